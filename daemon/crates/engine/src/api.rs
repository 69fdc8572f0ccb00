//! All that anyone can ask of the engine: one closed enum of commands, which
//! [`crate::EngineHandle`] sends.
//!
//! The engine is one OS thread that owns the device, the cache, the KV pages and the sequences.
//! Everybody else holds a cloneable handle: a bounded channel of [`Command`]s in, and a `watch` of
//! published [`Snapshot`]s out. A status call reads the snapshot and never enters the engine.
//! Replies travel on channels that the sender of the command made; the engine never blocks on one
//! of them: a sequence whose reader is slow is left out of the schedule until it reads.

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

/// Capacity of the queue of commands to the engine. Replies to queued commands come within a pass,
/// so a short queue is enough; a full one is answered with RESOURCE_EXHAUSTED at once.
pub const COMMAND_CAPACITY: usize = 256;

/// Maximum number of a request's events that may wait for a slow reader before its sequence is left
/// out of the schedule.
pub const EVENT_CAPACITY: usize = 64;

/// Maximum number of events that one pass may add to a request's channel.
pub(crate) const STEP_EVENTS: usize = 3;

/// What the engine can be asked to do.
#[derive(Debug)]
pub enum Command {
    /// Registers a model. Uploads nothing.
    Load {
        /// The model to register: its checked file, plan and tokenizer.
        prepared: Box<PreparedModel>,
        /// Receives the result of the load.
        reply: oneshot::Sender<Result<Registered, Error>>,
    },
    /// Forgets a model and frees what it holds. With `force`, its running requests are cancelled;
    /// without, they make the unload fail with `Precondition`.
    Unload {
        /// Name of the model to unload.
        name: String,
        /// Whether the model's requests are cancelled, instead of rejecting the unload.
        force: bool,
        /// Receives the result of the unload.
        reply: oneshot::Sender<Result<Unloaded, Error>>,
    },
    /// Forgets a model that nobody uses. The first `Close` withdraws the model from the snapshots;
    /// once nobody holds the model any more, a later `Close` forgets it. See
    /// [`crate::EngineHandle::close`].
    Close {
        /// Name of the model to close.
        name: String,
        /// If given, close only this model, not another one that has taken its name since.
        only: Option<Weak<LoadedModel>>,
        /// Receives how far the closing is.
        reply: oneshot::Sender<Result<Closing, Error>>,
    },
    /// Puts a model that was withdrawn into the snapshots again.
    Reopen {
        /// Name of the model to publish again.
        name: String,
        /// Receives the result of the reopening.
        reply: oneshot::Sender<Result<(), Error>>,
    },
    /// Generates text. Events end with `Done` or `Failed`.
    Generate {
        /// The prompt, the sampling parameters and the limits of the generation.
        request: Box<GenerateRequest>,
        /// Images of the prompt, in the order in which they occur in it; see [`ImageSpan`].
        images: Vec<ImageSpan>,
        /// Channel for the request's events; its capacity bounds how many may wait for the reader.
        events: mpsc::Sender<GenerateEvent>,
        /// Time at which the handle sent the command.
        sent: Instant,
        /// Where the request's time account goes at its end, if the caller wants it.
        times: Option<TimesSlot>,
    },
    /// Computes an image's rows (the embeddings that stand for it in a prompt) with the model's
    /// vision tower.
    ReadImage {
        /// The model whose vision tower reads the image.
        model: Arc<LoadedModel>,
        /// The image, as patches for the tower.
        image: Arc<PreparedImage>,
        /// Receives the image's rows.
        reply: oneshot::Sender<Result<images::ImageRows, Error>>,
    },
    /// Computes log-probabilities of given tokens.
    Score {
        /// The tokens to score.
        request: Box<ScoreRequest>,
        /// Receives the log-probabilities.
        reply: oneshot::Sender<Result<Scores, Error>>,
        /// Time at which the command was sent, and the slot for the request's time account.
        timed: Timed,
    },
    /// Computes the embedding of a text: one vector, or one for each token.
    Embed {
        /// The tokens to embed, and how they are pooled.
        request: Box<EmbedRequest>,
        /// Receives the embedding.
        reply: oneshot::Sender<Result<Embedding, Error>>,
        /// Time at which the command was sent, and the slot for the request's time account.
        timed: Timed,
    },
    /// Uploads a model's segments ahead of their use.
    Preload {
        /// Name of the model to preload.
        name: String,
        /// Indices of the segments to upload; all segments if `None`.
        segments: Option<Vec<u32>>,
        /// Memory that the preload may take: free memory, or also that of evicted segments.
        room: PreloadRoom,
        /// Receives the preload's progress, ended by `Done` or `Failed`.
        events: mpsc::Sender<PreloadEvent>,
    },
    /// Pins (or unpins) segments: a pinned one is evicted only if its content is bad. Pinning
    /// uploads nothing by itself.
    Pin {
        /// Name of the model whose segments are pinned.
        name: String,
        /// Indices of the segments to pin or unpin; all segments if `None`.
        segments: Option<Vec<u32>>,
        /// Whether to pin the segments; `false` unpins them.
        pinned: bool,
        /// Receives the bytes of the model's segments that are pinned now.
        reply: oneshot::Sender<Result<u64, Error>>,
    },
    /// Evicts all segments and cached prefixes that are neither pinned nor in use.
    Clear {
        /// Name of the only model to clear; all models if `None`.
        name: Option<String>,
        /// Whether the KV cache on disk is deleted, too.
        disk: bool,
        /// Receives what was freed and which segments stayed.
        reply: oneshot::Sender<Result<Cleared, Error>>,
    },
    /// Changes the budget. Shrinking evicts, and never fails running work.
    SetBudget {
        /// The new budget, in bytes or in percent of the device's memory.
        budget: Budget,
        /// Receives the result of the budget change.
        reply: oneshot::Sender<Result<BudgetChange, Error>>,
    },
    /// Gives the device's memory back until the next request.
    Release {
        /// Whether host memory is given back, too, even if the configuration keeps it.
        host: bool,
        /// Receives the bytes that were given back.
        reply: oneshot::Sender<Result<Released, Error>>,
    },
    /// Changes after what idle time the device's memory is given back without a command.
    SetIdleRelease {
        /// The new configuration of idle release.
        config: IdleRelease,
        /// Receives a reply when the configuration is in force.
        reply: oneshot::Sender<Result<(), Error>>,
    },
    /// Changes the eviction policy.
    SetPolicy {
        /// The new eviction policy.
        policy: Policy,
        /// Receives the policy that was in force before.
        reply: oneshot::Sender<Result<Policy, Error>>,
    },
    /// Takes no new work from now on; running requests may go on until `grace` has passed, then
    /// they fail with `Unavailable`. The engine thread ends afterwards.
    Drain {
        /// How long running requests may go on before they fail.
        grace: Duration,
        /// Notified when the last request has ended.
        reply: oneshot::Sender<()>,
    },
    /// Replies at once, to show that the engine responds.
    Ping {
        /// Notified when the engine has taken the ping from its queue.
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
    /// Identifies the client: a user of the machine, or an API key. Clients that were served less
    /// so far go first.
    pub client: u64,
    /// Priority class of the request.
    pub class: Class,
    /// Maximum number of the client's requests that run at once; `None` is as many as the engine
    /// runs.
    pub running_max: Option<u32>,
    /// Maximum number of the client's requests that wait in the queue; `None` is as many as the
    /// queue holds.
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

/// A request to generate text from a prompt of tokens.
#[derive(Debug)]
pub struct GenerateRequest {
    /// The model that generates the text.
    pub model: Arc<LoadedModel>,
    /// Token ids of the prompt; at least one.
    pub prompt: Vec<u32>,
    /// Sampling parameters.
    pub sampling: SamplingParams,
    /// Maximum number of tokens to generate; `None` is up to the context's end.
    pub max_tokens: Option<u32>,
    /// Context length in tokens for this request; `None` is the model's training length
    /// (within the daemon's limit).
    pub n_ctx: Option<u32>,
    /// Stop strings: they end the generation and are not part of the output.
    pub stop: Vec<String>,
    /// Constraints on the generated tokens (grammar, stop tokens, log-probabilities).
    pub decoding: Decoding,
    /// Deadline of the request.
    pub deadline: Option<Instant>,
    /// Longest gap between the request's tokens to promise, zero for none; `None` takes the default
    /// of its class ([`config::MaxGaps`]).
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
    /// A piece of generated text, and the ids of its tokens. The text may be empty while a
    /// character is incomplete or a stop string possible.
    Piece {
        /// Generated text since the last event, complete UTF-8.
        text: String,
        /// Ids of the tokens generated since the last event.
        ids: Vec<u32>,
        /// The score of each token in `ids`, if the request asks for log-probabilities; else empty.
        scores: Vec<TokenScore>,
        /// Number of last tokens whose text is in no event yet, since it belongs to a stop string
        /// or may do so.
        held: usize,
    },
    /// The generation is complete; no further event follows.
    Done(GenerateSummary),
    /// The generation failed; no further event follows. Earlier events stay valid.
    Failed(Error),
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// The model generated an end-of-generation token.
    EndOfText,
    /// The text contains one of the request's stop strings.
    StopString {
        /// Index of the found stop string in the request's list.
        index: u32,
    },
    /// The model generated a token that the request named as an end.
    StopToken {
        /// Id of the stop token.
        id: u32,
    },
    /// The request's `max_tokens` was reached.
    MaxTokens,
    /// The context is full, or, for a request without `max_tokens`, the budget has no room for more
    /// of its KV cache.
    ContextFull,
}

/// Why a generation ended, and the request's counts and times.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GenerateSummary {
    /// Why the generation ended.
    pub finish: FinishReason,
    /// Number of tokens of the prompt.
    pub prompt_tokens: u32,
    /// Prompt tokens that were not computed, because the prefix cache had them.
    pub reused_tokens: u32,
    /// Number of generated tokens, without the token that ended the generation.
    pub generated_tokens: u32,
    /// Number of draft tokens that passes computed for the request.
    pub drafted_tokens: u32,
    /// Number of draft tokens that were accepted.
    pub accepted_tokens: u32,
    /// Time from the arrival at the engine to the first pass.
    pub queued: Duration,
    /// Time from the arrival at the engine to the first token.
    pub ttft: Duration,
    /// Decode rate in tokens per second, without the first token; 0 if there was only one.
    pub decode_tokens_per_s: f64,
    /// The longest time between two passes that generated tokens of this request; `None` if one
    /// pass generated all.
    pub longest_gap: Option<Gap>,
    /// The promised gap between tokens, and the number of gaps that were longer; `None` if none was
    /// promised.
    pub promised_gap: Option<(Duration, u32)>,
    /// The request's use of the cache.
    pub cache: RequestCacheUse,
}

/// Whether a feature that costs one resource to save another is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum When {
    /// Decided by measured rates: used where it is faster.
    #[default]
    Auto,
    /// Never used.
    Never,
    /// Used wherever possible.
    Always,
}

