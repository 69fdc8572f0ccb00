//! Command line of rocmforged.
//!
//! Data goes to the standard output and everything else to standard error. Exit
//! codes: 0 success, a reader that closed the pipe included; 1 failure; 2 wrong
//! usage; 3 no daemon to talk to; 4 not now, try again later; 5 no such model or
//! file; 6 the request or the file cannot work; 7 not allowed; 128 + n when signal
//! n ended it.
//!
//! The command runs as a task of its own, so that a signal is answered even
//! while the command waits for a slow reader of its output. Ending the task
//! drops its streams, which cancels the request in the daemon.

#![forbid(unsafe_code)]

mod cli;
mod commands;
mod context;
mod doctor;
mod failure;
mod generated;
mod human;
mod output;
mod private;
mod progress;
mod samplers;
mod sampling;
mod top;

use std::io::Write;
use std::process::ExitCode;
use std::task::Poll;
use std::time::Duration;

use clap::Parser;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::cli::Cli;
use crate::context::Context;
use crate::output::{Closed, Output};
use crate::private::PrivateSlot;

/// How long a command that was interrupted may take to cancel its request.
const CANCEL_MS_MAX: u64 = 500;

fn main() -> ExitCode {
    let cli = Cli::parse().checked().unwrap_or_else(|error| error.exit());
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("rocmforgectl: cannot start: {error}");
            return ExitCode::FAILURE;
        }
    };
    let private = PrivateSlot::default();
    let code = runtime.block_on(run(cli, private.clone()));
    // A thread may still wait for a line of input; it ends with the process.
    runtime.shutdown_background();
    private.stop();
    code
}

async fn run(cli: Cli, private: PrivateSlot) -> ExitCode {
    let mut endings = match Endings::install() {
        Ok(endings) => endings,
        Err(error) => {
            eprintln!("rocmforgectl: cannot watch for signals: {error}");
            return ExitCode::FAILURE;
        }
    };
    let json = cli.json;
    let output = Output::stdout(json);
    let context = Context::new(cli.socket, output, private);
    let mut command = tokio::spawn(commands::run(context, cli.command));
    let outcome = tokio::select! {
        outcome = &mut command => outcome,
        number = endings.next() => {
            command.abort();
            let _ = tokio::time::timeout(Duration::from_millis(CANCEL_MS_MAX), command).await;
            return ExitCode::from(128 + number);
        }
    };
    match outcome {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(error)) if error.is::<Closed>() => ExitCode::SUCCESS,
        Ok(Err(error)) => {
            let text = if json {
                failure::as_json(&error).to_string()
            } else {
                format!("rocmforgectl: {}", failure::describe(&error))
            };
            // Nobody is left to be told where this fails.
            let _ = writeln!(std::io::stderr(), "{text}");
            ExitCode::from(failure::exit_code(&error))
        }
        // The panic has printed its message.
        Err(_) => ExitCode::FAILURE,
    }
}

/// The signals that ask the program to end. Installed before a command begins,
/// so that none ends the program with a daemon or a request left behind.
struct Endings([(u8, Signal); 3]);

impl Endings {
    fn install() -> std::io::Result<Endings> {
        let of = |kind: SignalKind, number: u8| signal(kind).map(|signals| (number, signals));
        Ok(Endings([
            of(SignalKind::hangup(), 1)?,
            of(SignalKind::interrupt(), 2)?,
            of(SignalKind::terminate(), 15)?,
        ]))
    }

    /// Waits for the first signal that would end the program, and returns its number.
    async fn next(&mut self) -> u8 {
        std::future::poll_fn(|cx| {
            for (number, signals) in &mut self.0 {
                if signals.poll_recv(cx).is_ready() {
                    return Poll::Ready(*number);
                }
            }
            Poll::Pending
        })
        .await
    }
}
