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
