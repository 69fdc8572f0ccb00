//! What failures say, and how long texts are cut.

use super::*;

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
fn names_of_reasons_are_in_capitals() {
    for reason in Reason::ALL {
        let name = reason.name();
        let is_capital = |c: char| c.is_ascii_uppercase() || c == '_';
        assert!(name.chars().all(is_capital), "{name}");
    }
}
