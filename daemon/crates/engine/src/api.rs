//! All that anyone can ask of the engine: one closed enum of commands, which
//! [`crate::EngineHandle`] sends.
//!
//! The engine is one OS thread that owns the device, the cache, the KV pages and the sequences.
//! Everybody else holds a cloneable handle: a bounded channel of [`Command`]s in, and a `watch` of
//! published [`Snapshot`]s out. A status call reads the snapshot and never enters the engine.
//! Replies travel on channels that the asker made; the engine never blocks on one of them: a
//! sequence whose reader is slow is left out of the schedule until it reads.

mod closing;
pub(crate) mod config;
pub(crate) mod error;
pub mod estimate;
mod gaps;
pub(crate) mod handle;
pub(crate) mod images;
pub(crate) mod refusal;
mod release;
mod scoring;
mod status;
pub mod times;

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};

pub use gaps::{BrokenGaps, Gap, GapCause};
pub use release::{IdleRelease, Released};
pub use status::{
    CacheStatus, ClientStatus, DeviceStatus, FileWait, HostPressureStatus, HostTier, Hosted,
    KeepFreeStatus, KvDiskStatus, LIVE_MAX, LiveRequest, LiveState, ModelStatus, PrefixCounts,
    SegmentState, SegmentStatus, Snapshot, YieldStatus,
};

pub use rocmforge_device::{DeviceKind, MemoryUse};
pub use rocmforge_gpu_driver::{Libraries, Report, Vendor, probe, report as probe_vendor};

use crate::api::error::Error;
pub use crate::api::images::ImageSpan;
use crate::api::times::TimesSlot;
use crate::model::adapters::AppliedAdapters;
use crate::model::loaded::{LoadedModel, PreparedModel};
pub use crate::request::decoding::Decoding;
pub use crate::request::sampler::{
    Dry, DynamicTemperature, Mirostat, MirostatVersion, SamplerKind, SamplingParams, Xtc,
};
pub use rocmforge_model::{Pooling, WeightShare, WeightShares};
pub use rocmforge_ops::WeightType;
pub use rocmforge_scheduler::Class;
pub use rocmforge_tensor_cache::{EvictionCause, Evictions};
pub use rocmforge_vision::PreparedImage;

/// Commands that may wait for the engine. Replies to waiting ones come within a pass, so a short
/// queue is enough; a full one is answered with RESOURCE_EXHAUSTED at once.
pub const COMMAND_CAPACITY: usize = 256;

/// Events of one request that may wait for a slow reader before its sequence is
/// left out of the schedule.
pub const EVENT_CAPACITY: usize = 64;

/// Maximum number of events of one pass.
pub(crate) const STEP_EVENTS: usize = 3;

