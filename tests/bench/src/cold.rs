//! `cold`: a model that comes from a disk, or from the page cache, for the first time while texts
//! of another are read: how long their tokens stay away, and when its own first token comes.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures_util::future::{try_join, try_join_all};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rocmforge_engine::LoadedModel;

use crate::disk::drop_pages;
use crate::presets::{Mix, Preset};
use crate::report::{Report, Row};
use crate::session::{Session, greedy, random_prompt, run};
use crate::{Common, PolicyArg, generate};

/// Tokens that each reader has before the cold model is asked.
const BEFORE: usize = 32;
/// Tokens of a reader's text at most: enough for the slowest disk that is worth measuring.
const TEXT_MAX: u32 = 100_000;

/// Options of `cold`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    #[command(flatten)]
    common: Common,
    /// Shape of both models.
    #[arg(long, value_enum, default_value = "llama-1b")]
    preset: Preset,
    /// Type of both.
    #[arg(long = "type", value_enum, default_value = "q4_k_m")]
    mix: Mix,
    /// Texts that are read meanwhile.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=64))]
    readers: u8,
    /// Times that it is measured.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=100))]
    runs: u8,
    /// Leave its file in the page cache.
    #[arg(long)]
    cached: bool,
    /// Tokens of the cold model's prompt.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=1024))]
    prompt: u16,
}

/// What one run gave, in milliseconds.
struct Measured {
    /// The median gap between a reader's tokens, and the longest, before the cold model is asked.
    gap: f64,
    longest: f64,
    /// The longest from then on to its first token.
    longest_beside: f64,
    first_token: f64,
}

/// Runs it and prints the table.
///
/// # Errors
/// A model cannot be made or run.
pub(crate) fn run_all(options: &Options) -> Result<()> {
    let common = &options.common;
    let dir = common.dir()?;
    let name = format!("2 x {} {}", options.preset.name(), options.mix.name());
    let policy = PolicyArg::PassAware.policy();
    let mut session = Session::start(
        common.device,
        Some(common.threads()?),
        policy,
        common.prefetch,
    )?;
    let mut report = Report::new(&session.engine.snapshot().device);
    let near = generate::provide(dir.path(), options.preset, options.mix, 1)?;
    let path = generate::provide(dir.path(), options.preset, options.mix, 2)?;
    let (near, _) = session.load("near", &near)?;
    let n_prompt = usize::from(options.prompt);
    let mut rng = StdRng::seed_from_u64(1);
    let (mut all, mut alone) = (Vec::new(), Vec::new());
    for counted in std::iter::once(false).chain((0..options.runs).map(|_| true)) {
        // Nobody is there.
        let (cold, _) = session.load("cold", &path)?;
        make_cold(options, &path)?;
        let summary = session.generate(&cold, n_prompt, 1)?;
        session.unload("cold")?;
        drop(cold);
        session.generate(&near, n_prompt, 4)?;
        let (cold, _) = session.load("cold", &path)?;
        make_cold(options, &path)?;
        let prompts = (0..options.readers).map(|_| random_prompt(&mut rng, n_prompt));
        let prompts: Vec<_> = prompts.collect();
        let measured = beside(&session, &near, prompts, &cold, n_prompt, &mut rng)?;
        session.unload("cold")?;
        // The first run uploads and compiles.
        if counted {
            alone.push(summary.ttft.as_secs_f64() * 1e3);
            all.push(measured);
        }
    }
    let readers = options.readers;
    let place = match options.cached {
        true => "page cache",
        false => "disk",
    };
    let row = |figure: String, of: fn(&Measured) -> f64| {
        let values: Vec<f64> = all.iter().map(of).collect();
        Row::new(&name, figure, "ms", &values)
    };
    report.rows = vec![
        row(format!("{readers} readers, median gap"), |m| m.gap),
        row(format!("{readers} readers, longest gap"), |m| m.longest),
        row(
            format!("{readers} readers while the other comes from the {place}, longest gap"),
            |m| m.longest_beside,
        ),
        row(
            format!("first token from the {place} beside {readers} readers"),
            |m| m.first_token,
        ),
        Row::new(
            &name,
            format!("first token from the {place}, alone"),
            "ms",
            &alone,
        ),
    ];
    session.end()?;
    Ok(report.print(common.json)?)
}

fn make_cold(options: &Options, path: &Path) -> Result<()> {
    match options.cached {
        true => Ok(()),
        false => drop_pages(path),
    }
}

fn beside(
    session: &Session,
    near: &Arc<LoadedModel>,
    prompts: Vec<Vec<u32>>,
    cold: &Arc<LoadedModel>,
    n_prompt: usize,
    rng: &mut StdRng,
) -> Result<Measured> {
    let n = prompts.len();
    let told = &AtomicUsize::new(0);
    let late = greedy(cold, random_prompt(rng, n_prompt), 1);
    let stop = &AtomicUsize::new(0);
    let (texts, (asked, first)) = session.block_on(async |engine| {
        let readers = prompts.into_iter().map(|prompt| async move {
            let mut request = greedy(near, prompt, TEXT_MAX);
            request.decoding.ignore_eos = true;
            request.n_ctx = None;
            let mut events = engine.generate(request)?;
            let mut tokens = Vec::new();
            while stop.load(Ordering::Relaxed) == 0 {
                let event = events.next().await.context("the engine ended")?;
                let rocmforge_engine::api::GenerateEvent::Piece { ids, .. } = event else {
                    break;
                };
                let now = Instant::now();
                tokens.extend(ids.iter().map(|_| now));
                told.fetch_add(ids.len(), Ordering::Relaxed);
            }
            Ok::<Vec<Instant>, anyhow::Error>(tokens)
        });
        let late = async {
            while told.load(Ordering::Relaxed) < n * BEFORE {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let (asked, mut first) = (Instant::now(), None);
            run(engine, late, |_| first = first.or(Some(Instant::now()))).await?;
            stop.store(1, Ordering::Relaxed);
            Ok((asked, first.context("a prompt without a token")?))
        };
        try_join(try_join_all(readers), late).await
    })?;
    let begun = texts.iter().filter_map(|t| t.first()).max().copied();
    let begun = begun.context("a reader without a token")?;
    let gaps = |from: Instant, to: Instant| {
        let pairs = texts.iter().flat_map(|t| t.windows(2));
        // One that began before the end and reaches beyond it counts.
        let within = pairs.filter(|w| w[1] > from && w[0] <= to);
        let mut gaps: Vec<f64> = within.map(|w| (w[1] - w[0]).as_secs_f64() * 1e3).collect();
        gaps.sort_by(f64::total_cmp);
        gaps
    };
    let before = gaps(begun, asked);
    let meanwhile = gaps(asked, first);
    let last = |gaps: &[f64]| gaps.last().copied().unwrap_or(f64::NAN);
    Ok(Measured {
        gap: before.get(before.len() / 2).copied().unwrap_or(f64::NAN),
        longest: last(&before),
        longest_beside: last(&meanwhile),
        first_token: (first - asked).as_secs_f64() * 1e3,
    })
}
