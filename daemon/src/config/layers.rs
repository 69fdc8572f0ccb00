//! The configuration file and what lies in `conf.d` beside it, as one.
//!
//! Files of `conf.d` whose names end in `.toml` are read in the order of their names. Of a key that
//! several have the last one wins, whole; declared models and limits are collected, and of models
//! with one name in several files the last one wins.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;
use nix::unistd::geteuid;
use serde::Deserialize;

use super::limits::LimitTable;
use super::models::ModelTable;
use super::{CONFIG_FILE_MAX_BYTES, ConfigError};

/// Tables that every file adds to.
const COLLECTED: [&str; 2] = ["model", "limit"];
/// The directory beside the configuration file.
const DROP_INS: &str = "conf.d";
/// Most files in it.
pub(super) const DROP_INS_MAX: usize = 64;

/// A scalar of the file, turned into the text that a flag would have.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string or a number")]
pub(super) enum Scalar {
    Integer(i64),
    Float(f64),
    Text(String),
}

impl Scalar {
    pub(super) fn into_text(self) -> String {
        match self {
            Self::Integer(n) => n.to_string(),
            Self::Float(x) => x.to_string(),
            Self::Text(text) => text,
        }
    }
}

/// One path, or a list of them.
#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a path, or a list of paths such as [\"/a\", \"/b\"]"
)]
pub(super) enum PathList {
    One(PathBuf),
    Many(Vec<PathBuf>),
}

impl Default for PathList {
    fn default() -> Self {
        Self::Many(Vec::new())
    }
}

impl PathList {
    pub(super) fn into_paths(self) -> Vec<PathBuf> {
        match self {
            Self::One(path) => vec![path],
            Self::Many(paths) => paths,
        }
    }
}

/// The keys that there are.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct File {
    pub(super) socket: Option<PathBuf>,
    pub(super) device: Option<String>,
    pub(super) vram_budget: Option<Scalar>,
    pub(super) keep_free: Option<Scalar>,
    pub(super) model_dir: PathList,
    pub(super) threads: Option<Scalar>,
    pub(super) log: Option<String>,
    pub(super) n_ctx_max: Option<Scalar>,
    pub(super) max_sequences: Option<Scalar>,
    pub(super) queue_capacity: Option<Scalar>,
    pub(super) drain_grace: Option<Scalar>,
    pub(super) policy: Option<String>,
    pub(super) offload: Option<String>,
    pub(super) host_budget: Option<Scalar>,
    pub(super) host_tier: Option<String>,
    pub(super) host_pressure: Option<Scalar>,
    pub(super) direct_io: Option<String>,
    pub(super) prefix_cache: Option<String>,
    pub(super) kv_type: Option<String>,
    pub(super) speculate: Option<String>,
    pub(super) watchdog: Option<Scalar>,
    pub(super) use_by: Option<Vec<String>>,
    pub(super) manage_by: Option<Vec<String>>,
    pub(super) admin_by: Option<Vec<String>>,
    pub(super) http_socket: Option<PathBuf>,
    pub(super) http_listen: Option<String>,
    pub(super) http_token_file: Option<PathBuf>,
    pub(super) http_tls_cert: Option<PathBuf>,
    pub(super) http_tls_key: Option<PathBuf>,
    pub(super) otlp_endpoint: Option<String>,
    pub(super) model: Vec<ModelTable>,
    pub(super) limit: Vec<LimitTable>,
}

/// What all files together say.
#[derive(Debug, Default)]
pub(super) struct Layers {
    /// The keys; its models are in `models`.
    pub(super) file: File,
    /// Which file each key is from.
    pub(super) origins: BTreeMap<String, PathBuf>,
    /// Declared models, each with its file and its number there.
    pub(super) models: Vec<(PathBuf, usize, ModelTable)>,
    /// Limits, likewise.
    pub(super) limits: Vec<(PathBuf, usize, LimitTable)>,
    /// The files, in the order of reading.
    pub(super) files: Vec<PathBuf>,
}

