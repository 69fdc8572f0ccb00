//! Models that somebody asks for while others' tokens are read: what their next pass needs of the
//! file and of the link comes while those go on.
//!
//! ```text
//!   idle --(a request)--> on its way --(all came)--> uploaded beside others --> ready
//!     ^                       |                                                   |
//!     |                       +--(silent, or cannot be read)--> its requests      |
//!     +--(no requests)--------------------------------------------fail------------+
//! ```
//!
//! *On its way* into the page cache are the absent segments that a pass uses, as many as the budget
//! and half of the machine's free memory hold, and whether the file is still the same; experts with
//! a prompt that is long enough to be routed to most. A far file is asked for all that where it was
//! not read for a while, since it may not answer. One of a disk is where it is not in the page
//! cache and others have requests; alone, a model reads its file as its passes go on, and so does
//! one that is read past the page cache.
//!
//! *Beside others* the same segments are uploaded where others have requests and all that are asked
//! for fit the budget together: some are always under way while the others' passes run, about as
//! many as the link brings in the time of one. A model that has to evict the others' weights does
//! so in its passes, and one whose uploads do not come for a while waits for them there.
//!
//! A model that is ready meets its file in its passes, where [`crate::fetcher`] bounds the wait for
//! a far one.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

use rocmforge_ops::SegmentKind;
use rocmforge_tensor_cache::{ModelId, SegmentId};

use crate::actor::{Engine, Entry};
use crate::api::RequestCacheUse;
use crate::error::Error;
use crate::fetcher::{ASLEEP_MAX, Fetch};
use crate::file_watch::Waiting;
use crate::loaded::{LoadedModel, from_fault};
use crate::task::Task;
use crate::weight_store::WeightStore;

/// A file that was read within it answers, as far as is known.
const RECENT: Duration = Duration::from_secs(10);

/// How often what is on its way is looked at while there is nothing else to do.
pub(crate) const LOOK: Duration = Duration::from_millis(2);

/// Tokens at most whose rows of the embedding are brought before a pass.
const ROWS_MAX: usize = 4096;

/// Rows of a prompt that are routed to most of a layer's experts.
const ROUTED_TO_MOST: usize = 32;

/// Bytes that are under way beside others' passes, or one segment: what the link brought in the
/// time of a usual pass, within these. What the others miss meanwhile waits behind it. A link of 55
/// GB/s brings the most in 2.4 ms.
const AHEAD_LEAST: u64 = 16 << 20;
const AHEAD_MOST: u64 = 128 << 20;

/// Once nothing came for so long, a model's passes go on without what is under way, and wait for it
/// as they do for any upload.
const NOTHING_COMES: Duration = Duration::from_secs(10);

/// Segments under way at most: experts are small.
const AHEAD_SEGMENTS: usize = 64;

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
    Uploaded(Coming),
    Ready,
}

/// Segments that are uploaded beside others' passes.
#[derive(Debug)]
struct Coming {
    to_begin: VecDeque<u32>,
    under_way: Vec<u32>,
    /// When one last came, or the first began.
    came_at: Instant,
    /// Tells that the file is waited for, since one last came.
    _told: Waiting,
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
    /// Tells that it is waited for.
    _told: Waiting,
}

impl Engine {
    /// Gets models ready that requests came for, and fails the requests of those whose file does
    /// not come.
    pub(crate) fn call_models(&mut self) {
        // The models that have requests, each with the rows of its longest prompt.
        let mut rows: Vec<(ModelId, usize)> = Vec::new();
        for task in self.all_tasks() {
            let n = task.prompt_rows();
            match rows.iter_mut().find(|(model, _)| *model == task.model) {
                Some((_, most)) => *most = n.max(*most),
                None => rows.push((task.model, n)),
            }
        }
        for at in 0..self.models.len() {
            let id = self.models[at].id;
            let of_model = rows.iter().find(|(model, _)| *model == id);
            let asked = Asked {
                rows: of_model.map(|(_, n)| *n),
                others: rows.len() > usize::from(of_model.is_some()),
            };
            if let Err(error) = self.call_model(at, &asked) {
                let entry = &mut self.models[at];
                entry.nearness = Nearness::default();
                tracing::warn!(model = entry.loaded.name(), %error, "its requests fail");
                self.end_those(|task| (task.model == id).then(|| error.clone()));
            }
        }
    }

