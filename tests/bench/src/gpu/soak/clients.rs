//! Clients with random requests, and the probe that asks the same ones again and again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rocmforge_engine::LoadedModel;
use rocmforge_engine::api::{
    Asker, GenerateEvent, GenerateRequest, SamplingParams, ScoreRequest, TOP_N_MAX,
};

use super::super::text::MARGIN_MAX;
use super::Soak;
use crate::session::{greedy, random_prompt, run};

/// Most tokens of a text.
const TOKENS_MAX: u32 = 48;

/// Context of a request in tokens.
const N_CTX: u32 = 2048;

/// Longest wait for an event: other clients' prompts and uploads are in between.
const PATIENCE: Duration = Duration::from_secs(120);

/// Tokens of a probe's prompt and text: one chunk under any budget.
const PROBE: (usize, u32) = (12, 8);

/// Between two probes.
const PROBE_PERIOD: Duration = Duration::from_millis(250);

/// A fixed prompt of a model and the text that it had at the start.
pub(super) struct Probe {
    model: usize,
    prompt: Vec<u32>,
    text: Vec<u32>,
}

/// Asks each model once.
///
/// # Errors
/// A model does not answer.
pub(super) async fn probes(soak: &Soak, seed: u64) -> Result<Vec<Probe>> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut probes = Vec::new();
    for (model, (name, _)) in soak.models.iter().enumerate() {
        let prompt = random_prompt(&mut rng, PROBE.0);
        let loaded = soak.engine.model(name)?;
        // A long prompt first, so that the largest kernels and the vendor's library have been used.
        let long = random_prompt(&mut rng, soak.n_prompt_max);
        run(&soak.engine, greedy(&loaded, long.clone(), 2), |_| {}).await?;
        let mut sampled = greedy(&loaded, long, 2);
        sampled.sampling = SamplingParams::default();
        run(&soak.engine, sampled, |_| {}).await?;
        let text = ask(soak, &loaded, &prompt)
            .await
            .with_context(|| format!("the first probe of {name}"))?;
        probes.push(Probe {
            model,
            prompt,
            text,
        });
    }
    Ok(probes)
}

async fn ask(soak: &Soak, model: &Arc<LoadedModel>, prompt: &[u32]) -> Result<Vec<u32>> {
    let mut text = Vec::new();
    let request = greedy(model, prompt.to_vec(), PROBE.1);
    run(&soak.engine, request, |ids| text.extend_from_slice(ids)).await?;
    Ok(text)
}

/// Asks the probes in turn until the end.
pub(super) async fn probe(soak: Arc<Soak>, probes: Vec<Probe>) {
    for probe in probes.iter().cycle() {
        if !soak.goes_on() {
            return;
        }
        // A model that was unloaded, or requests that were refused, are the clients' to count.
        if let Ok(model) = soak.engine.model(&soak.models[probe.model].0)
            && let Ok(text) = ask(&soak, &model, &probe.prompt).await
        {
            let same = text == probe.text || close(&soak, &model, probe, &text).await;
            soak.tally.probe(same);
        }
        tokio::time::sleep(PROBE_PERIOD).await;
    }
}

/// Whether a text parts from a probe's where the two tokens are nearly equal: kernels depend on how
/// many rows a pass has, and so on who else asks.
async fn close(soak: &Soak, model: &Arc<LoadedModel>, probe: &Probe, text: &[u32]) -> bool {
    let same = text.iter().zip(&probe.text).take_while(|(a, b)| a == b);
    let same = same.count();
    let (Some(&had), Some(&has)) = (probe.text.get(same), text.get(same)) else {
        return false;
    };
    let mut ids = probe.prompt.clone();
    ids.extend(&text[..=same]);
    let request = ScoreRequest {
        model: Arc::clone(model),
        ids,
        top_n: TOP_N_MAX,
        deadline: None,
        asker: Asker::default(),
        adapters: None,
    };
    let Ok(scores) = soak.engine.score(request).await else {
        // Refused or unloaded, as any request may be meanwhile.
        return true;
    };
    let top = scores.tokens.last().map_or(&[][..], |last| &last.top);
    let of = |id| {
        top.iter()
            .find(|(i, _)| *i == id)
            .map(|(_, logprob)| logprob)
    };
    let margin = of(had).zip(of(has)).map(|(had, has)| (had - has).abs());
    margin.is_some_and(|margin| margin <= MARGIN_MAX)
}