/// What the engine can be asked to do.
#[derive(Debug)]
pub enum Command {
    /// Registers a model. Uploads nothing.
    Load {
        /// The checked file, plan and tokenizer.
        prepared: Box<PreparedModel>,
        /// Receives the result of the load.
        reply: oneshot::Sender<Result<Registered, Error>>,
    },
    /// Forgets a model and frees what it holds. With `force`, its running requests are cancelled;
    /// without, they make it fail with `Precondition`.
    Unload {
        /// The model's name.
        name: String,
        /// Whether the model's requests are cancelled, instead of rejecting the unload.
        force: bool,
        /// Receives the result of the unload.
        reply: oneshot::Sender<Result<Unloaded, Error>>,
    },
    /// Forgets a model that nobody uses. The first one withdraws it from the snapshots; once nobody
    /// holds the model any more, one of the next forgets it. See [`crate::EngineHandle::close`].
    Close {
        /// The model's name.
        name: String,
        /// The model, where one that has taken its name since is not meant.
        only: Option<Weak<LoadedModel>>,
        /// Receives the state of the closing.
        reply: oneshot::Sender<Result<Closing, Error>>,
    },
    /// Puts a model that was withdrawn into the snapshots again.
    Reopen {
        /// The model's name.
        name: String,
        /// Receives the result.
        reply: oneshot::Sender<Result<(), Error>>,
    },
    /// Generates text. Events end with `Done` or `Failed`.
    Generate {
        /// What to generate.
        request: Box<GenerateRequest>,
        /// Images of the prompt, in the order of their places; see [`ImageSpan`].
        images: Vec<ImageSpan>,
        /// Where the events go; its capacity is the reader's credit.
        events: mpsc::Sender<GenerateEvent>,
        /// Time at which the handle sent the command.
        sent: Instant,
        /// Where the request's time account goes at its end, if the caller wants it.
        times: Option<TimesSlot>,
    },
    /// Computes the rows that a model's vision tower gives for an image.
    ReadImage {
        /// The model.
        model: Arc<LoadedModel>,
        /// The image.
        image: Arc<PreparedImage>,
        /// The rows.
        reply: oneshot::Sender<Result<images::ImageRows, Error>>,
    },
    /// Computes log-probabilities of given tokens.
    Score {
        /// What to score.
        request: Box<ScoreRequest>,
        /// The scores.
        reply: oneshot::Sender<Result<Scores, Error>>,
        /// Time at which the command was sent, and the slot for the request's time account.
        timed: Timed,
    },
    /// Computes what a text means to a model, as one vector.
    Embed {
        /// What to embed.
        request: Box<EmbedRequest>,
        /// The vector.
        reply: oneshot::Sender<Result<Embedding, Error>>,
        /// Time at which the command was sent, and the slot for the request's time account.
        timed: Timed,
    },
    /// Uploads segments ahead of use.
    Preload {
        /// The model's name.
        name: String,
        /// Segment indices; all if `None`.
        segments: Option<Vec<u32>>,
        /// Memory that the preload may take.
        room: PreloadRoom,
        /// Progress, ended by `Done` or `Failed`.
        events: mpsc::Sender<PreloadEvent>,
    },
    /// Pins (or unpins) segments: a pinned one is evicted only if its content is bad. Pinning
    /// uploads nothing by itself.
    Pin {
        /// The model's name.
        name: String,
        /// Segment indices; all if `None`.
        segments: Option<Vec<u32>>,
        /// Pin or unpin.
        pinned: bool,
        /// Bytes of the model's segments that are pinned now.
        reply: oneshot::Sender<Result<u64, Error>>,
    },
    /// Evicts everything that is neither pinned nor in use.
    Clear {
        /// One model's name, or all.
        name: Option<String>,
        /// KV cache on disk is deleted, too.
        disk: bool,
        /// What went and what stayed.
        reply: oneshot::Sender<Result<Cleared, Error>>,
    },
    /// Changes the budget. Shrinking evicts, and never fails running work.
    SetBudget {
        /// The new budget.
        budget: Budget,
        /// Receives the result of the budget change.
        reply: oneshot::Sender<Result<BudgetChange, Error>>,
    },
    /// Gives the device's memory back until the next request.
    Release {
        /// The host's memory, too, whatever is configured.
        host: bool,
        /// What went.
        reply: oneshot::Sender<Result<Released, Error>>,
    },
    /// Changes when that happens by itself.
    SetIdleRelease {
        /// The new configuration of idle release.
        config: IdleRelease,
        /// Receives a reply when the configuration is in force.
        reply: oneshot::Sender<Result<(), Error>>,
    },
    /// Changes the eviction policy.
    SetPolicy {
        /// The new policy.
        policy: Policy,
        /// Channel that gets the policy that was in force before.
        reply: oneshot::Sender<Result<Policy, Error>>,
    },
    /// Takes no new work from now on; running requests may go on until `grace` has passed, then
    /// they fail with `Unavailable`. The engine thread ends afterwards.
    Drain {
        /// How long running requests may go on.
        grace: Duration,
        /// Sent when the last request has ended.
        reply: oneshot::Sender<()>,
    },
    /// Replies at once, to show that the engine responds.
    Ping {
        /// The answer.
        reply: oneshot::Sender<()>,
    },
    /// A reader took an event from a full channel: schedule its sequence again.
    Wake,
}

/// When a request was sent, and where its times go at the end, if the caller wants them.
#[derive(Debug)]
pub struct Timed {
    /// Time at which the handle sent the command.
    pub sent: Instant,
    /// Where the request's time account goes.
    pub times: Option<TimesSlot>,
}

/// Client and class of a request, which decide the order in which requests are served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Asker {
    /// A user of the machine, or what an API key stands for. Those that were served less go first.
    pub client: u64,
    /// Priority class of the request.
    pub class: Class,
    /// How many of the client's requests may run at once; `None` is as many as the engine runs.
    pub running_max: Option<u32>,
    /// How many of them may wait beside those; `None` is as many as the queue holds.
    pub queued_max: Option<u32>,
}

impl Default for Asker {
    fn default() -> Self {
        Self {
            client: 0,
            class: Class::Interactive,
            running_max: None,
            queued_max: None,
        }
    }
}

