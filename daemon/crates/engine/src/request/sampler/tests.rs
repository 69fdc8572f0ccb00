//! Samplers together, and what their own tests build on.

use rocmforge_kernels_cpu::ops::{self, Simd};

use super::*;

/// Words as tokens, for samplers that look at the text.
#[derive(Debug, Clone)]
pub(super) struct Words(Vec<String>);

impl Words {
    /// Those of a list, with a blank between two.
    pub(super) fn of(list: &str) -> Self {
        Self(list.split(' ').map(str::to_owned).collect())
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}

impl Pieces for Words {
    fn bytes(&self, token: u32) -> &[u8] {
        self.0[token as usize].as_bytes()
    }
}

/// A sampler whose tokens have no text.
pub(super) fn sampler(params: SamplingParams) -> Sampler {
    let words = |n| Words(vec![String::new(); n]);
    Sampler::new(params, move || Box::new(words(16)))
}

/// Every sampler off, but for the temperature.
pub(super) fn params(temperature: f32) -> SamplingParams {
    SamplingParams {
        temperature,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        seed: Some(7),
        ..SamplingParams::default()
    }
}

/// The distribution that a token was drawn from, most likely first.
#[derive(Debug, PartialEq)]
pub(super) struct Kept(Vec<(u32, f64)>);

impl Kept {
    pub(super) fn of(list: &[(u32, f64)]) -> Self {
        Self(list.to_vec())
    }

    pub(super) fn ids(&self) -> Vec<u32> {
        self.0.iter().map(|(id, _)| *id).collect()
    }

