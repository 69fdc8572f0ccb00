//! Rewrites a chat for its template, if the template rejects or drops parts of what clients send.
//!
//! - Beside a call of a tool clients send no content, and many templates look for something in it:
//!   those get an empty text (Qwen 3, gpt-oss, Granite, Ministral), as do those that would write
//!   the word None there, which nobody said (GLM 4.6 and 4.7, MiniMax M2).
//! - Mistral's templates want ids of calls of nine letters and digits.
//! - Agents let the system speak in between: Codex sends its instructions as several messages,
//!   Claude Code adds one where the date has changed. Many templates refuse a second one (Qwen 3.5,
//!   Mistral), others write one of them and leave the rest out without a word (gpt-oss, MiniMax).
//!   Those become part of the first where they stand beside it, and else of what the user says
//!   there, so that what comes before stays as it was.
//!
//! - Templates of models that always think open the thoughts whatever `enable_thinking` says
//!   (DeepSeek R1, QwQ): where that is false the thoughts are closed again, empty, as Qwen 3's own
//!   template has them.
//!
//! - gpt-oss' template refuses a call with both a content and reasoning: the content, which is what
//!   the model says before it calls, follows the reasoning there. Others add to reasoning that is
//!   not there (Command A Reasoning): they get an empty one beside the call.
//!
//! A template that takes a chat as it is gets it as it is.

use rocmforge_tokenizer::{Chat, Content, Ending, Message, RenderedChat};
use serde_json::{Value, json};

use crate::tool_calls::forms::Thinking;

const SYSTEM: &str = "system";
const USER: &str = "user";
/// What Jinja writes for a missing value.
const NONE: &str = "None";
/// Separator between texts that are joined.
const BETWEEN: &str = "\n\n";
/// Length of an id of a tool call that Mistral's templates accept.
const SHORT_ID: usize = 9;

/// A way to rewrite a chat; returns `None` if it changes nothing.
pub type Way = fn(&Chat) -> Option<Chat>;

/// Ways to rewrite a chat that a template rejects, each tried on the result of the one before.
pub const WAYS: [Way; 6] = [
    with_texts,
    with_short_ids,
    with_content_thought,
    with_empty_thoughts,
    with_one_of_system,
    with_none_of_system,
];
/// Ways to put a system message into a template that ignores that role.
pub const WAYS_OF_SYSTEM: [Way; 2] = [with_one_of_system, with_none_of_system];

/// Closes the reasoning that a template has opened at the end of a chat for which reasoning is
/// switched off.
pub fn close_thoughts(chat: &Chat, rendered: &mut RenderedChat) {
    let is_off = chat.template_kwargs.get("enable_thinking") == Some(&Value::Bool(false));
    if !is_off || chat.ending != Ending::Answer {
        return;
    }
    let opened = Thinking::opened_by(rendered.text().trim_end());
    if let Some(thinking) = opened {
        rendered.push(&format!("\n{}\n\n", thinking.close));
    }
}

/// Whether the rendered text contains all of several system messages.
pub fn is_whole(chat: &Chat, text: &dyn Fn() -> String) -> bool {
    of_system(chat).nth(1).is_none() || are_all_in(chat, &text())
}

/// Whether the rendered text contains some system messages and not others: a template that writes
/// none at all does not count.
pub fn leaves_out(chat: &Chat, text: &dyn Fn() -> String) -> bool {
    if of_system(chat).nth(1).is_none() {
        return false;
    }
    let text = text();
    let is_in = |message: &Message| is_said(message, &text);
    of_system(chat).any(is_in) && !of_system(chat).all(is_in)
}

fn of_system(chat: &Chat) -> impl Iterator<Item = &Message> {
    chat.messages
        .iter()
        .filter(|message| message.role == SYSTEM)
}

fn are_all_in(chat: &Chat, text: &str) -> bool {
    of_system(chat).all(|message| is_said(message, text))
}

fn is_said(message: &Message, text: &str) -> bool {
    let is_in = |said: &str| text.contains(said.trim());
    match &message.content {
        Content::None => true,
        Content::Text(said) => is_in(said),
        Content::Parts(parts) => parts
            .iter()
            .filter_map(|part| part["text"].as_str())
            .all(is_in),
    }
}

/// The chat with empty contents in place of missing ones, if the template wrote [`NONE`] for those.
pub fn without_none(chat: &Chat, text: &str) -> Option<Chat> {
    text.contains(NONE).then(|| with_texts(chat)).flatten()
}

/// Whether a template wrote [`NONE`] for missing contents, and otherwise the same as for empty
/// ones: `text` is the rendered chat, `other` the one with empty contents. White space around empty
/// contents is ignored.
pub fn spells_none(text: &str, other: &str) -> bool {
    let rest = |text: &str| {
        let parts = text.split_whitespace().flat_map(|word| word.split(NONE));
        parts.collect::<String>()
    };
    text.matches(NONE).count() > other.matches(NONE).count() && rest(text) == rest(other)
}

