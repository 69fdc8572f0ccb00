//! Generates answers to conversations, and renders conversations with chat templates.

use std::sync::Arc;

use rocmforge_chat::conversation::Conversation;
use rocmforge_chat::parts::splitter::Splitter;
use rocmforge_chat::prompt::Prompt;
use rocmforge_chat::tool_calls::forms;
use rocmforge_chat::tools;
use rocmforge_engine::LoadedModel;
use rocmforge_engine::api::Class;
use rocmforge_failure::Failure;

use crate::Service;
use crate::arrival::Arrival;
use crate::chat_model::chat_model;
use crate::check::Sampling;
use crate::generation::{Running, Wanted};
use crate::request_log::RequestLog;
use crate::text_work::Unwanted;

/// Parameters of the completion of a conversation.
#[derive(Debug)]
pub struct Answering {
    /// Sampling parameters, stop strings and limits.
    pub sampling: Sampling,
    /// Context length in tokens, within the model's and the daemon's limits.
    pub n_ctx: u32,
    /// Priority class of the request.
    pub class: Class,
    /// Whether the request may read from the prefix cache and store into it.
    pub reuse: bool,
    /// Number of completions, at most [`crate::answers::CHOICES_MAX`].
    pub choices: u32,
    /// Whether the output is returned as plain text, without parsing reasoning and tool calls.
    pub unparsed: bool,
}

impl Service {
    /// Starts the completions of a conversation, each with a parser that splits its text into
    /// parts.
    ///
    /// # Errors
    /// FAILED_PRECONDITION for a model without a usable template, UNIMPLEMENTED if its
    /// tool calls cannot be parsed, and those of [`Service::generate_choices`].
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
        let known = chat_model(model);
        let chat = conversation.chat(&known)?;
        let mut sampling = how.sampling;
        if !how.unparsed {
            tools::check_model(&tools, &known)?;
        }
        let source = known.template_source();
        if let Some(source) = source.filter(|_| !how.unparsed) {
            let with_tools = !tools.described.is_empty();
            sampling.decoding.control_text =
                forms::are_control_tokens(source, with_tools, model.tokenizer());
        }
        (sampling.format, sampling.trigger) = tools::format(&tools, sampling.format, &known)?;
        sampling.reasoning.is_chat = !how.unparsed;
        sampling.reasoning.is_off = is_off;
        sampling.reasoning.call = tools::forced_name(&tools).map(str::to_owned);
        let wanted = Wanted {
            model: Arc::clone(model),
            prompt: Prompt::chat(chat, &known),
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

    /// The prompt for a conversation: its text, and its token ids.
    ///
    /// # Errors
    /// FAILED_PRECONDITION for a model without a usable template, INVALID_ARGUMENT if the
    /// template rejects it, RESOURCE_EXHAUSTED above a limit of the client.
    pub async fn render(
        &self,
        model: &Arc<LoadedModel>,
        conversation: Conversation,
        arrival: Arrival,
    ) -> Result<(String, Vec<u32>), Failure> {
        let field = conversation.field;
        let known = chat_model(model);
        let prompt = Prompt::chat(conversation.chat(&known)?, &known);
        let (bytes, model, templates) = (prompt.bytes(), Arc::clone(model), self.templates.clone());
        let _ticket = self.enter(&arrival, bytes).await?;
        let work = move |unwanted: &Unwanted| {
            let is_unwanted = || unwanted.get();
            prompt.render(field, &chat_model(&model), (&templates, &is_unwanted))
        };
        let work = self.text.run(arrival.peer(), bytes, work);
        arrival.limit(work).await
    }
}
