//! What each keyword does to an output.

#![allow(clippy::unwrap_used, reason = "a test that fails says where")]

use std::path::Path;
use std::sync::OnceLock;

use rocmforge_gguf::{Gguf, MappedFile};
use rocmforge_tokenizer::Tokenizer;
use serde_json::{Value, json};

use super::keywords::{KEYWORDS, Treatment, known, page};
use crate::{Error, Grammar, Piece, Vocabulary, limits};

pub(crate) fn vocabulary() -> &'static (Tokenizer, Vocabulary) {
    static MADE: OnceLock<(Tokenizer, Vocabulary)> = OnceLock::new();
    MADE.get_or_init(|| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../../tests/fixtures/tiny-llama-Q4_K_M.gguf");
        let file = MappedFile::open(&path).unwrap();
        let tokenizer = Tokenizer::from_gguf(&Gguf::open(&file).unwrap()).unwrap();
        let vocabulary = Vocabulary::new(&tokenizer).unwrap();
        (tokenizer, vocabulary)
    })
}

/// Whether an output that is held to a schema may be this text.
fn allows(schema: &Value, text: &str) -> bool {
    let (tokenizer, vocabulary) = vocabulary();
    let matcher = vocabulary.matcher(&Grammar::JsonSchema(schema.clone()));
    let mut matcher = matcher.unwrap_or_else(|error| panic!("{schema}: {error}"));
    for id in tokenizer.encode(text, false, false).unwrap() {
        if matcher.is_complete() || !matcher.mask().unwrap().allows(id) {
            return false;
        }
        matcher.accept(id).unwrap();
    }
    let ends = tokenizer.end_of_generation();
    matcher.is_complete() || ends.iter().any(|&end| matcher.mask().unwrap().allows(end))
}

fn refusal(schema: &Value) -> String {
    let (_, vocabulary) = vocabulary();
    match vocabulary.matcher(&Grammar::JsonSchema(schema.clone())) {
        Err(Error::Grammar { reason }) => reason,
        other => panic!("{schema}: {other:?}"),
    }
}

#[path = "cases.rs"]
mod cases;

