//! The parent's side: children that wait for work, and what becomes of one
//! that fails.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::super::engine::Failure;
use super::{RENDER_CHILD_ARGUMENT, RenderLimits, wire};
use crate::Error;

/// Children that wait for the next chat; more end when they have answered.
const IDLE_MAX: usize = 2;
/// New children for one chat after one that was killed.
const RETRIES_MAX: u32 = 2;
/// Interval at which a waiting caller checks whether its request was cancelled.
const POLL: Duration = Duration::from_millis(20);
/// How long a child that broke off may take to end.
const END_WAIT_MAX: Duration = Duration::from_millis(500);
/// Bytes of its last words that are kept of a child.
const WORDS_BYTES_MAX: u64 = 4 << 10;
/// Signals, by their numbers on Linux.
const SIGABRT: i32 = 6;
const SIGXCPU: i32 = 24;
/// Signals that end a child and never come from what it does itself: SIGHUP, SIGINT, SIGQUIT,
/// SIGKILL (the kernel's, too, where memory is short), SIGUSR1, SIGUSR2, SIGTERM.
const KILLED_BY: [i32; 7] = [1, 2, 3, 9, 10, 12, 15];

/// Children that render.
#[derive(Debug)]
pub(super) struct Pool {
    exe: PathBuf,
    limits: RenderLimits,
    state: Mutex<State>,
    freed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    idle: Vec<Worker>,
    busy: usize,
}

/// One child process that renders templates. Dropping it kills the process.
#[derive(Debug)]
struct Worker {
    child: Child,
    socket: UnixStream,
}

/// A place among the workers, free again when it is dropped.
struct Place<'p> {
    pool: &'p Pool,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.pool.lock().busy -= 1;
        self.pool.freed.notify_one();
    }
}

