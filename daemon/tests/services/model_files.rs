//! Which files may be opened: only regular ones below the model directories,
//! and no word about the rest.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use rocmforged::model_files::{ModelDirs, ModelFileError};

/// Two model directories and a place outside of both.
struct Ground {
    root: tempfile::TempDir,
    dirs: ModelDirs,
}

impl Ground {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        for dir in ["a/sub", "b", "outside/sub"] {
            std::fs::create_dir_all(root.path().join(dir)).unwrap();
        }
        for file in [
            "a/one.gguf",
            "a/sub/two.gguf",
            "b/three.gguf",
            "outside/secret.gguf",
            "outside/sub/deep.gguf",
        ] {
            std::fs::write(root.path().join(file), file).unwrap();
        }
        let dirs = ModelDirs::new(&[root.path().join("a"), root.path().join("b")]).unwrap();
        Self { root, dirs }
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.path().canonicalize().unwrap().join(path)
    }

    fn open(&self, path: impl AsRef<Path>) -> Result<PathBuf, ModelFileError> {
        self.dirs
            .open(path.as_ref())
            .map(|file| file.path().to_owned())
    }

    fn assert_outside(&self, path: impl AsRef<Path>) {
        let path = path.as_ref();
        let error = self.open(path).unwrap_err();
        assert!(
            matches!(error, ModelFileError::Outside { .. }),
            "{}: {error:?}",
            path.display()
        );
        assert!(error.to_string().contains("--model-dir"), "{error}");
    }
}

#[test]
fn files_below_are_opened_under_their_real_path() {
    let ground = Ground::new();
    assert_eq!(
        ground.open(ground.path("a/one.gguf")).unwrap(),
        ground.path("a/one.gguf")
    );
    assert_eq!(
        ground.open(ground.path("a/sub/../sub/./two.gguf")).unwrap(),
        ground.path("a/sub/two.gguf")
    );
    assert_eq!(ground.open("one.gguf").unwrap(), ground.path("a/one.gguf"));
    assert_eq!(
        ground.open("three.gguf").unwrap(),
        ground.path("b/three.gguf"),
        "the second directory is tried, too"
    );
    symlink(ground.path("b/three.gguf"), ground.path("a/link.gguf")).unwrap();
    assert_eq!(
        ground.open("link.gguf").unwrap(),
        ground.path("b/three.gguf"),
        "links between model directories are fine"
    );
}

#[test]
fn a_model_directory_behind_a_link_works_under_both_names() {
    let ground = Ground::new();
    let link = ground.path("alias");
    symlink(ground.path("a"), &link).unwrap();
    let dirs = ModelDirs::new(std::slice::from_ref(&link)).unwrap();
    for path in [link.join("one.gguf"), ground.path("a/one.gguf")] {
        assert_eq!(dirs.open(&path).unwrap().path(), ground.path("a/one.gguf"));
    }
    assert!(matches!(
        dirs.open(&link.join("no.gguf")),
        Err(ModelFileError::NotFound { .. })
    ));
}

#[test]
fn links_and_dots_do_not_lead_out() {
    let ground = Ground::new();
    symlink(
        ground.path("outside/secret.gguf"),
        ground.path("a/out.gguf"),
    )
    .unwrap();
    symlink(ground.path("outside"), ground.path("a/outdir")).unwrap();
    symlink(
        "../../outside/secret.gguf",
        ground.path("a/sub/relative.gguf"),
    )
    .unwrap();
    ground.assert_outside("out.gguf");
    ground.assert_outside(ground.path("a/out.gguf"));
    ground.assert_outside("outdir/secret.gguf");
    ground.assert_outside("outdir/sub/deep.gguf");
    ground.assert_outside("sub/relative.gguf");
    ground.assert_outside("../outside/secret.gguf");
    ground.assert_outside(ground.path("a/../outside/secret.gguf"));
    ground.assert_outside(ground.path("outside/secret.gguf"));
    ground.assert_outside("/etc/passwd");
    ground.assert_outside("/proc/self/exe");
    // A sibling whose name begins like a model directory's.
    std::fs::create_dir(ground.path("aa")).unwrap();
    std::fs::write(ground.path("aa/x.gguf"), "x").unwrap();
    ground.assert_outside(ground.path("aa/x.gguf"));
}

#[test]
fn what_exists_outside_and_what_does_not_look_the_same() {
    let ground = Ground::new();
    symlink(
        ground.path("outside/secret.gguf"),
        ground.path("a/exists.gguf"),
    )
    .unwrap();
    symlink(
        ground.path("outside/nothing.gguf"),
        ground.path("a/absent.gguf"),
    )
    .unwrap();
    symlink(ground.path("outside"), ground.path("a/outdir")).unwrap();
    symlink(ground.path("nowhere"), ground.path("a/nodir")).unwrap();
    let pairs = [
        ("/etc/passwd", "/etc/no-such-file"),
        ("exists.gguf", "absent.gguf"),
        ("outdir/secret.gguf", "outdir/nothing.gguf"),
        ("outdir/secret.gguf", "nodir/secret.gguf"),
        ("outdir/sub/deep.gguf", "outdir/nosub/deep.gguf"),
        ("../outside/secret.gguf", "../outside/nothing.gguf"),
    ];
    for (there, absent) in pairs {
        let text = |path: &str| {
            ground
                .open(path)
                .unwrap_err()
                .to_string()
                .replace(path, "PATH")
        };
        assert_eq!(text(there), text(absent), "{there} and {absent}");
    }
}

