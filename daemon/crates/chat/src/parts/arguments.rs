//! Streams tool calls whose arguments are JSON text: the name once it is known, and the arguments
//! in pieces, as they are written, but with control characters in strings escaped as JSON requires
//! ([`Texts`]).
//!
//! ```text
//!  begin --a head, as {"name": "f", "arguments": {--> arguments --} of the object--> between
//!    |  anything else: the block is read as a whole        ^                            |
//!                                                          +------- another head -------+
//! ```
//!
//! JSON says where the arguments end, so a closing mark inside of a text of theirs is text. Where
//! they turn out to be no JSON, the closing mark ends them, or the one behind the call; or the last
//! bracket, where nothing but line breaks in a text is wrong. How calls begin tells [`Heads`].

use serde_json::Value;

use super::Part;
use super::block::Block;
use crate::tool_calls::ToolCall;
use crate::tool_calls::heads::{Head, Heads, Stop, member};
use crate::tool_calls::texts::{Texts, partial};

/// Position of the reading within a block of calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    /// Before the first call; nothing was sent yet.
    Begin,
    /// Inside of a call's arguments.
    Arguments,
    /// Inside of arguments that are not valid JSON; brackets may still show their end.
    Broken,
    /// After a call.
    Between,
    /// After a call, before text that is not a call.
    Rest,
}

/// A block of streamed calls, whose arguments are JSON text.
#[derive(Debug)]
pub(super) struct Objects {
    heads: Heads,
    at: At,
    json: Json,
    /// State of strings in the arguments, for escapes.
    texts: Texts,
    /// Offset from which the next call's head is searched.
    from: usize,
    /// Whether the mark before the next call has been read.
    marked: bool,
    /// Whether the current call counts; only the first one may.
    counts: bool,
}

/// What follows in a block of calls.
enum Next {
    More,
    /// No call in this form.
    No,
    /// The closing mark, at this byte offset.
    Close(usize),
    Call {
        name: String,
        at: usize,
    },
}

impl Objects {
    pub(super) fn new(heads: Heads) -> Self {
        Self {
            heads,
            at: At::Begin,
            json: Json::default(),
            texts: Texts::default(),
            from: 0,
            // What opens a block of Mistral's is a call's mark.
            marked: heads == Heads::Mistral,
            counts: false,
        }
    }

    /// Whether a call that counts still expects arguments.
    pub(super) fn is_open(&self) -> bool {
        self.counts && matches!(self.at, At::Arguments | At::Broken)
    }

    /// Whether any call of the block was sent.
    pub(super) fn has_begun(&self) -> bool {
        self.at != At::Begin
    }

    /// Consumes what it can of `held`, up to and including `close` (an empty mark never occurs).
    /// `counted` is asked for each new call whether it counts.
    pub(super) fn take(
        &mut self,
        held: &mut String,
        close: &str,
        tools: &[Value],
        counted: &mut impl FnMut() -> bool,
        into: &mut Vec<Part>,
    ) -> Block {
        loop {
            match self.at {
                At::Begin => match self.next(held, close) {
                    Next::More => return Block::More,
                    Next::No | Next::Close(_) => return Block::Whole,
                    // Who writes about the mark may have a word and a brace behind it.
                    Next::Call { name, .. }
                        if self.heads == Heads::Mistral && !is_tool(&name, tools) =>
                    {
                        return Block::Whole;
                    }
                    Next::Call { name, at } => self.open(name, at, held, counted, into),
                },
                At::Arguments => {
                    let (n, state) = self.json.take(held);
                    let rest = held.split_off(n);
                    self.say(&std::mem::replace(held, rest), into);
                    self.at = match state {
                        JsonState::More => return Block::More,
                        JsonState::Ended => At::Between,
                        JsonState::Loose | JsonState::Broken => At::Broken,
                    };
                }
                At::Broken => {
                    if let Some(block) = self.take_broken(held, close, into) {
                        return block;
                    }
                }
                At::Between => match self.between(held, close) {
                    Next::More => {
                        held.drain(..std::mem::take(&mut self.from));
                        return Block::More;
                    }
                    Next::No => self.at = At::Rest,
                    Next::Close(at) => {
                        held.drain(..at + close.len());
                        return Block::Ended(String::new());
                    }
                    Next::Call { name, at } => self.open(name, at, held, counted, into),
                },
                At::Rest => {
                    return cut_at(held, close).map_or(Block::More, Block::Ended);
                }
            }
        }
    }

