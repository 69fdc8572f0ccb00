//! Loads models: from a file's path to a model that requests can name.

use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rocmforge_engine::api::{ModelStatus, PreloadEvent, Registered, Snapshot};
use rocmforge_engine::{
    ADAPTER_SCALE_MAX, ADAPTERS_MAX, Beside, Error, Events, LoadedModel, MODELS_MAX, PrepareStage,
    PreparedModel, check_scale, prepare_among, prepare_beside,
};
use rocmforge_failure::{self as failure, Failure, Violations};
use rocmforge_gguf::MappedFile;
use tokio::sync::mpsc;

use crate::Service;
use crate::adapters::AdapterSpec;
use crate::arrival::Arrival;
use crate::model_files::ModelFileError;
use crate::naming::default_name;
use crate::origins::Origin;
use crate::projectors::{ProjectorError, projector_of};
use crate::refusals;
use crate::standing::looks_same;

/// How long a change that the engine has confirmed may take to show in its snapshot.
const PUBLISH_WAIT_MAX: Duration = Duration::from_secs(2);
/// How long the model of a failed load may take to be unloaded, and how often that is tried.
const FORGET_WAIT_MAX: Duration = Duration::from_secs(10);
const FORGET_RETRY: Duration = Duration::from_millis(20);

/// A step of loading a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadStep {
    /// The load has reached this step of reading the header.
    Header(PrepareStage),
    /// Progress of the upload.
    Preload {
        /// Bytes of the model's segments that are resident so far.
        done_bytes: u64,
        /// Bytes of all of the model's segments.
        total_bytes: u64,
    },
}

/// Channel for the steps of a load. If it is full or has no reader, steps of the header are
/// dropped.
pub type Steps = mpsc::Sender<LoadStep>;

/// A checked request to load a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Load {
    /// Path of the model's file, absolute or below a model directory.
    pub path: PathBuf,
    /// Name that the model gets.
    pub name: String,
    /// Whether all segments are pinned.
    pub pin: bool,
    /// Whether as much as fits is uploaded.
    pub preload: bool,
    /// Chat template that replaces the file's.
    pub template: Option<Arc<str>>,
    /// Name or alias of the draft model.
    pub draft: Option<String>,
    /// The projector's file, absolute or below a model directory; `None` takes one beside the
    /// model's file that fits.
    pub mmproj: Option<PathBuf>,
    /// The model's adapters.
    pub lora: Vec<AdapterSpec>,
}

impl Load {
    /// Checks a request to load a model. For an empty `name` the model gets its file's name.
    ///
    /// # Errors
    /// INVALID_ARGUMENT.
    pub fn checked(path: &str, name: &str, pin: bool, preload: bool) -> Result<Self, Failure> {
        let path = PathBuf::from(path);
        let mut violations = Violations::default();
        if path.as_os_str().is_empty() {
            violations.add(
                "path",
                "empty; give the path of a GGUF file, absolute or relative to a model directory",
            );
        }
        let name = if name.is_empty() {
            default_name(&path)
        } else {
            name.to_owned()
        };
        if name.is_empty() {
            violations.add(
                "name",
                "empty, and the path has no file name to take it from; give a name",
            );
        }
        violations.result()?;
        Ok(Self {
            path,
            name,
            pin,
            preload,
            template: None,
            draft: None,
            mmproj: None,
            lora: Vec::new(),
        })
    }

    /// Sets the name of the draft model; an empty name sets none.
    #[must_use]
    pub fn with_draft(mut self, name: &str) -> Self {
        self.draft = (!name.is_empty()).then(|| name.to_owned());
        self
    }

    /// Sets the projector's path; an empty path sets none.
    #[must_use]
    pub fn with_mmproj(mut self, path: &str) -> Self {
        self.mmproj = (!path.is_empty()).then(|| PathBuf::from(path));
        self
    }

