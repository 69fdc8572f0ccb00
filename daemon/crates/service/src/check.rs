//! Checks request fields against their ranges. A value out of range is rejected with the field, the
//! value and the range; nothing is corrected silently. All violations of a request are reported
//! together.

use std::time::Duration;

use rocmforge_chat::format::Format;
use rocmforge_chat::reasoning::Plan;
use rocmforge_engine::api::{Decoding, SamplingParams, TOP_N_MAX};
use rocmforge_failure::{self as failure, Failure, Violations};
use rocmforge_grammar::Trigger;

use crate::adapter_choice::{AdapterChoice, AdapterScale};
use crate::decoding::{self, DecodingFields};
use crate::samplers::SamplerFields;

/// Maximum number of stop strings of a request.
pub const STOP_MAX: usize = 256;
/// Maximum length of a stop string in bytes.
pub const STOP_MAX_BYTES: usize = 256;
/// Largest absolute value of a presence or frequency penalty.
pub const PENALTY_MAX: f32 = 100.0;
/// Longest gap between tokens that can be promised, in milliseconds.
pub const MAX_GAP_MS: u32 = 60_000;
/// Largest value of a count in a request.
const COUNT_MAX: u32 = i32::MAX as u32;
/// Maximum number of messages of a conversation.
pub const MESSAGES_MAX: usize = 4096;
/// Maximum number of content parts, and of tool calls, in all messages of a conversation.
pub const PARTS_MAX: usize = 16_384;
/// Maximum length of a message's role in bytes.
pub const ROLE_MAX_BYTES: usize = 64;
/// Maximum length of a model's name in bytes.
pub const MODEL_NAME_MAX: usize = rocmforge_engine::MODEL_NAME_MAX;
/// Maximum number of scores in a response: tokens times (`top_n` + 1).
pub const SCORES_MAX: u64 = 1 << 20;

/// Sampling fields as a request has them; absent fields take their defaults.
#[derive(Debug, Clone, Default)]
pub struct SamplingFields {
    /// Temperature: at least 0; 0 is greedy.
    pub temperature: Option<f32>,
    /// Number of most likely tokens that are kept: at least 0; 0 keeps all.
    pub top_k: Option<i32>,
    /// Top-p: probability that the kept tokens reach together: above 0, at most 1.
    pub top_p: Option<f32>,
    /// Share of the largest probability that a token needs to be kept: at least 0, below 1.
    pub min_p: Option<f32>,
    /// Penalty factor of repeated tokens: above 0; 1 is off.
    pub repeat_penalty: Option<f32>,
    /// Penalty of tokens that are present, subtracted from their logits: at most [`PENALTY_MAX`],
    /// either sign.
    pub presence_penalty: Option<f32>,
    /// Penalty of tokens for each occurrence, subtracted from their logits: at most
    /// [`PENALTY_MAX`], either sign.
    pub frequency_penalty: Option<f32>,
    /// Number of recent tokens that penalties count.
    pub penalty_last_n: Option<i32>,
    /// Fields of further samplers, and the order of all samplers.
    pub samplers: SamplerFields,
    /// Seed of sampling; a random one if absent.
    pub seed: Option<u64>,
    /// Maximum number of generated tokens: at least 1.
    pub max_tokens: Option<i32>,
    /// Strings that end the output: at most [`STOP_MAX`], each of at most [`STOP_MAX_BYTES`] bytes.
    pub stop: Vec<String>,
    /// Fields that constrain decoding.
    pub decoding: DecodingFields,
    /// Whether the request may use the prefix cache.
    pub reuse_prompt: Option<bool>,
    /// Longest gap between tokens to be promised, in milliseconds: 0 for none, up to
    /// [`MAX_GAP_MS`]. If absent, the default of the request's priority.
    pub max_gap_ms: Option<i32>,
    /// LoRA adapters of the request. If absent, those in the model's name, or the defaults of the
    /// load.
    pub lora: Option<Vec<AdapterScale>>,
}

/// The checked sampling fields.
#[derive(Debug)]
pub struct Sampling {
    /// Sampling parameters for the engine.
    pub params: SamplingParams,
    /// Maximum number of tokens; `None` is up to the context's end.
    pub max_tokens: Option<u32>,
    /// Strings that end the output.
    pub stop: Vec<String>,
    /// Texts, with the value to add to the logits of their tokens; not yet a part of `params`.
    pub biased_texts: Vec<(String, f32)>,
    /// Longest gap between tokens to promise, zero for none; `None` takes the default of the class.
    pub max_gap: Option<Duration>,
    /// Parameters that constrain decoding.
    pub decoding: Decoding,
    /// The grammar or format that constrains the output; not yet a part of `decoding`.
    pub format: Option<Format>,
    /// Text after which the format begins to apply; `None` applies it from the start of the output.
    pub trigger: Option<Trigger>,
    /// How much reasoning comes before the format.
    pub reasoning: Plan,
    /// LoRA adapters that the request asks for.
    pub adapters: AdapterChoice,
    rename: Option<fn(&str) -> String>,
}

