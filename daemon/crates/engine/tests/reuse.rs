//! Prompts that begin like earlier ones: what was computed is used again, and the
//! text does not depend on it.

use crate::fake;
use std::sync::Arc;

use rocmforge_engine::api::{
    Asker, Budget, Decoding, FinishReason, GenerateRequest, SamplingParams,
};
use rocmforge_engine::{EngineConfig, EngineHandle, LoadedModel, PrefixCache, start};

use crate::requests::{engine, greedy, load, run, until};

/// Positions of a page: a prompt is used again in steps of so many.
pub(crate) const PAGE: usize = 32;

/// A model of each kind of layers: all positions, windows, states, convolutions,
/// latent attention, mixtures.
pub(crate) const KINDS: [&str; 9] = [
    "smollm3",
    "gemma3",
    "gemma4",
    "gpt-oss",
    "qwen35",
    "lfm2",
    "nemotron_h",
    "deepseek2",
    "granitehybrid",
];

fn request(model: &Arc<LoadedModel>, prompt: Vec<u32>, n: u32) -> GenerateRequest {
    GenerateRequest {
        reuse: true,
        ..greedy(model, prompt, n)
    }
}

/// The same, from the first token.
fn anew(request: &GenerateRequest) -> GenerateRequest {
    GenerateRequest {
        model: Arc::clone(&request.model),
        prompt: request.prompt.clone(),
        sampling: request.sampling.clone(),
        max_tokens: request.max_tokens,
        n_ctx: None,
        stop: Vec::new(),
        decoding: Decoding::default(),
        deadline: None,
        max_gap: None,
        asker: request.asker,
        reuse: false,
        adapters: None,
    }
}

/// `n` ids, others for another `seed`.
pub(crate) fn ids(seed: u32, n: usize) -> Vec<u32> {
    (0..n as u32)
        .map(|i| 5 + (i * 31 + seed * 17 + i * i * seed) % 200)
        .collect()
}

/// Two turns of a chat of which the second has the first and its answer before it.
async fn two_turns(engine: &EngineHandle, name: &str) {
    let before = engine.snapshot().cache.resident_bytes;
    let model = load(engine, &format!("arch/{name}.gguf"), name).await;
    let mut prompt = ids(1, 150);
    for turn in 0..3 {
        let request = request(&model, prompt.clone(), 45);
        let (_, expected, alone) = run(engine, anew(&request)).await;
        assert_eq!(alone.reused_tokens, 0);
        let (_, found, summary) = run(engine, request).await;
        assert_eq!(found, expected, "{name}, turn {turn}");
        let known = prompt.len() as u32;
        let computed = known - summary.reused_tokens;
        println!("{name}: {computed} of {known} computed");
        match turn {
            0 => assert_eq!(summary.reused_tokens, 0, "{name}"),
            // The last page of the answer is not full, and its last token was never computed.
            _ => assert!(
                computed as usize <= 20 + PAGE,
                "{name}: {computed} of {known}"
            ),
        }
        prompt.extend(found);
        prompt.extend(ids(turn + 2, 20));
    }
    let cache = engine.snapshot().cache;
    assert_eq!(cache.kv_bytes, 0);
    assert!(cache.prefix_bytes > 0);
    engine.unload(name, false).await.unwrap();
    assert_eq!(engine.snapshot().cache.resident_bytes, before);
}

#[tokio::test]
async fn a_second_turn_computes_what_is_new() {
    let engine = engine(Budget::Bytes(64 << 20));
    for name in KINDS {
        two_turns(&engine, name).await;
    }
}

#[tokio::test]
async fn a_second_turn_computes_what_is_new_on_a_card() {
    let runtime = fake::Runtime::new();
    let engine = runtime.start(64 << 20).unwrap();
    for name in ["smollm3", "gemma3", "qwen35"] {
        two_turns(&engine, name).await;
    }
}

