//! How long work stood still for want of memory: the kernel's pressure stall information.
//!
//! Two counts matter, and the larger one is what is looked at. The machine's says that anybody
//! waits for memory, which an idle process that holds some cannot notice by itself. That of the
//! control group which this process is in says that the group's own bound (`MemoryHigh=`) is
//! reached, while the machine may have plenty. Groups above it are not read: they count what other
//! groups do to themselves, and what they do to this one is in its own count.

use std::path::PathBuf;

use crate::machine;

/// Of the machine.
const MACHINE: &str = "/proc/pressure/memory";

/// Counts of the time during which something waited for memory. Those of this process's machine and
/// control group, unless a test has its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stalls(Vec<PathBuf>);

impl Stalls {
    /// Counts that are in these files, of the form that the kernel writes.
    #[must_use]
    pub fn at(files: Vec<PathBuf>) -> Self {
        Self(files)
    }

    /// The files.
    #[must_use]
    pub fn files(&self) -> &[PathBuf] {
        &self.0
    }

    /// Microseconds since the system's start during which something waited for memory, by each
    /// count; `None` of one that is not there, as where the kernel was built or started without
    /// them.
    #[must_use]
    pub fn read(&self) -> Vec<Option<u64>> {
        let read = |file: &PathBuf| some_us(&std::fs::read_to_string(file).ok()?);
        self.0.iter().map(read).collect()
    }
}

impl Default for Stalls {
    fn default() -> Self {
        let own = machine::group_dir();
        let own = own.map(|dir| dir.join("memory.pressure"));
        Self([MACHINE.into()].into_iter().chain(own).collect())
    }
}

/// The time in all of the line for those tasks of which some wait.
fn some_us(text: &str) -> Option<u64> {
    let mut lines = text.lines().map(str::split_ascii_whitespace);
    let mut fields = lines.find_map(|mut line| (line.next()? == "some").then_some(line))?;
    let total = fields.find_map(|field| field.strip_prefix("total="))?;
    total.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_time_in_all_is_read_and_nothing_else() {
        let text = "some avg10=1.53 avg60=0.87 avg300=0.19 total=1234567\n\
                    full avg10=0.00 avg60=0.00 avg300=0.00 total=89\n";
        assert_eq!(some_us(text), Some(1_234_567));
        let turned = "full total=89\nsome total=12 avg10=0.00 more=1\n";
        assert_eq!(
            some_us(turned),
            Some(12),
            "fields and lines in another order"
        );
        for text in [
            "",
            "\n\n",
            "some",
            "some avg10=0.00 avg60=0.00 avg300=0.00\n",
            "full avg10=0.00 avg60=0.00 avg300=0.00 total=89\n",
            "some avg10=0.00 total=\n",
            "some avg10=0.00 total=-1\n",
            "some avg10=0.00 total=12x\n",
            "some avg10=0.00 total=99999999999999999999999\n",
            "something total=5\n",
            "total=5\n",
            "\u{0}\u{1}\u{2}",
        ] {
            assert_eq!(some_us(text), None, "{text:?}");
        }
    }

    #[test]
    fn a_count_that_is_not_there_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let there = dir.path().join("there");
        std::fs::write(&there, "some avg10=0.00 avg60=0.00 avg300=0.00 total=7\n").unwrap();
        let bytes = dir.path().join("bytes");
        std::fs::write(&bytes, [0xff, 0xfe, 0x00]).unwrap();
        let gone = dir.path().join("gone");
        let stalls = Stalls::at(vec![gone, there, bytes]);
        assert_eq!(stalls.read(), [None, Some(7), None]);
    }

    #[test]
    fn the_machine_comes_first() {
        let files = Stalls::default().files().to_vec();
        assert_eq!(files[0], Path::new(MACHINE));
        assert!(files.len() <= 2, "{files:?}");
    }
}
