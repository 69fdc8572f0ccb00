//! Reasoning in front of grammars, and grammars that hold calls alone.

#![allow(clippy::unwrap_used, reason = "a test that fails says where")]

use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::json;

use super::*;
use crate::schema::tests::vocabulary;
use crate::{Grammar, Piece};

fn number() -> Matcher {
    let (_, vocabulary) = vocabulary();
    let schema = json!({"type": "integer", "minimum": 5, "maximum": 7});
    vocabulary.matcher(&Grammar::JsonSchema(schema)).unwrap()
}

/// How far an output may go as this text does.
fn follows(matcher: &mut Matcher, text: &str) -> usize {
    let (tokenizer, _) = vocabulary();
    let mut bytes = 0;
    for id in tokenizer.encode(text, false, false).unwrap() {
        if matcher.is_complete() || !matcher.mask().unwrap().allows(id) {
            return bytes;
        }
        matcher.accept(id).unwrap();
        bytes += tokenizer.token_bytes(id).unwrap().len();
    }
    bytes
}

fn ends(matcher: &mut Matcher) -> bool {
    let (tokenizer, _) = vocabulary();
    let mask = matcher.mask().unwrap();
    matcher.is_complete()
        || tokenizer
            .end_of_generation()
            .iter()
            .all(|&id| mask.allows(id))
}

fn thinking(is_open: bool, budget: Option<u32>) -> Reasoning {
    Reasoning {
        opens: (!is_open).then(|| "<think>".to_owned()),
        is_open,
        closes: vec!["</think>".to_owned()],
        budget,
        end: None,
        closing: "\nEnough.\n</think>".to_owned(),
        has_gap: true,
    }
}

#[test]
fn reasoning_may_come_first_and_the_grammar_holds_behind_it() {
    for (text, may_be) in [
        ("6", true),
        ("<think>\nLet me see: 9?\n</think>\n\n6", true),
        ("\n<think></think>6", true),
        ("<think>x</think>\n 6", true),
        ("<think>x</think>9", false),
        ("<think>x</think>\n 9", false),
        ("9", false),
        ("hello", false),
        ("<tool>", false),
    ] {
        let mut matcher = number();
        matcher.reason_first(thinking(false, None));
        let went = follows(&mut matcher, text) == text.len() && ends(&mut matcher);
        assert_eq!(went, may_be, "{text}");
    }
    // It does not end inside of reasoning.
    let mut matcher = number();
    matcher.reason_first(thinking(false, None));
    assert_eq!(follows(&mut matcher, "<think>a"), 8);
    assert!(!ends(&mut matcher));
    let mut matcher = number();
    matcher.reason_first(thinking(true, None));
    let text = "a</think>\n6";
    assert!(follows(&mut matcher, text) == text.len() && ends(&mut matcher));
}

#[test]
fn a_grammar_that_describes_reasoning_holds_it() {
    let (_, vocabulary) = vocabulary();
    let regex = Grammar::Regex("<think> a</think> b".to_owned());
    for (text, went) in [("<think> a</think> b", true), ("<think> b", false)] {
        let mut matcher = vocabulary.matcher(&regex).unwrap();
        matcher.reason_first(thinking(false, None));
        assert_eq!(follows(&mut matcher, text) == text.len(), went, "{text}");
    }
}

/// Found with a model whose token was a line break and the brace behind it.
#[test]
fn a_token_of_white_space_and_the_beginning_of_the_grammar_is_taken() {
    let (tokenizer, vocabulary) = vocabulary();
    let mixed = (0..tokenizer.n_vocab() as u32).find_map(|id| {
        let text = std::str::from_utf8(tokenizer.token_bytes(id)?).ok()?;
        let word = text.strip_prefix(' ')?;
        let is_word = word.len() > 1 && word.bytes().all(|b| b.is_ascii_lowercase());
        (is_word && !tokenizer.is_special(id)).then(|| (id, word.to_owned()))
    });
    let (id, word) = mixed.unwrap();
    let mut matcher = vocabulary
        .matcher(&Grammar::Regex(format!("{word}!")))
        .unwrap();
    assert!(!matcher.mask().unwrap().allows(id));
    matcher.reason_first(thinking(true, None));
    let closing = "a</think>";
    assert_eq!(follows(&mut matcher, closing), closing.len());
    assert!(matcher.mask().unwrap().allows(id), "{word}");
    matcher.accept(id).unwrap();
    assert!(follows(&mut matcher, "!") == 1 && ends(&mut matcher));
}

