//! Pages whose copy to the host was begun and that go to the store's queue when it has ended.

use std::collections::VecDeque;

use rocmforge_device::CopyTicket;
use rocmforge_kv_disk::{Key, Kind, ModelTag, Store};
use rocmforge_tensor_cache::ModelId;

use crate::store;

/// A page on its way from the device to the store's queue.
#[derive(Debug)]
struct Page {
    ticket: CopyTicket,
    model: ModelId,
    bytes: u64,
    /// Where the page belongs; `None` of one that nobody wants any more.
    entry: Option<(Key, Kind, ModelTag)>,
}

/// Pages on their way to the store's queue, in the order in which their copies were begun.
#[derive(Debug, Default)]
pub(super) struct OutgoingPages {
    pages: VecDeque<Page>,
}

impl OutgoingPages {
    pub(super) fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// Bytes of the pages that the store's queue has to have room for.
    pub(super) fn bytes(&self) -> u64 {
        let wanted = self.pages.iter().filter(|page| page.entry.is_some());
        wanted.map(|page| page.bytes).sum()
    }

    /// Whether a page of this key is on its way.
    pub(super) fn has(&self, key: &Key) -> bool {
        let mut entries = self.pages.iter().filter_map(|page| page.entry.as_ref());
        entries.any(|(of, ..)| of == key)
    }

    /// A copy of a page was begun.
    pub(super) fn push(
        &mut self,
        ticket: CopyTicket,
        (model, bytes): (ModelId, u64),
        entry: (Key, Kind, ModelTag),
    ) {
        self.pages.push_back(Page {
            ticket,
            model,
            bytes,
            entry: Some(entry),
        });
    }

    /// Pages of a model, or of all, are not to be written. Their copies end as they would.
    pub(super) fn forget(&mut self, model: Option<ModelId>) {
        let of_model = |page: &&mut Page| model.is_none_or(|model| page.model == model);
        for page in self.pages.iter_mut().filter(of_model) {
            page.entry = None;
        }
    }

    /// Hands the first page to the store's queue if its copy has ended, or the caller `waits` for
    /// it. Whether a page has left.
    pub(super) fn end_first(
        &mut self,
        memory: &mut store::Store,
        store: &Store,
        waits: bool,
    ) -> bool {
        let Some(first) = self.pages.front() else {
            return false;
        };
        let payload = match memory.device.end_copy(first.ticket, waits) {
            Ok(None) => return false,
            Ok(payload) => payload,
            Err(error) => {
                memory.note_loss(&error);
                tracing::debug!(%error, "a page is not written to disk");
                None
            }
        };
        let entry = self.pages.pop_front().and_then(|page| page.entry);
        if let (Some(payload), Some((key, kind, tag))) = (payload, entry) {
            store.put(key, kind, tag, payload);
        }
        true
    }
}
