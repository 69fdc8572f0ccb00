//! What signals ask of the daemon.
//!
//! ```text
//! SIGTERM, SIGINT              stop: the first drains, the second ends at once
//! SIGHUP                       the settings are read anew; those that come meanwhile are one
//! SIGUSR1, SIGUSR2, SIGALRM,   nothing, where the system's default would end the process without
//! SIGVTALRM, SIGPROF, SIGIO,   a drain; a log that has grown to the limit of file sizes loses
//! SIGPWR, SIGXFSZ              lines, as on a full disk
//! ```
//!
//! SIGQUIT and SIGXCPU keep their default: whoever sends them, or limits processor time, wants the
//! process to end.
//!
//! Stops that come within [`STOP_APART_MIN`] of each other are one: `timeout` and shells signal a
//! process and then its group.

use std::io;
use std::time::{Duration, Instant};

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;

/// Minimum time between two signals for the second to count as a separate stop.
pub const STOP_APART_MIN: Duration = Duration::from_millis(500);

/// Receivers of what signals ask for.
#[derive(Debug)]
pub struct Signals {
    /// Receives a message for each stop, of which only the first two matter.
    pub stops: mpsc::Receiver<()>,
    /// Receives a message for each reload of the settings.
    pub reloads: mpsc::Receiver<()>,
}

/// Starts to handle signals. Must be called on a tokio runtime.
///
/// # Errors
/// A signal handler cannot be installed.
pub fn listen() -> io::Result<Signals> {
    let (stop, stops) = mpsc::channel(2);
    let (reload, reloads) = mpsc::channel(1);
    let [mut term, mut interrupt, mut hangup] = handlers([
        SignalKind::terminate(),
        SignalKind::interrupt(),
        SignalKind::hangup(),
    ])?;
    // A handler of tokio's stays for the life of the process, also when its receiver is gone.
    let _ignored = handlers([
        SignalKind::user_defined1(),
        SignalKind::user_defined2(),
        SignalKind::alarm(),
        SignalKind::io(),
        SignalKind::from_raw(libc::SIGVTALRM),
        SignalKind::from_raw(libc::SIGPROF),
        SignalKind::from_raw(libc::SIGPWR),
        SignalKind::from_raw(libc::SIGXFSZ),
    ])?;
    tokio::spawn(async move {
        let mut stopped: Option<Instant> = None;
        loop {
            tokio::select! {
                _ = term.recv() => {}
                _ = interrupt.recv() => {}
                _ = hangup.recv() => {
                    // Where one waits already, it will find what has changed since.
                    let _ = reload.try_send(());
                    continue;
                }
            }
            let now = Instant::now();
            let apart = stopped.is_none_or(|at| now.duration_since(at) >= STOP_APART_MIN);
            if apart {
                stopped = Some(now);
                // Whoever has had two stops listens no more.
                let _ = stop.try_send(());
            }
        }
    });
    Ok(Signals { stops, reloads })
}

fn handlers<const N: usize>(kinds: [SignalKind; N]) -> io::Result<[Signal; N]> {
    let mut made = Vec::with_capacity(N);
    for kind in kinds {
        made.push(signal(kind)?);
    }
    made.try_into()
        .map_err(|_| io::Error::other("a signal has no handler"))
}
