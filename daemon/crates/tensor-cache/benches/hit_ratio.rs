//! Hit ratio in bytes of the default policy, of plain LRU and of offline Belady, over traces of
//! passes, with the models of the requests that wait known and not; then what a decision costs.
//! `cargo bench -p rocmforge-tensor-cache`. Fails where the policy is 2 points or more below
//! offline Belady on a cyclic or two-model trace, 1 point or more on a random order of models that
//! is known four requests ahead, or where to know the queue makes it worse.
//!
//! Offline Belady knows the whole trace, has no fragmentation and uploads nothing early: on a miss
//! the resident segment whose next use is farthest goes until the bytes suffice. With sizes that
//! differ this is not quite optimal (nor is anything else that is cheap), so the better of two is
//! printed: as it is, and with needless victims spared.

use std::collections::{BTreeSet, HashMap};
use std::time::Instant;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rocmforge_tensor_cache::{
    Acquired, Cache, CacheConfig, ModelId, PassHint, Policy, SegmentId, SegmentKind, SegmentSpec,
};

const MIB: u64 = 1 << 20;
const BUDGETS: [u64; 4] = [25, 50, 75, 90];
const SEED: u64 = 7;

#[derive(Clone, Copy)]
enum Step {
    Begin(u32, bool),
    Use(u32, u32),
    End(u32),
    RequestEnd(u32),
}

struct Trace {
    name: &'static str,
    models: Vec<Vec<SegmentSpec>>,
    steps: Vec<Step>,
}

impl Trace {
    fn bytes(&self) -> u64 {
        self.models
            .iter()
            .flatten()
            .map(|segment| segment.bytes)
            .sum()
    }

    fn uses(&self) -> Vec<(u32, u32)> {
        let used = |step: &Step| {
            if let Step::Use(model, index) = *step {
                Some((model, index))
            } else {
                None
            }
        };
        self.steps.iter().filter_map(used).collect()
    }
}

/// The shape of a Q4_K_M file, in KiB: layers of attention, gate with up, and down, of which every
/// other has larger value and down matrices; a head.
fn dense(layers: usize, small: [u64; 3], large: [u64; 3], head: u64) -> Vec<SegmentSpec> {
    let mut sizes = Vec::new();
    for layer in 0..layers {
        let more_bits =
            layer < layers / 8 || layer >= layers * 7 / 8 || (layer - layers / 8) % 3 == 2;
        sizes.extend(if more_bits { large } else { small });
    }
    sizes.push(head);
    sizes
        .into_iter()
        .map(|kib| SegmentSpec::ordered(kib << 10))
        .collect()
}

fn llama_8b() -> Vec<SegmentSpec> {
    dense(
        32,
        [23_056, 64_528, 32_272],
        [24_112, 64_528, 47_056],
        420_864,
    )
}

fn qwen_3b() -> Vec<SegmentSpec> {
    dense(
        36,
        [5_328, 25_344, 12_672],
        [5_568, 25_344, 18_480],
        249_344,
    )
}

/// One request: `passes` passes. With `known`, the last is announced as such; otherwise it turns
/// out to be (an end-of-text token).
fn request(
    steps: &mut Vec<Step>,
    models: &[Vec<SegmentSpec>],
    model: u32,
    passes: u32,
    known: bool,
) {
    for pass in 1..=passes {
        steps.push(Step::Begin(model, !known || pass < passes));
        steps.extend((0..models[model as usize].len() as u32).map(|index| Step::Use(model, index)));
        steps.push(Step::End(model));
    }
    if !known {
        steps.push(Step::RequestEnd(model));
    }
}

/// Writes the steps of a trace over some models.
type Make<'a> = &'a mut dyn FnMut(&mut Vec<Step>, &[Vec<SegmentSpec>]);

