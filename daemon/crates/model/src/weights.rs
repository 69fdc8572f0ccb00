//! Where each weight is: every tensor that the architecture needs, by name, with its shape checked.

use std::collections::HashSet;

use rocmforge_device::{Role, TensorDesc};
use rocmforge_gguf::Gguf;

use crate::arch::{Arch, Need};
use crate::error::Error;
use crate::hparams::Hparams;

/// Tensors that old converters wrote and that nothing needs: rotations are computed.
const IGNORED: [&str; 2] = ["attn_rot_embd", "rope.freqs"];

/// A product's matrix and bias.
#[derive(Debug, Clone)]
pub(crate) struct Linear {
    pub(crate) weight: TensorDesc,
    pub(crate) bias: Option<TensorDesc>,
}

/// The weights of one layer.
#[derive(Debug, Clone)]
pub(crate) struct LayerWeights {
    pub(crate) attn_norm: TensorDesc,
    pub(crate) attn_q: Linear,
    pub(crate) attn_k: Linear,
    pub(crate) attn_v: Linear,
    pub(crate) attn_q_norm: Option<TensorDesc>,
    pub(crate) attn_k_norm: Option<TensorDesc>,
    pub(crate) attn_output: Linear,
    pub(crate) ffn_norm: TensorDesc,
    pub(crate) ffn_gate: Linear,
    pub(crate) ffn_up: Linear,
    pub(crate) ffn_down: Linear,
}

/// All weights of a model.
#[derive(Debug, Clone)]
pub(crate) struct Weights {
    pub(crate) embedding: TensorDesc,
    pub(crate) rope_factors: Option<TensorDesc>,
    pub(crate) layers: Vec<LayerWeights>,
    pub(crate) output_norm: TensorDesc,
    /// The output matrix; the embedding's if the file has none of its own (tied).
    pub(crate) output: TensorDesc,
}

/// Finds every weight and refuses files with tensors that the architecture would not use, since computing without
/// them would give wrong text.
pub(crate) fn map(gguf: &Gguf, arch: &Arch, hparams: &Hparams) -> Result<Weights, Error> {
    let mut find = Finder {
        gguf,
        arch: arch.name,
        used: HashSet::new(),
    };
    let n_embd = u64::from(hparams.n_embd);
    let n_vocab = u64::from(hparams.n_vocab);
    let n_ff = u64::from(hparams.n_ff);
    let q_rows = u64::from(hparams.heads.n_head) * u64::from(hparams.heads.head_dim);
    let k_rows = u64::from(hparams.heads.n_head_kv) * u64::from(hparams.heads.head_dim);
    let v_rows = u64::from(hparams.heads.n_head_kv) * u64::from(hparams.heads.head_dim_v);
    let a_cols = u64::from(hparams.heads.n_head) * u64::from(hparams.heads.head_dim_v);
    let head_dim = u64::from(hparams.heads.head_dim);

    let embedding = find.matrix("token_embd", n_embd, n_vocab)?;
    let output = find
        .optional_matrix("output", n_embd, n_vocab)?
        .unwrap_or_else(|| embedding.clone());
    let output_norm = find.vector("output_norm.weight", n_embd)?;
    let rope_factors =
        find.optional_vector("rope_freqs.weight", u64::from(hparams.rope.n_rot) / 2)?;
    let mut layers = Vec::with_capacity(hparams.n_layer as usize);
    for i in 0..hparams.n_layer {
        let blk = |name: &str| format!("blk.{i}.{name}");
        layers.push(LayerWeights {
            attn_norm: find.vector(&blk("attn_norm.weight"), n_embd)?,
            attn_q: find.linear(&blk("attn_q"), n_embd, q_rows, arch.qkv_bias)?,
            attn_k: find.linear(&blk("attn_k"), n_embd, k_rows, arch.qkv_bias)?,
            attn_v: find.linear(&blk("attn_v"), n_embd, v_rows, arch.qkv_bias)?,
            attn_q_norm: find.needed_vector(&blk("attn_q_norm.weight"), head_dim, arch.qk_norm)?,
            attn_k_norm: find.needed_vector(&blk("attn_k_norm.weight"), head_dim, arch.qk_norm)?,
            attn_output: find.linear(&blk("attn_output"), a_cols, n_embd, arch.output_bias)?,
            ffn_norm: find.vector(&blk("ffn_norm.weight"), n_embd)?,
            ffn_gate: find.linear(&blk("ffn_gate"), n_embd, n_ff, arch.ffn_bias)?,
            ffn_up: find.linear(&blk("ffn_up"), n_embd, n_ff, arch.ffn_bias)?,
            ffn_down: find.linear(&blk("ffn_down"), n_ff, n_embd, arch.ffn_bias)?,
        });
    }
    find.refuse_unused()?;
    Ok(Weights {
        embedding,
        rope_factors,
        layers,
        output_norm,
        output,
    })
}

