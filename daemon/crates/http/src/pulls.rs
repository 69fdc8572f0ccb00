//! Downloads of models that clients start over HTTP.
//!
//! Each runs on a thread of its own, so that nothing else waits for its disk or its checksums. One
//! that a client follows ends with the client; one in the background ends by itself, or is
//! cancelled by its name.
//!
//! *Invariant:* at most [`PULLS_MAX`] run at once, and the state of at most [`REMEMBERED_MAX`] is
//! kept.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rocmforge_failure::{self as failure, Failure};
use rocmforge_hub::{Config, Error, Event, Hub, Planned, Pulled, Scope, Source, Token};

use super::small_file;
use crate::refusals;
use serde_json::{Value, json};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};

/// Maximum number of downloads that run at once.
const PULLS_MAX: usize = 4;
/// Maximum number of background downloads whose state is kept.
const REMEMBERED_MAX: usize = 64;
/// Maximum number of progress steps that wait for a reader; further ones are dropped.
const STEPS_WAITING: usize = 256;
/// Maximum number of blocking threads of a download.
const BLOCKING_THREADS_MAX: usize = 8;
/// Delay after which a client should retry when too many downloads run.
const RETRY: Duration = Duration::from_secs(30);

/// Sources and target directory of downloads; none by default.
#[derive(Debug, Clone, Default)]
pub struct PullConfig {
    /// The model directory for downloads.
    pub dir: Option<PathBuf>,
    /// Configuration of the hubs.
    pub hub: Config,
    /// Whether clients over TCP may download, copy and delete models.
    pub over_tcp: bool,
}

/// Reads a hub's token from a file.
///
/// # Errors
/// A message with the file's path.
pub fn hub_token(path: &Path) -> Result<Token, String> {
    const FILE_MAX_BYTES: u64 = 16 << 10;
    let what_to_do = "chmod 0600 it, and change the token";
    let bytes = small_file::read(path, FILE_MAX_BYTES, Some(what_to_do))?;
    let told = |message: String| format!("{}: {message}", path.display());
    let text = String::from_utf8(bytes).map_err(|_| told("it is not UTF-8".to_owned()))?;
    rocmforge_hub::token(&text).map_err(told)
}

/// An event of a download.
#[derive(Debug)]
pub(super) enum Step {
    /// Progress of the download.
    Event(Event),
    /// The download has ended.
    Ended(Result<Vec<Pulled>, Error>),
}

/// A background download.
#[derive(Debug)]
struct Background {
    cancel: Option<oneshot::Sender<()>>,
    files: Vec<Planned>,
    /// Received bytes by the index of the file.
    done: HashMap<usize, u64>,
    ended: Option<Result<(), String>>,
}

/// All downloads of the daemon.
#[derive(Debug)]
pub(crate) struct Pulls {
    config: PullConfig,
    places: Arc<Semaphore>,
    /// Background downloads by their source. The lock is held only for a few operations on values.
    background: Mutex<BTreeMap<String, Background>>,
    /// Number of changes of the state of background downloads.
    changes: watch::Sender<u64>,
}

impl Pulls {
    pub(crate) fn new(config: PullConfig) -> Arc<Self> {
        Arc::new(Self {
            config,
            places: Arc::new(Semaphore::new(PULLS_MAX)),
            background: Mutex::default(),
            changes: watch::Sender::new(0),
        })
    }

    /// Whether clients over TCP may download, copy and delete models.
    pub(super) fn over_tcp(&self) -> bool {
        self.config.over_tcp
    }

    /// The model directory for downloads.
    ///
    /// # Errors
    ///
    /// NO_MODEL_DIR if none is configured.
    pub(super) fn dir(&self) -> Result<PathBuf, Failure> {
        self.config.dir.clone().ok_or_else(refusals::no_model_dir)
    }

    /// Begins a download; it ends when the receiver is dropped. Only clients at this machine may
    /// name arbitrary URLs.
    ///
    /// # Errors
    /// The name is invalid, or FULL_NOW if too many run.
    pub(super) fn start(
        self: &Arc<Self>,
        name: &str,
        may_name_urls: bool,
    ) -> Result<mpsc::Receiver<Step>, Failure> {
        let source = Source::parse(name).map_err(|error| failed(&error))?;
        if matches!(source, Source::Url { .. }) && !may_name_urls {
            let why =
                "addresses are taken over the Unix socket alone; name a repository of the hub";
            return Err(failure::invalid("model", why));
        }
        let dir = self.dir()?;
        let place = Arc::clone(&self.places).try_acquire_owned().map_err(|_| {
            let message =
                format!("{PULLS_MAX} downloads are under way; try again when one has ended");
            failure::exhausted(&message, RETRY)
        })?;
        let (steps, follower) = mpsc::channel(STEPS_WAITING);
        let pulls = Arc::clone(self);
        let work = move || pulls.run(&source, dir, &steps, place);
        let thread = std::thread::Builder::new()
            .name("pull".to_owned())
            .spawn(work);
        thread.map_err(|error| failure::bug(&format!("no thread for a download: {error}")))?;
        Ok(follower)
    }

