//! Whether file mappings are registered with the driver, or read through pinned memory: tried on a
//! small range.
//!
//! On some kernels and cards a registration of file-backed pages is refused, crawls (2 MB/s were
//! seen), spins for good, or gives the card other bytes. The range is of this program's own file,
//! which lies in the page cache. It goes to the card both ways, comes back, and is compared;
//! registering counts with its copy, since a window is read about once.

use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use rocmforge_device::{Loss, LossKind};
use rocmforge_gguf::MappedFile;
use rocmforge_gpu_driver::trial::{Outcome, Trials};
use rocmforge_gpu_driver::{Buffer, Context, Error, PinnedBuffer, Priority, Registration, Stream};

use super::errors::lost_as;

/// Bytes of the first look, which distinguishes a crawl from a copy without waiting long, and of
/// the comparison.
const LOOK_BYTES: u64 = 64 << 10;
const TRIAL_BYTES: u64 = 4 << 20;

/// This program's own file, also when another one has its name by now.
const OWN_FILE: &str = "/proc/self/exe";

/// How long the first look may take: 64 KiB at 2 MB/s take 33 ms.
const LOOK_MAX: Duration = Duration::from_millis(20);

/// Tries of each way, of which the best counts.
const TRIES: usize = 3;

/// What the trial found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Finding {
    /// Whether windows of files are registered.
    pub(super) registers: bool,
    /// The reason, for people.
    pub(super) text: String,
}

impl Finding {
    /// Where nothing was tried.
    pub(super) fn untried() -> Self {
        Self {
            registers: true,
            text: "files are registered where the driver takes them".to_owned(),
        }
    }

    pub(super) fn ring(why: impl std::fmt::Display) -> Self {
        Self {
            registers: false,
            text: format!("files go through pinned memory: {why}"),
        }
    }
}

/// Tries both ways on a card. What takes longer than `patience` counts as never coming back.
///
/// # Errors
/// The loss: the driver's call did not come back, or the device was lost by it. The driver cannot
/// be used by this process any more.
pub(super) fn find(
    context: &Context,
    trials: &Trials,
    patience: Duration,
) -> Result<Finding, Loss> {
    let mut lost = None;
    let tried = trials.run("registration", || {
        let (send, receive) = mpsc::channel();
        let of_thread = context.clone();
        // A thread of its own, which a call that never comes back keeps; then the process has to
        // end.
        let thread = std::thread::Builder::new().name("registration".to_owned());
        let spawned = thread.spawn(move || {
            let tried = compare(&of_thread, Path::new(OWN_FILE));
            drop(of_thread);
            // Nobody waits for it any more only where the process is about to end.
            let _ = send.send(tried);
        });
        match spawned {
            // A card that did not survive it is a trial that did not end.
            Ok(_) => match receive.recv_timeout(patience).ok()? {
                Err(error) if error.is_lost() => {
                    lost = Some(error);
                    None
                }
                tried => Some(tried),
            },
            Err(error) => Some(Ok(Finding::ring(format!(
                "no thread to try otherwise: {error}"
            )))),
        }
    });
    match tried {
        Outcome::Ended(Ok(finding)) => Ok(finding),
        Outcome::Ended(Err(error)) => Ok(Finding::ring(error)),
        Outcome::NotMade(why) => Ok(Finding::ring(why)),
        Outcome::Stuck => {
            let kind = lost.as_ref().and_then(lost_as);
            let how = match lost {
                Some(error) => format!("was the last that the device did ({error})"),
                None => format!("has not come back after {} s", patience.as_secs()),
            };
            Err(Loss::new(
                kind.unwrap_or(LossKind::Hang),
                format!(
                    "registering {TRIAL_BYTES} bytes of a file {how}; after two such starts it is not tried any more"
                ),
            ))
        }
    }
}

/// Times both ways, and sees to it that both bring the same bytes.
fn compare(context: &Context, path: &Path) -> Result<Finding, Error> {
    let file = match MappedFile::open(path) {
        Ok(file) => Arc::new(file),
        Err(error) => return Ok(Finding::ring(format!("no file to try otherwise: {error}"))),
    };
    let bytes = TRIAL_BYTES.min(file.len() & !4095);
    let mut both = Both {
        stream: Stream::new(context, Priority::Normal)?,
        device: Buffer::new(context, bytes)?,
        pinned: PinnedBuffer::new(context, bytes as usize)?,
        context: context.clone(),
        file,
    };
    // Both ways once, so that neither pays for what comes up only once; and the right bytes.
    both.through_ring(bytes)?;
    let small = LOOK_BYTES.min(bytes);
    let mut look = both.registered(small)?;
    if look > LOOK_MAX {
        // The first one may have paid for what comes up only once.
        look = look.min(both.registered(small)?);
    }
    if look > LOOK_MAX {
        let rate = small as f64 / look.as_secs_f64() / 1e6;
        return Ok(Finding::ring(format!(
            "registered, they came at {rate:.1} MB/s"
        )));
    }
    both.spoil(bytes)?;
    both.registered(bytes)?;
    if !both.brought_the_file(bytes)? {
        return Ok(Finding::ring("registered, other bytes came"));
    }
    let (mut ring, mut registered) = (Duration::MAX, Duration::MAX);
    for _ in 0..TRIES {
        ring = ring.min(both.through_ring(bytes)?);
        registered = registered.min(both.registered(bytes)?);
    }
    let rate = |time: Duration| bytes as f64 / time.as_secs_f64().max(1e-9) / 1e9;
    let (ring, registered) = (rate(ring), rate(registered));
    let rates = format!("{registered:.1} GB/s registered, {ring:.1} GB/s through pinned memory");
    Ok(if registered > ring {
        Finding {
            registers: true,
            text: format!("files are registered: {rates}"),
        }
    } else {
        Finding::ring(rates)
    })
}

