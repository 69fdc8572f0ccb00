//! RoPE tables of a plan, and the angles of a pass's rows.
//!
//! Files of Phi 3 and 4 have two sets of divisors of the frequencies: one for sequences up to the
//! context that the model was first trained on, one for longer ones. A sequence has one of them
//! throughout, since keys rotated by both do not go together. It is chosen once, by the positions
//! that the sequence may come to (`Task::reach`):
//!
//! - With `max_tokens` these are the prompt's and so many more.
//! - Where the client gives a length of context, that is what it may come to, as in llama.cpp.
//! - Without either nobody knows. A prompt that leaves a quarter of the short context free has the
//!   usual divisors, and the text ends at the end of that context as it does at the end of any
//!   (finish reason `length`): most chats end long before, and are computed as the authors do. A
//!   longer prompt has the divisors for long texts and all of the context.
//!
//! *Invariant:* a sequence with the usual divisors never goes beyond them: its `n_ctx` or
//! `max_tokens` ends it, and both are fixed when it comes. Cached prefixes are shared only by
//! sequences with the same divisors ([`crate::features::prefix_cache::Realm`]; test
//! `short_and_long_sequences_share_nothing`).

use rocmforge_kernels_cpu::ops::{RopeAngles, RopeParams, RopeTable};
use rocmforge_model::Tower;
use rocmforge_ops::{Plan, RopeAxes, RopeSpec, TensorDesc};

use crate::api::error::Error;
use crate::model::embedding_rows;
use crate::model::loaded::LoadedModel;
use crate::request::images::{self, PlacedImage};

/// The RoPE tables of one [`RopeSpec`].
pub(crate) struct Rotations {
    usual: RopeTable,
    /// Table for sequences that may become long, if the file has other divisors for them.
    long: Option<RopeTable>,
    /// For each rotated pair of elements, the index of the coordinate that rotates it.
    axes: Vec<u8>,
}

/// The rows of one sequence in a pass, whose RoPE angles are computed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Positions<'a> {
    pub(crate) first: usize,
    pub(crate) n: usize,
    /// Number of positions that the sequence may reach.
    pub(crate) reach: usize,
    /// The rows' coordinates in an image, if they have any.
    pub(crate) coordinates: Coordinates<'a>,
}

/// Coordinates of rows beside their position in the sequence.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Coordinates<'a> {
    /// Rows of text only: they have no coordinates beside their position.
    Text,
    /// Coordinates in the images of a prompt.
    Images(&'a [PlacedImage]),
    /// Coordinates in the patch grid of one image, which has all rows of the pass.
    Patches(&'a Tower, [usize; 2]),
}

impl<'a> Coordinates<'a> {
    /// The coordinates of a sequence with these images; text only if there are none.
    pub(crate) fn of_images(images: &'a [PlacedImage]) -> Self {
        match images {
            [] => Self::Text,
            images => Self::Images(images),
        }
    }
}

/// Makes the RoPE tables of a plan.
pub(crate) fn tables(loaded: &LoadedModel, plan: &Plan) -> Result<Vec<Rotations>, Error> {
    let of = |spec: &RopeSpec| {
        let long = spec.long.as_ref();
        Ok(Rotations {
            usual: table(loaded, spec, spec.factors.as_ref())?,
            long: long
                .map(|long| table(loaded, spec, Some(&long.factors)))
                .transpose()?,
            axes: spec.axes.of_pairs(spec.n_rot / 2),
        })
    };
    plan.ropes.iter().map(of).collect()
}

fn table(
    loaded: &LoadedModel,
    spec: &RopeSpec,
    factors: Option<&TensorDesc>,
) -> Result<RopeTable, Error> {
    let bad = |e: rocmforge_kernels_cpu::ops::RopeError| Error::BadModel {
        path: loaded.path().to_owned(),
        message: e.to_string(),
    };
    if let RopeAxes::Plane { in_turn, .. } = spec.axes {
        return RopeTable::plane(spec.n_rot as usize, spec.freq_base, in_turn).map_err(bad);
    }
    let params = RopeParams {
        n_rot: spec.n_rot as usize,
        freq_base: spec.freq_base,
        scaling: spec.scaling,
        freq_factors: factors
            .map(|t| embedding_rows::vector(loaded, t))
            .transpose()?,
        magnitude: spec.magnitude,
    };
    RopeTable::new(&params).map_err(bad)
}

/// Computes the RoPE angles of a pass's rows.
pub(crate) fn set_angles<'a>(
    plan: &Plan,
    tables: &[Rotations],
    sequences: impl Iterator<Item = Positions<'a>> + Clone,
    angles: &mut Vec<RopeAngles>,
) {
    // Memory, and what neighbouring positions share, is kept from pass to pass.
    let same = |(angles, spec): (&RopeAngles, &RopeSpec)| angles.order() == spec.order;
    if angles.len() != plan.ropes.len() || !angles.iter().zip(&plan.ropes).all(same) {
        let new = plan.ropes.iter().map(|spec| RopeAngles::new(spec.order));
        *angles = new.collect();
    }
    for ((of_spec, tables), spec) in angles.iter_mut().zip(tables).zip(&plan.ropes) {
        of_spec.clear(tables.usual.n_rot());
        for Positions {
            first,
            n,
            reach,
            coordinates,
        } in sequences.clone()
        {
            let long = tables.long.as_ref().filter(|_| plan.rotates_long(reach));
            let table = long.unwrap_or(&tables.usual);
            let axes = &tables.axes;
            match coordinates {
                Coordinates::Images(images) if spec.axes != RopeAxes::Sequence => {
                    of_spec.append_axes(table, axes, images::coordinates(images, first, first + n));
                }
                Coordinates::Patches(tower, grid) => {
                    let place = tower.places(grid);
                    let places = (first..first + n).map(place);
                    of_spec.append_axes(table, axes, places.map(|[row, column]| [0, row, column]));
                }
                Coordinates::Text | Coordinates::Images(_) => {
                    of_spec.append(table, first as u32..(first + n) as u32);
                }
            }
        }
    }
}

/// Context length for a request without `max_tokens` or a context length of its own: `n_ctx`, or
/// the end of the range of the usual RoPE divisors.
pub(crate) fn open_ended_context(plan: &Plan, n_prompt: usize, n_ctx: usize) -> usize {
    match plan.long_beyond() {
        Some(beyond) if n_prompt <= beyond as usize / 4 * 3 => n_ctx.min(beyond as usize),
        _ => n_ctx,
    }
}
