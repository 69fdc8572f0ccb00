//! Files that are no sound model: each is refused with its code and a message that
//! helps, and the daemon goes on.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use nix::sys::stat::Mode;
use nix::unistd::{Uid, mkfifo};
use rocmforge_client::{Client, Code};
use rocmforge_tests::daemon::{Daemon, Options};
use rocmforge_tests::fixtures::{self, TINY_LLAMA, TINY_QWEN3};
use rocmforge_tests::forge::{ENTRY_COUNT_AT, Forge, TENSOR_COUNT_AT, VERSION_AT};
use rocmforge_tests::session::{
    assert_works, connect, continuation, generate, greedy, refused, try_load,
};
use rocmforge_tests::skip;
use tempfile::TempDir;

/// The f16 that is not a number.
const F16_NAN: [u8; 2] = [0x00, 0x7e];

/// GGUF's metadata type of a 64-bit unsigned number, and a tensor type that is
/// listed but not supported.
const UINT64: u32 = 10;
const I32: u32 = 26;

/// What is no sound GGUF, what may not be opened, a relative path (refused, or looked for below the
/// model directories), and what may be either damaged or of another time.
const MALFORMED: &[Code] = &[Code::InvalidArgument];
/// See [`MALFORMED`].
const DENIED: &[Code] = &[Code::PermissionDenied];
/// See [`MALFORMED`].
const RELATIVE: &[Code] = &[Code::InvalidArgument, Code::NotFound];
/// See [`MALFORMED`].
const MALFORMED_OR_UNKNOWN: &[Code] = &[Code::InvalidArgument, Code::Unimplemented];

/// The codes of a case by its name: a version or a type that nobody knows may be
/// damage, or of another time.
fn codes(what: &str) -> &'static [Code] {
    if what.starts_with("version") || what == "an unknown tensor type" {
        MALFORMED_OR_UNKNOWN
    } else {
        MALFORMED
    }
}

/// A daemon that serves a temporary directory beside the fixtures.
struct Ground {
    daemon: Daemon,
    client: Client,
    models: TempDir,
}

impl Ground {
    async fn new() -> Ground {
        let models = tempfile::tempdir().expect("a temporary directory");
        let daemon = Daemon::start(&Options::default().model_dir(models.path()));
        let client = connect(&daemon).await;
        Ground {
            daemon,
            client,
            models,
        }
    }

    /// Tries to load a file of these bytes; the refusal must have the code, and its
    /// message one of the words.
    async fn refuses(&self, what: &str, bytes: &[u8], codes: &[Code], words: &[&str]) {
        let path = self.models.path().join("bad.gguf");
        fs::write(&path, bytes).expect("a file");
        self.refuses_path(what, &path, codes, words).await;
    }

    async fn refuses_path(&self, what: &str, path: &Path, codes: &[Code], words: &[&str]) {
        let error = refused(what, try_load(&self.client, path, "bad").await);
        assert!(
            codes.contains(&error.code),
            "{what}: {:?} {}",
            error.code,
            error.message
        );
        let message = error.message.to_lowercase();
        let said = words.is_empty()
            || words
                .iter()
                .any(|word| message.contains(&word.to_lowercase()));
        assert!(said, "{what}: none of {words:?} in {:?}", error.message);
    }

