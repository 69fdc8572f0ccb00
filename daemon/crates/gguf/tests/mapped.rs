//! Files on disk: what is refused, what is read, and what happens when a file changes under a
//! reader.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rocmforge_gguf::write::{GgufWriter, MetaValue};
use rocmforge_gguf::{Error, Gguf, MappedFile, ReadMode, TensorType};

const BOTH: [ReadMode; 2] = [ReadMode::Map, ReadMode::Pread];

/// Byte `i` of every file of noise that these tests make.
fn noise(i: u64) -> u8 {
    (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8 | 1
}

fn noise_file(dir: &Path, name: &str, len: u64) -> PathBuf {
    let path = dir.join(name);
    fs::write(&path, (0..len).map(noise).collect::<Vec<_>>()).unwrap();
    path
}

fn dir() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

#[test]
fn what_is_no_readable_file_is_refused_at_once() {
    let dir = dir();
    let started = Instant::now();
    let open = |path: &Path| {
        let error = MappedFile::open(path).expect_err("to be refused");
        println!("{error}");
        assert!(
            error.to_string().contains(path.to_str().unwrap()),
            "the error names the path"
        );
        error
    };
    assert!(matches!(
        open(dir.path()),
        Error::NotRegular {
            kind: "directory",
            ..
        }
    ));
    assert!(matches!(
        open(Path::new("/dev/zero")),
        Error::NotRegular {
            kind: "character device",
            ..
        }
    ));

    let fifo = dir.path().join("fifo");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert!(matches!(
        open(&fifo),
        Error::NotRegular { kind: "FIFO", .. }
    ));
    let socket = dir.path().join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    assert!(matches!(
        open(&socket),
        Error::NotRegular { kind: "socket", .. }
    ));
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(&fifo, &link).unwrap();
    assert!(matches!(
        open(&link),
        Error::NotRegular { kind: "FIFO", .. }
    ));

    let empty = dir.path().join("empty");
    File::create(&empty).unwrap();
    assert!(matches!(open(&empty), Error::Empty { .. }));
    let absent = dir.path().join("absent");
    assert!(
        matches!(open(&absent), Error::Io { op: "open", source, .. } if source.kind() == ErrorKind::NotFound)
    );

    let secret = noise_file(dir.path(), "secret", 10);
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o000)).unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    // Root may read everything, so a thread takes another identity for files; without
    // root this changes nothing.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            nix::unistd::setfsuid(nix::unistd::Uid::from_raw(65_534));
            let error = open(&secret);
            assert!(matches!(error, Error::Io { op: "open", source, .. } if source.kind() == ErrorKind::PermissionDenied));
        });
    });
    assert!(
        started.elapsed() < Duration::from_secs(60),
        "nothing blocked"
    );
}

#[test]
fn ranges_come_back_by_either_way() {
    let dir = dir();
    let len = 3 * 4096 + 17;
    let path = noise_file(dir.path(), "noise", len);
    for mode in BOTH {
        let file = MappedFile::open_with(&path, mode).unwrap();
        assert_eq!(
            (file.len(), file.is_mapped(), file.path()),
            (len, mode == ReadMode::Map, path.as_path())
        );
        let mut read = 0;
        for range in [
            0..len,
            0..0,
            len..len,
            4095..4097,
            1..2,
            4096..8192,
            12_288..len,
        ] {
            let want: Vec<u8> = range.clone().map(noise).collect();
            assert_eq!(
                file.with_range(range.clone(), <[u8]>::to_vec).unwrap(),
                want
            );
            let mut into = vec![0; want.len()];
            file.read_into(range.start, &mut into).unwrap();
            assert_eq!(into, want);
            read += 2 * want.len() as u64;
        }
        assert_eq!(file.bytes_read(), read);
        for range in [
            0..len + 1,
            len..len + 1,
            len + 1..len + 1,
            u64::MAX - 1..u64::MAX,
        ] {
            for error in [
                file.with_range(range.clone(), |_| panic!("not to be read"))
                    .unwrap_err(),
                file.read_into(range.end - 1, &mut [0; 2]).unwrap_err(),
            ] {
                assert!(
                    matches!(error, Error::OutOfRange { len: l, .. } if l == len),
                    "{error}"
                );
            }
        }
        #[expect(clippy::reversed_empty_ranges, reason = "it is to be refused")]
        let backwards = file.with_range(2..1, |_| ());
        assert!(matches!(backwards, Err(Error::OutOfRange { .. })));
        file.will_need(0..u64::MAX);
        file.will_need(len..len);
        file.check_unchanged().unwrap();
    }
}

