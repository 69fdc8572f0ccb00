//! Filters of texts.

use std::borrow::Cow;

use crate::args::{self, Args};
use crate::fault::{R, fail};
use crate::methods;
use crate::operators::sized;
use crate::repr;
use crate::value::{Text, Value};

/// Applies a filter of texts.
pub(super) fn apply(name: &str, value: &Value, args: Args) -> R<Value> {
    let text = repr::text(value)?;
    let made = match name {
        "capitalize" | "lower" | "upper" | "title" => {
            args.none(name)?;
            match name {
                "capitalize" => methods::capitalize(&text),
                "lower" => text.to_lowercase(),
                "upper" => text.to_uppercase(),
                _ => title(&text),
            }
        }
        "center" => {
            let [width] = args.bind(name, ["width"], 0)?;
            methods::center(&text, width.as_ref().map_or(Ok(80), args::int)?, ' ')?
        }
        "trim" => {
            let [chars] = args.bind(name, ["chars"], 0)?;
            let chars = args::some(chars);
            let chars = chars.as_ref().map(args::text).transpose()?;
            methods::strip(&text, chars, true, true).to_owned()
        }
        "replace" => {
            let [old, new, count] = args.bind(name, ["old", "new", "count"], 2)?;
            let (old, new) = (old.unwrap_or(Value::None), new.unwrap_or(Value::None));
            let (old, new) = (repr::text(&old)?, repr::text(&new)?);
            let count = args::some(count);
            let count = count.as_ref().map_or(Ok(-1), args::int)?;
            let most = usize::try_from(count).unwrap_or(usize::MAX);
            let found = match old.is_empty() {
                true => text.len() + 1,
                false => text.matches(&*old).take(most).count(),
            };
            sized(text.len().saturating_add(found.saturating_mul(new.len())))?;
            text.replacen(&*old, &new, most)
        }
        "indent" => indent(value, args)?,
        "truncate" => match truncate(value, args)? {
            Some(text) => text,
            None => return Ok(value.clone()),
        },
        _ => {
            args.none(name)?;
            let words = text.split(|c| !methods::is_word(c));
            let n = words.filter(|word| !word.is_empty()).count();
            return Ok(Value::count(n));
        }
    };
    Ok(Value::Str(Text {
        text: made.into(),
        safe: matches!(value, Value::Str(text) if text.safe),
    }))
}

/// Large letters behind white space, hyphens and opening brackets alone.
fn title(text: &str) -> String {
    let splits = |c: char| "-({[<".contains(c) || crate::lexer::is_space(c);
    let mut out = String::with_capacity(text.len());
    let mut word = String::new();
    let push = |word: &mut String, out: &mut String| {
        let mut chars = word.chars();
        if let Some(first) = chars.next() {
            out.extend(first.to_uppercase());
            out.push_str(&chars.as_str().to_lowercase());
        }
        word.clear();
    };
    for c in text.chars() {
        if splits(c) {
            push(&mut word, &mut out);
            out.push(c);
        } else {
            word.push(c);
        }
    }
    push(&mut word, &mut out);
    out
}

/// A text, of which methods are asked.
fn own_text(value: &Value) -> R<Cow<'_, str>> {
    match value {
        Value::Undefined(why) => fail(&**why),
        Value::Str(text) => Ok(Cow::Borrowed(&*text.text)),
        other => fail(format!(
            "unsupported operand type(s) for +=: '{}' and 'str'",
            other.type_name()
        )),
    }
}

fn indent(value: &Value, args: Args) -> R<String> {
    let [width, first, blank] = args.bind("indent", ["width", "first", "blank"], 0)?;
    let indention = match &width {
        Some(Value::Str(text)) => text.text.to_string(),
        Some(other) => {
            let n = args::size(other)?;
            sized(n)?;
            " ".repeat(n)
        }
        None => " ".repeat(4),
    };
    let text = format!("{}\n", own_text(value)?);
    let lines = methods::split_lines(&text, false);
    sized(
        text.len()
            .saturating_add(lines.len().saturating_mul(indention.len())),
    )?;
    let mut out = String::with_capacity(text.len());
    if args::flag(first.as_ref()) {
        out.push_str(&indention);
    }
    for (at, line) in lines.iter().enumerate() {
        if at > 0 {
            out.push('\n');
            if args::flag(blank.as_ref()) || !line.is_empty() {
                out.push_str(&indention);
            }
        }
        out.push_str(line);
    }
    Ok(out)
}

/// The shortened text; nothing where the value is short enough as it is, whatever its type.
fn truncate(value: &Value, args: Args) -> R<Option<String>> {
    let names = ["length", "killwords", "end", "leeway"];
    let [length, kill, end, leeway] = args.bind("truncate", names, 0)?;
    let length = length.as_ref().map_or(Ok(255), args::int)?;
    let end = match &end {
        Some(end) => args::text(end)?.to_owned(),
        None => "...".to_owned(),
    };
    let leeway = args::some(leeway);
    let leeway = leeway.as_ref().map_or(Ok(5), args::int)?;
    let n_end = end.chars().count() as i128;
    if length < n_end {
        return fail(format!("expected length >= {n_end}, got {length}"));
    }
    if leeway < 0 {
        return fail(format!("expected leeway >= 0, got {leeway}"));
    }
    let name = value.type_name();
    let Some(len) = value.len() else {
        return fail(format!("object of type '{name}' has no len()"));
    };
    if len as i128 <= length.saturating_add(leeway) {
        return Ok(None);
    }
    let Some(text) = value.as_str() else {
        return fail(format!("object of type '{name}' cannot be truncated"));
    };
    let kept: String = text.chars().take((length - n_end) as usize).collect();
    if args::flag(kill.as_ref()) {
        return Ok(Some(kept + &end));
    }
    let whole = kept.rsplit_once(' ').map_or(&*kept, |(before, _)| before);
    Ok(Some(format!("{whole}{end}")))
}
