//! A real rocmforged process with a directory, a socket and a log of its own.
//!
//! It is ready when it has said READY=1 on the notify socket, as systemd would be told. Dropping a
//! [`Daemon`] kills the process; a panicking test prints the end of its log first.

use std::ffi::OsString;
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

use crate::{binaries, fixtures};

/// How long a daemon may take to serve, and to end after SIGTERM beyond its grace period.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// What clients of a daemon with [`Options::http_with_token`] bring along.
pub const HTTP_TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// Lines of the log that a failing test prints.
const LOG_TAIL_LINES: usize = 40;

/// What to start a daemon with.
#[derive(Debug, Clone)]
pub struct Options {
    arguments: Vec<String>,
    model_dirs: Vec<PathBuf>,
    environment: Vec<(String, OsString)>,
}

impl Default for Options {
    /// The host device with two threads and the fixtures as the model directory.
    fn default() -> Options {
        let arguments = ["--device", "host", "--threads", "2", "--log", "info"];
        Options {
            arguments: arguments.map(str::to_owned).into(),
            model_dirs: vec![fixtures::dir()],
            environment: Vec::new(),
        }
    }
}

impl Options {
    /// The usual options on another device.
    #[must_use]
    pub fn on_device(device: &str) -> Options {
        let mut options = Options::default();
        options.arguments[1] = device.to_owned();
        options
    }

    /// Sets a variable of the daemon's environment.
    #[must_use]
    pub fn env(mut self, name: &str, value: impl Into<OsString>) -> Options {
        self.environment.push((name.to_owned(), value.into()));
        self
    }

    /// Bounds the daemon's memory, in bytes.
    #[must_use]
    pub fn vram_budget(self, bytes: u64) -> Options {
        self.arg("--vram-budget").arg(&bytes.to_string())
    }

    /// Adds a directory that models may be loaded from.
    #[must_use]
    pub fn model_dir(mut self, dir: &Path) -> Options {
        self.model_dirs.push(dir.to_path_buf());
        self
    }

    /// Serves HTTP on a port of this machine that is free; [`Daemon::url`] says which.
    #[must_use]
    pub fn http(self) -> Options {
        self.arg("--http-listen").arg("127.0.0.1:0")
    }

    /// The same for those who bring [`HTTP_TOKEN`], which is written to a file in `dir`.
    ///
    /// # Panics
    /// When that file cannot be written.
    #[must_use]
    pub fn http_with_token(self, dir: &Path) -> Options {
        let file = dir.join("token");
        std::fs::write(&file, HTTP_TOKEN).expect("a writable directory");
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o600)).expect("our own file");
        let file = file.to_str().expect("a path of plain characters");
        self.http().arg("--http-token-file").arg(file)
    }

    /// This model directory alone, without the fixtures.
    #[must_use]
    pub fn only_model_dir(mut self, dir: &Path) -> Options {
        self.model_dirs = vec![dir.to_path_buf()];
        self
    }

    /// Adds an argument.
    #[must_use]
    pub fn arg(mut self, argument: &str) -> Options {
        self.arguments.push(argument.to_owned());
        self
    }
}

/// A running daemon.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    dir: TempDir,
    ended: bool,
}

/// How a daemon ended.
#[derive(Debug)]
pub struct Ended {
    /// Its exit status.
    pub status: ExitStatus,
    /// All that it logged.
    pub log: String,
    /// From the signal to the end.
    pub took: Duration,
}

impl Daemon {
    /// Starts a daemon and waits until it serves.
    ///
    /// # Panics
    /// When it does not serve; its log is in the message.
    pub fn start(options: &Options) -> Daemon {
        Daemon::start_with(options, |_| {})
    }

    /// Does `prepare` with the socket's path, then starts a daemon and waits until it serves.
    ///
    /// # Panics
    /// When it does not serve; its log is in the message.
    pub fn start_with(options: &Options, prepare: impl FnOnce(&Path)) -> Daemon {
        let dir = tempfile::Builder::new()
            .prefix("rocmforged-")
            .tempdir()
            .expect("a temporary directory");
        prepare(&dir.path().join("socket"));
        let notify = UnixDatagram::bind(dir.path().join("notify")).expect("a notify socket");
        notify
            .set_read_timeout(Some(Duration::from_millis(50)))
            .expect("a time above zero");
        let mut daemon = Daemon {
            child: spawn(&dir, options),
            dir,
            ended: false,
        };
        daemon.wait_ready(&notify);
        daemon
    }

