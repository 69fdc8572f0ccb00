//! Choosing the next token from logits.
//!
//! ```text
//! logits + bias -> a chain of samplers, each of its own file -> a draw
//!    penalties, dry, top_n_sigma, top_k, typ_p, top_p, min_p, xtc, temperature
//! ```
//!
//! The order is llama.cpp's, or what the request gives ([`SamplerKind`]). With Mirostat the chain
//! is the temperature alone, and the bound of surprise stands in front of the draw.
//!
//! *Invariant:* a chain has only samplers that change something, so that what a request leaves off
//! costs nothing, and its first one says how much of the logits has to be read
//! ([`Sampler::takes_best`], [`Sampler::takes_top`]).

mod buckets;
mod candidates;
mod dry;
mod min_p;
mod mirostat;
mod order;
mod penalties;
mod temperature;
#[cfg(test)]
mod tests;
mod top_k;
mod top_n_sigma;
mod top_p;
mod typical;
mod xtc;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rocmforge_kernels_cpu::ops::{self, Simd};

pub(crate) use candidates::NotFinite;
use candidates::{Candidates, Weight};
pub use dry::Dry;
pub(crate) use dry::Pieces;
use dry::Repetitions;
use mirostat::Controller;
pub use mirostat::{Mirostat, MirostatVersion};
pub use order::SamplerKind;
use penalties::{Amounts, Penalties};
pub use temperature::DynamicTemperature;
use temperature::Temperature;
pub use xtc::Xtc;

/// Parameters of sampling. The defaults are not greedy; they are the usual ones of other servers.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// Temperature, which divides the logits; 0 is greedy: the most likely token, the lowest id
    /// among equals.
    pub temperature: f32,
    /// Dynamic temperature: how the temperature follows the entropy.
    pub dynatemp: DynamicTemperature,
    /// Top-k: keep the k most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Top-p: keep the smallest set of tokens whose probability reaches this; 1 keeps all.
    pub top_p: f32,
    /// Min-p: drop tokens whose probability is below this share of the most likely token's; 0 keeps
    /// all.
    pub min_p: f32,
    /// Typical-p: keep the tokens with surprise nearest the distribution's entropy that together
    /// reach this probability; 1 keeps all.
    pub typical_p: f32,
    /// Top-n-sigma: keep tokens within this many standard deviations of the largest logit; 0 keeps
    /// all.
    pub top_n_sigma: f32,
    /// XTC: leave out the most likely tokens now and then.
    pub xtc: Xtc,
    /// Minimum number of tokens that each of the samplers but top-k keeps.
    pub min_keep: u32,
    /// Divides (positive) or multiplies (negative) the logits of recent tokens; 1 is off.
    pub repeat_penalty: f32,
    /// Subtracted from the logits of recent tokens; 0 is off.
    pub presence_penalty: f32,
    /// Subtracted per occurrence among the recent tokens; 0 is off.
    pub frequency_penalty: f32,
    /// Number of recent tokens to which the penalties apply; 0 is none.
    pub penalty_last_n: u32,
    /// DRY: the penalty for repeated sequences.
    pub dry: Dry,
    /// Mirostat: keeps the surprise of the text at a target, in place of all samplers but the
    /// temperature.
    pub mirostat: Option<Mirostat>,
    /// The order of the samplers; one may occur several times, and those missing are off.
    pub order: Vec<SamplerKind>,
    /// Seed; the same seed gives the same text. `None` draws one.
    pub seed: Option<u64>,
    /// Values added to the logits of these tokens before all samplers; each token at most once.
    /// Minus infinity forbids a token.
    pub logit_bias: Vec<(u32, f32)>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.8,
            dynatemp: DynamicTemperature::default(),
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            typical_p: 1.0,
            top_n_sigma: 0.0,
            xtc: Xtc::default(),
            min_keep: 0,
            repeat_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            penalty_last_n: 64,
            dry: Dry::default(),
            mirostat: None,
            order: SamplerKind::ALL.into(),
            seed: None,
            logit_bias: Vec::new(),
        }
    }
}

/// Maximum number of best candidates that are requested from a device. Finding them takes it about
/// 1 us each; reading all logits of a large vocabulary and searching them on the host takes 0.15
/// ms.
const TOP_MAX: usize = 128;

/// A sampler of a chain, with its state.
#[derive(Debug)]
enum Step {
    Penalties(Penalties),
    Dry(Repetitions),
    TopNSigma(f32),
    TopK(u32),
    TypicalP(f32),
    TopP(f32),
    MinP(f32),
    Xtc(Xtc),
    Temperature(Temperature),
}

