//! run: a file and a prompt, with whichever daemon there is.

use std::path::Path;

use anyhow::Context as _;
use rocmforge_client::{Client, Code, Error};

use super::chat::{message, request};
use super::generate::print;
use super::images;
use super::models::is_of_file;
use super::{load, said};
use crate::cli::RunArgs;
use crate::context::Context;
use crate::failure::Unreadable;
use crate::private::find_daemon;

pub(super) async fn run(context: &mut Context, args: RunArgs) -> anyhow::Result<()> {
    // Before a daemon is started for it.
    std::fs::metadata(&args.file).with_context(|| Unreadable(args.file.clone()))?;
    let prompt = said(args.prompt).await?;
    let shown = images::read(&args.images)?;
    let client = daemon(context, &args.file, args.private).await?;
    let model = loaded(&client, &args.file).await?;

    let mut messages = Vec::new();
    messages.extend(args.system.map(|system| message("system", system)));
    images::check(&client, &model, &args.images).await?;
    messages.push(images::message(shown, prompt));
    let events = client
        .chat(request(&model, messages, &args.sampling))
        .await?;
    print(&mut context.output, events, args.sampling.stats).await?;
    // Here, not at the end of the program: the connection closes first, so that
    // the daemon has nothing to wait for.
    drop(client);
    context.private.stop();
    Ok(())
}

/// The running daemon, or one of our own where there is none.
async fn daemon(context: &Context, file: &Path, private: bool) -> anyhow::Result<Client> {
    if !private {
        match context.connect().await {
            Err(Error::NoDaemon { .. }) if !context.socket_is_given() => {}
            other => return Ok(other?),
        }
    }
    // The daemon resolves links before it looks at the directory; so does this.
    let file = std::fs::canonicalize(file).with_context(|| Unreadable(file.to_owned()))?;
    let dir = file.parent().unwrap_or(Path::new("/"));
    context.private.start(&find_daemon(true)?, dir).await
}

/// Loads the file, unless it is loaded, and gives the model's name. A model
/// stays loaded in a daemon that was running, where it costs next to nothing and
/// makes the next run faster.
async fn loaded(client: &Client, file: &Path) -> anyhow::Result<String> {
    let models = client.list().await?;
    if let Some(model) = models.iter().find(|model| is_of_file(model, file)) {
        return Ok(model.name.clone());
    }
    let wanted = load::request(file, None)?;
    match load::load_model(client, wanted.clone()).await {
        Ok(model) => Ok(model.name),
        Err(error) if name_is_taken(&error) => {
            let mut other = wanted;
            let stem = file.file_stem().unwrap_or_default().to_string_lossy();
            let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
            let stem: String = stem.chars().filter(|&c| allowed(c)).collect();
            other.name = format!("{stem}-{}", std::process::id());
            Ok(load::load_model(client, other).await?.name)
        }
        Err(error) => Err(error),
    }
}

fn name_is_taken(error: &anyhow::Error) -> bool {
    error.downcast_ref::<Error>().and_then(Error::code) == Some(Code::AlreadyExists)
}
