//! A library's first product, made in a process of its own before this one asks it for any.
//!
//! ```text
//! library opened --(its file passed before, on this card and driver)--> used
//!       |
//!       +--> child: opens card and library, one product --(right)--> used, and noted
//!                      |
//!                      +--(ended otherwise, wrong, late)--> not used, with the child's last words
//! ```
//!
//! rocBLAS calls `abort` where it has no kernels for a chip, which no caller can prevent.

use std::cell::RefCell;
use std::io::Read;
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::trial::{Outcome, Trials};
use crate::{Buffer, Context, Error, Libraries, Priority, Stream, Vendor, open};

use super::Gemm;
use super::classic::Classic;
use super::lt::Lt;
use super::tensile::Kernels;
use crate::library::{file_of, identity};

/// The hidden argument of the child; the card's number and the library follow.
pub const CHILD_ARGUMENT: &str = "--products-child";
/// What the child says of a product that is right: a library may write to the same output.
const MARK: &str = "product is right";
/// How often the parent looks whether the child has ended.
const POLL: Duration = Duration::from_millis(5);
/// How long a child that was ended may take to be gone.
const KILL_WAIT: Duration = Duration::from_secs(1);
/// Maximum time to wait for each piece of the output of a child process that has ended.
const WORDS_WAIT: Duration = Duration::from_secs(1);
const WORDS_PAUSE: Duration = Duration::from_millis(200);
/// Maximum bytes that are read of a child's output; bytes of one read; bytes of its last line that
/// are shown.
const WORDS_BYTES_MAX: usize = 1 << 20;
const WORDS_PIECE_BYTES: usize = 4096;
const WORDS_TOLD_MAX: usize = 400;

/// The product: `[TOKENS][ROWS]` of sums of `COLS`.
const ROWS: u64 = 128;
const COLS: u64 = 256;
const TOKENS: u64 = 128;
/// A byte that fills both matrices, and what two such make as f16.
const FILL: u8 = 0x3c;
const FILLED: f32 = 1.058_593_8;

/// One of a vendor's libraries for matrix products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Which {
    /// hipBLASLt.
    Lt,
    /// rocBLAS.
    Classic,
}

impl Which {
    fn name(self) -> &'static str {
        match self {
            Which::Lt => "hipblaslt",
            Which::Classic => "rocblas",
        }
    }

    /// Where the library keeps its kernels.
    pub(super) fn kernels(self) -> &'static Kernels {
        match self {
            Which::Lt => &Kernels {
                variable: "HIPBLASLT_TENSILE_LIBPATH",
                beside: "hipblaslt/library",
            },
            Which::Classic => &Kernels {
                variable: "ROCBLAS_TENSILE_LIBPATH",
                beside: "rocblas/library",
            },
        }
    }
}

/// How libraries are tried before they are used.
#[derive(Debug)]
pub struct FirstProduct {
    /// A program that understands [`CHILD_ARGUMENT`].
    pub exe: PathBuf,
    /// The runtime, where it was named.
    pub runtime: Option<PathBuf>,
    /// The card's number.
    pub ordinal: u32,
    /// How long a child may take.
    pub limit: Duration,
    /// Where outcomes are kept.
    pub trials: Trials,
    /// What was not probed because it passed before, as text for users.
    pub remembered: RefCell<Vec<String>>,
}

impl FirstProduct {
    /// Whether a library that was opened by a name may be used; else why not.
    pub(super) fn allows(&self, which: Which, library: &str) -> Result<(), String> {
        let what = format!("products-{}", which.name());
        let identity = file_of(library).and_then(|file| {
            let folder = which.kernels().folder(&file);
            let folder = folder.and_then(|folder| identity(&folder));
            Some(format!(
                "{}; {}",
                identity(&file)?,
                folder.unwrap_or_default()
            ))
        });
        let before = identity.as_ref();
        if let Some(path) = before.and_then(|with| self.trials.passed(&what, with)) {
            self.remembered.borrow_mut().push(format!(
                "a first product by {library} was right before, as remembered from {}",
                path.display()
            ));
            return Ok(());
        }
        match self.trials.run(&what, || self.child(which)) {
            Outcome::Ended(Ok(())) => {
                if let Some(identity) = identity {
                    self.trials.note_passed(&what, &identity);
                }
                Ok(())
            }
            Outcome::Ended(Err(why)) => Err(format!("{library}: {why}")),
            Outcome::NotMade(why) => Err(format!("{library}: {why}")),
            Outcome::Stuck => Err(format!(
                "{library}: a small product has not ended within {} s",
                self.limit.as_secs_f64()
            )),
        }
    }

