//! Sampling fields that dialects share, and fields that are rejected because they are not
//! supported.

use rocmforge_failure::{self as failure, Failure, Violations};
use rocmforge_service::check::SamplingFields;
use rocmforge_service::decoding::{DecodingFields, FORBIDDEN};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::adapter_scales::{self, WireAdapter};
use super::prompt::TextOr;
use super::samplers::WireSamplers;

/// Sampling fields under the names that OpenAI, Anthropic and Ollama share.
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
    /// vLLM's name for `repeat_penalty`; some clients send both.
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
    /// llama-server's field for the use of the prefix cache.
    cache_prompt: Option<bool>,
    /// Maximum number of reasoning tokens (llama-server's field); -1 is no limit.
    reasoning_budget: Option<Value>,
    /// llama-server's second name of `reasoning_budget`.
    thinking_budget_tokens: Option<Value>,
    /// Longest gap between tokens to promise, in milliseconds.
    #[serde(default, deserialize_with = "whole_number")]
    max_gap_ms: Option<i64>,
    /// llama-server's field for LoRA adapters.
    lora: Option<Vec<WireAdapter>>,
    #[serde(flatten)]
    samplers: WireSamplers,
    // Refused where they ask for anything: vLLM's.
    use_beam_search: Option<bool>,
    allowed_token_ids: Option<Vec<Value>>,
    bad_words: Option<Vec<Value>>,
}

/// Converts a count to i32, saturating, so that the range checks see it.
pub(super) fn small(n: i64) -> i32 {
    let nearest = n.clamp(i32::MIN.into(), i32::MAX.into());
    nearest as i32
}

/// Deserializes a whole number, or null. Some clients write 512.0.
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
    /// Up to this value f64 represents every whole number exactly.
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

/// Reasoning budget in tokens, from the first of the fields that has a value; -1 counts as none.
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
    /// The values of `temperature` and `top_p` as the request has them.
    pub(super) fn told(&self) -> (Value, Value) {
        // The shortest number that is this one: 0.7, not what lies beside it.
        let number = |x: Option<f32>| {
            let x = x.and_then(|x| x.to_string().parse::<f64>().ok());
            x.map_or(Value::Null, Value::from)
        };
        (number(self.temperature), number(self.top_p))
    }

    /// Rejects fields that would change the output and are not supported.
    fn add_unsupported(&self, violations: &mut Violations) {
        let lists = |list: &Option<Vec<Value>>| list.as_ref().is_some_and(|list| !list.is_empty());
        for (field, asked) in [
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

    /// The fields in the form that the checks of `rocmforge-service` take.
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
        let samplers = self.samplers.fields(violations);
        let (logit_bias, biased_texts) = biases(self.logit_bias.as_ref()).unwrap_or_else(|| {
            violations.add(
                "sampling.logit_bias",
                "give an object of token ids or texts and numbers, as in {\"1234\": -2.5}",
            );
            Biases::default()
        });
        let mut count = |field: &str, value: Option<i64>| {
            let value = value?;
            let count = i32::try_from(value).ok();
            if count.is_none() {
                violations.add(
                    field,
                    format!("{value} is out of range: from {} to {}", i32::MIN, i32::MAX),
                );
            }
            count
        };
        SamplingFields {
            temperature: self.temperature,
            // vLLM's, llama-server's and Ollama's word for all of them.
            top_k: count(
                "sampling.top_k",
                self.top_k.map(|n| if n == -1 { 0 } else { n }),
            ),
            top_p: self.top_p.map(likeliest_alone),
            min_p: self.min_p,
            repeat_penalty: self.repeat_penalty.or(self.repetition_penalty),
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            // Likewise, as far back as the context goes.
            penalty_last_n: count(
                "sampling.penalty_last_n",
                self.repeat_last_n.map(|n| match n {
                    -1 => i64::from(i32::MAX),
                    n => n,
                }),
            ),
            samplers,
            // Any number is a place to begin at.
            seed: self.seed.map(i64::cast_unsigned),
            max_tokens: count("sampling.max_tokens", max_tokens),
            stop: stop.map(TextOr::into_list).unwrap_or_default(),
            decoding: DecodingFields {
                reasoning_budget,
                reasoning_end: None,
                min_tokens: count("sampling.min_tokens", self.min_tokens),
                ignore_eos: self.ignore_eos.unwrap_or(false),
                stop_token_ids: self.stop_token_ids.unwrap_or_default(),
                logit_bias,
                biased_texts,
                logprobs: None,
                after_sampling: false,
                format: None,
            },
            max_gap_ms: count("max_gap_ms", self.max_gap_ms),
            reuse_prompt: self.cache_prompt,
            lora: adapter_scales::listed(self.lora),
        }
    }
}

