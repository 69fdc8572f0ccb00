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
    /// The same with routers that prefer some experts, as those of trained mixtures do.
    #[value(name = "qwen3-30b-a3b-skewed")]
    Qwen3_30bA3bSkewed,
    /// Qwen3.5 0.8B: three of four layers are gated delta nets.
    #[value(name = "qwen35-0.8b")]
    Qwen35_0_8b,
    /// Qwen3.5 9B.
    #[value(name = "qwen35-9b")]
    Qwen35_9b,
    /// Qwen3.5 35B-A3B: 256 experts a layer, of which a token uses 8 and a shared one.
    #[value(name = "qwen35-35b-a3b")]
    Qwen35_35bA3b,
    /// gpt-oss 20B: 32 experts a layer, of which a token uses 4, sinks, and a
    /// window in every other layer.
    #[value(name = "gpt-oss-20b")]
    GptOss20b,
    /// The first four layers of Qwen3.5 9B.
    #[value(name = "qwen35-9b-4")]
    Qwen35_9bShort,
    /// The first four layers of Qwen3.5 35B-A3B.
    #[value(name = "qwen35-35b-a3b-4")]
    Qwen35_35bA3bShort,
    /// The first two layers of gpt-oss 20B.
    #[value(name = "gpt-oss-20b-2")]
    GptOss20bShort,
    /// Llama 3.1 8B whose text goes round in circles of [`CIRCLE`] tokens.
    #[value(name = "llama-8b-circling")]
    Llama8bCircling,
    /// A llama of 4 layers of 512, for trying things out.
    Mini,
    /// The same, going round in circles.
    MiniCircling,
    /// The same with 16 experts a layer, of which a token uses 4.
    MiniMoe,
    /// The same with routers that prefer some experts.
    MiniMoeSkewed,
    /// The layers of Qwen3.5 35B-A3B, as small.
    MiniLinear,
    /// The layers of gpt-oss, as small.
    MiniOss,
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
    /// Experts in MXFP4, all else in Q8_0.
    #[value(name = "mxfp4")]
    Mxfp4,
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
    /// The layers without attention: all but every fourth.
    pub(crate) linear: Option<Linear>,
    /// Of each head that is rotated; 0 for all.
    pub(crate) rope_dims: u32,
    /// The output matrix has the embedding's rows, each for the token behind, and layers add
    /// little: a text goes round.
    pub(crate) circling: bool,
}

/// Tokens of a circle.
pub(crate) const CIRCLE: u64 = 16;

/// A layer's experts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Experts {
    /// How many there are.
    pub(crate) n: u32,
    /// How many a token uses.
    pub(crate) used: u32,
    /// Width of each one's hidden layer.
    pub(crate) n_ff: u32,
    /// Whether there is one more of that width, which every token uses.
    pub(crate) shared: bool,
    /// The standard deviation of the logarithms of what the router's rows are
    /// large by; 0 for all alike.
    pub(crate) skew: f32,
}

/// With this of the experts of a trained mixture's size the busiest quarter gets two of three
/// choices, as in the trained mixture of the tests (67 % on the questions of the exam).
const SKEW: f32 = 0.5;

/// Gated delta nets.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Linear {
    /// Heads of queries and keys.
    pub(crate) n_key: u32,
    /// Heads of values.
    pub(crate) n_value: u32,
    /// Elements of each.
    pub(crate) head_dim: u32,
}

/// Every so many layers one has attention, where the others are gated delta nets.
pub(crate) const ATTENTION_EVERY: u32 = 4;

/// Positions that a layer of gpt-oss with a window sees.
pub(crate) const WINDOW: u32 = 128;

impl Shape {
    pub(crate) fn is_gpt_oss(&self) -> bool {
        self.arch == "gpt-oss"
    }
}

impl Preset {
    /// Its name on the command line and in file names.
    pub(crate) fn name(self) -> String {
        value_name(self)
    }

    /// Its first layers.
    fn first(self, n_layer: u32) -> Shape {
        Shape {
            n_layer,
            ..self.shape()
        }
    }

    /// With routers that prefer some experts.
    fn skewed(self) -> Shape {
        let shape = self.shape();
        Shape {
            experts: shape.experts.map(|experts| Experts {
                skew: SKEW,
                ..experts
            }),
            ..shape
        }
    }

