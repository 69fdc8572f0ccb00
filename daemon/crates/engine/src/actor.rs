//! The engine thread: it owns the device, the cache, the KV pages and the
//! sequences, and nothing else does.
//!
//! ```text
//!   command --> waiting --(its KV pages, scratch and a segment fit)--> running --> done
//!                  |  ^                                                  |
//!                  |  +-- yielded: others need its room; ----------------+-- rows in passes:
//!                  |      computed again later                               chunks of its prompt,
//!                  +-- queue full: RESOURCE_EXHAUSTED                        then a token each
//! ```
//!
//! Each turn of the loop takes the commands that wait, lets the scheduler admit what fits, and
//! runs one pass of one model: a row of each of its requests that decode, and chunks of
//! prompts. A command waits for one pass, or for a chunk with the passes between its steps. A
//! request whose reader is slow is passed over until the reader has taken an event.
//!
//! *Invariant:* nothing here waits for a client (test `a_slow_reader_holds_up_only_itself`). What
//! is waited for is an upload, a read of the model's file (rows of the embedding), what the device
//! has computed (logits, routing), a kernel at its first use, pinned memory, the mask of a grammar,
//! and a command when there is no work.

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rocmforge_device::gpu::Report;
use rocmforge_device::{Device, Loss, SegmentLayout, Steps};
use rocmforge_kernels::host::ops::RopeAngles;
use rocmforge_ops::{Plan, Segment};
use rocmforge_scheduler::{Scheduler, SeqId};
use rocmforge_tensor_cache::{Cache, CacheConfig, ModelId};
use tokio::sync::{oneshot, watch};

use crate::api::{COMMAND_CAPACITY, Command, PreloadEvent, Snapshot};
use crate::aside::{self, Nearness, OnItsWay};
use crate::backlog::Backlog;
use crate::budget::Wanted;
use crate::config::EngineConfig;
use crate::draft::DraftModel;
use crate::error::{Error, from_device};
use crate::file_watch::FileWatch;
use crate::handle::EngineHandle;
use crate::host_pressure::PressureWatch;
use crate::interleave::Slice;
use crate::keep_free::{self, KeepFree};
use crate::loaded::LoadedModel;
use crate::masks::Masks;
use crate::open::Opened;
use crate::pass_times::PassTimes;
use crate::predict::Predictor;
use crate::rotations::Rotations;
use crate::schedule::{PassPace, ScratchSizes};
use crate::share::PromptShare;
use crate::states::SpareStates;
use crate::suspend::SleepClock;
use crate::task::Task;
use crate::under_way::{PassesUnderWay, ScratchBlock};
use crate::watchdog::{self, DeviceLoss, device_lost};
use crate::weight_store::WeightStore;

/// The engine's thread.
#[derive(Debug)]
pub struct EngineThread {
    thread: JoinHandle<Result<(), Error>>,
}

impl EngineThread {
    /// Waits for the engine to end; for ever, if its device hangs, which
    /// [`EngineHandle::lost`] tells.
    ///
    /// # Errors
    /// Why it ended, if it was not asked to.
    pub fn join(self) -> Result<(), Error> {
        self.thread
            .join()
            .unwrap_or_else(|_| Err(Error::Internal("the engine thread panicked".to_owned())))
    }
}

/// A registered model with what only the engine needs.
pub(crate) struct Entry {
    pub(crate) id: ModelId,
    pub(crate) loaded: Arc<LoadedModel>,
    /// The plan's tables of rotations; made at the first request, since they may
    /// need a tensor of the file.
    pub(crate) rope: Vec<Rotations>,
    /// How long passes take that only decode.
    pub(crate) times: PassTimes,
    pub(crate) share: PromptShare,
    /// How long a chunk of prompts goes on between two passes of tokens.
    pub(crate) slice: Slice,
    /// The block that predicts one token more, where the file has one and tokens are drafted.
    pub(crate) predictor: Option<Predictor>,
    /// The model that drafts for this one, if one was named and is loaded.
    pub(crate) draft: Option<DraftModel>,
    /// The name that was named, which counts while no model has it, too.
    pub(crate) draft_name: Option<String>,
    /// How it is got ready for its requests.
    pub(crate) nearness: Nearness,
    /// Where the states behind drafts go, where sequences have a state and tokens are drafted.
    pub(crate) states: Option<SpareStates>,
    /// It is left out of snapshots, to be closed once nobody holds it.
    pub(crate) is_withdrawn: bool,
}

