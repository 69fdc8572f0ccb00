//! How the families of models write a chat: calls of tools, reasoning, messages, told from the
//! source of their chat template.
//!
//! ```text
//! chat ---adapted: the way that the template takes it---> rendered prompt, its tail
//! output, the tail ---parts: text, reasoning, calls as they come (tool_calls)---> client
//! tools, reasoning ---what an output is held to (tool_calls::held, reasoning)---> grammar
//! ```
//!
//! No request, model file or engine is known here.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::too_many_lines, reason = "tables of cases"))]

pub mod adapted;
pub mod parts;
pub mod reasoning;
mod tail;
pub mod tool_calls;

pub use tail::{TAIL_MAX_BYTES, Tail};
