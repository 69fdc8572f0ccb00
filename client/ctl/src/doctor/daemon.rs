//! What the daemon says of itself, or its program where none runs: runtimes and versions.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use rocmforge_client::Error;
use rocmforge_client::proto::v1::{ListDevicesResponse, StatusResponse};

use super::Finding;
use super::machine::{Machine, Vendor};
use crate::commands::devices::notes;
use crate::context::Context;
use crate::private;

/// How long the daemon's program may look for runtimes: it gives each vendor ten seconds.
const PROGRAM_WAIT_MAX: Duration = Duration::from_secs(25);
const PROGRAM_POLL: Duration = Duration::from_millis(20);
/// Lines of its answer that are shown.
const LINES_MAX: usize = 24;

/// What `doctor` found out about the running daemon.
#[derive(Debug)]
pub(super) struct Told {
    running: Option<(StatusResponse, ListDevicesResponse)>,
    /// Why no daemon can be asked; `None` if one answered.
    error: Option<Error>,
    /// Output of the daemon's program, or why it could not be run.
    program: Option<Result<Program, String>>,
}

#[derive(Debug)]
struct Program {
    path: PathBuf,
    version: String,
    devices: String,
}

impl Told {
    /// The daemon's program, where none runs.
    pub(super) fn program(&self) -> Option<&Path> {
        let program = self.program.as_ref()?.as_ref().ok()?;
        Some(&program.path)
    }

    pub(super) fn pid(&self) -> Option<u32> {
        self.running.as_ref().map(|(status, _)| status.pid)
    }

    /// Why the daemon at `path` did not respond, if it was asked.
    pub(super) fn refused(&self, path: &Path) -> Option<String> {
        match &self.error {
            Some(Error::NoDaemon { tried }) => {
                let attempt = tried.iter().find(|attempt| attempt.path == path)?;
                Some(attempt.error.to_string())
            }
            Some(error) => Some(error.to_string()),
            None => None,
        }
    }
}

/// Asks the daemon, or its program. With `only_path` the program is looked for in PATH alone.
pub(super) async fn ask(context: &Context, asks: bool, only_path: bool) -> Told {
    let mut told = Told {
        running: None,
        error: None,
        program: None,
    };
    if asks {
        match talk(context).await {
            Ok(running) => told.running = Some(running),
            Err(error) => told.error = Some(error),
        }
    }
    if told.running.is_none() {
        let asked = tokio::task::spawn_blocking(move || program(only_path)).await;
        told.program = Some(asked.unwrap_or_else(|error| Err(error.to_string())));
    }
    told
}

async fn talk(context: &Context) -> Result<(StatusResponse, ListDevicesResponse), Error> {
    let client = context.connect().await?;
    Ok((client.status().await?, client.list_devices().await?))
}

fn program(only_path: bool) -> Result<Program, String> {
    let path = private::find_daemon(!only_path).map_err(|error| error.to_string())?;
    let version = output(&path, "--version")?;
    let devices = output(&path, "--list-devices")?;
    Ok(Program {
        path,
        version: version.split_whitespace().last().unwrap_or("?").to_owned(),
        devices,
    })
}

/// The standard output of the program.
fn output(path: &Path, argument: &str) -> Result<String, String> {
    let Output { status, stdout, .. } = run(path, argument)?;
    if !status.success() {
        return Err(format!("{} {argument}: {status}", path.display()));
    }
    Ok(String::from_utf8_lossy(&stdout).into_owned())
}

/// What the program prints; it is killed if it takes too long.
pub(super) fn run(path: &Path, argument: &str) -> Result<Output, String> {
    let failed = |error: std::io::Error| format!("{} {argument}: {error}", path.display());
    let mut child = Command::new(path)
        .arg(argument)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let give_up = Instant::now() + PROGRAM_WAIT_MAX;
    // What it prints fits into a pipe.
    while child.try_wait().map_err(failed)?.is_none() {
        if Instant::now() >= give_up {
            // It may have ended just now; there is no more to be done.
            let _ = child.kill();
            let _ = child.wait();
            return Err(format!("{} {argument} does not end", path.display()));
        }
        std::thread::sleep(PROGRAM_POLL);
    }
    child.wait_with_output().map_err(failed)
}

