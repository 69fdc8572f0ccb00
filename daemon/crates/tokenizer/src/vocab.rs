//! The vocabulary of a file, checked: tokens, their types and scores, special
//! ids and flags.
//!
//! Everything here is one pass over the tokens. What needs a hash table
//! (duplicates, merges) is checked by the tables.

use std::ops::Deref;
use std::sync::Arc;

use crate::names::named_ends;
use crate::pre_tokenizer::PreTokenizer;
use crate::texts::Texts;
use crate::{Error, byte_level};

/// Tokens a vocabulary may have.
pub(crate) const MAX_TOKENS: usize = 1 << 22;
/// Bytes that the name of a special token may have, and all of them together:
/// text is searched for them, with tables that grow with their product.
pub(crate) const MAX_SPECIAL_BYTES: usize = 256;
pub(crate) const MAX_SPECIALS_BYTES: usize = 1 << 20;
/// Merges a vocabulary may have.
pub(crate) const MAX_MERGES: usize = 1 << 23;
/// Maximum number of remarks kept about tolerated defects of a vocabulary.
pub(crate) const TOLERATED_MAX: usize = 16;

pub(crate) const TOKENS: &str = "tokenizer.ggml.tokens";
pub(crate) const SCORES: &str = "tokenizer.ggml.scores";
pub(crate) const TYPES: &str = "tokenizer.ggml.token_type";
pub(crate) const MERGES: &str = "tokenizer.ggml.merges";
pub(crate) const MODEL: &str = "tokenizer.ggml.model";

/// What a file says about its vocabulary, as read, unchecked.
#[derive(Debug, Default, Clone)]
pub(crate) struct VocabData {
    pub(crate) model: String,
    pub(crate) pre: Option<String>,
    /// `general.name`
    pub(crate) name: Option<String>,
    pub(crate) tokens: Texts,
    pub(crate) scores: Option<Vec<f32>>,
    pub(crate) types: Option<Vec<i32>>,
    pub(crate) merges: Option<Texts>,
    /// What replaces characters before unigrams are cut.
    pub(crate) charsmap: Option<Vec<u8>>,
    /// Read apart from the rest, but in tests.
    #[cfg(test)]
    pub(crate) usage: Usage,
}

/// What a file says about how its tokens are used, as read, unchecked.
#[derive(Debug, Default, Clone)]
pub(crate) struct Usage {
    /// Value of each of [`SPECIAL_KEYS`].
    pub(crate) special: [Option<i64>; SPECIAL_KEYS.len()],
    pub(crate) add_bos: Option<bool>,
    pub(crate) add_eos: Option<bool>,
    pub(crate) add_space_prefix: Option<bool>,
    pub(crate) remove_extra_whitespaces: Option<bool>,
}

/// Keys of special token ids; [`BOS`] and so on index it.
pub(crate) const SPECIAL_KEYS: [&str; 11] = [
    "tokenizer.ggml.bos_token_id",
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.unknown_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
    "tokenizer.ggml.fim_pad_token_id",
    "tokenizer.ggml.fim_rep_token_id",
    "tokenizer.ggml.fim_sep_token_id",
    "tokenizer.ggml.padding_token_id",
    "tokenizer.ggml.cls_token_id",
    // As the format spells it.
    "tokenizer.ggml.seperator_token_id",
];
pub(crate) const BOS: usize = 0;
pub(crate) const EOS: usize = 1;
pub(crate) const UNK: usize = 2;
pub(crate) const CLS: usize = 9;
pub(crate) const SEP: usize = 10;
/// Of [`SPECIAL_KEYS`], those that end a generation.
const ENDS: [usize; 6] = [EOS, 3, 4, 5, 6, 7];

/// What kind of token it is; the numbers are the file format's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TokenType {
    Undefined = 0,
    Normal = 1,
    Unknown = 2,
    Control = 3,
    UserDefined = 4,
    Unused = 5,
    Byte = 6,
}

