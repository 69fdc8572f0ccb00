//! Models that the configuration declares, and their aliases.
//!
//! A declared model is registered when the daemon starts, and when a reload brings it; if its
//! directory does not respond, once that does. The model and its aliases can be used like any other
//! model's name in all protocols. A model that a reload no longer declares stays loaded: unloading
//! is a separate call. One whose file has changed is loaded again at its next use, or by a reload
//! (`renewal.rs`).
//!
//! *Invariant:* an alias leads to its model whatever else is loaded: no load is taken under a name
//! that is an alias (`Service::refuse_alias`, test `an_alias_works_wherever_a_name_does`), and a
//! model that was loaded under it before a reload brought the alias stays loaded without being
//! reached by it (`a_reload_takes_filter_token_and_models_and_names_the_rest`). Locks are only held
//! to read or replace one pointer, or to look up one entry.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, MutexGuard, PoisonError, RwLock};

use rocmforge_engine::LoadedModel;
use rocmforge_engine::api::PreloadEvent;
use rocmforge_engine::is_name_char;
use rocmforge_failure::{self as failure, Failure, Reason};
use tokio::sync::mpsc;

use crate::Service;
use crate::adapters::AdapterSpec;
use crate::arrival::Arrival;
use crate::check::MODEL_NAME_MAX;
use crate::defaults::Defaults;
use crate::files::DEFAULT_TAG;
use crate::load::Load;
use crate::origins::Origin;
use crate::refusals;
use crate::request_log::RequestLog;

/// Maximum number of declared models.
pub const DECLARED_MAX: usize = 256;
/// Maximum number of aliases of one declared model.
pub const ALIASES_MAX: usize = 16;

/// A model that the configuration declares.
#[derive(Debug, Clone, PartialEq)]
pub struct Declared {
    /// The declared model's name.
    pub name: String,
    /// The declared model's file, below a model directory.
    pub path: PathBuf,
    /// Other names of the model.
    pub aliases: Vec<String>,
    /// Whether as much of the model as fits is uploaded when it is registered.
    pub preload: bool,
    /// Whether all segments of the model are pinned.
    pub pin: bool,
    /// Name or alias of the draft model.
    pub draft: Option<String>,
    /// The model's projector file, below a model directory; `None` takes one beside the model's
    /// file that fits.
    pub mmproj: Option<PathBuf>,
    /// The declared model's adapters.
    pub lora: Vec<AdapterSpec>,
    /// Default parameters of the model's requests.
    pub defaults: Defaults,
}

impl Declared {
    /// Checks a name or an alias.
    ///
    /// # Errors
    /// A message that says what is allowed.
    pub fn check_name(name: &str) -> Result<(), String> {
        if !name.is_empty() && name.len() <= MODEL_NAME_MAX && name.chars().all(is_name_char) {
            return Ok(());
        }
        Err(format!(
            "{name:?} is no model name: 1 to {MODEL_NAME_MAX} bytes of letters, digits and any of . _ - : / @ +"
        ))
    }

    /// The load request for the declared model, without its preload.
    pub(crate) fn load(&self) -> Load {
        let template = self.defaults.template.as_ref();
        Load {
            path: self.path.clone(),
            name: self.name.clone(),
            pin: self.pin,
            preload: false,
            template: template.map(|t| Arc::clone(&t.source)),
            draft: self.draft.clone(),
            mmproj: self.mmproj.clone(),
            lora: self.lora.clone(),
        }
    }
}

/// The set of declared models and their aliases.
#[derive(Debug, Default)]
pub struct Book {
    models: Vec<Declared>,
    /// For each alias the name of its model.
    aliases: HashMap<String, String>,
}

impl Book {
    /// The book of these models.
    pub fn new(models: Vec<Declared>) -> Self {
        let pairs = models.iter().flat_map(|model| {
            let aliases = model.aliases.iter();
            aliases.map(|alias| (alias.clone(), model.name.clone()))
        });
        Self {
            aliases: pairs.collect(),
            models,
        }
    }