    /// Consumes arguments that are not valid JSON, up to their end; `None` if the block goes on.
    fn take_broken(
        &mut self,
        held: &mut String,
        close: &str,
        into: &mut Vec<Part>,
    ) -> Option<Block> {
        let ends = [close, self.heads.end()];
        let found = ends.map(|end| held.find(end).filter(|_| !end.is_empty()));
        let found_at = found.into_iter().flatten().min();
        let ready = found_at.unwrap_or_else(|| {
            let begun = ends.map(|end| partial(held, end)).into_iter().max();
            held.len() - begun.unwrap_or(0)
        });
        // Space in front of the mark is none of theirs.
        let ready = held[..ready].trim_end().len();
        let (n, state) = match self.json.loose {
            true => self.json.take(&held[..ready]),
            false => (ready, JsonState::More),
        };
        let rest = held.split_off(n);
        self.say(&std::mem::replace(held, rest), into);
        match state {
            JsonState::Ended => {
                self.at = At::Between;
                return None;
            }
            JsonState::Broken => {
                self.json.loose = false;
                return None;
            }
            JsonState::More | JsonState::Loose => {}
        }
        let Some(at) = found_at.map(|at| at - n) else {
            return Some(Block::More);
        };
        let rest = held.split_off(at);
        *held = rest;
        if found[0] == found_at {
            held.drain(..close.len());
            return Some(Block::Ended(String::new()));
        }
        self.at = At::Between;
        None
    }

    /// Handles the end of the output, with the unconsumed text `held`. Returns text that is left.
    pub(super) fn finish(&mut self, held: &str, close: &str, into: &mut Vec<Part>) -> String {
        let held = &held[..held.len() - partial(held, close)];
        match self.at {
            At::Arguments | At::Broken => {
                let begun = partial(held, self.heads.end());
                self.say(held[..held.len() - begun].trim_end(), into);
                String::new()
            }
            _ => held.to_owned(),
        }
    }

    /// Determines what follows at the beginning of a block.
    fn next(&mut self, held: &str, close: &str) -> Next {
        let mark = self.heads.mark();
        let is_list = self.heads == Heads::Mistral && self.from == 0;
        if is_list && held.trim_start().starts_with(['[', '{']) {
            if mark.starts_with(held.trim_start()) {
                return Next::More;
            }
            if !held.trim_start().starts_with(mark) {
                (self.heads, self.marked) = (Heads::Objects, false);
            }
        }
        if self.heads != Heads::Objects {
            return self.marked(held, close);
        }
        let list = held.trim_start();
        let list = list.strip_prefix('[').unwrap_or(list);
        match self.heads.head(list) {
            Head::More => Next::More,
            Head::No => Next::No,
            Head::Yes { name, at } => Next::Call {
                name,
                at: held.len() - list.len() + at,
            },
        }
    }

    /// Determines what follows after a call.
    fn between(&mut self, held: &mut String, close: &str) -> Next {
        if self.heads != Heads::Objects {
            return self.marked(held, close);
        }
        loop {
            let left = held.trim_start_matches(|c: char| c.is_whitespace() || "}],;".contains(c));
            held.drain(..held.len() - left.len());
            if !close.is_empty() && held.starts_with(close) {
                return Next::Close(0);
            }
            if held.is_empty() || close.starts_with(&**held) {
                return Next::More;
            }
            if held.starts_with('"') {
                match member(held) {
                    Ok(n) => {
                        held.drain(..n);
                        continue;
                    }
                    Err(Stop::Short) => return Next::More,
                    Err(Stop::Other) => return Next::No,
                }
            }
            return match self.heads.head(held) {
                Head::More => Next::More,
                Head::No => Next::No,
                Head::Yes { name, at } => Next::Call { name, at },
            };
        }
    }

