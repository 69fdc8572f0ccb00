//! Calls of tools as models write them, as a grammar in Lark.
//!
//! A mark that is a control token of the vocabulary is that token, and no text.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use crate::schema::prepared::prepared;
use crate::schema::rewrite::rewritten;
use crate::size::{Size, check_size, refused};
use crate::vocabulary::Vocabulary;
use crate::{Error, limits};

/// A part of how something is written.
#[derive(Debug, Clone, PartialEq)]
pub enum Piece {
    /// A text as it stands.
    Text(String),
    /// A text that may have names of control tokens, which stand for these.
    Mark(String),
    /// A little white space, or none.
    Space,
    /// A text that a regular expression describes, not an empty one.
    Pattern(&'static str),
    /// JSON that a schema describes.
    Json(Value),
    /// A value that a schema describes, in a notation other than JSON.
    Value(Value, Notation),
    /// Arguments by name, as Python has them: `a=1, b="x"`.
    Arguments(Value),
    /// Any text up to and with this one, which it does not have before.
    Until(String),
    /// A piece with what a refusal of it begins with.
    Named(String, Box<Piece>),
    /// These pieces in sequence.
    All(Vec<Piece>),
    /// One of these pieces.
    Any(Vec<Piece>),
    /// This piece, or nothing.
    Optional(Box<Piece>),
    /// One or more of the first piece, separated by the second.
    Several(Box<Piece>, Box<Piece>),
}

impl Piece {
    /// Adds the schemas below this piece, each with the name of the nearest [`Piece::Named`] above
    /// it.
    pub(crate) fn named_schemas<'p>(
        &'p self,
        name: Option<&'p str>,
        found: &mut Vec<(&'p str, &'p Value)>,
    ) {
        match self {
            Piece::Named(name, piece) => piece.named_schemas(Some(name), found),
            Piece::Json(schema) | Piece::Value(schema, _) | Piece::Arguments(schema) => {
                found.extend(name.map(|name| (name, schema)));
            }
            Piece::All(pieces) | Piece::Any(pieces) => pieces
                .iter()
                .for_each(|piece| piece.named_schemas(name, found)),
            Piece::Optional(piece) => piece.named_schemas(name, found),
            Piece::Several(piece, between) => {
                piece.named_schemas(name, found);
                between.named_schemas(name, found);
            }
            Piece::Text(_)
            | Piece::Mark(_)
            | Piece::Space
            | Piece::Pattern(_)
            | Piece::Until(_) => {}
        }
    }
}

/// A notation of values that is not JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Notation {
    /// Python's: `True`, `None`, and texts as JSON has them.
    Python,
    /// Gemma's: keys without quotation marks, and texts between `<|"|>`.
    Gemma,
}

/// What stands around a text of Gemma's.
const QUOTE: &str = "<|\"|>";

/// The grammar of a piece, for a vocabulary.
pub(crate) fn lark(piece: &Piece, vocabulary: &Vocabulary) -> Result<String, Error> {
    let mut writer = Writer {
        vocabulary,
        rules: String::new(),
        n_rules: 0,
        size: Size::default(),
        any: HashMap::new(),
    };
    let start = writer.piece(piece)?;
    let text = format!(
        "start: {start}\nSPACE: /[ \\t\\r\\n]{{1,8}}/\n{}",
        writer.rules
    );
    check_size(&text, limits::CALLS_MAX_BYTES)?;
    Ok(text)
}

/// A text as Lark has it.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

struct Writer<'v> {
    vocabulary: &'v Vocabulary,
    rules: String,
    n_rules: usize,
    size: Size,
    /// The rule of any value, by notation.
    any: HashMap<Notation, String>,
}

/// The schemas that a rewritten one refers to, with the rules of those that were asked for.
struct Definitions<'d> {
    all: Option<&'d Map<String, Value>>,
    rules: HashMap<String, String>,
}

/// How the keys of members are written, with what stands behind them.
struct Keys<'k>(&'k dyn Fn(&str) -> String);

