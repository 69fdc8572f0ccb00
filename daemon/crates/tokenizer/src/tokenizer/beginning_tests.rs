//! The beginning of a text is what its whole begins with, and no more is looked at.

use proptest::prelude::*;

use super::tests::{any_text, bpe, config, spm};
use super::*;
use crate::fixture::{bpe_data, spm_data};

/// The first tokens of the whole, with EOS at the end where there is one.
fn cut(tokenizer: &Tokenizer, max: usize, text: &str) -> Vec<u32> {
    let mut ids = tokenizer.encode(text, true, true).unwrap();
    if ids.len() > max {
        ids.truncate(max);
        let eos = tokenizer.eos().filter(|_| tokenizer.vocab().add_eos);
        if let (Some(eos), Some(last)) = (eos, ids.last_mut()) {
            *last = eos;
        }
    }
    ids
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn a_beginning_is_that_of_the_whole(text in any_text(), times in 1..9usize, max in 0..40usize) {
        let text = text.repeat(times);
        let mut with_eos = bpe_data(&["he"], &["h e"]);
        with_eos.usage.add_eos = Some(true);
        for tokenizer in [bpe(), spm(), Tokenizer::new(with_eos).unwrap()] {
            let beginning = tokenizer.encode_beginning(max, &text, true, true).unwrap();
            prop_assert_eq!(beginning, cut(&tokenizer, max, &text));
        }
    }
}

#[test]
fn what_comes_far_behind_a_beginning_is_not_looked_at() {
    // A character that cannot be expressed fails whatever looks at it.
    let mut data = spm_data(&[("▁", -1.0, 1)]);
    data.types.as_mut().unwrap()[3 + 0xC3] = 5;
    data.types.as_mut().unwrap()[0] = 1;
    let tokenizer = Tokenizer::new(data).unwrap();
    let text = "x".repeat(1 << 10) + "é";
    tokenizer.encode(&text, true, false).unwrap_err();
    let ids = tokenizer.encode_beginning(20, &text, true, false).unwrap();
    assert_eq!(ids.len(), 20);
    tokenizer
        .encode_beginning(1 << 11, &text, true, false)
        .unwrap_err();
}
