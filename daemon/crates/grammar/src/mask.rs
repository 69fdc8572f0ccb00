//! Which tokens may come next.

use std::sync::Arc;

use toktrie::SimpleVob;

/// The set of tokens that are allowed next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mask(pub(crate) Allowed);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Allowed {
    /// These tokens, as a bit set.
    Only(SimpleVob),
    /// These few tokens, as a list.
    Few(Arc<[u32]>),
    /// All tokens but these.
    AllBut(Arc<[u32]>),
}

impl Mask {
    /// Makes the logits of all other tokens minus infinity. `logits` is `[n_vocab]`.
    pub fn apply(&self, logits: &mut [f32]) {
        let mut forbid = |id: usize| {
            if let Some(logit) = logits.get_mut(id) {
                *logit = f32::NEG_INFINITY;
            }
        };
        match &self.0 {
            Allowed::Only(allowed) => allowed.iter_unset_entries(forbid),
            Allowed::Few(few) => {
                let all = 0..logits.len();
                let others = all.filter(|&id| !few.contains(&(id as u32)));
                others.for_each(|id| logits[id] = f32::NEG_INFINITY);
            }
            Allowed::AllBut(forbidden) => forbidden.iter().for_each(|&id| forbid(id as usize)),
        }
    }

    /// Whether token `id` is allowed next.
    pub fn allows(&self, id: u32) -> bool {
        match &self.0 {
            Allowed::Only(allowed) => (id as usize) < allowed.len() && allowed.is_allowed(id),
            Allowed::Few(few) => few.contains(&id),
            Allowed::AllBut(forbidden) => !forbidden.contains(&id),
        }
    }
}
