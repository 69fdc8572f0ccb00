//! A look at one device from its opening on, in seconds: what somebody sends when a card does not
//! do what it should. Each step is told as soon as it has ended, so that of a step that never
//! ends all before it is known.

use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rocmforge_device::{
    Buf, BufSpec, Device, Error as DeviceError, Role, Rows, Scratch, ScratchLayout, TensorDesc,
    Upload,
};
use rocmforge_gguf::MappedFile;
use rocmforge_ops::{Conflicts, RowCounts, WeightType};

use crate::cases::{Extent, cases};
use crate::run::{SCRATCH, SLAB};
use crate::{Case, Pair};

/// Bytes that are copied each way: the time of a few of the device's pieces.
const COPY_BYTES: usize = 8 << 20;

/// Columns of the matrix that is uploaded.
const FILE_COLS: u64 = 1024;

/// Seed of all data.
const SEED: u64 = 12;

/// The result of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The operation is right.
    Passed,
    /// The operation is wrong, or the device refused or failed.
    Failed,
    /// The operation was not tried.
    Skipped,
    /// Something to know.
    Note,
}

impl Outcome {
    /// A word for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed => "failed",
            Self::Skipped => "skipped",
            Self::Note => "note",
        }
    }
}

/// A step that has ended.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    /// The subject of the step.
    pub name: String,
    /// What came of it.
    pub outcome: Outcome,
    /// Figures, or what is wrong.
    pub detail: String,
    /// Time that the step took.
    pub took: Duration,
}

/// Opens the device and looks at it: memory, copies each way, a kernel of each kind against `host`,
/// a recorded pass. Kernels whose turn has not come after `limit` are left out.
pub fn check(
    open: impl FnOnce() -> Result<Box<dyn Device>, DeviceError>,
    host: Box<dyn Device>,
    limit: Duration,
    tell: &mut dyn FnMut(Step),
) {
    let begun = Instant::now();
    let mut told = Told { tell };
    let opened = told.step("open", |detail| {
        let device = open()?;
        let info = device.info();
        *detail = format!(
            "{} ({}), {} units, {} MiB, driver {}",
            info.name,
            info.arch,
            info.compute_units,
            info.memory_bytes >> 20,
            info.driver
        );
        Ok(device)
    });
    let Some(device) = opened else { return };
    let known = device.info().findings;
    for finding in &known {
        told.tell("found", Outcome::Note, finding.clone(), Duration::ZERO);
    }
    let pair = told.step("memory", |detail| {
        let pair = Pair::new(host, device)?;
        let held = pair.device.memory_use();
        let held = held.map_or(0, |held| held.allocated_bytes) >> 20;
        let free = pair.device.free_bytes().unwrap_or(0) >> 20;
        *detail = format!("{held} MiB taken, {free} MiB left");
        Ok(pair)
    });
    let Some(mut pair) = pair else { return };
    let device = pair.device.as_mut();
    told.step("copies", |detail| copies(device, detail));
    told.step("copy within", |detail| within(device, detail));
    told.step("file to device", |detail| file(device, detail));
    // What the first uploads showed.
    let found = device.info().findings.into_iter();
    for finding in found.filter(|found| !known.contains(found)) {
        told.tell("found", Outcome::Note, finding, Duration::ZERO);
    }
    kernels(&mut pair, begun + limit, &mut told);
}

/// Tells steps as they end.
struct Told<'a> {
    tell: &'a mut dyn FnMut(Step),
}

impl Told<'_> {
    fn tell(&mut self, name: &str, outcome: Outcome, detail: String, took: Duration) {
        (self.tell)(Step {
            name: name.to_owned(),
            outcome,
            detail,
            took,
        });
    }

    /// Runs a step and reports it; returns its value if the step passed.
    fn step<T>(
        &mut self,
        name: &str,
        run: impl FnOnce(&mut String) -> Result<T, DeviceError>,
    ) -> Option<T> {
        let (begun, mut detail) = (Instant::now(), String::new());
        let ran = run(&mut detail);
        let took = begun.elapsed();
        match ran {
            Ok(value) => {
                self.tell(name, Outcome::Passed, detail, took);
                Some(value)
            }
            Err(error) => {
                self.tell(name, Outcome::Failed, with_causes(&error), took);
                None
            }
        }
    }
}

fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(&format!(": {error}"));
        source = error.source();
    }
    text
}

