//! Pieces of calls that are known while their block still comes.

use serde_json::Value;

/// Longest name, and what stands around it, that is waited for; what is longer only the whole
/// block tells.
pub(crate) const NAME_MAX_BYTES: usize = 256;

/// The next piece of a call.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Known {
    /// A call of this tool begins.
    Call(String),
    /// More of its arguments, as JSON.
    More(String),
    /// The call's arguments are complete.
    End,
}

/// The JSON of a call's arguments, written as its parts are known.
#[derive(Debug, Default)]
pub(crate) struct Arguments {
    /// Keys so far; the first of a name counts.
    keys: Vec<String>,
}

impl Arguments {
    /// A call begins. Its arguments are never told as nothing, which may pass for an empty object.
    pub(crate) fn begin(&mut self, name: &str, tell: &mut Vec<Known>) {
        self.keys.clear();
        tell.push(Known::Call(name.to_owned()));
        tell.push(Known::More("{".to_owned()));
    }

    pub(crate) fn has(&self, key: &str) -> bool {
        self.keys.iter().any(|known| known == key)
    }

    /// A key, and what stands before its value.
    pub(crate) fn key(&mut self, key: &str, tell: &mut Vec<Known>) {
        let before = if self.keys.is_empty() { "" } else { "," };
        tell.push(Known::More(format!("{before}{}:", Value::from(key))));
        self.keys.push(key.to_owned());
    }

    /// The end of the object.
    pub(crate) fn end(&mut self, tell: &mut Vec<Known>) {
        tell.extend([Known::More("}".to_owned()), Known::End]);
    }
}

/// `text` as a part of a text in JSON.
pub(crate) fn escaped(text: &str) -> String {
    let quoted = Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}
