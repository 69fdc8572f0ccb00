//! The tokio runtimes: connections and their streams run on one thread, handlers on others.
//!
//! A streamed token is little work. Where several threads may do it, waking and asking one another
//! costs more than the token does; so one thread alone serves the sockets, and what takes longer (a
//! large body to decode, a prompt to check) is kept off it.

use std::panic::resume_unwind;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::runtime::Handle;
use tokio::task::{JoinError, JoinHandle};

/// The runtimes of connections and of handlers, which may be the same.
#[derive(Debug, Clone)]
pub struct Runtimes {
    /// Runtime of connections and of the events on their streams.
    pub sockets: Handle,
    /// Runtime of request handlers.
    pub handlers: Handle,
}

impl Runtimes {
    /// Runs `work` on the handlers' runtime and returns its result. Dropping the future ends the
    /// work at its next wait.
    pub fn handle<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Handled<T> {
        // Of one type for all that give the same: the code of a task is generated for each.
        let work: Pin<Box<dyn Future<Output = T> + Send>> = Box::pin(work);
        Handled(self.handlers.spawn(work))
    }
}

/// The result of work that runs on the handlers' runtime.
#[derive(Debug)]
pub struct Handled<T>(JoinHandle<T>);

impl<T> Future for Handled<T> {
    type Output = T;

    /// Panics if the work did.
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        match Pin::new(&mut self.0).poll(cx) {
            Poll::Ready(Ok(given)) => Poll::Ready(given),
            Poll::Ready(Err(error)) => match JoinError::try_into_panic(error) {
                Ok(panic) => resume_unwind(panic),
                // The daemon ends, and the connection with it.
                Err(_) => Poll::Pending,
            },
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<T> Drop for Handled<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    fn here() -> Runtimes {
        Runtimes {
            sockets: Handle::current(),
            handlers: Handle::current(),
        }
    }

    #[tokio::test]
    async fn work_ends_with_who_asked_for_it() {
        let (kept, mut ended) = oneshot::channel::<()>();
        let (begins, begun) = oneshot::channel();
        let work = here().handle(async move {
            let _ = begins.send(());
            std::future::pending::<()>().await;
            drop(kept);
        });
        begun.await.unwrap();
        assert!(ended.try_recv() == Err(oneshot::error::TryRecvError::Empty));
        drop(work);
        assert!(ended.await.is_err(), "what it held is let go");
    }

    #[tokio::test]
    async fn a_panic_is_who_asked_for_the_works() {
        assert_eq!(here().handle(async { 7 }).await, 7);
        let broken = here().handle(async { panic!("as it is meant to") });
        let asked: Result<(), _> = tokio::spawn(broken).await;
        assert!(asked.unwrap_err().is_panic());
    }
}
