//! Routing of rows to experts. A row has a few hundred logits, so plain Rust is fast enough and
//! gives the same bits with every instruction set.

use rocmforge_ops::{Router, RouterGate};

use super::act::{sigmoid, softplus};

/// Chooses one row's experts from its `logits`, `[n_expert]`, and the selection's `bias` of the
/// same length: `ids` and `weights`, `[n_used]` each, in falling order of selection, the lowest
/// index first among equals.
///
/// NaN is chosen last. The sum that weights are divided by is at least the smallest normal f32.
///
/// # Panics
/// When lengths do not fit the router, groups do not divide the experts, or the groups that are
/// kept have fewer experts than a row uses.
pub fn route(
    router: &Router,
    logits: &[f32],
    bias: Option<&[f32]>,
    ids: &mut [f32],
    weights: &mut [f32],
) {
    check(router, logits, bias, ids, weights);
    let probabilities = probabilities(router.gate, logits);
    // A number for each expert that may be chosen, NaN for the others.
    let mut keys: Vec<f32> = match bias {
        None => probabilities.iter().map(|&p| key(p)).collect(),
        Some(bias) => probabilities
            .iter()
            .zip(bias)
            .map(|(p, b)| key(p + b))
            .collect(),
    };
    keep_best_groups(router, &mut keys);
    for (id, weight) in ids.iter_mut().zip(weights.iter_mut()) {
        let best = take_best(&mut keys);
        // Whole numbers below 2^24 are exact.
        *id = best as f32;
        *weight = probabilities[best];
    }
    if router.gate == RouterGate::SoftmaxOfChosen {
        softmax_in_place(weights);
    }
    if router.renormalize {
        let sum = weights.iter().sum::<f32>().max(f32::MIN_POSITIVE);
        weights.iter_mut().for_each(|w| *w /= sum);
    }
    weights.iter_mut().for_each(|w| *w *= router.scale);
}

fn check(router: &Router, logits: &[f32], bias: Option<&[f32]>, ids: &[f32], weights: &[f32]) {
    let (n_expert, n_used) = (router.n_expert as usize, router.n_used as usize);
    let (n_group, kept) = (router.n_group as usize, router.n_group_used as usize);
    assert!(
        logits.len() == n_expert && bias.is_none_or(|bias| bias.len() == n_expert),
        "route: {} logits for {n_expert} experts",
        logits.len()
    );
    assert!(
        ids.len() == n_used && weights.len() == n_used,
        "route: {} ids for {n_used} experts a row",
        ids.len()
    );
    assert!(
        n_group > 0 && n_expert.is_multiple_of(n_group) && kept <= n_group,
        "route: {kept} of {n_group} groups of {n_expert} experts"
    );
    assert!(
        n_expert <= 1 << 24 && n_used <= n_expert / n_group * kept,
        "route: {n_used} experts a row of {n_expert} in {kept} of {n_group} groups"
    );
}

/// What experts are chosen by, and weigh; logits as they are where softmax follows the choice.
fn probabilities(gate: RouterGate, logits: &[f32]) -> Vec<f32> {
    let mut p = logits.to_vec();
    match gate {
        RouterGate::Softmax => softmax_in_place(&mut p),
        RouterGate::Sigmoid => p.iter_mut().for_each(|p| *p = sigmoid(*p)),
        RouterGate::SoftmaxOfChosen => {}
        RouterGate::SqrtSoftplus => p.iter_mut().for_each(|p| *p = softplus(*p).sqrt()),
    }
    p
}

fn softmax_in_place(x: &mut [f32]) {
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    x.iter_mut().for_each(|x| *x = (*x - max).exp());
    let scale = (1.0 / x.iter().map(|&x| f64::from(x)).sum::<f64>()) as f32;
    x.iter_mut().for_each(|x| *x *= scale);
}

fn key(selection: f32) -> f32 {
    if selection.is_nan() {
        f32::NEG_INFINITY
    } else {
        selection
    }
}

