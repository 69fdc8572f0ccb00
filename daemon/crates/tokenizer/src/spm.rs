//! SentencePiece BPE: of all adjacent pairs that join to a token, the one with
//! the highest score is joined, leftmost first; what ends up as no token is
//! spelled in byte tokens.
//!
//! Spaces are written as U+2581. The model knows no words, but where no token
//! has a space mark behind another character, no merge can cross from a
//! character to a space mark: then each such border cuts the text into words
//! that are merged alone (and cached), with the same result.

use std::collections::{BinaryHeap, HashMap};

use crate::Error;
use crate::texts::TextIndex;
use crate::vocab::{SPM_SPACE, TokenType, Vocab, Words};

/// No token, no neighbour.
const NONE: u32 = u32::MAX;

/// The tables of one vocabulary.
#[derive(Debug)]
pub(crate) struct Spm {
    index: TextIndex,
    /// Token of each byte.
    bytes: [u32; 256],
    /// No token has a space mark behind another character.
    pub(crate) splits_at_spaces: bool,
}

/// Buffers that one encode reuses from word to word.
#[derive(Debug, Default)]
pub(crate) struct MergeBuffers {
    symbols: Vec<Symbol>,
    heap: BinaryHeap<Candidate>,
    /// Parts still to be written, the next one last: start and length.
    undo: Vec<(u32, u32)>,
    /// Unused tokens that merges may have made, with the bytes of the left
    /// part. At most one entry an unused token.
    unused: HashMap<u32, u32>,
}

impl MergeBuffers {
    fn load(&mut self, word: &str) {
        self.symbols.clear();
        self.heap.clear();
        self.unused.clear();
        for (i, (start, c)) in word.char_indices().enumerate() {
            self.symbols.push(Symbol {
                start: start as u32,
                len: c.len_utf8() as u32,
                previous: (i as u32).wrapping_sub(1),
                next: i as u32 + 1,
            });
        }
        if let Some(last) = self.symbols.last_mut() {
            last.next = NONE;
        }
    }
}

/// A piece of the word; `len` 0 once it is joined to the one before.
#[derive(Debug, Clone, Copy)]
struct Symbol {
    start: u32,
    len: u32,
    previous: u32,
    next: u32,
}

/// A pair that joins to a token. The greatest has the highest score, and of
/// equal ones stands leftmost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    /// Score in the high half, complement of the left position in the low.
    key: u64,
    /// Bytes of both halves: says whether they are still as they were.
    len: u32,
}

impl Candidate {
    fn new(score: f32, left: u32, len: u32) -> Candidate {
        // -0.0 and 0.0 are one score.
        let bits = (score + 0.0).to_bits();
        let ordered = if bits >> 31 == 1 {
            !bits
        } else {
            bits | 1 << 31
        };
        Candidate {
            key: u64::from(ordered) << 32 | u64::from(!left),
            len,
        }
    }

    fn left(self) -> u32 {
        !(self.key as u32)
    }
}

