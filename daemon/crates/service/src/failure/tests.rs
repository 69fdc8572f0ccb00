//! What failures say, and how long texts are cut.

use super::*;

/// Whoever reads a message over HTTP has it alone.
#[test]
fn what_can_be_mended_is_told_with_how() {
    let none = || std::iter::empty::<&str>();
    let limit = |retry_after| peer_limit("user 7", ("tokens", 5), "9 tokens", retry_after);
    for (failure, remedy) in [
        (
            no_such_model("x", ["a"].into_iter(), none()),
            "name one of these",
        ),
        (
            beside_unreadable(
                no_such_model("x", none(), none()),
                "/m".as_ref(),
                "cannot be read",
            ),
            "the model directory /m cannot be read",
        ),
        (unloaded_meanwhile("x"), "load it again"),
        (body_too_large(9), "send less"),
        (deadline(), "allow more time"),
        (limit(Some(LIMIT_RETRY)), "try again"),
        (limit(None), "[[limit]]"),
    ] {
        let message = failure.message();
        assert!(message.contains(remedy), "{message}");
    }
}

#[test]
fn a_cut_keeps_whole_characters() {
    assert_eq!(cut("abc", 3), "abc");
    assert_eq!(cut("abcdefgh", 6), "abc...");
    assert_eq!(cut("\u{e9}\u{e9}\u{e9}\u{e9}", 6), "\u{e9}...");
    assert_eq!(cut("\u{1f600}\u{1f600}", 5), "...");
}

#[test]
fn a_parameter_is_named_as_the_interface_has_it() {
    let numbers = (9, 3, 4);
    let words = (
        "it has 9 tokens: shorten it, or raise ",
        Some("n_ctx"),
        " (at most 8)",
    );
    let raisable = context_exceeded("prompt", words, numbers);
    assert_eq!(
        raisable.message(),
        "prompt: it has 9 tokens: shorten it, or raise n_ctx (at most 8)"
    );
    let named = raisable.message_naming(|name| format!("options.<{name}>"));
    assert!(
        named.ends_with("or raise options.<n_ctx> (at most 8)"),
        "{named}"
    );
    let fixed = context_exceeded("prompt", (words.0, None, words.2), numbers);
    assert_eq!(
        fixed.message_naming(|_| unreachable!("none is named")),
        fixed.message()
    );
    // A name that was cut off is not put back.
    let long = "x".repeat(MESSAGE_MAX_BYTES - 5);
    let cut = context_exceeded(&long, words, numbers);
    assert_eq!(
        cut.message_naming(|_| unreachable!("it is cut off")),
        cut.message()
    );
}

#[test]
fn a_reason_of_a_refusal_is_the_engines() {
    let refusal = Refusal::TooManyModels { max: 7 };
    let failure = from_engine(&Error::Precondition(refusal.clone()));
    assert_eq!(failure.reason(), Reason::TooManyModels);
    assert_eq!(failure.reason().name(), refusal.reason());
    for reason in Reason::ALL {
        let name = reason.name();
        let is_capital = |c: char| c.is_ascii_uppercase() || c == '_';
        assert!(name.chars().all(is_capital), "{name}");
    }
}
