//! Large replies that nobody reads: what they hold is let go, and others are served again, while
//! their sockets stay open.

use std::future::poll_fn;
use std::pin::Pin;
use std::time::{Duration, Instant};

use http_body::Body as _;
use hyper::Response;
use hyper::body::Incoming;
use prost::Message as _;
use rocmforge_proto::v1;
use rocmforged::End;
use serde_json::json;
use tokio::net::UnixStream;
use tonic::body::Body;
use tonic::{Code, Status};

use crate::bounds::{Sender, TOKENIZE, raw};
use crate::daemon::Daemon;
use crate::http::client::{HttpDaemon, LLAMA, Whole, send};

/// Longer than any reply may be unread.
const PATIENCE: Duration = Duration::from_secs(90);
/// Of a reply of about ten megabytes. More of those than there is room for are fewer than this.
const LONG_BYTES: usize = 4 << 20;
const MANY: usize = 30;

fn text(bytes: usize) -> String {
    "ab ".repeat(bytes / 3)
}

/// Reads what there is of a reply; whether it ends in the middle.
async fn breaks_off(reply: Response<Incoming>) -> bool {
    let mut body = reply.into_body();
    let read = async {
        loop {
            match poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
                Some(Ok(_)) => {}
                Some(Err(_)) => return true,
                None => return false,
            }
        }
    };
    let read = tokio::time::timeout(PATIENCE, read).await;
    read.expect("what is left of it is there")
}

async fn tokenize(sender: &mut Sender, bytes: usize) -> Response<Incoming> {
    let request = v1::TokenizeRequest {
        model: "m".into(),
        text: text(bytes),
        ..Default::default()
    };
    let message = request.encode_to_vec();
    let mut body = vec![0];
    body.extend((message.len() as u32).to_be_bytes());
    body.extend(message);
    let request = hyper::Request::post(format!("http://rocmforged{TOKENIZE}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(Body::new(Whole(Some(body.into()))))
        .unwrap();
    sender.send_request(request).await.unwrap()
}

/// The status of a call that is refused.
fn refusal(response: &Response<Incoming>) -> Option<Code> {
    Status::from_header_map(response.headers()).map(|status| status.code())
}

#[tokio::test]
async fn replies_that_are_not_read_make_room_while_their_connections_stay() {
    let daemon = Daemon::start().await;
    daemon.load("tiny-llama-Q4_K_M.gguf", "m").await.unwrap();
    let mut unread = Vec::new();
    loop {
        assert!(unread.len() < MANY, "replies have no bound all together");
        let mut sender = raw(&daemon).await;
        let reply = tokenize(&mut sender, LONG_BYTES).await;
        if let Some(code) = refusal(&reply) {
            assert_eq!(code, Code::ResourceExhausted);
            break;
        }
        unread.push((sender, reply));
    }
    let begun = Instant::now();
    let mut sender = raw(&daemon).await;
    while let Some(code) = refusal(&tokenize(&mut sender, 3).await) {
        assert_eq!(code, Code::ResourceExhausted);
        assert!(begun.elapsed() < PATIENCE, "they hold their room for good");
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    // Which of them made room is not said.
    let mut broken_off = false;
    for (_open, reply) in unread {
        broken_off |= breaks_off(reply).await;
    }
    assert!(broken_off, "no part passes for all");
    assert_eq!(daemon.stop().await, End::Drained);
}

#[tokio::test]
async fn http_answers_that_are_not_read_have_a_bound_and_make_room() {
    let http = HttpDaemon::start().await;
    let body = json!({"model": LLAMA, "content": text(LONG_BYTES)}).to_string();
    let mut unread = Vec::new();
    while http.get("/v1/models").await.status == 200 {
        assert!(unread.len() < MANY, "answers have no bound all together");
        let stream = UnixStream::connect(http.path()).await.unwrap();
        let reply = send(stream, "POST", "/tokenize", &[], &body).await;
        assert_eq!(reply.status(), 200);
        unread.push(reply);
    }
    let refused = http.get("/v1/models").await;
    assert_eq!(refused.status, 429, "{refused:?}");
    assert_eq!(http.get("/health").await.status, 200);
    let begun = Instant::now();
    while http.get("/v1/models").await.status != 200 {
        assert!(begun.elapsed() < PATIENCE, "they hold their room for good");
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    let mut broken_off = false;
    for reply in unread {
        broken_off |= breaks_off(reply).await;
    }
    assert!(broken_off, "no part passes for all");
    assert_eq!(http.stop().await, End::Drained);
}
