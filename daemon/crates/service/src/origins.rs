//! Where each loaded model came from: what loaded it, with which arguments, and when it was last
//! asked for.
//!
//! A model whose file changes is loaded again by the same arguments. One that a request opened by
//! its file's name may be closed again, since the next request opens it.
//!
//! *Invariant:* there are no more entries than models that are loaded, but for loads under way
//! ([`Origins::note`] forgets those that are gone). The lock is held to look into one map.

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
    /// A request that named its file.
    FirstUse,
    /// A call that loads.
    ByHand,
    /// The configuration, which declared it so then.
    Declared(Box<Declared>),
}

/// A loaded model with what loaded it.
#[derive(Debug, Clone)]
pub(crate) struct Loaded {
    /// The model, which may be gone.
    pub(crate) model: Weak<LoadedModel>,
    /// The arguments of its load.
    pub(crate) load: Load,
    /// What loaded it.
    pub(crate) origin: Origin,
    /// The number of the request that asked for it last; they are counted from 1.
    pub(crate) used: u64,
    /// When a request asked for it last; `None` where none has since it was loaded by a call or as
    /// declared.
    pub(crate) used_at: Option<Instant>,
    /// Segments that clients pinned, where they did not pin all (`load.pin`).
    pub(crate) pinned_segments: BTreeSet<u32>,
}

impl Loaded {
    /// Notes that a client pinned these segments of `n_segments`, or all, or let them go. A model
    /// that is pinned by its name stays as one that was loaded by it.
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

/// Where the loaded models came from, by their names.
#[derive(Debug, Default)]
pub(crate) struct Origins {
    book: Mutex<Book>,
    /// Told when a request has opened a model, or the files are listed.
    pub(crate) opened: Arc<Notify>,
}

#[derive(Debug, Default)]
struct Book {
    of: HashMap<String, Loaded>,
    asked: u64,
}

impl Book {
    /// The entry of this model, not of another one of its name.
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

    /// Notes what loaded a model.
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

    /// Notes that a model is asked for, which makes it the last to be closed.
    pub(crate) fn note_use(&self, loaded: &Arc<LoadedModel>) {
        let mut book = self.book();
        book.asked += 1;
        let asked = book.asked;
        if let Some(entry) = book.entry(loaded) {
            entry.used = asked;
            entry.used_at = Some(Instant::now());
        }
    }

    /// Changes what is known of this model, if anything is.
    pub(crate) fn edit(&self, loaded: &Arc<LoadedModel>, change: impl FnOnce(&mut Loaded)) {
        if let Some(entry) = self.book().entry(loaded) {
            change(entry);
        }
    }

    /// What loaded this model, if that is known.
    pub(crate) fn of(&self, loaded: &Arc<LoadedModel>) -> Option<Loaded> {
        self.book().entry(loaded).cloned()
    }

    /// How a model was declared when it was loaded, if it was loaded so.
    pub(crate) fn declared_as(&self, loaded: &Arc<LoadedModel>) -> Option<Declared> {
        match self.of(loaded)?.origin {
            Origin::Declared(then) => Some(*then),
            Origin::FirstUse | Origin::ByHand => None,
        }
    }

    /// All that are still there.
    pub(crate) fn all(&self) -> Vec<(Arc<LoadedModel>, Loaded)> {
        let book = self.book();
        let there = book.of.values();
        there
            .filter_map(|entry| Some((entry.model.upgrade()?, entry.clone())))
            .collect()
    }

    /// Whether a request opened any model that is still there.
    pub(crate) fn has_opened(&self) -> bool {
        let book = self.book();
        let mut there = book.of.values();
        there.any(|entry| entry.origin == Origin::FirstUse && entry.model.strong_count() > 0)
    }
}
