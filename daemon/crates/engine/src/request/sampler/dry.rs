//! "Don't repeat yourself" (DRY): tokens that would continue a repetition are penalized, the more
//! the longer it is (p-e-w, text-generation-webui, 2024).
//!
//! If the last n tokens of the text occurred before, the token that followed them then is penalized
//! by `multiplier * base^(n - allowed_length)`. Sequences of characters that every text repeats, as
//! of names in a dialogue, end a repetition: the breakers.

use std::collections::{HashMap, VecDeque};
use std::fmt::Debug;
use std::sync::Arc;

use rocmforge_tokenizer::Tokenizer;

use super::candidates::Candidates;

/// Number of a prompt's last tokens whose text is searched for breakers first.
const FIRST_SEARCHED: usize = 64;
/// Factor by which more tokens are searched if those have no breaker.
const MORE_SEARCHED: usize = 8;

/// Parameters of the DRY sampler, which penalizes tokens that continue a repetition.
#[derive(Debug, Clone, PartialEq)]
pub struct Dry {
    /// Penalty for continuing a repetition of the allowed length; 0 is off.
    pub multiplier: f32,
    /// Factor on the penalty for each further token of the repetition, at least 1.
    pub base: f32,
    /// Repetitions shorter than this number of tokens are not penalized; at least 1.
    pub allowed_length: u32,
    /// Number of recent tokens in which repetitions are searched; 0 switches DRY off.
    pub last_n: u32,
    /// Texts that end a repetition, none of them empty.
    pub breakers: Vec<String>,
}

impl Default for Dry {
    fn default() -> Self {
        Self {
            multiplier: 0.0,
            base: 1.75,
            allowed_length: 2,
            last_n: u32::MAX,
            breakers: ["\n", ":", "\"", "*"].map(str::to_owned).into(),
        }
    }
}

/// Access to the bytes of tokens.
pub(crate) trait Pieces: Debug + Send {
    /// Bytes of a token.
    fn bytes(&self, token: u32) -> &[u8];
}

impl Pieces for Arc<Tokenizer> {
    fn bytes(&self, token: u32) -> &[u8] {
        self.token_bytes(token).unwrap_or_default()
    }
}

/// The DRY sampler's state: the recent tokens, at most `last_n` and at most a context.
#[derive(Debug)]
pub(super) struct Repetitions {
    params: Dry,
    pieces: Box<dyn Pieces>,
    recent: VecDeque<u32>,
    /// The last bytes of the text, one fewer than the longest breaker has.
    end: Vec<u8>,
    /// Number of tokens since the last breaker.
    unbroken: usize,
}

impl Repetitions {
    pub(super) fn new(params: Dry, pieces: Box<dyn Pieces>) -> Self {
        Self {
            params,
            pieces,
            recent: VecDeque::new(),
            end: Vec::new(),
            unbroken: 0,
        }
    }

    /// Adds the tokens of a prompt to the history.
    pub(super) fn read(&mut self, prompt: &[u32]) {
        let last_n = self.params.last_n as usize;
        let seen = &prompt[prompt.len().saturating_sub(last_n)..];
        self.recent.extend(seen);
        self.unbroken = self.unbroken_of(seen);
        // As many as may begin a breaker have at least a byte each, but for control tokens.
        let ends = &seen[seen.len().saturating_sub(FIRST_SEARCHED)..];
        self.end = self.text(ends);
        self.shorten_end();
    }

    fn text(&self, tokens: &[u32]) -> Vec<u8> {
        let bytes = tokens.iter().map(|&token| self.pieces.bytes(token));
        bytes.collect::<Vec<_>>().concat()
    }

    /// Number of tokens after the last breaker in a text. The end is searched first, where most
    /// texts have one.
    fn unbroken_of(&self, tokens: &[u32]) -> usize {
        let mut searched = FIRST_SEARCHED;
        loop {
            let begin = tokens.len().saturating_sub(searched);
            let text = self.text(&tokens[begin..]);
            if let Some(break_end) = self.last_break(&text) {
                let mut at = text.len();
                let behind = tokens.iter().rev().take_while(|&&token| {
                    at -= self.pieces.bytes(token).len();
                    at >= break_end
                });
                return behind.count();
            }
            if begin == 0 {
                return tokens.len();
            }
            searched = searched.saturating_mul(MORE_SEARCHED);
        }
    }

