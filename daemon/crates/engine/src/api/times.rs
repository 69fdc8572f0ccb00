//! Time account of a request: the parts of its time, which models and clients it waited for, and
//! what was uploaded for it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rocmforge_model::WeightShares;
use rocmforge_tensor_cache::EvictionCause;

use crate::api::Gap;

/// The parts of a request's time. Each instant belongs to exactly one of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// Before the engine has the request: its model is opened, its template rendered, its prompt
    /// tokenized.
    Preparing,
    /// Other requests run first: the request is not admitted, or nothing of it is computed yet.
    Queue,
    /// The request was preempted because others needed its KV cache memory.
    Preempted,
    /// Images of the request are computed by the vision tower.
    Tower,
    /// The request waits for weights or KV cache that are read from disk.
    Disk,
    /// The request waits for uploads of weights.
    Uploads,
    /// The CPU computes with weights that are not on the device.
    CpuCompute,
    /// The device computes the request's prompt.
    Prompt,
    /// The device computes the request's new tokens.
    Decode,
    /// Passes of the request's own model compute prompts or tokens of other requests.
    OwnModel,
    /// Passes of other models run.
    OtherModels,
    /// The request's next token is chosen: samplers and grammar.
    Sampling,
    /// The client does not read the request's stream, so the request waits.
    Reader,
    /// Other work of the engine between passes.
    Rest,
}

impl Part {
    /// All parts, in the order in which a request meets them.
    pub const ALL: [Self; 14] = [
        Self::Preparing,
        Self::Queue,
        Self::Preempted,
        Self::Tower,
        Self::Disk,
        Self::Uploads,
        Self::CpuCompute,
        Self::Prompt,
        Self::Decode,
        Self::OwnModel,
        Self::OtherModels,
        Self::Sampling,
        Self::Reader,
        Self::Rest,
    ];

    /// The part's name on the wire and in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Preparing => "preparing",
            Self::Queue => "queue",
            Self::Preempted => "preempted",
            Self::Tower => "images",
            Self::Disk => "disk",
            Self::Uploads => "uploads",
            Self::CpuCompute => "cpu_compute",
            Self::Prompt => "prompt",
            Self::Decode => "decode",
            Self::OwnModel => "own_model",
            Self::OtherModels => "other_models",
            Self::Sampling => "sampling",
            Self::Reader => "reader",
            Self::Rest => "rest",
        }
    }
}

/// Time of each part of a request's time; their sum is the request's whole time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PartTimes([Duration; Part::ALL.len()]);

impl PartTimes {
    /// The time of one part.
    #[must_use]
    pub fn of(&self, part: Part) -> Duration {
        self.0[part as usize]
    }

    /// Adds time to a part.
    pub fn add(&mut self, part: Part, took: Duration) {
        self.0[part as usize] += took;
    }

    /// Moves up to `took` from one part to another. Returns how much was moved.
    pub fn shift(&mut self, from: Part, to: Part, took: Duration) -> Duration {
        let took = took.min(self.of(from));
        self.0[from as usize] -= took;
        self.0[to as usize] += took;
        took
    }

    /// The times that were added since the earlier state `before`.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let mut since = Self::default();
        for part in Part::ALL {
            since.add(part, self.of(part).saturating_sub(before.of(part)));
        }
        since
    }

    /// Sum of all parts.
    #[must_use]
    pub fn total(&self) -> Duration {
        self.0.iter().sum()
    }

    /// The parts with a time above zero, the longest first.
    #[must_use]
    pub fn ranked(&self) -> Vec<(Part, Duration)> {
        let all = Part::ALL.map(|part| (part, self.of(part)));
        let mut some: Vec<_> = all.into_iter().filter(|(_, t)| !t.is_zero()).collect();
        some.sort_by_key(|&(part, took)| (std::cmp::Reverse(took), part));
        some
    }

    /// The longest part: the main cause of the request's duration.
    #[must_use]
    pub fn first_cause(&self) -> Part {
        self.ranked().first().map_or(Part::Rest, |&(part, _)| part)
    }
}

/// A model and client whose passes a request waited for, and how long.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WaitedFor {
    /// The part of the request's time in which it waited.
    pub part: Part,
    /// Name of the model whose passes ran.
    pub model: String,
    /// Client with most rows in these passes, by its number ([`crate::api::Asker::client`]).
    pub client: u64,
    /// How long the request waited for these passes.
    pub took: Duration,
}

