//! `stream`: a model under budgets that hold a share of it; what decode costs when segments
//! must come in at every token.

use std::sync::Arc;

use anyhow::Result;
use rocmforge_engine::LoadedModel;

use crate::presets::{Mix, Preset};
use crate::report::{Report, Row};
use crate::session::Session;
use crate::{Common, PolicyArg, generate};

/// Options of `stream`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    #[command(flatten)]
    common: Common,
    /// Shape.
    #[arg(long, value_enum, default_value = "llama-1b")]
    preset: Preset,
    /// Type.
    #[arg(long = "type", value_enum, default_value = "q4_k_m")]
    mix: Mix,
    /// Budgets in percent of the model's weights, separated by commas; what a request needs beside
    /// them is added, and what the largest segment needs is the least.
    #[arg(long, value_delimiter = ',', default_value = "100,75,50,25", value_parser = percent)]
    shares: Vec<f64>,
    /// Requests at each budget.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=1000))]
    runs: u16,
    /// Tokens of a request.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(2..=1024))]
    tokens: u32,
    /// Tokens of a prompt whose prefill is measured too; 0 measures none.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u16).range(0..4096))]
    prompt: u16,
    /// Add nothing to the budgets: what a request needs beside weights has to fit inside the share.
    #[arg(long)]
    inside: bool,
    /// Which segments go first.
    #[arg(long, value_enum, default_value = "pass-aware")]
    policy: PolicyArg,
}

fn percent(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|e| format!("{e}"))?;
    let fine = (1.0..=100.0).contains(&value);
    fine.then_some(value)
        .ok_or_else(|| "not between 1 and 100".to_owned())
}

/// What requests at one budget gave, one figure each.
#[derive(Debug, Default)]
pub(crate) struct Streamed {
    /// Tokens a second of decode.
    pub(crate) speeds: Vec<f64>,
    /// Bytes uploaded a token.
    pub(crate) uploads: Vec<f64>,
    /// Bytes of weights a token that the host computed with.
    pub(crate) hosted: Vec<f64>,
    /// Segments found resident, in percent.
    pub(crate) hits: Vec<f64>,
}

/// Requests of `tokens` tokens after a prompt of one. `before` of them come first and
/// are not counted: they pay for the change of the budget, and for what the host
/// brings into its own memory.
pub(crate) fn decode(
    session: &mut Session,
    model: &Arc<LoadedModel>,
    tokens: u32,
    before: usize,
    runs: usize,
) -> Result<Streamed> {
    for _ in 0..before {
        session.generate(model, 1, tokens)?;
    }
    let mut streamed = Streamed::default();
    for _ in 0..runs {
        let summary = session.generate(model, 1, tokens)?;
        streamed.speeds.push(summary.decode_tokens_per_s);
        // With a prompt of one token every token is one pass.
        let passes = f64::from(summary.generated_tokens);
        let uploaded = summary.cache.uploaded_bytes as f64;
        streamed.uploads.push(uploaded / passes);
        let hosted = summary.cache.host_bytes as f64;
        streamed.hosted.push(hosted / passes);
        let uses = summary.cache.hits + summary.cache.misses;
        streamed
            .hits
            .push(summary.cache.hits as f64 / uses as f64 * 100.0);
    }
    Ok(streamed)
}

/// Runs it and prints the table.
///
/// # Errors
/// The model cannot be made or run.
pub(crate) fn run(options: &Options) -> Result<()> {
    let common = &options.common;
    let dir = common.dir()?;
    let path = generate::provide(dir.path(), options.preset, options.mix, 1)?;
    let name = format!("{} {}", options.preset.name(), options.mix.name());
    let threads = Some(common.threads()?);
    let mut session = Session::start(
        common.device,
        threads,
        options.policy.policy(),
        common.prefetch,
    )?;
    let mut report = Report::new(&session.engine.snapshot().device);
    let (model, _) = session.load("stream", &path)?;
    // Everything resident once: how much there is, and what a request needs beside it.
    session.generate(&model, 1, options.tokens)?;
    let summary = session.generate(&model, 1, options.tokens)?;
    let weights = session.resident_bytes("stream");
    let least = session.largest_segment(&model)?;
    let mut full = None;
    for &share in &options.shares {
        // Less than the largest segment runs nothing.
        let bytes = ((weights as f64 * share / 100.0) as u64).max(least);
        let share = (bytes as f64 / weights as f64 * 1e4).round() / 1e2;
        eprintln!("{name}, {share} %");
        let beside = if options.inside {
            0
        } else {
            summary.cache.block_bytes
        };
        session.set_budget(bytes + beside)?;
        let runs = usize::from(options.runs);
        let streamed = decode(&mut session, &model, options.tokens, 1, runs)?;
        let uploads: Vec<f64> = streamed.uploads.iter().map(|bytes| bytes / 1e6).collect();
        let (mut prefills, mut speeds_after) = (Vec::new(), Vec::new());
        let n_prompt = usize::from(options.prompt);
        for _ in 0..if n_prompt > 0 { runs } else { 0 } {
            let summary = session.generate(&model, n_prompt, options.tokens)?;
            prefills.push(n_prompt as f64 / summary.ttft.as_secs_f64());
            speeds_after.push(summary.decode_tokens_per_s);
        }
        let figure = |what: &str| format!("{what}, {share} % of {:.2} GB", weights as f64 / 1e9);
        let speed = Row::new(&name, figure("decode"), "tokens/s", &streamed.speeds);
        let all = *full.get_or_insert(speed.value.median);
        report.rows.extend([
            speed.share_of(all),
            Row::new(&name, figure("uploaded"), "MB/token", &uploads),
            Row::new(&name, figure("segments hit"), "%", &streamed.hits),
        ]);
        if n_prompt > 0 {
            let prefill = figure(&format!("prefill {n_prompt}"));
            report.rows.extend([
                Row::new(&name, prefill, "tokens/s", &prefills),
                Row::new(&name, figure("decode after it"), "tokens/s", &speeds_after),
            ]);
        }
    }
    session.end()?;
    Ok(report.print(common.json)?)
}
