//! Downloads of models: from a repository of a hub that speaks Hugging Face's API, from a registry
//! that speaks Ollama's, or from a URL, into a model directory.
//!
//! ```text
//! name (source) -> files of the hub (catalogue, choose) -> room, places (store)
//!   -> each file: ranges over several connections, resumed, checked (transfer, spans, web)
//!   -> a new name in the model directory, which the daemon's listing finds
//! ```
//!
//! Beside it files that requests name by a URL, from hosts that are allowed (fetch).
//!
//! Nothing else of the project speaks to the network on its own.
//!
//! *Invariants:* a file has its name once all of it is there and its checksum is right; nothing is
//! written outside of the model directory; the token goes to the hub's own address alone.

#![forbid(unsafe_code)]

mod catalogue;
mod checksum;
mod choose;
mod error;
mod fetch;
mod redirect;
mod source;
mod spans;
mod store;
mod transfer;
mod web;

#[cfg(test)]
#[path = "../tests/fake/mod.rs"]
mod fake_hub;
#[cfg(test)]
mod faults_tests;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

pub use hyper::Uri;
use serde::Serialize;

use crate::catalogue::Wanted;
pub use crate::choose::{Group, RemoteFile, Use};
pub use crate::error::Error;
pub use crate::fetch::{FETCH_THREADS, FetchBounds, FetchError, Fetcher, Hosts};
pub use crate::source::Source;
use crate::source::without_query;
pub use crate::store::{Removed, Room, copy, remove, room};
use crate::transfer::{Division, Item, Told};
pub use crate::web::Patience;
use crate::web::Web;

/// The hub that names without an address mean.
pub const HUB_URL: &str = "https://huggingface.co";
/// The registry that Ollama's names mean.
pub const REGISTRY_URL: &str = "https://registry.ollama.ai";
/// Maximum number of connections for one file.
pub const CONNECTIONS_MAX: usize = 16;

/// Settings of downloads: hub, registry, tokens, connections and time limits.
#[derive(Debug, Clone)]
pub struct Config {
    /// A hub that speaks Hugging Face's API.
    pub hub: Uri,
    /// A registry that speaks Ollama's protocol.
    pub registry: Uri,
    /// What the hub is shown.
    pub token: Option<Token>,
    /// Connections for one file.
    pub connections: usize,
    /// Bytes of a range.
    pub piece_bytes: u64,
    /// Bytes of the disk that stay free.
    pub spare_bytes: u64,
    /// Time limits of requests and pauses between tries.
    pub patience: Patience,
}

impl Config {
    /// The usual hubs, without a token.
    pub fn new() -> Self {
        Config {
            hub: Uri::from_static(HUB_URL),
            registry: Uri::from_static(REGISTRY_URL),
            token: None,
            connections: 4,
            piece_bytes: 32 << 20,
            spare_bytes: 256 << 20,
            patience: Patience::default(),
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Config::new()
    }
}

/// Reads the address of a hub: `https://HOST[:PORT][/PATH]`, or `http://` for a hub of one's own.
///
/// # Errors
/// What is wrong with it.
pub fn address(text: &str) -> Result<Uri, String> {
    let refuse =
        || format!("{text:?} is no address of a hub; give https://HOST, or http://HOST:PORT");
    let url: Uri = text.trim_end_matches('/').parse().map_err(|_| refuse())?;
    let is_web = matches!(url.scheme_str(), Some("http" | "https"));
    let host = url.authority().map_or("", |authority| authority.as_str());
    match is_web && !host.is_empty() && !host.contains('@') && url.query().is_none() {
        true => Ok(url),
        false => Err(refuse()),
    }
}

/// A secret that a hub is shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a token")
    }
}

/// Reads a token: printable ASCII without spaces.
///
/// # Errors
/// What is wrong with it, without the token.
pub fn token(text: &str) -> Result<Token, String> {
    const TOKEN_MAX: usize = 4096;
    let token = text.trim();
    match !token.is_empty()
        && token.len() <= TOKEN_MAX
        && token.bytes().all(|b| b.is_ascii_graphic())
    {
        true => Ok(Token(token.to_owned())),
        false => Err("a hub's token is one word of ASCII letters, digits and signs".to_owned()),
    }
}

/// What a download includes and leaves out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Scope {
    /// Neither projector nor draft model.
    pub model_only: bool,
}

/// A file of a download.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Planned {
    /// Path that the file will have.
    pub path: PathBuf,
    /// Purpose of the file, such as model, projector or draft model.
    pub r#use: Use,
    /// The file's size.
    pub bytes: u64,
    /// Bytes that are there already: of an unfinished download, or all.
    pub have: u64,
    /// The hub's checksum.
    pub sha256: Option<String>,
}

/// What happens in a download. Numbers of files are places in the list of [`Event::Planned`].
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The files are known, and there is room for them.
    Planned {
        /// The source that was requested.
        source: String,
        /// The files.
        files: Vec<Planned>,
    },
    /// More of a file is there.
    Progress {
        /// The file's number.
        file: usize,
        /// Bytes of the file that are there.
        done: u64,
    },
    /// A connection failed, and is tried again.
    Waiting {
        /// The file's number.
        file: usize,
        /// What went wrong.
        why: String,
        /// Milliseconds until the next try.
        wait_ms: u64,
    },
    /// All bytes of a file are there; its checksum is computed.
    Checking {
        /// The file's number.
        file: usize,
    },
    /// A file is whole.
    Done {
        /// The file's number.
        file: usize,
        /// The file's checksum.
        sha256: String,
    },
}

/// Receives the events of a download. It is called often, and from several threads: it must not
/// block.
pub type Listener = Arc<dyn Fn(Event) + Send + Sync>;

