//! The program as systemd and a shell see it.

#![allow(clippy::too_many_lines, reason = "tables of cases")]
#![expect(
    clippy::unwrap_used,
    reason = "a test may panic, and so may its helpers"
)]

#[path = "../services/certificates/mod.rs"]
mod certificates;
mod declared;
mod http;
mod life;
mod log;
mod memory;
mod program;
mod release;
mod reload;
mod signals;
mod tls;
mod upgrade;
mod warm;
