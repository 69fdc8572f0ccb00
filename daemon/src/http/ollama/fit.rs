//! Conversations that are longer than their context: the oldest turns are left out, as by Ollama,
//! whose applications count on it.
//!
//! What the system says stays, and so does the last turn: what the user said last, with all that
//! follows. Where these alone are too long, the request is refused.

use std::sync::Arc;

use rocmforge_service::answers::Generation;
use rocmforge_service::check::Violations;
use rocmforge_service::failure::Failure;
use rocmforge_service::prompt::Prompt;
use rocmforge_tokenizer::{Chat, Message};

use super::super::call::Call;
use super::super::start::{self, Conversation};

/// Begins the answer to the conversation, or to the most turns at its end that fit.
pub(super) async fn chat(
    call: &Call,
    asked: Conversation,
    violations: Violations,
) -> Result<Generation, Failure> {
    let mut shorter = asked.clone();
    let failure = match start::chat(call, asked, violations.clone()).await {
        Err(failure) if failure.reason() == "CONTEXT_EXCEEDED" => failure,
        started => return started,
    };
    let n_ctx = failure.metadata().get("n_ctx");
    let Some(n_ctx) = n_ctx.and_then(|n| n.parse::<u32>().ok()) else {
        return Err(failure);
    };
    let model = call.model(&shorter.model).await?;
    let turns = turns(&shorter.messages);
    // The later the first turn, the fewer the tokens.
    let (mut least, mut most) = (0, turns.len());
    while least < most {
        let middle = usize::midpoint(least, most);
        let mut chat = Chat::new(from_turn(&shorter.messages, turns[middle]));
        chat.tools = shorter.tools.described.clone();
        chat.template_kwargs = shorter.kwargs.clone();
        let (service, prompt) = (&call.service, Prompt::Chat(chat));
        let counted = service.count(Arc::clone(&model), prompt, shorter.field, call.arrival);
        // One place is the answer's.
        if counted.await? < n_ctx {
            most = middle;
        } else {
            least = middle + 1;
        }
    }
    let Some(&first) = turns.get(least) else {
        return Err(failure);
    };
    let before = shorter.messages.len();
    shorter.messages = from_turn(&shorter.messages, first);
    let left_out = before - shorter.messages.len();
    tracing::info!(
        left_out,
        n_ctx,
        "the oldest messages of a chat are left out"
    );
    start::chat(call, shorter, violations).await
}

/// Where a turn of the user begins, behind the first.
fn turns(messages: &[Message]) -> Vec<usize> {
    let is_user = |(_, message): &(usize, &Message)| message.role == "user";
    let turns = messages.iter().enumerate().filter(is_user);
    turns.map(|(at, _)| at).skip(1).collect()
}

/// The messages from `first` on, behind what the system says.
fn from_turn(messages: &[Message], first: usize) -> Vec<Message> {
    let each = messages.iter().enumerate();
    let kept = each.filter(|(at, message)| *at >= first || message.role == "system");
    kept.map(|(_, message)| message.clone()).collect()
}
