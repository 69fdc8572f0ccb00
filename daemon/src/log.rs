//! The log: lines on standard error, written without ever blocking the process.
//!
//! Standard error may be a full disk, a closed terminal, or a pipe that nobody reads. Whoever logs
//! puts a line into a bounded queue and goes on; one thread writes. A line that finds the queue
//! full, or that cannot be written, is dropped and counted, and the count is written as soon as
//! lines can be again.
//!
//! *Invariants:* logging neither waits for standard error nor fails nor panics; the lock is never
//! held during a write; the queue holds at most [`LINES_MAX`] lines of [`BYTES_MAX`] bytes together
//! (tests below).

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tracing_subscriber::fmt::MakeWriter;

/// Maximum number of lines that wait to be written.
pub const LINES_MAX: usize = 4096;
/// Maximum number of bytes of the lines that may wait to be written.
pub const BYTES_MAX: usize = 1 << 20;
/// Pause before a write to a descriptor that is non-blocking and full is tried again.
const FULL_PAUSE: Duration = Duration::from_millis(20);

/// The log. Clones share one queue and one thread.
#[derive(Debug, Clone)]
pub struct Log(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    queue: Mutex<Queue>,
    /// Signalled when a line was queued.
    filled: Condvar,
    /// Signalled when the queue is empty and nothing is being written.
    idle: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    lines: VecDeque<Vec<u8>>,
    bytes: usize,
    /// Number of lines lost since the last line that reported losses.
    lost: u64,
    writing: bool,
}

impl Log {
    /// A log on standard error.
    ///
    /// # Errors
    /// The descriptor cannot be duplicated, or the thread not started.
    pub fn stderr() -> io::Result<Self> {
        Self::on(io::stderr().as_fd().try_clone_to_owned()?)
    }

    /// A log on `sink`, which may block or fail.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn on(sink: OwnedFd) -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let log = Self(Arc::clone(&shared));
        // A file, since `Stderr` has a lock that a stuck write would hold.
        let mut sink = File::from(sink);
        std::thread::Builder::new()
            .name("log".to_owned())
            .spawn(move || shared.write_all_lines(&mut sink))?;
        Ok(log)
    }

    /// Puts a line into the queue. Control characters inside of it are escaped, so that a name made
    /// of line breaks cannot forge another line.
    pub fn line(&self, text: &str) {
        let mut escaped = String::with_capacity(text.len());
        for c in text.strip_suffix('\n').unwrap_or(text).chars() {
            match c {
                c if c.is_ascii_control() => {
                    escaped.extend((c as u8).escape_ascii().map(char::from));
                }
                c if c.is_control() => escaped.extend(c.escape_unicode()),
                c => escaped.push(c),
            }
        }
        self.push(escaped.as_bytes());
    }

    fn push(&self, text: &[u8]) {
        let line = one_line(text);
        let mut queue = self.0.lock();
        if queue.lines.len() >= LINES_MAX || queue.bytes + line.len() > BYTES_MAX {
            queue.lost += 1;
            return;
        }
        queue.bytes += line.len();
        queue.lines.push_back(line);
        drop(queue);
        self.0.filled.notify_one();
    }

    /// Waits until everything has been written, at most for `limit`. Returns whether it has.
    pub fn flush(&self, limit: Duration) -> bool {
        let queue = self.0.lock();
        let busy = |queue: &mut Queue| queue.writing || !queue.lines.is_empty();
        let waited = self.0.idle.wait_timeout_while(queue, limit, busy);
        let (_queue, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        !timeout.timed_out()
    }
}

