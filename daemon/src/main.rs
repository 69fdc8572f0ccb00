//! The daemon: owns the device and serves rocmforge.v1.
//!
//! Exit codes: 0 after a drain, 1 when something failed or a second signal cut the drain short, 2 for settings that
//! cannot be used, 3 when the device that was asked for cannot be used, 4 when the device was lost while serving.

#![forbid(unsafe_code)]

use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::Parser;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rocmforge_engine::EngineConfig;
use rocmforge_engine::api::{Libraries, probe};
use rocmforged::config::{Config, Flags};
use rocmforged::devices::FoundDriver;
use rocmforged::model_files::ModelDirs;
use rocmforged::socket::Socket;
use rocmforged::{End, Limits, ServeError, ServeOptions};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tracing_subscriber::EnvFilter;

/// Threads of the async runtime. They move messages only; the engine and the text work have threads of their own.
const ASYNC_THREADS: usize = 2;
/// File descriptors to ask for: one a connection, one a model file, and room.
const DESCRIPTORS_WANTED: u64 = 4096;
/// How long blocking work, which cannot be cancelled, may delay the end.
const BLOCKING_WAIT_MAX: Duration = Duration::from_secs(1);

/// How long the end of a daemon that failed may take.
const END_WAIT_MAX: Duration = Duration::from_secs(5);

fn main() -> ExitCode {
    // Run-time compilers may abort: they run in a process of their own, which is this binary again.
    if std::env::args().nth(1).as_deref() == Some(rocmforge_kernels::gpu::compile::CHILD_ARGUMENT) {
        return ExitCode::from(
            u8::try_from(rocmforge_kernels::gpu::compile::rtc_child_main()).unwrap_or(1),
        );
    }
    // Vendors' libraries may crash or hang while they look for cards: likewise.
    if let Some(rocmforged::devices::CHILD_ARGUMENT) = std::env::args().nth(1).as_deref() {
        let vendor = std::env::args().nth(2).unwrap_or_default();
        return ExitCode::from(rocmforged::devices::child_main(&vendor));
    }
    let flags = Flags::parse();
    if flags.list_devices {
        return list_devices();
    }
    let config = match Config::new(flags, rocmforged::default_socket_path()) {
        Ok(config) => config,
        Err(error) => return fail(&error.into(), 2),
    };
    if let Err(error) = start_log(&config.log) {
        return fail(&error, 2);
    }
    let model_dirs = match ModelDirs::new(&config.model_dirs) {
        Ok(dirs) => dirs,
        Err(error) => return fail(&error.into(), 2),
    };
    match run(&config, model_dirs) {
        Ok(End::Drained) => ExitCode::SUCCESS,
        Ok(End::Forced) => {
            tracing::warn!("ended before the running requests did");
            ExitCode::FAILURE
        }
        Err(error) => {
            end_for_certain();
            fail(&error, exit_code(&error))
        }
    }
}

/// Ends the process within [`END_WAIT_MAX`], whatever happens: the exit handlers of a vendor's library may wait for a
/// device that does not answer.
fn end_for_certain() {
    let thread = std::thread::Builder::new().name("end".to_owned());
    let started = thread.spawn(|| {
        std::thread::sleep(END_WAIT_MAX);
        tracing::error!("the process does not end by itself; it is killed");
        // There is no more to be done if even that fails.
        let _ = kill(Pid::this(), Signal::SIGKILL);
    });
    if let Err(error) = started {
        tracing::debug!(%error, "nothing watches over the end");
    }
}

/// What a failure of the daemon ends with.
fn exit_code(error: &anyhow::Error) -> u8 {
    if let Some(rocmforge_engine::Error::NoDevice(_)) = error.downcast_ref() {
        return 3;
    }
    match error.downcast_ref() {
        Some(ServeError::DeviceLost(_)) => 4,
        _ => 1,
    }
}

/// Prints what there is, without a daemon.
fn list_devices() -> ExitCode {
    let reports = probe(&Libraries::from_env());
    for report in &reports {
        print!("{}", FoundDriver::from(report));
    }
    ExitCode::SUCCESS
}

fn fail(error: &anyhow::Error, code: u8) -> ExitCode {
    eprintln!("rocmforged: {error:#}");
    ExitCode::from(code)
}

fn start_log(filter: &str) -> anyhow::Result<()> {
    let log = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::try_new(filter)?)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal());
    // The journal has its own clock.
    let started = match std::env::var_os("JOURNAL_STREAM") {
        Some(_) => log.without_time().try_init(),
        None => log.try_init(),
    };
    started.map_err(|error| anyhow::anyhow!("cannot start the log: {error}"))
}

fn run(config: &Config, model_dirs: ModelDirs) -> anyhow::Result<End> {
    raise_descriptors();
    if model_dirs.real().next().is_none() {
        tracing::warn!("no --model-dir is given: every load will be refused");
    }
    // Before the engine, so that a second daemon is refused before it takes memory.
    let socket = Socket::acquire(&config.socket)?;
    let (engine, thread) = rocmforge_engine::start(EngineConfig {
        device: config.device,
        threads: config.threads,
        budget: config.vram_budget,
        policy: config.policy,
        max_sequences: config.max_sequences,
        queue_capacity: config.queue_capacity,
        n_ctx_max: config.n_ctx_max,
        watchdog: config.watchdog,
        ..EngineConfig::default()
    })
    .context("cannot start the engine")?;

    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(ASYNC_THREADS)
        .max_blocking_threads(rocmforged::BLOCKING_THREADS)
        .thread_name("rpc")
        .enable_all()
        .build()
        .context("cannot start the async runtime")?;
    let snapshot = engine.snapshot();
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        socket = socket.describe(),
        device = snapshot.device.name,
        budget_bytes = snapshot.cache.budget_bytes,
        "serving"
    );
    let threads = match config.threads {
        Some(threads) => threads,
        None => std::thread::available_parallelism()?,
    };
    let options = ServeOptions {
        model_dirs,
        limits: Limits {
            n_ctx_max: config.n_ctx_max,
            max_sequences: config.max_sequences.get() as u32,
            threads: threads.get() as u32,
        },
        drain_grace: config.drain_grace,
    };
    let listener = socket.listener().context("cannot share the socket")?;
    let end = runtime.block_on(async {
        let stops = stop_signals()?;
        anyhow::Ok(rocmforged::serve(listener, engine, options, stops).await?)
    });
    runtime.shutdown_timeout(BLOCKING_WAIT_MAX);
    if matches!(end, Ok(End::Drained)) {
        thread.join().context("the engine ended badly")?;
    }
    tracing::info!("ended");
    end
}

/// A message for each SIGTERM or SIGINT.
fn stop_signals() -> anyhow::Result<mpsc::Receiver<()>> {
    let mut term = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
    // Only the first two matter.
    let (sender, stops) = mpsc::channel(2);
    tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = term.recv() => {}
                _ = interrupt.recv() => {}
            }
            if sender.send(()).await.is_err() {
                return;
            }
        }
    });
    Ok(stops)
}

/// Raises the soft limit of file descriptors towards what the connections and model files need.
fn raise_descriptors() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE).and_then(|(soft, hard)| {
        let wanted = DESCRIPTORS_WANTED.min(hard);
        if soft < wanted {
            setrlimit(Resource::RLIMIT_NOFILE, wanted, hard)
        } else {
            Ok(())
        }
    });
    if let Err(error) = raised {
        tracing::debug!(%error, "the limit of file descriptors stays as it is");
    }
}
