//! Chat templates: the Jinja program in a model's file that turns messages
//! into the text the model was trained on.
//!
//! Templates are written for Python's Jinja as `transformers` sets it up
//! (`trim_blocks`, `lstrip_blocks`, loop controls, `raise_exception`,
//! `strftime_now`, `tojson`, `{% generation %}`), and use methods of Python's
//! strings, dicts and lists. A template comes with a file and is not trusted:
//! its instructions and its output are bounded.

mod python;

use std::io;

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, ErrorKind, UndefinedBehavior, Value, context};
use rocmforge_gguf::Gguf;

use crate::{Error, Tokenizer};

/// Bytes that a template may have.
pub const MAX_TEMPLATE_BYTES: usize = 1 << 20;
/// Bytes that a rendered chat may have.
pub const MAX_CHAT_BYTES: usize = 64 << 20;
/// Instructions that one rendering may execute.
pub const MAX_CHAT_STEPS: u64 = 20_000_000;

const NAME: &str = "chat_template";
const KEY: &str = "tokenizer.chat_template";

/// One message of a chat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// Who speaks: `system`, `user`, `assistant`, or what the template knows.
    pub role: String,
    /// What is said.
    pub content: String,
}

impl Message {
    /// A message of `role`.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Message {
        Message {
            role: role.into(),
            content: content.into(),
        }
    }
}

/// A model's chat template, compiled.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: String,
    eos: String,
}

impl ChatTemplate {
    /// Compiles the template of a file; `None` if the file has none.
    ///
    /// # Errors
    ///
    /// If the template is too long or does not parse.
    pub fn from_gguf(file: &Gguf, tokenizer: &Tokenizer) -> Result<Option<ChatTemplate>, Error> {
        let Some(source) = file.str(KEY)? else {
            return Ok(None);
        };
        let name = |id: Option<u32>| {
            let bytes = id.and_then(|id| tokenizer.token_bytes(id));
            String::from_utf8_lossy(bytes.unwrap_or_default()).into_owned()
        };
        let (bos, eos) = (name(tokenizer.bos()), name(tokenizer.eos()));
        ChatTemplate::new(source, &bos, &eos).map(Some)
    }

    /// Compiles `source`, which sees `bos` and `eos` as `bos_token` and
    /// `eos_token`.
    ///
    /// # Errors
    ///
    /// If the template is too long or does not parse.
    pub fn new(source: &str, bos: &str, eos: &str) -> Result<ChatTemplate, Error> {
        if source.len() > MAX_TEMPLATE_BYTES {
            return Err(Error::Size {
                key: KEY,
                len: source.len() as u64,
                unit: "bytes",
                max: MAX_TEMPLATE_BYTES as u64,
            });
        }
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()
            .expect("the default delimiters are valid");
        environment.set_syntax(syntax);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.set_fuel(Some(MAX_CHAT_STEPS));
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        python::register(&mut environment);
        environment
            .add_template_owned(NAME, python::without_generation_tags(source))
            .map_err(|error| Error::TemplateSyntax {
                line: error.line().unwrap_or(0),
                message: describe(&error),
            })?;
        Ok(ChatTemplate {
            environment,
            bos: bos.to_owned(),
            eos: eos.to_owned(),
        })
    }

    /// Writes `messages` as the model expects them; `add_generation_prompt`
    /// adds the opening of the answer. Tokenize the result with
    /// [`Tokenizer::encode_chat`].
    ///
    /// # Errors
    ///
    /// If the template refuses the messages, fails, or exceeds its limits.
    pub fn render(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
    ) -> Result<String, Error> {
        let template = self.environment.get_template(NAME).map_err(render_error)?;
        let messages: Vec<Value> = messages
            .iter()
            .map(|message| {
                Value::from_pairs([
                    ("role", message.role.as_str()),
                    ("content", message.content.as_str()),
                ])
            })
            .collect();
        let variables = context! {
            messages => messages,
            add_generation_prompt => add_generation_prompt,
            bos_token => self.bos.as_str(),
            eos_token => self.eos.as_str(),
            tools => Value::from(()),
            documents => Value::from(()),
        };
        let mut output = Bounded {
            bytes: Vec::new(),
            full: false,
        };
        let rendered = template
            .render_captured_to(variables, &mut output)
            .map(drop);
        if output.full {
            return Err(Error::TemplateLimit {
                unit: "bytes of output",
                max: MAX_CHAT_BYTES as u64,
            });
        }
        rendered.map_err(render_error)?;
        // Templates write text only; a replacement would show what does not.
        Ok(String::from_utf8(output.bytes)
            .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
    }
}

/// Refuses output past the limit.
struct Bounded {
    bytes: Vec<u8>,
    full: bool,
}

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > MAX_CHAT_BYTES {
            self.full = true;
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn describe(error: &minijinja::Error) -> String {
    match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    }
}

fn render_error(error: minijinja::Error) -> Error {
    let mut cause: Option<&dyn std::error::Error> = Some(&error);
    while let Some(inner) = cause {
        if let Some(raised) = inner.downcast_ref::<python::Raised>() {
            return Error::TemplateRaised {
                message: raised.0.clone(),
            };
        }
        cause = inner.source();
    }
    if error.kind() == ErrorKind::OutOfFuel {
        return Error::TemplateLimit {
            unit: "steps",
            max: MAX_CHAT_STEPS,
        };
    }
    Error::TemplateRender {
        line: error.line().unwrap_or(0),
        message: describe(&error),
    }
}

#[cfg(test)]
mod tests;
