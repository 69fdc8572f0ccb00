//! The note of what was resident and asked for, which the next daemon brings back.
//!
//! ```json
//! {"version": 1, "tries": 0, "models": [{"name": "a", "path": "/models/a.gguf",
//!   "file_bytes": 1000, "mtime_unix_ms": 1700000000000, "idle_s": 12,
//!   "n_segments": 40, "resident": [[0, 30], [35, 39]], "resident_bytes": 900}]}
//! ```
//!
//! The model that was used last comes first. A model has a `path` if a request opened it by its
//! file's name: every other model comes by its declaration, or because it is remembered. `resident`
//! has the first and the last index of each run of segments. `tries` counts the starts that began
//! to bring these models back and did not end it: a model whose upload ends the daemon is not tried
//! for ever.
//!
//! *Invariant:* nothing here reads the clock or a file. What was read is within all bounds (test
//! `a_damaged_or_foreign_note_is_refused_and_unsound_models_are_left_out`).

use std::collections::HashSet;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::declared::Declared;
use crate::model_files::MODEL_PATH_MAX;

/// The version of the format that is written and read.
const VERSION: u32 = 1;
/// Largest note that is read, in bytes.
pub(crate) const NOTE_MAX_BYTES: u64 = 4 << 20;
/// Maximum number of models of a note: those that were used last.
const MODELS_NOTED_MAX: usize = 64;
/// Maximum number of runs of segments of all models of a note together.
const RUNS_MAX: usize = 1 << 16;
/// Maximum number of segments of a model.
const SEGMENTS_MAX: u32 = 1 << 20;
/// Idle time after which a model is not loaded again at the next start.
const IDLE_MAX: Duration = Duration::from_secs(3600);
/// How much longer models may have been idle than a note says that is not written again.
const IDLE_STEP_S: u64 = 600;
/// How often a note is written at most, unless other models were opened or closed.
const WRITE_EVERY: Duration = Duration::from_secs(60);
/// Starts that may have failed to bring the models of a note back.
const TRIES_MAX: u32 = 2;

/// A model as it was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Noted {
    /// The model's own name.
    pub(crate) name: String,
    /// Path of the model's file, if a request opened the model by the file's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) path: Option<String>,
    /// The size of its file, with all parts.
    pub(crate) file_bytes: u64,
    /// When its file, or a part of it, was last written, in milliseconds since 1970.
    pub(crate) mtime_unix_ms: i64,
    /// Seconds since it was used.
    pub(crate) idle_s: u64,
    /// Segments of the whole model.
    pub(crate) n_segments: u32,
    /// The first and the last of each run of resident segments.
    pub(crate) resident: Vec<[u32; 2]>,
    /// The device memory of these.
    pub(crate) resident_bytes: u64,
}

impl Noted {
    /// Since when it is idle, where `now` is when it is brought back: the time without a daemon
    /// does not count.
    pub(crate) fn used_at(&self, now: Instant) -> Instant {
        let idle = Duration::from_secs(self.idle_s);
        now.checked_sub(idle).unwrap_or(now)
    }

    /// The indices of the resident segments.
    pub(crate) fn segments(&self) -> Vec<u32> {
        let runs = self.resident.iter();
        runs.flat_map(|&[first, last]| first..=last).collect()
    }

    fn is_sound(&self) -> bool {
        let path = self.path.as_deref();
        let mut next = 0;
        let runs_are = self.resident.iter().all(|&[first, last]| {
            let is_behind = first >= next && last >= first && last < self.n_segments;
            next = last.saturating_add(1);
            is_behind
        });
        Declared::check_name(&self.name).is_ok()
            && path.is_none_or(|path| (1..=MODEL_PATH_MAX).contains(&path.len()))
            && self.idle_s <= IDLE_MAX.as_secs()
            && self.n_segments <= SEGMENTS_MAX
            && runs_are
    }

