//! `GET /models/sse`: which models are loaded and unloaded, and how downloads in the background go,
//! as it happens, in llama-server's words.
//!
//! Only changes are sent; `GET /models` has the state. A model is reported under its name and each
//! alias. There is no `loading` in between: a load takes milliseconds.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::response::Response;
use bytes::Bytes;
use futures_util::stream;
use rocmforge_engine::api::Snapshot;
use rocmforge_service::Service;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::Instant;

use super::Http;
use super::call::Call;
use super::changes::{self, NOTHING_CHANGED, SILENT_MAX};
use super::pulls::Pulls;
use super::reply::event;

/// Minimum time between two checks, since a busy engine publishes every few milliseconds.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Handler of `GET /models/sse`.
pub(super) async fn models(State(http): State<Arc<Http>>, request: Request) -> Response {
    let call = Call::of(&http, "GET /models/sse", &request);
    if let Err(failure) = call.service.admit() {
        return call.refuse(&failure);
    }
    let mut snapshots = call.service.engine.watch();
    let names = names(&snapshots.borrow_and_update());
    let watching = Watching {
        service: call.service,
        downloads: http.pulls.changes(),
        told: http.pulls.told(),
        pulls: Arc::clone(&http.pulls),
        snapshots,
        names,
        said: None,
    };
    let events = stream::unfold(watching, |mut watching| async move {
        let text = watching.next().await?;
        Some((Ok::<_, Infallible>(Bytes::from(text)), watching))
    });
    changes::response(events)
}

fn names(snapshot: &Snapshot) -> BTreeSet<String> {
    let models = snapshot.models.iter();
    models.map(|m| m.model.name().to_owned()).collect()
}

/// A client that reads `GET /models/sse`.
struct Watching {
    service: Arc<Service>,
    pulls: Arc<Pulls>,
    downloads: watch::Receiver<u64>,
    /// Downloads as they were last sent.
    told: Vec<(String, &'static str, Value)>,
    snapshots: watch::Receiver<Arc<Snapshot>>,
    /// Names of models that the client knows to be loaded.
    names: BTreeSet<String>,
    /// Time of the last event.
    said: Option<Instant>,
}

impl Watching {
    /// Waits for the next event; `None` once the daemon ends.
    async fn next(&mut self) -> Option<String> {
        // The header goes out with the first bytes.
        let Some(said) = self.said else {
            self.said = Some(Instant::now());
            return Some(": changes of models follow\n\n".to_owned());
        };
        let silent = tokio::time::sleep_until(said + SILENT_MAX);
        let mut silent = std::pin::pin!(silent);
        loop {
            tokio::select! {
                changed = self.snapshots.changed() => changed.ok()?,
                changed = self.downloads.changed() => changed.ok()?,
                () = &mut silent => {
                    self.said = Some(Instant::now());
                    return Some(NOTHING_CHANGED.to_owned());
                }
            }
            let snapshot = Arc::clone(&self.snapshots.borrow_and_update());
            if snapshot.draining || self.service.is_draining() {
                return None;
            }
            let mut told = self.tell(names(&snapshot));
            self.tell_downloads(&mut told);
            if !told.is_empty() {
                self.said = Some(Instant::now());
                return Some(told);
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Appends events for downloads that made progress.
    fn tell_downloads(&mut self, text: &mut String) {
        let now = self.pulls.told();
        for told in now.iter().filter(|told| !self.told.contains(told)) {
            let (name, what, data) = told;
            let data = json!({"model": name, "event": what, "data": data});
            event(None, &data, text);
        }
        self.told = now;
    }

    /// Events for the differences from what the client knows.
    fn tell(&mut self, now: BTreeSet<String>) -> String {
        let gone = self.names.difference(&now).map(|name| (name, "unloaded"));
        let new = now.difference(&self.names).map(|name| (name, "loaded"));
        let book = self.service.declared();
        let mut text = String::new();
        for (name, status) in gone.chain(new) {
            // An alias of its name leads elsewhere.
            let own = std::iter::once(name).filter(|name| !book.is_alias(name));
            for name in own.chain(book.aliases_of(name)) {
                let data = json!({
                    "model": name, "event": "status_change", "data": {"status": status},
                });
                event(None, &data, &mut text);
            }
        }
        self.names = now;
        text
    }
}
