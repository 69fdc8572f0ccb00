//! What gRPC and HTTP do alike with a client's connection: it is accepted and counted by user, it
//! makes room for others, its requests are handled on other threads than its socket, and replies
//! that nobody reads are ended.
//!
//! ```text
//! listener --> a place (table) --> server of gRPC or HTTP --handle (runtimes)--> handler
//!                                    on the sockets' thread                         |
//!                  client <--a frame at a time-- reply (replies) <------------------+
//! ```

#![forbid(unsafe_code)]

mod peer;
mod quiet;
mod replies;
mod runtimes;
mod table;

pub use peer::{
    ACCEPT_LOG_EVERY, ACCEPT_RETRY, CONNECTIONS_MAX, Call, Peer, caller_of, connections_max,
};
pub use quiet::QuietStream;
pub use replies::{Ended, Outgoing, Replies, Rule, Taken, UNREAD_MAX};
pub use runtimes::{Handled, Runtimes};
pub use table::Table;
