//! From a template's text to tokens, with Jinja's rules of white space as `transformers` sets them:
//! a line end behind a block goes (`trim_blocks`), as does white space before one at the beginning
//! of a line (`lstrip_blocks`).

use crate::escapes;

/// A piece of a template.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Token {
    Data(String),
    PrintBegin,
    PrintEnd,
    BlockBegin,
    BlockEnd,
    Name(String),
    Int(i128),
    Float(f64),
    Str(String),
    Op(&'static str),
    Eof,
}

/// Operators, the longer ones first.
const OPERATORS: [&str; 27] = [
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}",
    ">", "<", "=", ".", ":", "|", ",", ";", "!",
];

/// A syntax error: line and message.
pub(crate) type SyntaxError = (u32, String);

/// The tokens of a template with their lines; the last is [`Token::Eof`].
pub(crate) fn tokens(source: &str) -> Result<Vec<(Token, u32)>, SyntaxError> {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    // One line end at the end is not part of the template.
    let source = source.strip_suffix('\n').unwrap_or(&source);
    let mut lexer = Lexer {
        source,
        at: 0,
        line: 1,
        starts_line: true,
        out: Vec::new(),
    };
    lexer.run()?;
    lexer.out.push((Token::Eof, lexer.line));
    Ok(lexer.out)
}

struct Lexer<'s> {
    source: &'s str,
    at: usize,
    line: u32,
    /// Whether what was read last ended with a line end.
    starts_line: bool,
    out: Vec<(Token, u32)>,
}

/// How a tag's opening treats the white space before it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Strip {
    All,
    Line,
    Keep,
}

