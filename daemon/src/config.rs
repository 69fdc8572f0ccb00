//! What the daemon was told: command-line flags over the environment over TOML files over defaults,
//! every value checked.
//!
//! A setting has one name in two spellings: `--vram-budget` on the command line, `vram_budget` in
//! the file. Both are read as text and go through the same check, so that a value is refused with
//! the same message wherever it came from, and the message names the place.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use rocmforge_engine::api::{Budget, Offload, Policy};
use rocmforge_engine::{DeviceChoice, KvType, PrefixCache};
use rocmforge_service::roles::{Roles, Who};

use crate::traces::Collector;

mod effective;
mod error;
mod http;
mod layers;
mod limits;
mod models;
mod values;

pub use effective::Setting;
pub use error::ConfigError;
pub use http::{HttpConfig, HttpFlags};
use layers::{Layers, Scalar};
pub use limits::ConfiguredLimit;
pub use models::DeclaredModel;
pub use values::parse_budget;
use values::{
    budget_or_none, device, integer, integer_u32, kv_type, log_filter, offload, percent_or_off,
    policy, prefix_cache, seconds, speculate, watchdog,
};

/// What variables of the environment begin with that are settings: `ROCMFORGED_VRAM_BUDGET`.
pub const ENVIRONMENT: &str = "ROCMFORGED_";
/// Default of `--vram-budget`, in percent of the device's memory. On the host device the other half
/// is for the page cache, which holds the file pages that uploads read.
pub const BUDGET_DEFAULT_PERCENT: f64 = 50.0;
/// Most directories that `--model-dir` may name.
pub const MODEL_DIRS_MAX: usize = 64;
/// Largest `--threads`.
pub const THREADS_MAX: u64 = 1024;
/// Default of `--n-ctx-max`, in tokens.
pub const N_CTX_MAX_DEFAULT: u32 = 131_072;
/// Largest `--n-ctx-max`, in tokens.
pub const N_CTX_MAX_LIMIT: u32 = 16 << 20;
/// Default of `--max-sequences`.
pub const MAX_SEQUENCES_DEFAULT: NonZeroUsize = NonZeroUsize::new(64).expect("not zero");
/// Largest `--max-sequences`.
pub const MAX_SEQUENCES_LIMIT: u32 = 1024;
/// Default of `--queue-capacity`.
pub const QUEUE_CAPACITY_DEFAULT: usize = 320;
/// Largest `--queue-capacity`.
pub const QUEUE_CAPACITY_LIMIT: u32 = 4096;
/// Default of `--drain-grace`.
pub const DRAIN_GRACE_DEFAULT: Duration = Duration::from_secs(20);
/// Largest `--drain-grace`.
pub const DRAIN_GRACE_MAX: Duration = Duration::from_secs(3600);
/// Smallest `--watchdog`: a large model's pass over a long prompt takes about this long.
pub const WATCHDOG_MIN: Duration = Duration::from_millis(500);
/// Largest `--watchdog`.
pub const WATCHDOG_MAX: Duration = Duration::from_secs(3600);
/// Default of `--log`.
pub const LOG_DEFAULT: &str = "info";
/// Longest path of a Unix socket in bytes: `sun_path` with its closing zero.
pub const SOCKET_PATH_MAX: usize = 107;
/// Largest configuration file in bytes.
pub const CONFIG_FILE_MAX_BYTES: u64 = 1 << 20;

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
    /// Unix socket to serve [default: $ROCMFORGE_SOCKET, $XDG_RUNTIME_DIR/rocmforged.sock, else
    /// /run/rocmforged/rocmforged.sock]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Device to compute on: auto, host, hip, hip:N, cuda or cuda:N [default: auto]
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<String>,
    /// Most device memory to hold: bytes, 2GiB, 1.5G (binary units), 2GB
    /// (decimal) or 80%; of an APU in the machine's memory of what is free there [default: 50%]
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub vram_budget: Option<String>,
    /// Device memory to leave to others: where less is free the budget shrinks, and grows again
    /// later; bytes, 2GiB or 5%, 0 for none; a GPU's alone [default: 0]
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub keep_free: Option<String>,
    /// Directory below which clients may load models, after links are resolved; repeatable
    #[arg(long, value_name = "DIR")]
    pub model_dir: Vec<PathBuf>,
    /// Threads that compute on the host device [default: one a core]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub threads: Option<String>,
    /// Log filter: a level, or directives like info,rocmforge_engine=debug; management calls are
    /// logged at every level unless audit=off is among them [default: info]
    #[arg(long, value_name = "FILTER")]
    pub log: Option<String>,
    /// Longest context of a request in tokens [default: 131072]
    #[arg(long, value_name = "TOKENS", allow_negative_numbers = true)]
    pub n_ctx_max: Option<String>,
    /// Requests that run at once [default: 64]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub max_sequences: Option<String>,
    /// Requests that may wait to be admitted; one client leaves an eighth to others [default: 320]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub queue_capacity: Option<String>,
    /// Seconds that running requests may go on after SIGTERM [default: 20]
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true)]
    pub drain_grace: Option<String>,
    /// Eviction policy: pass-aware or lru [default: pass-aware]
    #[arg(long, value_name = "POLICY")]
    pub policy: Option<String>,
    /// Compute on the CPU what is not on the card: auto, where that is faster than bringing it,
    /// never or always [default: auto]
    #[arg(long, value_name = "WHEN")]
    pub offload: Option<String>,
    /// Memory of the machine for weights that the CPU computes with beside the card, and for KV
    /// pages that have no room on it, bytes or percent; 0 is none [default: 12.5%]
    #[arg(long, value_name = "BYTES|PERCENT", allow_negative_numbers = true)]
    pub host_budget: Option<String>,
    /// Keep KV pages that leave the card in the machine's memory: auto, where to bring them back is
    /// faster than to compute them again, never or always [default: auto]
    #[arg(long, value_name = "WHEN")]
    pub host_tier: Option<String>,
    /// While anything waits for memory of the machine during this share of the time, give some of
    /// it back and take it again later; percent, or off [default: 10]
    #[arg(long, value_name = "PERCENT|off", allow_negative_numbers = true)]
    pub host_pressure: Option<String>,
    /// Read model files with O_DIRECT; pages that are cached already are still used: auto, those
    /// that are larger than the memory available when they are loaded, never or always
    /// [default: auto]
    #[arg(long, value_name = "WHEN")]
    pub direct_io: Option<String>,
    /// Reuse the KV cache of prompts that begin alike: off, per-user or shared by all
    /// [default: per-user]
    #[arg(long, value_name = "WHOSE")]
    pub prefix_cache: Option<String>,
    /// What keys and values are stored as: f32; f16; q8_0, in about half of f16's memory; or auto,
    /// which is f16, but f32 for models of floats that do not scale their scores down (Gemma 4) or
    /// are mixtures of experts [default: auto]
    #[arg(long, value_name = "TYPE")]
    pub kv_type: Option<String>,
    /// Draft tokens, from what a text has said before or by a model's block that predicts one more,
    /// where that pays: on, off or auto, on the host alone [default: auto]
    #[arg(long, value_name = "WHETHER")]
    pub speculate: Option<String>,
    /// Seconds that work of a GPU may take before the GPU counts as hung and the
    /// daemon ends [default: 30]
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true)]
    pub watchdog: Option<String>,
    /// Users and @groups that may use models: NAME, @NAME or *; repeatable [default: *]
    #[arg(long, value_name = "WHO")]
    pub use_by: Vec<String>,
    /// Users and @groups that may load, unload, preload, pin, clear and test the card; they may
    /// use, too [default: as --use-by]
    #[arg(long, value_name = "WHO")]
    pub manage_by: Vec<String>,
    /// Users and @groups that may change budget and policy and have the settings read anew; they
    /// may do all else, too [default: as --manage-by]
    #[arg(long, value_name = "WHO")]
    pub admin_by: Vec<String>,
    /// Where HTTP is served, if anywhere.
    #[command(flatten)]
    pub http: HttpFlags,
    /// OpenTelemetry collector that takes traces of requests, such as http://127.0.0.1:4318 (OTLP
    /// over HTTP, without TLS) [default: none]
    #[arg(long, value_name = "URL")]
    pub otlp_endpoint: Option<String>,
    /// Check settings, model directories and declared models, print what would be in force and
    /// where each value came from, and end
    #[arg(long)]
    pub check_config: bool,
    /// List the GPU drivers and devices that are found, and end
    #[arg(long)]
    pub list_devices: bool,
    /// Test a card, such as hip:0, without a daemon, and end: with 1 where a step failed
    #[arg(long, value_name = "DEVICE")]
    pub check_device: Option<String>,
}

