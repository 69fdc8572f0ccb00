//! The architectures: one file each, a function that reads like the paper and makes the plan.

mod arcee;
mod bailingmoe;
mod bert;
mod cohere;
mod deepseek2;
mod dots1;
mod encoders;
mod ernie4_5;
mod exaone4;
mod gemma;
mod gemma2;
mod gemma3;
mod gemma4;
mod glm4;
mod glm4moe;
mod gpt_oss;
mod granite;
mod granitehybrid;
mod hunyuan;
mod laguna;
mod layer;
mod lfm2;
mod llama;
mod mamba2;
mod minimax_m2;
mod mistral3;
mod moe;
mod muse_glimmer;
mod nemotron_h;
mod nextn;
mod olmo2;
mod olmoe;
mod phi3;
mod qwen2;
mod qwen2moe;
mod qwen3;
mod qwen35;
mod qwen3moe;
mod qwen3next;
mod seed_oss;
mod smollm3;
mod starcoder2;
pub(crate) mod vision;

use rocmforge_gguf::Gguf;

use crate::build::PlanBuilder;
use crate::error::Error;
use crate::hparams::Hparams;

/// Emits the operations of a pass.
type Build = fn(&mut PlanBuilder<'_>, &Hparams) -> Result<(), Error>;

/// A supported architecture.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arch {
    /// Value of `general.architecture`, and the prefix of the architecture's keys.
    pub(crate) name: &'static str,
    pub(crate) build: Build,
    /// Emits the operations of the MTP head, if that is supported.
    pub(crate) predict: Option<Build>,
}

const ALL: &[Arch] = &[
    Arch {
        name: "arcee",
        build: arcee::build,
        predict: None,
    },
    Arch {
        name: "bailingmoe",
        build: bailingmoe::build,
        predict: None,
    },
    Arch {
        name: "bailingmoe2",
        build: bailingmoe::build_2,
        predict: None,
    },
    Arch {
        name: "cohere2",
        build: cohere::build_windowed,
        predict: None,
    },
    Arch {
        name: "command-r",
        build: cohere::build,
        predict: None,
    },
    Arch {
        name: "deepseek2",
        build: deepseek2::build,
        predict: None,
    },
    Arch {
        name: "dots1",
        build: dots1::build,
        predict: None,
    },
    Arch {
        name: "ernie4_5",
        build: ernie4_5::build,
        predict: None,
    },
    Arch {
        name: "ernie4_5-moe",
        build: ernie4_5::build,
        predict: None,
    },
    Arch {
        name: "exaone4",
        build: exaone4::build,
        predict: None,
    },
    Arch {
        name: "gemma",
        build: gemma::build,
        predict: None,
    },
    Arch {
        name: "gemma2",
        build: gemma2::build,
        predict: None,
    },
    Arch {
        name: "gemma3",
        build: gemma3::build,
        predict: None,
    },
    Arch {
        name: "gemma4",
        build: gemma4::build,
        predict: None,
    },
    Arch {
        name: "glm4",
        build: glm4::build,
        predict: None,
    },
    Arch {
        name: "glm4moe",
        build: glm4moe::build,
        predict: Some(glm4moe::predict),
    },
    Arch {
        name: "gpt-oss",
        build: gpt_oss::build,
        predict: None,
    },
    Arch {
        name: "granite",
        build: granite::build,
        predict: None,
    },
    Arch {
        name: "granitehybrid",
        build: granitehybrid::build,
        predict: None,
    },
    Arch {
        name: "granitemoe",
        build: granite::build,
        predict: None,
    },
    Arch {
        name: "hunyuan-dense",
        build: hunyuan::build,
        predict: None,
    },
    Arch {
        name: "hunyuan-moe",
        build: hunyuan::build,
        predict: None,
    },
    Arch {
        name: "laguna",
        build: laguna::build,
        predict: None,
    },
    Arch {
        name: "lfm2",
        build: lfm2::build,
        predict: None,
    },
    Arch {
        name: "lfm2moe",
        build: lfm2::build,
        predict: None,
    },
    Arch {
        name: "llama",
        build: llama::build,
        predict: None,
    },
    Arch {
        name: "minimax-m2",
        build: minimax_m2::build,
        predict: None,
    },
    Arch {
        name: "mistral3",
        build: mistral3::build,
        predict: None,
    },
    Arch {
        name: "mistral4",
        build: deepseek2::build,
        predict: None,
    },
    Arch {
        name: "muse-glimmer",
        build: muse_glimmer::build,
        predict: None,
    },
    Arch {
        name: "nemotron_h",
        build: nemotron_h::build,
        predict: None,
    },
    Arch {
        name: "nemotron_h_moe",
        build: nemotron_h::build,
        predict: None,
    },
    Arch {
        name: "olmo2",
        build: olmo2::build,
        predict: None,
    },
    Arch {
        name: "olmoe",
        build: olmoe::build,
        predict: None,
    },
    Arch {
        name: "phi3",
        build: phi3::build,
        predict: None,
    },
    Arch {
        name: "qwen2",
        build: qwen2::build,
        predict: None,
    },
    Arch {
        name: "qwen2moe",
        build: qwen2moe::build,
        predict: None,
    },
    Arch {
        name: "qwen2vl",
        build: qwen2::build,
        predict: None,
    },
    Arch {
        name: "qwen3",
        build: qwen3::build,
        predict: None,
    },
    Arch {
        name: "qwen35",
        build: qwen35::build,
        predict: Some(qwen35::predict),
    },
    Arch {
        name: "qwen35moe",
        build: qwen35::build,
        predict: Some(qwen35::predict),
    },
    Arch {
        name: "qwen3moe",
        build: qwen3moe::build,
        predict: None,
    },
    Arch {
        name: "qwen3next",
        build: qwen3next::build,
        predict: None,
    },
    Arch {
        name: "qwen3vl",
        build: qwen3::build,
        predict: None,
    },
    Arch {
        name: "qwen3vlmoe",
        build: qwen3moe::build,
        predict: None,
    },
    Arch {
        name: "seed_oss",
        build: seed_oss::build,
        predict: None,
    },
    Arch {
        name: "smollm3",
        build: smollm3::build,
        predict: None,
    },
    Arch {
        name: "starcoder2",
        build: starcoder2::build,
        predict: None,
    },
];

