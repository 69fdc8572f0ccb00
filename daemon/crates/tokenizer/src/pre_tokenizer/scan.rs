//! The scanners: each takes the text from the current position on and returns
//! the length in bytes of its expression's match there, 0 for none.
//!
//! Alternatives are tried in the expression's order. Every scanner reads each
//! character a bounded number of times, so a text costs time in proportion to
//! its length.

use super::{han, letters};
use crate::Error;
use crate::unicode::{L, LOWER, M, N, P, S, SYMBOL, UPPER, class, look};

fn first(text: &str) -> Option<(char, u8)> {
    text.chars().next().map(|c| (c, class(c)))
}

/// Bytes of the longest prefix of at most `max` characters that `takes` accepts.
pub(super) fn run(text: &str, max: usize, takes: impl Fn(char) -> bool) -> usize {
    let mut len = 0;
    for c in text.chars().take(max) {
        look();
        if !takes(c) {
            break;
        }
        len += c.len_utf8();
    }
    len
}

fn class_run(text: &str, max: usize, mask: u8) -> usize {
    run(text, max, |c| class(c) & mask != 0)
}

/// `\s?[...]+`
pub(super) fn spaced_run(text: &str, takes: impl Fn(char) -> bool) -> usize {
    let Some((c, c_class)) = first(text) else {
        return 0;
    };
    if c_class & S != 0 {
        let after = run(&text[c.len_utf8()..], usize::MAX, &takes);
        if after > 0 {
            return c.len_utf8() + after;
        }
    }
    run(text, usize::MAX, takes)
}

/// `[0-9][0-9][0-9]`
pub(super) fn digit_triple(text: &str) -> usize {
    match text.as_bytes() {
        [a, b, c, ..] if [a, b, c].iter().all(|d| d.is_ascii_digit()) => 3,
        _ => 0,
    }
}

fn is_line_end(c: char) -> bool {
    matches!(c, '\r' | '\n')
}

/// Character sets of single expressions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Set {
    /// `[\r\n]`
    LineEnd,
    /// `\p{L}`
    Letter,
    /// `\p{P}`
    Punctuation,
    /// `[一-龥ࠀ-一가-퟿]`
    Cjk,
    /// `[一-龥぀-ゟ゠-ヿ]`
    CjkOrKana,
    /// ``[\p{P}\$\+<=>\^~\|`]``
    FalconPunctuation,
    /// `[\p{P}\$\+<=>\^~\|]`
    DefaultPunctuation,
    /// The letters with case that DeepSeek LLM lists.
    CasedLetter,
    /// `[!-/:-~！-／：-～‘-‟　-。]`
    WidePunctuation,
    /// ``[^(\s|.,!?…。，、।۔،)]``
    BloomWord,
}

impl Set {
    pub(super) fn has(self, c: char) -> bool {
        match self {
            Set::LineEnd => is_line_end(c),
            Set::Letter => class(c) & L != 0,
            Set::Punctuation => class(c) & P != 0,
            Set::Cjk => matches!(c, '\u{800}'..='\u{9FA5}' | '\u{AC00}'..='\u{D7FF}'),
            Set::CjkOrKana => matches!(c, '\u{4E00}'..='\u{9FA5}' | '\u{3040}'..='\u{30FF}'),
            Set::CasedLetter => letters::is_listed(c),
            Set::WidePunctuation => matches!(
                c,
                '!'..='/' | ':'..='~' | '\u{FF01}'..='\u{FF0F}' | '\u{FF1A}'..='\u{FF5E}'
                    | '\u{2018}'..='\u{201F}' | '\u{3000}'..='\u{3002}'
            ),
            Set::BloomWord => {
                class(c) & S == 0
                    && !matches!(
                        c,
                        '(' | '|'
                            | '.'
                            | ','
                            | '!'
                            | '?'
                            | '\u{2026}'
                            | '\u{3002}'
                            | '\u{FF0C}'
                            | '\u{3001}'
                            | '\u{964}'
                            | '\u{6D4}'
                            | '\u{60C}'
                            | ')'
                    )
            }
            Set::FalconPunctuation => c == '`' || Set::DefaultPunctuation.has(c),
            Set::DefaultPunctuation => {
                class(c) & P != 0 || matches!(c, '$' | '+' | '<' | '=' | '>' | '^' | '~' | '|')
            }
        }
    }
}

/// `'s|'t|'re|'ve|'m|'ll|'d`
fn contraction(text: &str, any_case: bool) -> usize {
    let bytes = text.as_bytes();
    if bytes.first() != Some(&b'\'') {
        return 0;
    }
    let at = |i: usize| {
        let byte = bytes.get(i).copied().unwrap_or(0);
        if any_case {
            byte.to_ascii_lowercase()
        } else {
            byte
        }
    };
    match (at(1), at(2)) {
        (b's' | b't' | b'm' | b'd', _) => 2,
        (b'r' | b'v', b'e') | (b'l', b'l') => 3,
        _ => 0,
    }
}

