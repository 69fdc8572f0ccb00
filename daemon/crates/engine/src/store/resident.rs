//! Where the segments of a fully resident model are, as one value that passes can share.

use std::sync::Arc;

use rocmforge_tensor_cache::{Acquired, ModelId, SegmentId, Slab};

use crate::api::RequestCacheUse;
use crate::api::error::{Error, from_cache};
use crate::store::Store;

/// Slabs of all segments of a fully resident model.
#[derive(Debug)]
pub(crate) struct Resident {
    /// Number that identifies the model and these slabs, and is never reused.
    pub(crate) stamp: u64,
    /// The cache's count of changes when the model was last seen resident.
    changes: u64,
    /// Slabs of the model's segments, by index.
    pub(crate) slabs: Vec<Slab>,
}

impl Store {
    /// Slabs of a fully resident model; see
    /// [`Memory::all_resident`](crate::memory::Memory::all_resident).
    pub(crate) fn all_resident(
        &mut self,
        model: ModelId,
        counts: &mut RequestCacheUse,
    ) -> Result<Option<Arc<Resident>>, Error> {
        let n = self.sources[&model].layouts.len() as u32;
        if !self.cache.use_all(model) {
            if !self.cache.is_resident(model, n).map_err(from_cache)? {
                return Ok(None);
            }
            for index in 0..n {
                let segment = SegmentId { model, index };
                match self.cache.acquire(segment, &mut self.actions) {
                    Ok(Acquired::Resident(_)) => self.cache.release(segment),
                    other => {
                        return Err(Error::Internal(format!(
                            "{segment} was resident and then was {other:?}"
                        )));
                    }
                }
            }
        }
        counts.hits += u64::from(n);
        let changes = self.cache.changes(model);
        if let Some(known) = self.resident.get(&model)
            && known.changes == changes
        {
            return Ok(Some(Arc::clone(known)));
        }
        let statuses = self.cache.residency(model).map_err(from_cache)?;
        let slabs = statuses.iter().filter_map(|s| s.residency.slab());
        self.stamps += 1;
        let found = Arc::new(Resident {
            stamp: self.stamps,
            changes,
            slabs: slabs.collect(),
        });
        self.resident.insert(model, Arc::clone(&found));
        Ok(Some(found))
    }
}
