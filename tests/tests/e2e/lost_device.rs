//! A daemon whose device fails: on a fake HIP runtime that faults, hangs or refuses
//! memory when it is told to.

use std::path::Path;

use hyper_util::rt::TokioIo;
use rocmforge_client::{Code, Error};
use rocmforge_fake_hip::{Fake, HANG};
use rocmforge_tests::daemon::{Daemon, Options};
use rocmforge_tests::fixtures::{self, TINY_LLAMA};
use rocmforge_tests::session::{
    ask, collect, connect, continuation, greedy, in_time, is_right, load, noise,
};
use tokio::net::UnixStream;
use tonic::transport::Endpoint;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

const LAUNCH_FAILURE: u32 = 719;
const OUT_OF_MEMORY: u32 = 2;

/// A daemon on a fake card that fails as `order` says.
fn options(fake: &Fake, order: &str) -> Options {
    Options::on_device("hip")
        .env("ROCMFORGE_HIP_LIBRARY", fake.path())
        .env("ROCMFORGE_KERNELS", fake.images())
        .env("FAKE_HIP_FAIL", order)
        .vram_budget(32 << 20)
        .arg("--watchdog")
        .arg("1")
}

/// Follows the daemon's health until it says that it does not serve, or is gone.
async fn until_not_serving(socket: &Path) -> bool {
    let path = socket.to_owned();
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let endpoint = Endpoint::from_static("http://rocmforged");
    let channel = endpoint.connect_with_connector(connector).await;
    let request = HealthCheckRequest {
        service: "rocmforge.v1.Inference".to_owned(),
    };
    let mut health = HealthClient::new(channel.expect("the daemon answers"));
    let mut told = health.watch(request).await.expect("a watch").into_inner();
    while let Ok(Some(answer)) = told.message().await {
        if answer.status() == ServingStatus::NotServing {
            return true;
        }
    }
    false
}

