//! The page `/ui` in headless Chromium, beside a real daemon.
//!
//! `ROCMFORGE_CHROMIUM` names the program; given, it has to work. Without it `chromium` is tried,
//! and the test is skipped with a printed reason where there is none.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rocmforge_tests::daemon::{Daemon, HTTP_TOKEN, Options};
use rocmforge_tests::fixtures::{self, TINY_LLAMA};
use rocmforge_tests::node::Node;
use rocmforge_tests::session::connect;
use rocmforge_tests::skip;

const TEST: &str = "the_page_works_in_a_browser";
const CHROMIUM_ENV: &str = "ROCMFORGE_CHROMIUM";
/// Where pictures of the page are written, if anywhere.
const SHOTS_ENV: &str = "ROCMFORGE_PAGE_SHOTS";

/// Models that nobody asks.
const OTHERS: usize = 1_000;

fn chromium() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os(CHROMIUM_ENV).filter(|path| !path.is_empty()) {
        let named = PathBuf::from(named);
        assert!(named.is_file(), "{CHROMIUM_ENV}: {}", named.display());
        return Some(named);
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut programs = std::env::split_paths(&path).map(|dir| dir.join("chromium"));
    let found = programs.find(|program| program.is_file());
    if found.is_none() {
        skip(TEST, "no chromium (install it, or set ROCMFORGE_CHROMIUM)");
    }
    found
}

/// A model that never ends by itself, and says markup for ` the`.
fn endless() -> Vec<u8> {
    let mut bytes = std::fs::read(fixtures::path(TINY_LLAMA)).expect("the fixture is there");
    let mut replace = |from: &[u8], to: &[u8]| {
        let find = |bytes: &[u8]| bytes.windows(from.len()).position(|part| part == from);
        assert!(find(&bytes).is_some(), "nothing to replace");
        while let Some(at) = find(&bytes) {
            bytes[at..at + to.len()].copy_from_slice(to);
        }
    };
    replace(b"<|im_end|>", b"<|im_enx|>");
    replace(b"<|endoftext|>", b"<|endoftexx|>");
    replace(
        "\x05\0\0\0\0\0\0\0\u{120}the".as_bytes(),
        b"\x05\0\0\0\0\0\0\0<img>",
    );
    for (key, value) in [
        ("tokenizer.ggml.eos_token_id", u32::MAX),
        ("llama.context_length", 1 << 17),
    ] {
        let mut parts = bytes.windows(key.len());
        let at = parts.position(|part| part == key.as_bytes());
        // Behind the key is its type, of four bytes.
        let at = at.expect("the fixture has the key") + key.len() + 4;
        bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }
    bytes
}

fn write_models(dir: &Path) {
    std::fs::write(dir.join("endless.gguf"), endless()).expect("a writable directory");
    let agent = dir.join("agent.gguf");
    std::fs::copy(fixtures::path(TINY_LLAMA), &agent).expect("the fixture is there");
    let others = (0..OTHERS).map(|n| format!("other-{n:04}.gguf"));
    for name in others {
        std::fs::hard_link(&agent, dir.join(name)).expect("a link");
    }
}

/// Waits until the script asks for something, does it, and says so.
fn when_asked(signals: &Path, name: &str, script: &impl Fn() -> bool, work: impl FnOnce()) {
    while !signals.join(format!("{name}.asked")).exists() {
        // Its own message says why.
        if script() {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    work();
    std::fs::write(signals.join(format!("{name}.done")), "").expect("a writable directory");
}

#[test]
fn the_page_works_in_a_browser() {
    let (Some(node), Some(chromium)) = (Node::find(TEST), chromium()) else {
        return;
    };
    if !(node.has("playwright-core") && node.has("axe-core")) {
        return skip(TEST, "packages are missing (npm ci in tests/node)");
    }
    let dir = || tempfile::tempdir().expect("a temporary directory");
    let (models, token, signals) = (dir(), dir(), dir());
    write_models(models.path());
    let options = || Options::default().only_model_dir(models.path());
    let daemon = Daemon::start(&options().http_with_token(token.path()));
    let url = daemon.url();
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let client = runtime.block_on(connect(&daemon));
    let shots = std::env::var(SHOTS_ENV).ok();
    let said = std::thread::scope(|scope| {
        let script = scope.spawn(|| {
            let program = chromium.to_str().expect("a path of plain characters");
            let place = signals.path().to_str().expect("a path of plain characters");
            let mut arguments = vec![url.as_str(), HTTP_TOKEN, program, place];
            arguments.extend(shots.as_deref());
            node.run("page.mjs", &arguments)
        });
        let ended = || script.is_finished();
        when_asked(signals.path(), "evict", &ended, || {
            let cleared = runtime.block_on(client.cache_clear(None));
            cleared.expect("what no pass uses is evicted");
        });
        when_asked(signals.path(), "stop", &ended, || {
            daemon.stop();
        });
        let again = std::cell::Cell::new(None);
        when_asked(signals.path(), "start", &ended, || {
            let address = url.trim_start_matches("http://");
            let file = token.path().join("token");
            let file = file.to_str().expect("a path of plain characters");
            let options = options().arg("--http-listen").arg(address);
            again.set(Some(Daemon::start(
                &options.arg("--http-token-file").arg(file),
            )));
        });
        let said = script.join();
        if let Some(daemon) = again.take() {
            daemon.stop();
        }
        said.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    let scenarios = [
        "token",
        "models",
        "chat",
        "stopped",
        "images",
        "tools",
        "maps",
        "requests",
        "restarted",
        "steady",
        "accessible",
    ];
    assert_eq!(said.lines().collect::<Vec<_>>(), scenarios);
}