    /// `None`: it has not come to an end.
    fn child(&self, which: Which) -> Option<Result<(), String>> {
        let mut command = Command::new(&self.exe);
        if let Some(runtime) = &self.runtime {
            command.env("ROCMFORGE_HIP_LIBRARY", runtime);
        }
        let child = command
            .arg(CHILD_ARGUMENT)
            .arg(self.ordinal.to_string())
            .arg(which.name())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        let mut child = match child {
            Ok(child) => child,
            Err(error) => return Some(Err(format!("no process to try it in: {error}"))),
        };
        let said = child.stdout.take().map(words);
        let complaints = child.stderr.take().map(words);
        let give_up = Instant::now() + self.limit;
        let status: Option<ExitStatus> = loop {
            match child.try_wait() {
                Ok(Some(status)) => break Some(status),
                Ok(None) if Instant::now() < give_up => thread::sleep(POLL),
                _ => break None,
            }
        };
        let Some(status) = status else {
            // One in the kernel's hands stays, and nobody waits for it for long.
            let _ = child.kill();
            let gone = Instant::now() + KILL_WAIT;
            while matches!(child.try_wait(), Ok(None)) && Instant::now() < gone {
                thread::sleep(POLL);
            }
            return None;
        };
        let said_until = Instant::now() + WORDS_WAIT;
        let text = |words: Option<Words>| words.map_or_else(String::new, |w| w.until(said_until));
        // Exit handlers of a library may crash; the product was right before.
        if text(said).contains(MARK) {
            return Some(Ok(()));
        }
        let complaints = text(complaints);
        Some(Err(format!(
            "the process that made a small product with it ended with {status}: {}",
            last(&complaints)
        )))
    }
}

/// What comes by a pipe, piece by piece.
struct Words(Receiver<Vec<u8>>);

/// What comes by a pipe. Where a process that the child has started holds the pipe open, it does
/// not end with the child.
fn words(mut pipe: impl Read + Send + 'static) -> Words {
    let (sender, receiver) = channel();
    let read = move || {
        let (mut bytes, mut left) = (vec![0; WORDS_PIECE_BYTES], WORDS_BYTES_MAX);
        // What came before an error counts.
        while left > 0
            && let Ok(n @ 1..) = pipe.read(&mut bytes)
        {
            left = left.saturating_sub(n);
            if sender.send(bytes[..n].to_owned()).is_err() {
                return;
            }
        }
    };
    // Without a thread the channel is closed, which reads as no words.
    let _ = thread::Builder::new().name("words".to_owned()).spawn(read);
    Words(receiver)
}

impl Words {
    /// All that has come, of a child that has ended: the pipe's end is waited for until then at
    /// most, or until nothing has come for a moment.
    fn until(self, until: Instant) -> String {
        let mut bytes = Vec::new();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.0.recv_timeout(left.min(WORDS_PAUSE)) {
                Ok(more) => bytes.extend(more),
                Err(_) => return String::from_utf8_lossy(&bytes).into_owned(),
            }
        }
    }
}

/// The end of a child's output, as one line.
fn last(words: &str) -> String {
    let line = words.split_whitespace().collect::<Vec<_>>().join(" ");
    let from = line.len().saturating_sub(WORDS_TOLD_MAX);
    let from = (from..=line.len()).find(|&at| line.is_char_boundary(at));
    line[from.unwrap_or(0)..].to_owned()
}

/// What the child does with its arguments behind [`CHILD_ARGUMENT`]: one product by one library.
///
/// # Errors
/// In words, why it is not right. A library that ends the process says nothing.
pub fn child_main(mut arguments: impl Iterator<Item = String>) -> Result<(), String> {
    let ordinal = arguments.next().and_then(|n| n.parse().ok());
    let name = arguments.next().unwrap_or_default();
    let which = [Which::Lt, Which::Classic].into_iter();
    let which = which.clone().find(|which| which.name() == name);
    let (Some(ordinal), Some(which)) = (ordinal, which) else {
        return Err("expected the number of a GPU and hipblaslt or rocblas".to_owned());
    };
    let context = open(Vendor::Hip, &Libraries::from_env())
        .and_then(|driver| {
            driver.device_count()?;
            Context::open(driver, ordinal)
        })
        .map_err(|error| error.to_string())?;
    let sums = product(&context, which).map_err(|error| error.to_string())?;
    let expected = COLS as f32 * FILLED * FILLED;
    let wrong = |sum: &f32| sum.is_nan() || (sum - expected).abs() > expected / 100.0;
    if let Some(sum) = sums.iter().find(|sum| wrong(sum)) {
        return Err(format!("a sum is {sum} and should be {expected}"));
    }
    println!("\n{MARK}");
    Ok(())
}

