//! Messages in pieces of every size.

use serde_json::json;

use super::super::joined;
use super::*;
use crate::tool_calls;

/// The same whatever the pieces.
fn split(headers: Headers, tail: &str, text: &str) -> Vec<Part> {
    let parameters = json!({"properties": {"a": {"type": "integer"}}});
    let tools = Tools {
        described: vec![tool_calls::described("f", None, &parameters)],
        ..Tools::default()
    };
    let characters: Vec<char> = text.chars().collect();
    let all: Vec<Vec<Part>> = (1..=characters.len())
        .map(|size| {
            let mut messages = Messages::new(headers, tail, tools.clone());
            let mut parts = Vec::new();
            for piece in characters.chunks(size) {
                messages.push(&piece.iter().collect::<String>(), &mut parts);
            }
            messages.finish(false, &mut parts);
            joined(parts)
        })
        .collect();
    assert!(all.iter().all(|parts| *parts == all[0]), "{all:?}");
    all[0].clone()
}

fn call(name: &str, arguments: &str) -> Part {
    Part::Call(ToolCall {
        name: name.to_owned(),
        arguments: arguments.to_owned(),
    })
}

#[test]
fn channels_are_told_apart() {
    let parts = split(
        Headers::Channels,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>Hm < 5.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
    );
    let (hm, yes) = ("Hm < 5.".to_owned(), "Yes.".to_owned());
    assert_eq!(parts, [Part::Reasoning(hm.clone()), Part::Text(yes)]);
    let cut = split(
        Headers::Channels,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>Hm < 5.",
    );
    assert_eq!(cut, [Part::Reasoning(hm)]);
    let open = "<|start|>assistant<|channel|>final<|message|>Once";
    assert_eq!(
        split(Headers::Channels, open, " upon"),
        [Part::Text(" upon".to_owned())]
    );
    assert!(split(Headers::Channels, "<|start|>assistant", "<|channel|>ana").is_empty());
}

#[test]
fn a_call_that_is_cut_has_what_came_of_it() {
    let cut = |headers: Headers, text: &str| {
        let mut messages = Messages::new(headers, "<|start|>assistant", Tools::default());
        let mut parts = Vec::new();
        messages.push(text, &mut parts);
        messages.finish(true, &mut parts);
        joined(parts)
    };
    let begun = " to=functions.f<|channel|>commentary<|message|>{\"a\": 1";
    let expected = [call("f", "{\"a\": 1")];
    assert_eq!(cut(Headers::Channels, begun), expected);
    assert_eq!(cut(Headers::Channels, &format!("{begun}<|ca")), expected);
    for header in ["", " to=functions.f<|channel|>commentary<|message|>"] {
        assert!(cut(Headers::Channels, header).is_empty(), "{header}");
    }
    let one = "<atem:invoke name=\"f\"><atem:parameter name=\"a\">/tmp/x";
    let whole = format!("{one}</atem:parameter></atem:invoke>");
    let begun = format!(" to=f<|message|><atem:function_calls>\n{whole}");
    let expected = [call("f", "{\"a\":\"/tmp/x\"}")];
    for at in " to=f<|message|>".len()..begun.len() {
        assert!(cut(Headers::Recipients, &begun[..at]).is_empty(), "{at}");
    }
    assert_eq!(cut(Headers::Recipients, &begun), expected);
    let another = format!("{begun}{one}");
    assert_eq!(cut(Headers::Recipients, &another), expected);
    // A tag in the value that is cut ends no call.
    let begun = " to=f<|message|><atem:function_calls>\n<atem:invoke name=\"f\">\n\
                 <atem:parameter name=\"a\">[\"<b></atem:invoke> and more";
    assert!(cut(Headers::Recipients, begun).is_empty());
}

