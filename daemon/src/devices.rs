//! Lists GPUs: each vendor's driver is probed in a process of its own.
//!
//! A vendor's library may hang or crash while it looks for cards. In a child process (this program,
//! with a hidden argument) that does no harm: the child is killed after [`LIMIT`], and the report
//! says so.
//!
//! *Invariant:* the daemon never waits longer than [`LIMIT`], and for each vendor [`KILL_WAIT`],
//! for children (test `a_driver_that_hangs_is_given_up`); one that cannot be killed is left alone,
//! and no other is started for that vendor while it lives.

use std::io::Read;
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use rocmforge_engine::api::{Libraries, Vendor, probe_vendor};
use rocmforge_service::machine::FoundDriver;
use tokio::sync::Semaphore;

/// Path of the running program, which works also if its file was replaced.
pub const OWN_PROGRAM: &str = "/proc/self/exe";
/// Hidden argument of the child process; the vendor's name follows.
pub const CHILD_ARGUMENT: &str = "--probe-child";
/// Time limit for a driver to list its devices.
const LIMIT: Duration = Duration::from_secs(10);
/// How long a killed child may take to end.
pub(crate) const KILL_WAIT: Duration = Duration::from_secs(1);
/// Interval at which the parent checks whether a child has ended.
pub(crate) const POLL: Duration = Duration::from_millis(5);
/// Time for which the result of a probe is reused.
const KEPT: Duration = Duration::from_secs(30);
/// Maximum number of device probes at a time, each on a blocking thread.
pub(crate) const AT_ONCE: usize = 1;
/// Maximum number of bytes of a child's report: below a pipe's capacity, so that it ends without
/// being read.
const ANSWER_BYTES_MAX: usize = 60 << 10;

/// Result for a vendor whose driver process could not be started or read.
fn failed(vendor: Vendor, error: String) -> FoundDriver {
    FoundDriver {
        vendor,
        tried: Vec::new(),
        library: None,
        driver_version: None,
        runtime_version: None,
        devices: Vec::new(),
        errors: vec![error],
    }
}

/// A line about the kernels for AMD GPUs that are embedded in this program.
pub fn embedded_kernels() -> String {
    let targets: Vec<&str> = rocmforge_kernels_gpu::aot::targets().collect();
    kernels_line(&targets)
}

fn kernels_line(targets: &[&str]) -> String {
    if targets.is_empty() {
        return "kernels: none inside for AMD; hiprtc compiles them (libhiprtc.so.7 or .so.6)"
            .to_owned();
    }
    format!("kernels: inside for AMD {}", targets.join(", "))
}

/// Main function of the child: probes one vendor's driver and writes the result. Returns the exit
/// code.
pub fn child_main(vendor: &str) -> u8 {
    let Some(vendor) = [Vendor::Hip, Vendor::Cuda]
        .into_iter()
        .find(|v| v.name() == vendor)
    else {
        return 2;
    };
    let found = FoundDriver::from(&probe_vendor(vendor, &Libraries::from_env()));
    match serde_json::to_string(&found) {
        // A library may have written to the standard output before; the last line is ours.
        Ok(text) if text.len() < ANSWER_BYTES_MAX => {
            println!("\n{text}");
            0
        }
        _ => 1,
    }
}

/// The last probe results, and children that could not be killed.
///
/// *Threads:* shared by the services; its locks are held for moments, never while a child is waited
/// for.
#[derive(Debug)]
pub struct Devices {
    kept: Mutex<Option<(Instant, Arc<[FoundDriver]>)>>,
    stuck: Mutex<Vec<(Vendor, Child)>>,
    /// Permits one probe at a time; callers that wait use its result.
    looking: Arc<Semaphore>,
    exe: PathBuf,
    limit: Duration,
}

impl Default for Devices {
    fn default() -> Self {
        Self::asking(OWN_PROGRAM.into(), LIMIT)
    }
}

impl Devices {
    /// Probes through the program `exe`, which understands [`CHILD_ARGUMENT`], with the time limit
    /// `limit`.
    pub fn asking(exe: PathBuf, limit: Duration) -> Self {
        Self {
            kept: Mutex::new(None),
            stuck: Mutex::new(Vec::new()),
            looking: Arc::new(Semaphore::new(AT_ONCE)),
            exe,
            limit,
        }
    }

    /// Both vendors' drivers: a recent result, or a new probe on a blocking thread.
    pub async fn list(self: &Arc<Self>) -> Arc<[FoundDriver]> {
        let turn = Arc::clone(&self.looking).acquire_owned().await;
        if let Some(found) = self.kept() {
            return found;
        }
        let asking = Arc::clone(self);
        // The turn goes along: a caller who leaves does not make room for
        // another look beside this one.
        let asked = tokio::task::spawn_blocking(move || {
            let found: Arc<[FoundDriver]> = asking.ask().into();
            *lock(&asking.kept) = Some((Instant::now(), Arc::clone(&found)));
            drop(turn);
            found
        });
        asked.await.unwrap_or_default()
    }

    fn kept(&self) -> Option<Arc<[FoundDriver]>> {
        let kept = lock(&self.kept);
        let (at, found) = kept.as_ref()?;
        (at.elapsed() < KEPT).then(|| Arc::clone(found))
    }

    /// Probes the drivers of both vendors at once.
    pub fn ask(&self) -> Vec<FoundDriver> {
        let started: Vec<_> = [Vendor::Hip, Vendor::Cuda]
            .map(|vendor| (vendor, self.start(vendor)))
            .into();
        let give_up = Instant::now() + self.limit;
        let answers = started.into_iter().map(|(vendor, child)| {
            child
                .and_then(|child| self.answer(vendor, child, give_up))
                .unwrap_or_else(|error| failed(vendor, error))
        });
        answers.collect()
    }

