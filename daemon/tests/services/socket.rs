//! The socket's file: what is replaced, what is refused, who may connect, and what is left behind.

use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use rocmforged::socket::{Socket, SocketError};

fn mode(path: &Path) -> u32 {
    std::fs::symlink_metadata(path)
        .unwrap()
        .permissions()
        .mode()
        & 0o7777
}

#[test]
fn a_socket_serves_its_owner_and_group_and_goes_with_its_daemon() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let socket = Socket::bind(&path).unwrap();
    assert_eq!(mode(&path), 0o660);
    assert!(UnixStream::connect(&path).is_ok());
    assert!(socket.describe().ends_with("/s"));
    drop(socket);
    assert!(!path.exists());
    let left: Vec<_> = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(
        left,
        ["s.lock"],
        "nothing is left behind but what the next start locks"
    );
}

#[test]
fn a_stale_socket_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    drop(UnixListener::bind(&path).unwrap());
    assert_eq!(
        UnixStream::connect(&path).unwrap_err().kind(),
        io::ErrorKind::ConnectionRefused
    );
    let _socket = Socket::bind(&path).unwrap();
    assert!(UnixStream::connect(&path).is_ok());
    assert_eq!(mode(&path), 0o660);
}

#[test]
fn a_live_socket_is_refused_and_its_process_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let first = Socket::bind(&path).unwrap();
    let error = Socket::bind(&path).unwrap_err();
    let SocketError::Live { pid, .. } = &error else {
        panic!("{error:?}")
    };
    assert_eq!(*pid, std::process::id() as i32);
    let message = error.to_string();
    assert!(
        message.contains(&pid.to_string()) && message.contains("--socket"),
        "{message}"
    );
    assert!(UnixStream::connect(&path).is_ok(), "the first goes on");
    drop(first);
}

#[test]
fn a_live_socket_whose_queue_is_full_is_refused_without_waiting() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let _first = Socket::bind(&path).unwrap();
    let mut waiting = Vec::new();
    // Non-blocking on our side, so that the queue's end shows as an error.
    loop {
        use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
        use std::os::fd::AsRawFd;
        let fd = socket(
            AddressFamily::Unix,
            SockType::Stream,
            SockFlag::SOCK_NONBLOCK,
            None,
        )
        .unwrap();
        match connect(fd.as_raw_fd(), &UnixAddr::new(&path).unwrap()) {
            Ok(()) => waiting.push(fd),
            Err(_) => break,
        }
        assert!(waiting.len() < 10_000, "the queue has no end");
    }
    assert!(matches!(Socket::bind(&path), Err(SocketError::Live { .. })));
}

#[test]
fn what_is_no_socket_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "precious").unwrap();
    let folder = dir.path().join("folder");
    std::fs::create_dir(&folder).unwrap();
    let link = dir.path().join("link");
    symlink(&file, &link).unwrap();
    let dangling = dir.path().join("dangling");
    symlink(dir.path().join("nothing"), &dangling).unwrap();
    for (path, kind) in [
        (&file, "a file"),
        (&folder, "a directory"),
        (&link, "a symbolic link"),
        (&dangling, "a symbolic link"),
    ] {
        let error = Socket::bind(path).unwrap_err();
        assert!(matches!(error, SocketError::Foreign { .. }), "{error:?}");
        let message = error.to_string();
        assert!(
            message.contains(kind) && message.contains("--socket"),
            "{message}"
        );
        assert!(
            path.symlink_metadata().is_ok(),
            "{} is still there",
            path.display()
        );
    }
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "precious");
}

#[test]
fn a_missing_directory_is_named_with_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let error = Socket::bind(&dir.path().join("missing/s")).unwrap_err();
    assert!(matches!(error, SocketError::Directory { .. }), "{error:?}");
    let message = error.to_string();
    assert!(
        message.contains("missing") && message.contains("create it"),
        "{message}"
    );

    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    assert!(matches!(
        Socket::bind(&file.join("s")),
        Err(SocketError::Directory { .. })
    ));
}

#[test]
fn a_file_that_took_the_sockets_place_is_not_removed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let socket = Socket::bind(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let successor = UnixListener::bind(&path).unwrap();
    drop(socket);
    assert!(path.symlink_metadata().unwrap().file_type().is_socket());
    drop(successor);
}

#[test]
fn of_many_that_start_together_one_serves() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    for _ in 0..8 {
        drop(UnixListener::bind(&path).unwrap());
        let results: Vec<_> = std::thread::scope(|scope| {
            let starts: Vec<_> = (0..6)
                .map(|_| scope.spawn(|| Socket::bind(&path)))
                .collect();
            starts
                .into_iter()
                .map(|start| start.join().unwrap())
                .collect()
        });
        let served = results.iter().filter(|result| result.is_ok()).count();
        assert_eq!(served, 1, "{results:?}");
        assert!(
            UnixStream::connect(&path).is_ok(),
            "the file is the one of who serves"
        );
        drop(results);
        assert!(!path.exists());
    }
}

#[test]
fn a_lock_that_everyone_may_take_holds_up_no_start() {
    let dir = tempfile::tempdir().unwrap();
    // As any user who can read the directory may.
    let taken = std::fs::File::open(dir.path()).unwrap();
    taken.try_lock().unwrap();
    let socket = Socket::bind(&dir.path().join("s")).unwrap();
    drop(socket);
    let lock = dir.path().join("s.lock").metadata().unwrap();
    let mode = std::os::unix::fs::PermissionsExt::mode(&lock.permissions());
    assert_eq!(mode & 0o777, 0o600, "only its owner can open the lock");
}
