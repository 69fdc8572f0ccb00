//! What the daemon's protocols share, independent of wire formats.
//!
//! A protocol (gRPC, HTTP) turns bytes into the fields of [`check`], passes them to [`Service`],
//! and converts the result or the [`Failure`] to its own format. Admission, checks, models, roles,
//! settings and status are only here; how a conversation becomes a prompt is in the crate `chat`.
//!
//! *Invariants:* no wire type is used here (tidy test `wire_types_stay_in_the_rpc_layer`); nothing
//! holds a lock across an await (clippy's `await_holding_lock`, and the tidy test
//! `no_lock_is_held_across_an_await` for locks that are awaited). Nothing CPU-bound or blocking
//! runs on the async workers.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::too_many_lines, reason = "tables of cases"))]

mod adapter_choice;
pub mod adapters;
pub mod answering;
pub mod answers;
pub mod arrival;
mod available;
pub mod chat_model;
pub mod check;
pub mod declared;
pub mod decoding;
pub mod defaults;
pub mod echo;
pub mod embedding;
mod encoding;
pub mod files;
mod flights;
pub mod generation;
mod hub_names;
mod idle_models;
pub mod images;
mod lane;
pub mod limits;
pub mod live;
pub mod load;
mod load_places;
mod looks;
pub mod machine;
pub mod measured;
pub mod model_files;
pub mod naming;
mod opening;
mod origins;
pub mod peer;
mod projectors;
pub mod rank_head;
pub mod refusals;
pub mod reloading;
mod remembered;
mod renewal;
pub mod request_log;
pub mod rerank;
pub mod roles;
pub mod samplers;
mod standing;
mod state_file;
pub mod sum;
pub mod text_work;
pub mod trace;
mod warm;
mod warm_note;
pub mod why;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rocmforge_engine::{EngineHandle, LoadedModel};
use rocmforge_failure::{self as failure, Failure};
use rocmforge_tokenizer::Renderer;

use crate::declared::Shelf;
use crate::files::Listing;
use crate::flights::Flights;
use crate::idle_models::Bounds;
use crate::images::ImageWork;
use crate::limits::LimitBook;
use crate::load_places::LoadPlaces;
use crate::looks::Looks;
use crate::measured::Measured;
use crate::model_files::ModelDirs;
use crate::opening::Opening;
use crate::origins::Origins;
use crate::reloading::Reader;
use crate::remembered::Memories;
use crate::renewal::Outcome;
use crate::roles::{RoleBook, Roles};
use crate::sum::Sum;
use crate::text_work::TextWork;
use crate::warm::Warmth;
use crate::why::RecentRequests;

/// Maximum bytes of requests that are being read, over all protocols together.
pub const READING_MAX_BYTES: u64 = 128 << 20;
/// Bytes of unsent replies, over all protocols together, above which requests with large replies
/// are rejected.
pub const SENDING_MAX_BYTES: u64 = 128 << 20;
/// Delay after which a client should retry when too many replies are unsent.
const SENDING_RETRY: Duration = Duration::from_secs(1);
/// Maximum size of a request message in bytes: enough for a prompt of eight megabytes, so that a
/// too long prompt is rejected by its tokens.
pub const REQUEST_MAX_BYTES: usize = 16 << 20;
/// Maximum size in bytes of a request without prompts.
pub const SMALL_REQUEST_MAX_BYTES: usize = 64 << 10;
/// Maximum silence of a request's body. Over gRPC the maximum time for the whole body; over HTTP a
/// body has one more second for each 64 KiB.
pub const BODY_WAIT_MAX: Duration = Duration::from_secs(15);
/// Number of blocking threads: one for each text, grammar and request with images that is processed
/// at once, and two for short work (listings, probes of declared files, group lookups). Other work
/// waits for a free one.
pub const BLOCKING_THREADS: usize = text_work::SHORT_AT_ONCE
    + text_work::LONG_AT_ONCE
    + text_work::GRAMMARS_AT_ONCE
    + images::IMAGES_AT_ONCE
    + 2;

/// Limits that apply to all requests.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Maximum context length of a request, in tokens.
    pub n_ctx_max: u32,
    /// Maximum number of requests that the engine runs at once.
    pub max_sequences: u32,
    /// Number of threads of the CPU device.
    pub threads: u32,
}

