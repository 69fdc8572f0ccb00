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
             *>.\n"
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
