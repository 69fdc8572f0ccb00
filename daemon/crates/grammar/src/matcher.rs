//! An output that a grammar constrains, token by token.
//!
//! ```text
//!                 what opens reasoning          what closes it
//!   lead -------------------------> reasoning -----------------> lead, without reasoning
//!    | anything else                  | budget used up: the closing text is forced
//!    v                                v
//!   held, to the end of the output              (a grammar that holds from the beginning)
//!   free --mark of a call--> held --its end--> free, or only the end    (one for calls alone)
//! ```
//!
//! *Invariant:* outside of `held` and of a closing text nothing is forbidden but the end of the
//! output in front of a grammar that holds from the beginning, and tokens that go on behind a
//! call's mark in a way that the call cannot. A token may end a call and go on
//! (`tails.rs`).

use std::collections::VecDeque;
use std::sync::Arc;

use rocmforge_tokenizer::Tokenizer;
use toktrie::SimpleVob;

use crate::lead::{GAP_MAX_BYTES, Reasoning, Trigger, begun_mark, find, leads};
use crate::mask::{Allowed, Mask};
use crate::tails::Tails;
use crate::vocabulary::Vocabulary;
use crate::{Error, reason};

mod behind_call;
mod digits;

use digits::Digits;

/// An output that a grammar constrains.
pub struct Matcher {
    /// The grammar; `None` if only reasoning is limited.
    grammar: Option<llguidance::Matcher>,
    /// Tokens were given to the grammar since it was made or reset.
    is_touched: bool,
    /// The number that those tokens may end with.
    digits: Digits,
    /// Numbers have bounds of digits that the grammar does not say.
    has_bounded_numbers: bool,
    ends: Arc<[u32]>,
    tokenizer: Tokenizer,
    reasoning: Reasoning,
    trigger: Option<Trigger>,
    /// Tokens that may end a call and go on.
    tails: Tails,
    phase: Phase,
    /// Tokens that are forced next.
    forced: VecDeque<u32>,
}

#[derive(Debug, Clone)]
enum Phase {
    /// In front of the grammar: the bytes so far, and whether they may belong to the grammar.
    Lead(Vec<u8>, bool),
    /// Inside of reasoning: the last bytes of the output, which may begin the end mark, and the
    /// mark's number.
    Reasoning(Vec<u8>, usize),
    /// Outside of calls: the end of what has come, which may begin a mark.
    Free(Vec<u8>),
    /// The grammar holds.
    Held,
    /// The output ends.
    Ends,
    /// Every token is allowed from now on.
    Done,
}

/// A clone is independent of the original, and may be used on any thread.
impl Clone for Matcher {
    fn clone(&self) -> Self {
        Self {
            grammar: self.grammar.as_ref().map(llguidance::Matcher::deep_clone),
            is_touched: self.is_touched,
            digits: self.digits,
            has_bounded_numbers: self.has_bounded_numbers,
            ends: Arc::clone(&self.ends),
            tokenizer: self.tokenizer.clone(),
            reasoning: self.reasoning.clone(),
            trigger: self.trigger.clone(),
            tails: self.tails.clone(),
            phase: self.phase.clone(),
            forced: self.forced.clone(),
        }
    }
}

impl std::fmt::Debug for Matcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Matcher")
            .field("phase", &self.phase)
            .field("complete", &self.is_complete())
            .finish_non_exhaustive()
    }
}

impl Matcher {
    pub(crate) fn new(grammar: llguidance::Matcher, of: &Vocabulary) -> Result<Self, Error> {
        let mut matcher = Self {
            grammar: Some(grammar),
            ends: Arc::clone(&of.ends),
            tails: of.tails.clone(),
            ..Self::without_grammar(&of.tokenizer)
        };
        matcher.phase = Phase::Held;
        // A grammar that allows nothing, or whose first mask is too much, is refused here.
        matcher.mask().map_err(|error| match error {
            Error::Stuck { reason } => Error::Grammar { reason },
            other => other,
        })?;
        Ok(matcher)
    }

