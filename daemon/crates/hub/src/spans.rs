//! Spans of a file that are there, and the journal that says so beside an unfinished file.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Longest journal that is read, bytes.
const JOURNAL_MAX: u64 = 1 << 20;
/// What this program writes.
const VERSION: u32 = 1;

/// Bytes that are there: first and one behind the last, in order, apart from each other.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Spans(Vec<(u64, u64)>);

impl Spans {
    /// Adds a span.
    pub(crate) fn add(&mut self, first: u64, end: u64) {
        if first >= end {
            return;
        }
        let from = self.0.partition_point(|span| span.1 < first);
        let to = self.0.partition_point(|span| span.0 <= end);
        let (mut low, mut high) = (first, end);
        if from < to {
            low = low.min(self.0[from].0);
            high = high.max(self.0[to - 1].1);
        }
        self.0.splice(from..to, [(low, high)]);
    }

    /// Sum of the bytes of all ranges.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.iter().map(|(first, end)| end - first).sum()
    }

    /// Number of bytes from the file's beginning that are there without a gap.
    pub(crate) fn prefix(&self) -> u64 {
        self.0
            .first()
            .filter(|span| span.0 == 0)
            .map_or(0, |span| span.1)
    }

    /// The spans of `bytes` that are missing, in pieces of at most `piece`.
    pub(crate) fn missing(&self, bytes: u64, piece: u64) -> Vec<(u64, u64)> {
        let mut pieces = Vec::new();
        let mut at = 0;
        let ends = self.0.iter().copied().chain([(bytes, bytes)]);
        for (first, end) in ends {
            while at < first {
                let until = first.min(at + piece);
                pieces.push((at, until));
                at = until;
            }
            at = at.max(end);
        }
        pieces
    }

    /// Whether these can be spans of a file of this length.
    fn fits(&self, bytes: u64) -> bool {
        let apart = self.0.windows(2).all(|two| two[0].1 < two[1].0);
        apart && self.0.iter().all(|span| span.0 < span.1 && span.1 <= bytes)
    }
}

/// What an unfinished file has, and of what.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Journal {
    version: u32,
    /// The file's source, without credentials.
    pub(crate) url: String,
    /// Bytes of the whole file.
    pub(crate) bytes: u64,
    /// The hub's checksum.
    pub(crate) sha256: Option<String>,
    /// The ETag of the server that gives the bytes.
    pub(crate) etag: Option<String>,
    /// Spans of the file that are there.
    pub(crate) spans: Spans,
}

impl Journal {
    pub(crate) fn new(url: String, bytes: u64, sha256: Option<String>) -> Self {
        Journal {
            version: VERSION,
            url,
            bytes,
            sha256,
            etag: None,
            spans: Spans::default(),
        }
    }

    /// Reads a journal that was written for this file; `None` where it is of another, is damaged,
    /// or is not there.
    pub(crate) fn read(path: &Path, wanted: &Journal) -> Option<Journal> {
        let mut text = Vec::new();
        let file = fs::File::open(path).ok()?;
        file.take(JOURNAL_MAX).read_to_end(&mut text).ok()?;
        let found: Journal = serde_json::from_slice(&text).ok()?;
        let is_of_it = found.version == VERSION
            && found.bytes == wanted.bytes
            && found.sha256 == wanted.sha256
            // Without a checksum the server has to say that the file is the same.
            && (found.sha256.is_some() || (found.url == wanted.url && found.etag.is_some()));
        (is_of_it && found.spans.fits(found.bytes)).then_some(found)
    }

    /// Writes it in the place of what is there.
    pub(crate) fn write(&self, path: &Path) -> io::Result<()> {
        let text = serde_json::to_vec(self)?;
        replace(path, &text)
    }
}

/// Writes a small file at once or not at all.
pub(crate) fn replace(path: &Path, text: &[u8]) -> io::Result<()> {
    let mut temporary = PathBuf::from(path);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    temporary.set_file_name(format!("{name}.new"));
    fs::write(&temporary, text)?;
    fs::rename(&temporary, path)
}

/// First byte of a range as `bytes 0-99/1000`, and the length of the file if it is given.
pub(crate) fn content_range(text: &str) -> Option<(u64, Option<u64>)> {
    let (range, total) = text.trim().strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
    let total = match total {
        "*" => None,
        total => Some(total.parse().ok()?),
    };
    (first <= last).then_some((first, total))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_grow_together_and_tell_what_is_missing() {
        let mut spans = Spans::default();
        for (first, end) in [(10, 20), (40, 50), (20, 30), (5, 12), (60, 60)] {
            spans.add(first, end);
        }
        assert_eq!(spans.0, [(5, 30), (40, 50)]);
        assert_eq!((spans.bytes(), spans.prefix()), (35, 0));
        assert_eq!(
            spans.missing(64, 8),
            [(0, 5), (30, 38), (38, 40), (50, 58), (58, 64)]
        );
        spans.add(0, 64);
        assert_eq!(
            (spans.0.len(), spans.prefix(), spans.missing(64, 8).len()),
            (1, 64, 0)
        );
        assert!(Spans::default().missing(0, 8).is_empty());
    }

    #[test]
    fn a_journal_of_another_file_or_a_damaged_one_counts_for_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("j");
        let mut journal = Journal::new("http://h/m".into(), 100, Some("ab".into()));
        journal.spans.add(0, 10);
        journal.write(&path).unwrap();
        assert_eq!(Journal::read(&path, &journal), Some(journal.clone()));
        let other = Journal {
            bytes: 99,
            ..journal.clone()
        };
        assert_eq!(Journal::read(&path, &other), None, "of another length");
        let other = Journal {
            sha256: Some("cd".into()),
            ..journal.clone()
        };
        assert_eq!(Journal::read(&path, &other), None, "of other bytes");
        for damaged in [
            "",
            "{}",
            r#"{"version":1,"url":"http://h/m","bytes":100,"sha256":"ab","etag":null,"spans":[[50,20]]}"#,
            r#"{"version":1,"url":"http://h/m","bytes":100,"sha256":"ab","etag":null,"spans":[[0,101]]}"#,
            r#"{"version":1,"url":"http://h/m","bytes":100,"sha256":"ab","etag":null,"spans":[[9,20],[0,5]]}"#,
        ] {
            fs::write(&path, damaged).unwrap();
            assert_eq!(Journal::read(&path, &journal), None, "{damaged}");
        }
        let bare = Journal {
            sha256: None,
            ..journal
        };
        bare.write(&path).unwrap();
        assert_eq!(
            Journal::read(&path, &bare),
            None,
            "nothing says that it is the same"
        );
    }
}
