//! Many clients at once: what they get together, against one alone.
//!
//! Every client sends a prompt at the same moment and reads its text to the end. *Together* counts all tokens that were
//! generated from the first request to the last end, prompts included; *decode* those between the last first token and
//! the first end, when nobody has a prompt left.

use std::num::NonZeroUsize;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use futures_util::future::try_join_all;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rocmforge_engine::EngineConfig;
use rocmforge_engine::api::SamplingParams;

use super::Bench;
use super::plan::{Choice, title};
use crate::check::Check;
use crate::report::Row;
use crate::session::{Session, greedy, random_prompt, run};

/// What a client's request came to.
struct Text {
    /// When each token came.
    tokens: Vec<Instant>,
    asked: Instant,
    ended: Instant,
}

/// Rates of some runs, in tokens a second.
#[derive(Default)]
struct Rates {
    together: Vec<f64>,
    decode: Vec<f64>,
    /// Milliseconds: the longest gap between two tokens of a client.
    gap: Vec<f64>,
}

/// Measures each number of clients.
///
/// # Errors
/// The model cannot be made or run.
pub(crate) fn run_all(bench: &mut Bench, check: &mut Check) -> Result<()> {
    let main = bench.plan.main;
    let path = bench.models.get(main, 1)?;
    let most = bench.plan.together.iter().map(|(n, _)| *n).max();
    let most = most.and_then(NonZeroUsize::new).context("no clients")?;
    let mut session = Session::start_as(EngineConfig {
        device: bench.device.choice(),
        max_sequences: most,
        ..EngineConfig::default()
    })?;
    let (model, _) = session.load("main", &path)?;
    session.generate(&model, 1, 2)?;
    let mut rng = StdRng::seed_from_u64(bench.seed);
    for (n, choice) in bench.plan.together.clone() {
        let mut rates = Rates::default();
        // The first run uploads, compiles and records.
        for counted in std::iter::once(false).chain((0..bench.plan.rounds_together).map(|_| true)) {
            let (n_prompt, n_tokens) = bench.plan.text_together;
            let requests: Vec<_> = (0..n)
                .map(|i| {
                    let mut request = greedy(&model, random_prompt(&mut rng, n_prompt), n_tokens);
                    if let Choice::Sampled = choice {
                        request.sampling = SamplingParams {
                            seed: Some(i as u64),
                            ..SamplingParams::default()
                        };
                    }
                    request
                })
                .collect();
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
            format!("{n} clients{how}, {what}")
        };
        let name = title(main);
        let goal = bench.plan.clients_goal(n);
        let decode = Row::new(&name, figure("decode"), "tokens/s", &rates.decode);
        bench.add(Row::new(
            &name,
            figure("together"),
            "tokens/s",
            &rates.together,
        ));
        bench.add(decode.judged(goal));
        bench.add(Row::new(&name, figure("longest gap"), "ms", &rates.gap));
    }
    let left = session.engine.snapshot().cache.kv_bytes;
    if left > 0 {
        check.fail(format!("{left} bytes of KV are held by nobody"));
    }
    session.end()
}

impl Rates {
    fn count(&mut self, texts: &[Text]) -> Result<()> {
        let begin = texts.iter().map(|t| t.asked).min();
        let end = texts.iter().map(|t| t.ended).max();
        let firsts = texts.iter().filter_map(|t| t.tokens.first()).max();
        let ends = texts.iter().filter_map(|t| t.tokens.last()).min();
        let (Some(begin), Some(end), Some(&first), Some(&last)) = (begin, end, firsts, ends) else {
            bail!("a client without tokens");
        };
        let all = texts.iter().map(|t| t.tokens.len()).sum::<usize>();
        self.together.push(all as f64 / (end - begin).as_secs_f64());
        ensure!(
            first < last,
            "the first client ended before the last one began: ask for longer texts"
        );
        let in_between = |t: &Text| {
            t.tokens
                .iter()
                .filter(|at| **at > first && **at <= last)
                .count()
        };
        let decoded = texts.iter().map(in_between).sum::<usize>();
        self.decode
            .push(decoded as f64 / (last - first).as_secs_f64());
        let gaps = texts
            .iter()
            .flat_map(|t| t.tokens.windows(2).map(|w| (w[1] - w[0]).as_secs_f64()));
        self.gap.push(gaps.fold(0.0, f64::max) * 1e3);
        Ok(())
    }
}
