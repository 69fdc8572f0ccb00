//! The end of a rendered chat, by which the beginning of an answer is read.

use rocmforge_tokenizer::Ending;

use crate::tool_calls::headers::{self, Fit};

/// Most bytes of [`Tail::text`], beside a header.
pub const TAIL_MAX_BYTES: usize = 64;

/// The end of a rendered chat.
#[derive(Debug, Clone, Default)]
pub struct Tail {
    /// The end of the prompt without the space after it, at most [`TAIL_MAX_BYTES`] bytes: it says
    /// whether the answer begins inside of something that the template has opened. Where messages
    /// have headers, the last of them is in front of it.
    pub text: String,
    /// Whether the tail is the middle of a message that the answer goes on with, however long that
    /// is.
    pub continues: bool,
}

impl Tail {
    /// The tail of a rendered chat.
    pub fn of(text: &str, with_headers: bool, ending: Ending) -> Self {
        Self {
            text: tail_of(text, with_headers),
            continues: ending == Ending::Continue,
        }
    }
}

/// See [`Tail::text`].
fn tail_of(text: &str, with_headers: bool) -> String {
    let text = text.trim_end();
    let mut from = text.len().saturating_sub(TAIL_MAX_BYTES);
    while !text.is_char_boundary(from) {
        from += 1;
    }
    let begun = with_headers.then(|| headers::last_of(text)).flatten();
    let Some(begun) = begun.filter(|begun| begun.len() > TAIL_MAX_BYTES) else {
        return text[from..].to_owned();
    };
    match headers::fit(begun) {
        // A message may be long, and what it says in between tells nothing.
        Fit::Whole(n) => {
            let body = text.len() - begun.len() + n;
            format!("{}{}", &begun[..n], &text[from.max(body)..])
        }
        Fit::Begins | Fit::No => begun.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tail_has_the_last_header_in_front_of_it() {
        let asked = "<|start|>user<|message|>Tell me a story.<|end|>";
        let header = "<|start|>assistant<|channel|>final<|message|>";
        for said in [
            "Once",
            &"Once upon a time, ".repeat(100),
            &"\u{e9}".repeat(99),
        ] {
            let tail = tail_of(&format!("{asked}{header}{said}  \n"), true);
            let body = tail.strip_prefix(header).unwrap_or_else(|| {
                let at = tail.find(header).unwrap();
                &tail[at + header.len()..]
            });
            assert!(said.trim_end().ends_with(body) && body.len() <= TAIL_MAX_BYTES);
        }
        let open = format!("{asked}<|start|>assistant");
        assert!(tail_of(&open, true).ends_with("<|start|>assistant"));
        let plain = tail_of(&format!("{asked}{header}{}", "x".repeat(99)), false);
        assert_eq!(plain, "x".repeat(TAIL_MAX_BYTES));
    }
}