/// `\s+(?!\S)|\s+`: all of a run at the end of the text, else all but its last
/// character, which belongs to the word that follows, else that character.
fn spaces(text: &str) -> usize {
    let len = class_run(text, usize::MAX, S);
    if len == text.len() {
        return len;
    }
    let last = text[..len].chars().next_back().map_or(0, char::len_utf8);
    if len > last { len - last } else { len }
}

/// `\s*[\r\n]+|\s+(?!\S)|\s+`: the first alternative ends at the last line
/// end of the white space.
fn lines_or_spaces(text: &str) -> usize {
    let len = class_run(text, usize::MAX, S);
    match text.as_bytes()[..len]
        .iter()
        .rposition(|b| matches!(b, b'\r' | b'\n'))
    {
        Some(last) => last + 1,
        None => spaces(text),
    }
}

pub(super) fn gpt2(text: &str) -> usize {
    let contraction = contraction(text, false);
    if contraction > 0 {
        return contraction;
    }
    let space = usize::from(text.starts_with(' '));
    let word = match first(&text[space..]) {
        None => 0,
        Some((_, c)) if c & L != 0 => class_run(&text[space..], usize::MAX, L),
        Some((_, c)) if c & N != 0 => class_run(&text[space..], usize::MAX, N),
        Some((_, c)) if c & S != 0 => 0,
        Some(_) => run(&text[space..], usize::MAX, |c| class(c) & (S | L | N) == 0),
    };
    if word > 0 { space + word } else { spaces(text) }
}

/// The cl100k family:
/// ``(?i:'s|...)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,d}|
/// ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+``.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cl100k {
    /// Digits a number piece may have.
    pub(super) digits: usize,
    /// Marks belong to words (`[\p{L}\p{M}]+`).
    pub(super) marks: bool,
    /// Punctuation takes the line ends after it.
    pub(super) newline_tail: bool,
}

impl Cl100k {
    pub(super) fn scan(self, text: &str) -> usize {
        let Some((c, c_class)) = first(text) else {
            return 0;
        };
        let word = if self.marks { L | M } else { L };
        let contraction = contraction(text, true);
        if contraction > 0 {
            return contraction;
        }
        if c_class & (L | N) == 0 && !is_line_end(c) {
            let after = class_run(&text[c.len_utf8()..], usize::MAX, word);
            if after > 0 {
                return c.len_utf8() + after;
            }
        }
        if c_class & word != 0 {
            return class_run(text, usize::MAX, word);
        }
        if c_class & N != 0 {
            return class_run(text, self.digits, N);
        }
        let space = usize::from(c == ' ');
        let other = run(&text[space..], usize::MAX, |c| {
            class(c) & (S | N | word) == 0
        });
        if other > 0 {
            let end = space + other;
            let tail = if self.newline_tail {
                run(&text[end..], usize::MAX, is_line_end)
            } else {
                0
            };
            return end + tail;
        }
        lines_or_spaces(text)
    }
}

/// The o200k family: `p?U*W+c?|p?U+W*c?|\p{N}{1,d}|
/// ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+` with `p = [^\r\n\p{L}\p{N}]`,
/// `U = [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]`,
/// `W = [\p{Ll}\p{Lm}\p{Lo}\p{M}]` and `c` the contractions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct O200k {
    /// Digits a number piece may have.
    pub(super) digits: usize,
    /// Words take a contraction that follows them.
    pub(super) contractions: bool,
}

impl O200k {
    pub(super) fn scan(self, text: &str) -> usize {
        let Some((c, c_class)) = first(text) else {
            return 0;
        };
        let prefix = if c_class & (L | N) == 0 && !is_line_end(c) {
            c.len_utf8()
        } else {
            0
        };
        for word in [mixed_word, upper_word] {
            let mut len = if prefix > 0 { word(&text[prefix..]) } else { 0 };
            if len > 0 {
                len += prefix;
            } else {
                len = word(text);
            }
            if len > 0 {
                if self.contractions {
                    len += contraction(&text[len..], true);
                }
                return len;
            }
        }
        if c_class & N != 0 {
            return class_run(text, self.digits, N);
        }
        let space = usize::from(c == ' ');
        let other = run(&text[space..], usize::MAX, |c| class(c) & (S | L | N) == 0);
        if other > 0 {
            let end = space + other;
            return end + run(&text[end..], usize::MAX, |c| is_line_end(c) || c == '/');
        }
        lines_or_spaces(text)
    }
}

