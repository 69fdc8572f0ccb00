//! Converts Anthropic's requests to conversations.

use rocmforge_failure::{self as failure, Failure, Violations};
use rocmforge_tokenizer::{Content, Ending, Message, Seen, ToolCall};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::super::picture::{self, Said};
use super::super::prompt::{TextOr, add_thought, kind_of, model_name, take, take_text, text_parts};
use super::super::sampling::{WireSampling, whole_number};
use super::super::start::Conversation;
use super::super::{format, media};
use super::{tools, violations};

/// First words of a line that Claude Code puts into system prompts for Anthropic's servers. The
/// line differs in every request, so cached prefixes would never match; it is removed.
const BILLING: &str = "x-anthropic-billing-header:";
/// Marks around the number of tokens left, which Claude Code puts into system prompts; the text
/// between them is removed, too.
const COUNTER: [&str; 2] = ["<total_tokens>", "</total_tokens>"];

/// The body of `/v1/messages` and `/v1/messages/count_tokens`.
#[derive(Debug, Deserialize)]
pub(super) struct MessagesRequest {
    #[serde(default, deserialize_with = "model_name")]
    pub(super) model: String,
    messages: Vec<WireMessage>,
    system: Option<TextOr<Value>>,
    #[serde(default, deserialize_with = "whole_number")]
    max_tokens: Option<i64>,
    pub(super) stream: Option<bool>,
    stop_sequences: Option<Vec<String>>,
    #[serde(flatten)]
    sampling: WireSampling,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    thinking: Option<Value>,
    output_config: Option<Value>,
    output_format: Option<Value>,
    mcp_servers: Option<Vec<Value>>,
}

#[derive(Debug, Deserialize)]
struct WireMessage {
    role: String,
    content: TextOr<Value>,
}

impl MessagesRequest {
    /// The conversation to continue.
    pub(super) fn conversation(self) -> Result<(Conversation, Violations), Failure> {
        let wrong = |why: &str| Err(failure::invalid("max_tokens", why));
        match self.max_tokens {
            None => wrong("missing; give the most tokens that the answer may have"),
            Some(n) if n < 1 => wrong(&format!("{n} is out of range: at least 1")),
            Some(_) => self.for_counting(),
        }
    }

    /// The conversation to count tokens of.
    pub(super) fn for_counting(self) -> Result<(Conversation, Violations), Failure> {
        let (kwargs, is_quiet) = thinking(self.thinking.as_ref(), self.output_config.as_ref())?;
        let (tools, mut missing) = tools::read(self.tools, self.tool_choice.as_ref())?;
        missing.extend(tools::servers(self.mcp_servers.as_deref()));
        let mut messages = Vec::new();
        if let Some(system) = self.system {
            let Said { content, seen } = match system {
                TextOr::Text(text) => Content::Text(text).into(),
                TextOr::List(parts) => {
                    let said = text_parts(parts, |at| format!("system[{at}]"))?;
                    Said {
                        content: joined(said.content),
                        seen: said.seen,
                    }
                }
            };
            messages.push(Message {
                role: "system".to_owned(),
                content,
                seen,
                ..Message::default()
            });
        }
        for (at, message) in self.messages.into_iter().enumerate() {
            turn(at, message, &mut messages)?;
        }
        let mut messages: Vec<_> = messages.into_iter().filter_map(steady).collect();
        tools::tell_missing(&missing, &mut messages);
        let ending = match messages.last().is_some_and(is_begun) {
            true => Ending::Continue,
            false => Ending::Answer,
        };
        let mut violations = violations();
        let stop = self.stop_sequences.map(TextOr::List);
        let mut sampling = self.sampling.fields(self.max_tokens, stop, &mut violations);
        let budget = self
            .thinking
            .as_ref()
            .filter(|said| said["type"] == "enabled");
        let budget = budget.and_then(|said| said["budget_tokens"].as_u64());
        if let Some(budget) = budget {
            sampling.decoding.reasoning_budget = Some(u32::try_from(budget).unwrap_or(u32::MAX));
        }
        sampling.decoding.format =
            format::of_messages(self.output_config.as_ref(), self.output_format.as_ref())?;
        let conversation = Conversation {
            model: self.model,
            messages,
            tools,
            kwargs,
            documents: Vec::new(),
            ending,
            is_quiet,
            sampling,
            n_ctx: None,
            choices: 1,
            field: "messages",
        };
        Ok((conversation, violations))
    }
}

