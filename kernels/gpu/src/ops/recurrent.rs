//! Layers with a state of their own: convolution, gated delta rule, Mamba-2 (`hip/conv.hip`,
//! `hip/delta_net.hip`, `hip/ssm.hip`).

use super::activations::ActSpec;
use crate::error::count;
use crate::launch::{ArgBytes, arg_struct};
use crate::{Address, Error, GpuTarget, Launch};
use rocmforge_ops::Act;

const CONV_THREADS: u32 = 256;
const STATE_THREADS: u32 = 128;

/// Rows of a block of [`conv`].
pub const CONV_CHUNK: u32 = 16;

/// Maximum number of inputs that a row of [`conv`] sees.
pub const TAPS_MAX: u32 = 8;

/// Maximum number of elements of a key of [`delta_net`], and of B and C of [`ssm`].
pub const STATE_DIM_MAX: u32 = 256;

arg_struct! {
    /// Where the rows and the state of a sequence are, as it lies in device memory. The places of
    /// its drafts, a row each, lie behind it; of those `n_rows` and `drafts` are 0, and
    /// `state_out` alone is read. `last` is the last position that its rows may attend to beyond
    /// their own, 0 where there is none.
    SequencePlace: 40 {
        first_row: u32,
        n_rows: u32,
        first_position: u32,
        drafts: u32,
        state: u64,
        state_out: u64,
        last: u32,
        reserved: u32,
    }
}

arg_struct! {
    /// Arguments of `conv`.
    ConvArgs: 72 {
        x: u64,
        weight: u64,
        bias: u64,
        out: u64,
        sequences: u64,
        state: u64,
        channels: u32,
        kernel: u32,
        act: ActSpec,
    }
}

arg_struct! {
    /// Arguments of `delta_net_<dim>`.
    DeltaNetArgs: 88 {
        qkv: u64,
        alpha: u64,
        beta: u64,
        a: u64,
        dt_bias: u64,
        out: u64,
        sequences: u64,
        state: u64,
        n_head_k: u32,
        n_head_v: u32,
        dim_k: u32,
        dim_v: u32,
        interleaved: u32,
        eps: f32,
    }
}

arg_struct! {
    /// Arguments of `ssm_<dim>`.
    SsmArgs: 80 {
        xbc: u64,
        dt: u64,
        a: u64,
        skip: u64,
        dt_bias: u64,
        out: u64,
        sequences: u64,
        state: u64,
        n_head: u32,
        dim: u32,
        n_group: u32,
        n_state: u32,
    }
}

impl SequencePlace {
    /// Bytes of the place as kernels read them.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        ArgBytes::of(self).to_bytes()
    }
}

/// The sequences of a batch, and one layer's part of their states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sequences {
    /// [`SequencePlace`]`[n]` in device memory, aligned to 8. Each one's rows are consecutive; no
    /// two write the same state.
    pub places: Address,
    /// How many.
    pub n: u32,
    /// No sequence has more rows, its drafts' included.
    pub rows_max: u32,
    /// Where the layer's state begins in a sequence's, in f32 elements.
    pub state: u64,
}

/// A causal convolution.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Conv {
    /// f32 rows `[channels]`.
    pub x: Address,
    /// f32 `[channels][kernel]`.
    pub weight: Address,
    /// f32 `[channels]`.
    pub bias: Option<Address>,
    /// Channels.
    pub channels: u64,
    /// Inputs that a row sees, its own included.
    pub kernel: u32,
    /// The function of the sum.
    pub act: Act,
    /// f32 rows `[channels]`, not `x`.
    pub out: Address,
}

/// Convolves all rows of the sequences and renews their states.
///
/// # Errors
/// [`Error::NoKernel`] for a kernel of less than 2 or more than [`TAPS_MAX`] inputs, or
/// a function of gates alone.
pub fn conv(conv: &Conv, sequences: Sequences) -> Result<Launch, Error> {
    if !(2..=TAPS_MAX).contains(&conv.kernel) || matches!(conv.act, Act::SwigluClamped { .. }) {
        return Err(Error::NoKernel {
            what: format!(
                "a convolution of {} inputs with {:?}",
                conv.kernel, conv.act
            ),
            built: "2 to 8 inputs and functions of one element",
        });
    }
    let args = ConvArgs {
        x: conv.x,
        weight: conv.weight,
        bias: conv.bias.unwrap_or(0),
        out: conv.out,
        sequences: sequences.places,
        state: sequences.state,
        channels: count("the number of channels", conv.channels)?,
        kernel: conv.kernel,
        act: ActSpec::new(conv.act),
    };
    Ok(Launch {
        kernel: "conv.conv",
        grid: [
            args.channels.div_ceil(CONV_THREADS),
            sequences.rows_max.div_ceil(CONV_CHUNK).max(1),
            sequences.n,
        ],
        block: [CONV_THREADS, 1, 1],
        shared_bytes: 0,
        args: ArgBytes::of(&args),
        overlaps: true,
    })
}

