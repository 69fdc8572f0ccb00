//! The self-test of a GPU: runs in a process of its own, which opens the GPU beside the daemon, so
//! that a hang or crash only affects its own line of the report.
//!
//! ```text
//! CheckDevice -> child: open, memory, copies, files, kernels against the host
//!             -> a line of JSON each
//!            <- what was told; after LIMIT the child is killed, and the step that hung is named
//! ```

use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use rocmforge_device::{Device, Error as DeviceError};
use rocmforge_device_cpu::{HostConfig, HostDevice};
use rocmforge_device_gpu::{GpuConfig, GpuDevice, usual_images};
use rocmforge_failure::{self as failure, Failure};
use rocmforge_gpu_driver::{Libraries, Vendor, environment, library_file, report};
use rocmforge_parity::check::{Outcome, Step, check};
use rocmforge_service::machine::Told;
use tokio::sync::Semaphore;

use crate::devices::{KILL_WAIT, OWN_PROGRAM, POLL};

/// Hidden argument of the child process; the device such as `hip:0` follows.
pub const CHILD_ARGUMENT: &str = "--self-test-child";
/// Time limit of the whole self-test.
pub const LIMIT: Duration = Duration::from_secs(10);
/// Time after which no further kernel is tested.
const KERNELS_LIMIT: Duration = Duration::from_secs(7);
/// Maximum number of steps of a self-test that are reported.
const STEPS_MAX: usize = 512;
/// Maximum number of bytes of a child's output.
const ANSWER_BYTES_MAX: u64 = 1 << 20;
/// Prefix of the child's lines, since a library may write to standard output as well.
const MARK: &str = "self-test ";
/// Delay after which a client should retry while another self-test runs.
const RETRY: Duration = Duration::from_secs(10);

fn note(name: &str, detail: String) -> Told {
    Told {
        name: name.to_owned(),
        outcome: Outcome::Note.name().to_owned(),
        detail,
        ms: 0.0,
    }
}

fn failed(name: &str, detail: String) -> Told {
    Told {
        name: name.to_owned(),
        outcome: Outcome::Failed.name().to_owned(),
        detail,
        ms: 0.0,
    }
}

/// A step in the form in which the child writes it.
fn told(step: Step) -> Told {
    Told {
        name: step.name,
        outcome: step.outcome.name().to_owned(),
        detail: step.detail,
        ms: step.took.as_secs_f64() * 1e3,
    }
}

/// Whether a step reports a failure.
pub fn is_failed(step: &Told) -> bool {
    step.outcome == Outcome::Failed.name()
}

/// Parses a GPU in the form of settings: `hip:1`, or `hip` for the first.
pub fn parse(device: &str) -> Option<(Vendor, u32)> {
    let (kind, ordinal) = device.split_once(':').unwrap_or((device, "0"));
    Some((Vendor::named(kind)?, ordinal.parse().ok()?))
}

/// The steps of a self-test as a table, with their totals.
pub fn table(told: &[Told]) -> String {
    let wide = |of: fn(&Told) -> usize| told.iter().map(of).max().unwrap_or(0);
    let (name, outcome) = (wide(|t| t.name.len()), wide(|t| t.outcome.len()));
    let mut text = String::new();
    for step in told {
        // A driver's words may be several lines, or write to the terminal.
        let detail: String = step
            .detail
            .chars()
            .map(|c| if c.is_control() { ' ' } else { c })
            .collect();
        text += &format!(
            "{:name$}  {:outcome$}  {:5.0} ms  {detail}\n",
            step.name, step.outcome, step.ms
        );
    }
    let count = |of: Outcome| told.iter().filter(|t| t.outcome == of.name()).count();
    let (passed, failed) = (count(Outcome::Passed), count(Outcome::Failed));
    text + &format!("{passed} passed, {failed} failed\n")
}

