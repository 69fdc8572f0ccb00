//! The tensors of a shape, in the order of its file.

use rocmforge_gguf::TensorType;

use crate::presets::{ATTENTION_EVERY, Experts, Linear, Mix, Shape};

/// What a tensor holds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Fill {
    /// Random weights, so many times as large as an initialisation's.
    Random(f32),
    /// The same, each row times `exp(z)` of a normal `z` of this standard deviation.
    Skewed(f32),
    /// The rows of the first tensor, each one further in circles of [`crate::presets::CIRCLE`].
    Circling,
    /// The same everywhere.
    All(f32),
}

/// A tensor of a model: dimensions in ggml's order, fastest first.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TensorSpec {
    pub(crate) name: String,
    pub(crate) dims: Vec<u64>,
    pub(crate) ty: TensorType,
    pub(crate) fill: Fill,
}

impl TensorSpec {
    /// A matrix of random weights, or a vector of ones: a norm.
    fn new(name: &str, dims: &[u32], ty: TensorType) -> Self {
        Self {
            name: format!("{name}.weight"),
            dims: dims.iter().copied().map(u64::from).collect(),
            ty,
            fill: match dims.len() {
                1 => Fill::All(1.0),
                _ => Fill::Random(1.0),
            },
        }
    }

    /// Bytes of its data.
    pub(crate) fn bytes(&self) -> u64 {
        let row = self.ty.row_bytes(self.dims[0]);
        row.expect("every preset's rows are whole blocks") * self.dims[1..].iter().product::<u64>()
    }
}

/// What an embedding is large by in a text that goes round: elements of about 1 in 8B, where
/// layers add [`LAYER`] each.
const EMBEDDING: f32 = 64.0;

/// What layers are small by there.
const LAYER: f32 = 1.0 / 16.0;

/// Tensors of a model under way.
struct Tensors {
    all: Vec<TensorSpec>,
    mix: Mix,
    layer: u32,
}

impl Tensors {
    fn add(&mut self, name: &str, dims: &[u32], ty: TensorType) -> &mut TensorSpec {
        let name = format!("blk.{}.{name}", self.layer);
        self.all.push(TensorSpec::new(&name, dims, ty));
        self.all.last_mut().expect("just added")
    }

    /// Random f32 that is added to a product of this name.
    fn bias(&mut self, of: &str, dims: &[u32]) {
        let layer = self.layer;
        let spec = self.add(of, dims, TensorType::F32);
        spec.name = format!("blk.{layer}.{of}.bias");
        spec.fill = Fill::Random(1.0);
    }

    fn attention(&mut self, shape: &Shape, finer: TensorType) {
        let (embd, base) = (shape.n_embd, self.mix.base());
        let kv = shape.n_head_kv * shape.head_dim;
        let attended = shape.n_head * shape.head_dim;
        // Where other layers are gated delta nets, a head's gate lies behind its query.
        let q = attended * (1 + u32::from(shape.linear.is_some()));
        self.add("attn_q", &[embd, q], base);
        self.add("attn_k", &[embd, kv], base);
        self.add("attn_v", &[embd, kv], finer);
        if shape.qk_norm {
            self.add("attn_q_norm", &[shape.head_dim], TensorType::F32);
            self.add("attn_k_norm", &[shape.head_dim], TensorType::F32);
        }
        self.add("attn_output", &[attended, embd], base);
        if shape.is_gpt_oss() {
            self.bias("attn_q", &[q]);
            self.bias("attn_k", &[kv]);
            self.bias("attn_v", &[kv]);
            self.bias("attn_output", &[embd]);
            self.add("attn_sinks", &[shape.n_head], TensorType::F32);
        }
    }

