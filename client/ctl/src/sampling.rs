//! The sampling flags that generate, chat and run share.
//!
//! Ranges are the daemon's to judge, so that they stand in one place; its answer
//! names the field, and [`flag_of`] names the flag.

use clap::Args;
use rocmforge_client::proto::v1::{Priority, SamplingParams};

#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Sampling", allow_negative_numbers = true)]
pub(crate) struct SamplingArgs {
    /// Most tokens to generate [default: until the text or the context ends]
    #[arg(long, value_name = "N")]
    max_tokens: Option<i32>,
    /// Divides the logits; 0 always takes the most probable token [default: 0.8]
    #[arg(long, value_name = "T")]
    temperature: Option<f32>,
    /// Keep the K most probable tokens; 0 keeps all [default: 40]
    #[arg(long, value_name = "K")]
    top_k: Option<i32>,
    /// Keep the most probable tokens that add up to P; 1 keeps all [default: 0.95]
    #[arg(long, value_name = "P")]
    top_p: Option<f32>,
    /// Drop tokens less probable than P times the most probable; 0 keeps all
    /// [default: 0.05]
    #[arg(long, value_name = "P")]
    min_p: Option<f32>,
    /// Weaken tokens seen lately by this factor; 1 does nothing [default: 1]
    #[arg(long, value_name = "X")]
    repeat_penalty: Option<f32>,
    /// Take this off the logits of tokens seen lately [default: 0]
    #[arg(long, value_name = "X")]
    presence_penalty: Option<f32>,
    /// Take this off the logits of tokens seen lately, once for each time
    /// [default: 0]
    #[arg(long, value_name = "X")]
    frequency_penalty: Option<f32>,
    /// How many of the last tokens count as seen lately [default: 64]
    #[arg(long, value_name = "N")]
    penalty_last_n: Option<i32>,
    /// Seed of the draw: the same seed gives the same text [default: a random one,
    /// which --json reports]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// End the text before this string; may be repeated
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    stop: Vec<String>,
    /// Context length in tokens, prompt and answer together [default: what the
    /// model was trained with, within the daemon's limit]
    #[arg(long, value_name = "N")]
    pub(crate) n_ctx: Option<i32>,
    /// Let requests that somebody waits for go first
    #[arg(long, help_heading = None)]
    batch: bool,
    /// Compute the whole prompt, whatever earlier ones have computed, and keep nothing of it
    #[arg(long, help_heading = None)]
    no_reuse: bool,
    /// Print counts and speed on standard error, also where that is no terminal
    #[arg(long, help_heading = None)]
    pub(crate) stats: bool,
}

impl SamplingArgs {
    /// How urgent the request is.
    pub(crate) fn priority(&self) -> Priority {
        match self.batch {
            true => Priority::Batch,
            false => Priority::Interactive,
        }
    }

    /// Whether the prompt may begin with what earlier ones have computed; unset is the daemon's own.
    pub(crate) fn reuse_prompt(&self) -> Option<bool> {
        self.no_reuse.then_some(false)
    }

    /// The flags as the request has them; what is not given stays unset.
    pub(crate) fn params(&self) -> SamplingParams {
        SamplingParams {
            max_tokens: self.max_tokens,
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repeat_penalty: self.repeat_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            penalty_last_n: self.penalty_last_n,
            seed: self.seed,
            stop: self.stop.clone(),
        }
    }
}

/// The flag that sets a field of a request, as the daemon names the field:
/// "sampling.max_tokens" is "--max-tokens", `sampling.stop[2]` is "--stop".
/// `None` for fields that no flag sets.
pub(crate) fn flag_of(field: &str) -> Option<String> {
    let name = field.rsplit('.').next()?.split('[').next()?;
    let known = matches!(
        name,
        "max_tokens"
            | "temperature"
            | "top_k"
            | "top_p"
            | "min_p"
            | "repeat_penalty"
            | "presence_penalty"
            | "frequency_penalty"
            | "penalty_last_n"
            | "seed"
            | "stop"
            | "n_ctx"
            | "top_n"
            | "name"
            | "segments"
    );
    known.then(|| format!("--{}", name.replace('_', "-")))
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    use super::*;

    #[derive(Debug, Parser)]
    struct Only {
        #[command(flatten)]
        sampling: SamplingArgs,
    }

    fn parse(line: &str) -> SamplingParams {
        let words = std::iter::once("x").chain(line.split_whitespace());
        Only::try_parse_from(words).unwrap().sampling.params()
    }

    #[test]
    fn what_is_not_given_stays_unset() {
        assert_eq!(parse(""), SamplingParams::default());
    }

    #[test]
    fn every_flag_reaches_its_field() {
        let params = parse(
            "--max-tokens 1 --temperature 0.5 --top-k 2 --top-p 0.25 --min-p 0.125 \
             --repeat-penalty 1.5 --presence-penalty -0.5 --frequency-penalty 0.75 \
             --penalty-last-n 3 --seed 18446744073709551615 --stop a --stop -b",
        );
        let expected = SamplingParams {
            max_tokens: Some(1),
            temperature: Some(0.5),
            top_k: Some(2),
            top_p: Some(0.25),
            min_p: Some(0.125),
            repeat_penalty: Some(1.5),
            presence_penalty: Some(-0.5),
            frequency_penalty: Some(0.75),
            penalty_last_n: Some(3),
            seed: Some(u64::MAX),
            stop: vec!["a".into(), "-b".into()],
        };
        assert_eq!(params, expected);
    }

    #[test]
    fn negative_values_are_the_daemons_to_judge() {
        let params = parse("--max-tokens -1 --temperature -0.5 --top-k -2");
        assert_eq!(params.max_tokens, Some(-1));
        assert_eq!(params.temperature, Some(-0.5));
        assert_eq!(params.top_k, Some(-2));
    }

    #[test]
    fn fields_lead_back_to_flags_that_exist() {
        let command = Only::command();
        // What is the command's own, or cannot be wrong in the request.
        let own = ["help", "stats", "batch", "no_reuse"];
        let of_requests = |a: &&clap::Arg| !own.contains(&a.get_id().as_str());
        for argument in command.get_arguments().filter(of_requests) {
            let id = argument.get_id().as_str();
            let flag = format!("--{}", argument.get_long().unwrap());
            assert_eq!(flag_of(&format!("sampling.{id}")), Some(flag));
        }
        assert_eq!(flag_of("sampling.stop[3]").as_deref(), Some("--stop"));
        assert_eq!(flag_of("messages[0].role"), None);
    }
}
