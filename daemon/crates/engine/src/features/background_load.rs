//! Loads models in the background: for a model that is requested while others are busy, what its
//! next pass needs is read from its file and uploaded while the others' passes go on.
//!
//! ```text
//!   idle --(a request)--> fetching --(all read)--> uploading beside others --> ready
//!     ^                       |                                                 |
//!     |                       +--(silent, or cannot be read)--> its requests    |
//!     +--(no requests)--------------------------------------------fail----------+
//! ```
//!
//! *Fetching* brings the absent segments that a pass uses into the page cache, as many as the
//! budget and half of the machine's free memory hold, and checks whether the file is still the
//! same; experts with a prompt that is long enough to be routed to most. A file on a network file
//! system is fetched if it was not read for a while, since it may not respond. A file on a local
//! disk is fetched if it is not in the page cache and other models have requests; alone, a model
//! reads its file as its passes go on, and so does a model that is read with direct I/O.
//!
//! *Uploading* uploads these segments if other models have requests and all requested models fit
//! the budget together: some are always in flight while the others' passes run, about as many as
//! the link transfers in the time of one pass. A model that has to evict the others' weights does
//! so in its passes, and one whose uploads do not arrive for a while waits for them there.
//!
//! A model that is ready reads its file in its passes, where [`crate::model::fetcher`] bounds the
//! wait for a far one.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::time::{Duration, Instant};

use rocmforge_ops::InputRows;
use rocmforge_tensor_cache::{ModelId, SegmentId};

use crate::api::RequestCacheUse;
use crate::api::error::Error;
use crate::features::context::{Context, have_room};
use crate::features::speculation::state::Speculation;
use crate::guards::file_watch::Waiting;
use crate::memory::Memory;
use crate::model::fetcher::ASLEEP_MAX;
use crate::model::loaded::{LoadedModel, from_fault};
use crate::model::registry::Models;
use crate::request::images::IMAGE;
use crate::request::requests::Requests;
use crate::request::task::Task;
use crate::store::fetch::FileFetch;

/// A file that was read within this time counts as responding.
const RECENT: Duration = Duration::from_secs(10);

/// Interval at which reads and uploads in flight are polled while there is no other work.
pub(crate) const POLL: Duration = Duration::from_millis(2);

/// Maximum number of tokens whose embedding rows are read from the file before a pass.
const ROWS_MAX: usize = 4096;

/// Number of prompt rows from which on most of a layer's experts are assumed to be chosen.
const ROUTED_TO_MOST: usize = 32;

/// Minimum number of bytes kept in flight beside other models' passes (or one segment, if that is
/// larger). Between this and `AHEAD_MOST` it is what the link transfers in the time of a usual
/// pass. Segments that the others miss meanwhile wait behind these uploads. A link of 55 GB/s
/// transfers `AHEAD_MOST` in 2.4 ms.
const AHEAD_LEAST: u64 = 16 << 20;
const AHEAD_MOST: u64 = 128 << 20;

/// If no upload has ended for this long, a model's passes start without the segments in flight, and
/// wait for them as for any upload.
const NOTHING_COMES: Duration = Duration::from_secs(10);

/// Maximum number of segments in flight; experts are small, so bytes alone would allow many.
const AHEAD_SEGMENTS: usize = 64;

/// Stage of loading a model in the background.
#[derive(Debug, Default)]
enum Stage {
    /// The model has no requests, or its file has not been checked yet.
    #[default]
    Idle,
    /// The model's file is read into the page cache.
    Fetching(FileFetch),
    /// The model's segments are uploaded beside other models' passes.
    Uploading(Uploads),
    /// The model's passes may run.
    Ready,
}

/// State of loading one model in the background.
#[derive(Debug, Default)]
struct Load {
    stage: Stage,
    /// Time at which the file was last read.
    read_at: Option<Instant>,
}

