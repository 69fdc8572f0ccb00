//! Requests that wait or run, as snapshots show them.

use std::num::NonZeroUsize;

use rocmforge_engine::api::times::TimesSlot;
use rocmforge_engine::api::{Asker, Budget, EVENT_CAPACITY, GenerateRequest, LiveState, Snapshot};
use rocmforge_engine::{EngineConfig, start};

use crate::requests::{greedy, load_endless, until};

#[tokio::test]
async fn requests_are_shown_with_their_tokens_and_what_they_wait_for() {
    let engine = start(EngineConfig {
        budget: Budget::Bytes(64 << 20),
        max_sequences: NonZeroUsize::MIN,
        ..EngineConfig::default()
    })
    .unwrap()
    .0;
    let model = load_endless(&engine, "m").await;
    assert!(engine.snapshot().requests.is_empty());
    // A client's request has the client's number and ten more.
    let of = |client, request: GenerateRequest| {
        let asker = Asker {
            client,
            ..request.asker
        };
        let slot = TimesSlot::numbered(client + 10);
        let request = GenerateRequest { asker, ..request };
        engine.generate_timed(request, Vec::new(), Some(slot))
    };
    let mut first = of(7, greedy(&model, vec![5, 6, 7], 100_000)).unwrap();
    let waits_for_reader = |s: &Snapshot| {
        let first = s.requests.first();
        first.is_some_and(|first| first.state == LiveState::Reader)
    };
    until(&engine, "a reader who does not read", waits_for_reader).await;
    let before = engine.snapshot().requests[0].clone();
    assert!(before.generated_tokens <= EVENT_CAPACITY as u32);
    let reads = tokio::spawn(async move { while first.next().await.is_some() {} });
    let decodes = |s: &Snapshot| {
        let first = s.requests.first();
        first.is_some_and(|first| first.state == LiveState::Decode)
    };
    until(&engine, "a reader who reads", decodes).await;
    let second = of(8, greedy(&model, vec![5, 6], 1)).unwrap();
    let both = until(&engine, "both", |s| s.requests.len() == 2).await;
    let shown = &both.requests;
    assert_eq!((shown[0].client, shown[1].client), (7, 8));
    assert_eq!((shown[0].number, shown[1].number), (17, 18));
    assert_eq!(shown[0].model.name(), "m");
    assert_eq!((shown[0].prompt_tokens, shown[1].prompt_tokens), (3, 2));
    let generated = shown[0].generated_tokens;
    assert!(generated >= before.generated_tokens.max(2));
    assert!(shown[0].computed_tokens >= generated + 2);
    assert!(shown[0].tokens_per_s.is_some_and(|rate| rate > 0.0));
    assert!(shown[0].longest_gap.is_some());
    assert_eq!(shown[1].state, LiveState::Queued);
    assert_eq!(
        (shown[1].generated_tokens, shown[1].tokens_per_s),
        (0, None)
    );
    drop(second);
    until(&engine, "one", |s| s.requests.len() <= 1).await;
    reads.abort();
    until(&engine, "none", |s| s.requests.is_empty()).await;
}
