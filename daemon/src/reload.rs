//! Reloads settings while the daemon runs.
//!
//! Reloaded are the log filter, when idle memory is given back, the tokens, the certificate,
//! limits, and declared models with their aliases. Other changed settings are logged with the value
//! in force and the value in the files, and take effect at the next start. If a setting is invalid,
//! nothing changes. A client that asked for the reload gets the same report.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rocmforge_engine::Error;
use rocmforge_engine::api::IdleRelease;
use rocmforge_http::{Http, Tls, Tokens};
use rocmforge_service::Service;
use rocmforge_service::declared::Declared;
use rocmforge_service::limits::Rules;
use rocmforge_service::refusals;
use rocmforge_service::reloading::{Answer, Change, Reloaded};
use sd_notify::NotifyState;
use tokio::sync::mpsc;

use crate::config::{Config, ConfigError, Flags, Reload, Setting};

/// The changes that a reload has to apply.
#[derive(Debug)]
pub struct Changes {
    /// The new configuration of idle release, if it changed.
    pub idle_release: Option<IdleRelease>,
    /// All declared models, if any of them changed.
    pub declared: Option<Vec<Declared>>,
    /// The new tokens, if they changed.
    pub tokens: Option<Tokens>,
    /// The new certificate and key, if they changed.
    pub tls: Option<Tls>,
    /// All limits, if any of them changed.
    pub limits: Option<Rules>,
    /// The report of applied and not applied settings, as far as it is known once the files are
    /// read.
    pub report: Reloaded,
}

/// Function that puts a log filter in force; the error says why it cannot.
pub type SetFilter = Box<dyn Fn(&str) -> Result<(), String> + Send>;

/// Reads the settings again and determines the changes.
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

/// Key of the setting that stands for certificate and key in reports.
const CERTIFICATE: &str = "http_tls_cert";

impl Reloader {
    /// A reloader that uses the same `flags` as the settings `in_force`.
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

    /// Reads the files, puts a changed log filter in force, and returns the other changes. Blocks
    /// on files.
    ///
    /// # Errors
    /// A setting is invalid; nothing has changed then.
    pub fn read(&mut self) -> Result<Changes, ConfigError> {
        let new = Config::new(self.flags.clone(), self.default_socket.clone())?;
        let mut report = Report::default();
        let before = self.in_force.settings();
        for (running, read) in before.into_iter().zip(new.settings()) {
            if running.value == read.value {
                continue;
            }
            match read.entry.reload {
                Reload::AtRestart => {
                    let reason = "it takes effect when the daemon is started again";
                    report.not_taken(change(running, read), reason.to_owned());
                }
                Reload::LogFilter => {
                    let change = Change {
                        before: self.in_force.values.log.clone(),
                        now: new.values.log.clone(),
                        ..named(read.entry.key)
                    };
                    match (self.set_filter)(&new.values.log) {
                        Ok(()) => {
                            report.taken(change);
                            self.in_force.values.log.clone_from(&new.values.log);
                        }
                        Err(error) => report.not_taken(change, error),
                    }
                }
                Reload::IdleRelease => report.taken(change(running, read)),
                // By what is in the files, below.
                Reload::Tokens | Reload::Certificate => {}
            }
        }
        let idle_release = self.idle_release(&new);
        let tokens = self.tokens(&new, &mut report);
        let tls = self.tls(&new, &mut report);
        let models = |config: &Config| -> Vec<Declared> {
            config.models.iter().map(|m| m.model.clone()).collect()
        };
        let (before, now) = (models(&self.in_force), models(&new));
        let declared = (before != now).then(|| {
            let names = |models: &[Declared]| {
                let names: Vec<&str> = models.iter().map(|model| &*model.name).collect();
                names.join(", ")
            };
            report.taken(Change {
                setting: "model".to_owned(),
                before: names(&before),
                now: names(&now),
                reason: String::new(),
            });
            now
        });
        self.in_force.models = new.models;
        let limits = (self.in_force.limits != new.limits).then(|| {
            report.taken(named("limit"));
            new.limits.iter().map(|limit| limit.rule.clone()).collect()
        });
        self.in_force.limits = new.limits;
        Ok(Changes {
            idle_release,
            declared,
            tokens,
            tls,
            limits,
            report: report.0,
        })
    }

    /// The new configuration of idle release, if it changed.
    fn idle_release(&mut self, new: &Config) -> Option<IdleRelease> {
        let changed = self.in_force.idle_release() != new.idle_release();
        self.in_force.values.idle_release = new.values.idle_release;
        self.in_force.values.idle_release_host = new.values.idle_release_host;
        changed.then(|| new.idle_release())
    }

