//! Every form, in pieces of every size.

#![allow(clippy::unwrap_used, reason = "a test that fails says where")]

use serde_json::json;

use super::super::joined;
use super::super::splitter::{Splitter, Way};
use super::*;
use crate::tool_calls::pieces::Pieces;
use crate::tool_calls::{self, ToolCall, forms, is_object};

/// `text` in pieces of every size gives the same.
fn split(state: State, with_tools: bool, text: &str) -> Vec<Part> {
    let described = tool_calls::described("f", None, &json!({}));
    let all: Vec<Vec<Part>> = (1..=text.len().max(1))
        .map(|size| {
            let tools = Tools {
                described: if with_tools {
                    vec![described.clone()]
                } else {
                    vec![]
                },
                single: false,
                forced: None,
            };
            let mut splitter = Marked {
                state,
                at_start: state == State::Thinking,
                ..Marked::new(Marks::of("<tool_call></think>"), &Tail::default(), tools)
            };
            let mut parts = Vec::new();
            let characters: Vec<char> = text.chars().collect();
            for piece in characters.chunks(size) {
                splitter.push(&piece.iter().collect::<String>(), &mut parts);
            }
            splitter.finish(false, &mut parts);
            joined(parts)
        })
        .collect();
    assert!(all.iter().all(|parts| *parts == all[0]), "{all:?}");
    all[0].clone()
}

fn text(text: &str) -> Part {
    Part::Text(text.into())
}

fn thought(text: &str) -> Part {
    Part::Reasoning(text.into())
}

fn call(arguments: &str) -> Part {
    Part::Call(ToolCall {
        name: "f".into(),
        arguments: arguments.into(),
    })
}

#[test]
fn thinking_is_told_from_saying() {
    let answer = "<think>\nhm <b> \u{e9}.\n</think>\n\nYes, a < b.";
    let parts = split(State::Begin, false, answer);
    assert_eq!(parts, [thought("hm <b> \u{e9}."), text("Yes, a < b.")]);
    let parts = split(State::Thinking, false, "hm.\n</think>\n\nYes.");
    assert_eq!(parts, [thought("hm."), text("Yes.")]);
    let parts = split(State::Begin, false, "<think>\n\n</think>\n\nYes.");
    assert_eq!(parts, [text("Yes.")]);
    let parts = split(State::Begin, false, "<thin air> </think>");
    assert_eq!(parts, [text("<thin air> </think>")]);
    let parts = split(State::Thinking, false, "cut off </thi");
    assert_eq!(parts, [thought("cut off </thi")]);
    assert_eq!(split(State::Begin, false, "<think"), [text("<think")]);
}

