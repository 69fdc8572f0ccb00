//! A daemon for the occasion: started for one command, stopped with it.
//!
//! It listens in a directory that only this user can enter, and may load from
//! one directory only. It sits in a slot that the program's main function also
//! holds, so that it is stopped however the command ends.
//!
//! Where this program is killed, the kernel closes the pipe that is the daemon's standard input,
//! and the daemon ends and removes its directory by itself.
//!
//! Once [`PrivateSlot::stop`] has returned, the process is gone and so is its directory, but for
//! one that is being started just then.

use std::env;
use std::ffi::OsString;
use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rocmforge_client::{Client, Error};
use tempfile::TempDir;

/// The program to start.
const DAEMON: &str = "rocmforged";
/// Flag by which the private daemon ends when its standard input is closed; that is a pipe from
/// this process only.
const ENDS_WITH_INPUT: &str = "--ends-with-input";
/// Longest time until the daemon listens.
const START_MS_MAX: u64 = 30_000;
/// Pause between looks at whether it listens.
const START_POLL_MS: u64 = 10;
/// Longest time from SIGTERM to the end; then it is killed.
const STOP_MS_MAX: u64 = 3_000;
/// Pause between looks at whether it ended.
const STOP_POLL_MS: u64 = 5;
/// How much of the end of its log an error quotes.
const LOG_LINES_MAX: usize = 20;

/// Where the private daemon is, while there is one.
#[derive(Clone, Default)]
pub(crate) struct PrivateSlot(Arc<Mutex<Option<PrivateDaemon>>>);

impl PrivateSlot {
    /// Starts `daemon` and connects to it. It may load below `model_dir`.
    pub(crate) async fn start(&self, daemon: &Path, model_dir: &Path) -> anyhow::Result<Client> {
        let started = PrivateDaemon::start(daemon, model_dir)?;
        let socket = started.socket();
        // In the slot before the first wait: an interrupt finds it there.
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(started);
        let deadline = Instant::now() + Duration::from_millis(START_MS_MAX);
        loop {
            match Client::connect(Some(&socket)).await {
                Ok(client) => return Ok(client),
                Err(Error::NoDaemon { .. }) => {}
                Err(error) => return Err(error.into()),
            }
            self.check_alive()?;
            if Instant::now() > deadline {
                bail!(
                    "{} did not listen within {START_MS_MAX} ms; run it by hand with --log debug to see why",
                    daemon.display()
                );
            }
            tokio::time::sleep(Duration::from_millis(START_POLL_MS)).await;
        }
    }

    /// Stops the daemon, if there is one, and waits for its end.
    pub(crate) fn stop(&self) {
        let daemon = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(daemon);
    }

    fn check_alive(&self) -> anyhow::Result<()> {
        let mut slot = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match slot.as_mut() {
            Some(daemon) => daemon.check_alive(),
            None => bail!("the private daemon was stopped"),
        }
    }
}

/// A running daemon. Dropping it stops it.
struct PrivateDaemon {
    child: Child,
    dir: TempDir,
}

impl PrivateDaemon {
    fn start(daemon: &Path, model_dir: &Path) -> anyhow::Result<PrivateDaemon> {
        let dir = tempfile::Builder::new()
            .prefix("rocmforgectl-")
            .permissions(Permissions::from_mode(0o700))
            .tempdir()
            .context("cannot make a directory for the private daemon; see TMPDIR")?;
        let log = File::create(dir.path().join("log"))?;
        let child = Command::new(daemon)
            .arg("--socket")
            .arg(dir.path().join("rocmforged.sock"))
            .arg("--model-dir")
            .arg(model_dir)
            // It is no service of anybody's.
            .env_remove("NOTIFY_SOCKET")
            .env_remove("LISTEN_FDS")
            .env_remove("LISTEN_PID")
            .env_remove(rocmforge_client::SOCKET_ENV)
            // The last one: it ends once this process does, and its input with it.
            .arg(ENDS_WITH_INPUT)
            .stdin(Stdio::piped())
            .stdout(log.try_clone()?)
            .stderr(log)
            // Ctrl-C goes to this program, which then stops it in order.
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {}", daemon.display()))?;
        Ok(PrivateDaemon { child, dir })
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("rocmforged.sock")
    }

