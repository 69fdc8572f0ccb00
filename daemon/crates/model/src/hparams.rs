//! Hyperparameters that every decoder has. Those of single architectures are read in the
//! architectures' files.

use rocmforge_gguf::Gguf;
use rocmforge_ops::HeadShape;

use crate::arch::is_encoder;
use crate::error::Error;
use crate::keys::{HEAD_DIM_MAX, Keys, N_CTX_MAX, N_HEAD_MAX, N_LAYER_MAX, WIDTH_MAX};

/// Hyperparameters of a decoder.
#[derive(Debug, Clone, PartialEq)]
pub struct Hparams {
    /// Architecture.
    pub arch: &'static str,
    /// Context length of the training, in tokens.
    pub n_ctx_train: u32,
    /// Width of the residual stream (`n_embd`).
    pub n_embd: u32,
    /// Number of layers, without MTP blocks.
    pub n_layer: u32,
    /// Number of MTP blocks behind the layers, which predict further tokens.
    pub n_layer_nextn: u32,
    /// Largest width of any layer's feed-forward.
    pub n_ff: u32,
    /// Width of each layer's feed-forward; 0 if the file says so.
    pub n_ff_of: Vec<u32>,
    /// Number of rows of the embedding.
    pub n_vocab: u32,
    /// Head counts and sizes of the layer with most heads.
    pub heads: HeadShape,
    /// Number of query heads of each layer.
    pub n_head_of: Vec<u32>,
    /// Number of KV heads of each layer; 0 for layers without attention.
    pub n_head_kv_of: Vec<u32>,
    /// Epsilon, which is added to the mean of squares in every RMSNorm.
    pub norm_eps: f32,
    /// Whether rows attend to later rows of their text, as in all encoders.
    pub both_ways: bool,
    /// Pooling of embeddings according to the file; `None` if it has none, or an unknown one.
    pub pooling: Option<Pooling>,
    /// Whether the file is a reranker that answers "yes" or "no": its classification head consists
    /// of these tokens' rows.
    pub ranks_yes_no: bool,
}

/// Maximum number of patches of an image.
pub const N_PATCH_MAX: u32 = 1 << 16;

/// The purpose of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// The model generates text. Its hidden states can be embeddings too.
    Text,
    /// The model computes embeddings.
    Embedding,
    /// The model classifies a text: how well a document fits a query.
    Ranking,
}

/// How hidden states of a text are pooled into its embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pooling {
    /// No pooling: every token has a vector.
    None,
    /// The mean of all hidden states.
    Mean,
    /// The hidden state of the first token.
    First,
    /// The hidden state of the last token.
    Last,
}

impl Pooling {
    /// The pooling with the number that files use (llama.cpp's `llama_pooling_type`).
    fn numbered(number: u32) -> Option<Self> {
        match number {
            0 => Some(Self::None),
            1 => Some(Self::Mean),
            2 => Some(Self::First),
            3 => Some(Self::Last),
            _ => None,
        }
    }
}