    /// The declared models in the order of the configuration.
    pub fn models(&self) -> &[Declared] {
        &self.models
    }

    /// The model that is declared under this name; aliases do not count.
    pub fn model(&self, name: &str) -> Option<&Declared> {
        self.models.iter().find(|model| model.name == name)
    }

    /// The declared model with this name or alias, also with Ollama's default tag appended.
    pub fn asked(&self, name: &str) -> Option<&Declared> {
        let find = |name: &str| self.model(&self.real_name(name));
        find(name).or_else(|| find(name.strip_suffix(DEFAULT_TAG)?))
    }

    /// The declared models, with draft models before the models that use them.
    fn drafts_first(&self) -> Vec<&Declared> {
        let draft_of = |model: &Declared| self.asked(model.draft.as_deref()?);
        let depth = |model: &&Declared| {
            let chain = std::iter::successors(Some(*model), |model| draft_of(model));
            // Settings are refused where it leads back to where it began.
            chain.take(self.models.len()).count()
        };
        let mut models: Vec<&Declared> = self.models.iter().collect();
        models.sort_by_key(depth);
        models
    }

    /// The aliases of a model.
    pub fn aliases_of(&self, name: &str) -> &[String] {
        self.model(name).map_or(&[], |model| &model.aliases)
    }

    /// Whether a name is an alias.
    pub fn is_alias(&self, name: &str) -> bool {
        self.aliases.contains_key(name)
    }

    /// The model's own name for a name or an alias.
    pub fn real_name<'a>(&self, name: &'a str) -> Cow<'a, str> {
        match self.aliases.get(name) {
            Some(real) => Cow::Owned(real.clone()),
            None => Cow::Borrowed(name),
        }
    }
}

/// The result of registering the declared models.
#[derive(Debug, Default)]
pub struct Registration {
    /// Models that were registered by this call.
    pub registered: Vec<Declared>,
    /// The names of models that could not be registered, each with the reason.
    pub refused: Vec<(String, String)>,
}

/// How a declared model's file compares with the one that is loaded under its name.
enum Seen {
    /// The loaded model has this file, unchanged.
    Same,
    /// The loaded model has this file, which has changed: the model was loaded again, or could not
    /// be.
    Changed,
    /// Another file is at the declared path, or none.
    Other(Found),
    /// The file did not respond.
    Nothing,
}

/// Describes which settings of the declaration `now` a model that was loaded with `then` does not
/// use; `None` if it uses all.
fn kept_by_loaded(then: &Declared, now: &Declared) -> Option<String> {
    let template = |model: &Declared| model.defaults.template.clone();
    let differ = [
        ("template", template(then) != template(now)),
        ("draft", then.draft != now.draft),
        ("mmproj", then.mmproj != now.mmproj),
        ("lora", then.lora != now.lora),
        ("pin", then.pin != now.pin),
        ("preload", now.preload && !then.preload),
    ];
    let keys = differ.into_iter().filter(|(_, differs)| *differs);
    let keys: Vec<_> = keys.map(|(key, _)| key).collect();
    let message =
        "of a loaded model changes when it is loaded again: unload it, and request it over HTTP";
    (!keys.is_empty()).then(|| format!("{} {message}", keys.join(", ")))
}

/// The message that says why a declared model's file is not the one that is loaded.
fn other_file(model: &Declared, found: &Found, loaded: &Path) -> String {
    let (path, loaded) = (model.path.display(), loaded.display());
    match **found {
        Some(_) => format!("the file {loaded} is loaded under this name; unload it for {path}"),
        None => format!(
            "{path} is not there, or leads nowhere; what is loaded, of {loaded}, stays until it is unloaded"
        ),
    }
}

/// The real path of a declared model's file, if the file exists.
type Found = Arc<Option<PathBuf>>;

/// Holds the set of declared models in force.
#[derive(Debug, Default)]
pub(crate) struct Shelf(RwLock<Arc<Book>>);

impl Shelf {
    fn get(&self) -> Arc<Book> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn replace(&self, book: Book) -> Arc<Book> {
        let mut place = self.0.write().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut place, Arc::new(book))
    }
}