impl Sampling {
    /// The full name of a field in the request's dialect.
    pub(crate) fn name_of(&self, field: &str) -> String {
        self.rename
            .map_or_else(|| field.to_owned(), |name| name(field))
    }
}

/// Checks the fields `sampling.*` of a request.
pub fn sampling(wire: SamplingFields, violations: &mut Violations) -> Sampling {
    let v = violations;
    let mut params = params(&wire, v);
    let mut wrong = |field: &str, message: String| v.add(field, message);
    wire.samplers.set(&mut params, &mut wrong);
    let max_tokens = v.integer(
        "sampling.max_tokens",
        wire.max_tokens,
        1,
        COUNT_MAX,
        "at least 1; leave it unset to generate until the text ends or the context is full",
    );
    let max_gap_ms = v.integer(
        "max_gap_ms",
        wire.max_gap_ms,
        0,
        MAX_GAP_MS,
        "milliseconds from 1 to 60000, or 0 for no promise",
    );
    stop_strings(&wire.stop, v);
    let reasoning = Plan {
        budget: wire.decoding.reasoning_budget,
        end: wire.decoding.reasoning_end.clone(),
        ..Plan::default()
    };
    let mut fields = wire.decoding;
    let biased_texts = std::mem::take(&mut fields.biased_texts);
    let (decoding, format);
    (params.logit_bias, decoding, format) =
        decoding::checked(fields, biased_texts.as_slice(), max_tokens, v);
    Sampling {
        params,
        max_tokens,
        stop: wire.stop,
        max_gap: max_gap_ms.map(|ms| Duration::from_millis(ms.into())),
        biased_texts,
        decoding,
        format,
        trigger: None,
        reasoning,
        adapters: AdapterChoice::default(),
        rename: v.naming(),
    }
}

/// The sampling parameters, without biases of tokens.
fn params(wire: &SamplingFields, v: &mut Violations) -> SamplingParams {
    let default = SamplingParams::default();
    SamplingParams {
        temperature: v.number(
            "sampling.temperature",
            wire.temperature,
            default.temperature,
            |x| x >= 0.0,
            "finite and at least 0, where 0 is greedy",
        ),
        top_k: v
            .integer(
                "sampling.top_k",
                wire.top_k,
                0,
                COUNT_MAX,
                "at least 0, where 0 keeps all",
            )
            .unwrap_or(default.top_k),
        top_p: v.number(
            "sampling.top_p",
            wire.top_p,
            default.top_p,
            |x| x > 0.0 && x <= 1.0,
            "above 0 and at most 1, where 1 keeps all",
        ),
        min_p: v.number(
            "sampling.min_p",
            wire.min_p,
            default.min_p,
            |x| (0.0..1.0).contains(&x),
            "at least 0 and below 1, where 0 keeps all",
        ),
        repeat_penalty: v.number(
            "sampling.repeat_penalty",
            wire.repeat_penalty,
            default.repeat_penalty,
            |x| x > 0.0,
            "finite and above 0, where 1 does nothing",
        ),
        presence_penalty: v.number(
            "sampling.presence_penalty",
            wire.presence_penalty,
            default.presence_penalty,
            |x| x.abs() <= PENALTY_MAX,
            "from -100 to 100, where 0 does nothing",
        ),
        frequency_penalty: v.number(
            "sampling.frequency_penalty",
            wire.frequency_penalty,
            default.frequency_penalty,
            |x| x.abs() <= PENALTY_MAX,
            "from -100 to 100, where 0 does nothing",
        ),
        penalty_last_n: v
            .integer(
                "sampling.penalty_last_n",
                wire.penalty_last_n,
                0,
                COUNT_MAX,
                "at least 0, where 0 turns penalties off",
            )
            .unwrap_or(default.penalty_last_n),
        seed: wire.seed,
        ..default
    }
}

fn stop_strings(stop: &[String], v: &mut Violations) {
    if stop.len() > STOP_MAX {
        v.add(
            "sampling.stop",
            format!("{} stop strings; at most {STOP_MAX}", stop.len()),
        );
    }
    if let Some(at) = stop
        .iter()
        .position(|stop| stop.is_empty() || stop.len() > STOP_MAX_BYTES)
    {
        let bytes = stop[at].len();
        v.add(
            "sampling.stop",
            format!("string {at} has {bytes} bytes; 1 to {STOP_MAX_BYTES} are allowed"),
        );
    }
}

/// Checks that a string is a valid model name.
pub fn model_name(field: &str, name: &str, violations: &mut Violations) {
    if name.is_empty() {
        violations.add(
            field,
            "empty; give the name of a loaded model (List names them)",
        );
    } else if name.len() > MODEL_NAME_MAX {
        violations.add(
            field,
            format!(
                "{} bytes; a model's name has at most {MODEL_NAME_MAX}",
                name.len()
            ),
        );
    }
}

