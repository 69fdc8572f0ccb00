//! `pprint`: Python's `pprint.pformat`.

use crate::compare::{LEVELS_MAX, sort_by_keys};
use crate::fault::{Fault, R};
use crate::repr;
use crate::value::{Dict, Value};

/// Columns of a line.
const WIDTH: usize = 80;

/// The value with line ends between what does not fit a line.
pub(super) fn pretty(value: &Value) -> R<String> {
    let mut out = String::new();
    write(&sorted(value, 0)?, 0, 0, &mut out)?;
    Ok(out)
}

/// The value with its dicts sorted by keys.
fn sorted(value: &Value, level: usize) -> R<Value> {
    if level > LEVELS_MAX {
        return Err(Fault::Depth);
    }
    let all = |items: &[Value]| -> R<Vec<Value>> {
        items.iter().map(|item| sorted(item, level + 1)).collect()
    };
    Ok(match value {
        Value::List(list) => Value::list(all(&list.borrow())?),
        Value::Tuple(items) => Value::tuple(all(items)?),
        Value::Dict(dict) => {
            let members = dict.borrow();
            let members = members
                .iter()
                .map(|(key, value)| (key.clone(), value.clone()));
            let mut members: Vec<_> = members.collect();
            // Keys without an order stay in that of the dict.
            let mut by_key = members.clone();
            if sort_by_keys(&mut by_key, false).is_ok() {
                members = by_key;
            }
            let mut sorted_dict = Dict::default();
            for (key, member) in members {
                sorted_dict.insert(key, sorted(&member, level + 1)?)?;
            }
            Value::dict(sorted_dict)
        }
        other => other.clone(),
    })
}

/// Writes a value from column `indent` on; `allowance` columns stand behind it.
fn write(value: &Value, indent: usize, allowance: usize, out: &mut String) -> R<()> {
    let line = repr::repr(value)?;
    let fits = indent + line.chars().count() + allowance <= WIDTH;
    if fits {
        out.push_str(&line);
        return Ok(());
    }
    let spaces = |n: usize| " ".repeat(n);
    match value {
        Value::List(_) | Value::Tuple(_) => {
            let items = value.items()?;
            let (open, close) = match (value, items.len()) {
                (Value::List(_), _) => ('[', "]"),
                (_, 1) => ('(', ",)"),
                _ => ('(', ")"),
            };
            out.push(open);
            for (at, item) in items.iter().enumerate() {
                if at > 0 {
                    out.push_str(",\n");
                    out.push_str(&spaces(indent + 1));
                }
                let is_last = at + 1 == items.len();
                let behind = if is_last { allowance + close.len() } else { 1 };
                write(item, indent + 1, behind, out)?;
            }
            out.push_str(close);
        }
        Value::Dict(dict) => {
            let dict = dict.borrow();
            out.push('{');
            for (at, (key, member)) in dict.iter().enumerate() {
                if at > 0 {
                    out.push_str(",\n");
                    out.push_str(&spaces(indent + 1));
                }
                let key = repr::repr(key)?;
                out.push_str(&key);
                out.push_str(": ");
                let column = indent + 1 + key.chars().count() + 2;
                let behind = if at + 1 == dict.len() {
                    allowance + 1
                } else {
                    1
                };
                write(member, column, behind, out)?;
            }
            out.push('}');
        }
        Value::Str(text) => write_text(&text.text, indent, allowance, out),
        _ => out.push_str(&line),
    }
    Ok(())
}

/// A long text, in pieces that stand below each other.
fn write_text(text: &str, indent: usize, allowance: usize, out: &mut String) {
    let quoted = |text: &str| {
        let mut shown = String::new();
        repr::push_quoted(text, &mut shown);
        shown
    };
    // At the top pieces stand in parentheses, which take a column.
    let (indent, allowance) = match indent {
        0 => (1, allowance + 1),
        _ => (indent, allowance),
    };
    let is_top = indent == 1 && out.is_empty();
    let mut pieces: Vec<String> = Vec::new();
    let lines: Vec<&str> = text.split_inclusive('\n').collect();
    for (at, line) in lines.iter().enumerate() {
        let is_last_line = at + 1 == lines.len();
        let whole = quoted(line);
        let most = WIDTH.saturating_sub(indent + if is_last_line { allowance } else { 0 });
        if whole.chars().count() <= most {
            pieces.push(whole);
            continue;
        }
        let mut current = String::new();
        let words = words(line);
        for (n, word) in words.iter().enumerate() {
            let is_last = is_last_line && n + 1 == words.len();
            let most = WIDTH.saturating_sub(indent + if is_last { allowance } else { 0 });
            let candidate = format!("{current}{word}");
            if quoted(&candidate).chars().count() > most {
                if !current.is_empty() {
                    pieces.push(quoted(&current));
                }
                current = (*word).to_owned();
            } else {
                current = candidate;
            }
        }
        if !current.is_empty() {
            pieces.push(quoted(&current));
        }
    }
    if pieces.len() == 1 {
        out.push_str(&quoted(text));
        return;
    }
    let between = format!("\n{}", " ".repeat(indent));
    let joined = pieces.join(&between);
    match is_top {
        true => out.push_str(&format!("({joined})")),
        false => out.push_str(&joined),
    }
}

/// Words with the white space behind them.
fn words(line: &str) -> Vec<&str> {
    let mut words = Vec::new();
    let mut rest = line;
    while !rest.is_empty() {
        let word = rest.find(crate::lexer::is_space).unwrap_or(rest.len());
        let blank = rest[word..].find(|c| !crate::lexer::is_space(c));
        let len = blank.map_or(rest.len(), |blank| word + blank);
        words.push(&rest[..len]);
        rest = &rest[len..];
    }
    words
}
