//! Packs objects into an archive: one after another, as one xz stream.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A packed archive.
pub(crate) struct Packed {
    /// The bytes of each object, in their order.
    pub(crate) lengths: Vec<u32>,
    /// Where the xz stream is.
    pub(crate) path: PathBuf,
}

/// Packs the files `objects` by the program xz, on one thread: the same objects give the same
/// bytes. `plain` is where they are put together; the stream is beside it, with the ending `xz`.
///
/// # Errors
/// What cannot be read, written or run.
pub(crate) fn pack<'a>(
    objects: impl Iterator<Item = &'a Path>,
    plain: &Path,
) -> Result<Packed, String> {
    let of = |path: &Path, error: std::io::Error| format!("{}: {error}", path.display());
    let mut lengths = Vec::new();
    let mut all = File::create(plain).map_err(|e| of(plain, e))?;
    for path in objects {
        let object = fs::read(path).map_err(|e| of(path, e))?;
        lengths.push(
            u32::try_from(object.len()).map_err(|_| format!("{} is too large", path.display()))?,
        );
        all.write_all(&object).map_err(|e| of(plain, e))?;
    }
    drop(all);
    let path = plain.with_extension("xz");
    let into = File::create(&path).map_err(|e| of(&path, e))?;
    let status = Command::new("xz")
        .args([
            "--format=xz",
            "--check=crc64",
            "--threads=1",
            "--lzma2=preset=9e,dict=16MiB",
            "--stdout",
            "--",
        ])
        .arg(plain)
        .env_remove("XZ_OPT")
        .env_remove("XZ_DEFAULTS")
        .stdout(into)
        .status()
        .map_err(|e| format!("xz: {e}; install xz-utils (Fedora, Arch: xz)"))?;
    if !status.success() {
        return Err(format!("xz on {}: {status}", plain.display()));
    }
    fs::remove_file(plain).map_err(|e| of(plain, e))?;
    Ok(Packed { lengths, path })
}