/// The daemon's services, as all protocols use them.
#[derive(Debug)]
pub struct Service {
    /// Handle of the engine.
    pub engine: EngineHandle,
    /// The directories from which models may be loaded.
    pub dirs: Arc<ModelDirs>,
    /// Limits that apply to all requests.
    pub limits: Limits,
    /// Time at which the daemon started.
    pub started: Instant,
    /// Roles of clients.
    pub roles: RoleBook,
    /// Rendering and tokenizing of texts.
    pub text: TextWork,
    /// Decoding of images.
    pub images: ImageWork,
    /// Measurements of requests, for metrics.
    pub measured: Measured,
    /// The last requests with their time accounts, for `why`.
    pub(crate) recent: Arc<RecentRequests>,
    /// Sum of bytes of requests that are being read.
    pub reading: Arc<Sum>,
    /// Sum of bytes of unsent replies.
    pub sending: Arc<Sum>,
    templates: Renderer,
    draining: AtomicBool,
    loads: LoadPlaces,
    listing: Listing,
    shelf: Shelf,
    /// The reason for which each model was loaded.
    origins: Origins,
    /// Loads and reloads under way, by the model's name.
    loading: Flights<Outcome>,
    /// Closings under way, by the model's name; the result is whether the model was closed.
    closing: Flights<bool>,
    /// Models that clients loaded, to be loaded again after a restart (`remember`).
    memories: Memories,
    /// Models in use, to be loaded again after a restart (`restart_warm`).
    warmth: Warmth,
    /// Limits on the models that requests opened: memory, descriptors and number.
    bounds: Bounds,
    /// Names of declared models that could not be registered because a model directory did not
    /// respond.
    late: Mutex<BTreeSet<String>>,
    /// Declared models that are being registered.
    opening: Opening,
    /// Probes of the files of declared models, by their declared paths.
    looks_at_declared: Arc<Looks<Option<PathBuf>>>,
    limit_book: LimitBook,
    reader: Reader,
}

impl Service {
    /// The service over an engine.
    pub fn new(
        engine: EngineHandle,
        dirs: ModelDirs,
        limits: Limits,
        templates: Renderer,
        roles: Roles,
    ) -> Self {
        Self {
            engine,
            dirs: Arc::new(dirs),
            limits,
            started: Instant::now(),
            roles: RoleBook::new(roles),
            text: TextWork::default(),
            images: ImageWork::default(),
            measured: Measured::default(),
            recent: Arc::default(),
            reading: Sum::new(READING_MAX_BYTES),
            sending: Sum::new(SENDING_MAX_BYTES),
            templates,
            draining: AtomicBool::new(false),
            loads: LoadPlaces::default(),
            listing: Listing::default(),
            shelf: Shelf::default(),
            origins: Origins::default(),
            loading: Flights::default(),
            closing: Flights::default(),
            memories: Memories::default(),
            warmth: Warmth::default(),
            bounds: Bounds::of_process(),
            late: Mutex::default(),
            opening: Opening::default(),
            looks_at_declared: Arc::default(),
            limit_book: LimitBook::default(),
            reader: Reader::default(),
        }
    }

    /// Starts to reject new work, before the daemon ends.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// Whether new work is rejected because the daemon ends.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// Checks that new work is accepted.
    ///
    /// # Errors
    /// UNAVAILABLE while the daemon drains.
    pub fn admit(&self) -> Result<(), Failure> {
        if self.is_draining() {
            Err(failure::draining())
        } else {
            Ok(())
        }
    }

    /// Checks that unsent replies leave room for another one to this user.
    ///
    /// # Errors
    /// RESOURCE_EXHAUSTED if unsent replies take too much memory.
    pub fn room_for_reply(&self, uid: u32) -> Result<(), Failure> {
        if self.sending.is_full(uid) {
            return Err(failure::exhausted(
                "unread replies fill the memory for replies; read or cancel open ones, then try again",
                SENDING_RETRY,
            ));
        }
        Ok(())
    }

    /// The loaded model with this name or alias.
    ///
    /// # Errors
    /// NOT_FOUND with the names of the loaded models.
    pub fn model(&self, name: &str) -> Result<Arc<LoadedModel>, Failure> {
        let name = self.without_adapters(name);
        let found = self.engine.model(&self.real_name(name));
        let model = found.map_err(|error| refusals::from_engine(&error))?;
        self.origins.note_use(&model);
        Ok(model)
    }

    /// The context length for a request that only states an upper bound: the smallest of that, the
    /// model's and the daemon's.
    pub fn n_ctx_at_most(&self, asked: Option<u32>, model: &LoadedModel) -> u32 {
        let most = model.model().info().n_ctx_train.min(self.limits.n_ctx_max);
        asked.map_or(most, |asked| asked.min(most))
    }

    /// The context length of a request, in tokens.
    ///
    /// # Errors
    /// INVALID_ARGUMENT if it exceeds the model's or the daemon's maximum.
    pub fn n_ctx(&self, asked: Option<u32>, model: &LoadedModel) -> Result<u32, Failure> {
        check::context(
            asked,
            model.model().info().n_ctx_train,
            self.limits.n_ctx_max,
        )
    }
}
