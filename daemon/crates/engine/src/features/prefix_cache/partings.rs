//! Where prompts are likely to part, before they are seen to.
//!
//! Behind a prompt's instructions and tools comes what is asked, and the next prompt with the same
//! instructions asks something else. Layers with windows or states go on only from where what they
//! need was kept, so it is kept there the first time. Chat templates end each part with control
//! tokens, which no text contains.
//!
//! Some prompts have a part of the same instructions, as those of subagents that lack one tool of
//! many: they part anywhere in them. What layers need is kept at even distances there, on the
//! chance, and is the first to go (`spare.rs`).

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

/// Distances between the places where prompts part on a chance, in tokens: in this range they are a
/// part of the usual pass, which so ends more often.
const CHANCE_TOKENS_MIN: usize = 8 * KV_PAGE_TOKENS;
const CHANCE_TOKENS_MAX: usize = 16 * KV_PAGE_TOKENS;
const CHANCE_PART: usize = 4;

/// Maximum number of places of a prompt that are kept as points where later prompts may part.
pub(crate) const CHANCES_MAX: usize = 64;

/// Where prompts part, in pages from the first.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Partings {
    /// Pages at which prompts are likely to part, ascending.
    pub(crate) likely: Vec<usize>,
    /// Pages at which prompts may part by chance, ascending.
    pub(crate) chances: Vec<usize>,
}

impl Partings {
    /// Places where a prompt may part from others. Of chances there are `chances` at most, so far
    /// from each other as suits passes of `rows` rows.
    pub(crate) fn of(
        tokens: &[u32],
        is_special: impl Fn(u32) -> bool,
        rows: usize,
        chances: usize,
    ) -> Self {
        let likely = likely(tokens, is_special);
        let end = likely.last().copied().unwrap_or(0);
        Self {
            chances: self::chances(end, rows, chances.min(CHANCES_MAX)),
            likely,
        }
    }
}

/// Pages at even distances before the page `end`, `most` at most. They are the same for all
/// prompts, or every other one of them.
fn chances(end: usize, rows: usize, most: usize) -> Vec<usize> {
    if most == 0 {
        return Vec::new();
    }
    let tokens = (rows / CHANCE_PART).clamp(CHANCE_TOKENS_MIN, CHANCE_TOKENS_MAX);
    let mut distance = (tokens / KV_PAGE_TOKENS).next_power_of_two();
    while end.saturating_sub(1) / distance > most {
        distance *= 2;
    }
    (distance..end).step_by(distance).collect()
}

/// Pages up to the ends of the first long parts of a prompt, ascending.
fn likely(tokens: &[u32], is_special: impl Fn(u32) -> bool) -> Vec<usize> {
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

/// End of the control tokens of a message header that begins at `at`.
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

    #[test]
    fn chances_are_at_even_distances_up_to_the_end_of_the_last_long_part() {
        let is_special = |id| id >= 900;
        // 1 + 3 + 1200 + 1 + 3 tokens.
        let of = |rows, most| Partings::of(&parts(&[1200, 40]), is_special, rows, most);
        assert_eq!(of(512, 64).likely, [1208 / KV_PAGE_TOKENS]);
        let pages = [8, 16, 24, 32];
        assert_eq!(of(512, 64).chances, pages);
        assert_eq!(of(1, 64).chances, pages);
        assert_eq!(of(2048, 64).chances, [16, 32]);
        assert_eq!(of(1 << 20, 64).chances, [16, 32]);
        // Fewer are farther from each other, and among those that there would be.
        assert_eq!(of(512, 3).chances, [16, 32]);
        assert_eq!(of(512, 1).chances, [32]);
        assert!(of(512, 0).chances.is_empty());
        assert!(
            Partings::of(&parts(&[40, 40]), is_special, 512, 64)
                .chances
                .is_empty()
        );
    }
}
