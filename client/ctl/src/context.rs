//! What every command works with.

use std::path::{Path, PathBuf};

use rocmforge_client::Client;

use crate::output::Output;
use crate::private::PrivateSlot;

/// What every command works with.
pub(crate) struct Context {
    socket: Option<PathBuf>,
    /// Where data goes.
    pub(crate) output: Output,
    /// Where the daemon that `run` starts is kept.
    pub(crate) private: PrivateSlot,
}

impl Context {
    /// A context for the daemon at `socket`, or at the usual places.
    pub(crate) fn new(socket: Option<PathBuf>, output: Output, private: PrivateSlot) -> Context {
        Context {
            socket,
            output,
            private,
        }
    }

    /// Connects to the daemon.
    pub(crate) async fn connect(&self) -> Result<Client, rocmforge_client::Error> {
        Client::connect(self.socket.as_deref()).await
    }

    /// The socket that the user named on the command line.
    pub(crate) fn socket(&self) -> Option<&Path> {
        self.socket.as_deref()
    }

    /// Whether the user named a socket on the command line.
    pub(crate) fn socket_is_given(&self) -> bool {
        self.socket.is_some()
    }
}
