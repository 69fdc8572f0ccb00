//! What only the inside of the module can bring about: a kernel without `MADV_POPULATE_READ`, and
//! signals that are not the guard's. The latter end a process, so they are tested in children.
#![allow(
    clippy::unwrap_used,
    reason = "a failed unwrap is a failed test, in helpers too"
)]

use std::fs::OpenOptions;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::Ordering;

use super::MappedFile;
use super::pages::{NO_POPULATE, tells_cached};
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

/// Once, of a file that another user owns, all pages would have counted as cached,
/// and none been read directly.
#[test]
fn what_the_system_says_of_others_files_is_not_believed() {
    let named = tempfile::NamedTempFile::new().unwrap();
    named.as_file().set_len(1 << 20).unwrap();
    let file = MappedFile::open(named.path()).unwrap();
    let tells = |file: &MappedFile| tells_cached(&file.parts[0].file, file.len());
    assert!(tells(&file) && !file.is_cached(0..1 << 20));
    if !nix::unistd::geteuid().is_root() {
        println!("skipped in part: not root, who can become another user");
        return;
    }
    let told = std::thread::spawn(move || {
        // SAFETY: no memory is touched. The call by its number, unlike the library's,
        // is about this thread alone.
        let done = unsafe { libc::syscall(libc::SYS_setresuid, -1, 65_534, -1) };
        assert_eq!(done, 0);
        (file.is_cached(0..1 << 20), tells(&file))
    });
    assert_eq!(told.join().unwrap(), (true, false));
}

fn eights(dir: &Path, name: &str) -> PathBuf {
    let path = dir.join(name);
    std::fs::write(&path, [8; 8192]).unwrap();
    path
}

/// Run as a child process by the tests below, which set the variable; does nothing otherwise.
#[test]
fn child() {
    let Some(role) = std::env::var_os("ROCMFORGE_GGUF_CHILD") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    if role == "chain" {
        // A handler of someone else, installed first: it is to get what is not ours.
        extern "C" fn theirs(_: libc::c_int) {
            // SAFETY: _exit is async-signal-safe.
            unsafe { libc::_exit(42) };
        }
        let handler: extern "C" fn(libc::c_int) = theirs;
        // SAFETY: the handler calls only what is async-signal-safe.
        unsafe { libc::signal(libc::SIGBUS, handler as libc::sighandler_t) };
    }
    let ours = MappedFile::open(&eights(dir.path(), "ours")).unwrap();
    assert!(ours.is_mapped());
    if role == "sent" {
        nix::sys::signal::raise(nix::sys::signal::Signal::SIGBUS).unwrap();
    } else {
        // A mapping that the guard knows nothing of.
        let path = eights(dir.path(), "foreign");
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(&path)
            .unwrap();
        // SAFETY: a fresh shared mapping; the bytes are only read, and that the
        // read fails is what is tested.
        let map = unsafe { memmap2::Mmap::map(&file) }.unwrap();
        file.set_len(0).unwrap();
        println!("{}", std::hint::black_box(&map)[4096]);
    }
    println!("still alive");
    std::process::exit(0);
}

fn run_child(role: &str) -> std::process::ExitStatus {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "mapped::tests::child", "--nocapture"])
        .env("ROCMFORGE_GGUF_CHILD", role);
    let output = command.output().unwrap();
    assert!(
        !String::from_utf8_lossy(&output.stdout).contains("still alive"),
        "{role}: the signal was swallowed"
    );
    output.status
}

#[test]
fn a_fault_that_is_not_ours_goes_to_the_handler_before_us() {
    assert_eq!(run_child("chain").code(), Some(42));
}

#[test]
fn a_fault_that_is_nobodys_still_ends_the_process() {
    assert_eq!(run_child("foreign").signal(), Some(libc::SIGBUS));
    assert_eq!(run_child("sent").signal(), Some(libc::SIGBUS));
}

/// What another machine has is compared by a thread, and comes out as of a local disk.
#[test]
fn the_content_of_a_far_file_is_compared() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    std::fs::write(&path, vec![7; 40 * 4096]).unwrap();
    let modified = path.metadata().unwrap().modified().unwrap();
    let mut file = MappedFile::open(&path).unwrap();
    file.parts[0].is_far = true;
    file.with_range(0..file.len(), |_| ()).unwrap();
    let writer = OpenOptions::new().write(true).open(&path).unwrap();
    for (byte, fails) in [(7, false), (8, true)] {
        // The clock of file times may tick as slowly as every few milliseconds.
        std::thread::sleep(std::time::Duration::from_millis(30));
        let before = file.identity();
        std::os::unix::fs::FileExt::write_all_at(&writer, &[byte], 100_000).unwrap();
        writer.set_modified(modified).unwrap();
        assert_eq!(file.check_unchanged().is_err(), fails);
        assert_eq!(file.has_changed(), fails);
        assert_eq!(
            file.identity() == before,
            fails,
            "a ctime is accepted or not"
        );
    }
}
