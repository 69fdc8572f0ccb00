//! One case on one device: weights uploaded from a file, the context before,
//! the operations, the results.

use std::io::Write;
use std::ops::Range;
use std::sync::Arc;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rocmforge_device::{
    Batch, BoundExpert, BoundStep, Buf, Device, Op, Role, Rows, Scratch, ScratchLayout,
    SegmentBinding, SegmentLayout, Span, TensorDesc, Upload,
};
use rocmforge_gguf::MappedFile;
use rocmforge_kernels_cpu::ops::{RopeAngles, RopeParams, RopeTable};
use rocmforge_ops::{
    Conflicts, KV_PAGE_TOKENS, KvGroup, KvLayout, MEAN_OF_SPAN, RopeScaling, RowCounts, WeightType,
};

use crate::cases::{APART, Case, Work};
use crate::weights::random_matrix;
use crate::{Error, rows, states};

/// Arena of each device: the device's own block, then the weights, scratch, and KV pages.
pub(crate) const ARENA: u64 = 192 << 20;
pub(crate) const SLAB: u64 = 16 << 20;
pub(crate) const SCRATCH: u64 = 48 << 20;
pub(crate) const KV: u64 = 144 << 20;

/// Maximum number of rows of a chunk of the context before.
const CHUNK: u32 = 64;

/// The case's weights as a file, and where each tensor is.
fn write_file(
    case: &Case,
    rng: &mut StdRng,
) -> Result<(tempfile::NamedTempFile, Vec<TensorDesc>), Error> {
    let failed = |e: std::io::Error| Error::File(e.to_string());
    let mut file = tempfile::NamedTempFile::new().map_err(failed)?;
    let mut at = 0u64;
    let mut descs = Vec::new();
    for (i, t) in case.tensors.iter().enumerate() {
        let size = match t.role {
            Role::Matrix => case.size,
            Role::Vector => 0.02,
        };
        let mut bytes = random_matrix(rng, t.ty, t.rows, t.cols, size);
        if t.negative {
            assert_eq!(t.ty, WeightType::F32, "only the sign of f32 is known");
            let signs = bytes.iter_mut().skip(3).step_by(4);
            signs.for_each(|sign| *sign |= 0x80);
        }
        let padding = at.next_multiple_of(32) - at;
        file.write_all(&vec![0; padding as usize]).map_err(failed)?;
        at += padding;
        file.write_all(&bytes).map_err(failed)?;
        descs.push(TensorDesc {
            name: format!("t{i}"),
            ty: t.ty,
            rows: t.rows,
            cols: t.cols,
            offset: at,
            bytes: bytes.len() as u64,
            role: t.role,
        });
        at += bytes.len() as u64;
    }
    file.flush().map_err(failed)?;
    Ok((file, descs))
}

/// Where the KV pages of `positions` tokens are, from `base` on, which moves behind them: not in
/// the order of their addresses.
fn pages(kv: &KvLayout, positions: usize, base: &mut u64) -> Vec<u64> {
    let n = positions.div_ceil(KV_PAGE_TOKENS) as u64;
    let stride = (kv.page_bytes() as u64).next_multiple_of(256);
    let first = *base;
    *base += n * stride;
    assert!(*base <= ARENA, "{n} pages of {stride} bytes at {first}");
    let swapped = |i| i ^ u64::from(n > 1 && i < n - n % 2);
    (0..n).map(|i| first + swapped(i) * stride).collect()
}

