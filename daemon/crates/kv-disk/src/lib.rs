//! A store of KV pages and recurrent states on disk.
//!
//! Entries are named by their content: a digest of all that determines their bytes. The store is a
//! cache. It may lose an entry at any time, and never returns other bytes than were written.
//!
//! ```text
//!   put --> queue (bounded bytes) --> writer thread --> segment files, append-only
//!                  |                                        |
//!   fetch ---------+--------> reader thread <---------------+
//! ```
//!
//! A segment file has a header and records (`format.rs`). [`Store::open`] takes a lock on the
//! directory, and the writer thread rebuilds the index from the record headers. Payloads are
//! verified when they are read. If the budget is exceeded, the segment that was used least recently
//! is deleted as a whole.
//!
//! *Invariants* (tests in `tests/`):
//! - A payload is returned only if its checksum, and that of its header with key and place, are
//!   right (`damaged_stores_never_return_wrong_bytes`).
//! - After a failed write the store pauses writing, and goes on reading
//!   (`a_full_disk_pauses_writing_and_reading_goes_on`).
//! - All segment files together are at most the budget (`files_stay_within_the_budget`).

#![forbid(unsafe_code)]

mod files;
mod format;
mod index;
mod reader;
mod store;
mod writer;

pub use files::{DirectoryFiles, FileInfo, Files, NOTE_MAX, OpenError, SegmentFile};
pub use format::{FORMAT_VERSION, Found, Scanned, read_payload, scan};
pub use index::{Key, Kind, ModelTag};
pub use reader::{Fetch, Next};
pub use store::{Options, Skipped, Status, Store};
