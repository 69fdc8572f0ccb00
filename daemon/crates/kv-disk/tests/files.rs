//! Files in memory and files that fail, and what the tests put into a store.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use rocmforge_kv_disk::{
    DirectoryFiles, FileInfo, Files, Key, Kind, ModelTag, Next, Options, SegmentFile, Store,
};

/// The contents of a directory.
pub(crate) type Contents = Arc<Mutex<BTreeMap<String, Vec<u8>>>>;

/// A directory in memory.
#[derive(Default)]
pub(crate) struct MemoryFiles(pub(crate) Contents);

struct MemoryFile(Contents, String);

impl Files for MemoryFiles {
    fn list(&self) -> io::Result<Vec<FileInfo>> {
        let all = self.0.lock().unwrap();
        let info = |(name, content): (&String, &Vec<u8>)| FileInfo {
            name: name.clone(),
            bytes: content.len() as u64,
            modified: SystemTime::UNIX_EPOCH,
            is_regular: true,
        };
        Ok(all.iter().map(info).collect())
    }

    fn create(&self, name: &str) -> io::Result<Box<dyn SegmentFile>> {
        let before = self.0.lock().unwrap().insert(name.to_owned(), Vec::new());
        assert!(before.is_none(), "{name} was there");
        self.open(name)
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn SegmentFile>> {
        match self.0.lock().unwrap().contains_key(name) {
            true => Ok(Box::new(MemoryFile(Arc::clone(&self.0), name.to_owned()))),
            false => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let removed = self.0.lock().unwrap().remove(name);
        removed.map(drop).ok_or(io::ErrorKind::NotFound.into())
    }
}

impl SegmentFile for MemoryFile {
    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        let all = self.0.lock().unwrap();
        let content = all.get(&self.1).ok_or(io::ErrorKind::NotFound)?;
        let from = content.get(offset as usize..).unwrap_or_default();
        let from = from.get(..into.len());
        into.copy_from_slice(from.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let mut all = self.0.lock().unwrap();
        let content = all.get_mut(&self.1).ok_or(io::ErrorKind::NotFound)?;
        let end = offset as usize + bytes.len();
        content.resize(content.len().max(end), 0);
        content[offset as usize..end].copy_from_slice(bytes);
        Ok(())
    }

    fn truncate(&self, bytes: u64) -> io::Result<()> {
        let mut all = self.0.lock().unwrap();
        let content = all.get_mut(&self.1).ok_or(io::ErrorKind::NotFound)?;
        content.resize(bytes as usize, 0);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn touch(&self, _: SystemTime) -> io::Result<()> {
        Ok(())
    }
}

/// When files fail.
#[derive(Default)]
pub(crate) struct Faults {
    /// Bytes of the disk; writes beyond return ENOSPC. 0 is no limit.
    pub(crate) space: AtomicU64,
    /// Each so many-th write returns EIO. 0 is none.
    pub(crate) bad_write: AtomicU64,
    /// Each so many-th read returns EIO. 0 is none.
    pub(crate) bad_read: AtomicU64,
    used: AtomicU64,
    writes: AtomicU64,
    reads: AtomicU64,
}

fn errno(number: i32) -> io::Error {
    io::Error::from_raw_os_error(number)
}

const EIO: i32 = 5;
const ENOSPC: i32 = 28;

impl Faults {
    fn is_bad(every: &AtomicU64, count: &AtomicU64) -> bool {
        let every = every.load(Ordering::Relaxed);
        let n = count.fetch_add(1, Ordering::Relaxed) + 1;
        every > 0 && n.is_multiple_of(every)
    }
}

/// A directory whose files fail.
pub(crate) struct FaultyFiles {
    pub(crate) below: DirectoryFiles,
    pub(crate) faults: Arc<Faults>,
}

struct FaultyFile {
    below: Box<dyn SegmentFile>,
    faults: Arc<Faults>,
}

impl FaultyFiles {
    fn file(&self, below: Box<dyn SegmentFile>) -> Box<dyn SegmentFile> {
        let faults = Arc::clone(&self.faults);
        Box::new(FaultyFile { below, faults })
    }
}

impl Files for FaultyFiles {
    fn list(&self) -> io::Result<Vec<FileInfo>> {
        self.below.list()
    }

    fn create(&self, name: &str) -> io::Result<Box<dyn SegmentFile>> {
        Ok(self.file(self.below.create(name)?))
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn SegmentFile>> {
        Ok(self.file(self.below.open(name)?))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.below.remove(name)
    }
}

impl SegmentFile for FaultyFile {
    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        if Faults::is_bad(&self.faults.bad_read, &self.faults.reads) {
            return Err(errno(EIO));
        }
        self.below.read_at(into, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        if Faults::is_bad(&self.faults.bad_write, &self.faults.writes) {
            // A part of it is written.
            self.below.write_at(&bytes[..bytes.len() / 3], offset)?;
            return Err(errno(EIO));
        }
        let space = self.faults.space.load(Ordering::Relaxed);
        let used = &self.faults.used;
        let before = used.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        if space > 0 && before + bytes.len() as u64 > space {
            used.fetch_sub(bytes.len() as u64, Ordering::Relaxed);
            self.below.write_at(&bytes[..bytes.len() / 2], offset)?;
            return Err(errno(ENOSPC));
        }
        self.below.write_at(bytes, offset)
    }

    fn truncate(&self, bytes: u64) -> io::Result<()> {
        self.below.truncate(bytes)
    }

    fn sync(&self) -> io::Result<()> {
        self.below.sync()
    }

    fn touch(&self, at: SystemTime) -> io::Result<()> {
        self.below.touch(at)
    }
}

/// A name of an entry by a number.
pub(crate) fn key(n: u64) -> Key {
    let mut digest = [0; 32];
    digest[..8].copy_from_slice(&n.to_le_bytes());
    digest[8..16].copy_from_slice(&(!n).to_le_bytes());
    Key {
        scope: [7; 16],
        digest,
        slot: (n % 3) as u16,
    }
}

/// The payload that belongs to a number: no two have a stretch in common.
pub(crate) fn payload(n: u64) -> Vec<u8> {
    let bytes = 100 + (n * 37 % 400) as usize;
    let mut state = n.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..bytes).map(|_| next()).collect()
}

/// The model of the tests.
pub(crate) const MODEL: ModelTag = ModelTag([1; 16]);

/// Puts an entry into the store's queue.
pub(crate) fn put(store: &Store, n: u64) -> bool {
    store.put(key(n), Kind::Page, MODEL, payload(n))
}

/// The payload that a store has of a number, if it has one.
pub(crate) fn get(store: &Store, n: u64) -> Option<Vec<u8>> {
    let begin = Instant::now();
    let mut fetch = store.fetch(vec![key(n)]).expect("few fetches wait");
    loop {
        match fetch.poll() {
            Next::Pending => std::thread::yield_now(),
            Next::Entry(payload) => return Some(payload),
            Next::Failed | Next::Done => return None,
        }
        assert!(begin.elapsed() < Duration::from_secs(60), "nothing is read");
    }
}

/// A store over a directory in memory, with its index read.
pub(crate) fn over(contents: &Contents, options: Options) -> Store {
    let store = Store::on(Box::new(MemoryFiles(Arc::clone(contents))), options);
    ready(store.unwrap())
}

/// Waits until the index is read.
pub(crate) fn ready(store: Store) -> Store {
    // The writer reads it before its first job.
    store.flush();
    assert!(store.status().is_ready);
    store
}
