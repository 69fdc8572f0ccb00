//! What a trace's prompts have in common, in tokens.

/// Tokens that prompts have, and how many of them need to be computed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Tokens {
    /// Of all prompts.
    pub(super) all: u64,
    /// Distinct ones: nodes of the tree of all prompts, where those with a common prefix share it.
    pub(super) distinct: u64,
    /// What each prompt computes, in the trace's order, where a prefix is reused in whole pages and
    /// the last token is computed for its logits.
    pub(super) floor: Vec<u64>,
}

impl Tokens {
    /// Of prompts in the order in which they begin, by a cache of pages of this size.
    pub(super) fn of(prompts: &[Vec<u32>], page: usize) -> Self {
        let mut order: Vec<usize> = (0..prompts.len()).collect();
        order.sort_by(|&a, &b| prompts[a].cmp(&prompts[b]));
        // What neighbours in this order have in common is the most that a prompt has in common with
        // any on that side; with one farther away it is the least of what lies between.
        let common: Vec<usize> = order
            .windows(2)
            .map(|pair| common(&prompts[pair[0]], &prompts[pair[1]]))
            .collect();
        let all = prompts.iter().map(|p| p.len() as u64).sum();
        let shared: usize = common.iter().sum();
        let mut floor = vec![0; prompts.len()];
        for (at, &prompt) in order.iter().enumerate() {
            let below = order[..at].iter().rev().zip(common[..at].iter().rev());
            let above = order[at + 1..].iter().zip(&common[at..]);
            let most = farthest(below, prompt).max(farthest(above, prompt));
            let len = prompts[prompt].len();
            let reused = most.min(len.saturating_sub(1)) / page * page;
            floor[prompt] = (len - reused) as u64;
        }
        Self {
            all,
            distinct: all - shared as u64,
            floor,
        }
    }
}

/// The most that a prompt has in common with one before it in the trace, among neighbours on one
/// side, nearest first, each with what it has in common with the one that is nearer.
fn farthest<'a>(neighbours: impl Iterator<Item = (&'a usize, &'a usize)>, prompt: usize) -> usize {
    let mut least = usize::MAX;
    for (&other, &common) in neighbours {
        least = least.min(common);
        if other < prompt || least == 0 {
            return least;
        }
    }
    0
}

fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    use super::*;

    /// The same by comparing each prompt with all before it, and by counting prefixes.
    fn slowly(prompts: &[Vec<u32>], page: usize) -> Tokens {
        let mut prefixes = HashSet::new();
        let mut floor = Vec::new();
        for (n, prompt) in prompts.iter().enumerate() {
            let before = prompts[..n].iter().map(|p| common(p, prompt));
            let most = before
                .max()
                .unwrap_or(0)
                .min(prompt.len().saturating_sub(1));
            floor.push((prompt.len() - most / page * page) as u64);
            prefixes.extend((1..=prompt.len()).map(|end| &prompt[..end]));
        }
        Tokens {
            all: prompts.iter().map(|p| p.len() as u64).sum(),
            distinct: prefixes.len() as u64,
            floor,
        }
    }

    #[test]
    fn counts_are_those_of_the_tree_of_all_prompts() {
        let mut rng = StdRng::seed_from_u64(5);
        for _ in 0..200 {
            let n = rng.random_range(0..12);
            // Of two tokens, so that much is in common.
            let prompt = |rng: &mut StdRng| {
                let len = rng.random_range(0..14);
                (0..len).map(|_| rng.random_range(0..2)).collect()
            };
            let prompts: Vec<Vec<u32>> = (0..n).map(|_| prompt(&mut rng)).collect();
            for page in [1, 3] {
                let expected = slowly(&prompts, page);
                assert_eq!(Tokens::of(&prompts, page), expected, "{prompts:?}");
            }
        }
    }
}
