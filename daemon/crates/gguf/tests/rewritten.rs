//! A file whose size and time of writing are what they were, though its ctime moved: rewritten in
//! place with its time put back, or touched in a way that leaves its content alone.

use std::fs::{self, FileTimes, OpenOptions, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rocmforge_gguf::{Error, MappedFile, ReadMode};

const BOTH: [ReadMode; 2] = [ReadMode::Map, ReadMode::Pread];
const MIB: u64 = 1 << 20;

fn noise_file(dir: &Path, len: u64, salt: u64) -> PathBuf {
    let byte = |i: u64| ((i ^ salt).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8;
    let path = dir.join(format!("noise-{salt}"));
    fs::write(&path, (0..len).map(byte).collect::<Vec<_>>()).unwrap();
    path
}

/// Long enough that the clock of file times has moved on.
fn tick() {
    std::thread::sleep(Duration::from_millis(30));
}

/// Writes in place, and puts the time back.
fn rewrite(path: &Path, at: u64, bytes: &[u8]) {
    let modified = fs::metadata(path).unwrap().modified().unwrap();
    let writer = OpenOptions::new().write(true).open(path).unwrap();
    writer.write_all_at(bytes, at).unwrap();
    writer.set_modified(modified).unwrap();
}

fn read_all(file: &MappedFile) {
    for start in (0..file.len()).step_by(MIB as usize) {
        let range = start..file.len().min(start + MIB);
        file.with_range(range, |_| ()).unwrap();
    }
}

type Change = fn(&Path);

/// What moves the ctime and nothing that anybody reads.
const HARMLESS: [(&str, Change); 8] = [
    ("chmod to another mode", |path| {
        fs::set_permissions(path, Permissions::from_mode(0o640)).unwrap();
    }),
    ("chmod to the same mode", |path| {
        fs::set_permissions(path, Permissions::from_mode(0o640)).unwrap();
    }),
    ("chown to the same owner", |path| {
        nix::unistd::chown(
            path,
            Some(nix::unistd::getuid()),
            Some(nix::unistd::getgid()),
        )
        .unwrap();
    }),
    ("a link", |path| {
        fs::hard_link(path, path.with_extension("link")).unwrap();
    }),
    ("another name of the link", |path| {
        fs::rename(path.with_extension("link"), path.with_extension("other")).unwrap();
    }),
    ("the end of the link", |path| {
        fs::remove_file(path.with_extension("other")).unwrap();
    }),
    ("another time of reading", |path| {
        let times = FileTimes::new().set_accessed(std::time::SystemTime::now());
        let file = OpenOptions::new().write(true).open(path).unwrap();
        file.set_times(times).unwrap();
    }),
    ("another name", |path| {
        fs::rename(path, path.with_extension("moved")).unwrap();
    }),
];

/// `rsync --inplace -tp` writes, puts the time back, and sets the mode; once the new bytes were
/// served as the old model.
#[test]
fn a_rewrite_is_a_change_whatever_was_done_to_the_file_besides() {
    for (what, change) in HARMLESS {
        if what.contains("the link") {
            continue;
        }
        for mode in BOTH {
            let dir = tempfile::tempdir().unwrap();
            let path = noise_file(dir.path(), 40 * MIB, 1);
            let other = fs::read(noise_file(dir.path(), 40 * MIB, 2)).unwrap();
            for (at, bytes) in [(0, &other[..]), (20 * MIB, &other[..20 << 20])] {
                let file = MappedFile::open_with(&path, mode).unwrap();
                read_all(&file);
                tick();
                rewrite(&path, at, bytes);
                change(&path);
                let error = file.check_unchanged().expect_err(what);
                assert!(
                    matches!(&error, Error::Changed { was, now, .. }
                        if was.mtime_ns == now.mtime_ns && was.ctime_ns < now.ctime_ns),
                    "{what}: {error}"
                );
                assert!(file.with_range(0..10, |_| ()).is_err(), "{what}");
                let moved = path.with_extension("moved");
                if moved.exists() {
                    fs::rename(moved, &path).unwrap();
                }
                let _ = fs::remove_file(path.with_extension("link"));
            }
        }
    }
}

/// Once each of these made every later read an error.
#[test]
fn what_leaves_the_content_alone_is_no_change() {
    for mode in BOTH {
        let dir = tempfile::tempdir().unwrap();
        let path = noise_file(dir.path(), 3 * MIB + 17, 1);
        let file = MappedFile::open_with(&path, mode).unwrap();
        read_all(&file);
        for (what, change) in HARMLESS {
            let before = file.identity();
            tick();
            change(&path);
            file.check_unchanged()
                .unwrap_or_else(|e| panic!("{what}: {e}"));
            file.with_range(MIB..2 * MIB, |_| ()).unwrap();
            assert!(
                file.identity().ctime_ns > before.ctime_ns,
                "{what}: the ctime did move"
            );
        }
    }
}

/// A byte of the first megabytes, or the file's last one, is found for certain where it was read.
#[test]
fn a_byte_of_the_header_is_a_change() {
    let len = 3 * MIB + 17;
    for at in [0, 4095, MIB + 1, len - 1] {
        let dir = tempfile::tempdir().unwrap();
        let path = noise_file(dir.path(), len, 1);
        let file = MappedFile::open(&path).unwrap();
        read_all(&file);
        tick();
        let byte = fs::read(&path).unwrap()[at as usize];
        rewrite(&path, at, &[byte ^ 1]);
        for _ in 0..2 {
            assert!(matches!(file.check_unchanged(), Err(Error::Changed { .. })));
        }
        // Nor does its old byte bring it back: what was read meanwhile may have been the new one.
        rewrite(&path, at, &[byte]);
        assert!(file.check_unchanged().is_err());
    }
}

/// What nobody has read yet is read as it is then: a change before that mixes nothing.
#[test]
fn what_was_not_read_yet_may_change() {
    let dir = tempfile::tempdir().unwrap();
    let path = noise_file(dir.path(), 40 * MIB, 1);
    let file = MappedFile::open(&path).unwrap();
    file.with_range(0..MIB, |_| ()).unwrap();
    tick();
    rewrite(&path, 30 * MIB, &[7; 1 << 20]);
    let read = file.with_range(30 * MIB..31 * MIB, <[u8]>::to_vec).unwrap();
    assert!(read.iter().all(|&byte| byte == 7));
    tick();
    rewrite(&path, 30 * MIB, &[8; 1 << 20]);
    assert!(matches!(file.check_unchanged(), Err(Error::Changed { .. })));
}
