//! Runs calls that may never return, such as for a file of a server that is gone, on a thread of
//! their own.

use std::io;
use std::sync::mpsc::{Receiver, channel};

/// Runs `what` on a thread of its own; the receiver gets its result.
///
/// # Errors
/// No thread can be started.
pub fn ask<T: Send + 'static>(
    what: impl FnOnce() -> T + Send + 'static,
) -> io::Result<Receiver<T>> {
    let (answers, answer) = channel();
    let thread = std::thread::Builder::new().name("late".to_owned());
    // Nobody may wait for it any more.
    thread.spawn(move || answers.send(what()))?;
    Ok(answer)
}
