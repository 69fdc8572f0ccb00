//! The key/value store on the host: views of a page's layers, and writing a token into one. The layout is
//! [`rocmforge_ops::kv`]'s.

use half::f16;
use rocmforge_ops::{KV_PAGE_TOKENS, KvLayout};

use super::Simd;
use super::lanes::{Lanes, simd_fn};

/// Layer `layer` of `page`, [`KvLayout::page_bytes`] long and aligned to 2 bytes.
///
/// # Panics
/// When the length, the alignment or the layer is wrong.
#[must_use]
pub fn kv_layer<'a>(layout: &KvLayout, page: &'a [u8], layer: usize) -> &'a [f16] {
    assert_eq!(page.len(), layout.page_bytes(), "kv page of another size");
    let bytes = &page[layout.layer_offset_bytes(layer)..][..layout.layer_bytes()];
    // SAFETY: every bit pattern is an f16, and f16 has no padding.
    let (before, elements, after) = unsafe { bytes.align_to::<f16>() };
    assert!(
        before.is_empty() && after.is_empty(),
        "kv page is not aligned to 2 bytes"
    );
    elements
}

/// [`kv_layer`], to write to.
///
/// # Panics
/// As [`kv_layer`].
#[must_use]
pub fn kv_layer_mut<'a>(layout: &KvLayout, page: &'a mut [u8], layer: usize) -> &'a mut [f16] {
    assert_eq!(page.len(), layout.page_bytes(), "kv page of another size");
    let bytes = &mut page[layout.layer_offset_bytes(layer)..][..layout.layer_bytes()];
    // SAFETY: every bit pattern is an f16 and every f16 is two bytes, with no padding.
    let (before, elements, after) = unsafe { bytes.align_to_mut::<f16>() };
    assert!(
        before.is_empty() && after.is_empty(),
        "kv page is not aligned to 2 bytes"
    );
    elements
}

/// Writes the key and the value of one token into slot `slot` of `page_layer` (one layer of a page, see
/// [`kv_layer_mut`]). `k` is `[n_head_kv][head_dim_k]`, `v` is `[n_head_kv][head_dim_v]`; rounded to
/// the nearest f16, beyond its range to infinity.
///
/// # Panics
/// When a length differs from the layout or `slot` is not below [`KV_PAGE_TOKENS`].
pub fn kv_append(
    simd: Simd,
    layout: &KvLayout,
    page_layer: &mut [f16],
    slot: usize,
    k: &[f32],
    v: &[f32],
) {
    assert!(
        slot < KV_PAGE_TOKENS,
        "kv_append: slot {slot} of {KV_PAGE_TOKENS}"
    );
    assert_eq!(
        page_layer.len(),
        layout.layer_elements(),
        "kv_append: not a layer of a page"
    );
    assert_eq!(
        k.len(),
        layout.n_head_kv * layout.head_dim_k,
        "kv_append: k has another shape"
    );
    assert_eq!(
        v.len(),
        layout.n_head_kv * layout.head_dim_v,
        "kv_append: v has another shape"
    );
    let (dk, dv) = (layout.head_dim_k, layout.head_dim_v);
    for head in 0..layout.n_head_kv {
        narrow(
            simd,
            &k[head * dk..][..dk],
            &mut page_layer[layout.k_offset(head) + slot * dk..][..dk],
        );
        narrow(
            simd,
            &v[head * dv..][..dv],
            &mut page_layer[layout.v_offset(head) + slot * dv..][..dv],
        );
    }
}

simd_fn! {
    fn narrow(from: &[f32], to: &mut [f16]);
    simd narrow_lanes;
    scalar narrow_scalar;
}

#[inline(always)]
fn narrow_lanes<S: Lanes>(s: S, from: &[f32], to: &mut [f16]) {
    let mut froms = from.chunks_exact(S::N);
    let mut tos = to.chunks_exact_mut(S::N);
    for (from, to) in froms.by_ref().zip(tos.by_ref()) {
        s.store_f16(to, s.load(from));
    }
    narrow_scalar(froms.remainder(), tos.into_remainder());
}

fn narrow_scalar(from: &[f32], to: &mut [f16]) {
    for (from, to) in from.iter().zip(to) {
        *to = f16::from_f32(*from);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::ops::testing::Source;

    #[test]
    fn a_token_lands_in_its_slot_of_its_layer_and_nowhere_else() {
        let mut source = Source::new("kv_append");
        for (n_head_kv, head_dim_k, head_dim_v) in [(2, 64, 64), (3, 20, 7), (1, 33, 128)] {
            let layout = KvLayout {
                n_layer: 3,
                n_head_kv,
                head_dim_k,
                head_dim_v,
            };
            assert_eq!(
                layout.page_bytes(),
                3 * n_head_kv * 32 * (head_dim_k + head_dim_v) * 2
            );
            let (k, mut v) = (
                source.normal(n_head_kv * head_dim_k),
                source.normal(n_head_kv * head_dim_v),
            );
            v[0] = 1e6;
            v[1] = f32::NAN;
            let slot = source.below(KV_PAGE_TOKENS);
            for simd in Simd::available() {
                let poison = f16::from_f32(-77.0);
                let mut memory = vec![poison; layout.page_bytes() / 2];
                // SAFETY: f16 has no padding, and bytes need no alignment.
                let (_, page, _) = unsafe { memory.align_to_mut::<u8>() };
                kv_append(simd, &layout, kv_layer_mut(&layout, page, 1), slot, &k, &v);
                let mut written = 0;
                let elements = kv_layer(&layout, page, 1);
                for head in 0..n_head_kv {
                    for i in 0..head_dim_k {
                        let found = elements[layout.k_offset(head) + slot * head_dim_k + i];
                        assert_eq!(found, f16::from_f32(k[head * head_dim_k + i]), "{simd:?}");
                        written += 1;
                    }
                    for i in 0..head_dim_v {
                        let found = elements[layout.v_offset(head) + slot * head_dim_v + i];
                        let expected = f16::from_f32(v[head * head_dim_v + i]);
                        assert!(
                            found == expected || found.is_nan() && expected.is_nan(),
                            "{simd:?}"
                        );
                        written += 1;
                    }
                }
                assert_eq!(
                    memory.iter().filter(|&&x| x != poison).count(),
                    written,
                    "{simd:?}"
                );
                assert_eq!(
                    memory.iter().filter(|x| x.is_infinite()).count(),
                    1,
                    "{simd:?}"
                );
            }
        }
    }
}
