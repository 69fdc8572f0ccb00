//! A conversation that is to be answered, or shown as its template renders it.

use std::sync::Arc;

use rocmforge_engine::LoadedModel;
use rocmforge_engine::api::Class;
use rocmforge_failure::{Failure, Violations};
use rocmforge_tokenizer::{Chat, Ending, Message};
use serde_json::{Map, Value};

use crate::Service;
use crate::arrival::Arrival;
use crate::check::Sampling;
use crate::generation::{Running, Wanted};
use crate::parts::Splitter;
use crate::prompt::{Prompt, no_template};
use crate::request_log::RequestLog;
use crate::tool_calls::{self, Forced, Tools, forms};

/// A conversation, of which the roles were checked ([`crate::check::messages`]).
#[derive(Debug)]
pub struct Conversation {
    /// The messages, oldest first.
    pub messages: Vec<Message>,
    /// What the model may call.
    pub tools: Tools,
    /// More variables for the template.
    pub kwargs: Map<String, Value>,
    /// Texts that the answer may rest on, for templates that know them.
    pub documents: Vec<Value>,
    /// How the rendered text ends.
    pub ending: Ending,
    /// What a refusal calls the messages.
    pub field: &'static str,
}

/// How a conversation is answered.
#[derive(Debug)]
pub struct Answering {
    /// How to choose tokens, and when to end.
    pub sampling: Sampling,
    /// The context length, within the model's and the daemon's.
    pub n_ctx: u32,
    /// Priority class of the request.
    pub class: Class,
    /// Whether its prompt may begin with what was computed for earlier ones, and be kept.
    pub reuse: bool,
    /// How many answers, at most [`crate::answers::CHOICES_MAX`].
    pub choices: u32,
    /// Whether the output stays unparsed.
    pub unparsed: bool,
}

/// Checks that the last message can be gone on with, where that is asked for: it is the model's
/// own.
pub fn check_continued(ending: Ending, last_role: Option<&str>, violations: &mut Violations) {
    if ending == Ending::Continue && last_role != Some("assistant") {
        violations.add(
            "messages",
            "continue_final_message needs a message of the assistant's at the end; add one, or leave the field unset",
        );
    }
}

impl Conversation {
    /// As the template sees it.
    fn chat(self, model: &LoadedModel) -> Result<Chat, Failure> {
        if model.template().is_none() {
            return Err(no_template(model));
        }
        let mut chat = Chat::new(self.messages);
        chat.tools = self.tools.described;
        chat.documents = self.documents;
        chat.template_kwargs = self.kwargs;
        chat.ending = self.ending;
        Ok(chat)
    }
}

impl Service {
    /// Begins the answers, each with what takes its text apart.
    ///
    /// # Errors
    /// FAILED_PRECONDITION for a model without a usable template, UNIMPLEMENTED where its calls are
    /// not read, and those of [`Service::generate_choices`].
    pub async fn answer(
        &self,
        model: &Arc<LoadedModel>,
        conversation: Conversation,
        how: Answering,
        arrival: Arrival,
        log: &mut RequestLog,
    ) -> Result<Vec<(Running, Splitter)>, Failure> {
        let (tools, field) = (conversation.tools.clone(), conversation.field);
        let is_off = conversation.kwargs.get("enable_thinking") == Some(&false.into());
        let chat = conversation.chat(model)?;
        let mut sampling = how.sampling;
        if !how.unparsed {
            tool_calls::check_model(&tools, model)?;
        }
        let source = model.template().and_then(|template| template.source().ok());
        if let Some(source) = source.filter(|_| !how.unparsed) {
            let with_tools = !tools.described.is_empty();
            sampling.decoding.control_text =
                forms::are_control_tokens(source, with_tools, model.tokenizer());
        }
        (sampling.format, sampling.trigger) = tool_calls::format(&tools, sampling.format, model)?;
        sampling.reasoning.is_chat = !how.unparsed;
        sampling.reasoning.is_off = is_off;
        if let Some(forced) = &tools.forced {
            let name = match forced {
                Forced::Named(name) => Some(name.as_str()),
                Forced::Any => tools
                    .described
                    .first()
                    .and_then(|tool| tool["function"]["name"].as_str()),
            };
            sampling.reasoning.call = name.map(str::to_owned);
        }
        let wanted = Wanted {
            model: Arc::clone(model),
            prompt: Prompt::chat(chat, model),
            field,
            sampling,
            n_ctx: how.n_ctx,
            class: how.class,
            reuse: how.reuse,
        };
        let choices = self.generate_choices(wanted, how.choices, arrival, log);
        let split = |running: Running| {
            let splitter = match how.unparsed {
                true => Splitter::plain(),
                false => {
                    Splitter::for_template(source.unwrap_or_default(), &running.tail, tools.clone())
                }
            };
            (running, splitter)
        };
        Ok(choices.await?.into_iter().map(split).collect())
    }

    /// What a conversation would let the model continue: the text, and its ids.
    ///
    /// # Errors
    /// FAILED_PRECONDITION for a model without a usable template, INVALID_ARGUMENT where the
    /// template refuses, RESOURCE_EXHAUSTED above a limit of its peer.
    pub async fn render(
        &self,
        model: &Arc<LoadedModel>,
        conversation: Conversation,
        arrival: Arrival,
    ) -> Result<(String, Vec<u32>), Failure> {
        let field = conversation.field;
        let prompt = Prompt::chat(conversation.chat(model)?, model);
        let (bytes, model, templates) = (prompt.bytes(), Arc::clone(model), self.templates.clone());
        let _ticket = self.enter(&arrival, bytes).await?;
        let work = move |unwanted: &_| prompt.render(field, &model, (&templates, unwanted));
        let work = self.text.run(arrival.peer(), bytes, work);
        arrival.limit(work).await
    }
}
