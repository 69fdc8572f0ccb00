//! Split models: parts that belong together are one model, and others are refused with the part and
//! what to do.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rocmforge_gguf::limits::{MAX_PARTS, PART_ALIGNMENT};
use rocmforge_gguf::write::{GgufWriter, MetaValue, split};
use rocmforge_gguf::{Error, Gguf, Glance, MappedFile, OtherUse, PartName, ReadMode, TensorType};

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

/// As llama.cpp, which goes by `split.count` alone: a model that was merged or quantized anew under
/// the name of its first part.
#[test]
fn a_whole_file_with_the_name_of_a_part_is_opened_as_it_is() {
    for number in 1..=3 {
        let dir = tempfile::tempdir().unwrap();
        // What was left of the parts before does not count.
        write(dir.path(), right);
        fs::write(name(dir.path(), number), fixture()).unwrap();
        let file = MappedFile::open_model(&name(dir.path(), number)).unwrap();
        assert_eq!((file.parts().len(), file.is_mapped()), (1, true));
        assert_eq!(file.split_count().unwrap(), 1);
        Gguf::open(&file).unwrap();
    }
}

fn glance(writer: &GgufWriter, is_part_named: bool) -> Option<Glance> {
    let bytes = writer.to_bytes();
    let glance = Glance::read(&mut bytes.as_slice(), bytes.len() as u64, is_part_named).unwrap();
    if let Ok(gguf) = Gguf::parse(&bytes, bytes.len() as u64) {
        // What the whole header says is what its beginning does.
        assert_eq!(glance, Some(Glance::of(&gguf, is_part_named)));
    }
    glance
}

#[test]
fn a_look_at_the_first_keys_tells_what_a_file_is_for() {
    let arch = |name: &str| GgufWriter::new().key("general.architecture", name);
    let data = |writer: GgufWriter| writer.zeros("t", &[4], TensorType::F32);
    let kind = |name: &str| data(arch("llama").key("general.type", name));
    let cases = [
        (data(arch("llama")), None),
        (kind("model"), None),
        (kind("adapter"), Some(OtherUse::Adapter)),
        (kind("mmproj"), Some(OtherUse::Projector)),
        (kind("clip-vision"), Some(OtherUse::Projector)),
        (data(arch("clip")), Some(OtherUse::Projector)),
        (kind("imatrix"), Some(OtherUse::Imatrix)),
        (data(arch("controlvector")), Some(OtherUse::ControlVector)),
        (
            data(arch("llama").key("adapter.type", "lora")),
            Some(OtherUse::Adapter),
        ),
        (
            data(GgufWriter::new().key("imatrix.chunk_count", 3u32)),
            Some(OtherUse::Imatrix),
        ),
        (arch("llama"), Some(OtherUse::Vocabulary)),
    ];
    for (i, (writer, other_use)) in cases.iter().enumerate() {
        assert_eq!(
            glance(writer, false).unwrap().other_use,
            *other_use,
            "case {i}"
        );
    }
    // The first of several parts may have no tensors.
    let first = arch("llama").part(0, 3, 9);
    let seen = glance(&first, true).unwrap();
    assert_eq!((seen.other_use, seen.split_count), (None, 3));
    for (bytes, other_use) in [
        (
            "version https://git-lfs.github.com/spec/v1",
            Some(OtherUse::LfsPointer),
        ),
        (
            "\n<!DOCTYPE html><html lang=\"en\"><title>404",
            Some(OtherUse::WebPage),
        ),
        ("<HTML><body>Log in, please.", Some(OtherUse::WebPage)),
        ("{\"error\": \"Invalid username or password.\"}", None),
    ] {
        let seen = Glance::read(&mut bytes.as_bytes(), bytes.len() as u64, false).unwrap();
        assert_eq!(seen.and_then(|seen| seen.other_use), other_use, "{bytes}");
    }
}

/// A vocabulary of megabytes lies behind the keys that say what the file is.
#[test]
fn a_look_reads_a_part_of_a_long_header_and_all_of_a_parts() {
    let words: MetaValue = (0..200_000).map(|i| format!("word {i}")).collect();
    let long = GgufWriter::new()
        .key("general.architecture", "llama")
        .key("tokenizer.ggml.tokens", words.clone())
        .part(0, 2, 1)
        .zeros("t", &[4], TensorType::F32);
    let bytes = long.to_bytes();
    for is_part_named in [false, true] {
        let mut rest = bytes.as_slice();
        let seen = Glance::read(&mut rest, bytes.len() as u64, is_part_named)
            .unwrap()
            .unwrap();
        assert_eq!(seen.architecture.as_deref(), Some("llama"));
        assert_eq!(seen.split_count, if is_part_named { 2 } else { 1 });
        let read = bytes.len() - rest.len();
        assert!(is_part_named || read == 64 << 10, "{read} bytes");
    }
    let late = GgufWriter::new()
        .key("tokenizer.ggml.tokens", words)
        .key("general.architecture", "clip")
        .zeros("t", &[4], TensorType::F32);
    let bytes = late.to_bytes();
    let mut rest = bytes.as_slice();
    let seen = Glance::read(&mut rest, bytes.len() as u64, false)
        .unwrap()
        .unwrap();
    assert_eq!(
        (seen.architecture, bytes.len() - rest.len()),
        (None, 1 << 20)
    );
}

/// As llama.cpp: nobody asks for such a key, and a bool is true unless it is 0.
#[test]
fn keys_that_are_no_text_and_odd_bools_are_tolerated_with_a_remark() {
    let bools = [
        &7u32.to_le_bytes(),
        3u64.to_le_bytes().as_slice(),
        &[0, 1, 9],
    ]
    .concat();
    let writer = GgufWriter::new()
        .raw_key(b"\xff\xfe", 0, &[7])
        .raw_key(b"\xff\xfd", 0, &[8])
        .raw_key(b"", 0, &[9])
        .raw_key(b"odd", 7, &[2])
        .raw_key(b"some", 9, &bools)
        .key("general.name", MetaValue::String(b"a\xe9".to_vec()))
        .key("last", 5u8);
    let bytes = writer.to_bytes();
    let gguf = Gguf::parse(&bytes, bytes.len() as u64).unwrap();
    assert_eq!(gguf.bool("odd").unwrap(), Some(true));
    assert_eq!(gguf.u64("last").unwrap(), Some(5));
    assert_eq!(gguf.str_lossy("general.name").unwrap(), "a\u{fffd}");
    assert!(gguf.value("").is_none() && gguf.value("\u{fffd}\u{fffd}").is_none());
    let remarks = gguf.tolerated();
    let words = [
        "key 0",
        "key 1",
        "key 2",
        "\"odd\" has a bool of 2",
        "\"some\" has a bool of 9",
        "\"general.name\" at byte",
    ];
    assert_eq!(remarks.len(), words.len(), "{remarks:?}");
    for (remark, word) in remarks.iter().zip(words) {
        assert!(remark.contains(word), "{remark}");
    }
}
