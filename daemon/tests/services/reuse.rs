//! What a client sees of prompts that begin like earlier ones.

use rocmforge_proto::v1;
use rocmforged::End;
use serde_json::json;

use crate::daemon::{Daemon, greedy};
use crate::http::client::HttpDaemon;

/// Longer than two pages of tokens.
fn story() -> String {
    "There was a proud whale named Omar. One morning Omar found a golden coin in the village. "
        .repeat(4)
}

async fn ask(daemon: &Daemon, reuse_prompt: Option<bool>) -> (String, v1::GenerateDone) {
    let request = v1::GenerateRequest {
        reuse_prompt,
        ..greedy("m", &story(), 8)
    };
    daemon.generate(request).await.unwrap()
}

#[tokio::test]
async fn a_prompt_that_was_computed_is_not_computed_again_unless_the_client_wants_it() {
    let daemon = Daemon::start().await;
    daemon.load("tiny-llama-Q4_K_M.gguf", "m").await.unwrap();
    let (text, first) = ask(&daemon, None).await;
    assert_eq!(first.reused_tokens, 0);
    let stats = daemon.cache().stats(v1::StatsRequest {}).await.unwrap();
    let total = stats.into_inner().total.unwrap();
    assert!(total.prefix_bytes > 0 && total.kv_bytes == 0, "{total:?}");

    let (again, second) = ask(&daemon, Some(true)).await;
    assert_eq!(again, text);
    assert_eq!(second.reused_tokens, (second.prompt_tokens - 1) / 32 * 32);
    let (anew, third) = ask(&daemon, Some(false)).await;
    assert_eq!((anew, third.reused_tokens), (text, 0));

    let mut cache = daemon.cache();
    let cleared = cache.clear(v1::ClearRequest::default()).await.unwrap();
    assert!(cleared.into_inner().freed_bytes > total.prefix_bytes);
    let stats = cache.stats(v1::StatsRequest {}).await.unwrap().into_inner();
    assert_eq!(stats.total.unwrap().prefix_bytes, 0);
    assert_eq!(ask(&daemon, None).await.1.reused_tokens, 0);
    assert_eq!(daemon.stop().await, End::Drained);
}

#[tokio::test]
async fn applications_are_told_how_much_of_a_prompt_was_cached() {
    let http = HttpDaemon::start().await;
    let asked = json!({
        "model": "tiny-llama-Q4_K_M",
        "messages": [{"role": "user", "content": story()}],
        "max_tokens": 4,
        "temperature": 0,
    });
    let mut cached = Vec::new();
    for _ in 0..2 {
        let reply = http.post("/v1/chat/completions", &asked).await;
        assert_eq!(reply.status, 200, "{reply:?}");
        let usage = reply.json()["usage"].clone();
        let prompt = usage["prompt_tokens"].as_u64().unwrap();
        let details = &usage["prompt_tokens_details"];
        cached.push((prompt, details["cached_tokens"].as_u64().unwrap()));
    }
    assert_eq!(cached[0].1, 0);
    assert_eq!(cached[1].1, (cached[1].0 - 1) / 32 * 32);
    let mut anew = asked.clone();
    anew["cache_prompt"] = json!(false);
    let usage = http.post("/v1/chat/completions", &anew).await.json()["usage"].clone();
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0);
    let metrics = http.get("/metrics").await.text;
    for line in [
        format!("vllm:prefix_cache_queries_total {}", 2 * cached[0].0),
        format!("vllm:prefix_cache_hits_total {}", cached[1].1),
    ] {
        assert!(metrics.contains(&line), "{line}: {metrics}");
    }
    assert_eq!(http.stop().await, End::Drained);
}