/// The settings in force.
#[derive(Debug, Clone)]
pub struct Config {
    /// Path of the Unix socket; unused under socket activation.
    pub socket: PathBuf,
    /// Device to compute on.
    pub device: DeviceChoice,
    /// Most device memory to hold.
    pub vram_budget: Budget,
    /// Where that was given; `None` for the default.
    pub vram_budget_origin: Option<Origin>,
    /// Device memory to leave to others; `None` is none.
    pub keep_free: Option<Budget>,
    /// Directories below which models may be loaded, as given.
    pub model_dirs: Vec<PathBuf>,
    /// Threads of the host device; `None` is one a core.
    pub threads: Option<NonZeroUsize>,
    /// Log filter, which parses.
    pub log: String,
    /// Longest context of a request in tokens.
    pub n_ctx_max: u32,
    /// Requests that run at once.
    pub max_sequences: NonZeroUsize,
    /// Requests that may wait.
    pub queue_capacity: usize,
    /// How long running requests may go on once the daemon is told to end.
    pub drain_grace: Duration,
    /// Eviction policy at start.
    pub policy: Policy,
    /// Whether what is not on the card may be computed on the CPU.
    pub offload: Offload,
    /// The machine's memory for weights that the CPU computes with, and KV pages beyond the card.
    pub host_budget: Option<Budget>,
    /// Whether KV pages that leave the card are kept in the machine's memory.
    pub host_tier: Offload,
    /// The share of time, in percent, of waits for memory at which it goes back; `None` is never.
    pub host_pressure: Option<f64>,
    /// Whether model files are read past the page cache.
    pub direct_io: Offload,
    /// Whose prompts may begin with what an earlier one has computed.
    pub prefix_cache: PrefixCache,
    /// What keys and values are stored as, where a model's heads fit it; `None` is by the model.
    pub kv_type: Option<KvType>,
    /// Whether tokens are drafted, as [`Flags::speculate`] says; `None` is on the host alone.
    pub speculate: Option<bool>,
    /// How long work of a GPU may take.
    pub watchdog: Duration,
    /// Who may do what.
    pub roles: Roles,
    /// `admin_by` makes everyone who may connect admin, by a word of its own.
    pub admin_for_all: bool,
    /// Where HTTP is served, if anywhere.
    pub http: HttpConfig,
    /// Where traces of requests go, if anywhere.
    pub traces: Option<Collector>,
    /// Declared models.
    pub models: Vec<DeclaredModel>,
    /// Limits per peer.
    pub limits: Vec<ConfiguredLimit>,
    /// Where values came from that are no defaults, by key.
    pub origins: BTreeMap<&'static str, Origin>,
    /// The files that were read, in that order.
    pub files: Vec<PathBuf>,
    /// Variables of the environment that look like settings and are none.
    pub unread_variables: Vec<String>,
}