#[test]
fn a_budget_that_is_used_up_forces_the_closing_text() {
    let (tokenizer, _) = vocabulary();
    for (is_open, mut matcher) in [
        (true, number()),
        (false, number()),
        (true, Matcher::without_grammar(tokenizer)),
    ] {
        matcher.reason_first(thinking(is_open, Some(4)));
        if !is_open {
            follows(&mut matcher, "<think>");
        }
        let words = tokenizer
            .encode("Once upon a time there was a fox.", false, false)
            .unwrap();
        let mut taken = 0;
        while matcher.forced.is_empty() {
            assert!(matcher.mask().unwrap().allows(words[taken]));
            matcher.accept(words[taken]).unwrap();
            taken += 1;
        }
        assert!((3..=4).contains(&taken), "{taken}");
        let mut said = Vec::new();
        while !matcher.forced.is_empty() {
            let mask = matcher.mask().unwrap();
            let few: Vec<u32> = (0..tokenizer.n_vocab() as u32)
                .filter(|&id| mask.allows(id))
                .collect();
            assert_eq!(few.len(), 1);
            said.extend_from_slice(tokenizer.token_bytes(few[0]).unwrap());
            matcher.accept(few[0]).unwrap();
        }
        assert_eq!(String::from_utf8(said).unwrap(), "\nEnough.\n</think>");
        match matcher.grammar {
            Some(_) => assert!(follows(&mut matcher, "6") == 1 && ends(&mut matcher)),
            None => assert!(matcher.is_done() && !matcher.restricts()),
        }
    }
    let mut matcher = number();
    matcher.reason_first(thinking(true, Some(0)));
    assert!(
        !matcher.forced.is_empty(),
        "a budget of none is used up at once"
    );
}

#[test]
fn reasoning_that_is_ended_from_outside_is_closed_with_the_next_token() {
    let (tokenizer, _) = vocabulary();
    for is_open in [true, false] {
        let end = Arc::new(AtomicBool::new(false));
        let mut matcher = Matcher::without_grammar(tokenizer);
        matcher.reason_first(Reasoning {
            end: Some(Arc::clone(&end)),
            ..thinking(is_open, None)
        });
        if is_open {
            assert_eq!(follows(&mut matcher, "Once upon a time"), 16);
            assert!(!matcher.restricts() && matcher.forced.is_empty());
        }
        // What has not begun yet is closed when it does.
        end.store(true, Ordering::Relaxed);
        let more = if is_open { " there" } else { "<think>" };
        assert_eq!(follows(&mut matcher, more), more.len());
        assert!(matcher.restricts());
        assert_eq!(follows(&mut matcher, "no, wait"), 0);
        let closing = "\nEnough.\n</think>";
        assert_eq!(follows(&mut matcher, closing), closing.len());
        assert!(matcher.is_done() && !matcher.restricts());
    }
}

