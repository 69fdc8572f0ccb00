//! Limits on the running and queued requests of one client.
//!
//! The scheduler is fair by client; these limits apply in addition. A request above `running_max`
//! is reported to the scheduler as not ready, like one whose reader is slow. A request above the
//! queue limit is rejected when it arrives.
//!
//! *Invariant:* no admission takes a client's running requests above its `running_max`: those that
//! run, and those that wait and are ready, are no more than that (test
//! `more_than_may_run_wait_and_more_than_may_wait_are_refused`). Where a reload lowers the limit,
//! what runs already goes on, and nothing is ready until enough of it has ended.

use std::collections::{HashMap, HashSet};

use rocmforge_scheduler::SeqId;
use rocmforge_tensor_cache::ModelId;

use crate::api::error::Error;
use crate::api::{Asker, ClientStatus};
use crate::request::requests::Requests;
use crate::request::task::Task;

impl Requests {
    /// Whether a request is admitted.
    fn runs(&self, seq: SeqId) -> bool {
        self.scheduler.sequence(seq).is_some_and(|s| s.running)
    }

    /// Number of waiting requests whose readers have room (a preempted one may have a reader that
    /// does not read), without those of the models in `not_ready`, which only wait for their file.
    pub(crate) fn queued_and_read(&self, not_ready: &[ModelId]) -> u32 {
        let waits = |task: &&Task| {
            task.reader_has_room() && !not_ready.contains(&task.model) && !self.runs(task.seq)
        };
        self.tasks.values().filter(waits).count() as u32
    }

    /// Numbers of each client's requests, ordered by the clients' numbers.
    pub(crate) fn clients(&self) -> Vec<ClientStatus> {
        let mut clients: Vec<ClientStatus> = Vec::new();
        for task in self.all() {
            let client = task.asker.client;
            let at = clients.binary_search_by_key(&client, |c| c.client);
            let at = at.unwrap_or_else(|at| {
                let none = ClientStatus {
                    client,
                    running: 0,
                    queued: 0,
                };
                clients.insert(at, none);
                at
            });
            match self.runs(task.seq) {
                true => clients[at].running += 1,
                false => clients[at].queued += 1,
            }
        }
        clients
    }

    /// The error if a client has reached its limit of requests.
    pub(crate) fn too_many_of(&self, asker: &Asker, sequences_max: usize) -> Option<Error> {
        let queued_max = asker.queued_max?;
        let (mut running, mut queued) = (0, 0);
        let of_asker = |task: &&Task| task.asker.client == asker.client;
        for task in self.all().filter(of_asker) {
            match self.runs(task.seq) {
                true => running += 1,
                false => queued += 1,
            }
        }
        let engine_max = u32::try_from(sequences_max).unwrap_or(u32::MAX);
        let running_max = asker.running_max.unwrap_or(engine_max).min(engine_max);
        // Those that came just now wait although there is a place for them.
        (running + queued >= running_max.saturating_add(queued_max)).then_some(Error::AskerLimit {
            running,
            queued,
            running_max,
            queued_max,
        })
    }

    /// Waiting requests that may not be admitted now because of their client's limit: other
    /// requests of the client run or come first (interactive ones, then by arrival).
    pub(crate) fn held_back(&self) -> HashSet<SeqId> {
        let limited = |task: &&Task| task.asker.running_max.is_some();
        if !self.all().any(|task| limited(&task)) {
            return HashSet::new();
        }
        let (mut taken, mut waiting) = (HashMap::<u64, u32>::new(), Vec::new());
        for task in self.all() {
            match self.runs(task.seq) {
                true => *taken.entry(task.asker.client).or_default() += 1,
                false => waiting.push(task),
            }
        }
        waiting.sort_by_key(|task| task.asker.class);
        let mut held_back = HashSet::new();
        for task in waiting {
            let taken = taken.entry(task.asker.client).or_default();
            if task.asker.running_max.is_some_and(|max| *taken >= max) {
                held_back.insert(task.seq);
            } else if task.reader_has_room() && !task.follows {
                *taken += 1;
            }
        }
        held_back
    }
}
