//! HTTP over a socket, in process: each route, each shape of a refusal, and what a connection may
//! do.

mod access;
mod anthropic;
mod calls;
pub(crate) mod client;
mod decoding;
mod deleted;
mod echo;
mod embeddings;
mod encoders;
mod forced;
mod gaps;
mod hostile_images;
mod images;
mod live;
mod llama;
mod lora;
mod metrics;
mod native;
mod ollama;
mod openai;
mod projectors;
mod responses;
mod samplers;
mod scores;
mod shapes;
mod store;
mod streams;
mod template;
mod why;
