//! What clients may make the daemon hold: connections, bodies, replies, streams that nobody reads.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::Frame;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rocmforge_proto::v1;
use rocmforge_proto::v1::inference_client::InferenceClient;
use rocmforge_test_scripts::is_whole_sweep;
use rocmforged::End;
use serde_json::json;
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tonic::body::Body;
use tonic::codegen::http::request::Builder;
use tonic::{Code, Status, Streaming};
use tonic_types::StatusExt;

use crate::daemon::{Daemon, assert_status, connect, endless, greedy};
use crate::http::client::{HttpDaemon, LLAMA, send, whole};

/// Far longer than any answer takes.
const PATIENCE: Duration = Duration::from_secs(120);

async fn status(daemon: &Daemon) -> v1::StatusResponse {
    let mut server = daemon.server();
    let answer = tokio::time::timeout(PATIENCE, server.status(v1::StatusRequest {})).await;
    answer
        .expect("the daemon answers")
        .expect("with its status")
        .into_inner()
}

#[tokio::test]
async fn sockets_that_never_send_a_byte_lock_nobody_out_and_are_closed() {
    let daemon = Daemon::start().await;
    let path = daemon.dir.path().join("s");
    // More than the daemon takes of one user, whatever its limit of open files.
    let (files, _) =
        nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE).unwrap();
    let most = (files as usize / 4).min(rocmforged::CONNECTIONS_MAX);
    let mut silent = Vec::new();
    for _ in 0..most {
        match tokio::time::timeout(PATIENCE, UnixStream::connect(&path)).await {
            Ok(stream) => silent.push(stream.unwrap()),
            Err(_) => panic!("the daemon accepts no more after {}", silent.len()),
        }
    }
    let fresh = connect(path, 1 << 20).await;
    let mut server = v1::server_client::ServerClient::new(fresh);
    let answer = tokio::time::timeout(PATIENCE, server.status(v1::StatusRequest {})).await;
    answer.expect("the daemon answers").unwrap();

    // The last of them cannot have made room for another; it is closed for its silence.
    let mut last = silent.pop().unwrap();
    let mut bytes = Vec::new();
    tokio::time::timeout(PATIENCE, last.read_to_end(&mut bytes))
        .await
        .expect("a silent connection is closed")
        .unwrap();
    drop((silent, last, server));
    assert_eq!(daemon.stop().await, End::Drained);
}

/// A body that has begun and never ends.
struct Unfinished(Option<Bytes>);

impl http_body::Body for Unfinished {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        match self.0.take() {
            Some(bytes) => Poll::Ready(Some(Ok(Frame::data(bytes)))),
            None => Poll::Pending,
        }
    }
}

pub(crate) type Sender = http2::SendRequest<Body>;