#[expect(clippy::too_many_lines, reason = "a list of traces")]
fn traces() -> Vec<Trace> {
    let mut rng = StdRng::seed_from_u64(SEED);
    let mut traces = Vec::new();
    let mut add = |name, models: Vec<Vec<SegmentSpec>>, make: Make| {
        let mut steps = Vec::new();
        make(&mut steps, &models);
        traces.push(Trace {
            name,
            models,
            steps,
        });
    };
    add(
        "cyclic: one request of 200 passes",
        vec![llama_8b()],
        &mut |steps, models| {
            request(steps, models, 0, 200, true);
        },
    );
    add(
        "cyclic: 200 requests of one pass",
        vec![llama_8b()],
        &mut |steps, models| {
            (0..200).for_each(|_| request(steps, models, 0, 1, true));
        },
    );
    let two = || vec![llama_8b(), qwen_3b()];
    add(
        "two-model: A, B, A, B, one pass each",
        two(),
        &mut |steps, models| {
            (0..200).for_each(|at| request(steps, models, at % 2, 1, true));
        },
    );
    add(
        "two-model: equal, one pass each",
        vec![llama_8b(), llama_8b()],
        &mut |steps, models| {
            (0..200).for_each(|at| request(steps, models, at % 2, 1, true));
        },
    );
    add(
        "two-model: 2 to 4 passes each",
        two(),
        &mut |steps, models| {
            (0..200).for_each(|at| request(steps, models, at % 2, rng.random_range(2..=4), true));
        },
    );
    add(
        "two-model: 2 to 40 passes each",
        two(),
        &mut |steps, models| {
            (0..60).for_each(|at| request(steps, models, at % 2, rng.random_range(2..=40), true));
        },
    );
    add(
        "two-model: 2 to 4, end not known",
        two(),
        &mut |steps, models| {
            (0..200).for_each(|at| request(steps, models, at % 2, rng.random_range(2..=4), false));
        },
    );
    add(
        "two-model: 2 to 40, end not known",
        two(),
        &mut |steps, models| {
            (0..60).for_each(|at| request(steps, models, at % 2, rng.random_range(2..=40), false));
        },
    );
    add(
        "two-model: interleaved pass by pass",
        two(),
        &mut |steps, models| {
            for _ in 0..100 {
                for model in 0..2 {
                    steps.push(Step::Begin(model, true));
                    steps.extend(
                        (0..models[model as usize].len() as u32)
                            .map(|index| Step::Use(model, index)),
                    );
                    steps.push(Step::End(model));
                }
            }
        },
    );
    let four = vec![
        llama_8b(),
        qwen_3b(),
        dense(28, [3_060, 13_632, 6_816], [3_252, 13_632, 9_940], 163_840),
        dense(16, [5_898, 18_432, 9_216], [6_168, 18_432, 13_440], 209_920),
    ];
    add(
        "random: 4 models, one pass each",
        four.clone(),
        &mut |steps, models| {
            (0..400).for_each(|_| {
                request(
                    steps,
                    models,
                    [0, 0, 0, 1, 1, 2, 2, 3][rng.random_range(0..8)],
                    1,
                    true,
                )
            });
        },
    );
    add(
        "random: 4 models, 2 to 20 passes",
        four,
        &mut |steps, models| {
            for _ in 0..80 {
                let model = [0, 0, 0, 1, 1, 2, 2, 3][rng.random_range(0..8)];
                request(steps, models, model, rng.random_range(2..=20), true);
            }
        },
    );
    add(
        "random: experts, 8 of 128 a layer, skewed",
        vec![mixture(12)],
        &mut |steps, models| {
            mixture_passes(steps, &models[0], 100, &mut rng);
        },
    );
    traces
}

const EXPERTS: u32 = 128;

/// Layers of attention (ordered) and 128 experts.
fn mixture(layers: u32) -> Vec<SegmentSpec> {
    let mut segments = vec![SegmentSpec::ordered(200 * MIB)];
    for _ in 0..layers {
        segments.push(SegmentSpec::ordered(12 * MIB));
        segments.extend((0..EXPERTS).map(|_| SegmentSpec::expert(2 * MIB + MIB / 2)));
    }
    segments.push(SegmentSpec::ordered(250 * MIB));
    segments
}

fn mixture_passes(steps: &mut Vec<Step>, segments: &[SegmentSpec], passes: u32, rng: &mut StdRng) {
    for _ in 0..passes {
        steps.push(Step::Begin(0, true));
        for (index, segment) in (0u32..).zip(segments) {
            if segment.kind == SegmentKind::Expert {
                continue;
            }
            steps.push(Step::Use(0, index));
            if index > 0 && index as usize + 1 < segments.len() {
                let mut chosen = BTreeSet::new();
                while chosen.len() < 8 {
                    // Popularity falls with the square root; which expert is popular
                    // differs from layer to layer.
                    let rank = (rng.random::<f64>().powi(2) * f64::from(EXPERTS)) as u32;
                    chosen.insert((rank * 37 + index) % EXPERTS);
                }
                steps.extend(
                    chosen
                        .into_iter()
                        .map(|expert| Step::Use(0, index + 1 + expert)),
                );
            }
        }
        steps.push(Step::End(0));
    }
}