/// Segment hits, misses and bytes that one request's passes caused. A pass of several requests
/// counts as a whole for each of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RequestCacheUse {
    /// Segments that were resident or in flight when a pass needed them.
    pub hits: u64,
    /// Segments that were not resident when a pass needed them.
    pub misses: u64,
    /// Bytes of weights uploaded for the request's passes.
    pub uploaded_bytes: u64,
    /// Bytes of weights that the CPU computed with, so that they were not uploaded.
    pub host_bytes: u64,
    /// Peak size of the request's KV cache and of the scratch of its passes, in bytes.
    pub block_bytes: u64,
}

impl RequestCacheUse {
    /// Adds the hits, misses and bytes of a pass to the request's; `block_bytes` is not changed.
    pub(crate) fn add(&mut self, pass: &Self) {
        self.hits += pass.hits;
        self.misses += pass.misses;
        self.uploaded_bytes += pass.uploaded_bytes;
        self.host_bytes += pass.host_bytes;
    }
}

/// A request for the log-probabilities of given tokens.
#[derive(Debug)]
pub struct ScoreRequest {
    /// The model that scores the tokens.
    pub model: Arc<LoadedModel>,
    /// Token ids to score; at least two, since the first has no token before it.
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
    /// The model that computes the embedding.
    pub model: Arc<LoadedModel>,
    /// Token ids to embed; at least one.
    pub ids: Vec<u32>,
    /// How hidden states are pooled into the embedding.
    pub pooling: Pooling,
    /// Whether to return the outputs of the model's classification head instead of hidden states;
    /// only for a model whose [purpose](rocmforge_model::Purpose) is to rank.
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
    /// The embedding, not normalised: one value for each element of a hidden state, or for each
    /// class. With [`Pooling::None`] the hidden states of all tokens, one token after the other.
    pub values: Vec<f32>,
    /// The request's use of the cache.
    pub cache: RequestCacheUse,
}