    /// Whether a note with `other` need not be written for this.
    fn is_like(&self, other: &Self) -> bool {
        let (a, b) = (self.idle_s / IDLE_STEP_S, other.idle_s / IDLE_STEP_S);
        let idle_as_other = Self {
            idle_s: other.idle_s,
            ..self.clone()
        };
        a == b && idle_as_other == *other
    }
}

/// The runs of these ascending indices.
pub(crate) fn runs(indices: impl Iterator<Item = u32>) -> Vec<[u32; 2]> {
    let mut runs: Vec<[u32; 2]> = Vec::new();
    for index in indices {
        match runs.last_mut() {
            Some([_, last]) if *last + 1 == index => *last = index,
            _ => runs.push([index, index]),
        }
    }
    runs
}

/// What there was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Note {
    /// Starts that began to load the models and did not finish.
    tries: u32,
    /// The models, last used first.
    models: Vec<Noted>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Content {
    version: u32,
    tries: u32,
    models: Vec<Noted>,
}

/// Why a note of models to bring back cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoteError {
    #[error("the note cannot be read: {0}; it is written again")]
    Damaged(#[from] serde_json::Error),
    #[error("the note has version {0}, and this daemon reads {VERSION}; it is written again")]
    Version(u32),
    #[error("the last {TRIES_MAX} daemons ended while they loaded its models again")]
    Tried,
}

impl Note {
    /// The note of these models, in whatever order: without those that were not used for long, and
    /// within the bounds of a note.
    pub(crate) fn of(mut models: Vec<Noted>) -> Self {
        models.retain(|model| model.idle_s <= IDLE_MAX.as_secs());
        models.sort_by(|a, b| (a.idle_s, &a.name).cmp(&(b.idle_s, &b.name)));
        models.truncate(MODELS_NOTED_MAX);
        let mut left = RUNS_MAX;
        for model in &mut models {
            model.resident.truncate(left);
            left -= model.resident.len();
        }
        Self { tries: 0, models }
    }

    /// The models, last used first.
    pub(crate) fn into_models(self) -> Vec<Noted> {
        self.models
    }

    /// Reads a note. Models that cannot be are left out.
    ///
    /// # Errors
    /// [`NoteError`].
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, NoteError> {
        #[derive(Deserialize)]
        struct Head {
            version: u32,
        }
        let head: Head = serde_json::from_slice(bytes)?;
        if head.version != VERSION {
            return Err(NoteError::Version(head.version));
        }
        let content: Content = serde_json::from_slice(bytes)?;
        if content.tries >= TRIES_MAX {
            return Err(NoteError::Tried);
        }
        let mut names = HashSet::new();
        let models = content.models.into_iter();
        let sound = models.filter(|model| model.is_sound() && names.insert(model.name.clone()));
        Ok(Self {
            tries: content.tries,
            ..Self::of(sound.collect())
        })
    }

    /// The text of the note.
    ///
    /// # Errors
    /// None that a note can cause.
    pub(crate) fn text(&self) -> serde_json::Result<String> {
        let content = Content {
            version: VERSION,
            tries: self.tries,
            models: self.models.clone(),
        };
        serde_json::to_string(&content).map(|text| text + "\n")
    }

    /// The note, tried once more.
    pub(crate) fn tried(mut self) -> Self {
        self.tries += 1;
        self
    }

    /// Whether this is to be written in the place of what this daemon wrote last, and when.
    pub(crate) fn is_due(&self, written: Option<&(Instant, Note)>, now: Instant) -> bool {
        let Some((at, before)) = written else {
            // What the last daemon wrote counts a try.
            return true;
        };
        let names = |note: &Note| -> HashSet<String> {
            note.models.iter().map(|model| model.name.clone()).collect()
        };
        let models = self.models.iter().zip(&before.models);
        let is_like =
            self.models.len() == before.models.len() && models.clone().all(|(a, b)| a.is_like(b));
        !is_like && (now.duration_since(*at) >= WRITE_EVERY || names(self) != names(before))
    }
}

#[cfg(test)]
#[path = "warm_note_tests.rs"]
mod tests;
