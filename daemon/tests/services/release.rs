//! Memory that is given back by a call until the next request.

use rocmforge_proto::v1;
use tonic::Code;
use tonic_types::StatusExt;

use crate::daemon::{Daemon, assert_status, endless, greedy};

const BUDGET: u64 = 64 << 20;

async fn release(daemon: &Daemon, host: bool) -> v1::ReleaseResponse {
    let request = v1::ReleaseRequest { host };
    daemon.cache().release(request).await.unwrap().into_inner()
}

/// The budget that comes back, and the one in force.
async fn budgets(daemon: &Daemon) -> (Option<u64>, u64) {
    let status = daemon.server().status(v1::StatusRequest {}).await.unwrap();
    let status = status.into_inner();
    let stats = daemon.cache().stats(v1::StatsRequest {}).await.unwrap();
    (
        status.released_budget_bytes,
        stats.into_inner().budget_bytes,
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn a_released_daemon_answers_the_next_request_as_before() {
    let daemon = Daemon::start().await;
    daemon.load("tiny-llama-Q4_K_M.gguf", "m").await.unwrap();
    let other = daemon.load("tiny-qwen3-Q8_0.gguf", "other").await.unwrap();
    let ask = || daemon.generate(greedy("m", "Once upon a time", 12));
    let (expected, done) = ask().await.unwrap();
    assert!(done.generated_tokens > 0);
    assert_eq!(budgets(&daemon).await, (None, BUDGET));

    let released = release(&daemon, false).await;
    assert!(released.freed_bytes > 0, "{released:?}");
    assert_eq!((released.kept_bytes, released.budget_bytes), (0, BUDGET));
    assert_eq!(released.host_freed_bytes, 0);
    let (comes_back, left) = budgets(&daemon).await;
    assert_eq!(comes_back, Some(BUDGET));
    assert!(left < BUDGET / 100, "{left}");
    // Twice is once.
    let again = release(&daemon, true).await;
    assert_eq!((again.freed_bytes, again.budget_bytes), (0, BUDGET));

    let (text, _) = ask().await.unwrap();
    assert_eq!(text, expected);
    assert_eq!(budgets(&daemon).await, (None, BUDGET));

    // What is pinned and resident stays.
    let request = v1::PinRequest {
        name: other.name.clone(),
        ..Default::default()
    };
    let pinned = daemon.models().pin(request).await.unwrap().into_inner();
    daemon
        .generate(greedy(&other.name, "Once", 2))
        .await
        .unwrap();
    let released = release(&daemon, false).await;
    assert_eq!(released.kept_bytes, pinned.pinned_bytes);
    assert_eq!(ask().await.unwrap().0, expected);
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_of_running_requests_is_not_released() {
    let daemon = Daemon::start().await;
    daemon.load("tiny-llama-Q4_K_M.gguf", "m").await.unwrap();
    let running = daemon.inference().generate(endless("m", 1)).await.unwrap();
    let mut running = running.into_inner();
    running.message().await.unwrap();
    let refused = daemon.cache().release(v1::ReleaseRequest::default()).await;
    let status = assert_status(
        refused,
        Code::FailedPrecondition,
        &["there are 1", "cache budget"],
    );
    let details = status.get_error_details();
    assert_eq!(details.error_info().unwrap().reason, "IN_USE");
    assert!(running.message().await.unwrap().is_some(), "it goes on");
    assert_eq!(budgets(&daemon).await, (None, BUDGET));
    drop(running);
    daemon.stop().await;
}
