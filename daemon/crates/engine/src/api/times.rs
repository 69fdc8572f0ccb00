//! Where a request's time went: its parts, whom it waited for, and what was uploaded for it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rocmforge_model::WeightShares;
use rocmforge_tensor_cache::EvictionCause;

use crate::api::Gap;

/// What a request's time can go to. At each instant it goes to one of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// Before the engine has the request: its model is opened, its template rendered, its text
    /// tokenized.
    Preparing,
    /// Other requests go first: it is not admitted, or nothing of it is computed yet.
    Queue,
    /// The request was preempted because others needed its KV cache memory.
    Preempted,
    /// Images of the request are computed by the vision tower.
    Tower,
    /// Weights or KV cache are read from disk.
    Disk,
    /// Weights are uploaded.
    Uploads,
    /// The CPU computes with weights that are not on the device.
    CpuCompute,
    /// The device computes the request's prompt.
    Prompt,
    /// The device computes the request's new tokens.
    Decode,
    /// Passes of its own model compute prompts or tokens of other requests.
    OwnModel,
    /// Passes of other models.
    OtherModels,
    /// The request's next token is chosen: samplers and grammar.
    Sampling,
    /// The client does not read the request's stream.
    Reader,
    /// What the daemon does between passes.
    Rest,
}

impl Part {
    /// All of them, in the order in which a request meets them.
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

/// Times of the parts of a request, which add up to its whole time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PartTimes([Duration; Part::ALL.len()]);

impl PartTimes {
    /// The time of a part.
    #[must_use]
    pub fn of(&self, part: Part) -> Duration {
        self.0[part as usize]
    }

    /// Adds time to a part.
    pub fn add(&mut self, part: Part, took: Duration) {
        self.0[part as usize] += took;
    }

    /// Moves as much of `took` as there is from one part to another. How much that was.
    pub fn shift(&mut self, from: Part, to: Part, took: Duration) -> Duration {
        let took = took.min(self.of(from));
        self.0[from as usize] -= took;
        self.0[to as usize] += took;
        took
    }

    /// The times that were added since `before`.
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

    /// The parts that took time, the longest first.
    #[must_use]
    pub fn ranked(&self) -> Vec<(Part, Duration)> {
        let all = Part::ALL.map(|part| (part, self.of(part)));
        let mut some: Vec<_> = all.into_iter().filter(|(_, t)| !t.is_zero()).collect();
        some.sort_by_key(|&(part, took)| (std::cmp::Reverse(took), part));
        some
    }

    /// The longest part: the first cause of the request's time.
    #[must_use]
    pub fn first_cause(&self) -> Part {
        self.ranked().first().map_or(Part::Rest, |&(part, _)| part)
    }
}

/// Model and client whose passes a request waited for, and how long.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WaitedFor {
    /// The part of the request's time that this belongs to.
    pub part: Part,
    /// The model of the passes.
    pub model: String,
    /// Client with most rows of these passes, by its number ([`crate::api::Asker::client`]).
    pub client: u64,
    /// How long.
    pub took: Duration,
}

/// Weights that were uploaded for a request, by why they were not there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Displaced {
    /// Why the weights had been evicted; `None` if they had not been resident before.
    pub cause: Option<EvictionCause>,
    /// Model that took the memory of the weights, if one did.
    pub by: Option<String>,
    /// Bytes of the weights.
    pub bytes: u64,
}

/// What the link brought while a request waited for uploads or the disk.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LinkUse {
    /// Bytes uploaded, for all requests.
    pub bytes: u64,
    /// Time that the uploads took.
    pub took: Duration,
    /// Bytes a second of uploads as the device measures them; `None` if it does not.
    pub measured_bytes_per_s: Option<f64>,
}

/// What the engine knows that bears on how fast a request could have been.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Surroundings {
    /// The budget.
    pub budget_bytes: u64,
    /// Bytes of the model's segments.
    pub model_bytes: u64,
    /// Whether all of them have room at once in the budget beside the KV cache and working memory
    /// in use.
    pub model_fits: bool,
    /// Maximum number of bytes of KV cache and working memory of the model's passes.
    pub block_bytes: u64,
    /// The type of the KV cache's elements.
    pub kv_type: String,
    /// Bytes of the request's KV cache.
    pub kv_bytes: u64,
    /// Seconds of a pass of one token of the model with all weights resident, if one was measured.
    pub resident_token_s: Option<f64>,
    /// Largest number of requests that ran at once while the request was queued, and how many may
    /// run (`max_sequences`).
    pub running: (u32, u32),
    /// Bytes of the device's memory that are free beside the budget and what is kept free for
    /// others, where its driver says so.
    pub free_bytes: Option<u64>,
    /// The model's weights by type.
    pub weights: WeightShares,
    /// The type that its file has as a whole, such as `Q4_K_M`, if it is known.
    pub file_type: Option<&'static str>,
    /// Whether passes have experts that are chosen row by row.
    pub has_experts: bool,
    /// Whether segments that the running pass needs soon are evicted last, so that of a model that
    /// does not fit no more is missing in a pass than has no room.
    pub is_pass_aware: bool,
    /// Bytes of weights a second that the device computes a pass of one token with; `None` if it
    /// does not measure that.
    pub computed_bytes_per_s: Option<f64>,
    /// Settings that can speed a request up.
    pub settings: Settings,
}

