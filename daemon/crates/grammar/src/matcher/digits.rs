//! Numbers in JSON end: the grammars of numbers allow digits without end, and a model that falls
//! into repetition writes them up to its last token.
//!
//! ```text
//!   outside --digit--> whole --.--> fraction
//!                        '----e-------'---> exponent       any other byte: outside
//! ```
//!
//! What is quoted is no number, whatever its digits; where the grammar allows letters or quotes
//! next, the output is not inside of one.

use rocmforge_tokenizer::Tokenizer;
use toktrie::SimpleVob;

use super::Matcher;
use crate::limits::{DIGITS_MAX, EXPONENT_DIGITS_MAX};

/// Digits that one token may bring; some vocabularies have tokens of this many zeros.
const TOKEN_DIGITS: usize = 16;
/// What may follow a number in JSON and in the calls of models.
const ENDS: &[u8] = b",}])< \t\r\n";

/// The part of a number that an output's end may be in, with its digits.
#[derive(Debug, Clone, Copy, Default)]
pub(super) enum Digits {
    /// Outside of numbers and quotes.
    #[default]
    Outside,
    /// Directly behind a quotation mark.
    Quoted,
    /// Digits in front of the point.
    Whole(usize),
    /// Digits behind the point.
    Fraction(usize),
    /// Digits behind the `e`, and its sign.
    Exponent(usize),
}

impl Digits {
    /// The state after further bytes of the output.
    pub(super) fn behind(self, bytes: &[u8]) -> Self {
        bytes.iter().fold(self, |digits, &byte| digits.next(byte))
    }

    fn next(self, byte: u8) -> Self {
        match (self, byte) {
            (_, b'"') => Self::Quoted,
            (Self::Outside, b'0'..=b'9') => Self::Whole(1),
            (Self::Quoted, b'0'..=b'9') => Self::Quoted,
            (Self::Whole(n), b'0'..=b'9') => Self::Whole(n + 1),
            (Self::Fraction(n), b'0'..=b'9') => Self::Fraction(n + 1),
            (Self::Exponent(n), b'0'..=b'9') => Self::Exponent(n + 1),
            (Self::Whole(_), b'.') => Self::Fraction(0),
            (Self::Whole(_) | Self::Fraction(1..), b'e' | b'E') => Self::Exponent(0),
            (Self::Exponent(0), b'+' | b'-') => self,
            _ => Self::Outside,
        }
    }

    /// Digits that may still come, where the next token may bring more than that.
    fn left(self) -> Option<usize> {
        let (has, most) = match self {
            Self::Outside | Self::Quoted => return None,
            Self::Whole(n) | Self::Fraction(n) => (n, DIGITS_MAX),
            Self::Exponent(n) => (n, EXPONENT_DIGITS_MAX),
        };
        let left = most.saturating_sub(has);
        (left < TOKEN_DIGITS).then_some(left)
    }
}

/// What a mask lets a number do.
#[derive(Default)]
struct NumberMask {
    may_end: bool,
    /// Tokens that begin with a digit.
    single: Vec<u32>,
    /// Tokens that begin with more digits than may still come.
    exceeding: Vec<u32>,
}

impl NumberMask {
    /// Nothing where the mask is not one of a number.
    fn of(allowed: &SimpleVob, tokenizer: &Tokenizer, left: usize) -> Option<Self> {
        let mut mask = Self::default();
        for id in allowed.iter() {
            let bytes = tokenizer.token_bytes(id).unwrap_or_default();
            if tokenizer.is_special(id) || tokenizer.is_end_of_generation(id) {
                mask.may_end = true;
                continue;
            }
            match bytes {
                [] | [b'.' | b'e' | b'E' | b'+' | b'-', ..] => {}
                [b'0'..=b'9', rest @ ..] => {
                    if rest.is_empty() {
                        mask.single.push(id);
                    }
                    let more = bytes.iter().take_while(|byte| byte.is_ascii_digit());
                    if more.count() > left {
                        mask.exceeding.push(id);
                    }
                }
                [first, ..] if ENDS.contains(first) => mask.may_end = true,
                _ => return None,
            }
        }
        Some(mask)
    }
}

impl Matcher {
    /// Forbids tokens that give a number more digits than it may have. One that cannot end yet goes
    /// on, past the bound with those digits alone behind which it can.
    pub(super) fn bound_digits(&mut self, allowed: &mut SimpleVob) {
        let Some(left) = self.digits.left().filter(|_| self.has_bounded_numbers) else {
            return;
        };
        let Some(mask) = NumberMask::of(allowed, &self.tokenizer, left) else {
            return;
        };
        if mask.may_end {
            for id in mask.exceeding {
                allowed.disallow_token(id);
            }
            return;
        }
        if left > 0 {
            return;
        }
        let ends: Vec<u32> = (ENDS.iter().map(std::slice::from_ref))
            .flat_map(|end| self.tokens_of(end))
            .chain(self.ends.iter().copied())
            .collect();
        let ending = mask.single.into_iter();
        let ending: Vec<u32> = ending
            .filter(|&id| ends.iter().any(|&end| self.takes(&[id, end])))
            .collect();
        if !ending.is_empty() {
            for id in mask.exceeding {
                allowed.disallow_token(id);
            }
            ending.into_iter().for_each(|id| allowed.allow_token(id));
        }
    }
}
