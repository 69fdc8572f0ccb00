//! Where keys and values lie: pages of consecutive positions, for the layers of a group.
//!
//! A page holds [`KV_PAGE_TOKENS`] consecutive positions of one sequence for all layers of one
//! group:
//!
//! ```text
//! page  = [n_layer] layer
//! layer = [n_head_kv] keys of a head  then  [n_head_kv] values of a head
//! F32:   f32 [KV_PAGE_TOKENS][head_dim]
//! F16:   f16 [KV_PAGE_TOKENS][head_dim]
//! Q8_0:  i8 [KV_PAGE_TOKENS][head_dim]  then scales, f16 [KV_PAGE_TOKENS][head_dim / 32]
//! ```
//!
//! so that what a head attends to is two contiguous pieces. Position `p` of a sequence is
//! slot `p % KV_PAGE_TOKENS` of its page `p / KV_PAGE_TOKENS`. Every piece of Q8_0 begins
//! at a multiple of 64 bytes.
//!
//! These are the values on every device, and the keys on a GPU. On the host the keys are
//! transposed, since a vector of its registers holds the scores of consecutive slots:
//!
//! ```text
//! F32:   f32 [head_dim][KV_PAGE_TOKENS]
//! F16:   f16 [head_dim][KV_PAGE_TOKENS]
//! Q8_0:  i8 [head_dim][KV_PAGE_TOKENS]  then scales, f16 [head_dim / 32][KV_PAGE_TOKENS]
//! ```
//!
//! Either order takes the same bytes, so that [`KvLayout`] is of both. A page never goes from one
//! device to another; on its own device it is copied whole.

/// Positions in one page.
pub const KV_PAGE_TOKENS: usize = 32;

/// Elements of a head that share a scale in [`KvType::Q8_0`].
pub const KV_BLOCK: usize = 32;

/// What keys and values are stored as.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KvType {
    /// f32, 4 bytes an element, as the products left it.
    F32,
    /// f16, 2 bytes an element.
    #[default]
    F16,
    /// 8 bits and an f16 scale for [`KV_BLOCK`] consecutive elements of a head: 34
    /// bytes for 32. An element is its code times the scale, which is the largest of
    /// the block divided by 127, as f16.
    Q8_0,
}

impl KvType {
    /// All KV types.
    pub const ALL: [KvType; 3] = [KvType::F32, KvType::F16, KvType::Q8_0];

    /// The name: `f32`, `f16`, `q8_0`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            KvType::F32 => "f32",
            KvType::F16 => "f16",
            KvType::Q8_0 => "q8_0",
        }
    }

    /// The type of a name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<KvType> {
        KvType::ALL.into_iter().find(|ty| ty.name() == name)
    }

    /// Bytes of `elements` elements, a whole number of blocks.
    #[must_use]
    pub const fn bytes(self, elements: usize) -> usize {
        match self {
            KvType::F32 => elements * 4,
            KvType::F16 => elements * 2,
            KvType::Q8_0 => elements + elements / KV_BLOCK * 2,
        }
    }

    /// Whether heads of `head_dim` elements can be stored in this type: they have a whole number of
    /// blocks.
    #[must_use]
    pub const fn fits(self, head_dim: usize) -> bool {
        match self {
            KvType::F32 | KvType::F16 => true,
            KvType::Q8_0 => head_dim.is_multiple_of(KV_BLOCK),
        }
    }
}

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
    /// Element type of keys and values.
    pub ty: KvType,
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
        self.n_head_kv * (self.keys_bytes() + self.values_bytes())
    }

    /// Bytes of the keys of one head in one layer of a page.
    #[must_use]
    pub fn keys_bytes(&self) -> usize {
        self.ty.bytes(KV_PAGE_TOKENS * self.head_dim_k)
    }

    /// Bytes of the values of one head in one layer of a page.
    #[must_use]
    pub fn values_bytes(&self) -> usize {
        self.ty.bytes(KV_PAGE_TOKENS * self.head_dim_v)
    }

    /// Where layer `layer` begins in a page, in bytes.
    #[must_use]
    pub fn layer_offset_bytes(&self, layer: usize) -> usize {
        layer * self.layer_bytes()
    }

    /// Where the keys of head `head_kv` begin in a layer, in bytes.
    #[must_use]
    pub fn k_offset_bytes(&self, head_kv: usize) -> usize {
        head_kv * self.keys_bytes()
    }

    /// Where the values of head `head_kv` begin in a layer, in bytes.
    #[must_use]
    pub fn v_offset_bytes(&self, head_kv: usize) -> usize {
        self.n_head_kv * self.keys_bytes() + head_kv * self.values_bytes()
    }

    /// The pages that `n_tokens` positions need.
    #[must_use]
    pub fn pages_for(&self, n_tokens: usize) -> usize {
        n_tokens.div_ceil(KV_PAGE_TOKENS)
    }

    /// Whether heads of this size can be stored as `ty`.
    #[must_use]
    pub fn fits(&self, ty: KvType) -> bool {
        ty.fits(self.head_dim_k) && ty.fits(self.head_dim_v)
    }
}

