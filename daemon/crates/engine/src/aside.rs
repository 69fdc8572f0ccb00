//! Models that somebody asks for while others' tokens are read: what their next pass needs of the
//! file and of the link comes while those go on.
//!
//! ```text
//!   idle --(a request)--> on its way --(all came)--> uploaded by slices --> ready
//!     ^                       |                                               |
//!     |                       +--(silent, or cannot be read)--> its requests  |
//!     +--(no requests)--------------------------------------------fail--------+
//! ```
//!
//! *On its way* into the page cache are the absent segments that a pass uses, as many as the budget
//! and the machine's memory hold, and whether the file is still the same; experts with a prompt
//! that is long enough to be routed to most. A far file is asked for all that where it was not read
//! for a while, since it may not answer. One of a disk is where it is not in the page cache and
//! others have requests; alone, a model reads its file as its passes go on, and so does one that is
//! read past the page cache.
//!
//! *By slices* the same segments are uploaded where others have requests and all that are asked for
//! fit the budget together: between two passes as much as comes in the time of one, and a segment
//! at least. A model that has to evict the others' weights does so in its passes.
//!
//! A model that is ready meets its file in its passes, where [`crate::fetcher`] bounds the wait for
//! a far one.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use rocmforge_ops::SegmentKind;
use rocmforge_tensor_cache::{ModelId, SegmentId};

use crate::actor::{Engine, Entry};
use crate::api::RequestCacheUse;
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

/// A slice takes at least so long, however short passes are.
const SLICE_LEAST: Duration = Duration::from_millis(1);

/// How a model is got ready for its requests.
#[derive(Debug, Default)]
pub(crate) struct Nearness {
    stage: Stage,
    /// When the file was last read.
    read_at: Option<Instant>,
}

#[derive(Debug, Default)]
enum Stage {
    /// It has no requests.
    #[default]
    Idle,
    OnItsWay(OnItsWay),
    /// Segments that are still to come.
    Uploaded(VecDeque<u32>, RequestCacheUse),
    Ready,
}

/// The requests of a model, and of others.
struct Asked {
    /// Rows of its longest prompt; none without a request.
    rows: Option<usize>,
    others: bool,
}

/// What is fetched of a file while others go on.
#[derive(Debug)]
pub(crate) struct OnItsWay {
    fetch: Fetch,
    /// Tells that a far file is waited for.
    _told: Option<Waiting>,
}

impl Engine {
    /// Gets models ready that requests came for, and fails the requests of those whose file does
    /// not come.
    pub(crate) fn call_models(&mut self) {
        for at in 0..self.models.len() {
            if let Err(error) = self.call_model(at) {
                let entry = &mut self.models[at];
                entry.nearness = Nearness::default();
                tracing::warn!(model = entry.loaded.name(), %error, "its requests fail");
                let id = entry.id;
                self.end_those(|task| (task.model == id).then(|| error.clone()));
            }
        }
    }

    fn call_model(&mut self, at: usize) -> Result<(), Error> {
        let id = self.models[at].id;
        let asked = self.asked(id);
        let entry = &mut self.models[at];
        let (name, path) = (entry.loaded.name(), entry.loaded.path());
        let failed = |fault| from_fault(name, path, fault);
        match &entry.nearness.stage {
            Stage::OnItsWay(OnItsWay { fetch, .. }) => {
                let Some(came) = entry.loaded.fetcher().ended(fetch, ASLEEP_MAX) else {
                    return Ok(());
                };
                came.map_err(failed)?;
                entry.nearness.read_at = Some(Instant::now());
                self.models[at].nearness.stage = self.slices(id, &asked);
                return Ok(());
            }
            Stage::Uploaded(..) | Stage::Ready => {
                if asked.rows.is_none() {
                    entry.nearness.stage = Stage::Idle;
                }
                return Ok(());
            }
            Stage::Idle if asked.rows.is_none() => return Ok(()),
            Stage::Idle => {}
        }
        let file = entry.loaded.file();
        let was_read = entry.nearness.read_at;
        let was_read = was_read.is_some_and(|at| at.elapsed() < RECENT);
        let may_wait = file.is_far() || asked.others && !file.is_direct();
        if may_wait && !was_read {
            let segments = self.store.absent(id, asked.is_long());
            let source = &self.store.sources[&id];
            let ranges: Vec<_> = segments.iter().flat_map(|&s| source.ranges(s)).collect();
            if file.is_far() || !ranges.iter().all(|range| file.seems_cached(range.clone())) {
                let fetch = entry.loaded.fetcher().begin(ranges, ASLEEP_MAX);
                let fetch = fetch.map_err(failed)?;
                entry.nearness.stage = Stage::OnItsWay(self.store.on_its_way(id, fetch));
                self.brought_aside += 1;
                return Ok(());
            }
        }
        self.models[at].nearness.stage = self.slices(id, &asked);
        Ok(())
    }

