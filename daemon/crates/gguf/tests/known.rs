//! Headers that have large arrays in common with one that was read before.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use rocmforge_gguf::write::{GgufWriter, MetaValue};
use rocmforge_gguf::{Error, Gguf, MappedFile, TensorType};

const TOKENS: usize = 20_000;
const KEYS: [&str; 4] = [
    "tokenizer.tokens",
    "tokenizer.scores",
    "tokenizer.types",
    "tokenizer.merges",
];

/// Strings that no other vocabulary of this process has.
#[derive(Clone)]
struct Vocabulary {
    tokens: Vec<Vec<u8>>,
    scores: Vec<f32>,
    types: Vec<i32>,
    merges: Vec<Vec<u8>>,
}

impl Vocabulary {
    fn new() -> Self {
        static SALT: AtomicU32 = AtomicU32::new(0);
        let salt = SALT.fetch_add(1, Ordering::Relaxed);
        let word = |i: usize| format!("{salt}-{:x}", i.wrapping_mul(0x9e37_79b9)).into_bytes();
        Self {
            tokens: (0..TOKENS).map(word).collect(),
            scores: (0..TOKENS).map(|i| i as f32 + salt as f32).collect(),
            types: (0..TOKENS as i32).map(|i| i % 6 + salt as i32).collect(),
            merges: (0..2 * TOKENS).map(|i| word(i * 3)).collect(),
        }
    }

    /// A header with it, behind a name that moves all of it.
    fn header(&self, name: &str) -> GgufWriter {
        let writer = GgufWriter::new()
            .key("general.name", name)
            .key(
                "tokenizer.tokens",
                self.tokens.iter().collect::<MetaValue>(),
            )
            .key("tokenizer.scores", self.scores.as_slice())
            .key("tokenizer.types", self.types.as_slice())
            .key(
                "tokenizer.merges",
                self.merges.iter().collect::<MetaValue>(),
            )
            .key("v.last", 7u32);
        let rows = name.len() as u64;
        writer.zeros("t", &[32, rows], TensorType::Q8_0)
    }
}