#[test]
fn each_keyword_holds_an_output_to_what_it_says() {
    let cases = [
        cases::of_core(),
        cases::of_applicators(),
        cases::of_validation(),
    ]
    .concat();
    let mut wrong = Vec::new();
    for (keyword, schema, valid, others) in &cases {
        assert!(
            known(keyword).is_some_and(|known| known.treatment != Treatment::Annotation),
            "{keyword}"
        );
        for (texts, expected) in [(valid, true), (others, false)] {
            let unlike = texts.iter().filter(|text| allows(schema, text) != expected);
            wrong.extend(
                unlike.map(|text| format!("{keyword}: {text} should be {expected}: {schema}")),
            );
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let enforced = KEYWORDS
        .iter()
        .filter(|known| known.treatment != Treatment::Annotation);
    for keyword in enforced.map(|known| known.name) {
        let is_tried = cases.iter().any(|(name, schema, ..)| {
            *name == keyword
                || schema.get(keyword).is_some()
                || schema.to_string().contains(&format!("\"{keyword}\""))
        });
        assert!(is_tried, "no case has {keyword}");
    }
}

#[test]
fn annotations_and_unknown_keywords_change_nothing() {
    let annotations = KEYWORDS
        .iter()
        .filter(|known| known.treatment == Treatment::Annotation);
    let names = annotations
        .map(|known| known.name)
        .chain(["x-order", "enumNames", "optional"]);
    for name in names {
        for value in [json!("x"), json!({"a": 1}), json!([1]), json!(true)] {
            let schema = json!({"type": "integer", name: value});
            assert!(allows(&schema, "1") && !allows(&schema, "null"), "{schema}");
        }
    }
    for word in [
        "binary",
        "password",
        "path",
        "base64",
        "jwt",
        "cuid",
        "e164",
        "cidrv4",
        "emoji",
        "starts_with",
        "uri-reference",
        "json-pointer",
        "regex",
        "ipv4network",
        "int32",
        "unknown",
    ] {
        assert!(
            allows(
                &json!({"type": "string", "format": word, "maxLength": 4}),
                "\"abc\""
            ),
            "{word}"
        );
    }
}

#[test]
fn forms_that_say_nothing_new_are_taken() {
    for more in [
        json!({"uniqueItems": false}),
        json!({"not": false}),
        json!({"if": {"pattern": "(?=x)y(?=z)"}}),
        json!({"unevaluatedProperties": true}),
        json!({"unevaluatedProperties": {}}),
        json!({"unevaluatedItems": true}),
        json!({"propertyNames": {}}),
        json!({"propertyNames": {"type": "string", "format": "uuid"}}),
        json!({"minProperties": 0}),
        json!({"maxProperties": 9}),
        json!({"dependentRequired": {"a": []}}),
        json!({"dependentSchemas": {"a": true}}),
        json!({"minContains": 3}),
        json!({"contains": null}),
        json!({"additionalItems": false}),
        json!({"exclusiveMinimum": false}),
        json!({"anyOf": [true, false]}),
        json!({"then": {"minimum": 7}}),
        json!({"enum": null, "pattern": null, "title": null}),
        // What PHP writes of an empty object, and Lua of an empty list.
        json!({"patternProperties": [], "$defs": [], "dependentRequired": {"a": {}}}),
        json!({"required": {}, "allOf": [[]]}),
    ] {
        let mut schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": false});
        schema
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        assert!(
            allows(&schema, "{\"a\":1}") && !allows(&schema, "{\"a\":null}"),
            "{schema}"
        );
    }
}

#[test]
fn what_cannot_be_enforced_is_rejected_with_its_place() {
    for (schema, place, words) in [
        (
            json!({"type": "object", "properties": {"a/b": {"type": "array", "items": {"type": "string"}, "uniqueItems": true}}}),
            "#/properties/a~1b/uniqueItems:",
            "drop what comes twice",
        ),
        (
            json!({"items": {"not": {"pattern": "^a"}}}),
            "#/items/not:",
            "pattern",
        ),
        (
            json!({"if": {"uniqueItems": false, "multipleOf": 2}, "then": {}, "else": false}),
            "#/if:",
            "multipleOf",
        ),
        (
            json!({"anyOf": [{"pattern": "(a)\\1"}]}),
            "#/anyOf/0/pattern:",
            "back-reference",
        ),
        (
            json!({"$ref": "#/$defs/none"}),
            "#/$ref:",
            "no schema at #/$defs/none",
        ),
        (
            json!({"$ref": "http://h/other.json"}),
            "#/$ref:",
            "put the schema into $defs",
        ),
        (
            json!({"$defs": {"a": {"$dynamicAnchor": "n"}, "b": {"$dynamicAnchor": "n"}}, "$dynamicRef": "#n"}),
            "#/$dynamicRef:",
            "$dynamicAnchor",
        ),
        (
            json!({"contains": {"type": "null"}, "minContains": 2}),
            "#/minContains:",
            "at most 1",
        ),
        (
            json!({"contains": {"type": "null"}, "maxContains": 2}),
            "#/maxContains:",
            "leave it out",
        ),
        (
            json!({"propertyNames": {"anyOf": [{"pattern": "a"}, {"pattern": "b"}]}}),
            "#/propertyNames:",
            "anyOf",
        ),
        (
            json!({"unevaluatedItems": false, "allOf": [{"prefixItems": [true]}]}),
            "#/unevaluatedItems:",
            "beside allOf",
        ),
        (
            json!({"unevaluatedProperties": false, "if": true, "then": {"properties": {"a": true}}}),
            "#/unevaluatedProperties:",
            "beside if",
        ),
        (
            json!({"properties": (0..9).map(|i| (format!("p{i}"), json!({}))).collect::<serde_json::Map<_, _>>(), "maxProperties": 4}),
            "#/maxProperties:",
            "9 optional",
        ),
        (
            json!({"type": "strnig"}),
            "#/type:",
            "\"strnig\" is no type",
        ),
        (json!({"type": []}), "#/type:", "empty"),
        (json!({"required": "a"}), "#/required:", "no list"),
        (
            json!({"minLength": -1}),
            "#/minLength:",
            "-1 is no whole number",
        ),
        (
            json!({"properties": {"a": 5}}),
            "#/properties/a:",
            "5 is no schema",
        ),
        (json!({"properties": [1]}), "#/properties:", "no object"),
        (json!({"allOf": []}), "#/allOf:", "empty"),
        (json!({"enum": "a"}), "#/enum:", "no list"),
        (
            json!({"const": 9_007_199_254_740_993_u64}),
            "#/const:",
            "2^53",
        ),
        (
            json!({"uniqueItems": "yes"}),
            "#/uniqueItems:",
            "neither true nor false",
        ),
    ] {
        let reason = refusal(&schema);
        assert!(
            reason.starts_with(place) && reason.contains(words),
            "{reason}\n{schema}"
        );
    }
}

#[test]
fn every_keyword_of_draft_2020_12_is_in_the_list() {
    let all = "$schema $vocabulary $comment $id $anchor $ref $dynamicRef $dynamicAnchor $defs allOf anyOf oneOf not if \
        then else dependentSchemas prefixItems items contains properties patternProperties additionalProperties \
        propertyNames unevaluatedItems unevaluatedProperties type enum const multipleOf maximum exclusiveMaximum \
        minimum exclusiveMinimum maxLength minLength pattern maxItems minItems uniqueItems maxContains minContains \
        maxProperties minProperties required dependentRequired format contentEncoding contentMediaType contentSchema \
        title description default deprecated readOnly writeOnly examples";
    let missing: Vec<&str> = all
        .split_whitespace()
        .filter(|name| known(name).is_none())
        .collect();
    assert!(missing.is_empty(), "{missing:?}");
    let names: std::collections::BTreeSet<_> = KEYWORDS.iter().map(|known| known.name).collect();
    assert_eq!(names.len(), KEYWORDS.len(), "each stands there once");
}

#[test]
fn the_page_of_keywords_is_printed_from_the_list() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../docs/json-schema.md");
    if std::env::var_os("ROCMFORGE_WRITE_PAGES").is_some() {
        std::fs::write(&path, page()).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(
        written,
        page(),
        "run this test with ROCMFORGE_WRITE_PAGES=1 to print the page anew"
    );
}

/// Four values of `uniqueItems` are written 49 times each, and a schema may have many such lists.
#[test]
fn what_unique_items_stand_for_is_bounded() {
    let list = |n: usize| {
        let values: Vec<String> = (0..4).map(|k| format!("{k}{}", "x".repeat(n))).collect();
        json!({"type": "array", "items": {"enum": values}, "uniqueItems": true})
    };
    let lists = |n: usize| {
        let lists = (0..n).map(|k| (format!("p{k}"), list(4)));
        json!({"type": "object", "properties": serde_json::Map::from_iter(lists)})
    };
    let (_, vocabulary) = vocabulary();
    let made = vocabulary.matcher(&Grammar::JsonSchema(list(1000)));
    assert!(made.is_ok(), "{:?}", made.err());
    for (large, place) in [
        (list(2000), "#/uniqueItems:"),
        (lists(200), "#/properties/p"),
    ] {
        let reason = refusal(&large);
        assert!(
            reason.starts_with(place) && reason.contains("262144 bytes"),
            "{reason}"
        );
    }
}

/// llguidance shows the expression that it made of the schema.
#[test]
fn texts_that_cannot_be_are_refused_in_words() {
    let schema = json!({"type": "string", "format": "date", "maxLength": 3});
    assert_eq!(
        refusal(&schema),
        "no text has both the pattern or format and the lengths that it gives"
    );
}

/// vllm 52011: the grammar of a number has no end of digits, so a model that repeats one writes it
/// up to its last token.
#[test]
fn numbers_end_and_those_of_128_bits_and_of_doubles_are_allowed() {
    let any = json!({"type": "number"});
    let some = json!({"type": "number", "minimum": 0});
    let above = json!({"type": "number", "exclusiveMinimum": 0, "maximum": 1});
    let whole = json!({"type": "integer"});
    let natural = json!({"type": "integer", "minimum": 0});
    let sevens = json!({"type": "integer", "multipleOf": 7});
    let everything = json!({});
    for text in [
        "340282366920938463463374607431768211455",
        "-170141183460469231731687303715884105728",
    ] {
        for schema in [&any, &whole, &everything] {
            assert!(allows(schema, text), "{schema}: {text}");
        }
    }
    for text in [
        "2.2250738585072014e-308",
        "1.7976931348623157E+308",
        "0.000000000000000012345678901234567",
        "1e0308",
    ] {
        assert!(allows(&any, text) && allows(&everything, text), "{text}");
    }
    let most = "1".repeat(limits::DIGITS_MAX);
    for schema in [&any, &some, &whole, &natural, &everything] {
        assert!(allows(schema, &most), "{schema}");
        assert!(!allows(schema, &format!("{most}1")), "{schema}");
    }
    for schema in [&any, &some, &everything] {
        assert!(allows(schema, &format!("{most}.{most}")), "{schema}");
        assert!(!allows(schema, &format!("{most}.{most}1")), "{schema}");
    }
    for schema in [&any, &everything] {
        assert!(allows(schema, &format!("{most}.{most}e-4932")));
        assert!(!allows(schema, "1e-49321"));
    }
    // Such a number cannot end with zeros alone.
    let zeros = "0".repeat(limits::DIGITS_MAX);
    assert!(allows(&above, &format!("0.{zeros}1")));
    assert!(!allows(&above, &format!("0.{zeros}01")));
    let rest = most
        .bytes()
        .fold(0, |rest, digit| (rest * 10 + u32::from(digit - b'0')) % 7);
    let seventh = format!("{most}{}", (7 - rest * 10 % 7) % 7);
    assert!(allows(&sevens, &seventh), "{seventh}");
    assert!(!allows(&sevens, &format!("{most}12345")));
}

/// Texts, names of members and patterns may have as many digits as they like.
#[test]
fn digits_in_texts_have_no_bound() {
    let digits = "7".repeat(4 * limits::DIGITS_MAX);
    for text in [
        format!("\"{digits}\""),
        format!("\"no {digits}.{digits}e{digits}, {digits}\""),
        format!("{{\"{digits}\": \"{digits}\", \"a\": [1, \"{digits}\"]}}"),
    ] {
        assert!(allows(&json!({}), &text), "{text}");
    }
    for pattern in [
        "^[0-9]+$",
        "^[0-9,]+$",
        "^[0-9]{160}$",
        "^v?[0-9]{160}(,x)?$",
    ] {
        let schema = json!({"type": "string", "pattern": pattern});
        assert!(allows(&schema, &format!("\"{digits}\"")), "{pattern}");
    }
}

/// What follows a number differs by where it stands.
#[test]
fn numbers_end_in_lists_objects_and_calls() {
    let (tokenizer, vocabulary) = vocabulary();
    let numbers =
        json!({"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"]});
    let calls = Piece::All(vec![
        Piece::Text("<p=n>".to_owned()),
        Piece::Json(json!({"type": "number"})),
        Piece::Text("</p>".to_owned()),
    ]);
    let python = Piece::All(vec![
        Piece::Text("f(".to_owned()),
        Piece::Arguments(numbers.clone()),
        Piece::Text(")".to_owned()),
    ]);
    for (grammar, before) in [
        (Grammar::JsonSchema(numbers), "{\"n\": "),
        (
            Grammar::JsonSchema(json!({"type": "array", "items": {"type": "number"}})),
            "[1, -",
        ),
        (Grammar::JsonObject, "{\"a\": {\"b\": [0."),
        (Grammar::Written(calls), "<p=n>"),
        (Grammar::Written(python), "f(n="),
    ] {
        let mut matcher = vocabulary.matcher(&grammar).unwrap();
        let text = format!("{before}{}", "3".repeat(limits::DIGITS_MAX));
        for id in tokenizer.encode(&text, false, false).unwrap() {
            assert!(matcher.mask().unwrap().allows(id), "{text}");
            matcher.accept(id).unwrap();
        }
        let mask = matcher.mask().unwrap();
        let begins_with_digit = |id: &u32| {
            let bytes = tokenizer.token_bytes(*id).unwrap_or_default();
            bytes.first().is_some_and(u8::is_ascii_digit)
        };
        let ids = 0..tokenizer.n_vocab() as u32;
        let allowed: Vec<u32> = ids.filter(|&id| mask.allows(id)).collect();
        assert!(
            !allowed.is_empty() && !allowed.iter().any(begins_with_digit),
            "{text}"
        );
    }
}

/// White space in a schema within another grammar has the bounds that it has in one by itself.
#[test]
fn white_space_within_a_schema_of_a_grammar_in_lark_is_bounded() {
    let (tokenizer, vocabulary) = vocabulary();
    let lark = "start: \"go \" value\nvalue: %json {\"oneOf\": [{\"type\": \"array\"}, {\"type\": \"null\"}]}\n";
    for (text, is_allowed) in [("go [1, 2]", true), ("go [1,     2]", false)] {
        let mut matcher = vocabulary.matcher(&Grammar::Lark(lark.to_owned())).unwrap();
        let ids = tokenizer.encode(text, false, false).unwrap();
        let all = ids.into_iter().all(|id| {
            let is_next = matcher.mask().unwrap().allows(id);
            is_next && matcher.accept(id).is_ok()
        });
        assert_eq!(all, is_allowed, "{text}");
    }
}
