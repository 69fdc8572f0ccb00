//! Compiling and rendering in this process: what a child does, and the
//! fallback without one.
//!
//! Steps and output are bounded here. Memory, time and depth are not: an
//! expression that is nested deeply enough ends the process that compiles it.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::ValueKind;
use minijinja::{Environment, ErrorKind, UndefinedBehavior, Value};
use serde::{Deserialize, Serialize};

use super::{MAX_CHAT_BYTES, MAX_CHAT_STEPS, methods, protect, python, source};
use crate::Error;

const NAME: &str = "chat_template";

/// Why a template gave no text, as a child tells it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Failure {
    Syntax { line: usize, message: String },
    Render { line: usize, message: String },
    Raised(String),
    Steps,
    Output,
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Error {
        match failure {
            Failure::Syntax { line, message } => Error::TemplateSyntax { line, message },
            Failure::Render { line, message } => Error::TemplateRender { line, message },
            Failure::Raised(message) => Error::TemplateRaised { message },
            Failure::Steps => Error::TemplateLimit {
                unit: "steps",
                max: MAX_CHAT_STEPS,
            },
            Failure::Output => Error::TemplateLimit {
                unit: "bytes of output",
                max: MAX_CHAT_BYTES as u64,
            },
        }
    }
}

/// A compiled template.
#[derive(Debug)]
pub(super) struct Compiled {
    environment: Environment<'static>,
}

impl Compiled {
    pub(super) fn new(text: &str) -> Result<Compiled, Failure> {
        guarded(|| Compiled::compile(text))
    }

    fn compile(text: &str) -> Result<Compiled, Failure> {
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
        environment.set_unknown_method_callback(methods::call);
        environment.set_formatter(|out, state, value| match python::float_text(value) {
            Some(text) => Ok(out.write_str(&text)?),
            None => minijinja::escape_formatter(out, state, value),
        });
        python::register(&mut environment);
        environment
            .add_template_owned(NAME, source::prepare(text))
            .map_err(|error| Failure::Syntax {
                line: error.line().unwrap_or(0),
                message: describe(&error),
            })?;
        Ok(Compiled { environment })
    }

    /// Renders with the variables of a JSON object.
    pub(super) fn render(&self, variables: &[u8]) -> Result<String, Failure> {
        guarded(|| self.write(variables))
    }

    fn write(&self, variables: &[u8]) -> Result<String, Failure> {
        let failed = |error: String| Failure::Render {
            line: 0,
            message: error,
        };
        let variables: Value =
            serde_json::from_slice(variables).map_err(|error| failed(error.to_string()))?;
        if variables.kind() != ValueKind::Map {
            return Err(failed("the variables are no object".to_owned()));
        }
        protect::Marks::put_in_force(&variables);
        let template = self.environment.get_template(NAME).map_err(refusal)?;
        let mut output = Bounded {
            bytes: Vec::new(),
            full: false,
        };
        let rendered = template
            .render_captured_to(variables, &mut output)
            .map(drop);
        if output.full {
            return Err(Failure::Output);
        }
        rendered.map_err(refusal)?;
        // Templates write text only; a replacement would show what does not.
        Ok(String::from_utf8(output.bytes)
            .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
    }
}

/// What `work` gives. A panic of the library below costs the chat, not its process: what it worked
/// on is not looked at again, and a compiled template does not change.
fn guarded<T>(work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(Failure::Render {
            line: 0,
            message: format!("the template engine failed: {}", text.unwrap_or("a panic")),
        })
    })
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

fn refusal(error: minijinja::Error) -> Failure {
    let mut cause: Option<&dyn std::error::Error> = Some(&error);
    while let Some(inner) = cause {
        if let Some(raised) = inner.downcast_ref::<python::Raised>() {
            return Failure::Raised(raised.0.clone());
        }
        cause = inner.source();
    }
    if error.kind() == ErrorKind::OutOfFuel {
        return Failure::Steps;
    }
    Failure::Render {
        line: error.line().unwrap_or(0),
        message: describe(&error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_of_the_engine_is_a_failure_with_its_words() {
        for panics in [
            (|| panic!("an index")) as fn() -> Result<(), Failure>,
            || std::panic::panic_any("an index".to_owned()),
        ] {
            let failure = guarded(panics).unwrap_err();
            assert!(
                matches!(&failure, Failure::Render { message, .. } if message.ends_with(": an index")),
                "{failure:?}"
            );
        }
    }
}
