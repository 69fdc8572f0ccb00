//! A model's file that does not answer, as when the server is gone that it lies on: its own
//! requests wait, or fail, and those of other models go on.

use std::time::{Duration, Instant};

use rocmforge_client::Client;
use rocmforge_client::proto::v1::{FileWait, SamplingParams, WhyRequest};
use rocmforge_tests::daemon::{Daemon, Options};
use rocmforge_tests::far_files::FarFiles;
use rocmforge_tests::fixtures::{self, TINY_LLAMA, TINY_QWEN3};
use rocmforge_tests::session::{
    Answer, connect, continuation, generate, greedy, in_time, load, refused, try_load,
};
use rocmforge_tests::skip;
use tokio::task::JoinHandle;

/// Until the daemon says that a file is waited for, or that none is.
async fn until(client: &Client, waits: bool) -> Option<FileWait> {
    let seen = async {
        loop {
            let status = client.status().await.expect("status asks no engine");
            if status.waits_for.is_some() == waits {
                return status.waits_for;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    in_time("the wait for a file", seen).await
}

/// Asks for a text in the background.
fn asked(
    client: &Client,
    model: &'static str,
    sampling: SamplingParams,
) -> JoinHandle<Result<Answer, rocmforge_client::Error>> {
    let client = client.clone();
    let request = continuation(model, "Once upon a time", sampling);
    tokio::spawn(async move { generate(&client, request).await })
}

/// A daemon with a model that is near and one, "far", whose file was not read yet.
async fn with_both(far: &FarFiles) -> (Daemon, Client) {
    let daemon = Daemon::start(&Options::default().model_dir(far.dir()));
    let client = connect(&daemon).await;
    load(&client, TINY_LLAMA).await;
    let loaded = try_load(&client, &far.path(), "far").await;
    loaded.expect("the header is read while the file answers");
    (daemon, client)
}

#[tokio::test]
async fn other_models_go_on_while_a_file_does_not_answer() {
    let far = match FarFiles::serve(&fixtures::path(TINY_QWEN3)) {
        Ok(far) => far,
        Err(reason) => return skip("a file that does not answer", &reason),
    };
    let (daemon, client) = with_both(&far).await;
    assert_eq!(until(&client, false).await, None);

    far.set_answering(false);
    let waiting = asked(&client, "far", greedy(4));
    // Each of them would wait as long as the file.
    for _ in 0..20 {
        let near = asked(&client, TINY_LLAMA, greedy(4));
        let near = in_time("a model that is near", near).await;
        near.expect("no panic").expect("it waits for nobody");
    }
    assert!(!waiting.is_finished(), "the file has not answered");
    let wait = until(&client, true).await.expect("it is told");
    assert_eq!((wait.model.as_str(), wait.all_wait), ("far", false));
    assert_eq!(wait.path, far.path().display().to_string());
    assert!(wait.waited_ms >= 5000, "{wait:?}");
    let log = daemon.log();
    let name = far.path().display().to_string();
    let told = |line: &&str| line.contains("does not answer") && line.contains(&name);
    assert_eq!(log.lines().filter(told).count(), 1, "{log}");
    for _ in 0..10 {
        tokio::time::sleep(Duration::from_millis(20)).await;
        let status = client.status().await.expect("status asks no engine");
        assert!(status.waits_for.is_some(), "it is told all the while");
    }

    far.set_answering(true);
    let answer = in_time("the request that waited", waiting).await;
    let answer = answer.expect("no panic").expect("the file has answered");
    assert_eq!(answer.ids.len(), 4);
    until(&client, false).await;
    // It was the slowest of them, and its file is why.
    let slowest = client.why(WhyRequest::default()).await.expect("reports");
    let [one] = &slowest[..] else {
        panic!("one is the slowest: {slowest:?}");
    };
    assert_eq!((&*one.model, &*one.cause), ("far", "disk"), "{one:?}");
    assert!(daemon.stop().status.success());
}

#[tokio::test]
async fn requests_of_a_file_that_stays_silent_fail_and_later_ones_are_answered() {
    let far = match FarFiles::serve(&fixtures::path(TINY_QWEN3)) {
        Ok(far) => far,
        Err(reason) => return skip("a file that stays silent", &reason),
    };
    let (daemon, client) = with_both(&far).await;
    let first = in_time("the first text", asked(&client, "far", greedy(4))).await;
    let first = first.expect("no panic").expect("the file answers");

    // In the midst of its use: its weights are gone, and what the kernel has of the file.
    far.set_answering(false);
    far.forget_content();
    client
        .cache_clear(Some("far"))
        .await
        .expect("nobody uses it");
    let silent = asked(&client, "far", greedy(4));
    tokio::time::sleep(Duration::from_millis(500)).await;
    let near = asked(&client, TINY_LLAMA, greedy(4));
    let near = in_time("a model that is near", near).await;
    near.expect("no panic")
        .expect("it waits no longer than the engine does");
    let silent = in_time("the text of the silent file", silent).await;
    let error = refused("a file that is silent", silent.expect("no panic"));
    assert_eq!(error.reason(), Some("MODEL_FILE_SILENT"), "{error:?}");
    let message = &error.message;
    let path = far.path().display().to_string();
    assert!(
        message.contains(&path) && message.contains("ask again"),
        "{message}"
    );

    // Whoever asks now holds nobody up.
    let waiting = asked(&client, "far", greedy(4));
    for _ in 0..5 {
        let near = asked(&client, TINY_LLAMA, greedy(4));
        let near = in_time("a model that is near", near).await;
        near.expect("no panic").expect("it waits for nobody");
    }
    assert!(
        !waiting.is_finished(),
        "it waits, and is not refused at once"
    );
    far.set_answering(true);
    let again = match in_time("the text that waited", waiting)
        .await
        .expect("no panic")
    {
        Ok(answer) => answer,
        // It came while the file still counted as silent.
        Err(_) => {
            let again = asked(&client, "far", greedy(4));
            let again = in_time("the text of the file that answers again", again).await;
            again.expect("no panic").expect("the file answers again")
        }
    };
    assert_eq!(again.ids, first.ids);
    assert!(daemon.stop().status.success());
}

#[tokio::test]
async fn settings_are_read_anew_while_a_declared_file_does_not_answer() {
    let far = match FarFiles::serve(&fixtures::path(TINY_QWEN3)) {
        Ok(far) => far,
        Err(reason) => return skip("a reload beside a silent file", &reason),
    };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let config = dir.path().join("config.toml");
    let configure = |running: u32| {
        let path = far.path();
        let model = format!("[[model]]\nname = \"far\"\npath = {path:?}\n");
        let limit = format!("[[limit]]\nfor = [\"*\"]\nrunning = {running}\n");
        std::fs::write(&config, model + &limit).expect("a writable directory");
    };
    configure(4);
    let options = Options::default().model_dir(far.dir()).arg("--config");
    let daemon = Daemon::start(&options.arg(config.to_str().expect("plain characters")));
    let client = connect(&daemon).await;
    let reload = async || {
        let told = in_time("a reload", client.reload()).await;
        told.expect("the settings can be used")
    };
    assert!(reload().await.not_taken.is_empty());

    far.fall_silent();
    // The first waits a while for the file; what it left behind holds up no other.
    for running in [5, 6] {
        configure(running);
        let told = reload().await;
        assert_eq!(told.taken.len(), 1, "{told:?}");
        assert_eq!(told.taken[0].setting, "limit");
        assert_eq!(told.not_taken.len(), 1, "{told:?}");
        let model = &told.not_taken[0];
        assert_eq!((&*model.setting, &*model.now), ("model", "far"));
        assert!(model.reason.contains("does not answer"), "{model:?}");
    }

    far.set_answering(true);
    let give_up = Instant::now() + Duration::from_secs(60);
    while !reload().await.not_taken.is_empty() {
        assert!(Instant::now() < give_up, "the file answers again");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(daemon.stop().status.success());
}

/// Whether the daemon has this model, and bytes of it on the device.
async fn registered(client: &Client, name: &str) -> Option<u64> {
    let models = client.list().await.expect("a list of models");
    let model = models.into_iter().find(|model| model.name == name)?;
    Some(model.resident_bytes)
}

#[tokio::test]
async fn declared_models_of_a_directory_that_answers_late_are_there_then() {
    let far = match FarFiles::serve(&fixtures::path(TINY_QWEN3)) {
        Ok(far) => far,
        Err(reason) => return skip("a directory that answers late", &reason),
    };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let config = dir.path().join("config.toml");
    let model = format!("[[model]]\nname = \"far\"\npath = {:?}\n", far.path());
    std::fs::write(&config, model + "preload = true\n").expect("a writable directory");
    far.path().metadata().expect("it answers still");
    far.fall_silent();
    let options = Options::default().model_dir(far.dir()).arg("--config");
    let daemon = Daemon::start(&options.arg(config.to_str().expect("plain characters")));
    let client = connect(&daemon).await;
    assert_eq!(registered(&client, "far").await, None);

    far.set_answering(true);
    let give_up = Instant::now() + Duration::from_secs(60);
    // Nobody asks for it.
    while registered(&client, "far")
        .await
        .is_none_or(|bytes| bytes == 0)
    {
        assert!(Instant::now() < give_up, "{}", daemon.log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(daemon.stop().status.success());
}
