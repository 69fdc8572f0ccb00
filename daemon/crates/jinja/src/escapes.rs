//! Escapes in texts of templates, as Python's `unicode-escape` reads them.

/// The text that a literal means.
///
/// # Errors
///
/// For an escape that is cut, or that names no character.
pub(crate) fn unescaped(literal: &str) -> Result<String, String> {
    if !literal.contains('\\') {
        return Ok(literal.to_owned());
    }
    let mut out = String::with_capacity(literal.len());
    let mut high = None;
    let mut rest = literal;
    while let Some(at) = rest.find('\\') {
        if at > 0 && high.take().is_some() {
            out.push(char::REPLACEMENT_CHARACTER);
        }
        out.push_str(&rest[..at]);
        let behind = &rest[at + 1..];
        let Some(c) = behind.chars().next() else {
            return Err("\\ at end of string".to_owned());
        };
        let (code, len) = match c {
            'x' | 'u' | 'U' => by_number(behind, c)?,
            '0'..='7' => {
                let len = behind
                    .bytes()
                    .take(3)
                    .take_while(|b| (b'0'..=b'7').contains(b))
                    .count();
                let code = u32::from_str_radix(&behind[..len], 8);
                (code.unwrap_or_default(), len)
            }
            other => {
                if high.take().is_some() {
                    out.push(char::REPLACEMENT_CHARACTER);
                }
                out.extend(simple(other).into_iter().flatten());
                rest = &behind[other.len_utf8()..];
                continue;
            }
        };
        rest = &behind[len..];
        push_unit(code, &mut high, &mut out);
    }
    if high.is_some() {
        out.push(char::REPLACEMENT_CHARACTER);
    }
    out.push_str(rest);
    Ok(out)
}

/// An escape of one character. Others stay as they are written.
fn simple(c: char) -> [Option<char>; 2] {
    let one = match c {
        '\n' => return [None, None],
        'n' => '\n',
        'r' => '\r',
        't' => '\t',
        'a' => '\u{7}',
        'b' => '\u{8}',
        'f' => '\u{c}',
        'v' => '\u{b}',
        '\\' | '\'' | '"' => c,
        other => return [Some('\\'), Some(other)],
    };
    [Some(one), None]
}

/// The number of `\x41`, `\u0041` or `\U00000041`, and the bytes behind the backslash.
fn by_number(text: &str, kind: char) -> Result<(u32, usize), String> {
    let digits = match kind {
        'x' => 2,
        'u' => 4,
        _ => 8,
    };
    let code = text.get(1..=digits).and_then(|hex| {
        let all = hex.bytes().all(|b| b.is_ascii_hexdigit());
        u32::from_str_radix(hex, 16).ok().filter(|_| all)
    });
    match code {
        Some(code) if code <= 0x10_ffff => Ok((code, 1 + digits)),
        Some(_) => Err("illegal Unicode character".to_owned()),
        None => Err(format!("truncated \\{kind} escape")),
    }
}

/// Halves of a pair become one character; Python could not print them.
fn push_unit(code: u32, high: &mut Option<u32>, out: &mut String) {
    match (high.take(), code) {
        (Some(first), 0xdc00..=0xdfff) => {
            let whole = 0x1_0000 + ((first - 0xd800) << 10) + (code - 0xdc00);
            out.extend(char::from_u32(whole));
            return;
        }
        (Some(_), _) => out.push(char::REPLACEMENT_CHARACTER),
        (None, _) => {}
    }
    match code {
        0xd800..=0xdbff => *high = Some(code),
        code => out.push(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_are_those_of_python() {
        for (literal, text) in [
            (r"a\nb\t\\", "a\nb\t\\"),
            (r"\d\.", "\\d\\."),
            (r"\x41\u00e9\U0001F600", "Aé😀"),
            (r"\ud83d\ude00", "😀"),
            (r"\ud83dx", "\u{fffd}x"),
            (r"\101\0", "A\0"),
            ("a\\\nb", "ab"),
        ] {
            assert_eq!(unescaped(literal).unwrap(), text, "{literal}");
        }
        for bad in [r"\x4", r"\u12", r"\U00110000"] {
            assert!(unescaped(bad).is_err(), "{bad}");
        }
    }
}
