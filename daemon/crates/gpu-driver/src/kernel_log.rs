//! What the kernel has to say of a card that was lost: whether it is still on its bus, and of an
//! AMD card a dump of a reset and the log's last lines about it.
//!
//! All of it is there only for those who may read it, and none of it is needed: what is found goes
//! into the reason of a loss, and makes its kind where the driver's calls do not tell a reset, a
//! hung scheduler (MES) and a card that left the bus apart.
//!
//! The view begins when the card is opened, so that what happened before, to the process that had
//! it then, is not taken for what happens now.

use std::collections::HashSet;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use super::driver::DeviceAttributes;
use crate::{LossKind, Said};

/// Records that are read at most: the kernel's buffer holds fewer.
const RECORDS_MAX: usize = 50_000;
/// Bytes of a record at most.
const RECORD_BYTES_MAX: usize = 8192;
/// Maximum number of lines of the kernel log that are reported (the last ones), and bytes of each.
const LINES_TOLD_MAX: usize = 3;
const LINE_BYTES_MAX: usize = 160;
/// Dumps that are examined.
const DUMPS_MAX: usize = 64;
/// How old a line may be: the loss may be seen some time after it.
const AGE_MAX: Duration = Duration::from_secs(300);

/// What a line says where something is wrong with a card, and what that comes to. The first that is
/// met in any of the lines counts: a hang is told again by the reset that follows it.
const TROUBLE: [(&str, LossKind); 10] = [
    ("device lost", LossKind::Gone),
    ("ncorrectable", LossKind::Hardware),
    ("MES failed", LossKind::SchedulerHang),
    ("MES might be", LossKind::SchedulerHang),
    ("unrecoverable state", LossKind::SchedulerHang),
    ("from MES", LossKind::SchedulerHang),
    ("GPU reset", LossKind::Reset),
    ("timeout", LossKind::Hang),
    ("hang", LossKind::Hang),
    ("page fault", LossKind::Fault),
];

/// What the kernel knows of a card, from its opening on.
#[derive(Debug)]
pub struct KernelView {
    root: PathBuf,
    pci: String,
    /// Dumps that were there before.
    dumps: HashSet<OsString>,
    /// The kernel's log behind what it had then, where it may be read.
    log: Option<File>,
    /// Whether the card was on its bus and answered there.
    was_there: bool,
    /// The first finding, which later calls repeat.
    said: OnceLock<Option<Said>>,
}

impl KernelView {
    /// Begins to watch the kernel's reports about a GPU that is being opened.
    pub fn of(card: &DeviceAttributes) -> Self {
        Self::below(Path::new("/"), &card.pci_bus_id)
    }

    fn below(root: &Path, pci: &str) -> Self {
        let pci = pci.to_lowercase();
        let opened = File::options()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(root.join("dev/kmsg"));
        // Without its address any card's lines would be this one's.
        let log = opened.ok().filter(|_| !pci.is_empty());
        let log = log.and_then(|mut file| {
            file.seek(SeekFrom::End(0)).ok()?;
            Some(file)
        });
        Self {
            dumps: dumps(root, &pci).map(|(name, _)| name).collect(),
            log,
            was_there: has_left(root, &pci).is_none(),
            root: root.to_owned(),
            pci,
            said: OnceLock::new(),
        }
    }

    /// What there is about the card, in one line.
    pub fn says(&self) -> Option<Said> {
        self.said.get_or_init(|| self.look(now())).clone()
    }

    fn look(&self, now: Duration) -> Option<Said> {
        let mut kinds = Vec::new();
        let mut said = Vec::new();
        if self.was_there
            && let Some(words) = has_left(&self.root, &self.pci)
        {
            kinds.push(LossKind::Gone);
            said.push(words.to_owned());
        }
        let mut new = dumps(&self.root, &self.pci).filter(|(name, _)| !self.dumps.contains(name));
        if let Some((_, path)) = new.next() {
            kinds.push(LossKind::Reset);
            let path = path.display();
            said.push(format!(
                "the kernel has reset the GPU and kept a dump of it, {path}/data"
            ));
        }
        let lines = self.lines(now);
        kinds.extend(lines.iter().map(|(kind, _)| *kind));
        if !lines.is_empty() {
            let from = lines.len().saturating_sub(LINES_TOLD_MAX);
            let told: Vec<_> = lines[from..].iter().map(|(_, words)| &**words).collect();
            said.push(format!("the kernel's log: {}", told.join(" / ")));
        }
        let ranked = TROUBLE.iter().map(|(_, kind)| *kind);
        let kind = ranked.into_iter().find(|kind| kinds.contains(kind))?;
        let words = said.join("; ");
        Some(Said { kind, words })
    }