fn write(dir: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = dir.join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

fn recognised(path: &Path) -> Result<(Gguf, MappedFile), Error> {
    let file = MappedFile::open(path)?;
    Ok((Gguf::open_recognising(&file)?, file))
}

/// All that is equal whether or not a header is whole.
fn assert_same(found: &Gguf, whole: &Gguf) {
    assert_eq!(found.header_bytes(), whole.header_bytes());
    assert_eq!(found.data_start(), whole.data_start());
    assert_eq!(found.tensors(), whole.tensors());
    assert!(found.keys().eq(whole.keys()));
    for key in whole.keys() {
        let (of_found, of_whole) = (found.digest_of_value(key), whole.digest_of_value(key));
        assert_eq!(of_found, of_whole, "{key}");
        if let Some(value) = found.value(key) {
            assert_eq!(Some(value), whole.value(key), "{key}");
        }
    }
}

fn strings(gguf: &Gguf, key: &str) -> Vec<Vec<u8>> {
    let strings = gguf.strings(key).unwrap().unwrap();
    strings.iter().map(<[u8]>::to_vec).collect()
}

#[test]
fn a_header_that_was_read_before_is_not_kept_again() {
    let (dir, words) = (tempfile::tempdir().unwrap(), Vocabulary::new());
    let paths = ["first", "the second", "one more that is third"]
        .map(|name| write(dir.path(), name, &words.header(name).to_bytes()));
    let (first, _) = recognised(&paths[0]).unwrap();
    assert!(first.is_whole(), "nobody has read it before");
    assert_eq!(first.kept_bytes() as u64, first.header_bytes());
    assert_eq!(strings(&first, "tokenizer.merges"), words.merges);
    for path in &paths[1..] {
        let (found, file) = recognised(path).unwrap();
        let whole = Gguf::open(&MappedFile::open(path).unwrap()).unwrap();
        assert!(whole.is_whole() && !found.is_whole());
        assert!(found.kept_bytes() < 1024, "{} bytes", found.kept_bytes());
        // Each byte once, and the first piece of each array twice.
        let most = found.header_bytes() + (KEYS.len() as u64) * (64 << 10) + 4096;
        assert!(file.bytes_read() <= most, "{} bytes", file.bytes_read());
        assert_same(&found, &whole);
        assert_eq!(found.u32("v.last").unwrap(), Some(7));
        assert_eq!(strings(&whole, "tokenizer.tokens"), words.tokens);
        for key in KEYS {
            assert_eq!(found.value(key), None, "{key}");
            let not_kept = [
                found.strings(key).map(drop),
                found.f32s(key).map(drop),
                found.i32s(key).map(drop),
                found.u32s(key).map(drop),
                found.bytes(key).map(drop),
                found.str(key).map(drop),
                found.u64(key).map(drop),
            ];
            let is_it = |found: &Result<(), Error>| matches!(found, Err(Error::NotKept { .. }));
            assert!(not_kept.iter().all(is_it), "{key}: {not_kept:?}");
        }
        // Files that are opened whole stay so.
        let again = Gguf::open(&MappedFile::open(path).unwrap()).unwrap();
        assert!(again.is_whole());
    }
}

#[test]
fn what_differs_anywhere_is_read() {
    let (dir, words) = (tempfile::tempdir().unwrap(), Vocabulary::new());
    let bytes = words.header("model").to_bytes();
    let path = write(dir.path(), "model", &bytes);
    recognised(&path).unwrap();
    assert!(!recognised(&path).unwrap().0.is_whole());
    let changed = |how: &dyn Fn(&mut Vocabulary)| {
        let mut other = words.clone();
        how(&mut other);
        other.header("model").to_bytes()
    };
    let last = 2 * TOKENS - 1;
    let cases: [(&str, Vec<u8>); 8] = [
        ("tokenizer.tokens", changed(&|w| w.tokens[0][0] ^= 1)),
        (
            "tokenizer.tokens",
            changed(&|w| w.tokens[TOKENS - 1][0] ^= 1),
        ),
        (
            "tokenizer.tokens",
            changed(&|w| w.tokens[TOKENS / 2].push(b'a')),
        ),
        (
            "tokenizer.tokens",
            // Of the same length as a whole.
            changed(&|w| {
                let moved = w.tokens[10_001].pop().unwrap();
                w.tokens[10_000].push(moved);
            }),
        ),
        (
            "tokenizer.scores",
            changed(&|w| w.scores[TOKENS - 1] += 0.5),
        ),
        ("tokenizer.types", changed(&|w| w.types[11_111] ^= 1)),
        (
            "tokenizer.merges",
            changed(&|w| *w.merges[last].last_mut().unwrap() ^= 1),
        ),
        (
            "tokenizer.merges",
            changed(&|w| {
                w.merges.pop();
            }),
        ),
    ];
    for (n, (key, bytes)) in cases.iter().enumerate() {
        let path = write(dir.path(), &n.to_string(), bytes);
        let whole = Gguf::open(&MappedFile::open(&path).unwrap()).unwrap();
        // The first time it is new, the second time known itself.
        for is_new in [true, false] {
            let (found, _) = recognised(&path).unwrap();
            assert_same(&found, &whole);
            for other in KEYS {
                let is_kept = found.value(other).is_some();
                assert_eq!(is_kept, is_new && other == *key, "{other} of {n}");
            }
        }
        let original = Gguf::open(&MappedFile::open(&dir.path().join("model")).unwrap()).unwrap();
        assert_ne!(whole.digest_of_value(key), original.digest_of_value(key));
    }
}

#[test]
fn damaged_headers_fail_as_if_nothing_was_known() {
    let (dir, words) = (tempfile::tempdir().unwrap(), Vocabulary::new());
    let writer = words.header("model");
    let (whole, header) = (writer.to_bytes(), writer.header().len());
    recognised(&write(dir.path(), "model", &whole)).unwrap();
    let find = |text: &[u8]| {
        let mut windows = whole.windows(text.len());
        windows.position(|window| window == text).unwrap()
    };
    let in_merges = find(b"tokenizer.merges") + 100_000;
    // Cut in an array, behind all of them, and before the end of the data.
    let mut cases: Vec<Vec<u8>> = [
        find(b"tokenizer.scores") - 9,
        in_merges,
        header - 5,
        header + 3,
    ]
    .map(|len| whole[..len].to_vec())
    .into();
    // A type that there is none of, behind what is passed over.
    let mut odd = whole.clone();
    odd[find(b"v.last") + 6] = 99;
    cases.push(odd);
    for (n, bytes) in cases.iter().enumerate() {
        let path = write(dir.path(), &n.to_string(), bytes);
        let found = recognised(&path).map(drop).unwrap_err().to_string();
        let plain = Gguf::open(&MappedFile::open(&path).unwrap());
        assert_eq!(found, plain.map(drop).unwrap_err().to_string(), "case {n}");
    }
}

/// What was passed over is compared like all of a header when only the ctime has moved.
#[test]
fn a_rewrite_of_what_was_passed_over_is_noticed() {
    use std::os::unix::fs::FileExt;
    let (dir, words) = (tempfile::tempdir().unwrap(), Vocabulary::new());
    let bytes = words.header("model").to_bytes();
    let path = write(dir.path(), "model", &bytes);
    recognised(&path).unwrap();
    for at in [100, bytes.len() / 3, bytes.len() / 2, bytes.len() - 20_000] {
        let (found, file) = recognised(&path).unwrap();
        assert!(!found.is_whole());
        file.check_unchanged().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(30));
        let modified = std::fs::metadata(&path).unwrap().modified().unwrap();
        let writer = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        writer.write_all_at(&[bytes[at] ^ 1], at as u64).unwrap();
        writer.set_modified(modified).unwrap();
        let looked = file.check_unchanged();
        assert!(
            matches!(looked, Err(Error::Changed { .. })),
            "{at}: {looked:?}"
        );
        writer.write_all_at(&[bytes[at]], at as u64).unwrap();
        drop(writer);
    }
}

#[test]
fn an_array_that_is_no_vocabulary_is_always_kept() {
    let dir = tempfile::tempdir().unwrap();
    let layers: Vec<i32> = (0..TOKENS as i32).collect();
    let header = GgufWriter::new().key("llama.attention.head_count_kv", layers.as_slice());
    let path = write(dir.path(), "layers", &header.to_bytes());
    for _ in 0..2 {
        let (found, _) = recognised(&path).unwrap();
        assert!(found.is_whole());
        assert!(found.value("llama.attention.head_count_kv").is_some());
    }
}
