//! A text that is held to a grammar, token by token.

use std::sync::Arc;

use rocmforge_tokenizer::Tokenizer;
use toktrie::SimpleVob;

use crate::vocabulary::Vocabulary;
use crate::{Error, reason};

/// The tokens that may come next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mask(Allowed);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Allowed {
    /// These.
    Only(SimpleVob),
    /// All but these.
    AllBut(Arc<[u32]>),
}

impl Mask {
    /// Makes the logits of all other tokens minus infinity. `logits` is `[n_vocab]`.
    pub fn apply(&self, logits: &mut [f32]) {
        let mut forbid = |id: usize| {
            if let Some(logit) = logits.get_mut(id) {
                *logit = f32::NEG_INFINITY;
            }
        };
        match &self.0 {
            Allowed::Only(allowed) => allowed.iter_unset_entries(forbid),
            Allowed::AllBut(forbidden) => forbidden.iter().for_each(|&id| forbid(id as usize)),
        }
    }

    /// Whether `id` may come next.
    pub fn allows(&self, id: u32) -> bool {
        match &self.0 {
            Allowed::Only(allowed) => (id as usize) < allowed.len() && allowed.is_allowed(id),
            Allowed::AllBut(forbidden) => !forbidden.contains(&id),
        }
    }
}

/// A text that is held to a grammar.
pub struct Matcher {
    inner: llguidance::Matcher,
    ends: Arc<[u32]>,
    tokenizer: Tokenizer,
    /// What has to come before the grammar begins.
    after: Option<After>,
}

/// A mark that ends what is not held to the grammar.
#[derive(Clone)]
struct After {
    mark: String,
    /// The end of what has come: what may begin the mark.
    seen: Vec<u8>,
}

/// A clone goes on by itself, on any thread.
impl Clone for Matcher {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.deep_clone(),
            ends: Arc::clone(&self.ends),
            tokenizer: self.tokenizer.clone(),
            after: self.after.clone(),
        }
    }
}

impl std::fmt::Debug for Matcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Matcher")
            .field("begun", &self.after.is_none())
            .field("complete", &self.inner.is_stopped())
            .finish_non_exhaustive()
    }
}

impl Matcher {
    pub(crate) fn new(inner: llguidance::Matcher, of: &Vocabulary) -> Result<Self, Error> {
        let mut matcher = Self {
            inner,
            ends: Arc::clone(&of.ends),
            tokenizer: of.tokenizer.clone(),
            after: None,
        };
        // A grammar that allows nothing, or whose first mask is too much, is refused here.
        matcher.mask().map_err(|error| match error {
            Error::Stuck { reason } => Error::Grammar { reason },
            other => other,
        })?;
        Ok(matcher)
    }

    /// Leaves the text free up to and with `mark`, but that it does not end before.
    pub fn begin_after(&mut self, mark: &str) {
        self.after = (!mark.is_empty()).then(|| After {
            mark: mark.to_owned(),
            seen: Vec::new(),
        });
    }

    /// The tokens that may come next. Of 150k tokens: microseconds inside of JSON and up to 3 ms
    /// where a text in it begins, 0.7 ms for a regular expression over letters; bounded to some 15
    /// ms.
    ///
    /// # Errors
    /// [`Error::Stuck`].
    pub fn mask(&mut self) -> Result<Mask, Error> {
        if self.after.is_some() {
            return Ok(Mask(Allowed::AllBut(Arc::clone(&self.ends))));
        }
        let mask = self.inner.compute_mask_or_eos().map_err(stuck)?;
        Ok(Mask(Allowed::Only(mask)))
    }

    /// Takes a token that the mask allows and that does not end the text.
    ///
    /// # Errors
    /// [`Error::Stuck`] if the grammar does not allow it.
    pub fn accept(&mut self, token: u32) -> Result<(), Error> {
        let Some(after) = &mut self.after else {
            return self.inner.consume_token(token).map_err(stuck);
        };
        let bytes = self.tokenizer.token_bytes(token).unwrap_or_default();
        after.seen.extend_from_slice(bytes);
        let mark = after.mark.as_bytes();
        if after.seen.windows(mark.len()).any(|part| part == mark) {
            // What the same token says behind the mark is not looked at: white space, in the
            // vocabularies that have such a token.
            self.after = None;
        } else {
            let from = after.seen.len().saturating_sub(mark.len() - 1);
            after.seen.drain(..from);
        }
        Ok(())
    }

    /// Whether the grammar allows nothing more than the end.
    pub fn is_complete(&self) -> bool {
        self.after.is_none() && self.inner.is_stopped() && !self.inner.is_error()
    }
}

fn stuck(error: impl std::fmt::Display) -> Error {
    Error::Stuck {
        reason: reason(&error),
    }
}
