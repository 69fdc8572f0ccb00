//! Parses calls in Python's notation: `[f(a=1, b="x"), g()]`, with literals only. Tuples become
//! lists.

pub(crate) mod coming;

use serde_json::{Map, Value};

use super::ToolCall;

/// Maximum nesting depth of values.
const NESTING_MAX: usize = 32;

/// Parses a list of calls; `None` if it is none.
pub(super) fn calls(text: &str) -> Option<Vec<ToolCall>> {
    let mut reader = Reader { rest: text.trim() };
    reader.eat('[')?;
    let mut calls = Vec::new();
    while reader.goes_on(']', calls.len())? {
        let name = reader.name()?;
        reader.eat('(')?;
        let mut arguments = Map::new();
        while reader.goes_on(')', arguments.len())? {
            let key = reader.name()?;
            reader.eat('=')?;
            let value = reader.value(0)?;
            // The first of a name counts, which may have been told before.
            arguments.entry(key).or_insert(value);
        }
        calls.push(ToolCall {
            name,
            arguments: Value::Object(arguments).to_string(),
        });
    }
    (reader.rest.trim().is_empty() && !calls.is_empty()).then_some(calls)
}

/// Parses a literal; `None` if the text is none.
pub(super) fn literal(text: &str) -> Option<Value> {
    let mut reader = Reader { rest: text };
    let value = reader.value(0)?;
    reader.rest.trim().is_empty().then_some(value)
}

/// Whether a character may be part of a name.
fn of_name(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '.' | '-')
}

struct Reader<'a> {
    rest: &'a str,
}

impl Reader<'_> {
    fn eat(&mut self, wanted: char) -> Option<()> {
        self.rest = self.rest.trim_start().strip_prefix(wanted)?;
        Some(())
    }

    /// Whether another member follows the `n` parsed so far, before `close`. A trailing comma is
    /// allowed.
    fn goes_on(&mut self, close: char, n: usize) -> Option<bool> {
        if self.eat(close).is_some() {
            return Some(false);
        }
        if n == 0 {
            return Some(true);
        }
        self.eat(',')?;
        Some(self.eat(close).is_none())
    }

    fn name(&mut self) -> Option<String> {
        let text = self.rest.trim_start();
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
            '"' | '\'' => self.text().map(Value::from),
            '[' => self.list(depth),
            '(' => self.tuple(depth),
            '{' => {
                self.eat('{')?;
                let mut members = Map::new();
                while self.goes_on('}', members.len())? {
                    let key = match self.value(depth + 1)? {
                        Value::String(key) => key,
                        Value::Array(_) | Value::Object(_) => return None,
                        // As Python writes such keys in JSON.
                        scalar => scalar.to_string(),
                    };
                    self.eat(':')?;
                    members.insert(key, self.value(depth + 1)?);
                }
                Some(members.into())
            }
            _ => {
                let end = self.rest.find([',', ')', ']', '}', ':']);
                let (word, rest) = self.rest.split_at(end.unwrap_or(self.rest.len()));
                self.rest = rest;
                match word.trim() {
                    "True" => Some(true.into()),
                    "False" => Some(false.into()),
                    "None" => Some(Value::Null),
                    word => serde_json::from_str(word).ok().or_else(|| number(word)),
                }
            }
        }
    }

    fn list(&mut self, depth: usize) -> Option<Value> {
        self.eat('[')?;
        let mut list = Vec::new();
        while self.goes_on(']', list.len())? {
            list.push(self.value(depth + 1)?);
        }
        Some(list.into())
    }

    /// Parses an expression in parentheses: a tuple if there is a comma or nothing inside.
    fn tuple(&mut self, depth: usize) -> Option<Value> {
        self.eat('(')?;
        if self.eat(')').is_some() {
            return Some(Value::Array(Vec::new()));
        }
        let first = self.value(depth + 1)?;
        if self.eat(')').is_some() {
            return Some(first);
        }
        let mut list = vec![first];
        while self.goes_on(')', list.len())? {
            list.push(self.value(depth + 1)?);
        }
        Some(list.into())
    }

    fn text(&mut self) -> Option<String> {
        let quote = self.rest.get(..1)?;
        let thrice = quote.repeat(3);
        let close = match self.rest.starts_with(&*thrice) {
            true => &*thrice,
            false => quote,
        };
        self.rest = &self.rest[close.len()..];
        let mut text = String::new();
        loop {
            if let Some(rest) = self.rest.strip_prefix(close) {
                self.rest = rest;
                return Some(text);
            }
            match self.character()? {
                '\\' => self.escape(&mut text)?,
                c => text.push(c),
            }
        }
    }

    fn character(&mut self) -> Option<char> {
        let mut characters = self.rest.chars();
        let c = characters.next()?;
        self.rest = characters.as_str();
        Some(c)
    }

    /// Parses an escape sequence after its backslash.
    fn escape(&mut self, text: &mut String) -> Option<()> {
        let from = self.rest;
        let code = match self.character()? {
            // The line goes on.
            '\n' => return Some(()),
            c @ ('\\' | '\'' | '"') => c.into(),
            'n' => 0x0A,
            't' => 0x09,
            'r' => 0x0D,
            'a' => 0x07,
            'b' => 0x08,
            'f' => 0x0C,
            'v' => 0x0B,
            'x' => self.digits(2, 2, 16)?,
            'u' => self.unit()?,
            'U' => self.digits(8, 8, 16)?,
            '0'..='7' => {
                self.rest = from;
                self.digits(1, 3, 8)?
            }
            // Python keeps the backslash of what is no escape.
            other => {
                text.extend(['\\', other]);
                return Some(());
            }
        };
        // Half of a pair is no character.
        text.push(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER));
        Some(())
    }

    /// Parses a number of `least` to `most` digits in this radix.
    fn digits(&mut self, least: usize, most: usize, radix: u32) -> Option<u32> {
        let end = self.rest.find(|c: char| !c.is_digit(radix));
        let end = end.unwrap_or(self.rest.len()).min(most);
        let (digits, rest) = self.rest.split_at(end);
        self.rest = rest;
        u32::from_str_radix(digits, radix)
            .ok()
            .filter(|_| end >= least)
    }

    /// Parses four hexadecimal digits as a UTF-16 code unit, or two of them as a surrogate pair.
    fn unit(&mut self) -> Option<u32> {
        let first = self.digits(4, 4, 16)?;
        let behind = self.rest;
        if let (0xD800..=0xDBFF, Some(rest)) = (first, behind.strip_prefix("\\u")) {
            self.rest = rest;
            if let Some(second @ 0xDC00..=0xDFFF) = self.digits(4, 4, 16) {
                return Some(0x1_0000 + ((first - 0xD800) << 10) + (second - 0xDC00));
            }
            self.rest = behind;
        }
        Some(first)
    }
}