impl Load {
    /// The next stage of a model that has requests; `None` if the stage does not change now.
    fn next_stage(
        &mut self,
        cx: &Context<'_>,
        speculation: &Speculation,
        (id, demand): (ModelId, Demand),
        now: Instant,
    ) -> Result<Option<Stage>, Error> {
        let Some(entry) = cx.models.get(id) else {
            return Ok(None);
        };
        let (name, path) = (entry.loaded.name(), entry.loaded.path());
        let failed = |fault| from_fault(name, path, fault);
        match &self.stage {
            Stage::Fetching(FileFetch { fetch, .. }) => {
                let Some(came) = entry.loaded.fetcher().ended(fetch, ASLEEP_MAX) else {
                    return Ok(None);
                };
                came.map_err(failed)?;
                self.read_at = Some(now);
                return Ok(Some(uploads(cx, speculation, (id, demand), now)));
            }
            Stage::Uploading(_) | Stage::Ready => return Ok(None),
            Stage::Idle => {}
        }
        let file = entry.loaded.file();
        let was_read = self
            .read_at
            .is_some_and(|at| now.saturating_duration_since(at) < RECENT);
        let may_wait = file.is_far() || demand.others && !file.is_direct();
        if may_wait && !was_read {
            let store = &cx.memory.store;
            let segments = store.absent(id, demand.is_long());
            let source = &store.sources[&id];
            let mut ranges: Vec<_> = segments.iter().flat_map(|&s| source.ranges(s)).collect();
            ranges.extend(rows_of(&entry.loaded, cx.requests.all()));
            if file.is_far() || !ranges.iter().all(|range| file.seems_cached(range.clone())) {
                let fetch = entry.loaded.fetcher().begin(ranges, ASLEEP_MAX);
                let fetch = store.file_fetch(id, fetch.map_err(failed)?);
                return Ok(Some(Stage::Fetching(fetch)));
            }
        }
        Ok(Some(uploads(cx, speculation, (id, demand), now)))
    }
}

/// Segments of a model that are uploaded beside others' passes.
#[derive(Debug)]
struct Uploads {
    to_begin: VecDeque<u32>,
    in_flight: Vec<u32>,
    /// Time at which the last upload ended, or at which the first one began.
    ended_at: Instant,
    /// Makes the status show that the model's file is waited for, since an upload last ended.
    waiting: Waiting,
}

/// Requests of a model and of the other models, as far as loading depends on them.
#[derive(Clone, Copy)]
struct Demand {
    /// Rows of the model's longest prompt.
    rows: usize,
    others: bool,
}

impl Demand {
    /// Whether the model's longest prompt is routed to most experts.
    fn is_long(self) -> bool {
        self.rows >= ROUTED_TO_MOST
    }
}

/// The models that are loaded in the background.
#[derive(Debug, Default)]
pub(crate) struct BackgroundLoads {
    loads: HashMap<ModelId, Load>,
    /// Number of times that a model's file was read while other models' passes went on.
    pub(crate) fetched_files: u64,
    /// Bytes of weights that were uploaded beside others' passes.
    pub(crate) uploaded_bytes: u64,
}

impl BackgroundLoads {
    /// Advances the background loads of models with requests. Returns the models whose file cannot
    /// be read, with the error that their requests fail with.
    pub(crate) fn before_pass(
        &mut self,
        cx: &Context<'_>,
        speculation: &Speculation,
        now: Instant,
    ) -> Vec<(ModelId, Error)> {
        // The models that have requests, each with the rows of its longest prompt.
        let mut rows: Vec<(ModelId, usize)> = Vec::new();
        for task in cx.requests.all() {
            let n = task.prompt_rows();
            match rows.iter_mut().find(|(model, _)| *model == task.model) {
                Some((_, most)) => *most = n.max(*most),
                None => rows.push((task.model, n)),
            }
        }
        for (id, load) in &mut self.loads {
            if !matches!(load.stage, Stage::Idle) && !rows.iter().any(|(model, _)| model == id) {
                load.stage = Stage::Idle;
            }
        }
        let others = rows.len() > 1;
        let mut failed = Vec::new();
        for (id, rows) in rows {
            let demand = Demand { rows, others };
            let load = self.loads.entry(id).or_default();
            match load.next_stage(cx, speculation, (id, demand), now) {
                Ok(None) => {}
                Ok(Some(stage)) => {
                    self.fetched_files += u64::from(matches!(stage, Stage::Fetching(_)));
                    load.stage = stage;
                }
                Err(error) => {
                    *load = Load::default();
                    let name = cx.models.get(id).map(|entry| entry.loaded.name());
                    tracing::warn!(model = name, %error, "its requests fail");
                    failed.push((id, error));
                }
            }
        }
        failed
    }

