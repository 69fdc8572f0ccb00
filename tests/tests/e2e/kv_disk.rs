//! KV cache on disk: after kill -9, unload and SIGTERM a conversation goes on where it was, with
//! the text of a prompt that is computed.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rocmforge_client::Client;
use rocmforge_client::proto::v1::KvDisk;
use rocmforge_tests::daemon::{Daemon, Options, PATIENCE};
use rocmforge_tests::fixtures::{self, TINY_LLAMA};
use rocmforge_tests::session::{Answer, connect, continuation, generate, greedy, load};
use serde_json::{Value, json};

/// Tokens of a KV page.
const PAGE: u32 = 32;

fn options(kv_disk: &Path) -> Options {
    let path = kv_disk.to_str().expect("a path of plain characters");
    Options::default().http().arg("--kv-disk").arg(path)
}

async fn disk(client: &Client) -> KvDisk {
    let stats = client.cache_stats().await.expect("statistics");
    stats.kv_disk.expect("there is a KV cache on disk")
}

/// Waits until the pages of a request are on disk, so many in all.
async fn written(client: &Client, entries: u64) {
    let begin = Instant::now();
    loop {
        let disk = disk(client).await;
        if disk.entries >= entries && disk.queued_bytes == 0 {
            return;
        }
        assert!(begin.elapsed() < PATIENCE, "{entries} pages: {disk:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn ask(client: &Client, prompt: &str) -> Answer {
    let request = continuation(TINY_LLAMA, prompt, greedy(40));
    generate(client, request).await.expect("a text")
}

/// The text and the cached tokens that the same prompt has for a client over HTTP, who is another
/// one than the user at the socket.
fn ask_over_http(daemon: &Daemon, prompt: &str) -> (String, u64) {
    let model = TINY_LLAMA.trim_end_matches(".gguf");
    let body = json!({"model": model, "prompt": prompt, "max_tokens": 40, "temperature": 0});
    let body = body.to_string();
    let address = daemon.url();
    let address = address.trim_start_matches("http://");
    let mut stream = TcpStream::connect(address).expect("it listens");
    let timeout = Some(PATIENCE);
    stream.set_read_timeout(timeout).expect("a time above zero");
    let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close";
    let length = body.len();
    write!(stream, "{head}\r\nContent-Length: {length}\r\n\r\n{body}").expect("it reads");
    let mut response = String::new();
    stream.read_to_string(&mut response).expect("UTF-8");
    let body = response.split_once("\r\n\r\n").expect("a head").1;
    let body: Value = serde_json::from_str(body).expect("JSON");
    let text = body["choices"][0]["text"].as_str().expect("a text");
    let cached = &body["usage"]["prompt_tokens_details"]["cached_tokens"];
    (text.to_owned(), cached.as_u64().unwrap_or_default())
}

/// Tokens of a prompt that are computed where all before its last page was found.
fn computed(answer: &Answer) -> u32 {
    answer.done.prompt_tokens - answer.done.reused_tokens
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_conversation_goes_on_after_kill_9_unload_and_sigterm() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("kv");
    let stories = fixtures::stories().join("\n");
    let mut prompt: String = stories.chars().take(1500).collect();

    let daemon = Daemon::start(&options(&path));
    let client = connect(&daemon).await;
    load(&client, TINY_LLAMA).await;
    let first = ask(&client, &prompt).await;
    assert_eq!(first.done.reused_tokens, 0);
    let positions = first.done.prompt_tokens + first.done.generated_tokens - 1;
    assert!(first.done.prompt_tokens > 10 * PAGE, "a long prompt");
    written(&client, u64::from(positions / PAGE)).await;
    prompt += &first.text;
    prompt += " And then";
    // SIGKILL.
    drop((client, daemon));

    // The text without any cache.
    let daemon = Daemon::start(&Options::default().arg("--prefix-cache").arg("off"));
    let client = connect(&daemon).await;
    load(&client, TINY_LLAMA).await;
    let expected = ask(&client, &prompt).await;
    assert_eq!(expected.done.reused_tokens, 0);
    daemon.stop();

    let daemon = Daemon::start(&options(&path));
    let client = connect(&daemon).await;
    load(&client, TINY_LLAMA).await;
    let (text, cached) = ask_over_http(&daemon, &prompt);
    assert_eq!(
        (text.as_str(), cached),
        (expected.text.as_str(), 0),
        "another client"
    );
    assert_eq!(disk(&client).await.requests, 0);
    let second = ask(&client, &prompt).await;
    assert_eq!((&second.text, &second.ids), (&expected.text, &expected.ids));
    // The answer may have other tokens as text than it had as it was generated.
    let found = second.done.reused_tokens;
    assert!(
        found + PAGE >= first.done.prompt_tokens,
        "{found} of {:?}",
        first.done
    );
    let read = disk(&client).await;
    assert_eq!((read.requests, read.reused_tokens), (1, u64::from(found)));
    assert_eq!(
        (read.skipped, read.read_errors, read.write_errors),
        (0, 0, 0)
    );

    // Unloaded at once: what is not on disk yet is handed over before.
    client.unload(TINY_LLAMA, false).await.expect("it is idle");
    load(&client, TINY_LLAMA).await;
    let third = ask(&client, &prompt).await;
    assert_eq!(third.ids, expected.ids);
    assert!(computed(&third) <= PAGE, "{:?}", third.done);

    // Ended in order, at once.
    daemon.stop();
    let daemon = Daemon::start(&options(&path));
    let client = connect(&daemon).await;
    load(&client, TINY_LLAMA).await;
    let fourth = ask(&client, &prompt).await;
    assert_eq!(fourth.ids, expected.ids);
    assert!(computed(&fourth) <= PAGE, "{:?}", fourth.done);
    let (_, cached) = ask_over_http(&daemon, &prompt);
    assert!(cached > 0, "the client over HTTP has pages of its own");
    daemon.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_daemons_do_not_share_a_directory() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("kv");
    let daemon = Daemon::start(&options(&path));
    let ended = Daemon::refused(&options(&path));
    assert!(!ended.status.success());
    assert!(
        ended.log.contains("is in use by another process"),
        "{}",
        ended.log
    );
    daemon.stop();
    let small = options(&path).arg("--kv-disk-budget").arg("1MiB");
    let ended = Daemon::refused(&small);
    assert!(
        ended.log.contains("kv_disk_budget is 1048576 bytes"),
        "{}",
        ended.log
    );
}