/// A preload under way.
pub(crate) struct Preloading {
    pub(crate) model: ModelId,
    pub(crate) segments: VecDeque<u32>,
    /// All of the model was asked for: what has no room is left out. Segments that were
    /// named take it from others.
    pub(crate) what_fits: bool,
    pub(crate) done_bytes: u64,
    pub(crate) total_bytes: u64,
    pub(crate) uploaded_bytes: u64,
    /// What the next segment needs of the file, on its way.
    pub(crate) coming: Option<OnItsWay>,
    pub(crate) events: tokio::sync::mpsc::Sender<PreloadEvent>,
}

/// A drain under way.
pub(crate) struct Draining {
    pub(crate) until: Instant,
    pub(crate) replies: Vec<oneshot::Sender<()>>,
}

/// What was found when the device was opened.
#[derive(Debug, Clone)]
pub(crate) struct DriverReports {
    pub(crate) drivers: Arc<[Report]>,
    pub(crate) passed_over: Arc<[String]>,
    /// That the CPU computes although a GPU is on the bus, and why.
    pub(crate) unused_gpu: Option<String>,
}

/// The engine.
pub(crate) struct Engine {
    pub(crate) config: EngineConfig,
    pub(crate) found: DriverReports,
    pub(crate) store: WeightStore,
    pub(crate) models: Vec<Entry>,
    pub(crate) next_model: u32,
    /// Decides who runs, and what the next pass computes.
    pub(crate) scheduler: Scheduler,
    /// The requests that the scheduler knows, in the order in which they came.
    pub(crate) tasks: BTreeMap<SeqId, Task>,
    /// The name of the next request.
    pub(crate) next_seq: u64,
    /// The threads that compute masks, since the first text that was held to a grammar.
    pub(crate) masks: Option<Masks>,
    pub(crate) scratch_sizes: ScratchSizes,
    pub(crate) pass_pace: PassPace,
    /// Tokens are drafted.
    pub(crate) speculates: bool,
    /// Passes that go before anybody is admitted: one yielded because the ledger
    /// had no room in one piece.
    pub(crate) passes_before_admission: u32,
    /// Drafts of the pass that is planned.
    pub(crate) drafts: u32,
    /// The last pass came to computing: recurrent states may have taken in a part of it.
    pub(crate) computing: bool,
    pub(crate) prefix_counts: crate::api::PrefixCounts,
    /// Passes of tokens that ran between the steps of a prompt's chunk.
    pub(crate) interleaved_passes: u64,
    /// Times that a model's file was read while others went on.
    pub(crate) brought_aside: u64,
    /// Bytes of weights that were uploaded beside others' passes.
    pub(crate) uploaded_aside_bytes: u64,
    pub(crate) preloads: VecDeque<Preloading>,
    /// Passes that go before the next segment of a preload.
    pub(crate) turns_before_preload: u32,
    pub(crate) draining: Option<Draining>,
    /// What the device has to do yet.
    pub(crate) backlog: Backlog,
    /// The passes that stopped between two steps.
    pub(crate) under_way: PassesUnderWay,
    /// The scratch block of the pass that runs, or ran last; suspended ones have their own. Passes
    /// of tokens between the steps of a prompt's have a part of it.
    pub(crate) scratch: Option<ScratchBlock>,
    /// Scratch blocks that no pass has.
    pub(crate) spare_scratch: Vec<ScratchBlock>,
    /// The budget asked for, while running work needs more than it.
    pub(crate) budget_wanted: Option<u64>,
    /// What a budget in percent is of, where that is less than all memory.
    pub(crate) budget_note: Option<String>,
    /// What is kept free for others.
    pub(crate) keep_free: KeepFree,
    /// What goes back of the host's memory, where it may have any.
    pub(crate) host_pressure: Option<PressureWatch>,
    /// Tokens of the pass under way.
    pub(crate) ids: Vec<u32>,
    /// Rows of its inputs, as their tables have them.
    pub(crate) inputs: Vec<Vec<u8>>,
    /// Residual streams of its rows, `[rows][n_embd]`, where the model's predictor wants them.
    pub(crate) stream: Vec<f32>,
    /// Rotations of its rows, for each table.
    pub(crate) angles: Vec<RopeAngles>,
    pub(crate) snapshot: watch::Sender<Arc<Snapshot>>,
    pub(crate) published_at: Instant,
    /// A request came or started, and no snapshot knows of it yet.
    pub(crate) requests_changed: bool,
    /// Uploads under way ahead of their turn, at most.
    pub(crate) prefetch: u32,
    /// Tokens of a prompt that are computed in one pass, at most.
    pub(crate) prefill_chunk: NonZeroUsize,
    pub(crate) lost: Option<Loss>,
    /// Sees the machine sleep.
    pub(crate) sleep: SleepClock,
    /// How everyone is told that the engine ends by itself.
    loss: DeviceLoss,
}

