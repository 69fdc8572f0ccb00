//! Advice on what would make a request faster, and what would have no effect, derived from its own
//! time account. Only changes whose effect measured numbers show are advised; decode rates are
//! predicted with [`rocmforge_engine::api::estimate`].

use std::time::Duration;

use rocmforge_engine::KvType;
use rocmforge_engine::api::estimate::MoreRoom;
use rocmforge_engine::api::times::{Part, PartTimes, RequestTimes};
use rocmforge_engine::api::{EvictionCause, WeightType};
use serde::Serialize;

/// Minimum share of a request's time for a part to be worth advice.
const WORTH: f64 = 0.1;

/// Minimum factor on the decode rate for a change to be worth advice.
const GAIN: f64 = 1.02;

/// Number of elements of a `q8_0` block, in which sizes of KV types are compared.
const ELEMENTS: usize = 32;

/// Minimum number of prompt tokens that could have shared KV cache: one page, and one token that is
/// computed.
const SHARED_MIN: u32 = 33;

/// Weight types that may be advised, largest first, each with the file type whose matrices are
/// mostly of it.
const TYPES: [(WeightType, &str); 5] = [
    (WeightType::Q8_0, "Q8_0"),
    (WeightType::Q6K, "Q6_K"),
    (WeightType::Q5K, "Q5_K_S"),
    (WeightType::Q4K, "Q4_K_S"),
    (WeightType::Q4_0, "Q4_0"),
];

/// Predicted effect of a change of a setting on a request's decode rate.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Prediction {
    /// The setting that would change: `budget`, `kv_type` or `weights`.
    pub setting: &'static str,
    /// New value of the setting: bytes of the budget, the KV cache's element type, or the model's
    /// file type.
    pub value: String,
    /// The request's actual decode rate in tokens per second.
    pub tokens_per_s: f64,
    /// Predicted decode rate in tokens per second.
    pub predicted_tokens_per_s: f64,
}

/// A piece of advice for a request, with its prediction if there is one.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Advice {
    pub(super) text: String,
    pub(super) prediction: Option<Prediction>,
}

impl Advice {
    fn plain(text: String) -> Self {
        Self {
            text,
            prediction: None,
        }
    }

    /// Advice whose text ends with the predicted rate, if that is known.
    fn with(text: String, prediction: Option<Prediction>) -> Self {
        let rates = prediction.as_ref().map(|of| {
            let (now, then) = (of.tokens_per_s, of.predicted_tokens_per_s);
            format!(": {now:.1} -> {then:.1} tokens/s")
        });
        Self {
            text: text + &rates.unwrap_or_default(),
            prediction,
        }
    }

    fn gain(&self) -> f64 {
        let of = self.prediction.as_ref();
        of.map_or(0.0, |of| of.predicted_tokens_per_s / of.tokens_per_s)
    }
}

/// Advice for a request, the most effective first.
pub(super) fn of(times: &RequestTimes, parts: &PartTimes) -> Vec<Advice> {
    let total = parts.total().as_secs_f64();
    let share = |some: &[Part]| {
        let some: Duration = some.iter().map(|&part| parts.of(part)).sum();
        some.as_secs_f64() >= WORTH * total && !some.is_zero()
    };
    let mut advice = Vec::new();
    let misses = share(&[Part::Uploads, Part::Disk, Part::CpuCompute]);
    if misses {
        advice.extend(residency(times));
        advice.extend(smaller_weights(times));
    }
    let by_kv = times
        .displaced
        .iter()
        .any(|d| d.cause == Some(EvictionCause::Kv));
    let was_short = share(&[Part::Preempted]) || by_kv && share(&[Part::Uploads, Part::Disk]);
    if was_short || misses {
        advice.extend(smaller_kv(times, was_short));
    }
    if share(&[Part::Queue]) {
        advice.extend(more_at_once(times));
    }
    if share(&[Part::Reader]) {
        let without = parts.total().saturating_sub(parts.of(Part::Reader));
        advice.push(Advice::plain(format!(
            "a client that takes tokens as they come would have had all of them after {}",
            seconds(without)
        )));
    }
    // Those without a rate keep their order, behind those with one.
    advice.sort_by(|a, b| b.gain().total_cmp(&a.gain()));
    advice
}

