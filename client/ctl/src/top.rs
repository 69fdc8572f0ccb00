//! top: the daemon's models, memory and queue, live on the whole terminal or once as text.
//!
//! ```text
//! watch, every second --- Sample --->
//! terminal -------------- keys ----->  Board --- lines ---> terminal
//! calls ----------------- messages ->    |
//!   ^------------- Action ---------------'
//! ```
//!
//! Calls run beside the loop, so keys work while the daemon does not respond. [`Screen`] restores
//! the terminal however the command ends.

pub(crate) mod args;
mod board;
mod line;
mod screen;

use std::io::IsTerminal as _;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use rocmforge_client::Client;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinSet;

use self::args::TopArgs;
pub(crate) use self::board::{Action, Board, Sample};
use self::screen::{Key, Screen};
use crate::context::Context;

/// Models whose segments are requested for a sample.
const MODELS_MAX: usize = 32;
/// Events that wait for the loop.
const EVENTS_WAITING: usize = 64;
/// Calls for keys that may be under way at once.
const CALLS_MAX: usize = 8;
/// How often the thread that reads keys checks whether it is still needed.
const KEYS_POLL_MS: u16 = 200;
/// Lines and columns of `--once`.
const ONCE_LINES: usize = 400;
const ONCE_COLUMNS: usize = 100;
/// Time between the two samples of `--once`, for rates.
const ONCE_PAUSE: Duration = Duration::from_millis(500);

/// What the loop takes in.
enum Event {
    Sample(Box<Sample>),
    Message(String),
    Key(Key),
    /// The terminal is gone.
    Closed,
}

/// Requests everything that the board shows.
async fn sample(client: &Client) -> Result<Sample, rocmforge_client::Error> {
    let status = client.status().await?;
    let cache = client.cache_stats().await?;
    let mut models = Vec::new();
    for summary in status.models.iter().take(MODELS_MAX) {
        // It may have been unloaded since.
        if let Ok(model) = client.get(&summary.name).await {
            models.push(model);
        }
    }
    Ok(Sample::new(status, cache, models))
}

pub(crate) async fn top(context: &mut Context, args: TopArgs) -> anyhow::Result<()> {
    let client = context.connect().await?;
    let mut board = Board::default();
    board.take(sample(&client).await?);
    if args.once || context.output.json {
        tokio::time::sleep(ONCE_PAUSE).await;
        board.take(sample(&client).await?);
        let json = board.as_json();
        return context
            .output
            .answer(|| json, || board.as_text(ONCE_COLUMNS, ONCE_LINES));
    }
    if !(std::io::stdout().is_terminal() && std::io::stdin().is_terminal()) {
        anyhow::bail!("top needs a terminal; --once prints the board as text");
    }
    watch(&client, &mut board, Duration::from_secs(args.every.into())).await
}

/// Shows the board until a key or the end of the terminal ends it.
async fn watch(client: &Client, board: &mut Board, every: Duration) -> anyhow::Result<()> {
    let mut resized = signal(SignalKind::window_change())?;
    let mut screen = Screen::open()?;
    let (sender, mut events) = mpsc::channel(EVENTS_WAITING);
    let keys = sender.clone();
    std::thread::Builder::new()
        .name("keys".to_owned())
        .spawn(move || read_keys(&keys))?;
    let changed = Arc::new(Notify::new());
    let mut sampler = JoinSet::new();
    sampler.spawn(send_samples(
        client.clone(),
        every,
        Arc::clone(&changed),
        sender.clone(),
    ));
    let mut calls = JoinSet::new();
    loop {
        screen.draw(|columns, rows| board.rows(columns, rows))?;
        let event = tokio::select! {
            event = events.recv() => event,
            // It is drawn at once.
            Some(()) = resized.recv() => continue,
        };
        let Some(event) = event else {
            return Ok(());
        };
        let action = match event {
            Event::Closed => return Ok(()),
            Event::Sample(sample) => {
                board.take(*sample);
                None
            }
            Event::Message(message) => {
                board.show(&message);
                None
            }
            Event::Key(key) => board.key(key),
        };
        while calls.try_join_next().is_some() {}
        match action {
            None => {}
            Some(Action::Quit) => return Ok(()),
            Some(_) if calls.len() >= CALLS_MAX => {
                board.show("the daemon has not answered the keys before this one; wait for it");
            }
            Some(action) => {
                let (client, sender) = (client.clone(), sender.clone());
                let changed = Arc::clone(&changed);
                calls.spawn(async move {
                    call(&client, action, &sender).await;
                    changed.notify_one();
                });
            }
        }
    }
}

/// Sends a sample after each interval, and after each call.
async fn send_samples(
    client: Client,
    every: Duration,
    changed: Arc<Notify>,
    sender: mpsc::Sender<Event>,
) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(every) => {}
            () = changed.notified() => {}
        }
        let event = match sample(&client).await {
            Ok(sample) => Event::Sample(Box::new(sample)),
            Err(error) => Event::Message(error.to_string()),
        };
        if sender.send(event).await.is_err() {
            return;
        }
    }
}

fn read_keys(sender: &mpsc::Sender<Event>) {
    while !sender.is_closed() {
        let events = match screen::read_keys(KEYS_POLL_MS) {
            Ok(keys) => keys.into_iter().map(Event::Key).collect(),
            Err(_) => vec![Event::Closed],
        };
        for event in events {
            let is_last = matches!(event, Event::Closed);
            if sender.blocking_send(event).is_err() || is_last {
                return;
            }
        }
    }
}

/// Calls the daemon for a key, and sends messages for the board.
async fn call(client: &Client, action: Action, sender: &mpsc::Sender<Event>) {
    let message = match action {
        Action::Preload(name) => preload(client, &name, sender).await,
        action => call_once(client, action).await,
    };
    let message = message.unwrap_or_else(|error| error.to_string());
    // Nobody reads it after the loop's end.
    let _ = sender.send(Event::Message(message)).await;
}

async fn preload(
    client: &Client,
    name: &str,
    sender: &mpsc::Sender<Event>,
) -> Result<String, rocmforge_client::Error> {
    let mut events = client.preload(name, &[]).await?;
    let _ = sender
        .send(Event::Message(format!("{name}: uploading")))
        .await;
    // Uploads continue while the stream is read; samples show how far they are.
    while let Some(event) = events.next().await {
        event?;
    }
    Ok(format!("{name}: preloaded"))
}

async fn call_once(client: &Client, action: Action) -> Result<String, rocmforge_client::Error> {
    Ok(match action {
        Action::Quit | Action::Preload(_) => String::new(),
        Action::Pin(name) => {
            let pinned = client.pin(&name, &[]).await?;
            format!("{name}: {} segments pinned", pinned.pinned_segments)
        }
        Action::Unpin(name) => {
            let left = client.unpin(&name, &[]).await?;
            format!("{name}: {} segments pinned", left.pinned_segments)
        }
        Action::Evict(name) => {
            let freed = client.cache_clear(Some(&name)).await?;
            format!("{name}: {} segments evicted", freed.freed_segments)
        }
        Action::Unload(name) => {
            client.unload(&name, false).await?;
            format!("{name}: unloaded")
        }
        Action::Budget(budget) => {
            let set = client.cache_set_budget(budget.into()).await?;
            format!("budget {}", crate::human::size(set.budget_bytes))
        }
    })
}
