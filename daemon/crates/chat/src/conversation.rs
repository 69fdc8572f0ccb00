//! A conversation to continue, or to render with its template.

use rocmforge_failure::{Failure, Violations};
use rocmforge_tokenizer::{Chat, Ending, Message};
use serde_json::{Map, Value};

use crate::model::ChatModel;
use crate::prompt::no_template;
use crate::tool_calls::Tools;

/// A conversation of a request; its protocol has checked the roles.
#[derive(Debug)]
pub struct Conversation {
    /// The messages, oldest first.
    pub messages: Vec<Message>,
    /// The tools that the model may call.
    pub tools: Tools,
    /// Additional variables for the template.
    pub kwargs: Map<String, Value>,
    /// Documents for templates that support them (retrieval-augmented generation).
    pub documents: Vec<Value>,
    /// How the rendered text ends.
    pub ending: Ending,
    /// The field of the messages in error messages.
    pub field: &'static str,
}

/// Checks that the last message is the model's own, if the request wants it to be continued.
pub fn check_continued(ending: Ending, last_role: Option<&str>, violations: &mut Violations) {
    if ending == Ending::Continue && last_role != Some("assistant") {
        violations.add(
            "messages",
            "continue_final_message needs a message of the assistant's at the end; add one, or leave the field unset",
        );
    }
}

impl Conversation {
    /// The conversation in the form that a template renders.
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
