//! Request fields of further samplers and their order, shared by all dialects.

use rocmforge_failure::Violations;
use rocmforge_service::samplers::{SamplerFields, names_of_letters};
use serde::Deserialize;

use super::prompt::TextOr;
use super::sampling::{small, whole_number};

/// Sampler fields under llama-server's names, which Ollama and vLLM share.
#[derive(Debug, Clone, Default, Deserialize)]
pub(super) struct WireSamplers {
    typical_p: Option<f32>,
    /// llama-server's name of `typical_p`.
    typ_p: Option<f32>,
    top_n_sigma: Option<f32>,
    xtc_probability: Option<f32>,
    xtc_threshold: Option<f32>,
    dynatemp_range: Option<f32>,
    dynatemp_exponent: Option<f32>,
    #[serde(default, deserialize_with = "whole_number")]
    min_keep: Option<i64>,
    dry_multiplier: Option<f32>,
    dry_base: Option<f32>,
    #[serde(default, deserialize_with = "whole_number")]
    dry_allowed_length: Option<i64>,
    #[serde(default, deserialize_with = "whole_number")]
    dry_penalty_last_n: Option<i64>,
    dry_sequence_breakers: Option<Vec<String>>,
    #[serde(default, deserialize_with = "whole_number")]
    mirostat: Option<i64>,
    mirostat_tau: Option<f32>,
    mirostat_eta: Option<f32>,
    /// The order of samplers: names, or a string of letters.
    samplers: Option<TextOr<String>>,
    /// A field of llama-server that is not supported; rejected if it asks for anything.
    adaptive_target: Option<f32>,
}

impl WireSamplers {
    /// The fields in the form that the checks of `rocmforge-service` take.
    pub(super) fn fields(self, violations: &mut Violations) -> SamplerFields {
        // llama-server's word for none is a negative target.
        if self.adaptive_target.is_some_and(|target| target >= 0.0) {
            violations.add(
                "sampling.adaptive_target",
                "not implemented; leave it unset",
            );
        }
        SamplerFields {
            typical_p: self.typical_p.or(self.typ_p),
            // llama-server's word for all of them.
            top_n_sigma: self.top_n_sigma.map(|n| if n == -1.0 { 0.0 } else { n }),
            xtc_probability: self.xtc_probability,
            xtc_threshold: self.xtc_threshold,
            dynatemp_range: self.dynatemp_range,
            dynatemp_exponent: self.dynatemp_exponent,
            min_keep: self.min_keep.map(small),
            dry_multiplier: self.dry_multiplier,
            dry_base: self.dry_base,
            dry_allowed_length: self.dry_allowed_length.map(small),
            dry_penalty_last_n: self.dry_penalty_last_n.map(small),
            dry_sequence_breakers: self.dry_sequence_breakers,
            mirostat: self.mirostat.map(small),
            mirostat_tau: self.mirostat_tau,
            mirostat_eta: self.mirostat_eta,
            samplers: self.samplers.map(|order| match order {
                TextOr::Text(letters) => names_of_letters(&letters),
                TextOr::List(names) => names,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(value: Value) -> SamplerFields {
        let wire: WireSamplers = serde_json::from_value(value).unwrap();
        let mut violations = Violations::default();
        let fields = wire.fields(&mut violations);
        violations.result().unwrap();
        fields
    }

    #[test]
    fn each_field_of_a_sampler_is_read_by_its_name() {
        let fields = read(json!({
            "typical_p": 0.5, "top_n_sigma": 1.5, "xtc_probability": 0.25, "xtc_threshold": 0.125,
            "dynatemp_range": 0.75, "dynatemp_exponent": 2, "min_keep": 3.0, "dry_multiplier": 0.8,
            "dry_base": 1.25, "dry_allowed_length": 4, "dry_penalty_last_n": -1,
            "dry_sequence_breakers": ["\n"], "mirostat": 2, "mirostat_tau": 4, "mirostat_eta": 0.5,
            "samplers": ["top_k", "temperature"], "adaptive_target": -1.0,
        }));
        let reals = [
            fields.typical_p,
            fields.top_n_sigma,
            fields.xtc_probability,
            fields.xtc_threshold,
            fields.dynatemp_range,
            fields.dynatemp_exponent,
            fields.dry_multiplier,
            fields.dry_base,
            fields.mirostat_tau,
            fields.mirostat_eta,
        ];
        let expected = [0.5, 1.5, 0.25, 0.125, 0.75, 2.0, 0.8, 1.25, 4.0, 0.5];
        assert_eq!(reals, expected.map(Some));
        let whole = [
            fields.min_keep,
            fields.dry_allowed_length,
            fields.dry_penalty_last_n,
            fields.mirostat,
        ];
        assert_eq!(whole, [3, 4, -1, 2].map(Some));
        assert_eq!(fields.dry_sequence_breakers, Some(vec!["\n".to_owned()]));
        let names = Some(vec!["top_k".to_owned(), "temperature".to_owned()]);
        assert_eq!(fields.samplers, names);
        assert_eq!(read(json!({"samplers": "kt"})).samplers, names);
    }

    #[test]
    fn words_of_other_servers_for_nothing_are_taken() {
        assert_eq!(read(json!({"top_n_sigma": -1})).top_n_sigma, Some(0.0));
        assert_eq!(read(json!({"typ_p": 0.5})).typical_p, Some(0.5));
        let wire: WireSamplers = serde_json::from_value(json!({"adaptive_target": 0.5})).unwrap();
        let mut violations = Violations::default();
        wire.fields(&mut violations);
        let failure = violations.result().unwrap_err();
        assert_eq!(failure.fields()[0].0, "sampling.adaptive_target");
    }
}