    pub(super) fn shares(&self) -> Vec<f64> {
        self.0.iter().map(|(_, share)| *share).collect()
    }
}

/// What is left of logits with one sampler on.
pub(super) fn kept(logits: &[f32], change: impl Fn(&mut SamplingParams)) -> Kept {
    let mut wanted = params(1.0);
    change(&mut wanted);
    let mut sampler = sampler(wanted);
    sampler.sample(&mut logits.to_vec()).unwrap();
    Kept(sampler.distribution(usize::MAX).1)
}

/// How often each token is drawn of `n` times.
pub(super) fn drawn(logits: &[f32], n: u32, change: impl Fn(&mut SamplingParams)) -> Vec<f64> {
    let mut wanted = params(1.0);
    change(&mut wanted);
    let mut sampler = sampler(wanted);
    let mut seen = vec![0u32; logits.len()];
    for _ in 0..n {
        seen[sampler.sample(&mut logits.to_vec()).unwrap() as usize] += 1;
    }
    let share = |seen| f64::from(seen) / f64::from(n);
    seen.into_iter().map(share).collect()
}

#[test]
fn greedy_takes_the_lowest_id_among_equals() {
    let mut sampler = sampler(params(0.0));
    assert_eq!(sampler.sample(&mut [0.5, 2.0, -1.0, 2.0]), Ok(1));
}

#[test]
fn nan_and_infinity_never_pass() {
    for bad in [f32::NAN, f32::INFINITY] {
        assert_eq!(sampler(params(0.0)).sample(&mut [0.0, bad]), Err(NotFinite));
        assert_eq!(sampler(params(1.0)).sample(&mut [0.0, bad]), Err(NotFinite));
    }
    assert_eq!(
        sampler(params(0.0)).sample(&mut [f32::NEG_INFINITY, 0.0]),
        Ok(1)
    );
}

#[test]
fn what_is_minus_infinity_is_never_chosen() {
    for temperature in [0.0, 5.0] {
        let mut sampler = sampler(params(temperature));
        for _ in 0..200 {
            let mut logits = [f32::NEG_INFINITY, -1e30, f32::NEG_INFINITY];
            assert_eq!(sampler.sample(&mut logits), Ok(1));
        }
        let mut none = [f32::NEG_INFINITY; 3];
        assert_eq!(sampler.sample(&mut none), Err(NotFinite));
    }
}

#[test]
fn bias_moves_the_choice_and_is_looked_at_in_all_logits() {
    for temperature in [0.0, 1.0] {
        let mut sampler = sampler(SamplingParams {
            logit_bias: vec![(1, 100.0), (7, 100.0)],
            top_k: 1,
            ..params(temperature)
        });
        assert_eq!((sampler.takes_best(), sampler.takes_top()), (false, None));
        assert_eq!(sampler.sample(&mut [3.0, 0.0, 9.0]), Ok(1));
    }
    let mut sampler = sampler(SamplingParams {
        logit_bias: vec![(2, -100.0)],
        ..params(0.0)
    });
    assert_eq!(sampler.sample(&mut [3.0, 0.0, 9.0]), Ok(0));
}

#[test]
fn draws_follow_the_softmax() {
    let mut sampler = sampler(params(1.0));
    let logits = [0.0f32, 1.0, 2.0];
    let total: f32 = logits.iter().map(|l| l.exp()).sum();
    let mut seen = [0u32; 3];
    let n = 20_000;
    for _ in 0..n {
        seen[sampler.sample(&mut logits.clone()).unwrap() as usize] += 1;
    }
    for (seen, logit) in seen.iter().zip(logits) {
        let expected = logit.exp() / total;
        let found = *seen as f32 / n as f32;
        assert!((found - expected).abs() < 0.02, "{found} of {expected}");
    }
}

#[test]
fn one_seed_one_sequence() {
    let run = |seed| {
        let mut sampler = sampler(SamplingParams {
            seed: Some(seed),
            ..params(1.0)
        });
        (0..50)
            .map(|_| sampler.sample(&mut [0.0; 100]).unwrap())
            .collect::<Vec<_>>()
    };
    assert_eq!(run(1), run(1));
    assert_ne!(run(1), run(2));
}

#[test]
fn the_largest_logits_alone_give_the_same_tokens() {
    let seed = rand::random();
    println!("seed {seed}");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    for top_k in [1, 2, 40, 128] {
        let params = SamplingParams {
            temperature: rng.random_range(0.2..2.0),
            top_k,
            top_p: rng.random_range(0.3..1.0),
            min_p: rng.random_range(0.0..0.2),
            typical_p: rng.random_range(0.5..1.0),
            xtc: Xtc {
                probability: 0.5,
                threshold: rng.random_range(0.0..0.4),
            },
            dynatemp: DynamicTemperature {
                range: rng.random_range(0.0..0.2),
                exponent: 1.0,
            },
            min_keep: rng.random_range(0..4),
            seed: Some(rng.random()),
            ..SamplingParams::default()
        };
        let (mut whole, mut few) = (sampler(params.clone()), sampler(params));
        let k = whole.takes_top().unwrap();
        let mut top = Vec::new();
        for _ in 0..100 {
            // Steps, so that there are equals.
            let mut logits: Vec<f32> = (0..3000)
                .map(|_| (rng.random_range(-8.0f32..8.0) * 16.0).round() / 16.0)
                .collect();
            ops::top_k(Simd::detect(), &logits, k, &mut top);
            assert_eq!(few.sample_from(&top), whole.sample(&mut logits), "{top_k}");
        }
    }
    let top = |bad| sampler(SamplingParams::default()).sample_from(&[(0, bad), (1, 0.0)]);
    assert_eq!([f32::NAN, f32::INFINITY].map(top), [Err(NotFinite); 2]);
}

#[test]
fn all_logits_are_looked_at_for_penalties_greed_and_long_tails() {
    let takes = |params| sampler(params).takes_top();
    assert_eq!(takes(SamplingParams::default()), Some(40));
    assert_eq!(takes(params(0.0)), None);
    for top_k in [0, 129] {
        let params = SamplingParams {
            top_k,
            ..SamplingParams::default()
        };
        assert_eq!(takes(params), None);
    }
    let penalized = SamplingParams {
        repeat_penalty: 1.1,
        ..SamplingParams::default()
    };
    assert_eq!(takes(penalized), None);
}

#[test]
fn top_p_min_p_and_top_k_cut_the_tail() {
    let logits = [3.0f32, 2.9, 0.0, -1.0];
    let cuts = [
        SamplingParams {
            top_p: 0.6,
            ..params(5.0)
        },
        SamplingParams {
            min_p: 0.5,
            ..params(5.0)
        },
        SamplingParams {
            top_k: 2,
            ..params(5.0)
        },
    ];
    for cut in cuts {
        let mut sampler = sampler(cut.clone());
        for _ in 0..300 {
            assert!(sampler.sample(&mut logits.clone()).unwrap() < 2, "{cut:?}");
        }
    }
}

/// The same steps in another order come to another distribution.
#[test]
fn samplers_come_in_the_order_that_is_asked_for() {
    use SamplerKind::{MinP, Temperature, TopK};
    // Shares of 1 and 0.6 at the temperature 1, of 1 and 0.36 at a half.
    let logits = [1.0f32.ln(), 0.6f32.ln(), -9.0];
    let of = |order: &[SamplerKind]| {
        let kept = kept(&logits, |p| {
            (p.temperature, p.min_p, p.top_k) = (0.5, 0.5, 3);
            p.order = order.to_vec();
        });
        kept.ids().len()
    };
    assert_eq!(of(&[MinP, Temperature]), 2);
    assert_eq!(of(&[Temperature, MinP]), 1);
    // What is missing is off, and what comes twice counts twice.
    assert_eq!(of(&[TopK]), 3);
    assert_eq!(of(&[MinP]), 2);
    assert_eq!(of(&[Temperature, Temperature, MinP]), 1);
    let hot = kept(&logits, |p| {
        (p.temperature, p.order) = (0.0, vec![TopK]);
    });
    assert_eq!(hot.ids().len(), 3, "no temperature is 1, not greedy");
}

#[test]
fn few_of_the_largest_logits_are_enough_where_top_k_comes_first() {
    let takes = |change: fn(&mut SamplingParams)| {
        let mut wanted = SamplingParams::default();
        change(&mut wanted);
        let sampler = sampler(wanted);
        (sampler.takes_best(), sampler.takes_top())
    };
    assert_eq!(takes(|_| {}), (false, Some(40)));
    assert_eq!(takes(|p| p.xtc.probability = 0.5), (false, Some(40)));
    assert_eq!(takes(|p| p.typical_p = 0.5), (false, Some(40)));
    assert_eq!(takes(|p| p.dynatemp.range = 0.5), (false, Some(40)));
    assert_eq!(takes(|p| p.min_keep = 60), (false, Some(40)));
    assert_eq!(takes(|p| p.top_n_sigma = 1.0), (false, None));
    assert_eq!(takes(|p| p.dry.multiplier = 1.0), (false, None));
    assert_eq!(takes(|p| p.logit_bias = vec![(0, 1.0)]), (false, None));
    let mirostat = |p: &mut SamplingParams| {
        p.mirostat = Some(Mirostat {
            version: MirostatVersion::V2,
            tau: 5.0,
            eta: 0.1,
        });
    };
    assert_eq!(takes(mirostat), (false, None));
    // Greedy: what only cuts the tail changes nothing.
    assert_eq!(takes(|p| p.temperature = 0.0), (true, None));
    let sigma = |p: &mut SamplingParams| (p.temperature, p.top_n_sigma) = (0.0, 1.0);
    assert_eq!(takes(sigma), (true, None));
    // The most likely token may be left out.
    let xtc = |p: &mut SamplingParams| (p.temperature, p.xtc.probability) = (0.0, 0.5);
    assert_eq!(takes(xtc), (false, Some(40)));
    let dry = |p: &mut SamplingParams| (p.temperature, p.dry.multiplier) = (0.0, 0.5);
    assert_eq!(takes(dry), (false, None));
}

#[test]
fn greedy_takes_the_best_of_what_the_other_samplers_leave() {
    let logits = [0.1f32, 0.4, 0.3, 0.2].map(f32::ln);
    let of = |change: fn(&mut SamplingParams)| {
        kept(&logits, |p| {
            p.temperature = 0.0;
            change(p);
        })
    };
    assert_eq!(of(|_| {}), Kept::of(&[(1, 1.0)]));
    let xtc = |p: &mut SamplingParams| (p.xtc.probability, p.xtc.threshold) = (1.0, 0.25);
    assert_eq!(of(xtc), Kept::of(&[(2, 1.0)]));
    assert_eq!(of(|p| p.logit_bias = vec![(3, 9.0)]), Kept::of(&[(3, 1.0)]));
    // A bound of surprise has nothing to do there.
    let mirostat = |p: &mut SamplingParams| {
        p.mirostat = Some(Mirostat {
            version: MirostatVersion::V2,
            tau: 5.0,
            eta: 0.1,
        });
    };
    assert_eq!(of(mirostat), Kept::of(&[(1, 1.0)]));
}

#[test]
fn what_is_forbidden_is_never_drawn() {
    for temperature in [0.0, 1.0] {
        let mut sampler = sampler(SamplingParams {
            logit_bias: vec![(2, f32::NEG_INFINITY)],
            ..params(temperature)
        });
        for _ in 0..100 {
            assert_ne!(sampler.sample(&mut [0.0, 1.0, 99.0]), Ok(2));
        }
        sampler.logit_bias = (0..3).map(|id| (id, f32::NEG_INFINITY)).collect();
        assert_eq!(sampler.sample(&mut [0.0; 3]), Err(NotFinite));
    }
}

/// Hostile logits and parameters leave a token, of a finite distribution.
#[test]
fn random_chains_over_random_logits_always_leave_a_token() {
    let seed = rand::random();
    println!("seed {seed}");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let spans = [1e-3f32, 1.0, 30.0, 1e30, f32::MAX];
    for round in 0..3000 {
        let n = rng.random_range(1..15u32);
        let span = spans[round % spans.len()];
        let logit = |rng: &mut ChaCha8Rng| match rng.random_range(0..5) {
            0 => f32::NEG_INFINITY,
            1 => span,
            _ => rng.random_range(-1.0..1.0f32) * span,
        };
        let mut logits: Vec<f32> = (0..n).map(|_| logit(&mut rng)).collect();
        logits[0] = 0.0;
        let order = (0..rng.random_range(0..12))
            .map(|_| SamplerKind::ALL[rng.random_range(0..SamplerKind::ALL.len())]);
        let order: Vec<_> = order.collect();
        let version = [MirostatVersion::V1, MirostatVersion::V2][round % 2];
        let wanted = SamplingParams {
            temperature: [0.0, 1e-30, 0.5, 1.0, 1e30][rng.random_range(0..5)],
            dynatemp: DynamicTemperature {
                range: [0.0, 1.0, 1e9][rng.random_range(0..3)],
                exponent: [0.0, 1.0, 50.0][rng.random_range(0..3)],
            },
            top_k: rng.random_range(0..5),
            top_p: rng.random_range(1e-9..=1.0),
            min_p: rng.random_range(0.0..1.0),
            typical_p: rng.random_range(1e-9..=1.0),
            top_n_sigma: rng.random_range(0.0..3.0),
            xtc: Xtc {
                probability: rng.random_range(0.0..=1.0),
                threshold: rng.random_range(0.0..=0.5),
            },
            min_keep: rng.random_range(0..4),
            repeat_penalty: [1e-30, 1.0, 1e30][rng.random_range(0..3)],
            presence_penalty: rng.random_range(-100.0..100.0),
            frequency_penalty: rng.random_range(-100.0..100.0),
            penalty_last_n: rng.random_range(0..9),
            dry: Dry {
                multiplier: [0.0, 1.0, 1e30][rng.random_range(0..3)],
                base: [1.0, 1.75, 1e30][rng.random_range(0..3)],
                last_n: rng.random_range(0..9),
                ..Dry::default()
            },
            mirostat: (round % 7 == 0).then_some(Mirostat {
                version,
                tau: [1e-3, 5.0, 99.0][rng.random_range(0..3)],
                eta: [0.0, 0.1, 1.0][rng.random_range(0..3)],
            }),
            order,
            seed: Some(rng.random()),
            logit_bias: Vec::new(),
        };
        let shown = format!("{wanted:?} {logits:?}");
        let mut sampler = sampler(wanted);
        sampler.read(&[0; 5]);
        for _ in 0..5 {
            let token = sampler.sample(&mut logits.clone());
            let token = token.unwrap_or_else(|_| panic!("{shown}"));
            assert!(logits[token as usize] > f32::NEG_INFINITY, "{shown}");
            let (share, top) = sampler.distribution(20);
            assert!(share > 0.0 && share <= 1.0 + 1e-9, "{share} {shown}");
            let sum: f64 = top.iter().map(|(_, share)| share).sum();
            assert!(sum <= 1.0 + 1e-6, "{sum} {shown}");
            sampler.accept(token);
        }
    }
}