fn wrong(what: &str) -> DeviceError {
    DeviceError::Config(format!(
        "{what}: the bytes read back differ from those written"
    ))
}

fn random(n: usize) -> Vec<f32> {
    let mut rng = StdRng::seed_from_u64(SEED);
    (0..n).map(|_| rng.random_range(-1.0..1.0)).collect()
}

/// Megabytes a second.
fn rate(bytes: usize, took: Duration) -> String {
    format!(
        "{:.0} MB/s",
        bytes as f64 / 1e6 / took.as_secs_f64().max(1e-9)
    )
}

/// One buffer of [`COPY_BYTES`] in the scratch.
fn copied() -> ScratchLayout {
    let buf = BufSpec {
        name: "copied",
        width: (COPY_BYTES / 4) as u64,
        rows: Rows::Tokens,
    };
    let counts = RowCounts {
        tokens: 1,
        outputs: 1,
    };
    ScratchLayout::new(&[buf], &Conflicts::all(1), counts)
}

/// Copies bytes to the device and back, and compares them.
fn copies(device: &mut dyn Device, detail: &mut String) -> Result<(), DeviceError> {
    let (layout, sent) = (copied(), random(COPY_BYTES / 4));
    let scratch = Scratch {
        layout: &layout,
        base: SCRATCH,
    };
    let begun = Instant::now();
    device.write(scratch, Buf(0), &sent)?;
    // A read waits for the write.
    device.read(scratch, Buf(0), &mut [0.0])?;
    let there = begun.elapsed();
    let mut back = vec![0.0; sent.len()];
    let begun = Instant::now();
    device.read(scratch, Buf(0), &mut back)?;
    *detail = format!(
        "{} there, {} back, {} MiB each",
        rate(COPY_BYTES, there),
        rate(COPY_BYTES, begun.elapsed()),
        COPY_BYTES >> 20
    );
    match back == sent {
        true => Ok(()),
        false => Err(wrong("a copy to the device and back")),
    }
}

/// From one place of the arena to another, which overlaps it: as a segment is moved.
fn within(device: &mut dyn Device, detail: &mut String) -> Result<(), DeviceError> {
    let (layout, sent) = (copied(), random(COPY_BYTES / 4));
    let to = SCRATCH + (1 << 20);
    let scratch = |base| Scratch {
        layout: &layout,
        base,
    };
    device.write(scratch(SCRATCH), Buf(0), &sent)?;
    device.read(scratch(SCRATCH), Buf(0), &mut [0.0])?;
    let begun = Instant::now();
    device.move_slab(SCRATCH, to, COPY_BYTES as u64)?;
    let mut moved = vec![0.0; 1];
    device.read(scratch(to), Buf(0), &mut moved)?;
    *detail = format!("{}, overlapping", rate(COPY_BYTES, begun.elapsed()));
    let mut moved = vec![0.0; sent.len()];
    device.read(scratch(to), Buf(0), &mut moved)?;
    match moved == sent {
        true => Ok(()),
        false => Err(wrong("a copy within the device")),
    }
}

/// From a file, as weights come, and again: through a registered mapping or pinned memory,
/// whichever the device has chosen for the first time and for later ones.
fn file(device: &mut dyn Device, detail: &mut String) -> Result<(), DeviceError> {
    let failed = |error: &dyn std::error::Error| {
        DeviceError::Config(format!(
            "a temporary file: {error}; TMPDIR names the folder"
        ))
    };
    let sent: Vec<u8> = random(COPY_BYTES / 4)
        .iter()
        .flat_map(|x| x.to_le_bytes())
        .collect();
    let mut written = tempfile::NamedTempFile::new().map_err(|e| failed(&e))?;
    written.write_all(&sent).map_err(|e| failed(&e))?;
    written.flush().map_err(|e| failed(&e))?;
    let mapped = MappedFile::open(written.path()).map_err(|e| failed(&e))?;
    let mapped = Arc::new(mapped);
    let desc = TensorDesc {
        name: "sent".to_owned(),
        ty: WeightType::F32,
        rows: (COPY_BYTES / 4) as u64 / FILE_COLS,
        cols: FILE_COLS,
        offset: 0,
        bytes: COPY_BYTES as u64,
        role: Role::Matrix,
    };
    let layout = Arc::new(device.layout(&[desc])?);
    let (mut is_right, mut rates) = (true, Vec::new());
    // A card keeps floats as in the file; the CPU has an order of its own.
    let keeps_order = device.volatile_memory().is_some();
    // Each to a place of its own, which nothing right lies at.
    for slab in [SLAB, SLAB + COPY_BYTES as u64] {
        let upload = Upload {
            file: Arc::clone(&mapped),
            layout: Arc::clone(&layout),
            slab,
        };
        let begun = Instant::now();
        let ticket = device.begin_upload(upload)?;
        device.wait_upload(ticket)?;
        let mut back = vec![0; sent.len()];
        // A read waits for the upload.
        device.read_slab(slab, &mut back[..1])?;
        rates.push(rate(COPY_BYTES, begun.elapsed()));
        device.read_slab(slab, &mut back)?;
        is_right &= !keeps_order || back == sent;
        device.finished_uploads();
    }
    *detail = format!("{}, {} again", rates[0], rates[1]);
    device.forget_file(&mapped);
    match is_right {
        true => Ok(()),
        false => Err(wrong("an upload of a file")),
    }
}

