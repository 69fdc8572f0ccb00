//! From a file's metadata to the vocabulary as it is written there.

use std::borrow::Cow;

use rocmforge_gguf::{Gguf, Strings};

use crate::Error;
use crate::interned::Digest;
use crate::texts::Texts;
use crate::unigram::CHARSMAP_MAX_BYTES;
use crate::vocab::{
    MAX_MERGES, MAX_TOKENS, MERGES, MODEL, SCORES, SPECIAL_KEYS, TOKENS, TYPES, Usage, VocabData,
    check_most, check_size, strips_behind_specials,
};

const PRE: &str = "tokenizer.ggml.pre";
const NAME: &str = "general.name";
const CHARSMAP: &str = "tokenizer.ggml.precompiled_charsmap";

/// Copies everything that a tokenizer needs out of `file`.
pub(crate) fn read(file: &Gguf) -> Result<VocabData, Error> {
    let model = file.str(MODEL)?.ok_or(Error::MissingKey { key: MODEL })?;
    let tokens = file
        .strings(TOKENS)?
        .ok_or(Error::MissingKey { key: TOKENS })?;
    check_size(TOKENS, tokens.len(), MAX_TOKENS)?;
    let merges = match file.strings(MERGES)? {
        Some(merges) => {
            check_most(MERGES, merges.len(), MAX_MERGES)?;
            Some(texts(MERGES, &merges)?)
        }
        None => None,
    };
    let charsmap = match file.bytes(CHARSMAP)? {
        Some(bytes) => {
            check_most(CHARSMAP, bytes.len(), CHARSMAP_MAX_BYTES)?;
            Some(bytes)
        }
        None => None,
    };
    Ok(VocabData {
        model: model.to_owned(),
        pre: file.str(PRE)?.map(str::to_owned),
        name: file.str_lossy(NAME).map(Cow::into_owned),
        tokens: texts(TOKENS, &tokens)?,
        scores: file.f32s(SCORES)?,
        types: file.i32s(TYPES)?,
        merges,
        charsmap,
        #[cfg(test)]
        usage: usage(file)?,
    })
}

/// Reads from a file how its tokens are used: special tokens, added spaces and others.
pub(crate) fn usage(file: &Gguf) -> Result<Usage, Error> {
    let mut special = [None; SPECIAL_KEYS.len()];
    for (key, slot) in SPECIAL_KEYS.iter().zip(&mut special) {
        *slot = file.i64(key)?;
    }
    Ok(Usage {
        special,
        add_bos: file.bool("tokenizer.ggml.add_bos_token")?,
        add_eos: file.bool("tokenizer.ggml.add_eos_token")?,
        add_space_prefix: file.bool("tokenizer.ggml.add_space_prefix")?,
        remove_extra_whitespaces: file.bool("tokenizer.ggml.remove_extra_whitespaces")?,
    })
}

/// The digest of everything that a file's tokens and their tables are made of.
pub(crate) fn digest_of_words(file: &Gguf) -> Digest {
    let strips = strips_behind_specials(file.str(NAME).ok().flatten());
    let keys = [MODEL, PRE, TOKENS, SCORES, TYPES, MERGES, CHARSMAP];
    // Of an absent one nothing.
    let values = keys.map(|key| file.digest_of_value(key));
    let values = values
        .iter()
        .map(|value| value.as_ref().map_or(&[][..], |value| value));
    Digest::of(std::iter::once(&[u8::from(strips)][..]).chain(values))
}

fn texts(key: &'static str, strings: &Strings<'_>) -> Result<Texts, Error> {
    // About eight bytes a string; the buffer grows if they are longer.
    let mut texts = Texts::with_capacity(strings.len(), strings.len() * 10);
    for string in strings.iter() {
        texts.push_with(key, |buffer| buffer.extend_from_slice(string))?;
    }
    texts.shrink();
    Ok(texts)
}
