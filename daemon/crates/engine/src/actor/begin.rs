//! How a request begins: with the cached part of its prompt, or behind another request that is
//! computing the same prefix.
//!
//! Requests that arrive together and share a prefix (several completions of one prompt, many
//! questions about one text) would each compute it. So a request that has computed nothing yet
//! follows the first of them, also if a part of the prefix is cached: it waits until that one has
//! computed what they share, and begins with its pages. It never waits for a request of a less
//! urgent class, one that was preempted or one whose reader is slow: if the first one does not go
//! on, the next computes for itself.

use std::sync::Arc;

use rocmforge_ops::{KV_PAGE_TOKENS, Plan};
use rocmforge_scheduler::{Costs, SeqId, SequenceStatus};

use crate::actor::engine::Engine;
use crate::features::prefix_cache::partings::Partings;
use crate::request::kv::{SequenceMemory, goes_on_anywhere};
use crate::request::task::{Task, Work};

/// Minimum number of KV pages that two prompts must share for one request to wait for the other.
const COMMON_PAGES_MIN: usize = 2;

impl Engine {
    /// Starts an admitted request with the KV pages of its prompt that are cached, so that these
    /// tokens are not computed.
    pub(crate) fn begin(&mut self, seq: SeqId) {
        let Some(task) = self.requests.tasks.get_mut(&seq) else {
            return;
        };
        if !std::mem::replace(&mut task.begun, true)
            && let (Some(_), Work::Generate(g)) = (task.realm, &task.work)
        {
            self.requests.prefix_counts.asked_tokens += g.n_prompt as u64;
        }
        self.requests.changed = true;
        // In this order: what it begins with does not give way to its own weights.
        self.begin_or_read(seq);
        self.count_recomputed(seq);
        self.note_wanted_weights();
    }

    /// Counts the tokens that a resumed request recomputes, once the number is known.
    pub(crate) fn count_recomputed(&mut self, seq: SeqId) {
        let task = self.requests.tasks.get_mut(&seq);
        if let Some(task) = task.filter(|task| !task.reads) {
            let yielded_at = std::mem::take(&mut task.yielded_at);
            let again = yielded_at.saturating_sub(task.n_past);
            self.memory.host_kv.count_again(again);
        }
    }

    pub(crate) fn begin_with_what_is_there(&mut self, seq: SeqId) {
        let Some(task) = self.requests.tasks.get_mut(&seq) else {
            return;
        };
        let Some(realm) = task.realm else {
            return;
        };
        let plan = task.loaded.model().plan();
        let partings = match goes_on_anywhere(plan) {
            true => Partings::default(),
            false => {
                let tokenizer = task.loaded.tokenizer();
                // A pass more uploads the weights once more where they are streamed.
                let chances = match self.memory.store.cache.fits(task.model) {
                    true => {
                        let states = self.memory.spare_states_max(plan.state_elements * 4);
                        states.min(windows_apart(plan, task.tokens.len()))
                    }
                    false => 0,
                };
                let rows = self.space.prefill_chunk.get();
                let is_special = |id| tokenizer.is_special(id);
                Partings::of(&task.tokens, is_special, rows, chances)
            }
        };
        let begun = task.memory.begin(
            &mut self.memory,
            realm,
            task.loaded.model(),
            &task.tokens,
            (&partings, task.predicts),
        );
        task.n_past = begun.positions;
        if begun.positions > 0 {
            self.requests.scheduler.reused(seq, begun.positions as u32);
        }
        let stops: Vec<u32> = begun.stops.iter().map(|&p| p as u32).collect();
        self.requests.scheduler.stop_at(seq, &stops);
        // What it finds of its own after it yielded was computed once.
        if let Work::Generate(g) = &mut task.work
            && g.generated == 0
            && g.started.is_none()
        {
            // One that yielded before its first pass finds the same again, and is counted once.
            let found = begun.positions as u32;
            self.requests.prefix_counts.reused_tokens += u64::from(found.saturating_sub(g.reused));
            g.reused = found;
        }
    }

    /// Makes requests wait whose prefix another request is computing, and starts those that have
    /// waited long enough.
    pub(crate) fn follow(&mut self) {
        // One that has yielded computes nothing, and begins when it is admitted again.
        let new = |task: &&Task| {
            task.n_past == 0
                && !task.reads
                && task.realm.is_some()
                && self.requests.running(task.seq).is_some()
        };
        let new: Vec<SeqId> = self
            .requests
            .tasks
            .values()
            .filter(new)
            .map(|t| t.seq)
            .collect();
        for seq in new {
            // One that follows has asked.
            let follows = self.has_leader(seq) || {
                self.ask_leaders(seq);
                self.has_leader(seq)
            };
            let Some(task) = self.requests.tasks.get_mut(&seq) else {
                continue;
            };
            let followed = std::mem::replace(&mut task.follows, follows);
            let ready = task.reader_has_room() && !follows;
            if followed && !follows {
                let plan = task.loaded.model().plan();
                task.memory.free(&mut self.memory, plan);
                self.begin_or_read(seq);
            }
            let reads = self.requests.tasks.get(&seq).is_some_and(|task| task.reads);
            self.requests.scheduler.set_ready(seq, ready && !reads);
        }
    }

