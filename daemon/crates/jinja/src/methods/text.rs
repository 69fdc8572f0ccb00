//! Methods of texts.

use unicode_general_category::{GeneralCategory, get_general_category};

use super::codes;
use crate::args::{self, Args};
use crate::fault::{R, fail};
use crate::format;
use crate::is_tests::is_cased;
use crate::lexer::is_space;
use crate::operators::sized;
use crate::repr::is_printable;
use crate::run::Run;
use crate::value::{Text, Value};

/// A method of a text.
pub(super) fn call(run: &Run<'_>, of: &Text, name: &str, args: Args) -> R<Value> {
    let text = &*of.text;
    let made = match name {
        "format" => format::format(run, text, args)?,
        "format_map" => {
            let given = args.only(name, 1, 1)?;
            format::format_map(run, text, &given[0])?
        }
        "join" => join(text, args)?,
        "replace" => replace(text, args)?,
        "strip" | "lstrip" | "rstrip" => {
            let given = args.only(name, 0, 1)?;
            let chars = given.first().filter(|chars| !chars.is_none());
            let chars = chars.map(args::text).transpose()?;
            strip(text, chars, name != "rstrip", name != "lstrip").to_owned()
        }
        "removeprefix" | "removesuffix" => {
            let given = args.only(name, 1, 1)?;
            let affix = args::text(&given[0])?;
            let rest = match name {
                "removeprefix" => text.strip_prefix(affix),
                _ => text.strip_suffix(affix),
            };
            rest.unwrap_or(text).to_owned()
        }
        "ljust" | "rjust" | "center" | "zfill" => padded(text, name, args)?,
        "expandtabs" => {
            let [size] = args.bind(name, ["tabsize"], 0)?;
            expand_tabs(text, size.as_ref().map_or(Ok(8), args::int)?)?
        }
        "translate" => {
            let given = args.only(name, 1, 1)?;
            codes::translate(text, &given[0])?
        }
        "capitalize" | "casefold" | "lower" | "swapcase" | "title" | "upper" => {
            args.none(name)?;
            cased(text, name)
        }
        _ => return other(of, name, args),
    };
    Ok(Value::Str(Text {
        text: made.into(),
        safe: of.safe,
    }))
}

/// Methods whose results are no texts.
fn other(of: &Text, name: &str, args: Args) -> R<Value> {
    let text = &*of.text;
    let part = |text: &str| {
        Value::Str(Text {
            text: text.into(),
            safe: of.safe,
        })
    };
    match name {
        "count" | "find" | "index" | "rfind" | "rindex" => find(text, name, args),
        "startswith" | "endswith" => affixed(text, name, args),
        "partition" | "rpartition" => {
            let given = args.only(name, 1, 1)?;
            let by = args::text(&given[0])?;
            if by.is_empty() {
                return fail("empty separator");
            }
            let parts = match name {
                "partition" => match text.split_once(by) {
                    Some((before, after)) => [before, by, after],
                    None => [text, "", ""],
                },
                _ => match text.rsplit_once(by) {
                    Some((before, after)) => [before, by, after],
                    None => ["", "", text],
                },
            };
            Ok(Value::tuple(parts.map(part)))
        }
        "split" | "rsplit" => {
            let parts = split(text, name == "rsplit", args)?;
            Ok(Value::list(parts.into_iter().map(part).collect()))
        }
        "splitlines" => {
            let [keep] = args.bind(name, ["keepends"], 0)?;
            let lines = split_lines(text, args::flag(keep.as_ref()));
            Ok(Value::list(lines.into_iter().map(part).collect()))
        }
        "encode" => codes::encode(text, args),
        "maketrans" => codes::maketrans(args),
        _ => {
            args.none(name)?;
            Ok(Value::Bool(is(text, name)))
        }
    }
}

fn join(text: &str, args: Args) -> R<String> {
    let items = args.only("join", 1, 1)?[0].items()?;
    let mut out = String::new();
    for (at, item) in items.iter().enumerate() {
        if at > 0 {
            out.push_str(text);
        }
        match item {
            Value::Str(item) => out.push_str(&item.text),
            other => {
                return fail(format!(
                    "sequence item {at}: expected str instance, {} found",
                    other.type_name()
                ));
            }
        }
        sized(out.len())?;
    }
    Ok(out)
}