/// Where a value came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// The command line.
    Flag,
    /// A variable of the environment: [`ENVIRONMENT`] and the key in capitals.
    Environment,
    /// The file.
    File(PathBuf),
}

/// The variable of the environment that has a setting of one value.
fn variable(key: &str) -> String {
    format!("{ENVIRONMENT}{}", key.to_uppercase())
}

impl Config {
    /// Reads the file that `flags` name, if any, and puts the flags over it. `default_socket` is
    /// served if neither names a socket.
    ///
    /// # Errors
    /// [`ConfigError`], which names the file, key and flag.
    pub fn new(flags: Flags, default_socket: PathBuf) -> Result<Self, ConfigError> {
        let layers = match &flags.config {
            Some(path) => Layers::read(path)?,
            None => Layers::default(),
        };
        let models = models::checked(layers.models)?;
        let limits = limits::checked(layers.limits)?;
        let (file, files) = (layers.file, layers.files);
        let settings = Settings {
            files: layers.origins,
            origins: RefCell::default(),
            variables: RefCell::default(),
        };
        let text = |scalar: Option<Scalar>| scalar.map(Scalar::into_text);

        let socket = match settings.path("socket", flags.socket, file.socket)? {
            Some(path) => path,
            None => default_socket,
        };
        let http_file = http::HttpFile {
            socket: file.http_socket,
            listen: file.http_listen,
            token_file: file.http_token_file,
            tls_cert: file.http_tls_cert,
            tls_key: file.http_tls_key,
        };
        let traces = settings
            .pick("otlp_endpoint", flags.otlp_endpoint, file.otlp_endpoint)
            .parse(Collector::parse)?;
        let http = HttpConfig::new(flags.http, http_file, &settings, &socket)?;
        let model_dirs = settings.model_dirs(flags.model_dir, file.model_dir.into_paths())?;
        let get = |key, flag, scalar| settings.pick(key, flag, scalar);
        let device = get("device", flags.device, file.device).parse(device)?;
        let vram_budget = get("vram_budget", flags.vram_budget, text(file.vram_budget));
        let vram_budget_origin = vram_budget.value.as_ref().map(|(_, origin)| origin.clone());
        let use_by = settings.who("use_by", flags.use_by, file.use_by)?;
        let use_by = use_by.unwrap_or_default();
        // A higher role is never open to more than the one below it.
        let manage_by = settings.who("manage_by", flags.manage_by, file.manage_by)?;
        let manage_by = manage_by.unwrap_or_else(|| use_by.clone());
        let admin_by = settings.who("admin_by", flags.admin_by, file.admin_by)?;
        let admin_for_all = admin_by == Some(Who::Everyone);
        let admin_by = admin_by.unwrap_or_else(|| manage_by.clone());
        Ok(Self {
            socket,
            device: device.unwrap_or(DeviceChoice::Auto),
            vram_budget: vram_budget
                .parse(parse_budget)?
                .unwrap_or(Budget::Percent(BUDGET_DEFAULT_PERCENT)),
            vram_budget_origin,
            keep_free: get("keep_free", flags.keep_free, text(file.keep_free))
                .parse(budget_or_none)?
                .flatten(),
            model_dirs,
            threads: get("threads", flags.threads, text(file.threads))
                .parse(|t| integer(t, 1, THREADS_MAX))?
                .and_then(|n| NonZeroUsize::new(n as usize)),
            log: get("log", flags.log, file.log)
                .parse(log_filter)?
                .unwrap_or_else(|| LOG_DEFAULT.to_owned()),
            n_ctx_max: get("n_ctx_max", flags.n_ctx_max, text(file.n_ctx_max))
                .parse(|t| integer_u32(t, N_CTX_MAX_LIMIT))?
                .unwrap_or(N_CTX_MAX_DEFAULT),
            max_sequences: get(
                "max_sequences",
                flags.max_sequences,
                text(file.max_sequences),
            )
            .parse(|t| integer_u32(t, MAX_SEQUENCES_LIMIT))?
            .and_then(|n| NonZeroUsize::new(n as usize))
            .unwrap_or(MAX_SEQUENCES_DEFAULT),
            queue_capacity: get(
                "queue_capacity",
                flags.queue_capacity,
                text(file.queue_capacity),
            )
            .parse(|t| integer_u32(t, QUEUE_CAPACITY_LIMIT))?
            .map_or(QUEUE_CAPACITY_DEFAULT, |n| n as usize),
            drain_grace: get("drain_grace", flags.drain_grace, text(file.drain_grace))
                .parse(seconds)?
                .unwrap_or(DRAIN_GRACE_DEFAULT),
            policy: get("policy", flags.policy, file.policy)
                .parse(policy)?
                .unwrap_or(Policy::PassAware),
            offload: get("offload", flags.offload, file.offload)
                .parse(offload)?
                .unwrap_or_default(),
            host_budget: get("host_budget", flags.host_budget, text(file.host_budget))
                .parse(budget_or_none)?
                .unwrap_or(Some(rocmforge_engine::HOST_BUDGET_DEFAULT)),
            host_tier: get("host_tier", flags.host_tier, file.host_tier)
                .parse(offload)?
                .unwrap_or_default(),
            host_pressure: get(
                "host_pressure",
                flags.host_pressure,
                text(file.host_pressure),
            )
            .parse(percent_or_off)?
            .unwrap_or(Some(rocmforge_engine::HOST_PRESSURE_DEFAULT_PERCENT)),
            direct_io: get("direct_io", flags.direct_io, file.direct_io)
                .parse(offload)?
                .unwrap_or_default(),
            prefix_cache: get("prefix_cache", flags.prefix_cache, file.prefix_cache)
                .parse(prefix_cache)?
                .unwrap_or(PrefixCache::PerClient),
            kv_type: get("kv_type", flags.kv_type, file.kv_type)
                .parse(kv_type)?
                .flatten(),
            speculate: get("speculate", flags.speculate, file.speculate)
                .parse(speculate)?
                .flatten(),
            watchdog: get("watchdog", flags.watchdog, text(file.watchdog))
                .parse(watchdog)?
                .unwrap_or(rocmforge_engine::WATCHDOG_DEFAULT),
            roles: Roles {
                use_by,
                manage_by,
                admin_by,
            },
            admin_for_all,
            http,
            traces,
            models,
            limits,
            files,
            // Behind the last of them.
            unread_variables: settings.unread_variables(),
            origins: settings.origins.into_inner(),
        })
    }

