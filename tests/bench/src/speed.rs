//! `host`: load, first use, prefill and decode of whole models with batch 1, beside the machine's
//! memory bandwidth and, if asked for, beside llama.cpp in alternation.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;
use rocmforge_engine::LoadedModel;
use rocmforge_engine::api::Policy;

use crate::Common;
use crate::generate;
use crate::llama_bench::{Gathered, LlamaBench};
use crate::memory::Bandwidth;
use crate::presets::{Mix, Preset};
use crate::report::{Ceiling, Report, Row};
use crate::session::Session;

/// Tokens of the short prompt.
const SHORT: usize = 128;

/// Tokens of a decode.
const DECODE: u32 = 32;

/// Times that a model is loaded.
const LOADS: usize = 7;

/// Times that its weights are brought in anew.
const FIRST_USES: usize = 3;

/// Parts in which the runs are done, with llama-bench's runs between them, so that a machine whose
/// speed drifts is as kind to the one as to the other.
const ROUNDS: usize = 4;

/// Options of `host`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    #[command(flatten)]
    common: Common,
    /// Shapes, separated by commas.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "llama-1b")]
    presets: Vec<Preset>,
    /// Types, separated by commas.
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "q4_0,q4_k_m,q8_0"
    )]
    types: Vec<Mix>,
    /// Runs of each figure; a third of them for the long prompt.
    #[arg(long, default_value_t = 12, value_parser = clap::value_parser!(u16).range(1..=1000))]
    runs: u16,
    /// Tokens of the long prompt.
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u16).range(1..4096))]
    long: u16,
    /// A llama-bench binary to run in alternation on the same files, with the same number of
    /// threads.
    #[arg(long, value_name = "LLAMA_BENCH")]
    compare: Option<PathBuf>,
}

/// Runs it and prints the table.
///
/// # Errors
/// A model cannot be made or run.
pub(crate) fn run(options: &Options) -> Result<()> {
    let common = &options.common;
    let threads = common.threads()?;
    let compare = options.compare.as_deref();
    let compare = compare
        .map(|binary| LlamaBench::find(binary, threads.get()))
        .transpose()?;
    let dir = common.dir()?;
    let mut files = Vec::new();
    for &preset in &options.presets {
        for &mix in &options.types {
            let path = generate::provide(dir.path(), preset, mix, 1)?;
            files.push((format!("{} {}", preset.name(), mix.name()), path));
        }
    }
    let mut bandwidth = Bandwidth::new(threads.get())?;
    let mut session = Session::start(
        common.device,
        Some(threads),
        Policy::PassAware,
        common.prefetch,
    )?;
    let mut report = Report::new(&session.engine.snapshot().device);
    for (name, path) in &files {
        eprintln!("{name}");
        let runs = options.runs.into();
        let rows = one(
            &mut session,
            name,
            path,
            (runs, options.long.into()),
            &mut bandwidth,
            compare.as_ref(),
        )?;
        report.rows.extend(rows);
    }
    report.ceilings.push(Ceiling {
        name: format!("memory read, {threads} threads"),
        value: bandwidth.bytes_per_s() / 1e9,
        unit: "GB/s",
    });
    session.end()?;
    Ok(report.print(common.json)?)
}

/// Loads a model some times over, and keeps it: milliseconds of each.
pub(crate) fn loads(
    session: &Session,
    name: &str,
    path: &Path,
    times: usize,
) -> Result<(Arc<LoadedModel>, Vec<f64>)> {
    let mut took = Vec::new();
    loop {
        let (model, load) = session.load(name, path)?;
        took.push(load.as_secs_f64() * 1e3);
        if took.len() >= times {
            return Ok((model, took));
        }
        session.unload(name)?;
    }
}

/// Seconds to the first token after a short prompt when nothing of the model is on the device.
pub(crate) fn first_uses(
    session: &mut Session,
    model: &Arc<LoadedModel>,
    times: usize,
) -> Result<Vec<f64>> {
    let mut took = Vec::new();
    for _ in 0..times {
        session.clear()?;
        let summary = session.generate(model, 4, 1)?;
        took.push(summary.ttft.as_secs_f64());
    }
    Ok(took)
}

/// Tokens a second of a decode of `n` tokens after a prompt of one.
pub(crate) fn decode_rate(session: &mut Session, model: &Arc<LoadedModel>, n: u32) -> Result<f64> {
    let summary = session.generate(model, 1, n)?;
    Ok(summary.decode_tokens_per_s)
}

/// Tokens a second of a prompt of `n`, up to the first token after it.
pub(crate) fn prefill_rate(
    session: &mut Session,
    model: &Arc<LoadedModel>,
    n: usize,
) -> Result<f64> {
    let ttft = session.generate(model, n, 1)?.ttft;
    Ok(n as f64 / ttft.as_secs_f64())
}

fn one(
    session: &mut Session,
    name: &str,
    path: &Path,
    (runs, long): (usize, usize),
    bandwidth: &mut Bandwidth,
    compare: Option<&LlamaBench>,
) -> Result<Vec<Row>> {
    let (model, loads) = loads(session, "speed", path, LOADS)?;
    let first_uses = first_uses(session, &model, FIRST_USES)?;
    let weights = session.resident_bytes("speed") as f64;
    let uploads: Vec<f64> = first_uses.iter().map(|s| weights / 1e9 / s).collect();
    let first_uses: Vec<f64> = first_uses.iter().map(|s| s * 1e3).collect();

    let mut prefill = [Vec::new(), Vec::new()];
    let mut decode = Vec::new();
    let mut theirs = Gathered::default();
    let rounds = ROUNDS.min(runs);
    for round in 0..rounds {
        let part = (runs + round) / rounds;
        bandwidth.measure();
        for i in 0..part {
            decode.push(decode_rate(session, &model, DECODE)?);
            for (n, figures) in [SHORT, long].into_iter().zip(&mut prefill) {
                if n == SHORT || i % 3 == 0 {
                    figures.push(prefill_rate(session, &model, n)?);
                }
            }
        }
        if let Some(bench) = compare {
            bench.run(path, SHORT as u32, DECODE, part, &mut theirs)?;
        }
    }
    session.unload("speed")?;

    let bandwidth = bandwidth.bytes_per_s();
    let unit = "tokens/s";
    let mut short = Row::new(name, format!("prefill {SHORT}"), unit, &prefill[0]);
    let mut decoded =
        Row::new(name, format!("decode {DECODE}"), unit, &decode).share_of(bandwidth / weights);
    if let Some(bench) = compare {
        let (value, options) = bench.prefill(&theirs);
        short = short.against(value, &options);
        let (value, options) = bench.decode(&theirs);
        decoded = decoded.against(value, &options);
    }
    Ok(vec![
        Row::new(name, "load", "ms", &loads),
        Row::new(name, "first use", "ms", &first_uses),
        Row::new(name, "first use, weights", "GB/s", &uploads).share_of(bandwidth / 1e9),
        short,
        Row::new(name, format!("prefill {long}"), unit, &prefill[1]),
        decoded,
    ])
}
