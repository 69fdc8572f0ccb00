//! Split models: parts that belong together are one model, and others are refused with the part and
//! what to do.
#![allow(
    clippy::unwrap_used,
    reason = "a failed unwrap is a failed test, in helpers too"
)]

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rocmforge_gguf::limits::{MAX_PARTS, PART_ALIGNMENT};
use rocmforge_gguf::write::{GgufWriter, split};
use rocmforge_gguf::{Error, Gguf, MappedFile, PartName, ReadMode};

/// Tensors of each part of tiny-llama that the tests make; the last takes the rest.
const COUNTS: [usize; 2] = [10, 31];

fn fixture() -> Vec<u8> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..");
    fs::read(root.join("tests/fixtures/tiny-llama-Q4_K_M.gguf")).unwrap()
}

/// The fixture in three parts, which do not say yet that they are.
fn parts() -> (Vec<u8>, Vec<GgufWriter>, i32) {
    let whole = fixture();
    let n = Gguf::parse(&whole, whole.len() as u64)
        .unwrap()
        .tensors()
        .len();
    let counts = [COUNTS[0], COUNTS[1], n - COUNTS[0] - COUNTS[1]];
    let parts = split(&whole, &counts).unwrap();
    (whole, parts, n as i32)
}

fn name(dir: &Path, number: usize) -> PathBuf {
    dir.join(format!("tiny-{number:05}-of-00003.gguf"))
}

/// Writes the three parts with what `change` makes of them.
fn write(dir: &Path, change: impl Fn(usize, GgufWriter, i32) -> GgufWriter) -> PathBuf {
    let (_, parts, n) = parts();
    for (i, part) in parts.into_iter().enumerate() {
        change(i, part, n).write_to(&name(dir, i + 1)).unwrap();
    }
    name(dir, 1)
}

fn right(i: usize, part: GgufWriter, n: i32) -> GgufWriter {
    part.part(i as u16, 3, n)
}

fn join(dir: &Path, mode: ReadMode) -> MappedFile {
    let open = |i| MappedFile::open_with(&name(dir, i), ReadMode::Pread).unwrap();
    MappedFile::join((1..=3).map(open).collect(), mode).unwrap()
}

#[test]
fn parts_are_one_model_with_the_tensors_of_the_whole() {
    let dir = tempfile::tempdir().unwrap();
    let first = write(dir.path(), right);
    let whole = fixture();
    let unsplit = Gguf::parse(&whole, whole.len() as u64).unwrap();
    let sizes: u64 = (1..=3)
        .map(|i| fs::metadata(name(dir.path(), i)).unwrap().len())
        .sum();
    let opened = [
        MappedFile::open_model(&first).unwrap(),
        join(dir.path(), ReadMode::Pread),
    ];
    for (file, mapped) in opened.into_iter().zip([true, false]) {
        assert_eq!((file.is_mapped(), file.path()), (mapped, first.as_path()));
        assert_eq!((file.parts().len(), file.size_bytes()), (3, sizes));
        let gguf = Gguf::open(&file).unwrap();
        let header = |path: &Path| {
            let bytes = fs::read(path).unwrap();
            let part = Gguf::parse(&bytes, bytes.len() as u64).unwrap();
            part.header_bytes()
        };
        let headers: u64 = file.parts().map(|(path, _)| header(path)).sum();
        assert_eq!(file.bytes_read(), headers, "the headers alone are read");
        assert_eq!(gguf.tensors().len(), unsplit.tensors().len());
        for tensor in unsplit.tensors() {
            let here = gguf.tensor(&tensor.name).unwrap();
            assert_eq!((here.dims, here.ty), (tensor.dims, tensor.ty));
            let range = tensor.offset as usize..tensor.range().end as usize;
            let same = file
                .with_range(here.range(), |bytes| bytes == &whole[range.clone()])
                .unwrap();
            assert!(same, "{}", tensor.name);
            let mut read = vec![0; range.len()];
            file.read_into(here.offset, &mut read).unwrap();
            assert_eq!(read, whole[range.clone()]);
            file.read_each([(here.offset, &mut read[..])]).unwrap();
            assert_eq!(read, whole[range]);
        }
        for key in unsplit.keys() {
            assert!(gguf.value(key) == unsplit.value(key), "{key}");
        }
    }
}

