//! A full table of the guard. Alone in its process, because it takes every place there is.

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use rocmforge_gguf::{MappedFile, limits::MAX_MAPPINGS};

#[test]
fn more_files_than_the_guard_can_watch_are_read_with_pread() {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    if hard < MAX_MAPPINGS as u64 + 32 {
        println!("skipped: only {hard} files may be open here");
        return;
    }
    setrlimit(Resource::RLIMIT_NOFILE, hard.min(4096), hard).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("noise");
    std::fs::write(&path, vec![7; 5000]).unwrap();
    let mut files: Vec<_> = (0..MAX_MAPPINGS + 2)
        .map(|_| MappedFile::open(&path).unwrap())
        .collect();
    assert_eq!(
        files.iter().filter(|file| file.is_mapped()).count(),
        MAX_MAPPINGS
    );
    let last = files.pop().unwrap();
    assert!(!last.is_mapped());
    assert_eq!(last.with_range(4999..5000, |b| b[0]).unwrap(), 7);
    files.pop();
    assert!(
        !MappedFile::open(&path).unwrap().is_mapped(),
        "that one had no place to give back"
    );
    files.remove(500);
    assert!(
        MappedFile::open(&path).unwrap().is_mapped(),
        "a place given back is taken again"
    );
}
