//! Requests whose cached prefix is read from disk before their first pass. Other requests run
//! meanwhile.

use std::time::Instant;

use rocmforge_scheduler::SeqId;

use crate::actor::engine::Engine;
use crate::features::kv_disk::reading::Wanted;

impl Engine {
    /// Starts an admitted or waiting request with what is cached in memory, unless another request
    /// is computing or reading more of its prefix, or more of it has to be read from disk first.
    pub(crate) fn begin_or_read(&mut self, seq: SeqId) {
        let now = self.now();
        self.ask_leaders(seq);
        let follows = self.has_leader(seq);
        let Some(task) = self.requests.tasks.get_mut(&seq) else {
            return;
        };
        // A part of what the other one is at would be all that it ever begins with. One that has
        // run before finds its own pages.
        if follows && task.realm.is_some() && task.yielded_at == 0 {
            task.follows = true;
            self.requests.scheduler.set_ready(seq, false);
            return;
        }
        if let Some(realm) = task.realm.filter(|_| !follows) {
            let wanted = Wanted {
                seq,
                realm,
                of: task.loaded.model(),
                tokens: &task.tokens,
                predicts: task.predicts,
            };
            task.reads = self.memory.begin_read(&wanted, now);
        }
        match task.reads {
            // It is not to run in the pass that comes next.
            true => self.requests.scheduler.set_ready(seq, false),
            false => self.begin_with_what_is_there(seq),
        }
    }

    /// Takes the KV pages that have been read from disk, and starts requests that have all of
    /// theirs.
    pub(crate) fn read_prefixes(&mut self, now: Instant) {
        let tasks = &self.requests.tasks;
        let reads = |seq| tasks.get(&seq).is_some_and(|task| task.reads);
        for ended in self.memory.read_turn(now, reads) {
            let seq = ended.seq;
            if let Some(task) = self.requests.tasks.get_mut(&seq) {
                task.reads = false;
            }
            match ended.found {
                None => self.begin_or_read(seq),
                Some(found) => {
                    self.begin_with_what_is_there(seq);
                    let there = self.requests.tasks.get(&seq).map_or(0, |task| task.n_past);
                    if let Some(disk) = &mut self.memory.kv_disk {
                        disk.count_reused(there.saturating_sub(found));
                    }
                }
            }
            self.count_recomputed(seq);
            self.memory.let_go(ended.held);
        }
    }
}
