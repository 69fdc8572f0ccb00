//! Chat templates: the Jinja program in a model's file that turns messages
//! into the text the model was trained on.
//!
//! Templates are written for Python's Jinja as `transformers` sets it up
//! (`trim_blocks`, `lstrip_blocks`, loop controls, `raise_exception`,
//! `strftime_now`, `tojson`, `{% generation %}`), and use methods of Python's
//! strings, dicts and lists.
//!
//! A template comes with a file and is not trusted. Jinja can be made to take
//! any amount of memory, time and stack, so that templates are compiled and
//! rendered in a child process with limits: see [`Renderer`]. A
//! [`ChatTemplate`] is only the text; whether it parses is found by the first
//! chat, and a file whose template does not parse still loads.
//!
//! Nor is trusted what the messages say: see [`protect`].

mod builtin;
mod clock;
mod engine;
mod images;
mod message;
mod protect;
mod shape;
mod source;
mod worker;

use std::borrow::Cow;
use std::sync::{Arc, OnceLock};

use rocmforge_gguf::Gguf;

use crate::{Error, Tokenizer};
pub use builtin::{builtin_template, builtin_template_names};
pub use images::{ChatImage, ImageData, Seen};
pub use message::{Chat, Content, Ending, Message, ToolCall};
pub(crate) use protect::Marks;
pub use protect::RenderedChat;
use shape::Shape;
pub use worker::{RENDER_CHILD_ARGUMENT, RenderLimits, Renderer, render_child_main};

/// Bytes that a template may have.
pub const MAX_TEMPLATE_BYTES: usize = 1 << 20;
/// Bytes that a rendered chat may have: what one encode takes.
pub const MAX_CHAT_BYTES: usize = crate::MAX_TEXT_BYTES;
/// Bytes that the messages, tools and arguments of a chat may have as JSON.
pub const MAX_CHAT_INPUT_BYTES: usize = 32 << 20;
/// Instructions that one rendering may execute.
pub const MAX_CHAT_STEPS: u64 = if cfg!(fuzzing) { 20_000 } else { 20_000_000 };

const KEY: &str = "tokenizer.chat_template";
/// The template that is meant for chats with tools, where there are two.
const TOOL_KEY: &str = "tokenizer.chat_template.tool_use";

/// Where the text of a chat template comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TemplateOrigin {
    /// The model's file, or the setting `template`, has the text.
    Given,
    /// The file's template is a name that this crate knows.
    Named(&'static str),
    /// The file has no template, or an empty one: ChatML is used.
    Default,
}

/// A model's chat template: its text, and what it sees of the vocabulary.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    source: Result<Arc<str>, Error>,
    origin: TemplateOrigin,
    tool_source: Option<Arc<str>>,
    bos: String,
    eos: String,
    /// How the two texts take messages, once that was tried.
    shapes: Arc<[OnceLock<Shape>; 2]>,
}

impl ChatTemplate {
    /// The template of a file: its text, or the one that it names. A file whose template is empty
    /// gets ChatML, as one without a template whose vocabulary has ChatML's marks; `None` for other
    /// files without. A template that cannot be used says why when it is rendered.
    #[must_use]
    pub fn from_gguf(file: &Gguf, tokenizer: &Tokenizer) -> Option<ChatTemplate> {
        let source = match file.str(KEY) {
            Ok(Some(source)) => Ok(Cow::Borrowed(source)),
            Ok(None) if speaks_chatml(tokenizer) => Ok(Cow::Borrowed("")),
            Ok(None) => return None,
            // A few damaged bytes leave a template of use; the load has told of them.
            Err(error) => file.str_lossy(KEY).ok_or(Error::from(error)),
        };
        let (source, origin) = match source.and_then(|source| resolved(&source)) {
            Ok((source, origin)) => (Ok(source), origin),
            Err(error) => (Err(error), TemplateOrigin::Given),
        };
        let name = |id: Option<u32>| {
            let bytes = id.and_then(|id| tokenizer.token_bytes(id));
            String::from_utf8_lossy(bytes.unwrap_or_default()).into_owned()
        };
        let for_tools = file.str(TOOL_KEY).ok().flatten();
        Some(ChatTemplate {
            source,
            origin,
            tool_source: for_tools.and_then(|source| checked(source).ok()),
            bos: name(tokenizer.bos()),
            eos: name(tokenizer.eos()),
            shapes: Arc::default(),
        })
    }

