//! Models of other kinds of layers than the main one's: gated delta nets, sinks and windows, shared
//! experts. How fast each is where all of it is resident, and the log-probabilities of its first
//! layers against the host's.
//!
//! A random router's choices lie so close together that the host's products of 8 bits and a card's
//! of 16 choose differently in some layer for some token, and then in most layers behind it. And a
//! delta net weighs values by dot products of random queries and keys, which are small beside what
//! they err by. So few layers are compared, and of mixtures the median: scores that have nothing to
//! do with each other differ by about 1.

use std::sync::Arc;

use anyhow::{Result, ensure};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rocmforge_engine::LoadedModel;
use rocmforge_engine::api::{Asker, Policy, ScoreRequest};

use super::Bench;
use super::plan::{Kind, title};
use crate::check::Check;
use crate::device::DeviceArg;
use crate::report::Row;
use crate::session::{Session, random_prompt};
use crate::speed;

/// Most that half of the log-probabilities may differ by.
const MEDIAN_MAX: f32 = 0.1;

/// Most that any may differ by where there is nothing to choose.
const DIFFERENCE_MAX: f32 = 0.5;

/// Measures every one of the plan; a check of the scores for each.
pub(crate) fn run_all(bench: &mut Bench) -> Vec<Check> {
    let mut checks = Vec::new();
    for (kind, compared) in bench.plan.shapes.clone() {
        let speeds = Check::ran(title(kind), |_| speeds(bench, kind));
        checks.extend((!speeds.passed()).then_some(speeds));
        let name = format!("Scores of a random {}", title(compared));
        checks.push(Check::ran(name, |check| scores(bench, compared, check)));
    }
    checks
}

fn speeds(bench: &mut Bench, kind: Kind) -> Result<()> {
    let plan = bench.plan.clone();
    let (path, name) = (bench.models.get(kind, 1)?, title(kind));
    let mut session = Session::start(bench.device, None, Policy::PassAware, None)?;
    let (model, _) = session.load("main", &path)?;
    // Kernels that were never compiled on this machine are compiled here.
    session.generate(&model, 4, 8)?;
    let firsts = speed::first_uses(&mut session, &model, plan.loads)?;
    let firsts: Vec<f64> = firsts.iter().map(|s| s * 1e3).collect();
    bench.add(Row::new(
        &name,
        "not resident to first token",
        "ms",
        &firsts,
    ));
    session.preload("main")?;
    let bytes = session.resident_bytes("main") as f64 / 1e9;
    bench.add(Row::new(&name, "resident bytes", "GB", &[bytes]));
    let n = plan.decode;
    speed::decode_rate(&mut session, &model, n)?;
    let rates = (0..plan.runs)
        .map(|_| speed::decode_rate(&mut session, &model, n))
        .collect::<Result<Vec<f64>>>()?;
    let figure = format!("resident: decode, batch 1, {n} tokens");
    bench.add(Row::new(&name, figure, "tokens/s", &rates));
    for n in plan.prefills {
        speed::prefill_rate(&mut session, &model, n)?;
        let rates = (0..plan.runs)
            .map(|_| speed::prefill_rate(&mut session, &model, n))
            .collect::<Result<Vec<f64>>>()?;
        let figure = format!("resident: prefill {n}");
        bench.add(Row::new(&name, figure, "tokens/s", &rates));
    }
    session.end()?;
    bench.models.done(&path);
    Ok(())
}

fn scores(bench: &Bench, kind: Kind, check: &mut Check) -> Result<()> {
    let path = bench.models.get(kind, 1)?;
    let host = Session::start(DeviceArg::Host, None, Policy::PassAware, None)?;
    let device = Session::start(bench.device, None, Policy::PassAware, None)?;
    let on_host = host.load("scored", &path)?.0;
    let on_device = device.load("scored", &path)?.0;
    let mut rng = StdRng::seed_from_u64(bench.seed);
    for (texts, n) in bench.plan.scored {
        let mut differences = Vec::with_capacity(texts * n);
        for _ in 0..texts {
            let ids = random_prompt(&mut rng, n);
            let theirs = of(&host, &on_host, ids.clone())?;
            let ours = of(&device, &on_device, ids)?;
            ensure!(theirs.len() == ours.len(), "another number of scores");
            let pairs = theirs.iter().zip(&ours);
            differences.extend(pairs.map(|(a, b)| (a - b).abs()));
        }
        ensure!(
            differences.iter().all(|d| d.is_finite()),
            "a score is not finite"
        );
        differences.sort_by(f32::total_cmp);
        let (most, median) = (differences.len() - 1, differences[differences.len() / 2]);
        let worst = differences[most];
        let told = format!(
            "{texts} texts of {n} tokens: log-probabilities differ from the host's by {median:.4} (median), {:.4} (nine of \
             ten), {worst:.4} (all); seed {}",
            differences[most * 9 / 10],
            bench.seed
        );
        let chooses = kind.0.shape().experts.is_some();
        match median > MEDIAN_MAX || (!chooses && worst > DIFFERENCE_MAX) {
            true => check.fail(told),
            false => check.note(told),
        }
    }
    drop((on_host, on_device));
    host.end()?;
    device.end()?;
    bench.models.done(&path);
    Ok(())
}

/// The log-probability of each token but the first.
fn of(session: &Session, model: &Arc<LoadedModel>, ids: Vec<u32>) -> Result<Vec<f32>> {
    let scores = session.score(ScoreRequest {
        model: Arc::clone(model),
        ids,
        top_n: 0,
        deadline: None,
        asker: Asker::default(),
        adapters: None,
    })?;
    Ok(scores.tokens.iter().map(|t| t.logprob).collect())
}