/// What lies between parts is nobody's, and reading it would be a fault.
#[test]
fn no_range_reaches_out_of_its_part() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), right);
    for mode in [ReadMode::Map, ReadMode::Pread] {
        let file = Arc::new(join(dir.path(), mode));
        let ranges: Vec<_> = file.parts().map(|(_, range)| range).collect();
        assert_eq!(ranges[1].start, PART_ALIGNMENT);
        for range in &ranges {
            let end = range.end;
            assert_eq!(file.part_end(range.start), Some(end));
            assert_eq!(file.part_end(end - 1), Some(end));
            assert_eq!(file.part_end(end), None);
            file.with_range(range.clone(), |b| assert_eq!(&b[..4], b"GGUF"))
                .unwrap();
            for wrong in [end - 1..end + 1, end + 1..end + 2, range.start..end + 4096] {
                for error in [
                    file.with_range(wrong.clone(), |_| panic!("not to be read"))
                        .unwrap_err(),
                    file.read_into(
                        wrong.start,
                        &mut vec![0; (wrong.end - wrong.start) as usize],
                    )
                    .unwrap_err(),
                    file.mapped_range(wrong.clone()).unwrap_err(),
                ] {
                    assert!(matches!(error, Error::OutOfRange { .. }), "{error}");
                }
                assert!(!file.is_cached(wrong.clone()));
                file.will_need(wrong);
            }
            let pages = file.mapped_range(range.clone()).unwrap();
            assert_eq!(pages.is_some(), mode == ReadMode::Map);
            if let Some(pages) = pages {
                assert_eq!(pages.offset(), range.start);
                assert!((pages.len() as u64) < range.end - range.start + 65_536);
            }
        }
    }
}

#[test]
fn parts_that_do_not_belong_together_are_refused_by_name() {
    type Change = fn(usize, GgufWriter, i32) -> GgufWriter;
    let rows: [(&str, Change, usize, &[&str]); 7] = [
        (
            "swapped",
            |i, part, n| part.part([0, 2, 1][i], 3, n),
            2,
            &["split.no 2", "split.no 1", "fetch"],
        ),
        (
            "another count",
            |i, part, n| part.part(i as u16, if i == 2 { 4 } else { 3 }, n),
            3,
            &["split.count 4", "split.count 3"],
        ),
        (
            "no number",
            |i, part, n| {
                if i == 1 {
                    part
                } else {
                    part.part(i as u16, 3, n)
                }
            },
            2,
            &["no split.no", "split.no 1"],
        ),
        (
            "of another model",
            |i, part, n| part.part(i as u16, 3, n - i32::from(i == 2)),
            3,
            &["split.tensors.count"],
        ),
        (
            "a tensor less",
            |i, part, n| part.part(i as u16, 3, n + 1),
            1,
            &["split.tensors.count", "fetch them again"],
        ),
        (
            "a tensor twice",
            |i, part, n| {
                let part = part.part(i as u16, 3, n);
                match i {
                    2 => part.zeros("output_norm.weight", &[32], rocmforge_gguf::TensorType::F32),
                    _ => part,
                }
            },
            3,
            &["output_norm.weight"],
        ),
        (
            "damaged",
            |i, part, n| match i {
                1 => part.part(1, 3, n).raw_counts(Some(1 << 20), None),
                _ => part.part(i as u16, 3, n),
            },
            2,
            &["tensor"],
        ),
    ];
    for (what, change, culprit, mentions) in rows {
        let dir = tempfile::tempdir().unwrap();
        let first = write(dir.path(), change);
        let error = Gguf::open(&MappedFile::open_model(&first).unwrap()).unwrap_err();
        let text = std::iter::successors(Some(&error as &dyn std::error::Error), |e| e.source())
            .map(ToString::to_string)
            .collect::<Vec<_>>()
            .join(": ");
        println!("{what}: {text}");
        let culprit = name(dir.path(), culprit);
        assert!(text.contains(culprit.to_str().unwrap()), "{what}: {text}");
        for word in mentions {
            assert!(text.contains(word), "{what}: '{word}' is not in {text}");
        }
    }
}

