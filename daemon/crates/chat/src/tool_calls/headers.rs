//! Recognizes headers of messages, and distinguishes them from text.
//!
//! ```text
//! <|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>
//! ```
//!
//! Control tokens come as their names, like all text, so that a name which a model writes about
//! looks the same. What follows decides: after the mark that ends a message comes another header,
//! or nothing.

/// Mark that ends a header.
pub(crate) const MESSAGE: &str = "<|message|>";
/// Mark before the name of a channel.
pub(crate) const CHANNEL: &str = "<|channel|>";
/// Mark that begins a message.
pub(crate) const START: &str = "<|start|>";
/// Marks that end a body; the first one also begins the next message.
pub(crate) const ENDS: [&str; 6] = [
    START,
    "<|end|>",
    "<|call|>",
    "<|return|>",
    "<|eom|>",
    "<|eot|>",
];
/// Text before the recipient of a message.
pub(crate) const TO: &str = "to=";
const CONSTRAIN: &str = "<|constrain|>";
/// Possible senders of a message.
const ROLES: [&str; 5] = ["assistant", "user", "system", "developer", "tool"];
/// Maximum length of a header in bytes.
const MAX_BYTES: usize = 4096;
/// Maximum number of words after one mark of a header.
const WORDS_MAX: usize = 3;

/// Maximum number of marks examined to find the last header, since a message may contain any number
/// as text.
const STARTS_MAX: usize = 64;

/// Whether a text begins with a header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fit {
    /// The text has the header, and the body begins at this byte.
    Whole(usize),
    /// The text may become the header, with more bytes.
    Begins,
    /// The text is not the header, whatever follows.
    No,
}

/// Which words a header may have at the current position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Words {
    Role,
    None,
    /// Up to this many more words.
    Any(usize),
}

/// Whether `text` begins with a header, optionally preceded by marks that end a message.
pub(crate) fn fit(text: &str) -> Fit {
    let mut rest = text;
    let mut words = Words::Role;
    loop {
        rest = rest.trim_start();
        let at = text.len() - rest.len();
        if at > MAX_BYTES {
            return Fit::No;
        }
        if let Some(body) = rest.strip_prefix(MESSAGE) {
            return Fit::Whole(text.len() - body.len());
        }
        let begun = |mark: &str| mark.starts_with(rest);
        if begun(MESSAGE) || begun(CHANNEL) || begun(CONSTRAIN) || ENDS.into_iter().any(begun) {
            return Fit::Begins;
        }
        let behind = |mark: &&str| rest.strip_prefix(*mark);
        if let Some(behind) = [CHANNEL, CONSTRAIN].iter().find_map(behind) {
            (rest, words) = (behind, Words::Any(WORDS_MAX));
            continue;
        }
        if let Some(behind) = ENDS.iter().find_map(behind) {
            (rest, words) = (behind, Words::Role);
            continue;
        }
        let end = rest.find(|c: char| c.is_whitespace() || c == '<');
        let (word, behind) = rest.split_at(end.unwrap_or(rest.len()));
        let may_be = |whole: &str| word == whole || end.is_none() && whole.starts_with(word);
        words = match words {
            _ if word.is_empty() || at + word.len() > MAX_BYTES => return Fit::No,
            _ if word.starts_with(TO) => Words::Any(WORDS_MAX),
            Words::Any(left @ 1..) => Words::Any(left - 1),
            Words::Role if ROLES.into_iter().any(may_be) => Words::None,
            _ if may_be(TO) => return Fit::Begins,
            _ => return Fit::No,
        };
        rest = behind;
    }
}

/// The end of `text` from its last header on, complete or begun.
pub(crate) fn last_of(text: &str) -> Option<&str> {
    let starts = text.rmatch_indices(START).map(|(at, _)| &text[at..]);
    starts.take(STARTS_MAX).find(|begun| fit(begun) != Fit::No)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_told_from_text() {
        for header in [
            "<|channel|>final<|message|>",
            "<|message|>",
            " to=self<|message|>",
            " to=user, all<|message|>",
            "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
            "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>",
            "\n<|end|><|start|>assistant<|channel|>analysis<|message|>",
        ] {
            assert_eq!(fit(&format!("{header}a")), Fit::Whole(header.len()));
            for (at, _) in header.char_indices() {
                assert_eq!(fit(&header[..at]), Fit::Begins, "{}", &header[..at]);
            }
        }
        for text in [
            "Hello",
            "<| is a mark.",
            "<|x|>",
            " ends a message, and <|start|> begins one.",
            "<|start|> begins one.",
            "<|start|>assistants",
            "assistant messages",
            "to do",
            "<|channel|>final I think that it is",
        ] {
            assert_eq!(fit(text), Fit::No, "{text}");
        }
        for long in [" ".repeat(5000), format!("to={}", "x".repeat(5000))] {
            assert_eq!(fit(&long), Fit::No);
            assert_eq!(fit(&format!("{long}<|message|>")), Fit::No);
        }
    }

    #[test]
    fn the_last_header_is_no_text_of_a_message() {
        let header = "<|start|>assistant<|channel|>final<|message|>";
        let text =
            format!("<|start|>user<|message|>Hi<|end|>{header}The mark <|start|> begins one");
        assert_eq!(last_of(&text), Some(&text[text.find(header).unwrap()..]));
        let open = "<|start|>user<|message|>Hi<|end|><|start|>assistant";
        assert_eq!(last_of(open), Some("<|start|>assistant"));
        assert_eq!(last_of("Hi"), None);
    }
}
