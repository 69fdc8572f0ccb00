//! The daemon: owns the device and serves rocmforge.v1.
//!
//! Exit codes: 0 after a drain or a stop before it serves, 1 when something failed or a second
//! signal cut the drain short, 2 for settings or limits of the process that cannot be used, 3 when
//! the device that was asked for cannot be used, 4 when the device was lost, while serving or while
//! it was opened, or does not answer at the start, or when a GPU can be used that could not be at
//! the start.

#![forbid(unsafe_code)]

mod logging;

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime};

use anyhow::Context as _;
use clap::Parser;
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit, setrlimit};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rocmforge_engine::{EngineConfig, EngineHandle, Error, Refusal};
use rocmforge_gpu_driver::{PRODUCTS_CHILD_ARGUMENT, end_process, products_child_main};
use rocmforge_kernels_gpu::compile;
use rocmforge_service::machine::FoundDriver;
use rocmforge_tokenizer::{RENDER_CHILD_ARGUMENT, RenderLimits, Renderer, render_child_main};
use rocmforged::config::{Config, ConfigError, DeclaredModel, Flags};
use rocmforged::devices::{self, Devices, OWN_PROGRAM, embedded_kernels};
use rocmforged::generated;
use rocmforged::gpu_wait;
use rocmforged::late;
use rocmforged::listeners::{self, NoNetwork, listen};
use rocmforged::model_files::{ModelDirError, ModelDirs};
use rocmforged::parent;
use rocmforged::passed::Passed;
use rocmforged::reload::{Reloader, Reloads};
use rocmforged::self_test;
use rocmforged::signals;
use rocmforged::socket::{Socket, SocketError};
use rocmforged::traces::Exporter;
use rocmforged::{
    Book, End, HttpListeners, Limits, ServeError, ServeOptions, without_their_drafts,
};
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, oneshot};

use crate::logging::start_log;

/// Number of threads of the runtime for handlers. The engine and the text work have their own
/// threads.
const HANDLER_THREADS: usize = 2;
/// Number of threads of the runtime for connections and streams. With a second one each token would
/// wake both.
const SOCKET_THREADS: usize = 1;
/// Desired number of file descriptors: one for each connection and model file, with a reserve.
const DESCRIPTORS_WANTED: u64 = 4096;
/// Minimum number of file descriptors, for the runtime, the device, a few connections and model
/// files.
const DESCRIPTORS_MIN: u64 = 64;
/// Maximum time by which blocking work, which cannot be cancelled, delays the end.
const BLOCKING_WAIT_MAX: Duration = Duration::from_secs(1);

/// Maximum time for the end of a daemon that failed.
const END_WAIT_MAX: Duration = Duration::from_secs(5);

/// Maximum time by which writing the last log lines delays the end, if standard error is stuck.
const LOG_WAIT_MAX: Duration = Duration::from_millis(500);

/// Time limit for a driver to list its devices for `--list-devices`; a simulated GPU is slow.
const LIST_WAIT_MAX: Duration = Duration::from_secs(30);

/// Exit code for settings or limits that cannot be used. The unit restarts the daemon after every
/// other failure.
const UNUSABLE: u8 = 2;
/// Delay for clients that reconnect at once while the daemon cannot start, so that the service
/// manager does not restart it without pause.
const REFUSED_PAUSE: Duration = Duration::from_secs(1);
/// Path of the configuration file that the systemd unit uses.
const UNITS_CONFIG: &str = "/etc/rocmforged/config.toml";
/// Maximum total time that `--check-config` waits for files.
const FILES_ANSWER: Duration = Duration::from_secs(30);
/// Warning for an environment variable with the prefix of settings that is no setting.
const UNREAD: &str = "in the environment is not read: no setting of one value has that name, and paths and lists come \
                      from flags and files alone; `rocmforged --help` lists them";

/// Error message if the threads of a runtime cannot be started.
const NO_THREADS: &str = "cannot start the threads that serve; raise the limit of processes (ulimit -u, TasksMax= in the unit)";