impl Step {
    /// The sampler with these parameters; `None` if they switch it off. `pieces` gives the bytes of
    /// tokens.
    fn new(
        kind: SamplerKind,
        params: &SamplingParams,
        pieces: impl FnOnce() -> Box<dyn Pieces>,
    ) -> Option<Self> {
        let step = |on: bool, step: Self| on.then_some(step);
        match kind {
            SamplerKind::Penalties => {
                let amounts = Amounts {
                    repeat: params.repeat_penalty,
                    presence: params.presence_penalty,
                    frequency: params.frequency_penalty,
                };
                let on = !amounts.are_off() && params.penalty_last_n > 0;
                let penalties = Penalties::new(amounts, params.penalty_last_n);
                step(on, Self::Penalties(penalties))
            }
            SamplerKind::Dry => {
                let on = params.dry.multiplier > 0.0 && params.dry.last_n > 0;
                on.then(|| Self::Dry(Repetitions::new(params.dry.clone(), pieces())))
            }
            SamplerKind::TopNSigma => step(
                params.top_n_sigma > 0.0,
                Self::TopNSigma(params.top_n_sigma),
            ),
            SamplerKind::TopK => step(params.top_k > 0, Self::TopK(params.top_k)),
            SamplerKind::TypicalP => step(params.typical_p < 1.0, Self::TypicalP(params.typical_p)),
            SamplerKind::TopP => step(params.top_p < 1.0, Self::TopP(params.top_p)),
            SamplerKind::MinP => step(params.min_p > 0.0, Self::MinP(params.min_p)),
            SamplerKind::Xtc => step(!params.xtc.is_off(), Self::Xtc(params.xtc)),
            SamplerKind::Temperature => {
                let temperature = Temperature {
                    fixed: params.temperature,
                    dynamic: params.dynatemp,
                };
                step(!temperature.is_off(), Self::Temperature(temperature))
            }
        }
    }

    fn read(&mut self, prompt: &[u32]) {
        match self {
            Self::Penalties(penalties) => penalties.read(prompt),
            Self::Dry(repetitions) => repetitions.read(prompt),
            _ => {}
        }
    }

    fn accept(&mut self, token: u32) {
        match self {
            Self::Penalties(penalties) => penalties.accept(token),
            Self::Dry(repetitions) => repetitions.accept(token),
            _ => {}
        }
    }

    fn apply(&mut self, candidates: &mut Candidates<'_>, rng: &mut ChaCha8Rng) {
        match self {
            Self::Penalties(penalties) => penalties.apply(candidates),
            Self::Dry(repetitions) => repetitions.apply(candidates),
            Self::TopNSigma(n) => top_n_sigma::apply(*n, candidates),
            Self::TopK(k) => top_k::apply(*k, candidates),
            Self::TypicalP(p) => typical::apply(*p, candidates),
            Self::TopP(p) => top_p::apply(*p, candidates),
            Self::MinP(p) => min_p::apply(*p, candidates),
            Self::Xtc(xtc) => xtc.apply(candidates, rng),
            Self::Temperature(temperature) => temperature.apply(candidates),
        }
    }

    fn is_greedy(&self) -> bool {
        matches!(self, Self::Temperature(temperature) if temperature.is_greedy())
    }
}

/// The samplers that the parameters do not switch off, in their order.
fn chain(params: &SamplingParams, pieces: &dyn Fn() -> Box<dyn Pieces>) -> Vec<Step> {
    let order = match params.mirostat {
        Some(_) => &[SamplerKind::Temperature][..],
        None => &params.order[..],
    };
    let made = order.iter();
    let made = made.filter_map(|&kind| Some((kind, Step::new(kind, params, pieces)?)));
    let mut chain: Vec<(SamplerKind, Step)> = made.collect();
    // Of what is greedy only the most likely token counts.
    if let Some(greedy) = chain.iter().position(|(_, step)| step.is_greedy()) {
        let last_move = chain.iter().rposition(|(kind, _)| kind.moves_best());
        let from = last_move.filter(|&at| at < greedy).map_or(0, |at| at + 1);
        chain.truncate(greedy + 1);
        chain.drain(from..greedy);
    }
    chain.into_iter().map(|(_, step)| step).collect()
}

/// Chooses the tokens of one sequence.
#[derive(Debug)]
pub(crate) struct Sampler {
    logit_bias: Vec<(u32, f32)>,
    min_keep: usize,
    chain: Vec<Step>,
    mirostat: Option<Controller>,
    rng: ChaCha8Rng,
    /// Reusable list of the tokens that were drawn from last, at least the most likely ones.
    list: Vec<(u32, f32)>,
    drawn: Drawn,
}

/// Weight and logit of the token that was sampled last, and the sum of all weights.
#[derive(Debug, Clone, Copy, Default)]
struct Drawn {
    weight: Weight,
    total: f64,
    logit: f32,
}

impl Sampler {
    /// A sampler with these parameters; `pieces` gives the bytes of tokens, if a sampler needs
    /// them.
    pub(crate) fn new(params: SamplingParams, pieces: impl Fn() -> Box<dyn Pieces>) -> Self {
        // ChaCha8's stream for a seed is part of its crate's promise, so a seed gives the
        // same text after an upgrade.
        let rng = ChaCha8Rng::seed_from_u64(params.seed.unwrap_or_else(rand::random));
        let chain = chain(&params, &pieces);
        let is_greedy = chain.last().is_some_and(Step::is_greedy);
        Self {
            mirostat: params.mirostat.filter(|_| !is_greedy).map(Controller::new),
            chain,
            logit_bias: params.logit_bias,
            min_keep: params.min_keep as usize,
            rng,
            list: Vec::new(),
            drawn: Drawn::default(),
        }
    }

