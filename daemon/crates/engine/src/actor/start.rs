//! Starts the engine's thread on a device.

use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;

use rocmforge_device::{Device, Loss, Steps};
use rocmforge_gpu_driver::others::Card;
use rocmforge_tensor_cache::{Cache, CacheConfig};
use tokio::sync::watch;

use crate::actor::engine::Engine;
use crate::actor::open::{self, Opened};
use crate::actor::publish;
use crate::actor::publisher::{DriverReports, Publisher};
use crate::api::config::{EngineConfig, PrefixCache};
use crate::api::error::{Error, device_lost};
use crate::api::handle::EngineHandle;
use crate::api::{COMMAND_CAPACITY, Command};
use crate::clock::Clock;
use crate::features::background_load::BackgroundLoads;
use crate::features::cpu_compute::{self, CpuCompute};
use crate::features::equal_segments::EqualSegments;
use crate::features::kv_disk::KvDisk;
use crate::features::preload::Preloads;
use crate::features::speculation::state::Speculation;
use crate::guards::Guards;
use crate::guards::budget::{self, WantedBudget};
use crate::guards::file_watch::FileWatch;
use crate::guards::host_pressure::PressureWatch;
use crate::guards::keep_free::KeepFree;
use crate::guards::others_watch::OthersWatch;
use crate::guards::power_log::PowerLog;
use crate::guards::release::MemoryRelease;
use crate::guards::sleep::SleepClock;
use crate::guards::watchdog::{self, DeviceLoss};
use crate::guards::yield_to::YieldGuard;
use crate::memory::Memory;
use crate::model::registry::Models;
use crate::pass::experts::UPLOADS_MANY;
use crate::pass::interleave::Interleaving;
use crate::pass::row_threads::RowThreads;
use crate::pass::space::PassSpace;
use crate::request::requests::Requests;

/// Handle of the engine's thread.
#[derive(Debug)]
pub struct EngineThread {
    thread: JoinHandle<Result<(), Error>>,
}

impl EngineThread {
    /// Waits for the engine to end; for ever if its device hangs, which [`EngineHandle::lost`]
    /// reports.
    ///
    /// # Errors
    /// Why the engine ended, if it was not asked to.
    pub fn join(self) -> Result<(), Error> {
        self.thread
            .join()
            .unwrap_or_else(|_| Err(Error::Internal("the engine thread panicked".to_owned())))
    }
}

/// Starts the engine on a thread of its own.
///
/// # Errors
/// The device or the budget cannot be used.
pub fn start(config: EngineConfig) -> Result<(EngineHandle, EngineThread), Error> {
    open::watched(config.watchdog, move |steps| {
        let opened = open::open(&config, steps)?;
        launch(opened, config, steps)
    })
}

/// Starts the engine on a given device, which is the GPU `card`, or the CPU for `None`.
///
/// # Errors
/// The budget cannot be used.
pub fn start_on(
    device: Box<dyn Device>,
    card: Option<Card>,
    config: EngineConfig,
) -> Result<(EngineHandle, EngineThread), Error> {
    let opened = Opened {
        device,
        card,
        drivers: Vec::new(),
        passed_over: Vec::new(),
        unused_gpu: None,
    };
    launch(opened, config, &Steps::default())
}

/// The device's memory after it was allocated for a budget.
struct TakenMemory {
    budget: u64,
    note: Option<String>,
    keep_free: KeepFree,
}

/// Allocates the device's memory for the configured budget.
fn take_memory(
    device: &mut dyn Device,
    config: &EngineConfig,
    replaces_gpu: bool,
    steps: &Steps,
) -> Result<TakenMemory, Error> {
    let counts = device.free_bytes().is_some();
    if config.keep_free.is_some() && !counts {
        tracing::warn!("this device has no driver that counts its memory: keep_free has no effect");
    }
    let kept = config.keep_free.filter(|_| counts);
    let mut keep_free = KeepFree::new(kept, device.info().memory_bytes, Clock.now())?;
    let asked = budget::meant(config.budget, replaces_gpu);
    let wanted = WantedBudget::of(asked, device, 0, keep_free.bytes())?;
    keep_free.budget_was_set(wanted.withheld, wanted.left);
    if let Some(note) = &wanted.note {
        tracing::info!("{note}");
    }
    let budget = budget::take(device, wanted.bytes, steps)?;
    keep_free.budget_was_cut(wanted.bytes - budget);
    Ok(TakenMemory {
        budget,
        note: wanted.note,
        keep_free,
    })
}

/// Opens the engine's memory. Returns it with the number of bytes that are host memory.
fn open_memory(
    device: Box<dyn Device>,
    config: &EngineConfig,
    (budget, prefetch): (u64, u32),
    steps: &Steps,
) -> Result<(Memory, u64), Error> {
    let cache = Cache::new(CacheConfig {
        align: rocmforge_device::ALIGNMENT,
        policy: publish::to_cache(config.policy),
        // Who begins uploads ahead bounds them himself.
        max_in_flight: match device.info().records {
            true => (prefetch + 1).max(UPLOADS_MANY as u32),
            false => prefetch + 1,
        },
        ..CacheConfig::new(budget)
    });
    let cpu = CpuCompute::new(
        config.cpu_compute,
        config.threads,
        config.host_budget,
        device.info().is_cpu,
    );
    let mut memory = Memory::new(device, cache, cpu);
    memory.equal = EqualSegments::new(config.share_weights);
    steps.begin("preparing the device's own memory");
    memory.take_reserve()?;
    steps.end();
    let of_machine = rocmforge_device::host_memory_bytes();
    let of_host = cpu_compute::bytes_of(config.host_budget, of_machine).min(of_machine / 2);
    memory.open_host_kv(config.host_kv, of_host);
    if let Some(wanted) = &config.kv_disk {
        steps.begin("opening the KV cache on disk");
        let device = memory.store.device.info();
        let device = format!("{} {}", device.kind, device.arch);
        let is_shared = config.prefix_cache == PrefixCache::Shared;
        let now = memory.store.clock.now();
        memory.kv_disk = Some(KvDisk::open(wanted, device, is_shared, now)?);
        steps.end();
    }
    Ok((memory, of_host))
}

