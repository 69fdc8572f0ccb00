//! Many requests in budgets that hold a small part of their models: whatever is begun comes to its
//! end, with the text of a roomy budget.

use crate::requests;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use crate::requests::{chat, engine, greedy, load, load_endless, run, until};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rocmforge_engine::api::{
    Asker, Budget, Class, FinishReason, GenerateEvent, GenerateRequest, ScoreRequest, Snapshot,
};
use rocmforge_engine::{
    EngineConfig, EngineHandle, Error, Events, LoadedModel, PrefixCache, start,
};

/// Budgets that were tried, each with [`REQUESTS`] requests at once.
const BUDGETS: usize = 24;
const REQUESTS: usize = 12;

/// Prompts of which two begin alike.
const ROUNDS: usize = 20;

/// Positions of a request at most.
const N_CTX: u32 = 600;

fn request(
    model: &Arc<LoadedModel>,
    repeats: usize,
    max_tokens: Option<u32>,
    n_ctx: u32,
) -> GenerateRequest {
    GenerateRequest {
        max_tokens,
        n_ctx: Some(n_ctx),
        ..chat(model, &"Name the capital city of Turkey. ".repeat(repeats))
    }
}

/// The tokens, or why there are none.
async fn tokens(events: &mut Events<GenerateEvent>) -> Result<Vec<u32>, Error> {
    let mut tokens = Vec::new();
    loop {
        match events.next().await.expect("an end") {
            GenerateEvent::Piece { ids, .. } => tokens.extend(ids),
            GenerateEvent::Done(_) => return Ok(tokens),
            GenerateEvent::Failed(error) => return Err(error),
        }
    }
}

#[tokio::test]
async fn what_is_begun_in_a_tight_budget_ends_with_the_text_of_a_roomy_one() {
    let roomy = engine(Budget::Bytes(64 << 20));
    let tight = engine(Budget::Bytes(64 << 20));
    let files = ["tiny-llama-Q4_K_M.gguf", "tiny-qwen3-Q8_0.gguf"];
    let mut models = Vec::new();
    for file in files {
        models.push((
            load(&roomy, file, file).await,
            load(&tight, file, file).await,
        ));
    }
    let mut rng = StdRng::seed_from_u64(7);
    let mut texts: HashMap<(usize, usize), Vec<u32>> = HashMap::new();
    let (mut done, mut refused) = (0, 0);
    for _ in 0..BUDGETS {
        let budget = rng.random_range(700 << 10..3200 << 10);
        tight.set_budget(Budget::Bytes(budget)).await.unwrap();
        let mut asked = Vec::new();
        for _ in 0..REQUESTS {
            let (model, repeats) = (rng.random_range(0..2), 5 * rng.random_range(0..8) + 1);
            let max_tokens = rng.random_bool(0.5).then(|| rng.random_range(1..200));
            let request = request(&models[model].1, repeats, max_tokens, N_CTX);
            let mut events = tight.generate(request).unwrap();
            asked.push((
                (model, repeats),
                max_tokens,
                tokio::spawn(async move { tokens(&mut events).await }),
            ));
        }
        for (prompt, max_tokens, answer) in asked {
            let answer = match answer.await.unwrap() {
                Ok(answer) => answer,
                Err(Error::Precondition(_)) => {
                    refused += 1;
                    continue;
                }
                Err(error) => panic!("begun and not ended in {budget} bytes: {error}"),
            };
            done += 1;
            let (model, repeats) = prompt;
            let expected = match texts.entry(prompt) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => {
                    let all = request(&models[model].0, repeats, None, N_CTX);
                    new.insert(run(&roomy, all).await.1)
                }
            };
            let n = max_tokens.map_or(expected.len(), |max| expected.len().min(max as usize));
            assert_eq!(answer, expected[..n], "{prompt:?} in {budget} bytes");
        }
    }
    println!("{done} came to their end, {refused} were refused");
    assert!(done > 2 * refused && refused > 0, "{done}, {refused}");
}

