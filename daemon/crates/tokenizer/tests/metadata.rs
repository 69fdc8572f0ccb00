//! From a file's bytes to a tokenizer: what is missing or wrong in the metadata.

use rocmforge_gguf::Gguf;
use rocmforge_gguf::write::{GgufWriter, MetaValue};
use rocmforge_tokenizer::{ChatTemplate, Error, Message, StreamDecoder, Tokenizer};

/// A file of a SentencePiece vocabulary of six tokens, without `skipped`.
fn file(skipped: &str, more: &[(&str, MetaValue)]) -> Gguf {
    let tokens = ["<unk>", "<s>", "</s>", "▁a", "▁", "a"];
    let keys: [(&str, MetaValue); 6] = [
        ("tokenizer.ggml.model", "llama".into()),
        ("tokenizer.ggml.tokens", tokens.iter().collect()),
        (
            "tokenizer.ggml.scores",
            (&[0.0f32, 0.0, 0.0, -1.0, -2.0, -3.0][..]).into(),
        ),
        (
            "tokenizer.ggml.token_type",
            (&[2i32, 3, 3, 1, 1, 1][..]).into(),
        ),
        ("tokenizer.ggml.bos_token_id", 1u32.into()),
        ("tokenizer.ggml.add_bos_token", true.into()),
    ];
    let mut writer = GgufWriter::new();
    for (key, value) in keys {
        if key != skipped && more.iter().all(|(other, _)| *other != key) {
            writer = writer.key(key, value);
        }
    }
    for (key, value) in more {
        writer = writer.key(key, value.clone());
    }
    let bytes = writer.to_bytes();
    Gguf::parse(&bytes, bytes.len() as u64).unwrap()
}

fn refusal(skipped: &str, more: &[(&str, MetaValue)]) -> Error {
    Tokenizer::from_gguf(&file(skipped, more)).unwrap_err()
}

#[test]
fn a_whole_file_works() {
    let file = file("", &[]);
    let tokenizer = Tokenizer::from_gguf(&file).unwrap();
    assert_eq!(tokenizer.encode("a a", true, false).unwrap(), [1, 3, 3]);
    assert_eq!(tokenizer.encode("é", false, false).unwrap(), [4, 0]);
    assert!(ChatTemplate::from_gguf(&file, &tokenizer).is_none());
    // Defaults of the kind: </s> is token 2.
    assert_eq!((tokenizer.eos(), tokenizer.n_vocab()), (Some(2), 6));
}

#[test]
fn the_template_sees_the_names_of_bos_and_eos() {
    let source = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}";
    let file = file("", &[("tokenizer.chat_template", source.into())]);
    let tokenizer = Tokenizer::from_gguf(&file).unwrap();
    let template = ChatTemplate::from_gguf(&file, &tokenizer).unwrap();
    let text = template.render(&[Message::new("user", "a")], true).unwrap();
    assert_eq!(text, "<s>a</s>");
    assert_eq!(tokenizer.encode_chat(99, &text).unwrap(), [1, 3, 2]);
}

/// A file whose template has a damaged byte was loaded, and every chat was refused.
#[test]
fn a_template_with_a_damaged_byte_is_used() {
    let source = MetaValue::String(b"{{ messages[0].content }}\xff!".to_vec());
    let file = file("", &[("tokenizer.chat_template", source)]);
    let tokenizer = Tokenizer::from_gguf(&file).unwrap();
    let template = ChatTemplate::from_gguf(&file, &tokenizer).unwrap();
    let text = template.render(&[Message::new("user", "a")], true).unwrap();
    assert_eq!(text, "a\u{fffd}!");
}

#[test]
fn missing_keys_are_named() {
    for key in ["tokenizer.ggml.model", "tokenizer.ggml.tokens"] {
        let error = refusal(key, &[]);
        assert!(
            matches!(error, Error::MissingKey { key: named } if named == key),
            "{error}"
        );
        assert!(error.to_string().contains(key));
    }
    let error = refusal("", &[("tokenizer.ggml.model", "gpt2".into())]);
    assert!(
        matches!(
            error,
            Error::MissingKey {
                key: "tokenizer.ggml.merges"
            }
        ),
        "{error}"
    );
}

#[test]
fn values_of_the_wrong_kind_are_refused() {
    for (key, value) in [
        ("tokenizer.ggml.model", MetaValue::from(7u32)),
        ("tokenizer.ggml.tokens", "a".into()),
        ("tokenizer.ggml.scores", (&[1i32, 2, 3][..]).into()),
        ("tokenizer.ggml.token_type", (&[1.0f32][..]).into()),
        ("tokenizer.ggml.bos_token_id", "1".into()),
        ("tokenizer.ggml.add_bos_token", "yes".into()),
    ] {
        let error = refusal("", &[(key, value)]);
        assert!(matches!(error, Error::Gguf(_)), "{key}: {error}");
        let cause = std::error::Error::source(&error).unwrap().to_string();
        assert!(cause.contains(key), "{cause}");
    }
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let error = refusal("", &[("tokenizer.ggml.scores", (&[0.0f32; 5][..]).into())]);
    assert!(
        matches!(
            error,
            Error::Length {
                len: 5,
                n_vocab: 6,
                ..
            }
        ),
        "{error}"
    );
    let none: MetaValue = Vec::<&str>::new().into_iter().collect();
    let error = refusal("", &[("tokenizer.ggml.tokens", none)]);
    assert!(matches!(error, Error::Size { len: 0, .. }), "{error}");
}

#[test]
fn everything_can_be_shared_between_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<Tokenizer>();
    shared::<ChatTemplate>();
    shared::<StreamDecoder>();
    shared::<Error>();
    let tokenizer = Tokenizer::from_gguf(&file("", &[])).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| assert_eq!(tokenizer.encode("a", false, false).unwrap(), [3]));
        }
    });
}