    /// Sets the LoRA adapters.
    ///
    /// # Errors
    /// INVALID_ARGUMENT for too many, an empty path and an invalid scale.
    pub fn with_lora(mut self, lora: Vec<AdapterSpec>) -> Result<Self, Failure> {
        let mut violations = Violations::default();
        if lora.len() > ADAPTERS_MAX {
            let why = format!("{} of them; at most {ADAPTERS_MAX}", lora.len());
            violations.add("lora", why);
        }
        for spec in &lora {
            if spec.path.as_os_str().is_empty() {
                violations.add(
                    "lora.path",
                    "empty; give the path of an adapter's GGUF file",
                );
            }
            if check_scale(spec.scale).is_err() {
                let why = format!(
                    "{} is no scale: from -{ADAPTER_SCALE_MAX} to {ADAPTER_SCALE_MAX}",
                    spec.scale
                );
                violations.add("lora.scale", why);
            }
        }
        violations.result()?;
        self.lora = lora;
        Ok(self)
    }
}

/// A loaded model of the same file, under whatever name.
fn same_file(snapshot: &Snapshot, file: &MappedFile) -> Option<Arc<LoadedModel>> {
    let mut models = snapshot.models.iter().map(|status| &status.model);
    models.find(|model| model.file().is_same_as(file)).cloned()
}

/// The failure of a load whose client is gone.
fn waiter_gone<T>(_: T) -> Failure {
    refusals::from_engine(&Error::Cancelled)
}

impl Service {
    /// Loads a model for a client's call, reporting progress to `steps`, and returns its status. If
    /// `stop` completes first, or anything fails, the model is unloaded again, unless other
    /// requests use it for too long; a model that was loaded before stays.
    ///
    /// # Errors
    /// Those of the file and of the engine, and the failure that `stop` returns.
    pub async fn load(
        self: &Arc<Self>,
        load: &Load,
        steps: &Steps,
        stop: impl Future<Output = Failure>,
    ) -> Result<ModelStatus, Failure> {
        let (status, _) = self.load_as(load, steps, stop, Origin::ByHand).await?;
        self.remember().await;
        Ok(status)
    }

    /// As [`Service::load`], for any origin. Also returns whether this call loaded the model: one
    /// that was loaded before keeps its template.
    pub(crate) async fn load_as(
        &self,
        load: &Load,
        steps: &Steps,
        stop: impl Future<Output = Failure>,
        origin: Origin,
    ) -> Result<(ModelStatus, bool), Failure> {
        self.refuse_alias(&load.name)?;
        self.make_way_for(load).await;
        let mut stop = pin!(stop);
        let prepared = tokio::select! {
            prepared = self.prepared(load, steps) => prepared?,
            failure = &mut stop => return Err(failure),
        };
        // Not stopped: once the engine has it, only its answer tells what there is to undo.
        let Registered { model, is_new } = self.registered(prepared).await?;
        self.note_origin(&model, is_new, load, origin);
        let mut kept = if load.preload {
            tokio::select! {
                done = self.preload_all(&model, steps) => done,
                failure = &mut stop => Err(failure),
            }
        } else {
            Ok(())
        };
        if kept.is_ok() && load.pin {
            kept = self.pin_all(&model).await;
        }
        match kept {
            Ok(()) => Ok((self.published(&model).await?, is_new)),
            Err(failure) => {
                if is_new {
                    self.forget(&load.name).await;
                }
                Err(failure)
            }
        }
    }

    /// Loads a model in place of `old`, which has the same name and is unloaded once the new file
    /// has been read; its requests end. If the new file cannot be read, `old` stays.
    pub(crate) async fn load_in_place_of(
        &self,
        old: &Arc<LoadedModel>,
        load: &Load,
        steps: &Steps,
        origin: Origin,
    ) -> Result<Arc<LoadedModel>, Failure> {
        let prepared = self.prepared(load, steps).await?;
        match self.engine.unload(old.name(), true).await {
            Ok(_) | Err(Error::UnknownModel { .. }) => {}
            Err(error) => return Err(refusals::from_engine(&error)),
        }
        let Registered { model, is_new } = self.registered(prepared).await?;
        self.note_origin(&model, is_new, load, origin);
        if load.pin
            && let Err(failure) = self.pin_all(&model).await
        {
            let reason = failure.message();
            tracing::warn!(model = ?model.name(), reason, "a model that was loaded again is not pinned any more");
        }
        Ok(self.published(&model).await?.model)
    }

