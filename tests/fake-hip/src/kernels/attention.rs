//! Attention (`attention_decode.hip`, `attention_prefill.hip`): the host device's, over
//! pages read from the table.

use std::num::NonZeroUsize;
use std::sync::OnceLock;

use rocmforge_kernels_cpu::Pool;
use rocmforge_kernels_cpu::ops::{self, AttentionShape, AttentionSpan, Simd};
use rocmforge_kernels_gpu::ops::attention::{AttentionDecodeArgs, AttentionPrefillArgs};
use rocmforge_kernels_gpu::ops::kv::KvPlace;
use rocmforge_ops::KvType;

use super::heads::{PAGE, append, layout, page_of, pages, rotated, row_of};
use super::rows::SEQUENCE_PLACE_BYTES;
use super::{Launch, agrees, args, covers, floats, store, words};
use crate::memory::{Fault, Memory};

/// Which of the forms of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Form {
    /// Of the pages.
    pub(super) ty: KvType,
    /// Whether scores fall with distance: what they fall by is where others have the soft cap.
    pub(super) alibi: bool,
}

impl Form {
    /// The soft cap and the bias of ALiBi, of what the arguments have for either.
    fn cap_and_bias(self, either: f32) -> (f32, f32) {
        match self.alibi {
            true => (0.0, either),
            false => (either, 0.0),
        }
    }
}

/// Positions of a step of decode; a context is split at multiples of it. Wide heads, and any where
/// the kernel takes any, take half as many, and f32 a quarter.
fn step(kv: &KvPlace, Form { ty, alibi }: Form) -> u32 {
    let narrow = matches!(
        (kv.dim_k, kv.dim_v),
        (64, 64) | (80, 80) | (96, 96) | (128, 128)
    );
    let narrow = narrow && !alibi;
    match ty {
        KvType::F32 => 16,
        KvType::F16 | KvType::Q8_0 if narrow => 64,
        KvType::F16 | KvType::Q8_0 => 32,
    }
}

/// How scores are made and masked.
#[derive(Clone, Copy)]
struct Scores {
    n_head: u32,
    scale: f32,
    /// Soft cap, and bias of ALiBi.
    softcap: f32,
    alibi: f32,
    window: u32,
    sinks: u64,
    ahead: u32,
    places: u64,
}

impl Scores {
    /// The first position that the row at a position attends to.
    fn start(&self, position: u32) -> u32 {
        match self.window {
            0 => 0,
            window => (position + 1).saturating_sub(window),
        }
    }
}

impl Scores {
    /// How far rows of a sequence attend beyond their own positions, and where what they attend to
    /// ends; rows up to `end` are looked at.
    fn reach(&self, memory: &mut Memory, sequence: u32, end: u32) -> Result<(u32, u32), Fault> {
        if self.ahead == 0 {
            return Ok((0, end));
        }
        let at = self.places + u64::from(sequence) * SEQUENCE_PLACE_BYTES;
        match words(memory, at, 9, "the place of a sequence")?[8] {
            0 => Ok((0, end)),
            last => {
                covers("a sequence", u64::from(last) + 1, u64::from(end))?;
                Ok((self.ahead, last + 1))
            }
        }
    }
}

/// The caller alone.
fn pool() -> Result<&'static Pool, Fault> {
    static POOL: OnceLock<Option<Pool>> = OnceLock::new();
    let made = POOL.get_or_init(|| Pool::new(NonZeroUsize::MIN).ok());
    made.as_ref().ok_or_else(|| Fault("no pool".to_owned()))
}