    fn check_alive(&mut self) -> anyhow::Result<()> {
        let Some(status) = self.child.try_wait()? else {
            return Ok(());
        };
        let log = std::fs::read(self.dir.path().join("log")).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = log.lines().collect();
        let tail = lines[lines.len().saturating_sub(LOG_LINES_MAX)..].join("\n  ");
        bail!("the private daemon ended at once ({status}):\n  {tail}");
    }

    fn wait_ms(&mut self, ms: u64) -> Option<ExitStatus> {
        let deadline = Instant::now() + Duration::from_millis(ms);
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(STOP_POLL_MS));
                }
                Ok(None) | Err(_) => return None,
            }
        }
    }
}

impl Drop for PrivateDaemon {
    fn drop(&mut self) {
        if self.wait_ms(0).is_some() {
            return;
        }
        if let Ok(pid) = i32::try_from(self.child.id()) {
            // Not waited for yet, so the id is still this child's.
            let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
        }
        if self.wait_ms(STOP_MS_MAX).is_none() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// The daemon's program: beside this one unless configured otherwise, else in PATH.
pub(crate) fn find_daemon(looks_beside: bool) -> anyhow::Result<PathBuf> {
    let beside = env::current_exe()
        .ok()
        .filter(|_| looks_beside)
        .and_then(|program| program.parent().map(Path::to_owned));
    find_in(beside, env::var_os("PATH"))
}

fn find_in(beside: Option<PathBuf>, path: Option<OsString>) -> anyhow::Result<PathBuf> {
    let in_path = path.iter().flat_map(env::split_paths);
    let mut tried = Vec::new();
    for dir in beside.iter().cloned().chain(in_path) {
        let program = dir.join(DAEMON);
        if program.is_file() {
            return Ok(program);
        }
        tried.push(dir.display().to_string());
    }
    bail!(
        "no daemon is running and there is no {DAEMON} to start (looked in {}); install it, or put \
         it into PATH",
        tried.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use nix::errno::Errno;

    use super::*;

    fn script(dir: &Path, body: &str) -> PathBuf {
        let path = dir.join(DAEMON);
        rocmforge_test_scripts::write(&path, body);
        path
    }

    fn is_gone(pid: u32) -> bool {
        kill(Pid::from_raw(pid as i32), None) == Err(Errno::ESRCH)
    }

    #[tokio::test]
    async fn a_daemon_that_fails_to_start_says_why() {
        let dir = tempfile::tempdir().unwrap();
        let daemon = script(dir.path(), "echo out of cheese >&2; exit 3");
        let slot = PrivateSlot::default();
        let error = slot.start(&daemon, dir.path()).await.unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("out of cheese") && text.contains("3"),
            "{text}"
        );
    }

    #[tokio::test]
    async fn stopping_ends_the_process_and_removes_its_directory() {
        let dir = tempfile::tempdir().unwrap();
        let daemon = script(dir.path(), "exec sleep 600");
        let daemon = PrivateDaemon::start(&daemon, dir.path()).unwrap();
        let (pid, place) = (daemon.child.id(), daemon.dir.path().to_owned());
        let mode = std::fs::metadata(&place).unwrap().permissions().mode();
        assert_eq!(mode & 0o077, 0, "others may enter {}", place.display());
        let slot = PrivateSlot::default();
        *slot.0.lock().unwrap() = Some(daemon);
        assert!(!is_gone(pid));
        slot.stop();
        assert!(is_gone(pid));
        assert!(!place.exists());
        slot.stop();
    }

    #[test]
    fn the_daemon_beside_comes_before_the_one_in_the_path() {
        let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let in_path = script(b.path(), "");
        let search = |beside: &Path| {
            find_in(
                Some(beside.to_owned()),
                Some(b.path().as_os_str().to_owned()),
            )
        };
        assert_eq!(search(a.path()).unwrap(), in_path);
        let beside = script(a.path(), "");
        assert_eq!(search(a.path()).unwrap(), beside);
        let error = find_in(Some("/nonexistent".into()), None).unwrap_err();
        assert!(error.to_string().contains("/nonexistent"), "{error}");
    }
}
