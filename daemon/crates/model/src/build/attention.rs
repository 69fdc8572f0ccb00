//! Attention as most architectures have it: products for queries, keys and values, heads normed and
//! rotated, KV appended, attention, output product.

use rocmforge_ops::{
    Act, Buf, ColumnPart, HeadShape, KvLayer, Mask, Op, Product, Role, RopeUse, TensorIndex,
};

use super::{PlanBuilder, Presence, blk, scale_of};
use crate::error::Error;

/// The gate that multiplies the output of attention before the output product.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum OutputGate {
    Absent,
    /// The query product also gives a gate for each element, interleaved by heads; its
    /// logistic function (Qwen3-Next).
    WithQueries,
    /// The gate is a function of a separate product `attn_gate`, with a row for each element or
    /// each head.
    Matrix(Act),
}

/// The kind of norms of queries and keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QkNorms {
    /// An RMSNorm over each head, before rotation, with one weight for all heads.
    Heads(Presence),
    /// A norm over each head, after rotation.
    HeadsRotated,
    /// An RMSNorm over all of a row's queries and one over all of its keys.
    Rows,
    /// A layer norm over each head, with a weight for each column.
    LayerNorms(Presence),
    /// A layer norm over all of a row's queries and one over all of its keys, each with a bias,
    /// where the file has them.
    LayerNormRows,
}

/// Parameters of a layer's attention.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttentionSpec {
    pub(crate) heads: HeadShape,
    /// Biases of the query, key and value products.
    pub(crate) qkv_bias: Presence,
    /// Bias of the output product.
    pub(crate) output_bias: Presence,
    pub(crate) qk_norms: QkNorms,
    /// Whether values have an RMSNorm without weight over each head.
    pub(crate) value_norm: bool,
    /// Whether keys serve as values if the file has no value matrix.
    pub(crate) keys_as_values: bool,
    pub(crate) rope: Option<RopeUse>,
    pub(crate) window: Option<u32>,
    /// Whether this layer stays causal within images while other layers attend in both directions.
    pub(crate) causal_in_images: bool,
    pub(crate) scale: f32,
    pub(crate) softcap: f32,
    /// Whether the softmax has a sink: one more score for each head, from a tensor.
    pub(crate) sinks: bool,
    /// Maximum bias of ALiBi; 0 for none.
    pub(crate) alibi: f32,
    pub(crate) output_gate: OutputGate,
    /// Strength and span of a temperature that depends on the position.
    pub(crate) temperature: Option<(f32, u32)>,
    /// Where the K and V of another layer are, which this layer uses instead of its own.
    pub(crate) shared_kv: Option<KvLayer>,
}

impl AttentionSpec {
    /// Grouped-query attention over all positions, without options.
    pub(crate) fn new(heads: HeadShape, rope: Option<RopeUse>) -> Self {
        Self {
            heads,
            qkv_bias: Presence::Absent,
            output_bias: Presence::Absent,
            qk_norms: QkNorms::Heads(Presence::Absent),
            value_norm: false,
            keys_as_values: false,
            rope,
            window: None,
            causal_in_images: false,
            scale: scale_of(heads.head_dim),
            softcap: 0.0,
            sinks: false,
            alibi: 0.0,
            output_gate: OutputGate::Absent,
            temperature: None,
            shared_kv: None,
        }
    }
}