impl Writer<'_> {
    fn name(&mut self) -> String {
        self.n_rules += 1;
        format!("r{}", self.n_rules)
    }

    /// A rule of its own.
    fn rule(&mut self, attributes: &str, body: &str) -> String {
        let name = self.name();
        self.rules
            .push_str(&format!("{name}{attributes}: {body}\n"));
        name
    }

    fn piece(&mut self, piece: &Piece) -> Result<String, Error> {
        Ok(match piece {
            Piece::Text(text) => quoted(text),
            Piece::Mark(text) => self.mark(text),
            Piece::Space => "SPACE?".to_owned(),
            Piece::Pattern(pattern) => self.rule("", &format!("/{pattern}/")),
            Piece::Json(schema) => {
                let schema = prepared(schema, &mut self.size)?;
                self.rule("", &format!("%json {schema}"))
            }
            Piece::Value(schema, notation) => {
                self.size.add(schema, 0)?;
                let schema = rewritten(schema)?;
                let all = schema.get("$defs").and_then(Value::as_object);
                let mut definitions = Definitions {
                    all,
                    rules: HashMap::new(),
                };
                self.value(&schema, *notation, &mut definitions)?
            }
            Piece::Arguments(schema) => {
                self.size.add(schema, 0)?;
                let schema = rewritten(schema)?;
                let all = schema.get("$defs").and_then(Value::as_object);
                let mut definitions = Definitions {
                    all,
                    rules: HashMap::new(),
                };
                let none = Map::new();
                let members = schema.as_object().unwrap_or(&none);
                if members
                    .get("properties")
                    .is_none_or(|properties| *properties == json!({}))
                {
                    return Ok(quoted(""));
                }
                let key = |key: &str| quoted(&format!("{key}="));
                let key = Keys(&key);
                self.members(members, Notation::Python, &mut definitions, key)?
            }
            Piece::Until(end) => self.until(end),
            Piece::Named(name, piece) => self.piece(piece).map_err(|error| match error {
                Error::Grammar { reason } => refused(format!("{name}: {reason}")),
                other => other,
            })?,
            Piece::All(pieces) => {
                let all = pieces.iter().map(|piece| self.piece(piece));
                all.collect::<Result<Vec<_>, _>>()?.join(" ")
            }
            Piece::Any(pieces) => {
                let any = pieces.iter().map(|piece| self.piece(piece));
                let any = any.collect::<Result<Vec<_>, _>>()?.join(" | ");
                self.rule("", &any)
            }
            Piece::Optional(piece) => {
                let body = self.piece(piece)?;
                format!("({body})?")
            }
            Piece::Several(piece, between) => {
                let body = self.piece(piece)?;
                let one = self.rule("", &body);
                let between = self.piece(between)?;
                format!("{one} ({between} {one})*")
            }
        })
    }

    /// A text whose control tokens are these.
    fn mark(&self, text: &str) -> String {
        let tokenizer = &self.vocabulary.tokenizer;
        let ids = tokenizer.encode(text, false, true).unwrap_or_default();
        if !ids.iter().any(|&id| tokenizer.is_special(id)) {
            return quoted(text);
        }
        let mut parts = Vec::new();
        let mut rest = text;
        for id in ids.into_iter().filter(|&id| tokenizer.is_special(id)) {
            let name = tokenizer.token_bytes(id).unwrap_or_default();
            let name = std::str::from_utf8(name).unwrap_or_default();
            let Some((before, behind)) = rest.split_once(name).filter(|_| !name.is_empty()) else {
                continue;
            };
            parts.extend((!before.is_empty()).then(|| quoted(before)));
            parts.push(format!("<[{id}]>"));
            rest = behind;
        }
        parts.extend((!rest.is_empty()).then(|| quoted(rest)));
        parts.join(" ")
    }

    fn until(&mut self, end: &str) -> String {
        let mark = self.mark(end);
        match mark.starts_with("<[") {
            true => {
                let text = self.rule("", "/(?s:.+)/");
                format!("{text}? {mark}")
            }
            false => self.rule(&format!("[suffix={}]", quoted(end)), "/(?s:.*)/"),
        }
    }

    /// A value of a rewritten schema.
    fn value(
        &mut self,
        schema: &Value,
        notation: Notation,
        definitions: &mut Definitions<'_>,
    ) -> Result<String, Error> {
        let Some(members) = schema
            .as_object()
            .filter(|members| members.keys().any(|key| key != "$defs"))
        else {
            return self.any(notation);
        };
        let list = |key: &str| members.get(key).and_then(Value::as_array);
        if let Some(one) = members.get("const") {
            return Ok(self.literal(one, notation));
        }
        if let Some(values) = list("enum") {
            let any: Vec<_> = values
                .iter()
                .map(|one| self.literal(one, notation))
                .collect();
            return Ok(self.rule("", &any.join(" | ")));
        }
        if let Some(reference) = members.get("$ref").and_then(Value::as_str) {
            return self.reference(reference, notation, definitions);
        }
        if let Some(branches) = list("anyOf").or_else(|| list("oneOf")) {
            let any = branches
                .iter()
                .map(|one| self.value(one, notation, definitions));
            let any = any.collect::<Result<Vec<_>, _>>()?.join(" | ");
            return Ok(self.rule("", &any));
        }
        let types = members.get("type").map(|types| match types {
            Value::Array(list) => list.iter().filter_map(Value::as_str).collect(),
            one => one.as_str().into_iter().collect::<Vec<_>>(),
        });
        let Some(types) = types else {
            return self.any(notation);
        };
        let mut any = Vec::new();
        for name in types {
            any.push(match (name, notation) {
                ("null", Notation::Python) => quoted("None"),
                ("null", Notation::Gemma) => quoted("null"),
                ("boolean", Notation::Python) => "(\"True\" | \"False\")".to_owned(),
                ("boolean", Notation::Gemma) => "(\"true\" | \"false\")".to_owned(),
                ("string", Notation::Gemma) => {
                    let quote = self.mark(QUOTE);
                    format!("{quote} {}", self.until(QUOTE))
                }
                ("array", _) => self.array(members, notation, definitions)?,
                ("object", _) => self.object(members, notation, definitions)?,
                (name, _) => {
                    let mut members = members.clone();
                    members.insert("type".to_owned(), name.into());
                    members.shift_remove("$defs");
                    self.rule("", &format!("%json {}", Value::from(members)))
                }
            });
        }
        Ok(self.rule("", &any.join(" | ")))
    }

    fn reference(
        &mut self,
        reference: &str,
        notation: Notation,
        definitions: &mut Definitions<'_>,
    ) -> Result<String, Error> {
        if let Some(rule) = definitions.rules.get(reference) {
            return Ok(rule.clone());
        }
        let name = self.name();
        definitions.rules.insert(reference.to_owned(), name.clone());
        let known = reference.strip_prefix("#/$defs/");
        let target = known.and_then(|known| definitions.all?.get(known)).cloned();
        let body = self.value(&target.unwrap_or(true.into()), notation, definitions)?;
        self.rules.push_str(&format!("{name}: {body}\n"));
        Ok(name)
    }

    /// Any value: its rule refers to itself.
    fn any(&mut self, notation: Notation) -> Result<String, Error> {
        if let Some(rule) = self.any.get(&notation) {
            return Ok(rule.clone());
        }
        let name = self.name();
        self.any.insert(notation, name.clone());
        let anything = json!({"type": ["null", "boolean", "number", "string", "array", "object"]});
        let mut none = Definitions {
            all: None,
            rules: HashMap::new(),
        };
        let body = self.value(&anything, notation, &mut none)?;
        self.rules.push_str(&format!("{name}: {body}\n"));
        Ok(name)
    }

    fn literal(&mut self, value: &Value, notation: Notation) -> String {
        match (value, notation) {
            (Value::Null, Notation::Python) => quoted("None"),
            (Value::Bool(true), Notation::Python) => quoted("True"),
            (Value::Bool(false), Notation::Python) => quoted("False"),
            (Value::String(text), Notation::Gemma) => {
                let quote = self.mark(QUOTE);
                format!("{quote} {} {quote}", quoted(text))
            }
            (Value::Array(list), _) => {
                let items: Vec<_> = list.iter().map(|one| self.literal(one, notation)).collect();
                format!("\"[\" {} \"]\"", items.join(" \",\" SPACE? "))
            }
            (Value::Object(members), _) => {
                let each = members.iter();
                let each = each.map(|(key, one)| {
                    format!("{} {}", key_of(key, notation), self.literal(one, notation))
                });
                let each: Vec<_> = each.collect();
                format!("\"{{\" {} \"}}\"", each.join(" \",\" SPACE? "))
            }
            (other, _) => quoted(&other.to_string()),
        }
    }

    fn array(
        &mut self,
        members: &Map<String, Value>,
        notation: Notation,
        definitions: &mut Definitions<'_>,
    ) -> Result<String, Error> {
        let item = match members.get("items") {
            Some(items) => self.value(items, notation, definitions)?,
            None => self.any(notation)?,
        };
        let item = self.rule("", &item);
        let count = |key: &str| members.get(key).and_then(Value::as_u64);
        let least = count("minItems").unwrap_or(0);
        let more = match (least.saturating_sub(1), count("maxItems")) {
            (_, Some(0)) => return Ok(quoted("[]")),
            (least, Some(most)) => format!("{{{least},{}}}", (most - 1).max(least)),
            (0, None) => "*".to_owned(),
            (least, None) => format!("{{{least},}}"),
        };
        let items = format!("{item} (\",\" SPACE? {item}){more}");
        Ok(match least {
            0 => self.rule("", &format!("\"[\" ({items})? \"]\"")),
            _ => self.rule("", &format!("\"[\" {items} \"]\"")),
        })
    }

    fn object(
        &mut self,
        members: &Map<String, Value>,
        notation: Notation,
        definitions: &mut Definitions<'_>,
    ) -> Result<String, Error> {
        let key = |key: &str| key_of(key, notation);
        let body = self.members(members, notation, definitions, Keys(&key))?;
        Ok(self.rule("", &format!("\"{{\" SPACE? {body} SPACE? \"}}\"")))
    }

    /// The declared members of an object in their order, with commas between; any, where none are
    /// declared and others may be.
    fn members(
        &mut self,
        members: &Map<String, Value>,
        notation: Notation,
        definitions: &mut Definitions<'_>,
        key: Keys<'_>,
    ) -> Result<String, Error> {
        let none = Map::new();
        let properties = members
            .get("properties")
            .and_then(Value::as_object)
            .unwrap_or(&none);
        let required: Vec<&Value> = members
            .get("required")
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .collect();
        if properties.is_empty() {
            let others = members
                .get("additionalProperties")
                .unwrap_or(&Value::Bool(true));
            if *others == false {
                return Ok("\"\"".to_owned());
            }
            let value = self.value(others, notation, definitions)?;
            let name = self.rule("", "/[A-Za-z_][A-Za-z0-9_]{0,63}/");
            let pair = match notation {
                Notation::Gemma => format!("{name} \":\" {value}"),
                Notation::Python => format!("\"\\\"\" {name} \"\\\":\" SPACE? {value}"),
            };
            let pair = self.rule("", &pair);
            return Ok(format!("({pair} (\",\" SPACE? {pair})*)?"));
        }
        // From the last one on: what may follow where none has come, and where some have.
        let (mut first, mut rest) = ("\"\"".to_owned(), "\"\"".to_owned());
        for (name, schema) in properties
            .iter()
            .rev()
            .filter(|(_, schema)| **schema != false)
        {
            let value = self.value(schema, notation, definitions)?;
            let pair = self.rule("", &format!("{} {value}", (key.0)(name)));
            let is_needed = required.iter().any(|one| *one == name);
            let with_first = format!("{pair} {rest}");
            let with_rest = format!("\",\" SPACE? {pair} {rest}");
            (first, rest) = match is_needed {
                true => (self.rule("", &with_first), self.rule("", &with_rest)),
                false => (
                    self.rule("", &format!("{with_first} | {first}")),
                    self.rule("", &format!("{with_rest} | {rest}")),
                ),
            };
        }
        Ok(first)
    }
}

/// A key and what stands behind it.
fn key_of(key: &str, notation: Notation) -> String {
    match notation {
        Notation::Gemma => quoted(&format!("{key}:")),
        Notation::Python => format!("{} SPACE?", quoted(&format!("{}:", quoted(key)))),
    }
}
