//! Conversations as OpenAI's and Ollama's clients write them, and the fields of sampling that
//! dialects share.

use rocmforge_service::check::{SamplingFields, Violations};
use rocmforge_service::decoding::{BIAS_MAX, DecodingFields};
use rocmforge_service::failure::{self, Failure};
use rocmforge_tokenizer::{Content, Message, ToolCall};
use serde::Deserialize;
use serde_json::{Map, Value};

/// A text, or a list.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged, expecting = "expected a text or a list")]
pub(super) enum TextOr<T> {
    Text(String),
    List(Vec<T>),
}

impl TextOr<String> {
    pub(super) fn into_list(self) -> Vec<String> {
        match self {
            Self::Text(text) => vec![text],
            Self::List(list) => list,
        }
    }
}

/// A message of a conversation.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct WireMessage {
    pub(super) role: String,
    pub(super) content: Option<TextOr<Value>>,
    pub(super) name: Option<String>,
    pub(super) tool_name: Option<String>,
    pub(super) tool_call_id: Option<String>,
    pub(super) tool_calls: Option<Vec<WireToolCall>>,
    pub(super) reasoning_content: Option<String>,
    pub(super) reasoning: Option<String>,
    pub(super) thinking: Option<String>,
    pub(super) images: Option<Vec<Value>>,
}

/// A call of an earlier answer.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct WireToolCall {
    id: Option<String>,
    function: WireFunction,
}

#[derive(Debug, Clone, Deserialize)]
struct WireFunction {
    name: String,
    #[serde(default)]
    arguments: Value,
}

/// The messages as templates see them.
pub(super) fn messages(wire: Vec<WireMessage>) -> Result<Vec<Message>, Failure> {
    let each = wire.into_iter().enumerate();
    each.map(|(at, message)| one(at, message)).collect()
}

fn one(at: usize, wire: WireMessage) -> Result<Message, Failure> {
    if wire.images.is_some_and(|images| !images.is_empty()) {
        return Err(failure::unsupported_field(
            &format!("messages[{at}].images"),
            "the models here read text only; leave images out",
        ));
    }
    let content = match wire.content {
        None => Content::None,
        Some(TextOr::Text(text)) => Content::Text(text),
        Some(TextOr::List(parts)) => {
            text_parts(parts, |part| format!("messages[{at}].content[{part}]"))?
        }
    };
    // What instructs the model is called so by newer clients.
    let role = match wire.role.as_str() {
        "developer" => "system".to_owned(),
        _ => wire.role,
    };
    let calls = wire.tool_calls.unwrap_or_default().into_iter();
    Ok(Message {
        role,
        content,
        reasoning_content: wire.reasoning_content.or(wire.reasoning).or(wire.thinking),
        tool_calls: calls
            .map(|call| ToolCall {
                id: call.id,
                name: call.function.name,
                arguments: call.function.arguments,
            })
            .collect(),
        tool_call_id: wire.tool_call_id,
        name: wire.name.or(wire.tool_name),
        parse_special: false,
    })
}

/// The member of an object; null where there is none, or where it is no object.
pub(super) fn take(value: &mut Value, key: &str) -> Value {
    value.get_mut(key).map(Value::take).unwrap_or_default()
}

/// Parts of a message, all of which have to be text.
pub(super) fn text_parts(
    parts: Vec<Value>,
    field: impl Fn(usize) -> String,
) -> Result<Content, Failure> {
    let mut texts = Vec::with_capacity(parts.len());
    for (at, mut part) in parts.into_iter().enumerate() {
        let kind = part["type"].as_str().unwrap_or("text");
        if !matches!(kind, "text" | "input_text" | "output_text") {
            return Err(failure::unsupported_field(
                &field(at),
                &format!(
                    "a part of the type {kind} cannot be read; the models here read text only"
                ),
            ));
        }
        match take(&mut part, "text") {
            Value::String(text) => texts.push(text),
            _ => return Err(failure::invalid(&field(at), "it has no text; give one")),
        }
    }
    Ok(match texts.len() {
        0 => Content::None,
        1 => Content::Text(texts.remove(0)),
        _ => {
            let part = |text: String| {
                let mut part = Map::new();
                part.insert("type".to_owned(), "text".into());
                part.insert("text".to_owned(), text.into());
                Value::Object(part)
            };
            Content::Parts(texts.into_iter().map(part).collect())
        }
    })
}

/// Sampling in the names that OpenAI's, Anthropic's and Ollama's fields share.
#[derive(Debug, Clone, Default, Deserialize)]
pub(super) struct WireSampling {
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<i64>,
    min_p: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    #[serde(alias = "repetition_penalty")]
    repeat_penalty: Option<f32>,
    repeat_last_n: Option<i64>,
    seed: Option<i64>,
    logit_bias: Option<Value>,
    min_tokens: Option<i64>,
    ignore_eos: Option<bool>,
    stop_token_ids: Option<Vec<u32>>,
    /// llama-server's.
    cache_prompt: Option<bool>,
}

