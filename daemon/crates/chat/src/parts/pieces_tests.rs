//! Calls of every form that is told in pieces, split and cut everywhere: the pieces make what the
//! form's parser reads, and nothing that was told changes.

#![allow(clippy::unwrap_used, reason = "a test that fails says where")]

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use serde_json::{Map, Value, json};

use super::{Marked, Marks, Part, Splitter, Tail, Way, joined};
use crate::tool_calls::forms::{self, Form};
use crate::tool_calls::{self, Tools, is_object};

/// A call that is written.
type Wanted = (&'static str, Map<String, Value>);

/// Writes calls.
type Writer = fn(&[Wanted]) -> String;

/// A form, and how calls are written in it.
struct Written {
    source: &'static str,
    write: Writer,
    /// What its texts cannot have.
    never: &'static [&'static str],
}

impl Written {
    /// A call that is broken is none, but where its beginning was told.
    fn is_strict(&self) -> bool {
        ["<|tool_call>", "<|tool_call_start|>"].contains(&self.source)
    }
}

fn forms() -> Vec<Written> {
    let all: [(&str, Writer, &[&str]); 18] = [
        ("<tool_call>", functions, &["</", "<parameter="]),
        ("<tool_call>", keys_and_values, &["</", "<arg_key>"]),
        (
            "<tool_call>",
            |calls| each(calls, "<tool_call>\n{}\n</tool_call>\n", "arguments"),
            &[],
        ),
        ("<seed:tool_call>", seed, &["</", "<parameter="]),
        (
            "<minimax:tool_call>",
            |calls| invokes(calls, "minimax:tool_call", "", false),
            &["</", "<parameter"],
        ),
        (
            "｜DSML｜",
            |calls| invokes(calls, "｜DSML｜function_calls", "｜DSML｜", true),
            &["</｜"],
        ),
        ("<|tool_call>", gemma, &["<|\"|>", "<tool_call|>"]),
        ("<|tool_call_start|>", python, &["<|tool_call_end|>"]),
        ("<|tool_calls_section_begin|>", kimi, &[]),
        (
            "<｜tool▁calls▁begin｜>",
            |calls| deepseek(calls, false),
            &[],
        ),
        ("<｜tool▁calls▁begin｜>", |calls| deepseek(calls, true), &[]),
        ("[TOOL_CALLS]", mistral, &[]),
        (
            "[TOOL_CALLS]",
            |calls| list(calls, "[TOOL_CALLS]", "name", "arguments", ""),
            &[],
        ),
        (
            "<|START_ACTION|>",
            |calls| {
                list(
                    calls,
                    "<|START_ACTION|>",
                    "tool_name",
                    "parameters",
                    "<|END_ACTION|>",
                )
            },
            &[],
        ),
        (
            "<TOOLCALL>",
            |calls| list(calls, "<TOOLCALL>", "name", "arguments", "</TOOLCALL>"),
            &[],
        ),
        (
            "<tool_calls>",
            |calls| list(calls, "<tool_calls>", "name", "arguments", "</tool_calls>"),
            &[],
        ),
        (
            "<|tool_call|>",
            |calls| list(calls, "<|tool_call|>", "name", "arguments", ""),
            &[],
        ),
        (
            "<|function_call|>",
            |calls| format!("<|function_call|>{}", each(calls, "{}\n", "arguments")),
            &[],
        ),
    ];
    all.map(|(source, write, never)| Written {
        source,
        write,
        never,
    })
    .into()
}

fn text_of(arguments: &Map<String, Value>) -> String {
    Value::from(arguments.clone()).to_string()
}

/// A value between tags.
fn between(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| value.to_string(), str::to_owned)
}

fn all(calls: &[Wanted], write: impl Fn(&str, &Map<String, Value>) -> String) -> String {
    calls
        .iter()
        .map(|(name, arguments)| write(name, arguments))
        .collect()
}

fn each(calls: &[Wanted], around: &str, key: &str) -> String {
    all(calls, |name, arguments| {
        let call = format!(
            "{{\"name\": \"{name}\", \"{key}\": {}}}",
            text_of(arguments)
        );
        around.replace("{}", &call)
    })
}

