//! Writes KV pages and states from the device to the store's queue.

use rocmforge_device::CopyStart;
use rocmforge_kv_disk::{Key, Kind, ModelTag};
use rocmforge_ops::KV_PAGE_TOKENS;
use rocmforge_tensor_cache::{ModelId, Slab};

use crate::features::kv_disk::keys::Chain;
use crate::features::kv_disk::{KvDisk, Note};
use crate::features::prefix_cache::{NodeId, Realm};
use crate::memory::Memory;

/// Maximum number of bytes that are copied from the device between two passes while requests run.
const BYTES_WHILE_BUSY: u64 = 4 << 20;

/// Maximum number of bytes that are copied from the device at a time while no request runs.
const BYTES_WHILE_IDLE: u64 = 64 << 20;

/// Minimum number of bytes that a node counts for, so that empty nodes also use up a turn.
const NODE_BYTES_MIN: u64 = 4096;

/// Result of writing a node of the prefix cache.
enum Written {
    /// Number of bytes of the page that were queued.
    Bytes(u64),
    /// The queue of pages to be written to disk is full, or as many copies as there may be are
    /// under way.
    Later,
}

/// Result of beginning to copy a page.
enum Copied {
    /// The page is in the store's queue, or its copy was begun.
    Begun,
    /// As many copies as there may be are under way.
    Busy,
    /// The device failed.
    Failed,
}

impl KvDisk {
    /// The name of the empty prefix of a realm; `None` while its model's identity is unknown.
    pub(super) fn root(&self, realm: Realm) -> Option<Chain> {
        let model = self.models.get(&realm.model)?;
        let identity = model.identity.get()?;
        let of = (identity.0, model.layout);
        Some(Chain::root(realm, self.is_shared, of, &self.device))
    }

    fn note(&mut self, node: NodeId, note: Note) {
        self.notes.add(node, note);
    }

    /// Has a page copied from the device to the store's queue: behind the device's work where it
    /// queues copies, else at once. With `now` it waits for other copies if need be.
    fn copy(
        &mut self,
        memory: &mut crate::store::Store,
        model: ModelId,
        slab: Slab,
        (key, kind, tag): (Key, Kind, ModelTag),
        now: bool,
    ) -> Copied {
        let begun = loop {
            match memory.device.begin_copy(slab.offset, slab.bytes) {
                Ok(CopyStart::Busy)
                    if now && self.outgoing.end_first(memory, &self.store, true) => {}
                other => break other,
            }
        };
        let copied = match begun {
            Ok(CopyStart::Begun(ticket)) => {
                let of = (model, slab.bytes);
                self.outgoing.push(ticket, of, (key, kind, tag));
                return Copied::Begun;
            }
            Ok(CopyStart::Busy) => return Copied::Busy,
            Ok(CopyStart::Unsupported) => {
                let mut payload = vec![0; slab.bytes as usize];
                let read = memory.device.read_slab(slab.offset, &mut payload);
                read.map(|()| payload)
            }
            Err(error) => Err(error),
        };
        match copied {
            Ok(payload) => {
                self.store.put(key, kind, tag, payload);
                Copied::Begun
            }
            Err(error) => {
                memory.note_loss(&error);
                tracing::debug!(%error, "a page is not written to disk");
                Copied::Failed
            }
        }
    }
}

impl Memory {
    /// Names the prefix of a realm with these tokens, whose nodes are in memory, and queues those
    /// nodes for writing that are not on disk. `None` if there is no KV cache on disk.
    pub(crate) fn note_prefix(
        &mut self,
        realm: Realm,
        nodes: &[NodeId],
        tokens: &[u32],
    ) -> Option<Chain> {
        let disk = self.kv_disk.as_mut()?;
        let mut chain = disk.root(realm)?;
        let model = realm.model;
        for (i, (&node, page)) in nodes
            .iter()
            .zip(tokens.chunks_exact(KV_PAGE_TOKENS))
            .enumerate()
        {
            chain = chain.next(page)?;
            let with_state = i + 1 == nodes.len();
            let note = Note {
                model,
                chain,
                with_state,
            };
            disk.note(node, note);
        }
        Some(chain)
    }

    /// Queues a node's pages for writing, and with `with_state` its state.
    pub(crate) fn note_node(
        &mut self,
        node: NodeId,
        model: ModelId,
        chain: Chain,
        with_state: bool,
    ) {
        if let Some(disk) = &mut self.kv_disk {
            let note = Note {
                model,
                chain,
                with_state,
            };
            disk.note(node, note);
        }
    }