#[test]
fn calls_are_told_from_text() {
    let one = r#"<tool_call>{"name": "f", "arguments": {"a":1}}</tool_call>"#;
    let answer = format!("<think>x</think>I look.\n{one}\n{one}\nDone.");
    let parts = split(State::Begin, true, &answer);
    let expected = [
        thought("x"),
        text("I look."),
        call(r#"{"a":1}"#),
        call(r#"{"a":1}"#),
        text("Done."),
    ];
    assert_eq!(parts, expected);
    let cut = &one[..one.len() - "</tool_call>".len()];
    assert_eq!(split(State::Saying, true, cut), [call(r#"{"a":1}"#)]);
    let none = "a <tool_call>nothing</tool_call> b";
    assert_eq!(
        split(State::Saying, true, none),
        [text("a <tool_call>nothing</tool_call> b")]
    );
    assert_eq!(
        split(State::Saying, false, one),
        [text(one)],
        "without tools it is text"
    );
}

#[test]
fn only_the_first_call_counts_where_one_is_asked_for() {
    let tools = Tools {
        described: vec![tool_calls::described("f", None, &json!({}))],
        single: true,
        forced: None,
    };
    let mut splitter = Marked::new(Marks::of("<tool_call>"), &Tail::default(), tools);
    let mut parts = Vec::new();
    let one = r#"<tool_call>{"name": "f"}</tool_call>"#;
    splitter.push(&format!("{one}{one}"), &mut parts);
    splitter.finish(false, &mut parts);
    assert_eq!(parts, [call("{}")]);
    assert_eq!(splitter.calls(), 1);
}

/// The parts of a text that comes in pieces of every size, as a template of these words has it.
fn of_form(source: &str, text: &str) -> Vec<Part> {
    let parameters =
        json!({"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}});
    let tools = Tools {
        described: ["weather", "now"]
            .map(|name| tool_calls::described(name, None, &parameters))
            .to_vec(),
        ..Tools::default()
    };
    let characters: Vec<char> = text.chars().collect();
    let all: Vec<Vec<Part>> = (1..=characters.len())
        .map(|size| {
            let mut splitter = Marked::new(Marks::of(source), &Tail::default(), tools.clone());
            let mut parts = Vec::new();
            for piece in characters.chunks(size) {
                splitter.push(&piece.iter().collect::<String>(), &mut parts);
            }
            splitter.finish(false, &mut parts);
            joined(parts)
        })
        .collect();
    assert!(
        all.iter().all(|parts| *parts == all[0]),
        "{source}: {all:?}"
    );
    all[0].clone()
}

/// Wherever an answer that calls is cut, no mark of a call is text, and no call has the
/// beginning of a value as all of it.
fn never_shows_marks(source: &str, written: &str) {
    let form = forms::of(source).unwrap();
    let parameters =
        json!({"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}});
    let tools = ["weather", "now"].map(|name| tool_calls::described(name, None, &parameters));
    let tools = Tools {
        described: tools.to_vec(),
        ..Tools::default()
    };
    let mut splitter = Marked::new(Marks::of(source), &Tail::default(), tools.clone());
    let mut whole = Vec::new();
    splitter.push(written, &mut whole);
    splitter.finish(false, &mut whole);
    let whole = joined(whole);
    for (at, _) in written.char_indices().skip(1) {
        let mut splitter = Marked::new(Marks::of(source), &Tail::default(), tools.clone());
        let mut parts = Vec::new();
        splitter.push(&written[..at], &mut parts);
        splitter.finish(true, &mut parts);
        // What is told as it comes is a beginning, and no object.
        let is_cut = |part: &Part| match part {
            Part::Call(call) => {
                let may_be_cut = form.pieces != Pieces::None && !is_object(&call.arguments);
                !whole.iter().any(|one| match one {
                    Part::Call(one) if may_be_cut => one.arguments.starts_with(&call.arguments),
                    one => one == part,
                })
            }
            _ => false,
        };
        let cut: Vec<Part> = joined(parts.clone()).into_iter().filter(is_cut).collect();
        assert!(cut.is_empty(), "{}: {cut:?}", &written[..at]);
        let shows = |part: &Part| match part {
            Part::Text(said) => {
                said.len() > 1 && form.open.starts_with(said.as_str()) || said.contains(form.open)
            }
            _ => false,
        };
        assert!(!parts.iter().any(shows), "{}: {parts:?}", &written[..at]);
    }
}

#[test]
fn a_call_that_is_cut_has_the_arguments_that_came() {
    let written = "I look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Bern\"}}\n</tool_call>";
    let arguments = written.find("{\"city").unwrap();
    let end = arguments + "{\"city\": \"Bern\"}".len();
    let tools = Tools {
        described: vec![tool_calls::described("weather", None, &json!({}))],
        ..Tools::default()
    };
    for at in "I look.\n".len() + 2..=written.len() {
        let mut splitter = Marked::new(Marks::of("<tool_call>"), &Tail::default(), tools.clone());
        let mut parts = Vec::new();
        splitter.push(&written[..at], &mut parts);
        assert_eq!(splitter.is_calling(), (arguments + 1..end).contains(&at));
        splitter.finish(true, &mut parts);
        let mut expected = vec![text("I look.")];
        if at > arguments {
            expected.push(Part::Call(ToolCall {
                name: "weather".into(),
                arguments: written[arguments..at.min(end)].into(),
            }));
        }
        assert_eq!(joined(parts), expected, "{}", &written[..at]);
    }
    // Who writes about calls is not cut short.
    let mut splitter = Marked::new(Marks::of("<tool_call>"), &Tail::default(), tools);
    let mut parts = Vec::new();
    splitter.push("Models write <tool_call> before what", &mut parts);
    splitter.finish(true, &mut parts);
    assert_eq!(
        joined(parts),
        [text("Models write <tool_call> before what")]
    );
}

#[test]
fn arguments_come_in_pieces_that_make_the_whole() {
    let call = r#"{"name": "weather", "arguments": {"city": "Bern", "days": [1, 2]}}"#;
    let written = format!("<tool_call>{call}</tool_call>\n<tool_call>\n{call}\n</tool_call>");
    let tools = Tools {
        described: vec![tool_calls::described("weather", None, &json!({}))],
        ..Tools::default()
    };
    let parts_of = |in_pieces: bool| {
        let mut splitter = Splitter::of(Way::Marked(Box::new(Marked::new(
            Marks::of("<tool_call>"),
            &Tail::default(),
            tools.clone(),
        ))));
        if in_pieces {
            splitter.tell_pieces();
        }
        let mut parts = Vec::new();
        for c in written.chars() {
            splitter.push(&c.to_string(), &mut parts);
        }
        splitter.finish(false, &mut parts);
        parts
    };
    let pieces = parts_of(true);
    let more = pieces
        .iter()
        .filter(|part| matches!(part, Part::Arguments(_)));
    assert_eq!(
        more.count(),
        2 * r#"{"city": "Bern", "days": [1, 2]}"#.len()
    );
    let whole = parts_of(false);
    assert_eq!(whole.len(), 2);
    assert_eq!(joined(pieces), whole);
}

#[test]
fn each_form_is_read_whatever_the_pieces() {
    let weather = |arguments: &str| {
        Part::Call(ToolCall {
            name: "weather".into(),
            arguments: arguments.into(),
        })
    };
    let now = || {
        Part::Call(ToolCall {
            name: "now".into(),
            arguments: "{}".into(),
        })
    };
    let both = r#"{"city":"Bern","days":3}"#;
    let spaced = r#"{"city": "Bern", "days": 3}"#;
    for (source, written, arguments) in [
        (
            "<|tool_call>",
            "<|tool_call>call:weather{city:<|\"|>Bern<|\"|>,days:3}<tool_call|><|tool_call>call:now{}<tool_call|>".to_owned(),
            both,
        ),
        (
            "[TOOL_CALLS]",
            format!("[TOOL_CALLS][{{\"name\": \"weather\", \"arguments\": {spaced}}}, {{\"name\": \"now\"}}]"),
            spaced,
        ),
        (
            "[TOOL_CALLS]",
            format!("[TOOL_CALLS]weather[ARGS]{spaced}[TOOL_CALLS]now{{}}"),
            spaced,
        ),
        (
            "<|tool_calls_section_begin|>",
            format!(
                "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{spaced}\
                 <|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>\
                 <|tool_calls_section_end|>"
            ),
            spaced,
        ),
        (
            "<｜tool▁calls▁begin｜>",
            format!(
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{spaced}\n```\
                 <｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n```\
                 <｜tool▁call▁end｜><｜tool▁calls▁end｜>"
            ),
            spaced,
        ),
        (
            "<｜tool▁calls▁begin｜>",
            format!(
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{spaced}<｜tool▁call▁end｜>\
                 <｜tool▁call▁begin｜>now<｜tool▁sep｜>{{}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
            ),
            spaced,
        ),
        (
            "｜DSML｜",
            "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"weather\">\n<｜DSML｜parameter name=\"city\" string=\"true\">\
             Bern</｜DSML｜parameter>\n<｜DSML｜parameter name=\"days\" string=\"false\">3</｜DSML｜parameter>\n\
             </｜DSML｜invoke>\n<｜DSML｜invoke name=\"now\">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>"
                .to_owned(),
            both,
        ),
        (
            "<minimax:tool_call>",
            "<minimax:tool_call>\n<invoke name=\"weather\">\n<parameter name=\"city\">Bern</parameter>\n\
             <parameter name=\"days\">3</parameter>\n</invoke>\n<invoke name=\"now\">\n</invoke>\n\
             </minimax:tool_call>"
                .to_owned(),
            both,
        ),
        (
            "<seed:tool_call>",
            "<seed:tool_call>\n<function=weather>\n<parameter=city>Bern</parameter>\n\
             <parameter=days>3</parameter>\n</function>\n</seed:tool_call>\
             <seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>"
                .to_owned(),
            both,
        ),
        (
            "<|START_ACTION|>",
            format!(
                "<|START_ACTION|>[\n    {{\"tool_call_id\": \"0\", \"tool_name\": \"weather\", \"parameters\": {spaced}}},\n\
                 {{\"tool_call_id\": \"1\", \"tool_name\": \"now\", \"parameters\": {{}}}}\n]<|END_ACTION|>"
            ),
            spaced,
        ),
        (
            "<tool_calls>",
            format!("<tool_calls>[{{\"name\": \"weather\", \"arguments\": {spaced}}}, {{\"name\": \"now\"}}]</tool_calls>"),
            spaced,
        ),
        (
            "<|function_call|>",
            format!("<|function_call|>{{\"name\": \"weather\", \"arguments\": {spaced}}}\n{{\"name\": \"now\"}}"),
            spaced,
        ),
        (
            "List of tools: ",
            "<|tool_call_start|>[weather(city='Bern', days=3), now()]<|tool_call_end|>".to_owned(),
            both,
        ),
        (
            "<|tool_call_start|>",
            "<|tool_call_start|>[weather(city='Bern', days=3), now()]<|tool_call_end|>".to_owned(),
            both,
        ),
        (
            "<TOOLCALL>",
            format!("<TOOLCALL>[{{\"name\": \"weather\", \"arguments\": {spaced}}}, {{\"name\": \"now\"}}]</TOOLCALL>"),
            spaced,
        ),
        (
            "<|tool_call|>",
            format!("<|tool_call|>[{{\"name\": \"weather\", \"arguments\": {spaced}}}, {{\"name\": \"now\"}}]"),
            spaced,
        ),
    ] {
        let parts = of_form(source, &format!("I look.\n{written}"));
        let said = Part::Text("I look.".to_owned());
        assert_eq!(parts, [said, weather(arguments), now()], "{written}");
        never_shows_marks(source, &written);
        // What is no call stays text, marks and all.
        let form = forms::of(source).unwrap();
        for said in ["nothing", " is a mark, and {\"a\" a brace", " begins {a"] {
            let none = format!("a {}{said}{} b", form.open, form.close);
            assert_eq!(of_form(source, &none), [Part::Text(none.clone())]);
        }
    }
    let llama = "<|python_tag|>";
    let first = format!("{{\"name\": \"weather\", \"parameters\": {spaced}}}");
    let second = "{\"name\": \"now\", \"parameters\": {}}";
    let expected = [weather(both), now()];
    assert_eq!(of_form(llama, &format!("{first}; {second}")), expected);
    assert_eq!(
        of_form(llama, &format!("<|python_tag|>{first};{second}")),
        expected
    );
    assert_eq!(
        of_form(llama, "[weather(city=\"Bern\", days=3), now()]"),
        expected
    );
    for none in ["{\"name\": \"other\"}", "{ \"a\": 1 }", "It is {}", "<|py"] {
        assert_eq!(
            of_form(llama, none),
            [Part::Text(none.to_owned())],
            "{none}"
        );
    }
}

#[test]
fn thoughts_have_other_marks_too() {
    for (source, text) in [
        ("[/THINK]", "[THINK]Hm.[/THINK]Yes."),
        ("<channel|>", "<|channel>thought\nHm.\n<channel|>Yes."),
        ("</seed:think>", "<seed:think>\nHm.\n</seed:think>Yes."),
        (
            "<|END_THINKING|>",
            "<|START_THINKING|>Hm.<|END_THINKING|>Yes.",
        ),
    ] {
        let expected = [
            Part::Reasoning("Hm.".to_owned()),
            Part::Text("Yes.".to_owned()),
        ];
        assert_eq!(of_form(source, text), expected);
    }
}

#[test]
fn a_frame_around_the_answer_is_left_out() {
    let (hm, yes) = (thought("Hm."), text("Yes, <b>."));
    let response = "<|START_RESPONSE|><|END_THINKING|><|START_ACTION|>";
    for (source, written) in [
        (
            response,
            "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes, <b>.<|END_RESPONSE|>",
        ),
        (
            "<|START_TEXT|><|END_THINKING|>",
            "<|START_THINKING|>Hm.<|END_THINKING|>\n<|START_TEXT|>Yes, <b>.<|END_TEXT|>",
        ),
        (
            "<answer></think>",
            "<think>\nHm.\n</think>\n<answer>\nYes, <b>.\n</answer>",
        ),
        // Cut, or never opened.
        (
            "<answer></think>",
            "<think>\nHm.\n</think>\n<answer>\nYes, <b>.",
        ),
        ("<answer></think>", "<think>\nHm.\n</think>\nYes, <b>."),
    ] {
        assert_eq!(
            of_form(source, written),
            [hm.clone(), yes.clone()],
            "{written}"
        );
    }
    let answer = "<|START_RESPONSE|>Yes, <b>.<|END_RESPONSE|>";
    assert_eq!(of_form(response, answer), [yes]);
    // Marks where no frame begins or ends are text.
    for none in ["Write <answer>.", "a </answer> b", "<answ"] {
        assert_eq!(of_form("<answer>", none), [text(none)]);
    }
    let calls = "<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[\n{\"tool_call_id\": \"0\", \
                 \"tool_name\": \"now\", \"parameters\": {}}\n]<|END_ACTION|>";
    let now = Part::Call(ToolCall {
        name: "now".into(),
        arguments: "{}".into(),
    });
    assert_eq!(of_form(response, calls), [hm, now]);
}

/// The parts of a text that something other than the model has ended.
fn cut(source: &str, written: &str) -> Vec<Part> {
    let parameters = json!({"properties": {"city": {"type": "string"}}});
    let tools = Tools {
        described: ["weather", "now"]
            .map(|name| tool_calls::described(name, None, &parameters))
            .to_vec(),
        ..Tools::default()
    };
    let mut splitter = Marked::new(Marks::of(source), &Tail::default(), tools);
    let mut parts = Vec::new();
    splitter.push(written, &mut parts);
    splitter.finish(true, &mut parts);
    joined(parts)
}

#[test]
fn a_value_with_tags_of_its_own_is_whole_with_the_calls_tag_alone() {
    let written =
        "<tool_call>\n<function=weather>\n<parameter=city>\n<b>x</b>\n</parameter>\n</function>\n";
    let named = written.find("weather>").unwrap() + "weather>".len();
    let whole = written.find("</function>").unwrap() + "</function>".len();
    for at in "<tool_call>\n<f".len()..=written.len() {
        let arguments = match cut("<tool_call>", &written[..at]).as_slice() {
            [] => String::new(),
            [Part::Call(call)] => call.arguments.clone(),
            other => panic!("{}: {other:?}", &written[..at]),
        };
        let all = r#"{"city":"<b>x</b>"}"#;
        assert_eq!(arguments.is_empty(), at < named, "{}", &written[..at]);
        assert_eq!(arguments == all, at >= whole, "{}", &written[..at]);
        assert!(all.starts_with(&arguments), "{arguments}");
    }
}

#[test]
fn behind_calls_that_nothing_closes_are_calls_or_text() {
    let named = |name: &str, arguments: &str| {
        Part::Call(ToolCall {
            name: name.into(),
            arguments: arguments.into(),
        })
    };
    let one = r#"<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>"#;
    let other = r#"<|tool_call|>[{"name": "weather", "arguments": {"city": "Bern"}}]"#;
    let two = [named("now", "{}"), named("weather", r#"{"city":"Bern"}"#)];
    assert_eq!(of_form("<|tool_call|>", &format!("{one}{other}")), two);
    let said = [named("now", "{}"), text("That is all.")];
    assert_eq!(
        of_form("<|tool_call|>", &format!("{one}\nThat is all.")),
        said
    );
    // The beginning of another is no text.
    assert_eq!(
        cut("<|tool_call|>", &format!("{one}{}", &other[..40])),
        said[..1]
    );
}
