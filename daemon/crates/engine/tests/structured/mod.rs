//! Texts that are held to a grammar.

mod schemas;

use std::sync::Arc;

use crate::requests::{chat, engine, load, load_endless, questions, run};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rocmforge_engine::LoadedModel;
use rocmforge_engine::api::{Budget, Decoding, FinishReason, GenerateRequest, SamplingParams};
use rocmforge_grammar::{Grammar, Matcher, Reasoning};
use serde_json::{Value, json};

const LLAMA: &str = "tiny-llama-Q4_K_M.gguf";
const QWEN: &str = "tiny-qwen3-Q8_0.gguf";
/// Schemas that are tried with each model.
const SCHEMAS: u64 = 200;
/// Requests at once.
const AT_ONCE: u64 = 20;

fn matcher(model: &LoadedModel, grammar: &Grammar) -> Matcher {
    model.grammars().unwrap().matcher(grammar).unwrap()
}

/// A request at temperature 1 over all tokens, so that only the grammar holds it.
fn held(model: &Arc<LoadedModel>, matcher: Matcher, seed: u64) -> GenerateRequest {
    GenerateRequest {
        sampling: SamplingParams {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: Some(seed),
            ..SamplingParams::default()
        },
        max_tokens: Some(900),
        decoding: Decoding {
            grammar: Some(Box::new(matcher)),
            ..Decoding::default()
        },
        ..chat(model, "Tell me a story about a fox.")
    }
}

#[tokio::test]
async fn every_answer_is_what_its_random_schema_describes() {
    let first = match std::env::var("ROCMFORGE_SCHEMAS_FROM") {
        Ok(first) => first.parse().unwrap(),
        Err(_) => 0,
    };
    for file in [LLAMA, QWEN] {
        let engine = engine(Budget::Bytes(64 << 20));
        let model = load(&engine, file, "m").await;
        let (mut tokens, mut cut) = (0, 0);
        for from in (first..first + SCHEMAS).step_by(AT_ONCE as usize) {
            let tasks: Vec<_> = (from..from + AT_ONCE)
                .map(|seed| {
                    let schema = schemas::random(&mut ChaCha8Rng::seed_from_u64(seed));
                    let matcher = matcher(&model, &Grammar::JsonSchema(schema.clone()));
                    let (engine, request) = (engine.clone(), held(&model, matcher, seed));
                    (
                        seed,
                        schema,
                        tokio::spawn(async move { run(&engine, request).await }),
                    )
                })
                .collect();
            for (seed, schema, task) in tasks {
                let (text, ids, summary) = task.await.unwrap();
                tokens += ids.len();
                if summary.finish == FinishReason::MaxTokens {
                    println!("schema {seed} is cut: {schema}: {text}");
                    cut += 1;
                    continue;
                }
                assert_eq!(summary.finish, FinishReason::EndOfText, "schema {seed}");
                let value: Value = serde_json::from_str(&text)
                    .unwrap_or_else(|error| panic!("schema {seed}: {error}: {text:?}"));
                assert_eq!(
                    schemas::wrong(&schema, &schema, &value),
                    None,
                    "schema {seed}"
                );
            }
        }
        println!("{file}: {SCHEMAS} schemas, {tokens} tokens, {cut} cut");
        // White space between any two parts can be long at this temperature.
        assert!(
            cut * 100 <= SCHEMAS,
            "{cut} of {SCHEMAS} did not come to their end"
        );
        let cache = engine.snapshot().cache;
        assert_eq!(cache.kv_bytes + cache.scratch_bytes, 0, "nothing is held");
    }
}