/// Facts about the machine and a GPU that are known before the GPU is opened.
fn about(vendor: Vendor, ordinal: u32) -> Vec<Told> {
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let program = format!("{}, kernel {}", env!("CARGO_PKG_VERSION"), kernel.trim());
    let mut told = vec![note("rocmforged", program)];
    told.extend(environment::that_is_set(vendor).map(|set| note("environment", set)));
    let report = report(vendor, &Libraries::from_env());
    if let Some(library) = &report.library {
        let file = library_file(library).unwrap_or_else(|| library.into());
        let versions = match &report.versions {
            Some(v) => format!("runtime {}, driver {}", v.runtime, v.driver),
            None => "versions unknown".to_owned(),
        };
        told.push(note("library", format!("{}, {versions}", file.display())));
    }
    let card = report.devices.iter().find(|card| card.ordinal == ordinal);
    if let Some(card) = card {
        let memory = match card.integrated {
            true => "integrated: it shares the machine's memory",
            false => "has memory of its own",
        };
        told.push(note("card", format!("at {}, {memory}", card.pci_bus_id)));
        let source = usual_images(vendor).source(&card.arch);
        told.push(note("kernels", source));
    }
    told
}

/// Writes a step for the parent; a parent that does not read any more has given up.
fn tell(told: &Told) {
    if let Ok(text) = serde_json::to_string(told) {
        println!("\n{MARK}{text}");
    }
}

/// Main function of the child process. Returns the exit code.
pub fn child_main(device: &str) -> u8 {
    let Some((vendor, ordinal)) = parse(device) else {
        return 2;
    };
    about(vendor, ordinal).iter().for_each(tell);
    let Ok(host) = HostDevice::new(HostConfig::default()) else {
        return 1;
    };
    let open = || -> Result<Box<dyn Device>, DeviceError> {
        let config = GpuConfig {
            watchdog: LIMIT,
            // A library that ends the process ends this one, and is told with its step.
            child_exe: None,
            // This process may be ended in a trial, which is nothing that a start did not survive.
            trials_dir: None,
            ..GpuConfig::new(vendor, ordinal)
        };
        let device = GpuDevice::open(config, usual_images(vendor))?;
        Ok(Box::new(device))
    };
    check(open, Box::new(host), KERNELS_LIMIT, &mut |step| {
        tell(&told(step));
    });
    0
}

/// Runs self-tests, one at a time.
#[derive(Debug)]
pub struct SelfTest {
    exe: PathBuf,
    limit: Duration,
    turn: Arc<Semaphore>,
}

impl Default for SelfTest {
    fn default() -> Self {
        Self::asking(OWN_PROGRAM.into(), LIMIT)
    }
}

impl SelfTest {
    /// Runs self-tests through the program `exe`, which understands [`CHILD_ARGUMENT`], with the
    /// time limit `limit`.
    pub fn asking(exe: PathBuf, limit: Duration) -> Self {
        Self {
            exe,
            limit,
            turn: Arc::new(Semaphore::new(1)),
        }
    }

    /// Tests a device, such as `hip:0`, on a blocking thread.
    ///
    /// # Errors
    /// RESOURCE_EXHAUSTED while another self-test runs.
    pub async fn run(&self, device: String) -> Result<Vec<Told>, Failure> {
        let Ok(turn) = Arc::clone(&self.turn).try_acquire_owned() else {
            return Err(failure::exhausted(
                "a self-test of the device is being made for another caller; try again when it has ended",
                RETRY,
            ));
        };
        let (exe, limit) = (self.exe.clone(), self.limit);
        let tested = tokio::task::spawn_blocking(move || {
            // The turn goes along: a caller who leaves makes no room for another beside this one.
            let _turn = turn;
            test(exe, &device, limit)
        });
        tested.await.map_err(|_| failure::draining())
    }
}

/// Tests a device through a program that understands [`CHILD_ARGUMENT`].
pub fn test(exe: PathBuf, device: &str, limit: Duration) -> Vec<Told> {
    let child = Command::new(exe)
        .arg(CHILD_ARGUMENT)
        .arg(device)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn();
    let mut child = match child {
        Ok(child) => child,
        Err(error) => {
            let detail = format!("no process could be started for it: {error}");
            return vec![failed("self-test", detail)];
        }
    };
    let give_up = Instant::now() + limit;
    let lines = child.stdout.take().map(lines);
    let mut told: Vec<Told> = Vec::new();
    let in_time = lines.is_some_and(|lines| {
        loop {
            let left = give_up.saturating_duration_since(Instant::now());
            match lines.recv_timeout(left) {
                Ok(line) => told.push(line),
                Err(RecvTimeoutError::Disconnected) => return true,
                Err(RecvTimeoutError::Timeout) => return false,
            }
        }
    });
    let after = told
        .last()
        .map_or("the start", |step| &step.name)
        .to_owned();
    match ended(&mut child, give_up, in_time) {
        Some(status) if status.success() && in_time => {}
        Some(status) if in_time => told.push(failed(
            "self-test",
            format!("the process that made it ended with {status} behind '{after}'"),
        )),
        _ => told.push(failed(
            "self-test",
            format!(
                "nothing came behind '{after}' within {} s of the beginning; the process that made it was killed",
                limit.as_secs_f64()
            ),
        )),
    }
    told
}