fn calls(then_ends: bool, once: bool) -> Matcher {
    let (_, vocabulary) = vocabulary();
    let schema = json!({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": false});
    let call = Piece::All(vec![
        Piece::Space,
        Piece::Text("f".to_owned()),
        Piece::Json(schema),
        Piece::Space,
        Piece::Mark("</call>".to_owned()),
    ]);
    let mut matcher = vocabulary.matcher(&Grammar::Written(call)).unwrap();
    matcher.hold_behind(Trigger {
        mark: "<call>".to_owned(),
        at_start: false,
        then_ends,
        once,
    });
    matcher
}

#[test]
fn a_begun_call_is_held_and_what_is_around_it_is_free() {
    for (text, went) in [
        ("any text", None),
        ("a < b and <cal me", None),
        (
            "see: <call>\nf{\"n\": 12}\n</call> and <call>f{\"n\": 3}</call> end",
            None,
        ),
        ("<call>f{\"n\": Paris}</call>", Some("<call>f{\"n\":")),
        ("<call>g{}", Some("<call>")),
        (
            "<call>f{\"n\": 1}</call> <call>f{}",
            Some("<call>f{\"n\": 1}</call> <call>f{"),
        ),
    ] {
        let mut matcher = calls(false, false);
        let n = follows(&mut matcher, text);
        match went {
            None => assert_eq!(n, text.len(), "{text}"),
            // A token may have more than what fits.
            Some(went) => assert!(n <= went.len() + 1 && n + 8 >= went.len(), "{text}: {n}"),
        }
    }
    let mut matcher = calls(false, false);
    follows(&mut matcher, "text");
    assert!(ends(&mut matcher) && !matcher.restricts());
    follows(&mut matcher, "<call>f{");
    assert!(!ends(&mut matcher) && matcher.restricts());
    let mut matcher = calls(true, false);
    let call = "<call>f{\"n\": 1}</call>";
    assert_eq!(follows(&mut matcher, &format!("{call}more")), call.len());
    assert!(ends(&mut matcher));
    let mut matcher = calls(false, true);
    follows(&mut matcher, call);
    assert!(matcher.is_done());
}

/// Once the grammar forbade a token whose beginning is the call's last byte, as `}\n` and `",` are
/// in large vocabularies, and so the model wrote something else.
#[test]
fn a_token_may_end_a_call_and_go_on() {
    let (tokenizer, vocabulary) = vocabulary();
    // A token of a letter and more is one of two parts here: the bracket and what follows.
    let longer = (0..tokenizer.n_vocab() as u32).find_map(|id| {
        let text = std::str::from_utf8(tokenizer.token_bytes(id)?).ok()?;
        let at = text.find(['}', ']', ')', '>'])?;
        let is_plain = text.is_ascii() && at + 1 < text.len() && !tokenizer.is_special(id);
        is_plain.then(|| (id, text.split_at(at + 1)))
    });
    let (id, (head, rest)) = longer.expect("a token that goes on behind a bracket");
    let make = |then_ends, once, at_start| {
        let call = Piece::All(vec![
            Piece::Text("f(".to_owned()),
            Piece::Text(head.to_owned()),
        ]);
        let mut matcher = vocabulary.matcher(&Grammar::Written(call)).unwrap();
        matcher.hold_behind(Trigger {
            mark: "<call>".to_owned(),
            at_start,
            then_ends,
            once,
        });
        assert_eq!(follows(&mut matcher, "<call>f("), 8);
        matcher
    };
    let mut matcher = make(false, false, false);
    let mask = matcher.mask().unwrap();
    assert!(mask.allows(id), "{head:?} {rest:?}");
    let bracket = tokenizer.encode("[", false, false).unwrap();
    assert!(!mask.allows(bracket[0]));
    matcher.accept(id).unwrap();
    // What follows is free, and the next call is held again.
    let more = " any text <call>f(";
    assert_eq!(follows(&mut matcher, more), more.len());
    assert!(!matcher.mask().unwrap().allows(bracket[0]));
    assert!(matcher.mask().unwrap().allows(id));
    for (once, at_start) in [(true, false), (false, true)] {
        let mut matcher = make(false, once, at_start);
        assert!(matcher.mask().unwrap().allows(id));
        matcher.accept(id).unwrap();
        assert!(matcher.is_done());
    }
    // Nothing but the end may come behind this one.
    assert!(!make(true, false, false).mask().unwrap().allows(id));
}