/// Rules out the groups other than the `n_group_used` with the largest sum of their two largest
/// keys.
fn keep_best_groups(router: &Router, keys: &mut [f32]) {
    if router.n_group_used == router.n_group {
        return;
    }
    let group = keys.len() / router.n_group as usize;
    let mut sums: Vec<f32> = keys
        .chunks_exact(group)
        .map(|keys| key(best_two(keys)))
        .collect();
    let mut kept = vec![false; sums.len()];
    for _ in 0..router.n_group_used {
        kept[take_best(&mut sums)] = true;
    }
    for (keys, kept) in keys.chunks_exact_mut(group).zip(kept) {
        if !kept {
            keys.fill(f32::NAN);
        }
    }
}

/// The sum of the two largest keys of a group, or its only one.
fn best_two(keys: &[f32]) -> f32 {
    let [mut first, mut second] = [f32::NEG_INFINITY; 2];
    for &key in keys {
        if key > first {
            (first, second) = (key, first);
        } else if key > second {
            second = key;
        }
    }
    if keys.len() > 1 {
        first + second
    } else {
        first
    }
}

/// The index of the largest key that is a number, the lowest among equals; becomes NaN.
fn take_best(keys: &mut [f32]) -> usize {
    let mut best: Option<(usize, f32)> = None;
    for (i, &key) in keys.iter().enumerate() {
        // Not so for NaN.
        if best.map_or(!key.is_nan(), |(_, most)| key > most) {
            best = Some((i, key));
        }
    }
    let (i, _) = best.expect("there are at least as many candidates as are chosen");
    keys[i] = f32::NAN;
    i
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{Random, assert_close};

    const GATES: [RouterGate; 4] = [
        RouterGate::Softmax,
        RouterGate::Sigmoid,
        RouterGate::SoftmaxOfChosen,
        RouterGate::SqrtSoftplus,
    ];

    fn router(n_expert: u32, n_used: u32, gate: RouterGate) -> Router {
        Router {
            n_expert,
            n_used,
            gate,
            n_group: 1,
            n_group_used: 1,
            renormalize: false,
            scale: 1.0,
        }
    }

    /// Straight from the definition, with sorts, in f64: ids, weights, and the least difference of
    /// two that were compared and are not equal.
    fn reference(
        router: &Router,
        logits: &[f32],
        bias: Option<&[f32]>,
    ) -> (Vec<usize>, Vec<f64>, f64) {
        let mut margin = f64::INFINITY;
        let x: Vec<f64> = logits.iter().map(|&x| f64::from(x)).collect();
        let softmax = |x: &[f64]| -> Vec<f64> {
            let sum: f64 = x.iter().map(|x| x.exp()).sum();
            x.iter().map(|x| x.exp() / sum).collect()
        };
        let p = match router.gate {
            RouterGate::Softmax => softmax(&x),
            RouterGate::Sigmoid => x.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect(),
            RouterGate::SoftmaxOfChosen => x.clone(),
            RouterGate::SqrtSoftplus => x.iter().map(|x| x.exp().ln_1p().sqrt()).collect(),
        };
        let selection: Vec<f64> = (0..p.len())
            .map(|i| p[i] + bias.map_or(0.0, |b| f64::from(b[i])))
            .collect();
        let mut falling = |mut order: Vec<usize>, by: &[f64]| {
            order.sort_by(|&a, &b| by[b].total_cmp(&by[a]));
            for pair in order.windows(2) {
                let difference = by[pair[0]] - by[pair[1]];
                if difference > 0.0 {
                    margin = margin.min(difference);
                }
            }
            order
        };
        let size = p.len() / router.n_group as usize;
        let sums: Vec<f64> = selection
            .chunks(size)
            .map(|group| {
                let order = falling((0..size).collect(), group);
                order.iter().take(2).map(|&i| group[i]).sum()
            })
            .collect();
        let mut groups = falling((0..sums.len()).collect(), &sums);
        groups.truncate(router.n_group_used as usize);
        let allowed = (0..p.len()).filter(|i| groups.contains(&(i / size)));
        let mut ids = falling(allowed.collect(), &selection);
        ids.truncate(router.n_used as usize);
        let mut weights: Vec<f64> = ids.iter().map(|&i| p[i]).collect();
        if router.gate == RouterGate::SoftmaxOfChosen {
            weights = softmax(&weights);
        }
        if router.renormalize {
            let sum: f64 = weights.iter().sum();
            weights.iter_mut().for_each(|w| *w /= sum);
        }
        weights
            .iter_mut()
            .for_each(|w| *w *= f64::from(router.scale));
        (ids, weights, margin)
    }

    #[test]
    fn agrees_with_the_definition() {
        let mut source = Random::new("route");
        let mut compared = 0;
        for round in 0..400 {
            let n_group = [1, 1, 4, 8][source.below(4)];
            let n_expert = n_group * (1 + source.below(40)) as u32;
            let n_group_used = 1 + source.below(n_group as usize) as u32;
            let most = n_expert / n_group * n_group_used;
            let router = Router {
                n_group,
                n_group_used,
                renormalize: source.below(2) == 0,
                scale: [1.0, 2.5][source.below(2)],
                ..router(
                    n_expert,
                    1 + source.below(most.min(12) as usize) as u32,
                    GATES[round % 4],
                )
            };
            let logits = source.normal(n_expert as usize);
            let biases = source.normal(n_expert as usize);
            let bias = (source.below(2) == 0).then_some(&biases[..]);
            let (expected, expected_weights, margin) = reference(&router, &logits, bias);
            if margin < 1e-6 {
                // Which of the two is larger is a matter of rounding.
                continue;
            }
            compared += 1;
            let n_used = router.n_used as usize;
            let (mut ids, mut weights) = (vec![f32::NAN; n_used], vec![f32::NAN; n_used]);
            route(&router, &logits, bias, &mut ids, &mut weights);
            let found: Vec<usize> = ids.iter().map(|&id| id as usize).collect();
            assert_eq!(found, expected, "{router:?}");
            assert_close(&weights, &expected_weights, 2e-6, &format!("{router:?}"));
        }
        assert!(compared > 100, "{compared} rounds were compared");
    }

    #[test]
    fn the_lowest_index_comes_first_among_equals() {
        for gate in GATES {
            let logits = [0.0, 1.0, 1.0, -1.0, 1.0, 0.0];
            let (mut ids, mut weights) = ([0.0; 4], [0.0; 4]);
            route(&router(6, 4, gate), &logits, None, &mut ids, &mut weights);
            assert_eq!(ids, [1.0, 2.0, 4.0, 0.0], "{gate:?}");
            // Groups too: all four are alike.
            let grouped = Router {
                n_group: 4,
                n_group_used: 2,
                ..router(8, 4, gate)
            };
            route(&grouped, &[1.0; 8], None, &mut ids, &mut weights);
            assert_eq!(ids, [0.0, 1.0, 2.0, 3.0], "{gate:?}");
        }
    }

    #[test]
    fn ids_are_distinct_and_in_range_whatever_the_logits() {
        let mut source = Random::new("route nan");
        for round in 0..200 {
            let mut logits = source.normal(16);
            for _ in 0..1 + source.below(16) {
                logits[source.below(16)] =
                    [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][source.below(3)];
            }
            let router = Router {
                n_group: 4,
                n_group_used: 2,
                renormalize: true,
                ..router(16, 8, GATES[round % 4])
            };
            let (mut ids, mut weights) = ([f32::NAN; 8], [0.0; 8]);
            route(&router, &logits, None, &mut ids, &mut weights);
            let mut seen = [false; 16];
            for id in ids {
                assert!(!std::mem::replace(&mut seen[id as usize], true), "{ids:?}");
            }
        }
    }

    #[test]
    fn weights_that_vanish_are_not_divided_by_zero() {
        let router = Router {
            renormalize: true,
            ..router(4, 2, RouterGate::Sigmoid)
        };
        let (mut ids, mut weights) = ([0.0; 2], [0.0; 2]);
        route(&router, &[-1e4; 4], None, &mut ids, &mut weights);
        assert_eq!(weights, [0.0, 0.0]);
    }
}
