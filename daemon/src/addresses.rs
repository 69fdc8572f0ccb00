//! Network addresses that HTTP is served on: parsed from the configuration, and resolved.
//!
//! A name is looked up when the daemon starts to listen, not when the settings are read: settings
//! are the same on every machine, and a name that leads nowhere yet may lead somewhere at the next
//! try.

use std::fmt;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::str::FromStr;

/// Maximum length of a host name in bytes, the same as in DNS.
const NAME_MAX_BYTES: usize = 253;
/// Maximum number of addresses of one name that are served.
const OF_NAME_MAX: usize = 8;

/// A configured HTTP address: an IP address or a host name, with a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ListenAddress {
    /// An IP address with a port.
    Number(SocketAddr),
    /// All addresses of a host name.
    Name {
        /// The host name.
        host: String,
        /// The port on each of the addresses.
        port: u16,
    },
}

impl ListenAddress {
    /// The addresses to serve, each once; at least one. Resolves a host name, which may wait for a
    /// DNS server.
    ///
    /// # Errors
    /// The name has no address, or could not be resolved.
    pub fn look_up(&self) -> io::Result<Vec<SocketAddr>> {
        let (host, port) = match self {
            Self::Number(address) => return Ok(vec![*address]),
            Self::Name { host, port } => (host.as_str(), *port),
        };
        let mut found = Vec::new();
        for address in (host, port).to_socket_addrs()? {
            if !found.contains(&address) && found.len() < OF_NAME_MAX {
                found.push(address);
            }
        }
        match found.is_empty() {
            true => Err(io::Error::other("the name has no address")),
            false => Ok(found),
        }
    }

    /// The host name, if the address is one.
    pub fn name(&self) -> Option<&str> {
        match self {
            Self::Number(_) => None,
            Self::Name { host, .. } => Some(host),
        }
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(address) => address.fmt(f),
            Self::Name { host, port } => write!(f, "{host}:{port}"),
        }
    }
}

impl FromStr for ListenAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(address) = text.parse() {
            return Ok(Self::Number(address));
        }
        let refused = || {
            format!(
                "'{text}' is no address: numbers or a name, and a port, such as 127.0.0.1:8080, [::1]:8080 or \
                 localhost:8080"
            )
        };
        let (host, port) = text.rsplit_once(':').ok_or_else(refused)?;
        if host == "*" {
            return Err(format!(
                "'{text}' is no address; 0.0.0.0:{port} and [::]:{port} are all addresses of this machine"
            ));
        }
        let fine = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
        let is_name = !host.is_empty()
            && host.len() <= NAME_MAX_BYTES
            && host.bytes().all(fine)
            // Numbers that are no address, such as 127.0.0.256.
            && host.bytes().any(|byte| byte.is_ascii_alphabetic());
        match port.parse() {
            Ok(port) if is_name => Ok(Self::Name {
                host: host.to_owned(),
                port,
            }),
            _ => Err(refused()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<ListenAddress, String> {
        text.parse()
    }

    #[test]
    fn addresses_are_numbers_or_names_with_a_port() {
        for number in ["127.0.0.1:8080", "[::1]:0", "0.0.0.0:80", "[fe80::1%2]:80"] {
            let address = ListenAddress::Number(number.parse().unwrap());
            assert_eq!(read(number).unwrap(), address);
            assert_eq!(address.to_string(), number);
        }
        for name in ["localhost:8080", "build-7.example.org:1", "a_b:65535"] {
            let address = read(name).unwrap();
            let (host, port) = name.split_once(':').unwrap();
            assert_eq!(address.name(), Some(host));
            assert!(
                matches!(address, ListenAddress::Name { port: p, .. } if p.to_string() == port)
            );
            assert_eq!(address.to_string(), name);
        }
        for (odd, words) in [
            ("localhost", "localhost:8080"),
            ("127.0.0.1", "127.0.0.1:8080"),
            ("127.0.0.256:80", "is no address"),
            ("::1:80", "[::1]:8080"),
            (":80", "is no address"),
            ("localhost:http", "is no address"),
            ("localhost:65536", "is no address"),
            ("a b:80", "is no address"),
            ("http://localhost:80", "is no address"),
            ("*:80", "0.0.0.0:80 and [::]:80"),
        ] {
            let told = read(odd).unwrap_err();
            assert!(told.contains(words) && told.contains(odd), "{told}");
        }
    }

    #[test]
    fn a_name_is_all_its_addresses_and_says_when_it_has_none() {
        let all = read("localhost:7").unwrap().look_up().unwrap();
        assert!(
            all.iter().all(|a| a.ip().is_loopback() && a.port() == 7),
            "{all:?}"
        );
        assert!(all.contains(&"127.0.0.1:7".parse().unwrap()), "{all:?}");
        // By RFC 6761 nobody has such a name.
        assert!(read("nobody.invalid:7").unwrap().look_up().is_err());
    }
}