/// Layers whose keys and values share pages: the same heads, and the same
/// positions that are of use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvGroup {
    /// The shape of a page.
    pub layout: KvLayout,
    /// Positions that a row attends to, its own included; `None` for all. What lies
    /// behind may be given back.
    pub window: Option<u32>,
    /// Rows attend within their part of the sequence alone, as parts of a vision tower's image do.
    /// Each part is a sequence of its own: its pages lie behind those of the part before it, and
    /// begin again.
    pub parts: bool,
}

/// Positions that the pages of parts of these lengths have room for: every part begins a page.
#[must_use]
pub fn positions_of_parts(parts: impl Iterator<Item = usize>) -> usize {
    parts.map(|n| n.next_multiple_of(KV_PAGE_TOKENS)).sum()
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

    /// The most pages that a sequence of `n_tokens` positions holds at once, computed by
    /// passes of at most `rows` rows.
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
            ty: KvType::F16,
        }
    }

    #[test]
    fn offsets_tile_the_layer() {
        let halves = layout();
        assert_eq!(halves.layer_bytes(), 4 * 32 * (10 + 6) * 2);
        let eight_bits = KvLayout {
            head_dim_k: 64,
            head_dim_v: 96,
            ty: KvType::Q8_0,
            ..halves
        };
        assert_eq!(eight_bits.layer_bytes(), 4 * 32 * (64 + 96) / 32 * 34);
        let floats = KvLayout {
            ty: KvType::F32,
            ..halves
        };
        assert_eq!(floats.layer_bytes(), 2 * halves.layer_bytes());
        for layout in [halves, eight_bits, floats] {
            let (keys, values) = (layout.keys_bytes(), layout.values_bytes());
            assert_eq!(layout.k_offset_bytes(3) + keys, layout.v_offset_bytes(0));
            assert_eq!(layout.v_offset_bytes(3) + values, layout.layer_bytes());
            assert_eq!(
                layout.layer_offset_bytes(1) + layout.layer_bytes(),
                layout.page_bytes()
            );
        }
        assert_eq!([0, 1, 32, 33].map(|n| halves.pages_for(n)), [0, 1, 1, 2]);
    }

    #[test]
    fn every_part_begins_a_page() {
        let of = |parts: &[usize]| positions_of_parts(parts.iter().copied());
        assert_eq!([of(&[]), of(&[64]), of(&[64, 4, 33])], [0, 64, 160]);
    }

    #[test]
    fn eight_bits_take_whole_blocks_and_lie_at_multiples_of_64_bytes() {
        for dim in 1..=576 {
            let layout = KvLayout {
                head_dim_k: dim,
                head_dim_v: 32,
                ty: KvType::Q8_0,
                ..layout()
            };
            assert_eq!(layout.fits(KvType::Q8_0), dim % 32 == 0, "{dim}");
            assert!(layout.fits(KvType::F16) && layout.fits(KvType::F32));
            if layout.fits(KvType::Q8_0) {
                let at = [layout.k_offset_bytes(1), layout.v_offset_bytes(1)];
                assert!(at.iter().all(|at| at % 64 == 0), "{dim}: {at:?}");
            }
        }
        for ty in KvType::ALL {
            assert_eq!(KvType::from_name(ty.name()), Some(ty));
        }
        assert_eq!(KvType::from_name("q4_0"), None);
    }

    /// Walks a sequence by passes of every length and counts the pages between the first one still
    /// read and the last one written.
    #[test]
    fn a_window_holds_no_more_pages_than_it_says() {
        for window in [1, 16, 31, 32, 33, 100] {
            let group = KvGroup {
                layout: layout(),
                window: Some(window),
                parts: false,
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
