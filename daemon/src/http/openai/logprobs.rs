//! Log-probabilities of generated tokens, as OpenAI's two routes spell them.
//!
//! They are natural logarithms of the probabilities that the model gives, over its whole
//! vocabulary, before bias, penalties, temperature and the other parameters.

use rocmforge_engine::LoadedModel;
use rocmforge_engine::api::TokenScore;
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
/// before it.
pub(super) fn of_prompt(
    model: &LoadedModel,
    ids: &[u32],
    scores: &[TokenScore],
    offset: &mut u64,
) -> Value {
    let Some(&first) = ids.first() else {
        return Value::Null;
    };
    let text = String::from_utf8_lossy(bytes(model, first));
    *offset += text.chars().count() as u64;
    let mut all = of_completion(model, scores, offset);
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

/// `logprobs` of a text of a response.
pub(super) fn of_text(model: &LoadedModel, scores: &[TokenScore]) -> Value {
    take(&mut of_chat(model, scores), "content")
}

/// `logprobs` of a completion's choice. `offset` is the place of the first token in the text, in
/// characters; it is moved behind the last one.
pub(super) fn of_completion(model: &LoadedModel, scores: &[TokenScore], offset: &mut u64) -> Value {
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
        offsets.push(*offset);
        let text = String::from_utf8_lossy(bytes(model, score.id));
        *offset += text.chars().count() as u64;
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
