//! How many tokens a conversation has, without an answer.

use axum::response::Response;
use rocmforge_service::check::{self, Violations};
use rocmforge_service::conversation;
use rocmforge_service::failure::Failure;
use rocmforge_service::prompt::{Prompt, no_template};
use rocmforge_service::tool_calls;
use rocmforge_tokenizer::Chat;
use serde_json::{Value, json};

use super::call::{Call, json as answer};
use super::start::{self, Conversation};

/// Counts the tokens of a conversation as a request for its answer would be, and answers with
/// `fields` and `input_tokens`. `violations` are those that were found before.
///
/// # Errors
/// Those of a conversation that cannot be answered.
pub(super) async fn input_tokens(
    call: &Call,
    asked: Conversation,
    mut violations: Violations,
    mut fields: Value,
) -> Result<Response, Failure> {
    let mut log = call.log(&asked.model);
    let result = async {
        let roles = asked.messages.iter().map(|m| m.role.as_str());
        let roles: Vec<_> = roles.collect();
        check::messages(&roles, &mut violations);
        let last = roles.last().copied();
        conversation::check_continued(asked.ending, last, &mut violations);
        violations.result()?;
        let service = &call.service;
        let model = call.model(&asked.model).await?;
        if model.template().is_none() {
            return Err(no_template(&model));
        }
        tool_calls::check_model(&asked.tools, &model)?;
        let mut kwargs = asked.kwargs;
        let unsaid = service.defaults(&asked.model).thinking;
        start::think_by_default(&model, unsaid, asked.is_quiet, &mut kwargs);
        let mut messages = asked.messages;
        call.fetch_images(&mut messages, &model).await?;
        let mut chat = Chat::new(messages);
        chat.tools = asked.tools.described;
        chat.template_kwargs = kwargs;
        chat.documents = asked.documents;
        chat.ending = asked.ending;
        let prompt = Prompt::chat(chat, &model);
        let count = service.count(model, prompt, asked.field, call.arrival);
        count.await
    };
    let result = result.await;
    log.prompt_tokens = result.as_ref().ok().copied();
    let n = log.end(result)?;
    fields["input_tokens"] = n.into();
    answer(&fields)
}

/// What OpenAI's dialect says beside the count.
pub(super) fn openai_fields() -> Value {
    json!({"object": "response.input_tokens"})
}
