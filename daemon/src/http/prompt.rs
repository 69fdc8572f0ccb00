//! Conversations as OpenAI's and Ollama's clients write them, and the fields of sampling that
//! dialects share.

use rocmforge_service::check::{SamplingFields, Violations};
use rocmforge_service::decoding::{BIAS_MAX, DecodingFields};
use rocmforge_service::failure::{self, Failure};
use rocmforge_tokenizer::{Content, Message, ToolCall};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value, json};

use super::media;

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

    /// Stop strings without the empty ones, which some clients send for none.
    pub(super) fn stops(self) -> Self {
        let mut list = self.into_list();
        list.retain(|stop| !stop.is_empty());
        Self::List(list)
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
    function: Option<WireFunction>,
    /// Of tools whose input is a text, in conversations that another server began.
    custom: Option<WireCustom>,
}

#[derive(Debug, Clone, Deserialize)]
struct WireCustom {
    name: String,
    #[serde(default)]
    input: Value,
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
    let mut reasoning = wire.reasoning_content.or(wire.reasoning).or(wire.thinking);
    let content = match wire.content {
        None => Content::None,
        Some(TextOr::Text(text)) => Content::Text(text),
        Some(TextOr::List(mut parts)) => {
            if wire.role == "assistant" {
                take_thoughts(&mut parts, &mut reasoning);
            }
            text_parts(parts, |part| format!("messages[{at}].content[{part}]"))?
        }
    };
    let content = with_images(content, wire.images.map_or(0, |images| images.len()));
    // What instructs the model is called so by newer clients.
    let role = match wire.role.as_str() {
        "developer" => "system".to_owned(),
        _ => wire.role,
    };
    let mut calls = Vec::new();
    for (n, call) in wire.tool_calls.unwrap_or_default().into_iter().enumerate() {
        let (name, arguments) = match (call.function, call.custom) {
            (Some(function), _) => (function.name, function.arguments),
            (None, Some(custom)) => (custom.name, json!({"input": custom.input})),
            (None, None) => {
                let field = format!("messages[{at}].tool_calls[{n}]");
                return Err(failure::invalid(&field, "it has no function; give one"));
            }
        };
        calls.push(ToolCall {
            id: call.id,
            name,
            arguments,
        });
    }
    Ok(Message {
        role,
        content,
        reasoning_content: reasoning,
        tool_calls: calls,
        tool_call_id: wire.tool_call_id,
        name: wire.name.or(wire.tool_name),
        parse_special: false,
    })
}

/// What a message says, with what is told in place of each of its images.
fn with_images(content: Content, n: usize) -> Content {
    if n == 0 {
        return content;
    }
    let told = vec![media::IMAGE; n].join("\n");
    match content {
        Content::None => Content::Text(told),
        Content::Text(text) => Content::Text(beside_images(&text, n)),
        Content::Parts(mut parts) => {
            parts.push(json!({"type": "text", "text": told}));
            Content::Parts(parts)
        }
    }
}

/// A text with what is told in place of each of `n` images beside it.
pub(super) fn beside_images(text: &str, n: usize) -> String {
    let told = vec![media::IMAGE; n].join("\n");
    match (text.is_empty(), n) {
        (_, 0) => text.to_owned(),
        (true, _) => told,
        (false, _) => format!("{text}\n{told}"),
    }
}

/// The name of a model, or an empty one where there is none.
pub(super) fn model_name<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    Option::<String>::deserialize(deserializer).map(Option::unwrap_or_default)
}

/// Takes parts of reasoning out of an answer, in Mistral's form: `thinking` is a text, or parts of
/// text. They count where the message has no reasoning of its own.
fn take_thoughts(parts: &mut Vec<Value>, reasoning: &mut Option<String>) {
    let mut thought = String::new();
    parts.retain(|part| {
        if part["type"] != "thinking" {
            return true;
        }
        match &part["thinking"] {
            Value::String(text) => thought.push_str(text),
            Value::Array(texts) => {
                thought.extend(texts.iter().filter_map(|text| text["text"].as_str()))
            }
            _ => {}
        }
        false
    });
    if !thought.is_empty() {
        reasoning.get_or_insert(thought);
    }
}

