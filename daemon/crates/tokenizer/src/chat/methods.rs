//! Methods of Python's strings, lists and dicts that templates call.

use minijinja::value::{ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat;

/// Columns that `ljust`, `center` and the like pad to at most.
const WIDTH_MAX: usize = 1 << 16;

/// Called for a method that a value does not have.
pub(super) fn call(
    state: &mut State,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let found = match (value.kind(), value.as_str()) {
        (ValueKind::String, Some(text)) => string(text, method, args)?,
        (ValueKind::Seq, _) => list(value, method, args)?,
        (ValueKind::Map, _) if method == "copy" => {
            let () = from_args(args)?;
            Some(value.clone())
        }
        _ => None,
    };
    match found {
        Some(result) => Ok(result),
        None => pycompat::unknown_method_callback(state, value, method, args),
    }
}

fn string(text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let chars = |byte: usize| text[..byte].chars().count();
    Ok(Some(match method {
        "index" | "rindex" => {
            let (what,): (&str,) = from_args(args)?;
            let found = match method {
                "index" => text.find(what),
                _ => text.rfind(what),
            };
            let at = found.ok_or_else(|| invalid("substring not found"))?;
            Value::from(chars(at))
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "partition" => {
            let (by,): (&str,) = from_args(args)?;
            triple(match separator(by)?.and_then(|by| text.split_once(by)) {
                Some((before, after)) => [before, by, after],
                None => [text, "", ""],
            })
        }
        "rpartition" => {
            let (by,): (&str,) = from_args(args)?;
            triple(match separator(by)?.and_then(|by| text.rsplit_once(by)) {
                Some((before, after)) => [before, by, after],
                None => ["", "", text],
            })
        }
        "rsplit" => {
            let (by, most): (Option<&str>, Option<i64>) = from_args(args)?;
            Value::from(rsplit(text, by, most)?)
        }
        "ljust" | "rjust" | "center" => {
            let (width, fill): (usize, Option<char>) = from_args(args)?;
            Value::from(justify(text, method, width, fill.unwrap_or(' '))?)
        }
        "zfill" => {
            let (width,): (usize,) = from_args(args)?;
            let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
            let sign = &text[..text.len() - digits.len()];
            let width = width.saturating_sub(sign.len());
            Value::from(format!("{sign}{}", justify(digits, "rjust", width, '0')?))
        }
        "swapcase" => {
            let () = from_args(args)?;
            let mut out = String::with_capacity(text.len());
            for c in text.chars() {
                if c.is_uppercase() {
                    out.extend(c.to_lowercase());
                } else {
                    out.extend(c.to_uppercase());
                }
            }
            Value::from(out)
        }
        "casefold" => {
            let () = from_args(args)?;
            Value::from(text.to_lowercase().replace('ß', "ss"))
        }
        "expandtabs" => {
            let (size,): (Option<usize>,) = from_args(args)?;
            Value::from(expand_tabs(text, size.unwrap_or(8))?)
        }
        "encode" => {
            let (_encoding,): (Option<&str>,) = from_args(args)?;
            Value::from_bytes(text.as_bytes().to_vec())
        }
        _ => return Ok(None),
    }))
}

fn list(value: &Value, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match method {
        "copy" => {
            let () = from_args(args)?;
            value.clone()
        }
        "index" => {
            let (what,): (Value,) = from_args(args)?;
            let at = value.try_iter()?.position(|item| item == what);
            Value::from(at.ok_or_else(|| invalid("the value is not in the list"))?)
        }
        _ => return Ok(None),
    }))
}

fn invalid(message: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

fn separator(by: &str) -> Result<Option<&str>, Error> {
    if by.is_empty() {
        Err(invalid("empty separator"))
    } else {
        Ok(Some(by))
    }
}

fn triple(parts: [&str; 3]) -> Value {
    Value::from(minijinja::value::Tuple::from(parts.map(Value::from)))
}

fn rsplit(text: &str, by: Option<&str>, most: Option<i64>) -> Result<Vec<String>, Error> {
    let most = usize::try_from(most.unwrap_or(-1)).unwrap_or(usize::MAX);
    let mut parts = Vec::new();
    let mut rest = match by {
        Some(_) => text,
        None => text.trim_end(),
    };
    while parts.len() < most {
        let cut = match by {
            Some(by) => rest.rsplit_once(separator(by)?.unwrap_or(by)),
            None => rest.rsplit_once(char::is_whitespace),
        };
        let Some((before, after)) = cut else {
            break;
        };
        parts.push(after.to_owned());
        rest = match by {
            Some(_) => before,
            None => before.trim_end(),
        };
    }
    if by.is_some() || !rest.is_empty() {
        parts.push(rest.to_owned());
    }
    if by.is_none() {
        parts.retain(|part| !part.is_empty());
    }
    parts.reverse();
    Ok(parts)
}

fn justify(text: &str, how: &str, width: usize, fill: char) -> Result<String, Error> {
    if width > WIDTH_MAX {
        return Err(invalid("the width is above 65536"));
    }
    let pad = width.saturating_sub(text.chars().count());
    let (left, right) = match how {
        "ljust" => (0, pad),
        "rjust" => (pad, 0),
        // As CPython: the odd column goes left where the width is odd.
        _ => {
            let left = pad / 2 + (pad & width & 1);
            (left, pad - left)
        }
    };
    let pad = |n: usize| std::iter::repeat_n(fill, n);
    Ok(pad(left).chain(text.chars()).chain(pad(right)).collect())
}

fn expand_tabs(text: &str, size: usize) -> Result<String, Error> {
    if size > WIDTH_MAX {
        return Err(invalid("the width is above 65536"));
    }
    let mut out = String::with_capacity(text.len());
    let mut column = 0;
    for c in text.chars() {
        match c {
            '\t' => {
                let spaces = if size == 0 { 0 } else { size - column % size };
                out.extend(std::iter::repeat_n(' ', spaces));
                column += spaces;
            }
            '\n' | '\r' => {
                out.push(c);
                column = 0;
            }
            c => {
                out.push(c);
                column += 1;
            }
        }
    }
    Ok(out)
}
