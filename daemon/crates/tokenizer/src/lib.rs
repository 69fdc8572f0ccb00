//! Text to token ids and back; chat templates.
//!
//! - [`Tokenizer`]: the vocabulary of a GGUF file. Byte-level BPE (`gpt2`) with
//!   the pre-tokenizers in use, BPE of characters (`gemma4`), SentencePiece's BPE (`llama`) and
//!   unigrams (`t5`), and WordPiece (`bert`).
//! - [`StreamDecoder`]: ids to text one at a time, whole characters only.
//! - [`ChatTemplate`]: messages to the text a model was trained on, by a
//!   [`Renderer`], which keeps a bad template away from this process.
//!
//! Nothing here is trusted: vocabulary and template come from a file, text and
//! ids from a client. Every size has a named maximum, and encoding takes time
//! in proportion to the text (n log n inside one word).
//!
//! *Invariant:* no scanner or merge loop backtracks without bound (the tests
//! `long_runs_are_cut_in_time_in_proportion_under_every_name` and
//! `huge_words_take_time_in_proportion`).
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::too_many_lines, reason = "tables of cases"))]

mod bpe;
mod byte_level;
mod chat;
mod error;
#[cfg(test)]
mod fixture;
mod interned;
mod lexicon;
mod metadata;
mod names;
mod pre_tokenizer;
mod special;
mod spm;
mod stream;
mod texts;
mod tokenizer;
mod unicode;
mod unigram;
mod vocab;
mod word_piece;

pub use chat::{
    Chat, ChatImage, ChatTemplate, Content, Ending, ImageData, MAX_CHAT_BYTES,
    MAX_CHAT_INPUT_BYTES, MAX_CHAT_STEPS, MAX_TEMPLATE_BYTES, Message, RENDER_CHILD_ARGUMENT,
    RenderLimits, RenderedChat, Renderer, Seen, TemplateOrigin, ToolCall, builtin_template,
    builtin_template_names, render_child_main,
};
pub use error::Error;
pub use interned::{Digest, Interned};
pub use stream::{DecodeOptions, StreamDecoder};
pub use tokenizer::{MAX_TEXT_BYTES, Tokenizer};