#[test]
fn calls_have_their_names_from_the_header() {
    let parts = split(
        Headers::Channels,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.f \
         <|constrain|>json<|message|>{\"a\": 1}<|call|>",
    );
    let thought = Part::Reasoning("I look.".to_owned());
    assert_eq!(parts, [thought, call("f", "{\"a\": 1}")]);
    let before = "<|start|>assistant to=functions.g<|channel|>commentary<|message|>";
    assert_eq!(split(Headers::Channels, "", before), [call("g", "{}")]);
    let preamble = split(
        Headers::Channels,
        "",
        "<|channel|>commentary<|message|>I will look.<|end|>",
    );
    assert_eq!(preamble, [Part::Text("I will look.".to_owned())]);
}

#[test]
fn recipients_are_told_apart() {
    let recipients = |tail: &str, text: &str| split(Headers::Recipients, tail, text);
    let start = "<|start|>assistant";
    let (hm, yes) = ("Hm < 5.".to_owned(), "Yes.".to_owned());
    let thought = " to=self<|message|>Hm < 5.<|eom|><|start|>assistant";
    let parts = recipients(start, &format!("{thought} to=user<|message|>Yes.<|eot|>"));
    assert_eq!(
        parts,
        [Part::Reasoning(hm.clone()), Part::Text(yes.clone())]
    );
    assert_eq!(
        recipients(start, "<|message|>Yes."),
        [Part::Text(yes.clone())]
    );
    let open = "<|start|>user<|message|>a<|eot|><|start|>assistant to=user<|message|>Once";
    assert_eq!(recipients(open, "Yes."), [Part::Text(yes)]);
    let calls = "<atem:function_calls>\n<atem:invoke name=\"f\">\n<atem:parameter name=\"a\">1</atem:parameter>\n\
                 </atem:invoke>\n</atem:function_calls>";
    let two =
        format!("{thought} to=f<|message|>{calls}<|eom|>{start} to=f<|message|>{calls}<|eot|>");
    let called = call("f", "{\"a\":1}");
    assert_eq!(
        recipients(start, &two),
        [Part::Reasoning(hm), called.clone(), called]
    );
    // What is no call is what it says.
    let none = recipients(start, " to=f<|message|>a = 1<|eot|>");
    assert_eq!(none, [Part::Text("a = 1".to_owned())]);
}

#[test]
fn a_prompt_that_goes_on_with_a_message_has_opened_it() {
    let header = "<|start|>assistant<|channel|>final<|message|>";
    let asked = "<|start|>user<|message|>Hi<|end|>";
    let more = " who ran.<|end|><|start|>assistant<|channel|>final<|message|>More.<|return|>";
    for said in [
        "Once upon a time there was a fox whose name was Sam",
        "The mark <|start|> begins one, and <|end|> ends it",
    ] {
        let tail = format!("{asked}{header}{said}");
        let parts = split(Headers::Channels, &tail, more);
        assert_eq!(parts, [Part::Text(" who ran.More.".to_owned())]);
        // It comes as it is generated.
        let mut messages = Messages::new(Headers::Channels, &tail, Tools::default());
        let mut parts = Vec::new();
        messages.push(" who", &mut parts);
        assert_eq!(parts, [Part::Text(" who".to_owned())]);
    }
    let thought = "<|start|>assistant<|channel|>analysis";
    let parts = split(Headers::Channels, thought, "<|message|>Hm.<|end|>");
    assert_eq!(parts, [Part::Reasoning("Hm.".to_owned())]);
    // Behind a message that has ended, another header comes.
    let closed = format!("{header}Hi<|end|>");
    let parts = split(
        Headers::Channels,
        &closed,
        &format!("{thought}<|message|>Hm."),
    );
    assert_eq!(parts, [Part::Reasoning("Hm.".to_owned())]);
}

#[test]
fn marks_that_no_header_follows_are_text() {
    let said = |answer: &str, expected: &str| {
        let parts = split(Headers::Channels, "<|start|>assistant", answer);
        assert_eq!(parts, [Part::Text(expected.to_owned())], "{answer}");
    };
    for text in [
        "Hello there, <| is a mark.",
        " Hello",
        "a",
        "The mark <|end|> ends a message, and <|start|> begins one.",
    ] {
        said(text, text);
        let header = "<|channel|>final<|message|>";
        said(&format!("{header}{text}"), text);
        said(&format!("{header}{text}<|return|>"), text);
        let thought = format!("<|channel|>analysis<|message|>{text}<|end|><|start|>assistant");
        let parts = split(
            Headers::Channels,
            "<|start|>assistant",
            &format!("{thought}{header}{text}"),
        );
        let expected = [
            Part::Reasoning(text.to_owned()),
            Part::Text(text.to_owned()),
        ];
        assert_eq!(parts, expected);
    }
    for header in ["<|channel|>final", " to=functions.f", "<|start|>assis"] {
        assert!(split(Headers::Channels, "<|start|>assistant", header).is_empty());
    }
}

#[test]
fn arguments_are_an_object() {
    let header = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>";
    let written = |body: &str| {
        let text = format!("{header}{body}<|call|>");
        split(Headers::Channels, "<|start|>assistant", &text)
    };
    for none in ["hello", "5", "[1]"] {
        assert_eq!(written(none), [Part::Text(none.to_owned())]);
    }
    // What begins as one is told as it comes, whatever it comes to.
    let broken = "{\"a\": \"rm -rf /";
    assert_eq!(written(broken), [call("f", broken)]);
    for object in ["{}", "{\"a\": \"say <|end|> now\"}"] {
        assert_eq!(written(object), [call("f", object)]);
    }
    // JSON has escapes for line breaks in a text.
    let valid = "{\n\"a\": \"x\\n\\ty\"\n}";
    assert_eq!(written("{\n\"a\": \"x\n\ty\"\n}"), [call("f", valid)]);
}