pub(crate) async fn raw(daemon: &Daemon) -> Sender {
    let stream = UnixStream::connect(daemon.dir.path().join("s"))
        .await
        .unwrap();
    let (sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
        .await
        .unwrap();
    tokio::spawn(connection);
    sender
}

/// Sends the beginning of a request, and gives the code that it ends with.
async fn unfinished(sender: Sender, path: &str, bytes: usize) -> Code {
    let request = hyper::Request::post(format!("http://rocmforged{path}"));
    ends_with(sender, request, bytes).await.code()
}

async fn ends_with(mut sender: Sender, head: Builder, bytes: usize) -> Status {
    let request = head
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(Body::new(Unfinished(Some(vec![0; bytes].into()))))
        .unwrap();
    let response = tokio::time::timeout(PATIENCE, sender.send_request(request))
        .await
        .expect("the daemon answers")
        .unwrap();
    Status::from_header_map(response.headers()).expect("the answer is a status")
}

pub(crate) const TOKENIZE: &str = "/rocmforge.v1.Inference/Tokenize";

#[tokio::test]
async fn a_request_that_does_not_end_is_ended() {
    let daemon = Daemon::start().await;
    let code = unfinished(raw(&daemon).await, TOKENIZE, 100).await;
    assert_eq!(code, Code::DeadlineExceeded);
    assert_eq!(daemon.stop().await, End::Drained);
}

/// Nothing but the deadline ends these soon, and the server's own timer would say CANCELLED.
#[tokio::test]
async fn a_request_that_does_not_end_is_ended_at_its_deadline() {
    let daemon = Daemon::start().await;
    let sender = raw(&daemon).await;
    for timeout in ["0m", "1n", "1u", "1m", "7m", "50m"] {
        for _ in 0..8 {
            let request = hyper::Request::post(format!("http://rocmforged{TOKENIZE}"))
                .header("grpc-timeout", timeout);
            let status = ends_with(sender.clone(), request, 100).await;
            assert_eq!(
                status.code(),
                Code::DeadlineExceeded,
                "{timeout}: {status:?}"
            );
            assert!(status.message().contains("deadline"), "{status:?}");
        }
    }
    assert_eq!(daemon.stop().await, End::Drained);
}

#[tokio::test]
async fn requests_in_reading_have_a_bound_all_together() {
    let daemon = Daemon::start().await;
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..16 {
        tasks.spawn(unfinished(raw(&daemon).await, TOKENIZE, 15 << 20));
    }
    // Some do not fit beside the others, and are told at once; the others are
    // told when their time is over.
    let first = tasks.join_next().await.unwrap().unwrap();
    assert_eq!(first, Code::ResourceExhausted);
    assert_eq!(status(&daemon).await.state(), v1::ServerState::Serving);
    let mut exhausted = 1;
    while let Some(code) = tasks.join_next().await {
        match code.unwrap() {
            Code::ResourceExhausted => exhausted += 1,
            code => assert_eq!(code, Code::DeadlineExceeded),
        }
    }
    assert!(exhausted >= 8, "{exhausted} of 16 are more than 128 MiB");
    daemon.load("tiny-llama-Q4_K_M.gguf", "m").await.unwrap();
    assert_eq!(daemon.stop().await, End::Drained);
}

#[tokio::test]
async fn each_call_has_a_largest_request() {
    let daemon = Daemon::start().await;
    for (path, bytes) in [
        ("/rocmforge.v1.Models/Get", 100 << 10),
        ("/rocmforge.v1.Inference/Detokenize", 9 << 20),
        (TOKENIZE, 17 << 20),
    ] {
        let code = unfinished(raw(&daemon).await, path, bytes).await;
        assert_eq!(code, Code::InvalidArgument, "{path}");
    }
    let chat = v1::ChatRequest {
        model: "m".into(),
        messages: vec![v1::ChatMessage::default(); 1 << 20],
        ..Default::default()
    };
    let refused = daemon.inference().chat(chat).await;
    assert_status(refused, Code::InvalidArgument, &["messages", "4096"]);
    assert_eq!(daemon.stop().await, End::Drained);
}

/// Streams of the model `m` that nobody reads, more than run at once.
async fn unread(daemon: &Daemon) -> Vec<Streaming<v1::GenerateEvent>> {
    let slow = connect(daemon.dir.path().join("s"), 1).await;
    let mut unread = Vec::new();
    for seed in 1..=9 {
        let mut client = InferenceClient::new(slow.clone());
        let events = client.generate(endless("m", seed)).await.unwrap();
        unread.push(events.into_inner());
    }
    unread
}

/// How many of them were ended.
async fn ended(unread: Vec<Streaming<v1::GenerateEvent>>) -> usize {
    let mut ended = 0;
    for mut events in unread {
        let end = loop {
            match events.message().await {
                Ok(Some(_)) => {}
                Ok(None) => break None,
                Err(status) => break Some(status),
            }
        };
        if let Some(status) = end {
            assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
            let details = status.get_error_details();
            assert_eq!(details.error_info().unwrap().reason, "UNREAD");
            ended += 1;
        }
    }
    ended
}

/// Longer than a stream may be unread while others wait.
const UNREAD_FOR: Duration = Duration::from_secs(12);

#[tokio::test]
async fn streams_that_are_not_read_end_when_others_wait() {
    let daemon = Daemon::start().await;
    daemon.load("tiny-llama-Q4_K_M.gguf", "m").await.unwrap();
    let unread = unread(&daemon).await;
    let answer = daemon.generate(greedy("m", "Once upon a time", 4));
    let (text, _) = tokio::time::timeout(PATIENCE, answer)
        .await
        .expect("others get their turn")
        .unwrap();
    assert!(!text.is_empty());
    // More than run at once, so that some always wait.
    let mut read = tokio::task::JoinSet::new();
    for first in (100..1300).step_by(100) {
        let mut client = daemon.inference();
        read.spawn(async move {
            for seed in first.. {
                let events = client.generate(endless("m", seed)).await.unwrap();
                let mut events = events.into_inner();
                while events.message().await.unwrap().is_some() {}
            }
        });
    }
    tokio::time::sleep(UNREAD_FOR).await;
    read.shutdown().await;
    assert!(ended(unread).await > 0);
    assert_eq!(daemon.stop().await, End::Drained);
}

/// Each of them was a reason to end the others: one always waits, but for its own reader.
#[tokio::test]
async fn streams_that_are_not_read_do_not_end_each_other() {
    let daemon = Daemon::start().await;
    daemon.load("tiny-llama-Q4_K_M.gguf", "m").await.unwrap();
    let unread = unread(&daemon).await;
    tokio::time::sleep(UNREAD_FOR).await;
    assert_eq!(ended(unread).await, 0);
    assert_eq!(daemon.stop().await, End::Drained);
}

/// Longer than an HTTP answer may be unread.
const UNREAD_OVER_HTTP_FOR: Duration = Duration::from_secs(65);

#[tokio::test]
async fn http_streams_that_are_not_read_do_not_end_each_other() {
    // A minute of waiting. `streams_that_are_not_read_do_not_end_each_other` shows the same of
    // gRPC, and the unit tests of http/reply.rs what ends an HTTP stream that is not read.
    if !is_whole_sweep("HTTP streams that are not read for a minute") {
        return;
    }
    let http = HttpDaemon::start().await;
    let mut unread = Vec::new();
    for seed in 1..=9 {
        let body = json!({
            "model": LLAMA, "prompt": "Once upon a time", "temperature": 1000, "top_k": 0, "top_p": 1, "min_p": 0,
            "seed": seed, "logprobs": 5, "stream": true,
        });
        let stream = UnixStream::connect(http.path()).await.unwrap();
        unread.push(send(stream, "POST", "/v1/completions", &[], &body.to_string()).await);
    }
    tokio::time::sleep(UNREAD_OVER_HTTP_FOR).await;
    // All at once, so that none is unread while another one waits.
    let read = unread.into_iter().map(|reply| tokio::spawn(whole(reply)));
    for reply in read.collect::<Vec<_>>() {
        let reply = reply.await.expect("it has an end");
        let end = reply.text.len().saturating_sub(300);
        let end = reply.text.get(end..).unwrap_or_default();
        assert!(end.ends_with("data: [DONE]\n\n"), "{end}");
        assert!(!end.contains("UNREAD"), "{end}");
    }
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn many_cancellations_at_once_end_no_innocent_call() {
    let daemon = Daemon::start().await;
    daemon.load("tiny-llama-Q4_K_M.gguf", "m").await.unwrap();
    // In all fewer than the 1,024 frames for streams that it has reset after which this side, not
    // the daemon, gives the connection up.
    for _ in 0..4 {
        let mut calls = tokio::task::JoinSet::new();
        for seed in 0..200 {
            let mut client = daemon.inference();
            calls.spawn(async move {
                let call = client.generate(endless("m", seed));
                let _ = tokio::time::timeout(Duration::from_millis(1), call).await;
            });
        }
        // On the same connection.
        tokio::join!(calls.join_all(), status(&daemon));
    }
    assert_eq!(daemon.stop().await, End::Drained);
}
