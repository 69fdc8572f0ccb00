//! What may never answer, as a file of a server that is gone: asked on a thread of its own, which
//! nobody has to wait for.

use std::io;
use std::sync::mpsc::{Receiver, channel};

/// Asks on a thread of its own; the receiver gets the answer.
///
/// # Errors
/// There is no thread for it.
pub fn ask<T: Send + 'static>(
    what: impl FnOnce() -> T + Send + 'static,
) -> io::Result<Receiver<T>> {
    let (answers, answer) = channel();
    let thread = std::thread::Builder::new().name("late".to_owned());
    // Nobody may wait for it any more.
    thread.spawn(move || answers.send(what()))?;
    Ok(answer)
}