    /// Keeps uploads in flight for models that wait for them. Returns whether an upload ended or
    /// began.
    pub(crate) fn after_pass(
        &mut self,
        cx: &mut Context<'_>,
        speculation: &Speculation,
        now: Instant,
    ) -> bool {
        let loads = &self.loads;
        let uploads = |id: &ModelId| {
            let stage = loads.get(id).map(|load| &load.stage);
            matches!(stage, Some(Stage::Uploading(_)))
        };
        let Some(id) = cx.models.iter().map(|entry| entry.id).find(uploads) else {
            return false;
        };
        let Some(Load {
            stage: stage @ Stage::Uploading(_),
            ..
        }) = self.loads.get_mut(&id)
        else {
            return false;
        };
        let Stage::Uploading(uploads) = stage else {
            return false;
        };
        // Of a third model requests may have come meanwhile.
        let fits = all_fit(cx.memory, cx.models, cx.requests, speculation);
        let goes_on = cx.requests.any_of_others(id) && fits;
        let ahead = cx.space.pace.upload_bytes.clamp(AHEAD_LEAST, AHEAD_MOST);
        let mut counts = RequestCacheUse::default();
        let ended = uploads.collect(cx.memory, id, &mut counts, now);
        let began = goes_on && uploads.begin(cx.memory, id, ahead);
        self.uploaded_bytes += counts.uploaded_bytes;
        // As of a pass, each of its requests that is there has them in full.
        for task in cx
            .requests
            .tasks
            .values_mut()
            .filter(|task| task.model == id)
        {
            task.counts.add(&counts);
        }
        let goes_on = goes_on && !uploads.is_done() && uploads.is_in_time(now);
        if !goes_on {
            // What is still in flight its passes find so, and count.
            *stage = Stage::Ready;
        }
        ended || began || !goes_on
    }

    /// The models that must not run a pass until they are ready.
    pub(crate) fn not_ready(&self) -> Vec<ModelId> {
        let waits = |(_, load): &(&ModelId, &Load)| {
            matches!(load.stage, Stage::Fetching(_) | Stage::Uploading(_))
        };
        self.loads.iter().filter(waits).map(|(id, _)| *id).collect()
    }

    /// What passes of a model wait for: `Some(true)` for its file, `Some(false)` for uploads;
    /// `None` if they do not wait.
    pub(crate) fn stage_of(&self, model: ModelId) -> Option<bool> {
        match self.loads.get(&model)?.stage {
            Stage::Fetching(_) => Some(true),
            Stage::Uploading(_) => Some(false),
            Stage::Idle | Stage::Ready => None,
        }
    }

    /// Records that a pass of a model has read its file at `now`.
    pub(crate) fn note_read(&mut self, model: ModelId, now: Instant) {
        self.loads.entry(model).or_default().read_at = Some(now);
    }

    /// Forgets the state of a model that is unloaded.
    pub(crate) fn forget(&mut self, model: ModelId) {
        self.loads.remove(&model);
    }
}

/// The stage after a model's file was read: uploading the listed segments, or ready if there are
/// none to upload.
fn uploads(
    cx: &Context<'_>,
    speculation: &Speculation,
    (id, demand): (ModelId, Demand),
    now: Instant,
) -> Stage {
    if !demand.others || !all_fit(cx.memory, cx.models, cx.requests, speculation) {
        return Stage::Ready;
    }
    // Which experts few rows need nobody knows yet.
    let segments = cx.memory.store.absent(id, demand.is_long());
    match segments.is_empty() {
        true => Stage::Ready,
        false => Stage::Uploading(Uploads {
            to_begin: segments.into(),
            in_flight: Vec::new(),
            ended_at: now,
            waiting: cx.memory.store.wait_in_background(id),
        }),
    }
}

/// Whether the weights of all models with requests, their draft models and pinned segments fit the
/// budget beside the blocks that cannot be evicted.
fn all_fit(
    memory: &Memory,
    models: &Models,
    requests: &Requests,
    speculation: &Speculation,
) -> bool {
    let asked = models.iter().map(|entry| entry.id);
    let asked: Vec<ModelId> = asked.filter(|&id| requests.any_of(id)).collect();
    have_room(memory, speculation, &asked, memory.budget())
}

impl Uploads {
    /// Whether all uploads have ended and none is left to begin.
    fn is_done(&self) -> bool {
        self.to_begin.is_empty() && self.in_flight.is_empty()
    }