/// Checks that `n_ctx` is positive; its maximum depends on the model.
pub fn n_ctx(value: Option<i32>, violations: &mut Violations) -> Option<u32> {
    violations.integer(
        "n_ctx",
        value,
        1,
        i32::MAX as u32,
        "at least 1, at most the model's training length",
    )
}

/// Checks the field `top_n`, the number of most likely tokens to score.
pub fn top_n(value: Option<i32>, violations: &mut Violations) -> u32 {
    violations
        .integer(
            "top_n",
            value,
            0,
            TOP_N_MAX,
            &format!("from 0 to {TOP_N_MAX}"),
        )
        .unwrap_or(0)
}

/// Checks the number of best results to return (`top_n` of rankings).
pub fn best(value: Option<i32>, violations: &mut Violations) -> Option<u32> {
    let range = "at least 1; leave it unset for all";
    violations.integer("top_n", value, 1, i32::MAX as u32, range)
}

/// Checks the number of messages of a conversation, and their roles.
pub fn messages(roles: &[&str], violations: &mut Violations) {
    if roles.is_empty() || roles.len() > MESSAGES_MAX {
        violations.add(
            "messages",
            format!("{} messages; 1 to {MESSAGES_MAX} are allowed", roles.len()),
        );
    }
    if let Some(at) = roles
        .iter()
        .position(|role| role.is_empty() || role.len() > ROLE_MAX_BYTES)
    {
        let bytes = roles[at].len();
        violations.add(
            &format!("messages[{at}].role"),
            format!("{bytes} bytes; a role has 1 to {ROLE_MAX_BYTES}, for example system, user or assistant"),
        );
    }
}

/// The context length of a request: the one that it asks for, within the limits of the model and
/// the daemon.
///
/// # Errors
/// INVALID_ARGUMENT, with the field and its range.
pub fn context(asked: Option<u32>, n_ctx_train: u32, n_ctx_max: u32) -> Result<u32, Failure> {
    let most = n_ctx_train.min(n_ctx_max);
    match asked {
        Some(n) if n > most => {
            let whose = if n_ctx_train <= n_ctx_max {
                "the length that the model was trained with"
            } else {
                "the daemon's limit, --n-ctx-max"
            };
            Err(failure::invalid(
                "n_ctx",
                &format!("{n} is out of range: at least 1, at most {most}, {whose}"),
            ))
        }
        Some(n) => Ok(n),
        None => Ok(most),
    }
}

/// Checks that token ids are in a vocabulary of `n_vocab` tokens.
///
/// # Errors
/// INVALID_ARGUMENT, with the field and its range.
pub fn ids(field: &str, ids: &[u32], n_vocab: u32) -> Result<(), Failure> {
    match ids.iter().position(|&id| id >= n_vocab) {
        None => Ok(()),
        Some(at) => Err(failure::invalid(
            field,
            &format!(
                "id {} at place {at} is out of range: the vocabulary has the ids 0 to {}",
                ids[at],
                n_vocab.max(1) - 1
            ),
        )),
    }
}

/// Checks that there are tokens to score, and that the scores fit a response.
///
/// # Errors
/// INVALID_ARGUMENT, with the field and its range.
pub fn score_length(field: &str, n_tokens: usize, top_n: u32) -> Result<(), Failure> {
    if n_tokens < 2 {
        return Err(failure::invalid(
            field,
            &format!(
                "the text has {n_tokens} tokens; scoring needs at least 2, since the first has nothing before it"
            ),
        ));
    }
    let scores = n_tokens as u64 * (u64::from(top_n) + 1);
    if scores > SCORES_MAX {
        return Err(failure::invalid(
            "top_n",
            &format!(
                "{top_n} for {n_tokens} tokens makes {scores} scores; at most {SCORES_MAX} fit an answer: lower it, or score \
                 fewer tokens"
            ),
        ));
    }
    Ok(())
}

/// Checks segment indices and drops repeated ones. An empty list means all segments (`None`).
///
/// # Errors
/// INVALID_ARGUMENT, with the field and its range.
pub fn segments(asked: Vec<u32>, n_segments: usize) -> Result<Option<Vec<u32>>, Failure> {
    if asked.is_empty() {
        return Ok(None);
    }
    if let Some(&index) = asked.iter().find(|&&index| index as usize >= n_segments) {
        return Err(failure::invalid(
            "segments",
            &format!(
                "index {index} is out of range: the model has the segments 0 to {}",
                n_segments.max(1) - 1
            ),
        ));
    }
    let mut seen = vec![false; n_segments];
    Ok(Some(
        asked
            .into_iter()
            .filter(|&index| !std::mem::replace(&mut seen[index as usize], true))
            .collect(),
    ))
}

#[cfg(test)]
#[path = "check_tests.rs"]
mod tests;
