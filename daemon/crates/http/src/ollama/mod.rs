//! Ollama's routes, and what they share.

pub(super) mod chat;
pub(super) mod embed;
mod fit;
pub(super) mod generate;
mod keep_alive;
mod logprobs;
pub(super) mod models;
pub(super) mod pull;
pub(super) mod time;

use rocmforge_failure::{Failure, Violations};
use rocmforge_service::answers::Ended;
use rocmforge_service::check::SamplingFields;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

pub(super) use self::keep_alive::KeepAlives;
use super::prompt::TextOr;
use super::sampling::{WireSampling, refuse_unsupported, whole_number};
use super::sse::append_json;
use super::timings;

/// Content type of JSON lines.
const NDJSON: &str = "application/x-ndjson";

/// The field `options`: those supported here; others concern where Ollama runs a model, and are
/// ignored.
#[derive(Debug, Default, Deserialize)]
struct Options {
    #[serde(default, deserialize_with = "whole_number")]
    num_predict: Option<i64>,
    #[serde(default, deserialize_with = "whole_number")]
    num_ctx: Option<i64>,
    stop: Option<TextOr<String>>,
    #[serde(flatten)]
    sampling: WireSampling,
    tfs_z: Option<f64>,
}

impl Options {
    fn refuse_unsupported(&self) -> Result<(), Failure> {
        const LATER: &str = "not implemented; leave it unset";
        refuse_unsupported(&[("options.tfs_z", self.tfs_z.is_some_and(|z| z != 1.0), LATER)])
    }

    /// The sampling fields, and the context length.
    fn fields(self, violations: &mut Violations) -> (SamplingFields, Option<i32>) {
        // 0 and below is without end, which the context's is.
        let max_tokens = self.num_predict.filter(|&n| n > 0);
        let stop = self.stop.map(TextOr::stops);
        let mut sampling = self.sampling.fields(max_tokens, stop, violations);
        // Below 0 is a fresh draw.
        sampling.seed = sampling.seed.filter(|&seed| seed.cast_signed() >= 0);
        let n_ctx = self.num_ctx.map(|n| i32::try_from(n).unwrap_or(i32::MAX));
        (sampling, n_ctx)
    }
}

/// The name of a field in Ollama's requests.
pub(super) fn name(field: &str) -> String {
    match field {
        "n_ctx" => "options.num_ctx".to_owned(),
        "logprobs" => "top_logprobs".to_owned(),
        "sampling.max_tokens" => "options.num_predict".to_owned(),
        "sampling.penalty_last_n" => "options.repeat_last_n".to_owned(),
        _ => field.replace("sampling.", "options."),
    }
}

/// Converts the field `think` to template variables: off, on, or how much.
fn thinking(think: Option<&Value>) -> Map<String, Value> {
    let mut kwargs = Map::new();
    match think {
        Some(Value::Bool(on)) => {
            kwargs.insert("enable_thinking".to_owned(), (*on).into());
        }
        Some(Value::String(effort)) => {
            kwargs.insert("enable_thinking".to_owned(), true.into());
            kwargs.insert("reasoning_effort".to_owned(), effort.as_str().into());
        }
        _ => {}
    }
    kwargs
}

/// Fields of a stream's last line besides `done`.
fn counts(ended: &Ended) -> Value {
    let ns = |time: std::time::Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    let mut counts = json!({
        "done_reason": if ended.is_cut() { "length" } else { "stop" },
        "total_duration": ns(ended.times.total),
        "load_duration": 0,
        "prompt_eval_count": ended.prompt_tokens,
        "prompt_eval_duration": ns(ended.times.prompt),
        "eval_count": ended.generated_tokens,
        "eval_duration": ns(ended.times.generation),
    });
    timings::add_promised_gaps(ended, &mut counts);
    counts
}

/// Copies the members of one object into another.
fn merge(into: &mut Value, from: Value) {
    if let (Value::Object(into), Value::Object(from)) = (into, from) {
        into.extend(from);
    }
}

fn line(value: &impl Serialize, out: &mut String) {
    append_json(value, out);
    out.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_read_and_called_by_their_names() {
        let options: Options = serde_json::from_value(json!({
            "num_predict": -1, "num_ctx": 0.0, "temperature": 0, "top_k": 5, "seed": -1, "stop": "x",
            "num_gpu": 99, "use_mmap": true,
        }))
        .unwrap();
        assert!(options.refuse_unsupported().is_ok());
        let mut violations = Violations::named(name);
        let (fields, n_ctx) = options.fields(&mut violations);
        assert_eq!(
            (fields.max_tokens, fields.top_k, fields.seed),
            (None, Some(5), None)
        );
        assert_eq!((n_ctx, fields.stop.len()), (Some(0), 1));
        rocmforge_service::check::n_ctx(n_ctx, &mut violations);
        let failure = violations.result().unwrap_err();
        assert_eq!(failure.fields()[0].0, "options.num_ctx");
        let options: Options = serde_json::from_value(json!({"tfs_z": 0.5})).unwrap();
        let failure = options.refuse_unsupported().unwrap_err();
        assert_eq!(failure.fields()[0].0, "options.tfs_z");
        let options = json!({"mirostat": 2, "mirostat_tau": 3, "typical_p": 0.5});
        let options: Options = serde_json::from_value(options).unwrap();
        let samplers = options.fields(&mut Violations::named(name)).0.samplers;
        assert_eq!(
            (samplers.mirostat, samplers.mirostat_tau, samplers.typical_p),
            (Some(2), Some(3.0), Some(0.5))
        );
    }
}
