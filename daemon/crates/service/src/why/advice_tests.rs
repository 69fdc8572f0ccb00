//! What is advised, and what is not.

use std::time::Instant;

use rocmforge_engine::api::times::{DecodeTimes, Displaced, LinkUse, Settings, Surroundings};
use rocmforge_engine::api::{WeightShare, WeightShares};

use super::*;

const MIB: u64 = 1 << 20;

fn times() -> RequestTimes {
    let now = Instant::now();
    RequestTimes {
        begun: now,
        ended: now,
        parts: PartTimes::default(),
        waited_for: Vec::new(),
        uploaded_bytes: 0,
        cold_bytes: 0,
        displaced: Vec::new(),
        link: LinkUse::default(),
        cpu_bytes: 0,
        prompt_tokens: (10, 0),
        generated_tokens: 5,
        decode: DecodeTimes::default(),
        longest_gap: None,
        promised_gap: None,
        surroundings: Surroundings {
            budget_bytes: 100 * MIB,
            model_bytes: 60 * MIB,
            model_fits: true,
            block_bytes: 10 * MIB,
            kv_type: "f16".to_owned(),
            kv_bytes: 8 * MIB,
            resident_token_s: Some(0.004),
            running: (3, 64),
            is_pass_aware: true,
            ..Surroundings::default()
        },
    }
}

fn mostly(part: Part) -> PartTimes {
    let mut parts = PartTimes::default();
    parts.add(part, Duration::from_millis(900));
    parts.add(Part::Decode, Duration::from_millis(100));
    parts
}

fn texts(times: &RequestTimes, part: Part) -> Vec<String> {
    let advice = of(times, &mostly(part)).into_iter();
    advice.map(|advice| advice.text).collect()
}

/// Of a model of 120 MiB in 100 MiB, 10 of which its passes need: each of 20 passes waits 40 ms for
/// 40 MiB and computes for 10 ms.
fn that_does_not_fit() -> RequestTimes {
    let mut times = times();
    let mut parts = PartTimes::default();
    parts.add(Part::Uploads, Duration::from_millis(800));
    parts.add(Part::Decode, Duration::from_millis(200));
    times.parts = parts;
    times.uploaded_bytes = 900 * MIB;
    times.decode = DecodeTimes {
        tokens: 20,
        passes: 20,
        parts,
        uploaded_bytes: 800 * MIB,
        cpu_bytes: 0,
    };
    let around = &mut times.surroundings;
    (around.model_bytes, around.model_fits) = (120 * MIB, false);
    around.resident_token_s = None;
    times
}

/// Matrices of so many MiB.
fn matrices(ty: WeightType, mib: u64) -> WeightShares {
    let bytes = mib * MIB;
    let share = WeightShare {
        ty,
        rows_of: 256,
        elements: bytes / ty.block_bytes() as u64 * ty.block_size() as u64,
        bytes,
    };
    WeightShares {
        matrices: vec![share],
        pass_bytes: bytes,
    }
}

/// What is predicted of a setting.
fn predicted(times: &RequestTimes, setting: &str) -> Option<(String, f64, f64)> {
    let advice = of(times, &times.parts).into_iter();
    let mut of = advice.filter_map(|advice| advice.prediction);
    let of = of.find(|of| of.setting == setting)?;
    let rates = (of.tokens_per_s, of.predicted_tokens_per_s);
    Some((of.value, rates.0, rates.1))
}