fn main() -> ExitCode {
    if let Some(code) = other_use() {
        return code;
    }
    let mut arguments: Vec<_> = std::env::args_os().collect();
    let ends_with_parent = parent::take_argument(&mut arguments);
    let flags = Flags::parse_from(arguments);
    if flags.list_devices {
        return list_devices();
    }
    if let Some(device) = &flags.check_device {
        return check_device(device);
    }
    let check_only = flags.check_config;
    let is_units = flags.config.as_deref() == Some(Path::new(UNITS_CONFIG));
    let passed = Passed::from_env();
    let waiting = passed.try_clone().unwrap_or_default();
    let config = match Config::new(flags.clone(), rocmforged::default_socket_path()) {
        Ok(config) => config,
        Err(error) => {
            let code = fail(&error.into(), UNUSABLE);
            refuse_waiting(&waiting);
            return code;
        }
    };
    if check_only {
        return check(&config, is_units);
    }
    let (log, set_filter) = match start_log(&config.values.log) {
        Ok(started) => started,
        Err(error) => return fail(&error, 2),
    };
    if ends_with_parent && let Err(error) = parent::follow(&config.values.socket) {
        return fail(&anyhow::Error::from(error).context(NO_THREADS), 1);
    }
    let reloader = Reloader::new(
        flags,
        rocmforged::default_socket_path(),
        config.clone(),
        set_filter,
    );
    let code = match serve(&config, reloader, passed) {
        Ok(End::Drained) => 0,
        Ok(End::BeforeServing) => {
            tracing::info!("ended while the device was being opened");
            log.flush(LOG_WAIT_MAX);
            // The driver is at work on a thread of its own.
            end_process(0)
        }
        Ok(End::GpuReady) => 4,
        Ok(End::Forced) => {
            tracing::warn!("ended before the running requests did");
            1
        }
        Err(error) => {
            end_for_certain();
            log.line(&format!("rocmforged: {error:#}"));
            exit_code(&error)
        }
    };
    log.flush(LOG_WAIT_MAX);
    if code == UNUSABLE {
        refuse_waiting(&waiting);
    }
    ExitCode::from(code)
}

/// Runs the binary's other modes (child processes, generated files), if the arguments select one.
fn other_use() -> Option<ExitCode> {
    let mut arguments = std::env::args().skip(1);
    let ended = |result: Result<(), String>| match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => fail(&anyhow::Error::msg(message), 1),
    };
    Some(match arguments.next()?.as_str() {
        // Run-time compilers may abort: they run in a process of their own.
        compile::CHILD_ARGUMENT => {
            ExitCode::from(u8::try_from(compile::rtc_child_main()).unwrap_or(1))
        }
        // Chat templates come with files and may crash or take all memory: likewise.
        RENDER_CHILD_ARGUMENT => ExitCode::from(render_child_main(arguments)),
        // Vendors' libraries may crash or hang while they look for cards: likewise.
        devices::CHILD_ARGUMENT => {
            let vendor = arguments.next().unwrap_or_default();
            ExitCode::from(devices::child_main(&vendor))
        }
        // Libraries for products may abort: likewise.
        PRODUCTS_CHILD_ARGUMENT => ended(products_child_main(arguments)),
        // So is a card tested, which may do as it likes.
        self_test::CHILD_ARGUMENT => {
            let device = arguments.next().unwrap_or_default();
            ExitCode::from(self_test::child_main(&device))
        }
        generated::ARGUMENT => ended(generated::main(&arguments.collect::<Vec<_>>())),
        _ => return None,
    })
}

/// Closes connections that wait in sockets passed by the service manager, if it does not restart
/// the daemon by itself. Otherwise they would make it start the daemon again and again.
fn refuse_waiting(passed: &Passed) {
    if !passed.is_empty() {
        passed.refuse_waiting();
        std::thread::sleep(REFUSED_PAUSE);
    }
}

/// Ends the process within [`END_WAIT_MAX`] in any case: exit handlers of a vendor's library may
/// wait for a device that does not respond.
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

/// The exit code for an error.
fn exit_code(error: &anyhow::Error) -> u8 {
    let is_of_settings = error.is::<ModelDirError>()
        || error.is::<TooFewDescriptors>()
        || error.is::<ConfigError>()
        || error.is::<NoNetwork>()
        || matches!(error.downcast_ref(), Some(SocketError::Activation { .. }));
    if is_of_settings {
        return UNUSABLE;
    }
    match error.downcast_ref() {
        Some(Error::NoDevice(_)) => return 3,
        Some(Error::DeviceLost(_)) => return 4,
        _ => {}
    }
    match error.downcast_ref() {
        Some(ServeError::DeviceLost(_)) => 4,
        _ => 1,
    }
}

/// Warning for settings that make every user an admin.
const ADMIN_FOR_ALL: &str = "admin_by has '*', so that everyone who may connect is admin and may change the budget, the \
     policy and the settings; name users or @groups there, or leave admin_by unset and restrict manage_by or use_by";