/// The member of an object; null where there is none, or where it is no object.
pub(super) fn take(value: &mut Value, key: &str) -> Value {
    value.get_mut(key).map(Value::take).unwrap_or_default()
}

/// Parts of a message as text, with their further members, which reach the template: documents are
/// what is in them, and what models here cannot read leaves a text that says so.
pub(super) fn text_parts(
    parts: Vec<Value>,
    field: impl Fn(usize) -> String,
) -> Result<Content, Failure> {
    let mut texts = Vec::with_capacity(parts.len());
    for (at, mut part) in parts.into_iter().enumerate() {
        let kind = part["type"].as_str().unwrap_or("text");
        let key = match kind {
            "refusal" => "refusal",
            _ => "text",
        };
        if !matches!(kind, "text" | "input_text" | "output_text" | "refusal") {
            let text = media::text_of(kind, &part).ok_or_else(|| {
                let message = format!("a part of the type {kind} is not known here; leave it out");
                failure::unsupported_field(&field(at), &message)
            })?;
            texts.push((text, Value::Null));
            continue;
        }
        match take(&mut part, key) {
            Value::String(text) => texts.push((text, part)),
            _ => {
                let message = format!("it has no {key}; give one");
                return Err(failure::invalid(&field(at), &message));
            }
        }
    }
    // One part without more is what a text is.
    if let [(text, part)] = texts.as_mut_slice()
        && part
            .as_object()
            .is_none_or(|part| part.keys().all(|key| is_of_text(key)))
    {
        return Ok(Content::Text(std::mem::take(text)));
    }
    if texts.is_empty() {
        return Ok(Content::None);
    }
    let part = |(text, part): (String, Value)| {
        let mut whole = Map::new();
        whole.insert("type".to_owned(), "text".into());
        whole.insert("text".to_owned(), text.into());
        if let Value::Object(more) = part {
            whole.extend(more.into_iter().filter(|(key, _)| !is_of_text(key)));
        }
        Value::Object(whole)
    };
    Ok(Content::Parts(texts.into_iter().map(part).collect()))
}

/// Whether a part of text has this member for its text.
fn is_of_text(key: &str) -> bool {
    matches!(key, "type" | "text" | "refusal")
}

/// Sampling in the names that OpenAI's, Anthropic's and Ollama's fields share.
#[derive(Debug, Clone, Default, Deserialize)]
pub(super) struct WireSampling {
    temperature: Option<f32>,
    top_p: Option<f32>,
    #[serde(default, deserialize_with = "whole_number")]
    top_k: Option<i64>,
    min_p: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    repeat_penalty: Option<f32>,
    /// vLLM's word for it; some clients send both.
    repetition_penalty: Option<f32>,
    #[serde(default, deserialize_with = "whole_number")]
    repeat_last_n: Option<i64>,
    #[serde(default, deserialize_with = "whole_number")]
    seed: Option<i64>,
    logit_bias: Option<Value>,
    #[serde(default, deserialize_with = "whole_number")]
    min_tokens: Option<i64>,
    ignore_eos: Option<bool>,
    stop_token_ids: Option<Vec<u32>>,
    /// llama-server's.
    cache_prompt: Option<bool>,
    /// Most tokens of reasoning; -1 is without a bound. llama-server's.
    reasoning_budget: Option<Value>,
    /// Likewise.
    thinking_budget_tokens: Option<Value>,
    // Refused where they ask for anything: llama-server's and vLLM's.
    mirostat: Option<f32>,
    typ_p: Option<f32>,
    typical_p: Option<f32>,
    xtc_probability: Option<f32>,
    dry_multiplier: Option<f32>,
    dynatemp_range: Option<f32>,
    use_beam_search: Option<bool>,
    allowed_token_ids: Option<Vec<Value>>,
    bad_words: Option<Vec<Value>>,
}

