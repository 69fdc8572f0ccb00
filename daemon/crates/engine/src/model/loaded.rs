//! A model that clients can name: its file, hyperparameters, plan, tokenizer and
//! template. Immutable and shared.

use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use rocmforge_gguf::{Gguf, MappedFile};
use rocmforge_grammar::Vocabulary;
use rocmforge_model::{ImageSizes, Model};
use rocmforge_ops::{KV_BLOCK, KvType, Plan};
use rocmforge_tokenizer::{ChatTemplate, TemplateOrigin, Tokenizer};
use rocmforge_vision::{Filter, Rules, Sizes, Tiles};

use crate::api::error::{Error, from_read};
use crate::model::adapters::{self, AdapterFile, Joined, LoadedAdapters};
use crate::model::fetcher::{Fault, Fetcher, SILENT_AFTER};
use crate::model::header;
use crate::model::name::check_name;
use crate::model::projector::tower_model;

/// Size of a header, in bytes, from which on the allocator is asked to return freed memory to the
/// system after the load.
const LARGE_HEADER_BYTES: usize = 1 << 20;

/// A step of preparing a model, for progress reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrepareStage {
    /// The header is read and checked.
    Header,
    /// The vocabulary is read, and the tables of its tokenizer are built.
    Tokenizer,
    /// The weight map and the plan are made.
    Plan,
}

/// A model that is ready to be registered; made off the engine thread by [`prepare`].
#[derive(Debug)]
pub struct PreparedModel {
    pub(crate) loaded: LoadedModel,
    /// Name of the draft model.
    pub(crate) draft: Option<String>,
}

/// A registered model.
#[derive(Debug)]
pub struct LoadedModel {
    name: String,
    file: Arc<MappedFile>,
    fetcher: Arc<Fetcher>,
    contents: Arc<Contents>,
    /// Chat template that replaces the file's; `None` uses the file's.
    template: Option<ChatTemplate>,
    /// The vision tower from the model's projector file; `None` without one.
    tower: Option<Arc<LoadedModel>>,
    adapters: LoadedAdapters,
}

/// Approximate host memory, in bytes, that cache, device and snapshots use for one segment.
const SEGMENT_BYTES: usize = 512;

/// Host memory of a model beside its weights, and its file descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelMemory {
    /// Bytes that the model frees when it is closed.
    pub own_bytes: u64,
    /// Number of open file descriptors of the model's files.
    pub descriptors: u64,
    /// Number that models with the same vocabulary share.
    pub vocabulary: usize,
    /// Bytes of the vocabulary and its tables, which are freed with the last model that shares
    /// them.
    pub vocabulary_bytes: u64,
}

impl PreparedModel {
    /// Sets the draft model by name; it must be loaded when this model is registered.
    pub fn set_draft(&mut self, name: &str) {
        self.draft = Some(name.to_owned());
    }

    /// Renders chats with the template `source` instead of the file's.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a template that is too long.
    pub fn set_template(&mut self, source: &str) -> Result<(), Error> {
        let tokenizer = &self.loaded.contents.tokenizer;
        let name = |id: Option<u32>| {
            let bytes = id.and_then(|id| tokenizer.token_bytes(id));
            String::from_utf8_lossy(bytes.unwrap_or_default()).into_owned()
        };
        let (bos, eos) = (name(tokenizer.bos()), name(tokenizer.eos()));
        let template = ChatTemplate::new(source, &bos, &eos);
        self.loaded.template = Some(template.map_err(|error| Error::InvalidArgument {
            field: "template",
            message: error.to_string(),
        })?);
        Ok(())
    }
}

/// Model, tokenizer and template of a file, shared by all names under which the file is loaded.
#[derive(Debug)]
struct Contents {
    model: Model,
    tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
    /// The vocabulary for constrained output; made for the first request that needs it.
    grammars: OnceLock<Result<Arc<Vocabulary>, rocmforge_grammar::Error>>,
}

impl Drop for Contents {
    fn drop(&mut self) {
        rocmforge_device::give_back_heap_soon();
    }
}

