//! Compiling and rendering in this process: what a child does, and the
//! fallback without one.
//!
//! Steps, output and depth are bounded, as is the size of one value. Memory and time are not: a
//! template may hold many values.

use std::panic::{AssertUnwindSafe, catch_unwind};

use rocmforge_jinja::{Host, Template};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::protect::{MARK_VARIABLE, Marks};
use super::{MAX_CHAT_BYTES, MAX_CHAT_STEPS, clock};
use crate::Error;

/// Why a template was not rendered, as reported by the child process.
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

impl From<rocmforge_jinja::Error> for Failure {
    fn from(error: rocmforge_jinja::Error) -> Failure {
        use rocmforge_jinja::Error as E;
        match error {
            E::Syntax { line, message } => Failure::Syntax { line, message },
            E::Render { line, message } => Failure::Render { line, message },
            E::Raised(message) => Failure::Raised(message),
            E::Steps => Failure::Steps,
            E::Output => Failure::Output,
        }
    }
}

/// A compiled template.
#[derive(Debug)]
pub(super) struct Compiled {
    template: Template,
}

impl Compiled {
    pub(super) fn new(text: &str) -> Result<Compiled, Failure> {
        guarded(|| {
            let template = Template::parse(text)?;
            Ok(Compiled { template })
        })
    }

    /// Renders with the variables of a JSON object.
    pub(super) fn render(&self, variables: &[u8]) -> Result<String, Failure> {
        guarded(|| self.write(variables))
    }

    fn write(&self, variables: &[u8]) -> Result<String, Failure> {
        let failed = |message: String| Failure::Render { line: 0, message };
        let variables: Value =
            serde_json::from_slice(variables).map_err(|error| failed(error.to_string()))?;
        if !variables.is_object() {
            return Err(failed("the variables are no object".to_owned()));
        }
        let marks = Marks::of(variables[MARK_VARIABLE].as_str().unwrap_or_default());
        let host = Host {
            strftime: &clock::now,
            meant: &|c| marks.meant(c),
            max_steps: MAX_CHAT_STEPS,
            max_output: MAX_CHAT_BYTES,
        };
        Ok(self.template.render(&variables, &host)?)
    }
}

/// What `work` gives. A panic costs the chat, not its process: what it worked
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
