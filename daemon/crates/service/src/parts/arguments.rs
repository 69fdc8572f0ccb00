//! Calls that are JSON objects, told as they come: the name once it is known, and the arguments in
//! pieces, as they stand in the text.
//!
//! ```text
//!  begin --{"name": "f", "arguments": {--> arguments --} of the object--> between <-> next call
//!    |  anything else: the block is read as a whole
//! ```
//!
//! JSON says where the arguments end, so a closing mark inside of a text of theirs is text. Where
//! they turn out to be no JSON, the closing mark ends them.

use super::{Part, partial};
use crate::tool_calls::ToolCall;

/// The keys that arguments may have.
const KEYS: [&str; 2] = ["arguments", "parameters"];

/// Where a call is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    /// Nothing of the block is told yet.
    Begin,
    /// Inside of the arguments.
    Arguments,
    /// Inside of arguments that are no JSON.
    Broken,
    /// Behind a call.
    Between,
    /// Behind a call, in front of what is no call in pieces.
    Rest,
}

/// What came of the text so far.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Block {
    /// It may be more of the block.
    More,
    /// It has no call that can be told in pieces, from its beginning on.
    Whole,
    /// It has ended. What is left of the text comes behind it, but for the text of calls that have
    /// to be read as a whole.
    Ended(String),
}

/// A block of calls, while it comes.
#[derive(Debug)]
pub(super) struct Calls {
    at: At,
    json: Json,
    /// Whether the call that comes counts.
    counts: bool,
}

impl Calls {
    pub(super) fn new() -> Self {
        Self {
            at: At::Begin,
            json: Json::default(),
            counts: false,
        }
    }

    /// Whether arguments are open of a call that counts.
    pub(super) fn is_open(&self) -> bool {
        self.counts && matches!(self.at, At::Arguments | At::Broken)
    }

    /// Whether any call of the block was told.
    pub(super) fn has_begun(&self) -> bool {
        self.at != At::Begin
    }

    /// Takes what it can of `held`, up to and with `close`; an empty one never comes. `counted`
    /// says of each call that begins whether it counts.
    pub(super) fn take(
        &mut self,
        held: &mut String,
        close: &str,
        mut counted: impl FnMut() -> bool,
        into: &mut Vec<Part>,
    ) -> Block {
        loop {
            match self.at {
                At::Begin => match begun(in_list(held)) {
                    Begun::More => return Block::More,
                    Begun::No => return Block::Whole,
                    Begun::Yes { name, left } => {
                        self.open(name, left, held, &mut counted, into);
                    }
                },
                At::Arguments => {
                    let (n, state) = self.json.take(held);
                    let rest = held.split_off(n);
                    self.say(&std::mem::replace(held, rest), into);
                    self.at = match state {
                        JsonState::More => return Block::More,
                        JsonState::Ended => At::Between,
                        JsonState::Broken => At::Broken,
                    };
                }
                At::Broken => match cut_at(held, close) {
                    Some(said) => {
                        self.say(said.trim_end(), into);
                        return Block::Ended(String::new());
                    }
                    None => {
                        // Space in front of the mark is none of theirs.
                        let n = held.len() - partial(held, close);
                        let rest = held.split_off(held[..n].trim_end().len());
                        self.say(&std::mem::replace(held, rest), into);
                        return Block::More;
                    }
                },
                At::Between => {
                    let skipped = ['}', ']', ',', ';'];
                    let left = held
                        .trim_start_matches(|c: char| c.is_whitespace() || skipped.contains(&c));
                    *held = left.to_owned();
                    if held.is_empty() || close.starts_with(&**held) && *held != close {
                        return Block::More;
                    }
                    match begun(held) {
                        Begun::More => return Block::More,
                        Begun::No => self.at = At::Rest,
                        Begun::Yes { name, left } => {
                            self.open(name, left, held, &mut counted, into);
                        }
                    }
                }
                At::Rest => {
                    return cut_at(held, close).map_or(Block::More, Block::Ended);
                }
            }
        }
    }

    /// The end of all text, `held` behind what was taken.
    pub(super) fn finish(&mut self, held: &str, close: &str, into: &mut Vec<Part>) -> String {
        let held = &held[..held.len() - partial(held, close)];
        match self.at {
            At::Arguments | At::Broken => {
                self.say(held.trim_end(), into);
                String::new()
            }
            _ => held.to_owned(),
        }
    }