    fn call_model(&mut self, at: usize, asked: &Asked) -> Result<(), Error> {
        let entry = &mut self.models[at];
        let id = entry.id;
        let (name, path) = (entry.loaded.name(), entry.loaded.path());
        let failed = |fault| from_fault(name, path, fault);
        match &entry.nearness.stage {
            Stage::OnItsWay(_) if asked.rows.is_none() => {
                entry.nearness.stage = Stage::Idle;
                return Ok(());
            }
            Stage::OnItsWay(OnItsWay { fetch, .. }) => {
                let Some(came) = entry.loaded.fetcher().ended(fetch, ASLEEP_MAX) else {
                    return Ok(());
                };
                came.map_err(failed)?;
                entry.nearness.read_at = Some(Instant::now());
                self.models[at].nearness.stage = self.coming(id, asked);
                return Ok(());
            }
            Stage::Uploaded(_) | Stage::Ready => {
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
            let mut ranges: Vec<_> = segments.iter().flat_map(|&s| source.ranges(s)).collect();
            let suspended = self.under_way.tasks();
            ranges.extend(rows_of(&entry.loaded, self.tasks.values().chain(suspended)));
            if file.is_far() || !ranges.iter().all(|range| file.seems_cached(range.clone())) {
                let fetch = entry.loaded.fetcher().begin(ranges, ASLEEP_MAX);
                let fetch = fetch.map_err(failed)?;
                entry.nearness.stage = Stage::OnItsWay(self.store.on_its_way(id, fetch));
                self.brought_aside += 1;
                return Ok(());
            }
        }
        self.models[at].nearness.stage = self.coming(id, asked);
        Ok(())
    }

    /// What comes before the passes of a model whose file is there.
    fn coming(&self, id: ModelId, asked: &Asked) -> Stage {
        if !asked.others || !self.all_fit() {
            return Stage::Ready;
        }
        // Which experts few rows need nobody knows yet.
        let segments = self.store.absent(id, asked.is_long());
        match segments.is_empty() {
            true => Stage::Ready,
            false => Stage::Uploaded(Coming {
                to_begin: segments.into(),
                under_way: Vec::new(),
                came_at: Instant::now(),
                _told: self.store.told_aside(id),
            }),
        }
    }

    /// Whether the weights of all models that have requests, with what drafts for them and what is
    /// pinned, fit the budget beside its blocks that do not give way.
    fn all_fit(&self) -> bool {
        let store = &self.store;
        let mut bytes = store.cache.usage().blocks() - store.prefixes.kept_bytes();
        for entry in &self.models {
            if !self.all_tasks().any(|task| task.model == entry.id) {
                bytes += store.model_pinned_bytes(entry.id);
                continue;
            }
            let predictor = entry.predictor.as_ref().filter(|p| p.on).map(|p| p.id);
            let draft = entry.draft.as_ref().filter(|d| d.is_used()).map(|d| d.id);
            let with = [Some(entry.id), predictor, draft].into_iter().flatten();
            bytes += with.map(|id| store.model_bytes(id)).sum::<u64>();
        }
        bytes <= self.budget()
    }

    /// Keeps uploads of a model that waits for them under way. Whether one came or began.
    pub(crate) fn upload_beside(&mut self) -> bool {
        let waits = |entry: &Entry| matches!(entry.nearness.stage, Stage::Uploaded(_));
        let Some(at) = self.models.iter().position(waits) else {
            return false;
        };
        let id = self.models[at].id;
        let stage = std::mem::take(&mut self.models[at].nearness.stage);
        let Stage::Uploaded(mut coming) = stage else {
            return false;
        };
        // Of a third model requests may have come meanwhile.
        let goes_on = self.all_tasks().any(|task| task.model != id) && self.all_fit();
        let ahead = self.pass_pace.upload_bytes.clamp(AHEAD_LEAST, AHEAD_MOST);
        let mut counts = RequestCacheUse::default();
        let came = self.store.note_came(id, &mut coming, &mut counts);
        let began = goes_on && self.store.begin_some(id, &mut coming, ahead);
        self.uploaded_aside_bytes += counts.uploaded_bytes;
        // As of a pass, each of its requests that is there has them in full.
        for task in self.tasks.values_mut().filter(|task| task.model == id) {
            task.counts.misses += counts.misses;
            task.counts.uploaded_bytes += counts.uploaded_bytes;
        }
        let all_came = coming.to_begin.is_empty() && coming.under_way.is_empty();
        let in_time = coming.came_at.elapsed() < NOTHING_COMES;
        let goes_on = goes_on && !all_came && in_time;
        self.models[at].nearness.stage = match goes_on {
            true => Stage::Uploaded(coming),
            // What is still under way its passes find so, and count.
            false => Stage::Ready,
        };
        came || began || !goes_on
    }

    /// The models whose passes have to wait until they are ready.
    pub(crate) fn not_ready(&self) -> Vec<ModelId> {
        let waits = |entry: &&Entry| {
            let stage = &entry.nearness.stage;
            matches!(stage, Stage::OnItsWay(_) | Stage::Uploaded(_))
        };
        let waiting = self.models.iter().filter(waits);
        waiting.map(|entry| entry.id).collect()
    }

    /// Whether any file or upload is on its way.
    pub(crate) fn waits_for_files(&self) -> bool {
        !self.not_ready().is_empty() || self.preloads.iter().any(|preload| preload.coming.is_some())
    }

    /// A pass of a model has read its file.
    pub(crate) fn note_near(&mut self, model: ModelId) {
        if let Some(entry) = self.models.iter_mut().find(|entry| entry.id == model) {
            entry.nearness.read_at = Some(Instant::now());
        }
    }
}

/// Where the rows of the embedding lie that a model's requests begin with.
fn rows_of<'a>(loaded: &LoadedModel, tasks: impl Iterator<Item = &'a Task>) -> Vec<Range<u64>> {
    let of_model = tasks.filter(|task| std::ptr::eq(&raw const *task.loaded, loaded));
    let mut ids: Vec<u32> = of_model
        .flat_map(|task| task.tokens.iter().copied())
        .take(ROWS_MAX)
        .collect();
    ids.sort_unstable();
    ids.dedup();
    let tables = loaded
        .model()
        .plan()
        .inputs
        .iter()
        .map(|input| &input.table);
    let rows = tables.flat_map(|table| {
        let row = table.bytes / table.rows;
        let at = move |id: &u32| table.offset + u64::from(*id) * row;
        ids.iter().map(move |id| at(id)..at(id) + row)
    });
    rows.collect()
}

