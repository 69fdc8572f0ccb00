//! Grammars that want too much: each is refused with a reason, or works within its bounds.

#![allow(clippy::too_many_lines, reason = "tables of cases")]
#![allow(clippy::unwrap_used, reason = "a test that fails says where")]

use std::path::Path;
use std::time::{Duration, Instant};

use rocmforge_gguf::{Gguf, MappedFile};
use rocmforge_grammar::{Error, Grammar, Vocabulary};
use rocmforge_tokenizer::Tokenizer;
use serde_json::{Value, json};

fn vocabulary() -> Vocabulary {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../../tests/fixtures/tiny-llama-Q4_K_M.gguf");
    let file = MappedFile::open(&path).unwrap();
    let gguf = Gguf::open(&file).unwrap();
    Vocabulary::new(&Tokenizer::from_gguf(&gguf).unwrap()).unwrap()
}

fn nested(depth: usize) -> Value {
    (0..depth).fold(
        json!({"type": "integer"}),
        |inner, _| json!({"type": "array", "items": inner}),
    )
}

/// A list of `n` schemas.
fn list(n: usize, of: impl Fn(usize) -> Value) -> Value {
    (0..n).map(of).collect()
}

/// An object with `n` patterns of names.
fn patterns(n: usize) -> Value {
    json!({"type": "object", "patternProperties": (0..n)
        .map(|i| (format!("^a{i}[a-z]{{3,40}}x?$"), json!({"type": "integer"})))
        .collect::<serde_json::Map<_, _>>()})
}