    /// Finds the next call of a form with a mark for each call, or the end of the block. Text
    /// between calls is dropped.
    fn marked(&mut self, held: &str, close: &str) -> Next {
        let mark = self.heads.mark();
        let closed = held.find(close).filter(|_| !close.is_empty());
        let text = &held[..closed.unwrap_or(held.len())];
        loop {
            if !self.marked {
                let Some(n) = text[self.from..].find(mark) else {
                    if closed.is_none() {
                        let begun = partial(text, mark).max(partial(text, close));
                        self.from = self.from.max(text.len() - begun);
                    }
                    return closed.map_or(Next::More, Next::Close);
                };
                self.from += n + mark.len();
                self.marked = true;
            }
            match self.heads.head(&text[self.from..]) {
                Head::Yes { name, at } => {
                    let at = self.from + at;
                    return Next::Call { name, at };
                }
                Head::More if closed.is_none() => return Next::More,
                Head::More | Head::No => self.marked = false,
            }
        }
    }

    fn open(
        &mut self,
        name: String,
        at: usize,
        held: &mut String,
        counted: &mut impl FnMut() -> bool,
        into: &mut Vec<Part>,
    ) {
        held.drain(..at);
        (self.json, self.texts) = (Json::default(), Texts::default());
        self.at = At::Arguments;
        (self.from, self.marked) = (0, false);
        self.counts = counted();
        if self.counts {
            let arguments = String::new();
            into.push(Part::Call(ToolCall { name, arguments }));
        }
    }

    fn say(&mut self, text: &str, into: &mut Vec<Part>) {
        let text = self.texts.escape(text);
        if self.counts && !text.is_empty() {
            into.push(Part::Arguments(text.into_owned()));
        }
    }
}

fn is_tool(name: &str, tools: &[Value]) -> bool {
    tools.iter().any(|tool| tool["function"]["name"] == name)
}

/// Returns the text before `close`, if that has arrived, and leaves in `held` what follows it.
fn cut_at(held: &mut String, close: &str) -> Option<String> {
    let at = held.find(close).filter(|_| !close.is_empty())?;
    let rest = held.split_off(at + close.len());
    let mut before = std::mem::replace(held, rest);
    before.truncate(at);
    Some(before)
}

/// Scanner for a JSON object that arrives in pieces, which finds its end.
#[derive(Debug, Default)]
struct Json {
    depth: u32,
    in_text: bool,
    escaped: bool,
    /// Whether a string contains raw control characters, which JSON does not allow: a mark may end
    /// it.
    loose: bool,
}

#[derive(Debug, PartialEq, Eq)]
enum JsonState {
    More,
    Ended,
    /// Not valid JSON, but brackets and quotation marks may still show the end.
    Loose,
    Broken,
}

impl Json {
    /// Returns how many bytes of `text` belong to the object, and the state after them.
    fn take(&mut self, text: &str) -> (usize, JsonState) {
        for (at, c) in text.char_indices() {
            match c {
                c if self.in_text && c < ' ' && !self.loose => {
                    self.loose = true;
                    return (at, JsonState::Loose);
                }
                _ if self.escaped => self.escaped = false,
                '\\' if self.in_text => self.escaped = true,
                '"' => self.in_text = !self.in_text,
                _ if self.in_text => {}
                '{' | '[' => self.depth += 1,
                '}' | ']' => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        return (at + 1, JsonState::Ended);
                    }
                }
                ',' | ':' | '.' | '+' | '-' => {}
                c if c.is_ascii_alphanumeric() || c.is_whitespace() => {}
                _ => return (at, JsonState::Broken),
            }
        }
        (text.len(), JsonState::More)
    }
}

#[cfg(test)]
mod tests {
    use super::super::joined;
    use super::*;

    const CLOSE: &str = "</call>";

    /// The parts of a block, and what is behind it, in pieces of every size.
    fn split(text: &str) -> (Vec<Part>, Option<Block>, String) {
        let characters: Vec<char> = text.chars().collect();
        let all = (1..=characters.len()).map(|size| {
            let (mut calls, mut held, mut parts) =
                (Objects::new(Heads::Objects), String::new(), Vec::new());
            let mut ended = None;
            for piece in characters.chunks(size) {
                held.extend(piece);
                if ended.is_none() {
                    match calls.take(&mut held, CLOSE, &[], &mut || true, &mut parts) {
                        Block::More => {}
                        other => ended = Some(other),
                    }
                }
            }
            if ended.is_none() {
                held = calls.finish(&held, CLOSE, &mut parts);
            }
            (joined(parts), ended, held)
        });
        let all: Vec<_> = all.collect();
        assert!(all.iter().all(|one| *one == all[0]), "{all:?}");
        all.into_iter().next().unwrap()
    }

