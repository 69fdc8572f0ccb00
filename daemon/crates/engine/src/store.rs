//! The device and the cache: the cache's decisions, carried out on the device.
//!
//! The cache is pure and the device has no policy; this is the one place where they meet. Every
//! action that the cache emits is executed here in order, and every upload that ends is reported
//! back, so the cache's state matches the device's memory at every step.
//!
//! *Invariant:* a segment's upload is started once; whoever needs the segment meanwhile waits for
//! that upload (`under_way` has one entry for each segment).

pub(crate) mod arena;
mod closing;
pub(crate) mod displaced;
pub(crate) mod fetch;
mod resident;
mod slot;
mod source;
pub(crate) mod timetable;
mod uploads;

use std::cell::{Cell, OnceCell};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rocmforge_device::{Device, Loss, SegmentLayout, UploadTicket};
use rocmforge_ops::SegmentKind;
use rocmforge_tensor_cache::{
    Acquired, Action, BlockId, BlockKind, Cache, Cleared, Error as CacheError, EvictionCause,
    ModelId, SegmentId, SegmentSpec, Slab,
};

use crate::api::error::{Error, from_cache, from_device};
use crate::clock::Clock;
use crate::guards::file_watch::FileWatch;
use displaced::{Reason, UploadReasons};
pub(crate) use resident::Resident;
use slot::DeviceSlot;
pub(crate) use source::Source;
use timetable::Timetable;
use uploads::UnderWay;

/// The device, its segment cache, and the state of uploads between them.
pub(crate) struct Store {
    pub(crate) clock: Clock,
    pub(crate) device: DeviceSlot,
    /// Number of times that the device was opened again after it was closed.
    pub(crate) openings: u64,
    pub(crate) cache: Cache,
    pub(crate) sources: HashMap<ModelId, Source>,
    /// Models that were completely resident at the last check.
    resident: HashMap<ModelId, Arc<Resident>>,
    stamps: u64,
    tickets: HashMap<UploadTicket, SegmentId>,
    under_way: HashMap<SegmentId, UnderWay>,
    /// Uploads that the cache counts as completed, and whose end the device has not confirmed yet.
    settling: HashMap<UploadTicket, SegmentId>,
    /// Segments used in order by passes whose uploads have ended since this list was last read.
    pub(crate) arrived: Vec<SegmentId>,
    /// Resident segments whose content turned out to be bad while they were in use.
    spoiled: Vec<SegmentId>,
    pub(crate) actions: Vec<Action>,
    /// The block of the ledger that the device keeps for itself.
    reserve: Option<Slab>,
    /// Bytes of device memory that the driver last reported as free.
    pub(crate) free_bytes: Option<u64>,
    counted_at: Instant,
    /// Why the device is lost; empty while it is not.
    lost: OnceCell<Loss>,
    /// Bytes that the driver refused to allocate since this was last read; 0 if it did not say how
    /// many.
    refused: Cell<Option<u64>>,
    /// The first bytes of segments on the device, which are compared after the machine slept.
    witnesses: arena::Witnesses,
    /// Files whose reads are waited for.
    pub(crate) files: FileWatch,
    /// Whether the device captures passes as graphs.
    pub(crate) records: bool,
    /// Uploads that are queued on the link, with the times at which they are expected to end.
    pub(crate) timetable: Timetable,
    /// Counts why weights are uploaded, and how long passes wait for uploads.
    pub(crate) reasons: UploadReasons,
    /// The model that blocks are being reserved for now.
    reserves_for: Option<ModelId>,
}

/// Shortest time between two queries of the driver's free memory for the snapshot while there is
/// work.
const MEMORY_RENEWAL: Duration = Duration::from_millis(500);

impl Store {
    pub(crate) fn new(device: Box<dyn Device>, cache: Cache) -> Self {
        Self {
            free_bytes: device.free_bytes(),
            records: device.info().records,
            counted_at: Clock.now(),
            clock: Clock,
            device: DeviceSlot::new(device),
            openings: 0,
            cache,
            sources: HashMap::new(),
            resident: HashMap::new(),
            stamps: 0,
            tickets: HashMap::new(),
            under_way: HashMap::new(),
            settling: HashMap::new(),
            arrived: Vec::new(),
            spoiled: Vec::new(),
            actions: Vec::new(),
            reserve: None,
            lost: OnceCell::new(),
            refused: Cell::new(None),
            witnesses: arena::Witnesses::new(),
            files: FileWatch::default(),
            timetable: Timetable::default(),
            reasons: UploadReasons::default(),
            reserves_for: None,
        }
    }

    /// Number of uploads in flight that nobody has waited for.
    pub(crate) fn under_way(&self) -> usize {
        self.under_way.len()
    }

