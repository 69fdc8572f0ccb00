//! rocmforge-bench: how fast the engine is on this machine, with nothing but this binary.
//!
//! It makes models of real shapes with random weights (speed does not depend on the values), runs
//! the engine in its own process, and prints one table on stdout; everything else goes to stderr.
//! Exit codes: 0, 1 for a failure, 2 for wrong usage.

#![forbid(unsafe_code)]

mod check;
mod cold;
mod date;
mod device;
mod disk;
mod generate;
mod goal;
mod gpu;
mod llama_bench;
mod memory;
mod presets;
mod projector;
mod rates;
mod replay;
mod report;
mod session;
mod socket;
mod speed;
mod stream;
mod swap;
mod tensors;
mod vocab;
mod weights;
mod zoo;

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand, ValueEnum};
use rocmforge_engine::api::Policy;
use rocmforge_gpu_driver::{PRODUCTS_CHILD_ARGUMENT, products_child_main};

use crate::device::DeviceArg;
use crate::presets::{Mix, Preset};

/// Measures the engine on models of random weights that it makes itself.
#[derive(Debug, Parser)]
#[command(name = "rocmforge-bench", version = concat!(env!("CARGO_PKG_VERSION"), " (", env!("ROCMFORGE_COMMIT"), ")"))]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Write a model: a GGUF file of a real shape with random weights.
    Model {
        /// Shape.
        #[arg(value_enum)]
        preset: Preset,
        /// Type of the matrices.
        #[arg(value_enum, value_name = "TYPE")]
        mix: Mix,
        /// The file, which is replaced if it exists.
        out: PathBuf,
        /// The same seed gives the same file.
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// Load, first use, prefill and decode of whole models.
    Host(speed::Options),
    /// Decode under budgets that hold a share of the model.
    Stream(stream::Options),
    /// Two models in turn under a budget for one and a half.
    Swap(swap::Options),
    /// A model that comes from a disk while texts of another are read.
    Cold(cold::Options),
    /// Read a cold file from its disk, as uploads do and as `dd` does.
    Disk(disk::Options),
    /// Clients of a running daemon, over its socket: rates of several numbers of them at once.
    Socket(socket::Options),
    /// Many models on one server, asked over HTTP: any server with OpenAI's routes.
    Zoo(zoo::Options),
    /// Agents' requests, sent again to a running daemon: how much of them was computed, and when
    /// each got its first token.
    Replay(replay::Options),
    /// All that a GPU is judged by: figures beside its ceilings, parity, text, a mixed load,
    /// rounds. Exit code 1 if one of the checks fails.
    Gpu(gpu::Options),
    /// The first request of a process: what `gpu` runs again and again.
    #[command(hide = true)]
    FirstToken(gpu::first::Options),
}

/// What every measurement takes.
#[derive(Debug, clap::Args)]
struct Common {
    /// The device to measure.
    #[arg(long, value_enum, default_value = "auto")]
    device: DeviceArg,
    /// Threads of the host's operations [default: one a core].
    #[arg(long)]
    threads: Option<NonZeroUsize>,
    /// Uploads under way ahead of their turn, at most [default: what the device prefers].
    #[arg(long)]
    prefetch: Option<u32>,
    /// Where models are made, and found if they are there [default: a temporary directory].
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

/// Values of `--policy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PolicyArg {
    /// Farthest next use first.
    PassAware,
    /// Least recently used first.
    Lru,
}

impl PolicyArg {
    fn policy(self) -> Policy {
        match self {
            PolicyArg::PassAware => Policy::PassAware,
            PolicyArg::Lru => Policy::Lru,
        }
    }
}

/// Where models are: a directory of the user's, or one that goes away with this.
enum Dir {
    Given(PathBuf),
    Temporary(tempfile::TempDir),
}

impl Dir {
    fn path(&self) -> &Path {
        match self {
            Dir::Given(path) => path,
            Dir::Temporary(dir) => dir.path(),
        }
    }
}

impl Common {
    fn threads(&self) -> Result<NonZeroUsize> {
        match self.threads {
            Some(threads) => Ok(threads),
            None => std::thread::available_parallelism()
                .context("the number of cores is not known: give --threads"),
        }
    }

    fn dir(&self) -> Result<Dir> {
        match &self.dir {
            Some(dir) => Ok(Dir::Given(dir.clone())),
            None => tempfile::tempdir()
                .map(Dir::Temporary)
                .context("no temporary directory for models: give --dir"),
        }
    }
}

fn main() -> ExitCode {
    // Run-time compilers may abort: they run in a process of their own, which is this binary again.
    if std::env::args().nth(1).as_deref() == Some(rocmforge_kernels_gpu::compile::CHILD_ARGUMENT) {
        return ExitCode::from(
            u8::try_from(rocmforge_kernels_gpu::compile::rtc_child_main()).unwrap_or(1),
        );
    }
    // Libraries for products may abort: likewise.
    if let Some(PRODUCTS_CHILD_ARGUMENT) = std::env::args().nth(1).as_deref() {
        return match products_child_main(std::env::args().skip(2)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(message) => {
                eprintln!("{message}");
                ExitCode::FAILURE
            }
        };
    }
    let done = match Cli::parse().command {
        Command::Model {
            preset,
            mix,
            out,
            seed,
        } => model(preset, mix, &out, seed),
        Command::Host(options) => speed::run(&options),
        Command::Stream(options) => stream::run(&options),
        Command::Swap(options) => swap::run(&options),
        Command::Cold(options) => cold::run_all(&options),
        Command::Disk(options) => disk::run(&options),
        Command::Socket(options) => socket::run(&options),
        Command::Zoo(options) => zoo::run(&options),
        Command::Replay(options) => replay::run(&options),
        Command::Gpu(options) => gpu::run(&options),
        Command::FirstToken(options) => gpu::first::child(&options),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rocmforge-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn model(preset: Preset, mix: Mix, out: &Path, seed: u64) -> Result<()> {
    let begin = Instant::now();
    let written = generate::write(out, preset, mix, seed)?;
    let seconds = begin.elapsed().as_secs_f64();
    eprintln!(
        "{}: {:.2} GB, {} tensors, {seconds:.1} s ({:.0} MB/s)",
        out.display(),
        written.bytes as f64 / 1e9,
        written.tensors,
        written.bytes as f64 / 1e6 / seconds
    );
    Ok(())
}
