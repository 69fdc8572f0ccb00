//! Thin typed client of rocmforged: one method an RPC, streams as
//! [`futures_util::Stream`]s, errors as one enum.
//!
//! ```no_run
//! use futures_util::StreamExt;
//! use rocmforge_client::proto::v1::generate_event::Event;
//! use rocmforge_client::proto::v1::generate_request::Prompt;
//! use rocmforge_client::proto::v1::GenerateRequest;
//!
//! # async fn example() -> Result<(), rocmforge_client::Error> {
//! let client = rocmforge_client::Client::connect(None).await?;
//! let mut events = client
//!     .generate(GenerateRequest {
//!         model: "tiny-llama".into(),
//!         prompt: Some(Prompt::Text("Once upon a time".into())),
//!         ..Default::default()
//!     })
//!     .await?;
//! while let Some(event) = events.next().await {
//!     match event? {
//!         Event::Piece(piece) => print!("{}", piece.text),
//!         Event::Done(done) => println!("\n{} tokens", done.generated_tokens),
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! Requests and answers are the wire types of [`proto::v1`]; where an answer has
//! one field that matters, that field is returned.
//!
//! *Invariant:* a client holds one connection, which its clones share (tonic's `Channel`). Dropping
//! a stream cancels its request.

#![forbid(unsafe_code)]

mod client;
mod connect;
mod error;
mod events;

pub use client::Client;
pub use error::{Attempt, Error, RpcError};
pub use events::{Events, GenerateEvents, LoadEvents, PreloadEvents, StreamEvent};
pub use rocmforge_proto as proto;
pub use rocmforge_proto::{MAX_MESSAGE_BYTES, SOCKET_ENV, default_socket_path, socket_candidates};
pub use tonic::Code;
pub use tonic_types::ErrorDetails;