/// The watch for other processes on the GPU, if memory is to be given up for them; the inner error
/// says why they cannot be watched.
///
/// # Errors
///
/// As [`YieldGuard::new`].
fn watch_others(
    device: &dyn Device,
    card: Option<&Card>,
    config: &EngineConfig,
) -> Result<Result<Option<(OthersWatch, YieldGuard)>, String>, Error> {
    let Some(yield_to) = &config.yield_to else {
        return Ok(Ok(None));
    };
    let guard = YieldGuard::new(yield_to, device.info().memory_bytes)?;
    let card = card.ok_or_else(|| {
        "the CPU computes, whose memory is the machine's (host_pressure gives that back)".to_owned()
    });
    let watch = card.and_then(|card| OthersWatch::start(card.clone(), config.places.clone()));
    Ok(match watch {
        Ok(watch) => Ok(Some((watch, guard))),
        Err(why) => {
            let note = format!(
                "yield_to: other users of the GPU cannot be seen, and no memory is given up for them: {why}"
            );
            tracing::warn!("{note}");
            Err(note)
        }
    })
}

fn launch(
    opened: Opened,
    config: EngineConfig,
    steps: &Steps,
) -> Result<(EngineHandle, EngineThread), Error> {
    let mut device = opened.device;
    let prefetch = config.prefetch.unwrap_or(device.info().prefetch);
    let preferred = NonZeroUsize::new(device.info().prefill_chunk as usize);
    let prefill_chunk = config.prefill_chunk.or(preferred);
    let prefill_chunk = prefill_chunk.unwrap_or(NonZeroUsize::MIN);
    let taken = take_memory(&mut *device, &config, opened.unused_gpu.is_some(), steps)?;
    let (commands, receiver) = sync_channel(COMMAND_CAPACITY);
    let (mut memory, of_host) = open_memory(device, &config, (taken.budget, prefetch), steps)?;
    let may_hold = of_host > 0 && (memory.host_kv.is_on() || memory.cpu.takes_part(1));
    let host_pressure = config.host_pressure.clone().filter(|_| may_hold);
    let host_pressure = host_pressure.map(|config| PressureWatch::new(config, of_host));
    let found = DriverReports {
        drivers: opened.drivers.into(),
        passed_over: opened.passed_over.into(),
        unused_gpu: opened.unused_gpu,
    };
    let (others, yield_note) =
        match watch_others(&*memory.store.device, opened.card.as_ref(), &config)? {
            Ok(others) => (others, None),
            Err(note) => (None, Some(note)),
        };
    let models = Models::default();
    let speculation = Speculation::new(config.speculate, memory.store.device.info().is_cpu);
    let mut first = publish::snapshot_of(&memory, (&models, &speculation), &config, &found);
    first.device.findings.extend(taken.note.clone());
    first.device.findings.extend(yield_note.clone());
    first.keep_free = taken.keep_free.status();
    first.host_pressure = host_pressure.as_ref().map(|watch| watch.status(0));
    let (snapshot, watch) = watch::channel(Arc::new(first));
    memory.store.files = FileWatch::start(snapshot.clone());
    let loss = DeviceLoss::new(snapshot.clone());
    let lost = loss.subscribe();
    let guards = Guards {
        keep_free: taken.keep_free,
        release: MemoryRelease::new(config.idle_release, Clock.now()),
        others,
        power: PowerLog::new(opened.card),
        host_pressure,
        sleep: SleepClock::new(config.clocks.clone()),
        budget_wanted: None,
        budget_note: taken.note,
        yield_note,
        lost: None,
        loss,
    };
    let engine = Engine {
        memory,
        models,
        requests: Requests::new(config.max_sequences, config.queue_capacity, config.term),
        space: PassSpace::new(
            prefetch,
            prefill_chunk,
            RowThreads::new(config.threads, config.rows_shared_from),
        ),
        speculation,
        background: BackgroundLoads::default(),
        preloads: Preloads::default(),
        interleaving: Interleaving::default(),
        guards,
        publisher: Publisher::new(found, snapshot, Clock.now()),
        draining: None,
        config,
    };
    let thread = std::thread::Builder::new()
        .name("engine".to_owned())
        .spawn(move || guarded(engine, receiver))
        .map_err(|e| Error::Internal(format!("the engine thread could not be started: {e}")))?;
    let handle = EngineHandle::new(commands, watch, lost);
    Ok((handle, EngineThread { thread }))
}

/// Runs the engine and catches a panic in it (a bug): then every request ends with an error instead
/// of hanging.
fn guarded(mut engine: Engine, commands: Receiver<Command>) -> Result<(), Error> {
    let watchdog = watchdog::start(
        engine.memory.store.device.watch(),
        engine.guards.loss.clone(),
    );
    let ran = catch_unwind(AssertUnwindSafe(|| engine.run(&commands)));
    let lost = match ran {
        Ok(None) => return Ok(()),
        Ok(Some(lost)) => lost.with(engine.memory.store.device.said_of_loss()),
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
