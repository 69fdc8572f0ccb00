//! Reads past the page cache: they give what others give, leave the page cache alone, and are not
//! made where they cannot be.

use std::fs::{self, File, OpenOptions};
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use proptest::prelude::{Strategy, any};
use proptest::test_runner::{Config, TestRunner};
use rocmforge_gguf::limits::{DIRECT_ALIGNMENT, PART_ALIGNMENT};
use rocmforge_gguf::{Error, MappedFile, ReadMode};

const BLOCK: u64 = DIRECT_ALIGNMENT as u64;

/// Byte `i` of a file of noise.
fn noise(i: u64) -> u8 {
    (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

fn bytes(len: u64) -> Vec<u8> {
    (0..len).map(noise).collect()
}

/// Where the build is, which is on a disk; `None`, with a word, where its file
/// system has no direct reads.
fn dir() -> Option<tempfile::TempDir> {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let probe = dir.path().join("probe");
    fs::write(&probe, [0; 4096]).unwrap();
    let mut options = OpenOptions::new();
    match options.read(true).custom_flags(libc::O_DIRECT).open(&probe) {
        Ok(_) => Some(dir),
        Err(error) => {
            println!(
                "skipped: no direct reads in {}: {error}",
                dir.path().display()
            );
            None
        }
    }
}

/// A file of noise that is on the disk and not in the page cache.
fn cold(dir: &Path, name: &str, len: u64) -> PathBuf {
    let path = dir.join(name);
    fs::write(&path, bytes(len)).unwrap();
    drop_cached(&path);
    path
}

fn drop_cached(path: &Path) {
    let file = File::open(path).unwrap();
    file.sync_all().unwrap();
    posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).unwrap();
}

/// Memory that begins at a multiple of the alignment.
struct Aligned(Vec<u8>, usize);

impl Aligned {
    fn new(len: usize) -> Aligned {
        let memory = vec![0xa5; len + DIRECT_ALIGNMENT];
        let skip = memory.as_ptr().align_offset(DIRECT_ALIGNMENT);
        Aligned(memory, skip)
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.0[self.1..]
    }
}

/// A range by a direct read; the test fails where none is made.
fn direct(file: &MappedFile, range: Range<u64>) -> Result<Vec<u8>, Error> {
    let len = (range.end - range.start) as usize;
    let mut memory = Aligned::new(len + 2 * DIRECT_ALIGNMENT);
    let buffer = memory.bytes();
    let start = file.read_direct(range.clone(), buffer)?;
    let start = start.unwrap_or_else(|| panic!("{range:?} was not read directly"));
    Ok(buffer[start..start + len].to_vec())
}

#[test]
fn direct_reads_give_what_the_file_has() {
    let Some(dir) = dir() else { return };
    // The last block is a short one, of 1 byte, of all but one, and a whole one.
    for len in [1, BLOCK - 1, BLOCK, 5 * BLOCK + 1, (3 << 20) + 1234] {
        let path = cold(dir.path(), "noise", len);
        let expected = bytes(len);
        let file = MappedFile::open(&path).unwrap();
        let check = |range: Range<u64>| {
            let got = direct(&file, range.clone()).unwrap();
            let expected = &expected[range.start as usize..range.end as usize];
            assert!(got == expected, "{range:?} of {len}");
        };
        for range in [0..len, 0..1, len - 1..len, 0..0, len..len] {
            check(range);
        }
        for border in (BLOCK..len).step_by(BLOCK as usize).take(3) {
            check(border - 1..border + 1);
            check(border - 1..border);
            check(border..border + 1);
            check(border..len);
        }
        let ranges = (any::<u64>(), any::<u64>()).prop_map(move |(a, b)| {
            let (a, b) = (a % (len + 1), b % (len + 1));
            a.min(b)..a.max(b)
        });
        TestRunner::new(Config::with_cases(200))
            .run(&ranges, |range| {
                check(range);
                Ok(())
            })
            .unwrap();
        assert_eq!(file.bytes_read(), file.direct_bytes());
        assert!(file.direct_bytes() >= len);
    }
}

#[test]
fn direct_reads_of_parts_stay_in_their_part() {
    let Some(dir) = dir() else { return };
    let sizes = [BLOCK * 3 + 7, 1, PART_ALIGNMENT + 5, BLOCK];
    let parts = sizes.iter().enumerate().map(|(i, &len)| {
        let path = cold(dir.path(), &format!("part-{i}"), len);
        MappedFile::open_with(&path, ReadMode::Pread).unwrap()
    });
    let file = MappedFile::join(parts.collect(), ReadMode::Map).unwrap();
    assert!(file.prefer_direct());
    let ranges: Vec<_> = file.parts().map(|(_, range)| range).collect();
    for (range, len) in ranges.into_iter().zip(sizes) {
        let expected = bytes(len);
        assert!(direct(&file, range.clone()).unwrap() == expected);
        let last = len.saturating_sub(5000) as usize;
        let end = range.start + last as u64..range.end;
        assert!(direct(&file, end).unwrap() == expected[last..]);
        let beyond = direct(&file, range.start..range.end + 1);
        assert!(
            matches!(beyond, Err(Error::OutOfRange { .. })),
            "{beyond:?}"
        );
    }
}

#[test]
fn a_direct_read_leaves_the_page_cache_as_it_was() {
    let Some(dir) = dir() else { return };
    let len = (2 << 20) + 77;
    let path = cold(dir.path(), "noise", len);
    let file = MappedFile::open(&path).unwrap();
    if file.cached_bytes(0..len).unwrap() > 0 {
        println!("skipped: the system keeps pages that it was asked to drop");
        return;
    }
    let expected = bytes(len);
    assert!(direct(&file, 0..len).unwrap() == expected);
    assert!(direct(&file, 5000..90_000).unwrap() == expected[5000..90_000]);
    assert_eq!(file.cached_bytes(0..len).unwrap(), 0);

    // The ways that decide for themselves do so too, once they were told.
    assert!(file.prefer_direct() && file.is_direct());
    let mut memory = Aligned::new(len as usize + 2 * DIRECT_ALIGNMENT);
    let start = file.read_around(777..len, memory.bytes()).unwrap();
    assert!(memory.bytes()[start..][..len as usize - 777] == expected[777..]);
    let same = file.with_range(1..len, |bytes| {
        // A reader may come back to the file.
        let inner = file.with_range(100..200_000, |inner| inner == &expected[100..200_000]);
        inner.unwrap() && bytes == &expected[1..]
    });
    assert!(same.unwrap());
    assert_eq!(file.cached_bytes(0..len).unwrap(), 0);
    let direct_bytes = file.direct_bytes();
    assert_eq!(direct_bytes, file.bytes_read());

    // What is cached is taken from there.
    assert!(fs::read(&path).unwrap() == expected);
    assert_eq!(
        file.cached_bytes(0..len).unwrap(),
        len.next_multiple_of(4096)
    );
    let start = file.read_around(777..len, memory.bytes()).unwrap();
    assert!(memory.bytes()[start..][..len as usize - 777] == expected[777..]);
    assert_eq!(file.direct_bytes(), direct_bytes);
}

/// Reads are ordinary ones as long as nobody says otherwise.
#[test]
fn nothing_is_read_directly_unasked() {
    let Some(dir) = dir() else { return };
    let path = cold(dir.path(), "noise", 1 << 20);
    let file = MappedFile::open(&path).unwrap();
    let mut memory = Aligned::new(2 << 20);
    assert_eq!(file.read_around(5..1 << 20, memory.bytes()).unwrap(), 0);
    file.with_range(0..1 << 20, |bytes| assert!(bytes == self::bytes(1 << 20)))
        .unwrap();
    assert_eq!(file.direct_bytes(), 0);
    assert!(!file.is_direct());
}

#[test]
fn a_buffer_that_no_block_goes_to_is_filled_by_way_of_another() {
    let Some(dir) = dir() else { return };
    let path = cold(dir.path(), "noise", 1 << 20);
    let expected = bytes(1 << 20);
    let file = MappedFile::open(&path).unwrap();
    assert!(file.prefer_direct());
    let mut memory = Aligned::new(200_000);
    let range = 5..100_005;
    for buffer in [0..100_000, 1..200_000] {
        let buffer = &mut memory.bytes()[buffer];
        assert_eq!(file.read_direct(range.clone(), buffer).unwrap(), None);
        assert_eq!(file.read_around(range.clone(), buffer).unwrap(), 0);
        assert!(buffer[..100_000] == expected[5..100_005]);
    }
    assert_eq!(file.direct_bytes(), 200_000);
    if file.cached_bytes(0..1 << 20).unwrap() > 0 {
        println!("the system keeps pages that it was asked to drop");
    }
}

#[test]
fn a_file_that_was_cut_or_rewritten_is_not_read_directly_either() {
    let Some(dir) = dir() else { return };
    let len = 1 << 20;
    let changes: [fn(&File); 3] = [
        |file| file.set_len(300_000).unwrap(),
        // Within a block of what is read.
        |file| file.set_len((1 << 20) - 1).unwrap(),
        |file| file.write_all_at(b"other", 600_000).unwrap(),
    ];
    for (i, change) in changes.into_iter().enumerate() {
        let path = cold(dir.path(), &format!("noise-{i}"), len);
        let file = MappedFile::open(&path).unwrap();
        assert!(direct(&file, 0..len).is_ok());
        // The times of files are no finer than the kernel's clock.
        std::thread::sleep(std::time::Duration::from_millis(20));
        let writer = OpenOptions::new().write(true).open(&path).unwrap();
        change(&writer);
        for range in [0..len, 400_000..700_000, 0..100, len - 1..len] {
            let read = direct(&file, range.clone());
            assert!(matches!(read, Err(Error::Changed { .. })), "{i}: {range:?}");
        }
    }
}

/// The descriptor is of the file that was opened, whatever has its name since.
#[test]
fn a_file_whose_name_went_to_another_is_still_read() {
    let Some(dir) = dir() else { return };
    let path = cold(dir.path(), "noise", 300_000);
    let file = MappedFile::open(&path).unwrap();
    fs::rename(&path, dir.path().join("elsewhere")).unwrap();
    fs::write(&path, vec![0; 300_000]).unwrap();
    assert!(direct(&file, 0..300_000).unwrap() == bytes(300_000));
}

#[test]
fn a_file_system_without_direct_reads_is_read_in_the_ordinary_way() {
    let shm = Path::new("/dev/shm");
    let Ok(dir) = tempfile::tempdir_in(shm) else {
        println!("skipped: no {}", shm.display());
        return;
    };
    let path = dir.path().join("noise");
    fs::write(&path, bytes(200_000)).unwrap();
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_DIRECT);
    let refuses = options.open(&path).is_err();
    println!("the file system refuses direct reads: {refuses}");
    let file = Arc::new(MappedFile::open(&path).unwrap());
    assert_eq!(file.prefer_direct(), !refuses);
    let mut memory = Aligned::new(300_000);
    let start = file.read_around(7..200_000, memory.bytes()).unwrap();
    assert!(memory.bytes()[start..][..199_993] == bytes(200_000)[7..]);
    file.with_range(0..200_000, |got| assert!(got == bytes(200_000)))
        .unwrap();
    if refuses {
        assert_eq!(file.read_direct(0..100, memory.bytes()).unwrap(), None);
        assert_eq!((file.is_direct(), file.direct_bytes()), (false, 0));
    }
}
