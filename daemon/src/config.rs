//! The configuration of the daemon: command-line flags over the environment over TOML files over
//! defaults, every value checked.
//!
//! A setting has one name in two spellings: `--vram-budget` on the command line, `vram_budget` in
//! the file. Both are read as text and go through the same check, so that an invalid value is
//! rejected with the same message wherever it came from, and the message names the place. Each
//! setting is declared once, in [`settings`].

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::io;
use std::net::SocketAddr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Parser;
use rocmforge_engine::api::IdleRelease;
use rocmforge_engine::{EngineConfig, HostPressure, KvDiskConfig, MaxGaps, YieldTo};
use rocmforge_http::PullConfig;
use rocmforge_service::roles::{Roles, Who};

use crate::addresses::ListenAddress;

mod bounds;
mod effective;
mod error;
mod given;
mod http;
mod kinds;
mod layers;
mod limits;
mod models;
mod origin;
mod pulls;
mod quoted;
mod reference;
mod settings;
mod table;

pub use effective::Setting;
pub use error::ConfigError;
use given::{Given, Shape};
pub use http::HttpConfig;
pub use kinds::parse_budget;
use layers::Layers;
pub use limits::ConfiguredLimit;
pub use models::DeclaredModel;
pub use origin::Origin;
use origin::{ENVIRONMENT, variable};
pub use reference::{dictionary, reference};
pub use settings::Values;
use table::{AllGiven, Entry};
pub use table::{Reload, SettingFlags};

/// The command line. Values are kept as text; [`Config::new`] checks them together with the file's.
#[derive(Debug, Clone, Default, Parser)]
#[command(
    name = "rocmforged",
    version,
    about = "Owns the device and serves GGUF models to local clients over a Unix socket.",
    after_help = "Every flag but --config, --check-config, --list-devices and --check-device is also a key of the file, with _ for -; a flag wins over the file.\n\
                  Those of one value that are no paths are also variables: ROCMFORGED_KEEP_FREE wins over the file.\n\
                  With no --model-dir every load is refused: the daemon opens nothing that it was not told to."
)]
pub struct Flags {
    /// TOML file with the same settings; *.toml in conf.d beside it are read after it, by name, and
    /// the last one wins
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// The settings.
    #[command(flatten)]
    pub settings: SettingFlags,
    /// Check settings, model directories and declared models, print the settings in force and where
    /// each value came from, and exit
    #[arg(long)]
    pub check_config: bool,
    /// List the GPU drivers and devices that are found, and exit
    #[arg(long)]
    pub list_devices: bool,
    /// Test a GPU, such as hip:0, without a daemon, and exit: with 1 if a step failed
    #[arg(long, value_name = "DEVICE")]
    pub check_device: Option<String>,
}

/// The checked settings in force.
#[derive(Debug, Clone)]
pub struct Config {
    /// The value of each setting.
    pub values: Values,
    /// Whether `admin_by` contains `*`, which makes everyone who may connect an admin.
    pub admin_for_all: bool,
    /// The tokens and the TLS certificate that the HTTP settings name.
    pub http: HttpConfig,
    /// Sources of model downloads, and their target directory.
    pub pulls: PullConfig,
    /// The declared models (`[[model]]`).
    pub models: Vec<DeclaredModel>,
    /// Limits of clients (`[[limit]]`).
    pub limits: Vec<ConfiguredLimit>,
    /// Sources of values that are not defaults, by key.
    pub origins: BTreeMap<&'static str, Origin>,
    /// Configuration files in the order in which they were read.
    pub files: Vec<PathBuf>,
    /// Environment variables that look like settings and are none.
    pub unread_variables: Vec<String>,
}

