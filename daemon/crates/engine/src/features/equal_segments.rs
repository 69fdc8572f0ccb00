//! Finds segments with the same content in several models, as fine-tunes of one model have them, in
//! the background. They then share one slab on the device and are read from one file.
//!
//! Two segments are compared when both are resident, so that memory would be saved, and their
//! layouts are alike: a thread reads both from their files, a sample first and then all of it.
//! Nothing else counts as proof. Equal segments are reported to the cache
//! ([`Cache::share`](rocmforge_tensor_cache::Cache::share)) as soon as no pass uses one of them.
//!
//! *Invariant:* segments share a slab only if every byte of both files was compared, and neither
//! file had changed when they were joined (`segments_of_two_models_are_kept_once_and_texts_stay`).

use std::collections::{HashMap, HashSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};

use rocmforge_device::{PlacedTensor, SegmentLayout};
use rocmforge_gguf::MappedFile;
use rocmforge_tensor_cache::{ModelId, SegmentId};

use crate::store::Store;

/// Number of bytes that are read and compared at a time.
const PIECE_BYTES: u64 = 1 << 20;

/// Number of bytes at the middle of each tensor that are compared before the whole tensor.
const SAMPLE_BYTES: u64 = 4096;

/// Maximum number of pairs that the comparing thread is given at a time.
const UNDER_WAY_MAX: usize = 16;

/// Maximum number of pairs that wait to be compared; further ones are found again at their next
/// upload.
const WAITING_MAX: usize = 4096;

/// Maximum number of pairs that are remembered as unequal.
const UNEQUAL_MAX: usize = 1 << 16;

/// Maximum number of equal pairs that one call tries to join; pairs in use by a running model wait.
const SHARED_AT_ONCE: usize = 8;

/// Two segments of different models, the smaller id first.
type Pair = (SegmentId, SegmentId);

/// Two segments to compare: their files and their byte ranges in them.
#[derive(Debug)]
struct Comparison {
    pair: Pair,
    files: [Arc<MappedFile>; 2],
    ranges: Vec<[Range<u64>; 2]>,
}

/// The comparing thread's queue of pairs, and its results: whether the two are equal.
#[derive(Debug)]
struct Thread {
    jobs: Sender<Comparison>,
    found: Receiver<(Comparison, bool)>,
}

/// Finds segments of equal content, and lets them share a slab.
#[derive(Debug, Default)]
pub(crate) struct EqualSegments {
    is_on: bool,
    thread: Option<Thread>,
    under_way: usize,
    /// Segments that have been resident, by index in their model and size in bytes.
    seen: HashMap<(u32, u64), Vec<SegmentId>>,
    waiting: VecDeque<Pair>,
    /// Pairs that wait to be compared or are being compared.
    asked: HashSet<Pair>,
    unequal: HashSet<Pair>,
    /// Pairs proven equal that could not be joined yet because they were in use.
    equal: VecDeque<Comparison>,
}

impl EqualSegments {
    pub(crate) fn new(is_on: bool) -> Self {
        Self {
            is_on,
            ..Self::default()
        }
    }

    /// Whether segments are being compared.
    pub(crate) fn is_comparing(&self) -> bool {
        self.under_way + self.waiting.len() > 0
    }

    /// Records that a segment has become resident, and queues its comparisons.
    fn note(&mut self, store: &Store, segment: SegmentId) {
        let Some(layout) = layout(store, segment) else {
            return;
        };
        let seen = self.seen.entry((segment.index, layout.bytes)).or_default();
        let is_candidate = |&&other: &&SegmentId| {
            let pair = ordered(segment, other);
            is_worthwhile(store, pair)
                && !self.unequal.contains(&pair)
                && !self.asked.contains(&pair)
                && self::layout(store, other).is_some_and(|other| are_alike(layout, other))
        };
        let candidates = seen.iter().filter(is_candidate);
        let room = WAITING_MAX.saturating_sub(self.waiting.len());
        let candidates: Vec<Pair> = candidates
            .take(room)
            .map(|&other| ordered(segment, other))
            .collect();
        if !seen.contains(&segment) {
            seen.push(segment);
        }
        self.asked.extend(&candidates);
        self.waiting.extend(candidates);
    }