/// What both ways need.
struct Both {
    // The copies' stream goes before their ends.
    stream: Stream,
    device: Buffer,
    pinned: PinnedBuffer,
    context: Context,
    file: Arc<MappedFile>,
}

impl Both {
    /// Through pinned memory; how long that took.
    fn through_ring(&mut self, bytes: u64) -> Result<Duration, Error> {
        let begin = Instant::now();
        // SAFETY: every copy from it has been waited for.
        let piece = unsafe { self.pinned.as_mut_slice() };
        self.file
            .read_around(0..bytes, &mut piece[..bytes as usize])
            .map_err(unreadable)?;
        // SAFETY: the source is this value's and is left alone until the wait.
        let queued = unsafe {
            self.device
                .copy_from_host(0, self.pinned.as_ptr(), bytes, &self.stream)
        };
        queued.and(self.stream.synchronize())?;
        Ok(begin.elapsed())
    }

    /// From registered pages; how long that took with registering and the end of it.
    fn registered(&self, bytes: u64) -> Result<Duration, Error> {
        let pages = self.file.mapped_range(0..bytes).map_err(unreadable)?;
        let Some(pages) = pages else {
            return Err(unreadable("the program's file is not mapped"));
        };
        let (ptr, len) = (pages.as_ptr(), pages.len());
        let begin = Instant::now();
        // SAFETY: the pages are mapped as long as `pages` lives, which the registration keeps; none
        // of them is registered, since each registration here ends before the next; it is dropped
        // after the wait for its one copy.
        let registration = unsafe { Registration::new(&self.context, ptr, len, Arc::new(pages)) }?;
        // SAFETY: registered until after the wait, and the file's pages are read only.
        let queued = unsafe { self.device.copy_from_host(0, ptr, bytes, &self.stream) };
        queued.and(self.stream.synchronize())?;
        drop(registration);
        Ok(begin.elapsed())
    }

    /// Leaves nothing of the file on the device.
    fn spoil(&mut self, bytes: u64) -> Result<(), Error> {
        // SAFETY: nothing else uses the buffer, and the stream is waited for.
        let queued = unsafe { self.device.fill(0, 0xA5, bytes, &self.stream) };
        queued.and(self.stream.synchronize())
    }

    /// Whether the device holds the file's first bytes.
    fn brought_the_file(&mut self, bytes: u64) -> Result<bool, Error> {
        // SAFETY: every copy from it has been waited for.
        let back = unsafe { self.pinned.as_mut_slice() };
        self.device
            .read(0, &mut back[..bytes as usize], &self.stream)?;
        let back = &*back;
        self.file
            .with_range(0..bytes, |file| *file == back[..bytes as usize])
            .map_err(unreadable)
    }
}

fn unreadable(error: impl std::fmt::Display) -> Error {
    Error::Answer {
        call: "reading the program's own file",
        message: error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use rocmforge_fake_hip::{Fake, HANG};
    use rocmforge_gpu_driver::{Libraries, Vendor, open};

    use super::*;

    /// A call that spins for good would keep every start from its end.
    #[test]
    fn a_registration_that_never_comes_back_is_not_tried_at_every_start() {
        let dir = tempfile::tempdir().unwrap();
        for start in 0..3 {
            // Each start is a process of its own, and so is its runtime; the library is the same
            // one.
            let fake = Fake::new();
            let libraries = Libraries {
                hip: Some(fake.path().to_owned()),
                cuda: None,
            };
            let context = Context::open(open(Vendor::Hip, &libraries).unwrap(), 0).unwrap();
            let trials = Trials::of(&context, Some(dir.path())).of_card("the same library");
            fake.fail("hipHostRegister", 1, HANG);
            let found = find(&context, &trials, Duration::from_secs(2));
            if start < 2 {
                let error = found.unwrap_err();
                assert_eq!(error.kind, LossKind::Hang);
                assert!(error.reason.contains("has not come back"), "{error}");
                // The thread in the call uses the library for good.
                std::mem::forget(fake);
            } else {
                let finding = found.unwrap();
                assert!(!finding.registers, "{finding:?}");
                assert!(finding.text.contains("did not end 2 times"), "{finding:?}");
            }
        }
    }
}
