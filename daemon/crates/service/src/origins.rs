//! The origin of each loaded model: what loaded it, with which arguments, and when it was last
//! used.
//!
//! A model whose file changes is loaded again by the same arguments. One that a request opened by
//! its file's name may be closed again, since the next request opens it.
//!
//! *Invariant:* there are no more entries than loaded models, except for loads under way
//! ([`Origins::note`] removes entries of unloaded ones). The lock is held only to access one map.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use rocmforge_engine::LoadedModel;
use tokio::sync::Notify;

use crate::declared::Declared;
use crate::load::Load;

/// What loaded a model.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Origin {
    /// A request that named the model's file.
    FirstUse,
    /// A client's call to load it.
    ByHand,
    /// The configuration; this is how it declared the model then.
    Declared(Box<Declared>),
}

/// A loaded model with its origin and use.
#[derive(Debug, Clone)]
pub(crate) struct Loaded {
    /// The model; dangling once it is unloaded.
    pub(crate) model: Weak<LoadedModel>,
    /// The arguments with which the model was loaded.
    pub(crate) load: Load,
    /// What loaded the model.
    pub(crate) origin: Origin,
    /// Number of the request that used the model last; requests are counted from 1.
    pub(crate) used: u64,
    /// Time at which a request last used the model; `None` if none has since a call or the
    /// configuration loaded it.
    pub(crate) used_at: Option<Instant>,
    /// Segments that clients pinned, if they did not pin all (`load.pin`).
    pub(crate) pinned_segments: BTreeSet<u32>,
}

impl Loaded {
    /// Records that a client pinned or unpinned these segments of `n_segments`, or all (`None`). A
    /// model that a client pinned is kept like one that a client loaded.
    pub(crate) fn note_pins(&mut self, segments: Option<&[u32]>, n_segments: u32, pinned: bool) {
        if pinned && self.origin == Origin::FirstUse {
            self.origin = Origin::ByHand;
        }
        if self.load.pin {
            self.pinned_segments = (0..n_segments).collect();
        }
        let named = segments.map_or_else(|| (0..n_segments).collect(), <[u32]>::to_vec);
        match pinned {
            true => self.pinned_segments.extend(named),
            false => self
                .pinned_segments
                .retain(|segment| !named.contains(segment)),
        }
        self.load.pin = self.pinned_segments.len() as u32 == n_segments;
        if self.load.pin {
            self.pinned_segments.clear();
        }
    }
}

/// The origins of the loaded models, by name.
#[derive(Debug, Default)]
pub(crate) struct Origins {
    book: Mutex<Book>,
    /// Notified when a request has opened a model, or the files are listed.
    pub(crate) opened: Arc<Notify>,
}

#[derive(Debug, Default)]
struct Book {
    of: HashMap<String, Loaded>,
    asked: u64,
}

impl Book {
    /// The entry of exactly this model, not of another one with its name.
    fn entry(&mut self, loaded: &Arc<LoadedModel>) -> Option<&mut Loaded> {
        let entry = self.of.get_mut(loaded.name())?;
        // Who holds a weak pointer keeps its address from being that of another model.
        std::ptr::eq(entry.model.as_ptr(), Arc::as_ptr(loaded)).then_some(entry)
    }
}

impl Origins {
    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records what loaded a model, and with which arguments.
    pub(crate) fn note(&self, loaded: &Arc<LoadedModel>, load: &Load, origin: Origin) {
        let is_first_use = origin == Origin::FirstUse;
        let mut book = self.book();
        book.of.retain(|_, entry| entry.model.strong_count() > 0);
        book.asked += 1;
        let entry = Loaded {
            model: Arc::downgrade(loaded),
            load: load.clone(),
            origin,
            used: book.asked,
            used_at: is_first_use.then(Instant::now),
            pinned_segments: BTreeSet::new(),
        };
        book.of.insert(loaded.name().to_owned(), entry);
        drop(book);
        if is_first_use {
            self.opened.notify_one();
        }
    }

    /// Records a use of a model, which makes it the last one to be closed.
    pub(crate) fn note_use(&self, loaded: &Arc<LoadedModel>) {
        let mut book = self.book();
        book.asked += 1;
        let asked = book.asked;
        if let Some(entry) = book.entry(loaded) {
            entry.used = asked;
            entry.used_at = Some(Instant::now());
        }
    }

    /// Changes the entry of a model, if it has one.
    pub(crate) fn edit(&self, loaded: &Arc<LoadedModel>, change: impl FnOnce(&mut Loaded)) {
        if let Some(entry) = self.book().entry(loaded) {
            change(entry);
        }
    }

    /// The origin of a model, if it is known.
    pub(crate) fn of(&self, loaded: &Arc<LoadedModel>) -> Option<Loaded> {
        self.book().entry(loaded).cloned()
    }

    /// The declaration with which a model was loaded, if it was a declared model.
    pub(crate) fn declared_as(&self, loaded: &Arc<LoadedModel>) -> Option<Declared> {
        match self.of(loaded)?.origin {
            Origin::Declared(then) => Some(*then),
            Origin::FirstUse | Origin::ByHand => None,
        }
    }

    /// All loaded models with their entries.
    pub(crate) fn all(&self) -> Vec<(Arc<LoadedModel>, Loaded)> {
        let book = self.book();
        let there = book.of.values();
        there
            .filter_map(|entry| Some((entry.model.upgrade()?, entry.clone())))
            .collect()
    }

    /// Whether any loaded model was opened by a request.
    pub(crate) fn has_opened(&self) -> bool {
        let book = self.book();
        let mut there = book.of.values();
        there.any(|entry| entry.origin == Origin::FirstUse && entry.model.strong_count() > 0)
    }
}