    /// The budget is one that the device cannot have.
    pub fn refuse_budget(&self, message: String) -> ConfigError {
        ConfigError::Value {
            key: "vram_budget",
            origin: self.vram_budget_origin.clone().unwrap_or(Origin::Flag),
            message,
        }
    }
}

/// Picks between flag and files, and knows for messages which file says what.
struct Settings {
    /// The file of each key.
    files: BTreeMap<String, PathBuf>,
    /// Where the values in force came from.
    origins: RefCell<BTreeMap<&'static str, Origin>>,
    /// The variables of the environment that were looked for.
    variables: RefCell<BTreeSet<String>>,
}

/// A setting's text, if it was given, and its place.
struct RawValue {
    key: &'static str,
    value: Option<(String, Origin)>,
}

impl RawValue {
    fn parse<T>(
        self,
        check: impl FnOnce(&str) -> Result<T, String>,
    ) -> Result<Option<T>, ConfigError> {
        let Some((text, origin)) = self.value else {
            return Ok(None);
        };
        check(text.trim())
            .map(Some)
            .map_err(|message| ConfigError::Value {
                key: self.key,
                origin,
                message,
            })
    }
}

impl Settings {
    /// Notes where a value came from.
    fn origin(&self, key: &'static str, by_flag: bool) -> Origin {
        let origin = match self.files.get(key) {
            Some(file) if !by_flag => Origin::File(file.clone()),
            _ => Origin::Flag,
        };
        self.origins.borrow_mut().insert(key, origin.clone());
        origin
    }