    /// Starts a daemon and does not wait until it serves.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn begin(options: &Options) -> Daemon {
        let dir = tempfile::Builder::new()
            .prefix("rocmforged-")
            .tempdir()
            .expect("a temporary directory");
        let child = spawn(&dir, options);
        let ended = false;
        Daemon { child, dir, ended }
    }

    /// Where clients connect.
    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("socket")
    }

    /// Where HTTP is served, the first address of several. The line of the log that says so may
    /// come after the socket answers.
    ///
    /// # Panics
    /// When there is no such line in [`PATIENCE`].
    pub fn url(&self) -> String {
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            let log = self.log();
            let mut words = log.split_whitespace();
            if let Some(address) = words.find_map(|word| word.strip_prefix("http_listen=")) {
                let addresses = address.trim_matches('"');
                let first = addresses.split(',').next().unwrap_or_default();
                return format!("http://{first}");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("no address in {}", self.log());
    }

    /// A directory for this test's own files; below no model directory unless the options said so.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Descriptors that the process has open.
    ///
    /// # Panics
    /// When the process has ended.
    pub fn open_descriptors(&self) -> usize {
        let listing = std::fs::read_dir(format!("/proc/{}/fd", self.pid()));
        listing.expect("the daemon runs").count()
    }

    /// Resident memory of the process in bytes.
    ///
    /// # Panics
    /// When the process has ended.
    pub fn memory_bytes(&self) -> u64 {
        self.memory("VmRSS:")
    }

    /// The most that was resident of the process so far, in bytes.
    ///
    /// # Panics
    /// When the process has ended.
    pub fn peak_memory_bytes(&self) -> u64 {
        self.memory("VmHWM:")
    }

    fn memory(&self, field: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid()))
            .expect("the daemon runs");
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix(field))
            .expect("a process has it");
        let kib: u64 = line
            .trim()
            .trim_end_matches(" kB")
            .parse()
            .expect("it is in kB");
        kib * 1024
    }

    /// All that it has logged so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    /// Whether the process still runs.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Sends SIGTERM and returns at once.
    ///
    /// # Panics
    /// When the process is gone already.
    pub fn terminate(&self) {
        let pid = Pid::from_raw(self.pid().cast_signed());
        kill(pid, Signal::SIGTERM).expect("the daemon runs");
    }

    /// Starts a daemon that is to end at once, and waits for its end.
    ///
    /// # Panics
    /// When it does not end in [`PATIENCE`].
    pub fn refused(options: &Options) -> Ended {
        Daemon::begin(options).wait()
    }

    /// Waits for the end of a daemon that was told to end.
    ///
    /// # Panics
    /// When it does not end in [`PATIENCE`].
    pub fn wait(mut self) -> Ended {
        let start = Instant::now();
        let status = loop {
            match self.child.try_wait().expect("the child can be waited for") {
                Some(status) => break status,
                None if start.elapsed() < PATIENCE => std::thread::sleep(Duration::from_millis(5)),
                None => panic!("rocmforged did not end within {PATIENCE:?} of SIGTERM"),
            }
        };
        self.ended = true;
        Ended {
            status,
            log: self.log(),
            took: start.elapsed(),
        }
    }

    /// SIGTERM, then the end: exit 0, and no panic in the log.
    ///
    /// # Panics
    /// When it is otherwise.
    pub fn stop(self) -> Ended {
        self.terminate();
        let ended = self.wait();
        assert!(
            ended.status.success(),
            "rocmforged ended with {}; its log:\n{}",
            ended.status,
            ended.log
        );
        assert!(
            !ended.log.contains("panicked at"),
            "rocmforged panicked:\n{}",
            ended.log
        );
        ended
    }

    fn wait_ready(&mut self, notify: &UnixDatagram) {
        let start = Instant::now();
        let mut message = [0_u8; 4096];
        while start.elapsed() < PATIENCE {
            match notify.recv(&mut message) {
                Ok(n)
                    if String::from_utf8_lossy(&message[..n])
                        .lines()
                        .any(|line| line == "READY=1") =>
                {
                    return;
                }
                Ok(_) => {}
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                    ) => {}
                Err(error) => panic!("the notify socket failed: {error}"),
            }
            if let Some(status) = self.child.try_wait().expect("the child can be waited for") {
                panic!(
                    "rocmforged ended at once with {status}; its log:\n{}",
                    self.log()
                );
            }
        }
        panic!(
            "rocmforged did not say READY=1 within {PATIENCE:?}; its log:\n{}",
            self.log()
        );
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        // Gone already is as good as killed.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let log = self.log();
            let lines: Vec<&str> = log.lines().collect();
            let tail = lines[lines.len().saturating_sub(LOG_TAIL_LINES)..].join("\n");
            eprintln!("--- the end of rocmforged's log\n{tail}\n---");
        }
    }
}

fn spawn(dir: &TempDir, options: &Options) -> Child {
    let log = File::create(dir.path().join("log")).expect("a log file");
    let mut command = Command::new(binaries::rocmforged());
    command
        .arg("--socket")
        .arg(dir.path().join("socket"))
        .args(&options.arguments);
    for model_dir in &options.model_dirs {
        command.arg("--model-dir").arg(model_dir);
    }
    // What one finds out of its card is not another one's.
    let named = |name: &str| options.environment.iter().any(|(is, _)| is == name);
    if !named("CACHE_DIRECTORY") && !named("XDG_CACHE_HOME") {
        command.env("CACHE_DIRECTORY", dir.path().join("cache"));
    }
    command
        .envs(options.environment.iter().cloned())
        .env("NOTIFY_SOCKET", dir.path().join("notify"))
        .env("RUST_BACKTRACE", "1")
        .stdin(Stdio::null())
        .stdout(log.try_clone().expect("a second handle of the log"))
        .stderr(log);
    command.spawn().expect("rocmforged starts")
}
