//! With which tokens and which certificate HTTP is served.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use rocmforge_http::{Tls, TlsFault, Tokens};

use super::{ConfigError, Origin, Values};
use crate::addresses::ListenAddress;

/// What HTTP over TCP is protected with.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HttpConfig {
    /// What callers over TCP have to send, one of them.
    pub tokens: Option<Tokens>,
    /// What the addresses are served with.
    pub tls: Option<Tls>,
}

impl HttpConfig {
    /// Reads the files that the settings name, and checks that the settings go together. `origins`
    /// says where the settings came from.
    pub(super) fn new(
        values: &Values,
        origins: &BTreeMap<&'static str, Origin>,
    ) -> Result<Self, ConfigError> {
        const SOCKET: &str = "http_socket";
        const LISTEN: &str = "http_listen";
        const TOKEN: &str = "http_token_file";
        const CERTIFICATE: &str = "http_tls_cert";
        const KEY: &str = "http_tls_key";

        let refuse = |key, message| ConfigError::Value {
            key,
            origin: origins.get(key).cloned().unwrap_or(Origin::Flag),
            message,
        };
        if values.http_socket.as_ref() == Some(&values.socket) {
            let message = format!(
                "{} is the socket that gRPC is served on (--socket); choose another path",
                values.socket.display()
            );
            return Err(refuse(SOCKET, message));
        }
        let tokens = values.http_token_file.as_deref().map(Tokens::read);
        let tokens = tokens.transpose().map_err(|error| refuse(TOKEN, error))?;
        let tls = match (&values.http_tls_cert, &values.http_tls_key) {
            (None, None) => None,
            (Some(certificate), Some(key)) => {
                let read = Tls::read(certificate, key);
                Some(read.map_err(|(fault, message)| match fault {
                    TlsFault::Certificate => refuse(CERTIFICATE, message),
                    TlsFault::Key => refuse(KEY, message),
                })?)
            }
            (Some(_), None) => {
                let message =
                    "a certificate is of no use without its key; add --http-tls-key (http_tls_key)";
                return Err(refuse(CERTIFICATE, message.to_owned()));
            }
            (None, Some(_)) => {
                let message = "a key is of no use without its certificate; add --http-tls-cert (http_tls_cert)";
                return Err(refuse(KEY, message.to_owned()));
            }
        };
        let http = Self { tokens, tls };
        for entry in &values.http_listen {
            // Names are looked up once somebody listens.
            if let ListenAddress::Number(address) = entry
                && let Some(message) = http.refusal_of(entry, *address)
            {
                return Err(refuse(LISTEN, message));
            }
        }
        Ok(http)
    }

    /// Why HTTP is not served on an address that `entry` leads to, if it is not: other machines
    /// reach it, and something is missing that this needs.
    pub(super) fn refusal_of(&self, entry: &ListenAddress, address: SocketAddr) -> Option<String> {
        if address.ip().to_canonical().is_loopback() {
            return None;
        }
        let (what, add) = match (&self.tokens, &self.tls) {
            (Some(_), Some(_)) => return None,
            (None, Some(_)) => (
                "there is no token that identifies clients",
                "--http-token-file (http_token_file)",
            ),
            (Some(_), None) => (
                "without TLS anyone on the network path reads tokens and texts",
                "--http-tls-cert and --http-tls-key (http_tls_cert, http_tls_key)",
            ),
            (None, None) => (
                "there is neither a token that identifies clients nor TLS",
                "--http-token-file, --http-tls-cert and --http-tls-key (http_token_file, http_tls_cert, http_tls_key)",
            ),
        };
        let shown = match entry.name() {
            Some(_) => format!("{address}, to which {entry} leads,"),
            None => address.to_string(),
        };
        Some(format!(
            "{shown} can be reached from other machines, and {what}; add {add}, or listen on 127.0.0.1 or [::1], \
             behind a proxy if others are to reach it"
        ))
    }
}