impl Spm {
    /// Bytes of memory.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.index.memory_bytes()
    }

    /// Builds the tables; a few milliseconds for 32,000 tokens.
    pub(crate) fn build(vocab: &Words) -> Result<Spm, Error> {
        let mergeable = |id| {
            matches!(
                vocab.token_type(id),
                TokenType::Normal | TokenType::UserDefined | TokenType::Unused
            )
        };
        let index = TextIndex::build(&vocab.texts, mergeable)?;
        let mut bytes = [NONE; 256];
        let mut splits_at_spaces = true;
        for (id, text) in vocab.texts.iter().enumerate() {
            let id = id as u32;
            if vocab.token_type(id) == TokenType::Byte
                && let Some(&[byte]) = vocab.pieces.get(id as usize)
            {
                bytes[usize::from(byte)] = id;
            }
            if mergeable(id) {
                splits_at_spaces &= !has_inner_space(text);
            }
        }
        Ok(Spm {
            index,
            bytes,
            splits_at_spaces,
        })
    }

    /// Appends the tokens of one word, in which spaces are marks already.
    pub(crate) fn encode_word(
        &self,
        vocab: &Vocab,
        word: &str,
        scratch: &mut MergeBuffers,
        out: &mut Vec<u32>,
    ) -> Result<(), Error> {
        scratch.load(word);
        for left in 1..scratch.symbols.len() {
            self.propose(vocab, word, scratch, left as u32 - 1);
        }
        self.merge(vocab, word, scratch);
        let mut at = 0;
        while let Some(&symbol) = scratch.symbols.get(at as usize) {
            self.push_symbol(vocab, word, symbol, scratch, out)?;
            at = symbol.next;
        }
        Ok(())
    }

    fn merge(&self, vocab: &Vocab, word: &str, scratch: &mut MergeBuffers) {
        while let Some(candidate) = scratch.heap.pop() {
            let symbols = &mut scratch.symbols;
            let left = candidate.left();
            let Symbol { len, next, .. } = symbols[left as usize];
            let Some(&right) = symbols.get(next as usize) else {
                continue;
            };
            if len == 0 || len + right.len != candidate.len {
                continue;
            }
            symbols[left as usize].len += right.len;
            symbols[left as usize].next = right.next;
            symbols[next as usize].len = 0;
            if let Some(after) = symbols.get_mut(right.next as usize) {
                after.previous = left;
            }
            let previous = symbols[left as usize].previous;
            self.propose(vocab, word, scratch, left);
            if previous != NONE {
                self.propose(vocab, word, scratch, previous);
            }
        }
    }

    /// Adds the pair of `left` and its neighbour if it joins to a token.
    fn propose(&self, vocab: &Vocab, word: &str, scratch: &mut MergeBuffers, left: u32) {
        let Symbol {
            start, len, next, ..
        } = scratch.symbols[left as usize];
        let Some(right) = scratch.symbols.get(next as usize) else {
            return;
        };
        let joined = len + right.len;
        let text = &word.as_bytes()[start as usize..(start + joined) as usize];
        if let Some(id) = self.index.find(&vocab.texts, text) {
            let score = vocab.scores[id as usize];
            scratch.heap.push(Candidate::new(score, left, joined));
            if vocab.token_type(id) == TokenType::Unused {
                scratch.unused.insert(id, len);
            }
        }
    }

    /// Appends a symbol: its token; if that is unused, the two parts that a
    /// merge made it of; if there is none, its bytes.
    fn push_symbol(
        &self,
        vocab: &Vocab,
        word: &str,
        symbol: Symbol,
        scratch: &mut MergeBuffers,
        out: &mut Vec<u32>,
    ) -> Result<(), Error> {
        let MergeBuffers { undo, unused, .. } = scratch;
        undo.clear();
        undo.push((symbol.start, symbol.len));
        while let Some((start, len)) = undo.pop() {
            let text = &word[start as usize..(start + len) as usize];
            match self.index.find(&vocab.texts, text.as_bytes()) {
                None => self.push_bytes(vocab, text, out)?,
                Some(id) => match unused.get(&id) {
                    Some(&cut) => undo.extend([(start + cut, len - cut), (start, cut)]),
                    None => out.push(id),
                },
            }
        }
        Ok(())
    }

    fn push_bytes(&self, vocab: &Vocab, text: &str, out: &mut Vec<u32>) -> Result<(), Error> {
        let missing = text.bytes().find(|&b| self.bytes[usize::from(b)] == NONE);
        match (missing, vocab.unknown) {
            (None, _) => out.extend(text.bytes().map(|b| self.bytes[usize::from(b)])),
            (Some(_), Some(unknown)) => out.push(unknown),
            (Some(byte), None) => return Err(Error::Unencodable { byte }),
        }
        Ok(())
    }
}

/// True if a space mark stands behind another character.
/// Whether a token has a space mark behind another character.
pub(crate) fn has_inner_space(text: &[u8]) -> bool {
    let mark = SPM_SPACE.as_bytes();
    let mut rest = text;
    while let Some(after) = rest.strip_prefix(mark) {
        rest = after;
    }
    rest.windows(mark.len()).any(|window| window == mark)
}

/// Calls `emit` with each word of `text`: cut before each space mark that
/// stands behind another character.
pub(crate) fn split(
    text: &str,
    emit: &mut dyn FnMut(&str) -> Result<(), Error>,
) -> Result<(), Error> {
    let (mut start, mut in_word) = (0, false);
    let mark = SPM_SPACE.as_bytes();
    let bytes = text.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        if bytes[at..].starts_with(mark) {
            if in_word {
                emit(&text[start..at])?;
                start = at;
                in_word = false;
            }
            at += mark.len();
        } else {
            in_word = true;
            at += 1;
        }
    }
    if start < text.len() {
        emit(&text[start..])?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn candidates_order_by_score_then_from_the_left() {
        let mut heap = BinaryHeap::from([
            Candidate::new(-1.5, 0, 2),
            Candidate::new(0.0, 9, 2),
            Candidate::new(-0.0, 3, 2),
            Candidate::new(2.0, 7, 2),
            Candidate::new(f32::NEG_INFINITY, 1, 2),
        ]);
        let order: Vec<u32> = std::iter::from_fn(|| heap.pop())
            .map(Candidate::left)
            .collect();
        assert_eq!(order, [7, 3, 9, 0, 1]);
    }

    #[test]
    fn words_begin_at_space_marks() {
        let mut words = Vec::new();
        split("▁▁a▁bc▁▁▁d▁", &mut |word| {
            words.push(word.to_owned());
            Ok(())
        })
        .unwrap();
        assert_eq!(words, ["▁▁a", "▁bc", "▁▁▁d", "▁"]);
        assert!(has_inner_space("▁a▁".as_bytes()) && !has_inner_space("▁▁a".as_bytes()));
    }
}
