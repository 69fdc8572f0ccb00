//! A request: its tokens, its KV cache, the choice of its next token, and the events sent to its
//! client.

mod clients;
pub(crate) mod decoding;
pub(crate) mod encode;
pub(crate) mod gaps;
pub(crate) mod images;
pub(crate) mod kv;
mod live;
pub(crate) mod masks;
pub(crate) mod promises;
pub(crate) mod requests;
pub(crate) mod sampler;
pub(crate) mod stop;
pub(crate) mod task;
pub(crate) mod time_account;
pub(crate) mod time_book;