/// For each step that begins a request, the models of the `queue` requests behind it, in order.
fn queues(trace: &Trace, queue: usize) -> HashMap<usize, Vec<ModelId>> {
    let mut runs = BTreeSet::new();
    let mut more_of = HashMap::new();
    let mut begins = Vec::new();
    for (at, step) in trace.steps.iter().enumerate() {
        match *step {
            Step::Begin(model, more) => {
                if runs.insert(model) {
                    begins.push((at, ModelId(model)));
                }
                more_of.insert(model, more);
            }
            Step::End(model) if !more_of[&model] => {
                runs.remove(&model);
            }
            Step::RequestEnd(model) => {
                runs.remove(&model);
            }
            Step::End(_) | Step::Use(..) => {}
        }
    }
    let behind = |i: usize| begins[i + 1..].iter().take(queue).map(|(_, model)| *model);
    let of = |(i, (at, _)): (usize, &(usize, ModelId))| (*at, behind(i).collect());
    begins.iter().enumerate().map(of).collect()
}

/// Runs a trace as the engine would: take, prefetch the next `ahead` segments, give
/// back. So many requests wait.
fn simulate(trace: &Trace, budget: u64, policy: Policy, ahead: u32, queue: usize) -> Cache {
    let queues = queues(trace, queue);
    let mut cache = Cache::new(CacheConfig {
        policy,
        ..CacheConfig::new(budget)
    });
    for (model, segments) in (0..).zip(&trace.models) {
        cache
            .register(ModelId(model), segments)
            .expect("the largest segment fits a quarter of the sum");
    }
    let mut actions = Vec::new();
    for (at, step) in trace.steps.iter().enumerate() {
        match *step {
            Step::Begin(model, more) => {
                if let Some(upcoming) = queues.get(&at) {
                    cache.foresee(upcoming);
                }
                cache
                    .pass_begin(
                        ModelId(model),
                        PassHint {
                            expects_next_pass: more,
                        },
                    )
                    .expect("registered");
            }
            Step::End(model) => cache.pass_end(ModelId(model)),
            Step::RequestEnd(model) => cache.request_end(ModelId(model)),
            Step::Use(model, index) => {
                let segment = SegmentId {
                    model: ModelId(model),
                    index,
                };
                let acquired = match cache.acquire(segment, &mut actions) {
                    Ok(acquired) => acquired,
                    Err(_) => {
                        // Prefetched segments are in the way: let them arrive, as the engine does.
                        let last = index + ahead;
                        complete(&mut cache, model, index + 1..=last);
                        cache
                            .acquire(segment, &mut actions)
                            .expect("nothing else is in use")
                    }
                };
                if !matches!(acquired, Acquired::Resident(_)) {
                    cache.uploaded(segment);
                }
                for next in index + 1..=index + ahead {
                    cache.prefetch(
                        SegmentId {
                            model: ModelId(model),
                            index: next,
                        },
                        &mut actions,
                    );
                }
                cache.release(segment);
            }
        }
        actions.clear();
    }
    cache
}

fn complete(cache: &mut Cache, model: u32, indices: std::ops::RangeInclusive<u32>) {
    let states = cache.residency(ModelId(model)).expect("registered");
    for index in indices {
        if let Some(rocmforge_tensor_cache::SegmentState::InFlight(_)) =
            states.get(index as usize).map(|s| s.residency)
        {
            cache.uploaded(SegmentId {
                model: ModelId(model),
                index,
            });
        }
    }
}

fn hit_ratio(cache: &Cache) -> f64 {
    let counters = cache.stats().total.counters;
    100.0 * counters.hit_bytes as f64 / (counters.hit_bytes + counters.miss_bytes) as f64
}

/// Offline Belady, see above.
fn oracle(trace: &Trace, budget: u64, spare: bool) -> f64 {
    let uses = trace.uses();
    let size = |(model, index): (u32, u32)| trace.models[model as usize][index as usize].bytes;
    let mut next_use = vec![usize::MAX; uses.len()];
    let mut seen: HashMap<(u32, u32), usize> = HashMap::new();
    for (at, id) in uses.iter().enumerate().rev() {
        next_use[at] = seen.insert(*id, at).unwrap_or(usize::MAX);
    }
    let mut resident: HashMap<(u32, u32), usize> = HashMap::new();
    let mut by_next: BTreeSet<(usize, (u32, u32))> = BTreeSet::new();
    let (mut used, mut hit, mut total) = (0, 0, 0);
    for (at, &id) in uses.iter().enumerate() {
        let bytes = size(id);
        total += bytes;
        if let Some(next) = resident.remove(&id) {
            hit += bytes;
            by_next.remove(&(next, id));
        } else {
            let mut victims = Vec::new();
            while used + bytes > budget {
                let victim = by_next.pop_last().expect("a segment fits the budget");
                used -= size(victim.1);
                victims.push(victim);
            }
            for victim in victims.into_iter().rev() {
                if spare && used + bytes + size(victim.1) <= budget {
                    used += size(victim.1);
                    by_next.insert(victim);
                } else {
                    resident.remove(&victim.1);
                }
            }
            used += bytes;
        }
        resident.insert(id, next_use[at]);
        by_next.insert((next_use[at], id));
    }
    100.0 * hit as f64 / total as f64
}

