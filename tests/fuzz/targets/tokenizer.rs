//! Vocabularies of forged metadata, and texts. An input has parts: the kind of vocabulary, the
//! pre-tokenizer, tokens, their types, scores, merges, the ids of special tokens, and a text.
//!
//! Loading ends with a tokenizer or a refusal; a tokenizer gives ids that it knows, the same each
//! time, and turns them into text at once as one by one.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rocmforge_fuzz::{file, items, parts, text};
use rocmforge_gguf::write::{GgufWriter, MetaValue};
use rocmforge_tokenizer::{ChatTemplate, DecodeOptions, TemplateOrigin, Tokenizer};

fuzz_target!(|data: &[u8]| {
    let [model, pre, tokens, types, scores, merges, ids, said] = parts(data);
    let list = |part| items(part).collect::<MetaValue>();
    let signed = |part: &[u8]| part.iter().map(|&byte| byte as i8).collect::<Vec<_>>();
    let mut writer = GgufWriter::new()
        .key("tokenizer.ggml.model", MetaValue::String(model.to_vec()))
        .key("tokenizer.ggml.tokens", list(tokens));
    if !pre.is_empty() {
        writer = writer.key("tokenizer.ggml.pre", MetaValue::String(pre.to_vec()));
    }
    if !types.is_empty() {
        let types: Vec<i32> = signed(types).into_iter().map(i32::from).collect();
        writer = writer.key("tokenizer.ggml.token_type", types.as_slice());
    }
    if !scores.is_empty() {
        // One stands for what is no number.
        let score = |x: i8| if x == i8::MIN { f32::NAN } else { f32::from(x) };
        let scores: Vec<f32> = signed(scores).into_iter().map(score).collect();
        writer = writer.key("tokenizer.ggml.scores", scores.as_slice());
    }
    if !merges.is_empty() {
        writer = writer.key("tokenizer.ggml.merges", list(merges));
    }
    let names = [
        "bos",
        "eos",
        "unknown",
        "eot",
        "eom",
        "padding",
        "separator",
    ];
    for (name, &id) in names.iter().zip(ids) {
        if id < 0x80 {
            writer = writer.key(&format!("tokenizer.ggml.{name}_token_id"), u32::from(id));
        }
    }
    let flags = ["add_bos_token", "add_eos_token", "add_space_prefix"];
    for (name, &flag) in flags.iter().zip(ids.get(names.len()..).unwrap_or_default()) {
        writer = writer.key(&format!("tokenizer.ggml.{name}"), flag % 2 == 1);
    }
    let file = file(&writer);
    let tokenizer = match Tokenizer::from_gguf(&file) {
        Ok(tokenizer) => tokenizer,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    // A vocabulary may have the marks of ChatML.
    let template = ChatTemplate::from_gguf(&file, &tokenizer);
    assert!(template.is_none_or(|template| template.origin() == TemplateOrigin::Default));
    let said = text(said);
    for (add, parse) in [(false, false), (true, true)] {
        let Ok(ids) = tokenizer.encode(&said, add, parse) else {
            continue;
        };
        assert!(ids.iter().all(|&id| (id as usize) < tokenizer.n_vocab()));
        assert!(
            ids.len() <= 2 * said.len() + 4,
            "no more than a token a byte"
        );
        let again = tokenizer.encode(&said, add, parse);
        assert!(again.is_ok_and(|again| again == ids));
        if let Some(fewer) = ids.len().checked_sub(1) {
            assert!(tokenizer.encode_at_most(fewer, &said, add, parse).is_err());
        }
        for special in [false, true] {
            let options = DecodeOptions {
                special,
                from_start: true,
            };
            let whole = tokenizer
                .decode_with(&ids, options)
                .expect("ids of its own");
            let mut stream = tokenizer.stream_with(options);
            let mut pieces = String::new();
            for &id in &ids {
                pieces.push_str(&stream.push(&tokenizer, id));
            }
            pieces.push_str(&stream.finish());
            assert_eq!(pieces, whole);
        }
    }
});
