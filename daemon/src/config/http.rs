//! Where HTTP is served, with which tokens and which certificate.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use clap::Args;

use super::{ConfigError, Settings};
use crate::http::{Tls, TlsFault, Tokens};

/// The command line's part.
#[derive(Debug, Clone, Default, Args)]
pub struct HttpFlags {
    /// Unix socket for HTTP (OpenAI, Anthropic, Ollama and llama-server routes) [default: none]
    #[arg(long, value_name = "PATH")]
    pub http_socket: Option<PathBuf>,
    /// Address for HTTP, such as 127.0.0.1:8080; one that other machines reach needs
    /// --http-token-file and --http-tls-cert [default: none]
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub http_listen: Option<String>,
    /// File of tokens, one a line (TOKEN or NAME TOKEN); each request over TCP must send one of
    /// them, and may load and unload, too
    #[arg(long, value_name = "FILE")]
    pub http_token_file: Option<PathBuf>,
    /// Certificate of the address in PEM, with those of who signed it behind it; with it and
    /// --http-tls-key HTTP over TCP is served with TLS alone
    #[arg(long, value_name = "FILE")]
    pub http_tls_cert: Option<PathBuf>,
    /// Private key of the certificate in PEM, not encrypted
    #[arg(long, value_name = "FILE")]
    pub http_tls_key: Option<PathBuf>,
}

/// The file's part.
#[derive(Debug, Default)]
pub(super) struct HttpFile {
    pub(super) socket: Option<PathBuf>,
    pub(super) listen: Option<String>,
    pub(super) token_file: Option<PathBuf>,
    pub(super) tls_cert: Option<PathBuf>,
    pub(super) tls_key: Option<PathBuf>,
}

/// The settings in force.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HttpConfig {
    /// A Unix socket.
    pub socket: Option<PathBuf>,
    /// An address.
    pub listen: Option<SocketAddr>,
    /// The file of the token.
    pub token_file: Option<PathBuf>,
    /// What callers over TCP have to send, one of them.
    pub tokens: Option<Tokens>,
    /// What the address is served with.
    pub tls: Option<Tls>,
}

impl HttpConfig {
    /// `grpc_socket` is the path that is taken already.
    pub(super) fn new(
        flags: HttpFlags,
        file: HttpFile,
        settings: &Settings,
        grpc_socket: &Path,
    ) -> Result<Self, ConfigError> {
        const SOCKET: &str = "http_socket";
        const LISTEN: &str = "http_listen";
        const TOKEN: &str = "http_token_file";
        const CERTIFICATE: &str = "http_tls_cert";
        const KEY: &str = "http_tls_key";

        let refuse = |key, origin, message| ConfigError::Value {
            key,
            origin,
            message,
        };
        let by_flag = flags.http_socket.is_some();
        let socket = settings.path(SOCKET, flags.http_socket, file.socket)?;
        if socket.as_deref() == Some(grpc_socket) {
            let message = format!(
                "{} is the socket that gRPC is served on (--socket); choose another path",
                grpc_socket.display()
            );
            return Err(refuse(SOCKET, settings.origin(SOCKET, by_flag), message));
        }
        let by_flag = flags.http_token_file.is_some();
        let token_file = settings.path(TOKEN, flags.http_token_file, file.token_file)?;
        let tokens = token_file.as_deref().map(|path| {
            Tokens::read(path)
                .map_err(|error| refuse(TOKEN, settings.origin(TOKEN, by_flag), error))
        });
        let tokens = tokens.transpose()?;
        let cert_origin = settings.origin(CERTIFICATE, flags.http_tls_cert.is_some());
        let key_origin = settings.origin(KEY, flags.http_tls_key.is_some());
        let certificate = settings.path(CERTIFICATE, flags.http_tls_cert, file.tls_cert)?;
        let key = settings.path(KEY, flags.http_tls_key, file.tls_key)?;
        let tls = match (certificate, key) {
            (None, None) => None,
            (Some(certificate), Some(key)) => {
                let read = Tls::read(&certificate, &key);
                Some(read.map_err(|(fault, message)| match fault {
                    TlsFault::Certificate => refuse(CERTIFICATE, cert_origin, message),
                    TlsFault::Key => refuse(KEY, key_origin, message),
                })?)
            }
            (Some(_), None) => {
                let message =
                    "a certificate is of no use without its key; add --http-tls-key (http_tls_key)";
                return Err(refuse(CERTIFICATE, cert_origin, message.to_owned()));
            }
            (None, Some(_)) => {
                let message = "a key is of no use without its certificate; add --http-tls-cert (http_tls_cert)";
                return Err(refuse(KEY, key_origin, message.to_owned()));
            }
        };
        let listen = settings.pick(LISTEN, flags.http_listen, file.listen);
        let listen_origin = listen.value.as_ref().map(|(_, origin)| origin.clone());
        let listen = listen.parse(address)?.zip(listen_origin);
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
        let far = listen.clone().filter(|(a, _)| !a.ip().is_loopback());
        if let (Some((address, origin)), Some((what, add))) = (far, missing) {
            let message = format!(
                "{address} can be reached from other machines, and {what}; add {add}, or listen on 127.0.0.1 or [::1], \
                 behind a proxy if others are to reach it"
            );
            return Err(refuse(LISTEN, origin, message));
        }
        Ok(Self {
            socket,
            listen: listen.map(|(address, _)| address),
            token_file,
            tokens,
            tls,
        })
    }
}

fn address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| {
        format!("'{text}' is no address: numbers and a port, such as 127.0.0.1:8080 or [::1]:8080")
    })
}
