//! One pass of a model over a chunk of one sequence: segment by segment, each acquired, run and released.
//!
//! Nothing of a segment outlives its step, so a model that is larger than the budget runs like any other. Between two
//! segments the request is looked at: one that nobody waits for ends within a segment's time.

use rocmforge_device::{Batch, Op, Scratch, ScratchLayout, Span};
use rocmforge_kernels::host::WeightType;
use rocmforge_kernels::host::ops::{KvLayout, RopeAngles};
use rocmforge_model::bufs;
use rocmforge_tensor_cache::{ModelId, PassHint, SegmentId, Slab};

use crate::api::RequestCacheUse;
use crate::error::{Error, from_cache};
use crate::lookahead::Ahead;
use crate::residency::Residency;

/// What is told of a wanted row.
type OnFound<'a> = &'a mut dyn FnMut(usize, Found<'_>) -> Result<(), Error>;

/// Whose logits a pass computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// Nobody's: a chunk of a prompt that goes on. The output head is not touched.
    None,
    /// The last row's.
    Last,
    /// Every row's.
    All,
}

/// What a pass works on.
#[derive(Clone, Copy)]
pub(crate) struct Pass<'a> {
    pub(crate) model: ModelId,
    pub(crate) segments: &'a [rocmforge_model::Segment],
    pub(crate) kv: &'a KvLayout,
    pub(crate) angles: &'a RopeAngles,
    pub(crate) kv_pages: &'a [u64],
    /// Position of the first row.
    pub(crate) first_position: u32,
    pub(crate) n_tokens: usize,
    pub(crate) wanted: Wanted,
    /// Another pass of this model is expected right after.
    pub(crate) more: bool,
    pub(crate) scratch: &'a ScratchLayout,
    /// Arena offset of the scratch block.
    pub(crate) scratch_at: u64,
    /// Uploads under way ahead of their turn, at most.
    pub(crate) prefetch: u32,
    /// How much of a wanted row is of interest.
    pub(crate) interest: Interest,
    /// Type of the embedding's rows.
    pub(crate) embedding: WeightType,
}

/// How much of a wanted row is of interest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Interest {
    /// Its best token.
    Best,
    /// So many of its best tokens.
    Top(usize),
    /// All of its logits.
    Logits,
}

