//! Texts as bytes, and tables from character to character.

use std::rc::Rc;

use crate::args::{self, Args};
use crate::fault::{Fault, R, fail};
use crate::operators::sized;
use crate::value::{Dict, Value};

/// `encode`.
pub(super) fn encode(text: &str, args: Args) -> R<Value> {
    let [encoding, errors] = args.bind("encode", ["encoding", "errors"], 0)?;
    let encoding = encoding
        .as_ref()
        .map_or(Ok("utf-8"), args::text)?
        .to_lowercase();
    let errors = errors.as_ref().map_or(Ok("strict"), args::text)?.to_owned();
    let most = match encoding.replace('_', "-").as_str() {
        "utf-8" | "utf8" => return Ok(Value::Bytes(text.as_bytes().into())),
        "ascii" | "us-ascii" => 0x7f,
        "latin-1" | "latin1" | "iso-8859-1" => 0xff,
        _ => return fail(format!("unknown encoding: {encoding}")),
    };
    let mut bytes = Vec::with_capacity(text.len());
    for c in text.chars() {
        match (u32::from(c), errors.as_str()) {
            (code, _) if code <= most => bytes.push(code as u8),
            (_, "ignore") => {}
            (_, "replace") => bytes.push(b'?'),
            (code, "backslashreplace") => {
                let escape = match code {
                    0..=0xff => format!("\\x{code:02x}"),
                    0x100..=0xffff => format!("\\u{code:04x}"),
                    _ => format!("\\U{code:08x}"),
                };
                bytes.extend(escape.into_bytes());
            }
            (code, "xmlcharrefreplace") => bytes.extend(format!("&#{code};").into_bytes()),
            _ => return fail(format!("'{encoding}' codec can't encode character {c:?}")),
        }
    }
    Ok(Value::Bytes(bytes.into()))
}

/// A method of bytes.
pub(super) fn of_bytes(bytes: &Rc<[u8]>, name: &str, args: Args) -> R<Value> {
    if name == "hex" {
        args.none(name)?;
        let hex = bytes.iter().map(|byte| format!("{byte:02x}"));
        return Ok(Value::from(hex.collect::<String>()));
    }
    let [_, errors] = args.bind("decode", ["encoding", "errors"], 0)?;
    let errors = errors.as_ref().map_or(Ok("strict"), args::text)?.to_owned();
    match (std::str::from_utf8(bytes), errors.as_str()) {
        (Ok(text), _) => Ok(Value::text(text)),
        (Err(_), "ignore") => Ok(Value::from(
            String::from_utf8_lossy(bytes).replace(char::REPLACEMENT_CHARACTER, ""),
        )),
        (Err(_), "replace") => Ok(Value::from(String::from_utf8_lossy(bytes).into_owned())),
        (Err(error), _) => fail(format!("'utf-8' codec can't decode bytes: {error}")),
    }
}

/// A table for `translate`.
pub(super) fn maketrans(args: Args) -> R<Value> {
    let given = args.only("maketrans", 1, 3)?;
    let mut table = Dict::default();
    let code = |c: char| Value::Int(i128::from(u32::from(c)));
    if given.len() == 1 {
        let Value::Dict(source) = &given[0] else {
            return fail("if you give only one argument to maketrans it must be a dict");
        };
        for (key, value) in source.borrow().iter() {
            let key = match key {
                Value::Str(text) => match text.text.chars().next() {
                    Some(c) if text.text.chars().count() == 1 => code(c),
                    _ => return fail("string keys in translate table must be of length 1"),
                },
                other => other.clone(),
            };
            table.insert(key, value.clone())?;
        }
        return Ok(Value::dict(table));
    }
    let (from, to) = (args::text(&given[0])?, args::text(&given[1])?);
    if from.chars().count() != to.chars().count() {
        return fail("the first two maketrans arguments must have equal length");
    }
    for (from, to) in from.chars().zip(to.chars()) {
        table.insert(code(from), code(to))?;
    }
    if let Some(gone) = given.get(2) {
        for c in args::text(gone)?.chars() {
            table.insert(code(c), Value::None)?;
        }
    }
    Ok(Value::dict(table))
}

/// `translate`.
pub(super) fn translate(text: &str, table: &Value) -> R<String> {
    // What has no table for a character leaves it as it is.
    let Value::Dict(table) = table else {
        return Ok(text.to_owned());
    };
    let table = table.borrow();
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match table.get(&Value::Int(u32::from(c).into()))? {
            None => out.push(c),
            Some(Value::None) => {}
            Some(Value::Str(text)) => out.push_str(&text.text),
            Some(other) => {
                let code = u32::try_from(args::int(&other)?)
                    .ok()
                    .and_then(char::from_u32);
                out.push(
                    code.ok_or_else(|| Fault::new("character mapping must be in range(0x110000)"))?,
                );
            }
        }
        sized(out.len())?;
    }
    Ok(out)
}
