//! The properties of a model that its chats depend on.

use rocmforge_tokenizer::{ChatTemplate, Tokenizer};
use rocmforge_vision::Rules;

/// A model, as far as prompts and formats depend on it.
#[derive(Debug, Clone, Copy)]
pub struct ChatModel<'a> {
    /// Name that clients use.
    pub name: &'a str,
    /// Architecture that the model file names.
    pub architecture: &'a str,
    /// Whether the model is an encoder, which generates no text.
    pub is_encoder: bool,
    /// Tokenizer of the model.
    pub tokenizer: &'a Tokenizer,
    /// Chat template of the model, if there is one.
    pub template: Option<&'a ChatTemplate>,
    /// Vision tower, where the model reads images.
    pub tower: Option<Tower<'a>>,
}

/// The properties of a vision tower that prompts depend on.
#[derive(Debug, Clone, Copy)]
pub struct Tower<'a> {
    /// Type of the projector, as its file names it.
    pub projector: &'a str,
    /// Rules by which images are resized and cut.
    pub rules: Rules,
}

impl<'a> ChatModel<'a> {
    /// Source text of the chat template, if there is a usable one.
    pub fn template_source(&self) -> Option<&'a str> {
        self.template.and_then(|template| template.source().ok())
    }
}
