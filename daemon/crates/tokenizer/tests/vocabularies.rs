//! Real vocabularies against the ids that other engines give.

use crate::files;
use rocmforge_tokenizer::{ChatTemplate, DecodeOptions, Message, Tokenizer};

const CASE_SEPARATOR: &str = "\n__ggml_vocab_test__\n";
const NAMES: [&str; 4] = ["gpt-2", "llama-bpe", "llama-spm", "qwen2"];

fn load(name: &str) -> Option<Tokenizer> {
    let path = files::shared(&format!("vocab/ggml-vocab-{name}.gguf"))?;
    let file = files::open(&path);
    let start = std::time::Instant::now();
    let tokenizer = Tokenizer::from_gguf(&file).unwrap();
    println!("{name}: built in {:?}", start.elapsed());
    Some(tokenizer)
}

fn cases(name: &str) -> Vec<(String, Vec<u32>)> {
    let read = |suffix| {
        let path = files::shared(&format!("vocab/ggml-vocab-{name}.gguf.{suffix}")).unwrap();
        std::fs::read_to_string(path).unwrap()
    };
    let (inputs, outputs) = (read("inp"), read("out"));
    // Each case ends with the separator.
    let inputs = inputs.strip_suffix(CASE_SEPARATOR).unwrap();
    let inputs: Vec<String> = inputs.split(CASE_SEPARATOR).map(str::to_owned).collect();
    let outputs: Vec<Vec<u32>> = outputs
        .lines()
        .map(|line| {
            line.split_whitespace()
                .map(|id| id.parse().unwrap())
                .collect()
        })
        .collect();
    assert_eq!(
        inputs.len(),
        outputs.len(),
        "{name}: cases and results differ in number"
    );
    inputs.into_iter().zip(outputs).collect()
}

#[test]
fn ids_match_the_reference() {
    for name in NAMES {
        let Some(tokenizer) = load(name) else {
            continue;
        };
        let cases = cases(name);
        let mut wrong = 0;
        for (text, expected) in &cases {
            let ids = tokenizer.encode(text, false, false).unwrap();
            if ids != *expected {
                wrong += 1;
                println!("{name}: {text:?}\n  ours     {ids:?}\n  expected {expected:?}");
            }
        }
        println!(
            "{name}: {} of {} cases match",
            cases.len() - wrong,
            cases.len()
        );
        assert_eq!(wrong, 0, "{name}");
    }
}

#[test]
fn decoding_gives_the_text_back() {
    for name in NAMES {
        let Some(tokenizer) = load(name) else {
            continue;
        };
        for (text, ids) in cases(name) {
            assert_eq!(tokenizer.decode(&ids).unwrap(), text, "{name}");
            let mut stream = tokenizer.stream_with(DecodeOptions {
                special: false,
                from_start: true,
            });
            let mut streamed = String::new();
            for id in ids {
                streamed.push_str(&stream.push(&tokenizer, id));
            }
            streamed.push_str(&stream.finish());
            assert_eq!(streamed, text, "{name}");
        }
    }
}

#[test]
fn special_tokens_and_rules_of_real_vocabularies() {
    if let Some(llama) = load("llama-bpe") {
        assert_eq!(llama.encode("a", true, false).unwrap(), [128_000, 64]);
        let ids = llama.encode("<|eot_id|>a", false, true).unwrap();
        assert_eq!(ids, [128_009, 64]);
        assert!(llama.encode("<|eot_id|>", false, false).unwrap().len() > 1);
        assert!(llama.is_end_of_generation(128_009) && llama.is_end_of_generation(128_001));
        assert!(!llama.is_end_of_generation(128_000));
        assert_eq!(
            llama.encode_chat(99, "<|begin_of_text|>a").unwrap(),
            [128_000, 64]
        );
        assert_eq!(llama.encode_chat(99, "a").unwrap(), [128_000, 64]);
        assert_eq!(llama.decode(&[128_000, 64, 128_009]).unwrap(), "a");
        let named = DecodeOptions {
            special: true,
            from_start: true,
        };
        assert_eq!(llama.decode_with(&ids, named).unwrap(), "<|eot_id|>a");
    }
    if let Some(spm) = load("llama-spm") {
        assert_eq!((spm.bos(), spm.eos()), (Some(1), Some(2)));
        assert_eq!(spm.encode("Hello", true, false).unwrap(), [1, 15043]);
        assert_eq!(spm.encode("</s>", false, true).unwrap(), [2]);
        assert!(!spm.encode("</s>", false, false).unwrap().contains(&2));
        assert_eq!(spm.encode("", true, false).unwrap(), [1]);
        assert_eq!(spm.stream().push(&spm, 15043), " Hello");
        assert_eq!(spm.decode(&[1, 15043]).unwrap(), "Hello");
    }
    if let Some(qwen) = load("qwen2") {
        assert_eq!(qwen.encode("a", true, false).unwrap(), [64]);
        assert!(qwen.is_end_of_generation(151_645) && qwen.is_end_of_generation(151_643));
        assert!(!qwen.is_end_of_generation(151_644));
    }
}