impl Shared {
    /// Locks the queue. A poisoned lock is used: it is valid at every moment.
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_all_lines(&self, sink: &mut impl Write) {
        loop {
            let mut queue = self.lock();
            queue.writing = false;
            while queue.lines.is_empty() {
                self.idle.notify_all();
                queue = self
                    .filled
                    .wait(queue)
                    .unwrap_or_else(PoisonError::into_inner);
            }
            let Some(line) = queue.lines.pop_front() else {
                continue;
            };
            queue.bytes -= line.len();
            queue.writing = true;
            let lost = queue.lost;
            drop(queue);

            let noted = lost > 0 && write(sink, note(lost).as_bytes()).is_ok();
            let written = (lost == 0 || noted) && write(sink, &line).is_ok();
            let mut queue = self.lock();
            if noted {
                queue.lost -= lost;
            }
            if !written {
                queue.lost += 1;
            }
        }
    }
}

fn note(lost: u64) -> String {
    format!("rocmforged: {lost} lines of the log were lost: standard error did not take them\n")
}

/// Writes all bytes, also to a descriptor that is set to non-blocking.
fn write(sink: &mut impl Write, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match sink.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => bytes = &bytes[n..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                std::thread::sleep(FULL_PAUSE);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The text as one line. Escape sequences for colours, which only the formatter writes, stay.
fn one_line(text: &[u8]) -> Vec<u8> {
    const COLOUR: u8 = 0x1b;
    let text = text.strip_suffix(b"\n").unwrap_or(text);
    let mut line = Vec::with_capacity(text.len() + 1);
    for &byte in text {
        if byte.is_ascii_control() && byte != COLOUR {
            line.extend(byte.escape_ascii());
        } else {
            line.push(byte);
        }
    }
    line.push(b'\n');
    line
}

/// Writer that collects one log event before it is queued.
#[derive(Debug)]
pub struct Line<'a>(&'a Log);

impl Write for Line<'_> {
    /// Queues an event, which the formatter writes in one piece.
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        self.0.push(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Line<'a> {
        Line(self)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, pipe};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    #[test]
    fn lines_come_out_in_order_and_cannot_forge_others() {
        let (reader, writer) = pipe().unwrap();
        let log = Log::on(writer.into()).unwrap();
        log.line("one");
        log.line("a\nERROR b\r\x07\n");
        log.line("of a name: \x1b[2J\u{9b}2J");
        let formatted = "\x1b[31mred\x1b[0m\n";
        Line(&log).write_all(formatted.as_bytes()).unwrap();
        assert!(log.flush(PATIENCE));
        let mut lines = BufReader::new(reader).lines();
        assert_eq!(lines.next().unwrap().unwrap(), "one");
        assert_eq!(lines.next().unwrap().unwrap(), "a\\nERROR b\\r\\x07");
        let named = lines.next().unwrap().unwrap();
        assert_eq!(named, "of a name: \\x1b[2J\\u{9b}2J");
        assert_eq!(lines.next().unwrap().unwrap(), "\x1b[31mred\x1b[0m");
    }

    #[test]
    fn a_full_disk_costs_lines_only() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let log = Log::on(full.into()).unwrap();
        for n in 0..100 {
            log.line(&format!("line {n}"));
        }
        assert!(log.flush(PATIENCE));
        assert_eq!(log.0.lock().lost, 100);
    }

    #[test]
    fn a_pipe_that_nobody_reads_holds_nobody_up_and_what_was_lost_is_counted() {
        let (reader, writer) = pipe().unwrap();
        let log = Log::on(writer.into()).unwrap();
        let line = "x".repeat(1 << 10);
        // Where the writer is late it takes all lines of a round at once, with what was lost by
        // then.
        let lost = (0..100).any(|_| {
            for _ in 0..4 * BYTES_MAX / line.len() {
                log.line(&line);
            }
            assert!(!log.flush(Duration::from_millis(50)), "the pipe is stuck");
            let queue = log.0.lock();
            assert!(queue.bytes <= BYTES_MAX && queue.lines.len() <= LINES_MAX);
            queue.lost > 0
        });
        assert!(lost, "nothing was lost");

        let mut read = BufReader::new(reader).lines();
        let noted = read.find_map(|line| line.unwrap().contains(" were lost").then_some(()));
        assert_eq!(noted, Some(()));
    }
}
