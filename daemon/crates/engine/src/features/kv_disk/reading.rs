//! Reads KV pages and states from disk into the prefix cache, for an admitted request that has
//! computed nothing yet.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use rocmforge_device::Plan;
use rocmforge_kv_disk::Next;
use rocmforge_model::Model;
use rocmforge_ops::KV_PAGE_TOKENS;
use rocmforge_scheduler::SeqId;
use rocmforge_tensor_cache::{BlockKind, ModelId};

use crate::features::kv_disk::keys::Chain;
use crate::features::kv_disk::read::{Entry, Read};
use crate::features::prefix_cache::{HeldSlots, NodeId, Realm};
use crate::memory::Memory;
use crate::request::kv::{predicting_slot, slots_of};

/// Time without a byte from disk after which a read is abandoned.
pub(super) const READ_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum number of bytes that are copied from the store to the device between two passes.
const BYTES_A_TURN: u64 = 64 << 20;

/// A request whose prefix may be read from disk.
pub(crate) struct Wanted<'a> {
    pub(crate) seq: SeqId,
    pub(crate) realm: Realm,
    pub(crate) of: &'a Model,
    /// The request's tokens: the prompt, and what it had generated before it was preempted.
    pub(crate) tokens: &'a [u32],
    /// Whether the request uses the MTP head.
    pub(crate) predicts: bool,
}

impl Wanted<'_> {
    /// Maximum number of pages that a request can begin with: its last token is always computed.
    fn pages_max(&self) -> usize {
        self.tokens.len().saturating_sub(1) / KV_PAGE_TOKENS
    }
}

/// A request that no longer waits for the disk.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) seq: SeqId,
    /// Positions that were cached in memory, if pages were read; else `None`.
    pub(crate) found: Option<usize>,
    /// Cached slots that the request begins with, held until they are released.
    pub(crate) held: HeldSlots,
}

/// The pages of a prefix that are not in memory and have to be read from disk.
struct Missing {
    entries: VecDeque<Entry>,
    keys: Vec<rocmforge_kv_disk::Key>,
    bytes: u64,
    /// Number of pages of the whole prefix.
    pages: usize,
    /// Slots of the prefix that are in memory.
    there: HeldSlots,
}

impl Memory {
    /// Starts to read a request's prefix, if more of it is on disk than in memory and reading is
    /// faster than computing. Returns whether the request has to wait.
    pub(crate) fn begin_read(&mut self, wanted: &Wanted<'_>, now: Instant) -> bool {
        let Some(disk) = &mut self.kv_disk else {
            return false;
        };
        if wanted.pages_max() == 0 {
            return false;
        }
        disk.forget_old_rate(now);
        disk.recall_rate(now);
        if disk.is_to_wait(wanted.realm.model, now) {
            disk.waiting.insert(wanted.seq);
            return true;
        }
        let Some(root) = disk.root(wanted.realm) else {
            return false;
        };
        if let Some(row) = disk.recalled_row(wanted.realm.model) {
            self.host_kv.recall_row(wanted.realm.model, row);
        }
        let most = wanted.pages_max();
        let Wanted {
            realm, of, tokens, ..
        } = *wanted;
        let (found, mut held) = self.find_prefix(realm, of, tokens, most, wanted.predicts);
        let found = found.nodes.len();
        let fetch = self.missing(root, wanted, found).and_then(|missing| {
            let disk = self.kv_disk.as_ref()?;
            let rows = (missing.pages - found) * KV_PAGE_TOKENS;
            let row_seconds = self.host_kv.row_seconds(realm.model);
            if !disk.pays(missing.bytes, rows, row_seconds) {
                return None;
            }
            let fetch = disk.store.fetch(missing.keys)?;
            Some((fetch, missing.entries, (missing.pages, missing.there)))
        });
        let (Some((fetch, entries, (pages, there))), Some(disk)) = (fetch, &mut self.kv_disk)
        else {
            self.let_go(held);
            return false;
        };
        for &(node, slot) in &there {
            self.prefixes.hold(node, slot);
        }
        held.extend(there);
        let read = Read {
            realm,
            tokens: tokens[..pages * KV_PAGE_TOKENS].to_vec(),
            slots: slots_of(of),
            entries,
            fetch,
            nodes: Vec::new(),
            held,
            found,
            began: now,
        };
        // One that yielded and came again before its read was looked at.
        if let Some(before) = disk.reads.insert(wanted.seq, read) {
            self.let_go(before.held);
        }
        true
    }