#[test]
fn chat_template_of_a_real_file() {
    let Some(path) = files::shared("vocab/ggml-vocab-qwen2.gguf") else {
        return;
    };
    let file = files::open(&path);
    let tokenizer = Tokenizer::from_gguf(&file).unwrap();
    let template = ChatTemplate::from_gguf(&file, &tokenizer).unwrap();
    let text = template
        .render(&[Message::new("user", "Hi")], true)
        .unwrap();
    assert_eq!(
        text,
        "<|im_start|>system\nYou are a helpful assistant<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    );
    let ids = tokenizer.encode_chat(99, &text).unwrap();
    assert_eq!(
        (ids[0], ids.iter().filter(|&&id| id == 151_645).count()),
        (151_644, 2)
    );
}

#[test]
fn the_shipped_models() {
    for name in ["tiny-llama-Q4_K_M.gguf", "tiny-qwen3-Q8_0.gguf"] {
        let file = files::fixture(name);
        let tokenizer = Tokenizer::from_gguf(&file).unwrap();
        assert_eq!((tokenizer.bos(), tokenizer.eos()), (Some(0), Some(2)));
        assert_eq!(tokenizer.end_of_generation(), [0, 2]);
        let template = ChatTemplate::from_gguf(&file, &tokenizer).unwrap();
        let messages = [Message::new("user", "Tell me a story.")];
        let text = template.render(&messages, true).unwrap();
        assert_eq!(
            text,
            "<|im_start|>user\nTell me a story.<|im_end|>\n<|im_start|>assistant\n"
        );
        let ids = tokenizer.encode_chat(99, &text).unwrap();
        assert_eq!((ids[0], ids.contains(&2)), (1, true));
        let named = DecodeOptions {
            special: true,
            from_start: true,
        };
        assert_eq!(tokenizer.decode_with(&ids, named).unwrap(), text);
        let story = std::fs::read_to_string(files::root().join("tests/fixtures/text.txt")).unwrap();
        let ids = tokenizer.encode(&story, true, false).unwrap();
        assert_eq!(tokenizer.decode(&ids).unwrap(), story);
        assert!(tokenizer.encode("Grüße, 世界 👋", false, false).is_ok());
    }
}

/// One model of each architecture: its tokenizer loads, and its texts come back.
#[test]
fn vocabularies_of_every_architecture() {
    let Some(folder) = files::shared("models/arch") else {
        return;
    };
    let mut loaded = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path
            .extension()
            .is_some_and(|extension| extension == "gguf")
        {
            let tokenizer = files::tokenizer(&path);
            let text = "Once upon a time, 12 + 30 = 42.\nEnd";
            let ids = tokenizer.encode(text, false, false).unwrap();
            assert_eq!(tokenizer.decode(&ids).unwrap(), text, "{}", path.display());
            loaded += 1;
        }
    }
    println!("{loaded} vocabularies");
}

/// WordPiece and unigrams on the texts of tests/python/make_encoders.py.
#[test]
fn ids_of_encoders_match_the_tokenizers_package() {
    let dir =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../tests/fixtures/encoders");
    let cases = std::fs::read(dir.join("tokens.json")).unwrap();
    let cases: std::collections::BTreeMap<String, Vec<(String, Vec<u32>)>> =
        serde_json::from_slice(&cases).unwrap();
    assert_eq!(cases.len(), 3);
    for (name, cases) in cases {
        let tokenizer =
            Tokenizer::from_gguf(&files::open(&dir.join(format!("{name}.gguf")))).unwrap();
        let mut wrong = Vec::new();
        for (text, expected) in &cases {
            let ids = tokenizer.encode(text, false, false).unwrap();
            if ids != *expected {
                wrong.push(format!(
                    "{text:?}\n  ours     {ids:?}\n  expected {expected:?}"
                ));
            }
        }
        assert!(wrong.is_empty(), "{name}:\n{}", wrong.join("\n"));
    }
}