#[test]
fn a_larger_budget_is_advised_with_the_rate_before_and_after() {
    let times = that_does_not_fit();
    let (value, now, then) = predicted(&times, "budget").unwrap();
    assert_eq!(value, (130 * MIB).to_string());
    assert!((now - 20.0).abs() < 1e-6 && (then - 100.0).abs() < 1e-6);
    let told = &of(&times, &times.parts)[0].text;
    assert!(told.starts_with("30.0 MiB more budget, 130.0 MiB in all"));
    assert!(told.ends_with(": 20.0 -> 100.0 tokens/s"), "{told}");
    // The device has less: 10 MiB of 40 that a pass misses, at 1 MiB in a ms.
    let mut on_small = times;
    on_small.surroundings.free_bytes = Some(10 * MIB);
    let (value, _, then) = predicted(&on_small, "budget").unwrap();
    assert_eq!(value, (110 * MIB).to_string());
    assert!((then - 25.0).abs() < 1e-6, "{then}");
    on_small.surroundings.free_bytes = Some(0);
    assert_eq!(predicted(&on_small, "budget"), None);
}

#[test]
fn the_largest_smaller_type_of_weights_that_fits_is_advised() {
    let mut times = that_does_not_fit();
    times.surroundings.weights = matrices(WeightType::Q8_0, 110);
    // 6.5625 bits in place of 8.5 save 25 MiB; 5.5 bits save 38.8.
    let (value, _, then) = predicted(&times, "weights").unwrap();
    assert_eq!(value, "Q5_K_S");
    assert!((then - 100.0).abs() < 1e-6, "{then}");
    let told = of(&times, &times.parts);
    let told = told.iter().find(|a| a.text.starts_with("a file")).unwrap();
    let expected = "a file of Q5_K_S in place of matrices of Q8_0: the weights take 38.8 MiB less, and all of them fit: \
                    20.0 -> 100.0 tokens/s";
    assert_eq!(told.text, expected);
    // A file of several types says which it is as a whole.
    times.surroundings.file_type = Some("Q6_K");
    let told = of(&times, &times.parts);
    let named = |a: &Advice| a.text.starts_with("a file of Q5_K_S in place of Q6_K: ");
    assert!(told.iter().any(named));
}

#[test]
fn weights_that_do_not_fit_in_any_type_are_fewer_to_be_uploaded() {
    let mut times = that_does_not_fit();
    times.surroundings.weights = matrices(WeightType::Q5K, 110);
    // The smallest type saves 20 of the 40 MiB that a pass misses, where 30 are lacking.
    let (value, _, then) = predicted(&times, "weights").unwrap();
    assert_eq!(value, "Q4_K_S");
    assert!((then - 1e3 / 30.0).abs() < 1e-6, "{then}");
    times.surroundings.weights = matrices(WeightType::Q4K, 110);
    assert_eq!(predicted(&times, "weights"), None, "no type is smaller");
    // Without a rate there is nothing to say of another type.
    times.surroundings.weights = matrices(WeightType::Q8_0, 110);
    times.decode = DecodeTimes::default();
    assert_eq!(predicted(&times, "weights"), None);
}

/// Q5_K would take less than the Q6_K that such files have beside, and more than the rest.
#[test]
fn of_a_file_with_a_few_matrices_of_a_larger_type_no_larger_type_is_advised() {
    let mut times = that_does_not_fit();
    let mut mixed = matrices(WeightType::Q4K, 80);
    mixed
        .matrices
        .extend(matrices(WeightType::Q6K, 30).matrices);
    times.surroundings.weights = mixed;
    assert_eq!(predicted(&times, "weights"), None);
}

#[test]
fn a_smaller_kv_cache_is_advised_for_the_weights_that_get_its_room() {
    let mut times = that_does_not_fit();
    times.surroundings.kv_bytes = 16 * MIB;
    // 7.5 of the 40 MiB that a pass misses.
    let (value, _, then) = predicted(&times, "kv_type").unwrap();
    assert_eq!(value, "q8_0");
    assert!((then - 1e3 / 42.5).abs() < 1e-6, "{then}");
    times.surroundings.kv_bytes = MIB;
    assert_eq!(predicted(&times, "kv_type"), None, "too little");
}