impl LoadedModel {
    /// The model's name in requests.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Path of the model's file, with links resolved.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// The model's open file.
    pub fn file(&self) -> &Arc<MappedFile> {
        &self.file
    }

    /// The model's hyperparameters, segments and plan.
    pub fn model(&self) -> &Model {
        &self.contents.model
    }

    /// The plan of a pass: the one with adapters if `adapted`, that is, if any row of the pass uses
    /// an adapter.
    pub(crate) fn plan(&self, adapted: bool) -> &Plan {
        let model = self.model();
        let with = model.adapted_plan().filter(|_| adapted);
        with.unwrap_or(model.plan())
    }

    /// The vision tower that reads images for this model; `None` if it was prepared without a
    /// projector.
    pub fn tower(&self) -> Option<&Arc<LoadedModel>> {
        self.tower.as_ref()
    }

    /// The model's LoRA adapters; the list may be empty.
    pub fn adapters(&self) -> &LoadedAdapters {
        &self.adapters
    }

    /// Rules by which images are resized for the model's vision tower, if it has one.
    pub fn image_rules(&self) -> Option<Rules> {
        let tower = self.tower.as_ref()?.model().tower()?;
        let cut = |tiles: rocmforge_model::Tiles| Tiles {
            side: tiles.side,
            least: tiles.least,
            most: tiles.most,
        };
        Some(Rules {
            patch: tower.patch,
            merge: tower.merge,
            sizes: match tower.sizes {
                ImageSizes::Between {
                    min_pixels,
                    max_pixels,
                    enlarges,
                } => Sizes::Between {
                    min_pixels,
                    max_pixels,
                    enlarges,
                },
                ImageSizes::Square(side) => Sizes::Square(side),
                ImageSizes::Within { longest } => Sizes::Within { longest },
                ImageSizes::Padded { patches, side } => Sizes::Padded { patches, side },
                ImageSizes::Largest { tokens } => Sizes::Largest { tokens },
                ImageSizes::Nearest { tokens } => Sizes::Nearest { tokens },
                ImageSizes::SquareTiles(tiles) => Sizes::SquareTiles(cut(tiles)),
                ImageSizes::Tiled {
                    min_pixels,
                    max_pixels,
                    tiles,
                } => Sizes::Tiled {
                    min_pixels,
                    max_pixels,
                    tiles: cut(tiles),
                },
            },
            filter: match tower.filter {
                rocmforge_model::Filter::Bilinear => Filter::Bilinear,
                rocmforge_model::Filter::Bicubic => Filter::Bicubic,
                rocmforge_model::Filter::Lanczos => Filter::Lanczos,
            },
            mean: tower.mean,
            std: tower.std,
        })
    }

