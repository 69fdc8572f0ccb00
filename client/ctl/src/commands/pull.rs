//! pull, rm and ls --remote: model files by a hub. They need no daemon; one that runs says which
//! directory its models lie in.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use clap::Args;
use rocmforge_hub::{Config, Event, Hub, Listener, Pulled, Scope, Source, Use};
use serde_json::json;
use tokio::sync::mpsc;

use crate::context::Context;
use crate::human::{Align, Table, clean, plural, size};
use crate::progress::Progress;

/// Events that wait to be printed.
const EVENTS_WAITING: usize = 1024;
/// Shortest time between two lines of progress in JSON.
const LINE_EVERY: Duration = Duration::from_millis(500);

/// Address and token of a hub.
#[derive(Debug, Args)]
#[command(next_help_heading = "Hub")]
pub(crate) struct HubArgs {
    /// Address of the hub, which speaks Hugging Face's API [default: $HF_ENDPOINT, else
    /// huggingface.co]
    #[arg(long, value_name = "URL", value_parser = rocmforge_hub::address)]
    pub(crate) hub: Option<rocmforge_hub::Uri>,
    /// Address of the registry for Ollama names [default: registry.ollama.ai]
    #[arg(long, value_name = "URL", value_parser = rocmforge_hub::address)]
    pub(crate) registry: Option<rocmforge_hub::Uri>,
    /// File with the token for the hub [default: the token in $HF_TOKEN]
    #[arg(long, value_name = "FILE")]
    pub(crate) token_file: Option<PathBuf>,
}

/// What `pull` takes.
#[derive(Debug, Args)]
pub(crate) struct PullArgs {
    /// OWNER/REPO[@REVISION][:QUANT or :FILE] of the hub, the URL of a .gguf file, or an Ollama
    /// name such as llama3.2:3b
    pub(crate) source: String,
    /// Directory to download into [default: $ROCMFORGE_MODEL_DIR, else the first model directory of
    /// the running daemon]
    #[arg(long, value_name = "DIR")]
    pub(crate) dir: Option<PathBuf>,
    /// Leave out the projector (mmproj) and the draft model
    #[arg(long)]
    pub(crate) model_only: bool,
    /// Connections for one file
    #[arg(
        long,
        value_name = "N",
        default_value_t = 4,
        value_parser = clap::value_parser!(u8).range(1..=16)
    )]
    pub(crate) connections: u8,
    #[command(flatten)]
    pub(crate) hub: HubArgs,
}

/// What `rm` takes.
#[derive(Debug, Args)]
pub(crate) struct RmArgs {
    /// Path of the model file, as `files` prints it, or relative to the directory; of a split model
    /// its first part
    pub(crate) file: PathBuf,
    /// The model directory [default: $ROCMFORGE_MODEL_DIR, else that of the running daemon]
    #[arg(long, value_name = "DIR")]
    pub(crate) dir: Option<PathBuf>,
}

/// A variable of the environment that says something.
fn variable(name: &str) -> Option<String> {
    std::env::var(name)
        .ok()
        .filter(|value| !value.trim().is_empty())
}

fn hub(args: &HubArgs, connections: usize) -> anyhow::Result<Hub> {
    let mut config = Config::new();
    config.connections = connections;
    if let Some(text) = variable("HF_ENDPOINT") {
        let address = rocmforge_hub::address(&text).map_err(anyhow::Error::msg);
        config.hub = address.context("$HF_ENDPOINT cannot be used")?;
    }
    if let Some(hub) = &args.hub {
        config.hub = hub.clone();
    }
    if let Some(registry) = &args.registry {
        config.registry = registry.clone();
    }
    let token = match &args.token_file {
        Some(path) => {
            let read = std::fs::read_to_string(path);
            let told = || crate::failure::Unreadable(path.clone());
            Some((
                read.map_err(|error| anyhow::Error::new(error).context(told()))?,
                "--token-file",
            ))
        }
        None => variable("HF_TOKEN").map(|token| (token, "$HF_TOKEN")),
    };
    if let Some((text, from)) = token {
        let token = rocmforge_hub::token(&text).map_err(anyhow::Error::msg);
        config.token = Some(token.with_context(|| format!("{from} cannot be used"))?);
    }
    Ok(Hub::new(config))
}

/// The directories that a command may mean, the first for downloads.
async fn model_dirs(context: &Context, given: Option<&Path>) -> anyhow::Result<Vec<PathBuf>> {
    if let Some(dir) = given {
        return Ok(vec![dir.to_owned()]);
    }
    if let Some(dirs) = variable("ROCMFORGE_MODEL_DIR") {
        return Ok(dirs.split(',').map(PathBuf::from).collect());
    }
    let status = match context.connect().await {
        Ok(client) => client.status().await,
        Err(error) => Err(error),
    };
    match status {
        Ok(status) if !status.model_dirs.is_empty() => {
            Ok(status.model_dirs.into_iter().map(PathBuf::from).collect())
        }
        Ok(_) => bail!("the daemon has no model directory; name a directory with --dir"),
        Err(error) => Err(error).context(
            "cannot ask a daemon for its model directory; name a directory with --dir, or set \
             ROCMFORGE_MODEL_DIR",
        ),
    }
}

