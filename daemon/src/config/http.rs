//! With which tokens and which certificate HTTP is served.

use std::collections::BTreeMap;

use super::{ConfigError, Origin, Values};
use crate::http::{Tls, TlsFault, Tokens};

/// What HTTP over TCP is protected with.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HttpConfig {
    /// What callers over TCP have to send, one of them.
    pub tokens: Option<Tokens>,
    /// What the address is served with.
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
        let missing = match (&tokens, &tls) {
            (Some(_), Some(_)) => None,
            (None, Some(_)) => Some((
                "there is no token that tells callers apart",
                "--http-token-file (http_token_file)",
            )),
            (Some(_), None) => Some((
                "without TLS whoever is on the way reads tokens and texts",
                "--http-tls-cert and --http-tls-key (http_tls_cert, http_tls_key)",
            )),
            (None, None) => Some((
                "there is neither a token that tells callers apart nor TLS",
                "--http-token-file, --http-tls-cert and --http-tls-key (http_token_file, http_tls_cert, http_tls_key)",
            )),
        };
        let far = values.http_listen.filter(|a| !a.ip().is_loopback());
        if let (Some(address), Some((what, add))) = (far, missing) {
            let message = format!(
                "{address} can be reached from other machines, and {what}; add {add}, or listen on 127.0.0.1 or [::1], \
                 behind a proxy if others are to reach it"
            );
            return Err(refuse(LISTEN, message));
        }
        Ok(Self { tokens, tls })
    }
}
