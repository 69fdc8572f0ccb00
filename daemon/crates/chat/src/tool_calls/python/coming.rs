//! Streaming reader of calls in Python's notation: strings are given as they arrive, other values
//! when they are complete.
//!
//! ```text
//! list --"["--> calls --f(--> arguments --a=--> value --> arguments --")"--> calls
//! ```
//!
//! A call counts only from its first argument's name or its end on: `f("x")` is not sent.

use serde_json::Value;

use super::Reader;
use crate::tool_calls::known::{Arguments, Known, NAME_MAX_BYTES, escaped};
use crate::tool_calls::typed::Parameters;

/// Maximum length of an escape in bytes: a surrogate pair.
const ESCAPE_MAX_BYTES: usize = 12;

#[derive(Debug, Default)]
enum State {
    /// Before the list.
    #[default]
    List,
    /// Inside of the list, before a call; the flag says that a call without a comma precedes.
    Calls(bool),
    /// After this call's name and opening bracket.
    Opened(String),
    /// Inside of a call, before an argument; the flag says that an argument without a comma
    /// precedes.
    Arguments(bool),
    /// After this argument's name.
    Value(String),
    /// Inside of a string with these quotation marks; the flag says whether it is sent.
    Text(&'static str, bool),
    /// Inside of another value of this argument.
    Other(String, Nesting),
    /// Before something that only the whole block can decide.
    Open,
}

/// Streaming reader of a list of calls.
#[derive(Debug, Default)]
pub(crate) struct Coming {
    state: State,
    /// Offset at which the text read so far ends.
    at: usize,
    arguments: Arguments,
}

impl Coming {
    /// Appends to `tell` what is known by `block`, which is the earlier block with more text.
    pub(crate) fn read(&mut self, block: &str, tools: &[Value], tell: &mut Vec<Known>) {
        while self.step(block, tools, tell).is_some() {}
    }

    /// Performs one state transition; `None` if more text or the block's end is needed.
    fn step(&mut self, block: &str, tools: &[Value], tell: &mut Vec<Known>) -> Option<()> {
        let rest = block[self.at..].trim_start();
        let place = block.len() - rest.len();
        let first = rest.chars().next();
        if !matches!(self.state, State::Text(..)) {
            self.at = place;
        }
        match &mut self.state {
            State::Open => return None,
            State::List => match first? {
                '[' => (self.state, self.at) = (State::Calls(false), place + 1),
                _ => return self.leave(),
            },
            State::Calls(is_behind) => match first? {
                ',' if *is_behind => (self.state, self.at) = (State::Calls(false), place + 1),
                ']' => return self.leave(),
                _ if *is_behind => return self.leave(),
                _ => {
                    let (name, behind) = self.name(rest, '(')?;
                    if Parameters::of(name, tools).is_none() {
                        return self.leave();
                    }
                    self.at = block.len() - behind.len();
                    self.state = State::Opened(name.to_owned());
                }
            },
            State::Opened(called) => {
                let called = std::mem::take(called);
                if first != Some(')') {
                    let Some(_) = self.name(rest, '=') else {
                        if matches!(self.state, State::Opened(_)) {
                            self.state = State::Opened(called);
                        }
                        return None;
                    };
                }
                self.arguments.begin(&called, tell);
                (self.state, self.at) = (State::Arguments(false), place);
            }
            State::Arguments(is_behind) => match first? {
                ')' => {
                    self.arguments.end(tell);
                    (self.state, self.at) = (State::Calls(true), place + 1);
                }
                ',' if *is_behind => (self.state, self.at) = (State::Arguments(false), place + 1),
                _ if *is_behind => return self.leave(),
                _ => {
                    let (name, behind) = self.name(rest, '=')?;
                    self.at = block.len() - behind.len();
                    self.state = State::Value(name.to_owned());
                }
            },
            State::Value(key) => {
                let key = std::mem::take(key);
                return self.begin_value(key, rest, place, tell);
            }
            State::Text(close, counts) => {
                let (close, counts) = (*close, *counts);
                return self.take_text(close, counts, block, tell);
            }
            State::Other(key, nesting) => {
                if !nesting.has_ended(rest) {
                    return None;
                }
                let key = std::mem::take(key);
                return self.take_value(&key, rest, block, tell);
            }
        }
        Some(())
    }

    /// Consumes a complete value that is not a string, at `rest`.
    fn take_value(
        &mut self,
        key: &str,
        rest: &str,
        block: &str,
        tell: &mut Vec<Known>,
    ) -> Option<()> {
        let mut reader = Reader { rest };
        let Some(value) = reader.value(0) else {
            return self.leave();
        };
        if !self.arguments.has(key) {
            self.arguments.key(key, tell);
            tell.push(Known::More(value.to_string()));
        }
        self.at = block.len() - reader.rest.len();
        self.state = State::Arguments(true);
        Some(())
    }

