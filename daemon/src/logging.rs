//! Sets up the process's log: its lines, its filter, and panics.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::{self, IsTerminal as _};

use anyhow::Context as _;
use rocmforged::log::Log;
use rocmforged::log_filter;
use rocmforged::reload::SetFilter;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::prelude::*;
use tracing_subscriber::reload::{self, Handle};

use crate::LOG_WAIT_MAX;

/// Starts the log, which also reports panics: their default message would block on a stuck standard
/// error.
pub(crate) fn start_log(filter: &str) -> anyhow::Result<(Log, SetFilter)> {
    let log = Log::stderr().context("cannot start the log")?;
    let (filter, in_force) = reload::Layer::new(with_audit(filter)?);
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(log.clone())
        .log_internal_errors(false)
        .with_ansi(io::stderr().is_terminal());
    // The journal has its own clock.
    let lines = match std::env::var_os("JOURNAL_STREAM") {
        Some(_) => lines.without_time().boxed(),
        None => lines.boxed(),
    };
    let started = tracing_subscriber::registry()
        .with(filter)
        .with(lines)
        .try_init();
    started.context("cannot start the log")?;
    let words = log.clone();
    std::panic::set_hook(Box::new(move |panic| {
        let thread = std::thread::current();
        let name = thread.name().unwrap_or("unnamed").to_owned();
        words.line(&format!("rocmforged: thread '{name}': {panic}"));
        let trace = Backtrace::capture();
        if trace.status() == BacktraceStatus::Captured {
            trace.to_string().lines().for_each(|line| words.line(line));
        }
        // A second panic would abort the process with these words unwritten.
        words.flush(LOG_WAIT_MAX);
    }));
    Ok((log, setter(in_force)))
}

/// A function that puts another filter in force.
fn setter<S: 'static>(in_force: Handle<Targets, S>) -> SetFilter {
    Box::new(move |filter| {
        let filter = with_audit(filter).map_err(|error| error.to_string())?;
        in_force.reload(filter).map_err(|error| error.to_string())
    })
}

/// The filter, with management calls (`audit`) logged at every level unless the text sets their
/// level.
fn with_audit(text: &str) -> anyhow::Result<Targets> {
    let filter = log_filter::parse(text).map_err(anyhow::Error::msg)?;
    Ok(match text.contains("audit") {
        true => filter,
        false => filter.with_target("audit", LevelFilter::INFO),
    })
}
