//! The second turn of a chat, which begins with the first one and its answer: its first
//! token where that was kept, and where it is computed again. And what drafting tokens costs
//! where nothing repeats: random weights and prompts; and what it brings where the text goes
//! round in circles of 16 tokens.

use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rocmforge_engine::api::{GenerateRequest, GenerateSummary};
use rocmforge_engine::{EngineConfig, LoadedModel};

use super::Bench;
use super::plan::title;
use crate::check::Check;
use crate::report::Row;
use crate::session::{Session, greedy, random_prompt, run};
use crate::weights::POOL_BLOCKS;

/// Tokens that the user adds.
const SAID: usize = 40;

/// Tokens of the answer before it.
const ANSWER: u32 = 64;

/// Tokens that a second turn may compute: what was said, and what did not fill a page.
const COMPUTED_MAX: usize = 99;

/// Measures.
///
/// # Errors
/// The model cannot be made or run.
pub(crate) fn run_all(bench: &mut Bench, check: &mut Check) -> Result<()> {
    let main = bench.plan.main;
    let (path, name) = (bench.models.get(main, 1)?, title(main));
    let mut rng = StdRng::seed_from_u64(bench.seed);
    let (n_history, runs) = (bench.plan.history, bench.plan.runs);

    let mut session = Session::start_as(EngineConfig {
        device: bench.device.choice(),
        ..EngineConfig::default()
    })?;
    let (model, _) = session.load("main", &path)?;
    session.generate(&model, 1, 2)?;
    let (mut again, mut anew) = (Vec::new(), Vec::new());
    // The first run uploads, compiles and records.
    for counted in std::iter::once(false).chain((0..runs).map(|_| true)) {
        let mut prompt = random_prompt(&mut rng, n_history);
        let (answer, _) = ask(&session, &model, &prompt, ANSWER, true)?;
        prompt.extend(answer);
        prompt.extend(random_prompt(&mut rng, SAID));
        let (_, computed_anew) = ask(&session, &model, &prompt, 1, false)?;
        let (_, begun) = ask(&session, &model, &prompt, 1, true)?;
        let computed = prompt.len() - begun.reused_tokens as usize;
        if computed > COMPUTED_MAX {
            check.fail(format!("{computed} of {} tokens computed", prompt.len()));
        }
        if counted {
            again.push(begun.ttft.as_secs_f64() * 1e3);
            anew.push(computed_anew.ttft.as_secs_f64() * 1e3);
        }
    }
    let figure = |what: &str| format!("second turn on {n_history} tokens, first token, {what}");
    bench.add(Row::new(&name, figure("reused"), "ms", &again));
    bench.add(Row::new(&name, figure("computed again"), "ms", &anew));
    session.end()?;

    for by in [By::Nothing, By::TheText] {
        speculation(bench, &path, &name, by)?;
    }
    let circling = bench.plan.circling;
    let (path, name) = (bench.models.get(circling, 1)?, title(circling));
    let small = bench.models.get(bench.plan.drafting, 1)?;
    let mut texts = Vec::new();
    for by in [By::Nothing, By::TheText, By::Model(&small)] {
        texts.push(speculation(bench, &path, &name, by)?);
    }
    // Random weights choose between tokens that are nearly equal; a text that goes round does not.
    if texts.iter().any(|text| *text != texts[0]) {
        check.fail(format!("drafts change a text: {texts:?}"));
    }
    bench.models.done(&path);
    Ok(())
}

/// What drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum By<'a> {
    Nothing,
    /// What was said before.
    TheText,
    /// A small model with the same vocabulary.
    Model(&'a Path),
}

/// Decode with drafts or without; a text, as rows of the vocabulary.
fn speculation(bench: &mut Bench, path: &Path, name: &str, by: By<'_>) -> Result<Vec<u32>> {
    let runs = bench.plan.runs;
    let mut session = Session::start_exactly(EngineConfig {
        device: bench.device.choice(),
        speculate: match by {
            By::Nothing => Some(false),
            By::TheText => Some(true),
            By::Model(_) => None,
        },
        ..EngineConfig::default()
    })?;
    let model = match by {
        By::Model(small) => {
            session.load("small", small)?;
            session.load_with_draft("main", path, "small")?
        }
        _ => session.load("main", path)?.0,
    };
    session.generate(&model, 1, 2)?;
    let (text, _) = ask(&session, &model, &[1, 2, 3], ANSWER, true)?;
    // Rows of the vocabulary repeat after so many, and equal ones are equally likely.
    let row = |id: u32| id % POOL_BLOCKS as u32;
    let text = text.into_iter().map(row).collect();
    let (mut rates, mut accepted) = (Vec::new(), Vec::new());
    for counted in std::iter::once(false).chain((0..runs).map(|_| true)) {
        let summary = session.generate(&model, 64, bench.plan.decode)?;
        if counted {
            rates.push(summary.decode_tokens_per_s);
            accepted.push(f64::from(summary.accepted_tokens));
        }
    }
    let how = match by {
        By::Nothing => "speculation off",
        By::TheText => "speculation on",
        By::Model(_) => "a draft model",
    };
    let figure = format!("decode, {how}");
    bench.add(Row::new(name, figure, "tokens/s", &rates));
    if by != By::Nothing {
        let figure = format!("{how}: drafts accepted, of {} tokens", bench.plan.decode);
        bench.add(Row::new(name, figure, "tokens", &accepted));
    }
    session.end()?;
    Ok(text)
}

/// A greedy answer of at most `n` tokens.
fn ask(
    session: &Session,
    model: &Arc<LoadedModel>,
    prompt: &[u32],
    n: u32,
    reuse: bool,
) -> Result<(Vec<u32>, GenerateSummary)> {
    let request = GenerateRequest {
        reuse,
        ..greedy(model, prompt.to_vec(), n)
    };
    session.block_on(async |engine| {
        let mut tokens = Vec::new();
        let summary = run(engine, request, |ids| tokens.extend_from_slice(ids)).await?;
        Ok((tokens, summary))
    })
}
