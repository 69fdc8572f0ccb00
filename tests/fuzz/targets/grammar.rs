//! JSON schemas, regular expressions and grammars. An input is a byte that chooses the kind, a
//! byte that chooses tokens, and the text.
//!
//! Compiling ends with a matcher or a refusal, and a token that the mask allows is accepted. A
//! panic of the libraries below is caught where it compiles, and is a refusal.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use rocmforge_fuzz::{leave_panics_of, text, tokenizer};
use rocmforge_grammar::{Error, Grammar, Vocabulary};

/// Tokens that a text has at most.
const TOKENS_MAX: usize = 6;

static VOCABULARY: LazyLock<Vocabulary> = LazyLock::new(|| {
    leave_panics_of(&["/llguidance-", "/derivre-", "/toktrie-", "/regex-syntax-"]);
    Vocabulary::new(&tokenizer()).expect("a sound vocabulary")
});

fuzz_target!(|data: &[u8]| {
    let [kind, pick, said @ ..] = data else {
        return;
    };
    let said = text(said);
    let grammar = match kind % 4 {
        0 | 1 => match Grammar::from_schema_text(&said) {
            Ok(grammar) => grammar,
            Err(_) => return,
        },
        2 => Grammar::Regex(said),
        _ => Grammar::Lark(said),
    };
    let mut matcher = match VOCABULARY.matcher(&grammar) {
        Ok(matcher) => matcher,
        Err(Error::Grammar { reason }) => {
            assert!(!reason.is_empty() && reason.len() < 500 && !reason.contains('\n'));
            return;
        }
        Err(other) => panic!("{other}"),
    };
    for step in 0..TOKENS_MAX {
        if matcher.is_complete() {
            return;
        }
        let Ok(mask) = matcher.mask() else { return };
        let allowed: Vec<u32> = (0..263).filter(|&id| mask.allows(id)).collect();
        if allowed.is_empty() {
            return;
        }
        let id = allowed[(usize::from(*pick) + step) % allowed.len()];
        let accepted = matcher.accept(id);
        assert!(accepted.is_ok(), "token {id} was allowed: {accepted:?}");
    }
});
