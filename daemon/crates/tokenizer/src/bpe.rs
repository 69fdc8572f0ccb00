//! BPE by merge rules: inside a word, the adjacent pair whose merge has the lowest
//! rank is joined, leftmost first, until no pair has a merge.
//!
//! Short words are merged by scanning for the minimum, long ones through a
//! heap over a linked list, so that a word of megabytes takes n log n steps.
//!
//! Words begin as bytes, each written as a character of GPT-2's alphabet; in
//! *raw* vocabularies (gemma4) as characters, and as byte tokens where there
//! is no token for a character. What has neither is left out.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::ops::Range;

use crate::pre_tokenizer::PreTokenizer;
use crate::texts::{TextIndex, Texts};
use crate::vocab::{MAX_MERGES, MERGES, TokenType, Vocab, Words, check_most};
use crate::{Error, byte_level};

/// No token, no rank, no neighbour.
const NONE: u32 = u32::MAX;

/// Words of more symbols than this are merged through the heap.
const SCAN_MAX: usize = 48;

/// Maximum number of threads that look up the tokens of merges, and the fewest merges that are
/// worth one.
const FIND_THREADS_MAX: usize = 8;
const FIND_SHARE_MIN: usize = 8 << 10;

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
    /// Words are not written in GPT-2's alphabet.
    raw: bool,
}

/// Buffers that one encode reuses from word to word.
#[derive(Debug, Default)]
pub(crate) struct MergeBuffers {
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

/// The tokens of a merge.
#[derive(Debug, Clone, Copy)]
struct Merge {
    left: u32,
    right: u32,
    joined: u32,
}

/// The tokens of all merges, in order; `None` for a rule that no text could follow.
fn find_all(index: &TextIndex, vocab: &Words, merges: &Texts) -> Vec<Option<Merge>> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let share = merges.len().div_ceil(threads.min(FIND_THREADS_MAX));
    let share = share.max(FIND_SHARE_MIN);
    let find = move |first: usize| {
        let share = first..merges.len().min(first + share);
        find_share(index, vocab, merges, share)
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = (share..merges.len())
            .step_by(share)
            .map(|first| {
                let name = "vocabulary".to_owned();
                let thread = std::thread::Builder::new().name(name);
                (first, thread.spawn_scoped(scope, move || find(first)))
            })
            .collect();
        let mut all = find(0);
        all.reserve(merges.len() - all.len());
        for (first, thread) in others {
            all.extend(match thread {
                Ok(thread) => thread
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
                // The system gives no thread more.
                Err(_) => find(first),
            });
        }
        all
    })
}

fn find_share(
    index: &TextIndex,
    vocab: &Words,
    merges: &Texts,
    share: Range<usize>,
) -> Vec<Option<Merge>> {
    let mut found = Vec::with_capacity(share.len());
    let mut joined = Vec::new();
    for rank in share {
        let merge = merges.get(rank).unwrap_or_default();
        found.push(halves(merge).and_then(|(left, right)| {
            joined.clear();
            joined.extend_from_slice(left);
            joined.extend_from_slice(right);
            let id = |part: &[u8]| index.find(&vocab.texts, part);
            Some(Merge {
                joined: id(&joined)?,
                left: id(left)?,
                right: id(right)?,
            })
        }));
    }
    found
}

