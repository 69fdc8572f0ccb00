//! Predicts where later prompts may diverge from a prompt.
//!
//! After a prompt's instructions and tools comes the question, and the next prompt with the same
//! instructions has another question. Layers with windows or states can continue only from places
//! where their pages or state were kept, so these are kept there the first time. Chat templates end
//! each part with control tokens, which no text contains.
//!
//! Some prompts share only a part of the instructions, such as those of subagents that lack one of
//! many tools: they diverge anywhere in them. There the states are kept speculatively at even
//! distances, and are evicted first (`spare.rs`).

use rocmforge_ops::KV_PAGE_TOKENS;

/// Minimum number of tokens of a part of a prompt for which its end is kept: fewer would not fill a
/// device in a pass of their own.
const PART_TOKENS_MIN: usize = 256;

/// Maximum number of likely places of divergence in a prompt: each may cost a copy of the state.
const PARTS_MAX: usize = 2;

/// Maximum number of control tokens between two parts of a prompt besides the end of one and the
/// header of the next (`<|eot_id|><|start_header_id|>user<|end_header_id|>`).
const HEADER_SPECIALS_MAX: usize = 2;
const HEADER_TEXT_MAX: usize = 3;

/// Minimum distance in tokens between speculatively kept places. Between this and the maximum, the
/// distance is a part of the usual pass's length, so that passes end more often.
const CHANCE_TOKENS_MIN: usize = 8 * KV_PAGE_TOKENS;
const CHANCE_TOKENS_MAX: usize = 16 * KV_PAGE_TOKENS;
const CHANCE_PART: usize = 4;

/// Maximum number of places in a prompt that are kept speculatively.
pub(crate) const CHANCES_MAX: usize = 64;

/// Places where later prompts may diverge, in pages from the first.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Partings {
    /// Pages at which prompts are likely to diverge (ends of parts), ascending.
    pub(crate) likely: Vec<usize>,
    /// Pages at which prompts may diverge by chance, at even distances, ascending.
    pub(crate) chances: Vec<usize>,
}

impl Partings {
    /// Finds the places where later prompts may diverge. At most `chances` of them are speculative,
    /// at distances that suit passes of `rows` rows.
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

/// Pages at even distances before the page `end`, at most `most`. All prompts get the same places,
/// or every other one of them.
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

/// End of the control tokens of a message header that begins at the token `at`.
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
