//! Units compiled ahead of time for AMD targets and embedded, where the build was asked for them
//! (`ROCMFORGE_AOT_TARGETS`, see build.rs).
//!
//! Chips and the generic target that their code is nearly the same as share an archive: one xz
//! stream of their objects, unit by unit. A target's objects are unpacked when the first of them is
//! asked for, and kept for as long as the process runs: some 4 MB.
//!
//! *Threads:* any may ask; who asks while another unpacks the same target waits for it.

use std::io::{self, Read};
use std::sync::{LazyLock, OnceLock};

use lzma_rust2::XzReader;

use super::amd_targets::generic_of;
use super::units;

/// Maximum number of bytes that an archive may come to when it is unpacked.
const ARCHIVE_BYTES_MAX: u64 = 256 << 20;
/// Maximum number of KiB that unpacking may take: archives are packed with a window of 16 MiB.
const UNPACKER_KIB_MAX: u32 = 17 << 10;

/// The objects of some targets.
struct Archive {
    targets: &'static [&'static str],
    /// Bytes of the objects: of the first unit for each target, of the second one, and so on.
    lengths: &'static [u32],
    /// The kernels' xz stream.
    packed: &'static [u8],
}

static ARCHIVES: &[Archive] = include!(concat!(env!("OUT_DIR"), "/aot.rs"));

/// An archive whose objects cannot be had.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the embedded kernels for {target} are damaged: {message}; install the daemon again")]
pub struct Damaged {
    /// The target that was asked for.
    pub target: &'static str,
    /// The damage that was found in the archive.
    pub message: String,
}

/// A target that objects are embedded for.
struct Target {
    name: &'static str,
    archive: &'static Archive,
    /// In the order of the units.
    objects: OnceLock<Result<Vec<Vec<u8>>, Damaged>>,
}

impl Target {
    fn objects(&'static self) -> Result<&'static [Vec<u8>], Damaged> {
        let objects = self.objects.get_or_init(|| {
            let Archive {
                targets,
                lengths,
                packed,
            } = self.archive;
            let at = targets.iter().position(|t| *t == self.name);
            unpack(packed, lengths, targets.len(), at.unwrap_or_default()).map_err(|error| {
                Damaged {
                    target: self.name,
                    message: error.to_string(),
                }
            })
        });
        objects.as_deref().map_err(Clone::clone)
    }
}

static TARGETS: LazyLock<Vec<Target>> = LazyLock::new(|| {
    let of = |archive: &'static Archive| {
        archive.targets.iter().map(move |name| Target {
            name,
            archive,
            objects: OnceLock::new(),
        })
    };
    ARCHIVES.iter().flat_map(of).collect()
});

/// What is embedded for a chip: its own target, else its generic one.
fn target_of(chip: &str) -> Option<&'static Target> {
    let named = |name: &str| TARGETS.iter().find(|target| target.name == name);
    named(chip).or_else(|| named(generic_of(chip)?))
}

/// The code object of a unit for an AMD chip (`gfx1100`, without feature flags): its own, else that
/// of its generic target, which an older runtime may not load; `None` where neither is embedded.
///
/// # Errors
/// What is embedded cannot be unpacked. The first call for a target unpacks it.
pub fn object(chip: &str, unit: &str) -> Result<Option<&'static [u8]>, Damaged> {
    let (Some(target), Some(at)) = (target_of(chip), units::units().position(|u| u.name == unit))
    else {
        return Ok(None);
    };
    Ok(target.objects()?.get(at).map(Vec::as_slice))
}

/// The targets that kernels are embedded for.
pub fn targets() -> impl Iterator<Item = &'static str> {
    TARGETS.iter().map(|target| target.name)
}

/// Every `of`-th object of an xz stream from the `at`-th on, all of whose objects are `lengths`
/// bytes. Reads the others, too: what the stream is checked by comes at its end.
fn unpack(packed: &[u8], lengths: &[u32], of: usize, at: usize) -> io::Result<Vec<Vec<u8>>> {
    let wrong = |message: &str| io::Error::new(io::ErrorKind::InvalidData, message);
    let bytes: u64 = lengths.iter().map(|&length| u64::from(length)).sum();
    if bytes > ARCHIVE_BYTES_MAX {
        return Err(wrong("they are larger than they may be"));
    }
    let mut stream = XzReader::new_mem_limit(packed, false, UNPACKER_KIB_MAX);
    let mut objects = Vec::new();
    for (n, &length) in lengths.iter().enumerate() {
        let mut object = vec![0; length as usize];
        stream.read_exact(&mut object)?;
        if n % of == at {
            objects.push(object);
        }
    }
    if stream.read(&mut [0])? != 0 {
        return Err(wrong("there is more than there should be"));
    }
    Ok(objects)
}

#[cfg(test)]
#[path = "tests/aot.rs"]
mod tests;