/// Encoders: architectures whose rows attend both ways, and that generate no text.
const ENCODERS: &[Arch] = &[
    Arch {
        name: "bert",
        build: bert::build,
        predict: None,
    },
    Arch {
        name: "eurobert",
        build: encoders::build_eurobert,
        predict: None,
    },
    Arch {
        name: "gemma-embedding",
        build: gemma3::build,
        predict: None,
    },
    Arch {
        name: "jina-bert-v2",
        build: bert::build,
        predict: None,
    },
    Arch {
        name: "jina-bert-v3",
        build: bert::build,
        predict: None,
    },
    Arch {
        name: "llama-embed",
        build: llama::build,
        predict: None,
    },
    Arch {
        name: "modern-bert",
        build: encoders::build_modern_bert,
        predict: None,
    },
    Arch {
        name: "neo-bert",
        build: encoders::build_neo_bert,
        predict: None,
    },
    Arch {
        name: "nomic-bert",
        build: bert::build,
        predict: None,
    },
    Arch {
        name: "nomic-bert-moe",
        build: bert::build,
        predict: None,
    },
];

/// Names of the supported architectures.
pub fn supported_architectures() -> impl Iterator<Item = &'static str> {
    ALL.iter().chain(ENCODERS).map(|a| a.name)
}

/// Whether an architecture is an encoder.
pub(crate) fn is_encoder(name: &str) -> bool {
    ENCODERS.iter().any(|a| a.name == name)
}

/// The architecture of a file.
pub(crate) fn find(gguf: &Gguf) -> Result<&'static Arch, Error> {
    const KEY: &str = "general.architecture";
    let name = gguf
        .str(KEY)?
        .ok_or_else(|| Error::MissingKey(KEY.to_owned()))?;
    ALL.iter()
        .chain(ENCODERS)
        .find(|a| a.name == name)
        .ok_or_else(|| Error::UnknownArchitecture {
            name: name.chars().take(64).collect(),
            supported: supported_architectures().collect::<Vec<_>>().join(", "),
        })
}