fn list(calls: &[Wanted], open: &str, name: &str, key: &str, close: &str) -> String {
    let calls = calls.iter().map(|(called, arguments)| {
        let arguments = text_of(arguments);
        format!("{{\"tool_call_id\": \"0\", \"{name}\": \"{called}\", \"{key}\": {arguments}, \"id\": \"1\", \"n\": -12.50}}")
    });
    format!(
        "{open}[\n{}\n]{close}",
        calls.collect::<Vec<_>>().join(", ")
    )
}

fn functions(calls: &[Wanted]) -> String {
    all(calls, |name, arguments| {
        let one = function(name, arguments);
        format!("<tool_call>\n{one}\n</tool_call>\n")
    })
}

fn function(name: &str, arguments: &Map<String, Value>) -> String {
    let parameters = arguments
        .iter()
        .map(|(key, value)| format!("<parameter={key}>\n{}\n</parameter>\n", between(value)));
    format!(
        "<function={name}>\n{}</function>",
        parameters.collect::<String>()
    )
}

fn seed(calls: &[Wanted]) -> String {
    let calls = all(calls, |name, arguments| {
        let one = function(name, arguments);
        one.replace(">\n", ">").replace("\n</", "</")
    });
    format!("<seed:tool_call>{calls}</seed:tool_call>")
}

fn keys_and_values(calls: &[Wanted]) -> String {
    all(calls, |name, arguments| {
        let parameters = arguments.iter().map(|(key, value)| {
            let value = between(value);
            format!("<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n")
        });
        let parameters = parameters.collect::<String>();
        format!("<tool_call>{name}\n{parameters}</tool_call>\n")
    })
}

fn invokes(calls: &[Wanted], block: &str, prefix: &str, says: bool) -> String {
    let calls = all(calls, |name, arguments| {
        let parameters = arguments.iter().map(|(key, value)| {
            let kind = if says {
                format!(" string=\"{}\"", value.is_string())
            } else {
                String::new()
            };
            let value = between(value);
            format!("<{prefix}parameter name=\"{key}\"{kind}>{value}</{prefix}parameter>\n")
        });
        let parameters = parameters.collect::<String>();
        format!("<{prefix}invoke name=\"{name}\">\n{parameters}</{prefix}invoke>\n")
    });
    format!("<{block}>\n{calls}</{block}>")
}

fn gemma(calls: &[Wanted]) -> String {
    fn value(of: &Value) -> String {
        match of {
            Value::String(text) => format!("<|\"|>{text}<|\"|>"),
            Value::Array(list) => {
                let list: Vec<_> = list.iter().map(value).collect();
                format!("[{}]", list.join(","))
            }
            Value::Object(members) => {
                let members = members
                    .iter()
                    .map(|(key, one)| format!("{key}:{}", value(one)));
                format!("{{{}}}", members.collect::<Vec<_>>().join(","))
            }
            other => other.to_string(),
        }
    }
    all(calls, |name, arguments| {
        let arguments = value(&arguments.clone().into());
        format!("<|tool_call>call:{name}{arguments}<tool_call|>")
    })
}

fn python(calls: &[Wanted]) -> String {
    fn value(of: &Value) -> String {
        match of {
            // As Python writes them, with either quotation mark.
            Value::String(text) if text.len() % 2 == 0 && !text.contains(['\'', '\n', '\\']) => {
                format!("'{}'", text)
            }
            Value::String(text) if text.len() % 3 == 0 && !text.contains(['"', '\\']) => {
                format!("\"\"\"{text}\"\"\"")
            }
            Value::Bool(truth) => if *truth { "True" } else { "False" }.to_owned(),
            Value::Array(list) => {
                let list: Vec<_> = list.iter().map(value).collect();
                format!("[{}]", list.join(", "))
            }
            Value::Object(members) => {
                let members = members
                    .iter()
                    .map(|(key, one)| format!("'{key}': {}", value(one)));
                format!("{{{}}}", members.collect::<Vec<_>>().join(", "))
            }
            other => other.to_string(),
        }
    }
    let calls = calls.iter().map(|(name, arguments)| {
        let arguments = arguments
            .iter()
            .map(|(key, one)| format!("{key}={}", value(one)));
        format!("{name}({})", arguments.collect::<Vec<_>>().join(", "))
    });
    let calls = calls.collect::<Vec<_>>().join(", ");
    format!("<|tool_call_start|>[{calls}]<|tool_call_end|>")
}