#[test]
fn truncation_between_reads_is_a_change() {
    for mode in BOTH {
        let dir = dir();
        let path = noise_file(dir.path(), "noise", 64 * 4096);
        let file = MappedFile::open_with(&path, mode).unwrap();
        file.with_range(0..file.len(), |bytes| bytes.len()).unwrap();
        OpenOptions::new()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(5000)
            .unwrap();
        for range in [0..file.len(), 0..10, 60 * 4096..61 * 4096] {
            let error = file.with_range(range.clone(), <[u8]>::to_vec).unwrap_err();
            assert!(
                matches!(&error, Error::Changed { was, now, .. } if was.size == 64 * 4096 && now.size == 5000),
                "{error}"
            );
            let mut into = vec![0; (range.end - range.start) as usize];
            assert!(matches!(
                file.read_into(range.start, &mut into),
                Err(Error::Changed { .. })
            ));
        }
        assert!(matches!(file.check_unchanged(), Err(Error::Changed { .. })));
        assert!(matches!(Gguf::open(&file), Err(Error::Changed { .. })));
    }
}

/// The real SIGBUS: the range is populated, then the file is cut inside of the
/// reader, then the reader reads.
#[test]
fn truncation_under_a_reader_is_an_error_of_that_read_only() {
    let dir = dir();
    let len = 64 * 4096;
    let (cut, whole) = (
        noise_file(dir.path(), "cut", len),
        noise_file(dir.path(), "whole", len),
    );
    let (cut, other) = (
        MappedFile::open(&cut).unwrap(),
        MappedFile::open(&whole).unwrap(),
    );
    let mut seen = Vec::new();
    let error = cut
        .with_range(0..len, |bytes| {
            OpenOptions::new()
                .write(true)
                .open(cut.path())
                .unwrap()
                .set_len(4096)
                .unwrap();
            seen = bytes.to_vec();
            // Another mapping is read meanwhile and is none the worse.
            assert_eq!(
                other.with_range(0..len, <[u8]>::to_vec).unwrap()[4096..],
                (4096..len).map(noise).collect::<Vec<_>>()
            );
        })
        .unwrap_err();
    assert!(
        matches!(&error, Error::Changed { now, .. } if now.size == 4096),
        "{error}"
    );
    assert!(
        seen[..4096]
            .iter()
            .zip(0..)
            .all(|(&byte, i)| byte == noise(i)),
        "what the file still has is still there"
    );
    assert!(
        seen[4096..].iter().all(|&byte| byte == 0),
        "the hole reads as zeros"
    );
    assert!(matches!(
        cut.with_range(0..1, |_| ()),
        Err(Error::Changed { .. })
    ));

    // Even if the file gets back what it was, size and time included, the mapping stays broken.
    let times =
        fs::FileTimes::new().set_modified(fs::metadata(&whole).unwrap().modified().unwrap());
    let restored = OpenOptions::new().write(true).open(cut.path()).unwrap();
    restored.set_len(len).unwrap();
    restored.set_times(times).unwrap();
    assert!(cut.with_range(0..1, |_| ()).is_err());
    other.with_range(0..len, |_| ()).unwrap();
    // And a fresh one of the same file works.
    drop(cut);
    MappedFile::open(&dir.path().join("cut"))
        .unwrap()
        .with_range(0..len, |_| ())
        .unwrap();
}