    /// The lines of trouble with the card that came since it was opened, and are recent.
    fn lines(&self, now: Duration) -> Vec<(LossKind, String)> {
        let mut told = Vec::new();
        let Some(mut file) = self.log.as_ref() else {
            return told;
        };
        let mut record = vec![0; RECORD_BYTES_MAX];
        for _ in 0..RECORDS_MAX {
            let n = match file.read(&mut record) {
                Ok(0) => break,
                Ok(n) => n,
                // What was overwritten meanwhile is told so, and the next one comes.
                Err(error) if error.kind() == ErrorKind::BrokenPipe => continue,
                Err(_) => break,
            };
            // The device gives a record a read; a plain file, as tests have, many.
            let text = String::from_utf8_lossy(&record[..n]);
            told.extend(
                text.lines()
                    .filter_map(|line| of_card(line, &self.pci, now)),
            );
        }
        told
    }
}

/// Why the GPU is no longer on its bus; `None` if it is there or if the system does not report it.
fn has_left(root: &Path, pci: &str) -> Option<&'static str> {
    let card = root.join("sys/bus/pci/devices").join(pci);
    if !card.exists() {
        return Some("it is no longer among the devices on the PCI bus");
    }
    let mut vendor = [0; 2];
    let read = File::open(card.join("config")).and_then(|mut file| file.read_exact(&mut vendor));
    // What nobody answers reads as ones.
    (read.is_ok() && vendor == [0xff; 2]).then_some("it does not answer on the PCI bus")
}

/// The dumps that the kernel makes of a card before it resets it; they go after some minutes.
fn dumps(root: &Path, pci: &str) -> impl Iterator<Item = (OsString, PathBuf)> {
    let entries = fs::read_dir(root.join("sys/class/devcoredump"));
    let entries = entries.into_iter().flatten().map_while(Result::ok);
    entries.take(DUMPS_MAX).filter_map(move |entry| {
        let path = entry.path();
        let of = fs::canonicalize(path.join("failing_device")).ok()?;
        (of.file_name()?.to_str()? == pci).then(|| (entry.file_name(), path))
    })
}

/// Time since the machine started without its sleeps, as records are stamped.
fn now() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the pointer is to a live local. The clock is always there.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