/// Prompts that part in the middle: the second one to do so leaves there what
/// the third can go on from.
#[tokio::test]
async fn where_prompts_part_others_go_on() {
    for name in KINDS {
        let engine = engine(Budget::Bytes(64 << 20));
        let model = load(&engine, &format!("arch/{name}.gguf"), name).await;
        let common = ids(7, 4 * PAGE + 5);
        let mut reused = Vec::new();
        for i in 0..4 {
            let prompt = [common.clone(), ids(20 + i, 3 * PAGE + 7)].concat();
            let request = request(&model, prompt, 5);
            let (_, expected, _) = run(&engine, anew(&request)).await;
            let (_, found, summary) = run(&engine, request).await;
            assert_eq!(found, expected, "{name}, prompt {i}");
            reused.push(summary.reused_tokens as usize);
        }
        println!("{name}: {reused:?}");
        assert_eq!(reused[0], 0);
        assert_eq!(reused[2..], [4 * PAGE; 2], "{name}");
    }
}

#[tokio::test]
async fn an_agent_computes_each_token_once() {
    let engine = engine(Budget::Bytes(64 << 20));
    let model = load(&engine, "tiny-llama-Q4_K_M.gguf", "m").await;
    let mut prompt = ids(3, 40);
    let (mut computed, mut turns) = (0, 0);
    while turns < 20 {
        let (_, new, summary) = run(&engine, request(&model, prompt.clone(), 6)).await;
        computed += prompt.len() - summary.reused_tokens as usize;
        prompt.extend(new);
        prompt.extend(ids(turns, 3));
        turns += 1;
    }
    // A turn computes again what does not fill a page.
    let most = prompt.len() + turns as usize * PAGE;
    println!("{computed} computed for {} tokens", prompt.len());
    assert!(computed <= most, "{computed} for {}", prompt.len());
    let counts = engine.snapshot().prefixes;
    assert_eq!(counts.asked_tokens - counts.reused_tokens, computed as u64);
}

/// Tokens that a second request of another asker finds.
async fn found_by_another(prefix_cache: PrefixCache, first: GenerateAs, second: GenerateAs) -> u32 {
    let engine = start(EngineConfig {
        budget: Budget::Bytes(64 << 20),
        prefix_cache,
        ..EngineConfig::default()
    });
    let engine = engine.unwrap().0;
    let model = load(&engine, "tiny-llama-Q4_K_M.gguf", "m").await;
    let mut found = 0;
    for GenerateAs { client, reuse } in [first, second] {
        let request = GenerateRequest {
            asker: Asker {
                client,
                ..Asker::default()
            },
            reuse,
            ..request(&model, ids(1, 100), 4)
        };
        found = run(&engine, request).await.2.reused_tokens;
    }
    found
}

#[derive(Clone, Copy)]
struct GenerateAs {
    client: u64,
    reuse: bool,
}

#[tokio::test]
async fn what_a_client_asked_is_its_own_affair() {
    let as_client = |client| GenerateAs {
        client,
        reuse: true,
    };
    let never = GenerateAs {
        client: 1,
        reuse: false,
    };
    let (one, two) = (as_client(1), as_client(2));
    assert_eq!(found_by_another(PrefixCache::PerClient, one, one).await, 96);
    assert_eq!(found_by_another(PrefixCache::PerClient, one, two).await, 0);
    assert_eq!(found_by_another(PrefixCache::Shared, one, two).await, 96);
    assert_eq!(found_by_another(PrefixCache::Off, one, one).await, 0);
    assert_eq!(
        found_by_another(PrefixCache::PerClient, one, never).await,
        0
    );
    assert_eq!(
        found_by_another(PrefixCache::PerClient, never, one).await,
        0
    );
}

