//! The sampling flags that generate, chat and run share.
//!
//! Ranges are the daemon's to judge, so that they stand in one place; its answer
//! names the field, and [`flag_of`] names the flag.

use std::io::Read as _;

use clap::{Args, Command};
use rocmforge_client::proto::v1::format::Kind;
use rocmforge_client::proto::v1::{Format, JsonObject, Priority, SamplingParams};

use crate::samplers::SamplerArgs;

#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Sampling", allow_negative_numbers = true)]
pub(crate) struct SamplingArgs {
    /// Maximum number of output tokens [default: until the model ends or the context is full]
    #[arg(long, value_name = "N")]
    max_tokens: Option<i32>,
    /// Temperature: divides the logits; 0 is greedy sampling [default: 0.8]
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
    /// Repetition penalty: divides the logits of recent tokens; 1 is off [default: 1]
    #[arg(long, value_name = "X")]
    repeat_penalty: Option<f32>,
    /// Presence penalty: subtracted from the logits of recent tokens [default: 0]
    #[arg(long, value_name = "X")]
    presence_penalty: Option<f32>,
    /// Frequency penalty: subtracted from the logits of recent tokens for each occurrence
    /// [default: 0]
    #[arg(long, value_name = "X")]
    frequency_penalty: Option<f32>,
    /// Number of recent tokens that the penalties look at [default: 64]
    #[arg(long, value_name = "N")]
    penalty_last_n: Option<i32>,
    #[command(flatten)]
    samplers: SamplerArgs,
    /// Sampling seed: the same seed gives the same output [default: a random one,
    /// which --json reports]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Stop string: ends the output before it; may be repeated
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    stop: Vec<String>,
    /// Add BIAS (-100 to 100) to the logit of a token; may be repeated
    #[arg(long, value_name = "ID=BIAS", value_parser = bias)]
    logit_bias: Vec<(u32, f32)>,
    /// Minimum number of output tokens before the model may end [default: 0]
    #[arg(long, value_name = "N")]
    min_tokens: Option<i32>,
    /// Ignore end-of-sequence tokens
    #[arg(long)]
    ignore_eos: bool,
    /// Further stop token; may be repeated
    #[arg(long, value_name = "ID")]
    stop_token_ids: Vec<u32>,
    /// With --json: the log-probability of each token, and of the N most probable
    /// ones in its place, 0 to 20
    #[arg(long, value_name = "N")]
    pub(crate) logprobs: Option<i32>,
    /// Constrain the output to a JSON object
    #[arg(long, group = "format")]
    json_object: bool,
    /// Constrain the output to a JSON schema; @FILE reads it from a file
    #[arg(long, group = "format", value_name = "SCHEMA", value_parser = text_or_file)]
    json_schema: Option<String>,
    /// Constrain the output to a regular expression
    #[arg(long, group = "format", value_name = "REGEX")]
    regex: Option<String>,
    /// Constrain the output to a Lark grammar; @FILE reads it from a file
    #[arg(long, group = "format", value_name = "GRAMMAR", value_parser = text_or_file)]
    lark: Option<String>,
    /// Constrain the output to a GBNF grammar; @FILE reads it from a file
    #[arg(long, group = "format", value_name = "GRAMMAR", value_parser = text_or_file)]
    gbnf: Option<String>,
    /// Number of choices to generate, 1 to 8 [default: 1]
    #[arg(long, value_name = "N")]
    pub(crate) choices: Option<i32>,
    /// Context length in tokens, prompt and answer together [default: what the
    /// model was trained with, within the daemon's limit]
    #[arg(long, value_name = "N")]
    pub(crate) n_ctx: Option<i32>,
    /// Longest gap between tokens that is promised, in milliseconds; 0 for no
    /// promise [default: the daemon's max_gap_ms_interactive or max_gap_ms_batch]
    #[arg(long, value_name = "MS")]
    pub(crate) max_gap_ms: Option<i32>,
    /// Low priority: interactive requests go first
    #[arg(long, help_heading = None)]
    batch: bool,
    /// Do not use the prefix cache for this prompt
    #[arg(long, help_heading = None)]
    no_reuse: bool,
    /// Print token counts and speed on standard error, even if it is no terminal
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

    /// Whether the prompt may begin with what earlier ones have computed; unset is the daemon's
    /// own.
    pub(crate) fn reuse_prompt(&self) -> Option<bool> {
        self.no_reuse.then_some(false)
    }