/// Starts the engine on a thread of its own.
///
/// # Errors
/// The device cannot be used or the budget cannot be.
pub fn start(config: EngineConfig) -> Result<(EngineHandle, EngineThread), Error> {
    crate::open::watched(config.watchdog, move |steps| {
        let opened = crate::open::open(&config, steps)?;
        launch(opened, config, steps)
    })
}

/// Starts the engine on a given device.
///
/// # Errors
/// The budget cannot be used.
pub fn start_on(
    device: Box<dyn Device>,
    config: EngineConfig,
) -> Result<(EngineHandle, EngineThread), Error> {
    let opened = Opened {
        device,
        drivers: Vec::new(),
        passed_over: Vec::new(),
        unused_gpu: None,
    };
    launch(opened, config, &Steps::default())
}

fn launch(
    opened: Opened,
    config: EngineConfig,
    steps: &Steps,
) -> Result<(EngineHandle, EngineThread), Error> {
    let Opened {
        mut device,
        drivers,
        passed_over,
        unused_gpu,
    } = opened;
    let prefetch = config.prefetch.unwrap_or(device.info().prefetch);
    let preferred = NonZeroUsize::new(device.info().prefill_chunk as usize);
    let prefill_chunk = config
        .prefill_chunk
        .or(preferred)
        .unwrap_or(NonZeroUsize::MIN);
    let counts = device.free_bytes().is_some();
    if config.keep_free.is_some() && !counts {
        tracing::warn!(
            "this device's memory is not counted by a driver: nothing of it is kept free"
        );
    }
    let memory = device.info().memory_bytes;
    let mut keep_free = KeepFree::new(config.keep_free.filter(|_| counts), memory)?;
    let budget = crate::budget::meant(config.budget, unused_gpu.is_some());
    let wanted = Wanted::of(budget, &*device, 0, keep_free.bytes())?;
    keep_free.budget_was_set(wanted.withheld, wanted.left);
    if let Some(note) = &wanted.note {
        tracing::info!("{note}");
    }
    let budget = crate::budget::take(&mut *device, wanted.bytes, steps)?;
    keep_free.budget_was_cut(wanted.bytes - budget);
    let cache = Cache::new(CacheConfig {
        align: rocmforge_device::ALIGNMENT,
        policy: crate::commands::to_cache(config.policy),
        max_in_flight: prefetch + 1,
        ..CacheConfig::new(budget)
    });
    let (commands, receiver) = sync_channel(COMMAND_CAPACITY);
    let offload = crate::offload::Offload::new(
        config.cpu_compute,
        config.threads,
        config.host_budget,
        device.info().kind,
    );
    let mut store = WeightStore::new(device, cache, offload);
    steps.begin("preparing the device's own memory");
    store.take_reserve()?;
    steps.end();
    let memory = rocmforge_device::host_memory_bytes();
    let of_host = crate::offload::bytes_of(config.host_budget, memory).min(memory / 2);
    store.open_tier(config.host_kv, of_host);
    let may_hold = of_host > 0 && (store.tier.is_on() || store.offload.takes_part(1));
    let host_pressure = config.host_pressure.clone().filter(|_| may_hold);
    let host_pressure = host_pressure.map(|config| PressureWatch::new(config, of_host));
    let found = DriverReports {
        drivers: drivers.into(),
        passed_over: passed_over.into(),
        unused_gpu,
    };
    let mut first = crate::publish::snapshot_of(&store, &[], &config, &found);
    first.device.findings.extend(wanted.note.clone());
    first.keep_free = keep_free.status();
    first.host_pressure = host_pressure.as_ref().map(|watch| watch.status(0));
    let (snapshot, watch) = watch::channel(Arc::new(first));
    store.files = FileWatch::start(snapshot.clone());
    let loss = DeviceLoss::new(snapshot.clone());
    let lost = loss.subscribe();
    let speculates = config
        .speculate
        .unwrap_or(store.device.info().kind == "host");
    let sleep = SleepClock::new(config.clocks.clone());
    let engine = Engine {
        found,
        store,
        models: Vec::new(),
        next_model: 0,
        scheduler: crate::schedule::scheduler(&config),
        tasks: BTreeMap::new(),
        next_seq: 0,
        masks: None,
        scratch_sizes: ScratchSizes::default(),
        pass_pace: PassPace::default(),
        speculates,
        passes_before_admission: 0,
        drafts: 0,
        computing: false,
        prefix_counts: crate::api::PrefixCounts::default(),
        interleaved_passes: 0,
        brought_aside: 0,
        uploaded_aside_bytes: 0,
        preloads: VecDeque::new(),
        turns_before_preload: crate::preload::PRELOAD_TURNS,
        draining: None,
        backlog: Backlog::default(),
        under_way: PassesUnderWay::default(),
        scratch: None,
        spare_scratch: Vec::new(),
        budget_wanted: None,
        budget_note: wanted.note,
        keep_free,
        host_pressure,
        config,
        ids: Vec::new(),
        inputs: Vec::new(),
        stream: Vec::new(),
        angles: Vec::new(),
        snapshot,
        published_at: Instant::now(),
        requests_changed: false,
        prefetch,
        prefill_chunk,
        lost: None,
        sleep,
        loss,
    };
    let thread = std::thread::Builder::new()
        .name("engine".to_owned())
        .spawn(move || guarded(engine, receiver))
        .map_err(|e| Error::Internal(format!("the engine thread could not be started: {e}")))?;
    let handle = EngineHandle::new(commands, watch, lost);
    Ok((handle, EngineThread { thread }))
}