/// Replaces a `top_p` of 0, which means only the most likely token, by the smallest positive
/// number.
fn likeliest_alone(top_p: f32) -> f32 {
    match top_p {
        0.0 => f32::MIN_POSITIVE,
        other => other,
    }
}

/// Biases of token ids, and of texts.
type Biases = (Vec<(u32, f32)>, Vec<(String, f32)>);

/// Parses biases: `{"1234": -2.5, " word": 3}`, or llama-server's `[[1234, -2.5], [" word", 3]]`.
/// `false` forbids a token.
fn biases(value: Option<&Value>) -> Option<Biases> {
    let number = |value: &Value| match value {
        Value::Bool(false) => Some(FORBIDDEN),
        value => value.as_f64().map(|bias| bias as f32),
    };
    let mut biases = Biases::default();
    match value {
        None | Some(Value::Null) => {}
        Some(Value::Object(map)) => {
            for (name, bias) in map {
                match name.parse() {
                    Ok(id) => biases.0.push((id, number(bias)?)),
                    Err(_) => biases.1.push((name.clone(), number(bias)?)),
                }
            }
        }
        Some(Value::Array(pairs)) => {
            for pair in pairs {
                match pair.as_array()?.as_slice() {
                    [Value::String(text), bias] => biases.1.push((text.clone(), number(bias)?)),
                    [id, bias] => biases
                        .0
                        .push((id.as_u64()?.try_into().ok()?, number(bias)?)),
                    _ => return None,
                }
            }
        }
        Some(_) => return None,
    }
    Some(biases)
}

/// Rejects fields that would change the result and are not supported. The flag says whether the
/// request asks for more than the default.
pub(super) fn refuse_unsupported(fields: &[(&str, bool, &str)]) -> Result<(), Failure> {
    match fields.iter().find(|(_, asked, _)| *asked) {
        Some((field, _, message)) => Err(failure::unsupported_field(field, message)),
        None => Ok(()),
    }
}

/// Whether a field is present and not null, false or empty.
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
            "use_beam_search": false, "allowed_token_ids": null, "bad_words": [],
        });
        assert!(read(neutral).is_ok());
        for (field, value) in [
            ("use_beam_search", json!(true)),
            ("allowed_token_ids", json!([1])),
            ("bad_words", json!(["x"])),
        ] {
            let failure = read(json!({field: value})).unwrap_err();
            assert_eq!(failure.fields()[0].0, format!("sampling.{field}"));
        }
    }

    #[test]
    fn biases_are_read_in_both_spellings_by_id_and_by_text() {
        let read = |value: Value| biases(Some(&value));
        let expected = Some((vec![(7, -2.5), (12, 1.0)], vec![]));
        assert_eq!(read(json!({"7": -2.5, "12": 1})), expected);
        assert_eq!(read(json!([[7, -2.5], [12, 1]])), expected);
        let expected = Some((vec![(7, FORBIDDEN)], vec![(" a".to_owned(), 3.0)]));
        assert_eq!(read(json!({"7": false, " a": 3})), expected);
        assert_eq!(read(json!([[7, false], [" a", 3]])), expected);
        assert_eq!(
            read(json!([["7", 1]])),
            Some((vec![], vec![("7".to_owned(), 1.0)]))
        );
        assert_eq!(biases(None), Some(Biases::default()));
        for bad in [
            json!({"1": "x"}),
            json!({"1": true}),
            json!([[1]]),
            json!([[-1, 1]]),
            json!([[1.5, 1]]),
            json!([["word", "x"]]),
            json!(5),
        ] {
            assert_eq!(read(bad.clone()), None, "{bad}");
        }
    }
}