/// A file that a download has brought, or found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Pulled {
    /// Path of the downloaded file.
    pub path: PathBuf,
    /// Purpose of the file, such as model, projector or draft model.
    pub r#use: Use,
    /// The file's size.
    pub bytes: u64,
    /// The file's checksum, where it is known.
    pub sha256: Option<String>,
    /// Whether the file's checksum was compared with the hub's.
    pub verified: bool,
    /// Whether the file was complete before this download.
    pub was_there: bool,
}

/// The way to the hubs.
#[derive(Debug, Clone)]
pub struct Hub {
    web: Web,
    config: Config,
}

impl Hub {
    /// Reads the system's certificates. Blocks on the file system.
    pub fn new(config: Config) -> Self {
        let token = config
            .token
            .clone()
            .map(|token| (config.hub.clone(), token));
        Hub {
            web: Web::new(token, config.patience),
            config,
        }
    }

    /// What a repository has: each model, projector and draft model. Of other sources the one model
    /// that is meant.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn list(&self, source: &Source) -> Result<Vec<Group>, Error> {
        catalogue::list(&self.web, &self.config, source).await
    }

    /// Downloads a model into the existing directory `dir`. Files that are complete stay, partial
    /// ones are continued. Dropping the future stops the download; the next one continues it.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn pull(
        &self,
        source: &Source,
        dir: &Path,
        scope: Scope,
        listener: Listener,
    ) -> Result<Vec<Pulled>, Error> {
        let wanted = catalogue::wanted(&self.web, &self.config, source, scope).await?;
        let (asked, root) = (source.clone(), dir.to_owned());
        let found = tokio::task::spawn_blocking(move || placed(&asked, &root, wanted)).await;
        let placed = found.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))?;
        let planned: Vec<Planned> = placed.iter().map(Placed::planned).collect();
        let need: u64 = planned
            .iter()
            .map(|file| file.bytes - file.have)
            .fold(0, u64::saturating_add);
        let (room, need_with) = (room(dir)?, need.saturating_add(self.config.spare_bytes));
        if need > 0 && need_with > room.free_bytes {
            return Err(Error::NoSpace {
                dir: dir.to_owned(),
                need: need_with,
                free: room.free_bytes,
            });
        }
        listener(Event::Planned {
            source: source.to_string(),
            files: planned,
        });
        let mut pulled = Vec::new();
        for (file, placed) in placed.into_iter().enumerate() {
            pulled.push(self.fetch(source, file, placed, &listener).await?);
        }
        Ok(pulled)
    }

    async fn fetch(
        &self,
        source: &Source,
        file: usize,
        placed: Placed,
        listener: &Listener,
    ) -> Result<Pulled, Error> {
        let Placed {
            item,
            r#use,
            is_current,
        } = placed;
        let mut pulled = Pulled {
            path: item.dest.clone(),
            r#use,
            bytes: item.bytes,
            sha256: item.sha256.clone(),
            verified: item.sha256.is_some(),
            was_there: is_current,
        };
        if is_current {
            return Ok(pulled);
        }
        let division = Division {
            connections: self.config.connections.clamp(1, CONNECTIONS_MAX),
            piece_bytes: self.config.piece_bytes.max(1),
        };
        let told = Arc::new(Teller {
            file,
            listener: Arc::clone(listener),
        });
        let arrived = transfer::fetch(&self.web, item.clone(), division, told).await?;
        let (sha256, source, url) = (
            arrived.sha256.clone(),
            source.to_string(),
            without_query(&item.url),
        );
        let noting = tokio::task::spawn_blocking(move || {
            store::note(&item, &source, url, arrived.sha256, arrived.etag)
        });
        // Without the note the next download reads the file to know it.
        let _ = noting.await;
        listener(Event::Done {
            file,
            sha256: sha256.clone(),
        });
        pulled.sha256 = Some(sha256);
        Ok(pulled)
    }
}

/// A file with its place.
#[derive(Debug)]
struct Placed {
    item: Item,
    r#use: Use,
    is_current: bool,
}

impl Placed {
    fn planned(&self) -> Planned {
        let have = match self.is_current {
            true => self.item.bytes,
            false => self.item.have(),
        };
        Planned {
            path: self.item.dest.clone(),
            r#use: self.r#use,
            bytes: self.item.bytes,
            have,
            sha256: self.item.sha256.clone(),
        }
    }
}

/// Gives each file its place, and looks what is there. Blocks on the file system.
fn placed(source: &Source, dir: &Path, wanted: Vec<Wanted>) -> Result<Vec<Placed>, Error> {
    let each = wanted.into_iter().map(|wanted| {
        let item = Item {
            dest: store::place(dir, &source.place(&wanted.file)?)?,
            url: wanted.url,
            name: wanted.file,
            bytes: wanted.bytes,
            sha256: wanted.sha256,
        };
        let is_current = store::is_current(&item, wanted.etag.as_deref());
        Ok(Placed {
            item,
            r#use: wanted.r#use,
            is_current,
        })
    });
    each.collect()
}

/// Tells of one file.
struct Teller {
    file: usize,
    listener: Listener,
}

impl Told for Teller {
    fn grown(&self, done: u64) {
        (self.listener)(Event::Progress {
            file: self.file,
            done,
        });
    }

    fn waiting(&self, why: &Error, wait: Duration) {
        let wait_ms = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
        (self.listener)(Event::Waiting {
            file: self.file,
            why: why.to_string(),
            wait_ms,
        });
    }

    fn checking(&self) {
        (self.listener)(Event::Checking { file: self.file });
    }
}