/// Weights that were uploaded for a request, by the reason for which they were not resident.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Displaced {
    /// Why the weights had been evicted; `None` if they had never been resident.
    pub cause: Option<EvictionCause>,
    /// Model that took the memory of the weights, if one did.
    pub by: Option<String>,
    /// Bytes of these weights.
    pub bytes: u64,
}

/// Uploads over the link while a request waited for uploads or the disk.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LinkUse {
    /// Bytes uploaded meanwhile, for all requests.
    pub bytes: u64,
    /// Time that these uploads took.
    pub took: Duration,
    /// Upload rate in bytes a second as the device measures it; `None` if it does not.
    pub measured_bytes_per_s: Option<f64>,
}

/// The conditions that influenced how fast a request was: sizes, rates and settings.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Surroundings {
    /// The budget of device memory, in bytes.
    pub budget_bytes: u64,
    /// Bytes of the model's segments.
    pub model_bytes: u64,
    /// Whether all of the model's segments fit the budget at once, beside the KV cache and scratch
    /// in use.
    pub model_fits: bool,
    /// Maximum number of bytes of KV cache and scratch that the model's passes used.
    pub block_bytes: u64,
    /// Name of the KV cache's element type.
    pub kv_type: String,
    /// Bytes of the request's KV cache.
    pub kv_bytes: u64,
    /// Measured seconds of a one-token pass of the model with all weights resident; `None` if not
    /// measured.
    pub resident_token_s: Option<f64>,
    /// Largest number of requests that ran at once while the request was queued, and how many may
    /// run (`max_sequences`).
    pub running: (u32, u32),
    /// Bytes of device memory that are free beside the budget and what is kept free for other
    /// programs; `None` if the driver does not report it.
    pub free_bytes: Option<u64>,
    /// The model's weights by tensor type.
    pub weights: WeightShares,
    /// The model file's overall type, such as `Q4_K_M`, if it is known.
    pub file_type: Option<&'static str>,
    /// Whether the model is an MoE model, whose rows choose experts.
    pub has_experts: bool,
    /// Whether eviction is pass-aware (segments that the running pass needs soon are evicted last),
    /// so that each pass of a model that does not fit misses only what does not fit.
    pub is_pass_aware: bool,
    /// Rate in bytes of weights a second at which the device computes a one-token pass; `None` if
    /// not measured.
    pub computed_bytes_per_s: Option<f64>,
    /// Settings that could speed a request up.
    pub settings: Settings,
}

/// Settings that speed up some requests and have no effect on others.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Settings {
    /// Whether the CPU may compute missing segments for the GPU.
    pub cpu_compute: bool,
    /// Name of the model's draft model, if it has one.
    pub draft_model: Option<String>,
    /// Number of draft tokens that were computed for the request, from any drafter.
    pub drafted: u32,
    /// Whether the request uses the prefix cache.
    pub shares_prefixes: bool,
}

/// Times of a request's decode phase, after its first token.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DecodeTimes {
    /// Number of generated tokens after the first.
    pub tokens: u32,
    /// Number of forward passes that computed these tokens.
    pub passes: u32,
    /// Parts of the time since the first token.
    pub parts: PartTimes,
    /// Bytes of the model's weights that were uploaded since the first token.
    pub uploaded_bytes: u64,
    /// Bytes of weights that the CPU computed with since the first token.
    pub cpu_bytes: u64,
}

impl DecodeTimes {
    /// Decode rate in tokens a second; `None` if there are no tokens.
    #[must_use]
    pub fn tokens_per_s(&self) -> Option<f64> {
        let seconds = self.parts.total().as_secs_f64();
        (self.tokens > 0 && seconds > 0.0).then(|| f64::from(self.tokens) / seconds)
    }
}

/// Time account of a request in the engine, from its sending to its end.
#[derive(Debug, Clone, PartialEq)]
pub struct RequestTimes {
    /// Time at which the account begins: when the request was sent to the engine.
    pub begun: Instant,
    /// Time at which the request ended.
    pub ended: Instant,
    /// The parts of the time from `begun` to `ended`.
    pub parts: PartTimes,
    /// Models and clients that the request waited for, at most [`WAITED_FOR_MAX`].
    pub waited_for: Vec<WaitedFor>,
    /// Bytes of the model's weights that were uploaded while the request ran.
    pub uploaded_bytes: u64,
    /// Uploaded bytes that were not in the page cache: the system read them from disk.
    pub cold_bytes: u64,
    /// The uploaded weights by why they were not resident.
    pub displaced: Vec<Displaced>,
    /// Uploads over the link while the request waited for them.
    pub link: LinkUse,
    /// Bytes of weights that the CPU computed with.
    pub cpu_bytes: u64,
    /// Number of prompt tokens, and of those that the prefix cache had.
    pub prompt_tokens: (u32, u32),
    /// Number of generated tokens.
    pub generated_tokens: u32,
    /// Times of the decode phase, after the first token.
    pub decode: DecodeTimes,
    /// Longest gap between the request's tokens.
    pub longest_gap: Option<Gap>,
    /// The promised gap between tokens, and the number of gaps that were longer; `None` if none was
    /// promised.
    pub promised_gap: Option<(Duration, u32)>,
    /// Sizes, rates and settings that influenced the request's time.
    pub surroundings: Surroundings,
}

