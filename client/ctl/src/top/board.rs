//! The board of `top`: a value that takes samples of the daemon and keys, and draws itself.

mod draw;
#[cfg(test)]
mod tests;

use std::time::Instant;

use rocmforge_client::proto::Budget;
use rocmforge_client::proto::v1::{CacheUsage, Model, StatsResponse, StatusResponse};
use serde_json::{Value, json};

use super::screen::Key;
use crate::human::{clean, percent, size};

/// Events that are shown.
const EVENTS_MAX: usize = 6;
/// Longest budget that is typed.
const TYPED_MAX: usize = 24;

/// The call that a key leads to. Names are those of models.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Action {
    /// Leave the board.
    Quit,
    /// Pin all segments.
    Pin(String),
    /// Unpin all segments.
    Unpin(String),
    /// Upload all segments.
    Preload(String),
    /// Evict what is not in use.
    Evict(String),
    /// Unload the model.
    Unload(String),
    /// Set the budget.
    Budget(Budget),
}

/// The daemon's state at one time.
#[derive(Debug, Clone)]
pub(crate) struct Sample {
    at: Instant,
    status: StatusResponse,
    cache: StatsResponse,
    models: Vec<Model>,
}

impl Sample {
    pub(crate) fn new(status: StatusResponse, cache: StatsResponse, models: Vec<Model>) -> Sample {
        Sample {
            at: Instant::now(),
            status,
            cache,
            models,
        }
    }

    fn total(&self) -> CacheUsage {
        self.cache.total.unwrap_or_default()
    }
}

/// The two last samples, the chosen model, and what is being typed.
#[derive(Debug, Default)]
pub(crate) struct Board {
    before: Option<Sample>,
    now: Option<Sample>,
    /// Index of the chosen model.
    chosen: usize,
    /// A budget that is being typed.
    typed: Option<String>,
    message: String,
    events: Vec<String>,
}

impl Board {
    /// Takes a sample, and notes the events that differences from the last one show.
    pub(crate) fn take(&mut self, sample: Sample) {
        if let Some(before) = self.now.take() {
            self.compare(&before, &sample);
            self.before = Some(before);
        }
        self.chosen = self.chosen.min(sample.models.len().saturating_sub(1));
        self.now = Some(sample);
    }

    fn compare(&mut self, before: &Sample, now: &Sample) {
        let has =
            |sample: &Sample, name: &str| sample.models.iter().any(|model| model.name == name);
        let mut events = Vec::new();
        for model in now.models.iter().filter(|model| !has(before, &model.name)) {
            events.push(format!("{} loaded", clean(&model.name)));
        }
        for model in before.models.iter().filter(|model| !has(now, &model.name)) {
            events.push(format!("{} unloaded", clean(&model.name)));
        }
        let evicted = now
            .total()
            .evictions
            .saturating_sub(before.total().evictions);
        if evicted > 0 {
            events.push(format!("{evicted} segments evicted"));
        }
        if now.cache.budget_bytes != before.cache.budget_bytes {
            let (was, is) = (
                size(before.cache.budget_bytes),
                size(now.cache.budget_bytes),
            );
            events.push(format!("budget {was} -> {is}"));
        }
        self.events.extend(events);
        let over = self.events.len().saturating_sub(EVENTS_MAX);
        self.events.drain(..over);
    }

    /// Shows a message until the next one.
    pub(crate) fn show(&mut self, text: &str) {
        self.message = clean(text);
    }

    /// Takes a key, and returns the call that it leads to.
    pub(crate) fn key(&mut self, key: Key) -> Option<Action> {
        if key == Key::Interrupt {
            return Some(Action::Quit);
        }
        if self.typed.is_some() {
            return self.type_budget(key);
        }
        let sample = self.now.as_ref()?;
        let name = sample
            .models
            .get(self.chosen)
            .map(|model| model.name.clone());
        match key {
            Key::Char('q') | Key::Esc => Some(Action::Quit),
            Key::Down | Key::Char('j') => {
                self.chosen = (self.chosen + 1).min(sample.models.len().saturating_sub(1));
                None
            }
            Key::Up | Key::Char('k') => {
                self.chosen = self.chosen.saturating_sub(1);
                None
            }
            Key::Char('b') => {
                self.typed = Some(String::new());
                None
            }
            Key::Char('p') => name.map(Action::Pin),
            Key::Char('P') => name.map(Action::Unpin),
            Key::Char('l') => name.map(Action::Preload),
            Key::Char('e') => name.map(Action::Evict),
            Key::Char('u') => name.map(Action::Unload),
            _ => None,
        }
    }

    fn type_budget(&mut self, key: Key) -> Option<Action> {
        let typed = self.typed.as_mut()?;
        match key {
            Key::Char(c) if typed.len() < TYPED_MAX && c.is_ascii_graphic() => typed.push(c),
            Key::Backspace => drop(typed.pop()),
            Key::Esc => self.typed = None,
            Key::Enter => {
                let budget = self.typed.take().unwrap_or_default().parse::<Budget>();
                match budget {
                    Ok(budget) => return Some(Action::Budget(budget)),
                    Err(error) => self.message = error.to_string(),
                }
            }
            _ => {}
        }
        None
    }

    /// Bytes uploaded a second between the last two samples.
    fn upload_rate(&self) -> Option<u64> {
        let (before, now) = (self.before.as_ref()?, self.now.as_ref()?);
        let bytes = now
            .total()
            .uploaded_bytes
            .saturating_sub(before.total().uploaded_bytes);
        let seconds = now.at.duration_since(before.at).as_secs_f64();
        (seconds > 0.0).then(|| (bytes as f64 / seconds) as u64)
    }

    /// Share of segments that were resident when a pass needed them, between the last two samples;
    /// since the daemon's start where no pass ran between them.
    fn hit_ratio(&self) -> String {
        let Some(now) = self.now.as_ref().map(Sample::total) else {
            return "-".to_owned();
        };
        let before = self.before.as_ref().map(Sample::total).unwrap_or_default();
        let (hits, misses) = (
            now.hits.saturating_sub(before.hits),
            now.misses.saturating_sub(before.misses),
        );
        match hits + misses {
            0 => percent(now.hits, now.hits + now.misses),
            all => percent(hits, all),
        }
    }

    /// The last sample as a JSON object.
    pub(crate) fn as_json(&self) -> Value {
        let Some(sample) = &self.now else {
            return json!({});
        };
        json!({
            "status": sample.status,
            "cache": sample.cache,
            "models": sample.models,
            "upload_bytes_per_s": self.upload_rate(),
        })
    }
}
