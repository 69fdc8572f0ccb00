//! Splits a model's output into reasoning, text and tool calls.
//!
//! Two formats are known: text with marks around reasoning and calls ([`marks`]), and messages with
//! headers ([`messages`]). The model's chat template determines which one, and which marks.

mod arguments;
mod block;
mod calls;
mod marks;
mod messages;
pub mod splitter;
mod written;

use crate::tool_calls::ToolCall;

/// Maximum length of a tool call in bytes; a longer one counts as text, if no part of it was sent.
const CALL_MAX_BYTES: usize = 1 << 20;

/// A part of an output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// Reasoning of the model.
    Reasoning(String),
    /// Text of the message.
    Text(String),
    /// A tool call. Unless calls are given whole, more of its arguments may follow.
    Call(ToolCall),
    /// More of the preceding call's arguments; never if calls are given whole.
    Arguments(String),
}

/// Joins consecutive parts of one kind.
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
