//! Shapes of real models, and which tensor has which type.

use clap::ValueEnum;
use rocmforge_gguf::TensorType;

/// A model's shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Preset {
    /// Llama 3.2 1B.
    #[value(name = "llama-1b")]
    Llama1b,
    /// Llama 3.1 8B.
    #[value(name = "llama-8b")]
    Llama8b,
    /// Qwen3 8B.
    #[value(name = "qwen3-8b")]
    Qwen3_8b,
    /// Qwen3 0.6B.
    #[value(name = "qwen3-0.6b")]
    Qwen3_0_6b,
    /// Qwen3 30B-A3B: 128 experts a layer, of which a token uses 8.
    #[value(name = "qwen3-30b-a3b")]
    Qwen3_30bA3b,
    /// A llama of 4 layers of 512, for trying things out.
    Mini,
    /// The same with 16 experts a layer, of which a token uses 4.
    MiniMoe,
}

/// The types of a model's matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Mix {
    /// F16 throughout.
    F16,
    /// Q8_0 throughout.
    #[value(name = "q8_0")]
    Q8_0,
    /// Q4_0, the output in Q6_K.
    #[value(name = "q4_0")]
    Q4_0,
    /// Q4_K; the output and, in half of the layers, attn_v and ffn_down in Q6_K.
    #[value(name = "q4_k_m")]
    Q4KM,
    /// Q6_K throughout.
    #[value(name = "q6_k")]
    Q6K,
}

/// Hyperparameters.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) arch: &'static str,
    pub(crate) n_layer: u32,
    pub(crate) n_embd: u32,
    pub(crate) n_ff: u32,
    pub(crate) n_head: u32,
    pub(crate) n_head_kv: u32,
    pub(crate) head_dim: u32,
    pub(crate) rope_freq_base: f32,
    pub(crate) rms_eps: f32,
    /// The output matrix is the embedding.
    pub(crate) tied: bool,
    /// Norms over each head's query and key.
    pub(crate) qk_norm: bool,
    /// The experts of each layer, in place of one feed-forward.
    pub(crate) experts: Option<Experts>,
}

/// A layer's experts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Experts {
    /// How many there are.
    pub(crate) n: u32,
    /// How many a token uses.
    pub(crate) used: u32,
    /// Width of each one's hidden layer.
    pub(crate) n_ff: u32,
}

impl Preset {
    /// Its name on the command line and in file names.
    pub(crate) fn name(self) -> String {
        value_name(self)
    }

    pub(crate) fn shape(self) -> Shape {
        let llama = Shape {
            arch: "llama",
            n_layer: 16,
            n_embd: 2048,
            n_ff: 8192,
            n_head: 32,
            n_head_kv: 8,
            head_dim: 64,
            rope_freq_base: 500_000.0,
            rms_eps: 1e-5,
            tied: true,
            qk_norm: false,
            experts: None,
        };
        let qwen3 = Shape {
            arch: "qwen3",
            head_dim: 128,
            rope_freq_base: 1_000_000.0,
            rms_eps: 1e-6,
            qk_norm: true,
            ..llama
        };
        match self {
            Preset::Llama1b => llama,
            Preset::Llama8b => Shape {
                n_layer: 32,
                n_embd: 4096,
                n_ff: 14_336,
                head_dim: 128,
                tied: false,
                ..llama
            },
            Preset::Qwen3_8b => Shape {
                n_layer: 36,
                n_embd: 4096,
                n_ff: 12_288,
                tied: false,
                ..qwen3
            },
            Preset::Qwen3_0_6b => Shape {
                n_layer: 28,
                n_embd: 1024,
                n_ff: 3072,
                n_head: 16,
                ..qwen3
            },
            Preset::Qwen3_30bA3b => Shape {
                arch: "qwen3moe",
                n_layer: 48,
                n_ff: 6144,
                n_head_kv: 4,
                tied: false,
                experts: Some(Experts {
                    n: 128,
                    used: 8,
                    n_ff: 768,
                }),
                ..qwen3
            },
            Preset::Mini => Shape {
                n_layer: 4,
                n_embd: 512,
                n_ff: 1536,
                n_head: 8,
                n_head_kv: 2,
                ..llama
            },
            Preset::MiniMoe => Shape {
                arch: "qwen3moe",
                n_layer: 4,
                n_embd: 512,
                n_ff: 1536,
                n_head: 8,
                n_head_kv: 2,
                head_dim: 64,
                experts: Some(Experts {
                    n: 16,
                    used: 4,
                    n_ff: 256,
                }),
                ..qwen3
            },
        }
    }
}

