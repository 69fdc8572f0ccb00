//! What goes to the standard output: data, and nothing else.
//!
//! *Invariant:* a reader that closes the pipe is no failure (test
//! `a_closed_pipe_is_success_and_cancels_the_request`). It comes back as [`Closed`], which the
//! program ends on with success.

use std::fmt::Display;
use std::io::{self, Write};

use anyhow::Context as _;
use serde::Serialize;

use crate::human::is_obeyed;

/// The reader of the standard output went away.
#[derive(Debug, thiserror::Error)]
#[error("the standard output was closed")]
pub(crate) struct Closed;

/// The standard output, in text or in JSON.
pub(crate) struct Output {
    writer: Box<dyn Write + Send + Sync>,
    /// Whether to print JSON.
    pub(crate) json: bool,
}

impl Output {
    /// Writes to the standard output.
    pub(crate) fn stdout(json: bool) -> Output {
        Output::new(Box::new(io::stdout()), json)
    }

    /// Writes to `writer`.
    pub(crate) fn new(writer: Box<dyn Write + Send + Sync>, json: bool) -> Output {
        Output { writer, json }
    }

    /// Writes text as it is and makes it visible at once.
    pub(crate) fn text(&mut self, text: &str) -> anyhow::Result<()> {
        let written = self
            .writer
            .write_all(text.as_bytes())
            .and_then(|()| self.writer.flush());
        match written {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(Closed.into()),
            Err(error) => {
                Err(anyhow::Error::new(error).context("cannot write to the standard output"))
            }
        }
    }

    /// Writes a line.
    pub(crate) fn line(&mut self, line: impl Display) -> anyhow::Result<()> {
        self.text(&format!("{line}\n"))
    }

    /// Writes an object on a line; what a terminal would obey is escaped in it.
    pub(crate) fn object(&mut self, json: &impl Serialize) -> anyhow::Result<()> {
        let json = serde_json::to_string(json).context("cannot write the answer as JSON")?;
        let mut line = String::new();
        // Outside of strings there are no such characters, and control characters of ASCII are
        // escaped already.
        for c in json.chars() {
            match is_obeyed(c) {
                true => line += &format!("\\u{:04x}", u32::from(c)),
                false => line.push(c),
            }
        }
        self.line(line)
    }

    /// Writes one answer: `json` as an object on a line, or the text of `human`.
    pub(crate) fn answer<T: Serialize>(
        &mut self,
        json: impl FnOnce() -> T,
        human: impl FnOnce() -> String,
    ) -> anyhow::Result<()> {
        if self.json {
            return self.object(&json());
        }
        let text = human();
        if text.is_empty() || text.ends_with('\n') {
            self.text(&text)
        } else {
            self.line(text)
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[derive(Clone, Default)]
    struct Shared(std::sync::Arc<std::sync::Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    struct Pipe(io::ErrorKind);

    impl Write for Pipe {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(self.0.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn nothing_that_a_terminal_obeys_is_in_an_object() {
        let json = serde_json::json!({"text": "a\u{9b}2J\u{202e}b\u{1b}c\u{e9}\n"});
        let written = Shared::default();
        let mut out = Output::new(Box::new(written.clone()), true);
        out.object(&json).unwrap();
        let line = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
        assert_eq!(line, "{\"text\":\"a\\u009b2J\\u202eb\\u001bc\u{e9}\\n\"}\n");
        let read: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(read, json);
    }

    #[test]
    fn a_closed_pipe_is_told_from_a_full_disk() {
        let mut out = Output::new(Box::new(Pipe(io::ErrorKind::BrokenPipe)), false);
        assert!(out.line("x").unwrap_err().is::<Closed>());
        let mut out = Output::new(Box::new(Pipe(io::ErrorKind::StorageFull)), false);
        assert!(!out.line("x").unwrap_err().is::<Closed>());
    }
}