/// Puts an empty text in place of missing contents.
fn with_texts(chat: &Chat) -> Option<Chat> {
    let lacks = |message: &Message| message.content == Content::None;
    changed(chat, chat.messages.iter().any(lacks), |message| {
        if lacks(message) {
            message.content = Content::Text(String::new());
        }
    })
}

/// Shortens ids of tool calls to the last letters and digits of the client's ids, so that equal ids
/// stay equal.
fn with_short_ids(chat: &Chat) -> Option<Chat> {
    let short = |id: &mut String| {
        let kept: Vec<char> = id.chars().filter(char::is_ascii_alphanumeric).collect();
        let tail: String = kept[kept.len().saturating_sub(SHORT_ID)..].iter().collect();
        *id = format!("{tail:0>SHORT_ID$}");
    };
    let has_calls =
        |message: &Message| !message.tool_calls.is_empty() || message.tool_call_id.is_some();
    changed(chat, chat.messages.iter().any(has_calls), |message| {
        let calls = message.tool_calls.iter_mut();
        let ids = calls.filter_map(|call| call.id.as_mut());
        ids.chain(message.tool_call_id.as_mut()).for_each(short);
    })
}

/// Moves the content beside tool calls behind the reasoning, if there are both.
fn with_content_thought(chat: &Chat) -> Option<Chat> {
    let said = |message: &Message| match (&message.content, &message.reasoning_content) {
        (Content::Text(text), Some(reasoning))
            if !message.tool_calls.is_empty() && !text.is_empty() && !reasoning.is_empty() =>
        {
            Some(format!("{reasoning}{BETWEEN}{text}"))
        }
        _ => None,
    };
    let has_both = chat.messages.iter().any(|message| said(message).is_some());
    changed(chat, has_both, |message| {
        if let Some(both) = said(message) {
            message.reasoning_content = Some(both);
            message.content = Content::Text(String::new());
        }
    })
}

/// Adds empty reasoning beside tool calls that have none.
fn with_empty_thoughts(chat: &Chat) -> Option<Chat> {
    let lacks =
        |message: &Message| !message.tool_calls.is_empty() && message.reasoning_content.is_none();
    changed(chat, chat.messages.iter().any(lacks), |message| {
        if lacks(message) {
            message.reasoning_content = Some(String::new());
        }
    })
}

fn changed(chat: &Chat, wanted: bool, change: impl Fn(&mut Message)) -> Option<Chat> {
    let mut chat = wanted.then(|| chat.clone())?;
    chat.messages.iter_mut().for_each(change);
    Some(chat)
}

fn with_one_of_system(chat: &Chat) -> Option<Chat> {
    of_system(chat).nth(1)?;
    Some(gathered(chat, true))
}

fn with_none_of_system(chat: &Chat) -> Option<Chat> {
    of_system(chat).next()?;
    Some(gathered(chat, false))
}

/// Merges the chat's system messages: into one at the beginning, or none at all, with the rest as
/// user messages.
///
/// Consecutive messages of one role are joined, since many templates require alternating turns.
fn gathered(chat: &Chat, keep_first: bool) -> Chat {
    let mut messages: Vec<Message> = Vec::with_capacity(chat.messages.len());
    for message in &chat.messages {
        let mut message = message.clone();
        let leads = messages.iter().all(|before| before.role == SYSTEM);
        if message.role == SYSTEM && !(keep_first && leads) {
            message.role = USER.to_owned();
        }
        let goes_on = |last: &&mut Message| {
            last.role == message.role
                && matches!(message.role.as_str(), SYSTEM | USER)
                && last.parse_special == message.parse_special
        };
        match messages.last_mut().filter(goes_on) {
            Some(last) => {
                let before = std::mem::take(&mut last.content);
                last.content = joined(before, message.content);
            }
            None => messages.push(message),
        }
    }
    Chat {
        messages,
        ..chat.clone()
    }
}

fn joined(first: Content, second: Content) -> Content {
    match (first, second) {
        (Content::None, content) | (content, Content::None) => content,
        (Content::Text(first), Content::Text(second)) => {
            Content::Text(format!("{first}{BETWEEN}{second}"))
        }
        (first, second) => Content::Parts(parts(first).into_iter().chain(parts(second)).collect()),
    }
}

fn parts(content: Content) -> Vec<Value> {
    match content {
        Content::None => Vec::new(),
        Content::Text(text) => vec![json!({"type": "text", "text": text})],
        Content::Parts(parts) => parts,
    }
}

#[cfg(test)]
mod tests {
    use rocmforge_tokenizer::ToolCall;

    use super::*;

    fn chat(turns: &[(&str, &str)]) -> Chat {
        let messages = turns.iter().map(|(role, text)| Message::new(*role, *text));
        Chat::new(messages.collect())
    }

    fn turns(chat: &Chat) -> Vec<(&str, &str)> {
        let each = chat.messages.iter();
        each.map(|message| match &message.content {
            Content::Text(text) => (message.role.as_str(), text.as_str()),
            other => panic!("{other:?}"),
        })
        .collect()
    }