impl TokenType {
    fn from_i32(value: i32) -> Option<TokenType> {
        Some(match value {
            0 => TokenType::Undefined,
            1 => TokenType::Normal,
            2 => TokenType::Unknown,
            3 => TokenType::Control,
            4 => TokenType::UserDefined,
            5 => TokenType::Unused,
            6 => TokenType::Byte,
            _ => return None,
        })
    }
}

/// The algorithm that turns text into tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Algorithm {
    /// BPE by merge rules, with the rules of a pre-tokenizer.
    Bpe(PreTokenizer),
    /// SentencePiece BPE: the pair with the highest score is merged first.
    Spm,
    /// SentencePiece's unigram model: the cut with the largest sum of scores.
    Unigram,
    /// BERT's: the longest pieces of each word.
    WordPiece,
}

/// SentencePiece's mark for a space.
pub(crate) const SPM_SPACE: &str = "\u{2581}";

/// The tokens of a vocabulary, checked. Ids index `texts`, `pieces` and `types` alike. Models that
/// have the same tokens share them.
#[derive(Debug)]
pub(crate) struct Words {
    pub(crate) algorithm: Algorithm,
    /// Tokens as the file spells them.
    pub(crate) texts: Texts,
    /// The bytes that each token stands for.
    pub(crate) pieces: Texts,
    pub(crate) types: Vec<TokenType>,
    /// Scores, for SentencePiece only.
    pub(crate) scores: Vec<f32>,
    /// Tokens that end a generation by their names.
    named_ends: Vec<u32>,
    /// Bytes of text that one token takes at most; at least 1.
    pub(crate) max_token_bytes: usize,
    /// Special tokens take the white space that follows them.
    pub(crate) special_rstrip: bool,
    /// Remarks about tokens that are wrong but do not prevent the use of the vocabulary.
    pub(crate) tolerated: Vec<String>,
}

/// A checked vocabulary: tokens, and what a file says of how they are used.
#[derive(Debug)]
pub(crate) struct Vocab {
    words: Arc<Words>,
    pub(crate) bos: Option<u32>,
    pub(crate) eos: Option<u32>,
    pub(crate) unknown: Option<u32>,
    pub(crate) add_bos: bool,
    pub(crate) add_eos: bool,
    pub(crate) add_space_prefix: bool,
    /// White space of a text is kept as it is; of unigrams alone.
    pub(crate) keeps_spaces: bool,
    /// Tokens that end a generation, ascending.
    pub(crate) ends: Vec<u32>,
    /// Defects of the vocabulary that were tolerated, as text.
    pub(crate) tolerated: Vec<String>,
}

impl Deref for Vocab {
    type Target = Words;

    fn deref(&self) -> &Words {
        &self.words
    }
}

/// Whether special tokens of a model of this name take the white space behind them.
pub(crate) fn strips_behind_specials(name: Option<&str>) -> bool {
    let name = name.unwrap_or_default().to_ascii_lowercase();
    name.contains("phi-3") || name.contains("phi3")
}

