//! Reasoning before a constrained output, and its budget.
//!
//! | the prompt | the output |
//! |---|---|
//! | has opened reasoning | begins inside of it |
//! | has closed it, or reasoning is switched off | has none |
//! | ends before it, and the template has its marks | may begin with it |
//! | messages have headers | has any messages up to the one that is held |

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use rocmforge_grammar::Reasoning;

use crate::tail::Tail;
use crate::tool_calls::forms::{Headers, Thinking};

/// Text that is inserted before the mark that closes reasoning when its budget is used up.
const CLOSING: &str = "\n\nThe reasoning budget is used up, so the answer follows now.\n";
/// Minimum number of tokens that a default reasoning budget leaves for the constrained output, if
/// there is room for twice as many.
const LEFT_MIN: u32 = 512;

/// A request's options for reasoning.
#[derive(Debug, Clone, Default)]
pub struct Plan {
    /// Whether the output is a chat message that is split into parts.
    pub is_chat: bool,
    /// Whether reasoning is switched off.
    pub is_off: bool,
    /// Maximum number of reasoning tokens; `None` allows as many as leave room for the constrained
    /// output.
    pub budget: Option<u32>,
    /// Flag that ends reasoning at once when it is set.
    pub end: Option<Arc<AtomicBool>>,
    /// The header of a message that calls a tool, if a call is forced: the constraint applies after
    /// it.
    pub call: Option<String>,
}

/// Number of tokens that a default reasoning budget leaves for the constrained output, of `room`
/// for all: a quarter, but at least 512 or half.
fn left_of(room: u32) -> u32 {
    (room / 4).max(LEFT_MIN.min(room / 2))
}

/// Limits reasoning so that room is left for the text that closes it, and for the constrained
/// output. `count` returns the number of a text's tokens. If there is little room, only the closing
/// marks are used.
pub fn fit(reasoning: &mut Reasoning, room: u32, count: impl Fn(&str) -> u32) {
    let left = left_of(room);
    let mut closing = count(&reasoning.closing);
    if closing > left / 2
        && let Some(marks) = reasoning.closing.strip_prefix(CLOSING)
    {
        reasoning.closing = format!("\n{marks}");
        closing = count(&reasoning.closing);
    }
    let most = room.saturating_sub(left).saturating_sub(closing);
    reasoning.budget = Some(reasoning.budget.unwrap_or(most).min(most));
}

impl Plan {
    /// The reasoning that may come first; `None` if there may be none. `holds` says that the output
    /// after it is constrained from its beginning.
    pub fn reasoning(
        &self,
        source: &str,
        tail: &Tail,
        holds: bool,
        budget: Option<u32>,
    ) -> Option<Reasoning> {
        let mut reasoning = self.without_end(source, tail, holds, budget)?;
        reasoning.end = self.end.clone();
        Some(reasoning)
    }

    /// Whether reasoning is limited although the output after it is not constrained.
    pub fn is_bounded(&self) -> bool {
        self.budget.is_some() || self.end.is_some()
    }

    fn without_end(
        &self,
        source: &str,
        tail: &Tail,
        holds: bool,
        budget: Option<u32>,
    ) -> Option<Reasoning> {
        if self.is_chat
            && let Some(headers) = Headers::of(source)
        {
            return match holds {
                true => self.behind_headers(headers, tail, budget),
                false => self.is_bounded().then(|| in_headers(headers, budget)),
            };
        }
        let opened = Thinking::opened_by(&tail.text);
        let may_open = || {
            let is_closed = |thinking: &Thinking| tail.text.ends_with(thinking.close);
            let wanted = self.is_chat && !self.is_off && !tail.continues;
            Thinking::of(source).filter(|thinking| wanted && !is_closed(thinking))
        };
        let thinking = opened.or_else(may_open)?;
        Some(Reasoning {
            opens: opened.is_none().then(|| thinking.open.to_owned()),
            is_open: opened.is_some(),
            closes: vec![thinking.close.to_owned()],
            budget,
            end: None,
            closing: format!("{CLOSING}{}", thinking.close),
            has_gap: true,
        })
    }

