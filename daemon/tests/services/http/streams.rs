//! Streams and connections: many at once, and the end of the daemon.

use std::time::Duration;

use rocmforged::End;
use serde_json::json;
use tokio::net::UnixStream;

use crate::http::client::{HttpDaemon, LLAMA, send, unix, whole};

/// Far longer than any answer takes.
const PATIENCE: Duration = Duration::from_secs(120);

/// Nearly evenly drawn tokens up to the end of the context.
fn endless() -> String {
    json!({
        "model": LLAMA, "prompt": "Once upon a time", "temperature": 1000, "top_k": 0, "top_p": 1, "min_p": 0,
        "seed": 7, "stream": true,
    })
    .to_string()
}

#[tokio::test]
async fn many_streams_and_idle_connections_are_served_at_once() {
    let http = HttpDaemon::start().await;
    let mut idle = Vec::new();
    for _ in 0..100 {
        idle.push(UnixStream::connect(http.path()).await.unwrap());
    }
    let body = json!({
        "model": LLAMA, "messages": [{"role": "user", "content": "42 - 30 = ?"}], "temperature": 0, "stream": true,
    })
    .to_string();
    let path = http.path();
    // As many as one client may have waiting.
    let asked = (0..14).map(|_| {
        let (path, body) = (path.clone(), body.clone());
        tokio::spawn(async move { unix(&path, "POST", "/v1/chat/completions", &[], &body).await })
    });
    let asked: Vec<_> = asked.collect();
    for answer in asked {
        let reply = tokio::time::timeout(PATIENCE, answer)
            .await
            .unwrap()
            .unwrap();
        assert_eq!(reply.status, 200, "{reply:?}");
        assert!(reply.text.ends_with("data: [DONE]\n\n"), "{}", reply.text);
    }
    drop(idle);
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn a_daemon_that_ends_lets_streams_end_and_takes_no_more() {
    let http = HttpDaemon::start().await;
    let stream = UnixStream::connect(http.path()).await.unwrap();
    let response = send(stream, "POST", "/v1/completions", &[], &endless()).await;
    http.daemon.stops.send(()).await.unwrap();
    let draining = async {
        loop {
            let health = http.get("/health").await;
            if health.status == 503 {
                return health;
            }
        }
    };
    let health = tokio::time::timeout(PATIENCE, draining).await.unwrap();
    assert!(health.headers.contains_key("retry-after"));
    let refused = unix(&http.path(), "POST", "/v1/completions", &[], &endless()).await;
    assert_eq!(refused.status, 503, "{refused:?}");
    let ended = tokio::time::timeout(PATIENCE, whole(response))
        .await
        .unwrap();
    assert!(ended.text.ends_with("data: [DONE]\n\n"), "{}", ended.text);
    assert_eq!(http.daemon.served.await.unwrap().unwrap(), End::Drained);
}