    fn start(&self, vendor: Vendor) -> Result<Child, String> {
        let mut stuck = lock(&self.stuck);
        stuck.retain_mut(|(_, child)| matches!(child.try_wait(), Ok(None)));
        if let Some((_, child)) = stuck.iter().find(|(of, _)| *of == vendor) {
            return Err(format!(
                "the driver hangs: process {}, which probed it, cannot be killed",
                child.id()
            ));
        }
        Command::new(&self.exe)
            .arg(CHILD_ARGUMENT)
            .arg(vendor.name())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| format!("no process could be started to ask the driver: {error}"))
    }

    fn answer(
        &self,
        vendor: Vendor,
        mut child: Child,
        give_up: Instant,
    ) -> Result<FoundDriver, String> {
        let Some(status) = ended(&mut child, give_up) else {
            // It may have ended in between, which is as well.
            let _ = child.kill();
            if ended(&mut child, Instant::now() + KILL_WAIT).is_none() {
                lock(&self.stuck).push((vendor, child));
            }
            return Err(format!(
                "the driver did not answer within {} s and hangs",
                self.limit.as_secs_f64()
            ));
        };
        let text = child.stdout.take().map(said).unwrap_or_default();
        // A library that breaks down in its exit handlers has told its devices before.
        let last = text.lines().last().unwrap_or_default();
        match serde_json::from_str::<FoundDriver>(last) {
            Ok(found) => Ok(FoundDriver { vendor, ..found }),
            _ => Err(format!(
                "the driver crashed: the process that probed it ended with {status}"
            )),
        }
    }
}

/// The output of a child that has ended. A process that it started may keep the pipe open, so only
/// available bytes are read.
fn said(mut pipe: ChildStdout) -> String {
    let mut text = Vec::new();
    if fcntl(&pipe, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).is_ok() {
        let mut part = [0; 4096];
        while text.len() < ANSWER_BYTES_MAX * 2
            && let Ok(n @ 1..) = pipe.read(&mut part)
        {
            text.extend_from_slice(&part[..n]);
        }
    }
    String::from_utf8_lossy(&text).into_owned()
}

fn ended(child: &mut Child, give_up: Instant) -> Option<std::process::ExitStatus> {
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status),
            Ok(None) if Instant::now() < give_up => std::thread::sleep(POLL),
            _ => return None,
        }
    }
}

/// Locks a mutex. A poisoned lock is used: the values are valid at every moment.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program for the child's place.
    fn script(dir: &tempfile::TempDir, text: &str) -> PathBuf {
        let path = dir.path().join("child");
        rocmforge_test_scripts::write(&path, text);
        path
    }

    async fn listed(text: &str, limit: Duration) -> Arc<[FoundDriver]> {
        let dir = tempfile::tempdir().unwrap();
        let devices = Arc::new(Devices::asking(script(&dir, text), limit));
        let found = devices.list().await;
        assert_eq!(
            found.iter().map(|d| d.vendor.name()).collect::<Vec<_>>(),
            ["hip", "cuda"]
        );
        found
    }

    #[test]
    fn what_is_inside_for_amd_is_told_by_target() {
        assert!(kernels_line(&[]).starts_with("kernels: none inside for AMD; hiprtc"));
        let line = kernels_line(&["gfx1100", "gfx12-generic"]);
        assert_eq!(line, "kernels: inside for AMD gfx1100, gfx12-generic");
    }

    #[tokio::test]
    async fn a_driver_that_hangs_is_given_up() {
        let found = listed("exec sleep 600", Duration::from_millis(200)).await;
        for driver in &*found {
            assert!(driver.errors[0].contains("hangs"), "{driver:?}");
        }
    }

    #[tokio::test]
    async fn a_process_that_a_driver_leaves_behind_holds_nobody_up() {
        let listing = listed("sleep 600 &\nexit 1", LIMIT);
        let found = tokio::time::timeout(LIMIT / 2, listing).await.unwrap();
        assert!(found[0].errors[0].contains("crashed"), "{found:?}");
    }

    #[tokio::test]
    async fn a_driver_that_crashes_says_so() {
        let found = listed("kill -SEGV $$", LIMIT).await;
        for driver in &*found {
            assert!(driver.errors[0].contains("SIGSEGV"), "{driver:?}");
        }
    }

    #[tokio::test]
    async fn words_of_a_library_before_the_answer_do_no_harm() {
        let mut sent = failed(Vendor::Hip, "no card".to_owned());
        sent.library = Some("libx.so".to_owned());
        let answer = serde_json::to_string(&sent).unwrap();
        let found = listed(&format!("echo hello\necho '{answer}'\nexit 1"), LIMIT).await;
        assert_eq!(found[0], sent);
        assert_eq!(found[0].to_string(), "hip: libx.so: no card\n");
    }

    #[tokio::test]
    async fn callers_share_one_look() {
        let dir = tempfile::tempdir().unwrap();
        let count = dir.path().join("count");
        let text = format!("echo $2 >> {}\nsleep 0.2\nexit 1", count.display());
        let devices = Arc::new(Devices::asking(script(&dir, &text), LIMIT));
        let calls = (0..8).map(|_| {
            let devices = Arc::clone(&devices);
            tokio::spawn(async move { devices.list().await.len() })
        });
        for call in calls.collect::<Vec<_>>() {
            assert_eq!(call.await.unwrap(), 2);
        }
        let mut asked: Vec<_> = std::fs::read_to_string(&count)
            .unwrap()
            .lines()
            .map(str::to_owned)
            .collect();
        asked.sort();
        assert_eq!(asked, ["cuda", "hip"]);
    }
}
