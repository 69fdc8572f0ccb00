//! What failures of the service say.

use rocmforge_failure::{body_too_large, bug, deadline};

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
fn a_reason_of_a_refusal_is_the_engines() {
    let refusal = Refusal::TooManyModels { max: 7 };
    let failure = from_engine(&Error::Precondition(refusal.clone()));
    assert_eq!(failure.reason(), Reason::TooManyModels);
    assert_eq!(failure.reason().name(), refusal.reason());
}

#[test]
fn bugs_of_the_engine_and_of_others_read_alike() {
    let of_engine = from_engine(&Error::Internal("no page".to_owned()));
    assert_eq!(of_engine, bug("no page"));
}
