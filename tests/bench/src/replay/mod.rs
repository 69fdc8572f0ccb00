//! `replay`: the requests of agents, sent again as they were, and how much of them was computed.
//!
//! ```text
//! trace ──> each request when those before it have ended ──> prompt tokens, cached tokens, TTFT
//!       └─> the tokens of each prompt, from the server ────> distinct tokens
//! ```
//!
//! The figure is computed over distinct tokens: 1 if no token of any prompt was computed twice.
//! Pages that are not full are not shared, so some are computed again in any case; the floor says
//! what that comes to. A trace is a file (`trace.rs`), or one of the shapes that programs' traces
//! have (`shapes.rs`), in words of our own.

mod send;
mod shapes;
mod summary;
mod tokens;
mod trace;

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use rocmforge_ops::KV_PAGE_TOKENS;

use self::shapes::{Shape, Sizes};
use self::tokens::Tokens;
use self::trace::Entry;
use crate::zoo::http::Server;

/// What the server computed a second time for requests that it had preempted, which their usage
/// does not say.
const RECOMPUTED: &str = "rocmforge_recomputed_tokens_total";

/// Options of `replay`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// The server, as http://HOST:PORT. It has to be this daemon, which says the tokens of a
    /// prompt.
    #[arg(long, default_value = "http://127.0.0.1:8080")]
    url: String,
    /// Bearer token, if the server wants one.
    #[arg(long)]
    token: Option<String>,
    /// The model that all requests go to [default: the first that /v1/models lists].
    #[arg(long)]
    model: Option<String>,
    /// A trace: a JSON object a line with id, after (ids of requests that end before), delay_ms,
    /// group, route and body.
    #[arg(long, required_unless_present = "shape", conflicts_with = "shape")]
    trace: Option<PathBuf>,
    /// A trace in the shape of a program's, made of random words.
    #[arg(long, value_enum)]
    shape: Option<Shape>,
    /// Size of its texts: 1 as programs have them.
    #[arg(long, default_value_t = 1.0)]
    scale: f64,
    /// Turns of its conversation [default: as programs have them].
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1000))]
    turns: Option<u16>,
    /// Requests of it that begin together: subagents, or all of a fleet [default: as programs have
    /// them].
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1000))]
    together: Option<u16>,
    /// The same seed makes the same trace.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Write the trace to this file, and send nothing.
    #[arg(long)]
    write: Option<PathBuf>,
    /// Longest output of a request, in tokens; 0 leaves it as the trace has it.
    #[arg(long, default_value_t = 16)]
    output: u32,
    /// Leave out the delays of the trace.
    #[arg(long)]
    no_delays: bool,
    /// Exit with 1 if computed over distinct tokens is above this.
    #[arg(long)]
    ratio_max: Option<f64>,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    ensure!(
        options.scale.is_finite() && options.scale > 0.0 && options.scale <= 100.0,
        "--scale is above 0, and 100 at most"
    );
    let entries = entries(options)?;
    if let Some(path) = &options.write {
        trace::write(path, &entries)?;
        eprintln!("{}: {} requests", path.display(), entries.len());
        return Ok(());
    }
    let server = Server::new(&options.url, options.token.as_deref())?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    runtime.block_on(replay(options, &entries, &server))
}

fn entries(options: &Options) -> Result<Vec<Entry>> {
    if let Some(path) = &options.trace {
        return trace::read(path);
    }
    let shape = options.shape.context("give --trace or --shape")?;
    let sizes = Sizes {
        scale: options.scale,
        turns: options.turns,
        together: options.together,
    };
    Ok(shapes::entries(shape, sizes, options.seed))
}

async fn replay(options: &Options, entries: &[Entry], server: &Server) -> Result<()> {
    let model = match &options.model {
        Some(model) => model.clone(),
        None => {
            let models = server.models().await?;
            let first = models.into_iter().next();
            first.context("the server lists no model: give --model")?
        }
    };
    let output_max = (options.output > 0).then_some(options.output);
    let way = send::Way {
        model: &model,
        output_max,
        delays: !options.no_delays,
    };
    // Counting needs the model, and loads it before the first request is timed.
    let mut prompts = Vec::new();
    for entry in entries {
        prompts.push(send::prompt(server, entry, &way).await?);
    }
    let tokens = Tokens::of(&prompts, KV_PAGE_TOKENS);
    drop(prompts);
    let before = server.metric(RECOMPUTED).await;
    let done = send::all(server, entries, &way).await;
    let recomputed = server.metric(RECOMPUTED).await.zip(before);
    let recomputed = recomputed.map_or(0, |(after, before)| after.saturating_sub(before));
    let summary = summary::Summary::of(entries, &done, &tokens, recomputed)?;
    summary.print(options.json)?;
    if let Some(most) = options.ratio_max {
        let ratio = summary.ratio();
        ensure!(
            ratio <= most,
            "{ratio:.4} computed tokens for each distinct one, {most} at most"
        );
    }
    Ok(())
}
