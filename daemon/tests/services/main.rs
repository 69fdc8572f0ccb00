//! The daemon in process: its settings and files, and its services over a socket.

#![allow(clippy::too_many_lines, reason = "tables of cases")]
#![expect(
    clippy::unwrap_used,
    reason = "a test may panic, and so may its helpers"
)]

mod bounds;
mod certificates;
mod chat;
mod config;
mod config_http;
mod daemon;
mod declared;
mod declared_encoders;
mod decoding;
mod http;
mod life;
mod limits;
mod model_files;
mod models;
mod refusals;
mod release;
mod reuse;
mod roles;
mod settings;
mod socket;
mod split;
mod templates;
mod unread;
mod vectors;
