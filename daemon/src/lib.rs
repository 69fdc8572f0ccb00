//! The daemon as a library: settings, socket, model directories, services and their life, so that
//! tests can run it in process. The binary adds the command line, the log and the signals.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::too_many_lines, reason = "tables of cases"))]

pub mod addresses;
pub mod config;
pub mod devices;
pub mod generated;
pub mod gpu_wait;
mod heartbeat;
pub mod late;
mod lifecycle;
pub mod listeners;
pub mod log;
pub mod log_filter;
mod machine;
pub mod parent;
pub mod passed;
pub mod reload;
pub mod self_test;
pub mod signals;
pub mod socket;
pub mod traces;
pub mod unit_user;

pub use lifecycle::{BLOCKING_THREADS, End, ServeError, ServeOptions, serve};
pub use rocmforge_connections::CONNECTIONS_MAX;
pub use rocmforge_grpc::default_socket_path;
pub use rocmforge_http::{Allowed, HttpListeners, PullConfig, ShownSetting, Tls, TlsFault, Tokens};
pub use rocmforge_service::declared::{Book, Declared};
pub use rocmforge_service::files::without_their_drafts;
pub use rocmforge_service::{
    Limits, REQUEST_MAX_BYTES, defaults, limits, model_files, peer, roles,
};
