//! What can go wrong with a vocabulary, an encode, a decode or a chat template.
//!
//! Errors are `Clone`, because a template keeps its own and every chat reports
//! the same failure.

use std::path::PathBuf;
use std::sync::Arc;

/// Everything this crate refuses, with what to do about it.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// The file's metadata could not be read.
    #[error("the tokenizer's metadata cannot be read")]
    Gguf(#[source] Arc<rocmforge_gguf::Error>),

    /// A key without which there is no tokenizer.
    #[error(
        "the file has no {key}: it carries no usable tokenizer; convert the model again with its tokenizer files beside it"
    )]
    MissingKey {
        /// The metadata key.
        key: &'static str,
    },

    /// `tokenizer.ggml.model` names an algorithm that is not implemented.
    #[error("tokenizer model {model:?} is not supported; supported are: {supported}")]
    UnknownModel {
        /// The name in the file.
        model: String,
        /// The names that are supported.
        supported: &'static str,
    },

    /// The table of replacements for characters is damaged.
    #[error("tokenizer.ggml.precompiled_charsmap {why}; the file is damaged, convert it again")]
    Charsmap {
        /// What is wrong with the map.
        why: &'static str,
    },

    /// `tokenizer.ggml.pre` names a pre-tokenizer that is not implemented.
    #[error("pre-tokenizer {pre:?} is not supported; supported are: {supported}")]
    UnknownPre {
        /// The name in the file.
        pre: String,
        /// The names that are supported.
        supported: String,
    },

    /// Arrays that describe the same tokens disagree in length.
    #[error("{key} has {len} entries for {n_vocab} tokens; the file is damaged, convert it again")]
    Length {
        /// The metadata key.
        key: &'static str,
        /// Entries found.
        len: usize,
        /// Tokens in `tokenizer.ggml.tokens`.
        n_vocab: usize,
    },

    /// An array is empty, or larger than any vocabulary.
    #[error("{key} has {len} {unit}; between 1 and {max} are accepted")]
    Size {
        /// The metadata key.
        key: &'static str,
        /// Size found.
        len: u64,
        /// Unit of the count: entries or bytes.
        unit: &'static str,
        /// The largest size accepted.
        max: u64,
    },

    /// Two tokens have the same text, so that text has no single id.
    #[error("tokens {first} and {second} have the same text {text:?}")]
    DuplicateToken {
        /// The lower id.
        first: u32,
        /// The higher id.
        second: u32,
        /// Text of the tokens.
        text: String,
    },

    /// The names of all special tokens are longer than text is searched for.
    #[error(
        "the names of the special tokens have {len} bytes together; at most {max} are accepted: the file is damaged, convert it again"
    )]
    SpecialNames {
        /// Bytes of all names.
        len: usize,
        /// Bytes accepted.
        max: usize,
    },

    /// The table of special tokens could not be built.
    #[error("the search table for special tokens cannot be built: {0}")]
    SpecialTable(String),

    /// The text is longer than [`MAX_TEXT_BYTES`](crate::MAX_TEXT_BYTES).
    #[error("the text has {len} bytes; at most {max} are tokenized at once, send it in parts")]
    TextTooLong {
        /// Bytes given.
        len: usize,
        /// Bytes accepted.
        max: usize,
    },

    /// The text needs more tokens than the caller has room for.
    #[error(
        "the text needs more than {max} tokens; shorten it, or ask for a longer context (n_ctx)"
    )]
    TooManyTokens {
        /// Tokens there is room for.
        max: usize,
    },

    /// A SentencePiece vocabulary has no token for a byte, and no unknown token
    /// either.
    #[error(
        "the vocabulary has no token for byte 0x{byte:02X} and no unknown token; leave the character out"
    )]
    Unencodable {
        /// The byte.
        byte: u8,
    },

    /// A token id that is not in the vocabulary.
    #[error("token id {id} is outside of the vocabulary of {n_vocab} tokens")]
    TokenId {
        /// The id given.
        id: u32,
        /// Tokens in the vocabulary.
        n_vocab: usize,
    },

    /// The template is a word that names no template.
    #[error(
        "the model's chat template is the word {name:?}, which names no template; give the model another \
         template (`template` of [[model]]), as a file or as one of these names: {}",
        crate::builtin_template_names()
    )]
    TemplateName {
        /// The word.
        name: String,
    },

    /// The chat template in the file does not parse.
    #[error("the model's chat template does not parse (line {line}): {message}")]
    TemplateSyntax {
        /// Line of the template, from 1; 0 if unknown.
        line: usize,
        /// The parser's words.
        message: String,
    },

    /// The chat template failed on these messages.
    #[error(
        "the model's chat template failed (line {line}): {message}; check the roles and their order, or give the model another \
         template (`template` of [[model]])"
    )]
    TemplateRender {
        /// Line of the template, from 1; 0 if unknown.
        line: usize,
        /// The engine's words.
        message: String,
    },

    /// The chat template itself refused these messages (`raise_exception`).
    #[error(
        "the model's chat template refuses these messages: {message}; change their roles or order, or give the model another \
         template (`template` of [[model]])"
    )]
    TemplateRaised {
        /// The template's words.
        message: String,
    },

    /// Rendering ran longer, wrote or took more than is allowed.
    #[error(
        "the model's chat template exceeds {max} {unit}; send fewer messages, give the model another template (`template` of [[model]]), or generate from \
         plain text"
    )]
    TemplateLimit {
        /// Unit of the limit.
        unit: &'static str,
        /// The limit.
        max: u64,
    },

    /// The process that renders chats ended on this one.
    #[error("the model's chat template crashed the process that renders it ({status})")]
    TemplateCrashed {
        /// The exit status of the process.
        status: String,
        /// Last lines of the process's standard error, for the log.
        words: String,
    },

    /// Another process, or the kernel for want of memory, killed each process that was to render
    /// the chat.
    #[error(
        "the process that renders the chat template was killed by signal {signal}, and so was each that took its place: \
         the machine or the control group of the daemon is short of memory (`dmesg`), or another program kills processes of the \
         daemon; try again"
    )]
    TemplateKilled {
        /// The signal's number on Linux.
        signal: i32,
    },

    /// The process that renders chats cannot be started.
    #[error("the process that renders chat templates ({}) cannot be started", exe.display())]
    Renderer {
        /// The program.
        exe: PathBuf,
        /// Why the process cannot be started.
        #[source]
        error: Arc<std::io::Error>,
    },

    /// The caller no longer wants the result.
    #[error("the call was cancelled")]
    Cancelled,
}

impl Error {
    /// True if the file is well formed, but needs something that is not
    /// implemented; false if the file or the request is at fault.
    #[must_use]
    pub fn is_unsupported(&self) -> bool {
        matches!(self, Error::UnknownModel { .. } | Error::UnknownPre { .. })
    }

    /// True if the file contradicts itself, as one does that is damaged or was converted wrongly,
    /// and the message does not say what to do.
    #[must_use]
    pub fn is_damage(&self) -> bool {
        match self {
            Error::Gguf(error) => error.is_damage(),
            Error::DuplicateToken { .. } => true,
            _ => false,
        }
    }
}

impl From<rocmforge_gguf::Error> for Error {
    fn from(error: rocmforge_gguf::Error) -> Self {
        Error::Gguf(Arc::new(error))
    }
}
