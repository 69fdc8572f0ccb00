//! A model's text, taken apart into what it thinks, what it says and what it calls.
//!
//! Two ways of writing are known: text with marks around thoughts and calls ([`marks`]), and
//! messages with headers ([`messages`]). Which one, and which marks, tells the model's chat
//! template.

mod arguments;
mod block;
mod calls;
mod marks;
mod messages;
pub mod splitter;
mod written;

use crate::tool_calls::ToolCall;

/// Longest call; what is longer is text, where nothing of it was told.
const CALL_MAX_BYTES: usize = 1 << 20;

/// A part of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// What the model thinks.
    Reasoning(String),
    /// Text of the message.
    Text(String),
    /// A tool call. Unless calls are given whole, more of its arguments may follow.
    Call(ToolCall),
    /// More of the arguments of the call before; never where calls are given whole.
    Arguments(String),
}

/// Parts of one kind in a row, as one.
pub fn joined(parts: Vec<Part>) -> Vec<Part> {
    let mut whole: Vec<Part> = Vec::new();
    for part in parts {
        match (whole.last_mut(), part) {
            (Some(Part::Text(text)), Part::Text(more))
            | (Some(Part::Reasoning(text)), Part::Reasoning(more)) => text.push_str(&more),
            (Some(Part::Call(call)), Part::Arguments(more)) => call.arguments.push_str(&more),
            (_, part) => whole.push(part),
        }
    }
    whole
}
