//! From a listening socket to a drained daemon.
//!
//! ```text
//! starting --READY=1--> serving --first stop--> draining --engine drained--> closing --> ended
//!                          |                       |
//!                          | engine or server died | second stop
//!                          v                       v
//!                        ended                   ended at once
//! ```
//!
//! When the device is lost, health is NOT_SERVING, waiting requests fail with UNAVAILABLE, and the
//! daemon ends, so that its service manager restarts it.
//!
//! While draining, health is NOT_SERVING, new work is rejected with UNAVAILABLE, status calls are
//! answered, and running requests have the grace period to end. Runs on tokio; the engine has its
//! own thread.
//!
//! A listening socket that the service manager holds, too, is left to the successor when the drain
//! begins: nothing more is accepted there, connections end with the requests under way on them, and
//! who connects waits in the socket (test `clients_of_a_kept_socket_wait_for_the_next_daemon`).

use std::io;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use rocmforge_connections::Runtimes;
use rocmforge_engine::{EngineHandle, Loss};
use rocmforge_grpc::{Health, HealthService};
use rocmforge_http::{Http, HttpListeners, Phase};
use rocmforge_service::declared::Declared;
use rocmforge_service::limits::Rules;
use rocmforge_service::model_files::ModelDirs;
use rocmforge_service::roles::Roles;
use rocmforge_service::{Limits, Service};
use rocmforge_tokenizer::Renderer;
use sd_notify::NotifyState;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;

use crate::machine::ThisMachine;
use crate::reload::{self, Reloads};
use crate::{devices, gpu_wait, heartbeat, traces};

/// Number of blocking threads: those of the services and of image hosts' look-ups, and one each for
/// probing devices, resolving the trace collector, and reading settings or a self-test. Other work
/// waits for a free one.
pub const BLOCKING_THREADS: usize = rocmforge_service::BLOCKING_THREADS
    + rocmforge_hub::FETCH_THREADS
    + devices::AT_ONCE
    + traces::LOOKUPS_AT_ONCE
    + 1;
/// Interval at which silent model directories are checked again for declared models.
const LATE_DIRS_EVERY: Duration = Duration::from_secs(2);
/// Maximum time by which registering declared models delays READY, so that a few models are
/// available by then. The rest is registered later, and requests for them wait.
const DECLARED_WAIT_MAX: Duration = Duration::from_secs(1);
/// Additional time beyond the grace period for the engine to end: one pass of a large model.
const DRAIN_MARGIN: Duration = Duration::from_secs(10);
/// Maximum time for connections to close after the last request, so that the last messages arrive.
const CLOSE_WAIT_MAX: Duration = Duration::from_secs(2);

/// Maximum time by which writing the note for a warm restart delays the end.
const NOTE_WAIT_MAX: Duration = Duration::from_secs(1);

/// How long a daemon whose device is lost still responds with UNAVAILABLE and NOT_SERVING, so that
/// clients learn why.
const LOST_WAIT: Duration = Duration::from_millis(500);

/// Parameters of [`serve`].
#[derive(Debug)]
pub struct ServeOptions {
    /// The directories from which models may be loaded.
    pub model_dirs: ModelDirs,
    /// Limits that apply to all requests.
    pub limits: Limits,
    /// Roles of users and groups.
    pub roles: Roles,
    /// Limits of single users and tokens.
    pub peer_limits: Rules,
    /// Bytes of memory for images of requests, until models have read them.
    pub image_memory: u64,
    /// How long running requests may go on after the first stop signal.
    pub drain_grace: Duration,
    /// Listeners of HTTP, besides gRPC.
    pub http: HttpListeners,
    /// Declared models, which are registered before READY.
    pub declared: Vec<Declared>,
    /// File that lists the models that clients loaded, for the next daemon (`remember`).
    pub remember: Option<PathBuf>,
    /// File that notes models in use and their resident weights, for the next daemon to load.
    pub warm: Option<PathBuf>,
    /// Source of reloads of the settings, if there is one.
    pub reloads: Option<Reloads>,
    /// Renders chat templates, which come from model files: the daemon renders them in child
    /// processes.
    pub templates: Renderer,
    /// Runtime of connections and their streams; handlers run on the runtime that calls [`serve`].
    pub sockets: Handle,
    /// Whether the service manager also holds the listening socket.
    pub is_kept: bool,
}

