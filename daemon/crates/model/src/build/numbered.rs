//! What a plan numbers: buffers, groups of KV cache, tables of
//! rotations; and room in the state.
//!
//! *Invariant:* a plan numbers its buffers, groups of KV and tables of rotations by bytes; a file
//! whose layers would need more is refused (test `layers_that_are_all_different_are_refused`, of
//! buffers).

use rocmforge_ops::{
    Buf, BufSpec, HeadShape, KvGroup, KvLayer, KvLayout, KvType, LongFactors, Role, RopeSpec, Rows,
    TensorDesc,
};

use super::PlanBuilder;
use crate::error::Error;
use crate::keys::N_CTX_MAX;

impl PlanBuilder<'_> {
    /// A buffer with a row a token. The same name and width give the same buffer.
    pub(crate) fn buf(&mut self, name: &'static str, width: u64) -> Buf {
        self.buf_rows(name, width, Rows::Tokens)
    }

    pub(crate) fn buf_rows(&mut self, name: &'static str, width: u64, rows: Rows) -> Buf {
        let key = (name, width, rows);
        if !self.buf_of.contains_key(&key) && self.is_full("buffers", self.bufs.len()) {
            return Buf(0);
        }
        let next = Buf(self.bufs.len() as u8);
        let bufs = &mut self.bufs;
        *self.buf_of.entry(key).or_insert_with(|| {
            bufs.push(BufSpec { name, width, rows });
            next
        })
    }

    pub(crate) fn width(&self, buf: Buf) -> u64 {
        self.bufs[usize::from(buf.0)].width
    }

    /// The count of rows of a buffer.
    pub(crate) fn rows_kind(&self, buf: Buf) -> Rows {
        self.bufs[usize::from(buf.0)].rows
    }

    /// A place for one more layer's keys and values. Where rows attend both ways nothing is read
    /// behind its layer: layers of one shape have one place, and no page goes before the pass ends.
    pub(crate) fn kv_layer(&mut self, heads: &HeadShape, window: Option<u32>) -> KvLayer {
        self.kv_layer_of(heads, window, false)
    }

    /// As [`PlanBuilder::kv_layer`], of rows that attend within their part of the sequence alone.
    pub(crate) fn kv_layer_of_parts(&mut self, heads: &HeadShape) -> KvLayer {
        self.kv_layer_of(heads, None, true)
    }

    fn kv_layer_of(&mut self, heads: &HeadShape, window: Option<u32>, parts: bool) -> KvLayer {
        let window = window.filter(|_| !self.both_ways);
        let layout = KvLayout {
            n_layer: 0,
            n_head_kv: heads.n_head_kv as usize,
            head_dim_k: heads.head_dim as usize,
            head_dim_v: heads.head_dim_v as usize,
            ty: KvType::F16,
        };
        let same = |g: &KvGroup| {
            (g.window, g.parts) == (window, parts)
                && KvLayout {
                    n_layer: 0,
                    ..g.layout
                } == layout
        };
        let group = match self.kv.iter().position(same) {
            Some(group) => group,
            None if self.is_full("groups of KV cache", self.kv.len()) => 0,
            None => {
                self.kv.push(KvGroup {
                    layout,
                    window,
                    parts,
                });
                self.kv.len() - 1
            }
        };
        let layers = &mut self.kv[group].layout.n_layer;
        *layers = if self.both_ways { 1 } else { *layers + 1 };
        KvLayer {
            group: group as u8,
            index: (*layers - 1) as u32,
        }
    }

    /// Room in the state of a sequence, in f32 elements; begins at a multiple of 64.
    pub(crate) fn state(&mut self, elements: u64) -> u64 {
        let at = self.state_elements;
        self.state_elements = (at + elements).next_multiple_of(64);
        at
    }

    /// A table of rotations.
    pub(crate) fn rope_table(&mut self, spec: RopeSpec) -> u8 {
        let at = match self.ropes.iter().position(|r| *r == spec) {
            Some(at) => at,
            None if self.is_full("tables of rotations", self.ropes.len()) => 0,
            None => {
                self.ropes.push(spec);
                self.ropes.len() - 1
            }
        };
        at as u8
    }

    /// Refuses a file whose layers need more of something than can be numbered.
    pub(crate) fn refuse_too_many(&self) -> Result<(), Error> {
        match self.too_many {
            None => Ok(()),
            Some(what) => Err(Error::Unsupported(format!(
                "the layers differ so much that a pass would need more than 256 {what}, which is not supported"
            ))),
        }
    }

    /// Whether there can be no more than these `n`. The file is refused then, and until
    /// it is any number will do.
    fn is_full(&mut self, what: &'static str, n: usize) -> bool {
        let full = n > usize::from(u8::MAX);
        if full {
            self.too_many = Some(what);
        }
        full
    }

    /// Takes over the short and the long divisors of rotation frequencies of a file that has them,
    /// and their magnitude, which is the same for both. Where the model is for no more positions
    /// than it was first trained on, the short ones serve all.
    pub(crate) fn long_factors(
        &mut self,
        rope: &mut RopeSpec,
        n_ctx_train: u32,
    ) -> Result<(), Error> {
        let short = self.rope_factors("rope_factors_short.weight", rope.n_rot)?;
        let long = self.rope_factors("rope_factors_long.weight", rope.n_rot)?;
        if short.is_none() && long.is_none() {
            return Ok(());
        }
        let keys = self.keys;
        let beyond = keys.count_but_0_or(
            "rope.scaling.original_context_length",
            N_CTX_MAX,
            n_ctx_train,
        )?;
        rope.magnitude = f64::from(keys.positive_or("rope.scaling.attn_factor", 1.0)?);
        rope.factors = short;
        rope.long = long
            .filter(|_| n_ctx_train > beyond)
            .map(|factors| LongFactors { beyond, factors });
        Ok(())
    }

    /// The divisors of rotation frequencies of a file that has them.
    pub(crate) fn rope_factors(
        &mut self,
        name: &str,
        n_rot: u32,
    ) -> Result<Option<TensorDesc>, Error> {
        let found = self.tensor_if(name, &[u64::from(n_rot) / 2])?;
        Ok(found.map(|f| TensorDesc {
            role: Role::Vector,
            ..f.0
        }))
    }
}
