//! Room that one client's texts have taken, and another's request: it waits for no text's end, and
//! those who gave it their room have the text that they have alone.

use std::sync::Arc;

use crate::requests::{engine, greedy, load_endless, run, until};
use rocmforge_engine::api::{Asker, Budget, GenerateRequest, Snapshot};
use rocmforge_engine::{EngineHandle, LoadedModel};
use tokio::task::JoinHandle;

const TEXTS: usize = 5;
/// Tokens of a long text. It takes a second or two beside three others.
const LONG: u32 = 900;

fn request(
    model: &Arc<LoadedModel>,
    client: u64,
    prompt: Vec<u32>,
    tokens: u32,
) -> GenerateRequest {
    GenerateRequest {
        asker: Asker {
            client,
            ..Asker::default()
        },
        ..greedy(model, prompt, tokens)
    }
}

/// A long text of one client.
fn long(model: &Arc<LoadedModel>, n: u32) -> GenerateRequest {
    request(model, 1, vec![20 + n, 9, 17], LONG)
}

fn spawn(engine: &EngineHandle, request: GenerateRequest) -> JoinHandle<Vec<u32>> {
    let engine = engine.clone();
    tokio::spawn(async move { run(&engine, request).await.1 })
}

/// An engine whose budget holds four of five long texts, and these texts under way.
async fn with_four_texts() -> (EngineHandle, Arc<LoadedModel>, Vec<JoinHandle<Vec<u32>>>) {
    // One takes 2.72 MiB.
    for budget in (11 << 20..15 << 20).step_by(128 << 10) {
        let engine = engine(Budget::Bytes(budget));
        let model = load_endless(&engine, "model").await;
        let texts: Vec<_> = (0..TEXTS as u32)
            .map(|n| spawn(&engine, long(&model, n)))
            .collect();
        let all_came = |s: &Snapshot| (s.running + s.queued) as usize == TEXTS && s.running > 0;
        let begun = until(&engine, "the texts", all_came).await;
        if begun.running as usize == TEXTS - 1 {
            return (engine, model, texts);
        }
        texts.iter().for_each(JoinHandle::abort);
    }
    panic!("no budget holds four of five");
}

#[tokio::test]
async fn a_client_with_less_waits_for_no_end_of_the_text_of_another() {
    let (engine, model, texts) = with_four_texts().await;
    for n in 0..3 {
        // More than what the four have left.
        let prompt = (0..250).map(|i| 5 + (n + i * 31) % 200).collect();
        let (_, ids, _) = run(&engine, request(&model, 2, prompt, 4)).await;
        assert_eq!(ids.len(), 4);
        let ended = texts.iter().filter(|text| text.is_finished()).count();
        assert_eq!(ended, 0, "it came behind the end of a text");
    }
    let roomy = self::engine(Budget::Bytes(64 << 20));
    let model = load_endless(&roomy, "model").await;
    for (n, text) in (0..).zip(texts) {
        let (_, expected, _) = run(&roomy, long(&model, n)).await;
        assert_eq!(text.await.unwrap(), expected, "text {n}");
    }
}
