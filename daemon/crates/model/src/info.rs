//! The description of a model that clients get.

use std::collections::BTreeMap;

use rocmforge_gguf::Gguf;

use rocmforge_ops::{
    KV_PAGE_TOKENS, KvGroup, KvType, Plan, RopeOrder, RopeScaling, SegmentKind, Step,
};

use crate::file_type;
use crate::hparams::Hparams;
use crate::weight_shares::WeightShares;

/// Number and bytes of a file's tensors of one type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuantizationShare {
    /// The type's name, for example `Q4_K`.
    pub ty: &'static str,
    /// Number of tensors of the type.
    pub tensors: u32,
    /// Bytes of the tensors of this type.
    pub bytes: u64,
}

/// Description of a segment for clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentInfo {
    /// Name of the segment, as [`rocmforge_ops::Segment::name`].
    pub name: String,
    /// Size of the segment in the file, in bytes.
    pub bytes: u64,
}

/// The description of a model for clients.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelInfo {
    /// Value of `general.architecture`.
    pub architecture: &'static str,
    /// Version of the file's format.
    pub gguf_version: u32,
    /// The tokenizer's model and pre-tokenizer as the file names them, for example `gpt2, qwen2`.
    pub tokenizer: String,
    /// Value of `general.name`, if the file has one.
    pub title: Option<String>,
    /// `general.file_type` by name, such as `Q4_K_M`, if the file has one that is known.
    pub file_type: Option<&'static str>,
    /// Number of elements of all tensors.
    pub n_params: u64,
    /// Bytes of all tensors.
    pub tensor_bytes: u64,
    /// Context length of the training, in tokens.
    pub n_ctx_train: u32,
    /// Width of the residual stream (`n_embd`).
    pub n_embd: u32,
    /// Number of layers.
    pub n_layer: u32,
    /// Number of query heads.
    pub n_head: u32,
    /// Number of KV heads.
    pub n_head_kv: u32,
    /// Number of elements of a query or key head.
    pub head_dim: u32,
    /// Width of the feed-forward.
    pub n_ff: u32,
    /// Number of tokens of the vocabulary.
    pub n_vocab: u32,
    /// Description of the RoPE parameters.
    pub rope: String,
    /// Bytes of KV cache for one token.
    pub kv_bytes_per_token: u64,
    /// Element types of the KV cache, for example `f16`, or `f16, q8_0` if layers differ. Empty
    /// without attention.
    pub kv_type: String,
    /// Bytes of a sequence's recurrent state, whatever its length.
    pub state_bytes: u64,
    /// Number of routed experts of a MoE layer; 0 for a dense model.
    pub n_expert: u32,
    /// Number of routed experts used for each token; 0 for a dense model.
    pub n_expert_used: u32,
    /// Number of segments of routed experts.
    pub n_expert_segments: u32,
    /// Number of known tensors that passes do not use, such as MTP blocks.
    pub left_alone: u32,
    /// Shares of the tensor types, largest first.
    pub quantization: Vec<QuantizationShare>,
    /// Weights of the model's passes by type.
    pub weights: WeightShares,
    /// Segments in the order of a pass.
    pub segments: Vec<SegmentInfo>,
}

/// Shares of a file's tensor types, the one with most bytes first.
fn quantization(gguf: &Gguf) -> Vec<QuantizationShare> {
    let mut types: BTreeMap<&'static str, (u32, u64)> = BTreeMap::new();
    for tensor in gguf.tensors() {
        let share = types.entry(tensor.ty.name()).or_default();
        share.0 += 1;
        share.1 += tensor.bytes;
    }
    let share = |(ty, (tensors, bytes))| QuantizationShare { ty, tensors, bytes };
    let mut shares: Vec<_> = types.into_iter().map(share).collect();
    shares.sort_by_key(|share| std::cmp::Reverse(share.bytes));
    shares
}

