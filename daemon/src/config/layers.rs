//! The configuration file and what lies in `conf.d` beside it, as one.
//!
//! Files of `conf.d` whose names end in `.toml` are read in the order of their names. Of a key that
//! several have the last one wins, whole; declared models and limits are collected, and of models
//! with one name in several files the last one wins.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;
use nix::unistd::geteuid;
use serde::Deserialize;
use serde::de::{self, DeserializeSeed, Deserializer, MapAccess, Visitor};
use toml::Spanned;

use super::bounds::{CONFIG_FILE_MAX_BYTES, DROP_INS_MAX};
use super::error::ConfigError;
use super::given::{Given, Shape};
use super::limits::LimitTable;
use super::models::ModelTable;
use super::origin::Origin;
use super::table::{self, Entry};

/// Tables that every file adds to.
const MODEL: &str = "model";
const LIMIT: &str = "limit";
/// The directory beside the configuration file.
const DROP_INS: &str = "conf.d";
/// How alike an unknown key and a setting are, from 0 to 1, if it may have been meant.
const ALIKE_MIN: f64 = 0.7;

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

/// One path, or a list of them.
#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a path, or a list of paths such as [\"/a\", \"/b\"]"
)]
enum PathList {
    One(String),
    Many(Vec<String>),
}

impl PathList {
    fn into_texts(self) -> Vec<String> {
        match self {
            Self::One(path) => vec![path],
            Self::Many(paths) => paths,
        }
    }
}

/// One text, or a list of them.
#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a text, or a list of texts such as [\"a\", \"b\"]"
)]
enum TextList {
    One(String),
    Many(Vec<String>),
}

impl TextList {
    fn into_texts(self) -> Vec<String> {
        match self {
            Self::One(text) => vec![text],
            Self::Many(texts) => texts,
        }
    }
}

/// What one file says.
#[derive(Debug, Default)]
struct File {
    /// The texts of each setting, and where its value begins in bytes.
    settings: Vec<(&'static Entry, Vec<String>, usize)>,
    models: Vec<ModelTable>,
    limits: Vec<LimitTable>,
}

impl<'de> Deserialize<'de> for File {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(FileVisitor)
    }
}

struct FileVisitor;

impl<'de> Visitor<'de> for FileVisitor {
    type Value = File;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a table of settings")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<File, A::Error> {
        let mut file = File::default();
        while let Some(key) = map.next_key_seed(KeySeed)? {
            match key {
                Key::Setting(entry) => {
                    let value = map.next_value_seed(ValueSeed(entry.shape))?;
                    let begin = value.span().start;
                    file.settings.push((entry, value.into_inner(), begin));
                }
                Key::Models => file.models = map.next_value()?,
                Key::Limits => file.limits = map.next_value()?,
            }
        }
        Ok(file)
    }
}

/// A key that a file may have.
enum Key {
    Setting(&'static Entry),
    Models,
    Limits,
}

/// Takes known keys alone, so that the parser shows the line of another one.
struct KeySeed;

impl<'de> DeserializeSeed<'de> for KeySeed {
    type Value = Key;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Key, D::Error> {
        let key = String::deserialize(deserializer)?;
        match (&*key, table::find(&key)) {
            (_, Some(entry)) => Ok(Key::Setting(entry)),
            (MODEL, None) => Ok(Key::Models),
            (LIMIT, None) => Ok(Key::Limits),
            (_, None) => Err(de::Error::custom(unknown(&key))),
        }
    }
}

/// Error text for a key that is no setting.
fn unknown(key: &str) -> String {
    if let Some(new) = table::renamed(key) {
        return format!("unknown field `{key}`: the setting is called `{new}`");
    }
    let known = table::keys().chain([MODEL, LIMIT]);
    let alike = known.map(|known| (strsim::jaro(key, known), known));
    match alike.max_by(|a, b| a.0.total_cmp(&b.0)) {
        Some((alike, known)) if alike >= ALIKE_MIN => {
            format!("unknown field `{key}`; did you mean `{known}`?")
        }
        _ => format!("unknown field `{key}`; `rocmforged --help` lists the settings"),
    }
}

/// Reads a value as its setting has it.
struct ValueSeed(Shape);

impl<'de> DeserializeSeed<'de> for ValueSeed {
    type Value = Spanned<Vec<String>>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        fn spanned<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
            deserializer: D,
            texts: impl FnOnce(T) -> Vec<String>,
        ) -> Result<Spanned<Vec<String>>, D::Error> {
            let value = Spanned::<T>::deserialize(deserializer)?;
            let span = value.span();
            Ok(Spanned::new(span, texts(value.into_inner())))
        }
        match self.0 {
            Shape::Text => spanned(deserializer, |scalar: Scalar| vec![scalar.into_text()]),
            Shape::Path => spanned(deserializer, |path: String| vec![path]),
            Shape::Paths => spanned(deserializer, PathList::into_texts),
            Shape::Names => spanned(deserializer, |names: Vec<String>| names),
            Shape::Texts => spanned(deserializer, TextList::into_texts),
        }
    }
}

/// The settings of all configuration files together.
#[derive(Debug, Default)]
pub(super) struct Layers {
    /// Given values of settings, by key.
    pub(super) settings: BTreeMap<&'static str, Given>,
    /// Declared models, each with its file and its number there.
    pub(super) models: Vec<(PathBuf, usize, ModelTable)>,
    /// Limits per peer, each with its file and its number there.
    pub(super) limits: Vec<(PathBuf, usize, LimitTable)>,
    /// The files, in the order of reading.
    pub(super) files: Vec<PathBuf>,
}

impl Layers {
    /// Reads `path` and what lies beside it.
    pub(super) fn read(path: &Path) -> Result<Self, ConfigError> {
        let mut layers = Self::default();
        layers.add(path)?;
        for drop_in in drop_ins(path)? {
            layers.add(&drop_in)?;
        }
        Ok(layers)
    }

    fn add(&mut self, path: &Path) -> Result<(), ConfigError> {
        let text = read_text(path)?;
        let file: File = toml::from_str(&text).map_err(|source| ConfigError::Syntax {
            path: path.to_owned(),
            source: Box::new(source),
        })?;
        let models = file.models.into_iter().enumerate();
        self.models
            .extend(models.map(|(i, model)| (path.to_owned(), i + 1, model)));
        let limits = file.limits.into_iter().enumerate();
        self.limits
            .extend(limits.map(|(i, limit)| (path.to_owned(), i + 1, limit)));
        for (entry, texts, begin) in file.settings {
            let above = text.as_bytes().iter().take(begin);
            let origin = Origin::File {
                path: path.to_owned(),
                line: above.filter(|&&byte| byte == b'\n').count() + 1,
            };
            let given = Given {
                texts: texts.into_iter().map(OsString::from).collect(),
                origin: Some(origin),
            };
            self.settings.insert(entry.key, given);
        }
        self.files.push(path.to_owned());
        Ok(())
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
