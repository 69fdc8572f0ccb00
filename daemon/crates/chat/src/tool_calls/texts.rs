//! Escapes control characters in JSON strings that models write raw, such as line breaks and tabs,
//! so that the arguments of calls are valid JSON.

use std::borrow::Cow;
use std::fmt::Write as _;

/// Tracks strings in JSON text that arrives in pieces.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Texts {
    in_text: bool,
    /// Whether a string ends in a backslash whose escape has not arrived yet.
    escaped: bool,
}

impl Texts {
    /// `more` with the control characters in its strings escaped. Valid JSON stays unchanged.
    pub(crate) fn escape<'t>(&mut self, more: &'t str) -> Cow<'t, str> {
        let mut written: Option<String> = None;
        for (at, c) in more.char_indices() {
            let after_backslash = self.escaped;
            if !self.take(c) {
                if let Some(written) = &mut written {
                    written.push(c);
                }
                continue;
            }
            let written = written.get_or_insert_with(|| more[..at].to_owned());
            // The backslash was told: it says itself then.
            if after_backslash {
                written.push('\\');
            }
            match c {
                '\n' => written.push_str("\\n"),
                '\r' => written.push_str("\\r"),
                '\t' => written.push_str("\\t"),
                // Writing into a string cannot fail.
                c => _ = write!(written, "\\u{:04x}", u32::from(c)),
            }
        }
        written.map_or(Cow::Borrowed(more), Cow::Owned)
    }

    /// Processes a character; returns whether it has to be escaped in a JSON string.
    fn take(&mut self, c: char) -> bool {
        match c {
            c if self.in_text && c < ' ' => {
                self.escaped = false;
                return true;
            }
            _ if self.escaped => self.escaped = false,
            '\\' => self.escaped = self.in_text,
            '"' => self.in_text = !self.in_text,
            _ => {}
        }
        false
    }
}

/// A whole JSON text with the control characters in its strings escaped.
pub(crate) fn escaped(text: &str) -> Cow<'_, str> {
    Texts::default().escape(text)
}

/// Offset at which the object or list at the beginning of `text` ends, by its brackets.
pub(crate) fn end(text: &str) -> Option<usize> {
    let (mut texts, mut depth) = (Texts::default(), 0_usize);
    for (at, c) in text.char_indices() {
        let in_text = texts.in_text;
        texts.take(c);
        match c {
            _ if in_text => {}
            '{' | '[' => depth += 1,
            '}' | ']' if depth <= 1 => return Some(at + 1),
            '}' | ']' => depth -= 1,
            _ => {}
        }
    }
    None
}

/// Number of bytes at the end of `text` that may begin `mark`.
pub(crate) fn partial(text: &str, mark: &str) -> usize {
    let most = text.len().min(mark.len().saturating_sub(1));
    (1..=most)
        .rev()
        .find(|&n| text.as_bytes().ends_with(&mark.as_bytes()[..n]))
        .unwrap_or(0)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails says where")]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn control_characters_of_texts_are_escaped_wherever_a_text_is_split() {
        for (written, says) in [
            ("{\"a\":\n\t\"x\ny\tz\r\"}", json!({"a": "x\ny\tz\r"})),
            (
                "[\"\u{1}\\\"\n\", \"\\\\\n\"]",
                json!(["\u{1}\"\n", "\\\n"]),
            ),
            // A line of a script that goes on.
            ("[\"a \\\n b\"]", json!(["a \\\n b"])),
            ("{\"a\": \"é\\n\"}", json!({"a": "é\n"})),
        ] {
            let whole = escaped(written);
            assert_eq!(serde_json::from_str::<Value>(&whole).unwrap(), says);
            for (at, _) in written.char_indices() {
                let mut texts = Texts::default();
                let told = [&written[..at], &written[at..]].map(|more| texts.escape(more));
                assert_eq!(told.concat(), whole, "{at}");
            }
            assert_eq!(end(written), Some(written.len()));
            assert!(matches!(escaped(&whole), Cow::Borrowed(_)));
        }
    }
}