impl<'s> Lexer<'s> {
    fn rest(&self) -> &'s str {
        &self.source[self.at..]
    }

    /// Goes past `bytes` bytes.
    fn skip(&mut self, bytes: usize) {
        let passed = &self.source[self.at..self.at + bytes];
        self.line += passed.matches('\n').count() as u32;
        if !passed.is_empty() {
            self.starts_line = passed.ends_with('\n');
        }
        self.at += bytes;
    }

    fn run(&mut self) -> Result<(), SyntaxError> {
        loop {
            let rest = self.rest();
            let found = rest
                .as_bytes()
                .windows(2)
                .position(|pair| matches!(pair, b"{{" | b"{%" | b"{#"));
            let Some(open) = found else {
                self.push_data(rest.to_owned());
                self.skip(rest.len());
                return Ok(());
            };
            let (data, tag) = rest.split_at(open);
            let kind = tag.as_bytes()[1];
            let strip = match tag.as_bytes().get(2) {
                Some(b'-') => Strip::All,
                Some(b'+') => Strip::Keep,
                _ if kind == b'{' => Strip::Keep,
                _ => Strip::Line,
            };
            let sign = usize::from(matches!(tag.as_bytes().get(2), Some(b'-' | b'+')));
            let data = self.stripped(data, strip);
            self.push_data(data);
            self.skip(open);
            match kind {
                b'#' => self.comment(2 + sign)?,
                b'%' => match raw_tag(tag, "raw") {
                    Some((len, strips)) => self.raw(len, strips)?,
                    None => {
                        self.skip(2 + sign);
                        self.expression(Token::BlockBegin, Token::BlockEnd)?;
                    }
                },
                _ => {
                    self.skip(2 + sign);
                    self.expression(Token::PrintBegin, Token::PrintEnd)?;
                }
            }
        }
    }

    /// Text before a tag, without the white space that the tag takes.
    fn stripped(&self, data: &str, strip: Strip) -> String {
        match strip {
            Strip::All => data.trim_end_matches(is_space).to_owned(),
            Strip::Keep => data.to_owned(),
            Strip::Line => {
                let begin = data.rfind('\n').map_or(0, |at| at + 1);
                let indent = &data[begin..];
                let is_blank = !indent.is_empty() && indent.chars().all(is_space);
                match is_blank && (begin > 0 || self.starts_line) {
                    true => data[..begin].to_owned(),
                    false => data.to_owned(),
                }
            }
        }
    }

    fn push_data(&mut self, data: String) {
        if !data.is_empty() {
            self.out.push((Token::Data(data), self.line));
        }
    }

    /// Bytes of the end of a tag, and of the white space that it takes, where one stands here.
    fn end(&self, close: &str) -> Option<usize> {
        let rest = self.rest();
        let strips = rest
            .strip_prefix('-')
            .and_then(|rest| rest.strip_prefix(close));
        if let Some(behind) = strips {
            let blank = behind.len() - behind.trim_start_matches(is_space).len();
            return Some(1 + close.len() + blank);
        }
        if close != "}}" && rest.starts_with('+') && rest[1..].starts_with(close) {
            return Some(1 + close.len());
        }
        let behind = rest.strip_prefix(close)?;
        let trims = close != "}}" && behind.starts_with('\n');
        Some(close.len() + usize::from(trims))
    }

    fn comment(&mut self, open: usize) -> Result<(), SyntaxError> {
        let line = self.line;
        self.skip(open);
        // The sign before the end is part of it.
        while !self.rest().is_empty() {
            if let Some(len) = self.end("#}") {
                self.skip(len);
                return Ok(());
            }
            let next = self.rest().chars().next().map_or(1, char::len_utf8);
            self.skip(next);
        }
        Err((line, "Missing end of comment tag".to_owned()))
    }

    fn raw(&mut self, open: usize, strips: bool) -> Result<(), SyntaxError> {
        let line = self.line;
        self.skip(open);
        if strips {
            let rest = self.rest();
            self.skip(rest.len() - rest.trim_start_matches(is_space).len());
        }
        let body = self.rest();
        let mut from = 0;
        while let Some(at) = body[from..].find("{%").map(|at| from + at) {
            let tag = &body[at..];
            let Some((len, strips)) = raw_tag(tag, "endraw") else {
                from = at + 2;
                continue;
            };
            let strip = match tag.as_bytes().get(2) {
                Some(b'-') => Strip::All,
                Some(b'+') => Strip::Keep,
                _ => Strip::Line,
            };
            let data = self.stripped(&body[..at], strip);
            self.push_data(data);
            self.skip(at + len);
            let rest = self.rest();
            if strips {
                self.skip(rest.len() - rest.trim_start_matches(is_space).len());
            } else if rest.starts_with('\n') && !body[..at + len].ends_with("+%}") {
                self.skip(1);
            }
            return Ok(());
        }
        Err((line, "Missing end of raw directive".to_owned()))
    }

    /// The tokens up to the end of a tag.
    fn expression(&mut self, begin: Token, end: Token) -> Result<(), SyntaxError> {
        let close = if end == Token::PrintEnd { "}}" } else { "%}" };
        self.out.push((begin, self.line));
        let mut open: Vec<&'static str> = Vec::new();
        loop {
            let rest = self.rest();
            let Some(first) = rest.chars().next() else {
                return Ok(());
            };
            if open.is_empty()
                && let Some(len) = self.end(close)
            {
                let line = self.line;
                self.skip(len);
                self.out.push((end, line));
                return Ok(());
            }
            if is_space(first) {
                self.skip(first.len_utf8());
            } else if first.is_ascii_digit() {
                self.number()?;
            } else if first == '\'' || first == '"' {
                self.string(first)?;
            } else if first == '_' || first.is_alphanumeric() {
                let len = rest.find(|c: char| c != '_' && !c.is_alphanumeric());
                let name = &rest[..len.unwrap_or(rest.len())];
                self.out.push((Token::Name(name.to_owned()), self.line));
                self.skip(name.len());
            } else {
                self.operator(&mut open)?;
            }
        }
    }

    fn operator(&mut self, open: &mut Vec<&'static str>) -> Result<(), SyntaxError> {
        let rest = self.rest();
        let Some(found) = OPERATORS.into_iter().find(|op| rest.starts_with(op)) else {
            let c = rest.chars().next().unwrap_or_default();
            return Err((self.line, format!("unexpected char {c:?} at {}", self.at)));
        };
        match found {
            "!" => return Err((self.line, format!("unexpected char '!' at {}", self.at))),
            "(" => open.push(")"),
            "[" => open.push("]"),
            "{" => open.push("}"),
            ")" | "]" | "}" => match open.pop() {
                Some(expected) if expected == found => {}
                Some(expected) => {
                    let words = format!("unexpected '{found}', expected '{expected}'");
                    return Err((self.line, words));
                }
                None => return Err((self.line, format!("unexpected '{found}'"))),
            },
            _ => {}
        }
        self.out.push((Token::Op(found), self.line));
        self.skip(found.len());
        Ok(())
    }

    fn number(&mut self) -> Result<(), SyntaxError> {
        let rest = self.rest();
        let is_behind_dot = self.source[..self.at].ends_with('.');
        let (len, token) = match float_len(rest).filter(|_| !is_behind_dot) {
            Some(len) => {
                let digits = rest[..len].replace('_', "");
                (len, Token::Float(digits.parse().unwrap_or(f64::NAN)))
            }
            None => {
                let (len, radix) = integer_len(rest);
                let digits = rest[..len].replace('_', "");
                let digits = if radix == 10 { &*digits } else { &digits[2..] };
                let n = i128::from_str_radix(digits, radix);
                let n = n.map_err(|_| {
                    let words = "a whole number takes more than 128 bits";
                    (self.line, words.to_owned())
                })?;
                (len, Token::Int(n))
            }
        };
        self.out.push((token, self.line));
        self.skip(len);
        Ok(())
    }

    fn string(&mut self, quote: char) -> Result<(), SyntaxError> {
        let rest = self.rest();
        let mut escaped = false;
        let end = rest[1..].find(|c: char| {
            let ends = c == quote && !escaped;
            escaped = c == '\\' && !escaped;
            ends
        });
        let Some(end) = end else {
            return Err((
                self.line,
                format!("unexpected char {quote:?} at {}", self.at),
            ));
        };
        let text = escapes::unescaped(&rest[1..=end]).map_err(|words| (self.line, words))?;
        self.out.push((Token::Str(text), self.line));
        self.skip(end + 2);
        Ok(())
    }
}

