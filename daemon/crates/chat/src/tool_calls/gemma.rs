//! Parses and streams Gemma 4's calls: `call:f{a:<|"|>text<|"|>,b:[1,2],c:{d:true}}`.

use std::ops::Range;

use serde_json::{Map, Value};

use super::ToolCall;
use super::known::{Arguments, Known, NAME_MAX_BYTES, escaped};
use super::texts::partial;
use super::typed::Parameters;

/// Text before a call's name.
const CALL: &str = "call:";
/// Quotation mark around Gemma's strings.
const QUOTE: &str = "<|\"|>";
/// Maximum nesting depth of a call's values.
const NESTING_MAX: usize = 32;

/// Parses the calls of a block. Text after them is ignored.
pub(super) fn gemma(block: &str, _: &[Value]) -> Option<Vec<ToolCall>> {
    let mut calls = Vec::new();
    let mut rest = block;
    while let Some((call, behind)) = one(rest) {
        calls.push(call);
        rest = behind;
    }
    (!calls.is_empty()).then_some(calls)
}

/// Parses the call at the beginning of `text`; returns it and the rest.
fn one(text: &str) -> Option<(ToolCall, &str)> {
    let text = text.trim_start().strip_prefix(CALL)?;
    let (name, mut rest) = text.split_at(text.find('{')?);
    let arguments = gemma_value(&mut rest, 0)?;
    let (name, arguments) = (name.trim().to_owned(), arguments.to_string());
    (!name.is_empty()).then_some((ToolCall { name, arguments }, rest))
}

/// Parses the value at the beginning of `rest`, and advances `rest` past it.
fn gemma_value(rest: &mut &str, depth: usize) -> Option<Value> {
    if depth > NESTING_MAX {
        return None;
    }
    let text = rest.trim_start();
    if let Some(text) = text.strip_prefix(QUOTE) {
        let (value, after) = text.split_once(QUOTE)?;
        *rest = after;
        return Some(value.into());
    }
    let (close, is_object) = match text.chars().next()? {
        '{' => ('}', true),
        '[' => (']', false),
        _ => {
            let end = text.find([',', '}', ']']).unwrap_or(text.len());
            let (word, after) = text.split_at(end);
            *rest = after;
            let word = word.trim();
            return Some(serde_json::from_str(word).unwrap_or_else(|_| word.into()));
        }
    };
    let (mut members, mut list) = (Map::new(), Vec::new());
    *rest = &text[1..];
    loop {
        let text = rest.trim_start();
        if let Some(after) = text.strip_prefix(close) {
            *rest = after;
            break;
        }
        *rest = text.strip_prefix(',').unwrap_or(text);
        if is_object {
            let (key, after) = rest.split_once(':')?;
            let key = key_of(key).to_owned();
            *rest = after;
            let value = gemma_value(rest, depth + 1)?;
            // The first of a name counts, which may have been told before.
            members.entry(key).or_insert(value);
        } else {
            list.push(gemma_value(rest, depth + 1)?);
        }
        let text = rest.trim_start();
        if !text.starts_with([',', close]) {
            return None;
        }
    }
    Some(match is_object {
        true => members.into(),
        false => list.into(),
    })
}

/// The name of a key, without quotation marks.
fn key_of(written: &str) -> &str {
    let key = written.trim().trim_start_matches(QUOTE);
    key.trim_end_matches(QUOTE)
}

/// Streaming reader of a block of Gemma's calls: strings are given as they arrive, other values
/// when they are complete.
///
/// ```text
/// name --"{"--> member --key--> value --> behind --","--> member
///   ^             | "}"                     | "}"
///   +-------------+-------------------------+
/// ```
#[derive(Debug, Default)]
pub(crate) struct Coming {
    state: State,
    /// Offset at which the text read so far ends.
    at: usize,
    arguments: Arguments,
}

#[derive(Debug, Default)]
enum State {
    /// Before a call.
    #[default]
    Name,
    /// Inside of the arguments, before a key or the end.
    Member,
    /// After this key.
    Value(String),
    /// Inside of a string; the flag says whether it is sent.
    Text(bool),
    /// Inside of another value of this key.
    Other(String, Brackets),
    /// After a value.
    Behind,
    /// Before something that only the whole block can decide.
    Open,
}

impl Coming {
    /// Appends to `tell` what is known by `block`, which is the earlier block with more text.
    pub(crate) fn read(&mut self, block: &str, tools: &[Value], tell: &mut Vec<Known>) {
        while self.step(block, tools, tell) == Some(true) {}
    }