/// A request for text.
#[derive(Debug)]
pub struct GenerateRequest {
    /// The model.
    pub model: Arc<LoadedModel>,
    /// Token ids of the prompt; at least one.
    pub prompt: Vec<u32>,
    /// Sampling parameters.
    pub sampling: SamplingParams,
    /// At most this many tokens; `None` is up to the context's end.
    pub max_tokens: Option<u32>,
    /// Context length in tokens for this request; `None` is the model's training length
    /// (within the daemon's limit).
    pub n_ctx: Option<u32>,
    /// Stop strings: they end the generation and are not part of the output.
    pub stop: Vec<String>,
    /// What else is asked of the tokens.
    pub decoding: Decoding,
    /// Deadline of the request.
    pub deadline: Option<Instant>,
    /// The longest gap between its tokens that is promised, zero for none; `None` is by its class
    /// ([`config::MaxGaps`]).
    pub max_gap: Option<Duration>,
    /// Client and class of the request.
    pub asker: Asker,
    /// Whether the request may read from the prefix cache and store into it.
    pub reuse: bool,
    /// LoRA adapters of the request ([`LoadedModel::adapters`]); `None` for none.
    pub adapters: Option<Arc<AppliedAdapters>>,
}

/// An event of a generation.
#[derive(Debug)]
pub enum GenerateEvent {
    /// Text, and the ids it came from. The text may be empty while a character is incomplete
    /// or a stop string possible.
    Piece {
        /// Complete UTF-8.
        text: String,
        /// Tokens generated since the last event.
        ids: Vec<u32>,
        /// The score of each of them, where the request asks for log-probabilities.
        scores: Vec<TokenScore>,
        /// Number of last tokens whose text is in no event yet, since it belongs to a stop string
        /// or may do so.
        held: usize,
    },
    /// The end.
    Done(GenerateSummary),
    /// The generation failed. Earlier events stay valid.
    Failed(Error),
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// An end-of-generation token.
    EndOfText,
    /// A stop string.
    StopString {
        /// The stop string's index in the request.
        index: u32,
    },
    /// A token that the request named.
    StopToken {
        /// The token.
        id: u32,
    },
    /// `max_tokens` was reached.
    MaxTokens,
    /// The context is full, or, without `max_tokens`, the budget has no room for more of it.
    ContextFull,
}

/// Counts of one request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GenerateSummary {
    /// Why the generation ended.
    pub finish: FinishReason,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Prompt tokens that were not computed, because the prefix cache had them.
    pub reused_tokens: u32,
    /// Tokens generated, the one that ended the text not counted.
    pub generated_tokens: u32,
    /// Tokens that were guessed and computed beside the others.
    pub drafted_tokens: u32,
    /// Draft tokens that were accepted.
    pub accepted_tokens: u32,
    /// Time from the arrival at the engine to the first pass.
    pub queued: Duration,
    /// Time from the arrival at the engine to the first token.
    pub ttft: Duration,
    /// Tokens a second after the first one; 0 if there was only one.
    pub decode_tokens_per_s: f64,
    /// The longest time between two passes that had tokens of it; `None` if one pass had all.
    pub longest_gap: Option<Gap>,
    /// The promised gap, and the number of gaps that were longer.
    pub promised_gap: Option<(Duration, u32)>,
    /// The request's use of the cache.
    pub cache: RequestCacheUse,
}

/// Whether a feature that costs one resource to save another is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum When {
    /// Used where it is faster, by measured rates.
    #[default]
    Auto,
    /// Never.
    Never,
    /// Used wherever possible.
    Always,
}

/// What one request did to the cache. A pass that it shares counts for each of its requests as a
/// whole.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RequestCacheUse {
    /// Segments found resident (or already in flight).
    pub hits: u64,
    /// Segments that were not resident.
    pub misses: u64,
    /// Bytes uploaded.
    pub uploaded_bytes: u64,
    /// Bytes of weights that the host computed with instead of their being uploaded.
    pub host_bytes: u64,
    /// Peak size of the request's KV cache and of the scratch of its passes, in bytes.
    pub block_bytes: u64,
}

impl RequestCacheUse {
    /// Adds what a pass used; its blocks are counted apart.
    pub(crate) fn add(&mut self, pass: &Self) {
        self.hits += pass.hits;
        self.misses += pass.misses;
        self.uploaded_bytes += pass.uploaded_bytes;
        self.host_bytes += pass.host_bytes;
    }
}

/// A request for log-probabilities.
#[derive(Debug)]
pub struct ScoreRequest {
    /// The model.
    pub model: Arc<LoadedModel>,
    /// Token ids; at least two, since the first has nothing before it.
    pub ids: Vec<u32>,
    /// How many of the most likely tokens to report at each position; 0 is none.
    pub top_n: u32,
    /// Deadline of the request.
    pub deadline: Option<Instant>,
    /// Client and class of the request.
    pub asker: Asker,
    /// LoRA adapters of the request ([`LoadedModel::adapters`]); `None` for none.
    pub adapters: Option<Arc<AppliedAdapters>>,
}

