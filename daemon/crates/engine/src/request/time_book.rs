//! State for the time accounts of all requests: the engine's sums when accounts were last charged,
//! and the speed of models with all weights resident.

use std::collections::HashMap;
use std::time::Duration;

use rocmforge_tensor_cache::ModelId;

use crate::request::time_account::{Meanwhile, Occupant, SliceUse, WaitsFor};
use crate::store::displaced::Waited;

/// Weight of a new sample in the moving average of a pass's time.
const WEIGHT: f64 = 0.125;

/// Counters since start-up; their growth over a slice is what the slice used.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Sums {
    pub(crate) waited: Waited,
    /// Time of CPU compute.
    pub(crate) cpu: Duration,
}

/// Time and bytes spent between two readings of the sums.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct SpentSince {
    /// Time of waits for uploads from memory, and from disk.
    uploads: Duration,
    disk: Duration,
    cpu: Duration,
    sampling: Duration,
    /// Bytes that were uploaded over the link.
    pub(crate) linked_bytes: u64,
    model: Option<ModelId>,
}

impl SpentSince {
    /// The sum of this and a later span.
    pub(crate) fn and(self, later: Self) -> Self {
        Self {
            uploads: self.uploads + later.uploads,
            disk: self.disk + later.disk,
            cpu: self.cpu + later.cpu,
            sampling: self.sampling + later.sampling,
            linked_bytes: self.linked_bytes + later.linked_bytes,
            model: later.model.or(self.model),
        }
    }

    /// Converts this to the use of a slice, for whose own work the device needs `work`.
    pub(crate) fn slice(self, earlier: Option<(Occupant, Duration)>, work: Duration) -> SliceUse {
        SliceUse {
            disk: self.disk,
            uploads: self.uploads,
            cpu: self.cpu,
            sampling: self.sampling,
            earlier,
            work,
        }
    }

    /// What was spent, as charged between two slices.
    pub(crate) fn between(self) -> Meanwhile {
        let any = !(self.uploads + self.disk).is_zero();
        let model = self.model.filter(|_| any);
        Meanwhile::Between(model.map(|model| WaitsFor {
            model,
            uploads: self.uploads,
            disk: self.disk,
        }))
    }
}

/// State that the time accounts of all requests share.
#[derive(Debug, Default)]
pub(crate) struct TimeBook {
    seen: Sums,
    /// Time in which tokens were chosen since the last reading.
    pub(crate) sampling: Duration,
    /// The pass that last queued work on the device which nobody has waited for.
    given: Option<Occupant>,
    /// Occupant of the last slice.
    pub(crate) last: Option<Occupant>,
    /// Seconds of a one-token pass of each model with all weights resident.
    resident_token: HashMap<ModelId, f64>,
}

impl TimeBook {
    /// What was spent since the last reading of the sums.
    pub(crate) fn look(&mut self, now: Sums) -> SpentSince {
        let before = std::mem::replace(&mut self.seen, now);
        let disk = now.waited.disk - before.waited.disk;
        SpentSince {
            uploads: (now.waited.all - before.waited.all).saturating_sub(disk),
            disk,
            cpu: now.cpu - before.cpu,
            sampling: std::mem::take(&mut self.sampling),
            linked_bytes: now.waited.linked_bytes - before.waited.linked_bytes,
            model: now.waited.model,
        }
    }

    /// Occupant of the pass that gave the device its last work that was not waited for.
    pub(crate) fn given(&self) -> Option<Occupant> {
        self.given
    }

    /// Records that a slice ended that waited `earlier` for previously queued work, and whether it
    /// waited for all of its own. Returns whose the earlier work was, if another model's.
    pub(crate) fn slice(
        &mut self,
        whose: Occupant,
        earlier: Duration,
        was_read: bool,
    ) -> Option<(Occupant, Duration)> {
        self.last = Some(whose);
        let before = match was_read {
            true => self.given.take(),
            false => self.given.replace(whose),
        };
        let other = before.filter(|before| before.model != whose.model);
        other.map(|other| (other, earlier))
    }

    /// Notes the time of a pass of one token with all weights resident.
    pub(crate) fn note_resident(&mut self, model: ModelId, took: Duration) {
        let took = took.as_secs_f64();
        let seconds = self.resident_token.entry(model).or_insert(took);
        *seconds += (took - *seconds) * WEIGHT;
    }

    /// Measured seconds of a one-token pass of a model with all weights resident.
    pub(crate) fn resident_token(&self, model: ModelId) -> Option<f64> {
        self.resident_token.get(&model).copied()
    }

    /// Forgets the times of a model that is unloaded.
    pub(crate) fn forget(&mut self, model: ModelId) {
        self.resident_token.remove(&model);
        for whose in [&mut self.given, &mut self.last] {
            *whose = whose.filter(|whose| whose.model != model);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn whose(model: u32) -> Occupant {
        Occupant {
            model: ModelId(model),
            client: 0,
        }
    }

    #[test]
    fn earlier_work_of_the_device_counts_only_where_nobody_waited_for_it() {
        let (mut book, ms) = (TimeBook::default(), Duration::from_millis);
        assert_eq!(book.slice(whose(1), ms(0), false), None);
        assert_eq!(book.slice(whose(2), ms(9), true), Some((whose(1), ms(9))));
        assert_eq!(book.slice(whose(2), ms(3), true), None);
        book.slice(whose(1), ms(0), false);
        assert_eq!(book.slice(whose(1), ms(4), true), None, "its own");
    }

    #[test]
    fn the_time_of_a_resident_pass_follows_the_recent_ones() {
        let mut book = TimeBook::default();
        assert_eq!(book.resident_token(ModelId(1)), None);
        book.note_resident(ModelId(1), Duration::from_millis(8));
        book.note_resident(ModelId(1), Duration::from_millis(16));
        let token = book.resident_token(ModelId(1)).unwrap_or_default();
        assert!((token - 0.009).abs() < 1e-9, "{token}");
        book.forget(ModelId(1));
        assert_eq!(book.resident_token(ModelId(1)), None);
    }
}