    /// Nothing of what was refused is left, and good requests are answered.
    async fn finish(self) {
        let listed = self.client.list().await.expect("List never fails");
        assert!(
            listed.iter().all(|model| model.name != "bad"),
            "a refused model is listed: {listed:?}"
        );
        assert_works(&self.client).await;
        self.daemon.stop();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_cut_anywhere_is_refused() {
    let ground = Ground::new().await;
    ground
        .refuses(
            "an empty file",
            &[],
            MALFORMED,
            &["empty", "0 bytes", "short", "GGUF"],
        )
        .await;
    let sound = Forge::open(&fixtures::path(TINY_LLAMA));
    for (part, at) in sound.cuts() {
        let what = format!("cut in {part}, after {at} bytes");
        ground
            .refuses(&what, &sound.bytes[..at], MALFORMED, &[])
            .await;
    }
    ground.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_header_is_refused() {
    let ground = Ground::new().await;
    let sound = Forge::open(&fixtures::path(TINY_LLAMA));
    let spoiled = |spoil: &dyn Fn(&mut Forge)| {
        let mut forge = sound.clone();
        spoil(&mut forge);
        forge.bytes
    };
    let first = sound.entries[0].clone();
    let tokens = sound.entry("tokenizer.ggml.tokens").clone();
    let cases: Vec<(&str, Vec<u8>, &[&str])> = vec![
        (
            "wrong magic",
            spoiled(&|f| _ = f.put(0, b"GGML")),
            &["magic", "GGUF"],
        ),
        (
            "version 1",
            spoiled(&|f| _ = f.put_u32(VERSION_AT, 1)),
            &["version"],
        ),
        (
            "version 77",
            spoiled(&|f| _ = f.put_u32(VERSION_AT, 77)),
            &["version"],
        ),
        (
            "a huge tensor count",
            spoiled(&|f| _ = f.put_u64(TENSOR_COUNT_AT, u64::MAX)),
            &["tensor"],
        ),
        (
            "a large tensor count",
            spoiled(&|f| _ = f.put_u64(TENSOR_COUNT_AT, 1 << 32)),
            &["tensor"],
        ),
        (
            "a huge metadata count",
            spoiled(&|f| _ = f.put_u64(ENTRY_COUNT_AT, u64::MAX)),
            &[],
        ),
        (
            "a huge key length",
            spoiled(&|f| _ = f.put_u64(first.at, u64::MAX)),
            &[],
        ),
        (
            "a huge string length",
            spoiled(&|f| _ = f.put_u64(first.value.start, u64::MAX - 7)),
            &[],
        ),
        (
            "a huge array length",
            spoiled(&|f| _ = f.put_u64(tokens.value.start + 4, u64::MAX / 2)),
            &[],
        ),
        (
            "an unknown value type",
            spoiled(&|f| _ = f.put_u32(first.type_at, 99)),
            &["type"],
        ),
        (
            "an array of arrays of nothing",
            spoiled(&|f| _ = f.put_u32(tokens.value.start, 9)),
            &[],
        ),
    ];
    for (what, bytes, words) in cases {
        ground.refuses(what, &bytes, codes(what), words).await;
    }
    ground.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_tensors_are_refused() {
    let ground = Ground::new().await;
    let sound = Forge::open(&fixtures::path(TINY_LLAMA));
    let (q, k) = (
        sound.row("blk.0.attn_q.weight").clone(),
        sound.row("blk.1.attn_k.weight").clone(),
    );
    let norm = sound.row("blk.2.attn_norm.weight").clone();
    let spoiled = |spoil: &dyn Fn(&mut Forge)| {
        let mut forge = sound.clone();
        spoil(&mut forge);
        forge.bytes
    };
    let cases: Vec<(&str, Vec<u8>, &[&str])> = vec![
        (
            "overlapping tensors",
            spoiled(&|f| _ = f.put_u64(k.offset_at, q.offset)),
            &["overlap"],
        ),
        (
            "an unaligned tensor",
            spoiled(&|f| _ = f.put_u64(q.offset_at, q.offset + 1)),
            &["align", "multiple"],
        ),
        (
            "a tensor past the end",
            spoiled(&|f| _ = f.put_u64(q.offset_at, 1 << 40)),
            &["attn_q", "end", "file"],
        ),
        (
            "an offset that overflows",
            spoiled(&|f| _ = f.put_u64(q.offset_at, u64::MAX - 31)),
            &[],
        ),
        (
            "a dimension of 0",
            spoiled(&|f| _ = f.put_u64(q.dims_at, 0)),
            &["blk.0.attn_q.weight"],
        ),
        (
            "dimensions that overflow",
            spoiled(&|f| _ = f.put_u64(q.dims_at + 8, 1 << 62)),
            &["blk.0.attn_q.weight"],
        ),
        (
            "a row that is no whole blocks",
            spoiled(&|f| _ = f.put_u64(q.dims_at, 255)),
            &["blk.0.attn_q.weight"],
        ),
        (
            "five dimensions",
            spoiled(&|f| _ = f.put_u32(q.n_dims_at, 5)),
            &["dimension"],
        ),
        (
            "a shape not the architecture's",
            spoiled(&|f| _ = f.put_u64(q.dims_at + 8, 128)),
            &["blk.0.attn_q.weight"],
        ),
        (
            "a norm of another width",
            spoiled(&|f| _ = f.put_u64(norm.dims_at, 128)),
            &["blk.2.attn_norm.weight"],
        ),
        (
            "a missing tensor",
            spoiled(&|f| _ = f.rename(q.at, "blk.0.attn_x.weight")),
            &["blk.0.attn_q.weight"],
        ),
        (
            "two tensors of one name",
            spoiled(&|f| _ = f.rename(q.at, "blk.1.attn_q.weight")),
            &["blk.1.attn_q.weight"],
        ),
        (
            "an unknown tensor type",
            spoiled(&|f| _ = f.put_u32(q.type_at, 9999)),
            &["9999", "type"],
        ),
    ];
    for (what, bytes, words) in cases {
        ground.refuses(what, &bytes, codes(what), words).await;
    }
    ground.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_hyperparameters_are_refused() {
    let ground = Ground::new().await;
    let sound = Forge::open(&fixtures::path(TINY_LLAMA));
    let numbers = [
        ("llama.block_count", 0),
        ("llama.block_count", 7),
        ("llama.block_count", u32::MAX),
        ("llama.embedding_length", 0),
        ("llama.embedding_length", 257),
        ("llama.attention.head_count", 0),
        ("llama.attention.head_count", 3),
        ("llama.attention.head_count_kv", 0),
        ("llama.attention.head_count_kv", 3),
        ("llama.attention.key_length", u32::MAX),
        ("llama.context_length", 0),
        ("llama.rope.dimension_count", 65),
        ("llama.rope.freq_base", f32::NAN.to_bits()),
        (
            "llama.attention.layer_norm_rms_epsilon",
            (-1.0_f32).to_bits(),
        ),
    ];
    for (key, value) in numbers {
        let mut forge = sound.clone();
        let at = sound.entry(key).value.start;
        forge.put_u32(at, value);
        let short = key.rsplit('.').next().unwrap_or(key);
        let what = format!("{key} = {value}");
        ground
            .refuses(
                &what,
                &forge.bytes,
                MALFORMED,
                &[short, "blk.", "token_embd"],
            )
            .await;
    }
    let mut forge = sound.clone();
    forge.put_u32(sound.entry("llama.block_count").type_at, UINT64);
    ground
        .refuses("a number of another width", &forge.bytes, MALFORMED, &[])
        .await;
    ground.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vocabulary_that_does_not_match_is_refused() {
    let ground = Ground::new().await;
    let sound = Forge::open(&fixtures::path(TINY_LLAMA));
    // The embedding has fewer rows than the vocabulary has tokens.
    let rows = sound.row("token_embd.weight").dims_at + 8;
    let mut forge = sound.clone();
    forge.put_u64(rows, 1200);
    ground
        .refuses(
            "fewer rows than tokens",
            &forge.bytes,
            MALFORMED,
            &["token_embd", "vocab"],
        )
        .await;
    // An end-of-text token outside of the vocabulary.
    let mut forge = sound.clone();
    forge.put_u32(sound.entry("tokenizer.ggml.eos_token_id").value.start, 1216);
    // It counts as absent, as llama.cpp has it.
    let path = ground.models.path().join("eos.gguf");
    fs::write(&path, &forge.bytes).expect("a file");
    let loaded = try_load(&ground.client, &path, "eos").await;
    loaded.expect("a special token outside of the vocabulary is ignored");
    ground.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_not_supported_is_named() {
    let ground = Ground::new().await;
    let sound = Forge::open(&fixtures::path(TINY_LLAMA));
    let mut forge = sound.clone();
    forge.rename(sound.entry("general.architecture").value.start, "mamba");
    ground
        .refuses(
            "an architecture",
            &forge.bytes,
            &[Code::Unimplemented],
            &["mamba"],
        )
        .await;

    // As large as F32, so the extents stay inside the file.
    let mut forge = sound.clone();
    forge.put_u32(sound.row("blk.0.attn_norm.weight").type_at, I32);
    ground
        .refuses(
            "a tensor type",
            &forge.bytes,
            &[Code::Unimplemented],
            &["i32"],
        )
        .await;

    // In no segment, so that no layout sees it: the divisors of rotations.
    let mut forge = Forge::open(&fixtures::path("arch/gemma4.gguf"));
    forge.put_u32(forge.row("rope_freqs.weight").type_at, I32);
    ground
        .refuses(
            "the type of a tensor outside of segments",
            &forge.bytes,
            &[Code::Unimplemented],
            &["i32", "rope_freqs.weight"],
        )
        .await;
    ground.finish().await;
}

/// The header is sound, so the file loads; the first pass over the weights must notice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scales_that_are_no_numbers_fail_the_request_only() {
    let ground = Ground::new().await;
    let mut forge = Forge::open(&fixtures::path(TINY_LLAMA));
    let at = forge.data_of("blk.3.ffn_up.weight");
    forge.put(at, &F16_NAN);
    let path = ground.models.path().join("nan.gguf");
    fs::write(&path, &forge.bytes).expect("a file");
    try_load(&ground.client, &path, "nan")
        .await
        .expect("loading reads no tensor data");
    let answer = generate(
        &ground.client,
        continuation("nan", "Once upon a time", greedy(8)),
    )
    .await;
    let error = refused("NaN scales", answer);
    assert!(
        matches!(
            error.code,
            Code::InvalidArgument | Code::DataLoss | Code::FailedPrecondition
        ),
        "{error:?}"
    );
    let message = error.message.to_lowercase();
    assert!(
        message.contains("nan") || message.contains("finite"),
        "{}",
        error.message
    );
    ground
        .client
        .unload("nan", false)
        .await
        .expect("an idle model unloads");
    ground.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_regular_files_below_the_model_directories_are_opened() {
    let ground = Ground::new().await;
    let outside = tempfile::tempdir().expect("a temporary directory");
    let dir = ground.models.path();
    let copy = outside.path().join("outside.gguf");
    fs::copy(fixtures::path(TINY_LLAMA), &copy).expect("a copy");
    symlink(&copy, dir.join("link.gguf")).expect("a link");
    fs::create_dir(dir.join("directory.gguf")).expect("a directory");
    mkfifo(&dir.join("fifo.gguf"), Mode::S_IRWXU).expect("a FIFO");
    let dots = dir
        .join("..")
        .join(outside.path().file_name().expect("a name"))
        .join("outside.gguf");

    ground
        .refuses_path(
            "a path outside",
            &copy,
            DENIED,
            &["model-dir", "model director"],
        )
        .await;
    ground
        .refuses_path(
            "a link to the outside",
            &dir.join("link.gguf"),
            DENIED,
            &["model-dir", "model director"],
        )
        .await;
    ground
        .refuses_path(
            "dots to the outside",
            &dots,
            DENIED,
            &["model-dir", "model director"],
        )
        .await;
    ground
        .refuses_path(
            "no file",
            &dir.join("absent.gguf"),
            &[Code::NotFound],
            &["absent.gguf"],
        )
        .await;
    ground
        .refuses_path(
            "a directory",
            &dir.join("directory.gguf"),
            MALFORMED,
            &["directory", "regular"],
        )
        .await;
    ground
        .refuses_path(
            "a FIFO",
            &dir.join("fifo.gguf"),
            MALFORMED,
            &["regular", "fifo"],
        )
        .await;
    ground
        .refuses_path(
            "a relative path",
            Path::new("tests/fixtures"),
            RELATIVE,
            &[],
        )
        .await;
    ground
        .refuses_path("an empty path", Path::new(""), MALFORMED, &["path"])
        .await;

    if Uid::effective().is_root() {
        skip("a file without permission", "root may read every file");
    } else {
        let path = dir.join("secret.gguf");
        fs::copy(fixtures::path(TINY_LLAMA), &path).expect("a copy");
        fs::set_permissions(&path, Permissions::from_mode(0o000)).expect("our own file");
        ground
            .refuses_path(
                "a file without permission",
                &path,
                DENIED,
                &["permission", "read"],
            )
            .await;
    }
    ground.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_are_unique_and_well_formed() {
    let ground = Ground::new().await;
    let (llama, qwen) = (fixtures::path(TINY_LLAMA), fixtures::path(TINY_QWEN3));
    let first = try_load(&ground.client, &llama, "one")
        .await
        .expect("a sound model");
    let again = try_load(&ground.client, &llama, "one")
        .await
        .expect("the same file under the same name");
    assert_eq!(first.name, again.name);
    let error = refused("a taken name", try_load(&ground.client, &qwen, "one").await);
    assert_eq!(error.code, Code::AlreadyExists, "{}", error.message);
    assert!(error.message.contains("one"), "{}", error.message);
    for name in ["with space", "new\nline", &"long".repeat(64)] {
        let error = refused(name, try_load(&ground.client, &llama, name).await);
        assert_eq!(error.code, Code::InvalidArgument, "{}", error.message);
    }
    let unnamed = try_load(&ground.client, &qwen, "")
        .await
        .expect("a name is made of the file's");
    assert_eq!(unnamed.name, TINY_QWEN3.trim_end_matches(".gguf"));
    ground.finish().await;
}
