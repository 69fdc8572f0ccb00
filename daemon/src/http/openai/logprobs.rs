//! Log-probabilities of generated tokens, as OpenAI's two routes spell them.
//!
//! They are natural logarithms of the probabilities that the model gives, over its whole
//! vocabulary, before bias, penalties, temperature and the other parameters.

use rocmforge_engine::LoadedModel;
use rocmforge_engine::api::TokenScore;
use rocmforge_tokenizer::{DecodeOptions, StreamDecoder};
use serde_json::{Map, Value, json};

use super::super::prompt::take;

/// `logprobs` of a chat's choice.
pub(super) fn of_chat(model: &LoadedModel, scores: &[TokenScore]) -> Value {
    let token = |id: u32, logprob: f32| {
        let bytes = bytes(model, id);
        json!({"token": String::from_utf8_lossy(bytes), "logprob": logprob, "bytes": bytes})
    };
    let content = scores.iter().map(|score| {
        let mut value = token(score.id, score.logprob);
        let top = score.top.iter().map(|&(id, logprob)| token(id, logprob));
        value["top_logprobs"] = top.collect();
        value
    });
    json!({"content": content.collect::<Vec<_>>(), "refusal": null})
}

/// `logprobs` of a prompt that is repeated: those of its first token are null, since nothing comes
/// before it. Where it is `named`, its text has the names of control tokens, but not that of a BOS
/// that was put before it.
pub(super) fn of_prompt(
    model: &LoadedModel,
    ids: &[u32],
    scores: &[TokenScore],
    named: bool,
) -> Value {
    let Some(&first) = ids.first() else {
        return Value::Null;
    };
    let tokenizer = model.tokenizer();
    let mut place = Place::new(DecodeOptions {
        special: named,
        from_start: true,
    });
    if !(named && tokenizer.adds_bos() && tokenizer.bos() == Some(first)) {
        place.of(model, first);
    }
    let mut all = of_completion(model, scores, &mut place);
    let begin = [
        ("tokens", spelled(model, first).into()),
        ("token_logprobs", Value::Null),
        ("top_logprobs", Value::Null),
        ("text_offset", 0.into()),
    ];
    for (key, value) in begin {
        if let Value::Array(list) = &mut all[key] {
            list.insert(0, value);
        }
    }
    all
}

/// Where the next token stands in a text, in characters.
#[derive(Debug, Clone, Default)]
pub(super) struct Place {
    options: DecodeOptions,
    /// Once a token was seen.
    decoder: Option<StreamDecoder>,
    /// Characters that are complete.
    complete: u64,
}

impl Place {
    fn new(options: DecodeOptions) -> Self {
        Self {
            options,
            ..Self::default()
        }
    }

    /// Behind a text.
    pub(super) fn behind(text: &str) -> Self {
        Self {
            complete: text.chars().count() as u64,
            ..Self::default()
        }
    }

    /// The place of a token, and moves behind it. One that begins inside of a character has that
    /// character's, one without a text that of the next one.
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

/// `logprobs` of a text of a response.
pub(super) fn of_text(model: &LoadedModel, scores: &[TokenScore]) -> Value {
    take(&mut of_chat(model, scores), "content")
}

/// `logprobs` of a completion's choice. `place` is that of the first token; it is moved behind the
/// last one.
pub(super) fn of_completion(
    model: &LoadedModel,
    scores: &[TokenScore],
    place: &mut Place,
) -> Value {
    let (mut tokens, mut logprobs, mut tops, mut offsets) = (vec![], vec![], vec![], vec![]);
    for score in scores {
        tokens.push(spelled(model, score.id));
        logprobs.push(score.logprob);
        let top: Map<String, Value> = score
            .top
            .iter()
            .map(|&(id, logprob)| (spelled(model, id), logprob.into()))
            .collect();
        tops.push(top);
        offsets.push(place.of(model, score.id));
    }
    json!({
        "tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets,
    })
}

fn bytes(model: &LoadedModel, id: u32) -> &[u8] {
    model.tokenizer().token_bytes(id).unwrap_or_default()
}

/// A token that is part of a character as its bytes, so that no two are called the same for that.
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
