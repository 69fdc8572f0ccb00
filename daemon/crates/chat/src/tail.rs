//! The end of a rendered chat, which determines how the output's beginning is parsed.

use rocmforge_tokenizer::Ending;

use crate::tool_calls::headers::{self, Fit};

/// Maximum length of [`Tail::text`] in bytes, without a header.
pub const TAIL_MAX_BYTES: usize = 64;

/// The end of a rendered chat.
#[derive(Debug, Clone, Default)]
pub struct Tail {
    /// The end of the prompt without trailing white space, at most [`TAIL_MAX_BYTES`] bytes: it
    /// shows whether the output begins inside of something that the template has opened. For
    /// formats with headers it begins with the last header.
    pub text: String,
    /// Whether the prompt ends in the middle of a message that the output continues, however long
    /// that is.
    pub continues: bool,
}

impl Tail {
    /// Takes the end of a rendered chat.
    pub fn of(text: &str, with_headers: bool, ending: Ending) -> Self {
        Self {
            text: tail_of(text, with_headers),
            continues: ending == Ending::Continue,
        }
    }
}

/// The text for [`Tail::text`].
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
