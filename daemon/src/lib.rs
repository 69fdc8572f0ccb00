//! The daemon as a library: settings, socket, model directories, services and their life, so that
//! tests can run it in process. The binary adds the command line, the log and the signals.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::too_many_lines, reason = "tables of cases"))]

pub mod addresses;
pub mod config;
mod connection;
pub mod devices;
pub mod generated;
pub mod gpu_wait;
mod heartbeat;
mod http;
pub mod late;
mod lifecycle;
pub mod listeners;
pub mod log;
pub mod log_filter;
pub mod parent;
pub mod passed;
pub mod reload;
mod replies;
mod rpc;
mod runtimes;
pub mod self_test;
pub mod signals;
pub mod socket;
pub mod traces;
pub mod unit_user;

pub use connection::CONNECTIONS_MAX;
pub use http::{Allowed, HttpListeners, PullConfig, ShownSetting, Tls, TlsFault, Tokens};
pub use lifecycle::{End, ServeError, ServeOptions, serve};
pub use rocmforge_service::declared::{Book, Declared};
pub use rocmforge_service::files::without_their_drafts;
pub use rocmforge_service::{
    Limits, REQUEST_MAX_BYTES, defaults, limits, model_files, peer, roles,
};
pub use rpc::{BLOCKING_THREADS, default_socket_path};
