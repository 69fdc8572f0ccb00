//! Code objects on disk: one file a key, written beside and renamed into place, with a checksum.
//!
//! Several processes may share a directory: a reader sees a whole file or none, and a file that
//! fails its checksum counts as none and goes.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use sha2::{Digest, Sha256};

use super::{Language, OBJECT_BYTES_MAX, Request};

/// Begins every file; the last byte is the format's version.
const MAGIC: &[u8; 8] = b"RFKOBJ\0\x01";
const HEADER_BYTES: usize = MAGIC.len() + 32;
const EXTENSION: &str = "kobj";
/// Bytes that a cache keeps unless configured otherwise.
const BYTES_MAX: u64 = 512 << 20;
/// A file's time of last use is noted when it is older than this.
const TOUCH_AFTER: Duration = Duration::from_secs(24 * 3600);

/// A directory of code objects.
#[derive(Debug, Clone)]
pub struct Cache {
    dir: PathBuf,
    bytes_max: u64,
}

/// `kernels` in `$CACHE_DIRECTORY` (as systemd sets it), `$XDG_CACHE_HOME/rocmforge`
/// or `/var/cache/rocmforge`.
pub fn default_cache_dir() -> PathBuf {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    let base = set("CACHE_DIRECTORY")
        .map(PathBuf::from)
        .or_else(|| set("XDG_CACHE_HOME").map(|dir| PathBuf::from(dir).join("rocmforge")))
        .unwrap_or_else(|| PathBuf::from("/var/cache/rocmforge"));
    base.join("kernels")
}

/// Everything that an object depends on, as a hash in hex. Each field is preceded by its length.
pub(super) fn key(language: Language, version: &str, request: &Request<'_>) -> String {
    let mut hash = Sha256::new();
    let mut field = |bytes: &[u8]| {
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    field(MAGIC);
    for text in [
        language.compiler(),
        version,
        request.name,
        request.source,
        request.target,
    ] {
        field(text.as_bytes());
    }
    field(&(request.headers.len() as u64).to_le_bytes());
    for (name, text) in request.headers {
        field(name.as_bytes());
        field(text.as_bytes());
    }
    for option in request.options {
        field(option.as_bytes());
    }
    hash.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

impl Cache {
    /// A cache in `dir`, which is made when the first object is kept.
    pub fn new(dir: impl Into<PathBuf>) -> Cache {
        Cache {
            dir: dir.into(),
            bytes_max: BYTES_MAX,
        }
    }

    /// Keeps at most `bytes` bytes.
    #[must_use]
    pub fn with_bytes_max(self, bytes: u64) -> Cache {
        Cache {
            bytes_max: bytes,
            ..self
        }
    }

    /// Directory of the cache.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    fn path(&self, key: &str) -> PathBuf {
        self.dir.join(key).with_extension(EXTENSION)
    }

    /// The object of a key; one that is damaged is removed.
    pub(super) fn get(&self, key: &str) -> Option<Vec<u8>> {
        let path = self.path(key);
        let mut file = File::open(&path).ok()?;
        let mut bytes = Vec::new();
        let limit = (HEADER_BYTES + OBJECT_BYTES_MAX) as u64 + 1;
        (&mut file).take(limit).read_to_end(&mut bytes).ok()?;
        let Some(object) = checked(&bytes) else {
            // If it cannot be removed, it is replaced when the object is kept again.
            let _ = fs::remove_file(&path);
            return None;
        };
        let now = SystemTime::now();
        let old = file
            .metadata()
            .and_then(|m| m.modified())
            .is_ok_and(|t| now.duration_since(t).is_ok_and(|age| age > TOUCH_AFTER));
        if old && let Ok(file) = File::options().append(true).open(&path) {
            // Only the order of eviction depends on it.
            let _ = file.set_modified(now);
        }
        Some(object.to_vec())
    }

    /// Keeps an object, then drops the least recently used beyond the bound.
    pub(super) fn put(&self, key: &str, object: &[u8]) -> io::Result<()> {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.dir)?;
        let mut file = tempfile::NamedTempFile::new_in(&self.dir)?;
        file.write_all(MAGIC)?;
        file.write_all(&Sha256::digest(object))?;
        file.write_all(object)?;
        file.persist(self.path(key)).map_err(|error| error.error)?;
        self.evict(key)
    }

    fn evict(&self, keep: &str) -> io::Result<()> {
        let keep = self.path(keep);
        let mut files = Vec::new();
        let mut total = 0;
        for entry in fs::read_dir(&self.dir)? {
            let path = entry?.path();
            if path.extension().is_none_or(|e| e != EXTENSION) {
                continue;
            }
            // Another process may have removed it meanwhile.
            let Ok(metadata) = fs::metadata(&path) else {
                continue;
            };
            total += metadata.len();
            if path != keep {
                files.push((metadata.modified()?, metadata.len(), path));
            }
        }
        files.sort();
        for (_, bytes, path) in files {
            if total <= self.bytes_max {
                break;
            }
            if fs::remove_file(path).is_ok() {
                total -= bytes;
            }
        }
        Ok(())
    }
}