    fn asked(&self, id: ModelId) -> Asked {
        let mut asked = Asked {
            rows: None,
            others: false,
        };
        for task in self.tasks.values() {
            match task.model == id {
                true => asked.rows = asked.rows.max(Some(task.prompt_rows())),
                false => asked.others = true,
            }
        }
        asked
    }

    /// What comes before the passes of a model whose file is there.
    fn slices(&self, id: ModelId, asked: &Asked) -> Stage {
        if !asked.others || !self.all_fit() {
            return Stage::Ready;
        }
        let segments = self.store.absent(id, asked.is_long());
        match segments.is_empty() {
            true => Stage::Ready,
            false => Stage::Uploaded(segments.into(), RequestCacheUse::default()),
        }
    }

    /// Whether the weights of all models that have requests fit the budget beside its blocks.
    fn all_fit(&self) -> bool {
        let has_requests = |entry: &&Entry| self.tasks.values().any(|task| task.model == entry.id);
        let asked = self.models.iter().filter(has_requests);
        let bytes: u64 = asked.map(|entry| self.store.model_bytes(entry.id)).sum();
        bytes + self.store.cache.usage().blocks() <= self.budget()
    }

    /// Uploads a slice of a model that waits for it. Whether there was one.
    pub(crate) fn upload_slice(&mut self) -> bool {
        let waits = |entry: &Entry| matches!(entry.nearness.stage, Stage::Uploaded(..));
        let Some(at) = self.models.iter().position(waits) else {
            return false;
        };
        let id = self.models[at].id;
        let stage = std::mem::take(&mut self.models[at].nearness.stage);
        let Stage::Uploaded(mut segments, mut counts) = stage else {
            return false;
        };
        let others = self.asked(id).others;
        let slice = self.pass_seconds().max(SLICE_LEAST);
        let begin = Instant::now();
        self.store.collect();
        while others && begin.elapsed() < slice {
            let Some(index) = segments.pop_front() else {
                break;
            };
            let segment = SegmentId { model: id, index };
            if self.store.acquire(segment, &mut counts).is_err() {
                // Its passes meet that themselves, and say so.
                segments.clear();
                break;
            }
            self.store.release(segment);
        }
        if others && !segments.is_empty() {
            self.models[at].nearness.stage = Stage::Uploaded(segments, counts);
            return true;
        }
        self.models[at].nearness.stage = Stage::Ready;
        self.uploaded_aside_bytes += counts.uploaded_bytes;
        if let Some(task) = self.tasks.values_mut().find(|task| task.model == id) {
            task.counts.misses += counts.misses;
            task.counts.uploaded_bytes += counts.uploaded_bytes;
        }
        true
    }

    /// Whether passes of a model have to wait until it is ready.
    pub(crate) fn is_waited_for(&self, model: ModelId) -> bool {
        let entry = self.models.iter().find(|entry| entry.id == model);
        entry.is_some_and(|entry| {
            matches!(
                entry.nearness.stage,
                Stage::OnItsWay(_) | Stage::Uploaded(..)
            )
        })
    }

    /// Whether any file is on its way.
    pub(crate) fn waits_for_files(&self) -> bool {
        let mut all = self.models.iter();
        all.any(|entry| matches!(entry.nearness.stage, Stage::OnItsWay(_)))
            || self.preloads.iter().any(|preload| preload.coming.is_some())
    }

    /// A pass of a model has read its file.
    pub(crate) fn note_near(&mut self, model: ModelId) {
        if let Some(entry) = self.models.iter_mut().find(|entry| entry.id == model) {
            entry.nearness.read_at = Some(Instant::now());
        }
    }
}

impl Asked {
    /// Whether its rows are routed to most experts.
    fn is_long(&self) -> bool {
        self.rows.is_some_and(|rows| rows >= ROUTED_TO_MOST)
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

    /// The segments that a pass of a model uses and that are absent, as many as the budget and a
    /// half of the memory that is free hold.
    fn absent(&self, model: ModelId, experts: bool) -> Vec<u32> {
        let source = &self.sources[&model];
        let mut room = match rocmforge_device::host_available_bytes() {
            0 => self.budget(),
            available => self.budget().min(available / 2),
        };
        let mut segments = Vec::new();
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
            segments.push(index);
        }
        segments
    }
}
