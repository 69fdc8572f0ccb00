//! GLM 4: half of each head rotates; norms before and after; one matrix for gate and up.
//!
//! Source: Team GLM 2024, "ChatGLM: A Family of Large Language Models"; the authors'
//! published code (Glm4ForCausalLM).

use rocmforge_ops::{RopeAxes, RopeOrder, RopeUse};

use super::layer::{FeedForward, Layer, Norms, layer};
use crate::build::{AttentionSpec, PlanBuilder, Presence, blk};
use crate::error::Error;
use crate::hparams::Hparams;

pub(super) fn build(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    let x = b.embedding()?;
    let mut rope = b.keys.rope(RopeOrder::Norm, h.heads.head_dim)?;
    // Files of models that read images (GLM-4.1V) have the pairs' halves apart.
    if rope.axes != RopeAxes::Sequence {
        rope.order = RopeOrder::Neox;
    }
    let table = b.rope_table(rope);
    leave_predictors(b, h)?;
    for i in 0..h.n_layer {
        let attention = AttentionSpec {
            qkv_bias: Presence::Optional,
            ..AttentionSpec::new(h.heads_of(i), Some(RopeUse { table, first: 0 }))
        };
        let feed_forward = FeedForward::swiglu(h.n_ff(b.keys, i)?);
        let norms = Norms::SANDWICH;
        layer(
            b,
            i,
            x,
            &Layer {
                norms,
                ..Layer::new(attention, feed_forward)
            },
        )?;
    }
    b.head(x, Presence::Absent, None, None)
}

/// Marks the tensors of MTP blocks as known and unused.
///
/// # Errors
/// A block that is declared as MTP has only a layer's tensors, and so is an ordinary
/// layer.
pub(super) fn leave_predictors(b: &mut PlanBuilder<'_>, h: &Hparams) -> Result<(), Error> {
    let blocks: Vec<String> = (h.n_layer..h.n_layer + h.n_layer_nextn)
        .map(|i| blk(i, ""))
        .collect();
    for block in &blocks {
        let mut names = b.names().filter(|name| name.starts_with(block.as_str()));
        let predicts = |name: &str| name.contains(".nextn.") || name.contains(".mtp.");
        if names.next().is_some_and(|first| !predicts(first)) && !names.any(predicts) {
            let message = format!("{block}* has no tensor of a block that predicts");
            return Err(b.keys.bad("nextn_predict_layers", h.n_layer_nextn, message));
        }
    }
    b.leave_alone(|name| {
        blocks
            .iter()
            .any(|prefix| name.starts_with(prefix.as_str()))
            || name.starts_with("mtp.")
            || name.contains(".nextn.")
    });
    Ok(())
}
