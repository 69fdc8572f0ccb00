//! The table: what is judged, beside the card's ceilings.
//!
//! Shares: a decode reads all resident weights once a token, against the memory's rate; a
//! first token moves them over the link, against the link's; a prompt multiplies every weight
//! with every token, against the vendor's product. Under a budget the bytes that were
//! uploaded count, against the link.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use rocmforge_device::Role;
use rocmforge_device_gpu::ceilings::Ceilings;
use rocmforge_engine::LoadedModel;
use rocmforge_engine::api::{Policy, When};

use super::Bench;
use super::plan::{Figure, Kind, title};
use crate::check::Check;
use crate::memory::Bandwidth;
use crate::report::{Ceiling, Row};
use crate::session::Session;
use crate::{speed, stream, swap};
use crate::{stream::Streamed, swap::Swapped};

/// Share of the model that the smaller budget holds: 24 of an 8B model's 33 layers.
const BUDGET: (u64, u64) = (24, 33);

/// Tokens of prompt and text of a request to one of two models.
const ALTERNATING: (usize, u32) = (16, 8);

/// Rates that figures are shares of, per second.
#[derive(Debug, Clone, Copy, Default)]
struct Rates {
    memory: Option<f64>,
    link: Option<f64>,
    product: Option<f64>,
}

/// Measures everything. What cannot be measured is named in the check, and the rest
/// is measured all the same.
///
/// # Errors
/// The main model cannot be made or run at all.
pub(crate) fn run(bench: &mut Bench, check: &mut Check) -> Result<()> {
    let main = bench.plan.main;
    let path = bench.models.get(main, 1)?;
    let rates = ceilings(bench, &path)?;
    let weights = whole(bench, &path, rates)?;
    let mut noted = |what: &str, measured: Result<()>| {
        if let Err(error) = measured {
            check.fail(format!("{what}: {error:#}"));
        }
    };
    noted("first requests", first(bench, &path, weights, rates));
    // What of the model would lie on the device, and the file, of which the embedding never does.
    let file = std::fs::metadata(&path)?.len();
    for whole in [(weights, "its weights there"), (file, "the file")] {
        noted("part of the model", budget(bench, &path, whole, rates));
    }
    noted("two models", alternate(bench, &path, weights, rates));
    if !bench.plan.mixed.contains(&main) {
        bench.models.done(&path);
    }
    for kind in bench.plan.others.clone() {
        noted(&title(kind), other(bench, kind, rates));
    }
    Ok(())
}

/// The decode of another model.
fn other(bench: &mut Bench, kind: Kind, rates: Rates) -> Result<()> {
    let path = bench.models.get(kind, 1)?;
    let mut session = Session::start(bench.device, None, Policy::PassAware, None)?;
    let (model, _) = session.load("other", &path)?;
    let decode = decode(bench, &mut session, &model)?;
    let weights = session.resident_bytes("other") as f64;
    session.end()?;
    let row = Row::new(&title(kind), decode_name(bench), "tokens/s", &decode);
    let read = |rate: f64| row.value.median * weights / rate;
    let share = rates.memory.map(read);
    bench.add(
        row.share(share, "memory")
            .judged(bench.plan.decode_goal(kind)),
    );
    if kind != bench.plan.small && !bench.plan.mixed.contains(&kind) {
        bench.models.done(&path);
    }
    Ok(())
}

