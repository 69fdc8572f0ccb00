//! Many clients at once: what they get together, against one alone.
//!
//! Every client sends a prompt at the same moment and reads its text to the end. *Together* counts
//! all tokens that were generated from the first request to the last end, prompts included;
//! *decode* those between the last first token and the first end, when nobody has a prompt left.
//! And what a long prompt does to the gaps between the tokens of others.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures_util::future::try_join_all;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rocmforge_engine::api::{GenerateRequest, SamplingParams};
use rocmforge_engine::{EngineConfig, LoadedModel};

use super::plan::{Choice, title};
use super::{Bench, lora};
use crate::check::Check;
use crate::rates::{Rates, Text};
use crate::report::Row;
use crate::session::{Session, greedy, random_prompt, run};

/// Measures each number of clients.
///
/// # Errors
/// The model cannot be made or run.
pub(crate) fn run_all(bench: &mut Bench, check: &mut Check) -> Result<()> {
    let asked = bench.plan.asked;
    let path = bench.models.get(asked, 1)?;
    let most = bench.plan.together.iter().map(|(n, _)| *n).max();
    let most = most.and_then(NonZeroUsize::new).context("no clients")?;
    let mut session = Session::start_as(EngineConfig {
        device: bench.device.choice(),
        // And the long prompt beside them.
        max_sequences: most
            .max(NonZeroUsize::MIN.saturating_add(READERS - 1))
            .saturating_add(1),
        ..EngineConfig::default()
    })?;
    let n_adapters = bench.plan.adapters_together;
    let adapters = tempfile::tempdir().context("no temporary folder for adapters")?;
    let model = match n_adapters {
        0 => session.load("main", &path)?.0,
        n => {
            let written = lora::write(adapters.path(), &path, n, bench.seed)?;
            session.load_with_adapters("main", &path, &written)?
        }
    };
    session.generate(&model, 1, 2)?;
    let mut rng = StdRng::seed_from_u64(bench.seed);
    for (n, choice) in bench.plan.together.clone() {
        // Without adapters first, in whose passes the model computes as one that has none.
        let without = together(bench, &mut session, (&model, 0), (n, choice), &mut rng)?;
        if n_adapters > 0 {
            let with = (&model, n_adapters);
            let with = together(bench, &mut session, with, (n, choice), &mut rng)?;
            let shares = with
                .iter()
                .zip(&without)
                .map(|(with, without)| with / without);
            let what = format!("{n} clients, decode with {n_adapters} adapters over without");
            let shares: Vec<f64> = shares.collect();
            bench.add(Row::new(&title(asked), what, "", &shares));
        }
    }
    beside_a_prompt(bench, &mut session, &model, &mut rng)?;
    let left = session.engine.snapshot().cache.kv_bytes;
    if left > 0 {
        check.fail(format!("{left} bytes of KV are held by nobody"));
    }
    session.end()
}

/// Measures clients of a model at once, each with one of `n_adapters` in turn. Returns the rates of
/// decode.
fn together(
    bench: &mut Bench,
    session: &mut Session,
    (model, n_adapters): (&Arc<LoadedModel>, u16),
    (n, choice): (usize, Choice),
    rng: &mut StdRng,
) -> Result<Vec<f64>> {
    let mut rates = Rates::default();
    // The first run uploads, compiles and records.
    for counted in std::iter::once(false).chain((0..bench.plan.rounds_together).map(|_| true)) {
        let requests = (0..n)
            .map(|i| request(bench, (model, n_adapters), i, choice, rng))
            .collect::<Result<Vec<GenerateRequest>>>()?;
        let texts = session.block_on(async |engine| {
            let asked = requests.into_iter().map(|request| async move {
                let asked = Instant::now();
                let mut tokens = Vec::new();
                run(engine, request, |ids| {
                    let now = Instant::now();
                    tokens.extend(ids.iter().map(|_| now));
                })
                .await?;
                Ok::<Text, anyhow::Error>(Text {
                    tokens,
                    asked,
                    ended: Instant::now(),
                })
            });
            try_join_all(asked).await
        })?;
        if counted {
            rates.count(&texts)?;
        }
    }
    let figure = |what: &str| {
        let how = match choice {
            Choice::Greedy => "",
            Choice::Sampled => ", sampled",
        };
        let with = match n_adapters {
            0 => String::new(),
            n => format!(" with {n} adapters"),
        };
        format!("{n} clients{with}{how}, {what}")
    };
    let name = title(bench.plan.asked);
    // That of others is without adapters.
    let goal = bench.plan.clients_goal(n).filter(|_| n_adapters == 0);
    let decode = Row::new(&name, figure("decode"), "tokens/s", &rates.decode);
    bench.add(Row::new(
        &name,
        figure("together"),
        "tokens/s",
        &rates.together,
    ));
    bench.add(decode.judged(goal));
    bench.add(Row::new(&name, figure("longest gap"), "ms", &rates.gap));
    Ok(rates.decode)
}