/// A whole number, or nothing. Clients whose numbers are all real ones write 512.0.
pub(super) fn whole_number<'de, D>(deserializer: D) -> Result<Option<i64>, D::Error>
where
    D: Deserializer<'de>,
{
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "expected a whole number")]
    enum Number {
        Whole(i64),
        Real(f64),
    }
    /// Up to here every whole number is a real one.
    const EXACT: f64 = (1_u64 << 53) as f64;
    match Option::<Number>::deserialize(deserializer)? {
        None => Ok(None),
        Some(Number::Whole(n)) => Ok(Some(n)),
        Some(Number::Real(x)) if x.fract() == 0.0 && x.abs() <= EXACT => Ok(Some(x as i64)),
        // Whole numbers that are larger come as real ones, too, with other digits.
        Some(Number::Real(x)) if x.fract() == 0.0 => Err(D::Error::custom(
            "number out of range, expected a whole number of 64 bits with a sign",
        )),
        Some(Number::Real(x)) => Err(D::Error::custom(format_args!(
            "invalid number {x}, expected a whole number"
        ))),
    }
}

/// Most tokens of reasoning, of what the first of these fields says that says anything.
pub(super) fn reasoning_budget(
    fields: &[(&'static str, &Option<Value>)],
    violations: &mut Violations,
) -> Option<u32> {
    let said = fields
        .iter()
        .filter(|(_, value)| says_something(value.as_ref()));
    for (field, value) in said {
        let number = value.as_ref().and_then(Value::as_f64);
        match number.filter(|n| n.fract() == 0.0 && (-1.0..=f64::from(i32::MAX)).contains(n)) {
            Some(-1.0) => {}
            Some(n) => return Some(n as u32),
            None => violations.add(field, "give a whole number of tokens, or -1 for no bound"),
        }
    }
    None
}

impl WireSampling {
    /// `temperature` and `top_p` as they were written.
    pub(super) fn told(&self) -> (Value, Value) {
        // The shortest number that is this one: 0.7, not what lies beside it.
        let number = |x: Option<f32>| {
            let x = x.and_then(|x| x.to_string().parse::<f64>().ok());
            x.map_or(Value::Null, Value::from)
        };
        (number(self.temperature), number(self.top_p))
    }

    /// What would choose other tokens, and is not here.
    fn add_unsupported(&self, violations: &mut Violations) {
        let other = |value: Option<f32>, neutral: f32| value.is_some_and(|x| x != neutral);
        let lists = |list: &Option<Vec<Value>>| list.as_ref().is_some_and(|list| !list.is_empty());
        for (field, asked) in [
            ("sampling.mirostat", other(self.mirostat, 0.0)),
            ("sampling.typ_p", other(self.typ_p, 1.0)),
            ("sampling.typical_p", other(self.typical_p, 1.0)),
            ("sampling.xtc_probability", other(self.xtc_probability, 0.0)),
            ("sampling.dry_multiplier", other(self.dry_multiplier, 0.0)),
            ("sampling.dynatemp_range", other(self.dynatemp_range, 0.0)),
            (
                "sampling.use_beam_search",
                self.use_beam_search == Some(true),
            ),
            ("sampling.allowed_token_ids", lists(&self.allowed_token_ids)),
            ("sampling.bad_words", lists(&self.bad_words)),
        ] {
            if asked {
                violations.add(field, "not implemented; leave it unset");
            }
        }
    }

    /// As the checks take it.
    pub(super) fn fields(
        self,
        max_tokens: Option<i64>,
        stop: Option<TextOr<String>>,
        violations: &mut Violations,
    ) -> SamplingFields {
        self.add_unsupported(violations);
        let budgets = [
            ("reasoning_budget", &self.reasoning_budget),
            ("thinking_budget_tokens", &self.thinking_budget_tokens),
        ];
        let reasoning_budget = reasoning_budget(&budgets, violations);
        let mut small = |field: &str, value: Option<i64>| {
            let value = value?;
            let small = i32::try_from(value).ok();
            if small.is_none() {
                violations.add(
                    field,
                    format!("{value} is out of range: from {} to {}", i32::MIN, i32::MAX),
                );
            }
            small
        };
        SamplingFields {
            temperature: self.temperature,
            // vLLM's, llama-server's and Ollama's word for all of them.
            top_k: small(
                "sampling.top_k",
                self.top_k.map(|n| if n == -1 { 0 } else { n }),
            ),
            top_p: self.top_p.map(likeliest_alone),
            min_p: self.min_p,
            repeat_penalty: self.repeat_penalty.or(self.repetition_penalty),
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            // Likewise, as far back as the context goes.
            penalty_last_n: small(
                "sampling.penalty_last_n",
                self.repeat_last_n.map(|n| match n {
                    -1 => i64::from(i32::MAX),
                    n => n,
                }),
            ),
            // Any number is a place to begin at.
            seed: self.seed.map(i64::cast_unsigned),
            max_tokens: small("sampling.max_tokens", max_tokens),
            stop: stop.map(TextOr::into_list).unwrap_or_default(),
            decoding: DecodingFields {
                reasoning_budget,
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

/// `top_p`, whose 0 leaves the likeliest token, as the smallest number above it does.
fn likeliest_alone(top_p: f32) -> f32 {
    match top_p {
        0.0 => f32::MIN_POSITIVE,
        other => other,
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
    fn further_members_of_parts_are_kept() {
        let chat = read(json!([
            {"role": "user", "content": [{"type": "input_text", "text": "a", "cache_control": {"x": 1}}]},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b", "n": 2}]},
        ]))
        .unwrap();
        assert_eq!(
            chat[0].content,
            Content::Parts(vec![
                json!({"type": "text", "text": "a", "cache_control": {"x": 1}})
            ])
        );
        assert_eq!(
            chat[1].content,
            Content::Parts(vec![
                json!({"type": "text", "text": "a"}),
                json!({"type": "text", "text": "b", "n": 2}),
            ])
        );
    }

    #[test]
    fn parts_of_reasoning_are_reasoning() {
        let chat = read(json!([
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": [{"type": "text", "text": "I "}, {"type": "text", "text": "think."}]},
                {"type": "text", "text": "a"}]},
            {"role": "assistant", "reasoning": "own", "content": [{"type": "thinking", "thinking": "other"}]},
        ]))
        .unwrap();
        assert_eq!(chat[0].reasoning_content.as_deref(), Some("I think."));
        assert_eq!(chat[0].content, Content::Text("a".into()));
        assert_eq!(chat[1].reasoning_content.as_deref(), Some("own"));
        assert_eq!(chat[1].content, Content::None);
    }

    #[test]
    fn what_other_servers_answered_is_read() {
        let chat = read(json!([
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"role": "assistant", "tool_calls": [
                {"id": "1", "type": "custom", "custom": {"name": "f", "input": "x"}}]},
        ]))
        .unwrap();
        assert_eq!(chat[0].content, Content::Text("No.".into()));
        assert_eq!(chat[1].tool_calls[0].arguments, json!({"input": "x"}));
        let none = read(json!([{"role": "assistant", "tool_calls": [{"id": "1"}]}]));
        let failure = none.unwrap_err();
        assert_eq!(failure.fields()[0].0, "messages[0].tool_calls[0]");
    }

    #[test]
    fn minus_one_is_without_a_bound() {
        let read = |value: Value| {
            let wire: WireSampling = serde_json::from_value(value).unwrap();
            let mut violations = Violations::default();
            let fields = wire.fields(None, None, &mut violations);
            violations.result().unwrap();
            fields
        };
        let fields = read(json!({"top_k": -1, "repeat_last_n": -1}));
        assert_eq!(
            (fields.top_k, fields.penalty_last_n),
            (Some(0), Some(i32::MAX))
        );
        // Either word for a penalty, or both.
        let fields = read(json!({"repeat_penalty": 1.1, "repetition_penalty": 1.2}));
        assert_eq!(fields.repeat_penalty, Some(1.1));
        let fields = read(json!({"repetition_penalty": 1.2}));
        assert_eq!(fields.repeat_penalty, Some(1.2));
    }

    #[test]
    fn whole_numbers_may_be_written_as_real_ones() {
        let read = |value: Value| serde_json::from_value::<WireSampling>(value);
        let wire = read(json!({"top_k": 40.0, "seed": -7})).unwrap();
        assert_eq!((wire.top_k, wire.seed), (Some(40), Some(-7)));
        assert_eq!(read(json!({"top_k": null})).unwrap().top_k, None);
        for bad in [
            json!(0.5),
            json!(1e300),
            json!(u64::MAX),
            json!("5"),
            json!([]),
        ] {
            assert!(read(json!({"top_k": bad})).is_err(), "{bad}");
        }
        let large = read(json!({"seed": u64::MAX})).unwrap_err();
        assert!(
            large.to_string().starts_with("number out of range"),
            "{large}"
        );
    }

    #[test]
    fn samplers_that_are_not_here_are_refused_by_name_unless_they_do_nothing() {
        let read = |value: Value| {
            let wire: WireSampling = serde_json::from_value(value).unwrap();
            let mut violations = Violations::default();
            wire.fields(None, None, &mut violations);
            violations.result()
        };
        let neutral = json!({
            "mirostat": 0, "typ_p": 1, "typical_p": 1.0, "xtc_probability": 0, "dry_multiplier": 0.0,
            "dynatemp_range": 0, "use_beam_search": false, "allowed_token_ids": null, "bad_words": [],
        });
        assert!(read(neutral).is_ok());
        for (field, value) in [
            ("mirostat", json!(2)),
            ("typ_p", json!(0.9)),
            ("xtc_probability", json!(0.5)),
            ("dry_multiplier", json!(0.8)),
            ("use_beam_search", json!(true)),
            ("allowed_token_ids", json!([1])),
            ("bad_words", json!(["x"])),
        ] {
            let failure = read(json!({field: value})).unwrap_err();
            assert_eq!(failure.fields()[0].0, format!("sampling.{field}"));
        }
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
    fn a_conversation_lives_on_with_an_image_in_it() {
        let chat = read(json!([
            {"role": "user", "content": [
                {"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]},
            {"role": "tool", "tool_call_id": "1", "content": [{"type": "image_url", "image_url": "x"}]},
            {"role": "user", "content": "a", "images": ["x", "y"]},
            {"role": "user", "images": ["x"]},
        ]))
        .unwrap();
        let text = |text: &str| json!({"type": "text", "text": text});
        assert_eq!(
            chat[0].content,
            Content::Parts(vec![text("a"), text(media::IMAGE)])
        );
        assert_eq!(chat[1].content, Content::Text(media::IMAGE.into()));
        let two = format!("a\n{0}\n{0}", media::IMAGE);
        assert_eq!(chat[2].content, Content::Text(two));
        assert_eq!(chat[3].content, Content::Text(media::IMAGE.into()));
    }

    #[test]
    fn a_part_of_no_known_type_is_refused_by_its_place() {
        let odd = json!([{"role": "user", "content": [
            {"type": "text", "text": "a"}, {"type": "robot"}]}]);
        let failure = read(odd).unwrap_err();
        assert_eq!(failure.fields()[0].0, "messages[0].content[1]");
        assert!(failure.message().contains("robot"), "{failure:?}");
    }
}
