//! The block behind the layers that predicts one token more (MTP), as a plan of its own.
//!
//! A row for position `p` takes the token at `p + 1`, which is known by then, and the residual
//! stream of the layers at `p`; what comes out is the logits of the token at `p + 2`:
//!
//! ```text
//! E, H = rms_norm(embed(token at p + 1)), rms_norm(output_norm(stream at p))     [T][n_embd] each
//! X = [E, H] * W_eh                                                              [T][n_embd]
//! X = layer(X)                     a layer as the others, with keys and values of its own
//! L = rms_norm(X) * W_head         the block's norm and matrix, or the model's where it has none
//! ```
//!
//! Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report" (2.2, multi-token prediction), which
//! GLM-4.5 and Qwen 3.5 follow. The norm of the model's output comes before that of the block, as
//! in the authors' served models.

use rocmforge_ops::{Buf, ColumnPart, InputRows};

use crate::build::{PlanBuilder, Presence, blk};
use crate::error::Error;

/// Name of a tensor that only MTP blocks have.
fn name(block: u32, part: &str) -> String {
    blk(block, &format!("nextn.{part}"))
}

/// Emits the input of the MTP block's layer, from a token and the model's hidden state.
pub(super) fn begin(b: &mut PlanBuilder<'_>, block: u32) -> Result<Buf, Error> {
    let n_embd = b.n_embd;
    let own = name(block, "embed_tokens.weight");
    let table = match b.has(&own) {
        true => own.as_str(),
        false => "token_embd.weight",
    };
    let token = b.input("e", table, n_embd, InputRows::Tokens)?;
    let stream = b.stream_input("h");
    b.cut(blk(block, "nextn"), &[]);
    let e = b.norm(token, &name(block, "enorm.weight"), "en")?;
    let h = b.norm(stream, "output_norm.weight", "hs")?;
    let h = b.norm(h, &name(block, "hnorm.weight"), "hn")?;
    let both = b.buf("eh", 2 * n_embd);
    let part = |x| ColumnPart::new(x, 0, 0, n_embd as u32);
    b.columns(1, vec![part(e), part(h)], both);
    let x = b.stream("x");
    b.product(&name(block, "eh_proj"), both, Presence::Absent, x)
}

/// Emits the output head of the MTP block.
pub(super) fn end(b: &mut PlanBuilder<'_>, block: u32, x: Buf) -> Result<(), Error> {
    let own = |b: &PlanBuilder<'_>, part, other: &str| {
        let own = name(block, part);
        match b.has(&own) {
            true => own,
            false => other.to_owned(),
        }
    };
    let norm = own(b, "shared_head_norm.weight", "output_norm.weight");
    let matrix = own(b, "shared_head_head.weight", "output.weight");
    b.cut(name(block, "head"), &[]);
    b.head_of(x, &norm, &matrix, Presence::Absent)?;
    Ok(())
}
