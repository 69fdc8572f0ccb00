//! What the program prints of vectors, ranks and conversations, and what it asks for them.

use std::process::Output;
use std::time::Duration;

use crate::fake::FakeDaemon;
use tokio::process::Command;

pub(crate) async fn ctl(daemon: &FakeDaemon, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rocmforgectl"));
    let command = command
        .env_remove("ROCMFORGE_SOCKET")
        .arg("--socket")
        .arg(&daemon.socket)
        .args(args);
    let ended = tokio::time::timeout(Duration::from_secs(30), command.kill_on_drop(true).output());
    ended
        .await
        .expect("rocmforgectl hangs")
        .expect("rocmforgectl starts")
}

pub(crate) fn success(output: &Output) -> &str {
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), &*error), (Some(0), ""));
    std::str::from_utf8(&output.stdout).expect("UTF-8")
}

#[tokio::test]
async fn vectors_ranks_and_conversations_read_well() {
    let daemon = FakeDaemon::start();
    let embed = ctl(&daemon, &["embed", "tiny", "abcde", "a"]).await;
    assert_eq!(
        success(&embed),
        "TOKENS  ELEMENTS  VALUES\n     \
         5         5  97.0000 98.0000 99.0000 100.0000 ...\n     \
         1         1  97.0000\n"
    );
    let rerank = ctl(
        &daemon,
        &["rerank", "tiny", "q", "one", "two\n", "--top-n", "1"],
    )
    .await;
    assert_eq!(
        success(&rerank),
        " SCORE  INDEX  DOCUMENT\n\
         0.5000      1  two\\n\n"
    );
    let tools =
        r#"[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]"#;
    let flags = [
        "--system",
        "Be brief.",
        "--tools",
        tools,
        "--template-args",
        r#"{"a": 1}"#,
    ];
    let more = [
        "--answer",
        "I am",
        "--unparsed",
        "--choices",
        "2",
        "--render",
    ];
    let args = [&["chat", "tiny", "Hi"], &flags[..], &more[..]].concat();
    let rendered = ctl(&daemon, &args).await;
    assert_eq!(
        success(&rendered).trim_end(),
        "<system>Be brief.<user>Hi<assistant>I am"
    );
    let seen = daemon.seen.chat.lock().unwrap();
    let asked = seen.last().unwrap();
    assert_eq!(
        (
            asked.tools[0].name.as_str(),
            asked.tools[0].parameters.as_str()
        ),
        ("f", r#"{"type":"object"}"#)
    );
    assert_eq!(
        (asked.template_args.as_str(), asked.n),
        (r#"{"a": 1}"#, Some(2))
    );
    assert!(asked.continue_last && asked.unparsed);
}