fn grammars() -> Vec<(&'static str, Grammar)> {
    let any = |n: usize, salt: usize| {
        json!({"anyOf": list(n, |i| json!({
            "type": "object", "properties": {format!("p{salt}_{i}"): {"type": "integer"}},
            "required": [format!("p{salt}_{i}")],
        }))})
    };
    let schema = Grammar::JsonSchema;
    vec![
        ("deep", schema(nested(60))),
        ("deeper", schema(nested(120))),
        ("a choice of many", schema(any(2000, 0))),
        (
            "choices that meet",
            schema(json!({"allOf": list(6, |i| any(10, i))})),
        ),
        (
            "choices that meet by name",
            schema(json!({
                "$defs": {"a": any(10, 0), "b": any(10, 1), "c": any(10, 2), "d": any(10, 3), "e": any(10, 4)},
                "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, {"$ref": "#/$defs/c"},
                    {"$ref": "#/$defs/d"}, {"$ref": "#/$defs/e"}],
            })),
        ),
        (
            "names that double",
            schema({
                let mut defs = json!({"d0": {"type": "integer"}});
                for i in 1..40 {
                    let before = json!({"$ref": format!("#/$defs/d{}", i - 1)});
                    defs[format!("d{i}")] = json!({"allOf": [before, before]});
                }
                json!({"$defs": defs, "$ref": "#/$defs/d39"})
            }),
        ),
        (
            "choices that double",
            schema({
                let mut defs = json!({"d0": any(2, 0)});
                for i in 1..30 {
                    let before = json!({"$ref": format!("#/$defs/d{}", i - 1)});
                    defs[format!("d{i}")] = json!({"anyOf": [before, before], "allOf": [before]});
                }
                json!({"$defs": defs, "$ref": "#/$defs/d29"})
            }),
        ),
        ("itself", schema(json!({"$ref": "#"}))),
        (
            "all of itself",
            schema(json!({"allOf": [{"$ref": "#"}, {"type": "object"}]})),
        ),
        (
            "two that are each other",
            schema(json!({
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"})),
        ),
        (
            "a tree",
            schema(json!({"type": "object", "properties": {
            "l": {"$ref": "#"}, "r": {"$ref": "#"}, "n": {"type": "integer"}}})),
        ),
        (
            "nothing of that name",
            schema(json!({"$ref": "#/$defs/none"})),
        ),
        (
            "somewhere else",
            schema(json!({"$ref": "http://localhost:1/schema.json"})),
        ),
        ("a file", schema(json!({"$ref": "file:///etc/passwd"}))),
        (
            "a long string",
            schema(json!({"type": "string", "minLength": 1_000_000_000})),
        ),
        (
            "strings of a length",
            schema(json!({"type": "string", "maxLength": 200_000})),
        ),
        (
            "many items",
            schema(json!({"type": "array", "minItems": 1_000_000, "items": {"type": "integer"}})),
        ),
        (
            "items up to many",
            schema(json!({"type": "array", "maxItems": 1_000_000})),
        ),
        (
            "many words",
            schema(json!({"enum": list(5_000, |i| json!(format!("word number {i}")))})),
        ),
        (
            "too many words",
            schema(json!({"enum": list(30_000, |i| json!(i))})),
        ),
        (
            "many members",
            schema(json!({"type": "object", "properties": (0..2900)
            .map(|i| (format!("p{i}"), json!({"type": "integer"})))
            .collect::<serde_json::Map<_, _>>()})),
        ),
        (
            "a pattern that repeats",
            schema(json!({"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"})),
        ),
        (
            "numbers",
            schema(
                json!({"type": "number", "multipleOf": 1e-300, "minimum": -1e308, "maximum": 1e308}),
            ),
        ),
        (
            "a large multiple",
            schema(json!({"type": "integer", "multipleOf": 1_000_000_007})),
        ),
        (
            "a multiple between",
            schema(json!({"type": "integer", "multipleOf": 10_000_019})),
        ),
        (
            "two multiples",
            schema(json!({"allOf": [
                {"type": "integer", "multipleOf": 9973}, {"type": "integer", "multipleOf": 9967},
            ]})),
        ),
        (
            "many multiples",
            schema(json!({"anyOf": list(300, |i| json!({
                "type": "integer", "multipleOf": 100_003 + 2 * i,
            }))})),
        ),
        ("many patterns", schema(patterns(1000))),
        (
            "patterns that meet often",
            schema(
                json!({"$defs": {"a": patterns(24)}, "anyOf": list(60, |i| json!({
                    "allOf": [{"$ref": "#/$defs/a"}, {"properties": {format!("p{i}"): {}}}],
                }))}),
            ),
        ),
        (
            "patterns that meet as often as they may",
            schema(
                json!({"$defs": {"a": patterns(12)}, "anyOf": list(36, |i| json!({
                    "allOf": [{"$ref": "#/$defs/a"}, {"properties": {format!("p{i}"): {}}}],
                }))}),
            ),
        ),
        (
            "patterns in lark",
            Grammar::Lark(format!("start: %json {}", patterns(1000))),
        ),
        (
            "a multiple in lark",
            Grammar::Lark("start: %json {\"multipleOf\": 10000019}".to_owned()),
        ),
        (
            "impossible",
            schema(json!({"type": "integer", "minimum": 5, "maximum": 4})),
        ),
        ("never", schema(json!(false))),
        ("no schema", schema(json!([1, 2]))),
        (
            "a bound beyond whole numbers",
            schema(json!({"type": "integer", "minimum": 9_007_199_254_740_993_u64})),
        ),
        (
            "a factor below 0",
            schema(json!({"type": "number", "multipleOf": -0.1})),
        ),
        (
            "a separator that is none",
            schema(json!({"type": "array", "x-guidance": {"item_separator": "zzz"}})),
        ),
        ("a wrong type", schema(json!({"type": "strnig"}))),
        ("wrong options", schema(json!({"x-guidance": 5}))),
        (
            "an endless beginning",
            Grammar::Regex("(.*a){50}".to_owned()),
        ),
        (
            "a regex that repeats",
            Grammar::Regex("((a{1,1000}){1,1000}){1,1000}".to_owned()),
        ),
        (
            "unicode",
            Grammar::Regex(r"(\p{L}|\p{N}){1,5000}".to_owned()),
        ),
        ("brackets", Grammar::Regex("(".repeat(50_000))),
        (
            "closed brackets",
            Grammar::Regex(format!("{}a{}", "(".repeat(5000), ")".repeat(5000))),
        ),
        ("too long", Grammar::Regex("a".repeat(300 << 10))),
        ("long", Grammar::Regex("a".repeat(200 << 10))),
        ("look ahead", Grammar::Regex("(?=a)b".to_owned())),
        ("no lark", Grammar::Lark("this is nothing".to_owned())),
        ("empty", Grammar::Lark(String::new())),
        (
            "lark brackets",
            Grammar::Lark(format!("start: {}\"a\"", "( ".repeat(20_000))),
        ),
        ("lark itself", Grammar::Lark("start: start".to_owned())),
        (
            "lark that is ambiguous",
            Grammar::Lark("start: start start | \"a\" | \"\"".to_owned()),
        ),
        (
            "lark negations",
            Grammar::Lark(format!("start: {}\"a\"", "~".repeat(100_000))),
        ),
        (
            "lark rules",
            Grammar::Lark((0..5000).fold(String::from("start: r0\n"), |all, i| {
                all + &format!("r{i}: \"a\" r{}\n", (i * 7 + 1) % 5000)
            })),
        ),
        (
            "lark terminals",
            Grammar::Lark(
                (0..4000).fold(String::from("start: A0\n"), |all, i| {
                    all + &format!("A{i}: \"a\" A{}\n", i + 1)
                }) + "A4000: \"b\"\n",
            ),
        ),
    ]
}

/// What has no bound takes minutes or never ends; these are ten times what the slowest takes
/// on a machine that has nothing else to do.
const COMPILED_MAX: Duration = Duration::from_secs(30);
const MASK_MAX: Duration = Duration::from_secs(10);

#[test]
fn what_wants_too_much_is_refused_or_bounded() {
    let vocabulary = vocabulary();
    let mut refused = 0;
    for (name, grammar) in grammars() {
        let begun = Instant::now();
        let matcher = vocabulary.matcher(&grammar);
        let compiled = begun.elapsed();
        match matcher {
            Err(Error::Grammar { reason }) => {
                println!("{name}: {compiled:?}: refused: {reason}");
                assert!(!reason.is_empty() && reason.len() < 500 && !reason.contains('\n'));
                refused += 1;
            }
            Err(other) => panic!("{name}: {other:?}"),
            Ok(mut matcher) => {
                // Some tokens on, whichever come first.
                let (mut steps, mut slowest) = (0, Duration::ZERO);
                while steps < 60 && !matcher.is_complete() {
                    let begun = Instant::now();
                    let Ok(mask) = matcher.mask() else { break };
                    slowest = slowest.max(begun.elapsed());
                    let mut ids = (0..2000).filter(|&id| mask.allows(id));
                    let Some(id) = ids.nth(steps % 3) else { break };
                    if matcher.accept(id).is_err() {
                        break;
                    }
                    steps += 1;
                }
                println!("{name}: {compiled:?}, {steps} tokens, at most {slowest:?} a mask");
                assert!(slowest < MASK_MAX, "{name}: {slowest:?}");
            }
        }
        assert!(compiled < COMPILED_MAX, "{name}: {compiled:?}");
    }
    println!("{refused} were refused");
    assert!(refused >= 15, "{refused}");
}

#[test]
fn what_an_answer_would_not_be_held_to_is_refused_by_name() {
    let vocabulary = vocabulary();
    for (schema, told) in [
        (
            json!({"type": "integer", "minimum": 1e19}),
            "#/minimum: 1e+19 is beyond 2^53",
        ),
        (
            json!({"type": "object", "properties": {"a": {"exclusiveMaximum": -9_007_199_254_740_994_i64}}}),
            "#/properties/a/exclusiveMaximum: -9007199254740994",
        ),
        (
            json!({"type": "number", "multipleOf": 0}),
            "#/multipleOf: 0 is not above 0",
        ),
        (
            json!({"type": "array", "x-guidance": {"key_separator": "zzz"}}),
            "x-guidance with key_separator",
        ),
    ] {
        let Err(Error::Grammar { reason }) = vocabulary.matcher(&Grammar::JsonSchema(schema))
        else {
            panic!("{told}: it was taken");
        };
        assert!(reason.contains(told), "{reason}");
    }
    let exact = json!({"type": "integer", "minimum": 0, "maximum": 9_007_199_254_740_992_u64});
    assert!(vocabulary.matcher(&Grammar::JsonSchema(exact)).is_ok());
}

#[test]
fn patterns_and_multiples_of_usual_size_are_taken() {
    let vocabulary = vocabulary();
    for schema in [
        json!({"type": "integer", "multipleOf": 1000}),
        json!({"type": "number", "multipleOf": 0.01}),
        patterns(8),
    ] {
        let begun = Instant::now();
        let matcher = vocabulary.matcher(&Grammar::JsonSchema(schema.clone()));
        assert!(matcher.is_ok(), "{schema}: {matcher:?}");
        println!("{schema}: {:?}", begun.elapsed());
    }
}

#[test]
fn a_grammar_without_a_text_is_told_in_words() {
    let vocabulary = vocabulary();
    for grammar in [
        Grammar::JsonSchema(json!({"$ref": "#"})),
        Grammar::Gbnf("root ::= root".to_owned()),
    ] {
        let refused = vocabulary.matcher(&grammar).unwrap_err();
        assert_eq!(refused.to_string(), "there is no text that it allows");
    }
}
