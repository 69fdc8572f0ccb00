//! Log-probabilities of generated tokens in the formats of all dialects.
//!
//! They are natural logarithms of the probabilities that the model gives, over its whole
//! vocabulary, before bias, penalties, temperature and the other parameters.
//!
//! A response has up to 21 of them for each token. So the JSON is written directly from the scores,
//! which take a tenth of its size.

use std::borrow::Cow;
use std::collections::BTreeMap;

use rocmforge_engine::LoadedModel;
use rocmforge_engine::api::TokenScore;
use rocmforge_tokenizer::{DecodeOptions, StreamDecoder};
use serde::ser::SerializeStruct as _;
use serde::{Serialize, Serializer};

/// `logprobs` of a chat completion's choice.
#[derive(Serialize)]
pub(super) struct OfChat<'a> {
    content: OfText<'a>,
    refusal: (),
}

impl<'a> OfChat<'a> {
    pub(super) fn new(model: &'a LoadedModel, scores: &'a [TokenScore]) -> Self {
        Self {
            content: OfText { model, scores },
            refusal: (),
        }
    }
}

/// Log-probabilities as a list: for texts in responses, and on Ollama's routes.
#[derive(Clone, Copy)]
pub(in super::super) struct OfText<'a> {
    pub(in super::super) model: &'a LoadedModel,
    pub(in super::super) scores: &'a [TokenScore],
}

impl Serialize for OfText<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let scores = self.scores.iter();
        serializer.collect_seq(scores.map(|score| Token {
            top_logprobs: Some(Tops {
                model: self.model,
                top: &score.top,
            }),
            ..Token::of(self.model, score.id, score.logprob)
        }))
    }
}

#[derive(Serialize)]
struct Token<'a> {
    token: Cow<'a, str>,
    logprob: f64,
    bytes: &'a [u8],
    /// The most likely tokens at this position.
    #[serde(skip_serializing_if = "Option::is_none")]
    top_logprobs: Option<Tops<'a>>,
}

impl<'a> Token<'a> {
    fn of(model: &'a LoadedModel, id: u32, logprob: f32) -> Self {
        let bytes = bytes(model, id);
        Self {
            token: String::from_utf8_lossy(bytes),
            logprob: logprob.into(),
            bytes,
            top_logprobs: None,
        }
    }
}

/// `completion_probabilities` of llama-server, which include token ids.
#[derive(Clone, Copy)]
pub(in super::super) struct OfNative<'a> {
    pub(in super::super) model: &'a LoadedModel,
    pub(in super::super) scores: &'a [TokenScore],
    /// Whether probabilities are those behind the samplers, not log-probabilities.
    pub(in super::super) after_sampling: bool,
}

impl Serialize for OfNative<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.scores.iter().map(|score| NativeToken {
            of: *self,
            id: score.id,
            logprob: score.logprob,
            top: Some(&score.top),
        }))
    }
}

struct NativeToken<'a> {
    of: OfNative<'a>,
    id: u32,
    logprob: f32,
    /// The most likely tokens at this position; `None` for an entry of such a list.
    top: Option<&'a [(u32, f32)]>,
}

impl Serialize for NativeToken<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let bytes = bytes(self.of.model, self.id);
        let mut token = serializer.serialize_struct("token", 5)?;
        token.serialize_field("id", &self.id)?;
        token.serialize_field("token", &String::from_utf8_lossy(bytes))?;
        token.serialize_field("bytes", bytes)?;
        let logprob = f64::from(self.logprob);
        let (value, list) = match self.of.after_sampling {
            true => (("prob", logprob.exp()), "top_probs"),
            false => (("logprob", logprob), "top_logprobs"),
        };
        token.serialize_field(value.0, &value.1)?;
        if let Some(top) = self.top {
            let likely = |&(id, logprob): &(u32, f32)| NativeToken {
                of: self.of,
                id,
                logprob,
                top: None,
            };
            token.serialize_field(list, &List(|| top.iter().map(likely)))?;
        }
        token.end()
    }
}

struct Tops<'a> {
    model: &'a LoadedModel,
    top: &'a [(u32, f32)],
}

impl Serialize for Tops<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let top = self.top.iter();
        serializer.collect_seq(top.map(|&(id, logprob)| Token::of(self.model, id, logprob)))
    }
}

/// Character offset of the next token in a text.
#[derive(Debug, Clone, Default)]
pub(super) struct Place {
    options: DecodeOptions,
    /// Decoder of the text, once a token was seen.
    decoder: Option<StreamDecoder>,
    /// Number of complete characters so far.
    complete: u64,
}

impl Place {
    /// The offset after a text.
    pub(super) fn behind(text: &str) -> Self {
        Self {
            complete: text.chars().count() as u64,
            ..Self::default()
        }
    }

