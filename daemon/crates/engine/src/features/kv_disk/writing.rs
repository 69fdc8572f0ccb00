//! Pages and states on their way from the device to the store's queue.

use rocmforge_kv_disk::{Kind, Store};
use rocmforge_ops::KV_PAGE_TOKENS;
use rocmforge_tensor_cache::{ModelId, Slab};

use crate::features::kv_disk::keys::Chain;
use crate::features::kv_disk::{KvDisk, Note};
use crate::features::prefix_cache::{NodeId, Realm};
use crate::memory::Memory;

/// Bytes that are copied from the device between two passes while requests run.
const BYTES_WHILE_BUSY: u64 = 4 << 20;

/// Bytes that are copied from the device at a time while none runs.
const BYTES_WHILE_IDLE: u64 = 64 << 20;

/// What a node counts for at least.
const NODE_BYTES_MIN: u64 = 4096;

/// Result of writing a node of the prefix cache.
enum Written {
    /// Number of bytes of the page that were queued.
    Bytes(u64),
    /// The queue of pages to be written to disk is full.
    NoRoom,
}

impl KvDisk {
    /// The name of the empty prefix of a realm, if its model is known.
    pub(super) fn root(&self, realm: Realm) -> Option<Chain> {
        let model = self.models.get(&realm.model)?;
        let identity = model.identity.get()?;
        let of = (identity.0, model.layout);
        Some(Chain::root(realm, self.is_shared, of, &self.device))
    }

    fn note(&mut self, node: NodeId, note: Note) {
        self.notes.add(node, note);
    }
}

impl Memory {
    /// Names the prefix of a realm with these tokens, whose nodes are in memory, and has those
    /// written that are not on disk. `None` where nothing is kept on disk.
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

    /// Has the pages of a node written, and its state if that is wanted.
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

    /// Hands nodes to the store between two passes, as many as there is time for. Whether there
    /// were any.
    pub(crate) fn write_notes(&mut self, is_busy: bool) -> bool {
        let most = match is_busy {
            true => BYTES_WHILE_BUSY,
            false => BYTES_WHILE_IDLE,
        };
        let (mut bytes, mut any) = (0, false);
        while bytes < most {
            let Some((node, note)) = self.kv_disk.as_mut().and_then(|disk| disk.notes.pop()) else {
                return any;
            };
            match self.write_node(node, note) {
                Written::Bytes(of_node) => {
                    // What is on disk already is looked for.
                    bytes += of_node.max(NODE_BYTES_MIN);
                    any = true;
                }
                Written::NoRoom => {
                    if let Some(disk) = &mut self.kv_disk {
                        disk.notes.put_back(node, note);
                    }
                    return any;
                }
            }
        }
        any
    }

    /// Notes what was measured for the next process, `always` or where it is time for that.
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

    /// Whether the store works by itself, so that its status changes.
    pub(crate) fn is_disk_busy(&self) -> bool {
        let disk = self.kv_disk.as_ref();
        disk.is_some_and(|disk| disk.store.status().is_busy)
    }

    /// Hands all nodes to the store that it has room for: what they have is about to go.
    pub(crate) fn write_all_notes(&mut self) {
        while self.write_notes(false) {}
        self.note_rates(true);
    }

    /// Whether a node is still to be written and the store's queue is full, so that its pages would
    /// not be written if it went now.
    pub(crate) fn waits_to_be_written(&self, node: NodeId) -> bool {
        let Some(disk) = &self.kv_disk else {
            return false;
        };
        let bytes = self.prefixes.on_device(node).into_iter();
        let bytes = bytes.map(|(_, slab)| slab.bytes);
        disk.notes.has(node) && !disk.store.has_room(bytes.sum()) && waits_for_room(&disk.store)
    }

    /// Hands a node to the store that is about to go, if it was to be written.
    pub(crate) fn write_before_eviction(&mut self, node: NodeId) {
        let note = self.kv_disk.as_mut().and_then(|disk| disk.notes.take(node));
        if let Some(note) = note {
            self.write_node(node, note);
        }
    }

    /// Hands what a node has on the device to the store.
    fn write_node(&mut self, node: NodeId, note: Note) -> Written {
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
            if is_state && !note.with_state || disk.store.touch(&note.chain.key(slot)) {
                continue;
            }
            let rows = match is_state {
                true => prefixes.positions(node),
                false => KV_PAGE_TOKENS,
            };
            if !disk.pays(slab.bytes, rows, row_seconds) {
                continue;
            }
            if !disk.store.has_room(slab.bytes) {
                return match waits_for_room(&disk.store) {
                    true => Written::NoRoom,
                    false => Written::Bytes(bytes),
                };
            }
            let Some(payload) = read(memory, slab) else {
                return Written::Bytes(bytes);
            };
            let kind = if is_state { Kind::State } else { Kind::Page };
            disk.store
                .put(note.chain.key(slot), kind, model.tag(), payload);
            if let Some(of_model) = disk.models.get_mut(&note.model) {
                of_model.may_have_entries = true;
            }
            bytes += slab.bytes;
        }
        Written::Bytes(bytes)
    }
}

/// Whether the queue has room once what is in it is written.
fn waits_for_room(store: &Store) -> bool {
    let status = store.status();
    status.queued_bytes > 0 && !status.is_paused
}

/// What lies on the device.
fn read(memory: &mut crate::store::Store, slab: Slab) -> Option<Vec<u8>> {
    let mut payload = vec![0; slab.bytes as usize];
    match memory.device.read_slab(slab.offset, &mut payload) {
        Ok(()) => Some(payload),
        Err(error) => {
            memory.note_loss(&error);
            tracing::debug!(%error, "a page is not written to disk");
            None
        }
    }
}