#[tokio::test]
async fn an_object_a_regex_and_a_lark_grammar_hold() {
    let engine = engine(Budget::Bytes(64 << 20));
    let model = load(&engine, LLAMA, "m").await;
    let mut whole = 0;
    for seed in 0..20 {
        let matcher = matcher(&model, &Grammar::JsonObject);
        let (text, _, summary) = run(&engine, held(&model, matcher, seed)).await;
        assert!(text.starts_with('{'), "{text}");
        if summary.finish == FinishReason::EndOfText {
            assert!(serde_json::from_str::<Value>(&text).unwrap().is_object());
            whole += 1;
        }
    }
    assert!(whole > 5, "{whole} of 20 came to their end");

    let regex = matcher(&model, &Grammar::Regex("(yes|no), [0-9]{3}".to_owned()));
    let (text, _, summary) = run(&engine, held(&model, regex, 1)).await;
    let (word, digits) = text.split_once(", ").unwrap();
    assert!(["yes", "no"].contains(&word) && digits.len() == 3, "{text}");
    assert!(digits.bytes().all(|b| b.is_ascii_digit()), "{text}");
    assert_eq!(summary.finish, FinishReason::EndOfText);

    let lark = "start: pair (\";\" pair){2}\npair: NAME \"=\" NAME\nNAME: /[a-z]{1,6}/";
    let lark = matcher(&model, &Grammar::Lark(lark.to_owned()));
    let (text, _, _) = run(&engine, held(&model, lark, 2)).await;
    let pairs: Vec<_> = text.split(';').map(|pair| pair.split_once('=')).collect();
    assert!(
        pairs.len() == 3 && pairs.iter().all(Option::is_some),
        "{text}"
    );
}

#[tokio::test]
async fn a_text_ends_where_its_grammar_does_without_an_end_token() {
    let engine = engine(Budget::Bytes(64 << 20));
    let model = load_endless(&engine, "m").await;
    let grammar = Grammar::JsonSchema(json!({"enum": ["red", "green"]}));
    for seed in 0..5 {
        let request = held(&model, matcher(&model, &grammar), seed);
        let (text, _, summary) = run(&engine, request).await;
        assert!(["\"red\"", "\"green\""].contains(&text.as_str()), "{text}");
        assert_eq!(summary.finish, FinishReason::EndOfText);
    }
}

#[tokio::test]
async fn what_comes_before_the_mark_is_free() {
    let engine = engine(Budget::Bytes(64 << 20));
    let model = load(&engine, LLAMA, "m").await;
    // What the greedy answer says anyway, up to a word of its middle.
    let (story, _, _) = run(&engine, chat(&model, "Tell me a story.")).await;
    let mark = story.split_whitespace().nth(6).unwrap();
    let schema = Grammar::JsonSchema(json!({"type": "integer", "minimum": 5, "maximum": 7}));
    let mut matcher = matcher(&model, &schema);
    matcher.reason_first(Reasoning {
        is_open: true,
        closes: vec![mark.to_owned()],
        ..Reasoning::default()
    });
    let request = GenerateRequest {
        decoding: Decoding {
            grammar: Some(Box::new(matcher)),
            ..Decoding::default()
        },
        ..chat(&model, "Tell me a story.")
    };
    let (text, _, summary) = run(&engine, request).await;
    let (thought, answer) = text.split_once(mark).unwrap();
    assert!(story.starts_with(thought), "{text}");
    assert!(["5", "6", "7"].contains(&answer), "{text}");
    assert_eq!(summary.finish, FinishReason::EndOfText);
}

#[tokio::test]
async fn who_is_held_changes_nobodys_text() {
    let engine = engine(Budget::Bytes(64 << 20));
    let model = load(&engine, LLAMA, "m").await;
    let request = |i: usize| GenerateRequest {
        sampling: SamplingParams {
            temperature: if i.is_multiple_of(2) { 0.0 } else { 0.8 },
            seed: Some(i as u64),
            ..SamplingParams::default()
        },
        ..chat(&model, &questions(4)[i].0)
    };
    let mut alone = Vec::new();
    for i in 0..4 {
        alone.push(run(&engine, request(i)).await.1);
    }
    let schema = json!({"type": "array", "minItems": 60, "items": {"type": "integer"}});
    let matcher = matcher(&model, &Grammar::JsonSchema(schema));
    let beside = engine.generate(held(&model, matcher, 3)).unwrap();
    for (i, ids) in alone.iter().enumerate() {
        assert_eq!(&run(&engine, request(i)).await.1, ids, "request {i}");
    }
    drop(beside);
}