    /// A template of `source`, or of its name ([`builtin_template`]), which sees `bos` and `eos` as
    /// `bos_token` and `eos_token`. Whether it parses is found when it is rendered, as is a word
    /// that names none.
    ///
    /// # Errors
    ///
    /// If the template is longer than [`MAX_TEMPLATE_BYTES`].
    pub fn new(source: &str, bos: &str, eos: &str) -> Result<ChatTemplate, Error> {
        let (source, origin) = match resolved(source) {
            Ok((source, origin)) => (Ok(source), origin),
            Err(error @ Error::TemplateName { .. }) => (Err(error), TemplateOrigin::Given),
            Err(error) => return Err(error),
        };
        Ok(ChatTemplate {
            source,
            origin,
            tool_source: None,
            bos: bos.to_owned(),
            eos: eos.to_owned(),
            shapes: Arc::default(),
        })
    }

    /// Origin of the template's text.
    #[must_use]
    pub fn origin(&self) -> TemplateOrigin {
        self.origin
    }

    /// The template's text.
    ///
    /// # Errors
    ///
    /// If it is too long or a word that names no template, or the file's value is no text.
    pub fn source(&self) -> Result<&str, Error> {
        match &self.source {
            Ok(source) => Ok(source),
            Err(error) => Err(error.clone()),
        }
    }

    /// The text for a chat: files may carry a second one for tools.
    fn source_for(&self, chat: &Chat) -> Result<(&Arc<str>, &OnceLock<Shape>), Error> {
        match (&self.source, &self.tool_source) {
            (_, Some(source)) if !chat.tools.is_empty() => Ok((source, &self.shapes[1])),
            (Ok(source), _) => Ok((source, &self.shapes[0])),
            (Err(error), _) => Err(error.clone()),
        }
    }

    /// Writes `messages` as the model expects them, in this process and with
    /// the messages' text as it is: names of control tokens in it become these
    /// tokens when the result is encoded. For templates and messages that are
    /// trusted, as in tests and measurements; a daemon uses a [`Renderer`].
    ///
    /// # Errors
    ///
    /// If the template does not parse, refuses the messages, fails, or exceeds
    /// its limits of steps and output.
    pub fn render(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
    ) -> Result<String, Error> {
        let mut chat = Chat::new(messages.to_vec());
        chat.parse_special = true;
        if !add_generation_prompt {
            chat.ending = Ending::Closed;
        }
        let rendered = Renderer::in_process().render(self, None, &chat, &|| false)?;
        Ok(rendered.into_text())
    }
}

/// The text that is given, or that has its name.
fn resolved(source: &str) -> Result<(Arc<str>, TemplateOrigin), Error> {
    let word = source.trim();
    if word.is_empty() && source.len() <= MAX_TEMPLATE_BYTES {
        let text = builtin_template(builtin::CHATML).unwrap_or_default();
        return Ok((text.into(), TemplateOrigin::Default));
    }
    if !builtin::is_name(word) {
        return Ok((checked(source)?, TemplateOrigin::Given));
    }
    match builtin::known(word) {
        Some((name, text)) => Ok((text.into(), TemplateOrigin::Named(name))),
        None => Err(Error::TemplateName {
            name: word.to_owned(),
        }),
    }
}

/// Whether the vocabulary has ChatML's marks as control tokens.
fn speaks_chatml(tokenizer: &Tokenizer) -> bool {
    builtin::CHATML_MARKS.iter().all(|mark| {
        let ids = tokenizer.encode(mark, false, true);
        matches!(ids.as_deref(), Ok(&[id]) if tokenizer.is_special(id))
    })
}

fn checked(source: &str) -> Result<Arc<str>, Error> {
    if source.len() > MAX_TEMPLATE_BYTES {
        return Err(Error::Size {
            key: KEY,
            len: source.len() as u64,
            unit: "bytes",
            max: MAX_TEMPLATE_BYTES as u64,
        });
    }
    Ok(source.into())
}

#[cfg(test)]
mod tests;