#[test]
fn a_missing_file_lists_what_was_tried() {
    let ground = Ground::new();
    let ModelFileError::NotFound { tried } = ground.open("no/such.gguf").unwrap_err() else {
        panic!()
    };
    assert_eq!(
        tried,
        [ground.path("a/no/such.gguf"), ground.path("b/no/such.gguf")]
    );
    let ModelFileError::NotFound { tried } = ground.open(ground.path("a/none.gguf")).unwrap_err()
    else {
        panic!()
    };
    assert_eq!(tried, [ground.path("a/none.gguf")]);
    assert!(
        matches!(
            ground.open("one.gguf/below"),
            Err(ModelFileError::NotFound { .. })
        ),
        "a file is no directory"
    );
}

#[test]
fn what_is_no_regular_file_is_refused_without_blocking() {
    let ground = Ground::new();
    nix::unistd::mkfifo(&ground.path("a/fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let _listener = std::os::unix::net::UnixListener::bind(ground.path("a/socket")).unwrap();
    for (path, kind) in [
        ("fifo", "a FIFO"),
        ("sub", "a directory"),
        (".", "a directory"),
        ("socket", "a socket"),
    ] {
        let error = ground.open(path).unwrap_err();
        assert!(
            matches!(error, ModelFileError::NotAFile { .. }),
            "{path}: {error:?}"
        );
        assert!(error.to_string().contains(kind), "{error}");
    }
    std::fs::write(ground.path("a/empty.gguf"), "").unwrap();
    assert!(matches!(
        ground.open("empty.gguf"),
        Err(ModelFileError::Empty { .. })
    ));
}

#[test]
fn paths_that_cannot_be_are_refused() {
    let ground = Ground::new();
    for path in [String::new(), "x".repeat(5000), "a\0b".to_owned()] {
        assert!(
            matches!(ground.open(&path), Err(ModelFileError::BadPath { .. })),
            "{path:?}"
        );
    }
    assert!(
        ground.open("x".repeat(300)).is_err(),
        "a name above the file system's limit"
    );
}

#[test]
fn a_file_that_may_not_be_read_is_told_apart_from_a_missing_one() {
    if nix::unistd::geteuid().is_root() {
        println!("skipped: root may read every file");
        return;
    }
    let ground = Ground::new();
    std::fs::set_permissions(ground.path("a/one.gguf"), PermissionsExt::from_mode(0o000)).unwrap();
    let error = ground.open("one.gguf").unwrap_err();
    assert!(
        matches!(error, ModelFileError::Unreadable { .. }),
        "{error:?}"
    );
    assert!(error.to_string().contains("change its mode"), "{error}");
}

#[test]
fn without_a_model_directory_nothing_is_opened() {
    let dirs = ModelDirs::new(&[]).unwrap();
    let error = dirs.open(Path::new("/etc/passwd")).unwrap_err();
    assert!(matches!(error, ModelFileError::NoModelDir));
    assert!(error.to_string().contains("--model-dir"), "{error}");
}

#[test]
fn a_model_directory_has_to_be_one() {
    let ground = Ground::new();
    let error = ModelDirs::new(&[ground.path("a/one.gguf")]).unwrap_err();
    let error = error.to_string();
    for word in ["a/one.gguf", "--model-dir", "not a directory"] {
        assert!(error.contains(word), "'{error}' lacks '{word}'");
    }
    // One that is missing may come; until then a request is told so.
    let dirs = ModelDirs::new(&[ground.path("missing"), ground.path("a")]).unwrap();
    assert!(dirs.open(Path::new("one.gguf")).is_ok());
    let refused = dirs.open(&ground.path("missing/m.gguf")).unwrap_err();
    assert!(
        matches!(refused, ModelFileError::DirSilent { .. }),
        "{refused:?}"
    );
    assert!(refused.to_string().contains("is not there"), "{refused}");
}

#[test]
fn a_link_that_is_swapped_all_the_time_never_leads_out() {
    use std::sync::atomic::{AtomicBool, Ordering};
    const TRIES_MIN: u32 = 3000;
    const TRIES_MAX: u32 = 1_000_000;
    let ground = Ground::new();
    let (link, inside, outside) = (
        ground.path("a/swap"),
        ground.path("b"),
        ground.path("outside"),
    );
    std::fs::write(ground.path("b/secret.gguf"), "fine").unwrap();
    symlink(&inside, &link).unwrap();
    let stop = AtomicBool::new(false);
    let (mut tries, mut opened, mut refused) = (0, 0, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let next = ground.path("a/next");
            while !stop.load(Ordering::Relaxed) {
                for target in [&outside, &inside] {
                    symlink(target, &next).unwrap();
                    std::fs::rename(&next, &link).unwrap();
                }
            }
        });
        // Where the machine is busy, many are opened before the link is swapped at all.
        while tries < TRIES_MIN || (tries < TRIES_MAX && (opened == 0 || refused == 0)) {
            tries += 1;
            match ground.open("swap/secret.gguf") {
                Ok(path) => {
                    assert_eq!(path, ground.path("b/secret.gguf"));
                    opened += 1;
                }
                Err(ModelFileError::Outside { .. }) => refused += 1,
                // The link of the first directory, looked at in the moment of its replacement.
                Err(ModelFileError::NotFound { .. } | ModelFileError::Replaced { .. }) => {}
                Err(error) => panic!("{error:?}"),
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    println!("{opened} opened, {refused} refused");
    assert!(
        opened > 0 && refused > 0,
        "{opened} opened, {refused} refused: the race was not run"
    );
}
