//! Byte-level BPE: inside a word, the adjacent pair whose merge has the lowest
//! rank is joined, leftmost first, until no pair has a merge.
//!
//! Short words are merged by scanning for the minimum, long ones through a
//! heap over a linked list, so that a word of megabytes takes n log n steps.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use crate::texts::{TextIndex, Texts};
use crate::vocab::{MAX_MERGES, MERGES, TokenType, Vocab, check_size};
use crate::{Error, byte_level};

/// No token, no rank, no neighbour.
const NONE: u32 = u32::MAX;

/// Words of more symbols than this are merged through the heap.
const SCAN_MAX: usize = 48;

/// The tables of one vocabulary.
#[derive(Debug)]
pub(crate) struct Bpe {
    index: TextIndex,
    /// Rank of the merge of two tokens (left id in the high half).
    ranks: HashMap<u64, u32, foldhash::fast::RandomState>,
    /// Token that each merge makes, by rank.
    merged: Vec<u32>,
    /// Token of each single byte.
    bytes: [u32; 256],
    /// A word that is a token is taken as it is.
    ignore_merges: bool,
}

/// Buffers that one encode reuses from word to word.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    symbols: Vec<Symbol>,
    heap: BinaryHeap<Reverse<u64>>,
    spelled: Vec<u8>,
}

#[derive(Debug, Clone, Copy)]
struct Symbol {
    token: u32,
    /// Rank of the merge with the next symbol.
    rank: u32,
    previous: u32,
    next: u32,
}

fn pair(left: u32, right: u32) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}

impl Bpe {
    /// Builds the tables; about 30 ms for 280,000 merges.
    pub(crate) fn build(vocab: &Vocab, merges: &Texts, ignore_merges: bool) -> Result<Bpe, Error> {
        check_size(MERGES, merges.len(), MAX_MERGES)?;
        let index = TextIndex::build(&vocab.texts, |_| true)?;
        let mut ranks =
            HashMap::with_capacity_and_hasher(merges.len(), foldhash::fast::RandomState::default());
        let mut merged = Vec::with_capacity(merges.len());
        let mut joined = Vec::new();
        for (rank, merge) in merges.iter().enumerate() {
            let (left, right) = halves(rank, merge)?;
            joined.clear();
            joined.extend_from_slice(left);
            joined.extend_from_slice(right);
            let id = |part: &[u8]| {
                index
                    .find(&vocab.texts, part)
                    .ok_or_else(|| Error::MergeUnknown {
                        index: rank,
                        merge: String::from_utf8_lossy(merge).into_owned(),
                        missing: String::from_utf8_lossy(part).into_owned(),
                    })
            };
            merged.push(id(&joined)?);
            // A rule that is there twice counts where it stands first.
            ranks
                .entry(pair(id(left)?, id(right)?))
                .or_insert(rank as u32);
        }
        let mut bytes = [NONE; 256];
        let mut spelled = Vec::with_capacity(2);
        for byte in 0..=u8::MAX {
            spelled.clear();
            byte_level::push_char(byte, &mut spelled);
            if let Some(id) = index.find(&vocab.texts, &spelled) {
                bytes[usize::from(byte)] = id;
            }
        }
        Ok(Bpe {
            index,
            ranks,
            merged,
            bytes,
            ignore_merges,
        })
    }

    fn rank(&self, left: u32, right: u32) -> u32 {
        self.ranks.get(&pair(left, right)).copied().unwrap_or(NONE)
    }

    fn byte_token(&self, vocab: &Vocab, byte: u8) -> Result<u32, Error> {
        match self.bytes[usize::from(byte)] {
            NONE => vocab.unknown.ok_or(Error::Unencodable { byte }),
            id => Ok(id),
        }
    }

    /// Appends the tokens of one word.
    pub(crate) fn encode_word(
        &self,
        vocab: &Vocab,
        word: &str,
        scratch: &mut Scratch,
        out: &mut Vec<u32>,
    ) -> Result<(), Error> {
        if let &[byte] = word.as_bytes() {
            out.push(self.byte_token(vocab, byte)?);
            return Ok(());
        }
        if self.ignore_merges && word.len() <= self.index.max_len() {
            scratch.spelled.clear();
            for byte in word.bytes() {
                byte_level::push_char(byte, &mut scratch.spelled);
            }
            if let Some(id) = self.index.find(&vocab.texts, &scratch.spelled)
                && vocab.token_type(id) == TokenType::Normal
            {
                out.push(id);
                return Ok(());
            }
        }
        self.load(vocab, word, scratch)?;
        if scratch.symbols.len() <= SCAN_MAX {
            self.merge_by_scan(&mut scratch.symbols);
            out.extend(scratch.symbols.iter().map(|symbol| symbol.token));
        } else {
            self.merge_by_heap(scratch);
            let mut at = 0;
            while let Some(symbol) = scratch.symbols.get(at as usize) {
                out.push(symbol.token);
                at = symbol.next;
            }
        }
        Ok(())
    }

    fn load(&self, vocab: &Vocab, word: &str, scratch: &mut Scratch) -> Result<(), Error> {
        scratch.symbols.clear();
        scratch.symbols.reserve(word.len());
        for (i, byte) in word.bytes().enumerate() {
            let token = self.byte_token(vocab, byte)?;
            if let Some(last) = scratch.symbols.last_mut() {
                last.rank = self.rank(last.token, token);
                last.next = i as u32;
            }
            scratch.symbols.push(Symbol {
                token,
                rank: NONE,
                previous: (i as u32).wrapping_sub(1),
                next: NONE,
            });
        }
        Ok(())
    }