    /// Records the origin of a load, also if a request had opened the model before.
    fn note_origin(&self, model: &Arc<LoadedModel>, is_new: bool, load: &Load, origin: Origin) {
        let is_opened = || {
            let known = self.origins.of(model);
            known.is_none_or(|known| known.origin == Origin::FirstUse)
        };
        if is_new || origin == Origin::ByHand && is_opened() {
            self.origins.note(model, load, origin);
        }
    }

    async fn pin_all(&self, model: &LoadedModel) -> Result<(), Failure> {
        let pinned = self.engine.pin(model.name(), None, true).await;
        pinned
            .map(drop)
            .map_err(|error| refusals::from_engine(&error))
    }

    /// Closes a model of this name that a request opened, if its file has changed or is not the one
    /// to load.
    async fn make_way_for(&self, load: &Load) {
        self.closed_or_kept(&load.name).await;
        let Ok(there) = self.engine.model(&load.name) else {
            return;
        };
        let known = self.origins.of(&there);
        let is_opened = known.is_some_and(|known| known.origin == Origin::FirstUse);
        let is_same = looks_same(&load.path, there.file());
        drop(there);
        if is_opened && !is_same {
            self.close(&load.name, "a load has its name").await;
        }
    }

    /// Registers a model; if too many are loaded, closes one that a request opened.
    async fn registered(&self, prepared: PreparedModel) -> Result<Registered, Failure> {
        let models = self.engine.snapshot().models.len();
        if models >= MODELS_MAX {
            // If none can be closed the engine refuses the load.
            self.close_one().await;
        }
        let registered = self.engine.register(prepared).await;
        registered.map_err(|error| refusals::from_engine(&error))
    }

    /// Loads the draft model of a load first, and puts its own name into the load.
    ///
    /// # Errors
    /// NOT_FOUND with the available names, and those of the draft model's load.
    pub async fn with_draft_loaded(
        self: &Arc<Self>,
        mut load: Load,
        arrival: &Arrival,
    ) -> Result<Load, Failure> {
        if let Some(name) = &load.draft {
            // One that is loaded is taken as it is: its file is looked at when requests come.
            let loaded = self.engine.model(&self.real_name(name)).ok();
            let found = match loaded {
                Some(found) => found,
                None => self.draft_at_first_use(name, arrival).await?,
            };
            load.draft = Some(found.name().to_owned());
        }
        Ok(load)
    }

    /// Unloads the model of a failed load. Work for it may take a moment to end.
    async fn forget(&self, name: &str) {
        let give_up = Instant::now() + FORGET_WAIT_MAX;
        loop {
            match self.engine.unload(name, false).await {
                Ok(_) | Err(Error::UnknownModel { .. }) => return,
                Err(error) if Instant::now() >= give_up => {
                    tracing::warn!(model = ?name, %error, "a load failed after the model was registered, and it stays");
                    return;
                }
                Err(_) => tokio::time::sleep(FORGET_RETRY).await,
            }
        }
    }

    /// Opens the file and reads its header; if no file descriptor is free, closes models that
    /// requests opened first.
    async fn prepared(&self, load: &Load, steps: &Steps) -> Result<PreparedModel, Failure> {
        loop {
            match self.read_header(load, steps).await? {
                Ok(prepared) => return Ok(prepared),
                Err(_) if self.close_one().await => {}
                Err(full) => return Err(full),
            }
        }
    }

