//! Wire types of `rocmforge.v1`, generated from `rocmforge/v1/*.proto`, and the
//! few facts that a server and its clients have to agree on beside them: where
//! the socket is ([`socket_candidates`]), how large a message may be
//! ([`MAX_MESSAGE_BYTES`]) and how people write a [`Budget`].
//!
//! Nothing here opens a socket, reads a file or starts a thread.

#![forbid(unsafe_code)]

mod budget;
mod json;
mod socket;

pub use budget::{BUDGET_MAX_BYTES, Budget, BudgetError};
pub use json::Word;

pub use socket::{
    SOCKET_ENV, SOCKET_FILE_NAME, SYSTEM_SOCKET_PATH, default_socket_path, socket_candidates,
};

/// Messages, clients and servers of the package `rocmforge.v1`.
///
/// The fields and the errors of each RPC are documented in the `.proto` files,
/// whose comments appear here. Messages serialize with serde: keys are the names of the fields,
/// enums are lowercase words.
#[allow(
    missing_docs,
    unreachable_pub,
    clippy::all,
    clippy::too_many_lines,
    clippy::unwrap_used,
    rustdoc::all,
    reason = "generated code"
)]
pub mod v1 {
    tonic::include_proto!("rocmforge.v1");
}

/// The encoded `google.protobuf.FileDescriptorSet` of [`v1`], comments included,
/// for `grpc.reflection.v1`.
pub const FILE_DESCRIPTOR_SET: &[u8] =
    include_bytes!(concat!(env!("OUT_DIR"), "/rocmforge_descriptor.bin"));

/// Largest message of an answer, in bytes. Of a request the daemon takes 16 MiB (the .proto files).
///
/// Well above any sensible prompt, so that a prompt which is too long reaches the
/// server and is answered with a message about the context length instead of one
/// about the transport.
pub const MAX_MESSAGE_BYTES: usize = 64 * 1024 * 1024;
