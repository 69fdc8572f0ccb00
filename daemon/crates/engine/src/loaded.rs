//! A model that clients can name: its file, hyperparameters, plan, tokenizer and template. Immutable and shared.

use std::path::Path;
use std::sync::Arc;

use rocmforge_gguf::{Gguf, MappedFile};
use rocmforge_model::Model;
use rocmforge_tokenizer::{ChatTemplate, Tokenizer};

use crate::error::Error;

/// Longest name of a model in bytes.
pub const MODEL_NAME_MAX: usize = 128;

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
}

/// A registered model.
#[derive(Debug)]
pub struct LoadedModel {
    name: String,
    file: Arc<MappedFile>,
    model: Model,
    tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
}

impl LoadedModel {
    /// The name that clients use.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The file, with links resolved.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// The open file.
    pub fn file(&self) -> &Arc<MappedFile> {
        &self.file
    }

    /// Hyperparameters, segments and plan.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// The chat template, if the file has one.
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref()
    }
}

/// Reads an open file's header and makes the model of it. Reads no tensor data. Takes milliseconds; meant for a
/// blocking thread.
///
/// # Errors
/// [`Error::BadModel`], [`Error::Unsupported`], [`Error::DataLoss`] if the file changes meanwhile, and
/// [`Error::InvalidArgument`] for the name.
pub fn prepare(
    name: &str,
    file: MappedFile,
    progress: &mut dyn FnMut(PrepareStage),
) -> Result<PreparedModel, Error> {
    check_name(name)?;
    let bad = |message: String| Error::BadModel {
        path: file.path().to_owned(),
        message,
    };
    let gguf = Gguf::open(&file).map_err(|e| crate::error::from_gguf(name, file.path(), e))?;
    progress(PrepareStage::Header);
    let tokenizer =
        Tokenizer::from_gguf(&gguf).map_err(|e| crate::error::from_tokenizer(file.path(), &e))?;
    let tokenizer = Arc::new(tokenizer);
    // A template that does not parse is no reason to refuse the file: chats say what is wrong with it.
    let template = ChatTemplate::from_gguf(&gguf, &tokenizer);
    progress(PrepareStage::Tokenizer);
    let model = Model::from_gguf(&gguf).map_err(|e| crate::error::from_model(file.path(), e))?;
    if tokenizer.n_vocab() != model.hparams().n_vocab as usize {
        return Err(bad(format!(
            "the vocabulary has {} tokens but token_embd.weight has {} rows",
            tokenizer.n_vocab(),
            model.hparams().n_vocab
        )));
    }
    progress(PrepareStage::Plan);
    Ok(PreparedModel {
        loaded: LoadedModel {
            name: name.to_owned(),
            file: Arc::new(file),
            model,
            tokenizer,
            template,
        },
    })
}

fn check_name(name: &str) -> Result<(), Error> {
    let fine = |c: char| c.is_ascii_alphanumeric() || "._-:/@+".contains(c);
    if name.is_empty() || name.len() > MODEL_NAME_MAX || !name.chars().all(fine) {
        return Err(Error::InvalidArgument {
            field: "name",
            message: format!(
                "'{}' is no model name: 1 to {MODEL_NAME_MAX} letters, digits and any of . _ - : / @ +",
                name.chars().take(MODEL_NAME_MAX).collect::<String>()
            ),
        });
    }
    Ok(())
}