pub(super) async fn pull(context: &mut Context, args: PullArgs) -> anyhow::Result<()> {
    let source = Source::parse(&args.source)?;
    let dirs = model_dirs(context, args.dir.as_deref()).await?;
    let dir = dirs
        .into_iter()
        .next()
        .context("no model directory; name one with --dir")?;
    if args.dir.is_some() {
        std::fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    } else {
        std::fs::metadata(&dir).with_context(|| {
            format!(
                "cannot use the model directory {}; create it, or name another with --dir",
                dir.display()
            )
        })?;
    }
    let hub = hub(&args.hub, args.connections.into())?;
    let (told, mut events) = mpsc::channel(EVENTS_WAITING);
    // Where nobody reads so fast, progress is left out.
    let listener: Listener = Arc::new(move |event| {
        let _ = told.try_send(event);
    });
    let scope = Scope {
        model_only: args.model_only,
    };
    let pulling = hub.pull(&source, &dir, scope, listener);
    tokio::pin!(pulling);
    let mut shown = Shown::new(&source.to_string(), context.output.json);
    let pulled = loop {
        tokio::select! {
            pulled = &mut pulling => break pulled,
            Some(event) = events.recv() => shown.event(context, &event)?,
        }
    };
    while let Ok(event) = events.try_recv() {
        shown.event(context, &event)?;
    }
    drop(shown);
    let pulled = pulled?;
    context.output.answer(
        || json!({"event": "pulled", "files": pulled}),
        || pulled.iter().map(told_of).collect(),
    )
}

fn told_of(file: &Pulled) -> String {
    let checked = match (file.was_there, file.verified) {
        (true, _) => "was there",
        (false, true) => "checksum right",
        (false, false) => "the hub has no checksum",
    };
    let kind = match file.r#use {
        Use::Model => "model",
        Use::Projector => "projector",
        Use::Draft => "draft model",
    };
    let path = clean(&file.path.display().to_string());
    format!("{path}: {kind}, {}, {checked}\n", size(file.bytes))
}

/// A download as it is shown: a bar, or lines of JSON.
struct Shown {
    bar: Progress,
    json: bool,
    /// Bytes that are there, of each file.
    done: BTreeMap<usize, u64>,
    total: u64,
    printed: Option<Instant>,
}

impl Shown {
    fn new(source: &str, json: bool) -> Self {
        Shown {
            bar: Progress::new(&clean(source)),
            json,
            done: BTreeMap::new(),
            total: 0,
            printed: None,
        }
    }

    fn event(&mut self, context: &mut Context, event: &Event) -> anyhow::Result<()> {
        let is_small = matches!(event, Event::Progress { .. });
        let is_due = self.printed.is_none_or(|at| at.elapsed() >= LINE_EVERY);
        if self.json && (!is_small || is_due) {
            context.output.object(event)?;
            if is_small {
                self.printed = Some(Instant::now());
            }
        }
        match event {
            Event::Planned { files, .. } => {
                self.total = files.iter().map(|file| file.bytes).sum();
                self.done = files.iter().map(|file| file.have).enumerate().collect();
                self.bar.begin_at(self.there());
            }
            Event::Progress { file, done } => {
                self.done.insert(*file, *done);
                self.bar.download("downloading", self.there(), self.total);
            }
            Event::Waiting { why, wait_ms, .. } => {
                let seconds = *wait_ms as f64 / 1000.0;
                let line = format!("{}; next try in {seconds:.1} s", clean(why));
                self.bar.note(&line);
            }
            Event::Checking { .. } => self.bar.download("checking", self.there(), self.total),
            Event::Done { .. } => {}
        }
        Ok(())
    }

    fn there(&self) -> u64 {
        self.done.values().sum()
    }
}

pub(super) async fn ls_remote(
    context: &mut Context,
    name: &str,
    args: &HubArgs,
) -> anyhow::Result<()> {
    let source = Source::parse(name)?;
    let groups = hub(args, 1)?.list(&source).await?;
    context.output.answer(
        || json!({"source": source.to_string(), "models": groups}),
        || {
            let mut table = Table::new([
                ("TAG", Align::Left),
                ("SIZE", Align::Right),
                ("PARTS", Align::Right),
                ("USE", Align::Left),
                ("FILE", Align::Left),
            ]);
            for group in &groups {
                let kind = match group.r#use {
                    Use::Model => "model",
                    Use::Projector => "projector",
                    Use::Draft => "draft",
                };
                table.row([
                    group.tag.clone(),
                    size(group.bytes()),
                    group.files.len().to_string(),
                    kind.to_owned(),
                    group.path().to_owned(),
                ]);
            }
            table.to_string()
        },
    )
}

pub(super) async fn rm(context: &mut Context, args: RmArgs) -> anyhow::Result<()> {
    let dirs = model_dirs(context, args.dir.as_deref()).await?;
    let mut refused = None;
    for dir in &dirs {
        match rocmforge_hub::remove(dir, &args.file) {
            Ok(removed) => {
                return context.output.answer(
                    || &removed,
                    || {
                        let files = plural(removed.files.len() as u64, "file");
                        format!("{files} deleted, {} freed", size(removed.bytes))
                    },
                );
            }
            Err(error) => refused = refused.or(Some(error)),
        }
    }
    match refused {
        Some(error) => Err(error.into()),
        None => bail!("no model directory; name one with --dir"),
    }
}

/// What the model files take, and what is free, for each file system that the directories lie on.
pub(super) fn disk_use(dirs: &[String], files: impl Iterator<Item = (String, u64)>) -> String {
    let files: Vec<_> = files.collect();
    let mut text = String::new();
    for dir in dirs {
        let inside = files
            .iter()
            .filter(|(path, _)| Path::new(path).starts_with(dir));
        let (n, bytes) = inside.fold((0, 0), |(n, sum), (_, bytes)| (n + 1, sum + bytes));
        text += &format!("{}: {}, {}", clean(dir), plural(n, "model"), size(bytes));
        // A directory of a daemon with other mounts may not be here.
        if let Ok(room) = rocmforge_hub::room(Path::new(dir)) {
            text += &format!(
                "; {} of {} free",
                size(room.free_bytes),
                size(room.total_bytes)
            );
        }
        text.push('\n');
    }
    text
}