    /// The model's tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.contents.tokenizer
    }

    /// The first difference between this model's vocabulary and another model's; `None` if they are
    /// the same.
    pub(crate) fn vocabulary_differs(&self, other: &LoadedModel) -> Option<String> {
        if Arc::ptr_eq(&self.contents, &other.contents) {
            return None;
        }
        let (ours, theirs) = (self.tokenizer(), other.tokenizer());
        let (n, m) = (ours.n_vocab(), theirs.n_vocab());
        let text = |of: &Tokenizer, id| {
            let bytes = of.token_bytes(id).unwrap_or_default();
            String::from_utf8_lossy(bytes).into_owned()
        };
        let differs = |id: &u32| ours.token_bytes(*id) != theirs.token_bytes(*id);
        match (0..n.min(m) as u32).find(differs) {
            Some(id) => Some(format!(
                "token {id} is {:?} there and {:?} here",
                text(theirs, id),
                text(ours, id)
            )),
            None if n != m => Some(format!("it has {m} tokens there and {n} here")),
            None => None,
        }
    }

    /// The chat template in use: the one set at loading, else the file's; `None` if there is
    /// neither.
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref().or(self.contents.template.as_ref())
    }

    /// The vocabulary for constrained output. The first call makes it, which takes half a second
    /// for 128k tokens: call it on a blocking thread.
    ///
    /// # Errors
    ///
    /// The vocabulary cannot be used with grammars.
    pub fn grammars(&self) -> Result<&Arc<Vocabulary>, rocmforge_grammar::Error> {
        let made = self
            .contents
            .grammars
            .get_or_init(|| Vocabulary::shared(&self.contents.tokenizer));
        made.as_ref().map_err(Clone::clone)
    }

    /// Memory of the model beside weights, and its file descriptors.
    pub fn memory(&self) -> ModelMemory {
        let contents = &self.contents;
        let tokenizer = &contents.tokenizer;
        let grammars = contents.grammars.get().and_then(|made| made.as_ref().ok());
        let grammars = grammars.map_or(0, |vocabulary| vocabulary.memory_bytes());
        let template = self.template().and_then(|t| t.source().ok());
        let own = contents.model.memory_bytes()
            + contents.model.plan().segments.len() * SEGMENT_BYTES
            + template.map_or(0, str::len)
            + self.file.memory_bytes();
        let of_tower = self.tower.as_ref().map(|tower| tower.memory());
        let (tower_bytes, tower_parts) =
            of_tower.map_or((0, 0), |of| (of.own_bytes, of.descriptors));
        ModelMemory {
            own_bytes: own as u64 + tower_bytes,
            descriptors: self.file.parts().len() as u64
                + u64::from(!self.adapters.is_empty())
                + tower_parts,
            vocabulary: tokenizer.lexicon_id(),
            vocabulary_bytes: (tokenizer.lexicon_bytes() + grammars) as u64,
        }
    }

    /// Sets the KV cache's element type, `None` for the model's own default, where its head sizes
    /// allow it. Shared contents were registered before, with the engine's single type, and stay.
    pub(crate) fn set_kv_type(&mut self, ty: Option<KvType>) {
        if let Some(contents) = Arc::get_mut(&mut self.contents) {
            contents.model.set_kv_type(ty);
        }
        // A model's own default fits all its heads.
        let Some(ty) = ty else { return };
        let kept = self.model().plan().kv.iter().map(|g| g.layout);
        for layout in kept.filter(|layout| layout.ty != ty) {
            tracing::warn!(
                model = self.name,
                layers = layout.n_layer,
                head_dim_k = layout.head_dim_k,
                head_dim_v = layout.head_dim_v,
                "the KV cache of these layers stays {}: {} takes heads of a multiple of {KV_BLOCK} elements",
                layout.ty.name(),
                ty.name(),
            );
        }
    }

    /// The fetcher of the model's file, which reads ranges into the page cache.
    pub(crate) fn fetcher(&self) -> &Arc<Fetcher> {
        &self.fetcher
    }

    /// The fetcher of a file on a network file system, which may not respond; `None` for a local
    /// file.
    pub(crate) fn far(&self) -> Option<&Arc<Fetcher>> {
        self.file.is_far().then_some(&self.fetcher)
    }

    /// Reads ranges of a file on a network file system into the page cache and waits for them with
    /// a limit; does nothing for local files.
    ///
    /// # Errors
    /// [`Error::FileSilent`], [`Error::DataLoss`].
    pub(crate) fn bring(&self, ranges: impl IntoIterator<Item = Range<u64>>) -> Result<(), Error> {
        let Some(far) = self.far() else {
            return Ok(());
        };
        let fetch = far.begin(ranges, SILENT_AFTER);
        let came = fetch.and_then(|fetch| far.wait(fetch, SILENT_AFTER));
        came.map_err(|fault| from_fault(&self.name, self.path(), fault))
    }

    /// Takes over the contents of `other` if it is another name for the same file. Returns whether
    /// it is.
    pub(crate) fn share(&mut self, other: &LoadedModel) -> bool {
        // With another tower there may be other inputs.
        let inputs = |of: &Self| of.model().plan().inputs.len();
        // Those with adapters have plans of their own.
        let same = self.file.is_same_as(&other.file)
            && inputs(self) == inputs(other)
            && self.adapters.is_empty()
            && other.adapters.is_empty();
        if same {
            self.contents = Arc::clone(&other.contents);
        }
        same
    }
}