/// Whether the last message is the beginning of the response (prefill): the assistant's own, with
/// text after its reasoning, and no call.
fn is_begun(last: &Message) -> bool {
    let says = match &last.content {
        Content::None => false,
        Content::Text(text) => !text.is_empty(),
        Content::Parts(_) => true,
    };
    last.role == "assistant" && says && last.tool_calls.is_empty()
}

/// Joins the parts of a system prompt to one text, since templates do not take parts there.
fn joined(content: Content) -> Content {
    match content {
        Content::Parts(parts) => {
            let texts: Vec<_> = parts
                .iter()
                .filter_map(|part| part["text"].as_str())
                .collect();
            Content::Text(texts.join("\n"))
        }
        other => other,
    }
}

/// A system message without [`BILLING`] and [`COUNTER`]; `None` if nothing is left. Other messages
/// stay.
fn steady(mut message: Message) -> Option<Message> {
    if message.role != "system" {
        return Some(message);
    }
    let content = match message.content {
        Content::Text(text) => match without_counts(&text) {
            Some(kept) if kept.trim().is_empty() => return None,
            kept => Content::Text(kept.unwrap_or(text)),
        },
        Content::Parts(mut parts) => {
            parts.retain_mut(|part| {
                let kept = part["text"].as_str().and_then(without_counts);
                let says = kept.as_ref().is_none_or(|text| !text.trim().is_empty());
                if let Some(kept) = kept {
                    part["text"] = kept.into();
                }
                says
            });
            match parts.is_empty() {
                true => return None,
                false => Content::Parts(parts),
            }
        }
        Content::None => Content::None,
    };
    message.content = content;
    for seen in &mut message.seen {
        if let Seen::Part(part) = seen
            && let Some(kept) = part["text"].as_str().and_then(without_counts)
        {
            part["text"] = kept.into();
        }
    }
    Some(message)
}

/// The text without [`BILLING`] and [`COUNTER`]; `None` if it has neither.
fn without_counts(text: &str) -> Option<String> {
    let [open, close] = COUNTER;
    if !text.contains(BILLING) && !text.contains(open) {
        return None;
    }
    let lines = text.split_inclusive('\n');
    let unbilled: String = lines.filter(|line| !line.starts_with(BILLING)).collect();
    let mut rest = unbilled.as_str();
    let mut kept = String::with_capacity(rest.len());
    while let Some((before, counted)) = rest.split_once(open) {
        let Some((count, behind)) = counted.split_once(close) else {
            break;
        };
        // Whoever writes about it has other words between.
        if count.trim_end().ends_with("tokens left") {
            kept.push_str(before.trim_end());
        } else {
            kept.push_str(&rest[..rest.len() - behind.len()]);
        }
        rest = behind;
    }
    kept.push_str(rest);
    Some(kept)
}

/// Converts `thinking` to template variables. Also returns whether reasoning is off because the
/// request leaves `thinking` unset: requests of this route ask for reasoning if they want it.
fn thinking(
    thinking: Option<&Value>,
    config: Option<&Value>,
) -> Result<(Map<String, Value>, bool), Failure> {
    let mut kwargs = Map::new();
    let effort = config.and_then(|config| config["effort"].as_str());
    if let Some(effort) = effort {
        kwargs.insert("reasoning_effort".to_owned(), effort.into());
    }
    let on = match thinking {
        None | Some(Value::Null) => return Ok((kwargs, true)),
        Some(thinking) => match thinking["type"].as_str() {
            Some("enabled" | "adaptive") => true,
            Some("disabled") => false,
            _ => {
                let why = "give {\"type\": \"enabled\"}, adaptive or disabled";
                return Err(failure::invalid("thinking", why));
            }
        },
    };
    kwargs.insert("enable_thinking".to_owned(), on.into());
    Ok((kwargs, false))
}