/// What rows at positions from `first` on, queries `[n_rows][n_head][dim]`, attend to.
fn attend(
    memory: &mut Memory,
    (kv, ty): (&KvPlace, KvType),
    sequence: u32,
    first: u32,
    q: &[f32],
    scores: &Scores,
) -> Result<Vec<f32>, Fault> {
    let n_head = scores.n_head;
    let sinks = match scores.sinks {
        0 => None,
        at => Some(floats(memory, at, n_head as usize, "sinks")?),
    };
    let n_rows = q.len() / (n_head as usize * kv.dim_k as usize);
    let (ahead, end) = scores.reach(memory, sequence, first + n_rows as u32)?;
    let shape = AttentionShape {
        kv: layout(kv, ty)?,
        n_head: n_head as usize,
        scale: scores.scale,
        ahead: ahead as usize,
        window: NonZeroUsize::new(scores.window as usize),
        softcap: scores.softcap,
        sinks: sinks.as_deref(),
        alibi: scores.alibi,
    };
    if shape.kv.n_head_kv == 0 || !shape.n_head.is_multiple_of(shape.kv.n_head_kv) {
        return Err(Fault(format!(
            "{n_head} query heads over {} key/value heads",
            shape.kv.n_head_kv
        )));
    }
    let later = (end - first) as usize - n_rows;
    // What lies behind the window of the first row may have been given back.
    let read = pages(
        memory,
        kv,
        ty,
        sequence,
        (
            scores.start(first),
            u64::from(first) + (n_rows + later) as u64,
        ),
    )?;
    let read: Vec<&[u8]> = read.iter().map(Vec::as_slice).collect();
    let spans = [AttentionSpan {
        n_rows,
        pos0: first as usize,
        pages: &read,
        later,
        whole: false,
    }];
    let mut out = vec![0.0; n_rows * shape.n_head * shape.kv.head_dim_v];
    ops::attention(pool()?, Simd::detect(), &shape, &spans, q, &mut out);
    Ok(out)
}

/// Rows that append run side by side, so none may read a page that another one writes.
fn append_apart(
    memory: &mut Memory,
    kv: &KvPlace,
    rows: u32,
    start: impl Fn(u32) -> u32,
) -> Result<(), Fault> {
    let mut written = Vec::with_capacity(rows as usize);
    for row in 0..rows {
        let (position, sequence) = row_of(memory, kv, row)?;
        written.push(page_of(memory, kv, sequence, u64::from(position) / PAGE)?);
    }
    for row in 0..rows {
        let (position, sequence) = row_of(memory, kv, row)?;
        for page in u64::from(start(position)) / PAGE..=u64::from(position) / PAGE {
            let read = page_of(memory, kv, sequence, page)?;
            let by = |(other, to): (u32, &u64)| other != row && *to == read;
            if let Some((other, _)) = (0..).zip(&written).find(|w| by(*w)) {
                let what = format!("row {row} reads a page to which row {other} appends");
                return Err(Fault(what));
            }
        }
    }
    Ok(())
}

/// A row a sequence, split over the context; with `append` the row is rotated and
/// written to its page before.
pub(super) fn decode(
    memory: &mut Memory,
    launch: &Launch,
    dims: Option<(u32, u32)>,
    most: u32,
    form: Form,
) -> Result<(), Fault> {
    let ty = form.ty;
    let a = args(launch, AttentionDecodeArgs::from_bytes)?;
    match dims {
        Some((dim_k, dim_v)) => {
            agrees("the size of a key and of the kernel", a.kv.dim_k, dim_k)?;
            agrees("the size of a value and of the kernel", a.kv.dim_v, dim_v)?;
        }
        None if a.kv.dim_k.is_multiple_of(8) && a.kv.dim_v.is_multiple_of(8) => {
            covers("a head", 576, u64::from(a.kv.dim_k.max(a.kv.dim_v)))?;
        }
        None => return Err(Fault("heads of no multiple of 8".to_owned())),
    }
    agrees(
        "blocks of the grid and of the heads",
        launch.grid[0] * a.heads,
        a.n_head,
    )?;
    agrees(
        "parts of the grid and by the arguments",
        launch.grid[1],
        a.n_split,
    )?;
    let of_head = a.n_head / a.kv.n_head_kv.max(1);
    covers("the kernel's heads", u64::from(most), u64::from(a.heads))?;
    if a.heads == 0 || !of_head.is_multiple_of(a.heads) {
        return Err(Fault(format!("blocks of {} of {of_head} heads", a.heads)));
    }
    let dim = a.kv.dim_k;
    let width = u64::from(a.n_head) * u64::from(dim);
    let width_out = u64::from(a.n_head) * u64::from(a.kv.dim_v);
    let (softcap, alibi) = form.cap_and_bias(a.softcap);
    let scores = Scores {
        n_head: a.n_head,
        scale: a.scale,
        softcap,
        alibi,
        window: a.window,
        sinks: a.sinks,
        ahead: a.ahead,
        places: a.places,
    };
    if a.append != 0 {
        append_apart(memory, &a.kv, launch.grid[2], |p| scores.start(p))?;
    }
    for row in 0..launch.grid[2] {
        let (position, sequence) = row_of(memory, &a.kv, row)?;
        let mut q = floats(
            memory,
            a.q + u64::from(row) * width * 4,
            width as usize,
            "queries",
        )?;
        if a.append != 0 {
            let entry = if a.rope.by_position != 0 {
                position
            } else {
                row
            };
            let mut turned = Vec::with_capacity(q.len());
            for head in q.chunks_exact(dim as usize) {
                let head = rotated(memory, head.to_vec(), a.rope.q_norm, &a.rope, entry)?;
                turned.extend(head);
            }
            q = turned;
            append(memory, (a.k, a.v), &a.kv, ty, &a.rope, row)?;
        }
        let (ahead, end) = scores.reach(memory, sequence, position + 1)?;
        let last = position.saturating_add(ahead).min(end - 1);
        split(memory, &a, form, row, scores.start(position), last)?;
        let out = attend(memory, (&a.kv, ty), sequence, position, &q, &scores)?;
        store(memory, a.out + u64::from(row) * width_out * 4, &out)?;
    }
    Ok(())
}

