//! Kernels whose scores fall with distance (ALiBi): one of many rows for heads of 64, which the
//! models that need it have, and one of single rows for heads of any size.

use super::{
    DECODE_ANY_HEADS, DECODE_THREADS, DecodeShape, Error, GpuTarget, KvLayout, KvType, Scores,
    decode_shape, heads_of_block, n_split, supports,
};

const PREFILL: &str = "attention_prefill_64_alibi.attention_prefill_64_alibi";
const DECODE: &str = "attention_decode_any_alibi.attention_decode_any_alibi";
const DECODE_F32: &str = "attention_decode_any_f32_alibi.attention_decode_any_f32_alibi";

/// The kernel of many rows, where there is one for these heads.
pub(super) fn prefill_kernel(kv: &KvLayout) -> Option<&'static str> {
    let fits = (kv.head_dim_k, kv.head_dim_v, kv.ty) == (64, 64, KvType::F16);
    fits.then_some(PREFILL)
}

/// [`decode_shape`] of rows whose scores are made so.
///
/// # Errors
/// As [`supports`]; of ALiBi there is no kernel for pages of 8 bits.
pub fn decode_shape_of(
    scores: &Scores,
    target: &GpuTarget,
    rows: u32,
    n_head: u32,
    kv: &KvLayout,
    positions_max: u32,
) -> Result<DecodeShape, Error> {
    if scores.alibi == 0.0 {
        return decode_shape(target, rows, n_head, kv, positions_max);
    }
    supports(n_head, kv)?;
    let kernel = match kv.ty {
        KvType::F16 => DECODE,
        KvType::F32 => DECODE_F32,
        KvType::Q8_0 => {
            return Err(Error::NoKernel {
                what: "attention with ALiBi over keys of 8 bits".to_owned(),
                built: "keys of f16 and of f32",
            });
        }
    };
    let heads = heads_of_block(n_head, kv.n_head_kv as u32, DECODE_ANY_HEADS);
    let blocks = n_head / heads;
    Ok(DecodeShape {
        kernel,
        threads: DECODE_THREADS,
        heads,
        blocks,
        n_split: n_split(target, rows, blocks, positions_max),
    })
}
