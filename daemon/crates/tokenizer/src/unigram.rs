//! SentencePiece's unigram model (Kudo 2018, arXiv 1804.10959), T5's and XLM-RoBERTa's: of all ways
//! to cut a text into tokens the one with the largest sum of scores, found by Viterbi's algorithm.
//! A character without a token counts as an unknown one, ten less than the least score; unknown
//! ones that follow each other are one token.
//!
//! Before, characters are replaced by the file's own table
//! (`tokenizer.ggml.precompiled_charsmap`), a double array of UTF-8 and its replacements, of which
//! the longest entry counts; then white space is put in order.

use crate::Error;
use crate::vocab::{SPM_SPACE, TokenType, Vocab, Words};

/// How much less than the least score an unknown character counts.
const UNKNOWN_PENALTY: f64 = 10.0;

/// Maximum number of bytes of a table of replacements.
pub(crate) const CHARSMAP_MAX_BYTES: usize = 16 << 20;

/// The tables of one vocabulary.
#[derive(Debug)]
pub(crate) struct Unigram {
    /// Ids of the tokens that text is cut into, in the order of their texts.
    sorted: Vec<u32>,
    /// For each first byte, the index of the first token that begins with it.
    first: Vec<u32>,
    unknown_score: f64,
    /// No token has a space mark behind another character.
    splits_at_spaces: bool,
    replacements: Option<Replacements>,
}

/// The best path to an offset of the text.
#[derive(Debug, Clone, Copy)]
struct Way {
    score: f64,
    token: u32,
    from: u32,
}

/// Buffers that one encode reuses from word to word.
#[derive(Debug, Default)]
pub(crate) struct Lattice {
    ways: Vec<Way>,
    tokens: Vec<u32>,
}

/// Stands for the token of a character that the vocabulary lacks.
const UNKNOWN: u32 = u32::MAX;
const NOWHERE: Way = Way {
    score: f64::NEG_INFINITY,
    token: UNKNOWN,
    from: 0,
};

impl Unigram {
    /// Bytes of memory.
    pub(crate) fn memory_bytes(&self) -> usize {
        let replacements = self.replacements.as_ref();
        let replacements = replacements.map_or(0, |r| r.units.len() * 4 + r.texts.len());
        (self.sorted.len() + self.first.len()) * 4 + replacements
    }

    /// Builds the tables.
    pub(crate) fn build(vocab: &Words, charsmap: Option<&[u8]>) -> Result<Unigram, Error> {
        let is_piece = |id: &u32| {
            let fits = matches!(
                vocab.token_type(*id),
                TokenType::Normal | TokenType::UserDefined | TokenType::Unused
            );
            fits && vocab.texts.get(*id as usize).is_some_and(|t| !t.is_empty())
        };
        let text = |id: u32| vocab.texts.get(id as usize).unwrap_or_default();
        let mut sorted: Vec<u32> = (0..vocab.n_vocab() as u32).filter(is_piece).collect();
        sorted.sort_unstable_by(|&a, &b| text(a).cmp(text(b)).then(a.cmp(&b)));
        sorted.dedup_by(|later, first| text(*later) == text(*first));
        let at = |byte: usize| sorted.partition_point(|&id| usize::from(text(id)[0]) < byte) as u32;
        let first = (0..=256).map(at).collect();
        let least = sorted.iter().map(|&id| vocab.scores[id as usize]);
        let least = least.filter(|s| s.is_finite()).fold(0.0, f32::min);
        Ok(Unigram {
            first,
            unknown_score: f64::from(least) - UNKNOWN_PENALTY,
            splits_at_spaces: !sorted
                .iter()
                .any(|&id| crate::spm::has_inner_space(text(id))),
            replacements: charsmap.map(Replacements::read).transpose()?,
            sorted,
        })
    }

    /// Calls `emit` with each part of a text that is cut by itself, characters replaced and spaces
    /// marked.
    pub(crate) fn split(
        &self,
        text: &str,
        prefix: bool,
        keeps_spaces: bool,
        emit: &mut dyn FnMut(&str) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let replaced;
        let text = match &self.replacements {
            Some(replacements) => {
                replaced = replacements.apply(text);
                &replaced
            }
            None => text,
        };
        let mut marked = String::with_capacity(text.len() + text.len() / 4 + SPM_SPACE.len());
        match keeps_spaces {
            true => {
                if prefix {
                    marked.push_str(SPM_SPACE);
                }
                let mark = |c| if c == ' ' { '\u{2581}' } else { c };
                marked.extend(text.chars().map(mark));
            }
            false => {
                for word in text.split_whitespace() {
                    // A mark that a text has itself is no other one's.
                    if (prefix || !marked.is_empty()) && !word.starts_with(SPM_SPACE) {
                        marked.push_str(SPM_SPACE);
                    }
                    marked.push_str(word);
                }
            }
        }
        match self.splits_at_spaces {
            true => crate::spm::split(&marked, emit),
            false if marked.is_empty() => Ok(()),
            false => emit(&marked),
        }
    }

