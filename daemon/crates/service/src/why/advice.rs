//! What would help a request, by the numbers of its own time. Nothing is advised whose effect no
//! measured number tells.

use std::time::Duration;

use rocmforge_engine::KvType;
use rocmforge_engine::api::EvictionCause;
use rocmforge_engine::api::times::{Part, PartTimes, RequestTimes};

/// The share of a request's time from which on a part is worth advice.
const WORTH: f64 = 0.1;

/// Elements of a block of `q8_0`, the unit that sizes are compared in.
const ELEMENTS: usize = 32;

/// What would help, the most first.
pub(super) fn of(times: &RequestTimes, parts: &PartTimes) -> Vec<String> {
    let total = parts.total().as_secs_f64();
    let share = |some: &[Part]| {
        let some: Duration = some.iter().map(|&part| parts.of(part)).sum();
        some.as_secs_f64() >= WORTH * total && !some.is_zero()
    };
    let mut advice = Vec::new();
    if share(&[Part::Uploads, Part::Disk, Part::CpuCompute]) {
        advice.extend(residency(times));
    }
    let by_kv = times
        .displaced
        .iter()
        .any(|d| d.cause == Some(EvictionCause::Kv));
    if share(&[Part::Preempted]) || by_kv && share(&[Part::Uploads, Part::Disk]) {
        advice.extend(smaller_kv(times));
    }
    if share(&[Part::Queue]) {
        advice.extend(more_at_once(times));
    }
    if share(&[Part::Reader]) {
        let without = parts.total().saturating_sub(parts.of(Part::Reader));
        advice.push(format!(
            "a client that takes tokens as they come would have had all of them after {}",
            seconds(without)
        ));
    }
    advice
}

/// What would keep the weights resident.
fn residency(times: &RequestTimes) -> Vec<String> {
    let around = &times.surroundings;
    let mut advice = Vec::new();
    let bytes_by = |causes: &[Option<EvictionCause>]| {
        let some = times.displaced.iter().filter(|d| causes.contains(&d.cause));
        some.map(|d| d.bytes).sum::<u64>()
    };
    let rate = around.resident_token_s.filter(|seconds| *seconds > 0.0);
    let rate = rate.map_or_else(String::new, |token| {
        format!(
            "; a token of it alone then takes {:.2} ms ({:.1} tokens/s), as measured in passes with all weights resident",
            token * 1e3,
            1.0 / token
        )
    });
    let needed = around.model_bytes + around.block_bytes;
    if !around.model_fits && needed > around.budget_bytes {
        advice.push(format!(
            "{} more budget, {} in all, is the least that holds all weights of the model beside the request's own \
             memory{rate}",
            size(needed - around.budget_bytes),
            size(needed),
        ));
        return advice;
    }
    let taken = bytes_by(&[Some(EvictionCause::OtherModel)]).min(around.model_bytes);
    if taken > 0 {
        advice.push(format!(
            "{} more budget is the least that holds what was evicted for other models{rate}",
            size(taken)
        ));
    }
    let first = bytes_by(&[None]);
    if first > taken {
        advice.push(format!(
            "{} were uploaded for the first time since the model was loaded: a preload brings them before a request \
             waits for them",
            size(first)
        ));
    }
    advice
}

/// What a smaller type of the KV cache would free.
fn smaller_kv(times: &RequestTimes) -> Option<String> {
    let around = &times.surroundings;
    let ty = KvType::from_name(&around.kv_type)?;
    let (now, then) = (
        ty.bytes(ELEMENTS) as u64,
        KvType::Q8_0.bytes(ELEMENTS) as u64,
    );
    let freed = around.kv_bytes / now * now.checked_sub(then)?;
    (freed > 0).then(|| {
        format!(
            "kv_type q8_0 in place of {} frees {} of the request's KV cache of {}",
            around.kv_type,
            size(freed),
            size(around.kv_bytes)
        )
    })
}

/// What lets more requests run at once.
fn more_at_once(times: &RequestTimes) -> Option<String> {
    let (ran, most) = times.surroundings.running;
    (ran >= most)
        .then(|| format!("{ran} requests ran while it waited, as many as max_sequences allows"))
}

/// Bytes for people.
fn size(bytes: u64) -> String {
    let bytes = bytes as f64;
    let (gib, mib) = (f64::from(1 << 30), f64::from(1 << 20));
    match bytes {
        b if b >= gib => format!("{:.2} GiB", b / gib),
        b if b >= mib => format!("{:.1} MiB", b / mib),
        b => format!("{b:.0} bytes"),
    }
}

fn seconds(took: Duration) -> String {
    match took.as_secs_f64() {
        s if s < 1.0 => format!("{:.0} ms", s * 1e3),
        s => format!("{s:.1} s"),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use rocmforge_engine::api::times::{Displaced, LinkUse, Surroundings};

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
            },
        }
    }

    fn mostly(part: Part) -> PartTimes {
        let mut parts = PartTimes::default();
        parts.add(part, Duration::from_millis(900));
        parts.add(Part::Decode, Duration::from_millis(100));
        parts
    }

    #[test]
    fn a_model_that_does_not_fit_is_told_the_budget_that_holds_it_and_its_rate_then() {
        let mut of_large = times();
        of_large.surroundings.model_bytes = 120 * MIB;
        of_large.surroundings.model_fits = false;
        let told = of(&of_large, &mostly(Part::Uploads));
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
        assert!(!of(&of_large, &mostly(Part::Uploads))[0].contains("tokens/s"));
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
        let told = of(&evicted, &mostly(Part::Uploads));
        assert!(told[0].starts_with("60.0 MiB more budget"), "{told:?}");
    }

    #[test]
    fn a_smaller_type_of_the_kv_cache_is_advised_where_its_memory_was_short() {
        let told = of(&times(), &mostly(Part::Preempted));
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
        assert!(of(&full, &mostly(Part::Queue))[0].starts_with("64 requests ran"));
        assert_eq!(of(&times(), &mostly(Part::Reader)).len(), 1);
    }
}