    fn tokens(&mut self, new: &Config, report: &mut Report) -> Option<Tokens> {
        const KEY: &str = "http_token_file";

        let (before, now) = (&self.in_force.http.tokens, &new.http.tokens);
        match (before, now) {
            (Some(_), None) => {
                // Whoever reaches the address would need none any more.
                let reason = "a token is taken away only when the daemon is started again";
                report.not_taken(named(KEY), reason.to_owned());
                None
            }
            (before, Some(now)) if before.as_ref() != Some(now) => {
                report.taken(named(KEY));
                let now = now.clone();
                self.in_force.http.tokens = Some(now.clone());
                Some(now)
            }
            _ => None,
        }
    }

    fn tls(&mut self, new: &Config, report: &mut Report) -> Option<Tls> {
        let (before, now) = (&self.in_force.http.tls, &new.http.tls);
        if let Some(warning) = now.as_ref().and_then(|tls| tls.warning(SystemTime::now())) {
            tracing::warn!("{warning}");
        }
        match (before, now) {
            (Some(before), Some(now)) if before != now => {
                report.taken(named(CERTIFICATE));
                let now = now.clone();
                self.in_force.http.tls = Some(now.clone());
                Some(now)
            }
            (Some(_), Some(_)) | (None, None) => None,
            (before, now) => {
                let change = Change {
                    setting: CERTIFICATE.to_owned(),
                    before: with_or_without(before.as_ref()),
                    now: with_or_without(now.as_ref()),
                    reason: String::new(),
                };
                let reason =
                    "an address begins and ceases to speak TLS when the daemon is started again";
                report.not_taken(change, reason.to_owned());
                None
            }
        }
    }
}

/// A change of a setting's value, for the report.
fn change(running: Setting, read: Setting) -> Change {
    let none = || "unset".to_owned();
    Change {
        setting: read.entry.key.to_owned(),
        before: running.value.unwrap_or_else(none),
        now: read.value.unwrap_or_else(none),
        reason: String::new(),
    }
}

/// "TLS" or "no TLS", for the report of a reload.
fn with_or_without(tls: Option<&Tls>) -> String {
    match tls {
        Some(_) => "TLS".to_owned(),
        None => "no TLS".to_owned(),
    }
}

/// A change of a setting whose value is not shown, for the report.
fn named(setting: &str) -> Change {
    Change {
        setting: setting.to_owned(),
        ..Change::default()
    }
}

/// The report of a reload; each entry is logged when it is added.
#[derive(Debug, Default)]
struct Report(Reloaded);

impl Report {
    fn taken(&mut self, change: Change) {
        let Change {
            setting,
            before,
            now,
            ..
        } = &change;
        tracing::info!(setting, before, now, "reloaded");
        self.0.taken.push(change);
    }

    fn not_taken(&mut self, change: Change, reason: String) {
        let Change {
            setting,
            before,
            now,
            ..
        } = &change;
        tracing::warn!(setting, running = %before, configured = %now, reason, "not reloaded");
        self.0.not_taken.push(Change { reason, ..change });
    }
}

/// Sources of reload requests, and the reloader. Clients' calls are a further source.
#[derive(Debug)]
pub struct Reloads {
    /// Receives a message for each SIGHUP.
    pub asked: mpsc::Receiver<()>,
    /// Reads the settings.
    pub reloader: Reloader,
}

/// Reloads the settings whenever a signal or a call asks for it, for as long as the future is
/// polled. Earlier calls wait for that.
pub(crate) fn follow(
    reloads: Option<Reloads>,
    service: Arc<Service>,
    http: Arc<Http>,
) -> impl Future<Output = ()> {
    let asked = reloads.and_then(|Reloads { asked, reloader }| {
        let calls = service.reload_calls()?;
        Some((Askers { asked, calls }, reloader))
    });
    async move {
        if let Some((askers, reloader)) = asked {
            answer_all(askers, reloader, &service, &http).await;
        }
        // Who asks from now on learns that nobody reads.
        std::future::pending().await
    }
}

async fn answer_all(
    mut askers: Askers,
    mut reloader: Reloader,
    service: &Arc<Service>,
    http: &Http,
) {
    while let Some(answer) = askers.next().await {
        begin();
        let read = tokio::task::spawn_blocking(move || {
            let read = reloader.read();
            (reloader, read)
        });
        let Ok((again, read)) = read.await else {
            tracing::error!("reading the settings failed; no more of them are reloaded");
            crate::lifecycle::notify(&[NotifyState::Ready]);
            break;
        };
        reloader = again;
        let told = match read {
            Ok(changes) => Ok(apply(changes, service, http).await),
            Err(error) => {
                let error = anyhow::Error::from(error);
                let error = format!("{error:#}");
                tracing::error!(error, "the settings cannot be used; nothing was reloaded");
                Err(refusals::settings_unusable(&error))
            }
        };
        crate::lifecycle::notify(&[NotifyState::Ready, NotifyState::Status("serving")]);
        if let Some(answer) = answer {
            // Its caller may have gone.
            let _ = answer.send(told);
        }
    }
}