/// Messages about model directories that cannot be used.
fn troubles(dirs: &ModelDirs) -> Vec<String> {
    let states = dirs.first_states().into_iter();
    let told = states.filter_map(|dir| Some((dir.path, dir.trouble?)));
    told.map(|(path, trouble)| format!("the model directory {} {trouble}", path.display()))
        .collect()
}

/// Opens the files of the declared models concurrently, so that a hung one delays no other.
fn open_declared(dirs: &ModelDirs, models: &[DeclaredModel]) -> Vec<anyhow::Result<()>> {
    let begin = |declared: &DeclaredModel| {
        let (dirs, path) = (dirs.clone(), declared.model.path.clone());
        late::ask(move || dirs.open(&path).map(drop))
    };
    let begun: Vec<_> = models.iter().map(begin).collect();
    let until = Instant::now() + FILES_ANSWER;
    let opened = begun.into_iter().zip(models);
    let opened = opened.map(|(answer, declared)| -> anyhow::Result<()> {
        let left = until.saturating_duration_since(Instant::now());
        let Ok(opened) = answer.context(NO_THREADS)?.recv_timeout(left) else {
            anyhow::bail!(
                "{} does not answer; check the server or the mount that it lies on",
                declared.model.path.display()
            );
        };
        Ok(opened?)
    });
    opened.collect()
}

/// Prints the settings that would be in force, and checks the paths and devices that they name;
/// `is_units` says that they are the service's.
fn check(config: &Config, is_units: bool) -> ExitCode {
    // A reader that has seen enough is no failure.
    let _ = io::stdout().write_all(config.describe().as_bytes());
    for name in &config.unread_variables {
        // There is nobody else to tell when standard error does not take it.
        let _ = writeln!(io::stderr(), "rocmforged: {name} {UNREAD}");
    }
    if config.admin_for_all {
        let _ = writeln!(io::stderr(), "rocmforged: {ADMIN_FOR_ALL}");
    }
    let tls = config.http.tls.as_ref();
    if let Some(warning) = tls.and_then(|tls| tls.warning(SystemTime::now())) {
        let _ = writeln!(io::stderr(), "rocmforged: {warning}");
    }
    let dirs = match ModelDirs::new(&config.values.model_dir) {
        Ok(dirs) => dirs,
        Err(error) => return fail(&error.into(), 2),
    };
    let mut code = ExitCode::SUCCESS;
    let addresses = match config.http_addresses() {
        Ok(addresses) => addresses,
        Err(error) => {
            code = fail(&error, UNUSABLE);
            Vec::new()
        }
    };
    if is_units {
        let mut refused = addresses.iter().map(|(address, _)| *address);
        if let Some(refused) = refused.find_map(listeners::refused_by_unit) {
            code = fail(&refused.into(), UNUSABLE);
        }
    }
    for trouble in troubles(&dirs) {
        code = fail(&anyhow::anyhow!(trouble), 2);
    }
    let by_unit = rocmforged::unit_user::troubles(&config.values.model_dir);
    for trouble in by_unit.into_iter().chain(dirs.troubles_of_files()) {
        let _ = writeln!(io::stderr(), "rocmforged: {trouble}");
    }
    let opened = open_declared(&dirs, &config.models);
    for (declared, opened) in config.models.iter().zip(opened) {
        if let Err(error) = opened {
            let error = error.context(format!(
                "path of the declared model '{}' in {}",
                declared.model.name,
                declared.file.display()
            ));
            code = fail(&error, 2);
        }
    }
    let declared = config.models.iter().map(|m| m.model.clone());
    let book = Book::new(declared.collect());
    for (name, draft) in without_their_drafts(&dirs, &book) {
        let file = config.models.iter().find(|m| m.model.name == name);
        let file = file.map(|m| m.file.display().to_string());
        let error = anyhow::anyhow!(
            "draft of the declared model '{name}' in {}: no model '{draft}' is declared or a file in a model directory; \
             declare it, or put its file there",
            file.unwrap_or_default()
        );
        code = fail(&error, 2);
    }
    code
}

/// Prints the GPU drivers and devices, without a daemon.
fn list_devices() -> ExitCode {
    let found: String = Devices::asking(OWN_PROGRAM.into(), LIST_WAIT_MAX)
        .ask()
        .iter()
        .map(FoundDriver::to_string)
        .collect();
    // A reader that has seen enough is no failure.
    let _ = writeln!(io::stdout(), "{found}{}", embedded_kernels());
    ExitCode::SUCCESS
}

