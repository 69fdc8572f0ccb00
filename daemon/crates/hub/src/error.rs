//! Why a model is not downloaded.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Tags that an error lists.
const LISTED_MAX: usize = 24;

/// Why a listing or a download failed. Each says what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The name of a model cannot be one.
    #[error("{name:?} names no model: {why}")]
    BadName {
        /// The name as it was given, cut to a length that can be read.
        name: String,
        /// What is wrong with the name, and what is allowed.
        why: String,
    },
    /// The hub has no such model or file.
    #[error("{what} does not exist on {host}; check its name")]
    NotFound {
        /// The repository, model or file.
        what: String,
        /// The hub.
        host: String,
    },
    /// The hub does not give it to this caller.
    #[error(
        "{host} does not give {what} ({status}); accept its licence on the hub's page if it has one, and set a token \
         (HF_TOKEN, or hub_token_file of the daemon)"
    )]
    Denied {
        /// The repository, model or file.
        what: String,
        /// The hub.
        host: String,
        /// The status of its answer.
        status: u16,
    },
    /// The hub has had too many requests.
    #[error("{host} accepts no more requests for {} s; pull again after that", wait.as_secs())]
    RateLimited {
        /// The hub.
        host: String,
        /// Time that the server asks to wait.
        wait: Duration,
    },
    /// The hub failed, again and again.
    #[error("{host} fails ({status}) again and again; pull again later")]
    Unavailable {
        /// The hub.
        host: String,
        /// The status of its last answer.
        status: u16,
    },
    /// An answer that this program does not understand.
    #[error("{host} answers {what}; check the hub's address")]
    BadAnswer {
        /// The hub.
        host: String,
        /// What the host answered.
        what: String,
    },
    /// The host redirects to a place that is not trusted.
    #[error("{host} leads to {to}, {why}")]
    Redirect {
        /// The host that redirects.
        host: String,
        /// Target of the redirect.
        to: String,
        /// Why the redirect is not followed.
        why: &'static str,
    },
    /// Nobody answers.
    #[error("cannot reach {host}: {why}; check the network and the hub's address")]
    Unreachable {
        /// The hub.
        host: String,
        /// What the system, or TLS, says.
        why: String,
    },
    /// The connection broke, again and again.
    #[error(
        "the connection to {host} breaks again and again ({why}); pull again to go on where it stopped"
    )]
    Broken {
        /// The hub.
        host: String,
        /// What happened last.
        why: String,
    },
    /// The file on the hub is not the one that it was.
    #[error("{name} changed on the hub while it was downloaded; pull it again")]
    Changed {
        /// The file.
        name: String,
    },
    /// The hub says one length and gives another.
    #[error(
        "{name} has {given} bytes where the hub listed {listed}; pull it again, or tell its owner"
    )]
    Length {
        /// The file.
        name: String,
        /// Bytes by the listing.
        listed: u64,
        /// Bytes by the answer.
        given: u64,
    },
    /// The bytes are not those of the hub's checksum.
    #[error(
        "{name} has the SHA-256 {found}, and {expected} by the hub; it was deleted: pull it again"
    )]
    BadChecksum {
        /// The file.
        name: String,
        /// The hub's checksum in hexadecimal.
        expected: String,
        /// SHA-256 of the bytes that came.
        found: String,
    },
    /// The file would not fit on the disk.
    #[error(
        "{} has {free} bytes free, and {need} are needed; delete files, or choose another directory",
        dir.display()
    )]
    NoSpace {
        /// The directory.
        dir: PathBuf,
        /// Bytes that are missing of the model, with what stays free.
        need: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// A repository has no file for the tag.
    #[error("{repo} has no GGUF file for {tag:?}; it has: {}", listed(tags))]
    NoSuchTag {
        /// The repository.
        repo: String,
        /// The tag that was requested.
        tag: String,
        /// What there is.
        tags: Vec<String>,
    },
    /// Several files could be meant.
    #[error(
        "{repo} has several models that this could be; name one behind a colon: {}",
        listed(tags)
    )]
    Ambiguous {
        /// The repository.
        repo: String,
        /// What there is.
        tags: Vec<String>,
    },
    /// The repository has no GGUF file.
    #[error("{what} has no GGUF file; choose a repository with GGUF files")]
    NoModel {
        /// The repository or model.
        what: String,
    },
    /// Parts of a split model are not on the hub.
    #[error("{name} has {count} parts, of which the hub lacks {missing}; choose another file")]
    MissingParts {
        /// The first part.
        name: String,
        /// Number of parts by the file's name.
        count: u32,
        /// Number of parts that the hub does not have.
        missing: u32,
    },
    /// Someone else downloads it.
    #[error("{} is being downloaded by another process; wait for it", path.display())]
    Busy {
        /// The file.
        path: PathBuf,
    },
    /// No such file to delete or copy.
    #[error(
        "{} is no model file below {}; `rocmforgectl files` lists those that are",
        path.display(),
        dir.display()
    )]
    NoFile {
        /// The path that was named.
        path: PathBuf,
        /// The model directory.
        dir: PathBuf,
    },
    /// A name is taken.
    #[error("{} exists; delete it first, or choose another name", path.display())]
    Exists {
        /// The file that is there.
        path: PathBuf,
    },
    /// The file system refuses.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
}

fn listed(tags: &[String]) -> String {
    let more = tags.len().saturating_sub(LISTED_MAX);
    let mut text = tags[..tags.len() - more].join(", ");
    if more > 0 {
        text += &format!(" and {more} more");
    }
    text
}

impl Error {
    pub(crate) fn io(path: &std::path::Path, source: io::Error) -> Error {
        let path = path.to_owned();
        Error::Io { path, source }
    }

    /// A short word for programs.
    pub fn word(&self) -> &'static str {
        match self {
            Error::BadName { .. } => "BAD_NAME",
            Error::NotFound { .. } => "NOT_FOUND",
            Error::Denied { .. } => "DENIED",
            Error::RateLimited { .. } => "RATE_LIMITED",
            Error::Unavailable { .. } => "UNAVAILABLE",
            Error::BadAnswer { .. } => "BAD_ANSWER",
            Error::Redirect { .. } => "REDIRECT",
            Error::Unreachable { .. } => "UNREACHABLE",
            Error::Broken { .. } => "BROKEN",
            Error::Changed { .. } => "CHANGED",
            Error::Length { .. } => "LENGTH",
            Error::BadChecksum { .. } => "BAD_CHECKSUM",
            Error::NoSpace { .. } => "NO_SPACE",
            Error::NoSuchTag { .. } => "NO_SUCH_TAG",
            Error::Ambiguous { .. } => "AMBIGUOUS",
            Error::NoModel { .. } => "NO_MODEL",
            Error::MissingParts { .. } => "MISSING_PARTS",
            Error::Busy { .. } => "BUSY",
            Error::NoFile { .. } => "NO_FILE",
            Error::Exists { .. } => "EXISTS",
            Error::Io { .. } => "IO",
        }
    }
}
