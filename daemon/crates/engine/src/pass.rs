//! One pass of a model over a chunk of one sequence: segment by segment, each acquired, run and released.
//!
//! Nothing of a segment outlives its step, so a model that is larger than the budget runs like any other. Between two
//! segments the request is looked at: one that nobody waits for ends within a layer's time.

use rocmforge_device::{Batch, Op, Scratch, ScratchLayout, Span};
use rocmforge_kernels::host::ops::{KvLayout, RopeAngles};
use rocmforge_model::bufs;
use rocmforge_tensor_cache::{ModelId, PassHint, SegmentId};

use crate::api::RequestCacheUse;
use crate::error::{Error, from_cache};
use crate::residency::Residency;

/// Takes each wanted row and its logits, `[n_vocab]`.
pub(crate) type OnLogits<'a> = &'a mut dyn FnMut(usize, &mut [f32]) -> Result<(), Error>;

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
    /// Segments whose upload is started ahead of their turn.
    pub(crate) prefetch: u32,
}

/// Runs a pass. `embeddings` is `[n_tokens][n_embd]`; `logits` is called with each wanted row and its logits,
/// `[n_vocab]`; `ended` tells between segments whether to give up.
pub(crate) fn run(
    residency: &mut Residency,
    pass: &Pass<'_>,
    embeddings: &[f32],
    counts: &mut RequestCacheUse,
    ended: &dyn Fn() -> Option<Error>,
    logits: OnLogits<'_>,
) -> Result<(), Error> {
    residency
        .cache
        .pass_begin(pass.model, PassHint { more: pass.more })
        .map_err(from_cache)?;
    let result = steps(residency, pass, embeddings, counts, ended, logits);
    residency.cache.pass_end(pass.model);
    result
}

fn steps(
    residency: &mut Residency,
    pass: &Pass<'_>,
    embeddings: &[f32],
    counts: &mut RequestCacheUse,
    ended: &dyn Fn() -> Option<Error>,
    logits: OnLogits<'_>,
) -> Result<(), Error> {
    let scratch = Scratch {
        layout: pass.scratch,
        base: pass.scratch_at,
    };
    let lost = |residency: &Residency, e| residency.device_error(Some(pass.model), e);
    residency
        .device
        .write(scratch, bufs::X, embeddings)
        .map_err(|e| lost(residency, e))?;
    let (head, layers) = pass
        .segments
        .split_last()
        .expect("a plan has an output segment");
    for (index, segment) in (0..).zip(layers) {
        with_segment(
            residency,
            pass,
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
    let n_vocab = pass.scratch.bufs[bufs::LOGITS.0 as usize].width as usize;
    with_segment(
        residency,
        pass,
        layers.len() as u32,
        counts,
        ended,
        |residency, id, slab| {
            let mut buffer = vec![0.0; n_vocab * rows.len().min(pass.scratch.outputs as usize)];
            for chunk in rows.chunks(pass.scratch.outputs as usize) {
                run_ops(residency, pass, id, slab, &head.ops, chunk)?;
                let out = &mut buffer[..chunk.len() * n_vocab];
                residency
                    .device
                    .read(scratch, bufs::LOGITS, out)
                    .map_err(|e| lost(residency, e))?;
                for (&row, row_logits) in chunk.iter().zip(out.chunks_exact_mut(n_vocab)) {
                    logits(row as usize, row_logits)?;
                }
                if let Some(error) = ended() {
                    return Err(error);
                }
            }
            Ok(())
        },
    )
}

/// Acquires a segment, starts the uploads of those behind it, runs `step`, and releases it whatever came of it.
fn with_segment(
    residency: &mut Residency,
    pass: &Pass<'_>,
    index: u32,
    counts: &mut RequestCacheUse,
    ended: &dyn Fn() -> Option<Error>,
    step: impl FnOnce(&mut Residency, SegmentId, rocmforge_tensor_cache::Slab) -> Result<(), Error>,
) -> Result<(), Error> {
    if let Some(error) = ended() {
        return Err(error);
    }
    let id = SegmentId {
        model: pass.model,
        index,
    };
    let slab = residency.acquire(id, counts)?;
    let last = pass.segments.len() as u32 - u32::from(pass.wanted == Wanted::None);
    let mut result = Ok(());
    for ahead in index + 1..last.min(index + 1 + pass.prefetch) {
        result = result.and_then(|()| {
            residency.prefetch(SegmentId {
                model: pass.model,
                index: ahead,
            })
        });
    }
    let result = result.and_then(|()| step(residency, id, slab));
    residency.release(id);
    result
}

fn run_ops(
    residency: &mut Residency,
    pass: &Pass<'_>,
    id: SegmentId,
    slab: rocmforge_tensor_cache::Slab,
    ops: &[Op],
    outputs: &[u32],
) -> Result<(), Error> {
    let spans = [Span {
        first_row: 0,
        n_rows: pass.n_tokens,
        first_position: pass.first_position,
        kv_pages: pass.kv_pages,
    }];
    let batch = Batch {
        n_tokens: pass.n_tokens,
        spans: &spans,
        kv: pass.kv,
        rope: pass.angles,
        outputs,
    };
    let scratch = Scratch {
        layout: pass.scratch,
        base: pass.scratch_at,
    };
    let (device, weights) = residency.device_and_bound(id, slab);
    let ran = device.run(ops, weights, scratch, &batch);
    ran.map_err(|e| residency.device_error(Some(pass.model), e))
}
