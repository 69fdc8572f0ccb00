//! Tokens and the tables that encoding needs, which all models have in common that have the same.
//!
//! *Invariant:* nothing changes once it is made, and one content is there once
//! ([`Interned`]; the engine's test `a_vocabulary_is_there_once_for_all_models_that_have_it`).

use std::sync::{Arc, LazyLock};

use crate::Error;
use crate::bpe::Bpe;
use crate::interned::{Digest, Interned};
use crate::special::Specials;
use crate::spm::Spm;
use crate::texts::Texts;
use crate::unigram::Unigram;
use crate::vocab::{Algorithm, MERGES, TOLERATED_MAX, VocabData, Words};
use crate::word_piece::WordPiece;

/// Tokens and their tables, which models that have the same tokens share.
#[derive(Debug)]
pub(crate) struct Lexicon {
    pub(crate) words: Arc<Words>,
    pub(crate) tables: Tables,
    /// Of what they were made of.
    pub(crate) digest: Digest,
}

/// The lexicons of all models.
pub(crate) static LEXICONS: LazyLock<Interned<Lexicon>> = LazyLock::new(Interned::default);

impl Lexicon {
    /// Checks a vocabulary and builds its tables.
    pub(crate) fn new(mut data: VocabData, digest: Digest) -> Result<Lexicon, Error> {
        let (merges, charsmap) = (data.merges.take(), data.charsmap.take());
        let mut words = Words::new(data)?;
        let mut tolerated = std::mem::take(&mut words.tolerated);
        let tables = Tables::build(&words, merges.as_ref(), charsmap.as_deref(), &mut tolerated)?;
        tolerated.truncate(TOLERATED_MAX);
        words.tolerated = tolerated;
        Ok(Lexicon {
            words: Arc::new(words),
            tables,
            digest,
        })
    }

    /// Bytes of memory.
    pub(crate) fn memory_bytes(&self) -> usize {
        let model = match &self.tables.model {
            Model::Bpe(bpe) => bpe.memory_bytes(),
            Model::Spm(spm) => spm.memory_bytes(),
            Model::Unigram(unigram) => unigram.memory_bytes(),
            Model::WordPiece(word_piece) => word_piece.memory_bytes(),
        };
        self.words.memory_bytes() + model
    }
}

/// What encoding needs beside the tokens.
#[derive(Debug)]
pub(crate) struct Tables {
    pub(crate) model: Model,
    pub(crate) specials: Specials,
}

/// The tables of an algorithm.
#[derive(Debug)]
pub(crate) enum Model {
    Bpe(Bpe),
    Spm(Spm),
    Unigram(Unigram),
    WordPiece(WordPiece),
}

impl Tables {
    fn build(
        vocab: &Words,
        merges: Option<&Texts>,
        charsmap: Option<&[u8]>,
        tolerated: &mut Vec<String>,
    ) -> Result<Tables, Error> {
        let model = match vocab.algorithm {
            Algorithm::Spm => Model::Spm(Spm::build(vocab)?),
            Algorithm::Unigram => Model::Unigram(Unigram::build(vocab, charsmap)?),
            Algorithm::WordPiece => Model::WordPiece(WordPiece::build(vocab)?),
            Algorithm::Bpe(pre) => {
                let merges = merges.ok_or(Error::MissingKey { key: MERGES })?;
                Model::Bpe(Bpe::build(vocab, merges, pre, tolerated)?)
            }
        };
        Ok(Tables {
            model,
            specials: Specials::build(vocab)?,
        })
    }
}