    /// Gives waiting pairs to the comparing thread, and takes its results.
    fn go_on(&mut self, store: &Store) {
        while let Some(Thread { found, .. }) = &self.thread {
            let (comparison, is_equal) = match found.try_recv() {
                Ok(found) => found,
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => {
                    // It ended by a bug: what it had is met again at its next upload.
                    (self.thread, self.under_way) = (None, 0);
                    self.asked.clear();
                    self.waiting.clear();
                    break;
                }
            };
            self.under_way -= 1;
            if is_equal {
                self.equal.push_back(comparison);
            } else {
                if self.unequal.len() >= UNEQUAL_MAX {
                    self.unequal.clear();
                }
                self.asked.remove(&comparison.pair);
                self.unequal.insert(comparison.pair);
            }
        }
        while self.under_way < UNDER_WAY_MAX
            && let Some(pair) = self.waiting.pop_front()
        {
            // Meanwhile one may have gone, or both have come into one group.
            let wanted = is_worthwhile(store, pair);
            let comparison = wanted.then(|| Comparison::new(store, pair)).flatten();
            if comparison.is_some_and(|comparison| self.give(comparison)) {
                self.under_way += 1;
            } else {
                self.asked.remove(&pair);
            }
        }
    }

    /// Gives a pair to the comparing thread. Returns `false` if there is no thread.
    fn give(&mut self, comparison: Comparison) -> bool {
        if self.thread.is_none() {
            self.thread = start();
        }
        let thread = self.thread.as_ref();
        thread.is_some_and(|thread| thread.jobs.send(comparison).is_ok())
    }

    /// Takes comparison results, and lets equal segments share a slab.
    pub(crate) fn share(&mut self, store: &mut Store) {
        let mut arrived = std::mem::take(&mut store.arrived);
        if !self.is_on {
            arrived.clear();
        }
        if arrived.is_empty() && !self.is_comparing() && self.equal.is_empty() {
            return;
        }
        for segment in arrived {
            self.note(store, segment);
        }
        self.go_on(store);
        for _ in 0..self.equal.len().min(SHARED_AT_ONCE) {
            let Some(comparison) = self.equal.pop_front() else {
                break;
            };
            let (first, second) = comparison.pair;
            self.asked.remove(&comparison.pair);
            if !comparison.holds_for(store) {
                continue;
            }
            match store.share(first, second) {
                Ok(true) => tracing::debug!(%first, %second, "equal segments share a slab"),
                Ok(false) => {
                    self.asked.insert(comparison.pair);
                    self.equal.push_back(comparison);
                }
                Err(error) => {
                    let error = crate::api::error::chain(&error);
                    tracing::warn!(%first, %second, %error, "equal segments cannot share a slab");
                }
            }
        }
    }

    /// Forgets the pairs of a model that is unloaded.
    pub(crate) fn forget(&mut self, model: ModelId) {
        let is_of = |pair: &Pair| pair.0.model == model || pair.1.model == model;
        for seen in self.seen.values_mut() {
            seen.retain(|id| id.model != model);
        }
        self.seen.retain(|_, seen| !seen.is_empty());
        self.waiting.retain(|pair| !is_of(pair));
        self.asked.retain(|pair| !is_of(pair));
        self.unequal.retain(|pair| !is_of(pair));
        self.equal.retain(|comparison| !is_of(&comparison.pair));
    }
}

impl Comparison {
    fn new(store: &Store, pair: Pair) -> Option<Self> {
        let of = |segment: SegmentId| {
            let source = store.sources.get(&segment.model)?;
            let ranges: Vec<Range<u64>> = source.ranges(segment.index).collect();
            Some((Arc::clone(&source.file), ranges))
        };
        let ((file, ranges), (other, others)) = (of(pair.0)?, of(pair.1)?);
        let ranges = ranges.into_iter().zip(others).map(|(a, b)| [a, b]);
        Some(Self {
            pair,
            files: [file, other],
            ranges: ranges.collect(),
        })
    }