/// Runs a case and reads the buffers that it compares, with their names.
pub(crate) fn run(
    device: &mut dyn Device,
    case: &Case,
    seed: u64,
) -> Result<Vec<(&'static str, Vec<f32>)>, Error> {
    let kind = device.info().kind.name();
    let failed = |source| Error::Device {
        case: format!("{}, {}", case.operation, case.name),
        seed,
        kind,
        source: Box::new(source),
    };
    let mut rng = StdRng::seed_from_u64(seed);
    let counts = RowCounts {
        tokens: case.tokens,
        outputs: 1,
    };
    let mut scratch_layout =
        ScratchLayout::new(&case.bufs, &Conflicts::all(case.bufs.len()), counts);
    scratch_layout.parts = case.parts;
    scratch_layout.float_weights = !case.tensors.iter().any(|t| t.ty.is_quantized());
    let end = SCRATCH + scratch_layout.bytes + device.workspace_bytes(&scratch_layout);
    assert!(end <= KV, "scratch and workspace end at {end}");
    let scratch = Scratch {
        layout: &scratch_layout,
        base: SCRATCH,
    };
    let n = case.tokens as usize;
    match &case.work {
        Work::Ops(ops) => operations(device, case, ops, scratch, &mut rng, &failed)?,
        Work::Experts { route, .. } => {
            let ops = std::slice::from_ref(route);
            operations(device, case, ops, scratch, &mut rng, &failed)?;
        }
        Work::State(op, state, sequences) => {
            let of = (op, *state, &sequences[..]);
            return states::run(device, case, of, scratch, &mut rng, &failed);
        }
        Work::EmbeddingRows(ty) => {
            let shape = (case.tokens, case.bufs[0].width);
            rows::write_embedding(device, *ty, shape, scratch, &mut rng).map_err(failed)?;
        }
        Work::Argmax => {
            let shape = (n, case.bufs[0].width as usize);
            let found = rows::argmax(device, shape, scratch, &mut rng).map_err(failed)?;
            return Ok(vec![("index", found)]);
        }
        Work::TopK(k) => {
            let shape = (n, case.bufs[0].width as usize);
            let found = rows::top_k(device, shape, *k, scratch, &mut rng).map_err(failed)?;
            return Ok(found.into());
        }
    }
    let out = read(device, case, scratch, counts).map_err(failed)?;
    for (_, result) in device.finished_uploads() {
        result.map_err(failed)?;
    }
    Ok(out)
}

/// The rows of the buffers that a case compares, with their names.
pub(crate) fn read(
    device: &mut dyn Device,
    case: &Case,
    scratch: Scratch<'_>,
    counts: RowCounts,
) -> Result<Vec<(&'static str, Vec<f32>)>, rocmforge_device::Error> {
    let of = |&buf: &Buf| {
        let spec = case.bufs[buf.0 as usize];
        let mut values = vec![0.0; (counts.of(spec.rows) * spec.width) as usize];
        device.read(scratch, buf, &mut values)?;
        Ok((spec.name, values))
    };
    case.compared.iter().map(of).collect()
}

/// A case's weights on a device.
pub(crate) struct Weights {
    mapped: Arc<MappedFile>,
    layout: Arc<SegmentLayout>,
    /// Removes the file at last.
    _file: tempfile::NamedTempFile,
}

impl Weights {
    /// Writes them to a file and uploads it.
    pub(crate) fn upload(
        device: &mut dyn Device,
        case: &Case,
        rng: &mut StdRng,
        failed: Failed<'_>,
    ) -> Result<Self, Error> {
        let (file, descs) = write_file(case, rng)?;
        let layout: Arc<SegmentLayout> = Arc::new(device.layout(&descs).map_err(failed)?);
        assert!(layout.bytes <= SCRATCH - SLAB, "{} bytes", layout.bytes);
        let mapped = MappedFile::open(file.path()).map_err(|e| Error::File(e.to_string()))?;
        let mapped = Arc::new(mapped);
        if !descs.is_empty() {
            let upload = Upload {
                file: Arc::clone(&mapped),
                layout: Arc::clone(&layout),
                slab: SLAB,
            };
            let ticket = device.begin_upload(upload).map_err(failed)?;
            device.wait_upload(ticket).map_err(failed)?;
        }
        Ok(Self {
            mapped,
            layout,
            _file: file,
        })
    }

    /// Addresses of the uploaded segments.
    pub(crate) fn bound(&self) -> SegmentBinding<'_> {
        SegmentBinding {
            layout: &self.layout,
            slab: SLAB,
        }
    }

    /// Nothing of the file is needed once the operations have ended, which somebody has waited for.
    pub(crate) fn forget(self, device: &mut dyn Device) {
        device.finished_uploads();
        device.forget_file(&self.mapped);
    }
}

/// Names the case of what a device says.
pub(crate) type Failed<'a> = &'a dyn Fn(rocmforge_device::Error) -> Error;

/// What is read behind some operations: by those that follow, by experts, or to be compared.
fn live_out(case: &Case, later: &[Op]) -> Vec<Buf> {
    let bufs = (0..case.bufs.len()).map(|b| Buf(b as u8));
    let mut by_experts = Vec::new();
    if let Work::Experts { ffn, .. } = &case.work {
        ffn.buffers(&mut |b| by_experts.push(b), &mut |_| {});
    }
    bufs.filter(|b| {
        case.compared.contains(b) || by_experts.contains(b) || later.iter().any(|op| op.reads(*b))
    })
    .collect()
}

