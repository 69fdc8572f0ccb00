//! Where keys and values lie: pages of consecutive positions, for the layers of a group.
//!
//! A page holds [`KV_PAGE_TOKENS`] consecutive positions of one sequence for all layers of one group, as f16:
//!
//! ```text
//! page  = [n_layer] layer
//! layer = K [n_head_kv][KV_PAGE_TOKENS][head_dim_k]  then  V [n_head_kv][KV_PAGE_TOKENS][head_dim_v]
//! ```
//!
//! so that what a head attends to is two contiguous pieces. Position `p` of a sequence is slot
//! `p % KV_PAGE_TOKENS` of its page `p / KV_PAGE_TOKENS`.

/// Positions in one page.
pub const KV_PAGE_TOKENS: usize = 32;

/// Bytes of a stored element (f16).
const ELEMENT_BYTES: usize = 2;

/// The shape of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvLayout {
    /// Layers of the group.
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
        self.layer_elements() * ELEMENT_BYTES
    }

    /// Elements of one layer of a page.
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
}

/// Layers whose keys and values share pages: the same heads, and the same positions that are of use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvGroup {
    /// The shape of a page.
    pub layout: KvLayout,
    /// Positions that a row attends to, its own included; `None` for all. What lies behind may be given back.
    pub window: Option<u32>,
}

impl KvGroup {
    /// The first page that rows at `first_position` and later still read.
    #[must_use]
    pub fn first_page(&self, first_position: usize) -> usize {
        match self.window {
            None => 0,
            Some(window) => (first_position + 1).saturating_sub(window as usize) / KV_PAGE_TOKENS,
        }
    }

    /// The most pages that a sequence of `n_tokens` positions holds at once, computed by passes of at most
    /// `rows` rows.
    #[must_use]
    pub fn pages_at_most(&self, n_tokens: usize, rows: usize) -> usize {
        let all = self.layout.pages_for(n_tokens);
        match self.window {
            None => all,
            // The window, the rows of a pass, and a page that is begun at either end.
            Some(window) => all.min((window as usize + rows).div_ceil(KV_PAGE_TOKENS) + 1),
        }
    }
}

/// A layer's place: which group, and which layer of its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvLayer {
    /// The group, by its index in the plan.
    pub group: u8,
    /// The layer within the group's pages.
    pub index: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout() -> KvLayout {
        KvLayout {
            n_layer: 2,
            n_head_kv: 4,
            head_dim_k: 10,
            head_dim_v: 6,
        }
    }

    #[test]
    fn offsets_tile_the_layer() {
        let layout = layout();
        assert_eq!(layout.k_offset(3) + 32 * 10, layout.v_offset(0));
        assert_eq!(layout.v_offset(3) + 32 * 6, layout.layer_elements());
        assert_eq!(
            layout.layer_offset_bytes(1) + layout.layer_bytes(),
            layout.page_bytes()
        );
        assert_eq!([0, 1, 32, 33].map(|n| layout.pages_for(n)), [0, 1, 1, 2]);
    }

    /// Walks a sequence by passes of every length and counts the pages between the first one still read and the
    /// last one written.
    #[test]
    fn a_window_holds_no_more_pages_than_it_says() {
        for window in [1, 16, 31, 32, 33, 100] {
            let group = KvGroup {
                layout: layout(),
                window: Some(window),
            };
            for rows in [1, 7, 32, 50] {
                let mut first = 0;
                while first < 400 {
                    let end = (first + rows).min(400);
                    let held = group.layout.pages_for(end) - group.first_page(first);
                    assert!(
                        held <= group.pages_at_most(400, rows),
                        "window {window}, rows {rows}, at {first}: {held} pages"
                    );
                    let oldest = (first + 1).saturating_sub(window as usize);
                    assert!(group.first_page(first) * KV_PAGE_TOKENS <= oldest);
                    first = end;
                }
            }
        }
    }
}
