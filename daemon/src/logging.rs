//! The log of the process: its lines, its filter, and panics.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::{self, IsTerminal as _};

use anyhow::Context as _;
use rocmforged::log::Log;
use rocmforged::reload::SetFilter;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::reload::Handle;

use crate::LOG_WAIT_MAX;

/// Starts the log, through which panics speak, too: their usual words would wait
/// for a stuck standard error.
pub(crate) fn start_log(filter: &str) -> anyhow::Result<(Log, SetFilter)> {
    let log = Log::stderr().context("cannot start the log")?;
    let lines = tracing_subscriber::fmt()
        .with_env_filter(log_filter(filter)?)
        .with_writer(log.clone())
        .log_internal_errors(false)
        .with_ansi(io::stderr().is_terminal());
    // The journal has its own clock.
    let (set_filter, started) = match std::env::var_os("JOURNAL_STREAM") {
        Some(_) => {
            let lines = lines.without_time().with_filter_reloading();
            (setter(lines.reload_handle()), lines.try_init())
        }
        None => {
            let lines = lines.with_filter_reloading();
            (setter(lines.reload_handle()), lines.try_init())
        }
    };
    started.map_err(|error| anyhow::anyhow!("cannot start the log: {error}"))?;
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
    Ok((log, set_filter))
}

/// What puts another filter in force.
fn setter<S: 'static>(in_force: Handle<EnvFilter, S>) -> SetFilter {
    Box::new(move |filter| {
        let filter = log_filter(filter).map_err(|error| error.to_string())?;
        in_force.reload(filter).map_err(|error| error.to_string())
    })
}

/// The filter, under which calls of management are written at every level unless
/// it speaks of them itself.
fn log_filter(filter: &str) -> anyhow::Result<EnvFilter> {
    let parsed = EnvFilter::try_new(filter)?;
    if filter.contains("audit") {
        return Ok(parsed);
    }
    Ok(parsed.add_directive("audit=info".parse()?))
}