impl Pool {
    pub(super) fn new(exe: PathBuf, limits: RenderLimits) -> Pool {
        Pool {
            exe,
            limits,
            state: Mutex::default(),
            freed: Condvar::new(),
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Renders in a child, and in a new one where another process killed that. `cancelled` is asked
    /// some fifty times a second.
    pub(super) fn render(
        &self,
        template: &str,
        variables: &[u8],
        cancelled: &dyn Fn() -> bool,
    ) -> Result<String, Error> {
        let place = self.place(cancelled)?;
        let request = wire::request(template, variables);
        let mut worker = self.worker()?;
        let mut retries = RETRIES_MAX;
        loop {
            let deadline = Instant::now() + self.limits.time;
            match worker.ask(&request, deadline, cancelled) {
                Ok((answer, retires)) => {
                    let mut state = self.lock();
                    if !retires && state.idle.len() < IDLE_MAX {
                        state.idle.push(worker);
                    }
                    drop(state);
                    drop(place);
                    return answer.map_err(Error::from);
                }
                Err(Interrupted::Cancelled) => return Err(Error::Cancelled),
                Err(Interrupted::Late) => return Err(self.too_long()),
                Err(Interrupted::Broken) => {}
            }
            match self.death(worker) {
                // Neither the chat nor its template is at fault.
                Error::TemplateKilled { .. } if retries > 0 => retries -= 1,
                error => return Err(error),
            }
            worker = self.start()?;
        }
    }

    /// Waits until fewer than all places are taken.
    fn place(&self, cancelled: &dyn Fn() -> bool) -> Result<Place<'_>, Error> {
        let mut state = self.lock();
        while state.busy >= self.limits.at_once {
            if cancelled() {
                return Err(Error::Cancelled);
            }
            let waited = self.freed.wait_timeout(state, POLL);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        state.busy += 1;
        Ok(Place { pool: self })
    }

    /// A child that lives: one that waits, or a new one.
    fn worker(&self) -> Result<Worker, Error> {
        loop {
            let Some(mut worker) = self.lock().idle.pop() else {
                break;
            };
            // The kernel may have ended it meanwhile.
            if matches!(worker.child.try_wait(), Ok(None)) {
                return Ok(worker);
            }
        }
        self.start()
    }

    fn start(&self) -> Result<Worker, Error> {
        Worker::start(self).map_err(|error| Error::Renderer {
            exe: self.exe.clone(),
            error: Arc::new(error),
        })
    }

    fn too_long(&self) -> Error {
        Error::TemplateLimit {
            unit: "seconds",
            max: self.limits.time.as_secs(),
        }
    }

    /// Why a child ended without an answer.
    fn death(&self, worker: Worker) -> Error {
        let (status, words) = worker.end();
        let out_of_memory = Error::TemplateLimit {
            unit: "bytes of memory",
            max: self.limits.memory_bytes,
        };
        match status.and_then(|status| status.signal()) {
            Some(SIGXCPU) => self.too_long(),
            Some(SIGABRT) if words.contains("memory allocation") => out_of_memory,
            Some(SIGABRT) if words.contains("overflowed its stack") => Error::TemplateLimit {
                unit: "bytes of stack",
                max: super::STACK_BYTES as u64,
            },
            Some(signal) if KILLED_BY.contains(&signal) => Error::TemplateKilled { signal },
            _ => Error::TemplateCrashed {
                status: match status {
                    Some(status) => status.to_string(),
                    None => "its reply is not valid".to_owned(),
                },
                words: words.trim().to_owned(),
            },
        }
    }
}

/// Why there is no answer.
enum Interrupted {
    Cancelled,
    Late,
    /// The child is gone, or says what is no answer.
    Broken,
}

impl Worker {
    fn start(pool: &Pool) -> io::Result<Worker> {
        let (ours, theirs) = UnixStream::pair()?;
        let output = theirs.try_clone()?;
        let child = Command::new(&pool.exe)
            .arg(RENDER_CHILD_ARGUMENT)
            .arg(pool.limits.memory_bytes.to_string())
            .arg(pool.limits.time.as_secs().to_string())
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::from(OwnedFd::from(output)))
            .stderr(Stdio::piped())
            .spawn()?;
        // From here on dropping it ends the child.
        let worker = Worker {
            child,
            socket: ours,
        };
        worker.socket.set_read_timeout(Some(POLL))?;
        worker.socket.set_write_timeout(Some(POLL))?;
        Ok(worker)
    }

    fn ask(
        &mut self,
        request: &[u8],
        deadline: Instant,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<(Result<String, Failure>, bool), Interrupted> {
        let mut patience = || {
            if cancelled() {
                Err(Interrupted::Cancelled)
            } else if Instant::now() >= deadline {
                Err(Interrupted::Late)
            } else {
                Ok(())
            }
        };
        let mut sent = 0;
        while sent < request.len() {
            match self.socket.write(&request[sent..]) {
                Ok(0) => return Err(Interrupted::Broken),
                Ok(n) => sent += n,
                Err(error) if waits(&error) => patience()?,
                Err(_) => return Err(Interrupted::Broken),
            }
        }
        let mut len = [0; 4];
        self.read_all(&mut len, &mut patience)?;
        let len = u32::from_le_bytes(len) as usize;
        if len > wire::FRAME_BYTES_MAX {
            return Err(Interrupted::Broken);
        }
        let mut frame = vec![0; len];
        self.read_all(&mut frame, &mut patience)?;
        wire::parse_answer(frame).ok_or(Interrupted::Broken)
    }

    fn read_all(
        &mut self,
        buffer: &mut [u8],
        patience: &mut dyn FnMut() -> Result<(), Interrupted>,
    ) -> Result<(), Interrupted> {
        let mut read = 0;
        while read < buffer.len() {
            match self.socket.read(&mut buffer[read..]) {
                Ok(0) => return Err(Interrupted::Broken),
                Ok(n) => read += n,
                Err(error) if waits(&error) => patience()?,
                Err(_) => return Err(Interrupted::Broken),
            }
        }
        Ok(())
    }

    /// The exit status of a child that ended by itself, and the last line of its output. The end
    /// has come or comes now that its socket is closed; else it is brought about, and is no end by
    /// itself.
    fn end(mut self) -> (Option<ExitStatus>, String) {
        let _ = self.socket.shutdown(Shutdown::Both);
        let give_up = Instant::now() + END_WAIT_MAX;
        let ended = loop {
            match self.child.try_wait() {
                Ok(None) if Instant::now() < give_up => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                ended => break ended.ok().flatten(),
            }
        };
        let _ = self.child.kill();
        let mut words = Vec::new();
        if let Some(stderr) = self.child.stderr.take() {
            let mut stderr = stderr.take(WORDS_BYTES_MAX);
            // It ends with the child; what was read until an error is kept.
            let _ = stderr.read_to_end(&mut words);
        }
        // Dropping this waits for it.
        (ended, String::from_utf8_lossy(&words).into_owned())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // It may have ended already; wait takes it off the table either way.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn waits(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted
    )
}
