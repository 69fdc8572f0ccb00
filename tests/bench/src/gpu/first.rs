//! The first request of a process: this program run again, with nothing on the device and nothing
//! registered, but with kernels that were compiled before.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use rocmforge_engine::api::Policy;
use serde::{Deserialize, Serialize};

use crate::device::{DeviceArg, UploadArgs};
use crate::session::{Session, set_uploads};

/// Options of `first-token`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    #[arg(long, value_enum)]
    device: DeviceArg,
    #[command(flatten)]
    uploads: UploadArgs,
    #[arg(long)]
    model: PathBuf,
}

/// Milliseconds of a fresh process.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct First {
    /// From the start of the engine to its readiness.
    pub(crate) start_ms: f64,
    /// Of the first load.
    pub(crate) load_ms: f64,
    /// From the first request to its first token.
    pub(crate) ttft_ms: f64,
}

/// The process's own part: prints one JSON object.
///
/// # Errors
/// The model does not load or run.
pub(crate) fn child(options: &Options) -> Result<()> {
    set_uploads(options.uploads.way());
    let begin = Instant::now();
    let mut session = Session::start(options.device, None, Policy::PassAware, None)?;
    let start_ms = begin.elapsed().as_secs_f64() * 1e3;
    let (model, load) = session.load("first", &options.model)?;
    let summary = session.generate(&model, 4, 1)?;
    let first = First {
        start_ms,
        load_ms: load.as_secs_f64() * 1e3,
        ttft_ms: summary.ttft.as_secs_f64() * 1e3,
    };
    println!("{}", serde_json::to_string(&first)?);
    session.end()
}

/// Runs a process and takes its figures.
///
/// # Errors
/// It fails.
pub(crate) fn measure(device: DeviceArg, uploads: UploadArgs, model: &Path) -> Result<First> {
    let own = std::env::current_exe().context("where this program is")?;
    let output = Command::new(own)
        .args(["first-token", "--device", &device.name()])
        .args(uploads.arguments())
        .arg("--model")
        .arg(model)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .context("running this program again")?;
    if !output.status.success() {
        bail!("the process for a first token ended with {}", output.status);
    }
    serde_json::from_slice(&output.stdout).context("the process for a first token")
}