impl Config {
    /// Reads the file that `flags` name, if any, and overrides it by the flags. `default_socket` is
    /// served if neither names a socket.
    ///
    /// # Errors
    /// [`ConfigError`], which names the file, key and flag.
    pub fn new(flags: Flags, default_socket: PathBuf) -> Result<Self, ConfigError> {
        let mut layers = match &flags.config {
            Some(path) => Layers::read(path)?,
            None => Layers::default(),
        };
        let models = models::checked(layers.models)?;
        let limits = limits::checked(layers.limits)?;
        let mut given = AllGiven::default();
        for entry in settings::ENTRIES.iter() {
            let file = layers.settings.remove(entry.key);
            let above = flags.settings.given(entry).or_else(|| environment(entry));
            if let Some(found) = above.or(file) {
                given.0.insert(entry.key, found);
            }
        }
        let origins = given.origins();
        given.set_default("socket", vec![default_socket.into()]);
        // A higher role is never open to more than the one below it.
        given.set_default_to("manage_by", "use_by");
        given.set_default_to("admin_by", "manage_by");
        let values = Values::read(&given)?;
        Ok(Self {
            http: HttpConfig::new(&values, &origins)?,
            pulls: pulls::config(&values, &origins)?,
            admin_for_all: origins.contains_key("admin_by") && values.admin_by == Who::Everyone,
            values,
            models,
            limits,
            files: layers.files,
            unread_variables: unread_variables(),
            origins,
        })
    }

    /// Roles of users and groups.
    pub fn roles(&self) -> Roles {
        Roles {
            use_by: self.values.use_by.clone(),
            manage_by: self.values.manage_by.clone(),
            admin_by: self.values.admin_by.clone(),
        }
    }

    /// Path of the note for a warm restart: beside the file of `remember`, else in the first state
    /// directory of the service manager (`$STATE_DIRECTORY`).
    pub fn warm_note(&self, state_directories: Option<OsString>) -> Option<PathBuf> {
        if !self.values.restart_warm {
            return None;
        }
        if let Some(remember) = &self.values.remember {
            let mut beside = remember.clone().into_os_string();
            beside.push(".warm");
            return Some(PathBuf::from(beside));
        }
        let directories = state_directories?;
        let first = directories.as_bytes().split(|&byte| byte == b':').next()?;
        let first = Path::new(OsStr::from_bytes(first));
        first.is_absolute().then(|| first.join("warm.json"))
    }

    /// When idle device memory is given back, and whether host memory, too.
    pub fn idle_release(&self) -> IdleRelease {
        IdleRelease {
            after: self.values.idle_release,
            host: self.values.idle_release_host,
        }
    }

    /// The configuration of the engine, from the settings.
    pub fn engine(&self) -> EngineConfig {
        let values = &self.values;
        let ms = |ms: u32| Duration::from_millis(ms.into());
        EngineConfig {
            device: values.device,
            threads: values.threads,
            budget: values.vram_budget,
            policy: values.policy,
            cpu_compute: values.cpu_compute,
            host_budget: values.host_budget,
            host_kv: values.host_kv,
            kv_disk: values.kv_disk.clone().map(|directory| KvDiskConfig {
                directory,
                budget: values.kv_disk_budget,
                always: false,
                queue_bytes: None,
                write_bytes_per_s: None,
            }),
            idle_release: self.idle_release(),
            host_pressure: values.host_pressure.map(|percent| HostPressure {
                percent,
                ..HostPressure::default()
            }),
            direct_io: values.direct_io,
            share_weights: values.share_weights,
            prefix_cache: values.prefix_cache,
            kv_type: values.kv_type,
            speculate: values.speculate,
            keep_free: values.keep_free,
            yield_to: values.yield_to.map(YieldTo::new),
            max_sequences: values.max_sequences,
            queue_capacity: values.queue_capacity as usize,
            n_ctx_max: values.n_ctx_max,
            max_gaps: MaxGaps {
                interactive: values.max_gap_ms_interactive.map(ms),
                batch: values.max_gap_ms_batch.map(ms),
            },
            watchdog: values.watchdog,
            ..EngineConfig::default()
        }
    }

