//! Checks of a request's options besides sampling: logit bias, where the output may and must end,
//! log-probabilities.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use rocmforge_chat::format::Format;
use rocmforge_engine::LoadedModel;
use rocmforge_engine::api::Decoding;
use rocmforge_failure::{self as failure, Failure, Violations};

use crate::check::Sampling;

/// Maximum number of tokens with a bias.
pub const LOGIT_BIAS_MAX: usize = 1024;
/// Largest absolute value of a logit bias.
pub const BIAS_MAX: f32 = 100.0;
/// Bias of a token that must not be generated.
pub const FORBIDDEN: f32 = f32::NEG_INFINITY;
/// Maximum length in bytes of a text with a bias.
pub const BIASED_TEXT_MAX_BYTES: usize = 256;
/// Maximum number of stop tokens of a request, besides the vocabulary's own.
pub const STOP_TOKENS_MAX: usize = 64;
/// Maximum number of most likely tokens that are returned with log-probabilities at each position.
pub const LOGPROBS_MAX: u32 = 20;

/// Options of a request besides sampling, as the request has them; absent ones have no effect.
#[derive(Debug, Clone, Default)]
pub struct DecodingFields {
    /// Token ids, with the value to add to their logits: at most [`LOGIT_BIAS_MAX`] entries, each
    /// value at most [`BIAS_MAX`] in magnitude, or [`FORBIDDEN`].
    pub logit_bias: Vec<(u32, f32)>,
    /// Texts of 1 to [`BIASED_TEXT_MAX_BYTES`] bytes, with the value to add to the logits of each
    /// of their tokens; they count towards [`LOGIT_BIAS_MAX`].
    pub biased_texts: Vec<(String, f32)>,
    /// Minimum number of generated tokens: from 0 to `max_tokens`.
    pub min_tokens: Option<i32>,
    /// Whether generation goes on after end-of-generation tokens.
    pub ignore_eos: bool,
    /// Ids of tokens that end the generation: at most [`STOP_TOKENS_MAX`].
    pub stop_token_ids: Vec<u32>,
    /// Number of most likely tokens to return with log-probabilities: 0 to [`LOGPROBS_MAX`].
    pub logprobs: Option<i32>,
    /// Whether log-probabilities are those after all samplers, with which tokens are drawn.
    pub after_sampling: bool,
    /// The grammar or format that constrains the output.
    pub format: Option<Format>,
    /// Maximum number of reasoning tokens; `None` allows as many as leave room for the constrained
    /// output.
    pub reasoning_budget: Option<u32>,
    /// A flag that ends reasoning at once when it is set.
    pub reasoning_end: Option<Arc<AtomicBool>>,
}

/// Checks the fields as far as that needs no vocabulary. Returns the biases by token, the decoding
/// options, and the format that has to be compiled.
pub(crate) fn checked(
    mut fields: DecodingFields,
    texts: &[(String, f32)],
    max_tokens: Option<u32>,
    v: &mut Violations,
) -> (Vec<(u32, f32)>, Decoding, Option<Format>) {
    check_biased_texts(texts, v);
    let bias = &mut fields.logit_bias;
    let n = bias.len() + texts.len();
    if n > LOGIT_BIAS_MAX {
        let message = format!("{n} tokens; at most {LOGIT_BIAS_MAX}");
        v.add("sampling.logit_bias", message);
    }
    if let Some((id, bias)) = bias.iter().find(|(_, bias)| !is_bias(*bias)) {
        let message = format!("{bias} for token {id} is out of range: from -100 to 100");
        v.add("sampling.logit_bias", message);
    }
    bias.sort_unstable_by_key(|(id, _)| *id);
    if let Some(twice) = bias.windows(2).find(|two| two[0].0 == two[1].0) {
        let message = format!("token {} is given twice; give it once", twice[0].0);
        v.add("sampling.logit_bias", message);
    }
    let range = "at least 0, where 0 does nothing";
    let min_tokens = v.integer(
        "sampling.min_tokens",
        fields.min_tokens,
        0,
        i32::MAX as u32,
        range,
    );
    let min_tokens = min_tokens.unwrap_or(0);
    if let Some(max) = max_tokens.filter(|&max| max < min_tokens) {
        let message = format!("{min_tokens} is more than max_tokens, {max}; give less");
        v.add("sampling.min_tokens", message);
    }
    if fields.stop_token_ids.len() > STOP_TOKENS_MAX {
        let n = fields.stop_token_ids.len();
        let message = format!("{n} tokens; at most {STOP_TOKENS_MAX}");
        v.add("sampling.stop_token_ids", message);
    }
    if let Some(format) = &fields.format {
        format.check_beside(min_tokens, fields.ignore_eos, v);
    }
    let range = format!("from 0 to {LOGPROBS_MAX}");
    let decoding = Decoding {
        min_tokens,
        ignore_eos: fields.ignore_eos,
        stop_tokens: fields.stop_token_ids,
        logprobs: v.integer("logprobs", fields.logprobs, 0, LOGPROBS_MAX, &range),
        after_sampling: fields.after_sampling,
        ..Decoding::default()
    };
    (fields.logit_bias, decoding, fields.format)
}

/// Whether a value may be a logit bias: it is in the range, and not NaN.
fn is_bias(bias: f32) -> bool {
    bias.abs() <= BIAS_MAX || bias == FORBIDDEN
}