pub(crate) fn bind<'a>(
    ops: &'a [Op],
    live_out: &'a [Buf],
    bound: SegmentBinding<'a>,
) -> BoundStep<'a> {
    BoundStep::Run {
        ops,
        live_out,
        weights: Some(bound),
    }
}

#[expect(clippy::too_many_lines, reason = "a table of operations")]
fn operations(
    device: &mut dyn Device,
    case: &Case,
    ops: &[Op],
    scratch: Scratch<'_>,
    rng: &mut StdRng,
    failed: Failed<'_>,
) -> Result<(), Error> {
    let weights = Weights::upload(device, case, rng, failed)?;
    let bound = weights.bound();
    let kv = KvLayout {
        n_layer: 2,
        n_head_kv: case.heads.n_head_kv as usize,
        head_dim_k: case.heads.head_dim as usize,
        head_dim_v: case.heads.head_dim_v as usize,
        ty: case.kv,
    };
    let n = case.tokens as usize;
    let group = KvGroup {
        layout: kv,
        window: None,
        parts: case.parts,
    };
    // Of each sequence: its first position, and its pages.
    let mut end = KV;
    let of_texts = case.texts.iter();
    let sequences: Vec<(u32, Vec<u64>)> = match case.apart {
        _ if !case.texts.is_empty() => of_texts
            .map(|&n| (0, pages(&kv, n as usize, &mut end)))
            .collect(),
        true => (0..n as u32)
            .map(|i| case.first_position + i * APART)
            .map(|first| (first, pages(&kv, first as usize + 1, &mut end)))
            .collect(),
        false => {
            let first = case.first_position;
            vec![(first, pages(&kv, first as usize + n, &mut end))]
        }
    };
    let table = RopeTable::new(&RopeParams {
        n_rot: case.n_rot as usize,
        freq_base: 10_000.0,
        scaling: RopeScaling::None,
        freq_factors: None,
        magnitude: 1.0,
    });
    let table = table.map_err(|e| Error::Case(e.to_string()))?;
    let mut angles = RopeAngles::new(case.order);
    // Rows of a pass: a sequence, and which of its positions.
    type PassRows = [(usize, Range<u32>)];
    let mut step = |device: &mut dyn Device,
                    rows: &PassRows,
                    rng: &mut StdRng,
                    ops: &[Op],
                    times: u32|
     -> Result<(), Error> {
        let positions = rows.iter().flat_map(|(_, positions)| positions.clone());
        let n = positions.clone().count();
        angles.set(&table, positions);
        let kv_pages: Vec<[&[u64]; 1]> = rows.iter().map(|(s, _)| [&*sequences[*s].1]).collect();
        let mut first_row = 0;
        let spans: Vec<Span<'_>> = rows
            .iter()
            .zip(&kv_pages)
            .enumerate()
            .map(|(i, ((_, positions), kv_pages))| {
                let n_rows = positions.len();
                first_row += n_rows;
                Span {
                    first_row: first_row - n_rows,
                    n_rows,
                    first_position: positions.start,
                    kv_pages,
                    state: 0,
                    state_out: 0,
                    whole: case.images && i % 2 == 1,
                    draft: case.drafts && n_rows == 1 && first_row > 1,
                }
            })
            .collect();
        let mean = if case.mean { MEAN_OF_SPAN } else { 0 };
        let outputs = [(n as u32 - 1) | mean];
        let whole = Span {
            n_rows: n,
            kv_pages: &[],
            ..spans[0]
        };
        let (spans, parts) = match case.parts {
            true => (std::slice::from_ref(&whole), &spans[..]),
            false => (&spans[..], &[][..]),
        };
        let batch = Batch {
            n_tokens: n,
            spans,
            parts,
            kv: &[group],
            rope: std::slice::from_ref(&angles),
            outputs: &outputs,
        };
        let again: u64 = rng.random();
        let stamp: u64 = rng.random();
        for time in 0..times {
            // Nothing of what a recording was made with may be left in it.
            let seed = again.wrapping_add(time as u64);
            fill(device, case, scratch, n, seed).map_err(failed)?;
            let (first, rest) = ops.split_at(case.cut.unwrap_or(0).min(ops.len()));
            let (none, of_first) = (live_out(case, &[]), live_out(case, rest));
            let runs = [(first, &of_first), (rest, &none)];
            let runs = runs.into_iter().filter(|(ops, _)| !ops.is_empty());
            let mut steps: Vec<_> = runs
                .map(|(ops, live_out)| bind(ops, live_out, bound))
                .collect();
            steps.extend(experts(case, bound));
            let ran = match times > 1 {
                true => device.run_all(stamp, &steps, scratch, &batch),
                false => device.run_each(&steps, scratch, &batch),
            };
            ran.map_err(failed)?;
        }
        Ok(())
    };
    // The context before the rows that are compared: its keys and values are
    // appended first, in chunks.
    let append: Vec<Op> = ops
        .iter()
        .filter(|op| matches!(op, Op::RopeKv { .. }))
        .cloned()
        .collect();
    for (i, (end, _)) in sequences.iter().enumerate() {
        let mut first = 0;
        while first < *end && !append.is_empty() {
            let chunk = (end - first).min(CHUNK).min(case.tokens as u32);
            step(device, &[(i, first..first + chunk)], rng, &append, 1)?;
            first += chunk;
        }
    }
    let first = case.first_position;
    let rows: Vec<(usize, Range<u32>)> = match (case.apart, case.drafts) {
        _ if !case.texts.is_empty() => case.texts.iter().map(|n| 0..*n).enumerate().collect(),
        (true, _) => (0..n)
            .map(|i| (i, sequences[i].0..sequences[i].0 + 1))
            .collect(),
        (false, true) => (first..first + n as u32).map(|p| (0, p..p + 1)).collect(),
        (false, false) => vec![(0, first..first + n as u32)],
    };
    let times = if case.recorded { 3 } else { 1 };
    step(device, &rows, rng, ops, times)?;
    wait(device, case, scratch).map_err(failed)?;
    weights.forget(device);
    Ok(())
}

