//! chat: one message, or a conversation until the end of the input.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;

use anyhow::{Context as _, bail};
use rocmforge_client::proto::v1::{ChatMessage, ChatRequest, Tool};
use rocmforge_client::{Client, Error};

use serde_json::Value;

use super::generate::print;
use super::images;
use crate::cli::ChatArgs;
use crate::context::Context;
use crate::failure;
use crate::sampling::SamplingArgs;

pub(super) fn message(role: &str, content: String) -> ChatMessage {
    ChatMessage {
        role: role.to_owned(),
        content,
        ..Default::default()
    }
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
        n: sampling.choices,
        max_gap_ms: sampling.max_gap_ms,
        ..Default::default()
    }
}

/// The tools of a JSON list: OpenAI's `{"type": "function", "function": {...}}`, or the inner
/// object.
fn tools(text: &str) -> anyhow::Result<Vec<Tool>> {
    let list: Vec<Value> = serde_json::from_str(text)
        .context(r#"--tools: it is no JSON list; give [{"name": ..., "parameters": ...}, ...]"#)?;
    let tool = |(at, value): (usize, &Value)| {
        let function = value.get("function").unwrap_or(value);
        let name = function["name"]
            .as_str()
            .with_context(|| format!("--tools: tool {} has no \"name\"; give one", at + 1))?;
        Ok(Tool {
            name: name.to_owned(),
            description: function["description"]
                .as_str()
                .unwrap_or_default()
                .to_owned(),
            parameters: match &function["parameters"] {
                Value::Null => String::new(),
                schema => schema.to_string(),
            },
        })
    };
    list.iter().enumerate().map(tool).collect()
}

pub(super) async fn chat(
    context: &mut Context,
    model: String,
    said: Option<String>,
    args: &ChatArgs,
    sampling: &SamplingArgs,
) -> anyhow::Result<()> {
    let mut asked = request(&model, Vec::new(), sampling);
    let system = args.system.clone();
    asked
        .messages
        .extend(system.map(|system| message("system", system)));
    if let Some(text) = &args.tools {
        asked.tools = tools(text)?;
    }
    asked.template_args = args.template_args.clone().unwrap_or_default();
    asked.unparsed = args.unparsed;
    let shown = images::read(&args.images)?;
    let client = context.connect().await?;
    images::check(&client, &model, &args.images).await?;
    let Some(said) = said else {
        if args.render || args.answer.is_some() || sampling.choices.is_some() {
            bail!("--render, --answer and --choices go with a message");
        }
        return converse(context, &client, asked, (shown, sampling.stats)).await;
    };
    let said = super::said(said).await?;
    asked.messages.push(images::message(shown, said));
    if let Some(begun) = &args.answer {
        asked.messages.push(message("assistant", begun.clone()));
        asked.continue_last = true;
    }
    if args.render {
        let rendered = client.render(asked).await?;
        return context
            .output
            .answer(|| &rendered, || rendered.text.clone());
    }
    let events = client.chat(asked).await?;
    print(&mut context.output, events, sampling.stats).await?;
    Ok(())
}

/// Takes a line at a time as a message, and keeps the conversation.
async fn converse(
    context: &mut Context,
    client: &Client,
    mut asked: ChatRequest,
    (mut shown, stats): (Vec<Vec<u8>>, bool),
) -> anyhow::Result<()> {
    // A wrong name should not show only after the first message.
    client.get(&asked.model).await?;
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
        let messages = &mut asked.messages;
        if is_terminal && line.starts_with('/') {
            match line.trim() {
                // The answer, and what it answers; not the system message.
                "/undo" => {
                    let asked = messages.iter().rposition(|m| m.role == "user");
                    messages.truncate(asked.unwrap_or(messages.len()));
                }
                "/clear" => messages.retain(|m| m.role == "system"),
                "/quit" => return Ok(()),
                said => match said.strip_prefix("/image ") {
                    Some(path) => match image(client, &asked.model, path).await {
                        Ok(image) => shown.extend(image),
                        Err(error) => eprintln!("rocmforgectl: {}", failure::describe(&error)),
                    },
                    None => eprintln!(
                        "/image FILE shows an image with the next message, /undo forgets the last turn, /clear all of \
                         them, /quit ends"
                    ),
                },
            }
            continue;
        }
        messages.push(images::message(std::mem::take(&mut shown), line));
        match answer(context, client, asked.clone(), stats).await {
            Ok(said) => asked.messages.push(said),
            // At a terminal what the daemon refuses does not end the
            // conversation; what it was asked is forgotten.
            Err(error) if is_terminal && error.downcast_ref().is_some_and(is_refusal) => {
                eprintln!("rocmforgectl: {}", failure::describe(&error));
                asked.messages.pop();
            }
            Err(error) => return Err(error),
        }
    }
}

/// The image of `/image FILE`.
async fn image(client: &Client, model: &str, path: &str) -> anyhow::Result<Vec<Vec<u8>>> {
    let path = [PathBuf::from(path.trim())];
    images::check(client, model, &path).await?;
    images::read(&path)
}

async fn answer(
    context: &mut Context,
    client: &Client,
    request: ChatRequest,
    stats: bool,
) -> anyhow::Result<ChatMessage> {
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