    /// Has earlier requests that compute this request's prefix keep the window pages or states at
    /// its end, which they would drop: layers with windows or states can continue only from there.
    pub(crate) fn ask_leaders(&mut self, seq: SeqId) {
        let Some(task) = self.requests.tasks.get(&seq) else {
            return;
        };
        let loaded = Arc::clone(&task.loaded);
        let plan = loaded.model().plan();
        let (false, Some(status)) = (goes_on_anywhere(plan), self.requests.running(seq)) else {
            return;
        };
        if task.realm.is_none() {
            return;
        }
        // Those that it would follow.
        let leaders = self.requests.all().filter(|leader| {
            let leads = self.requests.running(leader.seq);
            leader.seq < seq
                && leader.realm == task.realm
                && !leader.follows
                && leads.is_some_and(|of| of.arrival.class <= status.arrival.class)
        });
        let asked: Vec<(SeqId, usize)> = leaders
            .map(|leader| (leader.seq, common_pages(leader, task)))
            .filter(|&(_, common)| common >= COMMON_PAGES_MIN)
            .map(|(leader, common)| (leader, common * KV_PAGE_TOKENS))
            .collect();
        for (leader, position) in asked {
            if let Some((memory, first)) = self.requests.memory_of_mut(leader)
                && position >= first
                && let Some(stops) = memory.mark(plan, position)
            {
                let stops: Vec<u32> = stops.into_iter().map(|p| p as u32).collect();
                self.requests.scheduler.stop_at(leader, &stops);
            }
        }
    }

    /// Whether a request that arrived earlier is computing the prefix that it shares with this one.
    pub(crate) fn has_leader(&self, seq: SeqId) -> bool {
        let (Some(task), Some(status)) =
            (self.requests.tasks.get(&seq), self.requests.running(seq))
        else {
            return false;
        };
        let before = self.requests.all().filter(|leader| leader.seq < seq);
        before.filter(|l| l.realm == task.realm).any(|leader| {
            let memory = self.requests.memory_of(leader.seq);
            let Some(computed) = memory.and_then(|memory| leads((leader, memory), task)) else {
                return false;
            };
            let urgent = |of: &SequenceStatus| of.arrival.class <= status.arrival.class;
            !computed
                && !leader.follows
                && leader.reader_has_room()
                && self
                    .requests
                    .running(leader.seq)
                    .as_ref()
                    .is_some_and(urgent)
        })
    }

    /// Sets how many bytes of weights are kept in preference to cached prefixes: those of models
    /// with running requests, and pinned ones. The weights of a model whose requests are preempted
    /// are not counted: they can be uploaded again, while evicted prefixes would have to be
    /// recomputed.
    pub(crate) fn note_wanted_weights(&mut self) {
        let store = &self.memory.store;
        let (mut running, mut pinned) = (Vec::new(), 0);
        for entry in self.models.iter() {
            if self.requests.running_of(entry.id) > 0 {
                running.push(entry.id);
                running.extend(self.speculation.mtp(entry.id).map(|mtp| mtp.id));
            } else {
                pinned += store.model_pinned_bytes(entry.id);
            }
        }
        let bytes = store.bytes_of(&running) + pinned;
        let preempted = self.preempted_kv();
        self.memory.set_wanted_weights(bytes, preempted);
    }

    /// Bytes of KV cache that preempted requests had when they were preempted.
    pub(crate) fn preempted_kv(&self) -> u64 {
        let sizes = self.sizes();
        let preempted = self.requests.tasks.values().map(|task| {
            let model = rocmforge_scheduler::ModelId(task.model.0);
            match task.yielded_at {
                0 => 0,
                positions => sizes.kv_bytes(model, positions as u32),
            }
        });
        preempted.sum()
    }
}

/// Number of places in a prompt of `tokens` tokens before which the pages of sliding windows may be
/// kept, so that the kept windows cover at most a quarter of the prompt; no limit for a plan
/// without windows.
fn windows_apart(plan: &Plan, tokens: usize) -> usize {
    let windows = plan.kv.iter().filter_map(|group| group.window);
    match windows.max() {
        Some(window) => tokens / (4 * window.max(1) as usize),
        None => usize::MAX,
    }
}

/// Number of leading KV pages that two prompts have in common. The last token of `task` is left
/// out, since its logits have to be computed.
fn common_pages(leader: &Task, task: &Task) -> usize {
    let (theirs, ours) = (
        leader.tokens.chunks_exact(KV_PAGE_TOKENS),
        task.tokens
            .chunks_exact(KV_PAGE_TOKENS)
            .take(pages_at_most(task)),
    );
    theirs.zip(ours).take_while(|(a, b)| a == b).count()
}

/// Maximum number of cached KV pages that a request can begin with: its last token has to be
/// computed.
fn pages_at_most(task: &Task) -> usize {
    task.tokens.len().saturating_sub(1) / KV_PAGE_TOKENS
}

/// Whether `leader` has computed all that it shares with `task`; `None` if they share too little to
/// wait for.
fn leads((leader, memory): (&Task, &SequenceMemory), task: &Task) -> Option<bool> {
    let common = common_pages(leader, task);
    let end = common * KV_PAGE_TOKENS;
    // With a state or a window others go on only from where that is kept. One that has not begun
    // will keep it at its prompt's end.
    let is_whole = common == pages_at_most(task) && common == pages_at_most(leader);
    let end = match goes_on_anywhere(task.loaded.model().plan()) || is_whole {
        true => end,
        false => memory.marked_up_to(end)?,
    };
    let worth = end >= COMMON_PAGES_MIN * KV_PAGE_TOKENS;
    worth.then_some(leader.n_past >= end)
}
