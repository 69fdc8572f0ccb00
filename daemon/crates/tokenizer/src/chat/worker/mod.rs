//! Where templates are compiled and rendered.
//!
//! Jinja bounds neither the memory nor the time of an expression, and it
//! recurses over expressions and values as deep as they are nested, so that a
//! template of some kilobytes can end the process that compiles it. A daemon
//! therefore renders in children: the same executable, started with
//! [`RENDER_CHILD_ARGUMENT`], limited by the kernel in memory and processor
//! time, by its parent in wall-clock time. A child answers one chat after the
//! other, each in well under a millisecond where the template is well-behaved;
//! one that crashes, grows or takes too long is ended and replaced, and costs
//! the one chat that it worked on. One that others kill, as the kernel does
//! where memory is short, costs no chat: a new one renders it.

mod child;
mod pool;
mod wire;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value};

use super::engine::Compiled;
use super::message::{Arguments, Chat, Ending};
use super::protect::{self, Guard, RenderedChat};
use super::shape::Shape;
use super::{ChatTemplate, MAX_CHAT_INPUT_BYTES};
use crate::{Error, Tokenizer};
pub use child::render_child_main;
use pool::Pool;

/// The hidden argument of a rendering child. A program that makes a
/// [`Renderer::with_children`] must call [`render_child_main`] where its first
/// argument is this one.
pub const RENDER_CHILD_ARGUMENT: &str = "--render-child";

/// Stack of the thread that compiles and renders: expressions may be nested
/// some hundred thousand levels deep. It takes memory only as far as it is
/// used.
pub(super) const STACK_BYTES: usize = 256 << 20;

/// Limits of a child process that renders templates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RenderLimits {
    /// Address space of a child, its stack of 256 MiB and its program among
    /// them.
    pub memory_bytes: u64,
    /// Time that one chat may take, whole seconds, once a child has it.
    pub time: Duration,
    /// Children that work at the same time; further chats wait.
    pub at_once: usize,
}

impl Default for RenderLimits {
    fn default() -> RenderLimits {
        RenderLimits {
            memory_bytes: 1 << 30,
            time: Duration::from_secs(5),
            // As many chats as the service lets work on texts at once: none waits for another here.
            at_once: 7,
        }
    }
}

/// Turns chats into text. Cheap to clone; clones share their children.
#[derive(Debug, Clone)]
pub struct Renderer {
    /// `None` renders in this process.
    pool: Option<Arc<Pool>>,
}

impl Renderer {
    /// Renders in children of this program, or of `exe`. Children are started
    /// by the chats that need them.
    #[must_use]
    pub fn with_children(exe: Option<PathBuf>, limits: RenderLimits) -> Renderer {
        // The running binary, also when its file was replaced since.
        let exe = exe.unwrap_or_else(|| PathBuf::from("/proc/self/exe"));
        Renderer {
            pool: Some(Arc::new(Pool::new(exe, limits))),
        }
    }

    /// Renders in this process, on a thread with a large stack: for programs
    /// that cannot start themselves as a child, such as tests, and for
    /// templates that are trusted. Steps and output are bounded; memory, time
    /// and depth are not, and a bad template ends the process.
    #[must_use]
    pub fn in_process() -> Renderer {
        Renderer { pool: None }
    }

