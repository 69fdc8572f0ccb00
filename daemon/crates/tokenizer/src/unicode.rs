//! Character classes as the published pre-tokenizer patterns use them.
//!
//! One bit per class, so that a pattern's bracket expression is one mask test.
//! Unicode 16; `\s` is the White_Space property.

use unicode_general_category::{GeneralCategory as G, get_general_category};

/// `\p{L}`
pub(crate) const L: u8 = 1;
/// `\p{N}`
pub(crate) const N: u8 = 2;
/// `\s`
pub(crate) const S: u8 = 4;
/// `\p{M}`
pub(crate) const M: u8 = 8;
/// `\p{P}`
pub(crate) const P: u8 = 16;
/// `\p{S}`
pub(crate) const SYMBOL: u8 = 32;
/// `[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]`
pub(crate) const UPPER: u8 = 64;
/// `[\p{Ll}\p{Lm}\p{Lo}\p{M}]`
pub(crate) const LOWER: u8 = 128;

const fn ascii_class(c: u8) -> u8 {
    match c {
        b'A'..=b'Z' => L | UPPER,
        b'a'..=b'z' => L | LOWER,
        b'0'..=b'9' => N,
        b' ' | 0x09..=0x0D => S,
        b'$' | b'+' | b'<' | b'=' | b'>' | b'^' | b'`' | b'|' | b'~' => SYMBOL,
        b'!'..=b'~' => P,
        _ => 0,
    }
}

const ASCII: [u8; 128] = {
    let mut table = [0; 128];
    let mut c = 0;
    while c < 128 {
        table[c] = ascii_class(c as u8);
        c += 1;
    }
    table
};

#[cfg(test)]
thread_local! {
    /// How often scanners have looked at a character on this thread.
    pub(crate) static LOOKS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
    /// At how many the thread panics, lest a test waits for minutes for what it knows already.
    pub(crate) static LOOKS_MAX: std::cell::Cell<u64> = const { std::cell::Cell::new(u64::MAX) };
}

/// Counts a look at a character where tests hold the work of scanners; elsewhere it is nothing.
pub(crate) fn look() {
    #[cfg(test)]
    {
        LOOKS.set(LOOKS.get() + 1);
        assert!(LOOKS.get() <= LOOKS_MAX.get(), "too many looks");
    }
}

/// The classes of `c`.
pub(crate) fn class(c: char) -> u8 {
    look();
    if c.is_ascii() {
        return ASCII[c as usize];
    }
    let class = match get_general_category(c) {
        G::UppercaseLetter | G::TitlecaseLetter => L | UPPER,
        G::LowercaseLetter => L | LOWER,
        G::ModifierLetter | G::OtherLetter => L | UPPER | LOWER,
        G::NonspacingMark | G::SpacingMark | G::EnclosingMark => M | UPPER | LOWER,
        G::DecimalNumber | G::LetterNumber | G::OtherNumber => N,
        G::ConnectorPunctuation
        | G::DashPunctuation
        | G::OpenPunctuation
        | G::ClosePunctuation
        | G::InitialPunctuation
        | G::FinalPunctuation
        | G::OtherPunctuation => P,
        G::MathSymbol | G::CurrencySymbol | G::ModifierSymbol | G::OtherSymbol => SYMBOL,
        _ => 0,
    };
    if c.is_whitespace() { class | S } else { class }
}

/// `\p{Nd}`
pub(crate) fn is_decimal(c: char) -> bool {
    get_general_category(c) == G::DecimalNumber
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_agree_with_the_regex_engine_on_every_character() {
        let patterns = [
            (L, r"\p{L}"),
            (N, r"\p{N}"),
            (S, r"\s"),
            (M, r"\p{M}"),
            (P, r"\p{P}"),
            (SYMBOL, r"\p{S}"),
            (UPPER, r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"),
            (LOWER, r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"),
        ];
        let all: String = ('\0'..=char::MAX).collect();
        for (bit, pattern) in patterns {
            let regex = fancy_regex::Regex::new(&format!("{pattern}+")).unwrap();
            let mut expected = String::new();
            for found in regex.find_iter(&all) {
                expected.push_str(found.unwrap().as_str());
            }
            let ours: String = all.chars().filter(|&c| class(c) & bit != 0).collect();
            assert_eq!(ours, expected, "{pattern}");
        }
    }
}