    /// Ends the reads for the models that `of` selects; their requests begin without the pages from
    /// disk.
    pub(crate) fn give_up_reads(&mut self, of: impl Fn(ModelId) -> bool) {
        let Some(disk) = &mut self.kv_disk else {
            return;
        };
        disk.given_up += 1;
        let reads = disk.reads.values_mut();
        let given_up = reads.filter(|read| of(read.realm.model));
        let held: HeldSlots = given_up.flat_map(Read::give_up).collect();
        self.let_go(held);
    }

    /// Deletes a model's entries on disk and ends its reads, because their content may be wrong.
    pub(crate) fn distrust_disk(&mut self, model: ModelId) {
        if let Some(disk) = &mut self.kv_disk {
            disk.distrust(model);
        }
        self.give_up_reads(|of| of == model);
    }

    /// Finds what has to be read so that a request begins with more than `found` pages; `None` if
    /// the disk has no more.
    fn missing(&self, root: Chain, wanted: &Wanted<'_>, found: usize) -> Option<Missing> {
        let disk = self.kv_disk.as_ref()?;
        let plan: &Plan = wanted.of.plan();
        let state = (plan.state_elements > 0).then_some(plan.kv.len());
        let mut chains = Vec::new();
        let mut nodes = Vec::new();
        let mut unbroken = vec![0; plan.kv.len()];
        let (mut chain, mut pages) = (root, 0);
        let on_disk = |chain: &Chain, slot| disk.store.bytes_of(&chain.key(slot));
        let in_memory =
            |node: Option<NodeId>, slot| node.is_some_and(|node| self.prefixes.has(node, slot));
        let chunks = wanted.tokens.chunks_exact(KV_PAGE_TOKENS);
        for (page, chunk) in chunks.take(wanted.pages_max()).enumerate() {
            let Some(next) = chain.next(chunk) else {
                break;
            };
            chain = next;
            let parent: Option<NodeId> = nodes.last().copied().flatten();
            let node = match page == 0 || parent.is_some() {
                true => self.prefixes.child(wanted.realm, parent, chunk),
                false => None,
            };
            let is_there = |slot| in_memory(node, slot) || on_disk(&chain, slot).is_some();
            let end = page + 1;
            let mut goes_on = state.is_none_or(is_there);
            for (slot, (group, unbroken)) in plan.kv.iter().zip(&mut unbroken).enumerate() {
                *unbroken = if is_there(slot) { *unbroken + 1 } else { 0 };
                goes_on &= *unbroken >= end - group.first_page(end * KV_PAGE_TOKENS).min(end);
            }
            chains.push(chain);
            nodes.push(node);
            if goes_on {
                pages = end;
            }
            // A layer that sees all positions needs each page.
            let mut of_all = plan.kv.iter().zip(&unbroken);
            if of_all.any(|(group, &unbroken)| group.window.is_none() && unbroken < end) {
                break;
            }
        }
        if pages <= found {
            return None;
        }
        let block = wanted.of.predictor().filter(|_| wanted.predicts);
        let first_of_block = predicting_slot(plan);
        let of_block = first_of_block..first_of_block + block.map_or(0, |block| block.kv.len());
        let firsts = plan.kv.iter().map(|g| g.first_page(pages * KV_PAGE_TOKENS));
        let firsts: Vec<usize> = firsts.collect();
        let mut missing = Missing {
            entries: VecDeque::new(),
            keys: Vec::new(),
            bytes: 0,
            pages,
            there: HeldSlots::new(),
        };
        for page in 0..pages {
            let of_groups = (0..plan.kv.len()).filter(|&slot| page >= firsts[slot]);
            let of_state = state.filter(|_| page + 1 == pages);
            for slot in of_groups.chain(of_state).chain(of_block.clone()) {
                if let Some(node) = nodes[page].filter(|&n| self.prefixes.has(n, slot)) {
                    missing.there.push((node, slot));
                    continue;
                }
                // Drafts go on without what the block lacks.
                if let Some(bytes) = on_disk(&chains[page], slot) {
                    missing.entries.push_back(Entry { page, slot });
                    missing.keys.push(chains[page].key(slot));
                    missing.bytes += bytes;
                }
            }
        }
        (!missing.entries.is_empty()).then_some(missing)
    }

