//! HTML and URLs: escapes, tags, and links.

use crate::Host;
use crate::fault::{R, fail};
use crate::lexer::is_space;
use crate::repr;
use crate::value::Value;

/// The text with escapes, in the spellings of Python's MarkupSafe. A symbol that stands for another
/// character is escaped as that.
pub(crate) fn escaped(host: &Host<'_>, text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match (host.meant)(c).flatten().unwrap_or(c) {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&#34;"),
            '\'' => out.push_str("&#39;"),
            _ => out.push(c),
        }
    }
    out
}

/// The filter `escape`: what is safe stays.
pub(crate) fn escape(host: &Host<'_>, value: &Value) -> R<Value> {
    Ok(match value {
        Value::Str(text) if text.safe => value.clone(),
        other => Value::safe(escaped(host, &repr::text(other)?)),
    })
}

/// The text without comments and tags, its white space made single, its entities resolved.
pub(crate) fn strip_tags(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, comment)) = rest.split_once("<!--") {
        let Some(end) = comment.find("-->") else {
            break;
        };
        out.push_str(before);
        rest = &comment[end + 3..];
    }
    out.push_str(rest);
    let mut plain = String::with_capacity(out.len());
    let mut rest = out.as_str();
    while let Some(at) = rest.find('<') {
        let Some(end) = rest[at..].find('>') else {
            break;
        };
        plain.push_str(&rest[..at]);
        rest = &rest[at + end + 1..];
    }
    plain.push_str(rest);
    let words: Vec<&str> = plain
        .split(is_space)
        .filter(|word| !word.is_empty())
        .collect();
    unescaped(&words.join(" "))
}

/// Entities by the names that texts have.
const ENTITIES: [(&str, &str); 12] = [
    ("amp", "&"),
    ("lt", "<"),
    ("gt", ">"),
    ("quot", "\""),
    ("apos", "'"),
    ("nbsp", "\u{a0}"),
    ("copy", "©"),
    ("reg", "®"),
    ("hellip", "…"),
    ("mdash", "—"),
    ("ndash", "–"),
    ("euro", "€"),
];

fn unescaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('&') {
        out.push_str(&rest[..at]);
        let behind = &rest[at + 1..];
        let end = behind.find(';').filter(|end| *end <= 32);
        let meant = end.and_then(|end| entity(&behind[..end]));
        match (meant, end) {
            (Some(meant), Some(end)) => {
                out.push_str(&meant);
                rest = &behind[end + 1..];
            }
            _ => {
                out.push('&');
                rest = behind;
            }
        }
    }
    out.push_str(rest);
    out
}

fn entity(name: &str) -> Option<String> {
    let Some(number) = name.strip_prefix('#') else {
        let found = ENTITIES.iter().find(|(known, _)| *known == name);
        return found.map(|(_, meant)| (*meant).to_owned());
    };
    let code = match number.strip_prefix(['x', 'X']) {
        Some(hex) => u32::from_str_radix(hex, 16).ok()?,
        None => number.parse().ok()?,
    };
    char::from_u32(code).map(String::from)
}

/// The filter `urlencode`.
///
/// # Errors
///
/// If the value is neither a text nor pairs.
pub(crate) fn url_encode(value: &Value) -> R<Value> {
    let pairs = match value {
        Value::Dict(dict) => {
            let dict = dict.borrow();
            let pairs = dict.iter().map(|(key, value)| (key.clone(), value.clone()));
            pairs.collect::<Vec<_>>()
        }
        Value::List(_) | Value::Tuple(_) | Value::Iter(_) | Value::View(..) => {
            let mut pairs = Vec::new();
            for pair in value.items()? {
                match pair.items()?.as_slice() {
                    [key, value] => pairs.push((key.clone(), value.clone())),
                    _ => return fail("urlencode needs pairs"),
                }
            }
            pairs
        }
        other => return Ok(Value::from(quoted(&repr::text(other)?, true))),
    };
    let each = pairs.iter().map(|(key, value)| -> R<String> {
        let plus = |value: &Value| -> R<String> {
            Ok(quoted(&repr::text(value)?, false).replace("%20", "+"))
        };
        Ok(format!("{}={}", plus(key)?, plus(value)?))
    });
    Ok(Value::from(each.collect::<R<Vec<_>>>()?.join("&")))
}

fn quoted(text: &str, keeps_slash: bool) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'.' | b'-' | b'~' => {
                out.push(char::from(byte));
            }
            b'/' if keeps_slash => out.push('/'),
            byte => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

/// The filter `xmlattr`.
///
/// # Errors
///
/// If the value is no dict, or a key is none of an attribute.
pub(crate) fn attributes(host: &Host<'_>, value: &Value, spaced: bool) -> R<String> {
    let Value::Dict(dict) = value else {
        return fail(format!(
            "'{}' object has no attribute 'items'",
            value.type_name()
        ));
    };
    let mut out = Vec::new();
    for (key, value) in dict.borrow().iter() {
        if value.is_none() || value.is_undefined() {
            continue;
        }
        let Value::Str(key) = key else {
            let name = key.type_name();
            return fail(format!("the name of an attribute is a string, not {name}"));
        };
        let key = &*key.text;
        if key.contains(|c: char| c.is_ascii_whitespace() || matches!(c, '/' | '>' | '=' | '\u{b}'))
        {
            return fail(format!("Invalid character in attribute name: '{key}'"));
        }
        let safe = |value: &Value| -> R<String> {
            match escape(host, value)? {
                Value::Str(text) => Ok(text.text.to_string()),
                _ => Ok(String::new()),
            }
        };
        let key = escaped(host, key);
        out.push(format!("{key}=\"{}\"", safe(value)?));
    }
    let joined = out.join(" ");
    Ok(match spaced && !joined.is_empty() {
        true => format!(" {joined}"),
        false => joined,
    })
}
