//! How attention's scores are made and masked.

use rocmforge_ops::Mask;

use crate::Address;

/// How scores are made and masked.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scores {
    /// Factor on the products of queries and keys.
    pub scale: f32,
    /// Which positions.
    pub mask: Mask,
    /// Scores become `softcap * tanh(score / softcap)`; 0 for none.
    pub softcap: f32,
    /// f32 `[n_head]`: one more score a head, without a value.
    pub sinks: Option<Address>,
    /// Scores fall by [`alibi_slope`](rocmforge_ops::alibi_slope) of this for each position between
    /// query and key; 0 for none. Never with a soft cap.
    pub alibi: f32,
    /// [`SequencePlace`](super::recurrent::SequencePlace)`[sequences]`, which tell where sequences
    /// end; read where rows attend ahead.
    pub places: Address,
    /// Whether some sequences' rows attend to all later ones of theirs, whatever the mask says: to
    /// those up to `last` of their place.
    pub whole: bool,
}

/// Rows ahead of any.
const ALL_AHEAD: u32 = i32::MAX as u32;

impl Scores {
    /// Scores for causal attention: of all positions up to a row's own, without soft cap, sinks or
    /// ALiBi.
    #[must_use]
    pub const fn causal(scale: f32) -> Scores {
        Scores {
            scale,
            mask: Mask::Causal,
            softcap: 0.0,
            sinks: None,
            alibi: 0.0,
            places: 0,
            whole: false,
        }
    }

    pub(super) fn window(&self) -> u32 {
        match self.mask {
            Mask::Causal | Mask::CausalInImages | Mask::Whole => 0,
            // A row always attends to itself.
            Mask::Window(n) => n.max(1),
            Mask::Around(n) => n.saturating_add(1),
        }
    }

    /// What the kernels read as a soft cap; those of ALiBi read their bias there.
    pub(super) fn softcap_or_alibi(&self) -> f32 {
        match self.alibi > 0.0 {
            true => self.alibi,
            false => self.softcap,
        }
    }

    pub(super) fn ahead(&self) -> u32 {
        match self.mask {
            Mask::CausalInImages => 0,
            _ if self.whole => ALL_AHEAD,
            Mask::Causal | Mask::Window(_) => 0,
            Mask::Whole => ALL_AHEAD,
            Mask::Around(n) => n.min(ALL_AHEAD),
        }
    }
}
