//! Gaps (times) between the tokens of a request, and their causes.

use std::time::Duration;

use crate::api::Class;

/// A time between two tokens of a request, and its main cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gap {
    /// Time between the two tokens.
    pub took: Duration,
    /// What took most of the gap.
    pub cause: GapCause,
}

/// What took most of a gap between two tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GapCause {
    /// Passes of the request's own model: its tokens, and other requests' prompts beside them.
    OwnPasses,
    /// Passes of other models.
    OtherModels,
    /// Uploads of weights that passes waited for.
    Uploads,
    /// No pass: the reader had no room, the request had been preempted, or the engine did
    /// something else.
    Waiting,
}

impl GapCause {
    /// All causes of long gaps.
    pub const ALL: [Self; 4] = [
        Self::OwnPasses,
        Self::OtherModels,
        Self::Uploads,
        Self::Waiting,
    ];

    /// The cause's name in logs, metrics and JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            GapCause::OwnPasses => "own_passes",
            GapCause::OtherModels => "other_models",
            GapCause::Uploads => "uploads",
            GapCause::Waiting => "waiting",
        }
    }
}

/// Numbers of gaps between tokens that were longer than promised, since start-up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BrokenGaps {
    interactive: [u64; GapCause::ALL.len()],
    batch: [u64; GapCause::ALL.len()],
}

impl BrokenGaps {
    /// Number of broken gaps of a class with this cause.
    #[must_use]
    pub fn of(&self, class: Class, cause: GapCause) -> u64 {
        match class {
            Class::Interactive => self.interactive[cause as usize],
            Class::Batch => self.batch[cause as usize],
        }
    }

    /// Number of broken gaps of all classes and causes.
    #[must_use]
    pub fn sum(&self) -> u64 {
        self.interactive.iter().chain(&self.batch).sum()
    }

    pub(crate) fn count(&mut self, class: Class, cause: GapCause) {
        let of_class = match class {
            Class::Interactive => &mut self.interactive,
            Class::Batch => &mut self.batch,
        };
        of_class[cause as usize] += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_class_and_cause_has_a_count_of_its_own() {
        let mut broken = BrokenGaps::default();
        let classes = [Class::Interactive, Class::Batch];
        for (at, cause) in GapCause::ALL.into_iter().enumerate() {
            assert_eq!(cause as usize, at);
            for class in classes {
                broken.count(class, cause);
                assert_eq!(broken.of(class, cause), 1);
            }
        }
        assert_eq!(broken.sum(), 8);
    }
}
