//! Clients that are slow, that go away, and that come in crowds.

use std::time::{Duration, Instant};

use futures_util::StreamExt;
use hyper_util::rt::TokioIo;
use rocmforge_client::Client;
use rocmforge_client::proto::v1::generate_event::Event;
use rocmforge_client::proto::v1::inference_client::InferenceClient;
use rocmforge_tests::daemon::{Daemon, Options};
use rocmforge_tests::fixtures::{self, TINY_LLAMA};
use rocmforge_tests::session::{
    Answer, HANG, ask, assert_works, connect, continuation, generate, greedy, in_time, is_right,
    load, noise,
};
use tokio::net::UnixStream;
use tonic::transport::Endpoint;

/// Clients that go away in mid-stream.
const DISCONNECTS: usize = 200;

/// How many of them are there at once: below what the daemon's queue takes.
const AT_ONCE: usize = 40;

/// Bytes that the slow client lets the daemon send before it reads; a token takes about twenty.
const SLOW_WINDOW_BYTES: u32 = 256;

/// Noise that goes on long enough to fill every buffer on the way to a client that does not read.
async fn long_noise(client: &Client) -> (u64, Answer) {
    for seed in 1..=64 {
        let answer = generate(
            client,
            continuation(TINY_LLAMA, "Once upon a time", noise(1000, seed)),
        )
        .await;
        let answer = answer.expect("noise is generated");
        if answer.done.generated_tokens >= 600 {
            return (seed, answer);
        }
    }
    panic!("no seed of 64 gives 600 tokens");
}

/// One who does not read holds up nobody, and loses nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_client_holds_up_only_itself() {
    let daemon = Daemon::start(&Options::default());
    let client = connect(&daemon).await;
    load(&client, TINY_LLAMA).await;
    let (seed, expected) = long_noise(&client).await;

    let socket = daemon.socket();
    let connector = tower::service_fn(move |_| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    let channel = Endpoint::from_static("http://rocmforged")
        .initial_stream_window_size(SLOW_WINDOW_BYTES)
        .connect_with_connector(connector)
        .await
        .expect("a second connection");
    let request = continuation(TINY_LLAMA, "Once upon a time", noise(1000, seed));
    let mut slow = InferenceClient::new(channel)
        .generate(request)
        .await
        .expect("a stream")
        .into_inner();

    for asked in fixtures::exam().iter().take(20) {
        let answer = ask(&client, TINY_LLAMA, asked).await;
        assert!(
            is_right(asked, &answer),
            "{:?} to {:?}",
            answer.text,
            asked.prompt
        );
    }
    let status = client.status().await.expect("Status never fails");
    assert_eq!(
        status.running, 1,
        "the slow one still waits for its reader: {status:?}"
    );

    let (mut text, mut ended) = (String::new(), false);
    in_time("the slow stream", async {
        while let Some(event) = slow.next().await {
            match event.expect("being slow is no error").event {
                Some(Event::Piece(piece)) => text.push_str(&piece.text),
                Some(Event::Done(_)) => ended = true,
                None => {}
            }
        }
    })
    .await;
    assert!(ended, "the slow stream has its outcome");
    assert_eq!(
        text, expected.text,
        "the same seed gives the same text, however slowly it is read"
    );
    daemon.stop();
}

/// Their requests end, and nothing of them stays: no sequence, no page, no descriptor.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_disconnect_leave_nothing_behind() {
    let daemon = Daemon::start(&Options::default());
    let client = connect(&daemon).await;
    load(&client, TINY_LLAMA).await;
    assert_works(&client).await;
    let before = (daemon.open_descriptors(), daemon.memory_bytes());
    let kv_before = client
        .cache_stats()
        .await
        .expect("stats")
        .total
        .expect("a total")
        .kv_bytes;

    let one = |n: usize| {
        let daemon = &daemon;
        async move {
            let client = connect(daemon).await;
            let sampling = noise(2000, n as u64);
            let request = continuation(TINY_LLAMA, "Once upon a time", sampling);
            let mut events = client.generate(request).await.expect("the queue has room");
            // Some leave before the first token, some after a few.
            for _ in 0..n % 4 {
                events.next().await;
            }
        }
    };
    let crowd = futures_util::stream::iter((0..DISCONNECTS).map(one)).buffer_unordered(AT_ONCE);
    in_time("the crowd", crowd.count()).await;

    let start = Instant::now();
    loop {
        let status = client.status().await.expect("Status never fails");
        let stats = client.cache_stats().await.expect("Stats never fails");
        let kv = stats.total.expect("a total").kv_bytes;
        let descriptors = daemon.open_descriptors();
        if status.running == 0
            && status.queue_depth == 0
            && kv <= kv_before
            && descriptors <= before.0
        {
            break;
        }
        assert!(
            start.elapsed() < HANG,
            "left behind: {} running, {} queued, {kv} bytes of KV, {descriptors} descriptors of {}",
            status.running,
            status.queue_depth,
            before.0
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // Allocators keep pages; two hundred leaked requests would keep far more.
    let grown = daemon.memory_bytes().saturating_sub(before.1);
    assert!(grown < 64 << 20, "{grown} bytes more than before");
    assert_works(&client).await;
    daemon.stop();
}

/// Requests are interleaved: a short one that comes after a long one ends before it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_request_does_not_starve_a_short_one() {
    let daemon = Daemon::start(&Options::default());
    let client = connect(&daemon).await;
    load(&client, TINY_LLAMA).await;
    let (seed, _) = long_noise(&client).await;
    let mut long = client
        .generate(continuation(
            TINY_LLAMA,
            "Once upon a time",
            noise(1000, seed),
        ))
        .await
        .expect("a stream");
    long.next().await.expect("an event").expect("a piece");
    let second = connect(&daemon).await;
    let long = tokio::spawn(async move {
        let mut events = 0_usize;
        while let Some(event) = long.next().await {
            event.expect("no error");
            events += 1;
        }
        (events, Instant::now())
    });
    let short = generate(
        &second,
        continuation(TINY_LLAMA, "Once upon a time", greedy(8)),
    )
    .await;
    let short_ended = Instant::now();
    assert_eq!(short.expect("a short text").done.generated_tokens, 8);
    let (events, long_ended) = in_time("the long request", long)
        .await
        .expect("it ends well");
    assert!(events > 0);
    assert!(
        short_ended < long_ended,
        "eight tokens waited for six hundred"
    );
    daemon.stop();
}