impl Mix {
    /// Its name on the command line and in file names.
    pub(crate) fn name(self) -> String {
        value_name(self)
    }

    /// `general.file_type`, as the ecosystem numbers mixes.
    pub(crate) fn file_type(self) -> u32 {
        match self {
            Mix::F16 => 1,
            Mix::Q4_0 => 2,
            Mix::Q8_0 => 7,
            Mix::Q4KM => 15,
            Mix::Q6K => 18,
        }
    }

    /// The type of most matrices.
    fn base(self) -> TensorType {
        match self {
            Mix::F16 => TensorType::F16,
            Mix::Q8_0 => TensorType::Q8_0,
            Mix::Q4_0 => TensorType::Q4_0,
            Mix::Q4KM => TensorType::Q4K,
            Mix::Q6K => TensorType::Q6K,
        }
    }

    /// The type of the output matrix, which the usual mixes keep finer.
    fn output(self) -> TensorType {
        match self {
            Mix::Q4_0 | Mix::Q4KM => TensorType::Q6K,
            Mix::F16 | Mix::Q8_0 | Mix::Q6K => self.base(),
        }
    }

    /// The type of attn_v and ffn_down of a layer. The usual mix spends more bits in the first and last eighth of the
    /// layers and in every third one between.
    fn finer(self, layer: u32, n_layer: u32) -> TensorType {
        let eighth = n_layer / 8;
        let more = layer < eighth || layer >= 7 * n_layer / 8 || (layer - eighth) % 3 == 2;
        match self {
            Mix::Q4KM if more => TensorType::Q6K,
            _ => self.base(),
        }
    }
}

fn value_name(value: impl ValueEnum) -> String {
    let value = value.to_possible_value().expect("no value is hidden");
    value.get_name().to_owned()
}

/// A tensor of a model: dimensions in ggml's order, fastest first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TensorSpec {
    pub(crate) name: String,
    pub(crate) dims: Vec<u64>,
    pub(crate) ty: TensorType,
}

impl TensorSpec {
    fn new(name: &str, dims: &[u32], ty: TensorType) -> Self {
        Self {
            name: format!("{name}.weight"),
            dims: dims.iter().copied().map(u64::from).collect(),
            ty,
        }
    }

    /// Bytes of its data.
    pub(crate) fn bytes(&self) -> u64 {
        let row = self.ty.row_bytes(self.dims[0]);
        row.expect("every preset's rows are whole blocks") * self.dims[1..].iter().product::<u64>()
    }
}

/// All tensors of a model, in the order of its file.
pub(crate) fn tensors(shape: &Shape, mix: Mix, n_vocab: u32) -> Vec<TensorSpec> {
    let Shape {
        n_embd: embd, n_ff, ..
    } = *shape;
    let (q, kv) = (
        shape.n_head * shape.head_dim,
        shape.n_head_kv * shape.head_dim,
    );
    let (base, f32) = (mix.base(), TensorType::F32);
    let embedding = if shape.tied { mix.output() } else { base };
    let mut all = vec![TensorSpec::new("token_embd", &[embd, n_vocab], embedding)];
    for i in 0..shape.n_layer {
        let finer = mix.finer(i, shape.n_layer);
        let mut add = |name: &str, dims: &[u32], ty| {
            all.push(TensorSpec::new(&format!("blk.{i}.{name}"), dims, ty));
        };
        add("attn_norm", &[embd], f32);
        add("attn_q", &[embd, q], base);
        add("attn_k", &[embd, kv], base);
        add("attn_v", &[embd, kv], finer);
        if shape.qk_norm {
            add("attn_q_norm", &[shape.head_dim], f32);
            add("attn_k_norm", &[shape.head_dim], f32);
        }
        add("attn_output", &[q, embd], base);
        add("ffn_norm", &[embd], f32);
        if let Some(Experts { n, n_ff, .. }) = shape.experts {
            add("ffn_gate_inp", &[embd, n], f32);
            add("ffn_gate_exps", &[embd, n_ff, n], base);
            add("ffn_up_exps", &[embd, n_ff, n], base);
            add("ffn_down_exps", &[n_ff, embd, n], finer);
            continue;
        }
        add("ffn_gate", &[embd, n_ff], base);
        add("ffn_up", &[embd, n_ff], base);
        add("ffn_down", &[n_ff, embd], finer);
    }
    all.push(TensorSpec::new("output_norm", &[embd], f32));
    if !shape.tied {
        all.push(TensorSpec::new("output", &[embd, n_vocab], mix.output()));
    }
    all
}
