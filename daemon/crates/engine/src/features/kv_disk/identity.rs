//! The identity of a model's file by its content: a digest of its header, and of samples of each
//! tensor. A copy of the file has the same identity; a change in a sampled byte gives another one.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use rocmforge_gguf::{Gguf, MappedFile};
use rocmforge_kv_disk::ModelTag;
use sha2::{Digest, Sha256};

/// Size of a sample in bytes.
const SAMPLE: u64 = 256;

/// Number of header bytes that are read at a time.
const HEADER_CHUNK: u64 = 1 << 20;

/// Maximum number of threads that read files which may hang.
const THREADS_MAX: usize = 32;

/// Number of threads that read files now.
static THREADS: AtomicUsize = AtomicUsize::new(0);

/// The digest of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileDigest(pub(super) [u8; 32]);

impl FileDigest {
    /// The tag that stands for the model in the store.
    pub(super) fn tag(self) -> ModelTag {
        let mut tag = [0; 16];
        tag.copy_from_slice(&self.0[..16]);
        ModelTag(tag)
    }
}

/// The identity of a file, once it was read: a digest, or nothing if reading failed.
#[derive(Debug, Clone)]
pub(crate) struct Identity(Arc<OnceLock<Option<FileDigest>>>);

impl Identity {
    /// Starts to read a file's identity in the background.
    pub(crate) fn of(file: &Arc<MappedFile>) -> Self {
        let identity = Self(Arc::default());
        if THREADS.fetch_add(1, Ordering::Relaxed) >= THREADS_MAX {
            THREADS.fetch_sub(1, Ordering::Relaxed);
            let _ = identity.0.set(None);
            return identity;
        }
        let (file, found) = (Arc::clone(file), Arc::clone(&identity.0));
        let started = std::thread::Builder::new()
            .name("kv-identity".to_owned())
            .spawn(move || {
                let digest = digest(&file);
                THREADS.fetch_sub(1, Ordering::Relaxed);
                if let Err(error) = &digest {
                    let path = file.path().display();
                    tracing::warn!(%path, %error, "KV pages of this model are not kept on disk");
                }
                let _ = found.set(digest.ok());
            });
        if let Err(error) = started {
            THREADS.fetch_sub(1, Ordering::Relaxed);
            tracing::warn!(%error, "KV pages of a model are not kept on disk");
            let _ = identity.0.set(None);
        }
        identity
    }

    /// An identity with a given digest.
    #[cfg(test)]
    pub(super) fn known(digest: [u8; 32]) -> Self {
        Self(Arc::new(Some(FileDigest(digest)).into()))
    }

    /// An identity that is not known yet.
    #[cfg(test)]
    pub(super) fn pending() -> Self {
        Self(Arc::default())
    }

    /// Whether the file is still being read.
    pub(super) fn is_pending(&self) -> bool {
        self.0.get().is_none()
    }

    /// The digest, if the file was read.
    pub(super) fn get(&self) -> Option<FileDigest> {
        self.0.get().copied().flatten()
    }
}

/// Computes the digest of a file.
fn digest(file: &MappedFile) -> Result<FileDigest, rocmforge_gguf::Error> {
    let gguf = Gguf::open_recognising(file)?;
    let mut hasher = Sha256::new();
    // What this process keeps in memory behind the files is none of the model's.
    let end = file.parts().last().map_or(0, |(_, range)| range.end);
    hasher.update(end.to_le_bytes());
    let mut buffer = Vec::new();
    let mut take = |hasher: &mut Sha256, from: u64, bytes: u64| {
        buffer.resize(bytes as usize, 0);
        file.read_into(from, &mut buffer)?;
        hasher.update(&buffer);
        Ok::<(), rocmforge_gguf::Error>(())
    };
    let header = gguf.header_bytes();
    for from in (0..header).step_by(HEADER_CHUNK as usize) {
        take(&mut hasher, from, HEADER_CHUNK.min(header - from))?;
    }
    for tensor in gguf.tensors() {
        // Of a split model the tables of the other parts are not in the first header.
        hasher.update(format!("{tensor:?}"));
        let bytes = tensor.bytes.min(SAMPLE);
        for from in [0, (tensor.bytes - bytes) / 2, tensor.bytes - bytes] {
            take(&mut hasher, tensor.offset + from, bytes)?;
        }
    }
    Ok(FileDigest(hasher.finalize().into()))
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::*;

    fn of(path: &Path) -> FileDigest {
        digest(&MappedFile::open(path).unwrap()).unwrap()
    }

    #[test]
    fn a_copy_has_the_same_identity_and_a_changed_tensor_another() {
        let fixtures = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../tests/fixtures");
        let path = fixtures.join("tiny-qwen3-Q8_0.gguf");
        let dir = tempfile::tempdir().unwrap();
        let copy = dir.path().join("copy.gguf");
        std::fs::copy(&path, &copy).unwrap();
        let first = of(&path);
        assert_eq!(of(&copy), first);
        assert_ne!(of(&fixtures.join("tiny-llama-Q4_K_M.gguf")), first);
        // The last byte is the end of a tensor; and a key of the header.
        let content = std::fs::read(&path).unwrap();
        let gguf = Gguf::open(&MappedFile::open(&path).unwrap()).unwrap();
        let tensor = &gguf.tensors()[gguf.tensors().len() / 2];
        let places = [
            tensor.offset,
            tensor.offset + tensor.bytes - 1,
            tensor.offset + tensor.bytes / 2,
        ];
        for at in places {
            let mut changed = content.clone();
            changed[at as usize] ^= 1;
            let other = dir.path().join(format!("{at}.gguf"));
            std::fs::write(&other, changed).unwrap();
            assert_ne!(of(&other), first, "byte {at}");
        }
    }
}