/// Tests a GPU and prints one line for each step, without a daemon.
fn check_device(device: &str) -> ExitCode {
    let Some((vendor, ordinal)) = self_test::parse(device) else {
        let error = anyhow::anyhow!(
            "--check-device {device}: expected hip:N or cuda:N; --list-devices lists what there is"
        );
        return fail(&error, 2);
    };
    let told = self_test::test(
        OWN_PROGRAM.into(),
        &format!("{vendor}:{ordinal}"),
        self_test::LIMIT,
    );
    // A reader that has seen enough is no failure.
    let _ = io::stdout().write_all(self_test::table(&told).as_bytes());
    match told.iter().any(self_test::is_failed) {
        true => ExitCode::FAILURE,
        false => ExitCode::SUCCESS,
    }
}

/// Prints why the daemon cannot start, before there is a log.
fn fail(error: &anyhow::Error, code: u8) -> ExitCode {
    // There is nobody else to tell when standard error does not take it.
    let _ = writeln!(io::stderr(), "rocmforged: {error:#}");
    ExitCode::from(code)
}

fn serve(config: &Config, reloader: Reloader, mut passed: Passed) -> anyhow::Result<End> {
    let model_dirs = ModelDirs::new(&config.values.model_dir)?;
    raise_descriptors()?;
    for variable in &config.unread_variables {
        tracing::warn!("{variable} {UNREAD}");
    }
    if config.admin_for_all {
        tracing::warn!("{ADMIN_FOR_ALL}");
    }
    for trouble in troubles(&model_dirs) {
        tracing::warn!("{trouble}");
    }
    if model_dirs.named().next().is_none() {
        tracing::warn!("no --model-dir is given: every load will be refused");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(HANDLER_THREADS)
        .max_blocking_threads(rocmforged::BLOCKING_THREADS)
        .thread_name("rpc")
        .enable_all()
        .build()
        .context(NO_THREADS)?;
    let sockets = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(SOCKET_THREADS)
        // Nothing there blocks.
        .max_blocking_threads(1)
        .thread_name("sockets")
        .enable_all()
        .build()
        .context(NO_THREADS)?;
    // Before the socket: a signal during the start must not leave its file behind.
    let signals = {
        let _context = runtime.enter();
        signals::listen().context("cannot listen for signals")?
    };
    // Before the engine, so that a second daemon is refused before it takes memory.
    let (socket, _http_socket, http) = listen(config, &mut passed)?;
    let reloads = Reloads {
        asked: signals.reloads,
        reloader,
    };
    serve_on(
        config,
        model_dirs,
        (runtime, sockets),
        (signals.stops, reloads),
        &socket,
        http,
    )
}

fn serve_on(
    config: &Config,
    model_dirs: ModelDirs,
    (runtime, sockets): (Runtime, Runtime),
    (mut stops, reloads): (mpsc::Receiver<()>, Reloads),
    socket: &Socket,
    http: HttpListeners,
) -> anyhow::Result<End> {
    let wanted = EngineConfig {
        child_exe: Some(OWN_PROGRAM.into()),
        ..config.engine()
    };
    let start = move || {
        gpu_wait::wait(wanted.device);
        rocmforge_engine::start(wanted)
    };
    let Some(started) = unless_stopped(&runtime, &mut stops, start)? else {
        return Ok(End::BeforeServing);
    };
    let (engine, thread) = started.map_err(|error| no_engine(config, error))?;

    log_serving(config, &engine, socket, &http);
    let threads = match config.values.threads {
        Some(threads) => threads,
        None => std::thread::available_parallelism()?,
    };
    let options = ServeOptions {
        model_dirs,
        limits: Limits {
            n_ctx_max: config.values.n_ctx_max,
            max_sequences: config.values.max_sequences.get() as u32,
            threads: threads.get() as u32,
        },
        roles: config.roles(),
        peer_limits: config.limits.iter().map(|l| l.rule.clone()).collect(),
        image_memory: config.values.image_memory,
        drain_grace: config.values.drain_grace,
        http,
        declared: config.models.iter().map(|m| m.model.clone()).collect(),
        remember: config.values.remember.clone(),
        warm: config.warm_note(std::env::var_os("STATE_DIRECTORY")),
        reloads: Some(reloads),
        templates: Renderer::with_children(None, RenderLimits::default()),
        sockets: sockets.handle().clone(),
        is_kept: socket.is_kept(),
    };
    let listener = socket.listener().context("cannot share the socket")?;
    let end = runtime.block_on(async {
        let traces = config
            .values
            .otlp_endpoint
            .clone()
            .and_then(Exporter::start);
        let end = rocmforged::serve(listener, engine, options, stops).await;
        if let Some(traces) = traces {
            traces.finish().await;
        }
        anyhow::Ok(end?)
    });
    sockets.shutdown_timeout(BLOCKING_WAIT_MAX);
    runtime.shutdown_timeout(BLOCKING_WAIT_MAX);
    if matches!(end, Ok(End::Drained | End::GpuReady)) {
        thread.join().context("the engine ended badly")?;
    }
    tracing::info!("ended");
    end
}

/// Logs which sockets are served, and on which device.
fn log_serving(config: &Config, engine: &EngineHandle, socket: &Socket, http: &HttpListeners) {
    let snapshot = engine.snapshot();
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        socket = socket.describe(),
        http_socket = config
            .values
            .http_socket
            .as_ref()
            .map(|path| path.display().to_string()),
        http_listen = shown_addresses(http),
        http_tls = http.tls.is_some(),
        device = snapshot.device.name,
        budget_bytes = snapshot.cache.budget_bytes,
        "serving"
    );
}