    /// Asks the driver for its count of free memory, unless it was asked within [`MEMORY_RENEWAL`].
    pub(crate) fn refresh_free_bytes(&mut self) {
        if self.clock.now() - self.counted_at >= MEMORY_RENEWAL {
            self.free_bytes = self.device.free_bytes();
            self.counted_at = self.clock.now();
        }
    }

    /// Asks the driver for its count of free memory, in bytes; `None` if it does not count.
    pub(crate) fn count_free_bytes_now(&mut self) -> Option<u64> {
        self.free_bytes = self.device.free_bytes();
        self.counted_at = self.clock.now();
        self.free_bytes
    }

    /// Why the device is lost, if it is.
    pub(crate) fn lost(&self) -> Option<&Loss> {
        self.lost.get()
    }

    /// Registers a model's segments. Uploads nothing.
    pub(crate) fn register(&mut self, model: ModelId, source: Source) -> Result<(), Error> {
        let specs: Vec<SegmentSpec> = source
            .layouts
            .iter()
            .zip(&source.kinds)
            .map(|(l, kind)| match kind {
                SegmentKind::Ordered => SegmentSpec::ordered(l.bytes),
                SegmentKind::Expert { .. } => SegmentSpec::expert(l.bytes),
            })
            .collect();
        self.cache.register(model, &specs).map_err(from_cache)?;
        let prepared_at = self.openings;
        self.sources.insert(
            model,
            Source {
                prepared_at,
                ..source
            },
        );
        self.count_pinned(model)
    }

    /// Holds a segment in the cache. If it was absent, the caller has to execute the emitted upload
    /// ([`Store::run_actions`]).
    pub(crate) fn try_acquire(&mut self, segment: SegmentId) -> Result<Acquired, CacheError> {
        self.cache.acquire(segment, &mut self.actions)
    }

    /// Reserves a block of `bytes` bytes in the cache's ledger. The caller has to execute the
    /// evictions that this emits.
    pub(crate) fn try_reserve(
        &mut self,
        kind: BlockKind,
        owner: Option<ModelId>,
        bytes: u64,
    ) -> Result<BlockId, CacheError> {
        self.reserves_for = owner;
        self.cache.reserve(kind, owner, bytes, &mut self.actions)
    }

    /// Starts to upload a segment ahead of its use. Returns whether it has room beside the segments
    /// of its own model and of models that run.
    pub(crate) fn begin_bringing(&mut self, segment: SegmentId) -> Result<bool, Error> {
        let has_room = self.cache.bring(segment, &mut self.actions);
        if has_room {
            self.execute()?;
        }
        Ok(has_room)
    }

    /// Starts to upload a segment ahead of its use, if free memory suffices. Returns whether it
    /// does.
    pub(crate) fn begin_bringing_into_free(&mut self, segment: SegmentId) -> Result<bool, Error> {
        let has_room = self.cache.bring_into_free(segment, &mut self.actions);
        if has_room {
            self.execute()?;
        }
        Ok(has_room)
    }

    /// Size of the block that the device keeps for itself, in bytes.
    pub(crate) fn reserve_bytes(&self) -> u64 {
        self.reserve.map_or(0, |slab| slab.bytes)
    }

    /// Gives the device a block of the ledger for its own use.
    pub(crate) fn set_reserve(&mut self, slab: Slab) -> Result<(), Error> {
        self.reserve = Some(slab);
        let set = self.device.set_reserve(slab.offset, slab.bytes);
        set.map_err(|e| self.device_error(None, e))
    }

    /// Removes a model's segments from the cache. Slabs that it shares with other models stay.
    pub(crate) fn unregister_segments(&mut self, model: ModelId) -> Result<(), CacheError> {
        let cache = &self.cache;
        let heir = |segment: SegmentId| {
            let mut members = cache.members(cache.holder(segment));
            members.find(|id| id.model != model).unwrap_or(segment)
        };
        // Whose content turns out to be bad is known by a segment that is still there.
        let spoiled = self.spoiled.iter_mut().chain(self.settling.values_mut());
        for segment in spoiled.filter(|segment| segment.model == model) {
            *segment = heir(*segment);
        }
        self.cache.unregister(model, &mut self.actions)
    }

    /// Lets two segments of equal content share a slab. Returns whether they share one now.
    pub(crate) fn share(&mut self, a: SegmentId, b: SegmentId) -> Result<bool, Error> {
        let mut share = |a, b| {
            self.cache
                .share(a, b, &mut self.actions)
                .map_err(from_cache)
        };
        let shared = share(b, a)? || share(a, b)?;
        self.execute()?;
        Ok(shared || self.cache.holder(a) == self.cache.holder(b))
    }

