//! `swap`: two models that share a budget for one and a half of them, asked in turn; what
//! the first token costs then.

use std::sync::Arc;

use anyhow::Result;
use rocmforge_engine::LoadedModel;

use crate::presets::{Mix, Preset};
use crate::report::{Report, Row};
use crate::session::Session;
use crate::{Common, PolicyArg, generate};

/// Requests that are not counted: two of each model. The first fills the budget; where uploads are
/// from registered mappings, the second registers what was read through pinned memory before.
const WARM_UP: usize = 4;

/// Options of `swap`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    #[command(flatten)]
    common: Common,
    /// Shape of both.
    #[arg(long, value_enum, default_value = "llama-1b")]
    preset: Preset,
    /// Type of both.
    #[arg(long = "type", value_enum, default_value = "q4_k_m")]
    mix: Mix,
    /// Budget in models; what a request needs beside weights is added.
    #[arg(long, default_value_t = 1.5)]
    models: f64,
    /// Requests that are counted, to one and the other in turn.
    #[arg(long, default_value_t = 12, value_parser = clap::value_parser!(u16).range(2..=1000))]
    requests: u16,
    /// Tokens of a request's prompt.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=1024))]
    prompt: u16,
    /// Tokens that a request generates.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1024))]
    tokens: u32,
    /// Which segments go first.
    #[arg(long, value_enum, default_value = "pass-aware")]
    policy: PolicyArg,
}

/// What requests in turn gave, one figure each.
#[derive(Debug, Default)]
pub(crate) struct Swapped {
    /// Seconds to the first token.
    pub(crate) ttfts: Vec<f64>,
    /// Bytes uploaded for the request.
    pub(crate) uploads: Vec<f64>,
}

/// Requests to the models in turn, of a prompt and a text of these lengths in tokens. The first
/// [`WARM_UP`] are not counted.
pub(crate) fn alternate(
    session: &mut Session,
    models: &[Arc<LoadedModel>],
    (n_prompt, tokens): (usize, u32),
    requests: usize,
) -> Result<Swapped> {
    let mut swapped = Swapped::default();
    for i in 0..WARM_UP + requests {
        let model = &models[(i + 1) % models.len()];
        let summary = session.generate(model, n_prompt, tokens)?;
        if i >= WARM_UP {
            swapped.ttfts.push(summary.ttft.as_secs_f64());
            swapped.uploads.push(summary.cache.uploaded_bytes as f64);
        }
    }
    Ok(swapped)
}

/// Runs it and prints the table.
///
/// # Errors
/// A model cannot be made or run.
pub(crate) fn run(options: &Options) -> Result<()> {
    let common = &options.common;
    let dir = common.dir()?;
    let name = format!("2 x {} {}", options.preset.name(), options.mix.name());
    let threads = Some(common.threads()?);
    let mut session = Session::start(
        common.device,
        threads,
        options.policy.policy(),
        common.prefetch,
    )?;
    let mut report = Report::new(&session.engine.snapshot().device);
    let mut models = Vec::new();
    for (seed, model) in [(1, "one"), (2, "two")] {
        let path = generate::provide(dir.path(), options.preset, options.mix, seed)?;
        models.push(session.load(model, &path)?.0);
    }
    let n_prompt = usize::from(options.prompt);
    session.generate(&models[0], n_prompt, options.tokens)?;
    let summary = session.generate(&models[0], n_prompt, options.tokens)?;
    let weights = session.resident_bytes("one") as f64;
    let resident = summary.ttft.as_secs_f64() * 1e3;
    session.set_budget((weights * options.models) as u64 + summary.cache.block_bytes)?;

    let lengths = (n_prompt, options.tokens);
    let swapped = alternate(&mut session, &models, lengths, options.requests.into())?;
    let ttfts: Vec<f64> = swapped.ttfts.iter().map(|s| s * 1e3).collect();
    let share = |bytes: &f64| bytes / weights * 100.0;
    let reloads: Vec<f64> = swapped.uploads.iter().map(share).collect();
    let budget = format!("budget {} models", options.models);
    report.rows = vec![
        Row::new(&name, "first token, resident", "ms", &[resident]),
        Row::new(
            &name,
            format!("first token, alternate, {budget}"),
            "ms",
            &ttfts,
        ),
        Row::new(
            &name,
            format!("reloaded by a request, {budget}"),
            "% of the model",
            &reloads,
        ),
    ];
    session.end()?;
    Ok(report.print(common.json)?)
}