    /// Gives queued nodes to the store between two passes, as many as time allows. Returns whether
    /// there were any.
    pub(crate) fn write_notes(&mut self, is_busy: bool) -> bool {
        let most = match is_busy {
            true => BYTES_WHILE_BUSY,
            false => BYTES_WHILE_IDLE,
        };
        let mut any = self.end_copies(false);
        let mut bytes = 0;
        while bytes < most {
            let Some((node, note)) = self.kv_disk.as_mut().and_then(|disk| disk.notes.pop()) else {
                return any;
            };
            match self.write_node(node, note, false) {
                Written::Bytes(of_node) => {
                    // What is on disk already is looked for.
                    bytes += of_node.max(NODE_BYTES_MIN);
                    any = true;
                }
                Written::Later => {
                    if let Some(disk) = &mut self.kv_disk {
                        disk.notes.put_back(node, note);
                    }
                    return any;
                }
            }
        }
        any
    }

    /// Saves measured rates for the next process: now if `always`, else if it is due.
    pub(crate) fn note_rates(&mut self, always: bool) {
        let now = self.store.clock.now();
        if let Some(disk) = &mut self.kv_disk {
            disk.note_rates(&self.host_kv, now, always);
        }
    }

    /// Whether a read or a write of the disk is under way.
    pub(crate) fn waits_for_disk(&self) -> bool {
        let disk = self.kv_disk.as_ref();
        disk.is_some_and(|disk| disk.is_reading() || disk.has_notes())
    }

    /// Whether the store works in the background, so that its status changes without the engine.
    pub(crate) fn is_disk_busy(&self) -> bool {
        let disk = self.kv_disk.as_ref();
        disk.is_some_and(|disk| disk.store.status().is_busy)
    }

    /// Hands the pages to the store whose copies have ended, or all of them if the caller `waits`.
    /// Whether there were any.
    pub(crate) fn end_copies(&mut self, waits: bool) -> bool {
        let Some(disk) = &mut self.kv_disk else {
            return false;
        };
        let mut any = false;
        while disk.outgoing.end_first(&mut self.store, &disk.store, waits) {
            any = true;
        }
        any
    }

    /// Hands all nodes to the store that it has room for: what they have is about to go.
    pub(crate) fn write_all_notes(&mut self) {
        while self.write_notes(false) || self.end_copies(true) {}
        self.note_rates(true);
    }

    /// Whether a node is still to be written and the store's queue is full, so that its pages would
    /// be lost if it were evicted now.
    pub(crate) fn waits_to_be_written(&self, node: NodeId) -> bool {
        let Some(disk) = &self.kv_disk else {
            return false;
        };
        let bytes = self.prefixes.on_device(node).into_iter();
        let bytes = bytes.map(|(_, slab)| slab.bytes);
        disk.notes.has(node) && !disk.has_room(bytes.sum()) && disk.waits_for_room()
    }

    /// Gives a node that is about to be evicted to the store, if it was queued for writing. One
    /// that `may_stay` is not given where that would have to wait. Returns whether it may be
    /// evicted.
    pub(crate) fn write_before_eviction(&mut self, node: NodeId, may_stay: bool) -> bool {
        let note = self.kv_disk.as_mut().and_then(|disk| disk.notes.take(node));
        let Some(note) = note else {
            return true;
        };
        match self.write_node(node, note, !may_stay) {
            Written::Later if may_stay => {
                if let Some(disk) = &mut self.kv_disk {
                    disk.notes.restore(node, note);
                }
                false
            }
            Written::Later | Written::Bytes(_) => true,
        }
    }

    /// Hands what a node has on the device to the store, or begins to copy it. If it is about to go
    /// (`now`), a copy that finds no place waits for those before it.
    fn write_node(&mut self, node: NodeId, note: Note, now: bool) -> Written {
        let Self {
            kv_disk: Some(disk),
            prefixes,
            store: memory,
            host_kv,
            ..
        } = self
        else {
            return Written::Bytes(0);
        };
        let of_model = disk.models.get(&note.model);
        let Some((model, state_slot)) =
            of_model.and_then(|m| Some((m.identity.get()?, m.state_slot)))
        else {
            return Written::Bytes(0);
        };
        let row_seconds = host_kv.row_seconds(note.model);
        let mut bytes = 0;
        for (slot, slab) in prefixes.on_device(node) {
            let is_state = Some(slot) == state_slot;
            let key = note.chain.key(slot);
            if is_state && !note.with_state || disk.outgoing.has(&key) || disk.store.touch(&key) {
                continue;
            }
            let rows = match is_state {
                true => prefixes.positions(node),
                false => KV_PAGE_TOKENS,
            };
            if !disk.pays(slab.bytes, rows, row_seconds) {
                continue;
            }
            if !disk.has_room(slab.bytes) {
                return match disk.waits_for_room() {
                    true => Written::Later,
                    false => Written::Bytes(bytes),
                };
            }
            let kind = if is_state { Kind::State } else { Kind::Page };
            let entry = (key, kind, model.tag());
            match disk.copy(memory, note.model, slab, entry, now) {
                Copied::Begun => {}
                Copied::Busy => return Written::Later,
                Copied::Failed => return Written::Bytes(bytes),
            }
            if let Some(of_model) = disk.models.get_mut(&note.model) {
                of_model.may_have_entries = true;
            }
            bytes += slab.bytes;
        }
        Written::Bytes(bytes)
    }
}