/// Advice that would keep the model's weights resident.
fn residency(times: &RequestTimes) -> Vec<Advice> {
    let around = &times.surroundings;
    let mut advice = Vec::new();
    let bytes_by = |causes: &[Option<EvictionCause>]| {
        let some = times.displaced.iter().filter(|d| causes.contains(&d.cause));
        some.map(|d| d.bytes).sum::<u64>()
    };
    let needed = around.model_bytes + around.block_bytes;
    if !around.model_fits && needed > around.budget_bytes {
        advice.extend(larger_budget(times, needed - around.budget_bytes));
        return advice;
    }
    let taken = bytes_by(&[Some(EvictionCause::OtherModel)]).min(around.model_bytes);
    if taken > 0 {
        advice.push(Advice::plain(format!(
            "{} more budget is the least that holds what was evicted for other models{}",
            size(taken),
            resident_rate(times)
        )));
    }
    let first = bytes_by(&[None]);
    if first > taken {
        advice.push(Advice::plain(format!(
            "{} were uploaded for the first time since the model was loaded: a preload brings them before a request \
             waits for them",
            size(first)
        )));
    }
    advice
}

/// Advice to use a budget that holds all weights of a model that does not fit, or as much as the
/// device has.
fn larger_budget(times: &RequestTimes, lacking: u64) -> Option<Advice> {
    let around = &times.surroundings;
    let more = lacking.min(around.free_bytes.unwrap_or(u64::MAX));
    let room = match more < lacking {
        true => MoreRoom::Bytes(more),
        false => MoreRoom::All,
    };
    let value = (around.budget_bytes + more).to_string();
    let prediction = predict(times, "budget", value, room);
    if more < lacking {
        let text = format!("{} more budget, all that the device has free", size(more));
        return prediction.map(|of| Advice::with(text, Some(of)));
    }
    let rate = match &prediction {
        Some(_) => String::new(),
        None => resident_rate(times),
    };
    let text = format!(
        "{} more budget, {} in all, is the least that holds all weights of the model beside the request's own \
         memory{rate}",
        size(more),
        size(around.budget_bytes + more),
    );
    Some(Advice::with(text, prediction))
}

/// Text that says how long a token takes with all weights resident, if that was measured.
fn resident_rate(times: &RequestTimes) -> String {
    let rate = times.surroundings.resident_token_s;
    let rate = rate.filter(|seconds| *seconds > 0.0);
    rate.map_or_else(String::new, |token| {
        format!(
            "; a token of it alone then takes {:.2} ms ({:.1} tokens/s), as measured in passes with all weights resident",
            token * 1e3,
            1.0 / token
        )
    })
}

/// Advice to use a smaller file type: the largest with which all weights fit, else the smallest.
fn smaller_weights(times: &RequestTimes) -> Option<Advice> {
    let around = &times.surroundings;
    let room = around.budget_bytes.checked_sub(around.block_bytes)?;
    if around.model_fits || around.model_bytes <= room {
        return None;
    }
    let lacking = around.model_bytes - room;
    let most = around.weights.matrices.first()?;
    let now = most.ty;
    let saved = |ty: WeightType| {
        let matrices = around.weights.matrices.iter();
        matrices.map(|of| of.bytes - of.bytes_as(ty)).sum::<u64>()
    };
    // Beside most of a smaller type a file has a few matrices of a larger one.
    let smaller = TYPES
        .into_iter()
        .filter(|&(ty, _)| most.bytes_as(ty) < most.bytes_as(now));
    let smaller = smaller.map(|(ty, file)| (file, saved(ty)));
    let smaller: Vec<_> = smaller.collect();
    let fits = smaller.iter().find(|(_, saved)| *saved >= lacking);
    let &(file, saved) = fits.or_else(|| smaller.iter().rev().max_by_key(|(_, saved)| *saved))?;
    let (room, fit) = match saved >= lacking {
        true => (MoreRoom::All, ", and all of them fit"),
        false => (MoreRoom::Bytes(saved), ""),
    };
    let prediction = predict(times, "weights", file.to_owned(), room)?;
    let of_file = around.file_type.map(str::to_owned);
    let now = of_file.unwrap_or_else(|| format!("matrices of {now}"));
    let text = format!(
        "a file of {file} in place of {now}: the weights take {} less{fit}",
        size(saved)
    );
    Some(Advice::with(text, Some(prediction)))
}

