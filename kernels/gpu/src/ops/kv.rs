//! Where rows' keys and values are, how heads are rotated, and the launches that rotate and append
//! (`hip/kv.h`, `hip/rope_kv.hip`, `hip/rope_heads.hip`).

use crate::error::count;
use crate::launch::{ArgBytes, arg_struct};
use crate::{Address, Error, GpuTarget, Launch};
use rocmforge_ops::{KvLayout, KvType, RopeOrder};

const THREADS: u32 = 128;

arg_struct! {
    /// `KvPlace` of kv.h.
    KvPlace: 56 {
        kv_base: u64,
        table: u64,
        positions: u64,
        sequences: u64,
        table_stride: u32,
        n_head_kv: u32,
        dim_k: u32,
        dim_v: u32,
        layer_offset: u64,
    }
}

arg_struct! {
    /// `RopePlace` of kv.h.
    RopePlace: 56 {
        cos: u64,
        sin: u64,
        q_norm: u64,
        k_norm: u64,
        eps: f32,
        n_rot: u32,
        neox: u32,
        by_position: u32,
        first: u32,
        reserved: u32,
    }
}

arg_struct! {
    /// Arguments of `rope_kv`.
    RopeKvArgs: 152 {
        q: u64,
        k: u64,
        v: u64,
        q_out: u64,
        kv: KvPlace,
        rope: RopePlace,
        n_head: u32,
        q_half: u32,
    }
}

arg_struct! {
    /// Arguments of `rope_heads`.
    RopeHeadsArgs: 80 {
        x: u64,
        positions: u64,
        rope: RopePlace,
        n_head: u32,
        dim: u32,
    }
}

/// Maximum number of elements of a head.
pub const HEAD_DIM_MAX: u32 = 576;

/// One layer's keys and values of a batch. All addresses are read by the kernels, so their contents
/// may change between replays of a graph.
#[derive(Debug, Clone, Copy)]
pub struct Kv<'a> {
    /// The layout of a page.
    pub layout: &'a KvLayout,
    /// The layer.
    pub layer: usize,
    /// Added to the offsets of the table: the arena's address, or 0 if the table has addresses.
    pub base: Address,
    /// u64 `[sequences][table_stride]`: each sequence's pages in order.
    pub table: Address,
    /// Entries a sequence.
    pub table_stride: u32,
    /// u32 `[rows]`: position of each row's token.
    pub positions: Address,
    /// u32 `[rows]`: the row's sequence in the table; `None`: row i is of sequence i.
    pub sequences: Option<Address>,
}

impl Kv<'_> {
    pub(super) fn place(&self) -> Result<KvPlace, Error> {
        let size = |what, n: usize| count(what, n as u64);
        Ok(KvPlace {
            kv_base: self.base,
            table: self.table,
            positions: self.positions,
            sequences: self.sequences.unwrap_or(0),
            table_stride: self.table_stride,
            n_head_kv: size("the number of key/value heads", self.layout.n_head_kv)?,
            dim_k: size("the size of a key", self.layout.head_dim_k)?,
            dim_v: size("the size of a value", self.layout.head_dim_v)?,
            layer_offset: self.layout.layer_offset_bytes(self.layer) as u64,
        })
    }
}

/// A table of rotations, and which elements of a head it turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rotation {
    /// f32 `[entries][n_rot]`, as `RopeAngles` of the CPU's kernels has them: what an
    /// element itself is multiplied by.
    pub cos: Address,
    /// f32, shaped as `cos`: what an element's partner is multiplied by, the sign folded in.
    pub sin: Address,
    /// The element of a head at which the rotated ones begin.
    pub first: u32,
    /// Elements of a head that are rotated.
    pub n_rot: u32,
    /// Which elements are partners.
    pub order: RopeOrder,
    /// Whether the entry of a row is its position; else it is the row's number.
    pub by_position: bool,
}

/// How queries and keys are normed and rotated.
#[derive(Debug, Clone, Copy)]
pub struct Rope {
    /// The rotation; `None` for none.
    pub rotation: Option<Rotation>,
    /// Weight `[head_dim_k]` of an RMSNorm over each query head.
    pub q_norm: Option<Address>,
    /// Weight `[head_dim_k]` of an RMSNorm over each key head.
    pub k_norm: Option<Address>,
    /// Added to the mean of squares.
    pub eps: f32,
}

impl Rope {
    pub(super) fn place(&self) -> RopePlace {
        let normed = RopePlace {
            q_norm: self.q_norm.unwrap_or(0),
            k_norm: self.k_norm.unwrap_or(0),
            eps: self.eps,
            ..RopePlace::default()
        };
        self.rotation.map_or(normed, |r| RopePlace {
            cos: r.cos,
            sin: r.sin,
            n_rot: r.n_rot,
            neox: u32::from(r.order == RopeOrder::Neox),
            by_position: u32::from(r.by_position),
            first: r.first,
            ..normed
        })
    }
}

/// Queries, keys and values as the products left them, f32.
#[derive(Debug, Clone, Copy)]
pub struct Qkv {
    /// `[rows][n_head][head_dim_k]`.
    pub q: Address,
    /// `[rows][n_head_kv][head_dim_k]`.
    pub k: Address,
    /// `[rows][n_head_kv][head_dim_v]`.
    pub v: Address,
    /// Query heads.
    pub n_head: u32,
    /// Rows.
    pub rows: u32,
}

