//! The bearer tokens of clients over TCP, each with a name for limits, log and metrics.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use axum::http::{HeaderMap, HeaderName, header};
use rocmforge_service::peer::{TOKEN_NAME_DEFAULT, TokenName};

use super::small_file;

/// Minimum length of a token in bytes, so that it cannot be guessed.
const TOKEN_MIN_BYTES: usize = 16;
/// Maximum length of a token in bytes.
const TOKEN_MAX_BYTES: usize = 1024;
/// Maximum number of tokens in a file.
const TOKENS_MAX: usize = 256;
/// Maximum size of a token file in bytes.
const FILE_MAX_BYTES: u64 = 64 << 10;
/// Header in which Anthropic's clients send the token.
const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// The accepted tokens: at least one.
#[derive(Clone, PartialEq, Eq)]
pub struct Tokens(Arc<[(TokenName, String)]>);

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.0.iter().map(|(name, _)| name);
        f.debug_list().entries(names).finish()
    }
}

impl Tokens {
    /// Reads tokens from a file; see [`Tokens::parse`].
    ///
    /// # Errors
    /// A message that says what is wrong with the file or a token.
    pub fn read(path: &Path) -> Result<Self, String> {
        let what_to_do = "chmod 0600 it, and change the token";
        let bytes = small_file::read(path, FILE_MAX_BYTES, Some(what_to_do))?;
        let shown = path.display();
        let text = String::from_utf8(bytes).map_err(|_| format!("{shown} is not UTF-8"))?;
        Self::parse(&text).map_err(|message| format!("{shown}: {message}"))
    }

    /// Parses tokens, one a line: `TOKEN`, whose name is `default`, or `NAME TOKEN`. Several may
    /// have one name, as while one of them takes the other's place.
    ///
    /// # Errors
    /// A message, if a name, a token's length or a character is not allowed, or there are
    /// none.
    pub fn parse(text: &str) -> Result<Self, String> {
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        let mut tokens: Vec<(TokenName, String)> = Vec::new();
        for line in lines {
            let (name, token) = match line.split_once(char::is_whitespace) {
                Some((name, token)) => (TokenName::new(name)?, token.trim_start()),
                None => (TokenName::new(TOKEN_NAME_DEFAULT)?, line),
            };
            check(token)?;
            if let Some((other, _)) = tokens.iter().find(|(_, known)| known == token) {
                return Err(format!("the tokens of {other} and {name} are the same"));
            }
            tokens.push((name, token.to_owned()));
        }
        match tokens.len() {
            0 => Err(check("").err().unwrap_or_default()),
            1..=TOKENS_MAX => Ok(Self(tokens.into())),
            n => Err(format!("{n} tokens; at most {TOKENS_MAX}: remove some")),
        }
    }

    /// The name of the token that a request has, if it is accepted. Takes the same time for any
    /// text of a length.
    pub(super) fn sent(&self, headers: &HeaderMap) -> Option<TokenName> {
        let bearer = headers.get(header::AUTHORIZATION).and_then(|value| {
            let (scheme, token) = value.to_str().ok()?.split_once(' ')?;
            scheme
                .eq_ignore_ascii_case("bearer")
                .then(|| token.trim_start())
        });
        let key = headers.get(X_API_KEY).and_then(|value| value.to_str().ok());
        let mut name = None;
        for sent in [bearer, key].into_iter().flatten() {
            for (own, token) in &*self.0 {
                if is_same(token, sent) {
                    name = name.or(Some(*own));
                }
            }
        }
        name
    }
}

fn check(token: &str) -> Result<(), String> {
    let fits = (TOKEN_MIN_BYTES..=TOKEN_MAX_BYTES).contains(&token.len());
    if fits && token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Ok(());
    }
    Err(format!(
        "a token has {TOKEN_MIN_BYTES} to {TOKEN_MAX_BYTES} printable characters without spaces; this one has {} \
         bytes (openssl rand -hex 32 makes one)",
        token.len()
    ))
}

fn is_same(own: &str, other: &str) -> bool {
    let (own, other) = (own.as_bytes(), other.as_bytes());
    let differences = own.iter().zip(other).fold(0, |sum, (a, b)| sum | (a ^ b));
    own.len() == other.len() && differences == 0
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_token_is_found_in_either_header() {
        let tokens = Tokens::parse("0123456789abcdef\nci  fedcba9876543210\n").unwrap();
        for (name, value, expected) in [
            ("authorization", "Bearer 0123456789abcdef", Some("default")),
            ("authorization", "bearer 0123456789abcdef", Some("default")),
            ("x-api-key", "0123456789abcdef", Some("default")),
            ("x-api-key", "fedcba9876543210", Some("ci")),
            ("authorization", "Bearer 0123456789abcdeF", None),
            ("authorization", "Bearer 0123456789abcde", None),
            ("authorization", "Bearer ci fedcba9876543210", None),
            ("authorization", "Basic 0123456789abcdef", None),
            ("authorization", "0123456789abcdef", None),
            ("x-api-key", "", None),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(name, HeaderValue::from_static(value));
            let found = tokens.sent(&headers);
            assert_eq!(found.as_ref().map(TokenName::as_str), expected, "{value}");
        }
        assert_eq!(format!("{tokens:?}"), r#"["default", "ci"]"#);
    }

    #[test]
    fn tokens_that_cannot_be_are_refused() {
        let long = "x".repeat(20);
        for (text, words) in [
            ("short".to_owned(), "this one has 5"),
            ("  \n".to_owned(), "this one has 0"),
            (format!("a/b {long}"), "no name of a token"),
            (format!("a {long} {long}"), "without spaces"),
            (format!("a {long}\nb {long}"), "of a and b are the same"),
        ] {
            let error = Tokens::parse(&text).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn a_token_file_that_everyone_reads_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        fs::write(&path, "0123456789abcdef\n").unwrap();
        fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
        assert!(Tokens::read(&path).unwrap_err().contains("every user"));
        fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        assert_eq!(
            Tokens::read(&path),
            Tokens::parse("0123456789abcdef"),
            "the line's end is no part of it"
        );
        assert!(Tokens::read(dir.path()).unwrap_err().contains("regular"));
    }
}