    /// A setting of one value: by its flag, else in the environment, else in the files.
    fn pick(&self, key: &'static str, flag: Option<String>, file: Option<String>) -> RawValue {
        let name = variable(key);
        // What is no UTF-8 is no value of any setting, and is refused as such.
        let value = std::env::var_os(&name).map(|text| text.to_string_lossy().into_owned());
        self.variables.borrow_mut().insert(name);
        let value = match (flag, file) {
            (Some(text), _) => Some((text, self.origin(key, true))),
            (None, file) => match value.filter(|text| !text.is_empty()) {
                Some(text) => {
                    let origin = Origin::Environment;
                    self.origins.borrow_mut().insert(key, origin.clone());
                    Some((text, origin))
                }
                None => file.map(|text| (text, self.origin(key, false))),
            },
        };
        RawValue { key, value }
    }

    /// The variables that begin as settings do and are none. Kubernetes has some like them, of a
    /// service that is called as the daemon is: those are left out.
    fn unread_variables(&self) -> Vec<String> {
        let known = self.variables.borrow();
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

    /// A path: as given on the command line, absolute in the file (which has no working directory).
    fn path(
        &self,
        key: &'static str,
        flag: Option<PathBuf>,
        file: Option<PathBuf>,
    ) -> Result<Option<PathBuf>, ConfigError> {
        let (path, origin) = match (flag, file) {
            (Some(path), _) => (path, self.origin(key, true)),
            (None, Some(path)) => (path, self.origin(key, false)),
            (None, None) => return Ok(None),
        };
        let refuse = |message| {
            Err(ConfigError::Value {
                key,
                origin: origin.clone(),
                message,
            })
        };
        let bytes = path.as_os_str().len();
        if bytes == 0 {
            return refuse("the path is empty".to_owned());
        }
        if key.ends_with("socket") && bytes > SOCKET_PATH_MAX {
            return refuse(format!(
                "{} has {bytes} bytes, but the path of a Unix socket has at most {SOCKET_PATH_MAX}; choose a shorter one",
                path.display()
            ));
        }
        if matches!(origin, Origin::File(_)) && !path.is_absolute() {
            return refuse(format!(
                "{} is relative; paths in the file are absolute",
                path.display()
            ));
        }
        Ok(Some(path))
    }

    /// Who has a role, where it is given.
    fn who(
        &self,
        key: &'static str,
        flags: Vec<String>,
        file: Option<Vec<String>>,
    ) -> Result<Option<Who>, ConfigError> {
        let (entries, origin) = match (flags, file) {
            (flags, _) if !flags.is_empty() => (flags, self.origin(key, true)),
            (_, Some(entries)) => (entries, self.origin(key, false)),
            (_, None) => return Ok(None),
        };
        Who::parse(&entries)
            .map(Some)
            .map_err(|message| ConfigError::Value {
                key,
                origin,
                message,
            })
    }

    fn model_dirs(
        &self,
        flags: Vec<PathBuf>,
        file: Vec<PathBuf>,
    ) -> Result<Vec<PathBuf>, ConfigError> {
        let from_flags = !flags.is_empty();
        let given = if from_flags { flags } else { file };
        if given.len() > MODEL_DIRS_MAX {
            let origin = self.origin("model_dir", from_flags);
            let message = format!(
                "{} directories are named; at most {MODEL_DIRS_MAX}",
                given.len()
            );
            return Err(ConfigError::Value {
                key: "model_dir",
                origin,
                message,
            });
        }
        let mut dirs = Vec::with_capacity(given.len());
        for dir in given {
            let (flag, file) = match from_flags {
                true => (Some(dir), None),
                false => (None, Some(dir)),
            };
            dirs.extend(self.path("model_dir", flag, file)?);
        }
        Ok(dirs)
    }
}
