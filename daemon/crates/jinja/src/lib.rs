//! Jinja2 templates, as Python renders them.
//!
//! Chat templates are written for Jinja2 3.1 as `transformers` sets it up, and they lean on Python:
//! methods of its texts and dicts, its formats of numbers, its rules of truth and of scopes. This
//! crate has those, and nothing of the world outside: no files, no other templates, no clock but
//! the one that it is given.
//!
//! A rendering is bounded in steps, in output, in depth, and in the size of one value. Sums of many
//! values are not: whoever renders templates that are not trusted bounds the memory of the process,
//! and its time.
//!
//! What differs from Jinja2 is listed in `tests/reference/differences.json` with reasons, and
//! checked.
//!
//! Stages: [`lexer`] makes tokens of a text, [`parser`] a tree of them ([`ast`]), [`run`] executes
//! its statements and [`eval`] its expressions. [`value`] is what they work on.

#![forbid(unsafe_code)]

mod access;
mod args;
mod ast;
mod compare;
mod escapes;
mod eval;
mod fault;
mod filters;
mod format;
mod html;
mod is_tests;
mod json;
mod lexer;
mod methods;
mod objects;
mod operators;
mod parser;
mod printf;
mod repr;
mod run;
mod value;

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests;

use std::fmt;

use fault::Fault;
use parser::Parsed;
use run::Run;

pub use repr::float as float_text;

/// What a rendering may use, and how much.
pub struct Host<'h> {
    /// Writes the time by a format of C's `strftime`; `strftime_now` calls it.
    pub strftime: &'h dyn Fn(&str) -> Result<String, String>,
    /// What a symbol stands for that keeps text apart: nothing for other characters,
    /// `Some(None)` for one that stands for no character.
    pub meant: &'h dyn Fn(char) -> Option<Option<char>>,
    /// Statements, expressions and items of loops that may be worked on.
    pub max_steps: u64,
    /// Bytes that may be written.
    pub max_output: usize,
}

/// Why a template was not rendered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// The template has a syntax error.
    Syntax {
        /// Line of the error, from 1.
        line: usize,
        /// The message of the error.
        message: String,
    },
    /// Rendering failed.
    Render {
        /// Line of the error, from 1; 0 if unknown.
        line: usize,
        /// What went wrong, mostly in Python's words.
        message: String,
    },
    /// The template called `raise_exception`, with this message.
    Raised(String),
    /// The template took more than [`Host::max_steps`].
    Steps,
    /// The template wrote more than [`Host::max_output`].
    Output,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Syntax { line, message } => write!(f, "line {line}: {message}"),
            Error::Render { line, message } => write!(f, "line {line}: {message}"),
            Error::Raised(message) => f.write_str(message),
            Error::Steps => f.write_str("too many steps"),
            Error::Output => f.write_str("too much output"),
        }
    }
}

impl std::error::Error for Error {}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Error {
        match fault {
            Fault::Failed { line, message } => Error::Render {
                line: line as usize,
                message,
            },
            Fault::Raised(message) => Error::Raised(message),
            Fault::Steps => Error::Steps,
            Fault::Output => Error::Output,
            Fault::Depth => Error::Render {
                line: 0,
                message: "values are nested too deeply".to_owned(),
            },
        }
    }
}

/// A parsed template.
pub struct Template {
    parsed: Parsed,
}

impl fmt::Debug for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Template").finish_non_exhaustive()
    }
}

impl Template {
    /// Parses a template. Trees may be some thousand levels deep: the thread needs a stack of
    /// several megabytes, as for [`Template::render`].
    ///
    /// # Errors
    ///
    /// [`Error::Syntax`].
    pub fn parse(source: &str) -> Result<Template, Error> {
        match parser::parse(source) {
            Ok(parsed) => Ok(Template { parsed }),
            Err((line, message)) => Err(Error::Syntax {
                line: line as usize,
                message,
            }),
        }
    }

    /// Renders the template with the members of a JSON object as variables.
    ///
    /// # Errors
    ///
    /// If the template fails, raises an exception, or exceeds a bound of `host`.
    pub fn render(&self, variables: &serde_json::Value, host: &Host<'_>) -> Result<String, Error> {
        let run = Run::new(&self.parsed.names, host);
        Ok(run.template(&self.parsed.body, variables)?)
    }
}
