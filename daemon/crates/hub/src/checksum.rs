//! SHA-256 of a file that grows.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, mpsc};

use sha2::{Digest, Sha256};

/// Bytes that are read at once.
const READ_BYTES: usize = 1 << 20;

/// The thread that computes a checksum; `None` of a file that did not grow to its end.
pub(crate) type Hashing = std::thread::JoinHandle<io::Result<Option<[u8; 32]>>>;

/// Computes the checksum of the file as far as it has grown together; `None` where it does not grow
/// to its end.
pub(crate) fn hash_behind(
    file: Arc<File>,
    bytes: u64,
    prefixes: mpsc::Receiver<u64>,
) -> io::Result<Hashing> {
    let work = move || {
        let mut hasher = Sha256::new();
        let mut buffer = vec![0; READ_BYTES];
        let (mut at, mut known) = (0, 0);
        loop {
            while at < known {
                let n = usize::try_from(known - at).map_or(READ_BYTES, |n| n.min(READ_BYTES));
                file.read_exact_at(&mut buffer[..n], at)?;
                hasher.update(&buffer[..n]);
                at += n as u64;
            }
            if at == bytes {
                return Ok(Some(hasher.finalize().into()));
            }
            match prefixes.recv() {
                Ok(prefix) => known = known.max(prefix),
                Err(_) => return Ok(None),
            }
        }
    };
    std::thread::Builder::new()
        .name("checksum".to_owned())
        .spawn(work)
}

/// Whether a text is a SHA-256 in hexadecimal.
pub(crate) fn is_sha256(text: &str) -> bool {
    text.len() == 64
        && text
            .bytes()
            .all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

pub(crate) fn hex(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}
