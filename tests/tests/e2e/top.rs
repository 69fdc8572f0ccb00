//! `rocmforgectl top` beside a real daemon: as text, and on a terminal with keys and sizes.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nix::pty::{Winsize, openpty};
use nix::sys::termios::{LocalFlags, tcgetattr};
use rocmforge_client::Client;
use rocmforge_client::proto::v1::{Model, Segment};
use rocmforge_tests::binaries;
use rocmforge_tests::daemon::{Daemon, Options};
use rocmforge_tests::fixtures::{self, TINY_LLAMA, TINY_QWEN3};
use rocmforge_tests::session::{ask, connect, load, try_load};

/// Until something is on the screen.
const SHOWN_WITHIN: Duration = Duration::from_secs(60);

/// `rocmforgectl top` on a terminal of its own, and everything that it wrote there.
struct Top {
    child: Child,
    terminal: File,
    slave: OwnedFd,
    written: Arc<Mutex<Vec<u8>>>,
}

impl Top {
    fn start(daemon: &Daemon) -> Top {
        let size = Winsize {
            ws_row: 24,
            ws_col: 80,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        let pty = openpty(&size, None).expect("a pseudo terminal");
        let stdio = || Stdio::from(pty.slave.try_clone().expect("a descriptor"));
        // Only a process in the session of a terminal is told of its size.
        let child = Command::new("setsid")
            .args(["--ctty", "--wait"])
            .arg(binaries::rocmforgectl())
            .arg("--socket")
            .arg(daemon.socket())
            .arg("top")
            .env("TERM", "xterm")
            .stdin(stdio())
            .stdout(stdio())
            .stderr(stdio())
            .spawn()
            .expect("setsid starts");
        let terminal = File::from(pty.master);
        let written = Arc::new(Mutex::new(Vec::new()));
        let (mut reading, output) = (
            terminal.try_clone().expect("a descriptor"),
            Arc::clone(&written),
        );
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(length @ 1..) = reading.read(&mut buffer) {
                output
                    .lock()
                    .expect("unpoisoned")
                    .extend_from_slice(&buffer[..length]);
            }
        });
        Top {
            child,
            terminal,
            slave: pty.slave,
            written,
        }
    }

    /// Forgets what was written, and sends keys.
    fn press(&mut self, keys: &str) {
        self.written.lock().expect("unpoisoned").clear();
        self.terminal
            .write_all(keys.as_bytes())
            .expect("an open terminal");
    }

    fn resize(&mut self, columns: u16, rows: u16) {
        self.written.lock().expect("unpoisoned").clear();
        let stty = Command::new("stty")
            .args(["cols", &columns.to_string(), "rows", &rows.to_string()])
            .stdin(Stdio::from(self.slave.try_clone().expect("a descriptor")))
            .status()
            .expect("stty starts");
        assert!(stty.success());
    }

    /// Waits until these words were written since the last key. Only cells that changed are
    /// written, so a word is one that was not there before.
    fn wait_for(&self, words: &[&str]) {
        let since = Instant::now();
        loop {
            let written = self.written.lock().expect("unpoisoned").clone();
            let text = String::from_utf8_lossy(&written);
            if words.iter().all(|word| text.contains(word)) {
                return;
            }
            assert!(since.elapsed() < SHOWN_WITHIN, "{words:?} not in {text:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn has_echo(&self) -> bool {
        let modes = tcgetattr(&self.slave).expect("a terminal");
        modes.local_flags.contains(LocalFlags::ECHO)
    }
}

impl Drop for Top {
    fn drop(&mut self) {
        // Gone already where the test passed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until the first model is as it should be after a key.
async fn until(client: &Client, is_so: impl Fn(&Model) -> bool) {
    let since = Instant::now();
    loop {
        let model = client.get(TINY_LLAMA).await.expect("it is loaded");
        if is_so(&model) {
            return;
        }
        assert!(since.elapsed() < SHOWN_WITHIN, "{model:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn top_shows_models_obeys_keys_and_sizes_and_restores_the_terminal() {
    let daemon = Daemon::start(&Options::default());
    let client = connect(&daemon).await;
    load(&client, TINY_LLAMA).await;
    load(&client, TINY_QWEN3).await;
    let mut top = Top::start(&daemon);
    top.wait_for(&["serving", "tiny-llama", "tiny-qwen3", "quit"]);
    assert!(!top.has_echo(), "raw mode");

    top.press("p");
    top.wait_for(&["segments", "pinned"]);
    let all = |model: &Model, is: fn(&Segment) -> bool| model.segments.iter().all(is);
    until(&client, |model| all(model, |segment| segment.pinned)).await;
    top.press("P");
    until(&client, |model| all(model, |segment| !segment.pinned)).await;
    top.press("l");
    until(&client, |model| model.resident_bytes == model.weight_bytes).await;
    top.press("e");
    until(&client, |model| model.resident_bytes == 0).await;

    top.press("b64MiB\r");
    top.wait_for(&["64.0"]);
    let stats = client.cache_stats().await.expect("an answer");
    assert_eq!(stats.budget_bytes, 64 << 20);

    // On two lines there is the foot alone, on ten the model that is chosen.
    for (columns, rows) in [(20, 2), (1, 1), (200, 60), (40, 10)] {
        top.resize(columns, rows);
    }
    top.wait_for(&["tiny-llama"]);
    top.press("j");
    top.wait_for(&["qwen3"]);
    top.press("u");
    top.wait_for(&["unloaded"]);
    let status = client.status().await.expect("an answer");
    let names: Vec<_> = status.models.iter().map(|model| &model.name).collect();
    assert_eq!(names, [TINY_LLAMA]);

    top.press("q");
    let status = top.child.wait().expect("it ends");
    assert!(status.success(), "{status}");
    top.wait_for(&["\u{1b}[?1049l"]);
    assert!(top.has_echo(), "the terminal's mode is as before");
    daemon.stop();
}

#[test]
fn top_ends_at_once_while_the_daemon_does_not_respond() {
    let daemon = Daemon::start(&Options::default());
    let mut top = Top::start(&daemon);
    top.wait_for(&["serving"]);
    let pid = nix::unistd::Pid::from_raw(i32::try_from(daemon.pid()).expect("a process id"));
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGSTOP).expect("our own process");
    // The sample and the call wait for the daemon now.
    top.press("b50%\r");
    std::thread::sleep(Duration::from_millis(1500));
    top.press("\u{3}");
    let status = top.child.wait().expect("it ends");
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGCONT).expect("our own process");
    assert!(status.success(), "{status}");
    daemon.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn top_prints_once_what_the_daemon_holds() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    // A file name that a terminal would obey.
    let hostile = dir.path().join("a\u{1b}[31mb.gguf");
    std::fs::copy(fixtures::path(TINY_LLAMA), &hostile).expect("a writable directory");
    let daemon = Daemon::start(&Options::default().model_dir(dir.path()));
    let client = connect(&daemon).await;
    load(&client, TINY_LLAMA).await;
    let hostile = try_load(&client, &hostile, "").await;
    let hostile = hostile.expect("a whole file");
    ask(&client, TINY_LLAMA, &fixtures::exam()[0]).await;
    assert!(!hostile.name.is_empty());
    let output = Command::new(binaries::rocmforgectl())
        .arg("--socket")
        .arg(daemon.socket())
        .args(["top", "--once"])
        .output()
        .expect("rocmforgectl starts");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    assert!(!text.contains('\u{1b}'), "{text:?}");
    let model = client.get(TINY_LLAMA).await.expect("loaded");
    let map: String = text
        .lines()
        .skip_while(|line| !line.contains(TINY_LLAMA))
        .skip(1)
        .take_while(|line| line.starts_with("    "))
        .map(str::trim_start)
        .collect();
    assert_eq!(map, "#".repeat(model.segments.len()), "{text}");
    assert!(text.contains("requests 0 running, 0 queued"), "{text}");
    assert!(text.contains("(100.0 %)  0 requests"), "{text}");
    daemon.stop();
}

/// `rocmforgectl why` of a real request: its parts are all of its time, and what it names as the
/// slowest of the last ones is one that the list has.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn why_says_where_the_time_of_a_request_went() {
    let daemon = Daemon::start(&Options::default());
    let client = connect(&daemon).await;
    load(&client, TINY_LLAMA).await;
    let why = |args: &[&str]| {
        let output = Command::new(binaries::rocmforgectl())
            .arg("--socket")
            .arg(daemon.socket())
            .args(args)
            .output()
            .expect("rocmforgectl starts");
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        (
            output.status.code(),
            String::from_utf8(output.stdout).expect("UTF-8"),
            stderr,
        )
    };
    let (code, _, stderr) = why(&["why"]);
    assert_eq!(code, Some(1), "nothing has ended yet");
    assert!(stderr.contains("no request of yours has ended"), "{stderr}");
    for question in &fixtures::exam()[..3] {
        ask(&client, TINY_LLAMA, question).await;
    }
    let (code, text, stderr) = why(&["why", "1"]);
    assert_eq!(code, Some(0), "{stderr}");
    assert!(text.starts_with("request 1 "), "{text}");
    assert!(text.contains("computing new tokens"), "{text}");
    assert!(text.contains("uploaded for the first time"), "{text}");
    let (_, json, _) = why(&["--json", "why"]);
    let one: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    let total = one["total_ms"].as_f64().expect("a time");
    let parts = one["parts"].as_array().expect("parts").iter();
    let sum: f64 = parts.filter_map(|part| part["ms"].as_f64()).sum();
    assert!((sum - total).abs() <= total * 0.01, "{json}");
    let (_, list, _) = why(&["why", "--list"]);
    assert_eq!(list.lines().count(), 4, "{list}");
    let (_, unknown, stderr) = why(&["why", "4"]);
    assert!(
        unknown.is_empty() && stderr.contains("why --list"),
        "{stderr}"
    );
    daemon.stop();
}
