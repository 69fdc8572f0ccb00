//! The KV cache on disk: KV pages and recurrent states of finished requests are written to a store
//! in the background, and read back for a request whose prefix is not in memory. So prompts survive
//! eviction, unload, restart and kill -9.
//!
//! ```text
//!   page is full ---> note --(between passes)--> queue of the store --> disk
//!   request is admitted --> longest prefix in memory and on disk --> pages come --> first pass
//! ```
//!
//! This module holds the notes of what is to be written, the requests that wait for pages, and the
//! decision whether reading is faster than computing. `kv_disk/keys.rs` names pages by their
//! content, `kv_disk/identity.rs` models, `kv_disk/writing.rs` and `kv_disk/reading.rs` move the
//! bytes. Files and threads are those of the crate `kv-disk`.
//!
//! Pages are written when they are full, once the device has time for it. Recurrent states are
//! written where a prompt ends, where prompts diverged, and at a request's end.
//!
//! *Invariant:* a request waits for pages for a bounded time, and computes what has not arrived by
//! then (`READ_TIMEOUT`). No other request waits with it, unless both have a prefix in common.

pub(crate) mod identity;
pub(crate) mod keys;
mod outgoing;
mod rates;
mod read;
pub(crate) mod reading;
#[cfg(test)]
mod tests;
mod writing;

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use nix::sys::statvfs::statvfs;
use rocmforge_kv_disk::{Options, Store};
use rocmforge_ops::Plan;
use rocmforge_scheduler::SeqId;
use rocmforge_tensor_cache::ModelId;

use crate::api::config::KvDiskConfig;
use crate::api::error::Error;
use crate::api::refusal::Refusal;
use crate::api::{Budget, KvDiskStatus};
use crate::features::host_kv::{HostKv, pays};
use crate::features::kv_disk::identity::Identity;
use crate::features::kv_disk::keys::{Chain, layout_digest};
use crate::features::kv_disk::outgoing::OutgoingPages;
use crate::features::kv_disk::rates::Rates;
use crate::features::kv_disk::read::Read;
use crate::features::prefix_cache::NodeId;

/// Minimum size of the store's files in bytes.
const BUDGET_MIN: u64 = 64 << 20;

/// Maximum number of prefix-cache nodes that wait to be written.
const NOTES_MAX: usize = 1 << 17;

/// How long a request waits for the index of the store after the start, and for the identity of its
/// model after the load.
const READY_TIMEOUT: Duration = Duration::from_secs(5);

/// Weight of a new sample in the moving average of the read rate.
const WEIGHT: f64 = 0.3;

/// How long a measured read rate is used. After that it is measured again: while reading is too
/// slow, nothing is read and nothing is measured.
const RATE_LASTS: Duration = Duration::from_secs(60);

/// Interval at which measured rates are written for the next process, if they changed.
const RATES_EVERY: Duration = Duration::from_secs(5);

/// The disk cache's state of one model.
#[derive(Debug)]
struct DiskModel {
    identity: Identity,
    /// Digest of the layout of the model's pages.
    layout: [u8; 32],
    /// Index of the recurrent states among the slots of this model's prefix-cache nodes.
    state_slot: Option<usize>,
    since: Instant,
    /// Whether the store may contain entries of this model that were not deleted: from other
    /// processes, or written since the last deletion.
    may_have_entries: bool,
}

/// A prefix-cache node whose slots are to be written to disk.
#[derive(Debug, Clone, Copy)]
struct Note {
    model: ModelId,
    chain: Chain,
    with_state: bool,
}

/// Prefix-cache nodes that are to be written to disk, the oldest first.
#[derive(Debug, Default)]
struct Notes {
    by_node: HashMap<NodeId, Note>,
    order: VecDeque<NodeId>,
}

impl Notes {
    fn add(&mut self, node: NodeId, note: Note) {
        if let Some(there) = self.by_node.get_mut(&node) {
            there.with_state |= note.with_state;
            return;
        }
        // Notes that were taken out of turn leave their place in the order.
        while self.order.len() >= NOTES_MAX {
            let oldest = self.order.pop_front();
            oldest.map(|oldest| self.by_node.remove(&oldest));
        }
        self.by_node.insert(node, note);
        self.order.push_back(node);
    }

    fn has(&self, node: NodeId) -> bool {
        self.by_node.contains_key(&node)
    }

    fn take(&mut self, node: NodeId) -> Option<Note> {
        self.by_node.remove(&node)
    }

    fn pop(&mut self) -> Option<(NodeId, Note)> {
        while let Some(node) = self.order.pop_front() {
            if let Some(note) = self.by_node.remove(&node) {
                return Some((node, note));
            }
        }
        None
    }

    fn put_back(&mut self, node: NodeId, note: Note) {
        self.by_node.insert(node, note);
        self.order.push_front(node);
    }

    /// Puts a note back that was taken out of turn, whose place in the order is there still.
    fn restore(&mut self, node: NodeId, note: Note) {
        self.by_node.insert(node, note);
    }
}