fn replace(text: &str, args: Args) -> R<String> {
    let [old, new, count] = args.bind("replace", ["old", "new", "count"], 2)?;
    let (old, new) = (old.unwrap_or(Value::None), new.unwrap_or(Value::None));
    let (old, new) = (args::text(&old)?, args::text(&new)?);
    let count = count.as_ref().map_or(Ok(-1), args::int)?;
    let most = usize::try_from(count).unwrap_or(usize::MAX);
    let found = match old.is_empty() {
        true => text.len() + 1,
        false => text.matches(old).take(most).count(),
    };
    sized(text.len().saturating_add(found.saturating_mul(new.len())))?;
    Ok(text.replacen(old, new, most))
}

/// The text without characters at its ends: white space, or those of `chars`.
pub(crate) fn strip<'t>(text: &'t str, chars: Option<&str>, left: bool, right: bool) -> &'t str {
    let goes = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    let text = if left {
        text.trim_start_matches(goes)
    } else {
        text
    };
    if right {
        text.trim_end_matches(goes)
    } else {
        text
    }
}

/// The text in the middle of `width` columns.
pub(crate) fn center(text: &str, width: i128, fill: char) -> R<String> {
    let pad = pad_of(text, width)?;
    // As CPython: the odd column goes left where the width is odd.
    let left = pad / 2 + (pad & width.max(0) as usize & 1);
    let spaces = |n: usize| std::iter::repeat_n(fill, n);
    Ok(spaces(left)
        .chain(text.chars())
        .chain(spaces(pad - left))
        .collect())
}

fn pad_of(text: &str, width: i128) -> R<usize> {
    let width = usize::try_from(width.max(0)).unwrap_or(usize::MAX);
    sized(width)?;
    Ok(width.saturating_sub(text.chars().count()))
}

fn padded(text: &str, name: &str, args: Args) -> R<String> {
    let given = args.only(name, 1, if name == "zfill" { 1 } else { 2 })?;
    let width = args::int(&given[0])?;
    let fill = match given.get(1) {
        None => ' ',
        Some(fill) => {
            let mut chars = args::text(fill)?.chars();
            match (chars.next(), chars.next()) {
                (Some(fill), None) => fill,
                _ => return fail("The fill character must be exactly one character long"),
            }
        }
    };
    if name == "center" {
        return center(text, width, fill);
    }
    let pad = pad_of(text, width)?;
    let spaces = |fill: char| std::iter::repeat_n(fill, pad);
    Ok(match name {
        "ljust" => text.chars().chain(spaces(fill)).collect(),
        "rjust" => spaces(fill).chain(text.chars()).collect(),
        _ => {
            let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
            let sign = text[..text.len() - digits.len()].chars();
            sign.chain(spaces('0')).chain(digits.chars()).collect()
        }
    })
}

fn expand_tabs(text: &str, size: i128) -> R<String> {
    let size = usize::try_from(size.max(0)).unwrap_or(usize::MAX);
    sized(size.saturating_mul(text.matches('\t').count()))?;
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

/// The character in the case that titles begin with.
fn push_title(c: char, out: &mut String) {
    match c {
        'ǆ' | 'Ǆ' | 'ǅ' => out.push('ǅ'),
        'ǉ' | 'Ǉ' | 'ǈ' => out.push('ǈ'),
        'ǌ' | 'Ǌ' | 'ǋ' => out.push('ǋ'),
        'ǳ' | 'Ǳ' | 'ǲ' => out.push('ǲ'),
        c => {
            let mut upper = c.to_uppercase();
            out.extend(upper.next());
            // Of a letter that becomes several, the others are small.
            out.extend(upper.flat_map(char::to_lowercase));
        }
    }
}

/// `capitalize`.
pub(crate) fn capitalize(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    if let Some(first) = text.chars().next() {
        push_title(first, &mut out);
        // A sigma at the end of a word depends on what is before it.
        let lower = text.to_lowercase();
        let of_first: String = first.to_lowercase().collect();
        out.push_str(lower.strip_prefix(&*of_first).unwrap_or_default());
    }
    out
}

/// `title`: every letter behind something else is large.
pub(crate) fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut word = String::new();
    for c in text.chars() {
        if is_letter(c) {
            word.push(c);
            continue;
        }
        out.push_str(&capitalize(&std::mem::take(&mut word)));
        out.push(c);
    }
    out.push_str(&capitalize(&word));
    out
}

/// A character that has a case.
fn is_letter(c: char) -> bool {
    c.is_lowercase()
        || c.is_uppercase()
        || get_general_category(c) == GeneralCategory::TitlecaseLetter
}

