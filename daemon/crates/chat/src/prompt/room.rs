//! Number of tokens that fit the context, and the error for a longer prompt.

use rocmforge_failure::{self as failure, Failure};

/// Context lengths that limit a prompt, in tokens.
#[derive(Debug, Clone, Copy)]
pub struct Lengths {
    /// Context length of the request, within the two other limits.
    pub n_ctx: u32,
    /// Context length of the model's training.
    pub n_ctx_train: u32,
    /// Maximum context length that the daemon allows.
    pub n_ctx_max: u32,
}

/// Maximum number of prompt tokens of a request, with the limit that sets it.
#[derive(Debug, Clone, Copy)]
pub struct Room {
    pub(super) tokens: usize,
    lengths: Lengths,
    /// What the prompt's tokens are used for.
    purpose: Purpose,
    /// Whether a longer text is truncated instead of rejected.
    pub(super) cuts: bool,
    /// Whether the rejection of a longer text states its number of tokens.
    pub(super) counts: bool,
}

/// What a prompt's tokens are used for.
#[derive(Debug, Clone, Copy)]
enum Purpose {
    /// Generation of an output, which also has to fit.
    Answer,
    Scores,
    Embedding,
}

impl Room {
    /// Room for a prompt to continue: the context, less one token of output.
    pub fn for_prompt(lengths: Lengths) -> Self {
        Self {
            tokens: lengths.n_ctx as usize - 1,
            lengths,
            purpose: Purpose::Answer,
            cuts: false,
            counts: true,
        }
    }

    /// Room for a text to score: the whole context.
    pub fn for_scores(lengths: Lengths) -> Self {
        Self {
            tokens: lengths.n_ctx as usize,
            purpose: Purpose::Scores,
            ..Self::for_prompt(lengths)
        }
    }

    /// Room for a text to embed: the whole context.
    pub fn for_embedding(lengths: Lengths) -> Self {
        Self {
            purpose: Purpose::Embedding,
            ..Self::for_scores(lengths)
        }
    }

    /// Sets whether a longer text is truncated instead of rejected.
    pub fn cutting(self, cuts: bool) -> Self {
        Self { cuts, ..self }
    }

    /// The room for an attempt whose rejection need not state the number of tokens.
    pub fn for_trial(self) -> Self {
        Self {
            counts: false,
            ..self
        }
    }

    /// The room that is left beside `tokens` other tokens.
    pub fn less(self, tokens: usize) -> Self {
        Self {
            tokens: self.tokens.saturating_sub(tokens),
            ..self
        }
    }

    /// The failure for a prompt of at least `n` tokens. Agents recognize the beginning of the
    /// message (llama-server's wording) and the part about the context length (OpenAI's), and
    /// shorten their conversation.
    pub(super) fn refuse(&self, field: &str, n: usize) -> Failure {
        let Lengths {
            n_ctx,
            n_ctx_train,
            n_ctx_max,
        } = self.lengths;
        let what = match self.purpose {
            Purpose::Answer => "prompt and answer share it: shorten the prompt",
            Purpose::Scores => "score it in windows",
            Purpose::Embedding => "send it in parts, or ask for `truncate`",
        };
        let (or, parameter) = match n_ctx {
            n_ctx if n_ctx < n_ctx_train.min(n_ctx_max) => (", or raise ", Some("n_ctx")),
            n_ctx if n_ctx < n_ctx_train => {
                (", or start the daemon with a larger --n-ctx-max", None)
            }
            _ => ("", None),
        };
        let least = if n == self.tokens + 1 {
            "at least "
        } else {
            ""
        };
        let before = format!(
            "the request exceeds the available context size: it has {least}{n} tokens, and this model's \
             maximum context length is {n_ctx} tokens (n_ctx); {what}{or}"
        );
        let after =
            format!(" (the model was trained with {n_ctx_train}, the daemon allows {n_ctx_max})");
        failure::context_exceeded(field, (&before, parameter, &after), (n, self.tokens, n_ctx))
    }
}