#[test]
fn threads_that_read_while_the_file_is_cut_all_hear_of_it() {
    let dir = dir();
    let len = 256 * 4096;
    let file = MappedFile::open(&noise_file(dir.path(), "cut", len)).unwrap();
    let other = MappedFile::open(&noise_file(dir.path(), "whole", len)).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..4u64)
            .map(|i| {
                let file = &file;
                scope.spawn(move || {
                    for at in (0..).map(|n| (n * 7919 + i * 4099) % (len - 8192)) {
                        match file.with_range(at..at + 8192, |b| {
                            b.iter().zip(at..).all(|(&b, i)| b == noise(i))
                        }) {
                            Ok(good) => assert!(good, "a range that counts is the file's"),
                            Err(Error::Changed { .. }) => return,
                            Err(other) => panic!("{other}"),
                        }
                    }
                })
            })
            .collect();
        let bystander = scope.spawn(|| {
            let mut rounds = 0u64;
            while !stop.load(Ordering::Relaxed) || rounds == 0 {
                assert!(
                    other
                        .with_range(0..len, |b| b.iter().zip(0..).all(|(&b, i)| b == noise(i)))
                        .unwrap()
                );
                rounds += 1;
            }
            rounds
        });
        std::thread::sleep(Duration::from_millis(20));
        OpenOptions::new()
            .write(true)
            .open(file.path())
            .unwrap()
            .set_len(0)
            .unwrap();
        readers
            .into_iter()
            .for_each(|reader| reader.join().unwrap());
        stop.store(true, Ordering::Relaxed);
        assert!(bystander.join().unwrap() > 0);
    });
}

#[test]
fn a_rewrite_in_place_is_a_change_and_an_unlink_or_rename_is_not() {
    for mode in BOTH {
        let dir = dir();
        let path = noise_file(dir.path(), "noise", 8192);
        let file = MappedFile::open_with(&path, mode).unwrap();
        let moved = dir.path().join("moved");
        fs::rename(&path, &moved).unwrap();
        noise_file(dir.path(), "noise", 10);
        assert_eq!(file.with_range(8191..8192, |b| b[0]).unwrap(), noise(8191));
        fs::remove_file(&moved).unwrap();
        assert_eq!(file.with_range(8191..8192, |b| b[0]).unwrap(), noise(8191));

        let file = MappedFile::open_with(&noise_file(dir.path(), "other", 8192), mode).unwrap();
        let rewritten = file.with_range(0..8192, |_| {
            let writer = OpenOptions::new().write(true).open(file.path()).unwrap();
            writer.write_all_at(&[7; 8192], 0).unwrap();
            // The clock of file times may tick as slowly as every few milliseconds.
            writer
                .set_modified(std::time::SystemTime::now() + Duration::from_secs(1))
                .unwrap();
        });
        assert!(matches!(rewritten, Err(Error::Changed { was, now, .. }) if was.size == now.size));
        assert!(matches!(file.check_unchanged(), Err(Error::Changed { .. })));
    }
}

/// Long enough that the clock of file times has moved on.
fn tick() {
    std::thread::sleep(Duration::from_millis(30));
}

/// Copying over a file with its times kept, as backup tools do, once served the new bytes as the
/// old model.
#[test]
fn a_rewrite_in_place_whose_time_is_put_back_is_a_change() {
    for mode in BOTH {
        let dir = dir();
        let path = noise_file(dir.path(), "noise", 8192);
        let modified = fs::metadata(&path).unwrap().modified().unwrap();
        let file = MappedFile::open_with(&path, mode).unwrap();
        tick();
        let writer = OpenOptions::new().write(true).open(&path).unwrap();
        writer.write_all_at(&[7; 100], 4000).unwrap();
        writer.set_modified(modified).unwrap();
        for error in [
            file.check_unchanged().unwrap_err(),
            file.with_range(0..10, |_| ()).unwrap_err(),
            file.read_into(0, &mut [0; 4]).unwrap_err(),
        ] {
            assert!(
                matches!(&error, Error::Changed { was, now, .. }
                    if was.mtime_ns == now.mtime_ns && was.ctime_ns < now.ctime_ns),
                "{error}"
            );
        }
        let again = MappedFile::open_with(&path, mode).unwrap();
        assert!(!again.is_same_as(&file), "a load sees that it is another");
    }
}

#[test]
fn other_permissions_links_and_names_are_no_change() {
    type Change = fn(&Path);
    let changes: [(&str, Change); 5] = [
        ("chmod", |path| {
            fs::set_permissions(path, fs::Permissions::from_mode(0o640)).unwrap();
        }),
        ("link", |path| {
            fs::hard_link(path, path.with_extension("link")).unwrap();
        }),
        ("unlink of the link", |path| {
            fs::remove_file(path.with_extension("link")).unwrap();
        }),
        ("rename", |path| {
            fs::rename(path, path.with_extension("moved")).unwrap();
            fs::rename(path.with_extension("moved"), path.with_extension("twice")).unwrap();
        }),
        ("unlink", |path| {
            fs::remove_file(path.with_extension("twice")).unwrap();
        }),
    ];
    for mode in BOTH {
        let dir = dir();
        let path = noise_file(dir.path(), "noise", 8192);
        let file = MappedFile::open_with(&path, mode).unwrap();
        let before = file.identity();
        for (what, change) in changes {
            tick();
            change(&path);
            let read = file.with_range(8191..8192, |b| b[0]);
            assert_eq!(read.unwrap(), noise(8191), "{what}");
        }
        assert!(
            file.identity().ctime_ns > before.ctime_ns,
            "the times did move"
        );
    }
}