    /// The addresses to serve HTTP on, each with its entry of `http_listen`. Names are resolved,
    /// which may wait for a DNS server.
    ///
    /// # Errors
    /// [`NoAddress`] for a name without an address; [`ConfigError`] for an address that
    /// other machines reach if tokens or TLS are missing.
    pub fn http_addresses(&self) -> anyhow::Result<Vec<(SocketAddr, ListenAddress)>> {
        let mut all: Vec<(SocketAddr, ListenAddress)> = Vec::new();
        for entry in &self.values.http_listen {
            let found = entry.look_up().map_err(|source| NoAddress {
                entry: entry.clone(),
                source,
            })?;
            for address in found {
                if let Some(message) = self.http.refusal_of(entry, address) {
                    return Err(self.refuse("http_listen", message).into());
                }
                if !all.iter().any(|(there, _)| *there == address) {
                    all.push((address, entry.clone()));
                }
            }
        }
        Ok(all)
    }

    fn refuse(&self, key: &'static str, message: String) -> ConfigError {
        ConfigError::Value {
            key,
            origin: self.origins.get(key).cloned().unwrap_or(Origin::Flag),
            message,
        }
    }

    /// The error for a budget that the device cannot have.
    pub fn refuse_budget(&self, message: String) -> ConfigError {
        self.refuse("vram_budget", message)
    }
}

/// A host name in `http_listen` has no address.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot find the address of {entry} (http_listen); check the name, or give the address in numbers"
)]
pub struct NoAddress {
    entry: ListenAddress,
    #[source]
    source: io::Error,
}

/// Whether a setting can be given as an environment variable.
fn is_variable(entry: &Entry) -> bool {
    matches!(entry.shape, Shape::Text | Shape::Texts)
}

/// The value of a setting's environment variable; `None` if it is unset or empty.
fn environment(entry: &Entry) -> Option<Given> {
    let is_variable = is_variable(entry);
    let value: OsString = is_variable.then(|| std::env::var_os(variable(entry.key)))??;
    (!value.is_empty()).then(|| Given {
        texts: vec![value],
        origin: Some(Origin::Environment),
    })
}

/// Environment variables with the prefix of settings that are no setting. Those that Kubernetes
/// sets for a service named like the daemon are left out.
fn unread_variables() -> Vec<String> {
    let entries = settings::ENTRIES.iter();
    let entries = entries.filter(|entry| is_variable(entry));
    let known: BTreeSet<String> = entries.map(|entry| variable(entry.key)).collect();
    let is_unread = |name: &String| {
        let of_service = format!("{name}_");
        name.starts_with(ENVIRONMENT)
            && !known.contains(name)
            && !of_service.contains("_SERVICE_HOST_")
            && !of_service.contains("_PORT_")
    };
    let names = std::env::vars_os().map(|(name, _)| name.to_string_lossy().into_owned());
    let unread: BTreeSet<String> = names.filter(is_unread).collect();
    unread.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_note_for_a_restart_lies_beside_what_is_remembered_or_in_the_state_directory() {
        let note = |arguments: &[&str], state: Option<&str>| {
            let arguments = [&["rocmforged"], arguments].concat();
            let config = Config::new(Flags::parse_from(arguments), PathBuf::from("/run/s"));
            let note = config.unwrap().warm_note(state.map(OsString::from));
            note.map(|path| path.to_str().unwrap().to_owned())
        };
        let remember = ["--remember", "/r/models.json"];
        let beside = Some("/r/models.json.warm".to_owned());
        assert_eq!(note(&remember, None), beside);
        assert_eq!(note(&remember, Some("/s")), beside);
        assert_eq!(note(&[], Some("/s")).as_deref(), Some("/s/warm.json"));
        assert_eq!(note(&[], Some("/s:/t")).as_deref(), Some("/s/warm.json"));
        for nowhere in [None, Some(""), Some(":/t"), Some("relative")] {
            assert_eq!(note(&[], nowhere), None, "{nowhere:?}");
        }
        let off = ["--restart-warm", "off", "--remember", "/r/models.json"];
        assert_eq!(note(&off, Some("/s")), None);
    }
}