fn kimi(calls: &[Wanted]) -> String {
    let calls = all(calls, |name, arguments| {
        let arguments = text_of(arguments);
        format!(
            "<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        )
    });
    format!("<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>")
}

fn deepseek(calls: &[Wanted], fenced: bool) -> String {
    let calls = all(calls, |name, arguments| {
        let arguments = text_of(arguments);
        let call = match fenced {
            true => format!("function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"),
            false => format!("{name}<｜tool▁sep｜>{arguments}"),
        };
        format!("<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>")
    });
    format!("<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>")
}

fn mistral(calls: &[Wanted]) -> String {
    all(calls, |name, arguments| {
        format!("[TOOL_CALLS]{name}[ARGS]{}", text_of(arguments))
    })
}

fn tools() -> Tools {
    let text = json!({"type": "string"});
    let maybe = json!({"anyOf": [{"type": "string"}, {"type": "null"}]});
    let edit = json!({"properties": {
        "path": text, "content": text, "note": maybe, "line": {"type": "integer"},
        "flag": {"type": "boolean"}, "edits": {"type": "array"}, "more": {"type": "object"}, "any": {},
    }});
    let other = json!({"properties": {"path": text}});
    let tool = |name: &str, parameters: &Value| tool_calls::described(name, None, parameters);
    Tools {
        described: vec![tool("edit", &edit), tool("other", &other)],
        ..Tools::default()
    }
}

/// What texts are made of.
const PLAIN: [&str; 22] = [
    "a", "word", " ", "\n", "\n\n", "\t", "\"", "\\", "'", "{", "}", "[1, 2]", ",", ":", "é",
    "漢字", "🦀", "null", "true", "12", "<b>", "x < y",
];
/// And what looks like a notation.
const MARKS: [&str; 27] = [
    "</",
    "</parameter>",
    "\n</parameter>\n",
    "<parameter=path>",
    "\n<parameter=line>",
    "<parameter=",
    "</function>",
    "\n</function>\n",
    "<function=other>",
    "<arg_key>",
    "</arg_key>",
    "</arg_value>",
    "<arg_key>line</arg_key>",
    "</invoke>",
    "<invoke name=\"other\">",
    "<parameter name=\"line\">",
    "</function_calls>",
    "<|\"|>",
    "<tool_call|>",
    "[TOOL_CALLS]",
    "<｜tool▁call▁end｜>",
    "<|tool_call_end|>",
    "</tool_call>",
    "</｜DSML｜parameter>",
    "</｜DSML｜invoke>",
    "```",
    "<|END_ACTION|>",
];

fn text(random: &mut StdRng, never: &[&str], marks: bool) -> String {
    let n = random.random_range(0..12);
    let pick = |random: &mut StdRng| match marks && random.random_range(0..3) == 0 {
        true => *MARKS.choose(random).unwrap(),
        false => *PLAIN.choose(random).unwrap(),
    };
    let text: String = (0..n).map(|_| pick(random)).collect();
    match never.iter().any(|mark| text.contains(mark)) {
        true => String::new(),
        false => text,
    }
}

fn value(random: &mut StdRng, never: &[&str], depth: u32) -> Value {
    match random.random_range(0..if depth > 0 { 7 } else { 5 }) {
        0 => random.random_range(-1000_i64..1000).into(),
        1 => random.random_bool(0.5).into(),
        2..=4 => text(random, never, true).into(),
        5 => (0..random.random_range(0..3))
            .map(|_| value(random, never, depth - 1))
            .collect(),
        _ => {
            let one = value(random, never, depth - 1);
            json!({"k": one, "l": text(random, never, true)})
        }
    }
}

fn calls(random: &mut StdRng, never: &[&str]) -> Vec<Wanted> {
    let one = |random: &mut StdRng| {
        let name = *["edit", "edit", "other"].choose(random).unwrap();
        let mut arguments = Map::new();
        let mut give = |key: &str, value: Value| arguments.insert(key.to_owned(), value);
        if random.random_bool(0.8) {
            give("path", text(random, never, true).into());
        }
        if name == "edit" {
            for key in ["note", "line", "content", "edits", "flag", "more", "any"] {
                if random.random_bool(0.5) {
                    continue;
                }
                let said = match key {
                    "line" => random.random_range(0..99).into(),
                    "flag" => random.random_bool(0.5).into(),
                    "edits" => json!([value(random, never, 2), value(random, never, 1)]),
                    "more" => json!({"b": value(random, never, 2)}),
                    "any" => value(random, never, 1),
                    _ => text(random, never, true).into(),
                };
                give(key, said);
            }
        }
        (name, arguments)
    };
    (0..random.random_range(1..4))
        .map(|_| one(random))
        .collect()
}

fn splitter(source: &str, in_pieces: bool) -> Splitter {
    let mut splitter = Splitter::of(Way::Marked(Box::new(Marked::new(
        Marks::of(source),
        &Tail::default(),
        tools(),
    ))));
    if in_pieces {
        splitter.tell_pieces();
    }
    splitter
}

/// The parts of a text, of which each piece ends at one of these bytes.
fn parts(source: &str, written: &str, ends: &[usize], in_pieces: bool, is_cut: bool) -> Vec<Part> {
    let mut splitter = splitter(source, in_pieces);
    let (mut parts, mut from) = (Vec::new(), 0);
    for end in ends.iter().copied().chain([written.len()]) {
        splitter.push(&written[from..end], &mut parts);
        from = end;
    }
    splitter.finish(is_cut, &mut parts);
    parts
}

fn calls_of(parts: &[Part]) -> Vec<(String, String)> {
    let call = |part: &Part| match part {
        Part::Call(call) => Some((call.name.clone(), call.arguments.clone())),
        _ => None,
    };
    parts.iter().filter_map(call).collect()
}

/// Every way to split a text in two, in characters, and some at random.
fn splits(random: &mut StdRng, written: &str) -> Vec<Vec<usize>> {
    let ends: Vec<usize> = written.char_indices().map(|(at, _)| at).skip(1).collect();
    let some = |random: &mut StdRng| {
        let share = random.random_range(0.02..0.9);
        ends.iter()
            .copied()
            .filter(|_| random.random_bool(share))
            .collect()
    };
    let some: Vec<Vec<usize>> = (0..8).map(|_| some(random)).collect();
    let in_two = ends.iter().map(|&at| vec![at]);
    in_two.chain([ends.clone()]).chain(some).collect()
}

/// What the form's parser makes of each block of an answer that is nothing but blocks.
fn by_parser(form: Form, written: &str) -> Option<Vec<(String, String)>> {
    let tools = tools();
    let mut calls = Vec::new();
    let mut rest = written;
    while let Some((_, block)) = rest.split_once(form.open) {
        let (block, behind) = block.split_once(form.close)?;
        let read = (form.parse)(block, &tools.described)?;
        calls.extend(read.into_iter().map(|call| (call.name, call.arguments)));
        rest = behind;
    }
    Some(calls)
}

#[test]
fn pieces_make_the_whole_however_a_text_is_split() {
    for (at, form) in forms().into_iter().enumerate() {
        for seed in 0..20 {
            let mut random = StdRng::seed_from_u64(seed * 100 + at as u64);
            let wanted = calls(&mut random, form.never);
            let written = (form.write)(&wanted);
            let whole = joined(parts(form.source, &written, &[], false, false));
            let expected: Vec<_> = wanted
                .iter()
                .map(|(name, arguments)| ((*name).to_owned(), text_of(arguments)))
                .collect();
            // Between tags a value may be text or JSON as it looks, and lose its first line.
            let by_looks = ["any", "note"].into_iter().any(|key| written.contains(key));
            let is_exact = match form.source {
                "<tool_call>" => !written.contains("<arg_key>") && !by_looks,
                source => !["<seed", "<minimax", "｜DSML｜"]
                    .iter()
                    .any(|tags| source.contains(tags)),
            };
            if is_exact {
                assert_eq!(calls_of(&whole), expected, "seed {seed}: {written}");
            }
            for ends in splits(&mut random, &written) {
                let pieces = parts(form.source, &written, &ends, true, false);
                let message = format!("seed {seed}, {ends:?}: {written}");
                assert_eq!(joined(pieces), whole, "{message}");
                let told = parts(form.source, &written, &ends, false, false);
                assert_eq!(joined(told), whole, "{message}");
            }
        }
    }
}

#[test]
fn notations_in_values_are_read_as_the_parser_reads_them() {
    for (at, form) in forms()
        .into_iter()
        .enumerate()
        .filter(|(_, form)| !form.never.is_empty())
    {
        let read = forms::of(form.source).unwrap();
        for seed in 0..30 {
            let mut random = StdRng::seed_from_u64(seed * 100 + at as u64);
            let wanted = calls(&mut random, &[]);
            let mut written = (form.write)(&wanted);
            // What was forgotten, too.
            for mark in [
                "</parameter>",
                "</arg_value>",
                "</function>",
                "</invoke>",
                "\n",
            ] {
                if random.random_range(0..5) == 0 {
                    written = written.replacen(mark, "", random.random_range(1..3));
                }
            }
            let whole = joined(parts(form.source, &written, &[], true, false));
            let told = joined(parts(form.source, &written, &[], false, false));
            if let Some(expected) = by_parser(read, &written) {
                assert_eq!(calls_of(&told), expected, "seed {seed}: {written}");
                assert_eq!(calls_of(&whole), expected, "seed {seed}: {written}");
            } else if form.is_strict() {
                let broken = calls_of(&whole).iter().any(|call| !is_object(&call.1));
                assert!(broken, "seed {seed}: {written} {whole:?}");
            }
            for ends in splits(&mut random, &written) {
                let pieces = joined(parts(form.source, &written, &ends, true, false));
                assert_eq!(pieces, whole, "seed {seed}, {ends:?}: {written}");
                let again = joined(parts(form.source, &written, &ends, false, false));
                assert_eq!(again, told, "seed {seed}, {ends:?}: {written}");
            }
        }
    }
}

#[test]
fn what_is_cut_is_a_beginning_and_no_object() {
    for (at, form) in forms().into_iter().enumerate() {
        for seed in 0..8 {
            let mut random = StdRng::seed_from_u64(seed * 100 + at as u64);
            let wanted = calls(
                &mut random,
                &["</", "<parameter", "<arg_key>", "<|", "<tool_call|>"],
            );
            let written = (form.write)(&wanted);
            let whole = calls_of(&parts(form.source, &written, &[], false, false));
            for (end, _) in written.char_indices() {
                let cut = &written[..end];
                let once = parts(form.source, cut, &[], true, true);
                let once = joined(once);
                let ends: Vec<usize> = cut.char_indices().map(|(at, _)| at).skip(1).collect();
                let split = joined(parts(form.source, cut, &ends, true, true));
                assert_eq!(split, once, "seed {seed}: {cut}");
                let calls = calls_of(&once);
                assert!(calls.len() <= whole.len(), "seed {seed}: {cut}");
                for (at, (call, of)) in calls.iter().zip(&whole).enumerate() {
                    let begins = call.0 == of.0 && of.1.starts_with(&call.1);
                    let is_last = at + 1 == calls.len();
                    let is_cut = is_last && !is_object(&call.1);
                    assert!(
                        call == of || begins && is_cut,
                        "seed {seed}: {cut} {call:?}"
                    );
                }
            }
        }
    }
}

#[path = "cases_tests.rs"]
mod cases_tests;