/// The error for a model whose file on a network file system cannot be read.
pub(crate) fn from_fault(name: &str, path: &Path, fault: Fault) -> Error {
    match fault {
        Fault::Silent(since) => Error::FileSilent {
            name: name.to_owned(),
            path: path.to_owned(),
            seconds: since.as_secs(),
        },
        Fault::Read(error) => from_read(name, path, error),
    }
}

/// As [`prepare`], but shares the contents of a model among `others` that was made of the same
/// file.
///
/// # Errors
/// As [`prepare`].
pub fn prepare_among<'a>(
    name: &str,
    file: MappedFile,
    others: impl IntoIterator<Item = &'a LoadedModel>,
    progress: &mut dyn FnMut(PrepareStage),
) -> Result<PreparedModel, Error> {
    let mut others = others.into_iter();
    let is_same = |other: &&LoadedModel| {
        other.file.is_same_as(&file) && other.tower.is_none() && other.adapters.is_empty()
    };
    let Some(other) = others.find(is_same) else {
        return prepare(name, file, progress);
    };
    check_name(name)?;
    file.check_unchanged()
        .map_err(|e| crate::api::error::from_gguf(name, file.path(), e))?;
    for stage in [
        PrepareStage::Header,
        PrepareStage::Tokenizer,
        PrepareStage::Plan,
    ] {
        progress(stage);
    }
    let file = Arc::new(file);
    Ok(PreparedModel {
        loaded: LoadedModel {
            name: name.to_owned(),
            fetcher: Arc::new(Fetcher::new(&file)),
            file,
            contents: Arc::clone(&other.contents),
            template: None,
            tower: None,
            adapters: LoadedAdapters::default(),
        },
        draft: None,
    })
}

/// As [`prepare`], for a model that reads images with the vision tower of `projector`, a file that
/// is named mmproj as a rule (`general.architecture` is `clip`).
///
/// # Errors
/// As [`prepare`], of either file; [`Error::Unsupported`] for a file that is no projector,
/// whose kind is not implemented, or which is for another model.
pub fn prepare_reading_images(
    name: &str,
    file: MappedFile,
    projector: MappedFile,
    progress: &mut dyn FnMut(PrepareStage),
) -> Result<PreparedModel, Error> {
    let beside = Beside {
        projector: Some(projector),
        adapters: Vec::new(),
    };
    prepare_beside(name, file, beside, progress)
}

/// What a model is loaded with besides its own file: a projector and adapters.
#[derive(Debug, Default)]
pub struct Beside {
    /// The projector with which the model reads images; see [`prepare_reading_images`].
    pub projector: Option<MappedFile>,
    /// The model's adapters (LoRA), at most [`rocmforge_model::ADAPTERS_MAX`].
    pub adapters: Vec<AdapterFile>,
}

/// Reads an open file's header and makes the model of it. Reads no tensor data. Takes milliseconds;
/// meant for a blocking thread.
///
/// # Errors
/// [`Error::BadModel`], [`Error::Unsupported`], [`Error::DataLoss`] if the file changes meanwhile,
/// and [`Error::InvalidArgument`] for the name.
pub fn prepare(
    name: &str,
    file: MappedFile,
    progress: &mut dyn FnMut(PrepareStage),
) -> Result<PreparedModel, Error> {
    prepare_beside(name, file, Beside::default(), progress)
}