/// Measures the card, or the host's memory where there is none.
fn ceilings(bench: &mut Bench, file: &Path) -> Result<Rates> {
    let mut add = |name: &str, value: Option<f64>, scale: f64, unit| {
        if let Some(value) = value {
            bench.report.ceilings.push(Ceiling {
                name: name.to_owned(),
                value: value / scale,
                unit,
            });
        }
    };
    let Some(card) = &bench.card else {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let mut bandwidth = Bandwidth::new(threads)?;
        bandwidth.measure();
        let rate = bandwidth.bytes_per_s();
        add("memory read", Some(rate), 1e9, "GB/s");
        return Ok(Rates {
            memory: Some(rate),
            ..Rates::default()
        });
    };
    let Ceilings {
        memory_bytes_per_s: memory,
        pinned_bytes_per_s: pinned,
        registered_bytes_per_s: registered,
        registering_bytes_per_s: registering,
        product_flops_per_s: product,
    } = card.ceilings(file)?;
    add("device memory, read + write", Some(memory), 1e9, "GB/s");
    add("host to device, pinned", Some(pinned), 1e9, "GB/s");
    let name = "host to device, registered file mapping";
    add(name, registered, 1e9, "GB/s");
    add("registering a file mapping", registering, 1e9, "GB/s");
    add("f16 matrix product, 8192", product, 1e12, "TFLOP/s");
    Ok(Rates {
        memory: Some(memory),
        link: Some(registered.unwrap_or(pinned)),
        product,
    })
}

/// Times of which a figure of milliseconds is made.
fn ms(seconds: &[f64]) -> Vec<f64> {
    seconds.iter().map(|s| s * 1e3).collect()
}

fn decode_name(bench: &Bench) -> String {
    format!("decode, batch 1, {} tokens", bench.plan.decode)
}

fn decode(bench: &Bench, session: &mut Session, model: &Arc<LoadedModel>) -> Result<Vec<f64>> {
    let n = bench.plan.decode;
    // Uploads, and what is recorded for replay.
    speed::decode_rate(session, model, n)?;
    (0..bench.plan.runs)
        .map(|_| speed::decode_rate(session, model, n))
        .collect()
}

/// Tokens a second of prompts of `n`, the first one not counted.
fn prefill(
    bench: &Bench,
    session: &mut Session,
    model: &Arc<LoadedModel>,
    n: usize,
) -> Result<Vec<f64>> {
    speed::prefill_rate(session, model, n)?;
    (0..bench.plan.runs)
        .map(|_| speed::prefill_rate(session, model, n))
        .collect()
}

/// Operations a token of a prompt, a product and a sum for each weight; those of attention, and the
/// output's, which only the last token needs, are not counted.
fn flops(model: &LoadedModel) -> f64 {
    let segments = model.model().plan().segments.as_slice();
    let layers = segments.split_last().map_or(segments, |(_, layers)| layers);
    let tensors = layers.iter().flat_map(|segment| &segment.tensors);
    let matrices = tensors.filter(|tensor| tensor.role == Role::Matrix);
    2.0 * matrices.map(|m| m.rows as f64 * m.cols as f64).sum::<f64>()
}

/// A row of prefill rates.
fn prefill_row(
    bench: &Bench,
    name: &str,
    rates: &[f64],
    figure: Figure,
    flops: f64,
    product: Option<f64>,
) -> Row {
    let row = Row::new(&title(bench.plan.main), name, "tokens/s", rates);
    let share = product.map(|rate| row.value.median * flops / rate);
    row.share(share, "product").judged(bench.plan.goal(figure))
}

