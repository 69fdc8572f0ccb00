//! Whose text the scores of tokens are told with, and how many are.

use rocmforge_chat::tail::Tail;
use rocmforge_chat::tool_calls::{self, ToolCall, Tools};

use super::*;
use serde_json::json;

fn text(said: &str) -> Part {
    Part::Text(said.to_owned())
}

fn call() -> Part {
    Part::Call(ToolCall {
        name: "f".to_owned(),
        arguments: "{}".to_owned(),
    })
}

fn scores(ids: &[u32]) -> Vec<TokenScore> {
    let score = |&id| TokenScore {
        id,
        logprob: -1.0,
        top: Vec::new(),
    };
    ids.iter().map(score).collect()
}

fn ids(scores: &[TokenScore]) -> Vec<u32> {
    scores.iter().map(|score| score.id).collect()
}

/// An answer that says, thinks and calls.
fn answer(text_only: bool) -> Collected {
    let mut answer = Collected {
        text_only,
        ..Collected::default()
    };
    answer.more(vec![Part::Reasoning("so".to_owned())], scores(&[1]));
    answer.more(vec![text("a")], scores(&[2, 3]));
    // Of a mark, and of what it stands for.
    answer.more(Vec::new(), scores(&[4]));
    answer.more(vec![call()], scores(&[5]));
    // Held back until it is no mark.
    answer.more(Vec::new(), scores(&[6]));
    answer.more(vec![text("b")], scores(&[7]));
    answer.more(vec![text("c"), call(), text("d")], scores(&[8]));
    answer.more(Vec::new(), scores(&[9]));
    answer.more(vec![text("e")], Vec::new());
    answer
}

#[test]
fn each_text_has_the_scores_of_its_own_tokens() {
    let answer = answer(true);
    let of_texts: Vec<_> = answer.of_texts.iter().map(|of| ids(of)).collect();
    assert_eq!(of_texts, [vec![2, 3], vec![6, 7, 8], vec![9]]);
    let texts = joined(answer.parts)
        .into_iter()
        .filter_map(|part| match part {
            Part::Text(text) => Some(text),
            _ => None,
        });
    assert_eq!(texts.collect::<Vec<_>>(), ["a", "bc", "de"]);
}

#[test]
fn all_tokens_have_scores() {
    let answer = answer(false);
    assert_eq!(ids(&answer.scores), [1, 2, 3, 4, 5, 6, 7, 8, 9]);
    assert!(answer.of_texts.is_empty());
}

/// Each text of an answer that comes in these pieces of a token each, with the numbers of the
/// tokens that are its own.
fn said(source: &str, tail: &str, whole: bool, pieces: &[&str]) -> Vec<(String, Vec<u32>)> {
    let tail = Tail {
        text: tail.to_owned(),
        continues: false,
    };
    let tools = Tools {
        described: vec![tool_calls::described("f", None, &json!({}))],
        single: true,
        forced: None,
    };
    let mut splitter = Splitter::for_template(source, &tail, tools);
    if !whole {
        splitter.tell_pieces();
    }
    let mut answer = Collected {
        text_only: true,
        ..Collected::default()
    };
    for (id, piece) in (0..).zip(pieces) {
        let mut parts = Vec::new();
        splitter.push(piece, &mut parts);
        let unsaid = is_unsaid(piece, &parts, &splitter);
        answer.more(parts, scores(&[id]));
        if unsaid {
            answer.unsaid();
        }
    }
    let mut parts = Vec::new();
    splitter.finish(false, &mut parts);
    answer.more(parts, Vec::new());
    let texts = joined(answer.parts).into_iter();
    let texts = texts.filter_map(|part| match part {
        Part::Text(text) => Some(text),
        _ => None,
    });
    texts
        .zip(answer.of_texts.iter().map(|of| ids(of)))
        .collect()
}

#[test]
fn scores_of_marks_are_told_of_no_text() {
    const THINKS: &str = "</think>";
    const CALLS: &str = "<tool_call>";
    const CHANNELS: &str = "<|message|><|channel|>";
    let first = [
        "<tool_call>",
        "\n",
        "{\"name\": \"f\", ",
        "\"arguments\": ",
        "{}",
        "}",
        "\n",
        "</tool",
        "_call>",
    ];
    // Of an answer's calls only the first counts.
    let second = [&first[..], &["\n"], &first[..]].concat();
    let tags = [
        "<tool_call>",
        "<function=f>",
        "<parameter=a>",
        "1",
        "</parameter>",
        "</function>",
        "</tool",
        "_call>",
    ];
    let around = |calls: &[&'static str]| [&["x"], calls, &["\n", "y"]].concat();
    for (source, tail, pieces, expected) in [
        (
            THINKS,
            "<think>",
            vec![" a", "</", "think", ">", "\n\n", "b", "", "c"],
            vec![("bc", vec![5, 6, 7])],
        ),
        (
            THINKS,
            "",
            vec!["<th", "ink>", "</", "think>", " b"],
            vec![("b", vec![4])],
        ),
        // What begins as a mark may be none.
        (
            THINKS,
            "",
            vec!["<th", "ough", "<"],
            vec![("<though<", vec![0, 1, 2])],
        ),
        (
            CALLS,
            "",
            around(&first),
            vec![("x", vec![0]), ("y", vec![11])],
        ),
        (
            CALLS,
            "",
            around(&second),
            vec![("x", vec![0]), ("y", vec![21])],
        ),
        (
            CALLS,
            "",
            around(&tags),
            vec![("x", vec![0]), ("y", vec![10])],
        ),
        (
            CALLS,
            "",
            vec!["<tool_call>", " is", " a mark</tool_call>", "."],
            vec![("<tool_call> is a mark</tool_call>.", vec![0, 1, 2, 3])],
        ),
        (
            CHANNELS,
            "<|start|>assistant",
            vec![
                "<|channel|>",
                "analysis",
                "<|message|>",
                "hm",
                "<|end|>",
                "<|start|>",
                "assistant",
                "<|channel|>",
                "final",
                "<|message|>",
                "b",
                "<|end|>",
                "!",
            ],
            vec![("b<|end|>!", vec![10, 11, 12])],
        ),
    ] {
        let expected: Vec<_> = expected
            .into_iter()
            .map(|(t, of)| (t.to_owned(), of))
            .collect();
        for whole in [true, false] {
            let told = said(source, tail, whole, &pieces);
            assert_eq!(told, expected, "{pieces:?}, whole: {whole}");
        }
    }
}

#[test]
fn scores_that_are_held_are_bounded_and_who_streams_is_not_told_to_stream() {
    let many = |n| TokenScore {
        top: vec![(0, -1.0); n],
        ..scores(&[0]).remove(0)
    };
    let half = SCORES_MAX as usize / 2 - 1;
    for (refusal, advises) in [
        (None, None),
        (Some(TOO_MANY_SCORES), Some(true)),
        (Some(TOO_MANY_IN_STREAMS), Some(false)),
    ] {
        let mut bound = Bound { so_far: 0, refusal };
        assert!(bound.count(&[many(half)]).is_ok());
        assert!(bound.count(&[many(half)]).is_ok());
        let last = bound.count(&scores(&[0]));
        let failure = last
            .err()
            .map(|failure| failure.message().contains("stream it"));
        assert_eq!(failure, advises);
    }
}