/// Maximum number of alternative tokens that a score reports for a position.
pub const TOP_N_MAX: u32 = 64;

/// One token's score.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenScore {
    /// Id of the scored token.
    pub id: u32,
    /// Natural logarithm of the token's probability given the tokens before it.
    pub logprob: f32,
    /// The most likely tokens at this position as (id, log-probability), most likely first.
    pub top: Vec<(u32, f32)>,
}

/// Log-probabilities of all tokens of a text but the first.
#[derive(Debug, Clone, PartialEq)]
pub struct Scores {
    /// A score for each token id but the first, in their order.
    pub tokens: Vec<TokenScore>,
    /// The request's use of the cache.
    pub cache: RequestCacheUse,
}

/// Memory that a preload may take. Segments that do not fit into it are not uploaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PreloadRoom {
    /// Free memory only: nothing is evicted.
    Free,
    /// Free memory, and that of segments whose models have no running requests.
    Idle,
    /// Evict whatever is not in use; the preload fails if a segment still does not fit.
    Any,
}

/// An event of a preload.
#[derive(Debug)]
pub enum PreloadEvent {
    /// Progress of the preload.
    Progress {
        /// Bytes of the segments to preload that are resident so far.
        done_bytes: u64,
        /// Bytes of all segments to preload.
        total_bytes: u64,
    },
    /// The preload has ended: each of its segments is resident, or was and has been evicted for
    /// others since.
    Done {
        /// Bytes that this preload uploaded.
        uploaded_bytes: u64,
    },
    /// The preload ended early with this error.
    Failed(Error),
}

