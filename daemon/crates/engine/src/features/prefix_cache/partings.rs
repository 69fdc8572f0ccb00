//! Where prompts are likely to part, before they are seen to.
//!
//! Behind a prompt's instructions and tools comes what is asked, and the next prompt with the same
//! instructions asks something else. Layers with windows or states go on only from where what they
//! need was kept, so it is kept there the first time. Chat templates end each part with control
//! tokens, which no text contains.

use rocmforge_ops::KV_PAGE_TOKENS;

/// Tokens of a part that is worth it: in a pass of its own they would not fill a device.
const PART_TOKENS_MIN: usize = 256;

/// Parts of a prompt, at most: each may cost a copy of the state.
const PARTS_MAX: usize = 2;

/// What stands between two parts: the end of one and the header of the next, with at most so many
/// control tokens more (`<|eot_id|><|start_header_id|>user<|end_header_id|>`) and so many tokens of
/// text before each.
const HEADER_SPECIALS_MAX: usize = 2;
const HEADER_TEXT_MAX: usize = 3;

/// Pages up to the ends of the first long parts of a prompt, ascending.
pub(crate) fn likely(tokens: &[u32], is_special: impl Fn(u32) -> bool) -> Vec<usize> {
    let mut pages = Vec::new();
    let (mut from, mut at) = (0, 0);
    while at < tokens.len() && pages.len() < PARTS_MAX {
        if !is_special(tokens[at]) {
            at += 1;
            continue;
        }
        let is_long = at - from >= PART_TOKENS_MIN;
        at = behind_header(tokens, at, &is_special);
        if is_long {
            pages.push(at / KV_PAGE_TOKENS);
        }
        from = at;
    }
    pages
}

/// Behind the control tokens of a header that begins here.
fn behind_header(tokens: &[u32], at: usize, is_special: impl Fn(u32) -> bool) -> usize {
    let mut end = at + 1;
    for _ in 0..HEADER_SPECIALS_MAX {
        let next = tokens[end..].iter().take(HEADER_TEXT_MAX + 1);
        match next.copied().position(&is_special) {
            Some(text) => end += text + 1,
            None => break,
        }
    }
    end
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Control tokens are those above 900.
    fn parts(lengths: &[usize]) -> Vec<u32> {
        let mut tokens = vec![900];
        for &length in lengths {
            tokens.extend([901, 7, 902]);
            tokens.extend((0..length as u32).map(|i| i % 800));
            tokens.push(903);
        }
        tokens
    }

    #[test]
    fn prompts_part_behind_the_header_of_what_follows_a_long_part() {
        let find = |lengths: &[usize]| likely(&parts(lengths), |id| id >= 900);
        // 1 + 3 + 600 + 1 + 3 tokens up to the end of the next header.
        assert_eq!(find(&[600, 40]), [608 / KV_PAGE_TOKENS]);
        assert!(find(&[40, 30, 20]).is_empty());
        // A short part in front is passed over, and the first two long ones count.
        let short = 1 + 3 + 40 + 1;
        let first = short + 3 + 300 + 1 + 3;
        let second = first + 300 + 1 + 3;
        let found = [first, second].map(|at| at / KV_PAGE_TOKENS);
        assert_eq!(find(&[40, 300, 300, 300, 10]), found);
        assert!(find(&[]).is_empty());
        assert!(likely(&[], |_| true).is_empty());
    }
}
