//! The part of an output in front of its grammar: reasoning, white space, or any text up to a mark.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Maximum number of bytes of white space between the end of reasoning and the constrained output.
pub(crate) const GAP_MAX_BYTES: usize = 8;

/// Reasoning in front of what is held.
#[derive(Debug, Clone, Default)]
pub struct Reasoning {
    /// What opens it, where the output may begin with it.
    pub opens: Option<String>,
    /// The prompt has opened it.
    pub is_open: bool,
    /// The marks that close it, one after the other.
    pub closes: Vec<String>,
    /// Maximum number of reasoning tokens.
    pub budget: Option<u32>,
    /// Flag that ends the reasoning with the next token, as at the end of the budget.
    pub end: Option<Arc<AtomicBool>>,
    /// Text that is forced at the end of the reasoning budget. It ends with the marks that close
    /// the reasoning.
    pub closing: String,
    /// Whether white space may follow the reasoning.
    pub has_gap: bool,
}

impl Reasoning {
    /// Whether no token of it is left.
    pub(crate) fn is_used_up(&self) -> bool {
        let ended = self.end.as_ref();
        self.budget == Some(0) || ended.is_some_and(|end| end.load(Ordering::Relaxed))
    }
}

/// When a grammar begins to hold, if not from the start of the output.
#[derive(Debug, Clone)]
pub struct Trigger {
    /// The grammar begins behind this mark.
    pub mark: String,
    /// The mark counts only as the output's first words.
    pub at_start: bool,
    /// Whether the output has to end at the grammar's end.
    pub then_ends: bool,
    /// Whether the grammar holds once only.
    pub once: bool,
}

/// Whether `more` goes on with white space, or with the beginning of what opens reasoning, behind
/// `seen`.
pub(crate) fn leads(opens: Option<&str>, seen: &[u8], more: &[u8]) -> bool {
    if more.is_empty() {
        return false;
    }
    let begun = seen.trim_ascii_start();
    let words = if begun.is_empty() {
        more.trim_ascii_start()
    } else {
        more
    };
    let space = seen.len() - begun.len() + more.len() - words.len();
    if words.is_empty() {
        return space <= GAP_MAX_BYTES;
    }
    let rest = opens.and_then(|open| open.as_bytes().strip_prefix(begun));
    rest.is_some_and(|rest| {
        space <= GAP_MAX_BYTES && (rest.starts_with(words) || words.starts_with(rest))
    })
}

/// Bytes at the end of `seen` that begin a mark.
pub(crate) fn begun_mark(seen: &[u8], mark: &[u8]) -> usize {
    let most = seen.len().min(mark.len().saturating_sub(1));
    let begins = |n: &usize| seen.ends_with(&mark[..*n]);
    (1..=most).rev().find(begins).unwrap_or(0)
}

/// Where `part` first stands in `bytes`.
pub(crate) fn find(bytes: &[u8], part: &[u8]) -> Option<usize> {
    bytes
        .windows(part.len().max(1))
        .position(|window| window == part)
}
