//! What the tasks of the load met, counted.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rocmforge_engine::Error;

use crate::check::Check;

/// Most failures that are kept in words.
const FAILURES_MAX: usize = 50;

#[derive(Default)]
struct Counts {
    done: BTreeMap<&'static str, u64>,
    refused: BTreeMap<&'static str, u64>,
    failures: Vec<String>,
    n_failures: u64,
    probes: u64,
    probes_differing: u64,
}

/// The counts. The lock is held for the counting only, never across a wait.
#[derive(Default)]
pub(super) struct Tally(Mutex<Counts>);

/// The kind of an error, and whether a load like this may meet it.
pub(super) fn kind(error: &Error) -> (&'static str, bool) {
    match error {
        Error::UnknownModel { .. } => ("unknown model", true),
        Error::Precondition(_) => ("precondition", true),
        Error::Exhausted { .. } => ("exhausted", true),
        Error::AskerLimit { .. } => ("limit of an asker", false),
        Error::DeadlineExceeded { .. } => ("deadline", true),
        Error::Cancelled => ("cancelled", true),
        Error::InvalidArgument { .. } => ("invalid argument", false),
        Error::BadModel { .. } => ("bad model", false),
        Error::Unsupported(_) => ("unsupported", false),
        Error::NameTaken { .. } => ("name taken", false),
        Error::Unavailable { .. } => ("unavailable", false),
        Error::FileSilent { .. } => ("file silent", false),
        Error::DataLoss { .. } => ("data loss", false),
        Error::NoDevice(_) => ("no device", false),
        Error::DeviceLost(_) => ("device lost", false),
        Error::Internal(_) => ("internal", false),
    }
}

impl Tally {
    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts what a call came to: a thing done, or an error.
    pub(super) fn count(&self, result: &Result<&'static str, Error>) {
        match result {
            Ok(what) => self.add(what, 1),
            Err(error) => {
                let (kind, expected) = kind(error);
                *self.lock().refused.entry(kind).or_default() += 1;
                if !expected {
                    self.fail(format!("{kind}: {error}"));
                }
            }
        }
    }

    pub(super) fn add(&self, what: &'static str, n: u64) {
        *self.lock().done.entry(what).or_default() += n;
    }

    pub(super) fn fail(&self, failure: String) {
        let mut counts = self.lock();
        counts.n_failures += 1;
        if counts.failures.len() < FAILURES_MAX {
            counts.failures.push(failure);
        }
    }

    /// Counts a probe and whether its text was what it was at the start.
    pub(super) fn probe(&self, same: bool) {
        let mut counts = self.lock();
        counts.probes += 1;
        counts.probes_differing += u64::from(!same);
    }

    /// Adds all of it to the check.
    pub(super) fn report(&self, check: &mut Check) {
        let counts = self.lock();
        for failure in &counts.failures {
            check.fail(failure.clone());
        }
        let list = |map: &BTreeMap<&'static str, u64>| {
            let parts: Vec<_> = map.iter().map(|(what, n)| format!("{n} {what}")).collect();
            parts.join(", ")
        };
        check.note(list(&counts.done));
        check.note(format!("refused: {}", list(&counts.refused)));
        // Random weights have near ties, and chunks of a prompt may be other
        // ones under another budget.
        let line = format!(
            "{} of {} probes had another text than at the start",
            counts.probes_differing, counts.probes
        );
        if counts.probes_differing * 10 > counts.probes {
            check.fail(format!("{line}: more than a tenth"));
        } else {
            check.note(line);
        }
        if !counts.done.contains_key("requests done") {
            check.fail("no request was done: the load proves nothing");
        }
    }
}
