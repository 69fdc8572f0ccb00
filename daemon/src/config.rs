//! What the daemon was told: command-line flags over a TOML file over defaults, every value checked.
//!
//! A setting has one name in two spellings: `--vram-budget` on the command line, `vram_budget` in the file. Both are read
//! as text and go through the same check, so that a value is refused with the same message wherever it came from, and
//! the message names the place.

use std::fmt;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Parser;
use rocmforge_engine::DeviceChoice;
use rocmforge_engine::api::{Budget, Policy};
use serde::Deserialize;
use tracing_subscriber::EnvFilter;

/// Default of `--vram-budget`, in percent of the device's memory. On the host device the other half is for the page
/// cache, which holds the file pages that uploads read.
pub const BUDGET_DEFAULT_PERCENT: f64 = 50.0;
/// Largest `--vram-budget` in bytes (one PiB): above it a typing error is more likely than the memory.
pub const BUDGET_MAX_BYTES: u64 = 1 << 50;
/// Most directories that `--model-dir` may name.
pub const MODEL_DIRS_MAX: usize = 64;
/// Largest `--threads`.
pub const THREADS_MAX: u64 = 1024;
/// Default of `--n-ctx-max`, in tokens.
pub const N_CTX_MAX_DEFAULT: u32 = 131_072;
/// Largest `--n-ctx-max`, in tokens.
pub const N_CTX_MAX_LIMIT: u32 = 16 << 20;
/// Default of `--max-sequences`.
pub const MAX_SEQUENCES_DEFAULT: NonZeroUsize = NonZeroUsize::new(16).expect("not zero");
/// Largest `--max-sequences`.
pub const MAX_SEQUENCES_LIMIT: u32 = 1024;
/// Default of `--queue-capacity`.
pub const QUEUE_CAPACITY_DEFAULT: usize = 256;
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
#[derive(Debug, Default, Parser)]
#[command(
    name = "rocmforged",
    version,
    about = "Owns the device and serves GGUF models to local clients over a Unix socket.",
    after_help = "Every flag but --config and --list-devices is also a key of the file, with _ for -; a flag wins over the file.\n\
                  With no --model-dir every load is refused: the daemon opens nothing that it was not told to."
)]
pub struct Flags {
    /// TOML file with the same settings
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Unix socket to serve [default: $ROCMFORGE_SOCKET, $XDG_RUNTIME_DIR/rocmforged.sock, else
    /// /run/rocmforged/rocmforged.sock]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Device to compute on: auto, host, hip[:N] or cuda[:N] [default: auto]
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<String>,
    /// Most device memory to hold: bytes, 2GiB, 1.5G (binary units), 2GB (decimal) or 80% [default: 50%]
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub vram_budget: Option<String>,
    /// Directory below which clients may load models, after links are resolved; repeatable
    #[arg(long, value_name = "DIR")]
    pub model_dir: Vec<PathBuf>,
    /// Threads that compute on the host device [default: one a core]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub threads: Option<String>,
    /// Log filter: a level, or directives like info,rocmforge_engine=debug [default: info]
    #[arg(long, value_name = "FILTER")]
    pub log: Option<String>,
    /// Longest context of a request in tokens [default: 131072]
    #[arg(long, value_name = "TOKENS", allow_negative_numbers = true)]
    pub n_ctx_max: Option<String>,
    /// Requests that run at once [default: 16]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub max_sequences: Option<String>,
    /// Requests that may wait to be admitted [default: 256]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub queue_capacity: Option<String>,
    /// Seconds that running requests may go on after SIGTERM [default: 20]
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true)]
    pub drain_grace: Option<String>,
    /// Eviction policy: pass-aware or lru [default: pass-aware]
    #[arg(long, value_name = "POLICY")]
    pub policy: Option<String>,
    /// Seconds that work of a GPU may take before the GPU counts as hung and the daemon ends [default: 30]
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true)]
    pub watchdog: Option<String>,
    /// List the GPU drivers and devices that are found, and end
    #[arg(long)]
    pub list_devices: bool,
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
    /// How long work of a GPU may take.
    pub watchdog: Duration,
}

/// Where a value came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// The command line.
    Flag,
    /// The file.
    File(PathBuf),
}

/// Why the settings cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration file {} (--config)", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is larger than a configuration is.
    #[error("the configuration file {} (--config) has {bytes} bytes; at most {CONFIG_FILE_MAX_BYTES} are read", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
    },
    /// The file is not TOML, or has an unknown key, or a value of a wrong type.
    #[error("the configuration file {} (--config) is not valid", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Line, column and cause.
        source: Box<toml::de::Error>,
    },
    /// A value is refused.
    #[error("{}: {message}", Place { key, origin })]
    Value {
        /// The setting's key in the file.
        key: &'static str,
        /// Where the value came from.
        origin: Origin,
        /// What is wrong, and what is allowed.
        message: String,
    },
}