/// Advice to use a smaller KV cache type. If KV memory was not short, only if the freed memory lets
/// weights make tokens faster.
fn smaller_kv(times: &RequestTimes, was_short: bool) -> Option<Advice> {
    let around = &times.surroundings;
    let ty = KvType::from_name(&around.kv_type)?;
    let (now, then) = (
        ty.bytes(ELEMENTS) as u64,
        KvType::Q8_0.bytes(ELEMENTS) as u64,
    );
    let freed = around.kv_bytes / now * now.checked_sub(then)?;
    let value = KvType::Q8_0.name().to_owned();
    let prediction = predict(times, "kv_type", value, MoreRoom::Bytes(freed));
    (freed > 0 && (was_short || prediction.is_some())).then(|| {
        let text = format!(
            "kv_type q8_0 in place of {} frees {} of the request's KV cache of {}",
            around.kv_type,
            size(freed),
            size(around.kv_bytes)
        );
        Advice::with(text, prediction)
    })
}

/// Predicted decode rate with more memory for weights; `None` if that is not worth advice.
fn predict(
    times: &RequestTimes,
    setting: &'static str,
    value: String,
    room: MoreRoom,
) -> Option<Prediction> {
    let (tokens_per_s, predicted) = (times.tokens_per_s()?, times.tokens_per_s_with(room)?);
    (predicted >= tokens_per_s * GAIN).then_some(Prediction {
        setting,
        value,
        tokens_per_s,
        predicted_tokens_per_s: predicted,
    })
}

/// Advice that lets more requests run at once.
fn more_at_once(times: &RequestTimes) -> Option<Advice> {
    let (ran, most) = times.surroundings.running;
    (ran >= most).then(|| {
        Advice::plain(format!(
            "{ran} requests ran while it waited, as many as max_sequences allows"
        ))
    })
}

/// Sentences on settings that had no effect, and changes that would have none.
pub(super) fn without_effect(times: &RequestTimes, parts: &PartTimes) -> Vec<String> {
    let (around, mut found) = (&times.surroundings, Vec::new());
    let settings = &around.settings;
    let missed = times.uploaded_bytes + times.cpu_bytes;
    let computed = [Part::Prompt, Part::Decode];
    let was_computed = computed.iter().any(|&part| !parts.of(part).is_zero());
    let is_resident = missed == 0 && was_computed;
    if settings.cpu_compute && is_resident {
        found.push("cpu_compute: all weights were resident, none were left to the CPU".to_owned());
    }
    // A request may wait in the queue for room of its KV cache.
    let had_room = parts.of(Part::Preempted).is_zero() && parts.first_cause() != Part::Queue;
    if is_resident && had_room {
        found.push("a larger budget: all weights were resident, the KV cache had room".to_owned());
    }
    if let Some(draft) = &settings.draft_model
        && settings.drafted == 0
        && times.decode.passes > 0
    {
        found.push(format!("draft model {draft}: no tokens were drafted"));
    }
    let (prompt, reused) = times.prompt_tokens;
    if settings.shares_prefixes && reused == 0 && prompt >= SHARED_MIN && was_computed {
        found.push(format!(
            "prefix_cache: none of the {prompt} prompt tokens had been computed for an earlier request"
        ));
    }
    let (ran, most) = around.running;
    if ran < most && parts.first_cause() == Part::Queue {
        found.push(format!(
            "a larger max_sequences: at most {ran} requests ran while it waited, {most} may"
        ));
    }
    found
}

/// A number of bytes, formatted for display.
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
#[path = "advice_tests.rs"]
mod tests;
