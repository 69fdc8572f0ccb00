//! Starts the generation of a request: the steps that all dialects share.

use rocmforge_chat::conversation;
use rocmforge_chat::parts::splitter::Splitter;
use rocmforge_chat::prompt::Prompt;
use rocmforge_chat::tool_calls::{Tools, forms};
use rocmforge_engine::LoadedModel;
use rocmforge_failure::{Failure, Violations};
use rocmforge_service::answering::Answering;
use rocmforge_service::answers::Generation;
use rocmforge_service::check::{self, SamplingFields};
use rocmforge_service::generation::{Running, Wanted};
use rocmforge_service::request_log::RequestLog;
use rocmforge_tokenizer::{Ending, Message};
use serde_json::{Map, Value};

use super::call::Call;

/// A conversation to continue, as a dialect's handler has parsed it.
#[derive(Debug, Clone)]
pub(super) struct Conversation {
    pub(super) model: String,
    pub(super) messages: Vec<Message>,
    pub(super) tools: Tools,
    /// More variables for the template.
    pub(super) kwargs: Map<String, Value>,
    /// Documents for templates that support them.
    pub(super) documents: Vec<Value>,
    /// How the rendered conversation ends.
    pub(super) ending: Ending,
    /// Whether the model should not reason unless the request asks for it, if its template has a
    /// switch.
    pub(super) is_quiet: bool,
    pub(super) sampling: SamplingFields,
    pub(super) n_ctx: Option<i32>,
    /// Number of completions, at most [`rocmforge_service::answers::CHOICES_MAX`].
    pub(super) choices: u32,
    /// The field of the messages in error messages.
    pub(super) field: &'static str,
}

/// A text to continue, as a dialect's handler has parsed it.
#[derive(Debug)]
pub(super) struct Continuation {
    pub(super) model: String,
    pub(super) prompt: Prompt,
    pub(super) sampling: SamplingFields,
    pub(super) n_ctx: Option<i32>,
    /// Number of completions, at most [`rocmforge_service::answers::CHOICES_MAX`].
    pub(super) choices: u32,
    pub(super) field: &'static str,
}

/// Running completions, each with the splitter of its text.
pub(super) type Answers = Vec<(Running, Splitter)>;

/// Checks the rest of a conversation's request, and starts its generation. `violations` are those
/// found earlier.
pub(super) async fn chat(
    call: &Call,
    asked: Conversation,
    violations: Violations,
) -> Result<Generation, Failure> {
    let mut log = call.log(&asked.model);
    let begun = begin(call, asked, violations, &mut log).await;
    generation(call, begun, log)
}

/// The generation of the started completions; logs the failure if there are none.
pub(super) fn generation(
    call: &Call,
    begun: Result<Answers, Failure>,
    log: RequestLog,
) -> Result<Generation, Failure> {
    match begun {
        Ok(answers) => Ok(Generation::new(answers, log, &call.arrival)),
        Err(failure) => log.end(Err(failure)),
    }
}

/// Starts the completions of a conversation.
pub(super) async fn begin(
    call: &Call,
    asked: Conversation,
    mut violations: Violations,
    log: &mut RequestLog,
) -> Result<Answers, Failure> {
    let (mut messages, mut kwargs) = (asked.messages, asked.kwargs);
    let roles: Vec<_> = messages.iter().map(|m| m.role.as_str()).collect();
    check::messages(&roles, &mut violations);
    let reuse = asked.sampling.reuse_prompt.unwrap_or(true);
    let last = roles.last().copied();
    conversation::check_continued(asked.ending, last, &mut violations);
    let service = &call.service;
    let sampling = service.sampling(&asked.model, asked.sampling, &mut violations);
    let n_ctx = check::n_ctx(asked.n_ctx, &mut violations);
    violations.result()?;
    let model = call.model(&asked.model).await?;
    call.fetch_images(&mut messages, &model).await?;
    let unsaid = service.defaults(&asked.model).thinking;
    think_by_default(&model, unsaid, asked.is_quiet, &mut kwargs);
    let how = Answering {
        sampling,
        // Ollama's clients send a length for all models, whatever theirs.
        n_ctx: service.n_ctx_at_most(n_ctx, &model),
        class: service.class(&asked.model, None),
        reuse,
        choices: asked.choices,
        unparsed: false,
    };
    let conversation = conversation::Conversation {
        messages,
        tools: asked.tools,
        kwargs,
        documents: asked.documents,
        ending: asked.ending,
        field: asked.field,
    };
    service
        .answer(&model, conversation, how, call.arrival, log)
        .await
}

/// Switches reasoning as the model's settings say, or off if the route is quiet, unless the request
/// sets it or the template has no switch. Without a switch, the model was trained to always reason,
/// and its reasoning would be cut off.
pub(super) fn think_by_default(
    model: &LoadedModel,
    by_setting: Option<bool>,
    is_quiet: bool,
    kwargs: &mut Map<String, Value>,
) {
    let Some(on) = by_setting.or(is_quiet.then_some(false)) else {
        return;
    };
    let says = ["enable_thinking", "reasoning_effort"];
    if !is_quiet && says.iter().any(|key| kwargs.contains_key(*key)) {
        return;
    }
    let template = model.template().and_then(|template| template.source().ok());
    if template.is_some_and(forms::has_thinking_switch) {
        kwargs.entry("enable_thinking").or_insert(on.into());
    }
}

/// Checks the rest of a request to continue a text, and starts its generation.
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
        let model = call.model(&asked.model).await?;
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
    let begun = result.await;
    generation(call, begun, log)
}