/// A prompt whose KV leaves next to nothing for scratch is computed in shorter passes, not refused.
#[tokio::test]
async fn a_prompt_whose_kv_takes_most_of_the_budget_is_computed_in_shorter_passes() {
    let engine = engine(Budget::Bytes(64 << 20));
    let model = load(&engine, "tiny-qwen3-Q8_0.gguf", "m").await;
    let request = || GenerateRequest {
        max_tokens: Some(8),
        ..chat(&model, &"Name the capital city of Turkey. ".repeat(300))
    };
    let (_, roomy, _) = run(&engine, request()).await;
    // The smallest budget in which it runs, to 64 KiB.
    let (mut refused, mut runs) = (0, 64 << 20);
    while runs - refused > 64 << 10 {
        let between = (refused + runs) / 2;
        engine.set_budget(Budget::Bytes(between)).await.unwrap();
        let mut events = engine.generate(request()).unwrap();
        let starts = until(&engine, "a start", |s| s.running == 1);
        tokio::select! {
            _ = starts => runs = between,
            Err(error) = tokens(&mut events) => {
                assert!(matches!(error, Error::Precondition(_)), "{error}");
                refused = between;
            }
        }
        drop(events);
        until(&engine, "its end", |s| s.running == 0).await;
    }
    engine.set_budget(Budget::Bytes(runs)).await.unwrap();
    let (_, ids, summary) = run(&engine, request()).await;
    assert_eq!(ids, roomy);
    // Chunks that take an eighth of the budget have 32 tokens here.
    let segments = model.model().plan().segments.len() as u64;
    let passes = (summary.cache.hits + summary.cache.misses) / segments;
    let tokens = request().prompt.len() as u64;
    println!("{tokens} tokens in {passes} passes, budget {runs}");
    assert!(
        tokens > 2000 && passes > tokens / 32 + 16,
        "{tokens}, {passes}"
    );
}

/// Scratch that grows behind pages leaves a hole before them, and then no room in one piece
/// for the head, however often the request is computed anew: unless it has all of its
/// scratch from the beginning.
#[tokio::test]
async fn a_score_that_a_budget_admits_is_computed_in_it() {
    let engine = engine(Budget::Bytes(64 << 20));
    for name in ["arcee", "glm4", "mistral3", "qwen3moe"] {
        let model = load(&engine, &format!("arch/{name}.gguf"), name).await;
        let request = || ScoreRequest {
            model: Arc::clone(&model),
            ids: (0..151).map(|i| 3 + i * 7 % 1000).collect(),
            top_n: 0,
            deadline: None,
            asker: Asker::default(),
            adapters: None,
        };
        let logprobs = |scores: rocmforge_engine::api::Scores| {
            let tokens = scores.tokens.iter();
            tokens.map(|t| t.logprob.to_bits()).collect::<Vec<u32>>()
        };
        engine.set_budget(Budget::Bytes(64 << 20)).await.unwrap();
        let expected = logprobs(engine.score(request()).await.unwrap());
        let mut computed = 0;
        for budget in (288 << 10..640 << 10).step_by(2 << 10) {
            engine.set_budget(Budget::Bytes(budget)).await.unwrap();
            match engine.score(request()).await {
                Ok(scores) => {
                    assert_eq!(logprobs(scores), expected, "{name} in {budget}");
                    computed += 1;
                }
                Err(Error::Exhausted { message, .. }) => panic!("{name} in {budget}: {message}"),
                // Too small a budget is told before anything is computed.
                Err(_) => {}
            }
        }
        assert!(computed > 20, "{name}: {computed} budgets");
    }
}

fn batch(request: GenerateRequest) -> GenerateRequest {
    GenerateRequest {
        asker: Asker {
            class: Class::Batch,
            ..Asker::default()
        },
        ..request
    }
}