impl WireSampling {
    /// As the checks take it.
    pub(super) fn fields(
        self,
        max_tokens: Option<i64>,
        stop: Option<TextOr<String>>,
        violations: &mut Violations,
    ) -> SamplingFields {
        let mut small = |field: &str, value: Option<i64>| {
            let value = value?;
            let small = i32::try_from(value).ok();
            if small.is_none() {
                violations.add(
                    field,
                    format!("{value} is out of range: at most {}", i32::MAX),
                );
            }
            small
        };
        SamplingFields {
            temperature: self.temperature,
            top_k: small("sampling.top_k", self.top_k),
            top_p: self.top_p,
            min_p: self.min_p,
            repeat_penalty: self.repeat_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            penalty_last_n: small("sampling.penalty_last_n", self.repeat_last_n),
            // Any number is a place to begin at.
            seed: self.seed.map(i64::cast_unsigned),
            max_tokens: small("sampling.max_tokens", max_tokens),
            stop: stop.map(TextOr::into_list).unwrap_or_default(),
            decoding: DecodingFields {
                min_tokens: small("sampling.min_tokens", self.min_tokens),
                ignore_eos: self.ignore_eos.unwrap_or(false),
                stop_token_ids: self.stop_token_ids.unwrap_or_default(),
                logit_bias: biases(self.logit_bias.as_ref()).unwrap_or_else(|| {
                    violations.add(
                        "sampling.logit_bias",
                        "give an object of token ids and numbers, as in {\"1234\": -2.5}",
                    );
                    Vec::new()
                }),
                logprobs: None,
                format: None,
            },
            reuse_prompt: self.cache_prompt,
        }
    }
}

/// Biases by token: `{"1234": -2.5}`, or llama-server's `[[1234, -2.5]]`, whose `false` is as low
/// as may be.
fn biases(value: Option<&Value>) -> Option<Vec<(u32, f32)>> {
    let number = |value: &Value| match value {
        Value::Bool(false) => Some(-BIAS_MAX),
        value => value.as_f64().map(|bias| bias as f32),
    };
    match value {
        None | Some(Value::Null) => Some(Vec::new()),
        Some(Value::Object(map)) => map
            .iter()
            .map(|(id, bias)| Some((id.parse().ok()?, number(bias)?)))
            .collect(),
        Some(Value::Array(pairs)) => pairs
            .iter()
            .map(|pair| match pair.as_array()?.as_slice() {
                [id, bias] => Some((id.as_u64()?.try_into().ok()?, number(bias)?)),
                _ => None,
            })
            .collect(),
        Some(_) => None,
    }
}

/// Refuses fields that would change the result and are not implemented. `asked` says whether the
/// request asks for more than the default.
pub(super) fn refuse_unsupported(fields: &[(&str, bool, &str)]) -> Result<(), Failure> {
    match fields.iter().find(|(_, asked, _)| *asked) {
        Some((field, _, message)) => Err(failure::unsupported_field(field, message)),
        None => Ok(()),
    }
}

/// Whether a field is there and says anything.
pub(super) fn says_something(value: Option<&Value>) -> bool {
    match value {
        None | Some(Value::Null | Value::Bool(false)) => false,
        Some(Value::Array(list)) => !list.is_empty(),
        Some(Value::Object(map)) => !map.is_empty(),
        Some(Value::String(text)) => !text.is_empty(),
        Some(Value::Bool(true) | Value::Number(_)) => true,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(value: Value) -> Result<Vec<Message>, Failure> {
        messages(serde_json::from_value(value).unwrap())
    }

    #[test]
    fn messages_are_read_in_the_forms_that_clients_write() {
        let chat = read(json!([
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"role": "assistant", "content": null, "reasoning": "hm", "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "7", "unknown": [1, 2]},
        ]))
        .unwrap();
        assert_eq!(chat[0].role, "system");
        assert_eq!(chat[1].content, Content::Text("a".into()));
        assert!(matches!(&chat[2].content, Content::Parts(parts) if parts.len() == 2));
        assert_eq!(chat[3].content, Content::None);
        assert_eq!(chat[3].reasoning_content.as_deref(), Some("hm"));
        assert_eq!(chat[3].tool_calls[0].name, "f");
        assert_eq!(chat[4].tool_call_id.as_deref(), Some("1"));
    }

    #[test]
    fn biases_are_read_in_both_spellings() {
        let read = |value: Value| biases(Some(&value));
        let expected = Some(vec![(7, -2.5), (12, 1.0)]);
        assert_eq!(read(json!({"7": -2.5, "12": 1})), expected);
        assert_eq!(read(json!([[7, -2.5], [12, 1]])), expected);
        assert_eq!(read(json!([[7, false]])), Some(vec![(7, -100.0)]));
        assert_eq!(biases(None), Some(Vec::new()));
        for bad in [
            json!({"a": 1}),
            json!({"-1": 1}),
            json!({"1": "x"}),
            json!([[1]]),
            json!([["word", 1]]),
            json!(5),
        ] {
            assert_eq!(read(bad.clone()), None, "{bad}");
        }
    }

    #[test]
    fn what_is_no_text_is_refused_by_its_place() {
        let image = json!([{"role": "user", "content": [
            {"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]}]);
        let failure = read(image).unwrap_err();
        assert_eq!(failure.fields()[0].0, "messages[0].content[1]");
        assert!(failure.message().contains("image_url"), "{failure:?}");
        let failure = read(json!([{"role": "user", "content": "a", "images": ["x"]}]));
        assert_eq!(failure.unwrap_err().fields()[0].0, "messages[0].images");
    }
}