    /// Takes pages that arrived from disk. Returns the requests that no longer wait. `is_wanted`
    /// says whether a request still exists.
    pub(crate) fn read_turn(
        &mut self,
        now: Instant,
        is_wanted: impl Fn(SeqId) -> bool,
    ) -> Vec<Ended> {
        let Some(disk) = &mut self.kv_disk else {
            return Vec::new();
        };
        let mut ended = Vec::new();
        disk.waiting.retain(|&seq| is_wanted(seq));
        let ready = disk.waiting.drain();
        ended.extend(ready.map(|seq| Ended {
            seq,
            found: None,
            held: HeldSlots::new(),
        }));
        let mut seqs: Vec<SeqId> = disk.reads.keys().copied().collect();
        seqs.sort_unstable();
        for seq in seqs {
            let Some(disk) = &mut self.kv_disk else {
                break;
            };
            let Some(mut read) = disk.reads.remove(&seq) else {
                continue;
            };
            if !is_wanted(seq) {
                self.let_go(read.held);
                continue;
            }
            let given_up = disk.given_up;
            let goes_on = self.take_entries(&mut read, now);
            let Some(disk) = &mut self.kv_disk else {
                break;
            };
            // While room was made for it.
            let is_given_up = disk.given_up != given_up;
            if goes_on && !is_given_up {
                disk.reads.insert(seq, read);
                continue;
            }
            disk.measure(now);
            if is_given_up {
                let held = read.give_up();
                self.let_go(held);
            }
            ended.push(Ended {
                seq,
                found: Some(read.found * KV_PAGE_TOKENS),
                held: read.held,
            });
        }
        ended
    }

    /// Takes the arrived entries of a read. Returns whether more are expected.
    fn take_entries(&mut self, read: &mut Read, now: Instant) -> bool {
        let mut bytes = 0;
        while let Some(&entry) = read.entries.front() {
            if bytes >= BYTES_A_TURN {
                return true;
            }
            match read.fetch.poll() {
                Next::Pending => {
                    // Others' reads are served first, which is no reason to give up.
                    let came = self.kv_disk.as_ref().map_or(now, |disk| disk.came);
                    return now.saturating_duration_since(came.max(read.began)) < READ_TIMEOUT;
                }
                Next::Entry(payload) => {
                    if let Some(disk) = &mut self.kv_disk {
                        disk.came = now;
                    }
                    bytes += payload.len() as u64;
                    read.entries.pop_front();
                    if !self.place_entry(read, entry, &payload) {
                        return false;
                    }
                }
                Next::Failed | Next::Done => return false,
            }
        }
        false
    }

    /// Puts an entry into the prefix cache and holds it there. Returns whether it is cached.
    fn place_entry(&mut self, read: &mut Read, entry: Entry, payload: &[u8]) -> bool {
        let model = read.realm.model;
        let bytes = payload.len() as u64;
        let Ok((block, slab)) = self.reserve(BlockKind::Kv, Some(model), bytes) else {
            return false;
        };
        if slab.bytes != bytes {
            self.store.free(block);
            return false;
        }
        if let Err(error) = self.store.device.write_slab(slab.offset, payload) {
            self.store.note_loss(&error);
            self.store.free(block);
            return false;
        }
        let Some(node) = self.node_of(read, entry.page) else {
            self.store.free(block);
            return false;
        };
        if self.prefixes.put(node, entry.slot, (block, slab), true) {
            read.held.push((node, entry.slot));
            return true;
        }
        self.store.free(block);
        // Another request computed it meanwhile.
        let is_there = self.prefixes.has(node, entry.slot);
        if is_there {
            self.prefixes.hold(node, entry.slot);
            read.held.push((node, entry.slot));
        }
        is_there
    }

    /// The node for a page of a read's prefix; created if it does not exist.
    fn node_of(&mut self, read: &mut Read, page: usize) -> Option<NodeId> {
        // Nodes that nothing hangs on may have gone since.
        while read
            .nodes
            .last()
            .is_some_and(|&n| !self.prefixes.contains(n))
        {
            read.nodes.pop();
        }
        while read.nodes.len() <= page {
            let at = read.nodes.len() * KV_PAGE_TOKENS;
            let chunk = &read.tokens[at..at + KV_PAGE_TOKENS];
            let parent = read.nodes.last().copied();
            let node = self.add_prefix(read.realm, parent, chunk, read.slots)?;
            read.nodes.push(node);
        }
        read.nodes.get(page).copied()
    }
}
