//! What `top` prints once.

use crate::fake::FakeDaemon;
use crate::vectors::{ctl, success};

#[tokio::test]
async fn the_board_is_printed_once_as_text() {
    let daemon = FakeDaemon::start();
    let output = ctl(&daemon, &["top", "--once"]).await;
    let bar = format!("[{}{}]", "=".repeat(5), " ".repeat(55));
    assert_eq!(
        success(&output),
        format!(
            "rocmforged 0.1.0  Test CPU  up 1h 2m  serving\n\
             memory 5.0 MiB of 2.00 GiB (0.2 %), pinned 1.0 MiB\n\
             {bar}\n\
             weights 3.0 MiB  in flight 1.0 MiB  kv 512.0 KiB  prefix 256.0 KiB  scratch 256.0 KiB\n\
             uploads 0 B/s  hits 75.0 %  evictions 4  requests 1 running, 0 queued\n\
             kv in host memory 12.0 MiB of 64.0 MiB  saved 9  restored 4  dropped 1\n\
             waits for /models/far.gguf (far) for 7s\n\
             \n\
             > tiny  1.0 MiB of 3.0 MiB (33.3 %)  0 requests  kv 512.0 KiB  hits 75.0 %\n    \
             *>.\n\
             \n\
             REQUEST  STATE             TOKENS  TOKENS/S   LONG GAP      AGE  MODEL, CLIENT\n      \
             7  decode            12 + 9      38.0    41.2 ms       2s  tiny, user:1000\n"
        )
    );
}

#[tokio::test]
async fn without_a_terminal_the_board_says_what_prints_it_as_text() {
    let daemon = FakeDaemon::start();
    let output = ctl(&daemon, &["top"]).await;
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(
        error.contains("top needs a terminal; --once prints the board as text"),
        "{error}"
    );
    let output = ctl(&daemon, &["--json", "top"]).await;
    let board: serde_json::Value = serde_json::from_str(success(&output)).unwrap();
    assert_eq!(board["status"]["state"], "serving");
    assert_eq!(board["models"][0]["name"], "tiny");
    assert_eq!(board["upload_bytes_per_s"], 0);
}

#[tokio::test]
async fn why_prints_the_parts_of_a_request_and_what_would_help() {
    let daemon = FakeDaemon::start();
    let output = ctl(&daemon, &["why"]).await;
    let text = success(&output).to_owned();
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let request = "request 3 (req-3) of user:1000: Chat of tiny, Ok, 120.0 ms";
    for line in [
        request,
        "12 prompt tokens (4 reused), 8 new tokens",
        "90.0 ms   75 %  waiting for uploads of weights",
        "30.0 ms   25 %  waiting in the queue",
        "30.0 ms of big for another client",
        "uploaded: 3.0 MiB, 1.0 MiB of it from disk, at 2.00 GB/s of the 8.00 GB/s that the link is measured to bring",
        "2.0 MiB: evicted for big",
        "would help: 2.0 MiB more budget",
        "no effect: prefix_cache: none of the 40 prompt tokens were known",
    ] {
        assert!(lines.contains(&line), "{line:?} is not in\n{text}");
    }
    let output = ctl(&daemon, &["--json", "why", "3"]).await;
    let one: serde_json::Value = serde_json::from_str(success(&output)).unwrap();
    assert_eq!(
        (&one["cause"], &one["total_ms"]),
        (&"uploads".into(), &120.0.into())
    );
}

#[tokio::test]
async fn why_lists_the_last_requests_with_their_first_causes() {
    let daemon = FakeDaemon::start();
    let output = ctl(&daemon, &["why", "--list"]).await;
    let text = success(&output).to_owned();
    assert_eq!(text.lines().count(), 3, "{text}");
    let first = text.lines().nth(1).unwrap_or_default();
    assert!(
        first.contains("75 % waiting for uploads of weights"),
        "{first}"
    );
    let output = ctl(&daemon, &["why", "4"]).await;
    assert_eq!(output.status.code(), Some(5), "an unknown request");
    let output = ctl(&daemon, &["why", "3", "--list"]).await;
    assert_eq!(output.status.code(), Some(2));
}
