//! Tokens that end a call and go on behind it, as `}}\n` does behind JSON. The grammar of a call
//! knows nothing of what follows, so its own mask forbids them all.

use std::collections::BTreeMap;
use std::sync::Arc;

use rocmforge_tokenizer::Tokenizer;
use toktrie::{SimpleVob, TokTrie};

use crate::lead::find;

/// The last bytes of calls, in all the forms that models write them in.
const LAST_BYTES: &[u8] = b"}])>";
/// What stands in front of them in one token. Of beginnings made of these a vocabulary has some
/// hundred.
const BEFORE_LAST: &[u8] = b"}])>\"'| \t\r\n";
/// Longest beginning of a token that is compared with a call's end, in bytes.
const HEAD_MAX_BYTES: usize = 16;

/// Tokens of a vocabulary that may end a call and go on, by how they begin.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tails(Arc<[Tail]>);

/// Tokens with one beginning.
#[derive(Debug)]
struct Tail {
    /// Bytes of the beginning, up to one that may be a call's last.
    head_bytes: usize,
    /// The beginning in tokens, and the output's end.
    head: Vec<u32>,
    /// The tokens that go on behind it.
    tokens: Vec<u32>,
}

/// The beginnings of a token that may end a call, each with what is behind it, the shortest first.
pub(crate) fn heads(bytes: &[u8]) -> impl DoubleEndedIterator<Item = (&[u8], &[u8])> {
    let is_before = |byte: &&u8| BEFORE_LAST.contains(byte);
    let most = bytes.iter().take_while(is_before).count();
    let most = most.min(bytes.len().saturating_sub(1)).min(HEAD_MAX_BYTES);
    let all = (1..=most).map(|n| bytes.split_at(n));
    all.filter(|(head, _)| head.last().is_some_and(|last| LAST_BYTES.contains(last)))
}

impl Tails {
    /// The tails of a vocabulary with its bytes as a tree, and the token that ends an output; none
    /// where none does. Looks at every token.
    pub(crate) fn of(tokenizer: &Tokenizer, tree: &TokTrie, end: Option<u32>) -> Self {
        let Some(end) = end else {
            return Self::default();
        };
        let mut by_head: BTreeMap<&[u8], Vec<u32>> = BTreeMap::new();
        for id in 0..tokenizer.n_vocab() as u32 {
            if tokenizer.is_special(id) || tokenizer.is_end_of_generation(id) {
                continue;
            }
            for (head, _) in heads(tokenizer.token_bytes(id).unwrap_or_default()) {
                by_head.entry(head).or_default().push(id);
            }
        }
        let tails = by_head.into_iter().map(|(head, tokens)| Tail {
            head_bytes: head.len(),
            head: ending(tree, head, end),
            tokens,
        });
        Self(tails.collect())
    }

    /// Allows the tokens whose beginning ends the call that `grammar` is in, but for those that go
    /// on behind the next call's `mark`: what stands there is held, too.
    pub(crate) fn allow(
        &self,
        grammar: &mut llguidance::Matcher,
        tokenizer: &Tokenizer,
        mark: &[u8],
        allowed: &mut SimpleVob,
    ) {
        for tail in &*self.0 {
            // Seldom so, and told by the mask alone.
            if !tail.head.first().is_some_and(|&id| allowed.is_allowed(id))
                || !takes(grammar, &tail.head)
            {
                continue;
            }
            for &id in &tail.tokens {
                let rest = &tokenizer.token_bytes(id).unwrap_or_default()[tail.head_bytes..];
                if find(rest, mark).is_none_or(|at| at + mark.len() == rest.len()) {
                    allowed.allow_token(id);
                }
            }
        }
    }
}

/// These bytes and the output's end, as tokens.
pub(crate) fn ending(tree: &TokTrie, head: &[u8], end: u32) -> Vec<u32> {
    let mut tokens = tree.greedy_tokenize(head);
    tokens.push(end);
    tokens
}

fn takes(grammar: &mut llguidance::Matcher, tokens: &[u32]) -> bool {
    matches!(grammar.validate_tokens(tokens), Ok(n) if n == tokens.len())
}