/// Kind and words of a record (`6,1234,5678901,-;amdgpu 0000:03:00.0: ...`), if it is of this
/// card's trouble, and recent.
fn of_card(record: &str, pci: &str, now: Duration) -> Option<(LossKind, String)> {
    let (head, words) = record.split_once(';')?;
    let at = Duration::from_micros(head.split(',').nth(2)?.parse().ok()?);
    let (_, kind) = TROUBLE
        .iter()
        .find(|(trouble, _)| words.contains(trouble))?;
    let is_recent = now.saturating_sub(at) < AGE_MAX;
    if !is_recent || !words.contains("amdgpu") || !words.contains(pci) {
        return None;
    }
    let plain: String = words.chars().filter(|c| !c.is_control()).collect();
    let mut end = plain.len().min(LINE_BYTES_MAX);
    while !plain.is_char_boundary(end) {
        end -= 1;
    }
    Some((*kind, plain[..end].trim().to_owned()))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::symlink;

    use super::*;

    const CARD: &str = "0000:03:00.0";
    const NOW: Duration = Duration::from_secs(1000);

    /// The kernel's files of a sound card that has been in trouble before it was opened.
    fn files() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for dir in ["dev", "sys/class/devcoredump/devcd1"] {
            fs::create_dir_all(root.path().join(dir)).unwrap();
        }
        let card = root.path().join("sys/bus/pci/devices").join(CARD);
        fs::create_dir_all(&card).unwrap();
        fs::write(card.join("config"), [0x02, 0x10, 0, 0]).unwrap();
        symlink(&card, dumped(root.path(), 1).join("failing_device")).unwrap();
        fs::write(root.path().join("dev/kmsg"), "").unwrap();
        log(root.path(), 990, "amdgpu 0000:03:00.0: amdgpu: page fault");
        root
    }

    fn dumped(root: &Path, n: u32) -> PathBuf {
        root.join(format!("sys/class/devcoredump/devcd{n}"))
    }

    fn log(root: &Path, second: u32, words: &str) {
        let mut log = File::options()
            .append(true)
            .open(root.join("dev/kmsg"))
            .unwrap();
        writeln!(log, "3,17,{second}000000,-;{words}\n SUBSYSTEM=pci").unwrap();
    }

    #[test]
    fn what_was_before_the_opening_is_not_told_nor_what_is_of_others() {
        let root = files();
        let view = KernelView::below(root.path(), CARD);
        assert_eq!(view.look(NOW), None);
        for (second, words) in [
            (600, "amdgpu 0000:03:00.0: amdgpu: GPU reset begin!"),
            (995, "amdgpu 0000:04:00.0: amdgpu: GPU reset begin!"),
            (995, "amdgpu 0000:03:00.0: [drm] fb0: amdgpudrmfb frame"),
            (995, "usb 1-1: reset timeout"),
        ] {
            log(root.path(), second, words);
        }
        assert_eq!(view.look(NOW), None, "of others, old, or no trouble");
    }

    #[test]
    fn a_hung_scheduler_a_reset_and_a_hang_are_told_apart() {
        use LossKind::{Fault, Gone, Hang, Hardware, Reset, SchedulerHang};
        for (lines, kind) in [
            (
                &[
                    "MES failed to respond to msg=REMOVE_QUEUE",
                    "failed to remove hardware queue from MES, doorbell=0x1002",
                    "MES might be in unrecoverable state, issue a GPU reset",
                    "GPU reset begin!",
                ][..],
                SchedulerHang,
            ),
            (&["ring gfx_0.0.0 timeout", "GPU reset begin!"], Reset),
            (&["ring gfx_0.0.0 timeout"], Hang),
            (&["[gfxhub] page fault (src_id:0 ring:24)"], Fault),
            (
                &["Uncorrectable hardware errors", "GPU reset begin!"],
                Hardware,
            ),
            (&["device lost from bus!"], Gone),
        ] {
            let root = files();
            let view = KernelView::below(root.path(), CARD);
            for words in lines {
                log(root.path(), 995, &format!("amdgpu {CARD}: amdgpu: {words}"));
            }
            let said = view.look(NOW).unwrap();
            assert_eq!(said.kind, kind, "{said:?}");
            let last = lines.last().unwrap();
            assert!(said.words.ends_with(last), "{said:?}");
            let told = said.words.matches(" / ").count() + 1;
            assert_eq!(told, lines.len().min(LINES_TOLD_MAX), "{said:?}");
        }
    }

    #[test]
    fn a_dump_that_is_new_is_a_reset() {
        let root = files();
        let view = KernelView::below(root.path(), CARD);
        fs::create_dir(dumped(root.path(), 2)).unwrap();
        let card = root.path().join("sys/bus/pci/devices").join(CARD);
        symlink(card, dumped(root.path(), 2).join("failing_device")).unwrap();
        let said = view.look(NOW).unwrap();
        assert_eq!(said.kind, LossKind::Reset);
        assert!(said.words.contains("devcd2/data"), "{said:?}");
        assert_eq!(
            KernelView::below(root.path(), "0000:05:00.0").look(NOW),
            None
        );
    }

    #[test]
    fn a_card_that_left_its_bus_or_answers_nothing_there_is_gone() {
        let root = files();
        let card = root.path().join("sys/bus/pci/devices").join(CARD);
        let view = KernelView::below(root.path(), &CARD.to_uppercase());
        fs::write(card.join("config"), [0xff; 64]).unwrap();
        let said = view.look(NOW).unwrap();
        assert_eq!(said.kind, LossKind::Gone);
        assert!(said.words.contains("does not answer"), "{said:?}");
        fs::remove_dir_all(&card).unwrap();
        let said = view.look(NOW).unwrap();
        assert!(said.words.contains("no longer among"), "{said:?}");
        let never = KernelView::below(root.path(), CARD);
        assert_eq!(never.look(NOW), None, "a system that shows no bus");
    }

    #[test]
    fn long_and_strange_records_are_cut() {
        let now = Duration::from_secs(3);
        let long = format!(
            "3,1,2000000,-;amdgpu {CARD}: timeout \u{1b}[31m{}",
            "é".repeat(500)
        );
        let (_, told) = of_card(&long, CARD, now).unwrap();
        assert!(
            told.len() <= LINE_BYTES_MAX && !told.contains('\u{1b}'),
            "{told}"
        );
        for record in ["", ";", "3,1,x,-;amdgpu", "no head", &long[..9]] {
            assert_eq!(of_card(record, CARD, now), None, "{record}");
        }
    }
}
