//! Choosing the next token from logits: penalties, temperature, top-k, top-p, min-p, seed.

/// How tokens are chosen. The defaults are greedy-free, the field's usual ones.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy: the most likely token, the lowest id among equals.
    pub temperature: f32,
    /// Keep the k most likely; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set whose probability reaches this; 1 keeps all.
    pub top_p: f32,
    /// Drop tokens less likely than this share of the most likely; 0 keeps all.
    pub min_p: f32,
    /// Divides (positive) or multiplies (negative) the logits of recent tokens; 1 is off.
    pub repeat_penalty: f32,
    /// Subtracted from the logits of recent tokens; 0 is off.
    pub presence_penalty: f32,
    /// Subtracted per occurrence among the recent tokens; 0 is off.
    pub frequency_penalty: f32,
    /// How many recent tokens the penalties look at; 0 is none.
    pub penalty_last_n: u32,
    /// Seed; the same seed gives the same text. `None` draws one.
    pub seed: Option<u64>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            repeat_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            penalty_last_n: 64,
            seed: None,
        }
    }
}
