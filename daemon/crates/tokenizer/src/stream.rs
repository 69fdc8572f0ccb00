//! Ids back to text, all at once or one by one.
//!
//! Tokens are bytes, and a character may be spread over several of them. The
//! decoder holds bytes back until the character is complete, at most three,
//! and writes U+FFFD for bytes that can no longer become one. What comes out
//! is the same for any way of cutting the ids into calls.

use crate::{Error, Tokenizer};

/// Options for turning token ids into text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DecodeOptions {
    /// Write control and unknown tokens by name; otherwise they are left out.
    pub special: bool,
    /// The ids begin a text: drop the space that a SentencePiece vocabulary
    /// puts before it. Not for ids that continue a prompt.
    pub from_start: bool,
}

/// Turns ids into text as they come; made by [`Tokenizer::stream`].
#[derive(Debug, Clone)]
pub struct StreamDecoder {
    options: DecodeOptions,
    /// The next byte of text is the first.
    at_start: bool,
    /// The beginning of a character: at most three bytes.
    pending: Vec<u8>,
}

impl StreamDecoder {
    pub(crate) fn new(options: DecodeOptions) -> StreamDecoder {
        StreamDecoder {
            options,
            at_start: true,
            pending: Vec::new(),
        }
    }

    /// Takes one more id; returns the text that is complete with it, often
    /// a whole word, sometimes nothing. Ids outside of the vocabulary stand
    /// for nothing.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> String {
        let mut text = String::new();
        self.push_to(tokenizer, id, &mut text);
        text
    }

    /// The bytes that are still held back, as U+FFFD. Ends the text.
    #[must_use]
    pub fn finish(mut self) -> String {
        self.flush()
    }

    fn flush(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        text
    }

    fn push_to(&mut self, tokenizer: &Tokenizer, id: u32, out: &mut String) {
        let mut piece = tokenizer.rendered(id, self.options.special);
        if self.at_start && !piece.is_empty() {
            self.at_start = false;
            // A special token at the start has no space put before it.
            if self.options.from_start && tokenizer.adds_space_prefix() && !tokenizer.is_special(id)
            {
                piece = piece.strip_prefix(b" ").unwrap_or(piece);
            }
        }
        if self.pending.is_empty() {
            let rest = push_complete(piece, out);
            self.pending.extend_from_slice(rest);
        } else {
            self.pending.extend_from_slice(piece);
            let bytes = std::mem::take(&mut self.pending);
            let rest = push_complete(&bytes, out);
            self.pending.extend_from_slice(rest);
        }
    }
}

/// Appends the complete characters of `bytes`, and U+FFFD for what cannot
/// become one; returns the beginning of a character at the end.
fn push_complete<'b>(bytes: &'b [u8], out: &mut String) -> &'b [u8] {
    let mut rest = bytes;
    loop {
        match std::str::from_utf8(rest) {
            Ok(text) => {
                out.push_str(text);
                return &[];
            }
            Err(error) => {
                let (valid, after) = rest.split_at(error.valid_up_to());
                out.push_str(std::str::from_utf8(valid).unwrap_or_default());
                match error.error_len() {
                    None => return after,
                    Some(len) => {
                        out.push(char::REPLACEMENT_CHARACTER);
                        rest = &after[len..];
                    }
                }
            }
        }
    }
}

pub(crate) fn decode(
    tokenizer: &Tokenizer,
    ids: &[u32],
    options: DecodeOptions,
) -> Result<String, Error> {
    let n_vocab = tokenizer.n_vocab();
    if let Some(&id) = ids.iter().find(|&&id| id as usize >= n_vocab) {
        return Err(Error::TokenId { id, n_vocab });
    }
    let mut decoder = StreamDecoder::new(options);
    let mut text = String::new();
    for &id in ids {
        decoder.push_to(tokenizer, id, &mut text);
    }
    text.push_str(&decoder.flush());
    Ok(text)
}
