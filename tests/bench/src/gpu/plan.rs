//! What is measured: the models and numbers of runs, in full and in a quick run that
//! shows that all of it works.

use crate::goal::Goal;
use crate::presets::{Mix, Preset};
use crate::projector::ProjectorShape;

/// A model by its shape and types.
pub(crate) type Kind = (Preset, Mix);

/// How tokens are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Choice {
    /// The likeliest.
    Greedy,
    /// From the 40 likeliest.
    Sampled,
}

/// The mixture that goals were set for.
const MIXTURE: Kind = (Preset::Qwen3_30bA3b, Mix::Q4KM);

/// What is measured.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    /// The model of most figures.
    pub(crate) main: Kind,
    /// What many clients ask.
    pub(crate) asked: Kind,
    /// Models of which only the decode is measured.
    pub(crate) others: Vec<Kind>,
    /// Mixtures of experts.
    pub(crate) mixtures: Vec<Kind>,
    /// Models of other kinds of layers, and for each the one whose scores are compared.
    pub(crate) shapes: Vec<(Kind, Kind)>,
    /// A model that reads images, its tower's shape, a side of images in pixels, and the clients
    /// that have one each.
    pub(crate) images: (Kind, ProjectorShape, u32, usize),
    /// Texts that are scored, of so many tokens each.
    pub(crate) scored: [(usize, usize); 3],
    /// A model whose text repeats, and a small one whose text goes on alike.
    pub(crate) circling: Kind,
    pub(crate) drafting: Kind,
    /// The model of the text and of the rounds.
    pub(crate) small: Kind,
    /// Models of the mixed load.
    pub(crate) mixed: Vec<Kind>,
    /// Times that a model is loaded, and brought in anew.
    pub(crate) loads: usize,
    /// Processes whose first request is measured.
    pub(crate) processes: usize,
    /// Runs of each rate.
    pub(crate) runs: usize,
    /// Tokens of a decode.
    pub(crate) decode: u32,
    /// Tokens of a chat's first turn.
    pub(crate) history: usize,
    /// Tokens of a decode under a budget.
    pub(crate) decode_streamed: u32,
    /// Requests of so many tokens before the host's part is measured with a mixture.
    pub(crate) before_split: usize,
    /// Tokens of the prompts.
    pub(crate) prefills: [usize; 2],
    /// Requests to two models in turn.
    pub(crate) requests: usize,
    /// Prompts for the random model's text, tokens of each at most, and tokens of the text.
    pub(crate) prompts: (usize, usize, u32),
    /// Questions of the exam asked under a small budget as well.
    pub(crate) questions_streamed: usize,
    /// Clients that ask at once, and how their tokens are chosen.
    pub(crate) together: Vec<(usize, Choice)>,
    /// Tokens of their prompts and of their texts.
    pub(crate) text_together: (usize, u32),
    /// Adapters of their model, of which each client has one; 0 for none.
    pub(crate) adapters_together: u16,
    /// Tokens of a prompt that comes while others read their texts.
    pub(crate) prompt_beside: usize,
    /// Runs of each that count.
    pub(crate) rounds_together: usize,
    /// Clients of the mixed load, and tokens of their longest prompts.
    pub(crate) clients: (usize, usize),
    /// Bytes beside the largest segment in the mixed load's least budget, for KV,
    /// scratch and the device's own.
    pub(crate) room: u64,
    /// Whether the figures are those that goals were set for.
    judged: bool,
}

/// Figures that have goals.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Figure {
    Load,
    Allocations,
    FirstToken,
    Decode,
    PrefillShort,
    PrefillLong,
    DecodeStreamed,
    DecodeSplit,
    PrefillStreamed,
    Alternating,
}

impl Plan {
    /// What one H200 is judged by.
    pub(crate) fn full() -> Self {
        use {Mix::*, Preset::*};
        Self {
            main: (Llama8b, Q4KM),
            asked: (Llama8b, Q4KM),
            others: vec![
                (Llama8b, Q4_0),
                (Llama8b, Q8_0),
                (Qwen3_8b, Q4KM),
                (Llama1b, Q4_0),
            ],
            mixtures: vec![MIXTURE],
            shapes: vec![
                ((Qwen35_9b, Q4KM), (Qwen35_9bShort, Q4KM)),
                ((Qwen35_35bA3b, Q4KM), (Qwen35_35bA3bShort, Q4KM)),
                ((GptOss20b, Mxfp4), (GptOss20bShort, Mxfp4)),
            ],
            images: (
                (Qwen35_9b, Q4KM),
                ProjectorShape {
                    n_layer: 27,
                    width: 1152,
                    n_ff: 4304,
                    n_head: 16,
                    patch: 16,
                    side: 48,
                    n_out: 4096,
                },
                1024,
                16,
            ),
            scored: [(60, 2), (4, 41), (2, 301)],
            circling: (Llama8bCircling, Q4KM),
            drafting: (MiniCircling, Q4KM),
            small: (Llama1b, Q4_0),
            mixed: vec![
                (Llama8b, Q4KM),
                (Llama1b, Q4_0),
                (Llama1b, Q4KM),
                (Llama1b, Q8_0),
                (Qwen3_0_6b, Q6K),
            ],
            loads: 7,
            processes: 5,
            runs: 7,
            decode: 128,
            history: 2000,
            decode_streamed: 32,
            before_split: 16,
            prefills: [512, 2048],
            requests: 12,
            prompts: (8, 200, 32),
            questions_streamed: 40,
            together: [1, 8, 32, 64, 128]
                .map(|n| (n, Choice::Greedy))
                .into_iter()
                .chain([(64, Choice::Sampled)])
                .collect(),
            text_together: (128, 128),
            adapters_together: 0,
            prompt_beside: 16_384,
            rounds_together: 3,
            clients: (8, 1500),
            room: 512 << 20,
            judged: true,
        }
    }

