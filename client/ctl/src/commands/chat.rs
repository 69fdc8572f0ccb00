//! chat: one message, or a conversation until the end of the input.

use std::io::{IsTerminal, Write};

use anyhow::Context as _;
use rocmforge_client::proto::v1::{ChatMessage, ChatRequest};
use rocmforge_client::{Client, Error};

use super::Context;
use super::generate::print;
use crate::failure;
use crate::sampling::SamplingArgs;

pub(super) fn message(role: &str, content: String) -> ChatMessage {
    let role = role.to_owned();
    ChatMessage { role, content }
}

/// The request to answer `messages`.
pub(super) fn request(
    model: &str,
    messages: Vec<ChatMessage>,
    sampling: &SamplingArgs,
) -> ChatRequest {
    ChatRequest {
        model: model.to_owned(),
        messages,
        sampling: Some(sampling.params()),
        n_ctx: sampling.n_ctx,
        logprobs: sampling.logprobs,
        priority: sampling.priority().into(),
        reuse_prompt: sampling.reuse_prompt(),
    }
}

pub(super) async fn chat(
    context: &mut Context,
    model: String,
    said: Option<String>,
    system: Option<String>,
    sampling: &SamplingArgs,
) -> anyhow::Result<()> {
    let mut messages: Vec<ChatMessage> = Vec::new();
    messages.extend(system.map(|system| message("system", system)));
    let client = context.connect().await?;
    let Some(said) = said else {
        return converse(context, &client, &model, messages, sampling).await;
    };
    messages.push(message("user", super::said(said).await?));
    let events = client.chat(request(&model, messages, sampling)).await?;
    print(&mut context.output, events, sampling.stats).await?;
    Ok(())
}

/// Takes a line at a time as a message, and keeps the conversation.
async fn converse(
    context: &mut Context,
    client: &Client,
    model: &str,
    mut messages: Vec<ChatMessage>,
    sampling: &SamplingArgs,
) -> anyhow::Result<()> {
    // A wrong name should not show only after the first message.
    client.get(model).await?;
    let is_terminal = std::io::stdin().is_terminal();
    loop {
        if is_terminal {
            eprint!("> ");
            let _ = std::io::stderr().flush();
        }
        let Some(line) = line().await? else {
            if is_terminal {
                eprintln!();
            }
            return Ok(());
        };
        if line.trim().is_empty() {
            continue;
        }
        if is_terminal && line.starts_with('/') {
            match line.trim() {
                // The answer, and what it answers; not the system message.
                "/undo" => {
                    let asked = messages.iter().rposition(|m| m.role == "user");
                    messages.truncate(asked.unwrap_or(messages.len()));
                }
                "/clear" => messages.retain(|m| m.role == "system"),
                "/quit" => return Ok(()),
                _ => eprintln!("/undo forgets the last turn, /clear all of them, /quit ends"),
            }
            continue;
        }
        messages.push(message("user", line));
        let asked = request(model, messages.clone(), sampling);
        match answer(context, client, asked, sampling.stats).await {
            Ok(text) => messages.push(message("assistant", text)),
            // At a terminal what the daemon refuses does not end the
            // conversation; what it was asked is forgotten.
            Err(error) if is_terminal && error.downcast_ref().is_some_and(is_refusal) => {
                eprintln!("rocmforgectl: {}", failure::describe(&error));
                messages.pop();
            }
            Err(error) => return Err(error),
        }
    }
}

async fn answer(
    context: &mut Context,
    client: &Client,
    request: ChatRequest,
    stats: bool,
) -> anyhow::Result<String> {
    let events = client.chat(request).await?;
    print(&mut context.output, events, stats).await
}

fn is_refusal(error: &Error) -> bool {
    matches!(error, Error::Rpc(_))
}

/// The next line of the standard input without its end; `None` after the last.
async fn line() -> anyhow::Result<Option<String>> {
    let read = || {
        let mut line = String::new();
        std::io::stdin().read_line(&mut line).map(|_| line)
    };
    let mut line = tokio::task::spawn_blocking(read)
        .await?
        .context("cannot read the standard input")?;
    if line.is_empty() {
        return Ok(None);
    }
    line.truncate(line.trim_end_matches(['\r', '\n']).len());
    Ok(Some(line))
}