/// Chats of two models in turn, in budgets from one for a part of a model to one for both: what is
/// kept goes before anything fails, and the text stays.
#[tokio::test]
async fn what_is_kept_gives_way() {
    let ample = engine(Budget::Bytes(64 << 20));
    for budget in [1600 << 10, 3 << 20, 6 << 20, 12 << 20] {
        let tight = engine(Budget::Bytes(budget));
        let mut reused = 0;
        for (file, name) in [
            ("tiny-llama-Q4_K_M.gguf", "llama"),
            ("arch/qwen35.gguf", "qwen35"),
        ] {
            load(&tight, file, name).await;
            if budget == 1600 << 10 {
                load(&ample, file, name).await;
            }
        }
        for round in 0..12 {
            let name = ["llama", "qwen35"][round % 2];
            let of = |engine: &EngineHandle| {
                let snapshot = engine.snapshot();
                let model = snapshot.models.iter().find(|m| m.model.name() == name);
                Arc::clone(&model.unwrap().model)
            };
            let prompt = [ids(round as u32 % 4, 70), ids(round as u32, 50)].concat();
            let (_, expected, _) =
                run(&ample, anew(&request(&of(&ample), prompt.clone(), 20))).await;
            let (_, found, summary) = run(&tight, request(&of(&tight), prompt, 20)).await;
            assert_eq!(found, expected, "{budget}, round {round}");
            reused += summary.reused_tokens;
            let cache = tight.snapshot().cache;
            assert!(cache.resident_bytes + cache.in_flight_bytes <= budget);
            assert!(cache.prefix_bytes <= budget / 4, "{cache:?}");
        }
        println!("{budget} bytes: {reused} tokens used again");
        let cleared = tight.clear(None).await.unwrap();
        assert!(cleared.kept.is_empty());
        assert_eq!(tight.snapshot().cache.prefix_bytes, 0);
        if budget >= 12 << 20 {
            assert!(reused > 0);
        }
    }
}

/// Many at once that begin alike, some of which yield: each gets what it gets alone.
#[tokio::test]
async fn those_that_begin_alike_run_together() {
    let ample = engine(Budget::Bytes(64 << 20));
    let tight = engine(Budget::Bytes(3 << 20));
    for name in [
        "tiny-llama-Q4_K_M.gguf",
        "arch/qwen35.gguf",
        "arch/gemma3.gguf",
    ] {
        let there = load(&ample, name, "m").await;
        let model = load(&tight, name, "m").await;
        let prompt = |i: u32| [ids(9, 70 + 16 * (i as usize % 3)), ids(i, 40)].concat();
        let mut expected = Vec::new();
        for i in 0..10 {
            expected.push(run(&ample, anew(&request(&there, prompt(i), 40))).await.1);
        }
        for round in 0..2 {
            let together: Vec<_> = (0..10)
                .map(|i| {
                    let (engine, request) = (tight.clone(), request(&model, prompt(i), 40));
                    tokio::spawn(async move { run(&engine, request).await })
                })
                .collect();
            for (i, one) in together.into_iter().enumerate() {
                let (_, found, _) = one.await.unwrap();
                assert_eq!(found, expected[i], "{name}, round {round}, request {i}");
            }
        }
        let cache = tight.snapshot().cache;
        assert_eq!((cache.kv_bytes, cache.scratch_bytes), (0, 0));
        for engine in [&ample, &tight] {
            engine.unload("m", false).await.unwrap();
            assert_eq!(engine.snapshot().cache.resident_bytes, 0);
        }
    }
}

/// A budget that shrinks takes what is kept with it, and one that grows again begins anew.
#[tokio::test]
async fn a_budget_that_shrinks_takes_what_is_kept() {
    let engine = engine(Budget::Bytes(64 << 20));
    let model = load(&engine, "tiny-llama-Q4_K_M.gguf", "m").await;
    let ask = || request(&model, ids(1, 100), 4);
    let (_, expected, _) = run(&engine, ask()).await;
    assert_eq!(run(&engine, ask()).await.2.reused_tokens, 96);
    engine.set_budget(Budget::Bytes(4 << 20)).await.unwrap();
    assert_eq!(engine.snapshot().cache.prefix_bytes, 0);
    engine.set_budget(Budget::Bytes(64 << 20)).await.unwrap();
    let (_, found, summary) = run(&engine, ask()).await;
    assert_eq!((found, summary.reused_tokens), (expected, 0));
}

