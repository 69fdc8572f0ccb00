//! What runs, as `/ui/live`, `/slots` and gRPC show it: under one number, and to its client alone.

use std::time::Duration;

use rocmforge_proto::v1;
use rocmforged::End;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};

use crate::http::client::{HttpDaemon, LLAMA, piece, send, tcp, unix};

/// A stream of what the page shows.
struct Live(hyper::Response<hyper::body::Incoming>, String);

impl Live {
    async fn follow(http: &HttpDaemon) -> Live {
        Self::over(UnixStream::connect(http.path()).await.unwrap()).await
    }

    async fn over(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> Live {
        let response = send(stream, "GET", "/ui/live", &[], "").await;
        assert_eq!(response.status(), 200);
        Live(response, String::new())
    }

    /// The next event that has this part, if the part is so. Signs of life do not count.
    async fn until(&mut self, part: &str, is_so: impl Fn(&Value) -> bool) -> Value {
        let next = self.next(part, is_so);
        let next = tokio::time::timeout(Duration::from_secs(60), next).await;
        next.unwrap_or_else(|_| panic!("{part} is not sent"))
    }

    async fn next(&mut self, part: &str, is_so: impl Fn(&Value) -> bool) -> Value {
        loop {
            while let Some((event, rest)) = self.1.split_once("\n\n") {
                let data = event.strip_prefix("data: ");
                let event = data.map(|data| serde_json::from_str::<Value>(data).unwrap());
                self.1 = rest.to_owned();
                match event {
                    Some(event) if event.get(part).is_some_and(&is_so) => return event,
                    _ => {}
                }
            }
            let next = piece(self.0.body_mut()).await;
            let next = next.expect("the stream goes on");
            self.1 += &String::from_utf8_lossy(&next);
        }
    }
}

#[tokio::test]
async fn the_page_is_told_what_is_resident_and_runs_as_it_changes() {
    let http = HttpDaemon::start().await;
    let mut live = Live::follow(&http).await;
    let first = live.until("models", |_| true).await;
    assert_eq!(first["models"], json!({"maps": [], "left_out": 0}));
    assert_eq!(
        (&first["requests"], &first["ended"]),
        (&json!([]), &json!(0))
    );
    assert_eq!(first["memory"]["weight_bytes"], 0);
    let chat = format!(
        "{{\"model\":\"{LLAMA}\",\"max_tokens\":1,\"messages\":[{{\"role\":\"user\",\"content\":\"hi\"}}]}}"
    );
    let answer = unix(&http.path(), "POST", "/v1/chat/completions", &[], &chat).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    // Six layers of three parts, and the output head.
    let all = "#".repeat(6 * 3 + 1);
    let is_there = |models: &Value| models["maps"][0]["segments"] == *all;
    let shown = live.until("models", is_there).await;
    assert_eq!(shown["models"]["maps"][0]["model"], LLAMA);
    assert!(shown["models"]["maps"][0]["resident_bytes"].as_u64() > Some(0));
    // A second stream has all parts at once, though nothing changes.
    let mut second = Live::follow(&http).await;
    let whole = second.until("ended", |ended| *ended == 1).await;
    assert_eq!(whole["models"], shown["models"]);
    assert!(whole["memory"]["weight_bytes"].as_u64() > Some(0));
    // One that ends without the engine, which publishes nothing then.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let body = json!({"model": LLAMA, "input": "a ".repeat(20_000)}).to_string();
    let refused = unix(&http.path(), "POST", "/v1/embeddings", &[], &body).await;
    assert_eq!(refused.status, 400, "{refused:?}");
    live.until("ended", |ended| *ended == 2).await;
    let body = format!("{{\"model\":\"{LLAMA}\"}}");
    let unloaded = unix(&http.path(), "POST", "/models/unload", &[], &body).await;
    assert_eq!(unloaded.status, 200, "{unloaded:?}");
    let is_empty = |models: &Value| *models == json!({"maps": [], "left_out": 0});
    let gone = live.until("models", is_empty).await;
    assert!(gone["loaded"].as_u64() > Some(0), "{gone}");
    drop((live, second));
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn a_request_has_one_number_wherever_it_is_shown() {
    let http = HttpDaemon::start().await;
    let first = json!({"model": LLAMA, "prompt": "Once", "max_tokens": 1}).to_string();
    unix(&http.path(), "POST", "/v1/completions", &[], &first).await;
    let mut own = Live::follow(&http).await;
    let mut others = Live::over(TcpStream::connect(http.tcp).await.unwrap()).await;
    // Nobody reads it, so that it runs on.
    let endless = json!({
        "model": LLAMA, "prompt": "Once upon a time", "temperature": 0, "ignore_eos": true, "stream": true,
        "max_tokens": 3000,
    });
    let stream = UnixStream::connect(http.path()).await.unwrap();
    let answer = send(stream, "POST", "/v1/completions", &[], &endless.to_string()).await;
    let runs = |requests: &Value| requests[0]["generated_tokens"].as_u64() > Some(1);
    let shown = own.until("requests", runs).await["requests"][0].clone();
    let user = format!("user:{}", nix::unistd::getuid());
    assert_eq!(
        (&shown["number"], &shown["client"]),
        (&json!(2), &json!(user))
    );
    assert!(shown["longest_gap_cause"].is_string(), "{shown}");
    let mut server = http.daemon.server();
    let status = server.status(v1::StatusRequest {}).await.unwrap();
    let live = &status.into_inner().requests[0];
    assert_eq!((live.number, &*live.model), (2, LLAMA));
    let slots = http.get("/slots").await.json();
    assert_eq!(
        (&slots[0]["id_task"], &slots[0]["model"]),
        (&json!(2), &json!(LLAMA))
    );
    assert!(
        slots[0]["next_token"][0]["n_decoded"].as_u64() > Some(1),
        "{slots}"
    );
    // Another client is shown that something runs, and no more.
    let of_others = tcp(http.tcp, "GET", "/slots", &[], "").await.json();
    assert_eq!(of_others[0]["is_processing"], true);
    assert_eq!(of_others[0].get("id_task"), None);
    let running = |memory: &Value| memory["running"] == 1;
    let told = others.until("memory", running).await;
    assert!(
        told.get("requests")
            .is_none_or(|requests| *requests == json!([])),
        "{told}"
    );
    drop(answer);
    own.until("ended", |ended| *ended == 2).await;
    let why = http.get("/why?request=2").await.json();
    assert_eq!(why["requests"][0]["code"], "Cancelled");
    assert!(
        why["requests"][0]["tokens_per_s"].as_f64() > Some(0.0),
        "{why}"
    );
    drop((own, others));
    assert_eq!(http.stop().await, End::Drained);
}