/// Converts a tool's result to a separate message.
fn tool_result(block: &mut Value, field: impl Fn() -> String) -> Result<Message, Failure> {
    let id = take_text(block, "tool_use_id", &field)?;
    let said = match take(block, "content") {
        Value::Array(parts) => {
            let field = |part: usize| format!("{}.content[{part}]", field());
            let said = text_parts(parts, field)?;
            Said {
                content: joined(said.content),
                seen: picture::with_joined_texts(said.seen),
            }
        }
        Value::String(text) => Content::Text(text).into(),
        Value::Null => Content::Text(String::new()).into(),
        _ => {
            let field = format!("{}.content", field());
            let message = "neither a text nor a list of blocks; give one of them";
            return Err(failure::invalid(&field, message));
        }
    };
    Ok(Message {
        role: "tool".to_owned(),
        content: said.content,
        seen: said.seen,
        tool_call_id: Some(id),
        ..Message::default()
    })
}

/// Converts a message, which may become several: each tool result is a message of its own.
fn turn(at: usize, wire: WireMessage, messages: &mut Vec<Message>) -> Result<(), Failure> {
    let blocks = match wire.content {
        TextOr::Text(text) => {
            messages.push(Message::new(wire.role, text));
            return Ok(());
        }
        TextOr::List(blocks) => blocks,
    };
    let mut message = Message {
        role: wire.role,
        ..Message::default()
    };
    let (mut texts, mut images) = (Vec::new(), Vec::new());
    for (n, mut block) in blocks.into_iter().enumerate() {
        let field = || format!("messages[{at}].content[{n}]");
        let kind = kind_of(&block, field)?.to_owned();
        match kind.as_str() {
            "text" => {
                let text = take_text(&mut block, "text", field)?;
                texts.push(json!({"type": "text", "text": text}));
            }
            "thinking" => {
                add_thought(&mut message, take_text(&mut block, "thinking", field)?);
            }
            // Nobody here can read it.
            "redacted_thinking" => {}
            // What another server did by itself: its outcome is in the text that followed.
            "server_tool_use" | "mcp_tool_use" => {}
            // A summary of the turns before it.
            "compaction" => match take(&mut block, "content") {
                // One that failed.
                Value::Null => {}
                Value::String(text) => texts.push(json!({"type": "text", "text": text})),
                _ => {
                    let message = "its content is no text; give one, or leave the block out";
                    return Err(failure::invalid(&field(), message));
                }
            },
            "tool_use" => {
                let id = take_text(&mut block, "id", field)?;
                let name = take_text(&mut block, "name", field)?;
                message.tool_calls.push(ToolCall {
                    id: Some(id),
                    name,
                    arguments: take(&mut block, "input"),
                });
            }
            "tool_result" => {
                messages.push(tool_result(&mut block, field)?);
            }
            kind if kind.ends_with("_tool_result") => {}
            kind => {
                let text = media::text_of(kind, &block, &field())?;
                images.resize(texts.len(), None);
                images.push(picture::of_part(kind, &block, &field()));
                texts.push(json!({"type": "text", "text": text}));
            }
        }
    }
    let only_results = texts.is_empty()
        && message.tool_calls.is_empty()
        && message.reasoning_content.is_none()
        && message.role == "user";
    if !only_results {
        images.resize(texts.len(), None);
        message.seen = Seen::of_parts(&texts, images);
        message.content = match texts.len() {
            0 => Content::None,
            1 => Content::Text(texts[0]["text"].as_str().unwrap_or_default().to_owned()),
            _ => Content::Parts(texts),
        };
        messages.push(message);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(value: Value) -> Result<Conversation, Failure> {
        let request: MessagesRequest = serde_json::from_value(value).unwrap();
        request.conversation().map(|(conversation, _)| conversation)
    }

    #[test]
    fn blocks_become_what_templates_know() {
        let conversation = read(json!({
            "model": "m", "max_tokens": 5,
            "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "auto"},
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "thinking", "thinking": "so", "signature": ""},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "7"}]},
                    {"type": "text", "text": "and?"}]},
            ],
        }))
        .unwrap();
        let roles: Vec<_> = conversation
            .messages
            .iter()
            .map(|m| m.role.as_str())
            .collect();
        assert_eq!(roles, ["system", "user", "assistant", "tool", "user"]);
        let [system, _, assistant, tool, user] = &conversation.messages[..] else {
            panic!("five messages");
        };
        assert_eq!(system.content, Content::Text("a\nb".into()));
        assert_eq!(assistant.reasoning_content.as_deref(), Some("hm\nso"));
        assert_eq!(assistant.tool_calls[0].arguments, json!({"a": 1}));
        assert_eq!(tool.content, Content::Text("7".into()));
        assert_eq!(tool.tool_call_id.as_deref(), Some("t1"));
        assert_eq!(user.content, Content::Text("and?".into()));
        assert_eq!(conversation.kwargs["enable_thinking"], true);
        assert_eq!(conversation.tools.described[0]["function"]["name"], "f");
    }

    /// Some of these once were read as if nothing were there.
    #[test]
    fn a_block_that_cannot_be_read_is_refused_by_its_place() {
        let result =
            |content: Value| json!({"type": "tool_result", "tool_use_id": "t", "content": content});
        for (block, place, words) in [
            (json!({"type": "robot"}), "", "robot"),
            (json!({"type": 5}), ".type", "5 is no type"),
            (json!({"type": "text"}), "", "no text"),
            (
                json!({"type": "thinking", "thinking": 5}),
                "",
                "no thinking",
            ),
            (json!({"type": "compaction", "content": 5}), "", "no text"),
            (result(json!({"a": 1})), ".content", "neither"),
            (result(json!([{"type": "robot"}])), ".content[0]", "robot"),
            (
                result(json!([{"type": "search_result", "content": [{"type": "robot"}]}])),
                ".content[0].content[0]",
                "robot",
            ),
        ] {
            let text = json!({"type": "text", "text": "a"});
            let messages = json!([{"role": "user", "content": [text, block]}]);
            let read = read(json!({"model": "m", "max_tokens": 5, "messages": messages}));
            let failure = read.unwrap_err();
            let (field, message) = &failure.fields()[0];
            assert_eq!(*field, format!("messages[0].content[1]{place}"), "{block}");
            assert!(message.contains(words), "{block}: {message}");
        }
        let empty = json!([{"role": "user", "content": [result(Value::Null)]}]);
        assert!(read(json!({"model": "m", "max_tokens": 5, "messages": empty})).is_ok());
    }

    #[test]
    fn an_answer_that_is_begun_is_gone_on_with() {
        let call = json!([{"type": "text", "text": "a"}, {"type": "tool_use", "id": "t", "name": "f", "input": {}}]);
        for (role, content, expected) in [
            ("assistant", json!("The answer is "), true),
            ("assistant", json!([{"type": "text", "text": "a"}]), true),
            ("assistant", json!(""), false),
            ("assistant", json!([]), false),
            ("assistant", call, false),
            ("user", json!("a"), false),
        ] {
            let conversation = read(json!({
                "model": "m", "max_tokens": 5,
                "messages": [{"role": "user", "content": "hi"}, {"role": role, "content": content}],
            }));
            let continues = conversation.unwrap().ending == Ending::Continue;
            assert_eq!(continues, expected, "{content}");
        }
    }

    #[test]
    fn the_most_tokens_are_asked_for_in_this_routes_words() {
        for (tokens, words) in [(json!(null), "missing"), (json!(0), "0 is out of range")] {
            let asked = read(json!({"model": "m", "max_tokens": tokens, "messages": []}));
            let failure = asked.unwrap_err();
            assert!(failure.message().contains(words), "{failure:?}");
            assert!(!failure.message().contains("unset"), "{failure:?}");
        }
    }

    #[test]
    fn what_changes_with_every_request_is_kept_out_of_prompts() {
        let texts = |turn: u32| {
            let counted = format!("<total_tokens>{} tokens left</total_tokens>", 900 - turn);
            let billed = format!("x-anthropic-billing-header: cc_version=2.1; cch={turn:05x};");
            let conversation = read(json!({
                "model": "m", "max_tokens": 5,
                "system": [
                    {"type": "text", "text": billed},
                    {"type": "text", "text": format!("You are an agent.\n\n{counted}\n{counted}")},
                ],
                "messages": [
                    {"role": "user", "content": counted},
                    {"role": "system", "content": counted},
                    {"role": "system", "content": [{"type": "text", "text": counted}]},
                    {"role": "system", "content": format!("The date has changed. {counted}")},
                ],
            }))
            .unwrap();
            let messages = conversation.messages.into_iter();
            let texts = messages.map(|message| match message.content {
                Content::Text(text) => text,
                other => panic!("{other:?}"),
            });
            texts.collect::<Vec<_>>()
        };
        // What a user writes is the user's.
        assert_eq!(
            texts(1),
            [
                "You are an agent.",
                "<total_tokens>899 tokens left</total_tokens>",
                "The date has changed."
            ]
        );
        assert_eq!(texts(1)[0], texts(2)[0]);
        let quoted = "Write <total_tokens>...</total_tokens> and <total_tokens>";
        assert_eq!(without_counts(quoted).as_deref(), Some(quoted));
        assert_eq!(without_counts("You are an agent."), None);
    }

    #[test]
    fn what_cannot_be_done_is_refused_by_its_field() {
        let base = |key: &str, value: Value| {
            let mut request = json!({"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]});
            request[key] = value;
            read(request).unwrap_err().fields()[0].0.clone()
        };
        assert_eq!(base("max_tokens", Value::Null), "max_tokens");
        assert_eq!(base("tool_choice", json!({"type": "any"})), "tool_choice");
        assert_eq!(base("thinking", json!({"type": "deep"})), "thinking");
        let odd = json!([{"role": "user", "content": [{"type": "robot"}]}]);
        assert_eq!(base("messages", odd), "messages[0].content[0]");
    }

    /// What a request with these messages comes to: role and text of each.
    fn told(messages: Value) -> Vec<(String, String)> {
        let request = json!({"model": "m", "max_tokens": 5, "messages": messages});
        let messages = read(request).unwrap().messages.into_iter();
        let texts = messages.map(|message| {
            let text = match joined(message.content) {
                Content::Text(text) => text,
                _ => String::new(),
            };
            (message.role, text)
        });
        texts.collect()
    }

    #[test]
    fn a_session_lives_on_with_pictures_and_documents_in_it() {
        let image = json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}});
        let result = json!({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "shot:"}, image]});
        let document = json!({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "42 - 30"}});
        let searched = json!({"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"type": "web_search_result"}]});
        let told = told(json!([
            {"role": "user", "content": [image]},
            {"role": "assistant", "content": [
                {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
                searched, {"type": "text", "text": "Found."}]},
            {"role": "user", "content": [result]},
            {"role": "user", "content": [document, {"type": "text", "text": "= ?"}]},
        ]));
        let expected = [
            ("user", media::IMAGE.to_owned()),
            ("assistant", "Found.".to_owned()),
            ("tool", format!("shot:\n{}", media::IMAGE)),
            ("user", "<document>\n42 - 30\n</document>\n= ?".to_owned()),
        ];
        let expected = expected.map(|(role, text)| (role.to_owned(), text));
        assert_eq!(told, expected);
    }

    #[test]
    fn without_a_word_about_it_the_model_does_not_think() {
        let of = |thinking: Value| {
            let conversation = read(json!({
                "model": "m", "max_tokens": 5, "thinking": thinking,
                "messages": [{"role": "user", "content": "hi"}],
            }));
            let conversation = conversation.unwrap();
            let switch = conversation.kwargs.get("enable_thinking").cloned();
            (conversation.is_quiet, switch)
        };
        assert_eq!(of(Value::Null), (true, None));
        let kinds = [("enabled", true), ("adaptive", true), ("disabled", false)];
        for (kind, on) in kinds {
            assert_eq!(of(json!({"type": kind})), (false, Some(on.into())));
        }
    }
}