    fn open(
        &mut self,
        name: String,
        left: usize,
        held: &mut String,
        counted: &mut impl FnMut() -> bool,
        into: &mut Vec<Part>,
    ) {
        *held = held.split_off(held.len() - left);
        self.json = Json::default();
        self.at = At::Arguments;
        self.counts = counted();
        if self.counts {
            let arguments = String::new();
            into.push(Part::Call(ToolCall { name, arguments }));
        }
    }

    fn say(&self, text: &str, into: &mut Vec<Part>) {
        if self.counts && !text.is_empty() {
            into.push(Part::Arguments(text.to_owned()));
        }
    }
}

/// `text` behind the bracket of a list, if it begins with one.
fn in_list(text: &str) -> &str {
    let text = text.trim_start();
    text.strip_prefix('[').unwrap_or(text)
}

/// What stands in front of `close`, where it has come; `held` is what follows it then.
fn cut_at(held: &mut String, close: &str) -> Option<String> {
    let at = held.find(close).filter(|_| !close.is_empty())?;
    let rest = held.split_off(at + close.len());
    let mut before = std::mem::replace(held, rest);
    before.truncate(at);
    Some(before)
}

/// Whether a text begins a call up to its arguments.
#[derive(Debug, PartialEq, Eq)]
enum Begun {
    More,
    No,
    Yes {
        name: String,
        /// Bytes from the arguments' brace on.
        left: usize,
    },
}

fn begun(text: &str) -> Begun {
    match Reader(text).head() {
        Ok((name, left)) => Begun::Yes { name, left },
        Err(Stop::Short) => Begun::More,
        Err(Stop::Other) => Begun::No,
    }
}

/// Why a text is not read further.
enum Stop {
    /// It ends, and what it has so far fits.
    Short,
    /// It is something else.
    Other,
}

struct Reader<'t>(&'t str);

impl Reader<'_> {
    /// The name, and what is left where the arguments begin.
    fn head(mut self) -> Result<(String, usize), Stop> {
        self.eat("{")?;
        self.eat("\"name\"")?;
        self.eat(":")?;
        let name = self.text()?;
        self.eat(",")?;
        let key = self.text()?;
        if name.is_empty() || !KEYS.contains(&&*key) {
            return Err(Stop::Other);
        }
        self.eat(":")?;
        self.skip_space();
        match self.0.chars().next() {
            Some('{') => Ok((name, self.0.len())),
            Some(_) => Err(Stop::Other),
            None => Err(Stop::Short),
        }
    }

    fn skip_space(&mut self) {
        self.0 = self.0.trim_start();
    }

    fn eat(&mut self, word: &str) -> Result<(), Stop> {
        self.skip_space();
        match self.0.strip_prefix(word) {
            Some(rest) => {
                self.0 = rest;
                Ok(())
            }
            None if word.starts_with(self.0) => Err(Stop::Short),
            None => Err(Stop::Other),
        }
    }

    fn text(&mut self) -> Result<String, Stop> {
        self.skip_space();
        let mut values = serde_json::Deserializer::from_str(self.0).into_iter::<String>();
        match values.next() {
            Some(Ok(text)) => {
                self.0 = &self.0[values.byte_offset()..];
                Ok(text)
            }
            Some(Err(error)) if error.is_eof() => Err(Stop::Short),
            Some(Err(_)) => Err(Stop::Other),
            None => Err(Stop::Short),
        }
    }
}

/// An object of JSON that comes in pieces, as far as its end needs.
#[derive(Debug, Default)]
struct Json {
    depth: u32,
    in_text: bool,
    escaped: bool,
}

#[derive(Debug, PartialEq, Eq)]
enum JsonState {
    More,
    Ended,
    Broken,
}

impl Json {
    /// How many bytes of `text` belong to it, and why no more.
    fn take(&mut self, text: &str) -> (usize, JsonState) {
        for (at, c) in text.char_indices() {
            match c {
                // No text of JSON has it as it is.
                c if self.in_text && c < ' ' => return (at, JsonState::Broken),
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
            let (mut calls, mut held, mut parts) = (Calls::new(), String::new(), Vec::new());
            let mut ended = None;
            for piece in characters.chunks(size) {
                held.extend(piece);
                if ended.is_none() {
                    match calls.take(&mut held, CLOSE, || true, &mut parts) {
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
            r#"{"tool": "#,
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
        let text = "{\"name\": \"f\", \"arguments\": {\"a\": 1</call>";
        let parts = vec![call("f", "{\"a\": 1")];
        assert_eq!(split(text), (parts, ended(""), String::new()));
    }
}
