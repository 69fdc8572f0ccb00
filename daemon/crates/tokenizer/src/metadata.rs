//! From a file's metadata to the vocabulary as it is written there.

use std::borrow::Cow;

use rocmforge_gguf::{Gguf, Strings};

use crate::Error;
use crate::texts::Texts;
use crate::vocab::{
    MAX_MERGES, MAX_TOKENS, MERGES, MODEL, SCORES, SPECIAL_KEYS, TOKENS, TYPES, VocabData,
    check_most, check_size,
};

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
    let mut special = [None; SPECIAL_KEYS.len()];
    for (key, slot) in SPECIAL_KEYS.iter().zip(&mut special) {
        *slot = file.i64(key)?;
    }
    Ok(VocabData {
        model: model.to_owned(),
        pre: file.str("tokenizer.ggml.pre")?.map(str::to_owned),
        name: file.str_lossy("general.name").map(Cow::into_owned),
        tokens: texts(TOKENS, &tokens)?,
        scores: file.f32s(SCORES)?,
        types: file.i32s(TYPES)?,
        merges,
        special,
        add_bos: file.bool("tokenizer.ggml.add_bos_token")?,
        add_eos: file.bool("tokenizer.ggml.add_eos_token")?,
        add_space_prefix: file.bool("tokenizer.ggml.add_space_prefix")?,
    })
}

fn texts(key: &'static str, strings: &Strings<'_>) -> Result<Texts, Error> {
    // About eight bytes a string; the buffer grows if they are longer.
    let mut texts = Texts::with_capacity(strings.len(), strings.len() * 10);
    for string in strings.iter() {
        texts.push_with(key, |buffer| buffer.extend_from_slice(string))?;
    }
    Ok(texts)
}