/// Maximum number of entries of [`RequestTimes::waited_for`].
pub const WAITED_FOR_MAX: usize = 8;

/// Where the engine puts the time account of a request when it ends, in whatever way. Several
/// requests of one call may share a slot, side by side or one after another: their accounts become
/// one, from the begin of the first to the end of the last, with each part scaled to its share of
/// that time.
#[derive(Debug, Clone, Default)]
pub struct TimesSlot {
    number: u64,
    shared: Arc<Mutex<Shared>>,
}

/// Bytes of a model that had been uploaded when a request began.
#[derive(Debug, Clone, Default)]
pub(crate) struct UploadsBefore {
    pub(crate) bytes: u64,
    pub(crate) cold_bytes: u64,
    /// Bytes uploaded for each reason, in the order of the model's list of reasons
    /// ([`crate::store::displaced`]).
    pub(crate) reasons: Vec<u64>,
}

#[derive(Debug, Default)]
struct Shared {
    /// Bytes of the model that had been uploaded when the slot's first request began.
    before: Option<UploadsBefore>,
    /// Sum of the time accounts of the call's requests that have ended.
    times: Option<RequestTimes>,
}

impl TimesSlot {
    /// A slot for the request with this number, under which snapshots show it while it waits or
    /// runs.
    #[must_use]
    pub fn numbered(number: u64) -> Self {
        Self {
            number,
            ..Self::default()
        }
    }

    /// Number of the slot's request; 0 if it has none.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// The combined time account of the slot's requests that have ended; `None` if none has.
    #[must_use]
    pub fn get(&self) -> Option<RequestTimes> {
        let times = self.shared().times.clone()?;
        let whole = times.ended.saturating_duration_since(times.begun);
        Some(match times.parts.total() == whole {
            true => times,
            false => times.within(whole),
        })
    }

    /// Adds the time account of an ended request to the slot.
    pub(crate) fn put(&self, times: RequestTimes) {
        let mut shared = self.shared();
        shared.times = Some(match shared.times.take() {
            Some(others) => others.and(times),
            None => times,
        });
    }