    /// Appends the tokens of a part of a text.
    pub(crate) fn encode_word(
        &self,
        vocab: &Vocab,
        word: &str,
        lattice: &mut Lattice,
        out: &mut Vec<u32>,
    ) {
        let bytes = word.as_bytes();
        let Lattice { ways, tokens } = lattice;
        ways.clear();
        ways.resize(bytes.len() + 1, NOWHERE);
        ways[0].score = 0.0;
        for (start, c) in word.char_indices() {
            let before = ways[start].score;
            let mut improve = |end: usize, score: f64, token: u32| {
                let score = before + score;
                if score > ways[end].score {
                    let from = start as u32;
                    ways[end] = Way { score, token, from };
                }
            };
            let character = c.len_utf8();
            let mut has_character = false;
            self.tokens_at(vocab, &bytes[start..], |len, id| {
                has_character |= len == character;
                let score = match vocab.token_type(id) {
                    TokenType::UserDefined => 0.0,
                    _ => f64::from(vocab.scores[id as usize]),
                };
                improve(start + len, score, id);
            });
            if !has_character {
                improve(start + character, self.unknown_score, UNKNOWN);
            }
        }
        tokens.clear();
        let mut at = bytes.len();
        while at > 0 {
            tokens.push(ways[at].token);
            at = ways[at].from as usize;
        }
        let unknown = vocab.unknown;
        let mut was_unknown = false;
        for &token in tokens.iter().rev() {
            let is_unknown = token == UNKNOWN;
            match (is_unknown, was_unknown) {
                (false, _) => out.push(token),
                (true, false) => out.extend(unknown),
                (true, true) => {}
            }
            was_unknown = is_unknown;
        }
    }

    /// Calls `found` with the length and the id of each token that `bytes` begin with.
    fn tokens_at(&self, vocab: &Vocab, bytes: &[u8], mut found: impl FnMut(usize, u32)) {
        let first = usize::from(bytes[0]);
        let (mut from, mut to) = (self.first[first] as usize, self.first[first + 1] as usize);
        let text = |id: u32| vocab.texts.get(id as usize).unwrap_or_default();
        for (len, &byte) in (0..).zip(bytes) {
            let these = &self.sorted[from..to];
            // Those that end here come first of those that begin so; longer ones go by their byte.
            let below = these.partition_point(|&id| text(id).get(len).is_none_or(|&b| b < byte));
            let not_above =
                these.partition_point(|&id| text(id).get(len).is_none_or(|&b| b <= byte));
            (from, to) = (from + below, from + not_above);
            match self.sorted[from..to].first() {
                None => return,
                Some(&id) if text(id).len() == len + 1 => found(len + 1, id),
                Some(_) => {}
            }
        }
    }
}

/// What replaces characters: a double array over bytes (darts-clone's form) whose values are places
/// of texts that end with 0.
#[derive(Debug)]
struct Replacements {
    units: Vec<u32>,
    texts: Vec<u8>,
}

impl Replacements {
    fn read(bytes: &[u8]) -> Result<Replacements, Error> {
        let bad = |why: &'static str| Error::Charsmap { why };
        let (size, rest) = bytes.split_first_chunk::<4>().ok_or(bad("has no size"))?;
        let size = u32::from_le_bytes(*size) as usize;
        if size > rest.len() || !size.is_multiple_of(4) {
            return Err(bad("is shorter than its array"));
        }
        let (array, texts) = rest.split_at(size);
        let (units, _) = array.as_chunks::<4>();
        if std::str::from_utf8(texts).is_err() {
            return Err(bad("has replacements that are no UTF-8"));
        }
        Ok(Replacements {
            units: units.iter().map(|unit| u32::from_le_bytes(*unit)).collect(),
            texts: texts.to_vec(),
        })
    }

