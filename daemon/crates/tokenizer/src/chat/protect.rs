//! Text that must not become control tokens.
//!
//! A rendered chat is one text in which the template's own names of control
//! tokens count and those in messages do not: else whoever writes a message
//! could end it and begin another. So a *mark*, a character that occurs
//! neither in the template nor in the chat, is put into each such name before
//! the chat is rendered. The name is then no name any more, whatever the
//! template does with the text around it (trimming, joining, JSON); after the
//! names were looked for, the marks go. Text without such names is rendered
//! as it is.
//!
//! Marked are
//! - every occurrence of a name, behind its first character;
//! - the beginning of a name at the end of a text, which what follows could
//!   complete;
//! - in roles, which templates write as `<|role|>`, the end of a name at the
//!   beginning too.
//!
//! A template that takes a message apart and joins the pieces in another
//! order can still make a name of them. A name of one character cannot be
//! marked.

use std::borrow::Cow;

use minijinja::State;
use serde_json::{Map, Value};

use super::message::Place;
use crate::Tokenizer;

/// The variable that holds the mark; no template can spell it.
pub(super) const MARK_VARIABLE: &str = "\u{1}mark";

/// A chat as its template wrote it, with what [`Tokenizer::encode_rendered`]
/// needs to tell the template's text from that of the messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderedChat {
    text: String,
    mark: Option<char>,
}

impl RenderedChat {
    pub(super) fn new(text: String, mark: Option<char>) -> RenderedChat {
        RenderedChat { text, mark }
    }

    /// The text that the model sees.
    #[must_use]
    pub fn text(&self) -> Cow<'_, str> {
        match self.mark {
            Some(mark) if self.text.contains(mark) => self.text.replace(mark, "").into(),
            _ => self.text.as_str().into(),
        }
    }

    /// As [`text`](Self::text).
    #[must_use]
    pub fn into_text(self) -> String {
        match self.mark {
            Some(mark) if self.text.contains(mark) => self.text.replace(mark, ""),
            _ => self.text,
        }
    }

    /// Writes more behind it, as if the template had: names of control tokens are these tokens.
    pub fn push(&mut self, more: &str) {
        self.text.push_str(more);
    }

    pub(crate) fn marked(&self) -> (&str, Option<char>) {
        (&self.text, self.mark)
    }
}

/// Characters for marks: noncharacters, which no text means, then a plane of
/// private ones.
fn candidates() -> impl Iterator<Item = char> {
    ('\u{FDD0}'..='\u{FDEF}').chain('\u{100000}'..='\u{10FFFD}')
}

/// Two characters that are neither in `template` nor in `variables`: the mark
/// of names, and that of the place where a message is left open. `None` only
/// if the text has tens of thousands of private characters.
pub(super) fn choose_marks(template: &str, variables: &Map<String, Value>) -> Option<[char; 2]> {
    let mut free = candidates().filter(|&c| {
        !template.contains(c)
            && !variables
                .iter()
                .any(|(key, value)| key.contains(c) || contains(value, c))
    });
    Some([free.next()?, free.next()?])
}

fn contains(value: &Value, c: char) -> bool {
    match value {
        Value::String(text) => text.contains(c),
        Value::Array(list) => list.iter().any(|item| contains(item, c)),
        Value::Object(map) => map
            .iter()
            .any(|(key, member)| key.contains(c) || contains(member, c)),
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
    }
}

/// Marks the names of control tokens in `text`.
pub(super) fn protect(tokenizer: &Tokenizer, mark: char, place: Place, text: &mut String) {
    let places = tokenizer.names_to_mark(text, place == Place::Role);
    if places.is_empty() {
        return;
    }
    let mut marked = String::with_capacity(text.len() + places.len() * mark.len_utf8());
    let mut copied = 0;
    for place in places {
        marked.push_str(&text[copied..place]);
        marked.push(mark);
        copied = place;
    }
    marked.push_str(&text[copied..]);
    *text = marked;
}

/// The mark that a template's variables hold.
pub(super) fn mark_of(state: &State) -> Option<char> {
    state.lookup(MARK_VARIABLE)?.as_str()?.chars().next()
}