impl PlanBuilder<'_> {
    /// Emits attention of layer `layer` on normed rows `n`. Returns the buffer of the output
    /// product, and where K and V are stored.
    pub(crate) fn attention(
        &mut self,
        layer: u32,
        n: Buf,
        spec: &AttentionSpec,
    ) -> Result<(Buf, KvLayer), Error> {
        let heads = spec.heads;
        let (q_width, k_width, v_width) = widths(&heads);
        let q = self.buf("q", q_width);
        let a = self.buf("a", u64::from(heads.n_head) * u64::from(heads.head_dim_v));
        let mut gate = None;
        let kv = if let Some(kv) = spec.shared_kv {
            if self.both_ways {
                return Err(Error::Unsupported(format!(
                    "layers of architecture '{}' share KV cache, and cannot attend both ways; {} must \
                     not be false",
                    self.keys.arch,
                    self.keys.name("attention.causal"),
                )));
            }
            self.product(&blk(layer, "attn_q"), n, spec.qkv_bias, q)?;
            self.queries_alone(layer, q, spec)?;
            kv
        } else {
            let k = self.buf("k", k_width);
            let v = self.buf("v", v_width);
            gate = self.queries_keys_values(layer, n, spec, (q, k, v))?;
            let kv = self.kv_layer(&heads, spec.window);
            self.append(layer, (q, k, v), spec, kv)?;
            kv
        };
        self.attend(layer, q, a, spec, kv)?;
        let attended = match gate {
            Some((gate, act)) if self.width(gate) == self.width(a) => {
                self.op(Op::Gate { gate, up: a, act });
                gate
            }
            Some((gate, act)) => {
                self.op(Op::GateHeads { x: a, gate, act });
                a
            }
            None => a,
        };
        let p = self.buf("p", self.n_embd);
        let name = blk(layer, "attn_output");
        self.product(&name, attended, spec.output_bias, p)?;
        Ok((p, kv))
    }

    /// Emits queries, keys and values, from three matrices or one, and the output gate if there is
    /// one.
    fn queries_keys_values(
        &mut self,
        layer: u32,
        n: Buf,
        spec: &AttentionSpec,
        (q, k, v): (Buf, Buf, Buf),
    ) -> Result<Option<(Buf, Act)>, Error> {
        let (q_width, k_width, v_width) = widths(&spec.heads);
        let cols = self.width(n);
        let joint =
            (spec.output_gate == OutputGate::WithQueries).then(|| self.buf("qg", 2 * q_width));
        let (q_out, q_rows) = joint.map_or((q, q_width), |joint| (joint, 2 * q_width));
        let outs = [(q_out, q_rows), (k, k_width), (v, v_width)];
        let mut no_values = false;
        let mut products = match self.fused(layer, cols, spec, outs)? {
            Some(products) => products,
            None => {
                let mut products = Vec::with_capacity(4);
                products.push(self.linear(
                    &blk(layer, "attn_q"),
                    cols,
                    q_rows,
                    spec.qkv_bias,
                    q_out,
                )?);
                products.push(self.linear(
                    &blk(layer, "attn_k"),
                    cols,
                    k_width,
                    spec.qkv_bias,
                    k,
                )?);
                let value = blk(layer, "attn_v");
                no_values = spec.keys_as_values && !self.has(&format!("{value}.weight"));
                if !no_values {
                    products.push(self.linear(&value, cols, v_width, spec.qkv_bias, v)?);
                }
                products
            }
        };
        let gate = self.gate_product(layer, n, spec, &mut products)?;
        self.mat_mul(n, products);
        if no_values {
            let part = |x, width: u64| ColumnPart::new(x, 0, 0, width as u32);
            self.columns(1, vec![part(k, k_width)], v);
        }
        let Some(joint) = joint else {
            return Ok(gate);
        };
        let gate = self.buf("qgate", q_width);
        let d = spec.heads.head_dim;
        for (first, out) in [(0, q), (d, gate)] {
            self.columns(
                spec.heads.n_head,
                vec![ColumnPart::new(joint, first, 2 * d, d)],
                out,
            );
        }
        Ok(Some((gate, Act::Sigmoid)))
    }

    /// The products of a fused matrix of queries, keys and values, if the file has one; `outs` are
    /// their buffers and rows.
    fn fused(
        &mut self,
        layer: u32,
        cols: u64,
        spec: &AttentionSpec,
        outs: [(Buf, u64); 3],
    ) -> Result<Option<Vec<Product>>, Error> {
        let fused = blk(layer, "attn_qkv.weight");
        if !self.has(&fused) {
            return Ok(None);
        }
        let rows = outs.iter().map(|(_, rows)| rows).sum();
        let matrix = self.tensor(&fused, &[cols, rows])?;
        let mut products = Vec::with_capacity(4);
        let mut first = 0;
        for (out, rows) in outs {
            products.push(self.rows_of(&matrix, first, rows, out)?);
            first += rows;
        }
        let name = blk(layer, "attn_qkv.bias");
        if spec.qkv_bias != Presence::Absent
            && let Some(bias) = self.tensor_if(&name, &[rows])?
        {
            let mut first = 0;
            for product in &mut products {
                let width = self.width(product.out);
                self.refuse_scaled_bias(&name, product.out, true)?;
                let part = bias.columns(first, width);
                product.bias = Some(self.place(&part, Role::Vector));
                first += width;
            }
        }
        Ok(Some(products))
    }

    /// Adds the product of the output gate, if it has a separate matrix.
    fn gate_product(
        &mut self,
        layer: u32,
        n: Buf,
        spec: &AttentionSpec,
        products: &mut Vec<Product>,
    ) -> Result<Option<(Buf, Act)>, Error> {
        let OutputGate::Matrix(act) = spec.output_gate else {
            return Ok(None);
        };
        let heads = u64::from(spec.heads.n_head);
        let name = blk(layer, "attn_gate");
        let rows = match self.rows_in_file(&format!("{name}.weight")) {
            Some(rows) if rows == heads => heads,
            _ => heads * u64::from(spec.heads.head_dim_v),
        };
        let gate = self.buf("qgate", rows);
        let product = self.linear(&name, self.width(n), rows, Presence::Absent, gate)?;
        products.push(product);
        Ok(Some((gate, act)))
    }

    /// Emits norms and rotation of queries and keys, and appends K and V to the cache.
    fn append(
        &mut self,
        layer: u32,
        (q, k, v): (Buf, Buf, Buf),
        spec: &AttentionSpec,
        kv: KvLayer,
    ) -> Result<(), Error> {
        let (eps, dim) = (self.eps, spec.heads.head_dim);
        let mut rope = spec.rope;
        for (x, name) in [(q, "attn_q_norm.weight"), (k, "attn_k_norm.weight")] {
            let width = self.width(x);
            let name = blk(layer, name);
            match spec.qk_norms {
                QkNorms::Heads(_) => {}
                QkNorms::HeadsRotated => {
                    if let Some(rope) = spec.rope {
                        let n_head = width as u32 / dim;
                        self.op(Op::Rope {
                            x,
                            n_head,
                            head_dim: dim,
                            norm: None,
                            rope,
                        });
                    }
                    rope = None;
                    let weight = Some(self.vector(&name, u64::from(dim))?);
                    self.rms_norm(x, weight, dim, x);
                }
                QkNorms::Rows => {
                    let weight = Some(self.vector(&name, width)?);
                    self.rms_norm(x, weight, width as u32, x);
                }
                QkNorms::LayerNorms(presence) => {
                    if let Some(weight) = self.vector_if(&name, width, presence)? {
                        self.op(Op::LayerNorm {
                            x,
                            weight,
                            bias: None,
                            eps,
                            group: dim,
                            out: x,
                        });
                    }
                }
                QkNorms::LayerNormRows => {
                    let name = name.trim_end_matches(".weight");
                    self.layer_norm_row(x, name)?;
                }
            }
        }
        if spec.value_norm {
            let group = spec.heads.head_dim_v;
            self.rms_norm(v, None, group, v);
        }
        let q_norm = self.head_norm(layer, "attn_q_norm.weight", spec)?;
        let k_norm = self.head_norm(layer, "attn_k_norm.weight", spec)?;
        self.op(Op::RopeKv {
            q,
            k,
            v,
            heads: spec.heads,
            q_norm,
            k_norm,
            rope,
            layer: kv,
        });
        Ok(())
    }

    /// Emits a layer norm over each whole row, if the file has its weight.
    fn layer_norm_row(&mut self, x: Buf, name: &str) -> Result<(), Error> {
        let width = self.width(x);
        let Some(weight) = self.vector_if(&format!("{name}.weight"), width, Presence::Optional)?
        else {
            return Ok(());
        };
        let bias = self.vector_if(&format!("{name}.bias"), width, Presence::Optional)?;
        self.op(Op::LayerNorm {
            x,
            weight,
            bias,
            eps: self.eps,
            group: width as u32,
            out: x,
        });
        Ok(())
    }

    fn head_norm(
        &mut self,
        layer: u32,
        name: &str,
        spec: &AttentionSpec,
    ) -> Result<Option<(TensorIndex, f32)>, Error> {
        let d = u64::from(spec.heads.head_dim);
        let QkNorms::Heads(presence) = spec.qk_norms else {
            return Ok(None);
        };
        let norm = self.vector_if(&blk(layer, name), d, presence)?;
        Ok(norm.map(|n| (n, self.eps)))
    }

    /// Emits norms and rotation of queries whose keys are another layer's.
    fn queries_alone(&mut self, layer: u32, q: Buf, spec: &AttentionSpec) -> Result<(), Error> {
        let norm = self.head_norm(layer, "attn_q_norm.weight", spec)?;
        match spec.rope {
            Some(rope) => self.op(Op::Rope {
                x: q,
                n_head: spec.heads.n_head,
                head_dim: spec.heads.head_dim,
                norm,
                rope,
            }),
            None => {
                if let Some((weight, _)) = norm {
                    self.rms_norm(q, Some(weight), spec.heads.head_dim, q);
                }
            }
        }
        Ok(())
    }

    /// Emits attention of queries over cached K and V.
    pub(crate) fn attend(
        &mut self,
        layer: u32,
        q: Buf,
        out: Buf,
        spec: &AttentionSpec,
        kv: KvLayer,
    ) -> Result<(), Error> {
        if let Some((beta, span)) = spec.temperature {
            self.op(Op::PositionScale { x: q, beta, span });
        }
        let sinks = if spec.sinks {
            let name = blk(layer, "attn_sinks.weight");
            Some(self.vector(&name, u64::from(spec.heads.n_head))?)
        } else {
            None
        };
        self.op(Op::Attention {
            q,
            out,
            heads: spec.heads,
            layer: kv,
            scale: spec.scale,
            mask: match self.mask(spec.window) {
                Mask::Causal if spec.causal_in_images => Mask::CausalInImages,
                mask => mask,
            },
            softcap: spec.softcap,
            sinks,
            alibi: spec.alibi,
        });
        Ok(())
    }
}

impl PlanBuilder<'_> {
    /// The attention mask. In a bidirectional model half of a window is on either side.
    fn mask(&self, window: Option<u32>) -> Mask {
        match (self.both_ways, window) {
            (false, None) => Mask::Causal,
            (false, Some(window)) => Mask::Window(window),
            (true, None) => Mask::Whole,
            (true, Some(window)) => Mask::Around(window / 2),
        }
    }
}

fn widths(heads: &HeadShape) -> (u64, u64, u64) {
    let (n, n_kv) = (u64::from(heads.n_head), u64::from(heads.n_head_kv));
    let (d, d_v) = (u64::from(heads.head_dim), u64::from(heads.head_dim_v));
    (n * d, n_kv * d, n_kv * d_v)
}