/// Settings that speed up some requests and do nothing for others.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Settings {
    /// The CPU may compute for a GPU.
    pub cpu_compute: bool,
    /// The model's draft model.
    pub draft_model: Option<String>,
    /// Draft tokens that were computed for the request, by whatever drafted them.
    pub drafted: u32,
    /// Whether the request uses the prefix cache.
    pub shares_prefixes: bool,
}

/// The tokens of a request behind its first one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DecodeTimes {
    /// Tokens.
    pub tokens: u32,
    /// Forward passes that computed these tokens.
    pub passes: u32,
    /// Parts of the time since the first token.
    pub parts: PartTimes,
    /// Bytes of the model that were uploaded since then.
    pub uploaded_bytes: u64,
    /// Bytes of weights that the CPU computed with since then.
    pub cpu_bytes: u64,
}

impl DecodeTimes {
    /// Tokens a second; `None` where there are none.
    #[must_use]
    pub fn tokens_per_s(&self) -> Option<f64> {
        let seconds = self.parts.total().as_secs_f64();
        (self.tokens > 0 && seconds > 0.0).then(|| f64::from(self.tokens) / seconds)
    }
}

/// Where the time of a request went in the engine, from its being sent there to its end.
#[derive(Debug, Clone, PartialEq)]
pub struct RequestTimes {
    /// Time at which the engine received the request.
    pub begun: Instant,
    /// Time at which the request ended.
    pub ended: Instant,
    /// The parts of the time between.
    pub parts: PartTimes,
    /// Models and clients that the request waited for, at most [`WAITED_FOR_MAX`].
    pub waited_for: Vec<WaitedFor>,
    /// Bytes of its model that were uploaded meanwhile, and those of them whose file was not in
    /// memory.
    pub uploaded_bytes: u64,
    /// Uploaded bytes that were not in the page cache: the system read them from disk.
    pub cold_bytes: u64,
    /// The uploaded weights by why they were not resident.
    pub displaced: Vec<Displaced>,
    /// What the link brought meanwhile.
    pub link: LinkUse,
    /// Bytes of weights that the CPU computed with.
    pub cpu_bytes: u64,
    /// Tokens of the prompt, and those of them that were not computed.
    pub prompt_tokens: (u32, u32),
    /// Tokens that were generated.
    pub generated_tokens: u32,
    /// Times of the passes behind the first token.
    pub decode: DecodeTimes,
    /// Longest gap between these tokens.
    pub longest_gap: Option<Gap>,
    /// The gap that was promised, and how many were longer.
    pub promised_gap: Option<(Duration, u32)>,
    /// What else influenced the request's time.
    pub surroundings: Surroundings,
}

/// Maximum number of entries of [`RequestTimes::waited_for`].
pub const WAITED_FOR_MAX: usize = 8;

/// Where the engine puts the times of a request when it ends, however that is. Texts of one call
/// may share a slot, side by side or one after another: they become one request from the begin of
/// the first to the end of the last, each part the share that it had of the time of all.
#[derive(Debug, Clone, Default)]
pub struct TimesSlot {
    number: u64,
    shared: Arc<Mutex<Shared>>,
}

/// What had been uploaded of a model when a request began.
#[derive(Debug, Clone, Default)]
pub(crate) struct UploadsBefore {
    pub(crate) bytes: u64,
    pub(crate) cold_bytes: u64,
    /// Bytes by reason, indexed as the model's list of reasons ([`crate::store::displaced`]).
    pub(crate) reasons: Vec<u64>,
}

#[derive(Debug, Default)]
struct Shared {
    /// What had been uploaded of the model before the first.
    before: Option<UploadsBefore>,
    /// Times of the call's parts, added up.
    times: Option<RequestTimes>,
}

impl TimesSlot {
    /// For the request of this number, under which snapshots show it while it waits or runs.
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

    /// The times of those that have ended.
    #[must_use]
    pub fn get(&self) -> Option<RequestTimes> {
        let times = self.shared().times.clone()?;
        let whole = times.ended.saturating_duration_since(times.begun);
        Some(match times.parts.total() == whole {
            true => times,
            false => times.within(whole),
        })
    }

    /// Puts the times of the request into the slot.
    pub(crate) fn put(&self, times: RequestTimes) {
        let mut shared = self.shared();
        shared.times = Some(match shared.times.take() {
            Some(others) => others.and(times),
            None => times,
        });
    }

    /// What had been uploaded of the model before the first that shares it.
    pub(crate) fn first_uploads(&self, before: UploadsBefore) -> UploadsBefore {
        self.shared().before.get_or_insert(before).clone()
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RequestTimes {
    /// With one that ended later; its uploads are counted from the first one's begin.
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

    /// The times with the same shares of another whole.
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