/// The second of two that begin alike waits for the first. When it yields meanwhile, it begins
/// again like any other, and not in the middle of nothing.
#[tokio::test]
async fn one_that_waits_for_another_and_yields_begins_again() {
    let engine = engine(Budget::Bytes(5 << 20));
    let model = load(&engine, "arch/deepseek2.gguf", "m").await;
    let mut rng = StdRng::seed_from_u64(1);
    for round in 0..ROUNDS {
        let prompt: Vec<u32> = (0..2000).map(|_| rng.random_range(60..1100)).collect();
        let alike = |reuse| GenerateRequest {
            reuse,
            ..batch(greedy(&model, prompt.clone(), 5))
        };
        let urgent = greedy(&model, prompt[..20].to_vec(), 1500);
        let asked = [alike(true), alike(true)].map(|request| {
            let mut events = engine.generate(request).unwrap();
            tokio::spawn(async move { tokens(&mut events).await.unwrap() })
        });
        let wait = rng.random_range(10..300);
        tokio::time::sleep(std::time::Duration::from_millis(wait)).await;
        run(&engine, urgent).await;
        let expected = run(&engine, alike(false)).await.1;
        for ids in asked {
            assert_eq!(ids.await.unwrap(), expected, "round {round}");
        }
    }
}

/// A budget that shrinks is not reached before what has begun has come to its end, also what has
/// yielded.
#[tokio::test]
async fn a_smaller_budget_fails_none_that_has_yielded() {
    let engine = engine(Budget::Bytes(4 << 20));
    let model = load_endless(&engine, "m").await;
    let long = || GenerateRequest {
        max_tokens: Some(500),
        ..greedy(&model, (10..40).collect(), 500)
    };
    let expected = run(&engine, long()).await.1;
    let mut yields = engine.generate(batch(long())).unwrap();
    // It runs, and has said something.
    let GenerateEvent::Piece { ids, .. } = yields.next().await.unwrap() else {
        panic!("no text");
    };
    engine.set_budget(Budget::Bytes(512 << 10)).await.unwrap();
    for _ in 0..3 {
        // Those that are urgent have its room meanwhile, and need less.
        let urgent = greedy(&model, (50..60).collect(), 20);
        run(&engine, urgent).await;
    }
    let rest = tokens(&mut yields).await.unwrap();
    assert_eq!([ids, rest].concat(), expected);
    until(&engine, "the smaller budget", |s| {
        s.cache.budget_bytes == 512 << 10
    })
    .await;
}

/// Waits until the engine does nothing.
async fn rested(engine: &EngineHandle) -> Arc<Snapshot> {
    let mut before = engine.snapshot();
    loop {
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
        let now = engine.snapshot();
        if now.cache.hits == before.cache.hits && now.running == before.running {
            return now;
        }
        before = now;
    }
}

/// Of two texts that nobody reads one has yielded to the other: it waits, but for its reader, and
/// is no reason to end the other one (which was ended for it).
#[tokio::test]
async fn a_text_that_nobody_reads_waits_for_nobody_but_its_reader() {
    let engine = engine(Budget::Bytes(12 << 20));
    let model = load_endless(&engine, "m").await;
    let long = || greedy(&model, (10..40).collect(), 3000);
    let mut yields = engine.generate(batch(long())).unwrap();
    until(&engine, "the first", |s| s.running == 1).await;
    let unread = |s: &Snapshot| s.running == 1 && s.queued == 1 && s.queued_and_read == 0;
    rested(&engine).await;
    let mut urgent = engine.generate(long()).unwrap();
    until(
        &engine,
        "two that nobody reads, of which one has yielded",
        unread,
    )
    .await;
    for events in [&mut urgent, &mut yields] {
        assert_eq!(tokens(events).await.unwrap().len(), 3000);
    }
    // One that waits for a text that is read is waited for.
    let mut first = engine.generate(long()).unwrap();
    until(&engine, "the one that is read", |s| s.running == 1).await;
    let first = tokio::spawn(async move { tokens(&mut first).await });
    let mut second = engine.generate(batch(long())).unwrap();
    let waits = |s: &Snapshot| s.queued == 1 && s.queued_and_read == 1;
    until(&engine, "the one that waits", waits).await;
    assert_eq!(first.await.unwrap().unwrap().len(), 3000);
    assert_eq!(tokens(&mut second).await.unwrap().len(), 3000);
}

