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
use half::slice::HalfFloatSliceExt;

use super::Simd;

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
    _simd: Simd,
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
    for head in 0..layout.n_head_kv {
        let (dk, dv) = (layout.head_dim_k, layout.head_dim_v);
        page_layer[layout.k_offset(head) + slot * dk..][..dk]
            .convert_from_f32_slice(&k[head * dk..][..dk]);
        page_layer[layout.v_offset(head) + slot * dv..][..dv]
            .convert_from_f32_slice(&v[head * dv..][..dv]);
    }
}
