//! A restart that brings back what was in use.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::declared::complete;
use crate::program::{Daemon, PATIENCE, host, start_logging_to};

const MODELS: [&str; 3] = ["one", "two", "three"];

/// A directory with models, of which a daemon's note is kept beside.
struct Ground(tempfile::TempDir);

impl Ground {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let fixtures = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
        for (model, file) in MODELS
            .into_iter()
            .zip(["tiny-llama-Q4_K_M", "tiny-qwen3-Q8_0"].iter().cycle())
        {
            let file = fixtures.join(format!("{file}.gguf"));
            std::fs::copy(file, dir.path().join(format!("{model}.gguf"))).unwrap();
        }
        Self(dir)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn http(&self) -> PathBuf {
        self.path("http")
    }

    /// Starts a daemon with more arguments, whose state directory is this one.
    fn start(&self, arguments: &[&str]) -> Daemon {
        let _ = std::fs::remove_file(self.path("notify"));
        let mut command = host(self.0.path(), &self.path("s"));
        command.arg("--http-socket").arg(self.http());
        command.args(arguments);
        command.env("STATE_DIRECTORY", self.0.path());
        let log = std::fs::File::create(self.path("log")).unwrap();
        // It is ready before anything is brought back.
        start_logging_to(self.0.path(), &mut command, Stdio::from(log)).0
    }

    fn ask(&self, model: &str) {
        assert_eq!(complete(&self.http(), model), "HTTP/1.1 200 OK", "{model}");
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap()
    }

    /// The share of each model's weights that is resident, of those that are loaded.
    fn resident(&self) -> Vec<(&'static str, f64)> {
        let mut stream = UnixStream::connect(self.http()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let head = "GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
        stream.write_all(head.as_bytes()).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        let of = |model: &'static str| {
            let begin = format!("rocmforge_model_residency_ratio{{model=\"{model}\"}} ");
            let found = text.lines().find_map(|line| line.strip_prefix(&begin));
            found.map(|share| (model, share.parse().unwrap()))
        };
        MODELS.into_iter().filter_map(of).collect()
    }

    fn wait(&self, what: &str, mut is_so: impl FnMut() -> bool) {
        let give_up = Instant::now() + PATIENCE;
        while !is_so() {
            assert!(Instant::now() < give_up, "{what}: {}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits until the two models that were used are resident, and the third is not even loaded.
    fn two_are_back(&self) {
        let both = [("one", 1.0), ("two", 1.0)];
        self.wait("both are back", || self.resident() == both);
        self.wait("it says so", || self.log().contains("2 models, "));
        assert_eq!(self.resident(), both);
        assert!(!self.log().contains("/v1/completions"), "{}", self.log());
    }
}

fn stop(daemon: Daemon) {
    daemon.signal(Signal::SIGTERM);
    assert_eq!(daemon.ended().0, Some(0));
}

#[test]
fn what_was_in_use_is_back_after_a_restart_without_a_request() {
    let ground = Ground::new();
    let daemon = ground.start(&[]);
    assert!(ground.resident().is_empty());
    ground.ask("one");
    ground.ask("two");
    stop(daemon);

    let daemon = ground.start(&[]);
    ground.two_are_back();
    // Nobody has asked: the next daemon does the same.
    stop(daemon);
    let daemon = ground.start(&[]);
    ground.ask("one");
    ground.wait("both", || ground.resident().len() == 2);
    let loads = |model: &str| {
        let line = format!("rpc=\"Load\" model=\"{model}\"");
        ground.log().matches(&line).count()
    };
    assert_eq!((loads("one"), loads("two")), (1, 1), "{}", ground.log());
    stop(daemon);

    let daemon = ground.start(&["--restart-warm", "off"]);
    std::thread::sleep(Duration::from_millis(300));
    assert!(ground.resident().is_empty());
    stop(daemon);
}

#[test]
fn what_was_in_use_is_back_after_kill_9() {
    let ground = Ground::new();
    // Beside the file of models that are loaded by name.
    let remember = ground.path("models.json");
    let arguments = ["--remember", remember.to_str().unwrap()];
    let daemon = ground.start(&arguments);
    ground.ask("one");
    ground.ask("two");
    let note = ground.path("models.json.warm");
    let is_noted = |path: &Path| {
        let note = std::fs::read_to_string(path).unwrap_or_default();
        note.contains("\"one\"") && note.contains("\"two\"")
    };
    ground.wait("the note is written", || is_noted(&note));
    assert!(!ground.path("warm.json").exists());
    // SIGKILL.
    drop(daemon);

    let daemon = ground.start(&arguments);
    ground.two_are_back();
    stop(daemon);
}

#[test]
fn a_damaged_note_holds_up_no_start_and_is_told_once() {
    let ground = Ground::new();
    let note = ground.path("warm.json");
    for damaged in [
        "",
        "{\"version\": 1, \"tries\": 0, \"mod",
        "{\"version\": 7}",
    ] {
        std::fs::write(&note, damaged).unwrap();
        let daemon = ground.start(&[]);
        ground.ask("one");
        stop(daemon);
        let log = ground.log();
        assert_eq!(log.matches("restart_warm").count(), 1, "{damaged}: {log}");
        let written = std::fs::read_to_string(&note).unwrap();
        assert!(written.contains("\"one\""), "{written}");
    }
}