/// Receives the steps that the self-test's child process reports; a thread of its own reads them.
fn lines(stdout: ChildStdout) -> Receiver<Told> {
    let (sender, receiver) = sync_channel(STEPS_MAX);
    let read = move || {
        let lines = BufReader::new(stdout.take(ANSWER_BYTES_MAX)).lines();
        let told = lines.map_while(Result::ok).filter_map(|line| {
            let text = line.strip_prefix(MARK)?;
            serde_json::from_str::<Told>(text).ok()
        });
        for step in told.take(STEPS_MAX) {
            if sender.send(step).is_err() {
                return;
            }
        }
    };
    let thread = std::thread::Builder::new().name("self-test".to_owned());
    if let Err(error) = thread.spawn(read) {
        tracing::warn!(%error, "the output of a self-test cannot be read");
    }
    receiver
}

/// Waits for the child to end, and kills it if it does not. Returns how it ended.
fn ended(child: &mut Child, give_up: Instant, in_time: bool) -> Option<ExitStatus> {
    let mut give_up = match in_time {
        true => give_up.max(Instant::now() + KILL_WAIT),
        false => Instant::now(),
    };
    let mut killed = false;
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status),
            Ok(None) if Instant::now() < give_up => std::thread::sleep(POLL),
            Ok(None) if !killed => {
                // It may have ended in between, which is as well.
                let _ = child.kill();
                killed = true;
                give_up = Instant::now() + KILL_WAIT;
            }
            _ => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn run(script: &str, limit: Duration) -> Vec<Told> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("child");
        rocmforge_test_scripts::write(&path, script);
        let tests = SelfTest::asking(path, limit);
        tests.run("hip:0".to_owned()).await.unwrap()
    }

    const OPENED: &str =
        r#"echo 'self-test {"name":"open","outcome":"passed","detail":"x","ms":1.5}'"#;

    #[tokio::test]
    async fn what_was_told_before_it_hangs_is_kept_and_the_place_is_named() {
        let script = format!("echo words\n{OPENED}\nexec sleep 600");
        let told = run(&script, Duration::from_millis(300)).await;
        assert_eq!(told[0].name, "open");
        assert_eq!((told.len(), &*told[1].outcome), (2, "failed"));
        assert!(told[1].detail.contains("behind 'open'"), "{told:?}");
    }

    #[tokio::test]
    async fn a_crash_is_told_with_its_signal() {
        let told = run(&format!("{OPENED}\nkill -SEGV $$"), LIMIT).await;
        assert!(told[1].detail.contains("SIGSEGV"), "{told:?}");
        let told = run(&format!("{OPENED}\nexit 0"), LIMIT).await;
        assert_eq!(told.len(), 1, "{told:?}");
    }

    #[tokio::test]
    async fn one_is_made_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("child");
        rocmforge_test_scripts::write(&path, "sleep 0.3");
        let tests = SelfTest::asking(path, LIMIT);
        let both = tokio::join!(tests.run("hip:0".to_owned()), tests.run("hip:0".to_owned()));
        assert!(both.0.is_ok());
        assert_eq!(both.1.unwrap_err().reason(), failure::Reason::FullNow);
    }

    #[test]
    fn a_child_for_no_device_ends_at_once() {
        assert_eq!((child_main("host"), child_main("hip:x")), (2, 2));
        assert_eq!(parse("cuda"), Some((Vendor::Cuda, 0)));
    }

    #[test]
    fn a_table_has_a_line_a_step_and_the_sum() {
        let told = [
            note("card", "at\n0000:03:00.0".to_owned()),
            failed("copy within", "wrong".to_owned()),
        ];
        assert_eq!(
            table(&told),
            "card         note        0 ms  at 0000:03:00.0\n\
             copy within  failed      0 ms  wrong\n\
             0 passed, 1 failed\n"
        );
    }
}