/// Runs the engine; a panic in it is a bug of ours, and every request ends with an
/// error instead of hanging.
fn guarded(mut engine: Engine, commands: Receiver<Command>) -> Result<(), Error> {
    let watchdog = watchdog::start(engine.store.device.watch(), engine.loss.clone());
    let ran = catch_unwind(AssertUnwindSafe(|| engine.run(&commands)));
    let lost = match ran {
        Ok(None) => return Ok(()),
        Ok(Some(lost)) => lost.with(engine.store.device.said_of_loss()),
        Err(payload) => {
            let message = payload
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| payload.downcast_ref::<&str>().copied())
                .unwrap_or("no message");
            Loss::unknown(format!("the engine panicked: {message}"))
        }
    };
    tracing::error!(kind = lost.kind.label(), error = %lost, "the engine ends");
    engine.give_up(&lost);
    drop(watchdog);
    // From here on nobody waits for this thread: giving the device back may wait
    // for one that never answers.
    drop(engine);
    Err(device_lost(&lost))
}

impl Engine {
    /// The loop. Returns `None` when asked to end, or why the device is lost.
    fn run(&mut self, commands: &Receiver<Command>) -> Option<Loss> {
        let mut rested = false;
        loop {
            // Not without end: those who send them on and on would stop everyone else's requests.
            for _ in 0..COMMAND_CAPACITY {
                match commands.try_recv() {
                    Ok(command) => self.handle(command),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => return self.lost(),
                }
            }
            if let Some(reason) = self.lost() {
                return Some(reason);
            }
            if self.check_after_sleep() {
                continue;
            }
            // In this order: a drain that waits for a reader who went away ends with it,
            // not with its grace period.
            self.end_the_ended();
            if self.drained() {
                return None;
            }
            self.call_models();
            self.admit();
            // Before the pass: it may take long, and its event must not come before the state
            // that knows of its request.
            if self.requests_changed {
                self.publish(true);
            }
            let stepped = self.step();
            let uploaded = self.upload_beside();
            if self.preload_turn(stepped) || stepped || uploaded {
                self.watch_memory_while_busy();
                self.watch_host();
                self.publish(false);
                rested = false;
                continue;
            }
            // What is on its way is looked at often, and nothing else has changed since.
            match std::mem::replace(&mut rested, true) && self.waits_for_files() {
                true => self.store.collect(),
                false => self.go_idle(),
            }
            match self.next_command(commands) {
                Ok(command) => {
                    self.handle(command);
                    rested = false;
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return self.lost(),
            }
        }
    }

    /// Why the device is lost, if it is.
    fn lost(&self) -> Option<Loss> {
        self.lost.clone().or_else(|| self.store.lost().cloned())
    }

    /// Waits for a command, or until it is time for something else.
    fn next_command(&mut self, commands: &Receiver<Command>) -> Result<Command, RecvTimeoutError> {
        let until = Instant::now() + self.idle_timeout();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let Some(every) = self.watch_interval() else {
                return commands.recv_timeout(left);
            };
            match commands.recv_timeout(left.min(every)) {
                // Only counts of memory are looked at: all else is as it was.
                Err(RecvTimeoutError::Timeout) if left > every && !self.watch_while_idle() => {}
                other => return other,
            }
        }
    }