impl Layers {
    /// Reads `path` and what lies beside it.
    pub(super) fn read(path: &Path) -> Result<Self, ConfigError> {
        let mut layers = Self::default();
        let mut merged = toml::Table::new();
        layers.add(path, &mut merged)?;
        for drop_in in drop_ins(path)? {
            layers.add(&drop_in, &mut merged)?;
        }
        layers.file = File::deserialize(merged).map_err(|source| syntax(path, source))?;
        Ok(layers)
    }

    fn add(&mut self, path: &Path, merged: &mut toml::Table) -> Result<(), ConfigError> {
        let text = read_text(path)?;
        // For itself first: an error names its line.
        let alone: File = toml::from_str(&text).map_err(|source| syntax(path, source))?;
        let models = alone.model.into_iter().enumerate();
        self.models
            .extend(models.map(|(i, model)| (path.to_owned(), i + 1, model)));
        let limits = alone.limit.into_iter().enumerate();
        self.limits
            .extend(limits.map(|(i, limit)| (path.to_owned(), i + 1, limit)));
        let table: toml::Table = toml::from_str(&text).map_err(|source| syntax(path, source))?;
        for (key, value) in table
            .into_iter()
            .filter(|(key, _)| !COLLECTED.contains(&key.as_str()))
        {
            self.origins.insert(key.clone(), path.to_owned());
            merged.insert(key, value);
        }
        self.files.push(path.to_owned());
        Ok(())
    }
}

fn syntax(path: &Path, source: toml::de::Error) -> ConfigError {
    ConfigError::Syntax {
        path: path.to_owned(),
        source: Box::new(source),
    }
}

/// The files of the directory beside `path`, in order; none where there is no directory.
fn drop_ins(path: &Path) -> Result<Vec<PathBuf>, ConfigError> {
    let dir = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.join(DROP_INS),
        _ => PathBuf::from(DROP_INS),
    };
    let unreadable = |source| ConfigError::Read {
        path: dir.clone(),
        source,
    };
    let entries = match fs::read_dir(&dir) {
        Ok(entries) => entries,
        Err(error) => {
            return match error.kind() {
                std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory => Ok(Vec::new()),
                _ => Err(unreadable(error)),
            };
        }
    };
    // In /tmp, say, somebody else could put one beside a file that is ours.
    let owner = fs::metadata(&dir).map_err(unreadable)?.uid();
    let file_owner = fs::metadata(path).map(|m| m.uid()).ok();
    if owner != 0 && owner != geteuid().as_raw() && Some(owner) != file_owner {
        return Err(ConfigError::ForeignDropIns { dir, owner });
    }
    let mut files = Vec::new();
    for entry in entries {
        let path = entry.map_err(unreadable)?.path();
        let is_hidden = path
            .file_name()
            .is_none_or(|name| name.as_encoded_bytes().starts_with(b"."));
        if path.extension().is_some_and(|e| e == "toml") && !is_hidden {
            files.push(path);
        }
        if files.len() > DROP_INS_MAX {
            return Err(ConfigError::TooManyDropIns { dir });
        }
    }
    files.sort();
    Ok(files)
}

fn read_text(path: &Path) -> Result<String, ConfigError> {
    let read = |source| ConfigError::Read {
        path: path.to_owned(),
        source,
    };
    // A FIFO would be waited for, a device has no end.
    let file = fs::OpenOptions::new()
        .read(true)
        .custom_flags(OFlag::O_NONBLOCK.bits())
        .open(path)
        .map_err(read)?;
    if !file.metadata().map_err(read)?.is_file() {
        return Err(ConfigError::NotAFile {
            path: path.to_owned(),
        });
    }
    let mut text = String::new();
    file.take(CONFIG_FILE_MAX_BYTES + 1)
        .read_to_string(&mut text)
        .map_err(read)?;
    if text.len() as u64 > CONFIG_FILE_MAX_BYTES {
        return Err(ConfigError::TooLarge {
            path: path.to_owned(),
        });
    }
    Ok(text)
}