/// A case of each operation, those of a recorded pass among them.
fn kernels(pair: &mut Pair, until: Instant, told: &mut Told<'_>) {
    let mut chosen: Vec<Case> = Vec::new();
    for case in cases(Extent::Quick) {
        if chosen.iter().all(|other| other.operation != case.operation) {
            chosen.push(case);
        }
    }
    let n = chosen.len();
    for (done, case) in chosen.into_iter().enumerate() {
        if Instant::now() >= until {
            let detail = format!("{} of {n} operations: no time was left", n - done);
            return told.tell("kernels", Outcome::Skipped, detail, Duration::ZERO);
        }
        let name = match case.recorded {
            true => format!("graph, {}", case.operation),
            false => case.operation.clone(),
        };
        let begun = Instant::now();
        let compared = pair.compare(&case, SEED);
        let took = begun.elapsed();
        let compared = match compared {
            Ok(compared) => compared,
            Err(error) => {
                told.tell(&name, Outcome::Failed, with_causes(&error), took);
                continue;
            }
        };
        let right = compared.iter().all(|c| c.right);
        let worst = compared.iter().map(|c| c.error).fold(0.0, f64::max);
        let outcome = match right {
            true => Outcome::Passed,
            false => Outcome::Failed,
        };
        let detail = format!(
            "differs from the host by {worst:.1e}, at most {:.0e}",
            case.tolerance
        );
        told.tell(&name, outcome, detail, took);
    }
}

#[cfg(test)]
mod tests {
    use rocmforge_device_cpu::{HostConfig, HostDevice};

    use super::*;

    fn host() -> Box<dyn Device> {
        Box::new(HostDevice::new(HostConfig::default()).unwrap())
    }

    fn checked(
        open: impl FnOnce() -> Result<Box<dyn Device>, DeviceError>,
        limit: Duration,
    ) -> Vec<Step> {
        let mut steps = Vec::new();
        check(open, host(), limit, &mut |step| steps.push(step));
        steps
    }

    #[test]
    fn a_device_that_is_right_passes_everything() {
        let steps = checked(|| Ok(host()), Duration::from_secs(600));
        let failed: Vec<_> = steps
            .iter()
            .filter(|s| s.outcome != Outcome::Passed)
            .collect();
        assert!(failed.is_empty(), "{failed:?}");
        for name in [
            "open",
            "memory",
            "copies",
            "copy within",
            "file to device",
            "attention",
        ] {
            assert!(steps.iter().any(|s| s.name == name), "{name}");
        }
        assert!(steps.iter().any(|s| s.name.starts_with("graph, ")));
        assert!(steps.len() > 20, "{}", steps.len());
    }

    #[test]
    fn what_there_is_no_time_for_is_told_and_a_device_that_does_not_open_ends_it() {
        let steps = checked(|| Ok(host()), Duration::ZERO);
        let last = steps.last().unwrap();
        assert_eq!((&*last.name, last.outcome), ("kernels", Outcome::Skipped));
        let refused = || Err(DeviceError::Config("no card".to_owned()));
        let steps = checked(refused, Duration::ZERO);
        assert_eq!(steps.len(), 1);
        assert_eq!(steps[0].outcome, Outcome::Failed);
        assert!(steps[0].detail.contains("no card"));
    }
}