/// The object in a file's bytes, if they are whole.
fn checked(bytes: &[u8]) -> Option<&[u8]> {
    let (magic, rest) = bytes.split_at_checked(MAGIC.len())?;
    let (sum, object) = rest.split_at_checked(32)?;
    let whole = magic == MAGIC
        && object.len() <= OBJECT_BYTES_MAX
        && sum == Sha256::digest(object).as_slice();
    whole.then_some(object)
}

#[cfg(test)]
mod tests {
    use super::*;

    const REQUEST: Request<'static> = Request {
        name: "add",
        source: "s",
        headers: &[("h", "t")],
        target: "gfx1100",
        options: &["-O3"],
    };

    #[test]
    fn everything_that_matters_changes_the_key() {
        let of = |version: &str, request: &Request<'_>| key(Language::Hip, version, request);
        let base = of("1", &REQUEST);
        assert_eq!(base, of("1", &REQUEST));
        let others = [
            of("2", &REQUEST),
            key(Language::Cuda, "1", &REQUEST),
            of(
                "1",
                &Request {
                    source: "S",
                    ..REQUEST
                },
            ),
            of(
                "1",
                &Request {
                    target: "gfx1101",
                    ..REQUEST
                },
            ),
            of(
                "1",
                &Request {
                    headers: &[("h", "T")],
                    ..REQUEST
                },
            ),
            of(
                "1",
                &Request {
                    headers: &[("H", "t")],
                    ..REQUEST
                },
            ),
            of(
                "1",
                &Request {
                    headers: &[],
                    ..REQUEST
                },
            ),
            of(
                "1",
                &Request {
                    options: &["-O", "3"],
                    ..REQUEST
                },
            ),
            of(
                "1",
                &Request {
                    options: &[],
                    ..REQUEST
                },
            ),
        ];
        for (i, other) in others.iter().enumerate() {
            assert_ne!(&base, other, "{i}");
            assert!(!others[..i].contains(other), "{i}");
        }
    }

    #[test]
    fn a_damaged_entry_counts_as_none_and_goes() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::new(dir.path().join("a/b"));
        let object: Vec<u8> = (0..1000u32).map(|i| (i * 7) as u8).collect();
        assert_eq!(cache.get("k"), None);
        cache.put("k", &object).unwrap();
        assert_eq!(cache.get("k").as_deref(), Some(&object[..]));
        let whole = fs::read(cache.path("k")).unwrap();
        for at in [0, 7, 8, 39, 40, whole.len() - 1] {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            fs::write(cache.path("k"), damaged).unwrap();
            assert_eq!(cache.get("k"), None, "byte {at}");
            assert!(!cache.path("k").exists(), "byte {at}");
        }
        for len in [0, 1, 39, whole.len() - 1] {
            fs::write(cache.path("k"), &whole[..len]).unwrap();
            assert_eq!(cache.get("k"), None, "{len} bytes");
        }
        cache.put("k", &object).unwrap();
        assert_eq!(cache.get("k").as_deref(), Some(&object[..]));
    }

    #[test]
    fn the_least_recently_used_goes_first() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::new(dir.path()).with_bytes_max(3 * 1100);
        for (age, key) in [(30, "old"), (40, "older"), (10, "new")] {
            cache.put(key, &[1; 1000]).unwrap();
            let then = SystemTime::now() - Duration::from_secs(age * 24 * 3600);
            let file = File::options().append(true).open(cache.path(key)).unwrap();
            file.set_modified(then).unwrap();
        }
        assert!(cache.get("older").is_some(), "a use makes it young");
        cache.put("newest", &[1; 1000]).unwrap();
        let kept = ["old", "older", "new", "newest"].map(|key| cache.path(key).exists());
        assert_eq!(kept, [false, true, true, true]);
    }
}
