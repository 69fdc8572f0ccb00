//! Memory that the driver refuses while passes run, because another process took it.
//!
//! The engine returns a part of the budget to the driver and repeats the pass; sequences that do
//! not fit any more are preempted. This module decides how much is returned, and how often.

use crate::demand::ScratchTarget;
use crate::error::Refusal;
use crate::plan::Action;
use crate::scheduler::Scheduler;
use crate::sequence::SeqId;
use crate::view::View;

/// The first time, at least one part in this many of the budget is returned; each further time
/// twice as much, up to half.
const FIRST_PART: u64 = 16;

/// The budget that is left after the driver refused `refused_bytes` (0 if unknown), with `refusals`
/// earlier refusals; a multiple of `align`.
#[must_use]
pub fn shrunk_budget(budget_bytes: u64, refused_bytes: u64, refusals: u32, align: u64) -> u64 {
    let part = (FIRST_PART >> refusals.min(3)).max(2);
    let step = refused_bytes.max(budget_bytes / part).max(1);
    let step = step.checked_next_multiple_of(align).unwrap_or(step);
    budget_bytes.saturating_sub(step)
}

impl Scheduler {
    /// Records that a pass with these sequences computed nothing because the driver refused memory.
    /// Returns the largest number of failures among them; the next [`Scheduler::admit`] rejects a
    /// sequence that failed too often.
    pub fn memory_refused(&mut self, seqs: impl IntoIterator<Item = SeqId>) -> u32 {
        let mut most = 0;
        for seq in seqs {
            if let Some(s) = self.sequences.get_mut(&seq) {
                s.refusals += 1;
                most = most.max(s.refusals);
            }
        }
        most
    }

    /// Rejects a sequence that failed too often.
    pub(crate) fn refuse_the_failed(&mut self, actions: &mut Vec<Action>) {
        let most = self.config.refusals_max;
        let failed: Vec<(SeqId, u32)> = self
            .running
            .iter()
            .filter(|seq| !self.sequences[*seq].in_pass)
            .map(|seq| (*seq, self.sequences[seq].refusals))
            .filter(|(_, refusals)| *refusals > most)
            .collect();
        for (seq, refusals) in failed {
            let why = Refusal::DriverRefuses { refusals };
            self.refuse(seq, why, actions);
        }
    }

    /// Bytes that running sequences need to continue with passes that are worth their cost. A
    /// single one could do with slightly less, but fixed blocks in the ledger need some slack.
    #[must_use]
    pub fn needed(&self, view: &View<'_>) -> u64 {
        let running = self.running_sequences();
        self.demand(running, None, ScratchTarget::Least, view)
            .total()
    }

    /// Minimum bytes that a sequence needs to continue alone; 0 if it is not known.
    #[must_use]
    pub fn needed_alone(&self, seq: SeqId, view: &View<'_>) -> u64 {
        let known = self.sequences.get(&seq);
        known.map_or(0, |s| self.demand_alone(s, s.promise_least(), view).total())
    }

    /// The smallest budget in which all sequences that have begun can come to their end, one after
    /// another if necessary; 0 if none has begun. An open-ended sequence counts with its present
    /// tokens.
    #[must_use]
    pub fn budget_least(&self, view: &View<'_>) -> u64 {
        let begun = self.sequences.values().filter(|s| s.begun);
        begun
            .map(|s| self.demand_alone(s, s.promise_least(), view).total())
            .max()
            .unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::shrunk_budget;

    #[test]
    fn a_budget_shrinks_by_what_was_refused_but_not_by_crumbs() {
        assert_eq!(shrunk_budget(16 << 20, 0, 0, 256), 15 << 20);
        assert_eq!(shrunk_budget(16 << 20, 1000, 0, 256), 15 << 20);
        assert_eq!(shrunk_budget(16 << 20, 3 << 20, 0, 256), 13 << 20);
        assert_eq!(
            shrunk_budget(16 << 20, (3 << 20) + 1, 0, 256),
            (13 << 20) - 256
        );
        assert_eq!(shrunk_budget(16 << 20, 0, 1, 256), 14 << 20);
        assert_eq!(shrunk_budget(16 << 20, 0, 100, 256), 8 << 20);
        assert_eq!(shrunk_budget(1 << 20, u64::MAX, 0, 256), 0);
        assert_eq!(shrunk_budget(0, 0, 0, 256), 0);
    }

    #[test]
    fn shrinking_ends() {
        let mut budget = 1 << 40;
        for refusals in 0..12 {
            let after = shrunk_budget(budget, 0, refusals, 256);
            assert!(after < budget, "{refusals}");
            budget = after;
        }
        assert!(budget < 1 << 32, "{budget}");
    }
}
