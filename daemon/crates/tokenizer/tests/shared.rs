//! Tokenizers of headers that are not whole, since their vocabulary was read before.

use rocmforge_gguf::write::{GgufWriter, MetaValue};
use rocmforge_gguf::{Gguf, MappedFile, TensorType};
use rocmforge_tokenizer::Tokenizer;

const TOKENS: u32 = 20_000;

/// A file whose last token is `last` and which ends texts with the token `eos`.
fn write(name: &str, last: &str, eos: u32) -> MappedFile {
    let token = |id| match id {
        0 => "<unk>".to_owned(),
        1 => "<s>".to_owned(),
        2 => "</s>".to_owned(),
        id if id == TOKENS - 1 => last.to_owned(),
        id => format!("w{id}"),
    };
    let types: Vec<i32> = (0..TOKENS).map(|id| if id < 3 { 3 } else { 1 }).collect();
    let scores: Vec<f32> = (0..TOKENS).map(|id| -(id as f32)).collect();
    let writer = GgufWriter::new()
        .key("general.name", name)
        .key("tokenizer.ggml.model", "llama")
        .key(
            "tokenizer.ggml.tokens",
            (0..TOKENS).map(token).collect::<MetaValue>(),
        )
        .key("tokenizer.ggml.scores", scores.as_slice())
        .key("tokenizer.ggml.token_type", types.as_slice())
        .key("tokenizer.ggml.eos_token_id", eos)
        .zeros("t", &[32], TensorType::Q8_0);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    writer.write_to(&path).unwrap();
    MappedFile::open(&path).unwrap()
}

/// Its header, as loads read it.
fn open(name: &str, last: &str, eos: u32) -> Gguf {
    Gguf::open_recognising(&write(name, last, eos)).unwrap()
}

#[test]
fn a_vocabulary_that_a_tokenizer_has_is_shared_and_not_read() {
    let last = "shared";
    let first = open("first", last, 2);
    assert!(first.strings("tokenizer.ggml.tokens").is_ok(), "it is new");
    assert!(Tokenizer::shared(&first).unwrap().is_none());
    let first = Gguf::open(&write("first", last, 2)).unwrap();
    let first = Tokenizer::from_gguf(&first).unwrap();
    let again = open("another one", last, 2);
    assert!(!again.is_whole() && again.kept_bytes() < 1024);
    let again = Tokenizer::shared(&again).unwrap().expect("it is there");
    assert_eq!(again.lexicon_id(), first.lexicon_id());
    assert_eq!(again.digest(), first.digest());
    assert_eq!(again.token_bytes(TOKENS - 1), Some(last.as_bytes()));
    // The same tokens, used otherwise.
    let other = Tokenizer::shared(&open("other", last, 5)).unwrap().unwrap();
    assert_eq!(other.lexicon_id(), first.lexicon_id());
    assert_ne!(other.digest(), first.digest());
    assert_eq!((other.eos(), first.eos()), (Some(5), Some(2)));
    // Another token far behind.
    let differs = open("differs", "sharee", 2);
    assert!(Tokenizer::shared(&differs).unwrap().is_none());
    assert!(differs.strings("tokenizer.ggml.tokens").unwrap().is_some());
    assert!(!differs.is_whole(), "its scores are known");
}

#[test]
fn a_vocabulary_that_nobody_has_any_more_is_not_found() {
    open("seen", "gone", 2);
    let whole = Gguf::open(&write("first", "gone", 2)).unwrap();
    let tokenizer = Tokenizer::from_gguf(&whole).unwrap();
    let known = open("second", "gone", 2);
    assert!(Tokenizer::shared(&known).unwrap().is_some());
    drop(tokenizer);
    assert!(!known.is_whole() && Tokenizer::shared(&known).unwrap().is_none());
    assert!(
        Tokenizer::from_gguf(&known).is_err(),
        "its tokens are not there"
    );
}