    fn apply(&self, text: &str) -> String {
        let mut out = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(c) = rest.chars().next() {
            match self.longest(rest) {
                Some((len, replacement)) => {
                    out.push_str(replacement);
                    rest = &rest[len..];
                }
                None => {
                    out.push(c);
                    rest = &rest[c.len_utf8()..];
                }
            }
        }
        out
    }

    /// The longest entry that a text begins with: its bytes, and what replaces it.
    fn longest(&self, text: &str) -> Option<(usize, &str)> {
        let offset = |unit: u32| ((unit >> 10) << ((unit & (1 << 9)) >> 6)) as usize;
        let mut at = offset(*self.units.first()?);
        let mut found = None;
        for (len, &byte) in (1..).zip(text.as_bytes()) {
            at ^= usize::from(byte);
            let Some(&unit) = self.units.get(at) else {
                break;
            };
            if unit & (1 << 31 | 0xFF) != u32::from(byte) {
                break;
            }
            at ^= offset(unit);
            let has_value = unit >> 8 & 1 == 1;
            if has_value && let Some(&value) = self.units.get(at) {
                found = Some((len, (value & !(1 << 31)) as usize));
            }
        }
        let (len, place) = found.filter(|(len, _)| text.is_char_boundary(*len))?;
        let texts = std::str::from_utf8(&self.texts).ok()?;
        let replacement = texts.get(place..)?.split('\0').next()?;
        Some((len, replacement))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Tokenizer;
    use crate::fixture::texts;
    use crate::vocab::{Usage, VocabData};

    /// `<s>`, `<pad>`, `</s>`, `<unk>`, then these with their scores.
    fn tokenizer(tokens: &[(&str, f32)]) -> Tokenizer {
        let names = ["<s>", "<pad>", "</s>", "<unk>"];
        let all = names.iter().copied().chain(tokens.iter().map(|t| t.0));
        let mut types = vec![3, 3, 3, 2];
        types.resize(names.len() + tokens.len(), 1);
        let mut scores = vec![0.0; names.len()];
        scores.extend(tokens.iter().map(|t| t.1));
        let mut special = [None; crate::vocab::SPECIAL_KEYS.len()];
        special[crate::vocab::BOS] = Some(0);
        special[crate::vocab::EOS] = Some(2);
        special[crate::vocab::UNK] = Some(3);
        Tokenizer::new(VocabData {
            model: "t5".into(),
            tokens: texts(all.map(str::as_bytes)),
            types: Some(types),
            scores: Some(scores),
            usage: Usage {
                special,
                add_bos: Some(true),
                add_eos: Some(true),
                ..Usage::default()
            },
            ..VocabData::default()
        })
        .unwrap()
    }

    #[test]
    fn the_cut_has_the_largest_sum_of_scores_and_unknown_characters_are_one() {
        let tokenizer = tokenizer(&[
            ("▁", -2.0),
            ("a", -3.0),
            ("b", -3.0),
            ("ab", -4.0),
            ("▁a", -3.5),
            ("▁ab", -9.0),
        ]);
        let ids = |text: &str| tokenizer.encode(text, true, false).unwrap();
        // "▁a" "b" is -6.5; "▁" "ab" is -6.
        assert_eq!(ids("ab"), [0, 4, 7, 2]);
        assert_eq!(ids("  a \n b  "), [0, 8, 4, 6, 2]);
        assert_eq!(ids("axyzb"), [0, 8, 3, 6, 2]);
        assert_eq!(ids(""), [0, 2]);
    }

    /// A double array of one entry, "A" to "a": the root's children begin at 1, so that "A" is unit
    /// 1 ^ 0x41, whose own child, the value, is at that place ^ 2.
    #[test]
    fn characters_are_replaced_by_the_files_table() {
        let at = 1usize ^ 0x41;
        let mut units = vec![0u32; 128];
        units[0] = 1 << 10;
        units[at] = 2 << 10 | 1 << 8 | 0x41;
        units[at ^ 2] = 1 << 31;
        let mut bytes = ((units.len() * 4) as u32).to_le_bytes().to_vec();
        bytes.extend(units.iter().flat_map(|unit| unit.to_le_bytes()));
        bytes.extend(b"a\0");
        let replacements = Replacements::read(&bytes).unwrap();
        assert_eq!(replacements.apply("AbA\u{e9}"), "aba\u{e9}");
        for cut in 0..bytes.len() {
            // A damaged table is refused or read within its bounds.
            if let Ok(replacements) = Replacements::read(&bytes[..cut]) {
                replacements.apply("AbA\u{e9}");
            }
        }
    }
}