/// Waits for the operations before.
pub(crate) fn wait(
    device: &mut dyn Device,
    case: &Case,
    scratch: Scratch<'_>,
) -> Result<(), rocmforge_device::Error> {
    device.read(scratch, case.compared[0], &mut [0.0])
}

/// The step of a case's experts.
fn experts<'a>(case: &'a Case, bound: SegmentBinding<'a>) -> Option<BoundStep<'a>> {
    let Work::Experts {
        ffn,
        first_tensor,
        n_expert,
        ..
    } = &case.work
    else {
        return None;
    };
    let experts = (0..*n_expert).map(|expert| BoundExpert {
        expert,
        weights: bound,
        first_tensor: first_tensor + (expert * ffn.n_tensors) as usize,
    });
    Some(BoundStep::Experts {
        ffn,
        experts: experts.collect(),
    })
}

/// Random rows in every buffer of tokens or routed rows, the same for a seed.
pub(crate) fn fill(
    device: &mut dyn Device,
    case: &Case,
    scratch: Scratch<'_>,
    n: usize,
    seed: u64,
) -> Result<(), rocmforge_device::Error> {
    let mut rng = StdRng::seed_from_u64(seed);
    for (i, spec) in case.bufs.iter().enumerate() {
        let counts = RowCounts {
            tokens: n as u64,
            outputs: 0,
        };
        if let Some(scales) = case.scales.filter(|s| usize::from(s.buf.0) == i) {
            let rows = scale_rows(&mut rng, (n, spec.width as usize), scales.size);
            device.write(scratch, scales.buf, &rows)?;
        } else if spec.rows != Rows::Outputs {
            let rows: Vec<f32> = (0..counts.of(spec.rows) * spec.width)
                .map(|_| {
                    let outlier = case.outliers && rng.random_range(0..200) == 0;
                    rng.random_range(-1.0f32..1.0) * if outlier { 20.0 } else { 1.0 }
                })
                .collect();
            device.write(scratch, Buf(i as u8), &rows)?;
        }
    }
    Ok(())
}

/// Maximum number of ranks of an adapter, and of one of many ranks.
const RANK_MAX: usize = 24;
const RANKS_MANY: usize = 200;

/// Rows of scales of up to three adapters each, and none for every fourth row.
fn scale_rows(rng: &mut StdRng, (n, width): (usize, usize), size: f32) -> Vec<f32> {
    let mut rows = vec![0.0; n * width];
    for (i, row) in rows.chunks_exact_mut(width).enumerate() {
        if i % 4 == 3 {
            continue;
        }
        for adapter in 0..rng.random_range(1..4) {
            let first = rng.random_range(0..width);
            let most = match adapter {
                0 if width > 2 * RANKS_MANY => RANKS_MANY,
                _ => RANK_MAX,
            };
            let end = width.min(first + rng.random_range(1..=most));
            row[first..end].fill(rng.random_range(-1.0f32..1.0) * size);
        }
    }
    rows
}