    fn delta_net(&mut self, shape: &Shape, linear: Linear) {
        let (embd, base, f32) = (shape.n_embd, self.mix.base(), TensorType::F32);
        let values = linear.n_value * linear.head_dim;
        let convolved = 2 * linear.n_key * linear.head_dim + values;
        self.add("attn_qkv", &[embd, convolved], base);
        self.add("attn_gate", &[embd, values], base);
        self.add("ssm_alpha", &[embd, linear.n_value], base);
        self.add("ssm_beta", &[embd, linear.n_value], base);
        let layer = self.layer;
        // A state loses some hundredth a token.
        let decay = self.add("ssm_a", &[linear.n_value], f32);
        (decay.name, decay.fill) = (format!("blk.{layer}.ssm_a"), Fill::All(-0.05));
        let step = self.add("ssm_dt", &[linear.n_value], f32);
        (step.name, step.fill) = (format!("blk.{layer}.ssm_dt.bias"), Fill::All(-1.0));
        self.add("ssm_conv1d", &[4, convolved], f32);
        self.add("ssm_norm", &[linear.head_dim], f32);
        self.add("ssm_out", &[values, embd], base);
    }

    fn experts(&mut self, shape: &Shape, experts: Experts, finer: TensorType) {
        let (embd, base, f32) = (shape.n_embd, self.mix.base(), TensorType::F32);
        let Experts {
            n,
            n_ff,
            shared,
            skew,
            ..
        } = experts;
        let (in_base, in_finer) = (self.mix.experts(base), self.mix.experts(finer));
        let router = self.add("ffn_gate_inp", &[embd, n], f32);
        if skew > 0.0 {
            router.fill = Fill::Skewed(skew);
        }
        self.add("ffn_gate_exps", &[embd, n_ff, n], in_base);
        self.add("ffn_up_exps", &[embd, n_ff, n], in_base);
        self.add("ffn_down_exps", &[n_ff, embd, n], in_finer);
        if shared {
            self.add("ffn_gate_inp_shexp", &[embd, 1], f32);
            self.add("ffn_gate_shexp", &[embd, n_ff], base);
            self.add("ffn_up_shexp", &[embd, n_ff], base);
            self.add("ffn_down_shexp", &[n_ff, embd], finer);
        }
        if shape.is_gpt_oss() {
            self.bias("ffn_gate_inp", &[n]);
            self.bias("ffn_gate_exps", &[n_ff, n]);
            self.bias("ffn_up_exps", &[n_ff, n]);
            self.bias("ffn_down_exps", &[embd, n]);
        }
    }
}

/// All tensors of a model.
pub(crate) fn tensors(shape: &Shape, mix: Mix, n_vocab: u32) -> Vec<TensorSpec> {
    let Shape {
        n_embd: embd, n_ff, ..
    } = *shape;
    let (base, f32) = (mix.base(), TensorType::F32);
    let embedding = match shape.tied || shape.circling {
        true => mix.output(),
        false => base,
    };
    let mut to = Tensors {
        all: vec![TensorSpec::new("token_embd", &[embd, n_vocab], embedding)],
        mix,
        layer: 0,
    };
    // The second norm of a layer, by what it is called there.
    let norm = match shape.linear.is_some() || shape.is_gpt_oss() {
        true => "post_attention_norm",
        false => "ffn_norm",
    };
    for i in 0..shape.n_layer {
        to.layer = i;
        let finer = mix.finer(i, shape.n_layer);
        to.add("attn_norm", &[embd], f32);
        match shape.linear {
            Some(linear) if (i + 1) % ATTENTION_EVERY != 0 => to.delta_net(shape, linear),
            _ => to.attention(shape, finer),
        }
        to.add(norm, &[embd], f32);
        if let Some(experts) = shape.experts {
            to.experts(shape, experts, finer);
            continue;
        }
        to.add("ffn_gate", &[embd, n_ff], base);
        to.add("ffn_up", &[embd, n_ff], base);
        to.add("ffn_down", &[n_ff, embd], finer);
    }
    let mut all = to.all;
    all.push(TensorSpec::new("output_norm", &[embd], f32));
    if !shape.tied {
        all.push(TensorSpec::new("output", &[embd, n_vocab], mix.output()));
    }
    if shape.circling {
        all[0].fill = Fill::Random(EMBEDDING);
        for spec in &mut all {
            if spec.name.contains("attn_output") || spec.name.contains("ffn_down") {
                spec.fill = Fill::Random(LAYER);
            } else if spec.name == "output.weight" {
                spec.fill = Fill::Circling;
            }
        }
    }
    all
}