fn cased(text: &str, name: &str) -> String {
    match name {
        "capitalize" => capitalize(text),
        "title" => title(text),
        "lower" => text.to_lowercase(),
        "upper" => text.to_uppercase(),
        "swapcase" => {
            let lower = text.to_lowercase();
            let mut out = String::with_capacity(text.len());
            let is_plain = lower.chars().count() == text.chars().count();
            for (c, small) in text.chars().zip(lower.chars()) {
                if c.is_uppercase() && is_plain {
                    out.push(small);
                } else if c.is_uppercase() {
                    out.extend(c.to_lowercase());
                } else if c.is_lowercase() {
                    out.extend(c.to_uppercase());
                } else {
                    out.push(c);
                }
            }
            out
        }
        _ => {
            let folded = text.chars().flat_map(|c| {
                let (one, more): (Option<char>, &str) = match c {
                    'ß' | 'ẞ' => (None, "ss"),
                    'ς' => (Some('σ'), ""),
                    'ſ' => (Some('s'), ""),
                    'ﬀ' => (None, "ff"),
                    'ﬁ' => (None, "fi"),
                    'ﬂ' => (None, "fl"),
                    'ﬃ' => (None, "ffi"),
                    'ﬄ' => (None, "ffl"),
                    'ﬅ' | 'ﬆ' => (None, "st"),
                    'µ' => (Some('μ'), ""),
                    'ŉ' => (None, "ʼn"),
                    'ı' => (Some('ı'), ""),
                    c => return c.to_lowercase().collect::<Vec<_>>(),
                };
                one.into_iter().chain(more.chars()).collect()
            });
            folded.collect()
        }
    }
}

/// Characters of words to Python's `\w`.
pub(crate) fn is_word(c: char) -> bool {
    c == '_' || is_alnum(c)
}

fn is_alpha(c: char) -> bool {
    use GeneralCategory as G;
    matches!(
        get_general_category(c),
        G::UppercaseLetter
            | G::LowercaseLetter
            | G::TitlecaseLetter
            | G::ModifierLetter
            | G::OtherLetter
    )
}

fn is_alnum(c: char) -> bool {
    is_alpha(c) || c.is_numeric()
}

fn is_decimal(c: char) -> bool {
    get_general_category(c) == GeneralCategory::DecimalNumber
}

fn is_digit(c: char) -> bool {
    is_decimal(c)
        || matches!(c, '²' | '³' | '¹' | '⁰' | '⁴'..='⁹' | '₀'..='₉' | '①'..='⑨' | '⑴'..='⑼' | '⒈'..='⒐'
            | '⓪' | '⓵'..='⓽' | '⓿' | '❶'..='❾' | '➀'..='➈' | '➊'..='➒')
}

fn is_numeric(c: char) -> bool {
    // Chinese digits are letters that count.
    c.is_numeric() || "〇一二三四五六七八九十百千万億兆零壹贰叁肆伍陆柒捌玖拾".contains(c)
}

fn is(text: &str, name: &str) -> bool {
    let all = |of: fn(char) -> bool| !text.is_empty() && text.chars().all(of);
    match name {
        "isalnum" => all(is_alnum),
        "isalpha" => all(is_alpha),
        "isascii" => text.is_ascii(),
        "isdecimal" => all(is_decimal),
        "isdigit" => all(is_digit),
        "isidentifier" => {
            use GeneralCategory as G;
            let begins =
                |c: char| c == '_' || is_alpha(c) || get_general_category(c) == G::LetterNumber;
            let goes_on = |c: char| {
                begins(c)
                    || matches!(
                        get_general_category(c),
                        G::NonspacingMark
                            | G::SpacingMark
                            | G::DecimalNumber
                            | G::ConnectorPunctuation
                    )
            };
            text.starts_with(begins) && text.chars().all(goes_on)
        }
        "islower" => is_cased(text, char::is_lowercase, char::is_uppercase),
        "isnumeric" => all(is_numeric),
        "isprintable" => text.chars().all(is_printable),
        "isspace" => all(is_space),
        "istitle" => is_title(text),
        _ => is_cased(text, char::is_uppercase, char::is_lowercase),
    }
}

fn is_title(text: &str) -> bool {
    let (mut any, mut before) = (false, false);
    for c in text.chars() {
        let is_first = c.is_uppercase() || is_letter(c) && !c.is_lowercase();
        if is_first && before || c.is_lowercase() && !before {
            return false;
        }
        any |= is_first;
        before = is_letter(c);
    }
    any
}

