//! Mixtures of experts: all of it resident, from nothing to a first token, and in budgets that
//! hold a part of the experts.
//!
//! Random routers route nearly evenly, which is the worst case for a cache: the share of experts
//! found resident stands beside each figure.

use std::sync::Arc;

use anyhow::Result;
use rocmforge_engine::LoadedModel;
use rocmforge_engine::api::{Policy, When};
use rocmforge_ops::SegmentKind;

use super::Bench;
use super::plan::{Kind, title};
use crate::check::Check;
use crate::goal::Goal;
use crate::report::Row;
use crate::session::Session;
use crate::speed;
use crate::stream;

/// Bytes beside the weights: KV, scratch and what the device takes.
const BESIDE: u64 = 700 << 20;

/// Measures every mixture of the plan.
///
/// # Errors
/// None so far: what cannot be measured is named in the check.
pub(crate) fn run_all(bench: &mut Bench, check: &mut Check) -> Result<()> {
    for kind in bench.plan.mixtures.clone() {
        if let Err(error) = one(bench, kind) {
            check.fail(format!("{}: {error:#}", title(kind)));
        }
    }
    Ok(())
}

/// Bytes of a model's weights in the file: of experts, and of all.
fn weights(model: &LoadedModel) -> (u64, u64) {
    let segments = &model.model().plan().segments;
    let bytes = |expert: bool| -> u64 {
        let some = segments
            .iter()
            .filter(|s| matches!(s.kind, SegmentKind::Expert { .. }) == expert);
        some.map(|s| s.file_bytes()).sum()
    };
    (bytes(true), bytes(true) + bytes(false))
}

fn one(bench: &mut Bench, kind: Kind) -> Result<()> {
    let plan = bench.plan.clone();
    let (path, name) = (bench.models.get(kind, 1)?, title(kind));
    let goal = |goal: Goal| plan.judges(kind).then_some(goal);

    let mut session = Session::start(bench.device, None, Policy::PassAware, None)?;
    let (model, _) = session.load("main", &path)?;
    // Kernels that were never compiled on this machine are compiled here.
    session.generate(&model, 4, 8)?;
    let firsts = speed::first_uses(&mut session, &model, plan.loads)?;
    let firsts: Vec<f64> = firsts.iter().map(|s| s * 1e3).collect();
    bench.add(
        Row::new(&name, "not resident to first token", "ms", &firsts)
            .judged(goal(Goal::at_most(600.0, Some(120.0)).beside(3000.0))),
    );
    // All experts, not only those that were routed to.
    session.preload("main")?;
    let rates = decode(bench, &mut session, &model)?;
    let figure = format!("resident: decode, batch 1, {} tokens", plan.decode);
    bench.add(
        Row::new(&name, figure, "tokens/s", &rates)
            .judged(goal(Goal::at_least(293.0, 600.0).beside(293.0))),
    );
    let theirs = [(8900.0, 20_000.0), (10_200.0, 25_000.0)];
    for (n, (must, aim)) in plan.prefills.into_iter().zip(theirs) {
        speed::prefill_rate(&mut session, &model, n)?;
        let rates = (0..plan.runs)
            .map(|_| speed::prefill_rate(&mut session, &model, n))
            .collect::<Result<Vec<f64>>>()?;
        bench.add(
            Row::new(&name, format!("resident: prefill {n}"), "tokens/s", &rates)
                .judged(goal(Goal::at_least(must, aim).beside(must))),
        );
    }
    session.end()?;

    let (experts, all) = weights(&model);
    let halves = [
        ("half of its bytes", all / 2, (120.0, 250.0, 76.0)),
        ("no expert", all - experts, (60.0, 110.0, 44.0)),
    ];
    for (what, bytes, goals) in halves {
        let beside = BESIDE.min(all / 2);
        for cpu_compute in [When::Never, When::Auto] {
            let within = format!(
                "budget of {what} and {:.1} GB, {:.2} GB in all, CPU compute {cpu_compute:?}",
                beside as f64 / 1e9,
                (bytes + beside) as f64 / 1e9
            )
            .to_lowercase();
            let mut session = Session::start_split(bench.device, bytes + beside, cpu_compute)?;
            let (model, _) = session.load("main", &path)?;
            let n = plan.decode_streamed;
            // The host brings each expert into its own memory once, some at each token.
            let before = match cpu_compute {
                When::Auto => plan.before_split,
                _ => 1,
            };
            let streamed = stream::decode(&mut session, &model, n, before, plan.runs)?;
            let (must, aim, theirs) = goals;
            let row = |figure: &str, unit: &'static str, values: &[f64]| {
                Row::new(&name, format!("{within}: {figure}"), unit, values)
            };
            let mb = |bytes: &[f64]| -> Vec<f64> { bytes.iter().map(|b| b / 1e6).collect() };
            bench.add(
                row("decode", "tokens/s", &streamed.speeds)
                    .judged(goal(Goal::at_least(must, aim).beside(theirs))),
            );
            bench.add(row("uploaded a token", "MB", &mb(&streamed.uploads)));
            bench.add(row(
                "computed on the host a token",
                "MB",
                &mb(&streamed.hosted),
            ));
            bench.add(row("found resident", "%", &streamed.hits));
            if cpu_compute == When::Never {
                // The host takes no part in a pass of many rows.
                let prompt = plan.prefills[0];
                speed::prefill_rate(&mut session, &model, prompt)?;
                let rates = (0..plan.runs)
                    .map(|_| speed::prefill_rate(&mut session, &model, prompt))
                    .collect::<Result<Vec<f64>>>()?;
                bench.add(row(&format!("prefill {prompt}"), "tokens/s", &rates));
            }
            session.end()?;
        }
    }
    bench.models.done(&path);
    Ok(())
}

fn decode(bench: &Bench, session: &mut Session, model: &Arc<LoadedModel>) -> Result<Vec<f64>> {
    let n = bench.plan.decode;
    speed::decode_rate(session, model, n)?;
    (0..bench.plan.runs)
        .map(|_| speed::decode_rate(session, model, n))
        .collect()
}
