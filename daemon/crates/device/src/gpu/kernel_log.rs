//! What the kernel has to say of an AMD card that was lost: a dump of a reset, and its last lines
//! about the card.
//!
//! Both are there only for those who may read them, and neither is needed: what is found goes into
//! the reason of a loss, so that a reset, a hung scheduler (MES) and a card that left the bus can
//! be told apart by who reads it.

use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Records that are read at most: the kernel's buffer holds fewer.
const RECORDS_MAX: usize = 50_000;
/// Bytes of a record at most.
const RECORD_BYTES_MAX: usize = 8192;
/// Lines that are told, the last ones, and bytes of each.
const LINES_TOLD_MAX: usize = 3;
const LINE_BYTES_MAX: usize = 160;
/// Dumps that are looked at.
const DUMPS_MAX: usize = 64;
/// How old a line may be: the loss may be seen some time after it.
const AGE_SECONDS_MAX: f64 = 300.0;

/// What a line says where something is wrong with a card.
const TROUBLE: [&str; 9] = [
    "MES failed",
    "MES might be",
    "GPU reset",
    "timeout",
    "page fault",
    "hang",
    "device lost",
    "Uncorrectable",
    "uncorrectable",
];

/// What there is about the card at a PCI address, in one line.
pub(super) fn says_of(pci: &str) -> Option<String> {
    says_of_below(Path::new("/"), pci)
}

fn says_of_below(root: &Path, pci: &str) -> Option<String> {
    let dump = dump(&root.join("sys/class/devcoredump"), pci);
    let lines = uptime(&root.join("proc/uptime"))
        .map(|now| lines(&root.join("dev/kmsg"), pci, now))
        .unwrap_or_default();
    let mut said = Vec::new();
    said.extend(dump);
    if !lines.is_empty() {
        said.push(format!("the kernel's log: {}", lines.join(" / ")));
    }
    (!said.is_empty()).then(|| said.join("; "))
}

/// The dump that the kernel makes of a card before it resets it; it goes after some minutes.
fn dump(class: &Path, pci: &str) -> Option<String> {
    let entries = fs::read_dir(class).ok()?.map_while(Result::ok);
    entries.take(DUMPS_MAX).find_map(|entry| {
        let path = entry.path();
        let of = fs::canonicalize(path.join("failing_device")).ok()?;
        let is_ours = of.file_name()?.to_str()? == pci;
        is_ours.then(|| {
            format!(
                "the kernel has reset the card and kept a dump of it, {}/data",
                path.display()
            )
        })
    })
}

/// Seconds since the machine started, as records are stamped.
fn uptime(path: &Path) -> Option<f64> {
    let text = fs::read_to_string(path).ok()?;
    text.split_whitespace().next()?.parse().ok()
}

/// The last lines of trouble with a card.
fn lines(path: &Path, pci: &str, now: f64) -> Vec<String> {
    let opened = File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path);
    let Ok(mut file) = opened else {
        return Vec::new();
    };
    let mut told = Vec::new();
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
        told.extend(text.lines().filter_map(|line| of_card(line, pci, now)));
        let from = told.len().saturating_sub(LINES_TOLD_MAX);
        told.drain(..from);
    }
    told
}

/// The words of a record (`6,1234,5678901,-;amdgpu 0000:03:00.0: ...`), if it is of this card's
/// trouble, and recent.
fn of_card(record: &str, pci: &str, now: f64) -> Option<String> {
    let (head, words) = record.split_once(';')?;
    let at: f64 = head.split(',').nth(2)?.parse().ok()?;
    let is_recent = now - at / 1e6 < AGE_SECONDS_MAX;
    let is_trouble = TROUBLE.iter().any(|trouble| words.contains(trouble));
    if !is_recent || !is_trouble || !words.contains("amdgpu") || !words.contains(pci) {
        return None;
    }
    let plain: String = words.chars().filter(|c| !c.is_control()).collect();
    let mut end = plain.len().min(LINE_BYTES_MAX);
    while !plain.is_char_boundary(end) {
        end -= 1;
    }
    Some(plain[..end].trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const CARD: &str = "0000:03:00.0";

    #[test]
    fn a_reset_and_its_lines_are_told_of_this_card_alone() {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        assert_eq!(says_of_below(root.path(), CARD), None);
        for dir in ["proc", "dev", "sys/devices/0000:03:00.0"] {
            fs::create_dir_all(at(dir)).unwrap();
        }
        fs::write(at("proc/uptime"), "1000.50 3000.00\n").unwrap();
        let mut log = String::new();
        for (second, words) in [
            (600, "amdgpu 0000:03:00.0: amdgpu: GPU reset begin!"),
            (990, "amdgpu 0000:04:00.0: amdgpu: GPU reset begin!"),
            (
                991,
                "amdgpu 0000:03:00.0: [drm] fb0: amdgpudrmfb frame buffer",
            ),
            (992, "usb 1-1: reset timeout"),
            (
                993,
                "amdgpu 0000:03:00.0: amdgpu: MES failed to respond to msg=REMOVE_QUEUE",
            ),
            (
                994,
                "amdgpu 0000:03:00.0: amdgpu: failed to remove hardware queue from MES, hang",
            ),
            (995, "amdgpu 0000:03:00.0: amdgpu: GPU reset begin!"),
            (996, "amdgpu 0000:03:00.0: amdgpu: ring gfx_0.0.0 timeout"),
        ] {
            log += &format!("3,17,{second}000000,-;{words}\n SUBSYSTEM=pci\n");
        }
        fs::write(at("dev/kmsg"), log).unwrap();
        let said = says_of_below(root.path(), CARD).unwrap();
        assert!(said.starts_with("the kernel's log: "), "{said}");
        assert_eq!(said.matches(" / ").count(), LINES_TOLD_MAX - 1, "{said}");
        for word in ["from MES", "GPU reset begin!", "ring gfx_0.0.0 timeout"] {
            assert!(said.contains(word), "{word}: {said}");
        }
        let dump = at("sys/class/devcoredump/devcd1");
        fs::create_dir_all(&dump).unwrap();
        let device = at("sys/devices/0000:03:00.0");
        std::os::unix::fs::symlink(device, dump.join("failing_device")).unwrap();
        let said = says_of_below(root.path(), CARD).unwrap();
        assert!(said.contains("has reset the card") && said.contains("devcd1/data"));
        assert_eq!(says_of_below(root.path(), "0000:05:00.0"), None);
    }

    #[test]
    fn long_and_strange_records_are_cut() {
        let long = format!(
            "3,1,2000000,-;amdgpu {CARD}: timeout \u{1b}[31m{}",
            "é".repeat(500)
        );
        let told = of_card(&long, CARD, 3.0).unwrap();
        assert!(
            told.len() <= LINE_BYTES_MAX && !told.contains('\u{1b}'),
            "{told}"
        );
        for record in ["", ";", "3,1,x,-;amdgpu", "no head", &long[..9]] {
            assert_eq!(of_card(record, CARD, 3.0), None, "{record}");
        }
    }
}
