//! Counts the tokens of a conversation without generating a response.

use axum::http::Uri;
use axum::response::Response;
use rocmforge_chat::conversation;
use rocmforge_chat::prompt::{Prompt, no_template};
use rocmforge_chat::tools;
use rocmforge_failure::{Failure, Violations};
use rocmforge_service::chat_model::chat_model;
use rocmforge_service::check;
use rocmforge_tokenizer::Chat;
use serde_json::{Value, json};

use super::call::{Call, json as answer, query};
use super::start::{self, Conversation};
use super::written::List;

/// Format of the response to a request that counts tokens.
#[derive(Debug)]
pub(super) struct Counted {
    /// Fields of the response besides the count.
    fields: Value,
    /// Whether the response includes the token ids.
    with_ids: bool,
}

impl Counted {
    /// OpenAI's format; includes the ids if the URI has `?tokens=true`.
    pub(super) fn openai(uri: &Uri) -> Self {
        Self {
            fields: json!({"object": "response.input_tokens"}),
            ..Self::anthropic(uri)
        }
    }

    /// Anthropic's format; includes the ids if the URI has `?tokens=true`.
    pub(super) fn anthropic(uri: &Uri) -> Self {
        Self {
            fields: json!({}),
            with_ids: query(uri, "tokens").as_deref() == Some("true"),
        }
    }
}

/// Counts the prompt tokens of a conversation, and responds with `input_tokens` and the fields of
/// `counted`. `violations` are those found earlier.
///
/// # Errors
/// As for a request to continue the conversation.
pub(super) async fn input_tokens(
    call: &Call,
    asked: Conversation,
    mut violations: Violations,
    counted: Counted,
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
        let known = chat_model(&model);
        if known.template.is_none() {
            return Err(no_template(&known));
        }
        tools::check_model(&asked.tools, &known)?;
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
        let prompt = Prompt::chat(chat, &known);
        let ids = service.ids(model, prompt, asked.field, call.arrival);
        ids.await
    };
    let result = result.await;
    log.prompt_tokens = result.as_ref().ok().map(|ids| ids.len() as u32);
    let ids = log.end(result)?;
    let mut fields = counted.fields;
    fields["input_tokens"] = ids.len().into();
    if !counted.with_ids {
        return answer(&fields);
    }
    let mut begin = fields.to_string();
    begin.truncate(begin.len() - 1);
    let list = List {
        begin: format!("{begin},\"tokens\":["),
        n: ids.len(),
        source_bytes: size_of_val(&ids[..]),
        item: move |at, out: &mut Vec<u8>| serde_json::to_writer(out, &ids[at]),
        end: "]}".to_owned(),
    };
    list.answer(call)
}