/// The main model with room for all of it. Returns the bytes of its weights on the device.
fn whole(bench: &mut Bench, path: &Path, rates: Rates) -> Result<u64> {
    let plan = bench.plan.clone();
    let name = title(plan.main);
    let mut session = Session::start(bench.device, None, Policy::PassAware, None)?;
    let allocations = session.engine.snapshot().device.allocations;
    let (model, _) = session.load("main", path)?;
    // Kernels that were never compiled on this machine are compiled here, those of short prompts
    // too.
    session.generate(&model, 1, 8)?;
    session.generate(&model, 4, 1)?;
    let allocations = session.engine.snapshot().device.allocations - allocations;
    session.unload("main")?;
    let (model, loads) = speed::loads(&session, "main", path, plan.loads)?;
    let firsts = speed::first_uses(&mut session, &model, plan.loads)?;
    let weights = session.resident_bytes("main");
    let decode = decode(bench, &mut session, &model)?;
    let mut prefills = Vec::new();
    for n in plan.prefills {
        prefills.push(prefill(bench, &mut session, &model, n)?);
    }
    let flops = flops(&model);
    session.end()?;

    let load = Row::new(&name, "load, warm page cache", "ms", &loads);
    let count = Row::new(
        &name,
        "driver allocations of a load and a generation",
        "",
        &[allocations as f64],
    );
    let figure = "not resident to first token, later requests";
    let first = Row::new(&name, figure, "ms", &ms(&firsts));
    let moved = |rate: f64| weights as f64 / (first.value.median / 1e3) / rate;
    let share = rates.link.map(moved);
    let decode = Row::new(&name, decode_name(bench), "tokens/s", &decode);
    let read = |rate: f64| decode.value.median * weights as f64 / rate;
    let decode_share = rates.memory.map(read);
    let figures = [Figure::PrefillShort, Figure::PrefillLong];
    let prefills = plan.prefills.iter().zip(&prefills).zip(figures);
    let prefills: Vec<Row> = prefills
        .map(|((n, figures), figure)| {
            let name = format!("prefill {n}");
            prefill_row(bench, &name, figures, figure, flops, rates.product)
        })
        .collect();
    bench.add(load.judged(plan.goal(Figure::Load)));
    bench.add(count.judged(plan.goal(Figure::Allocations)));
    bench.add(
        first
            .share(share, "link")
            .judged(plan.goal(Figure::FirstToken)),
    );
    bench.add(
        decode
            .share(decode_share, "memory")
            .judged(plan.goal(Figure::Decode)),
    );
    prefills.into_iter().for_each(|row| bench.add(row));
    Ok(weights)
}

/// First requests of processes of their own.
fn first(bench: &mut Bench, path: &Path, weights: u64, rates: Rates) -> Result<()> {
    let name = title(bench.plan.main);
    let mut firsts = Vec::new();
    for _ in 0..bench.plan.processes {
        firsts.push(super::first::measure(bench.device, bench.uploads, path)?);
    }
    let of = |figure: fn(&super::first::First) -> f64| firsts.iter().map(figure).collect();
    let (starts, loads, ttfts): (Vec<_>, Vec<_>, Vec<_>) =
        (of(|f| f.start_ms), of(|f| f.load_ms), of(|f| f.ttft_ms));
    let figure = "not resident to first token, a process's first request";
    let first = Row::new(&name, figure, "ms", &ttfts);
    let moved = |rate: f64| weights as f64 / (first.value.median / 1e3) / rate;
    let share = rates.link.map(moved);
    bench.add(
        first
            .share(share, "link")
            .judged(bench.plan.goal(Figure::FirstToken)),
    );
    bench.add(
        Row::new(&name, "load, a process's first", "ms", &loads)
            .judged(bench.plan.goal(Figure::Load)),
    );
    bench.add(Row::new(&name, "start of the engine", "ms", &starts));
    Ok(())
}

/// A budget that does not run the model is raised to what does; the figures say
/// how much of the model it is.
fn least_budget(bench: &Bench, path: &Path) -> Result<u64> {
    let mut session = Session::start(bench.device, None, Policy::PassAware, None)?;
    let (model, _) = session.load("main", path)?;
    let fixed = session.engine.snapshot().cache.resident_bytes;
    let prompt = *bench.plan.prefills.iter().min().context("no prompts")?;
    let summary = session.generate(&model, prompt, bench.plan.decode_streamed)?;
    let least = session.largest_segment(&model)? + summary.cache.block_bytes + fixed;
    session.end()?;
    Ok(least)
}