/// The sums.
fn product(context: &Context, which: Which) -> Result<Vec<f32>, super::Error> {
    let failed = |error: Error| super::failed(error.to_string());
    let stream = Stream::new(context, Priority::Normal).map_err(failed)?;
    let sizes = [ROWS * COLS * 2, TOKENS * COLS * 2, TOKENS * ROWS * 4, ROOM];
    let made = sizes.map(|bytes| Buffer::new(context, bytes).map_err(failed));
    let [weights, x, out, room] = made;
    let (weights, x, out, room) = (weights?, x?, out?, room?);
    for buffer in [&weights, &x, &out] {
        // SAFETY: fresh memory that nothing else uses yet.
        let filled = unsafe { buffer.fill(0, FILL, buffer.bytes(), &stream) };
        filled.map_err(failed)?;
    }
    let gemm = Gemm {
        weights: weights.ptr().0,
        x: x.ptr().0,
        out: out.ptr().0,
        rows: ROWS,
        cols: COLS,
        tokens: TOKENS,
        stride: ROWS,
        batch: 1,
        out_step: 0,
        factor: 1.0,
        add: false,
        bias: None,
    };
    let room = (room.ptr().0, room.bytes());
    let handle = stream.handle().0;
    let (mut lt, mut classic) = (None, None);
    match which {
        Which::Lt => {
            let opened = lt.insert(Lt::open(context, None)?);
            opened.gemm(&gemm, room, handle)?;
        }
        Which::Classic => {
            let opened = classic.insert(Classic::open(context, handle, None)?);
            opened.gemm(&gemm, room)?;
        }
    }
    let mut bytes = vec![0; out.bytes() as usize];
    out.read(0, &mut bytes, &stream).map_err(failed)?;
    let (words, _) = bytes.as_chunks::<4>();
    Ok(words.iter().map(|word| f32::from_le_bytes(*word)).collect())
}

/// Bytes that a library may use during the product.
const ROOM: u64 = 16 << 20;

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn tried(script: &str, limit: Duration) -> FirstProduct {
        let dir = tempfile::tempdir().unwrap().keep();
        let exe = dir.join("child");
        rocmforge_test_scripts::write(&exe, script);
        FirstProduct {
            exe,
            runtime: None,
            ordinal: 0,
            limit,
            trials: Trials::in_dir(&dir.join("trials"), "gfx1036-1"),
            remembered: RefCell::default(),
        }
    }

    const LONG: Duration = Duration::from_secs(30);

    #[test]
    fn a_library_that_aborts_is_not_used_and_its_words_are_told() {
        let script = "echo 'rocBLAS error: Cannot read TensileLibrary.dat' >&2\nkill -ABRT $$";
        let tried = tried(script, LONG);
        for _ in 0..3 {
            let why = tried.allows(Which::Classic, "libc.so.6").unwrap_err();
            for word in ["libc.so.6", "SIGABRT", "Cannot read TensileLibrary.dat"] {
                assert!(why.contains(word), "{word}: {why}");
            }
        }
    }

    #[test]
    fn a_library_that_passed_is_tried_once_until_its_file_changes() {
        let script = format!("echo x >> $0.runs\necho '{MARK}'\nkill -SEGV $$");
        let tried = tried(&script, LONG);
        let runs = || fs::read_to_string(tried.exe.with_extension("runs")).unwrap();
        let library = tried.exe.with_file_name("librocblas.so.5");
        fs::write(&library, "one").unwrap();
        let allows = || tried.allows(Which::Classic, &library.to_string_lossy());
        for _ in 0..3 {
            allows().unwrap();
        }
        assert_eq!(runs().lines().count(), 1);
        let told = tried.remembered.borrow().clone();
        assert_eq!(told.len(), 2, "{told:?}");
        assert!(told[0].contains("remembered from"), "{told:?}");
        fs::write(&library, "another").unwrap();
        allows().unwrap();
        assert_eq!(runs().lines().count(), 2);
        assert_eq!(tried.remembered.borrow().len(), 2);
    }

    /// Once its answer was lost: the pipe had not ended.
    #[test]
    fn a_library_whose_helper_outlives_the_child_is_heard_all_the_same() {
        let held = tried(&format!("sleep 30 &\necho '{MARK}'"), LONG);
        held.allows(Which::Classic, "libc.so.6").unwrap();
        let script = "sleep 30 &\necho 'no kernels' >&2\nexit 3";
        let why = tried(script, LONG).allows(Which::Lt, "libc.so.6");
        assert!(why.unwrap_err().contains("no kernels"));
    }

    #[test]
    fn a_library_that_hangs_is_tried_at_two_starts() {
        let tried = tried(
            "echo x >> $0.runs\nexec sleep 600",
            Duration::from_millis(300),
        );
        for _ in 0..3 {
            let why = tried.allows(Which::Lt, "libc.so.6").unwrap_err();
            assert!(why.contains("not end"), "{why}");
        }
        let runs = fs::read_to_string(tried.exe.with_extension("runs")).unwrap();
        assert_eq!(runs.lines().count(), 2);
    }
}
