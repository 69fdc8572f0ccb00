//! Handling of a pass that found no contiguous memory although enough bytes are free: blocks of
//! other requests came and went between its own, and a large segment, such as the output head after
//! a long prompt, does not fit any more.
//!
//! ```text
//! no room, passes are suspended --> the pass again, once they have ended
//!    |
//!    +--again, or none is suspended--> KV pages and states are moved together, the pass again;
//!    |                                 the second time in one piece, with no other one beside it
//!    +--again--> others are preempted, one by one; the last is recomputed (`pressure.rs`)
//! ```
//!
//! Preempting the request itself would lose what it has computed, and it would get stuck at the
//! same place again: a prompt of a model that is streamed was computed over and over so, for
//! minutes, beside streams that were promised a gap, which are preempted last.
//!
//! *Invariant:* a pass of a request is computed at most three times before another request is
//! preempted, unless the request gets farther.

use rocmforge_scheduler::SeqId;

use crate::actor::engine::Engine;
use crate::pass::member::Member;

/// Number of times that a pass finds no contiguous memory before it runs in one piece, with no
/// other pass beside it.
pub(super) const ALONE_AFTER: u32 = 2;

impl Engine {
    /// Records that a pass of these requests found no contiguous memory. Returns the largest number
    /// of times that this happened to one of them without getting farther.
    pub(super) fn note_no_room(&mut self, seqs: &[SeqId]) -> u32 {
        let mut most = 0;
        for seq in seqs {
            if let Some(task) = self.requests.tasks.get_mut(seq) {
                let (farthest, times) = task.no_room;
                task.no_room = match task.n_past > farthest || times == 0 {
                    true => (task.n_past, 1),
                    false => (farthest, times + 1),
                };
                most = most.max(task.no_room.1);
            }
        }
        most
    }

    /// Whether a pass of these requests has found no contiguous memory so often that it has to run
    /// in one piece, with no other pass beside it.
    pub(super) fn runs_alone(members: &[Member]) -> bool {
        members.iter().any(|member| {
            let (farthest, times) = member.task.no_room;
            times >= ALONE_AFTER && (member.task.n_past..member.end()).contains(&farthest)
        })
    }

    /// Compacts the KV pages and states of all requests, if their passes found no contiguous memory
    /// at most [`ALONE_AFTER`] times. Returns whether it did. No pass may be suspended.
    pub(super) fn gathers(&mut self, times: u32) -> bool {
        if times > ALONE_AFTER {
            return false;
        }
        self.gather(&mut []);
        true
    }

    /// Compacts KV pages and states, also those of `members`, whose pass begins, so that the memory
    /// that the pass allocates lies behind them. No pass may be suspended.
    pub(super) fn gather(&mut self, members: &mut [Member]) {
        self.free_scratch();
        match self.memory.gather() {
            Ok(moved) => tracing::debug!(
                moved,
                "KV pages are moved together: there was no room in one piece"
            ),
            // An arena of which nobody knows what lies where is the device's loss.
            Err(error) => self.lose(&error),
        }
        let of_pass = members.iter_mut().map(|member| &mut member.task);
        for task in self.requests.tasks.values_mut().chain(of_pass) {
            let plan = task.loaded.model().plan();
            task.memory.locate(&self.memory, plan);
        }
    }
}