/// Sources of reload requests: signals and calls.
struct Askers {
    asked: mpsc::Receiver<()>,
    calls: mpsc::Receiver<Answer>,
}

impl Askers {
    /// Waits for the next reload request, with the channel for its result if a call asks. `None`
    /// once there are no sources any more.
    async fn next(&mut self) -> Option<Option<Answer>> {
        loop {
            tokio::select! {
                Some(()) = self.asked.recv() => return Some(None),
                // Those whose callers went while they waited are left alone.
                Some(answer) = self.calls.recv() => if !answer.is_closed() {
                    return Some(Some(answer));
                },
                else => return None,
            }
        }
    }
}

/// Reports to systemd that a reload begins; it then waits for READY=1.
fn begin() {
    tracing::info!("reloading the settings");
    match NotifyState::monotonic_usec_now() {
        Ok(now) => crate::lifecycle::notify(&[NotifyState::Reloading, now]),
        Err(error) => tracing::warn!(%error, "cannot tell systemd of the reload"),
    }
}

/// Sets the engine's idle release, also if its queue of commands is full for a while.
async fn set_idle_release(service: &Service, config: IdleRelease) -> Result<(), Error> {
    const TRIES: u32 = 100;
    for _ in 0..TRIES {
        match service.engine.set_idle_release(config).await {
            Err(Error::Exhausted { .. }) => tokio::time::sleep(Duration::from_millis(50)).await,
            answer => return answer,
        }
    }
    service.engine.set_idle_release(config).await
}

async fn apply(changes: Changes, service: &Arc<Service>, http: &Http) -> Reloaded {
    let mut report = changes.report;
    if let Some(idle_release) = changes.idle_release
        && let Err(error) = set_idle_release(service, idle_release).await
    {
        report.not_taken.push(Change {
            reason: error.to_string(),
            ..named("idle_release")
        });
    }
    if let Some(tokens) = changes.tokens {
        http.set_tokens(tokens);
    }
    if let Some(tls) = changes.tls {
        http.set_tls(tls);
    }
    if let Some(limits) = changes.limits {
        service.set_limits(limits);
    }
    let registration = match changes.declared {
        Some(declared) => {
            service.declare(declared);
            service.register_declared().await
        }
        None => service.renew_declared().await,
    };
    service.load_remembered().await;
    let refused = registration.refused.into_iter();
    report
        .not_taken
        .extend(refused.map(|(name, reason)| Change {
            setting: "model".to_owned(),
            now: name,
            reason,
            ..Change::default()
        }));
    preload(service, registration.registered);
    report
}

/// Preloads declared models in the background.
pub(crate) fn preload(service: &Arc<Service>, registered: Vec<Declared>) {
    let service = Arc::clone(service);
    tokio::spawn(async move { service.preload_declared(&registered).await });
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;
    use std::time::Duration;

    use rocmforge_connections::Runtimes;
    use rocmforge_engine::api::Budget;
    use rocmforge_engine::{DeviceChoice, EngineConfig};
    use rocmforge_service::Limits;
    use rocmforge_service::arrival::Arrival;
    use rocmforge_service::model_files::ModelDirs;
    use rocmforge_service::roles::Roles;
    use rocmforge_tokenizer::Renderer;
    use tokio::runtime::Handle;

    use super::*;
    #[tokio::test]
    async fn a_call_that_comes_before_anybody_reads_waits() {
        let (engine, _thread) = rocmforge_engine::start(EngineConfig {
            device: DeviceChoice::Host,
            threads: NonZeroUsize::new(1),
            budget: Budget::Bytes(1 << 20),
            ..EngineConfig::default()
        })
        .unwrap();
        let limits = Limits {
            n_ctx_max: 1024,
            max_sequences: 4,
            threads: 1,
        };
        let service = Arc::new(Service::new(
            engine,
            ModelDirs::new(&[]).unwrap(),
            limits,
            Renderer::in_process(),
            Roles::default(),
        ));
        let runtimes = Runtimes {
            sockets: Handle::current(),
            handlers: Handle::current(),
        };
        let http = Http::new(
            Arc::clone(&service),
            runtimes,
            None,
            None,
            crate::Allowed::default(),
            Default::default(),
        );
        let (_signals, asked) = mpsc::channel(1);
        let config = Config::new(Flags::default(), PathBuf::from("s")).unwrap();
        let reloader = Reloader::new(
            Flags::default(),
            PathBuf::from("s"),
            config,
            Box::new(|_| Ok(())),
        );
        let following = follow(
            Some(Reloads { asked, reloader }),
            Arc::clone(&service),
            http,
        );
        let call = tokio::spawn(async move { service.reload(&Arrival::now(None)).await });
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert!(!call.is_finished(), "{:?}", call.await);
        let told = tokio::select! {
            told = call => told.unwrap().unwrap(),
            () = following => unreachable!("it has no end"),
        };
        assert_eq!(told, Reloaded::default());
    }
}