    /// Byte position at which the last breaker in a text ends.
    fn last_break(&self, text: &[u8]) -> Option<usize> {
        let ends_here = |end: &usize| {
            let before = &text[..*end];
            let mut breakers = self.params.breakers.iter();
            breakers.any(|breaker| before.ends_with(breaker.as_bytes()))
        };
        (1..=text.len()).rev().find(ends_here)
    }

    fn shorten_end(&mut self) {
        let longest = self.params.breakers.iter().map(String::len).max();
        let keep = longest.unwrap_or_default().saturating_sub(1);
        let excess = self.end.len().saturating_sub(keep);
        self.end.drain(..excess);
    }

    /// Adds a generated token to the history.
    pub(super) fn accept(&mut self, token: u32) {
        self.recent.push_back(token);
        if self.recent.len() > self.params.last_n as usize {
            self.recent.pop_front();
        }
        let before = self.end.len();
        self.end.extend_from_slice(self.pieces.bytes(token));
        let breaks = self.last_break(&self.end).is_some_and(|end| end > before);
        self.unbroken = if breaks { 0 } else { self.unbroken + 1 };
        self.shorten_end();
    }

    /// For each token that would continue a repetition, the repetition's length: the number of the
    /// text's last tokens that also stand before an earlier occurrence of it.
    fn lengths(&self) -> HashMap<u32, u32> {
        let most = self.unbroken.min(self.recent.len());
        let allowed = self.params.allowed_length as usize;
        let mut lengths = HashMap::new();
        if most < allowed || self.recent.len() <= allowed {
            return lengths;
        }
        let backwards: Vec<u32> = self.recent.iter().rev().copied().collect();
        for (at, common) in common_beginnings(&backwards)
            .into_iter()
            .enumerate()
            .skip(1)
        {
            let length = common.min(most);
            if length >= allowed {
                let longest = lengths.entry(backwards[at - 1]).or_default();
                *longest = length.max(*longest as usize) as u32;
            }
        }
        lengths
    }

    pub(super) fn apply(&self, candidates: &mut Candidates<'_>) {
        let mut lengths = self.lengths();
        // A breaker ends a repetition, so that it goes on with none.
        let breaks = |token: u32| self.last_break(self.pieces.bytes(token)).is_some();
        lengths.retain(|token, _| !breaks(*token));
        let (multiplier, base) = (self.params.multiplier, f64::from(self.params.base));
        candidates.change(lengths.into_iter(), |logit, length| {
            let beyond = f64::from(length - self.params.allowed_length);
            logit - (f64::from(multiplier) * base.powf(beyond)).min(f64::from(f32::MAX)) as f32
        });
    }
}

/// For each index, the length of the longest common prefix of the sequence and its suffix from
/// there: the Z-function (Gusfield, Algorithms on Strings, Trees and Sequences, 1997), in linear
/// time. The value at index 0 is 0.
fn common_beginnings(of: &[u32]) -> Vec<usize> {
    let mut common = vec![0; of.len()];
    // The part furthest to the right that is like a beginning: from `left` up to `right`.
    let (mut left, mut right) = (0, 0);
    for at in 1..of.len() {
        let known = match at < right {
            true => common[at - left].min(right - at),
            false => 0,
        };
        let more = of[known..].iter().zip(&of[at + known..]);
        let length = known + more.take_while(|(a, b)| a == b).count();
        common[at] = length;
        if at + length > right {
            (left, right) = (at, at + length);
        }
    }
    common
}

#[cfg(test)]
mod tests {
    use rand::{RngExt as _, SeedableRng as _};
    use rand_chacha::ChaCha8Rng;

    use super::*;
    use crate::request::sampler::tests::Words;

    fn dry(breakers: &[&str]) -> Dry {
        Dry {
            multiplier: 0.5,
            base: 2.0,
            breakers: breakers.iter().map(|&b| b.to_owned()).collect(),
            ..Dry::default()
        }
    }

    /// The logits of all words, each 0 before, behind a text.
    fn behind(params: Dry, words: &str, text: &[u32]) -> Vec<f32> {
        let pieces = Words::of(words);
        let n = pieces.len();
        let mut read = Repetitions::new(params.clone(), Box::new(pieces.clone()));
        read.read(text);
        let mut accepted = Repetitions::new(params, Box::new(pieces));
        text.iter().for_each(|&token| accepted.accept(token));
        let logits = |of: &Repetitions| {
            let (mut logits, mut room) = (vec![0.0; n], Vec::new());
            let mut candidates = Candidates::of_all(&mut logits, &mut room).unwrap();
            of.apply(&mut candidates);
            logits
        };
        assert_eq!(
            logits(&read),
            logits(&accepted),
            "a prompt is read as it is generated"
        );
        logits(&read)
    }

