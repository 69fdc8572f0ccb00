//! What a request for a message says, as the conversation that templates see.

use rocmforge_service::check::Violations;
use rocmforge_service::failure::{self, Failure};
use rocmforge_tokenizer::{Content, Ending, Message, ToolCall};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::super::format;
use super::super::prompt::{
    TextOr, WireSampling, refuse_unsupported, says_something, take, text_parts, whole_number,
};
use super::super::start::Conversation;
use super::violations;
use rocmforge_service::tool_calls::{self, Tools};

/// What Claude Code writes into system texts for Anthropic's own machines. It is another with every
/// request, so that no prompt would begin like the one before: a line that begins so,
const BILLING: &str = "x-anthropic-billing-header:";
/// and how many tokens are left, between these two, from which nothing here counts.
const COUNTER: [&str; 2] = ["<total_tokens>", "</total_tokens>"];

/// The body of both routes.
#[derive(Debug, Deserialize)]
pub(super) struct MessagesRequest {
    #[serde(default)]
    model: String,
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
    // Refused where it asks for anything.
    mcp_servers: Option<Value>,
}

#[derive(Debug, Deserialize)]
struct WireMessage {
    role: String,
    content: TextOr<Value>,
}

impl MessagesRequest {
    /// The conversation that is to be answered.
    pub(super) fn conversation(self) -> Result<(Conversation, Violations), Failure> {
        let wrong = |why: &str| Err(failure::invalid("max_tokens", why));
        match self.max_tokens {
            None => wrong("missing; give the most tokens that the answer may have"),
            Some(n) if n < 1 => wrong(&format!("{n} is out of range: at least 1")),
            Some(_) => self.for_counting(),
        }
    }

    /// The conversation, where no answer is asked for.
    pub(super) fn for_counting(self) -> Result<(Conversation, Violations), Failure> {
        refuse_unsupported(&[(
            "mcp_servers",
            says_something(self.mcp_servers.as_ref()),
            "nothing is called from here; call them yourself, and offer what they have as tools",
        )])?;
        let kwargs = thinking(self.thinking.as_ref());
        let tools = tools(self.tools, self.tool_choice.as_ref())?;
        let mut messages = Vec::new();
        if let Some(system) = self.system {
            let content = match system {
                TextOr::Text(text) => Content::Text(text),
                TextOr::List(parts) => joined(text_parts(parts, |at| format!("system[{at}]"))?),
            };
            messages.push(Message {
                role: "system".to_owned(),
                content,
                ..Message::default()
            });
        }
        for (at, message) in self.messages.into_iter().enumerate() {
            turn(at, message, &mut messages)?;
        }
        let messages: Vec<_> = messages.into_iter().filter_map(steady).collect();
        let ending = match messages.last().is_some_and(is_begun) {
            true => Ending::Continue,
            false => Ending::Answer,
        };
        let mut violations = violations();
        let stop = self.stop_sequences.map(TextOr::List);
        let mut sampling = self.sampling.fields(self.max_tokens, stop, &mut violations);
        sampling.decoding.format =
            format::of_messages(self.output_config.as_ref(), self.output_format.as_ref())?;
        let conversation = Conversation {
            model: self.model,
            messages,
            tools,
            kwargs,
            documents: Vec::new(),
            ending,
            sampling,
            n_ctx: None,
            choices: 1,
            field: "messages",
        };
        Ok((conversation, violations))
    }
}

/// Whether a message that ends a conversation is the beginning of the answer, as this route has it:
/// the model's own, with a text behind all that it thought, and no call.
fn is_begun(last: &Message) -> bool {
    let says = match &last.content {
        Content::None => false,
        Content::Text(text) => !text.is_empty(),
        Content::Parts(_) => true,
    };
    last.role == "assistant" && says && last.tool_calls.is_empty()
}

/// Parts of a system prompt are one text: templates know none there.
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

/// The message without [`BILLING`] and [`COUNTER`], where it is the system's; nothing
/// where it says nothing else.
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
    Some(message)
}

/// The text without [`BILLING`] and [`COUNTER`]; nothing where it has neither.
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

/// `thinking` as variables of templates.
fn thinking(thinking: Option<&Value>) -> Map<String, Value> {
    let mut kwargs = Map::new();
    let on = match thinking.and_then(|thinking| thinking["type"].as_str()) {
        Some("enabled" | "adaptive") => true,
        Some("disabled") => false,
        _ => return kwargs,
    };
    kwargs.insert("enable_thinking".to_owned(), on.into());
    kwargs
}