/// Client `i`'s request for a text of a random prompt.
fn request(
    bench: &Bench,
    (model, n_adapters): (&Arc<LoadedModel>, u16),
    i: usize,
    choice: Choice,
    rng: &mut StdRng,
) -> Result<GenerateRequest> {
    let (n_prompt, n_tokens) = bench.plan.text_together;
    let mut request = greedy(model, random_prompt(rng, n_prompt), n_tokens);
    if n_adapters > 0 {
        let mut scales = vec![0.0; n_adapters.into()];
        scales[i % usize::from(n_adapters)] = 1.0;
        request.adapters = model.adapters().at(&scales)?;
    }
    if let Choice::Sampled = choice {
        request.sampling = SamplingParams {
            seed: Some(i as u64),
            ..SamplingParams::default()
        };
    }
    Ok(request)
}

/// Clients that read their texts while a long prompt comes in.
const READERS: usize = 8;

/// Tokens that each of them has before it comes, as a share of the prompt's.
const BEFORE_PART: usize = 128;

/// Measures the gaps between tokens before a long prompt comes and while it is computed.
fn beside_a_prompt(
    bench: &mut Bench,
    session: &mut Session,
    model: &Arc<LoadedModel>,
    rng: &mut StdRng,
) -> Result<()> {
    let length = bench.plan.prompt_beside;
    let before = (length / BEFORE_PART).max(8);
    let mut rows: [Vec<f64>; 3] = Default::default();
    for _ in 0..bench.plan.rounds_together {
        let readers: Vec<_> = (0..READERS)
            .map(|_| greedy(model, random_prompt(rng, 32), 6 * before as u32))
            .collect();
        let mut long = greedy(model, random_prompt(rng, length), 1);
        long.n_ctx = Some(length as u32 + 1);
        let all_told = &AtomicUsize::new(0);
        let (texts, (asked, first)) = session.block_on(async |engine| {
            let readers = readers.into_iter().map(|request| async move {
                let mut tokens = Vec::new();
                run(engine, request, |ids| {
                    let now = Instant::now();
                    tokens.extend(ids.iter().map(|_| now));
                    all_told.fetch_add(ids.len(), Ordering::Relaxed);
                })
                .await?;
                Ok::<Vec<Instant>, anyhow::Error>(tokens)
            });
            let late = async {
                while all_told.load(Ordering::Relaxed) < READERS * before {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                let (asked, mut first) = (Instant::now(), None);
                run(engine, long, |_| first = first.or(Some(Instant::now()))).await?;
                Ok((asked, first.context("a prompt without a token")?))
            };
            futures_util::future::try_join(try_join_all(readers), late).await
        })?;
        let gaps = |from: Option<Instant>, to: Instant| {
            let pairs = texts.iter().flat_map(|t| t.windows(2));
            let within = pairs.filter(|w| from.is_none_or(|from| w[1] > from) && w[1] <= to);
            let mut gaps: Vec<f64> = within.map(|w| (w[1] - w[0]).as_secs_f64() * 1e3).collect();
            gaps.sort_by(f64::total_cmp);
            gaps.get(gaps.len().saturating_sub(1) * 99 / 100).copied()
        };
        // The first tokens come while others' prompts are computed.
        let begun = texts.iter().filter_map(|t| t.first()).max().copied();
        rows[0].extend(gaps(begun, asked));
        rows[1].extend(gaps(Some(asked), first));
        rows[2].push((first - asked).as_secs_f64() * 1e3);
    }
    let name = title(bench.plan.asked);
    let what = [
        format!("{READERS} clients, p99 gap"),
        format!("{READERS} clients beside a prompt of {length}, p99 gap"),
        format!("prompt of {length} beside {READERS} clients, first token"),
    ];
    for (what, values) in what.into_iter().zip(&rows) {
        bench.add(Row::new(&name, what, "ms", values));
    }
    Ok(())
}
