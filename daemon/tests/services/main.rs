//! The services over a socket, in process.

#![expect(
    clippy::unwrap_used,
    reason = "a test may panic, and so may its helpers"
)]

mod bounds;
mod chat;
mod daemon;
mod declared;
mod decoding;
mod http;
mod life;
mod limits;
mod models;
mod refusals;
mod reuse;
mod roles;
mod split;
mod templates;
mod unread;
mod vectors;