/// A file with a header of some hundred kilobytes and 64 MiB of (sparse) tensor data.
fn model(dir: &Path) -> (PathBuf, u64) {
    let words = (0..30_000)
        .map(|i| format!("{i:x}").repeat(1 + i % 5))
        .collect::<MetaValue>();
    let mut writer = GgufWriter::new()
        .key("general.architecture", "llama")
        .key("tokenizer.ggml.tokens", words);
    for i in 0..8 {
        let tensor = rocmforge_gguf::write::RawTensor {
            name: format!("blk.{i}.weight").into(),
            dims: vec![1024, 2048],
            ty: TensorType::F32.id(),
            offset: i * (8 << 20),
        };
        writer = writer.raw_tensor(tensor);
    }
    let header = writer.header();
    let path = dir.join("model.gguf");
    let mut file = File::create(&path).unwrap();
    file.write_all(&header).unwrap();
    file.set_len((header.len() as u64).next_multiple_of(32) + (64 << 20))
        .unwrap();
    (path, header.len() as u64)
}

/// Resident bytes of the mappings of `path`, from /proc/self/smaps.
fn resident(path: &Path) -> Option<u64> {
    let smaps = fs::read_to_string("/proc/self/smaps").ok()?;
    let (mut ours, mut sum, mut found) = (false, 0, false);
    for line in smaps.lines() {
        let first = line.split_whitespace().next().unwrap_or("");
        if !first.ends_with(':') {
            ours = line.ends_with(path.to_str()?);
            found |= ours;
        } else if ours && first == "Rss:" {
            sum += line.split_whitespace().nth(1)?.parse::<u64>().ok()? * 1024;
        }
    }
    found.then_some(sum)
}

#[test]
fn opening_a_model_reads_its_header_and_no_tensor() {
    let dir = dir();
    let (path, header) = model(dir.path());
    for mode in BOTH {
        let file = MappedFile::open_with(&path, mode).unwrap();
        let gguf = Gguf::open(&file).unwrap();
        assert_eq!(gguf.header_bytes(), header);
        assert_eq!(
            file.bytes_read(),
            header,
            "not one byte behind the header is read"
        );
        if mode == ReadMode::Map {
            match resident(&path) {
                // Pages of headers once counted for gigabytes of memory of a thousand models.
                Some(bytes) => assert_eq!(bytes, 0, "the header has {header} bytes"),
                None => println!("skipped: /proc/self/smaps does not list the mapping"),
            }
        }
        assert_eq!(
            file.with_range(gguf.tensor("blk.7.weight").unwrap().range(), |b| b.len())
                .unwrap(),
            8 << 20
        );
    }
}

#[test]
fn pages_are_lent_and_a_change_is_told_afterwards() {
    let dir = dir();
    let path = noise_file(dir.path(), "pages", 40_000);
    let file = std::sync::Arc::new(MappedFile::open(&path).unwrap());
    let pages = file
        .mapped_range(9_000..20_001)
        .unwrap()
        .expect("a mapping");
    let page = pages.as_ptr() as usize;
    assert!(page.is_power_of_two() || page.is_multiple_of(4096));
    assert!(pages.offset() <= 9_000 && pages.offset().is_multiple_of(4096));
    assert!(pages.offset() + pages.len() as u64 >= 20_001 && pages.len().is_multiple_of(4096));
    pages.check().unwrap();
    assert!(matches!(
        file.mapped_range(39_999..40_001),
        Err(Error::OutOfRange { .. })
    ));
    // The pages stay mapped without the file's other owners.
    drop(file);
    OpenOptions::new()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(1_000)
        .unwrap();
    assert!(matches!(pages.check(), Err(Error::Changed { .. })));

    let file = std::sync::Arc::new(MappedFile::open_with(&path, ReadMode::Pread).unwrap());
    assert!(file.mapped_range(0..10).unwrap().is_none());
}