impl Asked {
    /// Whether its rows are routed to most experts.
    fn is_long(&self) -> bool {
        self.rows.is_some_and(|rows| rows >= ROUTED_TO_MOST)
    }
}

impl WeightStore {
    /// Begins to fetch what an absent segment of a preload needs, where reading it would keep
    /// `others` waiting. One that has no room is not read (`what_fits`).
    pub(crate) fn fetch(
        &self,
        segment: SegmentId,
        others: bool,
        what_fits: bool,
    ) -> Result<Option<OnItsWay>, Error> {
        let source = &self.sources[&segment.model];
        let file = &source.file;
        let is_there = || {
            let mut ranges = source.ranges(segment.index);
            !others || file.is_direct() || ranges.all(|range| file.seems_cached(range))
        };
        let end = self.cache.usage().total() + self.segment_bytes(segment);
        let has_no_room = what_fits && end > self.budget();
        if has_no_room || self.cache.holds(segment) || !file.is_far() && is_there() {
            return Ok(None);
        }
        let fetch = source.bring(segment.index, ASLEEP_MAX)?;
        Ok(Some(self.on_its_way(segment.model, fetch)))
    }

    /// Notes what came of the uploads of a model. Whether any did.
    fn note_came(
        &mut self,
        model: ModelId,
        coming: &mut Coming,
        counts: &mut RequestCacheUse,
    ) -> bool {
        let segment = |index| SegmentId { model, index };
        self.collect();
        let before = coming.under_way.len();
        coming.under_way.retain(|&index| {
            let is_under_way = self.is_under_way(segment(index));
            // One that failed is absent: its passes ask for it, and tell why.
            if !is_under_way && self.cache.holds(segment(index)) {
                counts.misses += 1;
                counts.uploaded_bytes += self.segment_bytes(segment(index));
            }
            is_under_way
        });
        let came = coming.under_way.len() < before;
        if came {
            coming.came_at = Instant::now();
            coming._told = self.told_aside(model);
        }
        came
    }

    /// Begins uploads of what is to come, while fewer than so many bytes are under way. Whether any
    /// began.
    fn begin_some(&mut self, model: ModelId, coming: &mut Coming, ahead: u64) -> bool {
        let segment = |index| SegmentId { model, index };
        let under_way = coming.under_way.iter();
        let mut bytes: u64 = under_way.map(|&i| self.segment_bytes(segment(i))).sum();
        let before = coming.under_way.len();
        while bytes < ahead
            && coming.under_way.len() < AHEAD_SEGMENTS
            && let Some(index) = coming.to_begin.pop_front()
        {
            // Somebody else's are counted by him.
            if self.cache.holds(segment(index)) || self.is_under_way(segment(index)) {
                continue;
            }
            if !self.cache.bring(segment(index), &mut self.actions) {
                // Not in one piece: its passes make room.
                coming.to_begin.clear();
                break;
            }
            if let Err(error) = self.execute() {
                tracing::debug!(%error, "an upload beside others did not begin");
                coming.to_begin.clear();
                break;
            }
            coming.under_way.push(index);
            bytes += self.segment_bytes(segment(index));
        }
        coming.under_way.len() > before
    }

    /// Tells that the file of a model is waited for by its requests.
    fn told_aside(&self, model: ModelId) -> Waiting {
        let source = &self.sources[&model];
        self.files.begin_aside(&source.name, source.file.path())
    }

    fn on_its_way(&self, model: ModelId, fetch: Fetch) -> OnItsWay {
        let _told = self.told_aside(model);
        OnItsWay { fetch, _told }
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