/// Several that come together and begin alike: one computes what they have in
/// common, the others wait for it.
#[tokio::test]
async fn those_that_come_together_compute_their_beginning_once() {
    const MANY: usize = 8;
    for name in [
        "tiny-llama-Q4_K_M.gguf",
        "arch/qwen35.gguf",
        "arch/gemma3.gguf",
    ] {
        let engine = engine(Budget::Bytes(64 << 20));
        let model = load(&engine, name, "m").await;
        let prompt = ids(5, 5 * PAGE + 9);
        let mut expected = Vec::new();
        for seed in 0..MANY as u64 {
            expected.push(run(&engine, anew(&drawn(&model, &prompt, seed))).await.1);
        }
        // One of another beginning does not hold them up, nor they it.
        let other = request(&model, ids(6, 3 * PAGE), 4);
        let (_, alone, _) = run(&engine, anew(&other)).await;
        let together: Vec<_> = (0..MANY as u64)
            .map(|seed| drawn(&model, &prompt, seed))
            .chain([other])
            .map(|request| {
                let engine = engine.clone();
                tokio::spawn(async move { run(&engine, request).await })
            })
            .collect();
        let mut reused = Vec::new();
        for (i, one) in together.into_iter().enumerate() {
            let (_, found, summary) = one.await.unwrap();
            assert_eq!(found, *expected.get(i).unwrap_or(&alone), "{name}, {i}");
            reused.push(summary.reused_tokens as usize);
        }
        println!("{name}: {reused:?}");
        assert_eq!(reused[MANY], 0);
        reused.truncate(MANY);
        reused.sort_unstable();
        assert_eq!(reused[0], 0);
        assert_eq!(reused[1..], [5 * PAGE; MANY - 1], "{name}");
    }
}

/// Several that come together and part in the middle, as agents with the same instructions do: what
/// they have in common is computed once, whatever the layers need to go on from there.
#[tokio::test]
async fn those_that_come_together_and_part_compute_what_they_share_once() {
    const MANY: u32 = 6;
    // A pass that is under way does not end earlier for those who come meanwhile.
    let config = || EngineConfig {
        budget: Budget::Bytes(64 << 20),
        prefill_chunk: std::num::NonZeroUsize::new(8),
        ..EngineConfig::default()
    };
    for name in KINDS {
        let engine = start(config()).unwrap().0;
        let model = load(&engine, &format!("arch/{name}.gguf"), name).await;
        let common = ids(7, 4 * PAGE + 5);
        // Half of them have two pages more in common.
        let more = ids(8, 2 * PAGE);
        let prompt = |i: u32| match i % 2 {
            0 => [common.clone(), ids(20 + i, 3 * PAGE + 7)].concat(),
            _ => [common.clone(), more.clone(), ids(20 + i, PAGE + 7)].concat(),
        };
        let mut expected = Vec::new();
        for i in 0..MANY {
            expected.push(run(&engine, anew(&request(&model, prompt(i), 5))).await.1);
        }
        let together: Vec<_> = (0..MANY)
            .map(|i| {
                let (engine, request) = (engine.clone(), request(&model, prompt(i), 5));
                tokio::spawn(async move { run(&engine, request).await })
            })
            .collect();
        let mut reused = Vec::new();
        for (one, expected) in together.into_iter().zip(&expected) {
            let (_, found, summary) = one.await.unwrap();
            assert_eq!(&found, expected, "{name}");
            reused.push(summary.reused_tokens as usize / PAGE);
        }
        println!("{name}: {reused:?}");
        reused.sort_unstable();
        assert_eq!(reused, [0, 4, 4, 4, 6, 6], "{name}");
    }
}