    /// Writes `chat` as the model expects it. Names of control tokens that
    /// `tokenizer` knows stay plain text where messages, tools or arguments
    /// say them; see [`Chat::parse_special`] for exceptions. Without a
    /// tokenizer nothing is protected.
    ///
    /// `cancelled` is asked while this waits; once it is true, the call ends
    /// with [`Error::Cancelled`] and frees what it held.
    ///
    /// # Errors
    ///
    /// If the template does not parse, refuses the chat, fails, crashes, or
    /// exceeds its limits, or if no child can be started.
    pub fn render(
        &self,
        template: &ChatTemplate,
        tokenizer: Option<&Tokenizer>,
        chat: &Chat,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<RenderedChat, Error> {
        let (source, known) = template.source_for(chat)?;
        let shape = match known.get() {
            Some(shape) => *shape,
            None => {
                let mut trial = |variables| self.run(source, variables, cancelled);
                let shape = Shape::of(source, &mut trial)?;
                *known.get_or_init(|| shape)
            }
        };
        let render = |arguments| {
            let (variables, guard) =
                variables(template, source, tokenizer, chat, (shape, arguments))?;
            match self.run(source, variables, cancelled) {
                Ok(text) => finish(text, chat.ending, &guard),
                Err(error) => Err(in_plain_words(error, &guard)),
            }
        };
        match render(Arguments::Object) {
            // Some templates join the arguments of calls to a text.
            Err(error @ Error::TemplateRender { .. }) if chat.has_arguments() => {
                render(Arguments::Text).map_err(|_| error)
            }
            other => other,
        }
    }

    fn run(
        &self,
        source: &Arc<str>,
        variables: Vec<u8>,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<String, Error> {
        if let Some(pool) = &self.pool {
            return pool.render(source, &variables, cancelled);
        }
        let source = Arc::clone(source);
        let thread = std::thread::Builder::new()
            .name("render".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || Compiled::new(&source)?.render(&variables))
            .map_err(|error| Error::Renderer {
                exe: PathBuf::new(),
                error: Arc::new(error),
            })?;
        match thread.join() {
            Ok(result) => result.map_err(Error::from),
            Err(_) => Err(Error::TemplateCrashed {
                status: "panic".to_owned(),
                words: String::new(),
            }),
        }
    }
}

/// The variables as JSON, and what guards their text.
fn variables<'t>(
    template: &ChatTemplate,
    source: &str,
    tokenizer: Option<&'t Tokenizer>,
    chat: &Chat,
    (shape, arguments): (Shape, Arguments),
) -> Result<(Vec<u8>, Guard<'t>), Error> {
    let variables =
        |text: &mut dyn FnMut(_, &mut String)| chat.variables(template, shape, arguments, text);
    let mut plain = variables(&mut |_, _| {});
    let guard = Guard::new(source, tokenizer, &plain).ok_or(Error::TemplateLimit {
        unit: "private characters",
        max: 1 << 16,
    })?;
    let mut all = match tokenizer {
        Some(_) => variables(&mut |place, text| guard.protect(place, text)),
        None => std::mem::take(&mut plain),
    };
    if chat.ending == Ending::Continue {
        leave_open(&mut all, guard.open)?;
    }
    all.insert(protect::MARK_VARIABLE.to_owned(), guard.marks().to_value());
    let json = serde_json::to_vec(&all).unwrap_or_default();
    if json.len() > MAX_CHAT_INPUT_BYTES {
        return Err(Error::TextTooLong {
            len: json.len(),
            max: MAX_CHAT_INPUT_BYTES,
        });
    }
    Ok((json, guard))
}

/// What a template says of a chat, without marks.
fn in_plain_words(error: Error, guard: &Guard<'_>) -> Error {
    let plain = |message: String| guard.marks().without(&message).replace(guard.open, "");
    match error {
        Error::TemplateRaised { message } => Error::TemplateRaised {
            message: plain(message),
        },
        Error::TemplateRender { line, message } => Error::TemplateRender {
            line,
            message: plain(message),
        },
        other => other,
    }
}

/// Puts `mark` behind the text of the last message.
fn leave_open(all: &mut Map<String, Value>, mark: char) -> Result<(), Error> {
    let last = all.get_mut("messages").and_then(Value::as_array_mut);
    let content = last
        .and_then(|messages| messages.last_mut())
        .and_then(|message| message.get_mut("content"));
    match content {
        Some(Value::String(text)) => {
            text.push(mark);
            Ok(())
        }
        Some(Value::Array(parts)) => {
            let text = parts
                .iter_mut()
                .rev()
                .find_map(|part| match part.get_mut("text") {
                    Some(Value::String(text)) => Some(text),
                    _ => None,
                });
            text.ok_or_else(nothing_to_continue)?.push(mark);
            Ok(())
        }
        _ => Err(nothing_to_continue()),
    }
}

fn nothing_to_continue() -> Error {
    Error::TemplateRender {
        line: 0,
        message: "the last message has no text that could be continued".to_owned(),
    }
}

/// Cuts the text where the last message was left open.
fn finish(mut text: String, ending: Ending, guard: &Guard<'_>) -> Result<RenderedChat, Error> {
    if ending == Ending::Continue {
        let Some(at) = text.rfind(guard.open) else {
            return Err(Error::TemplateRender {
                line: 0,
                message: "the template does not write the last message as it is".to_owned(),
            });
        };
        text.truncate(at);
        if text.contains(guard.open) {
            text = text.replace(guard.open, "");
        }
    }
    Ok(RenderedChat::new(text, guard.marks().clone()))
}