/// Maximum size of the store's files in bytes, by the configuration.
fn bytes_of(wanted: &KvDiskConfig) -> Result<u64, String> {
    let bytes = match wanted.budget {
        Budget::Bytes(bytes) => bytes,
        Budget::Percent(percent) => {
            // The directory may be still to be made.
            let mut above = wanted.directory.ancestors();
            let there = above.find(|path| path.exists());
            let there = there.unwrap_or(std::path::Path::new("."));
            let all = statvfs(there).map_err(|error| format!("{}: {error}", there.display()))?;
            let all = all.blocks() * all.fragment_size();
            (all as f64 * percent / 100.0) as u64
        }
    };
    match bytes {
        BUDGET_MIN.. => Ok(bytes),
        _ => Err(format!(
            "kv_disk_budget is {bytes} bytes: give at least {BUDGET_MIN}"
        )),
    }
}

/// The store, the queue of pages to write, and the requests that read.
#[derive(Debug)]
pub(crate) struct KvDisk {
    /// Requests whose prefix is being read. Declared before the store so that it is dropped first:
    /// the store's reader may wait for those who take entries.
    reads: HashMap<SeqId, Read>,
    store: Store,
    /// Whether pages are read and written even if recomputing them is faster.
    always: bool,
    /// Whether all clients share one disk cache.
    is_shared: bool,
    /// Name of the device that computed the pages; pages of different devices are not mixed.
    device: String,
    since: Instant,
    models: HashMap<ModelId, DiskModel>,
    notes: Notes,
    /// Pages whose copy from the device was begun.
    outgoing: OutgoingPages,
    /// Requests that wait for the index, or for their model's identity.
    waiting: HashSet<SeqId>,
    /// Measured read rate of the files in bytes a second, and when it was measured; `None` if
    /// unknown.
    read_rate: Option<(f64, Instant)>,
    /// Measured rates, which are kept over restarts.
    rates: Rates,
    /// Whether the read rate that an earlier process measured was taken over.
    has_recalled: bool,
    /// Time of the last check whether rates have to be written.
    looked_at: Instant,
    /// Total of bytes read and of time spent reading when the rate was last measured.
    measured: (u64, Duration),
    /// Time at which the last entry was read.
    came: Instant,
    /// Number of reads that were abandoned.
    given_up: u64,
    reused_tokens: u64,
    requests: u64,
}

impl KvDisk {
    /// Opens the store in the configured directory, for KV pages that the device `device` computes.
    ///
    /// # Errors
    /// [`Refusal::Setting`] if the directory cannot be used.
    pub(crate) fn open(
        wanted: &KvDiskConfig,
        device: String,
        is_shared: bool,
        now: Instant,
    ) -> Result<Self, Error> {
        let refused = |message: String| {
            let message = format!("kv_disk: {message}");
            Error::from(Refusal::Setting { message })
        };
        let bytes = bytes_of(wanted).map_err(refused)?;
        let mut options = Options::new(bytes);
        options.queue_bytes = wanted.queue_bytes.unwrap_or(options.queue_bytes);
        let rate = wanted.write_bytes_per_s;
        options.write_bytes_per_s = rate.unwrap_or(options.write_bytes_per_s);
        let store = Store::open(&wanted.directory, options);
        let store = store.map_err(|error| refused(error.to_string()))?;
        let of = (wanted.always, is_shared);
        Ok(Self::new(store, device, of, now))
    }

    /// A disk cache over an open store, for KV pages that the device `device` computes.
    fn new(store: Store, device: String, (always, is_shared): (bool, bool), now: Instant) -> Self {
        let rates = store.note().and_then(|note| Rates::parse(&note));
        let rates = rates.unwrap_or_default();
        Self {
            store,
            always,
            is_shared,
            device,
            since: now,
            models: HashMap::new(),
            notes: Notes::default(),
            outgoing: OutgoingPages::default(),
            reads: HashMap::new(),
            waiting: HashSet::new(),
            read_rate: None,
            rates,
            has_recalled: false,
            looked_at: now,
            measured: (0, Duration::ZERO),
            came: now,
            given_up: 0,
            reused_tokens: 0,
            requests: 0,
        }
    }

    /// Registers a loaded model with its file's identity and its plan.
    pub(crate) fn add_model(
        &mut self,
        model: ModelId,
        identity: Identity,
        plan: &Plan,
        now: Instant,
    ) {
        let added = DiskModel {
            identity,
            layout: layout_digest(plan),
            state_slot: (plan.state_elements > 0).then_some(plan.kv.len()),
            since: now,
            may_have_entries: true,
        };
        self.models.insert(model, added);
    }

    /// Forgets a model that is unloaded.
    pub(crate) fn forget(&mut self, model: ModelId) {
        self.models.remove(&model);
        self.outgoing.forget(Some(model));
        self.notes.by_node.retain(|_, note| note.model != model);
    }

    /// Deletes all entries of a model; with `None` of all models, also of unloaded ones.
    pub(crate) fn clear(&mut self, model: Option<ModelId>) {
        self.outgoing.forget(model);
        self.notes
            .by_node
            .retain(|_, note| model.is_some_and(|model| note.model != model));
        let Some(model) = model else {
            return self.store.clear(None);
        };
        let identity = self.models.get(&model).and_then(|m| m.identity.get());
        if let Some(identity) = identity {
            self.store.clear(Some(identity.tag()));
        }
    }