struct Place<'a> {
    key: &'a &'static str,
    origin: &'a Origin,
}

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let flag = self.key.replace('_', "-");
        match self.origin {
            Origin::Flag => write!(f, "--{flag}"),
            Origin::File(path) => write!(f, "{} in {} (flag --{flag})", self.key, path.display()),
        }
    }
}

/// A scalar of the file, turned into the text that a flag would have.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string or a number")]
enum Scalar {
    Integer(i64),
    Float(f64),
    Text(String),
}

impl Scalar {
    fn into_text(self) -> String {
        match self {
            Self::Integer(n) => n.to_string(),
            Self::Float(x) => x.to_string(),
            Self::Text(text) => text,
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct File {
    socket: Option<PathBuf>,
    device: Option<String>,
    vram_budget: Option<Scalar>,
    model_dir: Vec<PathBuf>,
    threads: Option<Scalar>,
    log: Option<String>,
    n_ctx_max: Option<Scalar>,
    max_sequences: Option<Scalar>,
    queue_capacity: Option<Scalar>,
    drain_grace: Option<Scalar>,
    policy: Option<String>,
    watchdog: Option<Scalar>,
}

impl Config {
    /// Reads the file that `flags` name, if any, and puts the flags over it. `default_socket` is served if neither names
    /// a socket.
    ///
    /// # Errors
    /// [`ConfigError`], which names the file, key and flag.
    pub fn new(flags: Flags, default_socket: PathBuf) -> Result<Self, ConfigError> {
        let (file, file_path) = match &flags.config {
            Some(path) => (read_file(path)?, path.clone()),
            None => (File::default(), PathBuf::new()),
        };
        let settings = Settings { file: file_path };
        let text = |scalar: Option<Scalar>| scalar.map(Scalar::into_text);

        let socket = match settings.path("socket", flags.socket, file.socket)? {
            Some(path) => path,
            None => default_socket,
        };
        let model_dirs = settings.model_dirs(flags.model_dir, file.model_dir)?;
        let get = |key, flag, scalar| settings.pick(key, flag, scalar);
        Ok(Self {
            socket,
            device: get("device", flags.device, file.device)
                .parse(device)?
                .unwrap_or(DeviceChoice::Auto),
            vram_budget: get("vram_budget", flags.vram_budget, text(file.vram_budget))
                .parse(parse_budget)?
                .unwrap_or(Budget::Percent(BUDGET_DEFAULT_PERCENT)),
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
                .unwrap_or(Policy::Belady),
            watchdog: get("watchdog", flags.watchdog, text(file.watchdog))
                .parse(watchdog)?
                .unwrap_or(rocmforge_engine::WATCHDOG_DEFAULT),
        })
    }
}

fn read_file(path: &Path) -> Result<File, ConfigError> {
    let read = |source| ConfigError::Read {
        path: path.to_owned(),
        source,
    };
    let bytes = std::fs::metadata(path).map_err(read)?.len();
    if bytes > CONFIG_FILE_MAX_BYTES {
        return Err(ConfigError::TooLarge {
            path: path.to_owned(),
            bytes,
        });
    }
    let text = std::fs::read_to_string(path).map_err(read)?;
    toml::from_str(&text).map_err(|source| ConfigError::Syntax {
        path: path.to_owned(),
        source: Box::new(source),
    })
}

/// Picks between flag and file, and knows the file's name for messages.
struct Settings {
    file: PathBuf,
}

/// A setting's text, if it was given, and its place.
struct Given {
    key: &'static str,
    value: Option<(String, Origin)>,
}

impl Given {
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
    fn pick(&self, key: &'static str, flag: Option<String>, file: Option<String>) -> Given {
        let value = match (flag, file) {
            (Some(text), _) => Some((text, Origin::Flag)),
            (None, Some(text)) => Some((text, Origin::File(self.file.clone()))),
            (None, None) => None,
        };
        Given { key, value }
    }

    /// A path: as given on the command line, absolute in the file (which has no working directory).
    fn path(
        &self,
        key: &'static str,
        flag: Option<PathBuf>,
        file: Option<PathBuf>,
    ) -> Result<Option<PathBuf>, ConfigError> {
        let (path, origin) = match (flag, file) {
            (Some(path), _) => (path, Origin::Flag),
            (None, Some(path)) => (path, Origin::File(self.file.clone())),
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
        if key == "socket" && bytes > SOCKET_PATH_MAX {
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

    fn model_dirs(
        &self,
        flags: Vec<PathBuf>,
        file: Vec<PathBuf>,
    ) -> Result<Vec<PathBuf>, ConfigError> {
        let from_flags = !flags.is_empty();
        let given = if from_flags { flags } else { file };
        if given.len() > MODEL_DIRS_MAX {
            let origin = if from_flags {
                Origin::Flag
            } else {
                Origin::File(self.file.clone())
            };
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
            let (flag, file) = if from_flags {
                (Some(dir), None)
            } else {
                (None, Some(dir))
            };
            dirs.extend(self.path("model_dir", flag, file)?);
        }
        Ok(dirs)
    }
}

fn device(text: &str) -> Result<DeviceChoice, String> {
    match text {
        "auto" => Ok(DeviceChoice::Auto),
        "host" => Ok(DeviceChoice::Host),
        _ => gpu(text).ok_or_else(|| {
            format!("'{text}' is no device: auto, host, hip, hip:N, cuda or cuda:N")
        }),
    }
}

/// `hip`, `cuda`, each with or without `:N`.
fn gpu(text: &str) -> Option<DeviceChoice> {
    let (kind, ordinal) = match text.split_once(':') {
        Some((kind, ordinal)) => (kind, ordinal.parse().ok()?),
        None => (text, 0),
    };
    match kind {
        "hip" => Some(DeviceChoice::Hip(ordinal)),
        "cuda" => Some(DeviceChoice::Cuda(ordinal)),
        _ => None,
    }
}

fn policy(text: &str) -> Result<Policy, String> {
    match text {
        "pass-aware" => Ok(Policy::Belady),
        "lru" => Ok(Policy::Lru),
        _ => Err(format!("'{text}' is no policy: pass-aware or lru")),
    }
}

fn log_filter(text: &str) -> Result<String, String> {
    match EnvFilter::try_new(text) {
        Ok(_) => Ok(text.to_owned()),
        Err(error) => Err(format!(
            "'{text}' is no log filter ({error}): a level (error, warn, info, debug, trace) or directives such as \
             info,rocmforge_engine=debug"
        )),
    }
}

fn integer(text: &str, min: u64, max: u64) -> Result<u64, String> {
    match text.parse::<u64>() {
        Ok(n) if (min..=max).contains(&n) => Ok(n),
        _ => Err(format!(
            "'{text}' is not a whole number from {min} to {max}"
        )),
    }
}

fn integer_u32(text: &str, max: u32) -> Result<u32, String> {
    integer(text, 1, u64::from(max)).map(|n| n as u32)
}

/// Reads the watchdog's patience.
fn watchdog(text: &str) -> Result<Duration, String> {
    let range = WATCHDOG_MIN.as_secs_f64()..=WATCHDOG_MAX.as_secs_f64();
    match text.parse::<f64>() {
        Ok(s) if range.contains(&s) => Ok(Duration::from_secs_f64(s)),
        _ => Err(format!(
            "'{text}' is not a number of seconds from {} to {}",
            range.start(),
            range.end()
        )),
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let max = DRAIN_GRACE_MAX.as_secs();
    match text.parse::<f64>() {
        Ok(s) if s.is_finite() && (0.0..=DRAIN_GRACE_MAX.as_secs_f64()).contains(&s) => {
            Ok(Duration::from_secs_f64(s))
        }
        _ => Err(format!(
            "'{text}' is not a number of seconds from 0 to {max}"
        )),
    }
}

/// Reads a budget: `2147483648`, `2GiB`, `1.5G` (binary), `2GB` (decimal) or `80%`.
///
/// # Errors
/// A message that says what is allowed.
pub fn parse_budget(text: &str) -> Result<Budget, String> {
    let wrong = || {
        format!(
            "'{text}' is no budget: bytes (2147483648), a size (512MiB, 2GiB, 1.5G; KB, MB and GB are decimal), or a \
             share of the device's memory above 0% and at most 100% (80%)"
        )
    };
    if let Some(share) = text.strip_suffix('%') {
        let percent: f64 = share.trim().parse().map_err(|_| wrong())?;
        // Also false for NaN.
        return if percent > 0.0 && percent <= 100.0 {
            Ok(Budget::Percent(percent))
        } else {
            Err(wrong())
        };
    }
    let digits = text
        .find(|c: char| !(c.is_ascii_digit() || c == '.'))
        .unwrap_or(text.len());
    let (number, unit) = (&text[..digits], text[digits..].trim());
    let factor: u64 = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return Err(wrong()),
    };
    let bytes = match number.parse::<u64>() {
        Ok(n) => n.checked_mul(factor),
        // A fraction of a byte is a typing error; 53 bits are exact far above the largest budget.
        Err(_) if factor > 1 => number
            .parse::<f64>()
            .ok()
            .map(|x| (x * factor as f64) as u64),
        Err(_) => None,
    };
    match bytes {
        Some(bytes) if (1..=BUDGET_MAX_BYTES).contains(&bytes) => Ok(Budget::Bytes(bytes)),
        Some(0) => Err(wrong()),
        Some(bytes) => Err(format!(
            "'{text}' is {bytes} bytes; a budget has at most {BUDGET_MAX_BYTES}"
        )),
        None => Err(wrong()),
    }
}