/// Whether a line shows a device of this kind.
type ShowsDevice = fn(&str, &str) -> bool;

/// The vendor libraries that the daemon tried, and the devices of each.
pub(super) fn runtimes(told: &Told, machine: &Machine) -> Vec<Finding> {
    const SUBJECT: &str = "runtime";
    let (lines, found): (Vec<String>, ShowsDevice) = match (&told.running, &told.program) {
        (Some((status, devices)), _) => {
            let in_use = devices.in_use.as_ref();
            let device = in_use.or(status.device.as_ref());
            let mut lines: Vec<_> = device
                .map(|d| format!("the daemon computes on {}", d.name))
                .into_iter()
                .collect();
            let drivers = devices.drivers.iter();
            lines.extend(drivers.flat_map(|d| lines_of(&notes(d))));
            // A line of a library says how many devices it knows.
            (lines, |line, kind| {
                line.starts_with(&format!("{kind}:"))
                    && line.contains("device")
                    && !line.contains(": 0 devices")
            })
        }
        (None, Some(Ok(program))) => (lines_of(&program.devices), |line, kind| {
            line.strip_prefix(kind)
                .and_then(|rest| rest.strip_prefix(':'))
                .is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
        }),
        (None, Some(Err(error))) => {
            return vec![Finding::fail(
                SUBJECT,
                error.clone(),
                "install rocmforged, beside rocmforgectl or in PATH",
            )];
        }
        (None, None) => return Vec::new(),
    };
    let mut findings = Vec::new();
    for (vendor, kind, install) in [
        (
            Vendor::Amd,
            "hip",
            "install ROCm's HIP runtime, libamdhip64 (Debian, Ubuntu: libamdhip64-*; Fedora: rocm-hip-runtime; Arch: \
             hip-runtime-amd); it is looked for by the loader, in $ROCM_PATH/lib, /opt/rocm/lib and /opt/rocm-*/lib, or \
             named in ROCMFORGE_HIP_LIBRARY of the daemon's environment",
        ),
        (
            Vendor::Nvidia,
            "cuda",
            "install NVIDIA's driver with its libcuda.so.1 (Debian: libcuda1)",
        ),
    ] {
        let knows_one = lines.iter().any(|line| found(line, kind));
        if machine.has(vendor) && !knows_one {
            // What was tried is in the lines below.
            findings.push(Finding::fail(
                SUBJECT,
                format!("{kind}: a GPU is on the PCI bus, and no runtime lists it"),
                install,
            ));
        }
    }
    let shown = lines.into_iter().take(LINES_MAX);
    findings.extend(shown.map(|line| Finding::ok(SUBJECT, line)));
    findings
}

fn lines_of(text: &str) -> Vec<String> {
    let lines = text.lines().map(str::trim_end);
    lines
        .filter(|line| !line.is_empty())
        .map(str::to_owned)
        .collect()
}

/// Client and daemon should be of one release.
pub(super) fn versions(told: &Told) -> Vec<Finding> {
    const SUBJECT: &str = "versions";
    let own = env!("CARGO_PKG_VERSION");
    let (version, whose) = match (&told.running, &told.program) {
        (Some((status, _)), _) => (&status.version, "the running daemon".to_owned()),
        (None, Some(Ok(program))) => (&program.version, program.path.display().to_string()),
        _ => return vec![Finding::ok(SUBJECT, format!("rocmforgectl {own}"))],
    };
    let shown = format!("rocmforgectl {own}, {whose} {version}");
    if version == own {
        return vec![Finding::ok(SUBJECT, shown)];
    }
    vec![Finding::warn(
        SUBJECT,
        shown,
        "install both of one release, and restart the daemon",
    )]
}
