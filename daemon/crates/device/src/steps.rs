//! What is under way while a device is opened and given its memory.
//!
//! A driver's call may never come back, and before the device is there nobody watches it. So who
//! opens it says here what begins, and another thread looks how long that has been.

use std::borrow::Cow;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The step that is under way; clones share it.
#[derive(Debug, Clone, Default)]
pub struct Steps(Arc<Mutex<Option<Step>>>);

#[derive(Debug)]
struct Step {
    what: Cow<'static, str>,
    begun: Instant,
    /// How much longer than others it may take.
    longer: Duration,
}

impl Steps {
    /// Says what begins, in place of what was before: a phrase such as "starting the runtime".
    pub fn begin(&self, what: impl Into<Cow<'static, str>>) {
        self.begin_longer(what, Duration::ZERO);
    }

    /// Begins a step of opening that may take longer than others.
    pub fn begin_longer(&self, what: impl Into<Cow<'static, str>>, longer: Duration) {
        let what = what.into();
        tracing::debug!("{what}");
        let begun = Instant::now();
        *self.lock() = Some(Step {
            what,
            begun,
            longer,
        });
    }

    /// Nothing is under way that may get stuck.
    pub fn end(&self) {
        *self.lock() = None;
    }

    /// What has been under way for longer than `patience`, and for how long.
    pub fn stuck(&self, patience: Duration) -> Option<(String, Duration)> {
        let step = self.lock();
        let step = step.as_ref()?;
        let age = step.begun.elapsed();
        (age > patience + step.longer).then(|| (step.what.clone().into_owned(), age))
    }

    /// A step is whole at every moment.
    fn lock(&self) -> MutexGuard<'_, Option<Step>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_takes_long_is_told_until_the_next_begins() {
        let steps = Steps::default();
        let seen = steps.clone();
        assert_eq!(seen.stuck(Duration::ZERO), None);
        steps.begin("starting the runtime");
        std::thread::sleep(Duration::from_millis(20));
        let (what, age) = seen.stuck(Duration::from_millis(10)).unwrap();
        assert_eq!(what, "starting the runtime");
        assert!(age >= Duration::from_millis(20), "{age:?}");
        steps.begin("mapping memory".to_owned());
        assert_eq!(seen.stuck(Duration::from_secs(60)), None);
        steps.begin_longer("taking memory", Duration::from_secs(60));
        assert_eq!(seen.stuck(Duration::ZERO), None);
        steps.end();
        assert_eq!(seen.stuck(Duration::ZERO), None);
    }
}