/// Running and waiting requests end with UNAVAILABLE, health says NOT_SERVING,
/// and the process ends with 4; `how` is what all are told of the loss.
async fn ends_well(order: &str, how: &str) {
    let fake = Fake::new();
    let options = options(&fake, order).arg("--max-sequences").arg("2");
    let daemon = Daemon::start(&options);
    let client = connect(&daemon).await;
    load(&client, TINY_LLAMA).await;
    let socket = daemon.socket();
    let health = tokio::spawn(async move { until_not_serving(&socket).await });
    let mut streams = Vec::new();
    for seed in 0..5 {
        let request = continuation(TINY_LLAMA, "Once upon a time", noise(3000, seed));
        match client.generate(request).await {
            Ok(stream) => streams.push(stream),
            Err(error) => assert_eq!(error.code(), Some(Code::Unavailable), "{order}: {error}"),
        }
    }
    let (mut told, mut knows) = (0, false);
    for stream in &mut streams {
        match collect(stream).await {
            // By chance it came to an end before.
            Ok(_) => {}
            Err(Error::Rpc(error)) => {
                assert_eq!(error.code, Code::Unavailable, "{order}: {}", error.message);
                assert!(error.retry_after().is_some(), "{order}: no RetryInfo");
                knows |= error.message.contains(how);
                told += 1;
            }
            Err(other) => panic!("{order}: {other}"),
        }
    }
    assert!(told > 0, "{order}: nobody was told");
    // Where the engine's thread is in the call, those who wait for it are let go by others.
    let is_blocked = order.starts_with("hipMemcpyAsync");
    assert!(knows || is_blocked, "{order}: nobody was told how");
    assert!(
        in_time("health", health).await.expect("it does not panic"),
        "{order}: health never said NOT_SERVING"
    );
    drop((streams, client));
    let ended = daemon.wait();
    assert_eq!(ended.status.code(), Some(4), "{order}: {}", ended.log);
    let last = format!("the device is lost: {how}");
    assert!(ended.log.contains(&last), "{last}: {}", ended.log);
    assert!(!ended.log.contains("panicked at"), "{}", ended.log);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fault_ends_the_daemon_with_4() {
    ends_well(
        &format!("run:kernel:3000:{LAUNCH_FAILURE}"),
        "a kernel on it faulted: ",
    )
    .await;
}

/// hipErrorUnknown and hipErrorNoDevice are refusals, too; a card that gives them to everything is
/// lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_card_that_fails_all_calls_by_codes_that_say_little_ends_the_daemon_with_4() {
    // Nobody tells how, and nothing is made up.
    ends_well("run:kernel:3000:999", "").await;
    ends_well("run:kernel:3000:100", "").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kernel_that_hangs_ends_the_daemon_with_4() {
    ends_well(&format!("run:kernel:3000:{HANG}"), "it hangs: ").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_never_comes_back_ends_the_daemon_with_4() {
    ends_well(&format!("hipMemcpyAsync:200:{HANG}"), "it hangs: ").await;
}

/// A card that is lost while it is opened: once `auto` went on with the CPU, with the driver's
/// stuck thread in the process, and nobody started the daemon again.
#[test]
fn a_card_that_is_lost_while_it_is_opened_ends_the_daemon_with_4() {
    for device in ["auto", "hip"] {
        for order in [
            format!("hipSetDevice:1:{LAUNCH_FAILURE}"),
            format!("hipStreamCreateWithPriority:2:{LAUNCH_FAILURE}"),
            format!("hipHostRegister:1:{LAUNCH_FAILURE}"),
        ] {
            let (fake, cache) = (Fake::new(), tempfile::tempdir().expect("a directory"));
            let ended = Daemon::refused(&opening(device, &fake, &order, cache.path()));
            let log = &ended.log;
            assert_eq!(ended.status.code(), Some(4), "{device} {order}: {log}");
            assert!(log.contains("the device is lost"), "{order}: {log}");
        }
    }
}

/// The third start goes without what the first two did not survive.
#[test]
fn a_call_that_hangs_while_a_card_is_opened_is_left_out_after_two_starts() {
    let (fake, cache) = (Fake::new(), tempfile::tempdir().expect("a directory"));
    let order = format!("hipHostRegister:1:{HANG}");
    let options = opening("auto", &fake, &order, cache.path());
    for _ in 0..2 {
        let ended = Daemon::refused(&options);
        assert_eq!(ended.status.code(), Some(4), "{}", ended.log);
        assert!(ended.log.contains("has not come back"), "{}", ended.log);
    }
    let ended = Daemon::start(&options).stop();
    assert!(ended.log.contains("did not end 2 times"), "{}", ended.log);
    assert!(ended.log.contains("Fake GPU"), "{}", ended.log);
}

/// A daemon whose card fails at the start, with a folder of its own for what it remembers.
fn opening(device: &str, fake: &Fake, order: &str, cache: &Path) -> Options {
    Options::on_device(device)
        .env("ROCMFORGE_HIP_LIBRARY", fake.path())
        .env("ROCMFORGE_CUDA_LIBRARY", "/nonexistent/libcuda.so")
        .env("ROCMFORGE_KERNELS", fake.images())
        .env("XDG_CACHE_HOME", cache)
        .env("FAKE_HIP_FAIL", order)
        .vram_budget(32 << 20)
        .arg("--watchdog")
        .arg("1")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_that_is_refused_shrinks_the_budget_and_the_request_goes_on() {
    let fake = Fake::new();
    let order = format!("hipModuleLaunchKernel:200:{OUT_OF_MEMORY}");
    let daemon = Daemon::start(&options(&fake, &order));
    let client = connect(&daemon).await;
    load(&client, TINY_LLAMA).await;
    let asked = &fixtures::exam()[0];
    let answer = ask(&client, TINY_LLAMA, asked).await;
    assert!(is_right(asked, &answer), "{:?}", answer.text);
    let status = client.status().await.expect("a status");
    assert_eq!(status.budget_bytes, 30 << 20);
    let memory = status.device.and_then(|d| d.memory).expect("a count");
    assert_eq!(memory.capacity_bytes, 30 << 20);
    assert_eq!(memory.allocated_bytes, 30 << 20);
    assert!(status.used_bytes <= status.budget_bytes);
    let request = continuation(TINY_LLAMA, "Once", greedy(5));
    client.generate(request).await.expect("it serves on");
    let ended = daemon.stop();
    assert!(ended.log.contains("the budget shrinks"), "{}", ended.log);
}
