//! One request that fills the room for KV cache, and others that have none of it.

use std::sync::Arc;
use std::time::Duration;

use rocmforge_engine::api::{Budget, GenerateEvent, GenerateRequest, Snapshot};
use rocmforge_engine::{EngineConfig, LoadedModel, start};

use crate::requests::{engine, greedy, load, load_endless, run, until};

/// Positions of the request that fills the room.
const LARGE: u32 = 3_900;

fn large(model: &Arc<LoadedModel>) -> GenerateRequest {
    GenerateRequest {
        reuse: true,
        ..greedy(model, (10..110).collect(), LARGE - 100)
    }
}

/// Small requests of another model come one after another. They have their turns before the large
/// one has come to its end, which goes on behind each of them with the text that it has alone.
#[tokio::test]
async fn a_request_that_fills_the_room_gives_it_to_others_for_a_while() {
    let roomy = engine(Budget::Bytes(64 << 20));
    let expected = run(&roomy, large(&load_endless(&roomy, "m").await)).await.1;
    assert_eq!(expected.len() as u32, LARGE - 100);
    let tight = start(EngineConfig {
        budget: Budget::Bytes(64 << 20),
        term: Some(Duration::from_millis(20)),
        ..EngineConfig::default()
    })
    .unwrap()
    .0;
    let model = load_endless(&tight, "m").await;
    let other = load(&tight, "tiny-qwen3-Q8_0.gguf", "other").await;
    // The least budget, to 64 KiB, in which the large one is taken.
    let mut budget = 1 << 20;
    let mut events = loop {
        tight.set_budget(Budget::Bytes(budget)).await.unwrap();
        let mut events = tight.generate(large(&model)).unwrap();
        match events.next().await.unwrap() {
            GenerateEvent::Piece { ids, .. } => break (ids, events),
            GenerateEvent::Failed(_) => budget += 64 << 10,
            GenerateEvent::Done(_) => panic!("no text"),
        }
    };
    let text = tokio::spawn(async move {
        let mut ids = std::mem::take(&mut events.0);
        while let Some(event) = events.1.next().await {
            match event {
                GenerateEvent::Piece { ids: new, .. } => ids.extend(new),
                GenerateEvent::Done(_) => return ids,
                GenerateEvent::Failed(error) => panic!("{error}"),
            }
        }
        panic!("no end");
    });
    for turn in 0..3 {
        let question: Vec<u32> = (20..120 + turn).collect();
        let summary = run(&tight, greedy(&other, question, 40)).await.2;
        assert!(summary.generated_tokens > 0);
        // Later ones wait as long as it takes the large one to come back, some times over.
        let waits = turn > 0 || !text.is_finished();
        assert!(waits, "it waited for the end of the large one");
        let returns = |s: &Snapshot| s.running == 1 || text.is_finished();
        until(&tight, "the return of the large one", returns).await;
    }
    assert_eq!(text.await.unwrap(), expected);
}