    fn merge_by_scan(&self, symbols: &mut Vec<Symbol>) {
        loop {
            let lowest = symbols.iter().enumerate().min_by_key(|(_, s)| s.rank);
            let Some((at, &Symbol { rank, .. })) = lowest else {
                return;
            };
            if rank == NONE {
                return;
            }
            symbols[at].token = self.merged[rank as usize];
            symbols.remove(at + 1);
            symbols[at].rank = match symbols.get(at + 1) {
                Some(next) => self.rank(symbols[at].token, next.token),
                None => NONE,
            };
            if at > 0 {
                symbols[at - 1].rank = self.rank(symbols[at - 1].token, symbols[at].token);
            }
        }
    }

    fn merge_by_heap(&self, scratch: &mut Scratch) {
        let Scratch { symbols, heap, .. } = scratch;
        // A rank names one pair of tokens, so an entry holds as long as the
        // symbol at its position still has that rank with its neighbour.
        let entry = |rank: u32, at: u32| Reverse(u64::from(rank) << 32 | u64::from(at));
        heap.clear();
        heap.extend(
            symbols
                .iter()
                .enumerate()
                .filter(|(_, symbol)| symbol.rank != NONE)
                .map(|(at, symbol)| entry(symbol.rank, at as u32)),
        );
        while let Some(Reverse(key)) = heap.pop() {
            let (rank, at) = ((key >> 32) as u32, key as u32);
            let Symbol {
                rank: current,
                previous,
                next,
                ..
            } = symbols[at as usize];
            if current != rank {
                continue;
            }
            let token = self.merged[rank as usize];
            let after = symbols[next as usize].next;
            symbols[next as usize].rank = NONE;
            let rank = match symbols.get_mut(after as usize) {
                Some(symbol) => {
                    symbol.previous = at;
                    self.rank(token, symbol.token)
                }
                None => NONE,
            };
            symbols[at as usize] = Symbol {
                token,
                rank,
                previous,
                next: after,
            };
            if rank != NONE {
                heap.push(entry(rank, at));
            }
            if let Some(symbol) = symbols.get_mut(previous as usize) {
                symbol.rank = self.rank(symbol.token, token);
                if symbol.rank != NONE {
                    heap.push(entry(symbol.rank, previous));
                }
            }
        }
    }
}

/// The two tokens of a merge rule. The first may begin with a space.
fn halves(index: usize, merge: &[u8]) -> Result<(&[u8], &[u8]), Error> {
    let space = merge.iter().skip(1).position(|&b| b == b' ');
    match space.map(|i| (&merge[..=i], &merge[i + 2..])) {
        Some((left, right)) if !right.is_empty() => Ok((left, right)),
        _ => Err(Error::MergeForm {
            index,
            merge: String::from_utf8_lossy(merge).into_owned(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use proptest::prelude::*;

    #[test]
    fn halves_of_a_merge() {
        assert_eq!(halves(0, b"a b").unwrap(), (&b"a"[..], &b"b"[..]));
        for bad in [&b""[..], b" ", b"a", b"a ", b" a", b"ab"] {
            let error = halves(7, bad).unwrap_err();
            assert!(
                matches!(error, Error::MergeForm { index: 7, .. }),
                "{bad:?}"
            );
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
        /// The two ways of merging, and the definition: find the pair of the
        /// lowest rank, join its leftmost occurrence, again.
        #[test]
        fn heap_scan_and_definition_agree(word in "[abc]{2,300}") {
            let (vocab, merges) = fixture::bpe(
                &["ab", "bc", "abc", "aa", "aaaa", "ca", "cab", "bcab"],
                &["a b", "b c", "a a", "aa aa", "c a", "ab c", "c ab", "bc ab"],
            );
            let bpe = Bpe::build(&vocab, &merges, false).unwrap();
            let mut scratch = Scratch::default();
            bpe.load(&vocab, &word, &mut scratch).unwrap();
            let mut scanned = scratch.symbols.clone();
            bpe.merge_by_scan(&mut scanned);
            bpe.merge_by_heap(&mut scratch);
            let scanned: Vec<u32> = scanned.iter().map(|s| s.token).collect();
            let (mut heaped, mut at) = (Vec::new(), 0);
            while let Some(symbol) = scratch.symbols.get(at as usize) {
                heaped.push(symbol.token);
                at = symbol.next;
            }
            let mut defined: Vec<String> = word.chars().map(String::from).collect();
            'again: loop {
                for merge in merges.iter() {
                    let (left, right) = halves(0, merge).unwrap();
                    let found = defined
                        .windows(2)
                        .position(|w| w[0].as_bytes() == left && w[1].as_bytes() == right);
                    if let Some(at) = found {
                        let right = defined.remove(at + 1);
                        defined[at].push_str(&right);
                        continue 'again;
                    }
                }
                break;
            }
            let texts: Vec<&[u8]> = heaped.iter().map(|&id| vocab.texts.get(id as usize).unwrap()).collect();
            prop_assert_eq!(&scanned, &heaped);
            prop_assert_eq!(texts, defined.iter().map(String::as_bytes).collect::<Vec<_>>());
        }
    }
}
