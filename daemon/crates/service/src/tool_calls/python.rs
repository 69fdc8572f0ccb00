//! Calls in Python's notation: `[f(a=1, b="x"), g()]`, of literals only.

use serde_json::{Map, Value};

use super::ToolCall;

/// Deepest nesting of values.
const NESTING_MAX: usize = 32;

/// The calls of a list; nothing if it is none.
pub(super) fn calls(text: &str) -> Option<Vec<ToolCall>> {
    let mut reader = Reader { rest: text.trim() };
    reader.eat('[')?;
    let mut calls = Vec::new();
    while reader.eat(']').is_none() {
        if !calls.is_empty() {
            reader.eat(',')?;
        }
        let name = reader.name()?;
        reader.eat('(')?;
        let mut arguments = Map::new();
        while reader.eat(')').is_none() {
            if !arguments.is_empty() {
                reader.eat(',')?;
            }
            let key = reader.name()?;
            reader.eat('=')?;
            arguments.insert(key, reader.value(0)?);
        }
        calls.push(ToolCall {
            name,
            arguments: Value::Object(arguments).to_string(),
        });
    }
    (reader.rest.trim().is_empty() && !calls.is_empty()).then_some(calls)
}

struct Reader<'a> {
    rest: &'a str,
}

impl Reader<'_> {
    fn eat(&mut self, wanted: char) -> Option<()> {
        self.rest = self.rest.trim_start().strip_prefix(wanted)?;
        Some(())
    }

    fn name(&mut self) -> Option<String> {
        let text = self.rest.trim_start();
        let of_name = |c: char| c.is_alphanumeric() || matches!(c, '_' | '.' | '-');
        let end = text.find(|c| !of_name(c)).unwrap_or(text.len());
        let (name, rest) = text.split_at(end);
        self.rest = rest;
        (!name.is_empty()).then(|| name.to_owned())
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        if depth > NESTING_MAX {
            return None;
        }
        self.rest = self.rest.trim_start();
        match self.rest.chars().next()? {
            quote @ ('"' | '\'') => self.text(quote),
            '[' => {
                self.eat('[')?;
                let mut list = Vec::new();
                while self.eat(']').is_none() {
                    if !list.is_empty() {
                        self.eat(',')?;
                    }
                    list.push(self.value(depth + 1)?);
                }
                Some(list.into())
            }
            '{' => {
                self.eat('{')?;
                let mut members = Map::new();
                while self.eat('}').is_none() {
                    if !members.is_empty() {
                        self.eat(',')?;
                    }
                    let Value::String(key) = self.value(depth + 1)? else {
                        return None;
                    };
                    self.eat(':')?;
                    members.insert(key, self.value(depth + 1)?);
                }
                Some(members.into())
            }
            _ => {
                let end = self
                    .rest
                    .find([',', ')', ']', '}', ':'])
                    .unwrap_or(self.rest.len());
                let (word, rest) = self.rest.split_at(end);
                self.rest = rest;
                match word.trim() {
                    "True" => Some(true.into()),
                    "False" => Some(false.into()),
                    "None" => Some(Value::Null),
                    word => serde_json::from_str(word).ok(),
                }
            }
        }
    }

    fn text(&mut self, quote: char) -> Option<Value> {
        let mut text = String::new();
        let mut characters = self.rest.char_indices().skip(1);
        while let Some((at, c)) = characters.next() {
            match c {
                '\\' => match characters.next()?.1 {
                    'n' => text.push('\n'),
                    't' => text.push('\t'),
                    'r' => text.push('\r'),
                    other => text.push(other),
                },
                c if c == quote => {
                    self.rest = &self.rest[at + c.len_utf8()..];
                    return Some(text.into());
                }
                c => text.push(c),
            }
        }
        None
    }
}
