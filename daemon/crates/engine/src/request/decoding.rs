//! Options of a request besides sampling, and the choice of its next token.
//!
//! ```text
//! logits -> a copy, if log-probabilities are wanted
//!        -> tokens that may not come (yet) go
//!        -> bias, penalties, draw (sampler) -> the token, its score
//! ```
//!
//! *Invariant:* log-probabilities are those of the logits as the model gives them, unless the
//! request asks for those after the samplers: nothing that changes them comes before the copy (test
//! `log_probabilities_are_what_a_scoring_of_the_same_text_gives`).

use rocmforge_grammar::Matcher;
use rocmforge_kernels_cpu::ops::{self, Simd};

use crate::api::TokenScore;
use crate::api::error::Error;
use crate::model::loaded::LoadedModel;
use crate::pass::spec::RowOutput;
use crate::request::masks::{Constraint, Masks};
use crate::request::sampler::Sampler;

/// Options of a request besides its samplers: ends, log-probabilities, grammar.
#[derive(Debug, Clone, Default)]
pub struct Decoding {
    /// Number of tokens that must be generated before the generation may end.
    pub min_tokens: u32,
    /// Whether end-of-generation tokens do not end the generation: they are generated like others,
    /// and have no text.
    pub ignore_eos: bool,
    /// Tokens that end the generation in addition to the vocabulary's own; they are not part of the
    /// output.
    pub stop_tokens: Vec<u32>,
    /// Number of most likely tokens whose log-probabilities are reported with each generated
    /// token's own; `None` reports none.
    pub logprobs: Option<u32>,
    /// Whether log-probabilities are those of the distribution after all samplers, from which the
    /// token is drawn and in which fewer tokens may be left; only with `logprobs`.
    pub after_sampling: bool,
    /// Tokens whose log-probabilities are reported in addition to the most likely ones, however
    /// unlikely; only with `logprobs`.
    pub watched: Vec<u32>,
    /// Whether control tokens appear in the text by their names, for readers that parse such marks.
    pub control_text: bool,
    /// The grammar or format that constrains the output; the generation ends where it allows
    /// nothing more. Not allowed with `min_tokens` or `ignore_eos`.
    pub grammar: Option<Box<Matcher>>,
}

/// Chooses a generation's tokens: sampler, constraint and scores.
#[derive(Debug)]
pub(crate) struct Chooser {
    pub(crate) sampler: Sampler,
    wanted: Decoding,
    held: Option<Constraint>,
    /// Whether tokens may be drafted for the request.
    takes_drafts: bool,
    /// Reusable copy of the logits as the model gave them.
    untouched: Vec<f32>,
}

/// A chosen token, with its score if the request wants scores.
pub(crate) struct Chosen {
    pub(crate) token: u32,
    pub(crate) score: Option<TokenScore>,
}

/// The reason for which a token ends a generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ends {
    /// The token is an end-of-generation token of the vocabulary.
    Text,
    /// The token is among the request's stop tokens.
    Stop,
}

impl Chooser {
    /// A chooser for a request; `masks` is called for the threads that compute grammar masks, if
    /// they are needed.
    pub(crate) fn new(
        sampler: Sampler,
        mut wanted: Decoding,
        masks: impl FnOnce() -> Masks,
    ) -> Self {
        let grammar = wanted.grammar.take();
        Self {
            sampler,
            wanted,
            takes_drafts: grammar.is_none(),
            held: grammar.map(|matcher| Constraint::new(matcher, masks())),
            untouched: Vec::new(),
        }
    }

    /// Sets whether tokens may be drafted for the request.
    pub(crate) fn with_drafts(mut self, drafts: bool) -> Self {
        self.takes_drafts &= drafts;
        self
    }

    /// Whether all logits of the next row are needed, however few the sampler takes.
    pub(crate) fn looks_at_all(&self, generated: u32) -> bool {
        self.held.as_ref().is_some_and(Constraint::restricts)
            || self.wanted.logprobs.is_some()
            || generated < self.wanted.min_tokens
    }

    /// Whether tokens may be drafted: not with a grammar, which would have to follow each draft.
    pub(crate) fn takes_drafts(&self) -> bool {
        self.takes_drafts
    }

