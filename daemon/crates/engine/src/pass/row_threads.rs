//! Threads that process rows of logits: each request's rows on one thread.
//!
//! A sampler that reads all logits of a large vocabulary takes 0.1 to 2.4 ms a row, and the device
//! is idle meanwhile. Requests are independent, so what comes of their rows does not depend on the
//! number of threads.

use std::num::NonZeroUsize;
use std::sync::OnceLock;
use std::time::Duration;

use rocmforge_kernels_cpu::Pool;

/// Maximum number of threads, since so many rows are read from a device at a time.
const THREADS_MAX: usize = 32;

/// Number of logits below which the engine's own thread finishes before other threads wake.
const SHARED_FROM: usize = 1 << 16;

/// Threads that process rows of logits, started when they are first needed.
#[derive(Debug)]
pub(crate) struct RowThreads {
    threads: NonZeroUsize,
    shared_from: usize,
    /// The pool of threads; `None` if the system could start none.
    pool: OnceLock<Option<Pool>>,
}

impl RowThreads {
    /// Uses `threads` threads (one for each usable core if `None`) from `shared_from` logits on
    /// ([`SHARED_FROM`] if `None`).
    pub(crate) fn new(threads: Option<NonZeroUsize>, shared_from: Option<usize>) -> Self {
        let cores = || std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        let threads = threads.unwrap_or_else(cores).get().min(THREADS_MAX);
        Self {
            threads: NonZeroUsize::new(threads).unwrap_or(NonZeroUsize::MIN),
            shared_from: shared_from.unwrap_or(SHARED_FROM),
            pool: OnceLock::new(),
        }
    }

    /// Runs each job, on several threads if the jobs together read many logits.
    pub(crate) fn each<T: Send>(
        &self,
        jobs: &mut [T],
        logits: usize,
        does: impl Fn(&mut T) + Sync,
    ) {
        let shared = jobs.len() > 1 && logits >= self.shared_from && self.threads.get() > 1;
        match shared.then(|| self.pool()).flatten() {
            Some(pool) => pool.run_rows(jobs, 1, 1, |_, jobs| jobs.iter_mut().for_each(&does)),
            None => jobs.iter_mut().for_each(does),
        }
    }

    fn pool(&self) -> Option<&Pool> {
        let started = self.pool.get_or_init(|| {
            // Passes are milliseconds apart: to look for the next one takes more than to wake.
            let pool = Pool::with_spin(self.threads, Duration::ZERO);
            pool.inspect_err(|error| {
                tracing::warn!(%error, "tokens are sampled on the engine's thread alone");
            })
            .ok()
        });
        started.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::thread;

    use super::*;

    fn threads_of(row_threads: &RowThreads, jobs: usize, logits: usize) -> usize {
        let mut jobs: Vec<_> = (0..jobs).map(|_| None).collect();
        row_threads.each(&mut jobs, logits, |job| {
            // Long enough for the others to wake.
            thread::sleep(Duration::from_millis(5));
            assert!(job.replace(thread::current().id()).is_none(), "done twice");
        });
        let threads: HashSet<_> = jobs.iter().map(|job| job.expect("done")).collect();
        threads.len()
    }

    #[test]
    fn many_logits_of_several_requests_are_shared_out() {
        let four = RowThreads::new(NonZeroUsize::new(4), None);
        assert!(threads_of(&four, 24, SHARED_FROM) > 1);
        assert_eq!(threads_of(&four, 24, SHARED_FROM - 1), 1);
        assert_eq!(threads_of(&four, 1, SHARED_FROM), 1);
        let one = RowThreads::new(NonZeroUsize::new(1), Some(0));
        assert_eq!(threads_of(&one, 3, SHARED_FROM), 1);
    }
}
