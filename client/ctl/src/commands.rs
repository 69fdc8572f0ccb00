//! What the commands do, one file a subject.

mod cache;
mod chat;
pub(crate) mod devices;
mod generate;
mod images;
mod load;
mod models;
pub(crate) mod pull;
mod run;
mod status;
mod tokens;
mod vectors;
pub(crate) mod why;

use std::io::Read;

use anyhow::{Context as _, bail};
use rocmforge_client::MAX_MESSAGE_BYTES;
use rocmforge_client::proto::v1::{EmbedRequest, Pooling, RerankRequest};

use crate::cli::Command;
use crate::context::Context;

/// Carries out a command.
pub(crate) async fn run(mut context: Context, command: Command) -> anyhow::Result<()> {
    let context = &mut context;
    match command {
        Command::Load(args) => load::load(context, args).await,
        Command::Unload { name, force } => models::unload(context, &name, force).await,
        Command::Pull(args) => pull::pull(context, args).await,
        Command::Rm(args) => pull::rm(context, args).await,
        Command::Ls { remote: None, .. } => models::ls(context).await,
        Command::Ls {
            remote: Some(name),
            hub,
        } => pull::ls_remote(context, &name, &hub).await,
        Command::Names => models::names(context).await,
        Command::Show { name } => models::show(context, &name).await,
        Command::Generate {
            name,
            prompt,
            ids,
            special,
            sampling,
        } => {
            let input = Input { text: prompt, ids };
            generate::generate(context, name, input, &special, &sampling).await
        }
        Command::Chat {
            name,
            message,
            chat,
            sampling,
        } => chat::chat(context, name, message, &chat, &sampling).await,
        Command::Run(args) => run::run(context, args).await,
        Command::Embed {
            name,
            texts,
            ids,
            pooling,
            dimensions,
            no_normalise,
            input_type,
        } => {
            let pooling = pooling.map_or(Pooling::Unspecified, Into::into);
            let wanted = EmbedRequest {
                model: name,
                pooling: pooling.into(),
                dimensions,
                normalise: no_normalise.then_some(false),
                input_type: input_type.unwrap_or_default(),
                ..Default::default()
            };
            vectors::embed(context, wanted, texts, ids).await
        }
        Command::Rerank {
            name,
            query,
            documents,
            top_n,
            instruction,
        } => {
            let wanted = RerankRequest {
                model: name,
                query,
                documents,
                top_n,
                instruction: instruction.unwrap_or_default(),
                ..Default::default()
            };
            vectors::rerank(context, wanted).await
        }
        Command::Score {
            name,
            text,
            ids,
            top_n,
            n_ctx,
            special,
        } => tokens::score(context, name, Input { text, ids }, top_n, n_ctx, &special).await,
        Command::Tokenize {
            name,
            text,
            special,
        } => tokens::tokenize(context, name, text, &special).await,
        Command::Detokenize { name, ids } => tokens::detokenize(context, &name, &ids).await,
        Command::Cache(command) => cache::cache(context, command).await,
        Command::Preload(args) => load::preload(context, &args).await,
        Command::Pin(args) => models::pin(context, &args).await,
        Command::Unpin(args) => models::unpin(context, &args).await,
        Command::Status => status::status(context).await,
        Command::Devices { check } => devices::devices(context, check).await,
        Command::Top(args) => crate::top::top(context, args).await,
        Command::Why(args) => why::why(context, args).await,
        Command::Release { host } => cache::release(context, host).await,
        Command::Reload => status::reload(context).await,
        Command::Files => status::files(context).await,
        Command::Health => status::health(context).await,
        Command::Doctor { root } => crate::doctor::doctor(context, root.as_deref()).await,
        Command::Generated { what, dir } => crate::generated::write(what, &dir),
    }
}

/// A text or token ids, of which the command line has one.
struct Input {
    text: Option<String>,
    ids: Vec<u32>,
}

/// The prompt for a model: the text of an argument, or the standard input without its final line
/// break.
async fn said(argument: String) -> anyhow::Result<String> {
    let from_input = argument == "-";
    let mut text = text_of(argument).await?;
    if from_input && text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    Ok(text)
}

/// The text of an argument, read from the standard input where it is "-".
async fn text_of(argument: String) -> anyhow::Result<String> {
    if argument != "-" {
        return Ok(argument);
    }
    let read = || {
        let mut bytes = Vec::new();
        std::io::stdin()
            .lock()
            .take(MAX_MESSAGE_BYTES as u64 + 1)
            .read_to_end(&mut bytes)
            .map(|_| bytes)
    };
    let bytes = tokio::task::spawn_blocking(read)
        .await?
        .context("cannot read the standard input")?;
    if bytes.len() > MAX_MESSAGE_BYTES {
        bail!(
            "the standard input holds more than {MAX_MESSAGE_BYTES} bytes, the most a message has"
        );
    }
    String::from_utf8(bytes).context("the standard input is not UTF-8 text; convert it (iconv)")
}
