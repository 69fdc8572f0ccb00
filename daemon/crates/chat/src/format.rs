//! Constrained output: the grammar that a request asks for, and how it begins after the prompt.

use rocmforge_failure::{self as failure, Failure, Violations};
use rocmforge_grammar::{Error, Grammar, Matcher, Trigger};

use crate::model::ChatModel;
use crate::reasoning::{self, Plan};
use crate::tail::Tail;

/// The grammar that an output has to follow.
#[derive(Debug, Clone)]
pub struct Format {
    /// The grammar.
    pub grammar: Grammar,
    /// The field of the grammar in error messages.
    pub field: &'static str,
}

impl Format {
    /// A format with the name of the request's field that asks for it.
    pub fn new(grammar: Grammar, field: &'static str) -> Self {
        Self { grammar, field }
    }

    /// The format for a JSON schema given as text.
    ///
    /// # Errors
    /// INVALID_ARGUMENT if the text is no JSON.
    pub fn of_schema_text(text: &str, field: &'static str) -> Result<Self, Failure> {
        let grammar = Grammar::from_schema_text(text);
        let grammar = grammar.map_err(|error| refused(field, &error))?;
        Ok(Self::new(grammar, field))
    }

    /// Rejects options that cannot be combined with a format.
    pub fn check_beside(&self, min_tokens: u32, ignore_eos: bool, v: &mut Violations) {
        let message = "the output of a request with a format ends when the format is complete; leave this field unset";
        if min_tokens > 0 {
            v.add("sampling.min_tokens", message);
        }
        if ignore_eos {
            v.add("sampling.ignore_eos", message);
        }
    }
}

/// The constraint of an output after a prompt that ends in `tail`, with at most `room` tokens;
/// `None` if the output is not constrained.
pub fn begun(
    matcher: Option<Matcher>,
    trigger: Option<Trigger>,
    plan: &Plan,
    model: &ChatModel<'_>,
    (tail, room): (&Tail, u32),
) -> Option<Box<Matcher>> {
    let source = model.template_source().unwrap_or_default();
    let holds_from_start = matcher.is_some() && trigger.is_none();
    if matcher.is_none() && !plan.is_bounded() {
        return None;
    }
    let mut reasoning = plan.reasoning(source, tail, holds_from_start, plan.budget);
    if let Some(reasoning) = reasoning.as_mut().filter(|_| holds_from_start) {
        let ids = |text: &str| model.tokenizer.encode(text, false, true);
        let count = |text: &str| ids(text).map_or(0, |ids| ids.len() as u32);
        reasoning::fit(reasoning, room, count);
    }
    let is_free = matcher.is_none();
    let mut matcher = matcher.unwrap_or_else(|| Matcher::without_grammar(model.tokenizer));
    if let Some(trigger) = trigger {
        matcher.hold_behind(trigger);
    }
    match reasoning {
        Some(reasoning) => matcher.reason_first(reasoning),
        None if is_free => return None,
        None => {}
    }
    Some(Box::new(matcher))
}

/// The failure for a grammar in a request's field that cannot be used.
pub fn refused(field: &str, error: &Error) -> Failure {
    match error {
        Error::Grammar { .. } | Error::Stuck { .. } => failure::invalid(field, &error.to_string()),
        Error::Vocabulary { .. } => failure::unsupported_field(field, &error.to_string()),
    }
}
