//! A conversation that is to be answered, or shown as its template renders it.

use rocmforge_failure::{Failure, Violations};
use rocmforge_tokenizer::{Chat, Ending, Message};
use serde_json::{Map, Value};

use crate::model::ChatModel;
use crate::prompt::no_template;
use crate::tool_calls::Tools;

/// A conversation, of which the roles were checked by the interface that it came by.
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
    ///
    /// # Errors
    /// FAILED_PRECONDITION for a model without a template, UNIMPLEMENTED for an encoder.
    pub fn chat(self, model: &ChatModel<'_>) -> Result<Chat, Failure> {
        if model.template.is_none() {
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
