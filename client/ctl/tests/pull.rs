//! Downloads by the program itself, from a hub on this machine.

use std::path::Path;
use std::process::Output;
use std::time::Duration;

use crate::hub::{FakeHub, Fault, bytes, sha256};
use serde_json::Value;
use tokio::process::Command;

async fn ctl(hub: &FakeHub, args: &[&str]) -> Output {
    ctl_in(hub, None, args).await
}

/// The program, with a model directory in its environment.
async fn ctl_in(hub: &FakeHub, models: Option<&Path>, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rocmforgectl"));
    let command = command
        .env_remove("ROCMFORGE_SOCKET")
        .env_remove("ROCMFORGE_MODEL_DIR")
        .env("HF_ENDPOINT", hub.url())
        .env("HF_TOKEN", "secret")
        .envs(models.map(|models| ("ROCMFORGE_MODEL_DIR", models)))
        .args(args)
        .kill_on_drop(true);
    let ended = tokio::time::timeout(Duration::from_secs(60), command.output());
    ended
        .await
        .expect("rocmforgectl hangs")
        .expect("rocmforgectl starts")
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("UTF-8")
}

#[tokio::test]
async fn a_model_is_pulled_listed_and_deleted() {
    let hub = FakeHub::start();
    let model = bytes(300_000, 1);
    hub.put("o/r/m-Q4_K_M.gguf", model.clone());
    hub.put("o/r/m-Q8_0.gguf", bytes(500_000, 2));
    hub.put("o/r/mmproj-F16.gguf", bytes(1000, 3));
    let dir = tempfile::tempdir().expect("a directory");
    let models = dir.path().join("models");
    let path = models.to_str().expect("UTF-8");

    let listed = ctl(&hub, &["ls", "--remote", "o/r"]).await;
    assert_eq!(
        text(&listed.stdout),
        "TAG          SIZE  PARTS  USE        FILE\n\
         Q4_K_M  293.0 KiB      1  model      m-Q4_K_M.gguf\n\
         Q8_0    488.3 KiB      1  model      m-Q8_0.gguf\n\
         F16        1000 B      1  projector  mmproj-F16.gguf\n"
    );
    let pulled = ctl(&hub, &["pull", "o/r", "--dir", path]).await;
    assert_eq!((pulled.status.code(), text(&pulled.stderr)), (Some(0), ""));
    let real = models.canonicalize().expect("made");
    let real = real.display();
    assert_eq!(
        text(&pulled.stdout),
        format!(
            "{real}/o/r/m-Q4_K_M.gguf: model, 293.0 KiB, checksum right\n\
             {real}/o/r/mmproj-F16.gguf: projector, 1000 B, checksum right\n"
        )
    );
    assert_eq!(
        std::fs::read(models.join("o/r/m-Q4_K_M.gguf")).expect("there"),
        model
    );
    assert!(
        hub.seen()
            .iter()
            .all(|seen| seen.headers["authorization"] == "Bearer secret")
    );

    let again = ctl(&hub, &["pull", "o/r:Q4_K_M", "--model-only", "--dir", path]).await;
    assert!(text(&again.stdout).ends_with("was there\n"), "{again:?}");
    let removed = ctl(&hub, &["rm", "o/r/m-Q4_K_M.gguf", "--dir", path]).await;
    assert_eq!(text(&removed.stdout), "1 file deleted, 293.0 KiB freed\n");
    let gone = ctl(&hub, &["rm", "o/r/m-Q4_K_M.gguf", "--dir", path]).await;
    assert_eq!(gone.status.code(), Some(5), "{gone:?}");
}

#[tokio::test]
async fn a_model_directory_that_is_absent_is_named_with_what_to_do() {
    let hub = FakeHub::start();
    hub.put("o/r/m-Q4_K_M.gguf", bytes(1000, 1));
    let dir = tempfile::tempdir().expect("a directory");
    let absent = dir.path().join("absent");
    let failed = ctl_in(&hub, Some(&absent), &["pull", "o/r"]).await;
    assert_eq!(failed.status.code(), Some(1), "{failed:?}");
    let said = text(&failed.stderr);
    assert!(
        said.contains(absent.to_str().expect("UTF-8")) && said.contains("create it"),
        "{said}"
    );
    assert!(!absent.exists());
}

#[tokio::test]
async fn progress_and_failures_are_objects_with_json() {
    let hub = FakeHub::start();
    let model = bytes(300_000, 1);
    hub.put("library/llama3.2:3b", model.clone());
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().to_str().expect("UTF-8");
    let url = hub.url();
    let args = [
        "pull",
        "llama3.2:3b",
        "--json",
        "--registry",
        &url,
        "--dir",
        path,
    ];
    hub.fail(Fault::Status(503, "\r\nRetry-After: 0"), 1);
    let pulled = ctl(&hub, &args).await;
    let lines: Vec<Value> = text(&pulled.stdout)
        .lines()
        .map(|line| serde_json::from_str(line).expect(line))
        .collect();
    let events: Vec<&str> = lines
        .iter()
        .filter_map(|line| line["event"].as_str())
        .collect();
    assert_eq!(events.first(), Some(&"planned"), "{pulled:?}");
    assert!(
        events.contains(&"waiting") && events.contains(&"progress"),
        "{events:?}"
    );
    let last = lines.last().expect("a line");
    assert_eq!(last["event"], "pulled");
    assert_eq!(last["files"][0]["sha256"], sha256(&model));
    assert_eq!(last["files"][0]["bytes"], 300_000);
    assert!(dir.path().join("ollama/llama3.2:3b.gguf").exists());

    let failed = ctl(&hub, &["pull", "o/none", "--json", "--dir", path]).await;
    let error: Value = serde_json::from_str(text(&failed.stderr)).expect("JSON");
    assert_eq!(failed.status.code(), Some(5));
    assert_eq!(error["error"]["reason"], "NOT_FOUND");
    let odd = ctl(&hub, &["pull", "../../etc", "--dir", path]).await;
    assert_eq!(odd.status.code(), Some(6), "{odd:?}");
    // Nobody says where models lie.
    let lost = ctl(&hub, &["--socket", "/nowhere.sock", "pull", "o/r"]).await;
    assert!(text(&lost.stderr).contains("--dir"), "{lost:?}");
}