/// A prompt with the instructions of one before it, and another question, computes the question.
#[tokio::test]
async fn instructions_are_computed_once() {
    const INSTRUCTIONS: usize = 10 * PAGE;
    for name in KINDS {
        let engine = engine(Budget::Bytes(64 << 20));
        let model = load(&engine, &format!("arch/{name}.gguf"), name).await;
        let tokenizer = model.tokenizer();
        let mark = (0..200).find(|&id| tokenizer.is_special(id));
        let mark = mark.expect("a control token");
        let text = |seed, n| {
            let ids = ids(seed, n).into_iter();
            ids.map(|id| if tokenizer.is_special(id) { 100 } else { id })
        };
        let prompt = |question: u32| -> Vec<u32> {
            let parts = [text(7, INSTRUCTIONS), text(question, 3 * PAGE + 3)];
            let parts = parts
                .into_iter()
                .flat_map(|part| [mark].into_iter().chain(part));
            parts.chain([mark]).collect()
        };
        let mut reused = Vec::new();
        for question in 30..33 {
            let request = request(&model, prompt(question), 5);
            let (_, expected, _) = run(&engine, anew(&request)).await;
            let (_, found, summary) = run(&engine, request).await;
            assert_eq!(found, expected, "{name}");
            reused.push(summary.reused_tokens as usize);
        }
        assert_eq!(reused, [0, INSTRUCTIONS, INSTRUCTIONS], "{name}");
    }
}

/// A prompt that has a part of the instructions of one before it, as a subagent's that lacks a
/// tool, computes little of that part: what its layers need was kept near to where they part.
#[tokio::test]
async fn a_part_of_instructions_is_not_computed_again() {
    const INSTRUCTIONS: usize = 24 * PAGE;
    // States are kept at every eighth page, and what is parted from at its page.
    const NEAR: usize = 8 * PAGE;
    for name in KINDS {
        let engine = engine(Budget::Bytes(64 << 20));
        let model = load(&engine, &format!("arch/{name}.gguf"), name).await;
        let tokenizer = model.tokenizer();
        let mark = (0..200).find(|&id| tokenizer.is_special(id));
        let mark = mark.expect("a control token");
        let text = |seed, n| {
            let ids = ids(seed, n).into_iter();
            ids.map(|id| if tokenizer.is_special(id) { 100 } else { id })
        };
        // So many of the instructions are the same, and others follow.
        let prompt = |same: usize, seed: u32| -> Vec<u32> {
            let others = text(seed, INSTRUCTIONS).skip(same);
            let instructions = text(7, same).chain(others).collect();
            let parts = [instructions, text(seed, 3 * PAGE).collect::<Vec<_>>()];
            let parts = parts
                .into_iter()
                .flat_map(|part| [mark].into_iter().chain(part));
            parts.chain([mark]).collect()
        };
        run(&engine, request(&model, prompt(INSTRUCTIONS, 30), 5)).await;
        for (at, same) in [15 * PAGE + 9, 6 * PAGE, 21 * PAGE + 31]
            .into_iter()
            .enumerate()
        {
            for (turn, seed) in [40 + at as u32, 50 + at as u32].into_iter().enumerate() {
                let request = request(&model, prompt(same, seed), 5);
                let (_, expected, _) = run(&engine, anew(&request)).await;
                let (_, found, summary) = run(&engine, request).await;
                assert_eq!(found, expected, "{name}");
                let reused = summary.reused_tokens as usize;
                let shared = (same + 1) / PAGE * PAGE;
                // The second that parts there begins there, or up to two pages before.
                let least = match turn {
                    0 => shared.saturating_sub(NEAR),
                    _ => shared - PAGE,
                };
                let what = format!("{name}, {same} tokens, turn {turn}: {reused} of {shared}");
                assert!((least..=shared).contains(&reused), "{what}");
            }
        }
    }
}

/// One that comes while another computes what both begin with waits for all of it, not for the part
/// that is there when it comes.
#[tokio::test]
async fn who_comes_in_the_middle_of_a_beginning_computes_none_of_it() {
    let config = EngineConfig {
        budget: Budget::Bytes(64 << 20),
        prefill_chunk: std::num::NonZeroUsize::new(8),
        ..EngineConfig::default()
    };
    let engine = start(config).unwrap().0;
    let model = load(&engine, "tiny-llama-Q4_K_M.gguf", "m").await;
    let ask = || request(&model, ids(5, 24 * PAGE + 9), 6);
    let (_, expected, _) = run(&engine, anew(&ask())).await;
    for _ in 0..3 {
        let (leader, first) = (engine.clone(), ask());
        let first = tokio::spawn(async move { run(&leader, first).await });
        until(&engine, "a first page", |s| s.cache.prefix_bytes > 0).await;
        let (_, found, summary) = run(&engine, ask()).await;
        assert_eq!(
            (found, first.await.unwrap().1),
            (expected.clone(), expected.clone())
        );
        assert_eq!(summary.reused_tokens as usize, 24 * PAGE);
        engine.clear(None).await.unwrap();
    }
}