impl Bpe {
    /// Builds the tables. Most of the time goes to looking up three tokens a merge, which
    /// are shared out to threads. Rules that no text could follow, which llama.cpp takes without a
    /// word, are left out and told in `tolerated`.
    pub(crate) fn build(
        vocab: &Words,
        merges: &Texts,
        pre: PreTokenizer,
        tolerated: &mut Vec<String>,
    ) -> Result<Bpe, Error> {
        check_most(MERGES, merges.len(), MAX_MERGES)?;
        let index = TextIndex::build(&vocab.texts, |_| true)?;
        let mut ranks =
            HashMap::with_capacity_and_hasher(merges.len(), foldhash::fast::RandomState::default());
        let mut merged = Vec::with_capacity(merges.len());
        let mut left_out: Option<(usize, usize)> = None;
        for (rank, found) in find_all(&index, vocab, merges).iter().enumerate() {
            let Some(found) = found else {
                merged.push(NONE);
                left_out = Some(left_out.map_or((rank, 1), |(first, n)| (first, n + 1)));
                continue;
            };
            merged.push(found.joined);
            // A rule that is there twice counts where it stands first.
            ranks
                .entry(pair(found.left, found.right))
                .or_insert(rank as u32);
        }
        if let Some((first, n)) = left_out {
            let merge = String::from_utf8_lossy(merges.get(first).unwrap_or_default());
            tolerated.push(format!(
                "{n} of {} merges are not two tokens that make a third, the first of them merge {first} ({merge:?}); \
                 they are left out",
                merges.len()
            ));
        }
        let mut bytes = [NONE; 256];
        let mut spelled = Vec::with_capacity(6);
        for byte in 0..=u8::MAX {
            spelled.clear();
            if pre.raw {
                spelled.extend_from_slice(format!("<0x{byte:02X}>").as_bytes());
            } else {
                byte_level::push_char(byte, &mut spelled);
            }
            if let Some(id) = index.find(&vocab.texts, &spelled) {
                bytes[usize::from(byte)] = id;
            }
        }
        Ok(Bpe {
            index,
            ranks,
            merged,
            bytes,
            ignore_merges: pre.ignore_merges,
            raw: pre.raw,
        })
    }

    /// Bytes of memory.
    pub(crate) fn memory_bytes(&self) -> usize {
        // A hash table has a control byte a place, and up to an eighth of its places free.
        let rank = size_of::<(u64, u32)>() + 1;
        let ranks = self.ranks.capacity() * 8 / 7 * rank;
        let merged = self.merged.capacity() * size_of::<u32>();
        self.index.memory_bytes() + ranks + merged
    }

    fn rank(&self, left: u32, right: u32) -> u32 {
        self.ranks.get(&pair(left, right)).copied().unwrap_or(NONE)
    }

    /// Appends the tokens of one word.
    pub(crate) fn encode_word(
        &self,
        vocab: &Vocab,
        word: &str,
        scratch: &mut MergeBuffers,
        out: &mut Vec<u32>,
    ) {
        if let &[byte] = word.as_bytes()
            && !self.raw
        {
            out.extend(Some(self.bytes[usize::from(byte)]).filter(|&id| id != NONE));
            return;
        }
        if let Some(id) = self.whole(vocab, word, scratch) {
            out.push(id);
            return;
        }
        self.load(vocab, word, scratch);
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
    }

    /// The token that a word is taken for without merges.
    fn whole(&self, vocab: &Vocab, word: &str, scratch: &mut MergeBuffers) -> Option<u32> {
        if self.raw {
            // Runs of line ends are tokens that no merge makes.
            let lines = word.bytes().all(|byte| byte == b'\n');
            return self
                .index
                .find(&vocab.texts, word.as_bytes())
                .filter(|_| lines);
        }
        if !self.ignore_merges || word.len() > self.index.max_len() {
            return None;
        }
        scratch.spelled.clear();
        for byte in word.bytes() {
            byte_level::push_char(byte, &mut scratch.spelled);
        }
        let id = self.index.find(&vocab.texts, &scratch.spelled);
        id.filter(|&id| vocab.token_type(id) == TokenType::Normal)
    }

    /// Fills the scratch with the tokens that the word begins as.
    fn load(&self, vocab: &Vocab, word: &str, scratch: &mut MergeBuffers) {
        let symbols = &mut scratch.symbols;
        symbols.clear();
        symbols.reserve(word.len());
        let mut from = 0;
        while self.raw && from < word.len() {
            let len = word[from..].chars().next().map_or(1, char::len_utf8);
            let character = &word.as_bytes()[from..from + len];
            match self.index.find(&vocab.texts, character) {
                Some(id) => self.push(id, symbols),
                None => self.push_bytes(character, symbols),
            }
            from += len;
        }
        if !self.raw {
            self.push_bytes(word.as_bytes(), symbols);
        }
    }