/// White space to Python's `\s`.
pub(crate) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// Bytes of a tag that is only `name`, with its ends, and whether it takes the white space behind.
fn raw_tag(tag: &str, name: &str) -> Option<(usize, bool)> {
    let inner = tag.strip_prefix("{%")?;
    let inner = inner.strip_prefix(['-', '+']).unwrap_or(inner);
    let inner = inner.trim_start_matches(is_space).strip_prefix(name)?;
    let inner = inner.trim_start_matches(is_space);
    let (strips, inner) = match inner.strip_prefix('-') {
        Some(inner) => (true, inner),
        None if name == "endraw" => (false, inner.strip_prefix('+').unwrap_or(inner)),
        None => (false, inner),
    };
    Some((tag.len() - inner.strip_prefix("%}")?.len(), strips))
}

/// Bytes of digits with single underscores between them; 0 for none.
fn digits_len(text: &str) -> usize {
    let bytes = text.as_bytes();
    let mut len = 0;
    while let Some(byte) = bytes.get(len) {
        let joins = *byte == b'_' && len > 0 && bytes.get(len + 1).is_some_and(u8::is_ascii_digit);
        if !byte.is_ascii_digit() && !joins {
            break;
        }
        len += 1;
    }
    len
}

/// Bytes of a number with a point or an exponent.
fn float_len(text: &str) -> Option<usize> {
    let whole = digits_len(text);
    let exponent = |at: usize| -> Option<usize> {
        let behind = text[at..].strip_prefix(['e', 'E'])?;
        let unsigned = behind.strip_prefix(['+', '-']).unwrap_or(behind);
        let digits = digits_len(unsigned);
        (digits > 0).then(|| text.len() - unsigned.len() + digits)
    };
    match text[whole..].strip_prefix('.').map(digits_len) {
        Some(n) if n > 0 => Some(exponent(whole + 1 + n).unwrap_or(whole + 1 + n)),
        _ => exponent(whole),
    }
}