/// A request whose text is drawn.
fn drawn(model: &Arc<LoadedModel>, prompt: &[u32], seed: u64) -> GenerateRequest {
    GenerateRequest {
        sampling: SamplingParams {
            seed: Some(seed),
            ..SamplingParams::default()
        },
        ..request(model, prompt.to_vec(), 12)
    }
}

/// Those who wait for one that goes away do not wait for ever.
#[tokio::test]
async fn whoever_followed_goes_on_when_the_first_is_cancelled() {
    let config = EngineConfig {
        budget: Budget::Bytes(64 << 20),
        prefill_chunk: std::num::NonZeroUsize::new(8),
        ..EngineConfig::default()
    };
    let engine = start(config).unwrap().0;
    let model = load(&engine, "tiny-llama-Q4_K_M.gguf", "m").await;
    let prompt = ids(5, 8 * PAGE + 9);
    let (_, expected, _) = run(&engine, anew(&request(&model, prompt.clone(), 6))).await;
    let clearing = engine.clone();
    for _ in 0..5 {
        let first = engine.generate(request(&model, prompt.clone(), 6)).unwrap();
        let (engine, second) = (engine.clone(), request(&model, prompt.clone(), 6));
        let second = tokio::spawn(async move { run(&engine, second).await });
        tokio::time::sleep(std::time::Duration::from_millis(3)).await;
        drop(first);
        assert_eq!(second.await.unwrap().1, expected);
        clearing.clear(None).await.unwrap();
    }
}

/// A model with two sets of divisors: keys rotated by one are nothing to a sequence of the other,
/// and each text is that of a sequence alone. One that nobody bounds has the usual ones to their
/// end, where its prompt leaves room.
#[tokio::test]
async fn short_and_long_sequences_share_nothing() {
    let engine = engine(Budget::Bytes(64 << 20));
    let model = load(&engine, "arch/phi3-longrope.gguf", "longrope").await;
    let prompt = ids(1, 40);
    // The divisors change beyond 64 positions.
    let (short, long) = (
        || request(&model, prompt.clone(), 24),
        || request(&model, prompt.clone(), 60),
    );
    let (_, short_alone, _) = run(&engine, anew(&short())).await;
    let (_, long_alone, _) = run(&engine, anew(&long())).await;
    assert!(!long_alone.starts_with(&short_alone), "{short_alone:?}");
    for turn in 0..2 {
        let reused = if turn == 0 { 0 } else { PAGE as u32 };
        let (of_long, of_short) = tokio::join!(run(&engine, long()), run(&engine, short()));
        assert_eq!(
            (of_long.1, of_long.2.reused_tokens),
            (long_alone.clone(), reused)
        );
        assert_eq!(
            (of_short.1, of_short.2.reused_tokens),
            (short_alone.clone(), reused)
        );
    }

    let unbounded = |prompt: Vec<u32>, n_ctx| GenerateRequest {
        max_tokens: None,
        n_ctx,
        ..anew(&request(&model, prompt, 1))
    };
    let (_, found, summary) = run(&engine, unbounded(prompt.clone(), None)).await;
    assert_eq!(found, short_alone);
    assert_eq!(summary.finish, FinishReason::ContextFull);
    let (_, found, _) = run(&engine, unbounded(prompt.clone(), Some(100))).await;
    assert!(found.starts_with(&long_alone), "{found:?}");
    let (_, found, _) = run(&engine, unbounded(ids(1, 49), None)).await;
    assert!(found.len() > 64 - 49, "{found:?}");
}