/// As [`prepare`], for a model with a projector or adapters. Adapters are read whole.
///
/// # Errors
/// As [`prepare`] and [`prepare_reading_images`]; [`Error::InvalidArgument`] for an
/// adapter that does not fit the model.
pub fn prepare_beside(
    name: &str,
    file: MappedFile,
    beside: Beside,
    progress: &mut dyn FnMut(PrepareStage),
) -> Result<PreparedModel, Error> {
    check_name(name)?;
    let projector = beside.projector;
    let projector = projector.map(|file| tower_model(name, &file).map(|model| (file, model)));
    let projector = projector.transpose()?;
    let mut gguf = header::open(name, &file)?;
    header::refuse_other_kinds(&gguf, file.path())?;
    progress(PrepareStage::Header);
    let tokenizer = Arc::new(header::tokenizer(name, &file, &mut gguf)?);
    // A template that does not parse is no reason to refuse the file: chats say what is wrong with
    // it.
    let template = ChatTemplate::from_gguf(&gguf, &tokenizer);
    warn_of_defaults(name, &gguf, template.as_ref());
    progress(PrepareStage::Tokenizer);
    let tower = projector.as_ref().and_then(|(_, tower)| tower.tower());
    let (file, set, loaded_adapters) = match beside.adapters.is_empty() {
        true => (file, None, LoadedAdapters::default()),
        false => {
            let Joined { file, set, loaded } = adapters::join(name, file, &gguf, beside.adapters)?;
            (file, Some(set), loaded)
        }
    };
    let model = match (tower, &set) {
        (tower, Some(set)) => Model::with_adapters(&gguf, tower, set),
        (Some(tower), None) => Model::reading_images(&gguf, tower),
        (None, None) => Model::from_gguf(&gguf),
    };
    let model = model.map_err(|e| crate::api::error::from_model(file.path(), e))?;
    if tokenizer.n_vocab() != model.hparams().n_vocab as usize {
        return Err(Error::BadModel {
            path: file.path().to_owned(),
            message: crate::api::error::damaged(&format!(
                "the vocabulary has {} tokens but token_embd.weight has {} rows",
                tokenizer.n_vocab(),
                model.hparams().n_vocab
            )),
        });
    }
    header::tell_tolerated(name, file.path(), &gguf, &tokenizer, &model);
    progress(PrepareStage::Plan);
    if gguf.kept_bytes() >= LARGE_HEADER_BYTES {
        rocmforge_device::give_back_heap_soon();
    }
    let file = Arc::new(file);
    let tower = projector.map(|(file, model)| tower_beside(name, file, model, &tokenizer));
    Ok(PreparedModel {
        loaded: LoadedModel {
            name: name.to_owned(),
            fetcher: Arc::new(Fetcher::new(&file)),
            file,
            tower,
            adapters: loaded_adapters,
            contents: Arc::new(Contents {
                model,
                tokenizer,
                template,
                grammars: OnceLock::new(),
            }),
            template: None,
        },
        draft: None,
    })
}

/// Logs which properties of texts and chats the file does not state, so that defaults are assumed.
fn warn_of_defaults(name: &str, gguf: &Gguf, template: Option<&ChatTemplate>) {
    let says = |key| gguf.str(key).ok().flatten();
    if says("tokenizer.ggml.model") == Some("gpt2") && says("tokenizer.ggml.pre").is_none() {
        tracing::warn!(
            model = name,
            "the file does not say how its texts are split (tokenizer.ggml.pre); GPT-2's way is taken, and may be \
             wrong: convert the model again with a current converter"
        );
    }
    if template.map(ChatTemplate::origin) == Some(TemplateOrigin::Default) {
        tracing::warn!(
            model = name,
            "the file carries no chat template; chats are rendered as ChatML, which may not be the model's format: \
             set `template` of [[model]] to a file, or to a name such as chatml"
        );
    }
}

/// Makes the vision tower of a model. Clients cannot name it: its name has a space, which no
/// model's name may have.
fn tower_beside(
    name: &str,
    file: MappedFile,
    model: Model,
    tokenizer: &Arc<Tokenizer>,
) -> Arc<LoadedModel> {
    let file = Arc::new(file);
    Arc::new(LoadedModel {
        name: format!("{name} (vision tower)"),
        fetcher: Arc::new(Fetcher::new(&file)),
        file,
        contents: Arc::new(Contents {
            model,
            tokenizer: Arc::clone(tokenizer),
            template: None,
            grammars: OnceLock::new(),
        }),
        template: None,
        tower: None,
        adapters: LoadedAdapters::default(),
    })
}
