//! A pass that found no room in one piece although there is room by the sums: blocks of other
//! requests came and went between its own, and a large segment, such as the head behind a long
//! prompt, has no place any more.
//!
//! ```text
//! no room, passes are suspended --> the pass again, once they have ended
//!    |
//!    +--again, or none is suspended--> KV pages and states are moved together, the pass again;
//!    |                                 the second time in one piece, with no other one beside it
//!    +--again--> others yield, one after another; the last one is recomputed (`pressure.rs`)
//! ```
//!
//! To let the request itself yield would be the end of what it has computed, and it would come to
//! the same place again: a prompt of a model that is streamed was computed over and over so, for
//! minutes, beside streams that were promised a gap, which yield last.
//!
//! *Invariant:* a pass of a request is computed at most three times before another request yields,
//! unless it comes farther.

use rocmforge_scheduler::SeqId;

use crate::actor::engine::Engine;
use crate::pass::member::Member;

/// Times that a pass finds no room before it runs in one piece, with no other one beside it.
pub(super) const ALONE_AFTER: u32 = 2;

impl Engine {
    /// A pass of these requests found no room. How often that one of them did which did most often,
    /// without coming farther.
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

    /// Whether a pass of these requests found no room so often that it is to run in one piece, with
    /// no other one beside it.
    pub(super) fn runs_alone(members: &[Member]) -> bool {
        members.iter().any(|member| {
            let (farthest, times) = member.task.no_room;
            times >= ALONE_AFTER && (member.task.n_past..member.end()).contains(&farthest)
        })
    }

    /// Moves KV pages and states of all requests together, if their passes found no room only so
    /// many times. Whether it did. No pass is suspended.
    pub(super) fn gathers(&mut self, times: u32) -> bool {
        if times > ALONE_AFTER {
            return false;
        }
        self.gather(&mut []);
        true
    }

    /// Moves KV pages and states together, also those of the requests of a pass that begins, so
    /// that all that it takes lies behind them. No pass is suspended.
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