    /// A matcher that limits reasoning and constrains nothing else.
    pub fn without_grammar(tokenizer: &Tokenizer) -> Self {
        Self {
            grammar: None,
            is_touched: false,
            digits: Digits::default(),
            has_bounded_numbers: false,
            ends: tokenizer.end_of_generation().into(),
            tokenizer: tokenizer.clone(),
            reasoning: Reasoning::default(),
            trigger: None,
            tails: Tails::default(),
            phase: Phase::Done,
            forced: VecDeque::new(),
        }
    }

    /// Bounds the digits of numbers, where the grammar is one of JSON.
    pub(crate) fn bound_numbers(&mut self) {
        self.has_bounded_numbers = true;
    }

    /// The grammar holds behind a mark alone, up to its own end.
    pub fn hold_behind(&mut self, trigger: Trigger) {
        self.trigger = Some(trigger);
        self.phase = Phase::Free(Vec::new());
    }

    /// Lets the output begin with reasoning.
    pub fn reason_first(&mut self, reasoning: Reasoning) {
        let is_open = reasoning.is_open;
        self.reasoning = reasoning;
        if is_open {
            self.phase = Phase::Reasoning(Vec::new(), 0);
            self.force_at_budget();
        } else if self.reasoning.opens.is_some() {
            self.phase = Phase::Lead(Vec::new(), true);
        }
    }

    /// Whether the next token's mask may forbid anything.
    pub fn restricts(&self) -> bool {
        match &self.phase {
            Phase::Done => false,
            Phase::Free(seen) => begun_mark(seen, self.mark().as_bytes()) > 0,
            Phase::Lead(..) => self.holds_from_start(),
            Phase::Reasoning(..) => self.holds_from_start() || !self.forced.is_empty(),
            Phase::Held | Phase::Ends => true,
        }
    }

    /// Whether the matcher will allow every token from now on.
    pub fn is_done(&self) -> bool {
        matches!(self.phase, Phase::Done)
    }

    fn holds_from_start(&self) -> bool {
        self.grammar.is_some() && self.trigger.is_none()
    }

    /// The tokens that may come next. Of 150k tokens: microseconds inside of JSON and up to 3 ms
    /// where a text in it begins, 0.7 ms for a regular expression over letters; bounded to some 15
    /// ms.
    ///
    /// # Errors
    /// [`Error::Stuck`].
    pub fn mask(&mut self) -> Result<Mask, Error> {
        if let Some(&id) = self.forced.front() {
            return Ok(Mask(Allowed::Few(Arc::new([id]))));
        }
        let none = || Ok(Mask(Allowed::AllBut(Arc::new([]))));
        match &self.phase {
            Phase::Done => none(),
            Phase::Ends => Ok(Mask(Allowed::Few(Arc::clone(&self.ends)))),
            Phase::Reasoning(seen, at) if self.holds_from_start() => {
                let mark = self.reasoning.closes.get(*at).cloned().unwrap_or_default();
                let is_last = at + 1 >= self.reasoning.closes.len();
                let begun = begun_mark(seen, mark.as_bytes());
                let mut forbidden = self.ends.to_vec();
                if begun > 0 && is_last {
                    forbidden.extend(self.unfit_behind(&mark.as_bytes()[begun..])?);
                }
                Ok(Mask(Allowed::AllBut(forbidden.into())))
            }
            Phase::Reasoning(..) => none(),
            Phase::Lead(..) if !self.holds_from_start() => none(),
            Phase::Lead(seen, is_alive) => {
                let opens = self.reasoning.opens.as_deref();
                let before: Vec<u32> = (self.ids())
                    .filter(|&id| leads(opens, seen, self.bytes(id)))
                    .collect();
                if !is_alive {
                    return Ok(Mask(Allowed::Few(before.into())));
                }
                let is_space = seen.trim_ascii().is_empty();
                let mut allowed = self.grammar_mask()?;
                if is_space {
                    self.allow_behind_space(&mut allowed);
                }
                before.into_iter().for_each(|id| allowed.allow_token(id));
                Ok(Mask(Allowed::Only(allowed)))
            }
            Phase::Free(seen) => {
                let mark = self.mark().to_owned();
                let begun = begun_mark(seen, mark.as_bytes());
                let forbidden = match begun {
                    0 => Vec::new(),
                    begun => self.unfit_behind(&mark.as_bytes()[begun..])?,
                };
                Ok(Mask(Allowed::AllBut(forbidden.into())))
            }
            Phase::Held => {
                let mut allowed = self.grammar_mask()?;
                self.allow_behind_call(&mut allowed);
                Ok(Mask(Allowed::Only(allowed)))
            }
        }
    }

