//! Large arrays that this process has read before: the vocabularies that many files have in common.
//!
//! An array is known by its element type, its count and a digest of its bytes. Where a header comes
//! to an array of a known count, it is digested piece by piece as it is read, and what is the same
//! is not kept in memory, nor walked: what a walk checks of these bytes was checked the first time.
//!
//! ```text
//! count of a known one? --no--> walked, kept, and known from then on
//!      | yes                         ^
//! first piece the same? --no---------+
//!      | yes                         |
//! all pieces the same?  --no---------'
//!      | yes
//! passed over
//! ```
//!
//! *Invariant:* what is passed over has the bytes of an array that was walked to its end, as far as
//! a digest of 64 bits tells whose key no file can know (tests
//! `a_header_that_was_read_before_is_not_kept_again`, `what_differs_anywhere_is_read`).

use std::collections::VecDeque;
use std::hash::{BuildHasher, Hasher};
use std::ops::Range;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use foldhash::quality::RandomState;

use crate::{Error, MappedFile, ValueType};

/// Elements of the smallest array that is known. One of them takes a piece at least.
pub(crate) const LEAST: u64 = 16 << 10;
/// Bytes that are read and digested at a time: what stays in a core's own cache.
pub(crate) const PIECE: usize = 64 << 10;
/// Arrays that are known at once. Those that were seen last stay.
const KNOWN_MAX: usize = 256;
/// Arrays of one count and one beginning whose lengths are tried on a file.
const TRIES_MAX: usize = 4;

const _: () = assert!(LEAST * 4 >= PIECE as u64);

/// The key of all digests of this process.
static KEY: LazyLock<RandomState> = LazyLock::new(Default::default);

/// The arrays that are known, the one that was seen last in front.
static KNOWN: LazyLock<Mutex<VecDeque<Known>>> = LazyLock::new(Mutex::default);

/// A digest of bytes, keyed at random for this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Content(u64);

impl Content {
    /// The content of `bytes`, digested at once.
    pub(crate) fn of(bytes: &[u8]) -> Content {
        let mut digest = Digester::default();
        bytes.chunks(PIECE).for_each(|piece| digest.add(piece));
        digest.finish()
    }

    pub(crate) fn to_bytes(self) -> [u8; 8] {
        self.0.to_le_bytes()
    }
}

/// Digests bytes that come in pieces of [`PIECE`] bytes, the last one shorter.
struct Digester {
    hasher: <RandomState as BuildHasher>::Hasher,
    len: u64,
}

impl Default for Digester {
    fn default() -> Digester {
        Digester {
            hasher: KEY.build_hasher(),
            len: 0,
        }
    }
}

impl Digester {
    fn add(&mut self, piece: &[u8]) {
        self.hasher.write(piece);
        self.len += piece.len() as u64;
    }

    fn finish(mut self) -> Content {
        self.hasher.write_u64(self.len);
        Content(self.hasher.finish())
    }
}

/// An array that was walked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Known {
    ty: ValueType,
    count: u64,
    len: u64,
    first: Content,
    content: Content,
}

/// An array that was recognised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Recognised {
    /// Bytes of its elements.
    pub(crate) len: u64,
    pub(crate) content: Content,
}

/// Whether a key's array may be left out where its content is known: nobody but the tokenizer,
/// which knows of that, reads those.
pub(super) fn is_of_vocabulary(key: &str) -> bool {
    key.starts_with("tokenizer.")
}

/// Whether an array of `count` elements is large enough to be shared among files.
pub(crate) fn is_large(ty: ValueType, count: u64) -> bool {
    // No remark is made on the elements of these, which a file that is not walked would lack.
    let is_plain = matches!(ty, ValueType::String | ValueType::I32 | ValueType::F32);
    is_plain && count >= LEAST
}

/// Remembers an array that was walked to its end. Gives the digest of its bytes.
pub(crate) fn note(ty: ValueType, count: u64, bytes: &[u8]) -> Content {
    let known = Known {
        ty,
        count,
        len: bytes.len() as u64,
        first: Content::of(&bytes[..bytes.len().min(PIECE)]),
        content: Content::of(bytes),
    };
    let mut all = lock();
    to_front(&mut all, known);
    all.truncate(KNOWN_MAX);
    known.content
}

/// Looks for a known array in a file, whose elements would begin at the start of `rest`, which ends
/// with the file. Reads past the first piece only where that is a known one's.
pub(crate) fn recognise(
    file: &MappedFile,
    rest: Range<u64>,
    (ty, count): (ValueType, u64),
) -> Result<Option<Recognised>, Error> {
    let room = rest.end.saturating_sub(rest.start);
    let fits = |known: &&Known| (known.ty, known.count) == (ty, count) && known.len <= room;
    let mut alike: Vec<Known> = lock().iter().filter(fits).copied().collect();
    if alike.is_empty() {
        return Ok(None);
    }
    let first = digest(file, rest.start..rest.start + PIECE as u64)?;
    alike.retain(|known| known.first == first);
    for _ in 0..TRIES_MAX {
        let Some(len) = alike.first().map(|known| known.len) else {
            break;
        };
        let content = digest(file, rest.start..rest.start + len)?;
        let is_it = |known: &&Known| known.len == len && known.content == content;
        if let Some(found) = alike.iter().find(is_it) {
            to_front(&mut lock(), *found);
            return Ok(Some(Recognised { len, content }));
        }
        alike.retain(|known| known.len != len);
    }
    Ok(None)
}

fn digest(file: &MappedFile, range: Range<u64>) -> Result<Content, Error> {
    let mut digest = Digester::default();
    file.in_pieces(range, PIECE, |piece| digest.add(piece))?;
    Ok(digest.finish())
}

fn to_front(all: &mut VecDeque<Known>, known: Known) {
    all.retain(|other| *other != known);
    all.push_front(known);
}

fn lock() -> MutexGuard<'static, VecDeque<Known>> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}