#[test]
fn settings_that_did_nothing_are_named_where_that_is_recorded() {
    let named = |times: &RequestTimes, part| {
        let found = without_effect(times, &mostly(part)).into_iter();
        let of = found.map(|text| text.split(':').next().unwrap_or_default().to_owned());
        of.collect::<Vec<_>>()
    };
    let mut resident = times();
    assert_eq!(named(&resident, Part::Decode), ["a larger budget"]);
    assert_eq!(named(&resident, Part::Preempted).len(), 0);
    resident.decode.passes = 4;
    resident.prompt_tokens = (40, 0);
    resident.surroundings.settings = Settings {
        cpu_compute: true,
        draft_model: Some("small".to_owned()),
        drafted: 0,
        shares_prefixes: true,
    };
    let all = [
        "cpu_compute",
        "a larger budget",
        "draft model small",
        "prefix_cache",
    ];
    assert_eq!(named(&resident, Part::Decode), all);
    let mut effective = resident.clone();
    effective.prompt_tokens = (40, 32);
    effective.surroundings.settings.drafted = 1;
    effective.cpu_bytes = MIB;
    assert_eq!(named(&effective, Part::Decode).len(), 0);
    // A prompt of less than a page shares nothing.
    resident.prompt_tokens = (32, 0);
    assert_eq!(named(&resident, Part::Decode), all[..3]);
    let queued = named(&times(), Part::Queue);
    assert_eq!(queued, ["a larger max_sequences"]);
    let mut never = times();
    never.surroundings.running = (64, 64);
    never.uploaded_bytes = MIB;
    assert_eq!(named(&never, Part::Queue).len(), 0);
}

#[test]
fn a_model_that_does_not_fit_is_told_the_budget_that_holds_it_and_its_rate_then() {
    let mut of_large = times();
    of_large.surroundings.model_bytes = 120 * MIB;
    of_large.surroundings.model_fits = false;
    let told = texts(&of_large, Part::Uploads);
    let [told] = &told[..] else {
        panic!("{told:?}")
    };
    assert!(
        told.starts_with("30.0 MiB more budget, 130.0 MiB in all"),
        "{told}"
    );
    assert!(told.contains("4.00 ms (250.0 tokens/s)"), "{told}");
    // Without a measured pass there is no rate.
    of_large.surroundings.resident_token_s = None;
    assert!(!texts(&of_large, Part::Uploads)[0].contains("tokens/s"));
}

#[test]
fn weights_that_others_evicted_are_what_more_budget_holds() {
    let mut evicted = times();
    evicted.displaced = vec![Displaced {
        cause: Some(EvictionCause::OtherModel),
        by: Some("other".to_owned()),
        // Twice in the time of the request.
        bytes: 90 * MIB,
    }];
    let told = texts(&evicted, Part::Uploads);
    assert!(told[0].starts_with("60.0 MiB more budget"), "{told:?}");
}

#[test]
fn a_smaller_type_of_the_kv_cache_is_advised_where_its_memory_was_short() {
    let told = texts(&times(), Part::Preempted);
    // 34 bytes in place of 64.
    assert_eq!(told.len(), 1);
    assert!(told[0].contains("frees 3.8 MiB"), "{told:?}");
    let mut small = times();
    small.surroundings.kv_type = "q8_0".to_owned();
    assert!(of(&small, &mostly(Part::Preempted)).is_empty());
}

#[test]
fn nothing_is_advised_without_a_number_that_tells_its_effect() {
    for part in [Part::Decode, Part::Prompt, Part::OtherModels, Part::Rest] {
        assert!(of(&times(), &mostly(part)).is_empty(), "{part:?}");
    }
    assert!(of(&times(), &mostly(Part::Queue)).is_empty(), "not full");
    let mut full = times();
    full.surroundings.running = (64, 64);
    assert!(texts(&full, Part::Queue)[0].starts_with("64 requests ran"));
    assert_eq!(of(&times(), &mostly(Part::Reader)).len(), 1);
}
