//! Which tokens may come next in a text that a grammar constrains.
//!
//! ```text
//! Tokenizer --once--> Vocabulary --for each request--> Matcher --for each token--> Mask
//!                     Grammar ------------------------^  ^---- the token that was chosen
//! ```
//!
//! The work is done by the crate `llguidance`; what is here gives it our vocabularies, bounds what
//! a request can make it do, and says what is wrong in our words.
//!
//! *Invariants:* no panic and no endless work comes of a grammar, whatever it says: sizes, nesting,
//! steps and states are bounded ([`limits`]; test `what_wants_too_much_is_refused_or_bounded`). A
//! mask allows tokens that end the text exactly where the grammar is complete (test
//! `texts_are_allowed_as_a_plain_reading_says`).

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::too_many_lines, reason = "tables of cases"))]

mod compile;
mod gbnf;
mod lead;
pub mod limits;
mod mask;
mod matcher;
pub mod schema;
mod size;
mod tails;
mod vocabulary;
mod written;

pub use compile::Grammar;
pub use lead::{Reasoning, Trigger};
pub use mask::Mask;
pub use matcher::Matcher;
pub use vocabulary::Vocabulary;
pub use written::{Notation, Piece};

/// What is wrong with a grammar, or with a text that is held to it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The grammar cannot be used.
    #[error("{reason}")]
    Grammar {
        /// The reason, in one line.
        reason: String,
    },
    /// The vocabulary cannot be used.
    #[error(
        "the vocabulary cannot be constrained by a grammar: {reason}; leave the format out for this model"
    )]
    Vocabulary {
        /// The reason, in one line.
        reason: String,
    },
    /// No token can continue the text, or finding out takes more than is allowed.
    #[error("the text cannot be continued as its grammar asks: {reason}; make the grammar simpler")]
    Stuck {
        /// The reason, in one line.
        reason: String,
    },
}

/// What llguidance says in front of the fault of a schema that is part of a grammar.
const SCHEMA_AT: &str = "failed to compile JSON schema: ";
/// What llguidance says, with the expression, of texts that nothing matches.
const EMPTY_PATTERN: &str = "Regex is empty";
/// What llguidance says of a schema that leads back to itself at once.
const ENDLESS: &str = "circular references";

/// The reason that llguidance gives, as one line of bounded length.
fn reason(error: &dyn std::fmt::Display) -> String {
    let text = error.to_string();
    // What follows describes its own state.
    let text = text.split("\n<").next().unwrap_or_default();
    // Its word for a mask without a token.
    if text == "NoExtensionBias" {
        return "there is no text that it allows".to_owned();
    }
    // A bug of its own, which says nothing to whoever wrote the grammar.
    if text.starts_with("panic") {
        return "it is too large or too ambiguous to be compiled; give a simpler one".to_owned();
    }
    // The place is one in a grammar that was made of the schema, and what follows shows it.
    let text = match text.split_once(SCHEMA_AT) {
        Some((_, of_schema)) => of_schema.split('\n').next().unwrap_or_default(),
        None => text,
    };
    if text.contains(EMPTY_PATTERN) {
        return "no text has both the pattern or format and the lengths that it gives".to_owned();
    }
    if text.contains(ENDLESS) {
        return "a schema refers to itself and says nothing else; give it another form".to_owned();
    }
    let words: Vec<_> = text.split_whitespace().collect();
    let mut line = words.join(" ");
    if line.len() > limits::REASON_MAX_BYTES {
        let mut end = limits::REASON_MAX_BYTES;
        while !line.is_char_boundary(end) {
            end -= 1;
        }
        line.truncate(end);
        line.push_str(" ...");
    }
    line
}