/// What a pass found for one wanted row: what was of interest, or, where the device leaves that to the engine, all.
pub(crate) enum Found<'a> {
    /// Its logits, `[n_vocab]`.
    Logits(&'a mut [f32]),
    /// Its best token, the lowest id among equals; `None` if the logits are not finite.
    Best(Option<u32>),
    /// Its best tokens with their logits, sorted by falling logit, the lowest id first among equals; `None` if they are
    /// not finite.
    Top(Option<&'a [(u32, f32)]>),
}

/// Runs a pass. `embeddings` has `n_tokens` rows of `embedding`'s type; `found` is called with each wanted row and what was found
/// for it; `ended` tells between segments whether to give up.
pub(crate) fn run(
    residency: &mut Residency,
    pass: &Pass<'_>,
    embeddings: &[u8],
    counts: &mut RequestCacheUse,
    ended: &dyn Fn() -> Option<Error>,
    found: OnFound<'_>,
) -> Result<(), Error> {
    residency
        .cache
        .pass_begin(pass.model, PassHint { more: pass.more })
        .map_err(from_cache)?;
    let result = steps(residency, pass, embeddings, counts, ended, found);
    residency.cache.pass_end(pass.model);
    result
}

fn steps(
    residency: &mut Residency,
    pass: &Pass<'_>,
    embeddings: &[u8],
    counts: &mut RequestCacheUse,
    ended: &dyn Fn() -> Option<Error>,
    found: OnFound<'_>,
) -> Result<(), Error> {
    residency
        .device
        .write_rows(scratch(pass), bufs::X, pass.embedding, embeddings)
        .map_err(|e| residency.device_error(Some(pass.model), e))?;
    let mut slabs = Vec::new();
    if pass.n_tokens == 1
        && pass.wanted == Wanted::Last
        && residency.acquire_resident(pass.model, pass.segments.len() as u32, counts, &mut slabs)?
    {
        let ran = all_resident(residency, pass, &slabs, found);
        for index in 0..pass.segments.len() as u32 {
            residency.release(SegmentId {
                model: pass.model,
                index,
            });
        }
        return ran;
    }
    let ahead = residency.lookahead(pass.model, pass.n_tokens, pass.prefetch);
    let (head, layers) = pass
        .segments
        .split_last()
        .expect("a plan has an output segment");
    for (index, segment) in (0..).zip(layers) {
        with_segment(
            residency,
            (pass, ahead),
            index,
            counts,
            ended,
            |residency, id, slab| run_ops(residency, pass, id, slab, &segment.ops, &[]),
        )?;
    }
    if pass.wanted == Wanted::None {
        return Ok(());
    }
    let first = if pass.wanted == Wanted::All {
        0
    } else {
        pass.n_tokens - 1
    };
    let rows: Vec<u32> = (first as u32..pass.n_tokens as u32).collect();
    with_segment(
        residency,
        (pass, ahead),
        layers.len() as u32,
        counts,
        ended,
        |residency, id, slab| {
            let mut buffer = Vec::new();
            for chunk in rows.chunks(pass.scratch.outputs as usize) {
                run_ops(residency, pass, id, slab, &head.ops, chunk)?;
                tell(residency, pass, chunk, &mut buffer, found)?;
                if let Some(error) = ended() {
                    return Err(error);
                }
            }
            Ok(())
        },
    )
}

/// One token through a model of which everything is resident: the device gets the whole pass at once.
fn all_resident(
    residency: &mut Residency,
    pass: &Pass<'_>,
    slabs: &[Slab],
    found: OnFound<'_>,
) -> Result<(), Error> {
    let outputs = [0];
    let spans = spans(pass);
    let (device, bound) = residency.device_and_all(pass.model, slabs);
    let steps: Vec<(&[Op], _)> = pass
        .segments
        .iter()
        .zip(bound)
        .map(|(segment, bound)| (segment.ops.as_slice(), bound))
        .collect();
    let ran = device.run_all(&steps, scratch(pass), &batch(pass, &spans, &outputs));
    ran.map_err(|e| residency.device_error(Some(pass.model), e))?;
    tell(residency, pass, &outputs, &mut Vec::new(), found)
}

/// Reads what the head left for `rows` and tells it.
fn tell(
    residency: &mut Residency,
    pass: &Pass<'_>,
    rows: &[u32],
    buffer: &mut Vec<f32>,
    found: OnFound<'_>,
) -> Result<(), Error> {
    let device = &mut residency.device;
    match pass.interest {
        Interest::Best => {
            let best = device.argmax(scratch(pass), bufs::LOGITS, rows.len());
            if let Some(best) = best.map_err(|e| residency.device_error(Some(pass.model), e))? {
                let mut found_rows = rows.iter().zip(best);
                return found_rows
                    .try_for_each(|(&row, best)| found(row as usize, Found::Best(best)));
            }
        }
        Interest::Top(k) => {
            let top = device.top_k(scratch(pass), bufs::LOGITS, rows.len(), k);
            if let Some(top) = top.map_err(|e| residency.device_error(Some(pass.model), e))? {
                let mut found_rows = rows.iter().zip(top);
                return found_rows
                    .try_for_each(|(&row, top)| found(row as usize, Found::Top(top.as_deref())));
            }
        }
        Interest::Logits => {}
    }
    let n_vocab = pass.scratch.bufs[bufs::LOGITS.0 as usize].width as usize;
    buffer.resize(n_vocab * rows.len(), 0.0);
    let read = residency.device.read(scratch(pass), bufs::LOGITS, buffer);
    read.map_err(|e| residency.device_error(Some(pass.model), e))?;
    rows.iter()
        .zip(buffer.chunks_exact_mut(n_vocab))
        .try_for_each(|(&row, logits)| found(row as usize, Found::Logits(logits)))
}

/// Acquires a segment, starts uploads ahead, runs `step`, and releases it whatever came of it.
fn with_segment(
    residency: &mut Residency,
    (pass, ahead): (&Pass<'_>, Ahead),
    index: u32,
    counts: &mut RequestCacheUse,
    ended: &dyn Fn() -> Option<Error>,
    step: impl FnOnce(&mut Residency, SegmentId, Slab) -> Result<(), Error>,
) -> Result<(), Error> {
    if let Some(error) = ended() {
        return Err(error);
    }
    let id = SegmentId {
        model: pass.model,
        index,
    };
    let misses = counts.misses;
    let slab = residency.acquire(id, counts)?;
    let end = pass.segments.len() as u32 - u32::from(pass.wanted == Wanted::None);
    let result = residency
        .prefetch(pass.model, index + 1, end, ahead.uploads)
        .and_then(|()| step(residency, id, slab));
    residency.release(id);
    if ahead.hands_on && counts.misses > misses {
        return result.and_then(|()| residency.hand_on(id));
    }
    result
}

fn run_ops(
    residency: &mut Residency,
    pass: &Pass<'_>,
    id: SegmentId,
    slab: Slab,
    ops: &[Op],
    outputs: &[u32],
) -> Result<(), Error> {
    let spans = spans(pass);
    let (device, weights) = residency.device_and_bound(id, slab);
    let ran = device.run(ops, weights, scratch(pass), &batch(pass, &spans, outputs));
    ran.map_err(|e| residency.device_error(Some(pass.model), e))
}

fn scratch<'a>(pass: &Pass<'a>) -> Scratch<'a> {
    Scratch {
        layout: pass.scratch,
        base: pass.scratch_at,
    }
}

fn spans<'a>(pass: &Pass<'a>) -> [Span<'a>; 1] {
    [Span {
        first_row: 0,
        n_rows: pass.n_tokens,
        first_position: pass.first_position,
        kv_pages: pass.kv_pages,
    }]
}

fn batch<'a>(pass: &Pass<'a>, spans: &'a [Span<'a>], outputs: &'a [u32]) -> Batch<'a> {
    Batch {
        n_tokens: pass.n_tokens,
        spans,
        kv: pass.kv,
        rope: pass.angles,
        outputs,
    }
}