    /// Deletes all entries of a model because their content may be wrong.
    fn distrust(&mut self, model: ModelId) {
        let of_model = self.models.get_mut(&model);
        if of_model.is_some_and(|m| std::mem::take(&mut m.may_have_entries)) {
            self.clear(Some(model));
        }
    }

    /// Whether a request has to wait for the store's index, or for its model's identity.
    fn is_to_wait(&self, model: ModelId, now: Instant) -> bool {
        let is_within = |since: Instant| now.saturating_duration_since(since) < READY_TIMEOUT;
        let Some(of_model) = self.models.get(&model) else {
            return false;
        };
        let lacks_index = !self.store.status().is_ready && is_within(self.since);
        let lacks_identity = of_model.identity.is_pending() && is_within(of_model.since);
        lacks_index || lacks_identity
    }

    /// Whether anything is being read or waited for now.
    pub(crate) fn is_reading(&self) -> bool {
        !self.reads.is_empty() || !self.waiting.is_empty()
    }

    /// Whether nodes are to be written, or on their way to the store's queue.
    pub(crate) fn has_notes(&self) -> bool {
        !self.notes.order.is_empty() || !self.outgoing.is_empty()
    }

    /// Whether the store's queue has room for so many bytes beside the pages on their way there.
    fn has_room(&self, bytes: u64) -> bool {
        self.store.has_room(bytes + self.outgoing.bytes())
    }

    /// Whether the queue has room once what is in it, or on its way there, is written.
    fn waits_for_room(&self) -> bool {
        let status = self.store.status();
        (status.queued_bytes > 0 || self.outgoing.bytes() > 0) && !status.is_paused
    }

    /// Whether reading `bytes` bytes takes less time than computing `rows` rows. True if rates are
    /// not measured yet.
    fn pays(&self, bytes: u64, rows: usize, row_seconds: Option<f64>) -> bool {
        let rate = self.read_rate.map(|(rate, _)| rate);
        self.always || pays(bytes, 1, rows, rate, row_seconds)
    }

    /// Updates the read rate from what was read since the last call, without waits for other reads
    /// and for passes.
    fn measure(&mut self, now: Instant) {
        let status = self.store.status();
        let (bytes, time) =
            std::mem::replace(&mut self.measured, (status.read_bytes, status.read_time));
        self.note_rate(status.read_bytes - bytes, status.read_time - time, now);
    }

    /// Records that `bytes` bytes were read from files in the time `took`.
    fn note_rate(&mut self, bytes: u64, took: Duration, now: Instant) {
        if bytes == 0 || took.is_zero() {
            return;
        }
        let sample = bytes as f64 / took.as_secs_f64();
        let before = self.read_rate.map_or(sample, |(rate, _)| rate);
        let rate = before + (sample - before) * WEIGHT;
        self.read_rate = Some((rate, now));
        self.rates.know_read(rate);
    }

    /// Before the first read: uses the rate that an earlier process measured as if it was measured
    /// now.
    fn recall_rate(&mut self, now: Instant) {
        if self.store.status().read == 0 && self.read_rate.is_none() && !self.has_recalled {
            self.read_rate = self.rates.read().map(|rate| (rate, now));
            self.has_recalled = true;
        }
    }

    /// Seconds that the device takes for a row of a model's prompts, as an earlier process measured
    /// it.
    fn recalled_row(&self, model: ModelId) -> Option<f64> {
        let tag = self.models.get(&model)?.identity.get()?.tag();
        self.rates.row(tag, &self.device)
    }

    /// Writes measured rates for the next process: now if `always`, else if it is due.
    fn note_rates(&mut self, host_kv: &HostKv, now: Instant, always: bool) {
        let is_new = now.saturating_duration_since(self.looked_at) < RATES_EVERY;
        if is_new && !always {
            return;
        }
        self.looked_at = now;
        for (model, of_model) in &self.models {
            let row = host_kv.row_seconds(*model);
            if let (Some(digest), Some(row)) = (of_model.identity.get(), row) {
                self.rates.know_row(digest.tag(), &self.device, row);
            }
        }
        if let Some(note) = self.rates.due(now, always) {
            self.store.set_note(note);
        }
    }

    /// Drops a read rate that was measured too long ago.
    fn forget_old_rate(&mut self, now: Instant) {
        let is_fresh = |at: &(f64, Instant)| now.saturating_duration_since(at.1) < RATE_LASTS;
        self.read_rate = self.read_rate.filter(is_fresh);
    }

    /// Counts positions that a request read from disk instead of computing them.
    pub(crate) fn count_reused(&mut self, positions: usize) {
        self.requests += u64::from(positions > 0);
        self.reused_tokens += positions as u64;
    }

    /// The published status of the KV cache on disk.
    pub(crate) fn status(&self) -> KvDiskStatus {
        KvDiskStatus {
            store: self.store.status(),
            requests: self.requests,
            reused_tokens: self.reused_tokens,
        }
    }
}
