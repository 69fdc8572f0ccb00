//! From a dialect's request to a generation that runs: the same steps for all of them.

use std::sync::Arc;

use rocmforge_service::check::{self, SamplingFields, Violations};
use rocmforge_service::failure::Failure;
use rocmforge_service::generation::{Running, Wanted};
use rocmforge_service::prompt::{Prompt, no_template};
use rocmforge_tokenizer::{Chat, Message};
use serde_json::{Map, Value};

use super::call::Call;
use super::parts::Splitter;
use super::reply::Generation;
use super::tool_calls::{self, Tools};

/// Most answers of a request.
pub(super) const CHOICES_MAX: u32 = 8;

/// A conversation that is to be answered.
#[derive(Debug)]
pub(super) struct Conversation {
    pub(super) model: String,
    pub(super) messages: Vec<Message>,
    pub(super) tools: Tools,
    /// More variables for the template.
    pub(super) kwargs: Map<String, Value>,
    pub(super) sampling: SamplingFields,
    pub(super) n_ctx: Option<i32>,
    /// Answers that are wanted, at most [`CHOICES_MAX`].
    pub(super) choices: u32,
    /// What a refusal calls the messages.
    pub(super) field: &'static str,
}

/// A text that is to be continued.
#[derive(Debug)]
pub(super) struct Continuation {
    pub(super) model: String,
    pub(super) prompt: Prompt,
    pub(super) sampling: SamplingFields,
    pub(super) n_ctx: Option<i32>,
    /// Answers that are wanted, at most [`CHOICES_MAX`].
    pub(super) choices: u32,
    pub(super) field: &'static str,
}

/// Checks the rest of a conversation, and hands it to the engine. `violations` are those that were
/// found before.
pub(super) async fn chat(
    call: &Call,
    asked: Conversation,
    mut violations: Violations,
) -> Result<Generation, Failure> {
    let mut log = call.log(&asked.model);
    let result = async {
        let roles: Vec<_> = asked.messages.iter().map(|m| m.role.as_str()).collect();
        check::messages(&roles, &mut violations);
        let reuse = asked.sampling.reuse_prompt.unwrap_or(true);
        let service = &call.service;
        let mut sampling = service.sampling(&asked.model, asked.sampling, &mut violations);
        let n_ctx = check::n_ctx(asked.n_ctx, &mut violations);
        violations.result()?;
        let model = service
            .model_at_first_use("model", &asked.model, &call.arrival)
            .await?;
        if model.template().is_none() {
            return Err(no_template(&model));
        }
        tool_calls::check_model(&asked.tools, &model)?;
        sampling.format = tool_calls::format(&asked.tools, sampling.format, &model)?;
        // Ollama's clients send a length for all models, whatever theirs.
        let n_ctx = service.n_ctx_at_most(n_ctx, &model);
        let mut chat = Chat::new(asked.messages);
        chat.tools.clone_from(&asked.tools.described);
        chat.template_kwargs = asked.kwargs;
        let wanted = Wanted {
            model: Arc::clone(&model),
            prompt: Prompt::Chat(chat),
            field: asked.field,
            sampling,
            n_ctx,
            class: service.class(&asked.model, None),
            reuse,
        };
        let choices = service.generate_choices(wanted, asked.choices, call.arrival, &mut log);
        let split = |running: Running| {
            let splitter = Splitter::for_chat(&model, &running.tail, asked.tools.clone());
            (running, splitter)
        };
        Ok(choices.await?.into_iter().map(split).collect())
    };
    match result.await {
        Ok(choices) => Ok(Generation::new(choices, log, call)),
        Err(failure) => log.end(Err(failure)),
    }
}

/// Checks the rest of a continuation, and hands it to the engine.
pub(super) async fn text(
    call: &Call,
    asked: Continuation,
    mut violations: Violations,
) -> Result<Generation, Failure> {
    let mut log = call.log(&asked.model);
    let result = async {
        let reuse = asked.sampling.reuse_prompt.unwrap_or(true);
        let service = &call.service;
        let sampling = service.sampling(&asked.model, asked.sampling, &mut violations);
        let n_ctx = check::n_ctx(asked.n_ctx, &mut violations);
        violations.result()?;
        let model = service
            .model_at_first_use("model", &asked.model, &call.arrival)
            .await?;
        // Ollama's clients send a length for all models, whatever theirs.
        let n_ctx = service.n_ctx_at_most(n_ctx, &model);
        if let Prompt::Ids(ids) = &asked.prompt {
            check::ids(asked.field, ids, model.model().info().n_vocab)?;
        }
        let wanted = Wanted {
            model,
            prompt: asked.prompt,
            field: asked.field,
            sampling,
            n_ctx,
            class: service.class(&asked.model, None),
            reuse,
        };
        let choices = service.generate_choices(wanted, asked.choices, call.arrival, &mut log);
        let split = |running: Running| (running, Splitter::plain());
        Ok(choices.await?.into_iter().map(split).collect())
    };
    match result.await {
        Ok(choices) => Ok(Generation::new(choices, log, call)),
        Err(failure) => log.end(Err(failure)),
    }
}
