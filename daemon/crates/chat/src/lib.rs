//! From a conversation to a prompt, and from generated text to its parts, as each family of models
//! writes them: tool calls, reasoning and messages follow from the source of the chat template.
//!
//! ```text
//! conversation ---prompt: template (adapted), images, tokens---> ids, tail of the rendered chat
//! output, the tail ---parts: text, reasoning, calls as they come (tool_calls)---> client
//! tools, format, reasoning ---tools, format: constraints of an output---> grammar
//! ```
//!
//! What is known of a model is a [`model::ChatModel`]: no model file, engine or queue is seen here.
//! Templates are rendered and texts tokenized where they are called, on a blocking thread.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::too_many_lines, reason = "tables of cases"))]

pub mod adapted;
pub mod conversation;
pub mod format;
pub mod images;
pub mod infill;
pub mod model;
pub mod parts;
pub mod prompt;
pub mod reasoning;
pub mod tail;
pub mod tool_calls;
pub mod tools;