/// What a command to clear the cache freed, and what stayed.
#[derive(Debug, Clone, Default)]
pub struct Cleared {
    /// Bytes that the clear freed.
    pub freed_bytes: u64,
    /// Number of segments that the clear evicted.
    pub freed_segments: u32,
    /// Segments that stayed resident, with the reason.
    pub kept: Vec<KeptSegment>,
}

/// A segment that a clear left resident.
#[derive(Debug, Clone)]
pub struct KeptSegment {
    /// Name of the segment's model.
    pub model: String,
    /// The segment's index in its model.
    pub index: u32,
    /// The segment's name, such as `blk.3.attn`.
    pub name: String,
    /// Size of the segment in bytes.
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

/// A budget of device memory as a command asks for it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Budget {
    /// The budget in bytes.
    Bytes(u64),
    /// A share of the device's memory, in percent, above 0 and at most 100.
    Percent(f64),
}

/// The effect of a change of the budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BudgetChange {
    /// The budget now in force, in bytes.
    pub budget_bytes: u64,
    /// Number of segments evicted at once to fit the new budget.
    pub evicted_segments: u64,
    /// Size of the segments evicted at once, in bytes.
    pub evicted_bytes: u64,
    /// Bytes in use above the new budget, which are freed as running work ends.
    pub excess_bytes: u64,
}

/// The result of [`Command::Load`].
#[derive(Debug, Clone)]
pub struct Registered {
    /// The model as it is registered.
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
    /// The model stays: requests of it run or wait, it is pinned or being preloaded, or it is the
    /// draft model of another model.
    Used,
}

/// Eviction policy: which segments are evicted first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// The default: between models, the model whose next request is expected last; within a pass,
    /// the segment whose next use is farthest.
    PassAware,
    /// Least recently used segment first, for comparison.
    Lru,
}