/// What a client does with a request besides reading it.
#[derive(Debug, Clone, Copy)]
enum Manner {
    Reads,
    /// Waits so long before each event.
    Slow(Duration),
    /// Goes away after so many events.
    Leaves(u32),
}

/// Sends random requests until the end.
pub(super) async fn client(soak: Arc<Soak>, seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    while soak.goes_on() {
        let name = &soak.models[rng.random_range(0..soak.models.len())].0;
        let model = match soak.engine.model(name) {
            Ok(model) => model,
            Err(error) => {
                soak.tally.count(&Err(error));
                tokio::time::sleep(Duration::from_millis(20)).await;
                continue;
            }
        };
        let (request, manner) = draw(&soak, model, &mut rng);
        let result = send(&soak, request, manner).await;
        let refused = result.is_err();
        soak.tally.count(&result);
        if refused {
            tokio::time::sleep(Duration::from_millis(rng.random_range(5..50))).await;
        }
    }
}

fn draw(soak: &Soak, model: Arc<LoadedModel>, rng: &mut StdRng) -> (GenerateRequest, Manner) {
    let long = soak.n_prompt_max;
    let n_prompt = match rng.random_range(0..20) {
        0 => rng.random_range(long / 3..=long),
        1..=5 => rng.random_range(long / 20..=long / 3),
        _ => rng.random_range(1..=(long / 20).max(1)),
    };
    let mut request = greedy(
        &model,
        random_prompt(rng, n_prompt.max(1)),
        rng.random_range(1..=TOKENS_MAX),
    );
    request.n_ctx = Some(N_CTX);
    if rng.random() {
        request.sampling = SamplingParams {
            seed: Some(rng.random()),
            ..SamplingParams::default()
        };
    }
    let manner = match rng.random_range(0..20) {
        0..=2 => Manner::Leaves(rng.random_range(0..6)),
        3 | 4 => Manner::Slow(Duration::from_millis(rng.random_range(1..15))),
        _ => Manner::Reads,
    };
    if rng.random_range(0..20) == 0 {
        let patience = Duration::from_millis(rng.random_range(1..200));
        request.deadline = Some(Instant::now() + patience);
    }
    (request, manner)
}

/// Sends a request and reads it to the end that `manner` sets.
async fn send(
    soak: &Soak,
    request: GenerateRequest,
    manner: Manner,
) -> Result<&'static str, rocmforge_engine::Error> {
    let mut events = soak.engine.generate(request)?;
    let mut read = 0;
    loop {
        match manner {
            Manner::Leaves(after) if read >= after => return Ok("requests left by their client"),
            Manner::Slow(wait) => tokio::time::sleep(wait).await,
            _ => {}
        }
        let Ok(event) = tokio::time::timeout(PATIENCE, events.next()).await else {
            soak.tally
                .fail(format!("no event of a request for {PATIENCE:?}"));
            return Ok("requests that hung");
        };
        match event {
            Some(GenerateEvent::Piece { ids, .. }) => {
                read += 1;
                soak.tally.add("tokens", ids.len() as u64);
            }
            Some(GenerateEvent::Done(_)) => return Ok("requests done"),
            Some(GenerateEvent::Failed(error)) => return Err(error),
            None => {
                soak.tally.fail("a request without an end".to_owned());
                return Ok("requests without an end");
            }
        }
    }
}