/// Parses a number that Python allows and JSON does not: `.5`, `5.`, `+5`, `1_000`.
fn number(word: &str) -> Option<Value> {
    let (sign, digits) = match word.strip_prefix('-') {
        Some(digits) => ("-", digits),
        None => ("", word.strip_prefix('+').unwrap_or(word)),
    };
    let first = digits.trim_start_matches('.').chars().next()?;
    if !first.is_ascii_digit() {
        return None;
    }
    let zero = if digits.starts_with('.') { "0" } else { "" };
    let digits = digits.replace('_', "").replace(".e", ".0e");
    let behind = if digits.ends_with('.') { "0" } else { "" };
    serde_json::from_str(&format!("{sign}{zero}{digits}{behind}")).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn literals_are_read_as_python_reads_them() {
        for (text, expected) in [
            (r#""M\u00fcnchen \x41\101""#, json!("M\u{fc}nchen AA")),
            (
                r#""\ud83d\ude00 \U0001F600 \ud83d""#,
                json!("\u{1F600} \u{1F600} \u{FFFD}"),
            ),
            (r#"'\d \/ \\ \' \" \0'"#, json!("\\d \\/ \\ ' \" \0")),
            ("\"a\\\nb\"", json!("ab")),
            ("\"\"\"x \"y\"\nz\"\"\"", json!("x \"y\"\nz")),
            ("'''x'''", json!("x")),
            ("''", json!("")),
            (".5", json!(0.5)),
            ("-.5e1", json!(-5.0)),
            ("5.", json!(5.0)),
            ("1_000", json!(1000)),
            ("+7", json!(7)),
            ("(1, 2)", json!([1, 2])),
            ("(1,)", json!([1])),
            ("((1))", json!(1)),
            ("()", json!([])),
            ("[1, [2,],]", json!([1, [2]])),
            (
                "{'a': (1, None), 2: True,}",
                json!({"a": [1, null], "2": true}),
            ),
        ] {
            assert_eq!(literal(text), Some(expected), "{text}");
        }
        for none in [
            "",
            ".",
            "_1",
            "-",
            "x",
            "[,]",
            "[1,,]",
            "(,)",
            "1 2",
            "{[1]: 2}",
            "'",
            r"'\x4'",
            "'\\u\u{e9}'",
            "'''x''",
            "{1}",
        ] {
            assert_eq!(literal(none), None, "{none}");
        }
        assert_eq!(literal(&"(".repeat(100_000)), None);
    }

    #[test]
    fn a_comma_behind_the_last_is_none_too_many() {
        let read = calls("[f(a=\"x\", b=.5,), g(),]").unwrap();
        let read: Vec<_> = read.iter().map(|c| (&*c.name, &*c.arguments)).collect();
        assert_eq!(read, [("f", r#"{"a":"x","b":0.5}"#), ("g", "{}")]);
        for none in [
            "[]",
            "[,]",
            "[f(,)]",
            "[f(a=1,,)]",
            "[f()g()]",
            "[f(a=1 b=2)]",
        ] {
            assert_eq!(calls(none), None, "{none}");
        }
    }
}