    /// The offsets of tokens; advances past them.
    pub(super) fn of_all(
        &mut self,
        model: &LoadedModel,
        scores: &[TokenScore],
    ) -> impl Iterator<Item = u64> {
        scores.iter().map(|score| self.of(model, score.id))
    }

    /// The offset of a token; advances past it. A token that begins inside of a character has that
    /// character's offset, one without text the next one's.
    fn of(&mut self, model: &LoadedModel, id: u32) -> u64 {
        let tokenizer = model.tokenizer();
        let stream = || tokenizer.stream_with(self.options);
        let decoder = self.decoder.get_or_insert_with(stream);
        let place = self.complete;
        let added = decoder.push(tokenizer, id);
        self.complete += added.chars().count() as u64;
        // Bytes before it that become no character are one by now.
        let own = std::str::from_utf8(bytes(model, id)).unwrap_or_default();
        match added.strip_suffix(own) {
            Some(before) if !own.is_empty() => place + before.chars().count() as u64,
            _ => place,
        }
    }
}

/// Offsets of an echoed prompt's tokens in its text. With `named`, the text contains the names of
/// control tokens, but not of a BOS that was added.
pub(super) fn offsets_of_prompt(model: &LoadedModel, ids: &[u32], named: bool) -> Vec<u64> {
    let tokenizer = model.tokenizer();
    let mut place = Place {
        options: DecodeOptions {
            special: named,
            from_start: true,
        },
        ..Place::default()
    };
    let puts_bos = named && tokenizer.adds_bos();
    let is_unseen = |(at, id): (usize, u32)| at == 0 && puts_bos && tokenizer.bos() == Some(id);
    let ids = ids.iter().copied().enumerate();
    let offsets = ids.map(|(at, id)| match is_unseen((at, id)) {
        true => 0,
        false => place.of(model, id),
    });
    offsets.collect()
}

/// `logprobs` of a completion's choice, after those of an echoed prompt.
pub(super) struct OfCompletion<'a> {
    pub(super) model: &'a LoadedModel,
    /// The first token of an echoed prompt: its values are null, since no token precedes it.
    pub(super) first: Option<u32>,
    /// Log-probabilities of the prompt's tokens after the first.
    pub(super) prompt: &'a [TokenScore],
    /// Log-probabilities of the generated tokens.
    pub(super) scores: &'a [TokenScore],
    /// Offsets of all tokens in the text, in characters.
    pub(super) offsets: Vec<u64>,
}

impl<'a> OfCompletion<'a> {
    fn all(&self) -> impl Iterator<Item = &'a TokenScore> + use<'a> {
        self.prompt.iter().chain(self.scores)
    }

    fn ids(&self) -> impl Iterator<Item = u32> + use<'a> {
        self.first
            .into_iter()
            .chain(self.all().map(|score| score.id))
    }

    /// The null value for the first token of a prompt.
    fn nothing<T>(&self) -> Option<Option<T>> {
        self.first.map(|_| None)
    }
}

impl Serialize for OfCompletion<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let model = self.model;
        let logprob = |score: &TokenScore| Some(f64::from(score.logprob));
        let top = |score: &TokenScore| {
            let top = score.top.iter();
            let top = top.map(|&(id, logprob)| (spelled(model, id), f64::from(logprob)));
            Some(top.collect::<BTreeMap<_, _>>())
        };
        let mut lists = serializer.serialize_struct("logprobs", 4)?;
        let tokens = List(|| self.ids().map(|id| spelled(model, id)));
        lists.serialize_field("tokens", &tokens)?;
        let logprobs = List(|| self.nothing().into_iter().chain(self.all().map(logprob)));
        lists.serialize_field("token_logprobs", &logprobs)?;
        let tops = List(|| self.nothing().into_iter().chain(self.all().map(top)));
        lists.serialize_field("top_logprobs", &tops)?;
        lists.serialize_field("text_offset", &self.offsets)?;
        lists.end()
    }
}

/// Serializes the items of an iterator as a list.
struct List<F>(F);

impl<F: Fn() -> I, I: Iterator<Item: Serialize>> Serialize for List<F> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq((self.0)())
    }
}

fn bytes(model: &LoadedModel, id: u32) -> &[u8] {
    model.tokenizer().token_bytes(id).unwrap_or_default()
}

/// The text of a token; bytes of an incomplete character are written as escapes, so that different
/// tokens differ.
fn spelled(model: &LoadedModel, id: u32) -> String {
    let bytes = bytes(model, id);
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => {
            let hex: String = bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect();
            format!("bytes:{hex}")
        }
    }
}