#[test]
fn a_part_by_another_name_says_what_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let first = write(dir.path(), right);
    let renamed = dir.path().join("tiny.gguf");
    fs::rename(first, &renamed).unwrap();
    let error = Gguf::open(&MappedFile::open_model(&renamed).unwrap()).unwrap_err();
    let text = error.to_string();
    println!("{text}");
    for word in ["tiny.gguf", "part 1", "3 parts", "-00001-of-00003.gguf"] {
        assert!(text.contains(word), "'{word}' is not in {text}");
    }
    // A part that is not there.
    let absent = MappedFile::open_model(&name(dir.path(), 2)).unwrap_err();
    assert!(
        absent.to_string().contains("tiny-00001-of-00003.gguf"),
        "{absent}"
    );
}

#[test]
fn a_part_that_changes_is_the_one_that_is_named() {
    for (cut, mode) in [
        (true, ReadMode::Map),
        (true, ReadMode::Pread),
        (false, ReadMode::Map),
    ] {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), right);
        let file = join(dir.path(), mode);
        let second = file.parts().nth(1).unwrap().1;
        let third = file.parts().nth(2).unwrap().1;
        let changed = OpenOptions::new()
            .write(true)
            .open(name(dir.path(), 2))
            .unwrap();
        let outcome = file.with_range(second, |bytes| {
            if cut {
                changed.set_len(4096).unwrap();
            } else {
                changed.write_all_at(&[7; 64], 9000).unwrap();
                let later = std::time::SystemTime::now() + std::time::Duration::from_secs(1);
                changed.set_modified(later).unwrap();
            }
            bytes.iter().map(|&b| u64::from(b)).sum::<u64>()
        });
        for error in [outcome.unwrap_err(), file.check_unchanged().unwrap_err()] {
            assert!(
                matches!(&error, Error::Changed { path, .. } if *path == name(dir.path(), 2)),
                "{error}"
            );
        }
        let rest = file.with_range(third, |b| b.len());
        // A mapping with a page that was made up is not read again anywhere.
        assert_eq!(rest.is_ok(), !(cut && mode == ReadMode::Map));
    }
}

#[test]
fn names_of_parts() {
    let of = |name: &str| {
        PartName::of(Path::new(name))
            .map(|part| (part.stem().to_owned(), part.number(), part.count()))
    };
    assert_eq!(of("/m/a-b-00002-of-00003.gguf"), Some(("a-b".into(), 2, 3)));
    assert_eq!(of("x-00001-of-00002.GGUF"), Some(("x".into(), 1, 2)));
    for other in [
        "x.gguf",
        "x-00001-of-00001.gguf",
        "x-00000-of-00002.gguf",
        "x-00003-of-00002.gguf",
        "x-1-of-2.gguf",
        "x-00001-of-00002.bin",
        "x-00001-of-+0002.gguf",
        "00001-of-00002.gguf",
        "\u{e9}\u{e9}",
        "/",
    ] {
        assert_eq!(of(other), None, "{other}");
    }
    let part = PartName::of(Path::new("/m/a-00002-of-00003.gguf")).unwrap();
    assert_eq!(part.path(1), Path::new("/m/a-00001-of-00003.gguf"));
    assert_eq!(part.paths().unwrap().count(), 3);
    let many = format!("x-00001-of-{:05}.gguf", MAX_PARTS + 1);
    let error = MappedFile::open_model(Path::new(&many)).unwrap_err();
    assert!(matches!(error, Error::TooManyParts { .. }), "{error}");
}