impl Words {
    /// Checks the tokens of `data`; its merges are left to the caller.
    pub(crate) fn new(data: VocabData) -> Result<Words, Error> {
        let algorithm = match data.model.as_str() {
            "gpt2" => Algorithm::Bpe(PreTokenizer::by_name(data.pre.as_deref())?),
            "llama" => Algorithm::Spm,
            "t5" => Algorithm::Unigram,
            "bert" => Algorithm::WordPiece,
            "gemma4" => Algorithm::Bpe(PreTokenizer::by_name(Some("gemma4"))?),
            _ => {
                return Err(Error::UnknownModel {
                    model: data.model,
                    supported: "gpt2, llama, gemma4, t5, bert",
                });
            }
        };
        let n_vocab = check_size(TOKENS, data.tokens.len(), MAX_TOKENS)?;
        let mut tolerated = Vec::new();
        let mut types = check_types(data.types, n_vocab, &mut tolerated)?;
        let scores = match (algorithm, data.scores) {
            (Algorithm::Spm | Algorithm::Unigram, None) => {
                tolerated.push(format!(
                    "the file has no {SCORES}; all tokens have the same score"
                ));
                vec![0.0; n_vocab]
            }
            (Algorithm::Spm | Algorithm::Unigram, Some(scores)) => {
                check_scores(scores, n_vocab, &mut tolerated)?
            }
            // They are not used.
            (Algorithm::Bpe(_) | Algorithm::WordPiece, _) => Vec::new(),
        };
        let named_ends = named_ends(&data.tokens, &mut types);
        check_specials(&data.tokens, &types, &mut tolerated)?;
        let text_max = data.tokens.max_len();
        let pieces = pieces(algorithm, &data.tokens, &types)?;
        Ok(Words {
            algorithm,
            max_token_bytes: pieces.max_len().max(text_max).max(1),
            texts: data.tokens,
            pieces,
            types,
            scores,
            named_ends,
            special_rstrip: strips_behind_specials(data.name.as_deref()),
            tolerated,
        })
    }

    /// Bytes of memory.
    pub(crate) fn memory_bytes(&self) -> usize {
        let types = self.types.capacity() * size_of::<TokenType>();
        let scores = self.scores.capacity() * size_of::<f32>();
        self.texts.memory_bytes() + self.pieces.memory_bytes() + types + scores
    }

    pub(crate) fn n_vocab(&self) -> usize {
        self.texts.len()
    }

    /// Whether no token takes more bytes of text than its own: then a long text has many tokens.
    pub(crate) fn tokens_take_their_bytes(&self) -> bool {
        let cleans = matches!(self.algorithm, Algorithm::Unigram | Algorithm::WordPiece);
        !self.special_rstrip && !cleans
    }

    /// The type of `id`; tokens outside of the vocabulary are undefined.
    pub(crate) fn token_type(&self, id: u32) -> TokenType {
        self.types
            .get(id as usize)
            .copied()
            .unwrap_or(TokenType::Undefined)
    }
}

impl Vocab {
    /// Checks `data`; its merges are left to the caller.
    #[cfg(test)]
    pub(crate) fn new(data: VocabData) -> Result<Vocab, Error> {
        let usage = data.usage.clone();
        Ok(Vocab::of(Arc::new(Words::new(data)?), &usage))
    }

    /// The vocabulary of these tokens, used so.
    pub(crate) fn of(words: Arc<Words>, usage: &Usage) -> Vocab {
        let mut tolerated = Vec::new();
        let special = check_special(&usage.special, words.n_vocab(), &mut tolerated);
        tolerated.extend_from_slice(&words.tolerated);
        tolerated.truncate(TOLERATED_MAX);
        let is_spm = words.algorithm == Algorithm::Spm;
        let is_word_piece = words.algorithm == Algorithm::WordPiece;
        let is_unigram = words.algorithm == Algorithm::Unigram;
        let default = |id: u32| {
            let fits = matches!(
                words.types.get(id as usize),
                Some(TokenType::Control | TokenType::Unknown)
            );
            (is_spm && fits).then_some(id)
        };
        // BERT's texts lie between tokens with names of their own.
        let named = |key: usize, name: &str| {
            let texts = || words.texts.iter().position(|text| text == name.as_bytes());
            let found = || special[key].or_else(|| texts().map(|id| id as u32));
            is_word_piece.then(found).flatten()
        };
        let eos = named(SEP, "[SEP]").or(special[EOS]).or_else(|| default(2));
        let mut ends = words.named_ends.clone();
        ends.extend(ENDS.iter().filter_map(|&key| special[key]));
        ends.extend(eos);
        ends.sort_unstable();
        ends.dedup();
        let (bos, unknown) = (
            named(CLS, "[CLS]").or(special[BOS]).or_else(|| default(1)),
            special[UNK]
                .or_else(|| named(UNK, "[UNK]"))
                .or_else(|| default(0)),
        );
        let (pre_adds_bos, always_bos) = match words.algorithm {
            // Files of raw vocabularies were written that deny the BOS without
            // which their models fail.
            Algorithm::Bpe(pre) => (pre.add_bos, pre.raw),
            Algorithm::Spm => (true, false),
            Algorithm::Unigram => (false, false),
            Algorithm::WordPiece => (true, false),
        };
        Vocab {
            words,
            bos,
            eos,
            unknown,
            add_bos: always_bos || usage.add_bos.unwrap_or(pre_adds_bos),
            add_eos: usage.add_eos.unwrap_or(is_word_piece),
            add_space_prefix: (is_spm || is_unigram) && usage.add_space_prefix.unwrap_or(true),
            keeps_spaces: is_unigram && !usage.remove_extra_whitespaces.unwrap_or(true),
            ends,
            tolerated,
        }
    }
}