    fn grammar_mask(&mut self) -> Result<SimpleVob, Error> {
        let grammar = self
            .grammar
            .as_mut()
            .ok_or_else(|| stuck("it has no grammar"))?;
        let mut allowed = grammar.compute_mask_or_eos().map_err(stuck)?;
        self.bound_digits(&mut allowed);
        Ok(allowed)
    }

    fn ids(&self) -> std::ops::Range<u32> {
        0..self.tokenizer.n_vocab() as u32
    }

    fn bytes(&self, id: u32) -> &[u8] {
        self.tokenizer.token_bytes(id).unwrap_or_default()
    }

    /// Takes a token that the mask allows and that does not end the output.
    ///
    /// # Errors
    /// [`Error::Stuck`] if the grammar does not allow it.
    pub fn accept(&mut self, token: u32) -> Result<(), Error> {
        let is_forced = self.forced.pop_front().is_some();
        match std::mem::replace(&mut self.phase, Phase::Done) {
            Phase::Done => Ok(()),
            Phase::Ends => Err(stuck("the output has to end")),
            Phase::Held => {
                self.phase = Phase::Held;
                if let Some(rest) = self.end_call_within(token)? {
                    return self.go_on(rest);
                }
                self.consume(token)?;
                self.leave_call()
            }
            Phase::Free(seen) => {
                let more = [&seen[..], self.bytes(token)].concat();
                self.watch(more)
            }
            Phase::Lead(seen, is_alive) => self.lead(seen, is_alive, token),
            Phase::Reasoning(seen, at) => {
                let more = [&seen[..], self.bytes(token)].concat();
                self.reason(more, at)?;
                if let Phase::Reasoning(..) = self.phase
                    && !is_forced
                {
                    let left = &mut self.reasoning.budget;
                    *left = left.map(|left| left.saturating_sub(1));
                    self.force_at_budget();
                } else if let Phase::Reasoning(..) = self.phase
                    && self.forced.is_empty()
                {
                    // The closing text has no mark that closes.
                    self.behind_reasoning(&[])?;
                }
                Ok(())
            }
        }
    }

    fn consume(&mut self, token: u32) -> Result<(), Error> {
        self.is_touched = true;
        self.digits = self.digits.behind(self.bytes(token));
        let grammar = self
            .grammar
            .as_mut()
            .ok_or_else(|| stuck("it has no grammar"))?;
        grammar.consume_token(token).map_err(stuck)
    }

    /// Whether the grammar takes these tokens.
    fn takes(&mut self, tokens: &[u32]) -> bool {
        let grammar = self.grammar.as_mut();
        let valid = grammar.map(|grammar| grammar.validate_tokens(tokens));
        matches!(valid, Some(Ok(n)) if n == tokens.len())
    }

    /// Takes the grammar back to its beginning.
    fn rewind(&mut self) -> Result<(), Error> {
        if let Some(grammar) = self.grammar.as_mut().filter(|_| self.is_touched) {
            grammar.reset().map_err(stuck)?;
            self.is_touched = false;
            self.digits = Digits::default();
        }
        Ok(())
    }

    /// Tokens that have these bytes.
    fn tokens_of(&self, bytes: &[u8]) -> Vec<u32> {
        let env = self
            .grammar
            .as_ref()
            .and_then(|grammar| grammar.tok_env().ok());
        env.map(|env| env.tok_trie().greedy_tokenize(bytes))
            .unwrap_or_default()
    }

