//! Describes a loaded model to the crate `chat`.

use rocmforge_chat::model::{ChatModel, Tower};
use rocmforge_engine::LoadedModel;

/// The properties of a loaded model that prompts and formats depend on.
pub fn chat_model(model: &LoadedModel) -> ChatModel<'_> {
    let tower = model.tower().and_then(|tower| tower.model().tower());
    ChatModel {
        name: model.name(),
        architecture: model.model().info().architecture,
        is_encoder: model.model().plan().both_ways,
        tokenizer: model.tokenizer(),
        template: model.template(),
        tower: tower.zip(model.image_rules()).map(|(tower, rules)| Tower {
            projector: tower.projector,
            rules,
        }),
    }
}