    /// Forgets the recorded contents (first bytes) of a model's segments.
    pub(crate) fn forget_contents(&mut self, model: ModelId) {
        self.witnesses.retain(|segment, _| segment.model != model);
        self.resident.remove(&model);
        self.reasons.forget(model);
    }

    /// Forgets the file of a model's segments.
    pub(crate) fn forget_source(&mut self, model: ModelId) {
        if let Some(source) = self.sources.remove(&model) {
            self.device.forget_file(&source.file);
        }
    }

    /// Evicts all segments that are neither pinned nor in use, of one model or of all, and returns
    /// the memory to the system.
    pub(crate) fn clear(&mut self, model: Option<ModelId>) -> Result<Cleared, Error> {
        let cleared = self.cache.clear(model, &mut self.actions);
        let cleared = cleared.map_err(from_cache)?;
        self.execute_and_discard()?;
        Ok(cleared)
    }

    /// Changes the budget of the cache and of the arena to `bytes`. Returns how many bytes are
    /// still in use above it.
    pub(crate) fn set_budget(&mut self, bytes: u64) -> Result<u64, Error> {
        if bytes > self.budget() {
            self.set_capacity(bytes)?;
        }
        let change = self.cache.set_budget(bytes, &mut self.actions);
        self.execute_and_discard()?;
        self.set_capacity(bytes)?;
        Ok(change.used.saturating_sub(bytes))
    }

    /// Waits for the upload of a held segment; releases the segment if the upload fails.
    pub(crate) fn wait_for_held(&mut self, segment: SegmentId) -> Result<(), Error> {
        let came = self.wait(segment);
        if came.is_err() {
            self.cache.release(segment);
        }
        came
    }

    /// Waits for a held segment whose upload
    /// [`Memory::begin_acquire`](crate::memory::Memory::begin_acquire) found in flight. Returns
    /// whether it is resident; if not, its upload has failed, and it is held no longer.
    pub(crate) fn end_acquire(&mut self, segment: SegmentId) -> Result<bool, Error> {
        let came = self.wait(segment);
        if came.is_err() || !self.cache.holds(segment) {
            self.cache.release(segment);
        }
        came.map(|()| self.cache.holds(segment))
    }

    /// The device, mutable, and where the tensors of a model's segments lie in their slabs. One
    /// call returns both, since a pass borrows them at the same time.
    pub(crate) fn device_and_layouts(
        &mut self,
        model: ModelId,
    ) -> (&mut dyn Device, &[Arc<SegmentLayout>]) {
        (&mut *self.device, &self.sources[&model].layouts)
    }

    /// Starts to upload an expert that the current pass needs, unless too many uploads are in
    /// flight or segments in use leave it no room.
    pub(crate) fn start_needed(&mut self, segment: SegmentId) -> Result<(), Error> {
        if self.cache.prefetch_needed(segment, &mut self.actions) {
            self.execute()?;
        }
        Ok(())
    }

    /// Whether an upload of a segment is under way.
    pub(crate) fn is_under_way(&self, segment: SegmentId) -> bool {
        self.under_way.contains_key(&self.cache.holder(segment))
    }

    /// Whether [`Memory::acquire`](crate::memory::Memory::acquire) of this segment would return
    /// without waiting for an upload.
    pub(crate) fn comes_at_once(&self, segment: SegmentId) -> bool {
        match self.under_way.get(&self.cache.holder(segment)) {
            Some(UnderWay::Uploaded { ticket, .. }) => self.device.is_queued(*ticket),
            Some(UnderWay::Brought { .. }) => false,
            None => self.cache.holds(segment),
        }
    }

    /// Releases an acquired segment.
    pub(crate) fn release(&mut self, segment: SegmentId) {
        self.cache.release(segment);
    }

    /// Pins or unpins segments.
    pub(crate) fn pin(
        &mut self,
        model: ModelId,
        segments: &[u32],
        pinned: bool,
    ) -> Result<(), Error> {
        let mut outcome = Ok(());
        for &index in segments {
            let segment = SegmentId { model, index };
            let done = if pinned {
                self.cache.pin(segment)
            } else {
                self.cache.unpin(segment)
            };
            outcome = outcome.and(done.map_err(from_cache));
        }
        self.count_pinned(model)?;
        outcome
    }

    fn count_pinned(&mut self, model: ModelId) -> Result<(), Error> {
        let statuses = self.cache.residency(model).map_err(from_cache)?;
        let source = self
            .sources
            .get_mut(&model)
            .expect("the cache knows the same models");
        let aligned = |bytes: u64| bytes.next_multiple_of(rocmforge_device::ALIGNMENT);
        source.pinned_bytes = statuses
            .iter()
            .filter(|s| s.pinned)
            .map(|s| aligned(s.bytes))
            .sum();
        source.largest_unpinned = statuses
            .iter()
            .filter(|s| !s.pinned)
            .map(|s| aligned(s.bytes))
            .max()
            .unwrap_or(0);
        Ok(())
    }