    /// More of what comes in front of the grammar, where reasoning may begin or white space stand.
    fn lead(&mut self, mut seen: Vec<u8>, is_alive: bool, token: u32) -> Result<(), Error> {
        let opens = self.reasoning.opens.clone();
        let goes_on = leads(opens.as_deref(), &seen, self.bytes(token));
        let had_space_alone = seen.trim_ascii().is_empty();
        seen.extend_from_slice(self.bytes(token));
        let words = seen.trim_ascii_start();
        if let Some(open) = opens.as_deref()
            && let Some(behind) = words.strip_prefix(open.as_bytes())
        {
            let behind = behind.to_vec();
            // A grammar that describes the mark holds the reasoning, too.
            if is_alive && self.takes(&[token]) {
                self.phase = Phase::Held;
                return self.consume(token);
            }
            self.rewind()?;
            self.reason(behind, 0)?;
            self.force_at_budget();
            return Ok(());
        }
        if !self.holds_from_start() {
            return match goes_on {
                true => {
                    self.phase = Phase::Lead(seen, true);
                    Ok(())
                }
                false => self.leave_lead(seen),
            };
        }
        let is_space = words.is_empty();
        let mut is_alive = is_alive;
        if is_alive && self.takes(&[token]) {
            self.consume(token)?;
        } else if let Some(tokens) = self
            .behind_space(token)
            .filter(|_| had_space_alone && is_alive)
            && self.takes(&tokens)
        {
            tokens
                .into_iter()
                .try_for_each(|token| self.consume(token))?;
        } else if goes_on {
            self.rewind()?;
            // The grammar begins behind white space that it has no place for.
            is_alive = is_space;
        } else {
            return Err(stuck(
                "the generated token fits neither the reasoning nor the grammar",
            ));
        }
        self.phase = match goes_on {
            true => Phase::Lead(seen, is_alive),
            false => Phase::Held,
        };
        Ok(())
    }

    /// What a token that begins with white space has behind that, as tokens.
    fn behind_space(&self, token: u32) -> Option<Vec<u32>> {
        let bytes = self.bytes(token);
        let words = bytes.trim_ascii_start();
        (!words.is_empty() && words.len() < bytes.len()).then(|| self.tokens_of(words))
    }

    /// Allows tokens that begin with white space, and go on as the grammar begins, of which these
    /// tokens may come first.
    fn allow_behind_space(&mut self, allowed: &mut SimpleVob) {
        let more = self
            .ids()
            .filter_map(|id| Some((id, self.behind_space(id)?)));
        let more =
            more.filter(|(_, tokens)| tokens.first().is_some_and(|&id| allowed.is_allowed(id)));
        let more: Vec<(u32, Vec<u32>)> = more.collect();
        for (id, tokens) in more {
            if tokens.len() == 1 || self.takes(&tokens) {
                allowed.allow_token(id);
            }
        }
    }

    /// What comes in front of the grammar is over, and the grammar does not hold from there.
    fn leave_lead(&mut self, seen: Vec<u8>) -> Result<(), Error> {
        match self.trigger {
            Some(_) => self.watch(seen),
            None => {
                self.phase = Phase::Done;
                Ok(())
            }
        }
    }

    /// More reasoning, of which `seen` may have marks from number `at` on.
    fn reason(&mut self, mut seen: Vec<u8>, mut at: usize) -> Result<(), Error> {
        while let Some(mark) = self.reasoning.closes.get(at).map(String::as_bytes) {
            let Some(found) = find(&seen, mark) else {
                let keep = seen.len().saturating_sub(mark.len().saturating_sub(1));
                seen.drain(..keep);
                self.phase = Phase::Reasoning(seen, at);
                return Ok(());
            };
            seen.drain(..found + mark.len());
            at += 1;
        }
        self.forced.clear();
        self.behind_reasoning(&seen)
    }

    /// Reasoning has ended, and the same token has brought `more`.
    fn behind_reasoning(&mut self, more: &[u8]) -> Result<(), Error> {
        self.reasoning.opens = None;
        self.forced.clear();
        self.rewind()?;
        if !self.holds_from_start() {
            return self.leave_lead(more.to_vec());
        }
        let words = more.trim_ascii_start();
        if words.is_empty() && self.reasoning.has_gap && more.len() < GAP_MAX_BYTES {
            self.phase = Phase::Lead(more.to_vec(), true);
            return Ok(());
        }
        self.phase = Phase::Held;
        let tokens = self.tokens_of(words);
        if !tokens.is_empty() && self.takes(&tokens) {
            tokens
                .into_iter()
                .try_for_each(|token| self.consume(token))?;
        }
        Ok(())
    }

