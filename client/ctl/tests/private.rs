//! `run` where no daemon listens: the one that it starts, and that it is gone
//! afterwards however the command ended.
//!
//! The daemon is this test's own executable, which a script beside a copy of
//! rocmforgectl starts in the place of rocmforged.

use std::path::Path;
use std::process::{Output, Stdio};
use std::time::Duration;

use crate::fake::{FakeDaemon, STORY};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::io::AsyncReadExt;
use tokio::process::Command;

/// Variable that makes this executable a daemon on the socket that it names.
const SERVE_ENV: &str = "ROCMFORGECTL_TEST_SERVE";

/// A run that takes longer never ends.
const HANGS: Duration = Duration::from_secs(30);

async fn ended(mut command: Command) -> Output {
    tokio::time::timeout(HANGS, command.output())
        .await
        .expect("rocmforgectl hangs")
        .expect("rocmforgectl starts")
}

/// Not a test by itself: what the script starts.
#[tokio::test]
async fn stand_in_for_rocmforged() {
    let Some(socket) = std::env::var_os(SERVE_ENV) else {
        return;
    };
    let _daemon = FakeDaemon::start_at(Path::new(&socket));
    tokio::time::sleep(Duration::from_secs(60)).await;
    panic!("nobody stopped the private daemon");
}

struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    /// A directory with rocmforgectl, the stand-in and a file to load.
    fn new() -> Place {
        let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let dir = tempfile::tempdir_in(target).expect("a directory");
        let at = |name: &str| dir.path().join(name);
        let ctl = env!("CARGO_BIN_EXE_rocmforgectl");
        std::fs::hard_link(ctl, at("rocmforgectl")).expect("a second name");
        std::fs::create_dir(at("tmp")).expect("a directory");
        std::fs::write(at("story.gguf"), b"GGUF").expect("a file");
        let script = format!(
            "echo $$ > {0}/pid\necho \"$3 $4\" > {0}/args\n\
             {SERVE_ENV}=\"$2\" exec {1} --exact private::stand_in_for_rocmforged",
            dir.path().display(),
            std::env::current_exe().expect("this test").display(),
        );
        rocmforge_test_scripts::write(&at("rocmforged"), &script);
        Place { dir }
    }

    fn run(&self, prompt: &str) -> Command {
        let dir = self.dir.path();
        let mut command = Command::new(dir.join("rocmforgectl"));
        command
            .args(["run", "--private"])
            .arg(dir.join("story.gguf"))
            .arg(prompt)
            .env("TMPDIR", dir.join("tmp"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        command
    }

    fn read(&self, name: &str) -> String {
        let path = self.dir.path().join(name);
        std::fs::read_to_string(path).expect("the stand-in was started")
    }

    /// Panics unless the daemon has ended and left nothing behind.
    fn is_tidy(&self) {
        let pid = Pid::from_raw(self.read("pid").trim().parse().expect("a number"));
        assert_eq!(kill(pid, None), Err(Errno::ESRCH), "the daemon still runs");
        let left = std::fs::read_dir(self.dir.path().join("tmp")).expect("it is there");
        assert_eq!(left.count(), 0, "its directory is still there");
    }
}

#[tokio::test]
async fn a_private_daemon_serves_the_run_and_is_gone_after_it() {
    let place = Place::new();
    let output = ended(place.run("Tell me")).await;
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        format!("{}\n", STORY.concat())
    );
    let dir = std::fs::canonicalize(place.dir.path()).unwrap();
    assert_eq!(
        place.read("args"),
        format!("--model-dir {}\n", dir.display())
    );
    place.is_tidy();
}

#[tokio::test]
async fn a_private_daemon_is_gone_after_a_failure() {
    let place = Place::new();
    let output = ended(place.run("changed")).await;
    assert_eq!(output.status.code(), Some(6));
    place.is_tidy();
}

#[tokio::test]
async fn a_private_daemon_is_gone_after_an_interrupt() {
    for (signal, code) in [(Signal::SIGINT, 130), (Signal::SIGTERM, 143)] {
        let place = Place::new();
        let mut child = place.run("hang").spawn().unwrap();
        let mut first = [0; 4];
        child
            .stdout
            .as_mut()
            .unwrap()
            .read_exact(&mut first)
            .await
            .unwrap();
        let pid = Pid::from_raw(child.id().unwrap() as i32);
        kill(pid, signal).unwrap();
        let output = tokio::time::timeout(HANGS, child.wait_with_output())
            .await
            .unwrap()
            .unwrap();
        assert_eq!(output.status.code(), Some(code));
        place.is_tidy();
    }
}