    fn push_bytes(&self, bytes: &[u8], symbols: &mut Vec<Symbol>) {
        for &byte in bytes {
            let id = self.bytes[usize::from(byte)];
            if id != NONE {
                self.push(id, symbols);
            }
        }
    }

    fn push(&self, token: u32, symbols: &mut Vec<Symbol>) {
        let at = symbols.len() as u32;
        if let Some(last) = symbols.last_mut() {
            last.rank = self.rank(last.token, token);
            last.next = at;
        }
        symbols.push(Symbol {
            token,
            rank: NONE,
            previous: at.wrapping_sub(1),
            next: NONE,
        });
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

    fn merge_by_heap(&self, scratch: &mut MergeBuffers) {
        let MergeBuffers { symbols, heap, .. } = scratch;
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
fn halves(merge: &[u8]) -> Option<(&[u8], &[u8])> {
    let space = merge.iter().skip(1).position(|&b| b == b' ')?;
    let (left, right) = (&merge[..=space], &merge[space + 2..]);
    (!right.is_empty()).then_some((left, right))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use proptest::prelude::*;

    #[test]
    fn halves_of_a_merge() {
        assert_eq!(halves(b"a b"), Some((&b"a"[..], &b"b"[..])));
        for bad in [&b""[..], b" ", b"a", b"a ", b" a", b"ab"] {
            assert_eq!(halves(bad), None, "{bad:?}");
        }
    }

    /// As many merges as several threads share: each is at its rank, and of two
    /// that are left out the first is told.
    #[test]
    fn merges_of_all_shares_are_in_their_order() {
        let n = 3 * FIND_SHARE_MIN + 5;
        let tokens: Vec<String> = (0..n).map(|i| format!("x{i}")).collect();
        let joined = tokens.iter().map(|t| format!("{t}b"));
        let tokens: Vec<String> = tokens.iter().cloned().chain(joined).collect();
        let merges: Vec<String> = (0..n).map(|i| format!("x{i} b")).collect();
        let build = |merges: &[String]| {
            let tokens: Vec<&str> = tokens.iter().map(String::as_str).collect();
            let merges: Vec<&str> = merges.iter().map(String::as_str).collect();
            let (vocab, merges) = fixture::bpe(&tokens, &merges);
            let pre = PreTokenizer::by_name(Some("gpt-2")).unwrap();
            let mut tolerated = Vec::new();
            let bpe = Bpe::build(&vocab, &merges, pre, &mut tolerated).unwrap();
            (bpe, tolerated)
        };
        let (bpe, tolerated) = build(&merges);
        assert!(tolerated.is_empty());
        for rank in [0, 1, n / 2, n - 1] {
            let left = 256 + rank as u32;
            assert_eq!(bpe.rank(left, bpe.bytes[usize::from(b'b')]), rank as u32);
            assert_eq!(bpe.merged[rank], left + n as u32);
        }
        let mut wrong = merges;
        wrong[n - 2] = "no such".into();
        wrong[FIND_SHARE_MIN + 3] = "x1 x2".into();
        let (bpe, tolerated) = build(&wrong);
        let [remark] = &tolerated[..] else {
            panic!("{tolerated:?}")
        };
        let first = FIND_SHARE_MIN + 3;
        assert!(
            remark.contains(&format!("2 of {n} merges"))
                && remark.contains(&format!("merge {first} ")),
            "{remark}"
        );
        // The others are where they were.
        for rank in [first - 1, first + 1, n - 1] {
            let left = 256 + rank as u32;
            assert_eq!(bpe.rank(left, bpe.bytes[usize::from(b'b')]), rank as u32);
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
            let pre = PreTokenizer::by_name(Some("gpt-2")).unwrap();
            let bpe = Bpe::build(&vocab, &merges, pre, &mut Vec::new()).unwrap();
            let mut scratch = MergeBuffers::default();
            bpe.load(&vocab, &word, &mut scratch);
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
                    let (left, right) = halves(merge).unwrap();
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