/// What a split context takes: counters that are zero, and partial results, which nobody
/// else may find anything in.
fn split(
    memory: &mut Memory,
    a: &AttentionDecodeArgs,
    form: Form,
    row: u32,
    start: u32,
    position: u32,
) -> Result<(), Fault> {
    let step = step(&a.kv, form);
    let steps = position / step + 1 - start / step;
    let steps_part = steps.div_ceil(a.n_split.max(1));
    if steps.div_ceil(steps_part) == 1 {
        return Ok(());
    }
    let heads = u64::from(a.n_head / a.heads);
    let at = a.counters + u64::from(row) * heads * 4;
    let counters = words(memory, at, heads as usize, "counters of split attention")?;
    if counters.iter().any(|&c| c != 0) {
        return Err(Fault(format!("counters of row {row} are {counters:?}")));
    }
    let bytes = u64::from(a.n_head) * u64::from(a.n_split) * u64::from(a.kv.dim_v + 2) * 4;
    memory.spoil(a.partials + u64::from(row) * bytes, bytes as usize)
}

/// A tile of rows of one sequence a block column; queries are rotated and the pages complete.
pub(super) fn prefill(
    memory: &mut Memory,
    launch: &Launch,
    dim: u32,
    form: Form,
) -> Result<(), Fault> {
    let ty = form.ty;
    let a = args(launch, AttentionPrefillArgs::from_bytes)?;
    agrees("the size of a key and of the kernel", a.kv.dim_k, dim)?;
    agrees("the size of a value and of the kernel", a.kv.dim_v, dim)?;
    let width = u64::from(a.n_head) * u64::from(dim);
    let (softcap, alibi) = form.cap_and_bias(a.softcap);
    let scores = Scores {
        n_head: a.n_head,
        scale: a.scale,
        softcap,
        alibi,
        window: a.window,
        sinks: a.sinks,
        ahead: a.ahead,
        places: a.places,
    };
    let tiles = words(memory, a.tiles, 2 * launch.grid[1] as usize, "tiles")?;
    for tile in tiles.chunks_exact(2) {
        let (first_row, n_rows) = (tile[0], tile[1]);
        if n_rows == 0 {
            continue;
        }
        let (first, sequence) = row_of(memory, &a.kv, first_row)?;
        let last = row_of(memory, &a.kv, first_row + n_rows - 1)?;
        if last != (first + n_rows - 1, sequence) {
            return Err(Fault(format!(
                "rows {first_row}..+{n_rows} of a tile are not consecutive: {last:?}"
            )));
        }
        let at = u64::from(first_row) * width * 4;
        let n = n_rows as usize * width as usize;
        let q = floats(memory, a.q + at, n, "queries")?;
        let out = attend(memory, (&a.kv, ty), sequence, first, &q, &scores)?;
        store(memory, a.out + at, &out)?;
    }
    Ok(())
}