    /// Adds the tokens of the prompt to the history; called before any token is chosen.
    pub(crate) fn read(&mut self, prompt: &[u32]) {
        self.chain.iter_mut().for_each(|step| step.read(prompt));
    }

    /// Adds a chosen token to the history.
    pub(crate) fn accept(&mut self, token: u32) {
        self.chain.iter_mut().for_each(|step| step.accept(token));
    }

    /// Whether the sampler always takes the most likely token: greedy, without penalties and bias.
    pub(crate) fn takes_best(&self) -> bool {
        let greedy_alone = matches!(&self.chain[..], [only] if only.is_greedy());
        greedy_alone && self.logit_bias.is_empty()
    }

    /// Number of largest logits that suffice for sampling, if that is small:
    /// [`Sampler::sample_from`] takes them.
    pub(crate) fn takes_top(&self) -> Option<usize> {
        match self.chain.first() {
            Some(&Step::TopK(k)) if self.logit_bias.is_empty() => {
                (1..=TOP_MAX).contains(&(k as usize)).then_some(k as usize)
            }
            _ => None,
        }
    }

    /// Chooses a token from the [`Sampler::takes_top`] largest logits with their ids, sorted as
    /// [`ops::top_k`] does: the same token that [`Sampler::sample`] chooses from all.
    pub(crate) fn sample_from(&mut self, top: &[(u32, f32)]) -> Result<u32, NotFinite> {
        let mut list = std::mem::take(&mut self.list);
        list.clear();
        list.extend_from_slice(top);
        let candidates = Candidates::of_top(&mut list, top.len());
        let chosen = candidates.map(|candidates| self.draw(candidates));
        self.list = list;
        chosen
    }

    /// Chooses a token from the largest logits, where there may be more than this sampler needs
    /// because another request of the pass needs more; also for greedy sampling.
    pub(crate) fn choose(&mut self, top: &[(u32, f32)]) -> Result<u32, NotFinite> {
        let looked_at = match self.takes_top() {
            Some(k) => k.min(top.len()),
            None => 1,
        };
        match top {
            [] => Err(NotFinite),
            [best, ..] if self.takes_best() => Ok(best.0),
            top => self.sample_from(&top[..looked_at]),
        }
    }

    /// Chooses a token from `logits`, `[n_vocab]`, which bias and samplers change in place. A token
    /// with minus infinity is never chosen.
    pub(crate) fn sample(&mut self, logits: &mut [f32]) -> Result<u32, NotFinite> {
        for &(token, bias) in &self.logit_bias {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit += bias;
            }
        }
        let mut list = std::mem::take(&mut self.list);
        let chosen = match &self.chain[..] {
            [only] if only.is_greedy() => self.best(logits, &mut list),
            _ => {
                let candidates = Candidates::of_all(logits, &mut list);
                candidates.map(|candidates| self.draw(candidates))
            }
        };
        self.list = list;
        chosen
    }

    /// Chooses the most likely token, as a draw from it alone.
    fn best(&mut self, logits: &[f32], list: &mut Vec<(u32, f32)>) -> Result<u32, NotFinite> {
        candidates::check(logits)?;
        let best = ops::argmax(Simd::detect(), logits).ok_or(NotFinite)?;
        list.clear();
        list.push((best as u32, logits[best]));
        self.drawn = Drawn {
            weight: Weight::of_best(logits[best]),
            total: 1.0,
            logit: logits[best],
        };
        Ok(best as u32)
    }

    fn draw(&mut self, mut candidates: Candidates<'_>) -> u32 {
        candidates.keep_at_least(self.min_keep);
        for step in &mut self.chain {
            step.apply(&mut candidates, &mut self.rng);
        }
        if let Some(mirostat) = &self.mirostat {
            mirostat.apply(&mut candidates);
        }
        let weight = candidates.weight();
        let total = candidates.total(weight);
        let share = self.rng.random::<f64>();
        let (token, logit) = candidates.at_share(share, total, weight);
        self.drawn = Drawn {
            weight,
            total,
            logit,
        };
        if let Some(mirostat) = &mut self.mirostat {
            mirostat.observe(weight.of(logit) / total);
        }
        token
    }

    /// The probability with which the last token was drawn, and the probabilities of the `n` most
    /// likely tokens that it was drawn from; fewer if fewer were left.
    pub(crate) fn distribution(&self, n: usize) -> (f64, Vec<(u32, f64)>) {
        let Drawn {
            weight,
            total,
            logit,
        } = self.drawn;
        let share = |logit| weight.of(logit) / total;
        let most_likely = self.list.iter().take(n);
        let most_likely = most_likely.map(|&(token, logit)| (token, share(logit)));
        (share(logit), most_likely.collect())
    }
}