struct Finder<'a> {
    gguf: &'a Gguf,
    arch: &'static str,
    used: HashSet<String>,
}

impl Finder<'_> {
    fn optional(
        &mut self,
        name: &str,
        cols: u64,
        rows: u64,
        role: Role,
    ) -> Result<Option<TensorDesc>, Error> {
        let Some(tensor) = self.gguf.tensor(name) else {
            return Ok(None);
        };
        let expected = match role {
            Role::Matrix => [cols, rows, 1, 1],
            Role::Vector => [cols, 1, 1, 1],
        };
        if tensor.dims != expected {
            let keep = |dims: &[u64; 4], n: usize| dims[..n.clamp(1, 4)].to_vec();
            return Err(Error::WrongShape {
                name: name.to_owned(),
                found: keep(&tensor.dims, tensor.n_dims as usize),
                expected: keep(&expected, if role == Role::Matrix { 2 } else { 1 }),
                arch: self.arch,
            });
        }
        self.used.insert(name.to_owned());
        Ok(Some(TensorDesc {
            name: name.to_owned(),
            ty: tensor.ty,
            rows,
            cols,
            offset: tensor.offset,
            bytes: tensor.bytes,
            role,
        }))
    }

    fn required(
        &mut self,
        name: &str,
        cols: u64,
        rows: u64,
        role: Role,
    ) -> Result<TensorDesc, Error> {
        self.optional(name, cols, rows, role)?
            .ok_or_else(|| Error::MissingTensor(name.to_owned()))
    }

    fn matrix(&mut self, name: &str, cols: u64, rows: u64) -> Result<TensorDesc, Error> {
        self.required(&format!("{name}.weight"), cols, rows, Role::Matrix)
    }

    fn optional_matrix(
        &mut self,
        name: &str,
        cols: u64,
        rows: u64,
    ) -> Result<Option<TensorDesc>, Error> {
        self.optional(&format!("{name}.weight"), cols, rows, Role::Matrix)
    }

    fn vector(&mut self, name: &str, cols: u64) -> Result<TensorDesc, Error> {
        self.required(name, cols, 1, Role::Vector)
    }

    fn optional_vector(&mut self, name: &str, cols: u64) -> Result<Option<TensorDesc>, Error> {
        self.optional(name, cols, 1, Role::Vector)
    }

    fn needed_vector(
        &mut self,
        name: &str,
        cols: u64,
        need: Need,
    ) -> Result<Option<TensorDesc>, Error> {
        match need {
            Need::Required => self.vector(name, cols).map(Some),
            Need::Optional => self.optional_vector(name, cols),
            Need::Absent => Ok(None),
        }
    }

    fn linear(&mut self, name: &str, cols: u64, rows: u64, bias: Need) -> Result<Linear, Error> {
        Ok(Linear {
            weight: self.matrix(name, cols, rows)?,
            bias: self.needed_vector(&format!("{name}.bias"), rows, bias)?,
        })
    }

    fn refuse_unused(&self) -> Result<(), Error> {
        let ignored = |name: &str| IGNORED.iter().any(|part| name.contains(part));
        let unused: Vec<&str> = self
            .gguf
            .tensors()
            .iter()
            .map(|t| t.name.as_str())
            .filter(|name| !self.used.contains(*name) && !ignored(name))
            .collect();
        if unused.is_empty() {
            return Ok(());
        }
        Err(Error::Unsupported(format!(
            "the file has {} tensors that architecture '{}' as implemented does not use, so its text would be wrong: {}{}",
            unused.len(),
            self.arch,
            unused[..unused.len().min(5)].join(", "),
            if unused.len() > 5 { ", ..." } else { "" },
        )))
    }
}