    /// Whether the files that were compared are still those of the loaded models.
    fn holds_for(&self, store: &Store) -> bool {
        let pair = [self.pair.0, self.pair.1];
        pair.iter().zip(&self.files).all(|(segment, file)| {
            let source = store.sources.get(&segment.model);
            source.is_some_and(|source| Arc::ptr_eq(&source.file, file))
                && file.check_unchanged().is_ok()
        })
    }

    fn is_equal(&self) -> bool {
        let sample = |[a, b]: &[Range<u64>; 2]| {
            let middle = |range: &Range<u64>| {
                let at = range.start + (range.end - range.start) / 2;
                at..range.end.min(at + SAMPLE_BYTES)
            };
            self.is_equal_at(middle(a), middle(b))
        };
        let whole = |[a, b]: &[Range<u64>; 2]| {
            (0..a.end - a.start)
                .step_by(PIECE_BYTES as usize)
                .all(|at| {
                    let piece = |range: &Range<u64>| {
                        range.start + at..range.end.min(range.start + at + PIECE_BYTES)
                    };
                    self.is_equal_at(piece(a), piece(b))
                })
        };
        self.ranges.iter().all(sample) && self.ranges.iter().all(whole)
    }

    /// Whether both files have the same bytes in these ranges. Bytes that cannot be read count as
    /// different.
    fn is_equal_at(&self, a: Range<u64>, b: Range<u64>) -> bool {
        let [first, second] = &self.files;
        let is_same = first.with_range(a, |a| second.with_range(b, |b| a == b));
        matches!(is_same, Ok(Ok(true)))
    }
}

/// Starts the comparing thread; `None` if the system allows no further thread.
fn start() -> Option<Thread> {
    let (jobs, taken) = channel::<Comparison>();
    let (found, results) = channel();
    let work = move || {
        for comparison in taken {
            let is_equal = comparison.is_equal();
            if found.send((comparison, is_equal)).is_err() {
                return;
            }
        }
    };
    let thread = std::thread::Builder::new().name("equal".to_owned());
    match thread.spawn(work) {
        Ok(_) => Some(Thread {
            jobs,
            found: results,
        }),
        Err(error) => {
            tracing::warn!(%error, "weights that are equal in several models are not searched for: the thread cannot be started");
            None
        }
    }
}

fn ordered(a: SegmentId, b: SegmentId) -> Pair {
    (a.min(b), a.max(b))
}

/// Whether comparing two segments is useful and harmless: they have separate slabs, their files are
/// not larger than the memory, and the files will not hang.
fn is_worthwhile(store: &Store, (a, b): Pair) -> bool {
    let is_near = |id: SegmentId| {
        let source = store.sources.get(&id.model);
        source.is_some_and(|source| !source.file.is_direct() && !source.file.is_far())
    };
    let holds = |id| store.cache.holds(id) && store.cache.holder(id) == id;
    a.model != b.model && holds(a) && holds(b) && is_near(a) && is_near(b)
}

fn layout(store: &Store, segment: SegmentId) -> Option<&SegmentLayout> {
    let source = store.sources.get(&segment.model)?;
    source.layouts.get(segment.index as usize).map(|l| &**l)
}

/// Whether the tensors of two segments differ at most in name and place in their files.
fn are_alike(a: &SegmentLayout, b: &SegmentLayout) -> bool {
    let shape = |t: &PlacedTensor| {
        let desc = &t.desc;
        let of_file = (desc.ty, desc.rows, desc.cols, desc.bytes, desc.role);
        (of_file, t.at, t.device_bytes)
    };
    let pairs = a.tensors.iter().zip(&b.tensors);
    a.bytes == b.bytes
        && a.tensors.len() == b.tensors.len()
        && pairs.into_iter().all(|(a, b)| shape(a) == shape(b))
}