    fn run(
        &self,
        source: &Source,
        dir: PathBuf,
        steps: &mpsc::Sender<Step>,
        _place: OwnedSemaphorePermit,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .max_blocking_threads(BLOCKING_THREADS_MAX)
            .enable_all()
            .build();
        let runtime = match runtime {
            Ok(runtime) => runtime,
            Err(source) => {
                // Who follows may be gone.
                let _ = steps.try_send(Step::Ended(Err(Error::Io { path: dir, source })));
                return;
            }
        };
        let listener = {
            let steps = steps.clone();
            Arc::new(move |event| {
                // Progress that nobody takes in time is left out.
                let _ = steps.try_send(Step::Event(event));
            })
        };
        // Its connections are of this runtime.
        let hub = Hub::new(self.config.hub.clone());
        runtime.block_on(async {
            let pulled = tokio::select! {
                pulled = hub.pull(source, &dir, Scope::default(), listener) => pulled,
                () = steps.closed() => return,
            };
            match &pulled {
                Ok(files) => tracing::info!(%source, files = files.len(), "a model was downloaded"),
                Err(error) => tracing::warn!(%source, %error, "a model was not downloaded"),
            }
            let _ = steps.send(Step::Ended(pulled)).await;
        });
    }

    fn background(&self) -> MutexGuard<'_, BTreeMap<String, Background>> {
        self.background
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a background download, which continues without its client; a running one of the same
    /// source is kept.
    ///
    /// # Errors
    ///
    /// As [`Pulls::start`].
    pub(super) fn start_behind(
        self: &Arc<Self>,
        name: &str,
        may_name_urls: bool,
    ) -> Result<(), Failure> {
        let is_under_way = |pull: &Background| pull.ended.is_none();
        // Held until it is noted, so that two requests do not begin the same download.
        let mut background = self.background();
        if background.get(name).is_some_and(is_under_way) {
            return Ok(());
        }
        let mut steps = self.start(name, may_name_urls)?;
        let (cancel, mut cancelled) = oneshot::channel();
        remember(&mut background, name, cancel);
        drop(background);
        self.changes.send_modify(|n| *n += 1);
        let (pulls, name) = (Arc::clone(self), name.to_owned());
        tokio::spawn(async move {
            loop {
                let step = tokio::select! {
                    step = steps.recv() => step,
                    _ = &mut cancelled => {
                        pulls.note(&name, |pull| pull.ended = Some(Err("cancelled".to_owned())));
                        return;
                    }
                };
                match step {
                    Some(Step::Event(event)) => pulls.note(&name, |pull| pull.hear(event)),
                    Some(Step::Ended(ended)) => {
                        let ended = ended.map(|_| ()).map_err(|error| error.to_string());
                        pulls.note(&name, |pull| pull.ended = Some(ended));
                        return;
                    }
                    None => {
                        let why = "the download ended without a word".to_owned();
                        pulls.note(&name, |pull| pull.ended = Some(Err(why)));
                        return;
                    }
                }
            }
        });
        Ok(())
    }

    fn note(&self, name: &str, change: impl FnOnce(&mut Background)) {
        if let Some(pull) = self.background().get_mut(name) {
            change(pull);
        }
        self.changes.send_modify(|n| *n += 1);
    }

    /// Cancels a background download. Returns whether there was one.
    pub(super) fn cancel(&self, name: &str) -> bool {
        let mut background = self.background();
        let pull = background.get_mut(name).filter(|pull| pull.ended.is_none());
        let cancel = pull.and_then(|pull| pull.cancel.take());
        cancel.is_some_and(|cancel| cancel.send(()).is_ok())
    }

    /// Changes whenever the state of a download in the background changes.
    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Background downloads in llama-server's format: name, event and data.
    pub(super) fn told(&self) -> Vec<(String, &'static str, Value)> {
        let background = self.background();
        let told = background.iter().map(|(name, pull)| {
            let (event, data) = match &pull.ended {
                None => ("download_progress", pull.progress()),
                Some(Ok(())) => ("download_finished", json!({})),
                Some(Err(why)) => ("download_failed", json!({"message": why})),
            };
            (name.clone(), event, data)
        });
        told.collect()
    }
}

/// Adds a background download that begins.
fn remember(
    background: &mut BTreeMap<String, Background>,
    name: &str,
    cancel: oneshot::Sender<()>,
) {
    if background.len() >= REMEMBERED_MAX {
        // No more than a few run, so that most have ended.
        background.retain(|_, pull| pull.ended.is_none());
    }
    let fresh = Background {
        cancel: Some(cancel),
        files: Vec::new(),
        done: HashMap::new(),
        ended: None,
    };
    background.insert(name.to_owned(), fresh);
}

impl Background {
    fn hear(&mut self, event: Event) {
        match event {
            Event::Planned { files, .. } => {
                self.done = files.iter().map(|file| file.have).enumerate().collect();
                self.files = files;
            }
            Event::Progress { file, done } => {
                self.done.insert(file, done);
            }
            Event::Waiting { .. } | Event::Checking { .. } | Event::Done { .. } => {}
        }
    }

    fn progress(&self) -> Value {
        let each = self.files.iter().enumerate().map(|(n, file)| {
            let done = self.done.get(&n).copied().unwrap_or(0);
            let name = file.path.file_name().unwrap_or_default().to_string_lossy();
            (
                name.into_owned(),
                json!({"done": done, "total": file.bytes}),
            )
        });
        Value::Object(each.collect())
    }
}

/// Converts an error of a hub to a failure.
pub(super) fn failed(error: &Error) -> Failure {
    let message = error.to_string();
    match error {
        Error::BadName { .. }
        | Error::NoSuchTag { .. }
        | Error::Ambiguous { .. }
        | Error::Exists { .. } => failure::invalid("model", &message),
        Error::NotFound { .. }
        | Error::NoModel { .. }
        | Error::MissingParts { .. }
        | Error::NoFile { .. } => refusals::not_on_hub(&message),
        _ => refusals::hub_failed(error.word(), &message),
    }
}