/// The addresses of HTTP for the log; `None` if there are none.
fn shown_addresses(http: &HttpListeners) -> Option<String> {
    let addresses = http.tcp.iter().filter_map(|tcp| tcp.local_addr().ok());
    let addresses: Vec<String> = addresses.map(|address| address.to_string()).collect();
    (!addresses.is_empty()).then(|| addresses.join(","))
}

/// The result of `start`, which runs on a thread; `None` if a stop signal comes first. The thread
/// is then abandoned: only the end of the process ends a driver call.
fn unless_stopped<T: Send + 'static>(
    runtime: &Runtime,
    stops: &mut mpsc::Receiver<()>,
    start: impl FnOnce() -> T + Send + 'static,
) -> anyhow::Result<Option<T>> {
    let (sender, started) = oneshot::channel();
    let thread = std::thread::Builder::new().name("start".to_owned());
    // Nobody takes it only where the process is about to end.
    let spawned = thread.spawn(move || drop(sender.send(start())));
    spawned.context(NO_THREADS)?;
    runtime.block_on(async {
        tokio::select! {
            biased;
            started = started => started.map(Some).context("the thread that starts the engine panicked"),
            Some(()) = stops.recv() => Ok(None),
        }
    })
}

/// The error that the engine does not start, with the setting or limit that caused it.
fn no_engine(config: &Config, error: Error) -> anyhow::Error {
    if let Error::Precondition(refusal @ Refusal::BudgetOutOfRange { .. }) = &error {
        return config.refuse_budget(refusal.to_string()).into();
    }
    let limit = getrlimit(Resource::RLIMIT_AS).map_or(RLIM_INFINITY, |(soft, _)| soft);
    let error = anyhow::Error::from(error).context("cannot start the engine");
    if limit == RLIM_INFINITY {
        return error;
    }
    error.context(format!(
        "the address space of the process is limited to {limit} bytes (RLIMIT_AS, ulimit -v, LimitAS= in a unit), and a \
         device reserves addresses for the whole of its memory; lift that limit, and bound the memory with \
         --vram-budget or a control group"
    ))
}

/// The error that the limit of file descriptors is too low.
#[derive(Debug, thiserror::Error)]
#[error(
    "the process may open {limit} files (RLIMIT_NOFILE), and needs {DESCRIPTORS_MIN}; raise the limit (ulimit -n, \
     LimitNOFILE= in the unit)"
)]
struct TooFewDescriptors {
    limit: u64,
}

/// Raises the soft limit of file descriptors as far as connections and model files need.
fn raise_descriptors() -> anyhow::Result<()> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let wanted = DESCRIPTORS_WANTED.min(hard);
    let raised = if soft < wanted {
        setrlimit(Resource::RLIMIT_NOFILE, wanted, hard)
    } else {
        Ok(())
    };
    if let Err(error) = raised {
        tracing::debug!(%error, "the limit of file descriptors stays as it is");
    }
    let (limit, _) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if limit < DESCRIPTORS_MIN {
        return Err(TooFewDescriptors { limit }.into());
    }
    Ok(())
}