    #[expect(clippy::too_many_lines, reason = "a table of models")]
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
            linear: None,
            rope_dims: 0,
            circling: false,
        };
        let qwen3 = Shape {
            arch: "qwen3",
            head_dim: 128,
            rope_freq_base: 1_000_000.0,
            rms_eps: 1e-6,
            qk_norm: true,
            ..llama
        };
        let qwen35 = Shape {
            arch: "qwen35",
            head_dim: 256,
            rope_freq_base: 10_000_000.0,
            rope_dims: 64,
            linear: Some(Linear {
                n_key: 16,
                n_value: 32,
                head_dim: 128,
            }),
            tied: false,
            ..qwen3
        };
        let gpt_oss = Shape {
            arch: "gpt-oss",
            n_layer: 24,
            n_embd: 2880,
            n_ff: 2880,
            n_head: 64,
            rope_freq_base: 150_000.0,
            tied: false,
            experts: Some(Experts {
                n: 32,
                used: 4,
                n_ff: 2880,
                shared: false,
                skew: 0.0,
            }),
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
                    shared: false,
                    skew: 0.0,
                }),
                ..qwen3
            },
            Preset::Qwen3_30bA3bSkewed => Preset::Qwen3_30bA3b.skewed(),
            Preset::MiniMoeSkewed => Preset::MiniMoe.skewed(),
            Preset::Qwen35_0_8b => Shape {
                n_layer: 24,
                n_embd: 1024,
                n_ff: 3584,
                n_head: 8,
                n_head_kv: 2,
                linear: Some(Linear {
                    n_key: 16,
                    n_value: 16,
                    head_dim: 128,
                }),
                tied: true,
                ..qwen35
            },
            Preset::Qwen35_9b => Shape {
                n_layer: 32,
                n_embd: 4096,
                n_ff: 12_288,
                n_head: 16,
                n_head_kv: 4,
                ..qwen35
            },
            Preset::Qwen35_35bA3b => Shape {
                arch: "qwen35moe",
                n_layer: 40,
                n_ff: 512,
                n_head: 16,
                n_head_kv: 2,
                experts: Some(Experts {
                    n: 256,
                    used: 8,
                    n_ff: 512,
                    shared: true,
                    skew: 0.0,
                }),
                ..qwen35
            },
            Preset::GptOss20b => gpt_oss,
            Preset::Qwen35_9bShort => Preset::Qwen35_9b.first(4),
            Preset::Qwen35_35bA3bShort => Preset::Qwen35_35bA3b.first(4),
            Preset::GptOss20bShort => Preset::GptOss20b.first(2),
            Preset::Llama8bCircling => Shape {
                circling: true,
                ..Preset::Llama8b.shape()
            },
            Preset::MiniCircling => Shape {
                circling: true,
                tied: false,
                ..Preset::Mini.shape()
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
                    shared: false,
                    skew: 0.0,
                }),
                ..qwen3
            },
            Preset::MiniLinear => Shape {
                arch: "qwen35moe",
                n_layer: 4,
                n_embd: 512,
                n_ff: 256,
                n_head: 4,
                n_head_kv: 2,
                linear: Some(Linear {
                    n_key: 2,
                    n_value: 4,
                    head_dim: 128,
                }),
                experts: Some(Experts {
                    n: 16,
                    used: 4,
                    n_ff: 256,
                    shared: true,
                    skew: 0.0,
                }),
                ..qwen35
            },
            Preset::MiniOss => Shape {
                n_layer: 4,
                n_embd: 512,
                n_ff: 256,
                n_head: 8,
                n_head_kv: 2,
                experts: Some(Experts {
                    n: 8,
                    used: 2,
                    n_ff: 256,
                    shared: false,
                    skew: 0.0,
                }),
                ..gpt_oss
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
            Mix::Mxfp4 => 38,
        }
    }

    /// The type of most matrices.
    pub(crate) fn base(self) -> TensorType {
        match self {
            Mix::F16 => TensorType::F16,
            Mix::Q8_0 | Mix::Mxfp4 => TensorType::Q8_0,
            Mix::Q4_0 => TensorType::Q4_0,
            Mix::Q4KM => TensorType::Q4K,
            Mix::Q6K => TensorType::Q6K,
        }
    }

    /// The type of the output matrix, which the usual mixes keep finer.
    pub(crate) fn output(self) -> TensorType {
        match self {
            Mix::Q4_0 | Mix::Q4KM => TensorType::Q6K,
            Mix::F16 | Mix::Q8_0 | Mix::Q6K | Mix::Mxfp4 => self.base(),
        }
    }

    /// The type of experts whose tensors would be of another one else.
    pub(crate) fn experts(self, other: TensorType) -> TensorType {
        match self {
            Mix::Mxfp4 => TensorType::MXFP4,
            _ => other,
        }
    }

    /// The type of attn_v and ffn_down of a layer. The usual mix spends more bits in the first and
    /// last eighth of the layers and in every third one between.
    pub(crate) fn finer(self, layer: u32, n_layer: u32) -> TensorType {
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
