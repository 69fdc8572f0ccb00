//! The choice of each row's experts (`hip/route.hip`).

use crate::launch::{ArgBytes, arg_struct};
use crate::{Address, Error, GpuTarget, Launch};
use rocmforge_ops::{Router, RouterGate};

const THREADS: u32 = 128;

/// Maximum number of experts that the router's kernel chooses from.
pub const EXPERTS_MAX: u32 = 512;

/// Maximum number of groups of experts that the router's kernel chooses from.
pub const GROUPS_MAX: u32 = 64;

arg_struct! {
    /// Arguments of `route`.
    RouteArgs: 64 {
        logits: u64,
        bias: u64,
        ids: u64,
        weights: u64,
        rows: u32,
        n_expert: u32,
        n_used: u32,
        gate: u32,
        n_group: u32,
        n_group_used: u32,
        renormalize: u32,
        scale: f32,
    }
}

/// Whether [`route`] can choose so.
///
/// # Errors
/// [`Error::NoKernel`] that says why not.
pub fn supports(router: &Router) -> Result<(), Error> {
    let Router {
        n_expert,
        n_used,
        n_group,
        n_group_used,
        ..
    } = *router;
    let groups = (1..=GROUPS_MAX).contains(&n_group) && n_expert.is_multiple_of(n_group.max(1));
    let open = n_group_used.min(n_group) * (n_expert / n_group.max(1));
    if n_expert <= EXPERTS_MAX && groups && (1..=open).contains(&n_used) {
        return Ok(());
    }
    Err(Error::NoKernel {
        what: format!(
            "a choice of {n_used} of {n_expert} experts in {n_group_used} of {n_group} groups"
        ),
        built: "up to 512 experts in up to 64 groups of one size, of which a row takes at least one and no more than the kept groups have",
    })
}

/// Chooses the experts of `rows` rows: logits `[rows][n_expert]` and the selection's bias
/// `[n_expert]` to ids and weights `[rows][n_used]`, all f32.
///
/// # Errors
/// As [`supports`].
pub fn route(
    target: &GpuTarget,
    logits: Address,
    bias: Option<Address>,
    router: &Router,
    rows: u32,
    ids: Address,
    weights: Address,
) -> Result<Launch, Error> {
    supports(router)?;
    let args = RouteArgs {
        logits,
        bias: bias.unwrap_or(0),
        ids,
        weights,
        rows,
        n_expert: router.n_expert,
        n_used: router.n_used,
        gate: match router.gate {
            RouterGate::Softmax => 0,
            RouterGate::Sigmoid => 1,
            RouterGate::SoftmaxOfChosen => 2,
            RouterGate::SqrtSoftplus => 3,
        },
        n_group: router.n_group,
        n_group_used: router.n_group_used,
        renormalize: u32::from(router.renormalize),
        scale: router.scale,
    };
    Ok(Launch {
        kernel: "route.route",
        grid: [rows.div_ceil(THREADS / target.wave), 1, 1],
        block: [THREADS, 1, 1],
        shared_bytes: 0,
        args: ArgBytes::of(&args),
        overlaps: true,
    })
}
