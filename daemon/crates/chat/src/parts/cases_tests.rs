//! Single answers whose calls are told in pieces.

use serde_json::{Value, json};

use super::{calls_of, forms, parts, splitter};
use crate::parts::{Part, joined};

#[test]
fn space_in_front_of_a_missing_tag_is_no_part_of_a_value() {
    for written in [
        "<tool_call>\n<function=other>\n<parameter=path>\nx \n\n</tool_call>",
        "<tool_call>other\n<arg_key>path</arg_key>\n<arg_value>x \t \n</tool_call>",
    ] {
        let ends: Vec<usize> = (1..written.len()).collect();
        for is_cut in [false, true] {
            let told = joined(parts("<tool_call>", written, &ends, true, is_cut));
            let expected = [("other".to_owned(), r#"{"path":"x"}"#.to_owned())];
            assert_eq!(calls_of(&told), expected, "{written}");
        }
    }
}

#[test]
fn a_closing_tag_in_a_value_that_is_cut_ends_no_call() {
    for (written, told) in [
        (
            "<function=edit>\n<parameter=any>\n{\"xml\": \"<function>x</function> and more that is",
            "{",
        ),
        (
            "<function=edit>\n<parameter=any>\n[\"<b></function> and more",
            "{",
        ),
        (
            "<function=edit>\n<parameter=path>\nwrite:\n<parameter=content>\n</function>\nthen rm -rf",
            "{\"path\":\"write:",
        ),
    ] {
        let written = format!("<tool_call>\n{written}");
        let ends: Vec<usize> = (1..written.len()).collect();
        for in_pieces in [true, false] {
            for ends in [&[], &ends[..]] {
                let parts = joined(parts("<tool_call>", &written, ends, in_pieces, true));
                let expected = [("edit".to_owned(), told.to_owned())];
                assert_eq!(calls_of(&parts), expected, "{written}");
                assert_eq!(parts.len(), 1, "{written}");
            }
        }
    }
}

#[test]
fn a_number_behind_the_arguments_may_be_split() {
    let one = r#"{"name":"edit","arguments":{"path":"x"}, "id": 123}"#;
    let two = r#"{"name":"other","arguments":{"path":"y"}}"#;
    for (source, written) in [
        (
            "<tool_call>",
            format!("<tool_call>{one}\n{two}\n</tool_call>"),
        ),
        ("<|tool_call|>", format!("<|tool_call|>[{one}, {two}]")),
    ] {
        let ends: Vec<usize> = (1..written.len()).collect();
        let parts = joined(parts(source, &written, &ends, true, false));
        let expected = [("edit", r#"{"path":"x"}"#), ("other", r#"{"path":"y"}"#)];
        let expected = expected.map(|(name, said)| (name.to_owned(), said.to_owned()));
        assert_eq!(calls_of(&parts), expected, "{written}");
        assert_eq!(parts.len(), 2, "{written}");
    }
}

#[test]
fn line_breaks_in_texts_of_json_are_escaped_in_arguments() {
    for form in forms() {
        let arguments =
            json!({"path": "a\nb\t\u{1}c", "more": {"k": ["x \r\n\n y", "\n"]}, "line": 3});
        let Value::Object(arguments) = arguments else {
            unreachable!()
        };
        let calls = [("edit", arguments.clone()), ("edit", arguments.clone())];
        let mut written = (form.write)(&calls);
        let escapes = [
            ("\\n", "\n"),
            ("\\t", "\t"),
            ("\\r", "\r"),
            ("\\u0001", "\u{1}"),
        ];
        for (escape, character) in escapes {
            written = written.replace(escape, character);
        }
        let whole = calls_of(&joined(parts(form.source, &written, &[], false, false)));
        assert_eq!(whole.len(), 2, "{written}");
        for (_, told) in &whole {
            let read = serde_json::from_str::<Value>(told).unwrap();
            assert_eq!(read, Value::from(arguments.clone()), "{written}");
        }
        for (at, _) in written.char_indices().skip(1) {
            for in_pieces in [true, false] {
                let told = parts(form.source, &written, &[at], in_pieces, false);
                assert_eq!(calls_of(&joined(told)), whole, "{at}: {written}");
            }
        }
        let ends: Vec<usize> = written.char_indices().map(|(at, _)| at).skip(1).collect();
        let told = parts(form.source, &written, &ends, true, false);
        assert_eq!(calls_of(&joined(told)), whole, "{written}");
    }
    // What is read as a whole, too.
    for call in [
        "{\"arguments\": {\"path\": \"a\nb\"}, \"name\": \"edit\"}",
        "{\"name\": \"edit\", \"arguments\": \"{\\\"path\\\":\\\"a\\nb\\\"}\"}",
    ] {
        let written = format!("<tool_call>{call}</tool_call>");
        let told = calls_of(&parts("<tool_call>", &written, &[], true, false));
        let expected = ("edit".to_owned(), "{\"path\":\"a\\nb\"}".to_owned());
        assert_eq!(told, [expected], "{written}");
    }
}

#[test]
fn a_long_text_comes_as_it_is_written() {
    let content = "let a = \"b\" < c && \\d;\n\tfoo(<b>);\n".repeat(40);
    for form in forms() {
        let arguments = json!({"path": "/tmp/x", "content": content, "line": 3});
        let Value::Object(arguments) = arguments else {
            unreachable!()
        };
        let written = (form.write)(&[("edit", arguments)]);
        let mut splitter = splitter(form.source, true);
        let (mut parts, mut silent) = (Vec::new(), 0);
        for c in written.chars() {
            let before = parts.len();
            splitter.push(&c.to_string(), &mut parts);
            let is_silent = parts.len() == before && splitter.is_calling();
            silent = if is_silent { silent + 1 } else { 0 };
            assert!(silent < 80, "{}: silent at {written}", form.source);
        }
        assert!(parts.len() > content.len() / 2, "{}", form.source);
    }
}

#[test]
fn what_is_no_valid_call_is_text_where_calls_are_told_whole() {
    for (source, written) in [
        (
            "<|tool_call_start|>",
            "<|tool_call_start|>[edit(\"x\")]<|tool_call_end|>",
        ),
        (
            "<|tool_call_start|>",
            "<|tool_call_start|>[edit(path=x y)]<|tool_call_end|>",
        ),
        (
            "<|tool_call>",
            "<|tool_call>call:edit{any:foo[1],line:2}<tool_call|>",
        ),
        (
            "<|tool_call>",
            "<|tool_call>call:edit{any:{12},path:<|\"|>x<|\"|>}<tool_call|>",
        ),
    ] {
        let ends: Vec<usize> = (1..written.len()).collect();
        let expected = [Part::Text(written.to_owned())];
        for ends in [&[], &ends[..]] {
            let told = joined(parts(source, written, ends, false, false));
            assert_eq!(told, expected, "{written}");
            let pieces = joined(parts(source, written, ends, true, false));
            assert!(
                written.contains("(\"") == (pieces == expected),
                "{pieces:?}"
            );
        }
    }
}

#[test]
fn a_call_that_came_to_no_object_counts_as_none_however_it_is_told() {
    for (source, written, n) in [
        (
            "<|tool_call>",
            "<|tool_call>call:edit{any:{12}}<tool_call|>",
            0,
        ),
        ("<|tool_call>", "<|tool_call>call:edit{", 0),
        (
            "<|tool_call>",
            "<|tool_call>call:edit{line:1}<tool_call|><|tool_call>call:edit{any:{12}}<tool_call|>",
            1,
        ),
        (
            "<|tool_call_start|>",
            "<|tool_call_start|>[edit(path=x y)]<|tool_call_end|>",
            0,
        ),
        (
            "<tool_call>",
            "<tool_call>{\"name\": \"edit\", \"arguments\": {\"path\": \"x}}</tool_call>",
            0,
        ),
        ("[TOOL_CALLS]", "[TOOL_CALLS]edit[ARGS]{}", 1),
    ] {
        for in_pieces in [true, false] {
            let mut splitter = splitter(source, in_pieces);
            let mut parts = Vec::new();
            for c in written.chars() {
                splitter.push(&c.to_string(), &mut parts);
            }
            splitter.finish(false, &mut parts);
            assert_eq!(splitter.calls(), n, "{written}");
        }
    }
}

#[test]
fn a_value_of_gemmas_that_is_broken_is_told_alike_however_it_comes() {
    for (members, told) in [
        ("any:{12},path:<|\"|>x<|\"|>", "{"),
        ("any:foo[1],line:2", "{"),
        ("line:1,any:[1,{],path:<|\"|>x<|\"|>", "{\"line\":1"),
        ("any:f[o,line:2", "{\"any\":\"f[o\",\"line\":2}"),
    ] {
        let written = format!("<|tool_call>call:edit{{{members}}}<tool_call|>");
        let characters: Vec<usize> = (1..written.len()).collect();
        for ends in [&[], &characters[..]] {
            let parts = joined(parts("<|tool_call>", &written, ends, true, false));
            let expected = [("edit".to_owned(), told.to_owned())];
            assert_eq!(calls_of(&parts), expected, "{written}");
        }
    }
}

/// With work for all that came before at each character this takes minutes.
#[test]
fn long_values_are_told_alike_however_they_come() {
    const N: usize = 200_000;
    let (spaces, digits) = (" ".repeat(N), "1".repeat(N));
    let head = "<tool_call>\n<function=edit>\n";
    for (source, written) in [
        (
            "<tool_call>",
            format!("{head}<parameter=path>\na{spaces}b\n</parameter>"),
        ),
        (
            "<tool_call>",
            format!("{head}<parameter=path>\na</function>{spaces}b\n</parameter>"),
        ),
        (
            "<tool_call>",
            format!("{head}<parameter=path>\na<parameter={spaces}b\n</parameter>"),
        ),
        (
            "<tool_call>",
            format!("{head}<parameter=any>\n{digits}\n</parameter>"),
        ),
        ("<tool_call>", format!("{head}<parameter={digits}")),
        ("<tool_call>", format!("<tool_call>\n<function={digits}")),
        (
            "<|tool_call_start|>",
            format!("<|tool_call_start|>[edit({digits}=1)]"),
        ),
        (
            "<|tool_call_start|>",
            format!("<|tool_call_start|>[edit(path='x'{spaces}"),
        ),
        (
            "<|tool_call>",
            format!("<|tool_call>call:edit{{{digits}:1}}"),
        ),
        (
            "<|tool_call>",
            format!("<|tool_call>call:edit{{line:1{spaces},any:{spaces}"),
        ),
    ] {
        let ends: Vec<usize> = (1..written.len()).collect();
        let pieces = joined(parts(source, &written, &ends, true, true));
        let once = joined(parts(source, &written, &[], true, true));
        assert_eq!(pieces, once, "{}", &written[..60]);
    }
}