    #[test]
    fn what_the_system_says_later_is_said_by_the_user_there() {
        let asked = chat(&[
            ("system", "a"),
            ("system", "b"),
            ("user", "hi"),
            ("assistant", "yes"),
            ("system", "c"),
            ("user", "and?"),
            ("system", "d"),
        ]);
        let one = with_one_of_system(&asked).unwrap();
        let rest = [("assistant", "yes"), ("user", "c\n\nand?\n\nd")];
        let begin = [("system", "a\n\nb"), ("user", "hi")];
        assert_eq!(turns(&one), [begin, rest].concat());
        let none = with_none_of_system(&asked).unwrap();
        assert_eq!(turns(&none)[0], ("user", "a\n\nb\n\nhi"));
        assert_eq!(turns(&none)[1..], rest);
        assert_eq!(with_none_of_system(&none), None);
        let single = chat(&[("system", "a"), ("user", "hi")]);
        assert_eq!(with_one_of_system(&single), None);
    }

    #[test]
    fn calls_are_told_with_a_text_and_a_short_id() {
        let call = |id: &str| ToolCall {
            id: Some(id.to_owned()),
            ..ToolCall::default()
        };
        let mut asked = chat(&[("user", "hi")]);
        assert_eq!(with_texts(&asked), None);
        assert_eq!(with_short_ids(&asked), None);
        asked.messages.push(Message {
            role: "assistant".to_owned(),
            tool_calls: vec![call("call_8d68ca450f949c6b"), call("a-1")],
            ..Message::default()
        });
        asked.messages.push(Message {
            tool_call_id: Some("a-1".to_owned()),
            ..Message::new("tool", "7")
        });
        let told = with_short_ids(&with_texts(&asked).unwrap()).unwrap();
        assert_eq!(
            turns(&told),
            [("user", "hi"), ("assistant", ""), ("tool", "7")]
        );
        let calls = &told.messages[1].tool_calls;
        let ids: Vec<_> = calls.iter().map(|call| call.id.as_deref()).collect();
        assert_eq!(ids, [Some("50f949c6b"), Some("0000000a1")]);
        assert_eq!(told.messages[2].tool_call_id.as_deref(), Some("0000000a1"));
    }

    #[test]
    fn what_is_said_beside_a_call_follows_the_reasoning() {
        let mut asked = chat(&[("user", "hi"), ("assistant", "I look.")]);
        asked.messages[1].reasoning_content = Some("I must look.".to_owned());
        assert_eq!(with_content_thought(&asked), None);
        asked.messages[1].tool_calls = vec![ToolCall::default()];
        let told = with_content_thought(&asked).unwrap();
        assert_eq!(turns(&told), [("user", "hi"), ("assistant", "")]);
        let reasoning = told.messages[1].reasoning_content.as_deref();
        assert_eq!(reasoning, Some("I must look.\n\nI look."));
        assert_eq!(with_content_thought(&told), None);
        // Others want reasoning, be it empty.
        assert_eq!(with_empty_thoughts(&asked), None);
        asked.messages[1].reasoning_content = None;
        let told = with_empty_thoughts(&asked).unwrap();
        let reasoning = told.messages.iter().map(|m| m.reasoning_content.as_deref());
        assert_eq!(reasoning.collect::<Vec<_>>(), [None, Some("")]);
    }

    #[test]
    fn none_in_the_place_of_a_content_is_noticed() {
        for (text, other, expected) in [
            ("a</think>None<call>", "a</think><call>", true),
            ("ai\nNone\n<call>None", "ai\n<call>None", true),
            // The same, or another chat.
            ("say None", "say None", false),
            ("<call>None", "", false),
            ("a None", "a b", false),
        ] {
            assert_eq!(spells_none(text, other), expected, "{text}");
        }
        let mut asked = chat(&[("user", "hi")]);
        assert_eq!(without_none(&asked, "None"), None);
        asked.messages.push(Message {
            role: "assistant".to_owned(),
            ..Message::default()
        });
        assert_eq!(without_none(&asked, "nothing"), None);
        let told = without_none(&asked, "None").unwrap();
        assert_eq!(turns(&told), [("user", "hi"), ("assistant", "")]);
    }

    #[test]
    fn what_a_template_left_out_is_noticed() {
        let mut asked = chat(&[("system", " a\n"), ("user", "hi"), ("system", "b")]);
        assert!(are_all_in(&asked, "S: a U: hi S: b"));
        assert!(!are_all_in(&asked, "S: a U: hi"));
        for (text, expected) in [("S: a U: hi", true), ("S: a S: b", false), ("U: hi", false)] {
            assert_eq!(leaves_out(&asked, &|| text.to_owned()), expected, "{text}");
        }
        asked.messages[2].content = Content::Parts(vec![
            json!({"type": "text", "text": "b"}),
            json!({"text": "c"}),
        ]);
        assert!(!are_all_in(&asked, "S: a U: hi S: b"));
        assert!(are_all_in(&asked, "S: a U: hi S: b c"));
        let joined = gathered(&asked, true);
        assert!(matches!(&joined.messages[1].content, Content::Parts(parts) if parts.len() == 3));
    }
}