    /// Whether an upload ended recently ([`NOTHING_COMES`]).
    fn is_in_time(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.ended_at) < NOTHING_COMES
    }

    /// Takes uploads that have ended. Returns whether there were any.
    fn collect(
        &mut self,
        memory: &mut Memory,
        model: ModelId,
        counts: &mut RequestCacheUse,
        now: Instant,
    ) -> bool {
        let segment = |index| SegmentId { model, index };
        memory.collect();
        let store = &memory.store;
        let before = self.in_flight.len();
        self.in_flight.retain(|&index| {
            let is_in_flight = store.is_under_way(segment(index));
            // One that failed is absent: its passes ask for it, and report why.
            if !is_in_flight && store.cache.holds(segment(index)) {
                counts.misses += 1;
                counts.uploaded_bytes += store.segment_bytes(segment(index));
            }
            is_in_flight
        });
        let ended = self.in_flight.len() < before;
        if ended {
            self.ended_at = now;
            self.waiting = store.wait_in_background(model);
        }
        ended
    }

    /// Begins uploads until `ahead` bytes are in flight. Returns whether any began.
    fn begin(&mut self, memory: &mut Memory, model: ModelId, ahead: u64) -> bool {
        let segment = |index| SegmentId { model, index };
        let store = &mut memory.store;
        let in_flight = self.in_flight.iter();
        let mut bytes: u64 = in_flight.map(|&i| store.segment_bytes(segment(i))).sum();
        let before = self.in_flight.len();
        while bytes < ahead
            && self.in_flight.len() < AHEAD_SEGMENTS
            && let Some(index) = self.to_begin.pop_front()
        {
            // Somebody else's are counted by him.
            if store.cache.holds(segment(index)) || store.is_under_way(segment(index)) {
                continue;
            }
            match store.begin_bringing(segment(index)) {
                Ok(true) => {}
                // Not in one piece: its passes make room.
                Ok(false) => {
                    self.to_begin.clear();
                    break;
                }
                Err(error) => {
                    tracing::debug!(%error, "a background upload could not be started");
                    self.to_begin.clear();
                    break;
                }
            }
            self.in_flight.push(index);
            bytes += store.segment_bytes(segment(index));
        }
        self.in_flight.len() > before
    }
}

/// File ranges of the embedding rows that a model's requests need first.
fn rows_of<'a>(loaded: &LoadedModel, tasks: impl Iterator<Item = &'a Task>) -> Vec<Range<u64>> {
    let of_model = tasks.filter(|task| std::ptr::eq(&raw const *task.loaded, loaded));
    let mut ids: Vec<u32> = of_model
        .flat_map(|task| task.tokens.iter().copied())
        .filter(|id| id & IMAGE == 0)
        .take(ROWS_MAX)
        .collect();
    ids.sort_unstable();
    ids.dedup();
    let tables = loaded
        .model()
        .plan()
        .inputs
        .iter()
        .filter(|input| matches!(input.rows, InputRows::Tokens | InputRows::TextTokens))
        .map(|input| &input.table);
    let rows = tables.flat_map(|table| {
        let row = table.bytes / table.rows;
        let at = move |id: &u32| table.offset + u64::from(*id) * row;
        ids.iter().map(move |id| at(id)..at(id) + row)
    });
    rows.collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::guards::file_watch::FileWatch;

    fn uploads(now: Instant) -> Uploads {
        Uploads {
            to_begin: VecDeque::new(),
            in_flight: vec![3],
            ended_at: now,
            waiting: FileWatch::default().begin_in_background("cold", Path::new("/cold.gguf")),
        }
    }

    #[test]
    fn uploads_that_do_not_end_for_a_while_are_left_to_the_passes() {
        let start = Instant::now();
        let mut uploads = uploads(start);
        assert!(!uploads.is_done());
        assert!(uploads.is_in_time(start + NOTHING_COMES - Duration::from_millis(1)));
        assert!(!uploads.is_in_time(start + NOTHING_COMES));
        uploads.in_flight.clear();
        assert!(uploads.is_done());
        uploads.to_begin.push_back(4);
        assert!(!uploads.is_done());
    }

    #[test]
    fn a_model_is_not_ready_while_it_is_uploaded_and_is_forgotten_with_its_load() {
        let (start, model) = (Instant::now(), ModelId(1));
        let mut loads = BackgroundLoads::default();
        loads.note_read(ModelId(2), start);
        assert_eq!(loads.not_ready(), []);
        let load = loads.loads.entry(model).or_default();
        load.stage = Stage::Uploading(uploads(start));
        assert_eq!(loads.not_ready(), [model]);
        loads.forget(model);
        assert_eq!(loads.not_ready(), []);
    }

    #[test]
    fn long_prompts_are_routed_to_most_experts() {
        let demand = |rows| Demand {
            rows,
            others: false,
        };
        assert!(!demand(ROUTED_TO_MOST - 1).is_long());
        assert!(demand(ROUTED_TO_MOST).is_long());
    }
}