/// The way in which serving ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// After a stop signal, with every request ended.
    Drained,
    /// After a stop signal while the device was still being opened, before anything was served.
    BeforeServing,
    /// A GPU became usable that was not at the start, while no request was running.
    GpuReady,
    /// After a second stop signal, or because the engine did not end in time: requests were cut
    /// off.
    Forced,
}

/// Why serving ended without a stop signal.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The listening socket cannot be used.
    #[error("cannot serve on the socket")]
    Listener(#[source] io::Error),
    /// HTTP cannot be served.
    #[error("cannot serve HTTP")]
    Http(#[source] io::Error),
    /// The gRPC server ended with an error.
    #[error("the server ended")]
    Server(#[source] Option<rocmforge_grpc::Error>),
    /// The device failed for good.
    #[error("the device is lost: {0}; restart the daemon to open it again")]
    DeviceLost(Loss),
    /// The engine thread has ended.
    #[error("the engine ended unexpectedly; see the end of the log")]
    EngineGone,
}

/// Serves `engine` on `listener` until `stops` yields once (drain) or twice (end at once). A closed
/// `stops` drains.
///
/// # Errors
/// [`ServeError`], if the socket, the server or the engine fails.
// Behind a pointer, so that the servers are compiled here, once: a future that is known by its type
// is compiled in each binary that awaits it.
#[inline(never)]
pub fn serve(
    listener: UnixListener,
    engine: EngineHandle,
    options: ServeOptions,
    stops: mpsc::Receiver<()>,
) -> BoxFuture<'static, Result<End, ServeError>> {
    Box::pin(serve_until(listener, engine, options, stops))
}

async fn serve_until(
    listener: UnixListener,
    engine: EngineHandle,
    options: ServeOptions,
    mut stops: mpsc::Receiver<()>,
) -> Result<End, ServeError> {
    let runtimes = Runtimes {
        sockets: options.sockets,
        handlers: Handle::current(),
    };
    let listener = listening(listener, &runtimes)?;
    let context = Arc::new(Service::new(
        engine.clone(),
        options.model_dirs,
        options.limits,
        options.templates,
        options.roles,
    ));
    context.set_limits(options.peer_limits);
    context.images.set_memory(options.image_memory);
    if !registered(&context, options.declared, options.remember, &mut stops).await {
        // Nobody was served yet.
        context.drain();
        engine.drain(Duration::ZERO).await;
        return Ok(End::Drained);
    }
    let (health, health_service) = Health::new();
    health.set(true).await;

    let (http_phase, phase) = watch::channel(Phase::Serving);
    let http = http_of(&context, &runtimes, &options.http);
    let reloading = reload::follow(options.reloads, Arc::clone(&context), Arc::clone(&http));
    let mut http_server = runtimes
        .sockets
        .spawn(rocmforge_http::serve(http, options.http, phase));
    let left = left_to_successor(options.is_kept, http_phase.subscribe());
    let (close, mut server) = serve_rpc(&context, &runtimes, health_service, listener, left);
    notify(&[NotifyState::Ready, NotifyState::Status("serving")]);
    follow_up(&context, options.warm);

    let mut is_gpu_ready = false;
    let cause = tokio::select! {
        _ = stops.recv() => None,
        error = ended(&engine) => Some(error),
        () = heartbeat::follow(&engine, &health) => None,
        () = reloading => None,
        () = gpu_wait::follow(&engine) => {
            is_gpu_ready = true;
            None
        }
        ended = &mut server => Some(ServeError::Server(ended.ok().and_then(Result::err))),
        // Without a listener it ends at once, which is no reason to end.
        Ok(Err(error)) = &mut http_server => Some(ServeError::Http(error)),
    };
    // Before anything ends. What is missing where the device or a server failed is no client's
    // doing: the last note stays then.
    let noted = cause.is_none().then(|| context.note_at_stop()).flatten();
    begin_drain(&context, &health, &http_phase).await;
    let close = Some(close).filter(|_| !options.is_kept || cause.is_some());
    if let Some(error) = cause {
        if matches!(error, ServeError::DeviceLost(_)) {
            close_after_loss(&error, &mut server, close, &http_phase).await;
        }
        http_server.abort();
        return Err(error);
    }

    let end = drained(&engine, options.drain_grace, &mut stops).await;
    drop(close);
    http_phase.send_replace(Phase::Closing);
    if end == End::Drained {
        closed(&mut server, &mut http_server, &mut stops).await;
    }
    server.abort();
    http_server.abort();
    written(noted).await;
    match end {
        End::Drained if is_gpu_ready => Ok(End::GpuReady),
        end => Ok(end),
    }
}

/// Registers declared and remembered models. Returns false if a stop signal comes first.
async fn registered(
    context: &Arc<Service>,
    declared: Vec<Declared>,
    remember: Option<PathBuf>,
    stops: &mut mpsc::Receiver<()>,
) -> bool {
    let remembers = remember.is_some();
    if let Some(path) = remember {
        remember_in(context, path).await;
    }
    tokio::select! {
        () = register(context, declared, remembers) => true,
        _ = stops.recv() => false,
    }
}

/// Serves gRPC until the returned sender is dropped, or sends.
fn serve_rpc(
    context: &Arc<Service>,
    runtimes: &Runtimes,
    health: HealthService,
    listener: tokio::net::UnixListener,
    left: impl Future<Output = ()> + Send + 'static,
) -> (
    oneshot::Sender<()>,
    JoinHandle<Result<(), rocmforge_grpc::Error>>,
) {
    let (close, closing) = oneshot::channel::<()>();
    let (context, runs) = (Arc::clone(context), runtimes.clone());
    // A dropped sender closes, too.
    let closing = Box::pin(async { closing.await.unwrap_or_default() });
    let machine = Arc::<ThisMachine>::default();
    let (left, sockets) = (Box::pin(left), &runtimes.sockets);
    let served = rocmforge_grpc::serve(context, runs, machine, health, listener, left, closing);
    (close, sockets.spawn(served))
}

/// Starts to reject new work, and sets health and HTTP to draining.
async fn begin_drain(context: &Service, health: &Health, http_phase: &watch::Sender<Phase>) {
    context.drain();
    health.set(false).await;
    http_phase.send_replace(Phase::Draining);
    notify(&[
        NotifyState::Stopping,
        NotifyState::Status("draining: running requests may end, new ones are refused"),
    ]);
}

/// The state of the HTTP service.
fn http_of(context: &Arc<Service>, runtimes: &Runtimes, listeners: &HttpListeners) -> Arc<Http> {
    let HttpListeners {
        tokens,
        tls,
        allowed,
        pulls,
        settings,
        image_hosts,
        ..
    } = listeners;
    let shown = (pulls.clone(), settings.clone(), image_hosts.clone());
    let (context, runs) = (Arc::clone(context), runtimes.clone());
    let (tokens, tls, allowed) = (tokens.clone(), tls.clone(), allowed.clone());
    Http::new(context, runs, tokens, tls, allowed, shown)
}

/// Starts background work of a serving daemon: lists files, and loads models for a warm restart.
fn follow_up(context: &Arc<Service>, warm: Option<PathBuf>) {
    // Logs which files are not offered, and has the headers read before somebody waits for them.
    let listing = Arc::clone(context);
    tokio::spawn(async move { listing.list_files().await.map(drop) });
    if let Some(path) = warm {
        tokio::spawn(Service::keep_warm(Arc::downgrade(context), path));
    }
}

/// Waits until the note for a warm restart is written, at most [`NOTE_WAIT_MAX`].
async fn written(noted: Option<JoinHandle<()>>) {
    if let Some(noted) = noted {
        let _ = tokio::time::timeout(NOTE_WAIT_MAX, noted).await;
    }
}

/// Waits until running requests have ended: at most `grace`, or until `stops` yields.
async fn drained(engine: &EngineHandle, grace: Duration, stops: &mut mpsc::Receiver<()>) -> End {
    tracing::info!(grace_s = grace.as_secs_f64(), "draining");
    tokio::select! {
        () = engine.drain(grace) => End::Drained,
        // A closed channel is no second stop.
        Some(()) = stops.recv() => End::Forced,
        () = tokio::time::sleep(grace.saturating_add(DRAIN_MARGIN)) => End::Forced,
    }
}

/// Reads the list of remembered models, and keeps it up to date from now on. Errors are logged.
async fn remember_in(context: &Arc<Service>, path: PathBuf) {
    let context = Arc::clone(context);
    let _ = tokio::task::spawn_blocking(move || context.remember_in(path)).await;
}

/// The listening socket, registered with the runtime of sockets.
fn listening(
    listener: UnixListener,
    runtimes: &Runtimes,
) -> Result<tokio::net::UnixListener, ServeError> {
    listener
        .set_nonblocking(true)
        .map_err(ServeError::Listener)?;
    let _sockets = runtimes.sockets.enter();
    tokio::net::UnixListener::from_std(listener).map_err(ServeError::Listener)
}

/// Waits until both servers have closed their connections.
async fn closed<T, U>(
    server: &mut JoinHandle<T>,
    http_server: &mut JoinHandle<U>,
    stops: &mut mpsc::Receiver<()>,
) {
    let both = async {
        let _ = server.await;
        if !http_server.is_finished() {
            let _ = http_server.await;
        }
    };
    tokio::select! {
        _ = tokio::time::timeout(CLOSE_WAIT_MAX, both) => {}
        Some(()) = stops.recv() => {}
    }
}

/// Closes the daemon after a lost device: the engine has failed all requests, and these errors
/// still have to reach their clients.
async fn close_after_loss<T>(
    error: &ServeError,
    server: &mut JoinHandle<T>,
    close: Option<oneshot::Sender<()>>,
    http_phase: &watch::Sender<Phase>,
) {
    tracing::error!(%error, "ending, so that the service manager starts the daemon again");
    let _ = tokio::time::timeout(LOST_WAIT, &mut *server).await;
    drop(close);
    http_phase.send_replace(Phase::Closing);
    let _ = tokio::time::timeout(CLOSE_WAIT_MAX, &mut *server).await;
    server.abort();
}

/// Registers declared and remembered models, so that clients that connect find them or wait for
/// them.
async fn register(context: &Arc<Service>, declared: Vec<Declared>, remembers: bool) {
    let silent = context.dirs.silent().count();
    if silent > 0 {
        // A reload may declare models there, too.
        tokio::spawn(register_late(Arc::clone(context), silent));
    }
    tokio::spawn(Service::close_deleted(Arc::downgrade(context)));
    if declared.is_empty() && !remembers {
        return;
    }
    context.declare(declared);
    let registering = tokio::spawn({
        let context = Arc::clone(context);
        async move {
            // At once, so that who asks for any of them waits.
            let (registration, ()) =
                tokio::join!(context.register_declared(), context.load_remembered());
            reload::preload(&context, registration.registered);
        }
    });
    if tokio::time::timeout(DECLARED_WAIT_MAX, registering)
        .await
        .is_err()
    {
        tracing::info!("the daemon serves while it opens more models");
    }
}

/// Registers declared models of directories that did not respond, whenever one of these directories
/// does; `before` is their number.
async fn register_late(context: Arc<Service>, mut before: usize) {
    while before > 0 && !context.is_draining() {
        tokio::time::sleep(LATE_DIRS_EVERY).await;
        context.dirs.ask_again();
        let now = context.dirs.silent().count();
        if now < before {
            tracing::info!("a model directory answers now");
            let registration = context.register_late().await;
            reload::preload(&context, registration.registered);
            context.load_remembered().await;
        }
        before = now;
    }
}

/// Waits until a listener has to be left to the next daemon; for ever if the service manager does
/// not keep it.
async fn left_to_successor(is_kept: bool, mut phase: watch::Receiver<Phase>) {
    if !is_kept || phase.wait_for(|now| *now >= Phase::Draining).await.is_err() {
        std::future::pending().await
    }
}

/// Waits for the engine to end by itself. Polls, since the engine publishes a snapshot for each
/// token.
async fn ended(engine: &EngineHandle) -> ServeError {
    match engine.ended().await {
        Some(loss) => ServeError::DeviceLost(loss),
        None => ServeError::EngineGone,
    }
}

pub(crate) fn notify(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!(%error, "cannot tell systemd how the daemon stands");
    }
}
