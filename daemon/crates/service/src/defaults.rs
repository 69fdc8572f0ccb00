//! Default parameters of a declared model, for requests that leave them unset, over HTTP and gRPC.
//!
//! Without any, the defaults are those of [`SamplingParams`]. A default is treated like a value in
//! the request, and is checked against the same ranges when the configuration is read.

use std::path::PathBuf;
use std::sync::Arc;

use rocmforge_engine::api::{Class, Pooling, SamplingParams};
use rocmforge_failure::Violations;

use crate::Service;
use crate::adapters::AdapterChoice;
use crate::check::{self, Sampling, SamplingFields};
use crate::embedding::input_type::Prompts;

/// Default parameters of a declared model; for `None` the daemon's default applies.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Defaults {
    /// Default of [`SamplingFields::temperature`].
    pub temperature: Option<f32>,
    /// Default of [`SamplingFields::top_k`].
    pub top_k: Option<i32>,
    /// Default of [`SamplingFields::top_p`].
    pub top_p: Option<f32>,
    /// Default of [`SamplingFields::min_p`].
    pub min_p: Option<f32>,
    /// Default of [`SamplingFields::repeat_penalty`].
    pub repeat_penalty: Option<f32>,
    /// Default of [`SamplingFields::presence_penalty`].
    pub presence_penalty: Option<f32>,
    /// Default of [`SamplingFields::frequency_penalty`].
    pub frequency_penalty: Option<f32>,
    /// Default of [`SamplingFields::penalty_last_n`].
    pub penalty_last_n: Option<i32>,
    /// Default of [`SamplingFields::max_tokens`].
    pub max_tokens: Option<i32>,
    /// Default priority of requests for the model.
    pub class: Option<Class>,
    /// Chat template that replaces the file's.
    pub template: Option<Template>,
    /// Whether the model reasons in requests that leave it unset.
    pub thinking: Option<bool>,
    /// Pooling of embeddings, in place of the file's.
    pub pooling: Option<Pooling>,
    /// Prompts that are put before texts to embed, by the purpose of the embedding.
    pub prompts: Prompts,
}

/// A chat template that was read from a separate file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Template {
    /// Path of the template's file.
    pub path: PathBuf,
    /// Source text of the template.
    pub source: Arc<str>,
}

impl Defaults {
    /// Fills the fields that a request leaves unset with these defaults.
    fn fill(&self, mut fields: SamplingFields) -> SamplingFields {
        fields.temperature = fields.temperature.or(self.temperature);
        fields.top_k = fields.top_k.or(self.top_k);
        fields.top_p = fields.top_p.or(self.top_p);
        fields.min_p = fields.min_p.or(self.min_p);
        fields.repeat_penalty = fields.repeat_penalty.or(self.repeat_penalty);
        fields.presence_penalty = fields.presence_penalty.or(self.presence_penalty);
        fields.frequency_penalty = fields.frequency_penalty.or(self.frequency_penalty);
        fields.penalty_last_n = fields.penalty_last_n.or(self.penalty_last_n);
        // What a request asks for at the least is no error for the sake of a default.
        let max_tokens = self
            .max_tokens
            .map(|n| n.max(fields.decoding.min_tokens.unwrap_or(0)));
        fields.max_tokens = fields.max_tokens.or(max_tokens);
        fields
    }

    /// Checks the defaults like the fields of a request.
    ///
    /// # Errors
    /// The field and its range, as messages.
    pub fn check(&self) -> Result<(), (String, String)> {
        let mut violations = Violations::named(|field| field.replace("sampling.", ""));
        check::sampling(self.fill(SamplingFields::default()), &mut violations);
        match violations.result() {
            Ok(()) => Ok(()),
            Err(failure) => Err(failure.fields().first().cloned().unwrap_or_default()),
        }
    }

    /// The sampling parameters and `max_tokens` of a request that sets nothing.
    pub fn params(&self) -> (SamplingParams, Option<u32>) {
        let mut violations = Violations::default();
        let sampling = check::sampling(self.fill(SamplingFields::default()), &mut violations);
        (sampling.params, sampling.max_tokens)
    }
}

impl Service {
    /// Default parameters of the declared model with this name or alias; empty if none is declared.
    pub fn defaults(&self, model: &str) -> Defaults {
        let book = self.declared();
        let declared = book.asked(self.without_adapters(model));
        declared
            .map(|model| model.defaults.clone())
            .unwrap_or_default()
    }

    /// Checks the sampling of a request for the model of this name, with its defaults.
    pub fn sampling(
        &self,
        model: &str,
        fields: SamplingFields,
        violations: &mut Violations,
    ) -> Sampling {
        let listed = fields.lora.clone();
        let fields = self.defaults(model).fill(fields);
        let mut sampling = check::sampling(fields, violations);
        sampling.adapters = AdapterChoice::new(model, listed);
        sampling
    }

    /// Priority of a request for the model of this name.
    pub fn class(&self, model: &str, asked: Option<Class>) -> Class {
        let default = || self.defaults(model).class;
        asked.or_else(default).unwrap_or(Class::Interactive)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_request_sets_wins_and_what_it_leaves_unset_is_filled() {
        let defaults = Defaults {
            temperature: Some(0.2),
            top_k: Some(7),
            max_tokens: Some(5),
            ..Defaults::default()
        };
        let mut asked = SamplingFields {
            temperature: Some(0.9),
            ..SamplingFields::default()
        };
        asked.decoding.min_tokens = Some(9);
        let filled = defaults.fill(asked);
        assert_eq!((filled.temperature, filled.top_k), (Some(0.9), Some(7)));
        assert_eq!(
            filled.max_tokens,
            Some(9),
            "as many as are wanted at the least"
        );
        let (params, max_tokens) = defaults.params();
        assert_eq!((params.top_k, max_tokens), (7, Some(5)));
        assert_eq!(params.min_p, SamplingParams::default().min_p);
    }

    #[test]
    fn defaults_are_held_to_the_ranges_of_requests() {
        assert!(Defaults::default().check().is_ok());
        let bad = Defaults {
            top_p: Some(1.5),
            ..Defaults::default()
        };
        let (field, message) = bad.check().unwrap_err();
        assert_eq!(field, "top_p");
        assert!(message.contains("at most 1"), "{message}");
    }
}
