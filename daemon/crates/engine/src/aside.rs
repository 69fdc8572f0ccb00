//! Models whose file has to be read first: what their next pass needs comes into the page cache
//! while others go on.
//!
//! ```text
//!   idle --(a request)--> on its way --(all came)--> at hand --(RECENT without a pass)--> idle
//!                             \--(silent, or cannot be read)--> its requests fail; idle
//! ```
//!
//! A far file is asked for all that, since it may not answer. One of a disk is where it is not in
//! the page cache and others have requests; alone, a model reads its file as its passes go on, and
//! so does one that is read past the page cache. On their way are the absent segments that a pass
//! uses, as many as the budget and the machine's memory hold, and whether the file is still the
//! same; experts with a prompt that is long enough to be routed to most. A model at hand meets its
//! file in its passes, where [`crate::fetcher`] bounds the wait for a far one.

use std::ops::Range;
use std::time::{Duration, Instant};

use rocmforge_ops::SegmentKind;
use rocmforge_tensor_cache::{ModelId, SegmentId};

use crate::actor::Engine;
use crate::error::Error;
use crate::fetcher::{ASLEEP_MAX, Fetch};
use crate::file_watch::Waiting;
use crate::loaded::from_fault;
use crate::weight_store::WeightStore;

/// A file that was read within it answers, as far as is known.
const RECENT: Duration = Duration::from_secs(10);

/// How often what is on its way is looked at while there is nothing else to do.
pub(crate) const LOOK: Duration = Duration::from_millis(10);

/// Rows of a prompt that are routed to most of a layer's experts.
const ROUTED_TO_MOST: usize = 32;

/// Where the file of a model is.
#[derive(Debug, Default)]
pub(crate) enum Nearness {
    #[default]
    Idle,
    OnItsWay(OnItsWay),
    AtHand(Instant),
}

/// What is fetched of a file while others go on.
#[derive(Debug)]
pub(crate) struct OnItsWay {
    fetch: Fetch,
    /// Tells that a far file is waited for.
    _told: Option<Waiting>,
}

impl Engine {
    /// Has the files brought of models that requests came for, and fails the requests of those that
    /// do not come.
    pub(crate) fn call_files(&mut self) {
        for at in 0..self.models.len() {
            if let Err(error) = self.call_file(at) {
                let entry = &mut self.models[at];
                entry.nearness = Nearness::Idle;
                tracing::warn!(model = entry.loaded.name(), %error, "its requests fail");
                let id = entry.id;
                self.end_those(|task| (task.model == id).then(|| error.clone()));
            }
        }
    }

    fn call_file(&mut self, at: usize) -> Result<(), Error> {
        let entry = &mut self.models[at];
        let (id, fetcher) = (entry.id, entry.loaded.fetcher());
        let failed = |fault| from_fault(entry.loaded.name(), entry.loaded.path(), fault);
        match &entry.nearness {
            Nearness::AtHand(since) if since.elapsed() < RECENT => return Ok(()),
            Nearness::OnItsWay(OnItsWay { fetch, .. }) => {
                if let Some(came) = fetcher.ended(fetch, ASLEEP_MAX) {
                    came.map_err(failed)?;
                    entry.nearness = Nearness::AtHand(Instant::now());
                }
                return Ok(());
            }
            Nearness::Idle | Nearness::AtHand(_) => entry.nearness = Nearness::Idle,
        }
        let mut rows = None;
        let mut others = false;
        for task in self.tasks.values() {
            match task.model == id {
                true => rows = Some(rows.unwrap_or(0).max(task.prompt_rows())),
                false => others = true,
            }
        }
        let Some(rows) = rows else { return Ok(()) };
        let file = entry.loaded.file();
        if !file.is_far() && (!others || file.is_direct()) {
            return Ok(());
        }
        let ranges = self.store.absent_ranges(id, rows >= ROUTED_TO_MOST);
        if !file.is_far() && ranges.iter().all(|range| file.seems_cached(range.clone())) {
            entry.nearness = Nearness::AtHand(Instant::now());
            return Ok(());
        }
        let fetch = fetcher.begin(ranges, ASLEEP_MAX).map_err(failed)?;
        entry.nearness = Nearness::OnItsWay(self.store.on_its_way(id, fetch));
        self.brought_aside += 1;
        Ok(())
    }

    /// Whether passes of a model have to wait for its file.
    pub(crate) fn waits_for_file(&self, model: ModelId) -> bool {
        let entry = self.models.iter().find(|entry| entry.id == model);
        entry.is_some_and(|entry| matches!(entry.nearness, Nearness::OnItsWay(_)))
    }

    /// Whether any file is on its way.
    pub(crate) fn waits_for_files(&self) -> bool {
        let mut all = self.models.iter();
        all.any(|entry| matches!(entry.nearness, Nearness::OnItsWay(_)))
            || self.preloads.iter().any(|preload| preload.coming.is_some())
    }

    /// A pass of a model has read its file.
    pub(crate) fn note_near(&mut self, model: ModelId) {
        if let Some(entry) = self.models.iter_mut().find(|entry| entry.id == model)
            && !matches!(entry.nearness, Nearness::OnItsWay(_))
        {
            entry.nearness = Nearness::AtHand(Instant::now());
        }
    }
}

impl WeightStore {
    /// Begins to fetch what an absent segment needs, where reading it would keep others waiting.
    pub(crate) fn fetch(&self, segment: SegmentId) -> Result<Option<OnItsWay>, Error> {
        let source = &self.sources[&segment.model];
        let file = &source.file;
        let is_there = || {
            let mut ranges = source.ranges(segment.index);
            file.is_direct() || ranges.all(|range| file.seems_cached(range))
        };
        if self.cache.holds(segment) || !file.is_far() && is_there() {
            return Ok(None);
        }
        let fetch = source.bring(segment.index, ASLEEP_MAX)?;
        Ok(Some(self.on_its_way(segment.model, fetch)))
    }

    fn on_its_way(&self, model: ModelId, fetch: Fetch) -> OnItsWay {
        let source = &self.sources[&model];
        let tells = source.file.is_far();
        let told = || self.files.begin_aside(&source.name, source.file.path());
        OnItsWay {
            fetch,
            _told: tells.then(told),
        }
    }

    /// Whether what was begun to be fetched has come.
    pub(crate) fn has_come(&self, model: ModelId, coming: &OnItsWay) -> Result<bool, Error> {
        let came = self.sources[&model].ended(&coming.fetch, ASLEEP_MAX);
        came.map_or(Ok(false), |came| came.map(|()| true))
    }

    /// Where in its file the segments are that a pass of a model uses and that are absent, as many
    /// as the budget and a half of the memory that is free hold.
    fn absent_ranges(&self, model: ModelId, experts: bool) -> Vec<Range<u64>> {
        let source = &self.sources[&model];
        let mut room = match rocmforge_device::host_available_bytes() {
            0 => self.budget(),
            available => self.budget().min(available / 2),
        };
        let mut ranges = Vec::new();
        for (index, kind) in (0..).zip(source.kinds()) {
            let segment = SegmentId { model, index };
            let is_used = experts || *kind == SegmentKind::Ordered;
            if !is_used || self.cache.holds(segment) {
                continue;
            }
            let Some(left) = room.checked_sub(self.segment_bytes(segment)) else {
                break;
            };
            room = left;
            ranges.extend(source.ranges(index));
        }
        ranges
    }
}