/// Bytes of a whole number, and its base.
fn integer_len(text: &str) -> (usize, u32) {
    for (prefix, radix) in [("0b", 2), ("0o", 8), ("0x", 16)] {
        let begins = text
            .get(..2)
            .is_some_and(|begin| begin.eq_ignore_ascii_case(prefix));
        let of_base = |c: char| c == '_' || c.is_digit(radix);
        if begins && text[2..].starts_with(of_base) {
            let end = text[2..].find(|c| !of_base(c));
            return (end.map_or(text.len(), |end| 2 + end), radix);
        }
    }
    let len = digits_len(text);
    // Zeros before other digits are numbers of their own, which the parser refuses.
    match text.starts_with('0') {
        true => (
            text[..len].find(|c| !matches!(c, '0' | '_')).unwrap_or(len),
            10,
        ),
        false => (len, 10),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(source: &str) -> String {
        let tokens = tokens(source).unwrap();
        let text = tokens.into_iter().map(|(token, _)| match token {
            Token::Data(text) => text,
            Token::BlockBegin => "<".to_owned(),
            Token::BlockEnd => ">".to_owned(),
            Token::PrintBegin => "(".to_owned(),
            Token::PrintEnd => ")".to_owned(),
            _ => String::new(),
        });
        text.collect()
    }

    #[test]
    fn white_space_goes_as_in_jinja() {
        for (source, expected) in [
            ("a\n  {% x %}\nb", "a\n<>b"),
            ("a\n  {%+ x %}\n\nb", "a\n  <>\nb"),
            ("a\n  {% x +%}\nb", "a\n<>\nb"),
            ("a\n  {%- x -%}\n b", "a<>b"),
            ("a {% x %} b", "a <> b"),
            ("  {{ x }}\n b\n\n", "  ()\n b\n"),
            ("{% x %}\n  {% y %}", "<><>"),
            ("a\n  {# x #}\nb", "a\nb"),
            ("a {#- x -#} b{# + #}c", "abc"),
            ("{% raw %}\n{{ a }}{% endraw %}\nb", "\n{{ a }}b"),
            ("a {%- raw -%} b {%- endraw -%} c", "abc"),
            ("{{ {'a': {}} }}", "()"),
        ] {
            assert_eq!(data(source), expected, "{source}");
        }
    }

    #[test]
    fn numbers_and_texts_are_read() {
        let tokens = tokens("{{ 1_000 1.5e3 0x1F 2e-1 1.e 'a\\'b' \"\\u00e9\" a.0.1 }}").unwrap();
        let kept: Vec<_> = tokens.into_iter().map(|(token, _)| token).collect();
        assert_eq!(
            kept[1..5],
            [
                Token::Int(1000),
                Token::Float(1500.0),
                Token::Int(31),
                Token::Float(0.2)
            ]
        );
        assert_eq!(
            kept[8..10],
            [Token::Str("a'b".to_owned()), Token::Str("é".to_owned())]
        );
        assert_eq!(
            kept[11..15],
            [Token::Op("."), Token::Int(0), Token::Op("."), Token::Int(1)]
        );
        for bad in [
            "{{ 'a }}",
            "{{ ( ] }}",
            "{{ ? }}",
            "{# a",
            "{% raw %}a",
            "{{ a ! b }}",
        ] {
            assert!(super::tokens(bad).is_err(), "{bad}");
        }
    }
}
