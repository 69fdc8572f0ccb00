//! Settings that are read anew while the daemon runs.
//!
//! Reloaded are the log filter, the tokens, limits, and declared models with their aliases. What else has
//! changed is named in the log, each setting with what runs and what the files say, and takes
//! effect at the next start. Settings that cannot be used change nothing.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use rocmforge_service::Service;
use rocmforge_service::declared::Declared;
use rocmforge_service::limits::Rules;
use sd_notify::NotifyState;
use tokio::sync::mpsc;

use crate::config::{Config, ConfigError, Flags};
use crate::http::{Http, Tokens};

/// What is different from now on.
#[derive(Debug)]
pub struct Changes {
    /// All declared models, if any of them changed.
    pub declared: Option<Vec<Declared>>,
    /// The tokens, if they changed.
    pub tokens: Option<Tokens>,
    /// All limits, if any of them changed.
    pub limits: Option<Rules>,
}

/// Puts a log filter in force, or says why not.
pub type SetFilter = Box<dyn Fn(&str) -> Result<(), String> + Send>;

/// Reads the settings anew.
pub struct Reloader {
    flags: Flags,
    default_socket: PathBuf,
    in_force: Config,
    set_filter: SetFilter,
}

impl fmt::Debug for Reloader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reloader").finish_non_exhaustive()
    }
}

/// Settings that [`Reloader::read`] handles by themselves.
const RELOADED: [&str; 2] = ["log", "http_token_file"];

impl Reloader {
    /// Reads under the same `flags` as those that `in_force` came from.
    pub fn new(
        flags: Flags,
        default_socket: PathBuf,
        in_force: Config,
        set_filter: SetFilter,
    ) -> Self {
        Self {
            flags,
            default_socket,
            in_force,
            set_filter,
        }
    }

    /// Reads the files, puts a changed log filter in force, names what is not reloaded, and gives
    /// the rest. Blocks on files.
    ///
    /// # Errors
    /// Settings that cannot be used. Nothing has changed then.
    pub fn read(&mut self) -> Result<Changes, ConfigError> {
        let new = Config::new(self.flags.clone(), self.default_socket.clone())?;
        if new.log != self.in_force.log {
            match (self.set_filter)(&new.log) {
                Ok(()) => {
                    tracing::info!(setting = "log", before = ?self.in_force.log, now = ?new.log, "reloaded");
                    self.in_force.log.clone_from(&new.log);
                }
                Err(error) => tracing::error!(setting = "log", error, "not reloaded"),
            }
        }
        let tokens = self.tokens(&new);
        let before = self.in_force.settings();
        for (running, read) in before.iter().zip(new.settings()) {
            if running.value != read.value && !RELOADED.contains(&read.key) {
                let none = || "unset".to_owned();
                tracing::warn!(
                    setting = read.key,
                    running = %running.value.clone().unwrap_or_else(none),
                    configured = %read.value.unwrap_or_else(none),
                    "not reloaded: it takes effect when the daemon is started again"
                );
            }
        }
        let models = |config: &Config| -> Vec<Declared> {
            config.models.iter().map(|m| m.model.clone()).collect()
        };
        let (before, now) = (models(&self.in_force), models(&new));
        let declared = (before != now).then(|| {
            let names = |models: &[Declared]| -> Vec<String> {
                models.iter().map(|model| model.name.clone()).collect()
            };
            tracing::info!(setting = "model", before = ?names(&before), now = ?names(&now), "reloaded");
            now
        });
        self.in_force.models = new.models;
        let limits = (self.in_force.limits != new.limits).then(|| {
            tracing::info!(setting = "limit", "reloaded");
            new.limits.iter().map(|limit| limit.rule.clone()).collect()
        });
        self.in_force.limits = new.limits;
        Ok(Changes {
            declared,
            tokens,
            limits,
        })
    }

    fn tokens(&mut self, new: &Config) -> Option<Tokens> {
        let (before, now) = (&self.in_force.http.tokens, &new.http.tokens);
        match (before, now) {
            (Some(_), None) => {
                // Whoever reaches the address would need none any more.
                tracing::warn!(
                    setting = "http_token_file",
                    "not reloaded: a token is taken away only when the daemon is started again"
                );
                None
            }
            (before, Some(now)) if before.as_ref() != Some(now) => {
                tracing::info!(setting = "http_token_file", "reloaded");
                let now = now.clone();
                self.in_force.http.tokens = Some(now.clone());
                self.in_force
                    .http
                    .token_file
                    .clone_from(&new.http.token_file);
                Some(now)
            }
            _ => None,
        }
    }
}

/// Who asks for settings to be read anew, and who reads them.
#[derive(Debug)]
pub struct Reloads {
    /// A message each time.
    pub asked: mpsc::Receiver<()>,
    /// Reads them.
    pub reloader: Reloader,
}

/// Reloads whenever it is asked for, for as long as it is polled.
pub(crate) async fn follow(reloads: Option<Reloads>, service: Arc<Service>, http: Arc<Http>) {
    let Some(Reloads {
        mut asked,
        mut reloader,
    }) = reloads
    else {
        return std::future::pending().await;
    };
    while asked.recv().await.is_some() {
        begin();
        let read = tokio::task::spawn_blocking(move || {
            let read = reloader.read();
            (reloader, read)
        });
        let Ok((again, read)) = read.await else {
            tracing::error!("reading the settings failed; no more of them are reloaded");
            crate::lifecycle::notify(&[NotifyState::Ready]);
            return std::future::pending().await;
        };
        reloader = again;
        match read {
            Ok(changes) => apply(changes, &service, &http).await,
            Err(error) => {
                let error = anyhow::Error::from(error);
                let error = format!("{error:#}");
                tracing::error!(error, "the settings cannot be used; nothing was reloaded");
            }
        }
        crate::lifecycle::notify(&[NotifyState::Ready, NotifyState::Status("serving")]);
    }
    // Nobody asks any more.
    std::future::pending().await
}

/// Tells systemd, which waits for READY=1 then.
fn begin() {
    tracing::info!("reading the settings anew");
    match NotifyState::monotonic_usec_now() {
        Ok(now) => crate::lifecycle::notify(&[NotifyState::Reloading, now]),
        Err(error) => tracing::warn!(%error, "cannot tell systemd of the reload"),
    }
}

async fn apply(changes: Changes, service: &Arc<Service>, http: &Http) {
    if let Some(tokens) = changes.tokens {
        http.set_tokens(tokens);
    }
    if let Some(limits) = changes.limits {
        service.set_limits(limits);
    }
    if let Some(declared) = changes.declared {
        service.declare(declared);
        let registered = service.register_declared().await;
        preload(service, registered);
    }
}

/// Uploads declared models in the background.
pub(crate) fn preload(service: &Arc<Service>, registered: Vec<Declared>) {
    let service = Arc::clone(service);
    tokio::spawn(async move { service.preload_declared(&registered).await });
}