    fn behind_headers(
        &self,
        headers: Headers,
        tail: &Tail,
        budget: Option<u32>,
    ) -> Option<Reasoning> {
        let (closes, closing) = match (headers, &self.call) {
            (Headers::Channels, Some(_)) => (
                vec!["to=functions.".to_owned()],
                "<|end|><|start|>assistant<|channel|>commentary to=functions.".to_owned(),
            ),
            (Headers::Channels, None) => (
                vec!["<|channel|>final".to_owned(), "<|message|>".to_owned()],
                "<|end|><|start|>assistant<|channel|>final<|message|>".to_owned(),
            ),
            (Headers::Recipients, Some(name)) => (
                vec!["<atem:function_calls>".to_owned()],
                format!("<|eom|><|start|>assistant to={name}<|message|><atem:function_calls>"),
            ),
            (Headers::Recipients, None) => (
                vec!["to=user".to_owned(), "<|message|>".to_owned()],
                "<|eom|><|start|>assistant to=user<|message|>".to_owned(),
            ),
        };
        // A message that the prompt has begun goes on, unless it is reasoning.
        let says = |mark: &str| tail.text.contains(mark);
        let is_begun = tail.continues && !says("<|channel|>analysis") && !says("to=self");
        (!is_begun).then_some(Reasoning {
            opens: None,
            is_open: true,
            closes,
            budget,
            end: None,
            closing,
            has_gap: false,
        })
    }
}

/// Reasoning as the first message of several, without a constraint after it.
fn in_headers(headers: Headers, budget: Option<u32>) -> Reasoning {
    let (opens, close) = match headers {
        Headers::Channels => ("<|channel|>analysis<|message|>", "<|end|>"),
        Headers::Recipients => ("to=self<|message|>", "<|eom|>"),
    };
    Reasoning {
        opens: Some(opens.to_owned()),
        is_open: false,
        closes: vec![close.to_owned()],
        budget,
        end: None,
        closing: format!("{CLOSING}{close}"),
        has_gap: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tail(text: &str) -> Tail {
        Tail {
            text: text.to_owned(),
            continues: false,
        }
    }

    #[test]
    fn reasoning_comes_first_where_the_template_allows_it() {
        let chat = Plan {
            is_chat: true,
            ..Plan::default()
        };
        let off = Plan {
            is_off: true,
            ..chat.clone()
        };
        let source = "{% if x %}</think>{% endif %}";
        let of = |plan: &Plan, text: &str| plan.reasoning(source, &tail(text), true, None);
        let opened = of(&chat, "<|im_start|>assistant\n<think>").map(|r| (r.is_open, r.opens));
        assert_eq!(opened, Some((true, None)));
        let own = of(&chat, "<|im_start|>assistant").map(|r| (r.is_open, r.opens));
        assert_eq!(own, Some((false, Some("<think>".to_owned()))));
        assert!(of(&chat, "<think>\n\n</think>").is_none());
        assert!(of(&off, "<|im_start|>assistant").is_none());
        assert!(of(&Plan::default(), "a text").is_none());
        assert!(chat.reasoning("no marks", &tail(""), true, None).is_none());
        let harmony = "<|channel|><|message|>";
        let closes = |plan: &Plan| {
            plan.reasoning(harmony, &tail("<|start|>assistant"), true, None)
                .map(|r| r.closes)
        };
        assert_eq!(closes(&chat).map(|closes| closes.len()), Some(2));
        let forced = Plan {
            call: Some("f".to_owned()),
            ..chat
        };
        assert_eq!(closes(&forced), Some(vec!["to=functions.".to_owned()]));
    }

    /// Found by a test of scores: the closing sentence took the room of the content.
    #[test]
    fn a_default_budget_leaves_room_for_the_closing_text_and_for_what_is_held() {
        let chat = Plan {
            is_chat: true,
            ..Plan::default()
        };
        let of = |room: u32, budget: Option<u32>| {
            let opened = tail("<think>");
            let mut reasoning = chat.reasoning("</think>", &opened, true, budget)?;
            fit(&mut reasoning, room, |text| text.len() as u32 / 4);
            Some((reasoning.budget?, reasoning.closing.starts_with(CLOSING)))
        };
        let long = (CLOSING.len() + "</think>".len()) as u32 / 4;
        assert_eq!(of(80, None), Some((80 - 40 - long, true)));
        assert_eq!(of(30, None), Some((30 - 15 - 2, false)));
        assert_eq!(of(8192, None), Some((8192 - 2048 - long, true)));
        assert_eq!(of(8192, Some(9)), Some((9, true)));
        assert_eq!(of(1, None), Some((0, false)));
    }
}