/// `U*W+`: where nothing of W follows the longest U*, U* gives characters back
/// until one of them is of W.
fn mixed_word(text: &str) -> usize {
    let upper = class_run(text, usize::MAX, UPPER);
    let lower = class_run(&text[upper..], usize::MAX, LOWER);
    if lower > 0 {
        return upper + lower;
    }
    text[..upper]
        .char_indices()
        .rev()
        .find(|&(_, c)| class(c) & LOWER != 0)
        .map_or(0, |(i, c)| i + c.len_utf8())
}

/// `U+W*`
fn upper_word(text: &str) -> usize {
    let upper = class_run(text, usize::MAX, UPPER);
    if upper == 0 {
        return 0;
    }
    upper + class_run(&text[upper..], usize::MAX, LOWER)
}

/// ``[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|
/// ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+``
pub(super) fn deepseek3(text: &str) -> usize {
    let Some((c, c_class)) = first(text) else {
        return 0;
    };
    if c.is_ascii_punctuation() {
        let word = run(&text[1..], usize::MAX, |c| c.is_ascii_alphabetic());
        if word > 0 {
            return 1 + word;
        }
    }
    if c_class & (L | P | SYMBOL) == 0 && !is_line_end(c) {
        let after = class_run(&text[c.len_utf8()..], usize::MAX, L | M);
        if after > 0 {
            return c.len_utf8() + after;
        }
    }
    if c_class & (L | M) != 0 {
        return class_run(text, usize::MAX, L | M);
    }
    let space = usize::from(c == ' ');
    let marks = class_run(&text[space..], usize::MAX, P | SYMBOL);
    if marks > 0 {
        let end = space + marks;
        return end + run(&text[end..], usize::MAX, is_line_end);
    }
    lines_or_spaces(text)
}

/// Calls `emit` with the pieces of `text`: runs of decimal digits are cut into
/// groups of three from their end (`(?=(\d{3})+(?!\d))`).
pub(super) fn triples_from_end(
    text: &str,
    emit: &mut dyn FnMut(&str) -> Result<(), Error>,
) -> Result<(), Error> {
    let (mut start, mut at) = (0, 0);
    while at < text.len() {
        at += run(&text[at..], usize::MAX, |c| !is_decimal(c));
        let digits = &text[at..at + run(&text[at..], usize::MAX, is_decimal)];
        let count = digits.chars().count();
        for (i, (offset, _)) in digits.char_indices().enumerate() {
            let cut = at + offset;
            if (count - i).is_multiple_of(3) && cut > start {
                emit(&text[start..cut])?;
                start = cut;
            }
        }
        at += digits.len();
    }
    if start < text.len() {
        emit(&text[start..])?;
    }
    Ok(())
}

fn is_decimal(c: char) -> bool {
    c.is_ascii_digit() || (!c.is_ascii() && class(c) & N != 0 && crate::unicode::is_decimal(c))
}

/// Kimi K2: `[\p{Han}]+`, then the o200k family's expression whose letters are
/// not Chinese and whose punctuation takes line ends only.
pub(super) fn kimi_k2(text: &str) -> usize {
    let Some((c, c_class)) = first(text) else {
        return 0;
    };
    if han::is_han(c) {
        return run(text, usize::MAX, han::is_han);
    }
    let other = |mask: u8| move |c: char| class(c) & mask != 0 && !han::is_han(c);
    let mixed = |text: &str| {
        let upper = run(text, usize::MAX, other(UPPER));
        let lower = run(&text[upper..], usize::MAX, other(LOWER));
        if lower > 0 {
            return upper + lower;
        }
        let back = text[..upper].char_indices().rev();
        let mut back = back.filter(|&(_, c)| class(c) & LOWER != 0);
        back.next().map_or(0, |(i, c)| i + c.len_utf8())
    };
    let upper = |text: &str| match run(text, usize::MAX, other(UPPER)) {
        0 => 0,
        len => len + run(&text[len..], usize::MAX, other(LOWER)),
    };
    let prefix = if c_class & (L | N) == 0 && !is_line_end(c) {
        c.len_utf8()
    } else {
        0
    };
    let word = |scan: &dyn Fn(&str) -> usize| match scan(&text[prefix..]) {
        len if len > 0 => prefix + len,
        _ => scan(text),
    };
    let len = match word(&mixed) {
        0 => word(&upper),
        len => len,
    };
    if len > 0 {
        return len + contraction(&text[len..], true);
    }
    if c_class & N != 0 {
        return class_run(text, 3, N);
    }
    let space = usize::from(c == ' ');
    let marks = run(&text[space..], usize::MAX, |c| class(c) & (S | L | N) == 0);
    if marks > 0 {
        let end = space + marks;
        return end + run(&text[end..], usize::MAX, is_line_end);
    }
    lines_or_spaces(text)
}