/// A request for an embedding.
#[derive(Debug)]
pub struct EmbedRequest {
    /// The model.
    pub model: Arc<LoadedModel>,
    /// Token ids; at least one.
    pub ids: Vec<u32>,
    /// How hidden states are pooled into the embedding.
    pub pooling: Pooling,
    /// Whether the outputs of the model's classification are wanted instead of the hidden states:
    /// of a model whose [purpose](rocmforge_model::Purpose) is to rank.
    pub classes: bool,
    /// Deadline of the request.
    pub deadline: Option<Instant>,
    /// Client and class of the request.
    pub asker: Asker,
    /// LoRA adapters of the request ([`LoadedModel::adapters`]); `None` for none.
    pub adapters: Option<Arc<AppliedAdapters>>,
}

/// The embedding of a text: its pooled hidden states after the last norm.
#[derive(Debug, Clone, PartialEq)]
pub struct Embedding {
    /// One value for each element of a hidden state, not normalised; or for each class. With
    /// [`Pooling::None`] those of each token, one token after the other.
    pub values: Vec<f32>,
    /// The request's use of the cache.
    pub cache: RequestCacheUse,
}

/// Maximum number of alternatives that a score reports for a position.
pub const TOP_N_MAX: u32 = 64;

/// One token's score.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenScore {
    /// The token.
    pub id: u32,
    /// Natural logarithm of the token's probability given the tokens before it.
    pub logprob: f32,
    /// The most likely tokens at its position with their log-probabilities, best first.
    pub top: Vec<(u32, f32)>,
}

/// The scores of ids `1..n`, in order.
#[derive(Debug, Clone, PartialEq)]
pub struct Scores {
    /// A score for each id but the first.
    pub tokens: Vec<TokenScore>,
    /// The request's use of the cache.
    pub cache: RequestCacheUse,
}

/// The room that a preload may take. Segments without such room are left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PreloadRoom {
    /// Free room: nothing is evicted.
    Free,
    /// Free room, and that of models without running requests.
    Idle,
    /// Evict whatever is not in use; the preload fails if a segment still has no room.
    Any,
}

/// An event of a preload.
#[derive(Debug)]
pub enum PreloadEvent {
    /// Bytes resident of the bytes asked for.
    Progress {
        /// Resident so far.
        done_bytes: u64,
        /// Asked for.
        total_bytes: u64,
    },
    /// The preload has ended: each byte is resident, or was and has been evicted for others since.
    Done {
        /// Bytes that this call uploaded.
        uploaded_bytes: u64,
    },
    /// The preload ended early.
    Failed(Error),
}

/// What a clear did.
#[derive(Debug, Clone, Default)]
pub struct Cleared {
    /// Bytes freed.
    pub freed_bytes: u64,
    /// Segments freed.
    pub freed_segments: u32,
    /// Segments that stayed: model, segment index and name, reason.
    pub kept: Vec<KeptSegment>,
}

/// A segment that a clear left resident.
#[derive(Debug, Clone)]
pub struct KeptSegment {
    /// The model's name.
    pub model: String,
    /// The segment's index.
    pub index: u32,
    /// The segment's name.
    pub name: String,
    /// The segment's bytes.
    pub bytes: u64,
    /// Why the segment stayed.
    pub reason: KeptReason,
}

/// Why `clear` did not evict a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeptReason {
    /// The segment is pinned.
    Pinned,
    /// A running request uses the segment.
    InUse,
    /// The segment is in flight.
    InFlight,
}

/// A budget as asked for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Budget {
    /// Bytes.
    Bytes(u64),
    /// A share of the device's memory, in percent, above 0 and at most 100.
    Percent(f64),
}

/// What a change of the budget did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BudgetChange {
    /// The budget now in force.
    pub budget_bytes: u64,
    /// Segments evicted at once.
    pub evicted_segments: u64,
    /// Bytes of the evicted segments.
    pub evicted_bytes: u64,
    /// Bytes still above the budget, freed as running work ends.
    pub excess_bytes: u64,
}

/// The result of [`Command::Load`].
#[derive(Debug, Clone)]
pub struct Registered {
    /// The model.
    pub model: Arc<LoadedModel>,
    /// Whether this call loaded the model. If false, the same file was loaded under the same name
    /// before and keeps its template.
    pub is_new: bool,
}

/// Result of an unload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unloaded {
    /// Bytes that the model held and that are free now.
    pub freed_bytes: u64,
    /// Requests of the model that were cancelled.
    pub cancelled_requests: u32,
}

/// How far the closing of a model is.
#[derive(Debug)]
pub enum Closing {
    /// The model is forgotten. This is the last pointer to it: dropping it unmaps the file.
    Closed(Arc<LoadedModel>),
    /// The model is withdrawn, and a request that found it before still holds it.
    Held,
    /// The model stays: requests run or wait, it is pinned or preloaded, or it drafts for another
    /// model.
    Used,
}

/// Eviction policy: which segments are evicted first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// Farthest next use inside a pass, least recently used model first between models.
    PassAware,
    /// Plain least recently used, for comparison.
    Lru,
}
