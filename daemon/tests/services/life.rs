//! Status, health and reflection; the drain.

use std::time::Instant;

use rocmforge_proto::v1;
use rocmforge_proto::v1::inference_client::InferenceClient;
use rocmforged::End;
use tonic::Code;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_types::StatusExt;

use crate::daemon::{Daemon, GRACE, assert_status, connect, endless, greedy};

#[tokio::test]
async fn status_health_and_reflection_answer() {
    let daemon = Daemon::start().await;
    let status = daemon
        .server()
        .status(v1::StatusRequest {})
        .await
        .unwrap()
        .into_inner();
    assert_eq!(status.state(), v1::ServerState::Serving);
    assert_eq!(status.version, env!("CARGO_PKG_VERSION"));
    assert_eq!(status.pid, std::process::id());
    assert_eq!(status.running_capacity, 4);
    assert_eq!(status.model_dirs.len(), 2);
    assert_eq!(status.device.unwrap().kind(), v1::DeviceKind::Host);

    let devices = daemon
        .server()
        .list_devices(v1::ListDevicesRequest {})
        .await
        .unwrap()
        .into_inner();
    assert_eq!(devices.in_use.unwrap().kind(), v1::DeviceKind::Host);
    let kinds: Vec<_> = devices.drivers.iter().map(|d| d.kind()).collect();
    assert_eq!(kinds, [v1::DeviceKind::Hip, v1::DeviceKind::Cuda]);
    // The running program is this test, which knows nothing of probing: that is told,
    // and nothing worse happens.
    assert!(devices.drivers.iter().all(|d| !d.errors.is_empty()));

    for service in [
        "",
        "rocmforge.v1.Models",
        "rocmforge.v1.Inference",
        "rocmforge.v1.Cache",
        "rocmforge.v1.Server",
    ] {
        assert_eq!(
            daemon.health(service).await.unwrap(),
            ServingStatus::Serving,
            "'{service}'"
        );
    }
    assert_eq!(
        daemon.health("nonsense").await.unwrap_err().code(),
        Code::NotFound
    );

    use tonic_reflection::pb::v1 as reflection;
    let ask = reflection::ServerReflectionRequest {
        host: String::new(),
        message_request: Some(
            reflection::server_reflection_request::MessageRequest::ListServices(String::new()),
        ),
    };
    let mut client =
        reflection::server_reflection_client::ServerReflectionClient::new(daemon.channel.clone());
    let mut answers = client
        .server_reflection_info(tokio_stream::once(ask))
        .await
        .unwrap()
        .into_inner();
    let answer = answers.message().await.unwrap().unwrap();
    let text = format!("{answer:?}");
    for service in [
        "rocmforge.v1.Models",
        "rocmforge.v1.Inference",
        "rocmforge.v1.Cache",
        "grpc.health.v1.Health",
    ] {
        assert!(text.contains(service), "{text} lacks {service}");
    }
    drop((answers, client));
    assert_eq!(daemon.stop().await, End::Drained);
}

#[tokio::test]
async fn a_drain_refuses_new_work_says_so_in_health_and_answers_status() {
    let daemon = Daemon::start().await;
    daemon.load("tiny-llama-Q4_K_M.gguf", "m").await.unwrap();
    // Readers that hold their own generations up, so that they run for as long as the test needs
    // them. Four, because one may draw the end of its text before its reader's buffers are full.
    let slow = connect(daemon.dir.path().join("s"), 64).await;
    let mut running = Vec::new();
    for seed in 1..=4 {
        let mut client = InferenceClient::new(slow.clone());
        let mut events = client
            .generate(endless("m", seed))
            .await
            .unwrap()
            .into_inner();
        assert!(events.message().await.unwrap().is_some());
        running.push(events);
    }
    drop(slow);
    // A watch that stays open must not hold the end up for long.
    let mut watch = HealthClient::new(daemon.channel.clone())
        .watch(tonic_health::pb::HealthCheckRequest {
            service: String::new(),
        })
        .await
        .unwrap()
        .into_inner();
    assert_eq!(
        watch.message().await.unwrap().unwrap().status(),
        ServingStatus::Serving
    );
    daemon.stops.send(()).await.unwrap();
    assert_eq!(
        watch.message().await.unwrap().unwrap().status(),
        ServingStatus::NotServing
    );
    let refused = daemon.inference().generate(greedy("m", "x", 1)).await;
    let status = assert_status(refused, Code::Unavailable, &["retry"]);
    assert!(status.get_error_details().retry_info().is_some());
    assert_status(
        daemon.load("tiny-qwen3-Q8_0.gguf", "").await,
        Code::Unavailable,
        &["retry"],
    );
    let status = daemon
        .server()
        .status(v1::StatusRequest {})
        .await
        .unwrap()
        .into_inner();
    assert_eq!(status.state(), v1::ServerState::Draining);
    assert!(status.running > 0, "{status:?}");
    for events in &mut running {
        assert!(
            events.message().await.unwrap().is_some(),
            "what runs goes on"
        );
    }
    drop(running);
    let waiting = Instant::now();
    assert_eq!(daemon.served.await.unwrap().unwrap(), End::Drained);
    assert!(
        waiting.elapsed() < GRACE,
        "a drain ends with its last reader, not with the grace period"
    );
}
