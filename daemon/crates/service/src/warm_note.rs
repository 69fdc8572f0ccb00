//! The note of resident segments and recently used models, from which the next daemon restarts
//! warm.
//!
//! ```json
//! {"version": 1, "tries": 0, "models": [{"name": "a", "path": "/models/a.gguf",
//!   "file_bytes": 1000, "mtime_unix_ms": 1700000000000, "idle_s": 12,
//!   "n_segments": 40, "resident": [[0, 30], [35, 39]], "resident_bytes": 900}]}
//! ```
//!
//! The model that was used last comes first. A model has a `path` if a request opened it by its
//! file's name: other models are declared or remembered. `resident` has the first and the last
//! index of each run of segments. `tries` counts the starts that began to load these models and did
//! not finish: a model whose upload ends the daemon is not tried for ever.
//!
//! *Invariant:* nothing here reads the clock or a file. A parsed note is within all bounds (test
//! `a_damaged_or_foreign_note_is_refused_and_unsound_models_are_left_out`).

use std::collections::HashSet;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::declared::Declared;
use crate::model_files::MODEL_PATH_MAX;

/// The version of the format that is written and read.
const VERSION: u32 = 1;
/// Maximum size of a note in bytes.
pub(crate) const NOTE_MAX_BYTES: u64 = 4 << 20;
/// Maximum number of models in a note: the most recently used ones.
const MODELS_NOTED_MAX: usize = 64;
/// Maximum number of runs of segments of all models of a note together.
const RUNS_MAX: usize = 1 << 16;
/// Maximum number of segments of a model.
const SEGMENTS_MAX: u32 = 1 << 20;
/// Idle time after which a model is not loaded again at the next start.
const IDLE_MAX: Duration = Duration::from_secs(3600);
/// Increase of a model's idle time, in seconds, from which on the note is written again.
const IDLE_STEP_S: u64 = 600;
/// Minimum time between two writes of a note, unless models were opened or closed.
const WRITE_EVERY: Duration = Duration::from_secs(60);
/// Number of failed attempts to load a note's models after which it is ignored.
const TRIES_MAX: u32 = 2;

/// A model in the note.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Noted {
    /// The model's own name.
    pub(crate) name: String,
    /// Path of the model's file, if a request opened the model by the file's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) path: Option<String>,
    /// Size of the model's file in bytes, with all parts.
    pub(crate) file_bytes: u64,
    /// Last modification time of the file or its parts, in milliseconds since 1970.
    pub(crate) mtime_unix_ms: i64,
    /// Seconds since the model was last used.
    pub(crate) idle_s: u64,
    /// Number of segments of the model.
    pub(crate) n_segments: u32,
    /// First and last index of each run of resident segments.
    pub(crate) resident: Vec<[u32; 2]>,
    /// Bytes of the resident segments on the device.
    pub(crate) resident_bytes: u64,
}

impl Noted {
    /// Time of the last use, given that it is loaded again at `now`: the time without a daemon does
    /// not count.
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

    /// Whether `other` differs so little from this note's model that the note need not be written.
    fn is_like(&self, other: &Self) -> bool {
        let (a, b) = (self.idle_s / IDLE_STEP_S, other.idle_s / IDLE_STEP_S);
        let idle_as_other = Self {
            idle_s: other.idle_s,
            ..self.clone()
        };
        a == b && idle_as_other == *other
    }
}

/// Runs of consecutive numbers among ascending indices, as (first, last).
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

/// The models to load again after a restart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Note {
    /// Number of starts that began to load the models and did not finish.
    tries: u32,
    /// The models, most recently used first.
    models: Vec<Noted>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Content {
    version: u32,
    tries: u32,
    models: Vec<Noted>,
}

/// Why a note cannot be used.
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
    /// The note of these models, most recently used first, without those idle for too long and
    /// within the limits of a note.
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

    /// The models, most recently used first.
    pub(crate) fn into_models(self) -> Vec<Noted> {
        self.models
    }

    /// Parses a note. Invalid models are left out.
    ///
    /// # Errors
    ///
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
    /// No valid note causes one.
    pub(crate) fn text(&self) -> serde_json::Result<String> {
        let content = Content {
            version: VERSION,
            tries: self.tries,
            models: self.models.clone(),
        };
        serde_json::to_string(&content).map(|text| text + "\n")
    }

    /// The note with one more try counted.
    pub(crate) fn tried(mut self) -> Self {
        self.tries += 1;
        self
    }

    /// Whether this note has to replace the last `written` one.
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
