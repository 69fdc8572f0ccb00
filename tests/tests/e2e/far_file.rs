//! A model's file that does not answer, as when the server is gone that it lies on: seen by name
//! while it lasts, and nothing is lost when it answers again.

use std::time::Duration;

use rocmforge_client::Client;
use rocmforge_client::proto::v1::FileWait;
use rocmforge_tests::daemon::{Daemon, Options};
use rocmforge_tests::far_files::FarFiles;
use rocmforge_tests::fixtures::{self, TINY_LLAMA, TINY_QWEN3};
use rocmforge_tests::session::{connect, continuation, generate, greedy, in_time, load, try_load};
use rocmforge_tests::skip;

/// Until the daemon says that it waits for a file, or that it does not.
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

#[tokio::test]
async fn a_file_that_does_not_answer_is_named_while_all_models_wait() {
    let far = match FarFiles::serve(&fixtures::path(TINY_QWEN3)) {
        Ok(far) => far,
        Err(reason) => return skip("a file that does not answer", &reason),
    };
    let daemon = Daemon::start(&Options::default().model_dir(far.dir()));
    let client = connect(&daemon).await;
    load(&client, TINY_LLAMA).await;
    let loaded = try_load(&client, &far.path(), "far").await;
    loaded.expect("the header is read while the file answers");
    assert_eq!(until(&client, false).await, None);

    far.set_answering(false);
    let asks = client.clone();
    let asked = tokio::spawn(async move {
        generate(&asks, continuation("far", "Once upon a time", greedy(4))).await
    });
    let wait = until(&client, true).await.expect("it is told");
    assert_eq!(wait.model, "far");
    assert_eq!(wait.path, far.path().display().to_string());
    assert!(wait.waited_ms >= 5000, "{wait:?}");
    let log = daemon.log();
    let name = far.path().display().to_string();
    let told = |line: &&str| line.contains("does not answer") && line.contains(&name);
    assert!(log.lines().any(|line| told(&line)), "{log}");

    far.set_answering(true);
    let answer = in_time("the request that waited", asked).await;
    let answer = answer.expect("no panic").expect("the file has answered");
    assert_eq!(answer.ids.len(), 4);
    until(&client, false).await;
    let other = continuation(TINY_LLAMA, "Once upon a time", greedy(4));
    generate(&client, other).await.expect("nothing is lost");
    assert!(daemon.stop().status.success());
}