    /// Forces the closing text where no token of the budget is left.
    fn force_at_budget(&mut self) {
        if !self.reasoning.is_used_up()
            || !self.forced.is_empty()
            || !matches!(self.phase, Phase::Reasoning(..))
        {
            return;
        }
        let closing = self.tokenizer.encode(&self.reasoning.closing, false, true);
        self.forced = closing.unwrap_or_default().into();
        (self.reasoning.budget, self.reasoning.end) = (None, None);
    }

    /// More of what comes outside of calls.
    fn watch(&mut self, mut seen: Vec<u8>) -> Result<(), Error> {
        let Some(trigger) = self.trigger.clone() else {
            return Err(stuck("it has no mark"));
        };
        let mark = trigger.mark.as_bytes();
        if trigger.at_start {
            let words = seen.trim_ascii_start();
            let is_begun = mark.starts_with(words) || words.starts_with(mark);
            if !is_begun {
                self.phase = Phase::Done;
                return Ok(());
            }
        }
        let Some(at) = find(&seen, mark) else {
            if !trigger.at_start {
                let keep = seen.len().saturating_sub(mark.len().saturating_sub(1));
                seen.drain(..keep);
            }
            self.phase = Phase::Free(seen);
            return Ok(());
        };
        let behind = seen.split_off(at + mark.len());
        self.rewind()?;
        let tokens = self.tokens_of(&behind);
        if !behind.is_empty() && (tokens.is_empty() || !self.takes(&tokens)) {
            // It cannot be a call any more. A mask has forbidden this where one was asked for.
            self.phase = if trigger.at_start {
                Phase::Done
            } else {
                Phase::Free(Vec::new())
            };
            return Ok(());
        }
        self.phase = Phase::Held;
        tokens
            .into_iter()
            .try_for_each(|token| self.consume(token))?;
        self.leave_call()
    }

    /// Leaves the grammar of calls where it has come to its end.
    fn leave_call(&mut self) -> Result<(), Error> {
        let is_over = self
            .grammar
            .as_ref()
            .is_some_and(|grammar| grammar.is_stopped() && !grammar.is_error());
        if is_over { self.end_call() } else { Ok(()) }
    }

    /// Leaves the grammar of calls.
    fn end_call(&mut self) -> Result<(), Error> {
        let Some(trigger) = &self.trigger else {
            return Ok(());
        };
        self.phase = match trigger {
            Trigger {
                then_ends: true, ..
            } if !self.ends.is_empty() => Phase::Ends,
            Trigger { once: true, .. } | Trigger { at_start: true, .. } => Phase::Done,
            _ => Phase::Free(Vec::new()),
        };
        self.rewind()
    }

    /// What opens calls.
    fn mark(&self) -> &str {
        self.trigger.as_ref().map_or("", |trigger| &trigger.mark)
    }

    /// Tokens that end a mark with these bytes of it, and go on as what is held does not. White
    /// space may stand behind reasoning.
    fn unfit_behind(&mut self, rest: &[u8]) -> Result<Vec<u32>, Error> {
        let is_free = self.trigger.is_some();
        let longer = self.ids().filter_map(|id| {
            let behind = self.bytes(id).strip_prefix(rest)?;
            let words = if is_free {
                behind
            } else {
                behind.trim_ascii_start()
            };
            (!words.is_empty()).then(|| (id, self.tokens_of(words)))
        });
        let longer: Vec<(u32, Vec<u32>)> = longer.collect();
        self.rewind()?;
        let unfit = longer
            .into_iter()
            .filter(|(_, tokens)| tokens.is_empty() || !self.takes(tokens));
        Ok(unfit.map(|(id, _)| id).collect())
    }

    /// Whether the grammar allows nothing more than the end.
    pub fn is_complete(&self) -> bool {
        let grammar = self.grammar.as_ref().filter(|_| self.trigger.is_none());
        matches!(self.phase, Phase::Held)
            && grammar.is_some_and(|grammar| grammar.is_stopped() && !grammar.is_error())
    }
}

fn stuck(error: impl std::fmt::Display) -> Error {
    Error::Stuck {
        reason: reason(&error),
    }
}

#[cfg(test)]
#[path = "matcher_tests.rs"]
mod tests;
