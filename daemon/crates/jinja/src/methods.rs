//! Methods of Python's types.

mod codes;
mod containers;
mod numbers;
mod text;

use crate::args::Args;
use crate::fault::{R, fail};
use crate::run::Run;
use crate::value::Value;

pub(crate) use text::{capitalize, center, is_word, split_lines, strip};

const STR: [&str; 47] = [
    "capitalize",
    "casefold",
    "center",
    "count",
    "encode",
    "endswith",
    "expandtabs",
    "find",
    "format",
    "format_map",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "maketrans",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "swapcase",
    "title",
    "translate",
    "upper",
    "zfill",
];
const LIST: [&str; 11] = [
    "append", "clear", "copy", "count", "extend", "index", "insert", "pop", "remove", "reverse",
    "sort",
];
const DICT: [&str; 11] = [
    "clear",
    "copy",
    "fromkeys",
    "get",
    "items",
    "keys",
    "pop",
    "popitem",
    "setdefault",
    "update",
    "values",
];
const INT: [&str; 7] = [
    "as_integer_ratio",
    "bit_count",
    "bit_length",
    "conjugate",
    "from_bytes",
    "is_integer",
    "to_bytes",
];
const FLOAT: [&str; 5] = [
    "as_integer_ratio",
    "conjugate",
    "fromhex",
    "hex",
    "is_integer",
];

/// Whether a value has a method of this name.
pub(crate) fn has(value: &Value, name: &str) -> bool {
    let known: &[&str] = match value {
        Value::Str(_) => &STR,
        Value::Bytes(_) => &["decode", "hex"],
        Value::List(_) => &LIST,
        Value::Tuple(_) | Value::Group(_) | Value::Range(_) => &["count", "index"],
        Value::Dict(_) => &DICT,
        Value::View(..) => &["isdisjoint"],
        Value::Int(_) | Value::Bool(_) => &INT,
        Value::Float(_) => &FLOAT,
        Value::Cycler(_) => &["next", "reset"],
        _ => &[],
    };
    known.contains(&name)
}

/// Calls a method.
///
/// # Errors
///
/// If the value has none of this name, or it cannot be called with these arguments.
pub(crate) fn call(run: &Run<'_>, value: &Value, name: &str, args: Args) -> R<Value> {
    match value {
        Value::Str(of) => text::call(run, of, name, args),
        Value::Bytes(bytes) => codes::of_bytes(bytes, name, args),
        Value::List(list) => containers::list(list, name, args),
        Value::Tuple(_) | Value::Group(_) | Value::Range(_) => {
            containers::sequence(&value.items()?, value.type_name(), name, args)
        }
        Value::Dict(dict) => containers::dict(dict, name, args),
        Value::View(..) => containers::view(value, args),
        Value::Int(_) | Value::Bool(_) => numbers::int(value.as_int().unwrap_or(0), name, args),
        Value::Float(x) => numbers::float(*x, name, args),
        Value::Cycler(it) => {
            args.none(name)?;
            match name {
                "next" => Ok(it.next()),
                _ => {
                    it.at.set(0);
                    Ok(Value::None)
                }
            }
        }
        other => fail(format!(
            "'{}' object has no attribute '{name}'",
            other.type_name()
        )),
    }
}