    /// How `token` ends the generation, if it does.
    pub(crate) fn ends(&self, loaded: &LoadedModel, token: u32) -> Option<Ends> {
        if self.wanted.stop_tokens.contains(&token) {
            return Some(Ends::Stop);
        }
        let ends = !self.wanted.ignore_eos && loaded.tokenizer().is_end_of_generation(token);
        ends.then_some(Ends::Text)
    }

    /// Appends a chosen token to the output. Returns whether the format is complete with it.
    pub(crate) fn accept(&mut self, token: u32) -> Result<bool, Error> {
        self.sampler.accept(token);
        let Some(held) = &mut self.held else {
            return Ok(false);
        };
        let complete = held.accept(token)?;
        if held.is_done() {
            self.held = None;
        }
        Ok(complete)
    }

    /// Chooses the token that follows `generated` other generated tokens.
    pub(crate) fn choose(
        &mut self,
        found: RowOutput<'_>,
        generated: u32,
        loaded: &LoadedModel,
    ) -> Result<Chosen, Error> {
        let logits = match found {
            RowOutput::Logits(logits) => logits,
            RowOutput::Best(best) => return plain(best, loaded),
            RowOutput::Top(top) => {
                let token = top.and_then(|top| self.sampler.choose(top).ok());
                return plain(token, loaded);
            }
            RowOutput::Hidden(_) => {
                return Err(Error::Internal("a token needs logits".to_owned()));
            }
        };
        if self.wanted.logprobs.is_some() && !self.wanted.after_sampling {
            self.untouched.clear();
            self.untouched.extend_from_slice(logits);
        }
        if generated < self.wanted.min_tokens {
            let own: &[u32] = match self.wanted.ignore_eos {
                true => &[],
                false => loaded.tokenizer().end_of_generation(),
            };
            for &id in own.iter().chain(&self.wanted.stop_tokens) {
                if let Some(logit) = logits.get_mut(id as usize) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        if let Some(held) = self.held.as_mut().filter(|held| held.restricts()) {
            held.mask()?.apply(logits);
        }
        let token = self.sampler.sample(logits);
        let token = token.map_err(|_| not_finite(loaded))?;
        let score = match self.wanted.logprobs {
            None => None,
            Some(n) if self.wanted.after_sampling => {
                let (probability, top) = self.sampler.distribution(n as usize);
                let top = top.into_iter().map(|(id, share)| (id, share.ln() as f32));
                Some(TokenScore {
                    id: token,
                    logprob: probability.ln() as f32,
                    top: top.collect(),
                })
            }
            Some(n) => {
                let score = score(&mut self.untouched, token, n as usize);
                let mut score = score.ok_or_else(|| not_finite(loaded))?;
                // They are log-probabilities now.
                for &id in &self.wanted.watched {
                    let told = score.top.iter().any(|(of, _)| *of == id);
                    if let Some(&logprob) = self.untouched.get(id as usize).filter(|_| !told) {
                        score.top.push((id, logprob));
                    }
                }
                Some(score)
            }
        };
        Ok(Chosen { token, score })
    }
}

fn plain(token: Option<u32>, loaded: &LoadedModel) -> Result<Chosen, Error> {
    match token {
        Some(token) => Ok(Chosen { token, score: None }),
        None => Err(not_finite(loaded)),
    }
}

/// The score of token `next`; turns `logits` into log-probabilities in place. `None` if they are
/// not finite.
pub(crate) fn score(logits: &mut [f32], next: u32, top_n: usize) -> Option<TokenScore> {
    // Without an early end several are looked at a time. NaN is not below infinity.
    if !logits
        .iter()
        .fold(true, |all, l| all & (*l < f32::INFINITY))
    {
        return None;
    }
    let width = logits.len();
    ops::log_softmax(Simd::detect(), logits, width);
    let mut top = Vec::new();
    if top_n > 0 {
        ops::top_k(Simd::detect(), logits, top_n, &mut top);
    }
    Some(TokenScore {
        id: next,
        logprob: logits[next as usize],
        top,
    })
}

pub(crate) fn not_finite(loaded: &LoadedModel) -> Error {
    Error::BadModel {
        path: loaded.path().to_owned(),
        message:
            "the logits are not finite; a weight of the file is damaged, or the model overflows f32: fetch the file again, or \
             take another quantization of it"
                .to_owned(),
    }
}