/// The main model in a budget of a part of `whole` bytes, which are `what`, everything that the
/// engine holds on the device included.
fn budget(bench: &mut Bench, path: &Path, (whole, what): (u64, &str), rates: Rates) -> Result<()> {
    let plan = bench.plan.clone();
    let wanted = whole * BUDGET.0 / BUDGET.1;
    let budget = wanted.max(match bench.is_quick {
        true => least_budget(bench, path)?,
        false => 0,
    });
    let n = plan.decode_streamed;
    let mut session = Session::start_split(bench.device, budget, When::Auto)?;
    let (model, _) = session.load("main", path)?;
    let split: Streamed = stream::decode(&mut session, &model, n, 1, plan.runs)?;
    session.end()?;
    let mut session = Session::start_split(bench.device, budget, When::Never)?;
    let (model, _) = session.load("main", path)?;
    let streamed: Streamed = stream::decode(&mut session, &model, n, 1, plan.runs)?;
    let prefilled = prefill(bench, &mut session, &model, plan.prefills[0])?;
    let flops = flops(&model);
    session.end()?;

    let part = budget as f64 / whole as f64 * 33.0;
    let within = format!(
        "budget {part:.0}/33 of {what}, {:.2} GB in all",
        budget as f64 / 1e9
    );
    let name = title(plan.main);
    let decode = Row::new(
        &name,
        format!("{within}: decode"),
        "tokens/s",
        &streamed.speeds,
    );
    let uploads: Vec<f64> = streamed.uploads.iter().map(|b| b / 1e6).collect();
    let uploads = Row::new(&name, format!("{within}: uploaded a token"), "MB", &uploads);
    let moved = |rate: f64| decode.value.median * uploads.value.median * 1e6 / rate;
    let share = rates.link.map(moved);
    let figure = format!("{within}: prefill {}", plan.prefills[0]);
    let product = rates.product;
    let prefill = prefill_row(
        bench,
        &figure,
        &prefilled,
        Figure::PrefillStreamed,
        flops,
        product,
    );
    bench.add(
        decode
            .share(share, "link")
            .judged(plan.goal(Figure::DecodeStreamed)),
    );
    bench.add(uploads);
    let with = format!("{within}, the host takes part");
    let decode = format!("{with}: decode");
    bench.add(
        Row::new(&name, decode, "tokens/s", &split.speeds).judged(plan.goal(Figure::DecodeSplit)),
    );
    for (what, bytes) in [
        ("uploaded", &split.uploads),
        ("computed on the host", &split.hosted),
    ] {
        let megabytes: Vec<f64> = bytes.iter().map(|b| b / 1e6).collect();
        bench.add(Row::new(
            &name,
            format!("{with}: {what} a token"),
            "MB",
            &megabytes,
        ));
    }
    bench.add(prefill);
    Ok(())
}

/// Two models of the main kind in a budget of one and a half, everything included, asked in turn.
fn alternate(bench: &mut Bench, path: &Path, weights: u64, rates: Rates) -> Result<()> {
    let plan = bench.plan.clone();
    let second = bench.models.get(plan.main, 2)?;
    let budget = weights + weights / 2;
    let mut session = Session::start_within(bench.device, budget)?;
    let models = [
        session.load("one", path)?.0,
        session.load("two", &second)?.0,
    ];
    let swapped: Swapped = swap::alternate(&mut session, &models, ALTERNATING, plan.requests)?;
    session.end()?;
    bench.models.done(&second);

    let name = format!("2 x {}", title(plan.main));
    let within = format!("budget 1.5 models, {:.2} GB in all", budget as f64 / 1e9);
    let first = Row::new(
        &name,
        format!("{within}: first token, in turn"),
        "ms",
        &ms(&swapped.ttfts),
    );
    let uploads: Vec<f64> = swapped.uploads.iter().map(|b| b / 1e6).collect();
    let uploads = Row::new(
        &name,
        format!("{within}: uploaded a request"),
        "MB",
        &uploads,
    );
    let moved = |rate: f64| uploads.value.median * 1e6 / (first.value.median / 1e3) / rate;
    let share = rates.link.map(moved);
    bench.add(
        first
            .share(share, "link")
            .judged(plan.goal(Figure::Alternating)),
    );
    bench.add(uploads);
    Ok(())
}