    /// Mini models, few runs: whether all of it works, not how fast.
    pub(crate) fn quick() -> Self {
        use {
            Mix::*,
            Preset::{Mini, MiniCircling, MiniLinear, MiniMoe, MiniOss},
        };
        Self {
            main: (Mini, Q4KM),
            asked: (Mini, Q4KM),
            others: vec![(Mini, Q8_0)],
            mixtures: vec![(MiniMoe, Q4KM)],
            shapes: vec![
                ((MiniLinear, Q4KM), (MiniLinear, Q4KM)),
                ((MiniOss, Mxfp4), (MiniOss, Mxfp4)),
            ],
            images: (
                (MiniLinear, Q4KM),
                ProjectorShape {
                    n_layer: 2,
                    width: 128,
                    n_ff: 256,
                    n_head: 2,
                    patch: 8,
                    side: 8,
                    n_out: 512,
                },
                96,
                3,
            ),
            scored: [(3, 2), (1, 21), (1, 71)],
            circling: (MiniCircling, Q4KM),
            drafting: (MiniCircling, Q4KM),
            small: (Mini, Q4_0),
            mixed: vec![(Mini, Q4_0), (Mini, Q8_0)],
            loads: 2,
            processes: 1,
            runs: 2,
            decode: 8,
            history: 70,
            decode_streamed: 4,
            before_split: 2,
            prefills: [16, 48],
            requests: 4,
            prompts: (2, 24, 6),
            questions_streamed: 4,
            together: vec![(1, Choice::Greedy), (3, Choice::Sampled)],
            text_together: (12, 24),
            adapters_together: 0,
            prompt_beside: 300,
            rounds_together: 1,
            clients: (3, 40),
            room: 32 << 20,
            judged: false,
        }
    }

    /// Has mixtures whose routers prefer some experts.
    pub(crate) fn prefer_some_experts(&mut self) {
        for (preset, _) in &mut self.mixtures {
            *preset = match *preset {
                Preset::Qwen3_30bA3b => Preset::Qwen3_30bA3bSkewed,
                Preset::MiniMoe => Preset::MiniMoeSkewed,
                other => other,
            };
        }
    }

    /// What a figure of the main model is judged by.
    pub(crate) fn goal(&self, figure: Figure) -> Option<Goal> {
        let goal = match figure {
            Figure::Load => Goal::at_most(150.0, Some(20.0)),
            Figure::Allocations => Goal::at_most(9.0, None),
            Figure::FirstToken => Goal::at_most(250.0, Some(105.0)).beside(1280.0),
            Figure::Decode => Goal::at_least(300.0, 600.0).beside(276.0),
            // No bound was set for it.
            Figure::PrefillShort => Goal {
                must: None,
                aim: None,
                ..Goal::of_llama_cpp(9500.0)
            },
            Figure::PrefillLong => Goal::at_least(10_000.0, 30_000.0).beside(9800.0),
            Figure::DecodeStreamed => Goal::at_least(35.0, 90.0).beside(62.0),
            Figure::DecodeSplit => Goal::at_least(75.0, 95.0).beside(62.0),
            Figure::PrefillStreamed => Goal::at_least(5000.0, 9000.0).beside(2750.0),
            Figure::Alternating => Goal::at_most(200.0, Some(60.0)).beside(1400.0),
        };
        self.judged.then_some(goal)
    }

    /// What the decode of so many clients is judged by: llama.cpp's batched bench.
    pub(crate) fn clients_goal(&self, n: usize) -> Option<Goal> {
        let mixture = self.asked == MIXTURE;
        let theirs = match (mixture, n) {
            (false, 1) => 268.0,
            (false, 8) => 968.0,
            (false, 32) => 3299.0,
            (false, 64) => 4626.0,
            (false, 128) => 5511.0,
            (true, 1) => 277.0,
            (true, 8) => 877.0,
            (true, 32) => 1210.0,
            (true, 64) => 1644.0,
            _ => return None,
        };
        self.judged.then(|| Goal::of_llama_cpp(theirs))
    }

    /// Whether goals were set for a mixture.
    pub(crate) fn judges(&self, kind: Kind) -> bool {
        self.judged && kind == MIXTURE
    }

    /// What another model's decode is judged by: llama.cpp's, where it was measured.
    pub(crate) fn decode_goal(&self, kind: Kind) -> Option<Goal> {
        let theirs = match kind {
            (Preset::Llama8b, Mix::Q4_0) => 336.0,
            (Preset::Llama8b, Mix::Q8_0) => 255.0,
            (Preset::Llama1b, Mix::Q4_0) => 985.0,
            _ => return None,
        };
        self.judged.then(|| Goal::of_llama_cpp(theirs))
    }
}

/// A model's name in tables.
pub(crate) fn title((preset, mix): Kind) -> String {
    format!("{} {}", preset.name(), mix.name())
}
