//! Where HTTP is served, and with which token.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use clap::Args;

use super::{ConfigError, Settings};
use crate::http::Tokens;

/// The command line's part.
#[derive(Debug, Clone, Default, Args)]
pub struct HttpFlags {
    /// Unix socket for HTTP (OpenAI, Anthropic, Ollama and llama-server routes) [default: none]
    #[arg(long, value_name = "PATH")]
    pub http_socket: Option<PathBuf>,
    /// Address for HTTP, such as 127.0.0.1:8080; one that other machines reach needs
    /// --http-token-file, and a proxy for TLS [default: none]
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub http_listen: Option<String>,
    /// File with the tokens of which callers over TCP have to send one, each a line (TOKEN or
    /// NAME TOKEN); with it they may load and unload, too
    #[arg(long, value_name = "FILE")]
    pub http_token_file: Option<PathBuf>,
}

/// The file's part.
#[derive(Debug, Default)]
pub(super) struct HttpFile {
    pub(super) socket: Option<PathBuf>,
    pub(super) listen: Option<String>,
    pub(super) token_file: Option<PathBuf>,
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
        let by_flag = flags.http_listen.is_some();
        let listen = settings
            .pick(LISTEN, flags.http_listen, file.listen)
            .parse(address)?;
        if let Some(address) = listen.filter(|a| tokens.is_none() && !a.ip().is_loopback()) {
            let message = format!(
                "{address} can be reached from other machines, and there is no token that tells callers apart; add \
                 --http-token-file (http_token_file), or listen on 127.0.0.1 or [::1]"
            );
            return Err(refuse(LISTEN, settings.origin(LISTEN, by_flag), message));
        }
        Ok(Self {
            socket,
            listen,
            token_file,
            tokens,
        })
    }
}

fn address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| {
        format!("'{text}' is no address: numbers and a port, such as 127.0.0.1:8080 or [::1]:8080")
    })
}