/// A gated delta rule; shapes as [`rocmforge_ops::Op::DeltaNet`] has them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeltaNet {
    /// f32 rows of queries, keys, values.
    pub qkv: Address,
    /// f32 rows `[n_head_v]`.
    pub alpha: Address,
    /// f32 rows `[n_head_v]`.
    pub beta: Address,
    /// f32 `[n_head_v]`.
    pub a: Address,
    /// f32 `[n_head_v]`.
    pub dt_bias: Address,
    /// Heads of queries and keys.
    pub n_head_k: u32,
    /// Heads of values.
    pub n_head_v: u32,
    /// Elements of a query or key.
    pub dim_k: u32,
    /// Elements of a value.
    pub dim_v: u32,
    /// Whether value head `h` has key head `h % n_head_k`.
    pub interleaved: bool,
    /// Added to the sum of squares of queries and keys.
    pub eps: f32,
    /// f32 rows `[n_head_v * dim_v]`.
    pub out: Address,
}

/// All rows of the sequences, one after another, and their states.
///
/// # Errors
/// [`Error::NoKernel`] for keys of more than [`STATE_DIM_MAX`] elements or
/// heads that do not divide.
pub fn delta_net(
    target: &GpuTarget,
    net: &DeltaNet,
    sequences: Sequences,
) -> Result<Launch, Error> {
    let divides = net.n_head_k > 0 && net.n_head_v.is_multiple_of(net.n_head_k);
    let kernel = match net.dim_k {
        1..=128 => "delta_net_128.delta_net_128",
        129..=STATE_DIM_MAX => "delta_net_256.delta_net_256",
        _ => "",
    };
    if kernel.is_empty() || !divides || net.n_head_v == 0 || net.dim_v == 0 {
        return Err(Error::NoKernel {
            what: format!(
                "a delta rule with {} heads of keys of {} and {} of values of {}",
                net.n_head_k, net.dim_k, net.n_head_v, net.dim_v
            ),
            built: "keys of up to 256 elements, a whole number of value heads a key head",
        });
    }
    let args = DeltaNetArgs {
        qkv: net.qkv,
        alpha: net.alpha,
        beta: net.beta,
        a: net.a,
        dt_bias: net.dt_bias,
        out: net.out,
        sequences: sequences.places,
        state: sequences.state,
        n_head_k: net.n_head_k,
        n_head_v: net.n_head_v,
        dim_k: net.dim_k,
        dim_v: net.dim_v,
        interleaved: u32::from(net.interleaved),
        eps: net.eps,
    };
    let columns = 8 * STATE_THREADS / target.wave;
    Ok(Launch {
        kernel,
        grid: [net.n_head_v * net.dim_v.div_ceil(columns), sequences.n, 1],
        block: [STATE_THREADS, 1, 1],
        shared_bytes: 0,
        args: ArgBytes::of(&args),
        overlaps: true,
    })
}

/// Mamba-2; shapes as [`rocmforge_ops::Op::Ssm`] has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ssm {
    /// f32 rows of x, B, C.
    pub xbc: Address,
    /// f32 rows `[n_head]`.
    pub dt: Address,
    /// f32 `[n_head]`.
    pub a: Address,
    /// f32 `[n_head]`.
    pub skip: Address,
    /// f32 `[n_head]`.
    pub dt_bias: Address,
    /// Heads.
    pub n_head: u32,
    /// Elements of a head.
    pub dim: u32,
    /// Groups of heads that share B and C.
    pub n_group: u32,
    /// Elements of B and C.
    pub n_state: u32,
    /// f32 rows `[n_head * dim]`.
    pub out: Address,
}

/// All rows of the sequences, one after another, and their states.
///
/// # Errors
/// [`Error::NoKernel`] for more than [`STATE_DIM_MAX`] elements of B, or groups
/// that do not divide the heads.
pub fn ssm(ssm: &Ssm, sequences: Sequences) -> Result<Launch, Error> {
    let divides = ssm.n_group > 0 && ssm.n_head.is_multiple_of(ssm.n_group);
    let kernel = match ssm.n_state {
        1..=128 => "ssm_128.ssm_128",
        129..=STATE_DIM_MAX => "ssm_256.ssm_256",
        _ => "",
    };
    if kernel.is_empty() || !divides || ssm.n_head == 0 || ssm.dim == 0 {
        return Err(Error::NoKernel {
            what: format!(
                "a state space of {} heads of {} in {} groups with {} elements each",
                ssm.n_head, ssm.dim, ssm.n_group, ssm.n_state
            ),
            built: "states of up to 256 elements, a whole number of heads a group",
        });
    }
    let args = SsmArgs {
        xbc: ssm.xbc,
        dt: ssm.dt,
        a: ssm.a,
        skip: ssm.skip,
        dt_bias: ssm.dt_bias,
        out: ssm.out,
        sequences: sequences.places,
        state: sequences.state,
        n_head: ssm.n_head,
        dim: ssm.dim,
        n_group: ssm.n_group,
        n_state: ssm.n_state,
    };
    Ok(Launch {
        kernel,
        grid: [
            ssm.n_head * ssm.dim.div_ceil(STATE_THREADS / 8),
            sequences.n,
            1,
        ],
        block: [STATE_THREADS, 1, 1],
        shared_bytes: 0,
        args: ArgBytes::of(&args),
        overlaps: true,
    })
}
