//! Models whose file is far and that nobody has used for a while: what their next pass needs comes
//! into the page cache while others go on.
//!
//! ```text
//!   idle --(a request)--> on its way --(all came)--> at hand --(RECENT without a pass)--> idle
//!                             \--(silent, or cannot be read)--> its requests fail; idle
//! ```
//!
//! What is on its way are the absent segments that every pass uses, as many as the budget holds,
//! and whether the file is still the same; of a mixture, experts are brought when rows are routed
//! to them. A model at hand meets its file in its passes, where [`crate::far_file`] bounds the wait.

use std::ops::Range;
use std::time::{Duration, Instant};

use rocmforge_ops::SegmentKind;
use rocmforge_tensor_cache::{ModelId, SegmentId};

use crate::actor::Engine;
use crate::error::Error;
use crate::far_file::{ASLEEP_MAX, Fetch};
use crate::file_watch::Waiting;
use crate::loaded::from_fault;
use crate::weight_store::WeightStore;

/// A file that was read within it answers, as far as is known.
const RECENT: Duration = Duration::from_secs(10);

/// How often what is on its way is looked at while there is nothing else to do.
pub(crate) const LOOK: Duration = Duration::from_millis(10);

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
    /// Tells that it is waited for.
    _told: Waiting,
}

impl Engine {
    /// Has the files brought of models that requests came for, and fails the requests of those that
    /// do not come.
    pub(crate) fn call_far_files(&mut self) {
        for at in 0..self.models.len() {
            if self.models[at].loaded.far().is_none() {
                continue;
            }
            let id = self.models[at].id;
            if let Err(error) = self.call_far_file(at) {
                let entry = &mut self.models[at];
                entry.nearness = Nearness::Idle;
                tracing::warn!(model = entry.loaded.name(), %error, "its requests fail");
                self.end_those(|task| (task.model == id).then(|| error.clone()));
            }
        }
    }

    fn call_far_file(&mut self, at: usize) -> Result<(), Error> {
        let entry = &mut self.models[at];
        let Some(far) = entry.loaded.far() else {
            return Ok(());
        };
        let failed = |fault| from_fault(entry.loaded.name(), entry.loaded.path(), fault);
        match &entry.nearness {
            Nearness::AtHand(since) if since.elapsed() < RECENT => {}
            Nearness::OnItsWay(OnItsWay { fetch, .. }) => {
                if let Some(came) = far.ended(fetch, ASLEEP_MAX) {
                    came.map_err(failed)?;
                    entry.nearness = Nearness::AtHand(Instant::now());
                }
            }
            Nearness::Idle | Nearness::AtHand(_) => {
                entry.nearness = Nearness::Idle;
                if self.tasks.values().any(|task| task.model == entry.id) {
                    let ranges = self.store.absent_ranges(entry.id);
                    let fetch = far.begin(ranges, ASLEEP_MAX).map_err(failed)?;
                    let (name, path) = (entry.loaded.name(), entry.loaded.path());
                    let _told = self.store.files.begin_aside(name, path);
                    entry.nearness = Nearness::OnItsWay(OnItsWay { fetch, _told });
                }
            }
        }
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
            && matches!(entry.nearness, Nearness::AtHand(_))
        {
            entry.nearness = Nearness::AtHand(Instant::now());
        }
    }
}

impl WeightStore {
    /// Begins to fetch what an absent segment needs of a far file.
    pub(crate) fn fetch(&self, segment: SegmentId) -> Result<Option<OnItsWay>, Error> {
        let source = &self.sources[&segment.model];
        if source.far.is_none() || self.cache.holds(segment) {
            return Ok(None);
        }
        let fetch = source.bring(segment.index, ASLEEP_MAX)?;
        let _told = self.files.begin_aside(&source.name, source.file.path());
        Ok(Some(OnItsWay { fetch, _told }))
    }

    /// Whether what was begun to be fetched has come.
    pub(crate) fn has_come(&self, model: ModelId, coming: &OnItsWay) -> Result<bool, Error> {
        let came = self.sources[&model].ended(&coming.fetch, ASLEEP_MAX);
        came.map_or(Ok(false), |came| came.map(|()| true))
    }

    /// Where in its file the segments are that every pass of a model uses and that are absent, as
    /// many as the budget holds.
    fn absent_ranges(&self, model: ModelId) -> Vec<Range<u64>> {
        let source = &self.sources[&model];
        let mut room = self.budget();
        let mut ranges = Vec::new();
        for (index, (layout, kind)) in source.layouts.iter().zip(source.kinds()).enumerate() {
            let segment = SegmentId {
                model,
                index: index as u32,
            };
            if *kind != SegmentKind::Ordered || self.cache.holds(segment) {
                continue;
            }
            let Some(left) = room.checked_sub(layout.bytes) else {
                break;
            };
            room = left;
            let tensors = layout.tensors.iter().map(|placed| &placed.desc);
            ranges.extend(tensors.map(|t| t.offset..t.offset + t.bytes));
        }
        ranges
    }
}