    /// The uploads before the first of the slot's requests; `before` if this is the first.
    pub(crate) fn first_uploads(&self, before: UploadsBefore) -> UploadsBefore {
        self.shared().before.get_or_insert(before).clone()
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RequestTimes {
    /// Combines this account with one that ended later. Both count uploads from the begin of the
    /// first request, so those of `later` are taken.
    fn and(mut self, later: Self) -> Self {
        for part in Part::ALL {
            self.parts.add(part, later.parts.of(part));
        }
        for waited in later.waited_for {
            let same = |w: &&mut WaitedFor| {
                (w.part, w.client, &w.model) == (waited.part, waited.client, &waited.model)
            };
            match self.waited_for.iter_mut().find(same) {
                Some(known) => known.took += waited.took,
                None => self.waited_for.push(waited),
            }
        }
        let waited = &mut self.waited_for;
        waited.sort_by_key(|waited| std::cmp::Reverse(waited.took));
        waited.truncate(WAITED_FOR_MAX);
        let ran = self.surroundings.running.0;
        let mut surroundings = later.surroundings;
        surroundings.running.0 = surroundings.running.0.max(ran);
        Self {
            begun: self.begun.min(later.begun),
            ended: self.ended.max(later.ended),
            parts: self.parts,
            waited_for: self.waited_for,
            uploaded_bytes: later.uploaded_bytes,
            cold_bytes: later.cold_bytes,
            displaced: later.displaced,
            link: LinkUse {
                bytes: self.link.bytes + later.link.bytes,
                took: self.link.took + later.link.took,
                ..later.link
            },
            cpu_bytes: self.cpu_bytes + later.cpu_bytes,
            prompt_tokens: (
                self.prompt_tokens.0 + later.prompt_tokens.0,
                self.prompt_tokens.1 + later.prompt_tokens.1,
            ),
            generated_tokens: self.generated_tokens + later.generated_tokens,
            decode: DecodeTimes::default(),
            longest_gap: None,
            promised_gap: None,
            surroundings,
        }
    }

    /// Scales the parts so that their sum is `whole` and their shares stay.
    fn within(mut self, whole: Duration) -> Self {
        let all = self.parts.total();
        if all.is_zero() {
            self.parts.add(Part::Rest, whole);
            return self;
        }
        let share = whole.as_secs_f64() / all.as_secs_f64();
        let of_all = std::mem::take(&mut self.parts);
        for part in Part::ALL {
            let left = whole.saturating_sub(self.parts.total());
            self.parts
                .add(part, of_all.of(part).mul_f64(share).min(left));
        }
        let rounded = whole.saturating_sub(self.parts.total());
        self.parts.add(of_all.first_cause(), rounded);
        for waited in &mut self.waited_for {
            waited.took = waited.took.mul_f64(share);
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_ranked_by_their_time_and_keep_their_sum() {
        let ms = Duration::from_millis;
        let mut parts = PartTimes::default();
        assert_eq!(parts.first_cause(), Part::Rest);
        parts.add(Part::Decode, ms(5));
        parts.add(Part::Reader, ms(7));
        parts.add(Part::Decode, ms(4));
        assert_eq!(
            parts.ranked(),
            [(Part::Decode, ms(9)), (Part::Reader, ms(7))]
        );
        assert_eq!(parts.shift(Part::Decode, Part::OwnModel, ms(20)), ms(9));
        assert_eq!((parts.total(), parts.of(Part::Decode)), (ms(16), ms(0)));
        assert_eq!(parts.first_cause(), Part::OwnModel);
    }

    #[test]
    fn each_part_has_a_place_and_a_name_of_its_own() {
        for (at, part) in Part::ALL.into_iter().enumerate() {
            assert_eq!(part as usize, at);
            let same = Part::ALL.iter().filter(|p| p.name() == part.name());
            assert_eq!(same.count(), 1, "{part:?}");
        }
    }

    /// Times from `from` to `to` ms, all of which went to one part.
    fn times(begin: Instant, from: u64, to: u64, part: Part, uploaded: u64) -> RequestTimes {
        let ms = Duration::from_millis;
        let mut parts = PartTimes::default();
        parts.add(part, ms(to - from));
        RequestTimes {
            begun: begin + ms(from),
            ended: begin + ms(to),
            parts,
            waited_for: vec![WaitedFor {
                part,
                model: "m".to_owned(),
                client: 7,
                took: ms(to - from),
            }],
            uploaded_bytes: uploaded,
            cold_bytes: 0,
            displaced: Vec::new(),
            link: LinkUse::default(),
            cpu_bytes: 0,
            prompt_tokens: (4, 0),
            generated_tokens: 0,
            decode: DecodeTimes::default(),
            longest_gap: None,
            promised_gap: None,
            surroundings: Surroundings::default(),
        }
    }

    #[test]
    fn texts_that_share_a_slot_are_one_request_with_their_shares_of_its_time() {
        let (slot, begin) = (TimesSlot::default(), crate::clock::Clock.now());
        assert_eq!(slot.get(), None);
        let first = times(begin, 0, 40, Part::Uploads, 100);
        slot.put(first.clone());
        assert_eq!(slot.get(), Some(first));
        slot.put(times(begin, 0, 40, Part::Prompt, 100));
        slot.put(times(begin, 20, 60, Part::Prompt, 130));
        let all = slot.get().unwrap();
        let ms = Duration::from_millis;
        assert_eq!((all.begun, all.ended), (begin, begin + ms(60)));
        assert_eq!(all.parts.total(), ms(60), "they add up to the whole");
        let uploads = all.parts.of(Part::Uploads);
        assert!(uploads.abs_diff(ms(20)) < ms(1), "{uploads:?}");
        assert_eq!(all.parts.first_cause(), Part::Prompt);
        assert_eq!((all.uploaded_bytes, all.prompt_tokens), (130, (12, 0)));
        let waited = all.waited_for.iter().map(|w| (w.part, w.took.as_millis()));
        assert_eq!(
            waited.collect::<Vec<_>>(),
            [(Part::Prompt, 40), (Part::Uploads, 20)]
        );
        // What was uploaded is counted from the first on.
        let before = |bytes| UploadsBefore {
            bytes,
            ..UploadsBefore::default()
        };
        assert_eq!(slot.first_uploads(before(3)).bytes, 3);
        assert_eq!(slot.first_uploads(before(9)).bytes, 3);
    }
}