    #[test]
    fn what_goes_on_with_a_repetition_loses_by_its_length() {
        // "a b c d a b c": d goes on with three tokens, so it loses 0.5 * 2^(3 - 2).
        let text = [0, 1, 2, 3, 0, 1, 2];
        assert_eq!(behind(dry(&[]), "a b c d", &text), [0.0, 0.0, 0.0, -1.0]);
        // Of two repetitions the longer one counts: "a b c" and "b c" both stood before d.
        let text = [0, 1, 2, 3, 4, 1, 2, 3, 0, 1, 2];
        assert_eq!(behind(dry(&[]), "a b c d e", &text)[3], -1.0);
        // Two tokens of "b b b b" are overlapping repetitions of one another.
        assert_eq!(behind(dry(&[]), "a b", &[1, 1, 1, 1]), [0.0, -1.0]);
        // One token alone is allowed.
        assert_eq!(behind(dry(&[]), "a b c", &[0, 1, 2, 0]), [0.0; 3]);
        let strict = Dry {
            allowed_length: 1,
            ..dry(&[])
        };
        assert_eq!(behind(strict, "a b c", &[0, 1, 2, 0]), [0.0, -0.5, 0.0]);
    }

    #[test]
    fn a_repetition_does_not_go_across_a_breaker() {
        let text = [0, 1, 2, 3, 0, 1, 2];
        // "a b c" of which b breaks: one token is left behind it.
        assert_eq!(behind(dry(&["b"]), "a b c d", &text), [0.0; 4]);
        // A breaker of two tokens, and one inside of a token.
        assert_eq!(behind(dry(&["ab"]), "a b c d", &text), [0.0; 4]);
        let longer = [0, 1, 2, 4, 3, 0, 1, 2, 4];
        let two_left = behind(dry(&["ab"]), "a b c d e", &longer);
        assert_eq!(two_left, [0.0, 0.0, 0.0, -0.5, 0.0]);
        assert_eq!(behind(dry(&["y"]), "a xyz c d", &text), [0.0; 4]);
        // A breaker that goes on with it loses nothing.
        assert_eq!(behind(dry(&["d"]), "a b c d", &text), [0.0; 4]);
        // Half of one is none.
        assert_eq!(behind(dry(&["bz"]), "a b c d", &text)[3], -1.0);
    }

    #[test]
    fn what_leaves_the_window_is_no_repetition() {
        let text = [0, 1, 2, 3, 0, 1, 2];
        for (last_n, lost) in [(7, -1.0), (6, -0.5), (5, 0.0), (0, 0.0)] {
            let params = Dry { last_n, ..dry(&[]) };
            assert_eq!(behind(params, "a b c d", &text)[3], lost, "{last_n}");
        }
    }

    #[test]
    fn long_repetitions_leave_finite_logits() {
        let text = vec![0; 3000];
        let params = Dry {
            base: 100.0,
            ..dry(&[])
        };
        let logits = behind(params, "a b", &text);
        assert!(logits[0] < -1e38 && logits[0].is_finite(), "{logits:?}");
    }

    /// By the definition: for each earlier place, token by token.
    #[test]
    fn lengths_are_those_of_the_definition_for_random_texts() {
        let seed = rand::random();
        println!("seed {seed}");
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        for _ in 0..200 {
            let n = rng.random_range(0..60);
            let text: Vec<u32> = (0..n).map(|_| rng.random_range(0..3)).collect();
            // The last word breaks.
            let pieces = Words::of("a b \n");
            let mut dry = Repetitions::new(dry(&["\n"]), Box::new(pieces));
            dry.read(&text);
            let mut expected: HashMap<u32, u32> = HashMap::new();
            let unbroken = text.iter().rev().take_while(|&&t| t != 2).count();
            for at in 1..text.len() {
                let back = text[..at].iter().rev().zip(text.iter().rev());
                let same = back.take_while(|(a, b)| a == b).count().min(unbroken);
                if same >= 2 {
                    let longest = expected.entry(text[at]).or_default();
                    *longest = (same as u32).max(*longest);
                }
            }
            assert_eq!(dry.lengths(), expected, "{text:?}");
        }
    }
}
