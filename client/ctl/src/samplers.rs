//! The flags of samplers beside the first ones.
//!
//! Ranges are the daemon's to judge, as for the other flags of sampling.

use clap::Args;
use rocmforge_client::proto::v1::{DrySequenceBreakers, SamplerOrder, SamplingParams};

#[derive(Debug, Clone, Default, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct SamplerArgs {
    /// Locally typical sampling: keep tokens of about the entropy that add up to P; 1 keeps all
    /// [default: 1]
    #[arg(long, value_name = "P")]
    typical_p: Option<f32>,
    /// Keep tokens within N standard deviations of the largest logit; 0 keeps all [default: 0]
    #[arg(long, value_name = "N")]
    top_n_sigma: Option<f32>,
    /// XTC: how often all likely tokens but the least likely of them are dropped [default: 0]
    #[arg(long, value_name = "P")]
    xtc_probability: Option<f32>,
    /// XTC: probability from which a token is likely [default: 0.1]
    #[arg(long, value_name = "P")]
    xtc_threshold: Option<f32>,
    /// Dynamic temperature: how far it goes below and above --temperature [default: 0]
    #[arg(long, value_name = "T")]
    dynatemp_range: Option<f32>,
    /// Dynamic temperature: power of the entropy that it goes with [default: 1]
    #[arg(long, value_name = "X")]
    dynatemp_exponent: Option<f32>,
    /// Minimum number of tokens that samplers keep, except --top-k [default: 0]
    #[arg(long, value_name = "N")]
    min_keep: Option<i32>,
    /// DRY: penalty for a token that continues a repetition; 0 is off [default: 0]
    #[arg(long, value_name = "X")]
    dry_multiplier: Option<f32>,
    /// DRY: factor of the penalty for each further token of the repetition [default: 1.75]
    #[arg(long, value_name = "X")]
    dry_base: Option<f32>,
    /// DRY: longest repetition without a penalty [default: 2]
    #[arg(long, value_name = "N")]
    dry_allowed_length: Option<i32>,
    /// DRY: number of recent tokens to search; -1 is all [default: -1]
    #[arg(long, value_name = "N")]
    dry_penalty_last_n: Option<i32>,
    /// DRY: text that ends a repetition; may be repeated; an empty one is none
    /// [default: a line break, ":", a quotation mark and "*"]
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    dry_sequence_breakers: Vec<String>,
    /// Mirostat version 1 or 2 instead of all samplers but the temperature; 0 is off
    /// [default: 0]
    #[arg(long, value_name = "N")]
    mirostat: Option<i32>,
    /// Mirostat: target surprise in bits [default: 5]
    #[arg(long, value_name = "X")]
    mirostat_tau: Option<f32>,
    /// Mirostat: learning rate [default: 0.1]
    #[arg(long, value_name = "X")]
    mirostat_eta: Option<f32>,
    /// Samplers in their order, separated by commas; those that are missing are off [default:
    /// penalties,dry,top_n_sigma,top_k,typ_p,top_p,min_p,xtc,temperature]
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    samplers: Vec<String>,
}

impl SamplerArgs {
    /// The flags in a request; what is not given stays unset.
    pub(crate) fn set(&self, params: SamplingParams) -> SamplingParams {
        let given = |list: &[String]| (!list.is_empty()).then(|| list.to_vec());
        let breakers = given(&self.dry_sequence_breakers).map(|mut texts| {
            texts.retain(|text| !text.is_empty());
            DrySequenceBreakers { texts }
        });
        SamplingParams {
            typical_p: self.typical_p,
            top_n_sigma: self.top_n_sigma,
            xtc_probability: self.xtc_probability,
            xtc_threshold: self.xtc_threshold,
            dynatemp_range: self.dynatemp_range,
            dynatemp_exponent: self.dynatemp_exponent,
            min_keep: self.min_keep,
            dry_multiplier: self.dry_multiplier,
            dry_base: self.dry_base,
            dry_allowed_length: self.dry_allowed_length,
            dry_penalty_last_n: self.dry_penalty_last_n,
            dry_sequence_breakers: breakers,
            mirostat: self.mirostat,
            mirostat_tau: self.mirostat_tau,
            mirostat_eta: self.mirostat_eta,
            samplers: given(&self.samplers).map(|names| SamplerOrder { names }),
            ..params
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Only {
        #[command(flatten)]
        samplers: SamplerArgs,
    }

    fn parse(words: &[&str]) -> SamplingParams {
        let words = ["x"].iter().chain(words);
        let only = Only::try_parse_from(words).unwrap();
        only.samplers.set(SamplingParams::default())
    }

    #[test]
    fn every_flag_of_a_sampler_reaches_its_field() {
        assert_eq!(parse(&[]), SamplingParams::default());
        let params = parse(&[
            "--typical-p=0.5",
            "--top-n-sigma=1.5",
            "--xtc-probability=0.25",
            "--xtc-threshold=0.125",
            "--dynatemp-range=0.75",
            "--dynatemp-exponent=2",
            "--min-keep=3",
            "--dry-multiplier=0.8",
            "--dry-base=1.25",
            "--dry-allowed-length=4",
            "--dry-penalty-last-n",
            "-1",
            "--dry-sequence-breakers=-",
            "--dry-sequence-breakers=:",
            "--mirostat=2",
            "--mirostat-tau=4",
            "--mirostat-eta=0.5",
            "--samplers=top_k,temperature",
        ]);
        let expected = SamplingParams {
            typical_p: Some(0.5),
            top_n_sigma: Some(1.5),
            xtc_probability: Some(0.25),
            xtc_threshold: Some(0.125),
            dynatemp_range: Some(0.75),
            dynatemp_exponent: Some(2.0),
            min_keep: Some(3),
            dry_multiplier: Some(0.8),
            dry_base: Some(1.25),
            dry_allowed_length: Some(4),
            dry_penalty_last_n: Some(-1),
            dry_sequence_breakers: Some(DrySequenceBreakers {
                texts: vec!["-".into(), ":".into()],
            }),
            mirostat: Some(2),
            mirostat_tau: Some(4.0),
            mirostat_eta: Some(0.5),
            samplers: Some(SamplerOrder {
                names: vec!["top_k".into(), "temperature".into()],
            }),
            ..SamplingParams::default()
        };
        assert_eq!(params, expected);
        let none = parse(&["--dry-sequence-breakers="]).dry_sequence_breakers;
        assert_eq!(none.map(|breakers| breakers.texts), Some(vec![]));
    }
}
