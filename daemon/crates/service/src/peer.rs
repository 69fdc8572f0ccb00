//! The client of a request, as limits, logs and metrics identify it: a user of this machine, or the
//! name of a token.

use std::fmt;

use sha2::{Digest, Sha256};

/// Maximum length of a token's name in bytes.
pub const TOKEN_NAME_MAX: usize = 32;
/// The name of a token for which none is configured.
pub const TOKEN_NAME_DEFAULT: &str = "default";

/// The name of a bearer token. It is not a secret.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TokenName {
    bytes: [u8; TOKEN_NAME_MAX],
    len: u8,
}

impl TokenName {
    /// Checks and wraps a token's name.
    ///
    /// # Errors
    /// A message, if its length or a character is not allowed.
    pub fn new(text: &str) -> Result<Self, String> {
        let fine = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
        if text.is_empty() || text.len() > TOKEN_NAME_MAX || !text.bytes().all(fine) {
            return Err(format!(
                "{text:?} is no name of a token: 1 to {TOKEN_NAME_MAX} letters, digits and any of . _ -"
            ));
        }
        let mut bytes = [0; TOKEN_NAME_MAX];
        bytes[..text.len()].copy_from_slice(text.as_bytes());
        Ok(Self {
            bytes,
            len: text.len() as u8,
        })
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.bytes[..usize::from(self.len)]).unwrap_or_default()
    }
}

impl fmt::Debug for TokenName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

impl fmt::Display for TokenName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Identity of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Peer {
    /// A user of this machine who is connected over a Unix socket, by user id.
    User(u32),
    /// The client with this bearer token.
    Token(TokenName),
    /// Any client over TCP without a token.
    Local,
}

impl Peer {
    /// The client's number in the engine: user ids as they are, other clients above them. The
    /// number is stable over restarts and versions, since the KV cache on disk depends on it.
    pub fn client(&self) -> u64 {
        match self {
            Self::User(uid) => u64::from(*uid),
            Self::Local => 1 << 32,
            Self::Token(name) => {
                let digest = Sha256::digest(name.as_str());
                let first = digest.first_chunk().copied().unwrap_or_default();
                u64::from_be_bytes(first) | 1 << 63
            }
        }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::User(uid) => write!(f, "user:{uid}"),
            Self::Token(name) => write!(f, "token:{name}"),
            Self::Local => f.write_str("local"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_have_names_and_numbers_of_their_own() {
        let ci = TokenName::new("ci.main-1_x").unwrap();
        assert_eq!(Peer::Token(ci).to_string(), "token:ci.main-1_x");
        assert_eq!(Peer::User(7).to_string(), "user:7");
        let other = Peer::Token(TokenName::new("cj").unwrap());
        let all = [Peer::User(0), Peer::Local, Peer::Token(ci), other];
        for (i, one) in all.iter().enumerate() {
            assert!(all[..i].iter().all(|p| p.client() != one.client()));
        }
        let alice = Peer::Token(TokenName::new("alice").unwrap());
        // The first bytes of `printf alice | sha256sum`, with the highest bit.
        assert_eq!(alice.client(), 0xabd8_06c9_7f0e_00af);
        for bad in ["", "a b", "a:b", "\u{e9}", &"x".repeat(TOKEN_NAME_MAX + 1)] {
            assert!(TokenName::new(bad).is_err(), "{bad:?}");
        }
    }
}