/// The part of a text between two places in characters, and the first of them; nothing where the
/// first lies behind the second or the end.
fn part<'t>(text: &'t str, given: &[Value]) -> R<Option<(&'t str, usize)>> {
    if given.iter().skip(1).all(Value::is_none) {
        return Ok(Some((text, 0)));
    }
    let len = text.chars().count() as i128;
    let bound = |at: usize, or: i128| -> R<i128> {
        let at = match given.get(at) {
            None | Some(Value::None) => or,
            Some(at) => args::int(at)?,
        };
        Ok(if at < 0 {
            at.saturating_add(len).max(0)
        } else {
            at
        })
    };
    let (begin, end) = (bound(1, 0)?, bound(2, len)?.min(len));
    if begin > end {
        return Ok(None);
    }
    let byte = |at: i128| {
        let mut bytes = text.char_indices().map(|(byte, _)| byte);
        bytes.nth(at as usize).unwrap_or(text.len())
    };
    Ok(Some((&text[byte(begin)..byte(end)], begin as usize)))
}

fn find(text: &str, name: &str, args: Args) -> R<Value> {
    let given = args.only(name, 1, 3)?;
    let what = args::text(&given[0])?;
    let searched = part(text, &given)?;
    if name == "count" {
        let n = match searched {
            None => 0,
            Some((part, _)) if what.is_empty() => part.chars().count() + 1,
            Some((part, _)) => part.matches(what).count(),
        };
        return Ok(Value::count(n));
    }
    let found = searched.and_then(|(part, begin)| {
        let at = match name.starts_with('r') {
            true => part.rfind(what),
            false => part.find(what),
        };
        at.map(|at| begin + part[..at].chars().count())
    });
    match found {
        Some(at) => Ok(Value::count(at)),
        None if name.ends_with("index") => fail("substring not found"),
        None => Ok(Value::Int(-1)),
    }
}

fn affixed(text: &str, name: &str, args: Args) -> R<Value> {
    let given = args.only(name, 1, 3)?;
    let affixes = match &given[0] {
        Value::Tuple(affixes) => affixes.to_vec(),
        Value::Str(_) => vec![given[0].clone()],
        other => {
            return fail(format!(
                "{name} first arg must be str or a tuple of str, not {}",
                other.type_name()
            ));
        }
    };
    let Some((part, _)) = part(text, &given)? else {
        return Ok(Value::Bool(false));
    };
    for affix in &affixes {
        let affix = args::text(affix)?;
        let has = match name {
            "startswith" => part.starts_with(affix),
            _ => part.ends_with(affix),
        };
        if has {
            return Ok(Value::Bool(true));
        }
    }
    Ok(Value::Bool(false))
}

/// The words of a text, at most so many cuts from the left or the right.
pub(crate) fn split_space(text: &str, most: usize, from_right: bool) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = match from_right {
        true => text.trim_end_matches(is_space),
        false => text.trim_start_matches(is_space),
    };
    while !rest.is_empty() {
        let at = match from_right {
            true => rest.rfind(is_space),
            false => rest.find(is_space),
        };
        let Some(at) = at.filter(|_| parts.len() < most) else {
            parts.push(rest);
            break;
        };
        if from_right {
            let width = rest[at..].chars().next().map_or(1, char::len_utf8);
            parts.push(&rest[at + width..]);
            rest = rest[..at].trim_end_matches(is_space);
        } else {
            parts.push(&rest[..at]);
            rest = rest[at..].trim_start_matches(is_space);
        }
    }
    if from_right {
        parts.reverse();
    }
    parts
}

fn split(text: &str, from_right: bool, args: Args) -> R<Vec<&str>> {
    let [by, most] = args.bind("split", ["sep", "maxsplit"], 0)?;
    let most = most.as_ref().map_or(Ok(-1), args::int)?;
    let most = usize::try_from(most).unwrap_or(usize::MAX);
    match args::some(by) {
        None => Ok(split_space(text, most, from_right)),
        Some(by) => {
            let by = args::text(&by)?;
            if by.is_empty() {
                return fail("empty separator");
            }
            let most = most.saturating_add(1);
            let mut parts: Vec<_> = match from_right {
                true => text.rsplitn(most, by).collect(),
                false => text.splitn(most, by).collect(),
            };
            if from_right {
                parts.reverse();
            }
            Ok(parts)
        }
    }
}

/// The lines of a text, with their ends or without.
pub(crate) fn split_lines(text: &str, keep: bool) -> Vec<&str> {
    let ends = |c: char| matches!(c, '\n'..='\r' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let mut lines = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find(ends) {
        let width = match rest[at..].starts_with("\r\n") {
            true => 2,
            false => rest[at..].chars().next().map_or(1, char::len_utf8),
        };
        lines.push(&rest[..if keep { at + width } else { at }]);
        rest = &rest[at + width..];
    }
    if !rest.is_empty() {
        lines.push(rest);
    }
    lines
}