impl Hparams {
    pub(crate) fn read(keys: Keys<'_>) -> Result<Self, Error> {
        let n_embd = keys.count("embedding_length", WIDTH_MAX)?;
        let n_block = keys.count("block_count", N_LAYER_MAX)?;
        let n_layer_nextn = keys.maybe("nextn_predict_layers", N_LAYER_MAX)?;
        let n_layer = n_block
            .checked_sub(n_layer_nextn)
            .filter(|&n| n > 0)
            .ok_or_else(|| {
                let message = format!("must be less than the {n_block} blocks");
                keys.bad("nextn_predict_layers", n_layer_nextn, message)
            })?;
        let n_head_of = keys
            .per_layer("attention.head_count", n_layer, N_HEAD_MAX)?
            .ok_or_else(|| keys.missing("attention.head_count"))?;
        let n_head_kv_of = keys
            .per_layer("attention.head_count_kv", n_layer, N_HEAD_MAX)?
            .unwrap_or_else(|| n_head_of.clone());
        let n_head = n_head_of.iter().copied().max().unwrap_or(0);
        if n_head == 0 {
            return Err(keys.bad(
                "attention.head_count",
                0,
                format!("must be in 1..={N_HEAD_MAX}"),
            ));
        }
        for (&n, &n_kv) in n_head_of.iter().zip(&n_head_kv_of) {
            if n_kv > 0 && (n == 0 || n % n_kv != 0) {
                let message = format!("must divide the {n} heads");
                return Err(keys.bad("attention.head_count_kv", n_kv, message));
            }
        }
        let n_head_kv = n_head_kv_of.iter().copied().max().unwrap_or(0);
        if n_head_kv == 0 {
            return Err(keys.bad(
                "attention.head_count_kv",
                0,
                "at least one layer must attend",
            ));
        }
        let n_ff_of = keys
            .per_layer("feed_forward_length", n_layer, WIDTH_MAX)?
            .unwrap_or_else(|| vec![0; n_layer as usize]);
        let key_default = n_embd / n_head;
        Ok(Self {
            arch: keys.arch,
            n_ctx_train: keys.count("context_length", N_CTX_MAX)?,
            n_embd,
            n_layer,
            n_layer_nextn,
            n_ff: n_ff_of.iter().copied().max().unwrap_or(0),
            n_ff_of,
            n_vocab: vocab_rows(keys.gguf)?,
            heads: HeadShape {
                n_head,
                n_head_kv,
                head_dim: keys.count_or("attention.key_length", HEAD_DIM_MAX, key_default)?,
                head_dim_v: keys.count_or("attention.value_length", HEAD_DIM_MAX, key_default)?,
            },
            n_head_of,
            n_head_kv_of,
            norm_eps: keys.norm_eps()?,
            both_ways: is_encoder(keys.arch) || !keys.flag("attention.causal", true)?,
            pooling: keys
                .optional_u32("pooling_type")?
                .and_then(Pooling::numbered),
            ranks_yes_no: keys.ranks_yes_no()?,
        })
    }

    /// Hyperparameters of a vision tower, whose layers are all alike.
    pub(crate) fn of_tower(
        arch: &'static str,
        n_embd: u32,
        n_layer: u32,
        n_head: u32,
        n_ff: u32,
        norm_eps: f32,
    ) -> Self {
        let head_dim = n_embd / n_head;
        Self {
            arch,
            n_ctx_train: N_PATCH_MAX,
            n_embd,
            n_layer,
            n_layer_nextn: 0,
            n_ff,
            n_ff_of: vec![n_ff; n_layer as usize],
            n_vocab: 0,
            heads: HeadShape {
                n_head,
                n_head_kv: n_head,
                head_dim,
                head_dim_v: head_dim,
            },
            n_head_of: vec![n_head; n_layer as usize],
            n_head_kv_of: vec![n_head; n_layer as usize],
            norm_eps,
            both_ways: true,
            pooling: None,
            ranks_yes_no: false,
        }
    }

    /// The head counts and sizes of a layer.
    pub(crate) fn heads_of(&self, layer: u32) -> HeadShape {
        HeadShape {
            n_head: self.n_head_of[layer as usize],
            n_head_kv: self.n_head_kv_of[layer as usize],
            ..self.heads
        }
    }

    /// The width of a layer's feed-forward.
    ///
    /// # Errors
    /// [`Error::BadValue`] if the file says 0.
    pub(crate) fn n_ff(&self, keys: Keys<'_>, layer: u32) -> Result<u64, Error> {
        match self.n_ff_of[layer as usize] {
            0 => Err(keys.bad(
                "feed_forward_length",
                0,
                format!("must be in 1..={WIDTH_MAX}"),
            )),
            n => Ok(u64::from(n)),
        }
    }
}

/// Rows of the embedding. The tokenizer's count is compared with it where both are known.
fn vocab_rows(gguf: &Gguf) -> Result<u32, Error> {
    const NAME: &str = "token_embd.weight";
    let tensor = gguf
        .tensor(NAME)
        .ok_or_else(|| Error::MissingTensor(NAME.to_owned()))?;
    u32::try_from(tensor.dims[1])
        .ok()
        .filter(|&n| n > 0 && n <= 1 << 24)
        .ok_or_else(|| Error::WrongShape {
            name: NAME.to_owned(),
            found: tensor.dims.to_vec(),
            expected: vec![tensor.dims[0], 1 << 24],
            arch: "a decoder",
        })
}
