//! What only the inside of the module can bring about: a kernel without `MADV_POPULATE_READ`.
#![allow(
    clippy::unwrap_used,
    reason = "a failed unwrap is a failed test, in helpers too"
)]

use std::fs::OpenOptions;
use std::sync::atomic::Ordering;

use super::{MappedFile, NO_POPULATE};
use crate::Error;

#[test]
fn without_populate_the_guard_alone_holds() {
    NO_POPULATE.store(true, Ordering::Relaxed);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    std::fs::write(&path, vec![7; 40 * 4096]).unwrap();
    let file = MappedFile::open(&path).unwrap();
    assert_eq!(
        file.with_range(0..file.len(), |b| b.iter().filter(|&&x| x == 7).count())
            .unwrap(),
        40 * 4096
    );
    OpenOptions::new()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(4096)
        .unwrap();
    let mut zeros = 0;
    let error = file
        .with_range(8192..file.len(), |b| {
            zeros = b.iter().filter(|&&x| x == 0).count()
        })
        .unwrap_err();
    assert!(matches!(&error, Error::Changed { .. }), "{error}");
    assert_eq!(zeros, 38 * 4096, "the reader ran, on zeros");
    NO_POPULATE.store(false, Ordering::Relaxed);
}