/// Tools, in OpenAI's shape.
fn tools(tools: Option<Vec<Value>>, choice_value: Option<&Value>) -> Result<Tools, Failure> {
    let kind = choice_value.and_then(|choice| choice["type"].as_str());
    let choice = match kind {
        None => None,
        Some("auto" | "none") => kind.map(Value::from),
        Some(_) => choice_value.cloned(),
    };
    let single = choice_value.is_some_and(|choice| choice["disable_parallel_tool_use"] == true);
    let mut described = Vec::new();
    for (at, mut tool) in tools.unwrap_or_default().into_iter().enumerate() {
        let kind = tool["type"].as_str().unwrap_or("custom");
        if kind != "custom" {
            return Err(failure::unsupported_field(
                &format!("tools[{at}].type"),
                &format!(
                    "{kind} is not available here; give tools with a name and an input_schema"
                ),
            ));
        }
        let Some(name) = tool["name"].as_str().map(str::to_owned) else {
            return Err(failure::invalid(
                &format!("tools[{at}].name"),
                "missing; give the tool's name",
            ));
        };
        let schema = take(&mut tool, "input_schema");
        let description = tool["description"].as_str();
        described.push(tool_calls::described(&name, description, &schema));
    }
    tool_calls::checked(Some(described), choice.as_ref(), single.then_some(false))
}

/// One message, which may be several for a template: each result of a tool is one of its own.
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
    let mut texts = Vec::new();
    for (n, mut block) in blocks.into_iter().enumerate() {
        let field = || format!("messages[{at}].content[{n}]");
        let kind = block["type"].as_str().unwrap_or("text").to_owned();
        let mut text = |key: &str| match take(&mut block, key) {
            Value::String(text) => Ok(text),
            _ => Err(failure::invalid(
                &field(),
                &format!("it has no {key}; give one"),
            )),
        };
        match kind.as_str() {
            "text" => texts.push(json!({"type": "text", "text": text("text")?})),
            "thinking" => message.reasoning_content = Some(text("thinking")?),
            // Nobody here can read it.
            "redacted_thinking" => {}
            "tool_use" => {
                let (id, name) = (text("id")?, text("name")?);
                message.tool_calls.push(ToolCall {
                    id: Some(id),
                    name,
                    arguments: take(&mut block, "input"),
                });
            }
            "tool_result" => {
                let id = text("tool_use_id")?;
                let content = match take(&mut block, "content") {
                    Value::Array(parts) => joined(text_parts(parts, |part| {
                        format!("{}.content[{part}]", field())
                    })?),
                    Value::String(text) => Content::Text(text),
                    _ => Content::Text(String::new()),
                };
                messages.push(Message {
                    role: "tool".to_owned(),
                    content,
                    tool_call_id: Some(id),
                    ..Message::default()
                });
            }
            kind => {
                return Err(failure::unsupported_field(
                    &field(),
                    &format!(
                        "a block of the type {kind} cannot be read; the models here read text only, leave it out"
                    ),
                ));
            }
        }
    }
    let only_results = texts.is_empty()
        && message.tool_calls.is_empty()
        && message.reasoning_content.is_none()
        && message.role == "user";
    if !only_results {
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
        assert_eq!(assistant.reasoning_content.as_deref(), Some("hm"));
        assert_eq!(assistant.tool_calls[0].arguments, json!({"a": 1}));
        assert_eq!(tool.content, Content::Text("7".into()));
        assert_eq!(tool.tool_call_id.as_deref(), Some("t1"));
        assert_eq!(user.content, Content::Text("and?".into()));
        assert_eq!(conversation.kwargs["enable_thinking"], true);
        assert_eq!(conversation.tools.described[0]["function"]["name"], "f");
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
        assert_eq!(
            base(
                "tools",
                json!([{"type": "web_search_20250305", "name": "w"}])
            ),
            "tools[0].type"
        );
        let image = json!([{"role": "user", "content": [{"type": "image", "source": {}}]}]);
        assert_eq!(base("messages", image), "messages[0].content[0]");
        let servers = json!([{"type": "url", "url": "https://example.com", "name": "s"}]);
        assert_eq!(base("mcp_servers", servers), "mcp_servers");
        let document = json!({
            "model": "m", "max_tokens": 5,
            "messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}],
        });
        let failure = read(document).unwrap_err();
        assert!(failure.message().contains("type document"), "{failure:?}");
    }
}