    /// Begins an argument's value, which starts at the offset `place`.
    fn begin_value(
        &mut self,
        key: String,
        rest: &str,
        place: usize,
        tell: &mut Vec<Known>,
    ) -> Option<()> {
        let first = rest.chars().next();
        let Some(quote) = first.and_then(quote) else {
            self.state = match first {
                Some(_) => State::Other(key, Nesting::default()),
                None => State::Value(key),
            };
            self.at = place;
            return first.map(|_| ());
        };
        // Three of them, or one and what it closes.
        let n = rest.len() - rest.trim_start_matches(&quote[..1]).len();
        if n < 3 && n == rest.len() {
            self.state = State::Value(key);
            return None;
        }
        let close = if n < 3 { &quote[..1] } else { quote };
        let counts = !self.arguments.has(&key);
        if counts {
            self.arguments.key(&key, tell);
            tell.push(Known::More("\"".to_owned()));
        }
        self.at = place + close.len();
        self.state = State::Text(close, counts);
        Some(())
    }

    /// Consumes what has arrived of a string that `close` ends.
    fn take_text(
        &mut self,
        close: &'static str,
        counts: bool,
        block: &str,
        tell: &mut Vec<Known>,
    ) -> Option<()> {
        let mut text = String::new();
        let (n, end) = text_of(&block[self.at..], close, &mut text);
        self.at += n;
        if end == End::Closed {
            self.state = State::Arguments(true);
        }
        if counts {
            let close = if end == End::Closed { "\"" } else { "" };
            let more = format!("{}{close}", escaped(&text));
            tell.extend((!more.is_empty()).then_some(Known::More(more)));
        }
        match end {
            End::Closed => Some(()),
            End::More => None,
            End::Broken => self.leave(),
        }
    }

    /// Parses a name, and returns it with the text after the character `behind` that follows.
    fn name<'t>(&mut self, text: &'t str, behind: char) -> Option<(&'t str, &'t str)> {
        let end = text.find(|c| !super::of_name(c)).unwrap_or(text.len());
        let (name, rest) = text.split_at(end);
        let rest = rest.trim_start();
        if rest.is_empty() {
            if text.len() > NAME_MAX_BYTES {
                self.leave();
            }
            return None;
        }
        let Some(rest) = rest.strip_prefix(behind).filter(|_| !name.is_empty()) else {
            self.leave();
            return None;
        };
        Some((name, rest))
    }

    fn leave(&mut self) -> Option<()> {
        self.state = State::Open;
        None
    }
}

/// The triple quotation mark for a quotation mark.
fn quote(c: char) -> Option<&'static str> {
    match c {
        '"' => Some("\"\"\""),
        '\'' => Some("'''"),
        _ => None,
    }
}

/// Why a string could not be read further.
#[derive(Debug, PartialEq, Eq)]
enum End {
    More,
    Closed,
    Broken,
}

/// Reads a string up to and including `close`, or as far as it is known. Returns the number of
/// bytes read.
fn text_of(from: &str, close: &str, text: &mut String) -> (usize, End) {
    let mut reader = Reader { rest: from };
    loop {
        let before = reader.rest;
        let read = from.len() - before.len();
        if before.starts_with(close) {
            return (read + close.len(), End::Closed);
        }
        if close.starts_with(before) {
            return (read, End::More);
        }
        match reader.character() {
            Some('\\') => {
                let escape = reader.rest;
                let is_long = escape.starts_with(['x', 'u', 'U']) || escape.starts_with(of_octal);
                if escape.is_empty() || is_long && escape.len() < ESCAPE_MAX_BYTES {
                    return (read, End::More);
                }
                if reader.escape(text).is_none() {
                    return (read, End::Broken);
                }
            }
            Some(c) => text.push(c),
            None => return (read, End::More),
        }
    }
}

fn of_octal(c: char) -> bool {
    c.is_digit(8)
}

/// Nesting of a value other than a string, as far as it was scanned.
#[derive(Debug, Default)]
struct Nesting {
    seen: usize,
    depth: usize,
    /// The quotation marks that close the current string inside of it.
    close: Option<&'static str>,
}

impl Nesting {
    /// Whether all brackets of `value` are closed, or a character that ends a word has arrived.
    fn has_ended(&mut self, value: &str) -> bool {
        loop {
            let rest = &value[self.seen..];
            let Some(c) = rest.chars().next() else {
                return false;
            };
            if let Some(close) = self.close {
                if rest.starts_with(close) {
                    self.seen += close.len();
                    self.close = None;
                    continue;
                }
                if close.starts_with(rest) {
                    return false;
                }
                let Some(next) = rest.chars().nth(1) else {
                    return false;
                };
                self.seen += c.len_utf8() + if c == '\\' { next.len_utf8() } else { 0 };
                continue;
            }
            if let Some(quote) = quote(c) {
                let n = rest.len() - rest.trim_start_matches(c).len();
                if n < 3 && n == rest.len() {
                    return false;
                }
                let close = if n < 3 { &quote[..1] } else { quote };
                self.seen += close.len();
                self.close = Some(close);
                continue;
            }
            match c {
                '[' | '(' | '{' => self.depth += 1,
                ']' | ')' | '}' if self.depth <= 1 => return true,
                ']' | ')' | '}' => self.depth -= 1,
                ',' | ':' if self.depth == 0 => return true,
                _ => {}
            }
            self.seen += c.len_utf8();
        }
    }
}