fn check_biased_texts(texts: &[(String, f32)], v: &mut Violations) {
    let fits = |text: &str| (1..=BIASED_TEXT_MAX_BYTES).contains(&text.len());
    if let Some((text, _)) = texts.iter().find(|(text, _)| !fits(text)) {
        let bytes = text.len();
        let message = format!("a text of {bytes} bytes; 1 to {BIASED_TEXT_MAX_BYTES} are allowed");
        v.add("sampling.logit_bias", message);
    }
    if let Some((text, bias)) = texts.iter().find(|(_, bias)| !is_bias(*bias)) {
        let message = format!("{bias} for {text:?} is out of range: from -100 to 100");
        v.add("sampling.logit_bias", message);
    }
}

/// Adds the biases of texts to those of tokens: each token of a text gets the text's bias, and a
/// token of several texts gets their sum.
///
/// # Errors
/// INVALID_ARGUMENT for a text that the vocabulary cannot encode, or if there are more
/// than [`LOGIT_BIAS_MAX`] tokens.
pub(crate) fn add_biased_texts(
    bias: &mut Vec<(u32, f32)>,
    texts: &[(String, f32)],
    model: &LoadedModel,
) -> Result<(), Failure> {
    let mut sums: BTreeMap<u32, f32> = bias.drain(..).collect();
    for (text, bias) in texts {
        let ids = model.tokenizer().encode(text, false, false);
        let ids = ids.map_err(|error| failure::invalid("logit_bias", &error.to_string()))?;
        for id in ids {
            *sums.entry(id).or_default() += bias;
        }
    }
    if sums.len() > LOGIT_BIAS_MAX {
        let message = format!(
            "its texts and ids are {} tokens; at most {LOGIT_BIAS_MAX} may have a bias: give fewer",
            sums.len()
        );
        return Err(failure::invalid("logit_bias", &message));
    }
    bias.extend(sums);
    Ok(())
}

/// Checks the token ids in a request's options against a model's vocabulary.
///
/// # Errors
/// INVALID_ARGUMENT, with the field as the request calls it.
pub fn check_vocabulary(sampling: &Sampling, model: &LoadedModel) -> Result<(), Failure> {
    let n_vocab = model.model().info().n_vocab;
    let bias = sampling.params.logit_bias.iter().map(|(id, _)| *id);
    let stops = sampling.decoding.stop_tokens.iter().copied();
    let check = |field: &str, mut ids: Box<dyn Iterator<Item = u32> + '_>| {
        let Some(id) = ids.find(|&id| id >= n_vocab) else {
            return Ok(());
        };
        let last = n_vocab.max(1) - 1;
        Err(failure::invalid(
            &sampling.name_of(field),
            &format!("id {id} is out of range: the vocabulary has the ids 0 to {last}"),
        ))
    };
    check("sampling.logit_bias", Box::new(bias))?;
    check("sampling.stop_token_ids", Box::new(stops))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(change: impl Fn(&mut DecodingFields), max_tokens: Option<u32>) -> Option<String> {
        let mut fields = DecodingFields::default();
        change(&mut fields);
        let mut violations = Violations::default();
        let texts = std::mem::take(&mut fields.biased_texts);
        checked(fields, &texts, max_tokens, &mut violations);
        violations
            .result()
            .err()
            .map(|failure| failure.fields()[0].0.clone())
    }

    #[test]
    fn each_field_is_held_to_its_range() {
        assert_eq!(refused(|_| {}, None), None);
        let bias = |list: &[(u32, f32)]| refused(|f| f.logit_bias = list.to_vec(), None);
        assert_eq!(bias(&[(7, 100.0), (1, -100.0), (2, FORBIDDEN)]), None);
        let many: Vec<_> = (0..=LOGIT_BIAS_MAX as u32).map(|id| (id, 1.0)).collect();
        assert_eq!(bias(&many[1..]), None);
        for bad in [
            &[(0, 100.1)][..],
            &[(0, f32::NAN)],
            &[(0, f32::INFINITY)],
            &[(5, 1.0), (6, 1.0), (5, 2.0)],
            &many,
        ] {
            assert_eq!(bias(bad).as_deref(), Some("sampling.logit_bias"));
        }
        let texts = |list: &[(&str, f32)]| {
            let list = list.iter().map(|&(text, bias)| (text.to_owned(), bias));
            let list: Vec<_> = list.collect();
            refused(|f| f.biased_texts = list.clone(), None)
        };
        assert_eq!(texts(&[("a", 1.0), ("b c", FORBIDDEN), ("a", 1.0)]), None);
        let long = "x".repeat(BIASED_TEXT_MAX_BYTES + 1);
        for bad in [
            &[("", 1.0)][..],
            &[(&*long, 1.0)],
            &[("a", 101.0)],
            &[("a", f32::NAN)],
            &[("a", 1.0); LOGIT_BIAS_MAX + 1],
        ] {
            assert_eq!(texts(bad).as_deref(), Some("sampling.logit_bias"));
        }
        let least = |n, max| refused(|f| f.min_tokens = Some(n), max);
        assert_eq!(least(5, None), None);
        assert_eq!(least(5, Some(5)), None);
        for (n, max) in [(-1, None), (6, Some(5))] {
            assert_eq!(least(n, max).as_deref(), Some("sampling.min_tokens"));
        }
        let stops = |n| refused(|f| f.stop_token_ids = vec![1; n], None);
        assert_eq!(stops(STOP_TOKENS_MAX), None);
        let field = stops(STOP_TOKENS_MAX + 1);
        assert_eq!(field.as_deref(), Some("sampling.stop_token_ids"));
        let logprobs = |n| refused(|f| f.logprobs = Some(n), None);
        assert_eq!((logprobs(0), logprobs(20)), (None, None));
        for n in [-1, 21] {
            assert_eq!(logprobs(n).as_deref(), Some("logprobs"));
        }
    }
}
