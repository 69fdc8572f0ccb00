//! Tokens that end the call that is held and go on behind it.

use toktrie::SimpleVob;

use super::{Matcher, Phase};
use crate::Error;
use crate::tails::{ending, heads};

impl Matcher {
    /// The token that ends an output, where more than that may come behind a call.
    fn end_behind_call(&self) -> Option<u32> {
        let is_free = (self.trigger.as_ref()).is_some_and(|trigger| !trigger.then_ends);
        self.ends.first().copied().filter(|_| is_free)
    }

    /// Allows tokens that end the call that is held, and go on.
    pub(super) fn allow_behind_call(&mut self, allowed: &mut SimpleVob) {
        if self.end_behind_call().is_none() {
            return;
        }
        let mark = self.trigger.as_ref().map_or("", |trigger| &trigger.mark);
        if let Some(grammar) = &mut self.grammar {
            let mark = mark.as_bytes();
            self.tails.allow(grammar, &self.tokenizer, mark, allowed);
        }
    }

    /// Takes a token's beginning where that ends the call that is held and the whole token does not
    /// go on with it. What is behind the call's end then.
    pub(super) fn end_call_within(&mut self, token: u32) -> Result<Option<Vec<u8>>, Error> {
        let Some(end) = self.end_behind_call() else {
            return Ok(None);
        };
        if self.takes(&[token]) {
            return Ok(None);
        }
        let bytes = self.bytes(token).to_vec();
        let Some(env) = (self.grammar.as_ref()).and_then(|grammar| grammar.tok_env().ok()) else {
            return Ok(None);
        };
        let split = heads(&bytes).rev().find_map(|(head, rest)| {
            let tokens = ending(env.tok_trie(), head, end);
            self.takes(&tokens).then_some((tokens, rest))
        });
        let Some((mut head, rest)) = split else {
            return Ok(None);
        };
        head.pop();
        head.into_iter().try_for_each(|token| self.consume(token))?;
        Ok(Some(rest.to_vec()))
    }

    /// Leaves a call with what the token that ended it has behind that.
    pub(super) fn go_on(&mut self, rest: Vec<u8>) -> Result<(), Error> {
        self.end_call()?;
        match self.phase {
            Phase::Free(_) => self.watch(rest),
            _ => Ok(()),
        }
    }
}
