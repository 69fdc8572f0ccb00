//! Pieces of calls that are known before their block is complete.

use serde_json::Value;

/// Maximum length of a name with its surroundings that is waited for; a longer one is decided by
/// the whole block.
pub(crate) const NAME_MAX_BYTES: usize = 256;

/// The next piece of a call.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Known {
    /// A call of this tool begins.
    Call(String),
    /// More of the call's arguments, as JSON.
    More(String),
    /// The call's arguments are complete.
    End,
}

/// Writer of a call's arguments as JSON, as their parts become known.
#[derive(Debug, Default)]
pub(crate) struct Arguments {
    /// Keys written so far; only the first value of a key counts.
    keys: Vec<String>,
}

impl Arguments {
    /// Begins a call. Sends at least the opening brace, since empty arguments may pass for an empty
    /// object.
    pub(crate) fn begin(&mut self, name: &str, tell: &mut Vec<Known>) {
        self.keys.clear();
        tell.push(Known::Call(name.to_owned()));
        tell.push(Known::More("{".to_owned()));
    }

    pub(crate) fn has(&self, key: &str) -> bool {
        self.keys.iter().any(|known| known == key)
    }

    /// Writes a key, and what stands before its value.
    pub(crate) fn key(&mut self, key: &str, tell: &mut Vec<Known>) {
        let before = if self.keys.is_empty() { "" } else { "," };
        tell.push(Known::More(format!("{before}{}:", Value::from(key))));
        self.keys.push(key.to_owned());
    }

    /// Writes the end of the object.
    pub(crate) fn end(&mut self, tell: &mut Vec<Known>) {
        tell.extend([Known::More("}".to_owned()), Known::End]);
    }
}

/// `text` with the escapes of a JSON string, without quotation marks.
pub(crate) fn escaped(text: &str) -> String {
    let quoted = Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}