    /// Opens the file and reads its header. The inner failure says that too many files are open.
    async fn read_header(
        &self,
        load: &Load,
        steps: &Steps,
    ) -> Result<Result<PreparedModel, Failure>, Failure> {
        let (dirs, path, name, steps) = (
            Arc::clone(&self.dirs),
            load.path.clone(),
            load.name.clone(),
            // One that hangs must not keep the reader of the steps waiting.
            steps.downgrade(),
        );
        let (template, draft) = (load.template.clone(), load.draft.clone());
        let (mmproj, lora) = (load.mmproj.clone(), load.lora.clone());
        let engine = self.engine.clone();
        let read = move || {
            let file = match dirs.open(&path) {
                Ok(file) => file,
                Err(error @ ModelFileError::TooManyFiles { .. }) => {
                    return Ok(Err(refusals::from_model_file(&error)));
                }
                Err(error) => return Err(refusals::from_model_file(&error)),
            };
            let projector = match projector_of(&dirs, (&path, &file), mmproj.as_deref()) {
                Ok(projector) => projector,
                Err(error @ ProjectorError::File(ModelFileError::TooManyFiles { .. })) => {
                    return Ok(Err(error.into_failure()));
                }
                Err(error) => return Err(error.into_failure()),
            };
            let adapters = lora.iter().map(|spec| spec.open(&dirs));
            let adapters = match adapters.collect::<Result<Vec<_>, _>>() {
                Ok(adapters) => adapters,
                Err(error @ ModelFileError::TooManyFiles { .. }) => {
                    return Ok(Err(refusals::from_model_file(&error)));
                }
                Err(error) => return Err(refusals::from_model_file(&error)),
            };
            // Not before: one that hangs would keep all models of now.
            let other = same_file(&engine.snapshot(), &file);
            drop(engine);
            let bytes = file.size_bytes();
            let mut progress = |at| {
                // A reader that is gone or asleep does not stop the load here; the next await
                // notices.
                if let Some(steps) = steps.upgrade() {
                    let _ = steps.try_send(LoadStep::Header(at));
                }
            };
            tracing::debug!(path = ?file.path(), bytes, "reading a model's header");
            let beside = Beside {
                projector,
                adapters,
            };
            let prepared = match beside.projector.is_none() && beside.adapters.is_empty() {
                true => prepare_among(&name, file, other.as_deref(), &mut progress),
                false => prepare_beside(&name, file, beside, &mut progress),
            };
            let prepared = prepared.and_then(|mut prepared| {
                if let Some(source) = &template {
                    prepared.set_template(source)?;
                }
                if let Some(name) = &draft {
                    prepared.set_draft(name);
                }
                Ok(prepared)
            });
            prepared
                .map(Ok)
                .map_err(|error| refusals::from_engine(&error))
        };
        self.loads.run(&load.path, read).await
    }

    /// Uploads as much of a model as fits, reporting progress to `steps`.
    async fn preload_all(&self, model: &LoadedModel, steps: &Steps) -> Result<(), Failure> {
        let mut events = self.preload(model.name(), None)?;
        loop {
            match events.next().await {
                Some(PreloadEvent::Progress {
                    done_bytes,
                    total_bytes,
                }) => steps
                    .send(LoadStep::Preload {
                        done_bytes,
                        total_bytes,
                    })
                    .await
                    .map_err(waiter_gone)?,
                Some(PreloadEvent::Done { .. }) => return Ok(()),
                Some(PreloadEvent::Failed(error)) => return Err(refusals::from_engine(&error)),
                None => return Err(failure::engine_gone()),
            }
        }
    }

    /// Starts a preload of some segments of a model, or of all.
    ///
    /// # Errors
    /// The engine accepts no work.
    pub fn preload(
        &self,
        name: &str,
        segments: Option<Vec<u32>>,
    ) -> Result<Events<PreloadEvent>, Failure> {
        self.engine
            .preload(name, segments)
            .map_err(|error| refusals::from_engine(&error))
    }

    /// The model's published status, which may appear a moment after the engine confirmed the load.
    async fn published(&self, model: &Arc<LoadedModel>) -> Result<ModelStatus, Failure> {
        let mut snapshots = self.engine.watch();
        let is_there =
            |snapshot: &Arc<Snapshot>| snapshot.models.iter().any(|m| Arc::ptr_eq(&m.model, model));
        let shown = tokio::time::timeout(PUBLISH_WAIT_MAX, snapshots.wait_for(is_there)).await;
        let found = match &shown {
            Ok(Ok(snapshot)) => snapshot
                .models
                .iter()
                .find(|m| Arc::ptr_eq(&m.model, model)),
            Ok(Err(_)) => return Err(failure::engine_gone()),
            Err(_) => None,
        };
        match found {
            Some(status) => Ok(status.clone()),
            None => Err(refusals::unloaded_meanwhile(model.name())),
        }
    }
}