/// Without `max_tokens` and a context of its own a text is as long as there is room for.
#[tokio::test]
async fn a_text_without_a_length_ends_where_the_budget_has_no_more_room() {
    let engine = engine(Budget::Bytes(64 << 20));
    let model = load_endless(&engine, "m").await;
    let endless = || GenerateRequest {
        max_tokens: None,
        ..greedy(&model, (10..110).collect(), 1)
    };
    let roomy = run(&engine, endless()).await;
    assert_eq!(roomy.2.finish, FinishReason::ContextFull);
    let mut shorter = 0;
    for kib in (900..1700).step_by(100) {
        engine.set_budget(Budget::Bytes(kib << 10)).await.unwrap();
        let mut events = engine.generate(endless()).unwrap();
        let (mut ids, mut finish) = (Vec::new(), None);
        while let Some(event) = events.next().await {
            match event {
                GenerateEvent::Piece { ids: new, .. } => ids.extend(new),
                GenerateEvent::Done(summary) => finish = Some(summary.finish),
                GenerateEvent::Failed(error) => {
                    assert!(matches!(error, Error::Precondition(_)), "{kib}: {error}");
                }
            }
        }
        if finish.is_some() {
            assert_eq!(finish, Some(FinishReason::ContextFull));
            assert_eq!(ids, roomy.1[..ids.len()], "{kib}");
            shorter += u32::from(ids.len() < roomy.1.len() && ids.len() > 32);
        }
    }
    assert!(shorter > 1, "{shorter} texts ended for want of room");
}

/// A text is under way when the budget shrinks below where its keys and values lie, and then grows
/// by less than would hold them: they stay.
#[tokio::test]
async fn what_a_shrink_has_left_stays_when_the_budget_grows_a_little() {
    let engine = start(EngineConfig {
        budget: Budget::Bytes(24 << 20),
        prefix_cache: PrefixCache::Off,
        speculate: Some(false),
        ..EngineConfig::default()
    })
    .unwrap()
    .0;
    let model = requests::load(&engine, "arch/command-r-plus.gguf", "m").await;
    let request = |seed: u32, max_tokens| {
        let ids = (0..12).map(|i| 5 + (i * 31 + seed * 17) % 200).collect();
        let mut request = requests::greedy(&model, ids, max_tokens);
        request.decoding.ignore_eos = true;
        request
    };
    let expected = ids(engine.generate(request(7, 1200)).unwrap(), usize::MAX).await;
    for _ in 0..2 {
        engine.set_budget(Budget::Bytes(24 << 20)).await.unwrap();
        // They take the places below.
        let mut below = Vec::new();
        for seed in [100, 101] {
            let mut events = engine.generate(request(seed, 1300)).unwrap();
            some_ids(&mut events, 900).await;
            below.push(events);
        }
        let mut events = engine.generate(request(7, 1200)).unwrap();
        let mut text = some_ids(&mut events, 300).await;
        drop(below);
        requests::until(&engine, "the end of the others", |s| s.running == 1).await;
        for bytes in [11 << 19, 23 << 18] {
            engine.set_budget(Budget::Bytes(bytes)).await.unwrap();
        }
        text.extend(ids(events, usize::MAX).await);
        let differs = text.iter().zip(&expected).position(|(a, b)| a != b);
        assert_eq!((differs, text.len()), (None, expected.len()));
    }
}

/// The next tokens of a text, at least so many if it has them.
async fn some_ids(events: &mut Events<GenerateEvent>, n: usize) -> Vec<u32> {
    let mut found = Vec::new();
    while found.len() < n {
        match events.next().await.unwrap() {
            GenerateEvent::Piece { ids, .. } => found.extend(ids),
            GenerateEvent::Done(_) => break,
            GenerateEvent::Failed(error) => panic!("{error}"),
        }
    }
    found
}

async fn ids(mut events: Events<GenerateEvent>, n: usize) -> Vec<u32> {
    some_ids(&mut events, n).await
}