fn ratios() {
    println!(
        "hit ratio in bytes, %; 'off' = offline Belady less this policy; 'off 4' = the same where 4 requests wait and their \
         models are known, 'off 16' where 16 do; '+2' = with two segments prefetched"
    );
    println!(
        "{:<44}{:>7}{:>9}{:>7}{:>9}{:>7}{:>7}{:>8}{:>7}{:>8}",
        "trace", "budget", "policy", "LRU", "offline", "off", "off 4", "off 16", "+2", "moved"
    );
    for trace in traces() {
        for share in BUDGETS {
            let budget = trace.bytes() * share / 100;
            let cache = simulate(&trace, budget, Policy::PassAware, 0, 0);
            let lru = hit_ratio(&simulate(&trace, budget, Policy::Lru, 0, 0));
            let offline = oracle(&trace, budget, false).max(oracle(&trace, budget, true));
            let ahead = hit_ratio(&simulate(&trace, budget, Policy::PassAware, 2, 0));
            let ours = hit_ratio(&cache);
            let promised = trace.name.starts_with("cyclic") || trace.name.starts_with("two-model");
            assert!(
                !promised || offline - ours < 2.0,
                "{} at {share} %: {ours} of {offline}",
                trace.name
            );
            let known = |queue| hit_ratio(&simulate(&trace, budget, Policy::PassAware, 0, queue));
            let (four, sixteen) = (known(4), known(16));
            assert!(
                four.min(sixteen) > ours - 0.1,
                "{} at {share} %: {four}, {sixteen} with the queue known, {ours} without",
                trace.name
            );
            let models_are_random = trace.name.starts_with("random: 4 models");
            assert!(
                !models_are_random || offline - four.min(sixteen) < 1.0,
                "{} at {share} %: {four}, {sixteen} of {offline}",
                trace.name
            );
            let counters = cache.stats().total.counters;
            let moved = 100.0 * counters.moved_bytes as f64 / counters.uploaded_bytes.max(1) as f64;
            println!(
                "{:<44}{share:>5} %{ours:>9.2}{lru:>7.2}{offline:>9.2}{:>7.2}{:>7.2}{:>8.2}{ahead:>7.2}{moved:>6.0} %",
                trace.name,
                offline - ours,
                offline - four,
                offline - sixteen
            );
        }
    }
    println!("moved: bytes slid inside the arena per 100 bytes uploaded\n");
}

fn costs() {
    println!(
        "{:<52}{:>10}{:>10}{:>12}",
        "cost of acquire and release", "segments", "misses", "ns a use"
    );
    let mut rng = StdRng::seed_from_u64(SEED);
    let mut moe = Trace {
        name: "",
        models: vec![mixture(48)],
        steps: Vec::new(),
    };
    mixture_passes(&mut moe.steps, &moe.models[0], 40, &mut rng);
    let mut dense = Trace {
        name: "",
        models: vec![llama_8b()],
        steps: Vec::new(),
    };
    request(&mut dense.steps, &dense.models, 0, 2000, true);
    let many_models: Vec<_> = (0..32).map(|_| qwen_3b()).collect();
    let mut many = Trace {
        name: "",
        models: many_models,
        steps: Vec::new(),
    };
    (0..640).for_each(|at| request(&mut many.steps, &many.models, at * 7 % 32, 1, true));
    for (name, trace, share) in [
        ("dense, all hits", &dense, 101),
        ("dense, half of the bytes fit", &dense, 50),
        ("32 dense models in turn, half of the bytes fit", &many, 50),
        ("mixture, 48 layers of 128 experts, all fit", &moe, 101),
        ("mixture, 48 layers of 128 experts, half fit", &moe, 50),
    ] {
        let start = Instant::now();
        let cache = simulate(trace, trace.bytes() * share / 100, Policy::PassAware, 0, 0);
        let took = start.elapsed();
        let counters = cache.stats().total.counters;
        let uses = counters.hits + counters.misses;
        let segments: usize = trace.models.iter().map(Vec::len).sum();
        let missed = 100.0 * counters.misses as f64 / uses as f64;
        println!(
            "{name:<52}{segments:>10}{missed:>8.1} %{:>12.0}",
            took.as_nanos() as f64 / uses as f64
        );
    }
}

fn main() {
    ratios();
    costs();
}
