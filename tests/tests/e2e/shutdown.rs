//! SIGTERM: no new work, running streams to their end or to the end of the grace period,
//! exit 0. And the socket file.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::process::{Command, Stdio};
use std::time::Duration;

use futures_util::StreamExt;
use rocmforge_client::{Client, Code, Error};
use rocmforge_tests::binaries;
use rocmforge_tests::daemon::{Daemon, Options};
use rocmforge_tests::fixtures::{self, TINY_LLAMA};
use rocmforge_tests::session::{
    assert_works, collect, connect, continuation, generate, greedy, load, noise, try_load,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn running_streams_end_well_and_new_work_is_refused() {
    let daemon = Daemon::start(&Options::default().arg("--drain-grace").arg("60"));
    let client = connect(&daemon).await;
    load(&client, TINY_LLAMA).await;
    let mut running = client
        .generate(continuation(TINY_LLAMA, "Once upon a time", noise(300, 7)))
        .await
        .expect("a stream");
    running.next().await.expect("an event").expect("a piece");
    daemon.terminate();

    // The signal takes a moment to arrive; from then on nothing new is let in.
    let refusal = loop {
        match generate(&client, continuation(TINY_LLAMA, "Once", greedy(1))).await {
            Ok(_) => tokio::time::sleep(Duration::from_millis(1)).await,
            Err(error) => break error,
        }
    };
    match &refusal {
        Error::Rpc(error) => {
            assert_eq!(error.code, Code::Unavailable, "{}", error.message);
            assert!(error.retry_after().is_some(), "no RetryInfo: {error:?}");
        }
        Error::ConnectionLost { .. } => {}
        other => panic!("{other}"),
    }
    let answer = collect(&mut running)
        .await
        .expect("a running stream is not cut off");
    assert!(answer.done.generated_tokens > 1);
    drop((running, client));
    let ended = daemon.wait();
    assert!(ended.status.success(), "{}\n{}", ended.status, ended.log);
    assert!(!ended.log.contains("panicked at"), "{}", ended.log);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_grace_period_ends() {
    let daemon = Daemon::start(&Options::default().arg("--drain-grace").arg("1"));
    let client = connect(&daemon).await;
    load(&client, TINY_LLAMA).await;
    // Nobody reads this one, so it cannot end by itself.
    let mut stalled = Vec::new();
    for seed in 0..4 {
        let request = continuation(TINY_LLAMA, "Once upon a time", noise(4000, seed));
        stalled.push(client.generate(request).await.expect("a stream"));
    }
    daemon.terminate();
    let ended = daemon.wait();
    assert!(ended.status.success(), "{}\n{}", ended.status, ended.log);
    assert!(!ended.log.contains("panicked at"), "{}", ended.log);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_daemon_ends_at_once_and_takes_its_socket_along() {
    let daemon = Daemon::start(&Options::default());
    let socket = daemon.socket();
    let mode = socket.metadata().expect("a socket").permissions().mode() & 0o777;
    assert_eq!(mode, 0o660, "{mode:o}");
    let client = connect(&daemon).await;
    client.status().await.expect("a status");
    daemon.stop();
    assert!(!socket.exists(), "{} is left behind", socket.display());
    let gone = Client::connect(Some(&socket)).await.err();
    assert!(matches!(gone, Some(Error::NoDaemon { .. })), "{gone:?}");
}

/// A file that nobody listens on is replaced; a live socket is somebody's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stale_sockets_are_replaced_and_live_ones_refused() {
    let daemon = Daemon::start(&Options::default());
    let second = Command::new(binaries::rocmforged())
        .arg("--socket")
        .arg(daemon.socket())
        .args(["--device", "host", "--model-dir"])
        .arg(fixtures::dir())
        .stdin(Stdio::null())
        .output()
        .expect("rocmforged starts");
    assert!(
        !second.status.success(),
        "a second daemon took a live socket"
    );
    let said = String::from_utf8_lossy(&second.stderr);
    assert!(said.contains("socket"), "{said}");
    let client = connect(&daemon).await;
    assert_works(&client).await;
    daemon.stop();

    // A listener that is dropped leaves its file, as a killed daemon does.
    let stale = Daemon::start_with(&Options::default(), |socket| {
        drop(UnixListener::bind(socket).expect("a socket"));
    });
    let client = connect(&stale).await;
    assert_works(&client).await;
    stale.stop();
}

/// Once a model that was loaded and pinned by hand was gone after a restart.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn models_that_clients_load_come_back_after_a_restart() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = |name: &str| dir.path().join(name);
    let memory = path("models.json");
    let options = Options::default()
        .model_dir(dir.path())
        .arg("--remember")
        .arg(memory.to_str().expect("a path of plain characters"));
    for name in ["kept.gguf", "away.gguf", "unloaded.gguf"] {
        fs::copy(fixtures::path(TINY_LLAMA), path(name)).expect("a copy");
    }
    let daemon = Daemon::start(&options);
    let client = connect(&daemon).await;
    let load = async |name: &str| {
        let file = path(&format!("{name}.gguf"));
        try_load(&client, &file, name).await.expect("it loads");
    };
    for name in ["kept", "away", "unloaded"] {
        load(name).await;
    }
    client.pin("kept", &[]).await.expect("it fits");
    client.pin("away", &[1]).await.expect("it fits");
    client.unload("unloaded", false).await.expect("it is idle");
    let asked = || continuation("away", "Once upon a time", greedy(8));
    let text = generate(&client, asked()).await.expect("a text").text;
    daemon.stop();

    // One of the files is on a disk that is not there yet.
    fs::rename(path("away.gguf"), path("elsewhere")).expect("a rename");
    let daemon = Daemon::start(&options);
    let client = connect(&daemon).await;
    let names = async |client: &Client| {
        let models = client.list().await.expect("a list");
        models.into_iter().map(|m| m.name).collect::<Vec<_>>()
    };
    let pins = async |client: &Client, name: &str| {
        let model = client.get(name).await.expect("it is loaded");
        let pinned = model.segments.iter().filter(|segment| segment.pinned);
        (pinned.count(), model.segments.len())
    };
    assert_eq!(names(&client).await, ["kept"]);
    let (pinned, all) = pins(&client, "kept").await;
    assert_eq!(pinned, all);
    assert!(
        daemon
            .log()
            .contains("a model that is remembered cannot be loaded now")
    );
    fs::rename(path("elsewhere"), path("away.gguf")).expect("a rename");
    let again = generate(&client, asked())
        .await
        .expect("it is loaded when it is asked for");
    assert_eq!(again.text, text);
    assert_eq!(pins(&client, "away").await.0, 1);
    client.unload("kept", true).await.expect("it is pinned");
    daemon.stop();

    let daemon = Daemon::start(&options);
    let client = connect(&daemon).await;
    assert_eq!(names(&client).await, ["away"]);
    assert_eq!(pins(&client, "away").await.0, 1);
    daemon.stop();

    fs::write(&memory, "no memory").expect("our own file");
    let daemon = Daemon::start(&options);
    let client = connect(&daemon).await;
    assert!(names(&client).await.is_empty());
    assert!(
        daemon.log().contains("it is put aside as"),
        "{}",
        daemon.log()
    );
    assert_eq!(
        fs::read(path("models.json.unread")).expect("it is kept"),
        b"no memory"
    );
    daemon.stop();
}