/// Bounds the names that text is searched for.
fn check_specials(
    texts: &Texts,
    types: &[TokenType],
    tolerated: &mut Vec<String>,
) -> Result<(), Error> {
    let (mut sum, mut long) = (0, None);
    for (id, (text, token_type)) in texts.iter().zip(types).enumerate() {
        if !matches!(
            token_type,
            TokenType::UserDefined | TokenType::Control | TokenType::Unknown
        ) {
            continue;
        }
        if !is_searched(text) {
            long.get_or_insert((id, text.len()));
            continue;
        }
        sum += text.len();
    }
    if let Some((id, len)) = long {
        tolerated.push(format!(
            "special token {id} has a name of {len} bytes; texts cannot name one with more than {MAX_SPECIAL_BYTES}"
        ));
    }
    if sum > MAX_SPECIALS_BYTES {
        return Err(Error::SpecialNames {
            len: sum,
            max: MAX_SPECIALS_BYTES,
        });
    }
    Ok(())
}

/// Whether texts are searched for the name of a special token.
pub(crate) fn is_searched(name: &[u8]) -> bool {
    name.len() <= MAX_SPECIAL_BYTES
}

/// As [`check_size`], of what may be empty.
pub(crate) fn check_most(key: &'static str, len: usize, max: usize) -> Result<usize, Error> {
    match len {
        0 => Ok(0),
        len => check_size(key, len, max),
    }
}

pub(crate) fn check_size(key: &'static str, len: usize, max: usize) -> Result<usize, Error> {
    if len == 0 || len > max {
        return Err(Error::Size {
            key,
            len: len as u64,
            unit: "entries",
            max: max as u64,
        });
    }
    Ok(len)
}

/// Takes what is behind the last token away; an array that is too short says nothing of the last
/// tokens.
fn fit<T>(
    key: &'static str,
    values: &mut Vec<T>,
    n_vocab: usize,
    tolerated: &mut Vec<String>,
) -> Result<(), Error> {
    let len = values.len();
    if len < n_vocab {
        return Err(Error::Length { key, len, n_vocab });
    }
    if len > n_vocab {
        tolerated.push(format!(
            "{key} has {len} entries for {n_vocab} tokens; the last ones are not read"
        ));
        values.truncate(n_vocab);
    }
    Ok(())
}

fn check_types(
    types: Option<Vec<i32>>,
    n_vocab: usize,
    tolerated: &mut Vec<String>,
) -> Result<Vec<TokenType>, Error> {
    let Some(mut types) = types else {
        return Ok(vec![TokenType::Normal; n_vocab]);
    };
    fit(TYPES, &mut types, n_vocab, tolerated)?;
    let unknown = |&(_, value): &(usize, &i32)| TokenType::from_i32(*value).is_none();
    let mut unknown = types.iter().enumerate().filter(unknown);
    if let Some((id, value)) = unknown.next() {
        let n = 1 + unknown.count();
        tolerated.push(format!(
            "token {id} has type {value}; token types are 0 to 6: {n} such tokens count as undefined"
        ));
    }
    let known = |&value: &i32| TokenType::from_i32(value).unwrap_or(TokenType::Undefined);
    Ok(types.iter().map(known).collect())
}

