//! A synthetic byte-level BPE vocabulary of the size of Llama 3's: words without meaning,
//! but with merges that hold.
//!
//! Ids 0..256 are the bytes; then come the numbers of two and three digits and words of growing
//! length, each made of two tokens before it; the last 256 are special. A vocabulary made of ranks
//! has a merge for every way in which a token can be cut in two tokens, and so has this one, up to
//! the number that Llama 3 has.

use std::collections::HashMap;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// Tokens, special ones included.
pub(crate) const N_VOCAB: u32 = 128_256;

/// Special tokens, the last ids.
pub(crate) const N_SPECIAL: u32 = 256;

/// Most merges.
const MERGES_MAX: usize = 280_147;

/// Longest token in letters.
const LETTERS_MAX: usize = 13;

/// `<|begin_of_text|>`.
pub(crate) const BOS: u32 = N_VOCAB - N_SPECIAL;

/// `<|eot_id|>`, which ends a turn.
pub(crate) const EOS: u32 = BOS + 9;

/// What a file says of its tokenizer.
#[derive(Debug)]
pub(crate) struct Vocab {
    pub(crate) tokens: Vec<String>,
    /// 1 is normal, 3 is control.
    pub(crate) types: Vec<i32>,
    pub(crate) merges: Vec<String>,
}

/// The character that stands for a byte in byte-level vocabularies (GPT-2): printable ones for
/// themselves, the others for characters from U+0100 on, in order.
fn byte_char(byte: u8) -> char {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|b| !printable(*b)).count() as u32;
    char::from_u32(0x100 + before).expect("below the surrogates")
}

/// Tokens by text, in the order of their ids.
struct Words {
    tokens: Vec<String>,
    ids: HashMap<String, u32>,
}

impl Words {
    fn add(&mut self, token: String) -> bool {
        if self.ids.contains_key(&token) {
            return false;
        }
        self.ids.insert(token.clone(), self.tokens.len() as u32);
        self.tokens.push(token);
        true
    }
}

/// Makes the vocabulary; always the same one.
pub(crate) fn make() -> Vocab {
    let mut rng = StdRng::seed_from_u64(0x766f_6361);
    let n_normal = (N_VOCAB - N_SPECIAL) as usize;
    let mut words = Words {
        tokens: Vec::with_capacity(N_VOCAB as usize),
        ids: HashMap::with_capacity(N_VOCAB as usize),
    };
    for byte in 0..=255 {
        words.add(byte_char(byte).to_string());
    }
    for number in 0..100 {
        words.add(format!("{number:02}"));
    }
    for number in 0..1000 {
        words.add(format!("{number:03}"));
    }
    let space = byte_char(b' ');
    let letters: Vec<char> = ('a'..='z').collect();
    // Beginnings may start with a space; endings are one to three letters.
    let mut beginnings: Vec<String> = letters.iter().map(char::to_string).collect();
    let mut endings = beginnings.clone();
    let first = |text: String, list: &mut Vec<String>, words: &mut Words| {
        if words.add(text.clone()) {
            list.push(text);
        }
    };
    for &letter in &letters {
        first(format!("{space}{letter}"), &mut beginnings, &mut words);
    }
    for &a in &letters {
        for &b in &letters {
            first(format!("{a}{b}"), &mut endings, &mut words);
        }
    }
    beginnings.extend_from_slice(&endings[letters.len()..]);
    while words.tokens.len() < n_normal {
        let beginning = &beginnings[early(&mut rng, beginnings.len(), 5)];
        let ending = &endings[early(&mut rng, endings.len(), 4)];
        let token = format!("{beginning}{ending}");
        if token.chars().count() <= LETTERS_MAX && words.add(token.clone()) {
            beginnings.push(token);
        }
    }
    let merges = merges(&words);
    let mut tokens = words.tokens;
    let mut types = vec![1; tokens.len()];
    tokens.extend((0..N_SPECIAL).map(special));
    types.resize(tokens.len(), 3);
    Vocab {
        tokens,
        types,
        merges,
    }
}

/// An index below `n`, the lower the likelier: words of frequent parts can be cut in
/// several ways, as real ones can.
fn early(rng: &mut StdRng, n: usize, power: u32) -> usize {
    let u: f64 = rng.random();
    ((0..power).fold(n as f64, |at, _| at * u)) as usize
}

/// Every cut of every token into two tokens, in the order of the tokens; of those past the maximum,
/// the first cut of each token stays, so that every token can be reached.
fn merges(words: &Words) -> Vec<String> {
    let cuts = |token: &String| -> Vec<String> {
        let inner = token.char_indices().skip(1);
        inner
            .map(|(at, _)| token.split_at(at))
            .filter(|(a, b)| words.ids.contains_key(*a) && words.ids.contains_key(*b))
            .map(|(a, b)| format!("{a} {b}"))
            .collect()
    };
    let mut merges = Vec::with_capacity(MERGES_MAX);
    let long = &words.tokens[256..];
    for (done, token) in long.iter().enumerate() {
        let left = MERGES_MAX - merges.len() - (long.len() - done - 1);
        merges.extend(cuts(token).into_iter().take(left));
    }
    merges
}

fn special(index: u32) -> String {
    match index {
        0 => "<|begin_of_text|>".to_owned(),
        1 => "<|end_of_text|>".to_owned(),
        6 => "<|start_header_id|>".to_owned(),
        7 => "<|end_header_id|>".to_owned(),
        9 => "<|eot_id|>".to_owned(),
        10 => "<|vision_start|>".to_owned(),
        11 => "<|vision_end|>".to_owned(),
        12 => "<|image_pad|>".to_owned(),
        other => format!("<|reserved_special_token_{other}|>"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn has_the_size_of_a_real_one() {
        let vocab = make();
        assert_eq!(vocab.tokens.len(), N_VOCAB as usize);
        assert_eq!(vocab.types.len(), N_VOCAB as usize);
        println!("{} merges", vocab.merges.len());
        assert!((250_000..=MERGES_MAX).contains(&vocab.merges.len()));
        assert_eq!(vocab.tokens[EOS as usize], "<|eot_id|>");
    }

    #[test]
    fn every_merge_makes_a_token_of_two() {
        let vocab = make();
        let tokens: HashSet<&str> = vocab.tokens.iter().map(String::as_str).collect();
        assert_eq!(tokens.len(), vocab.tokens.len(), "tokens are distinct");
        let mut reached = HashSet::new();
        for merge in &vocab.merges {
            let (a, b) = merge.split_once(' ').expect("two parts");
            let whole = format!("{a}{b}");
            assert!(tokens.contains(a) && tokens.contains(b) && tokens.contains(whole.as_str()));
            reached.insert(whole);
        }
        assert_eq!(reached.len(), (N_VOCAB - N_SPECIAL) as usize - 256);
    }

    #[test]
    fn bytes_have_distinct_characters() {
        let chars: HashSet<char> = (0..=255).map(byte_char).collect();
        assert_eq!(chars.len(), 256);
        assert_eq!((byte_char(b'a'), byte_char(b' ')), ('a', '\u{120}'));
        assert_eq!(byte_char(0xAD), '\u{143}');
    }
}