    /// The grammar or format that constrains the output.
    fn format(&self) -> Option<Format> {
        let schema = || self.json_schema.clone().map(Kind::JsonSchema);
        let regex = || self.regex.clone().map(Kind::Regex);
        let lark = || self.lark.clone().map(Kind::Lark);
        let object = self.json_object.then_some(Kind::JsonObject(JsonObject {}));
        let gbnf = || self.gbnf.clone().map(Kind::Gbnf);
        let kind = object
            .or_else(schema)
            .or_else(regex)
            .or_else(lark)
            .or_else(gbnf)?;
        Some(Format { kind: Some(kind) })
    }

    /// The flags as the request has them; what is not given stays unset.
    pub(crate) fn params(&self) -> SamplingParams {
        let params = SamplingParams {
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
            logit_bias: self.logit_bias.iter().copied().collect(),
            min_tokens: self.min_tokens,
            ignore_eos: self.ignore_eos,
            stop_token_ids: self.stop_token_ids.clone(),
            format: self.format(),
            ..SamplingParams::default()
        };
        self.samplers.set(params)
    }
}

/// Largest file that a flag names: more than a daemon takes.
const FILE_MAX_BYTES: u64 = 1 << 20;

/// The text itself, or that of the file behind an `@`.
pub(crate) fn text_or_file(text: &str) -> Result<String, String> {
    let Some(path) = text.strip_prefix('@') else {
        return Ok(text.to_owned());
    };
    let read = || {
        let mut text = String::new();
        let file = std::fs::File::open(path)?;
        file.take(FILE_MAX_BYTES).read_to_string(&mut text)?;
        Ok(text)
    };
    read().map_err(|error: std::io::Error| format!("{path}: {error}"))
}

/// A token id and its bias.
fn bias(text: &str) -> Result<(u32, f32), String> {
    let parsed = text
        .split_once('=')
        .and_then(|(id, bias)| Some((id.trim().parse().ok()?, bias.trim().parse().ok()?)));
    parsed.ok_or_else(|| "give a token id and a number, as in 1234=-2.5".to_owned())
}

/// The flag that sets a field of a request, as the daemon names the field:
/// "sampling.max_tokens" is "--max-tokens", `sampling.stop[2]` is "--stop".
/// `None` for fields that no flag sets.
pub(crate) fn flag_of(field: &str) -> Option<String> {
    // A model's name is an argument of most commands, and a flag of `load` alone.
    let name = match field.rsplit('.').next()?.split('[').next()? {
        "n" => "choices",
        name => name,
    };
    let of_commands = matches!(
        name,
        "choices"
            | "logprobs"
            | "dimensions"
            | "pooling"
            | "input_type"
            | "instruction"
            | "tools"
            | "template_args"
            | "n_ctx"
            | "top_n"
            | "segments"
    );
    let of_sampling = || {
        let flags = SamplingArgs::augment_args(Command::new("flags"));
        flags.get_arguments().any(|flag| flag.get_id() == name)
    };
    let is_known = of_commands || of_sampling();
    is_known.then(|| format!("--{}", name.replace('_', "-")))
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
             --penalty-last-n 3 --seed 18446744073709551615 --stop a --stop -b \
             --logit-bias 7=-2.5 --logit-bias 8=1 --min-tokens 4 --ignore-eos --stop-token-ids 9",
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
            logit_bias: [(7, -2.5), (8, 1.0)].into(),
            min_tokens: Some(4),
            ignore_eos: true,
            stop_token_ids: vec![9],
            ..SamplingParams::default()
        };
        assert_eq!(params, expected);
    }

    #[test]
    fn one_format_reaches_the_request_from_a_flag_or_a_file() {
        let kind = |line: &str| parse(line).format.and_then(|format| format.kind);
        assert_eq!(kind("--json-object"), Some(Kind::JsonObject(JsonObject {})));
        assert_eq!(kind("--regex a+"), Some(Kind::Regex("a+".into())));
        assert_eq!(kind("--lark x"), Some(Kind::Lark("x".into())));
        assert_eq!(kind("--gbnf x"), Some(Kind::Gbnf("x".into())));
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "{}").unwrap();
        let line = format!("--json-schema @{}", file.path().display());
        assert_eq!(kind(&line), Some(Kind::JsonSchema("{}".into())));
        for bad in ["--json-object --regex a", "--json-schema @/no/such/file"] {
            let words = std::iter::once("x").chain(bad.split_whitespace());
            assert!(Only::try_parse_from(words).is_err(), "{bad}");
        }
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
        assert_eq!(flag_of("n").as_deref(), Some("--choices"));
        assert_eq!(flag_of("messages[0].role"), None);
    }
}