    /// Performs one state transition; `None` if more text is needed, false if only the block's end
    /// decides.
    fn step(&mut self, block: &str, tools: &[Value], tell: &mut Vec<Known>) -> Option<bool> {
        let rest = block[self.at..].trim_start();
        let place = block.len() - rest.len();
        if !matches!(self.state, State::Text(_)) {
            self.at = place;
        }
        let begun = |word: &str| word.starts_with(rest) && rest.len() < word.len();
        match &mut self.state {
            State::Open => return Some(false),
            State::Name => {
                if begun(CALL) {
                    return None;
                }
                let Some(call) = rest.strip_prefix(CALL) else {
                    return self.leave();
                };
                let Some((name, behind)) = call.split_once('{') else {
                    return self.wait(call);
                };
                if Parameters::of(name.trim(), tools).is_none() {
                    return self.leave();
                }
                self.arguments.begin(name.trim(), tell);
                (self.state, self.at) = (State::Member, block.len() - behind.len());
            }
            State::Member => {
                if rest.is_empty() {
                    return None;
                }
                if rest.starts_with('}') {
                    return self.end(place, tell);
                }
                let member = rest.strip_prefix(',').unwrap_or(rest);
                let Some((key, behind)) = member.split_once(':') else {
                    return self.wait(member);
                };
                let key = key_of(key).to_owned();
                (self.state, self.at) = (State::Value(key), block.len() - behind.len());
            }
            State::Value(key) => {
                if begun(QUOTE) {
                    return None;
                }
                let key = std::mem::take(key);
                self.begin_value(key, rest, place, tell);
            }
            State::Text(counts) => {
                let counts = *counts;
                return self.take_text(counts, block, tell);
            }
            State::Other(key, brackets) => {
                let end = brackets.end(block)?;
                let key = std::mem::take(key);
                return self.take_value(&key, block, place..end, tell);
            }
            State::Behind => match rest.chars().next()? {
                ',' => self.state = State::Member,
                '}' => return self.end(place, tell),
                _ => return self.leave(),
            },
        }
        Some(true)
    }

    /// Begins a value, which starts at the offset `place`.
    fn begin_value(&mut self, key: String, rest: &str, place: usize, tell: &mut Vec<Known>) {
        self.at = place;
        if !rest.starts_with(QUOTE) {
            self.state = State::Other(key, Brackets::at(place));
            return;
        }
        self.at += QUOTE.len();
        let counts = !self.arguments.has(&key);
        if counts {
            self.arguments.key(&key, tell);
            tell.push(Known::More("\"".to_owned()));
        }
        self.state = State::Text(counts);
    }

    /// Consumes more of a string; `counts` says whether it is sent.
    fn take_text(&mut self, counts: bool, block: &str, tell: &mut Vec<Known>) -> Option<bool> {
        let text = &block[self.at..];
        let end = text.find(QUOTE);
        let ready = end.unwrap_or_else(|| text.len() - partial(text, QUOTE));
        let close = if end.is_some() { "\"" } else { "" };
        let more = format!("{}{close}", escaped(&text[..ready]));
        if counts && !more.is_empty() {
            tell.push(Known::More(more));
        }
        self.at += ready;
        end?;
        self.at += QUOTE.len();
        self.state = State::Behind;
        Some(true)
    }

    /// Consumes a complete value that is not a string.
    fn take_value(
        &mut self,
        key: &str,
        block: &str,
        at: Range<usize>,
        tell: &mut Vec<Known>,
    ) -> Option<bool> {
        let end = at.end;
        let mut left = &block[at];
        let value = gemma_value(&mut left, 1).filter(|_| left.trim().is_empty());
        // No member ends at a bracket of a list.
        let value = value.filter(|_| !block[end..].starts_with(']'));
        let Some(value) = value else {
            return self.leave();
        };
        if !self.arguments.has(key) {
            self.arguments.key(key, tell);
            tell.push(Known::More(value.to_string()));
        }
        (self.state, self.at) = (State::Behind, end);
        Some(true)
    }

    /// Handles the end of a call, at a brace.
    fn end(&mut self, at: usize, tell: &mut Vec<Known>) -> Option<bool> {
        self.arguments.end(tell);
        (self.state, self.at) = (State::Name, at + 1);
        Some(true)
    }

    /// Waits for the end of a name, unless it is too long.
    fn wait(&mut self, name: &str) -> Option<bool> {
        match name.len() > NAME_MAX_BYTES {
            true => self.leave(),
            false => None,
        }
    }

    fn leave(&mut self) -> Option<bool> {
        self.state = State::Open;
        Some(false)
    }
}

/// Scanner that finds the end of a value other than a string by its brackets.
#[derive(Debug)]
struct Brackets {
    seen: usize,
    depth: usize,
    in_text: bool,
    /// Whether the position is inside a word, in which opening brackets are characters.
    in_word: bool,
}

impl Brackets {
    fn at(from: usize) -> Self {
        Self {
            seen: from,
            depth: 0,
            in_text: false,
            in_word: false,
        }
    }

    /// Offset at which the value ends: after the bracket that closes its first one, or before a
    /// character that ends a word; `None` if it has not arrived.
    fn end(&mut self, block: &str) -> Option<usize> {
        loop {
            let rest = &block[self.seen..];
            let c = rest.chars().next()?;
            if self.depth == 0 && !matches!(c, '{' | '[') {
                self.in_word = true;
            }
            if self.in_word {
                let end = rest.find([',', '}', ']']);
                self.seen += end.unwrap_or(rest.len());
                return end.map(|_| self.seen);
            }
            if rest.starts_with(QUOTE) {
                self.in_text = !self.in_text;
                self.seen += QUOTE.len();
                continue;
            }
            if c == '<' && QUOTE.starts_with(rest) {
                return None;
            }
            self.seen += c.len_utf8();
            match c {
                _ if self.in_text => {}
                '{' | '[' => self.depth += 1,
                '}' | ']' if self.depth <= 1 => return Some(self.seen),
                '}' | ']' => self.depth -= 1,
                _ => {}
            }
        }
    }
}