impl ModelInfo {
    pub(crate) fn new(gguf: &Gguf, hparams: &Hparams, plan: &Plan, left_alone: &[String]) -> Self {
        let tensors = gguf.tensors().iter();
        let heads = hparams.heads;
        let experts = plan.steps.iter().filter_map(|step| match step {
            Step::Experts { n_expert, ffn, .. } => Some((*n_expert, ffn.n_used)),
            Step::Run { .. } => None,
        });
        let (n_expert, n_expert_used) = experts.max().unwrap_or_default();
        let mut info = Self {
            architecture: hparams.arch,
            gguf_version: gguf.version(),
            tokenizer: ["tokenizer.ggml.model", "tokenizer.ggml.pre"]
                .iter()
                .filter_map(|key| gguf.str(key).ok().flatten())
                .map(|name| name.chars().take(64).collect::<String>())
                .collect::<Vec<_>>()
                .join(", "),
            title: gguf
                .str_lossy("general.name")
                .map(|s| s.chars().take(256).collect()),
            file_type: gguf
                .u32("general.file_type")
                .ok()
                .flatten()
                .and_then(file_type::name),
            n_params: tensors
                .clone()
                .map(|t| t.dims.iter().product::<u64>())
                .sum(),
            tensor_bytes: tensors.map(|t| t.bytes).sum(),
            n_ctx_train: hparams.n_ctx_train,
            n_embd: hparams.n_embd,
            n_layer: hparams.n_layer,
            n_head: heads.n_head,
            n_head_kv: heads.n_head_kv,
            head_dim: heads.head_dim,
            n_ff: hparams.n_ff,
            n_vocab: hparams.n_vocab,
            rope: rope(hparams, plan),
            kv_bytes_per_token: 0,
            kv_type: String::new(),
            state_bytes: plan.state_elements * 4,
            n_expert,
            n_expert_used,
            n_expert_segments: plan
                .segments
                .iter()
                .filter(|s| s.kind != SegmentKind::Ordered)
                .count() as u32,
            left_alone: left_alone.len() as u32,
            quantization: quantization(gguf),
            weights: WeightShares::new(plan, (n_expert_used, n_expert)),
            segments: plan
                .segments
                .iter()
                .map(|s| SegmentInfo {
                    name: s.name.clone(),
                    bytes: s.file_bytes(),
                })
                .collect(),
        };
        info.set_kv(plan);
        info
    }

    /// Sets the fields about KV from the plan.
    pub(crate) fn set_kv(&mut self, plan: &Plan) {
        let per_token = |g: &KvGroup| (g.layout.page_bytes() / KV_PAGE_TOKENS) as u64;
        self.kv_bytes_per_token = plan.kv.iter().map(per_token).sum();
        let there = |ty: &KvType| plan.kv.iter().any(|g| g.layout.ty == *ty);
        let names = KvType::ALL.into_iter().filter(there).map(KvType::name);
        self.kv_type = names.collect::<Vec<_>>().join(", ");
    }
}

fn rope(hparams: &Hparams, plan: &Plan) -> String {
    let one = |spec: &rocmforge_ops::RopeSpec| {
        let order = match spec.order {
            RopeOrder::Norm => "adjacent pairs",
            RopeOrder::Neox => "half-split pairs",
        };
        let scaling = match spec.scaling {
            RopeScaling::None => String::new(),
            RopeScaling::Linear { factor } => format!(", linear scaling {factor}"),
            RopeScaling::Yarn {
                factor, orig_ctx, ..
            } => format!(", YaRN {factor} x {orig_ctx}"),
        };
        let factors = match (&spec.factors, &spec.long) {
            (_, Some(long)) => format!(
                ", frequency factors for up to {} positions and for more",
                long.beyond
            ),
            (Some(_), None) => ", frequency factors".to_owned(),
            (None, None) => String::new(),
        };
        format!(
            "{order}, {} of {} elements, base {}{scaling}{factors}",
            spec.n_rot, hparams.heads.head_dim, spec.freq_base
        )
    };
    match plan.ropes.as_slice() {
        [] => "none".to_owned(),
        all => all.iter().map(one).collect::<Vec<_>>().join("; "),
    }
}