fn check_scores(
    mut scores: Vec<f32>,
    n_vocab: usize,
    tolerated: &mut Vec<String>,
) -> Result<Vec<f32>, Error> {
    fit(SCORES, &mut scores, n_vocab, tolerated)?;
    if let Some(id) = scores.iter().position(|score| score.is_nan()) {
        tolerated.push(format!(
            "token {id} has a score that is not a number; such tokens are merged last"
        ));
        let no_number = scores.iter_mut().filter(|score| score.is_nan());
        no_number.for_each(|score| *score = f32::NEG_INFINITY);
    }
    Ok(scores)
}

/// The ids that lie in the vocabulary.
fn check_special(
    ids: &[Option<i64>; SPECIAL_KEYS.len()],
    n_vocab: usize,
    tolerated: &mut Vec<String>,
) -> [Option<u32>; SPECIAL_KEYS.len()] {
    let mut checked = [None; SPECIAL_KEYS.len()];
    for ((key, &id), slot) in SPECIAL_KEYS.iter().zip(ids).zip(&mut checked) {
        *slot = match id {
            // Converters write -1 for "none", some of them as unsigned.
            None | Some(-1 | 0xFFFF_FFFF) => None,
            Some(id) if (0..n_vocab as i64).contains(&id) => Some(id as u32),
            Some(id) => {
                tolerated.push(format!(
                    "{key} is {id}, but the vocabulary has {n_vocab} tokens; it counts as absent"
                ));
                None
            }
        };
    }
    checked
}

/// `<0xXX>`, SentencePiece's spelling of a byte.
fn parse_byte(text: &[u8]) -> Option<u8> {
    let hex = text.strip_prefix(b"<0x")?.strip_suffix(b">")?;
    if hex.len() != 2 || !hex.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    u8::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok()
}

/// The bytes each token stands for. Unused tokens stand for nothing, special
/// ones for their name.
fn pieces(algorithm: Algorithm, texts: &Texts, types: &[TokenType]) -> Result<Texts, Error> {
    let mut pieces = Texts::with_capacity(texts.len(), texts.byte_len());
    for (text, &token_type) in texts.iter().zip(types) {
        pieces.push_with(TOKENS, |out| match (token_type, algorithm) {
            (TokenType::Unused | TokenType::Undefined, _) => {}
            (TokenType::Unknown | TokenType::Control, _) => out.extend_from_slice(text),
            (TokenType::Normal | TokenType::UserDefined, Algorithm::Bpe(pre)) if pre.raw => {
                push_with_spaces(text, out);
            }
            (TokenType::Normal, Algorithm::Bpe(_)) => byte_level::push_bytes(text, out),
            (TokenType::UserDefined, Algorithm::Bpe(_)) => out.extend_from_slice(text),
            (TokenType::Byte, _) => match parse_byte(text) {
                Some(byte) => out.push(byte),
                None => out.extend_from_slice(text),
            },
            (TokenType::Normal | TokenType::UserDefined, _) => {
                push_with_spaces(text, out);
            }
        })?;
    }
    Ok(pieces)
}

/// Appends `text` with SentencePiece's marks turned into spaces.
fn push_with_spaces(text: &[u8], out: &mut Vec<u8>) {
    let mark = SPM_SPACE.as_bytes();
    let mut rest = text;
    while let Some((&first, tail)) = rest.split_first() {
        match rest.strip_prefix(mark) {
            Some(after) => {
                out.push(b' ');
                rest = after;
            }
            None => {
                out.push(first);
                rest = tail;
            }
        }
    }
}