    /// Returns a block to the budget.
    pub(crate) fn free(&mut self, block: BlockId) {
        self.cache.free(block);
    }

    /// The budget in force, in bytes.
    pub(crate) fn budget(&self) -> u64 {
        self.cache.budget()
    }

    /// Sets the arena's size to `bytes`; to more if a shrink has left blocks beyond that size,
    /// which stay there until they are released.
    fn set_capacity(&mut self, bytes: u64) -> Result<(), Error> {
        let bytes = bytes.max(self.cache.arena_end());
        let set = self.device.set_capacity(bytes);
        set.map_err(|e| self.device_error(None, e))
    }

    /// Takes the bytes that the driver refused to allocate since the last call; `None` if it
    /// refused nothing.
    pub(crate) fn take_refused_bytes(&self) -> Option<u64> {
        self.refused.take()
    }

    /// Continues a shrink of the budget that blocks in use had held up. Called after releases.
    pub(crate) fn finish_shrink(&mut self) -> Result<(), Error> {
        if self.cache.budget_reached() {
            return Ok(());
        }
        self.cache.finish_shrink(&mut self.actions);
        self.execute_and_discard()?;
        self.set_capacity(self.budget())
    }

    pub(crate) fn execute(&mut self) -> Result<(), Error> {
        self.run_actions(false)
    }

    pub(crate) fn execute_and_discard(&mut self) -> Result<(), Error> {
        self.run_actions(true)
    }

    /// Carries out the cache's emitted actions in order. If one fails, the uploads behind it are
    /// reported as failed, so that the cache does not wait for them.
    fn run_actions(&mut self, discard: bool) -> Result<(), Error> {
        let mut actions = std::mem::take(&mut self.actions);
        self.note_reasons(&actions);
        let mut outcome = Ok(());
        for action in actions.drain(..) {
            match action {
                Action::Evict {
                    segment,
                    slab,
                    cause,
                } => {
                    tracing::trace!(%segment, slab.offset, slab.bytes, cause = cause.name(), "evict");
                    if discard {
                        self.device.discard(slab.offset, slab.bytes);
                    }
                }
                Action::Move { segment, from, to } => {
                    tracing::trace!(%segment, from.offset, to.offset, "move");
                    if let Err(error) = self.device.move_slab(from.offset, to.offset, from.bytes) {
                        // What lies at its new place is not what the ledger believes.
                        self.spoiled.push(segment);
                        outcome = outcome.and(Err(self.device_error(Some(segment.model), error)));
                    }
                }
                Action::Upload { segment, slab } => {
                    tracing::trace!(%segment, slab.offset, slab.bytes, "upload");
                    match outcome {
                        Ok(()) => outcome = self.begin(segment, slab),
                        Err(_) => self.cache.upload_failed(segment),
                    }
                }
            }
        }
        // Keeps the vector's memory for the next pass.
        self.actions = actions;
        outcome
    }

    /// Records why segments are evicted: for the upload behind them in `actions`, or for a block
    /// that is reserved.
    fn note_reasons(&mut self, actions: &[Action]) {
        for (at, action) in actions.iter().enumerate() {
            let Action::Evict { segment, cause, .. } = action else {
                continue;
            };
            let by = match cause {
                EvictionCause::OtherModel | EvictionCause::OwnPass => {
                    actions[at..].iter().find_map(|action| match action {
                        Action::Upload { segment, .. } => Some(segment.model),
                        Action::Evict { .. } | Action::Move { .. } => None,
                    })
                }
                EvictionCause::Kv | EvictionCause::Scratch => self.reserves_for,
                _ => None,
            };
            // What is shared now is still there.
            if *cause == EvictionCause::Shared {
                continue;
            }
            let cause = Some(*cause);
            for id in self.cache.members(*segment) {
                self.reasons.evicted(id, Reason { cause, by });
            }
        }
    }

    pub(crate) fn note_loss(&self, error: &rocmforge_device::Error) {
        if let rocmforge_device::Error::Lost(loss) = error {
            // The first reason is the one that counts.
            let _ = self.lost.set(loss.clone());
        }
    }

    pub(crate) fn device_error(
        &self,
        model: Option<ModelId>,
        error: rocmforge_device::Error,
    ) -> Error {
        self.note_loss(&error);
        if let rocmforge_device::Error::Memory { bytes, .. } = &error {
            self.refused.set(Some(*bytes));
        }
        let source = model.and_then(|m| self.sources.get(&m));
        from_device(source.map(|s| (s.name.as_str(), s.file.path())), error)
    }
}