/// A fault unless the rotation stays within heads of `dim` elements, of which there are kernels.
fn check_heads(dim: u32, rotation: Option<Rotation>) -> Result<(), Error> {
    let turned = rotation.map_or(0, |r| u64::from(r.first) + u64::from(r.n_rot));
    let even = rotation.is_none_or(|r| r.n_rot.is_multiple_of(2));
    if (1..=HEAD_DIM_MAX).contains(&dim) && turned <= u64::from(dim) && even {
        return Ok(());
    }
    Err(Error::NoKernel {
        what: format!("rotary embedding of heads of {dim} up to element {turned}"),
        built: "heads of up to 576, pairs of elements within the head",
    })
}

/// Checks that heads of these sizes can be stored in the KV type of the layout.
pub(super) fn check_type(layout: &KvLayout) -> Result<(), Error> {
    if layout.fits(layout.ty) {
        return Ok(());
    }
    Err(Error::NoKernel {
        what: format!(
            "keys of {} and values of {} as {}",
            layout.head_dim_k,
            layout.head_dim_v,
            layout.ty.name()
        ),
        built: "q8_0 for heads of whole blocks of 32, f16 and f32 for all",
    })
}

/// Norms and rotates q into `q_out` (f32, may be q itself), and k and v into the pages.
///
/// # Errors
/// [`Error::NoKernel`] for heads of more than [`HEAD_DIM_MAX`] and such as the type does not
/// fit, [`Error::TooLarge`].
pub fn rope_kv(
    target: &GpuTarget,
    qkv: Qkv,
    q_out: Address,
    kv: &Kv<'_>,
    rope: &Rope,
) -> Result<Launch, Error> {
    let place = kv.place()?;
    check_heads(place.dim_k, rope.rotation)?;
    check_type(kv.layout)?;
    let kernel = match (kv.layout.ty, place.dim_k) {
        (KvType::F16, 64) => "rope_kv_64.rope_kv_64",
        (KvType::F16, 72) => "rope_kv_72.rope_kv_72",
        (KvType::F16, 80) => "rope_kv_80.rope_kv_80",
        (KvType::F16, 96) => "rope_kv_96.rope_kv_96",
        (KvType::F16, 128) => "rope_kv_128.rope_kv_128",
        (KvType::F16, 256) => "rope_kv_256.rope_kv_256",
        (KvType::F16, _) => "rope_kv_any.rope_kv_any",
        (KvType::Q8_0, 64) => "rope_kv_64_q8.rope_kv_64_q8",
        (KvType::Q8_0, 96) => "rope_kv_96_q8.rope_kv_96_q8",
        (KvType::Q8_0, 128) => "rope_kv_128_q8.rope_kv_128_q8",
        (KvType::Q8_0, 256) => "rope_kv_256_q8.rope_kv_256_q8",
        (KvType::Q8_0, _) => "rope_kv_any_q8.rope_kv_any_q8",
        (KvType::F32, _) => "rope_kv_any_f32.rope_kv_any_f32",
    };
    let heads = qkv.n_head + 2 * place.n_head_kv;
    let args = RopeKvArgs {
        q: qkv.q,
        k: qkv.k,
        v: qkv.v,
        q_out,
        kv: place,
        rope: rope.place(),
        n_head: qkv.n_head,
        q_half: 0,
    };
    Ok(Launch {
        kernel,
        grid: [heads.div_ceil(THREADS / target.wave), qkv.rows, 1],
        block: [THREADS, 1, 1],
        shared_bytes: 0,
        args: ArgBytes::of(&args),
        overlaps: true,
    })
}

/// Heads of one buffer `[rows][n_head][dim]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// f32, changed in place.
    pub x: Address,
    /// Heads.
    pub n_head: u32,
    /// Elements of a head.
    pub dim: u32,
    /// Rows.
    pub rows: u32,
}

/// Norms (weight `[dim]` and eps) and rotates the heads of one buffer in place. `positions` is u32
/// `[rows]`, of use where the rotation goes by position.
///
/// # Errors
/// [`Error::NoKernel`] for heads of more than [`HEAD_DIM_MAX`].
pub fn rope_heads(
    target: &GpuTarget,
    heads: Heads,
    positions: Address,
    norm: Option<(Address, f32)>,
    rotation: Option<Rotation>,
) -> Result<Launch, Error> {
    check_heads(heads.dim, rotation)?;
    let rope = Rope {
        rotation,
        q_norm: norm.map(|(weight, _)| weight),
        k_norm: None,
        eps: norm.map_or(0.0, |(_, eps)| eps),
    };
    let args = RopeHeadsArgs {
        x: heads.x,
        positions,
        rope: rope.place(),
        n_head: heads.n_head,
        dim: heads.dim,
    };
    Ok(Launch {
        kernel: "rope_heads.rope_heads",
        grid: [heads.n_head.div_ceil(THREADS / target.wave), heads.rows, 1],
        block: [THREADS, 1, 1],
        shared_bytes: 0,
        args: ArgBytes::of(&args),
        overlaps: true,
    })
}
