//! How a device was lost, as far as its driver and the system tell.
//!
//! What a call of the driver shows is a symptom: work that does not end, a code. What the system
//! says ([`Said`]) may be its cause. [`Loss::with`] puts both together.

use std::fmt;

/// How a device was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LossKind {
    /// Work on it, or a call of its driver, does not end.
    Hang,
    /// The scheduler in its firmware (MES, HWS) does not answer the kernel.
    SchedulerHang,
    /// The kernel has reset the device.
    Reset,
    /// The device is no longer on the bus, or does not answer there.
    Gone,
    /// A kernel on it did what it may not: an access to memory that is not its own, as a rule.
    Fault,
    /// The device's hardware failed beyond correction: memory or link.
    Hardware,
    /// The device works, but its memory does not hold what it held: a reset, or a loss of power in
    /// a sleep.
    ContentsLost,
    /// The device's driver refuses memory without which it cannot go on.
    NoMemory,
    /// The cause is unknown.
    Unknown,
}

impl LossKind {
    /// A word for a label.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            LossKind::Hang => "hang",
            LossKind::SchedulerHang => "scheduler_hang",
            LossKind::Reset => "reset",
            LossKind::Gone => "gone",
            LossKind::Fault => "fault",
            LossKind::Hardware => "hardware",
            LossKind::ContentsLost => "contents_lost",
            LossKind::NoMemory => "no_memory",
            LossKind::Unknown => "unknown",
        }
    }

    /// What is said of the device before the reason; nothing where nobody tells.
    fn words(self) -> &'static str {
        match self {
            LossKind::Hang => "it hangs: ",
            LossKind::SchedulerHang => "the scheduler in its firmware hangs: ",
            LossKind::Reset => "it was reset: ",
            LossKind::Gone => "it is gone from the bus: ",
            LossKind::Fault => "a kernel on it faulted: ",
            LossKind::Hardware => "its hardware failed: ",
            LossKind::ContentsLost => "what its memory held is gone: ",
            LossKind::NoMemory => "its driver refuses memory: ",
            LossKind::Unknown => "",
        }
    }
}

/// What the system has to say of a device beside its driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Said {
    /// What that comes to.
    pub kind: LossKind,
    /// For people.
    pub words: String,
}

/// Loss of a device, with its kind and a text for users.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loss {
    /// How.
    pub kind: LossKind,
    /// The symptom of the loss, and how it was detected.
    pub reason: String,
}

impl Loss {
    /// A loss of a kind.
    pub fn new(kind: LossKind, reason: impl Into<String>) -> Self {
        let reason = reason.into();
        Self { kind, reason }
    }

    /// A loss of unknown cause.
    pub fn unknown(reason: impl Into<String>) -> Self {
        Self::new(LossKind::Unknown, reason)
    }

    /// The loss with what the system says of it. A device that is gone is gone, whatever the driver
    /// calls it; otherwise the system's word counts where the driver only shows that nothing comes
    /// any more: a kernel's fault, say, is followed by a reset, which is not its cause.
    #[must_use]
    pub fn with(self, said: Option<Said>) -> Self {
        let Some(said) = said else {
            return self;
        };
        let kind = match (self.kind, said.kind) {
            (kind, LossKind::Unknown) => kind,
            (_, LossKind::Gone) => LossKind::Gone,
            (LossKind::Unknown, told) => told,
            // Faults are told of any process's kernels: those do not make a hang.
            (LossKind::Hang, LossKind::Fault) => LossKind::Hang,
            (LossKind::Hang, told) => told,
            (kind, _) => kind,
        };
        Self {
            kind,
            reason: format!("{}; {}", self.reason, said.words),
        }
    }

    /// The loss with `what` put before the reason.
    #[must_use]
    pub fn during(self, what: impl fmt::Display) -> Self {
        Self {
            reason: format!("{what}: {}", self.reason),
            ..self
        }
    }
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.kind.words(), self.reason)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cause_is_told_apart_from_what_follows_it() {
        use LossKind::{Fault, Gone, Hang, Hardware, Reset, SchedulerHang, Unknown};
        for (seen, told, both) in [
            (Hang, Reset, Reset),
            (Hang, SchedulerHang, SchedulerHang),
            (Hang, Hardware, Hardware),
            (Hang, Fault, Hang),
            (Hang, Unknown, Hang),
            (Fault, Reset, Fault),
            (Fault, Gone, Gone),
            (LossKind::ContentsLost, Reset, LossKind::ContentsLost),
            (Unknown, Reset, Reset),
            (Unknown, Fault, Fault),
        ] {
            let loss = Loss::new(seen, "a call failed");
            let said = Said {
                kind: told,
                words: "the kernel's log".to_owned(),
            };
            let loss = loss.with(Some(said));
            assert_eq!(loss.kind, both, "{seen:?}, {told:?}");
            assert!(
                loss.to_string()
                    .ends_with("a call failed; the kernel's log")
            );
        }
        let alone = Loss::new(Hang, "no end").with(None);
        assert_eq!(alone.to_string(), "it hangs: no end");
        let during = Loss::unknown("no end").during("opening hip:0");
        assert_eq!(during.to_string(), "opening hip:0: no end");
    }
}