    fn call(name: &str, arguments: &str) -> Part {
        Part::Call(ToolCall {
            name: name.to_owned(),
            arguments: arguments.to_owned(),
        })
    }

    fn ended(text: &str) -> Option<Block> {
        Some(Block::Ended(text.to_owned()))
    }

    #[test]
    fn arguments_are_told_as_they_stand_in_the_text() {
        let object = r#"{"a": "}\" </call> \\", "b": [{"c": 1.5e-3}, null]}"#;
        let written = format!("\n{{\"name\": \"f\", \"arguments\": {object}}}\n</call> behind");
        let behind = " behind".to_owned();
        assert_eq!(
            split(&written),
            (vec![call("f", object)], ended(""), behind)
        );
        let two =
            r#"[{"name":"f","parameters":{}}, {"name":"g\u00e9","arguments":{"a":1}}]</call>"#;
        let both = vec![call("f", "{}"), call("g\u{e9}", "{\"a\":1}")];
        assert_eq!(split(two), (both, ended(""), String::new()));
    }

    #[test]
    fn what_does_not_begin_so_is_read_as_a_whole() {
        for text in [
            "nothing",
            "<function=f>",
            r#"{"tool": {"#,
            r#"{"name": 7, "arguments": {}}"#,
            r#"{"name": "f", "arguments": "{}"}"#,
            r#"{"name": "f", "other": {}}"#,
            r#"{"name": "f"}"#,
        ] {
            let (parts, block, _) = split(text);
            assert_eq!((parts, block), (Vec::new(), Some(Block::Whole)), "{text}");
        }
        let text = r#"[{"name":"f","arguments":{}},{"name":"g"}]</call>"#;
        let rest = ended(r#"{"name":"g"}]"#);
        assert_eq!(split(text), (vec![call("f", "{}")], rest, String::new()));
    }

    #[test]
    fn a_cut_leaves_the_arguments_so_far() {
        let whole = r#"{"name": "f", "arguments": {"a": "x"}}"#;
        for (cut, expected) in [
            (whole[..20].to_owned(), None),
            (whole[..33].to_owned(), Some(r#"{"a": "#.trim_end())),
            (whole[..35].to_owned(), Some(r#"{"a": "x"#)),
            (format!("{whole}\n</ca"), Some(r#"{"a": "x"}"#)),
        ] {
            let (parts, block, _) = split(&cut);
            let expected: Vec<_> = expected.iter().map(|text| call("f", text)).collect();
            let told: Vec<_> = parts
                .into_iter()
                .map(|part| match part {
                    Part::Call(mut call) => {
                        call.arguments.truncate(call.arguments.trim_end().len());
                        Part::Call(call)
                    }
                    other => other,
                })
                .collect();
            assert_eq!((told, block), (expected, None), "{cut}");
        }
    }

    #[test]
    fn arguments_that_are_no_json_end_with_the_mark() {
        let text = "{\"name\": \"f\", \"arguments\": {\"a\": \"x}}\n</call>behind";
        let parts = vec![call("f", "{\"a\": \"x}}")];
        assert_eq!(split(text), (parts, ended(""), "behind".to_owned()));
        let object = "{\"a\": \"x\n\ty\", \"b\": [\"}\\\"\"]}";
        let text = format!("{{\"name\":\"f\",\"arguments\":{object}}}\n</call>behind");
        let valid = "{\"a\": \"x\\n\\ty\", \"b\": [\"}\\\"\"]}";
        let parts = vec![call("f", valid)];
        assert_eq!(split(&text), (parts, ended(""), "behind".to_owned()));
        let text = "{\"name\": \"f\", \"arguments\": {\"a\": 1</call>";
        let parts = vec![call("f", "{\"a\": 1")];
        assert_eq!(split(text), (parts, ended(""), String::new()));
    }
}
