//! The key/value store: its page layout, and writing a token into it.
//!
//! A page holds [`KV_PAGE_TOKENS`] consecutive positions of one sequence for all layers, as f16:
//!
//! ```text
//! page  = [n_layer] layer
//! layer = K [n_head_kv][KV_PAGE_TOKENS][head_dim_k]  then  V [n_head_kv][KV_PAGE_TOKENS][head_dim_v]
//! ```
//!
//! so that what a head attends to is two contiguous pieces. Position `p` of a sequence is slot
//! `p % KV_PAGE_TOKENS` of its page `p / KV_PAGE_TOKENS`.

use half::f16;

use super::Simd;
use super::lanes::{Lanes, simd_fn};

/// Positions in one page.
pub const KV_PAGE_TOKENS: usize = 32;

/// The shape of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    /// Layers of the model.
    pub n_layer: usize,
    /// Key/value heads of a layer.
    pub n_head_kv: usize,
    /// Elements of a key.
    pub head_dim_k: usize,
    /// Elements of a value.
    pub head_dim_v: usize,
}

impl KvLayout {
    /// Bytes of a page, all layers.
    #[must_use]
    pub fn page_bytes(&self) -> usize {
        self.n_layer * self.layer_bytes()
    }

    /// Bytes of one layer of a page.
    #[must_use]
    pub fn layer_bytes(&self) -> usize {
        self.layer_elements() * size_of::<f16>()
    }

    /// f16 elements of one layer of a page.
    #[must_use]
    pub fn layer_elements(&self) -> usize {
        self.n_head_kv * KV_PAGE_TOKENS * (self.head_dim_k + self.head_dim_v)
    }

    /// Where layer `layer` begins in a page, in bytes.
    #[must_use]
    pub fn layer_offset_bytes(&self, layer: usize) -> usize {
        layer * self.layer_bytes()
    }

    /// Where the keys of head `head_kv` begin in a layer, in elements: `[KV_PAGE_TOKENS][head_dim_k]`.
    #[must_use]
    pub fn k_offset(&self, head_kv: usize) -> usize {
        head_kv * KV_PAGE_TOKENS * self.head_dim_k
    }

    /// Where the values of head `head_kv` begin in a layer, in elements: `[KV_PAGE_TOKENS][head_dim_v]`.
    #[must_use]
    pub fn v_offset(&self, head_kv: usize) -> usize {
        KV_PAGE_TOKENS * (self.n_head_kv * self.head_dim_k + head_kv * self.head_dim_v)
    }

    /// The pages that `n_tokens` positions need.
    #[must_use]
    pub fn pages_for(&self, n_tokens: usize) -> usize {
        n_tokens.div_ceil(KV_PAGE_TOKENS)
    }

    /// Layer `layer` of `page`, [`KvLayout::page_bytes`] long and aligned to 2 bytes.
    ///
    /// # Panics
    /// When the length, the alignment or the layer is wrong.
    #[must_use]
    pub fn layer<'a>(&self, page: &'a [u8], layer: usize) -> &'a [f16] {
        assert_eq!(page.len(), self.page_bytes(), "kv page of another size");
        let bytes = &page[self.layer_offset_bytes(layer)..][..self.layer_bytes()];
        // SAFETY: every bit pattern is an f16, and f16 has no padding.
        let (before, elements, after) = unsafe { bytes.align_to::<f16>() };
        assert!(
            before.is_empty() && after.is_empty(),
            "kv page is not aligned to 2 bytes"
        );
        elements
    }

    /// [`KvLayout::layer`], to write to.
    ///
    /// # Panics
    /// As [`KvLayout::layer`].
    #[must_use]
    pub fn layer_mut<'a>(&self, page: &'a mut [u8], layer: usize) -> &'a mut [f16] {
        assert_eq!(page.len(), self.page_bytes(), "kv page of another size");
        let bytes = &mut page[self.layer_offset_bytes(layer)..][..self.layer_bytes()];
        // SAFETY: every bit pattern is an f16 and every f16 is two bytes, with no padding.
        let (before, elements, after) = unsafe { bytes.align_to_mut::<f16>() };
        assert!(
            before.is_empty() && after.is_empty(),
            "kv page is not aligned to 2 bytes"
        );
        elements
    }
}

/// Writes the key and the value of one token into slot `slot` of `page_layer` (one layer of a page, see
/// [`KvLayout::layer_mut`]). `k` is `[n_head_kv][head_dim_k]`, `v` is `[n_head_kv][head_dim_v]`; rounded to
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
                kv_append(simd, &layout, layout.layer_mut(page, 1), slot, &k, &v);
                let mut written = 0;
                let elements = layout.layer(page, 1);
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

    #[test]
    fn offsets_tile_the_layer() {
        let layout = KvLayout {
            n_layer: 2,
            n_head_kv: 4,
            head_dim_k: 10,
            head_dim_v: 6,
        };
        assert_eq!(layout.k_offset(3) + 32 * 10, layout.v_offset(0));
        assert_eq!(layout.v_offset(3) + 32 * 6, layout.layer_elements());
        assert_eq!(
            layout.layer_offset_bytes(1) + layout.layer_bytes(),
            layout.page_bytes()
        );
        assert_eq!([0, 1, 32, 33].map(|n| layout.pages_for(n)), [0, 1, 1, 2]);
    }
}
