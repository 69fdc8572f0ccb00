//! A vocabulary as the parser needs it: the bytes of all tokens as a tree, made once and shared.

use std::sync::{Arc, LazyLock};

use llguidance::ParserFactory;
use rocmforge_tokenizer::{Interned, Tokenizer};
use toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};

use crate::tails::Tails;
use crate::{Error, limits, reason};

/// Longest token that a text which a grammar constrains can have. The tree takes no deeper ones.
const TOKEN_MAX_BYTES: usize = 1000;
/// Maximum number of bytes of all tokens: the tree has a node for each at worst, and numbers them
/// with 22 bits.
const TOKENS_MAX_BYTES: usize = (1 << 22) - 2;
/// Bytes of the tree, and of what is computed from it beforehand, for each token.
const BYTES_A_TOKEN: usize = 450;
/// Stands in place of an end where a vocabulary has none.
const NO_TOKEN: u32 = u32::MAX;

/// A vocabulary that texts can be constrained by grammars in. 56 MiB for one of 128k tokens.
pub struct Vocabulary {
    pub(crate) factory: ParserFactory,
    pub(crate) ends: Arc<[u32]>,
    pub(crate) n_vocab: usize,
    /// The bytes of tokens, names of special ones too.
    pub(crate) tokenizer: Tokenizer,
    /// Tokens that may end a call and go on.
    pub(crate) tails: Tails,
}

impl std::fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vocabulary")
            .field("n_vocab", &self.n_vocab)
            .finish_non_exhaustive()
    }
}

/// The vocabularies that anybody has.
static VOCABULARIES: LazyLock<Interned<Vocabulary>> = LazyLock::new(Interned::default);

impl Vocabulary {
    /// The vocabulary of this tokenizer, which all models have in common whose tokenizers do the
    /// same. The first call makes it, in half a second for 128k tokens: for a blocking thread.
    ///
    /// # Errors
    /// As [`Vocabulary::new`].
    pub fn shared(tokenizer: &Tokenizer) -> Result<Arc<Self>, Error> {
        VOCABULARIES.get(tokenizer.digest(), || Self::new(tokenizer))
    }

    /// Bytes of memory, as measured for vocabularies of 128k tokens.
    pub fn memory_bytes(&self) -> usize {
        self.n_vocab * BYTES_A_TOKEN
    }

    /// Makes the tree. Takes half a second for 128k tokens.
    ///
    /// # Errors
    /// [`Error::Vocabulary`] for one that has no tokens or too many bytes of them.
    pub fn new(tokenizer: &Tokenizer) -> Result<Self, Error> {
        let n_vocab = tokenizer.n_vocab();
        let bad = |reason: String| Error::Vocabulary { reason };
        let n = u32::try_from(n_vocab).map_err(|_| bad(format!("{n_vocab} tokens")))?;
        let words: Vec<Vec<u8>> = (0..n).map(|id| word(tokenizer, id)).collect();
        let bytes: usize = words.iter().map(Vec::len).sum();
        if bytes == 0 || bytes > TOKENS_MAX_BYTES {
            let message = format!("its tokens have {bytes} bytes, 1 to {TOKENS_MAX_BYTES} can be");
            return Err(bad(message));
        }
        let ends: Arc<[u32]> = tokenizer.end_of_generation().into();
        let info = TokRxInfo::new(n, ends.first().copied().unwrap_or(NO_TOKEN));
        let mut trie = TokTrie::from(&info, &words);
        if !ends.is_empty() {
            trie = trie.with_eos_tokens(&ends);
        }
        let tails = Tails::of(tokenizer, &trie, ends.first().copied());
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let slices = llguidance::earley::SlicedBiasComputer::general_slices();
        let mut factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices)
            .map_err(|error| bad(reason(&error)))?;
        factory.quiet();
        *factory.limits_mut() = limits::parser();
        Ok(Self {
            factory,
            ends,
            n_vocab,
            tokenizer: tokenizer.clone(),
            tails,
        })
    }
}

/// What a token adds to a text. Special tokens have their name behind a byte that no text has, so
/// that only a grammar that names them allows them.
fn word(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    let bytes = tokenizer.token_bytes(id).unwrap_or_default();
    if bytes.len() >= TOKEN_MAX_BYTES {
        return Vec::new();
    }
    if tokenizer.is_special(id) || tokenizer.is_end_of_generation(id) {
        let mut word = vec![TokTrie::SPECIAL_TOKEN_MARKER];
        word.extend_from_slice(bytes);
        return word;
    }
    match bytes.first() {
        Some(&TokTrie::SPECIAL_TOKEN_MARKER) => Vec::new(),
        _ => bytes.to_vec(),
    }
}