    /// How often memory is looked at that others may want while there is no work; `None` is not at
    /// all.
    fn watch_interval(&self) -> Option<Duration> {
        let of_card = self.keep_free.watches().then_some(keep_free::WHILE_IDLE);
        of_card.into_iter().chain(self.host_watch_interval()).min()
    }

    /// Looks at such memory. Whether there is more to do now.
    fn watch_while_idle(&mut self) -> bool {
        let changed = self.watch_memory(keep_free::WHILE_IDLE / 2);
        self.watch_host() || changed || self.lost().is_some()
    }

    /// How long nothing can happen without a command.
    fn idle_timeout(&self) -> Duration {
        let deadlines = self.all_tasks().filter_map(|t| t.deadline);
        let deadline = deadlines
            .chain(self.draining.as_ref().map(|d| d.until))
            .min();
        let idle = match self.waits_for_files() {
            true => aside::LOOK,
            false => Duration::from_secs(60),
        };
        deadline.map_or(idle, |d| {
            d.saturating_duration_since(Instant::now()).min(idle)
        })
    }

    /// Before the engine sleeps: what only running work needs is given back.
    fn go_idle(&mut self) {
        self.store.collect();
        self.store.remember();
        self.free_idle_scratch();
        self.finish_shrink();
        self.watch_host();
        self.publish(true);
    }

    /// Scratch belongs to running work.
    pub(crate) fn free_idle_scratch(&mut self) {
        if !self.all_tasks().any(|t| t.begun) {
            self.free_scratch();
        }
    }

    /// Ends requests that nobody waits for or whose time is over.
    fn end_the_ended(&mut self) {
        self.end_those(Task::ended);
    }

    /// Ends the requests for which there is a reason.
    pub(crate) fn end_those(&mut self, reason: impl Fn(&Task) -> Option<Error>) {
        let found = |task: &Task| reason(task).map(|error| (task.seq, error));
        let over: Vec<(SeqId, Error)> = self.tasks.values().filter_map(found).collect();
        for (seq, error) in over {
            self.end(seq, error);
        }
    }

    /// Gives back what a request held, publishes, and tells its end if it failed.
    pub(crate) fn finish(&mut self, mut task: Task, error: Option<Error>) {
        let plan = task.loaded.model().plan();
        task.memory.free(&mut self.store, plan);
        self.release_rest(task.model);
        if let Some(error) = error {
            tracing::debug!(model = task.loaded.name(), %error, "a request ended early");
            task.fail(error);
        }
    }

    /// Whether a drain is complete.
    fn drained(&mut self) -> bool {
        let Some(draining) = &self.draining else {
            return false;
        };
        let any = self.all_tasks().next().is_some();
        if any && Instant::now() < draining.until {
            return false;
        }
        self.finish_passes();
        self.end_those(|_| Some(crate::commands::draining()));
        let draining = self.draining.take().expect("looked at above");
        for reply in draining.replies {
            // Nobody waiting is no reason to stay.
            let _ = reply.send(());
        }
        true
    }

    /// Ends every request with the reason that the engine ends.
    fn give_up(&mut self, lost: &Loss) {
        self.lost = Some(lost.clone());
        let error = || device_lost(lost);
        for task in std::mem::take(&mut self.tasks).into_values() {
            task.fail(error());
        }
        self.under_way.fail(error);
        for preload in self.preloads.drain(..) {
            let _ = preload.events.try_send(PreloadEvent::Failed(error()));
        }
        self.loss.tell(lost);
    }

    /// Where the device wants the tensors of one of a model's plans.
    ///
    /// # Errors
    /// [`Error::Unsupported`] names what no kernel of the device can run.
    pub(crate) fn layouts(
        &self,
        loaded: &LoadedModel,
        plan: &Plan,
    ) -> Result<Vec<Arc<SegmentLayout>>, Error> {
        let layout = |s: &Segment| self.store.device.layout(&s.tensors).map(Arc::new);
        let layouts: Result<_, _> = plan.segments.iter().map(layout).collect();
        layouts.map_err(|e| from_device(Some((loaded.name(), loaded.path())), e))
    }
}
