//! Shortens conversations that exceed their context: the oldest turns are dropped, as by Ollama,
//! whose applications rely on that.
//!
//! System messages stay, and so does the last turn: the last user message with all that follows. If
//! these alone are too long, the request is rejected.

use std::sync::Arc;

use rocmforge_chat::prompt::{Prompt, Room};
use rocmforge_failure::{Failure, Reason, Violations};
use rocmforge_service::answers::Generation;
use rocmforge_service::chat_model::chat_model;
use rocmforge_tokenizer::{Chat, Message};

use super::super::call::Call;
use super::super::start::{self, Conversation};

/// Starts the response to the conversation, shortened if necessary.
pub(super) async fn chat(
    call: &Call,
    mut asked: Conversation,
    violations: Violations,
) -> Result<Generation, Failure> {
    let mut log = call.log(&asked.model);
    let begun = async {
        if Chat::images_of(&mut asked.messages).next().is_some() {
            // Once, not with each length that is tried.
            let model = call.model(&asked.model).await?;
            call.fetch_images(&mut asked.messages, &model).await?;
        }
        let whole = asked.clone();
        let failure = match start::begin(call, whole, violations.clone(), &mut log).await {
            Err(failure) if failure.reason() == Reason::ContextExceeded => failure,
            begun => return begun,
        };
        let shorter = shortened(call, asked, failure).await?;
        start::begin(call, shorter, violations, &mut log).await
    };
    let begun = begun.await;
    start::generation(call, begun, log)
}

/// The conversation with as many last turns as fit; the failure of the shortest one if none fits.
async fn shortened(
    call: &Call,
    mut asked: Conversation,
    failure: Failure,
) -> Result<Conversation, Failure> {
    let n_ctx = failure.metadata().get("n_ctx");
    let Some(n_ctx) = n_ctx.and_then(|n| n.parse::<u32>().ok()) else {
        return Err(failure);
    };
    let (service, model) = (&call.service, call.model(&asked.model).await?);
    // One place is the answer's. No more tokens than these are looked at.
    let room = Room::for_prompt(service.lengths(n_ctx, &model)).for_trial();
    let turns = turns(&asked.messages);
    // The later the first turn, the fewer the tokens.
    let (mut least, mut most) = (0, turns.len());
    while least < most {
        let middle = usize::midpoint(least, most);
        let mut chat = Chat::new(from_turn(&asked.messages, turns[middle]));
        chat.tools = asked.tools.described.clone();
        chat.template_kwargs = asked.kwargs.clone();
        chat.documents = asked.documents.clone();
        let prompt = Prompt::chat(chat, &chat_model(&model));
        let encoded = service.encode(Arc::clone(&model), prompt, asked.field, room, call.arrival);
        match encoded.await {
            Ok(_) => most = middle,
            Err(failure) if failure.reason() == Reason::ContextExceeded => least = middle + 1,
            Err(other) => return Err(other),
        }
    }
    let Some(&first) = turns.get(least) else {
        return Err(failure);
    };
    let before = asked.messages.len();
    asked.messages = from_turn(&asked.messages, first);
    let left_out = before - asked.messages.len();
    tracing::info!(
        left_out,
        n_ctx,
        "the oldest messages of a chat are left out"
    );
    Ok(asked)
}

/// Indices at which turns of the user begin, except the first.
fn turns(messages: &[Message]) -> Vec<usize> {
    let is_user = |(_, message): &(usize, &Message)| message.role == "user";
    let turns = messages.iter().enumerate().filter(is_user);
    turns.map(|(at, _)| at).skip(1).collect()
}

/// The system messages and the messages from index `first` on.
fn from_turn(messages: &[Message], first: usize) -> Vec<Message> {
    let each = messages.iter().enumerate();
    let kept = each.filter(|(at, message)| *at >= first || message.role == "system");
    kept.map(|(_, message)| message.clone()).collect()
}