impl Service {
    /// The models that are declared now.
    pub fn declared(&self) -> Arc<Book> {
        self.shelf.get()
    }

    /// The model's own name for a name or an alias.
    pub fn real_name<'a>(&self, name: &'a str) -> Cow<'a, str> {
        self.shelf.get().real_name(name)
    }

    /// The model's own name for a name or an alias, with or without adapters appended.
    pub(crate) fn meant<'a>(&self, name: &'a str) -> Cow<'a, str> {
        self.real_name(self.without_adapters(name))
    }

    /// Sets the declared models, replacing the earlier ones. Their names are valid at once;
    /// [`Service::register_declared`] loads them.
    pub fn declare(&self, models: Vec<Declared>) {
        let book = Book::new(models);
        let names: Vec<_> = book.models.iter().map(|m| m.name.clone()).collect();
        let before = self.shelf.replace(book);
        self.forget_listing();
        for gone in before.models.iter().filter(|m| !names.contains(&m.name)) {
            let is_loaded = self.engine.model(&gone.name).is_ok();
            tracing::info!(model = ?gone.name, is_loaded, "no longer declared; a loaded model stays until it is unloaded");
        }
        // Whatever was loaded by hand under such a name could not be asked for any more.
        for model in self.declared().models() {
            for alias in &model.aliases {
                if self.engine.model(alias).is_ok() {
                    tracing::warn!(alias = ?alias, model = ?model.name, "a model is loaded under a name that is an alias now; the alias wins");
                }
            }
        }
    }

    /// Registers declared models that are not loaded, with their pins. A model that cannot be
    /// loaded is logged, and tried again at its first use over HTTP. Reports settings of
    /// declarations that already loaded models do not use.
    pub async fn register_declared(self: &Arc<Self>) -> Registration {
        let mut registration = Registration::default();
        self.take_late();
        let book = self.declared();
        let models = book.drafts_first();
        // Who asks for one of them waits until it is there, or cannot be.
        let mut opening = self.opening.begin(models.iter().map(|model| &model.name));
        let mut looked = self.look_at_loaded(&models).await;
        for model in models {
            // What is left needs no model any more.
            if self.is_draining() {
                break;
            }
            let looked = looked.remove(&model.name);
            self.register_or_follow(model, looked, &mut registration)
                .await;
            opening.done(&model.name);
        }
        self.renew_others(&mut registration).await;
        registration
    }

    /// Registers a declared model. If it is loaded already, reports the settings of its declaration
    /// that it does not use.
    async fn register_or_follow(
        self: &Arc<Self>,
        model: &Declared,
        looked: Option<(Arc<LoadedModel>, Option<Found>)>,
        registration: &mut Registration,
    ) {
        let Ok(loaded) = self.engine.model(&model.name) else {
            return self.register(model, registration).await;
        };
        let found = match looked {
            Some((seen, found)) if Arc::ptr_eq(&seen, &loaded) => found,
            // It was loaded since.
            _ => {
                let mut looked = self.look_at_loaded(&[model]).await;
                looked.remove(&model.name).and_then(|(_, found)| found)
            }
        };
        self.follow_up(model, &loaded, found, registration).await;
    }

    /// Registers declared models whose model directory did not respond at the start. Those that a
    /// request has loaded meanwhile are reported as registered, too.
    pub async fn register_late(self: &Arc<Self>) -> Registration {
        let mut registration = Registration::default();
        let late = self.take_late();
        let book = self.declared();
        let late = book
            .drafts_first()
            .into_iter()
            .filter(|model| late.contains(&model.name));
        for model in late {
            match self.engine.model(&model.name) {
                Ok(_) => registration.registered.push(model.clone()),
                Err(_) => self.register(model, &mut registration).await,
            }
        }
        registration
    }

    /// Loads a declared model, or remembers it for later if its directory does not respond.
    async fn register(self: &Arc<Self>, model: &Declared, registration: &mut Registration) {
        loop {
            let silent = self.dirs.silent().count();
            let failure = match self.declared_loaded(model, &Arrival::now(None)).await {
                Ok(_) => return registration.registered.push(model.clone()),
                Err(failure) => failure,
            };
            if failure.reason() == Reason::ModelDirSilent {
                self.late().insert(model.name.clone());
                // Whoever waits for directories may have looked before it was there.
                if self.dirs.silent().count() != silent && self.late().remove(&model.name) {
                    continue;
                }
            }
            let reason = failure.message().to_owned();
            return registration.refused.push((model.name.clone(), reason));
        }
    }

    fn late(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.late.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take_late(&self) -> BTreeSet<String> {
        std::mem::take(&mut *self.late())
    }

    /// Reloads declared models whose files have changed in place, registers those whose directories
    /// had not responded, and reports settings that other loaded models do not use.
    pub async fn renew_declared(self: &Arc<Self>) -> Registration {
        let mut registration = Registration::default();
        let book = self.declared();
        let models = book.drafts_first();
        let mut looked = self.look_at_loaded(&models).await;
        for model in models {
            if let Some((loaded, found)) = looked.remove(&model.name) {
                self.follow_up(model, &loaded, found, &mut registration)
                    .await;
            }
        }
        self.renew_others(&mut registration).await;
        let late = self.register_late().await;
        registration.registered.extend(late.registered);
        registration.refused.extend(late.refused);
        registration
    }

    /// Reloads a declared model as [`Service::renew_one`] does, or reports the settings that the
    /// loaded one keeps.
    async fn follow_up(
        self: &Arc<Self>,
        model: &Declared,
        loaded: &Arc<LoadedModel>,
        found: Option<Found>,
        registration: &mut Registration,
    ) {
        let kept = match self.renew_one(model, loaded, found, registration).await {
            Seen::Same => {
                let then = self.origins.declared_as(loaded);
                then.and_then(|then| kept_by_loaded(&then, model))
            }
            Seen::Other(found) => Some(other_file(model, &found, loaded.path())),
            Seen::Changed | Seen::Nothing => None,
        };
        if let Some(reason) = kept {
            tracing::warn!(model = ?model.name, "{reason}");
            registration.refused.push((model.name.clone(), reason));
        }
    }

    /// Probes the files of those of `models` that are loaded, all at once, so that hung ones cost
    /// one wait together.
    async fn look_at_loaded(
        &self,
        models: &[&Declared],
    ) -> HashMap<String, (Arc<LoadedModel>, Option<Found>)> {
        let loaded = models.iter().filter_map(|model| {
            let loaded = self.engine.model(&model.name).ok()?;
            Some((*model, loaded))
        });
        let loaded: Vec<_> = loaded.collect();
        // Several models may be of one file, each with a mapping of its own.
        let mut files: HashMap<PathBuf, Vec<_>> = HashMap::new();
        for (model, loaded) in &loaded {
            let files = files.entry(model.path.clone()).or_default();
            files.push(Arc::clone(loaded.file()));
        }
        let looks = files.into_iter().map(|(path, files)| {
            let asked = path.clone();
            let look = move || {
                // What it finds is asked for later.
                files.iter().for_each(|file| _ = file.check_unchanged());
                asked.canonicalize().ok()
            };
            (path, look)
        });
        let looks: Vec<_> = looks.collect();
        let shared = Arc::clone(&self.looks_at_declared);
        let looked = tokio::task::spawn_blocking(move || shared.look_anew(looks)).await;
        let looked = looked.unwrap_or_default();
        let found = loaded.into_iter().map(|(model, loaded)| {
            let found = looked.get(&model.path).cloned();
            (model.name.clone(), (loaded, found))
        });
        found.collect()
    }

    /// Reloads a declared model if its file has changed, as the probe `found`. Does nothing if
    /// another file is loaded, or if the file did not respond.
    async fn renew_one(
        self: &Arc<Self>,
        model: &Declared,
        loaded: &Arc<LoadedModel>,
        found: Option<Found>,
        registration: &mut Registration,
    ) -> Seen {
        let refused = &mut registration.refused;
        let Some(found) = found else {
            let path = model.path.display();
            tracing::warn!(model = ?model.name, path = ?model.path, "the file of a declared model does not answer, or slowly; what is loaded of it stays");
            let reason = format!(
                "{path} does not answer, or slowly, so that what is loaded stays; check the server or the mount that it \
                 lies on, and reload again"
            );
            refused.push((model.name.clone(), reason));
            return Seen::Nothing;
        };
        if found.as_ref().is_none() {
            return Seen::Other(found);
        }
        let is_other = found.as_deref() != Some(loaded.path());
        if is_other && !self.is_replaced_by(loaded, model) {
            return Seen::Other(found);
        }
        let renewed = self
            .as_its_file_is(Arc::clone(loaded), &Arrival::now(None))
            .await;
        match renewed {
            Ok(Some(there)) if Arc::ptr_eq(&there, loaded) => {
                return if is_other {
                    Seen::Other(found)
                } else {
                    Seen::Same
                };
            }
            Ok(_) => registration.registered.push(model.clone()),
            Err(failure) => {
                let reason = failure.message().to_owned();
                registration.refused.push((model.name.clone(), reason));
            }
        }
        Seen::Changed
    }

    /// Whether a model was loaded from its declared path, so that another file at that path
    /// replaces it.
    fn is_replaced_by(&self, loaded: &Arc<LoadedModel>, model: &Declared) -> bool {
        let then = self.origins.declared_as(loaded);
        then.is_some_and(|then| then.path == model.path)
    }

    /// Loads one declared model, without its preload.
    pub(crate) async fn load_declared(
        self: &Arc<Self>,
        model: &Declared,
        arrival: &Arrival,
    ) -> Result<(), Failure> {
        let load = model.load();
        let mut asked = format!("path={:?} pin={} as declared", load.path, load.pin);
        if let Some(draft) = &load.draft {
            asked += &format!(" draft={draft:?}");
        }
        if let Some(mmproj) = &load.mmproj {
            asked += &format!(" mmproj={mmproj:?}");
        }
        let log = RequestLog::audit("Load", &load.name, &asked, arrival);
        // Nobody reads the steps of such a load.
        let (steps, _) = mpsc::channel(1);
        let origin = Origin::Declared(Box::new(model.clone()));
        let loaded = match self.with_draft_loaded(load, arrival).await {
            Ok(load) => self.load_as(&load, &steps, arrival.passed(), origin).await,
            Err(failure) => Err(failure),
        };
        log.end(loaded).map(drop)
    }

    /// Preloads those of `models` that are declared with `preload`, one after the other.
    pub async fn preload_declared(&self, models: &[Declared]) {
        for model in models.iter().filter(|model| model.preload) {
            let log = RequestLog::audit("Preload", &model.name, "as declared", &Arrival::now(None));
            // The log has said why, where it failed. Where the device was released, is lost, or
            // the engine ends, the others are not wanted either.
            let ended = log.end(self.preload_to_end(&model.name).await);
            if ended.is_err_and(|failure| failure.reason() == Reason::NotServing) {
                return;
            }
        }
    }

    async fn preload_to_end(&self, name: &str) -> Result<(), Failure> {
        let mut events = self.preload(name, None)?;
        loop {
            match events.next().await {
                Some(PreloadEvent::Progress { .. }) => {}
                Some(PreloadEvent::Done { .. }) => return Ok(()),
                Some(PreloadEvent::Failed(error)) => return Err(refusals::from_engine(&error)),
                None => return Err(failure::engine_gone()),
            }
        }
    }

    /// Rejects a load under a name that is an alias of another model.
    pub(crate) fn refuse_alias(&self, name: &str) -> Result<(), Failure> {
        match self.declared().aliases.get(name) {
            Some(real) => Err(failure::invalid(
                "name",
                &format!(
                    "'{name}' is an alias of the model '{real}' in the daemon's configuration; choose another name"
                ),
            )),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
#[path = "declared_tests.rs"]
mod tests;
