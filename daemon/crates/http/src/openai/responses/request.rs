//! Converts requests of `/v1/responses` to conversations.

use rocmforge_failure::{self as failure, Failure, Violations};
use rocmforge_tokenizer::{Content, Ending, Message, ToolCall};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::super::super::format;
use super::super::super::picture::Said;
use super::super::super::prompt::{TextOr, add_thought, model_name, take, take_text, text_parts};
use super::super::super::sampling::{
    WireSampling, refuse_unsupported, says_something, small, whole_number,
};
use super::super::super::start::Conversation;
use super::super::name;
use super::tools::{self, Names};

/// Value of `include` that asks for log-probabilities of output texts.
const LOGPROBS: &str = "message.output_text.logprobs";

/// Types of items that record actions of other servers. Their results are in the output that
/// followed, so they are dropped.
const SERVERS_OWN: [&str; 17] = [
    "web_search_call",
    "file_search_call",
    "image_generation_call",
    "code_interpreter_call",
    "computer_call",
    "computer_call_output",
    "mcp_call",
    "mcp_list_tools",
    "mcp_approval_request",
    "mcp_approval_response",
    "tool_search_call",
    "tool_search_output",
    "additional_tools",
    "compaction",
    "compaction_summary",
    "context_compaction",
    "ghost_snapshot",
];

/// The body of `POST /v1/responses`.
#[derive(Debug, Deserialize)]
pub(super) struct ResponsesRequest {
    #[serde(default, deserialize_with = "model_name")]
    pub(super) model: String,
    #[serde(default = "nothing")]
    input: TextOr<Value>,
    instructions: Option<String>,
    #[serde(default, deserialize_with = "whole_number")]
    max_output_tokens: Option<i64>,
    pub(super) stream: Option<bool>,
    #[serde(flatten)]
    sampling: WireSampling,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    reasoning: Option<Value>,
    chat_template_kwargs: Option<Map<String, Value>>,
    metadata: Option<Value>,
    #[serde(default, deserialize_with = "whole_number")]
    top_logprobs: Option<i64>,
    include: Option<Vec<String>>,
    previous_response_id: Option<Value>,
    store: Option<bool>,
    // Refused where they ask for anything.
    conversation: Option<Value>,
    background: Option<bool>,
    prompt: Option<Value>,
    text: Option<Value>,
}

/// The input of a request that only continues a response.
fn nothing() -> TextOr<Value> {
    TextOr::List(Vec::new())
}

impl ResponsesRequest {
    /// Id of the response that the request continues.
    ///
    /// # Errors
    /// INVALID_ARGUMENT if that is not a string.
    pub(super) fn previous(&self) -> Result<Option<&str>, Failure> {
        match &self.previous_response_id {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(id)) => Ok(Some(id)),
            Some(_) => {
                let why = "give the id of a response, a text";
                Err(failure::invalid("previous_response_id", why))
            }
        }
    }

    /// Id of the response that a checked request continues.
    pub(super) fn previous_id(&self) -> Option<&str> {
        self.previous_response_id.as_ref().and_then(Value::as_str)
    }

    /// Whether the response is stored, so that later requests may refer to it.
    pub(super) fn is_kept(&self) -> bool {
        self.store != Some(false)
    }

    /// Takes the input out of the request.
    pub(super) fn take_input(&mut self) -> TextOr<Value> {
        std::mem::replace(&mut self.input, nothing())
    }

    /// Fields of the request that the response repeats.
    pub(super) fn echo(&self) -> Value {
        let told = self.sampling.told();
        json!({
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata.clone().unwrap_or_else(|| json!({})),
            "parallel_tool_calls": self.parallel_tool_calls.unwrap_or(true),
            "reasoning": {"effort": self.reasoning_of("effort"), "summary": self.summary()},
            "temperature": told.0,
            "top_p": told.1,
            "top_logprobs": self.top_logprobs.unwrap_or(0),
            "truncation": "disabled",
            "background": false,
            "tool_choice": self.tool_choice.clone().unwrap_or_else(|| "auto".into()),
            "tools": self.tools.clone().unwrap_or_default(),
            "text": {"format": self.format()},
            "previous_response_id": self.previous_id(),
            "store": self.is_kept(),
        })
    }

    /// The names under which the model knows the tools.
    pub(super) fn names(&self) -> Names {
        Names::of(self.tools.as_deref().unwrap_or_default())
    }

    fn reasoning_of(&self, key: &str) -> Value {
        let reasoning = self.reasoning.as_ref();
        reasoning.map_or(Value::Null, |reasoning| reasoning[key].clone())
    }

    /// The requested kind of reasoning summary, by the newer field or the older one.
    fn summary(&self) -> Value {
        match self.reasoning_of("summary") {
            Value::Null => self.reasoning_of("generate_summary"),
            summary => summary,
        }
    }

    /// Whether a reasoning summary is requested.
    pub(super) fn summarises(&self) -> bool {
        self.summary().as_str().is_some_and(|kind| kind != "none")
    }

    fn format(&self) -> Value {
        let format = self.text.as_ref().map(|text| text["format"].clone());
        let said = format.filter(|format| !format.is_null());
        said.unwrap_or_else(|| json!({"type": "text"}))
    }

    pub(super) fn refuse_unsupported(&self) -> Result<(), Failure> {
        const STATELESS: &str =
            "conversations are not kept here; name the response before in previous_response_id";
        const LATER: &str = "not implemented; leave it unset";
        let says = |value: &Option<Value>| says_something(value.as_ref());
        refuse_unsupported(&[
            ("conversation", says(&self.conversation), STATELESS),
            ("background", self.background == Some(true), LATER),
            ("prompt", says(&self.prompt), LATER),
        ])
    }

    /// Number of most likely tokens to return for each token of a text; `None` if no
    /// log-probabilities are wanted.
    pub(super) fn scores(&self) -> Option<i32> {
        let wanted = self.include.iter().flatten().any(|what| what == LOGPROBS);
        match self.top_logprobs {
            Some(n) if n != 0 => Some(small(n)),
            _ => wanted.then_some(0),
        }
    }

    /// The conversation to continue, with these input items.
    pub(super) fn conversation(
        self,
        items: Vec<Value>,
    ) -> Result<(Conversation, Violations), Failure> {
        let scores = self.scores();
        let mut kwargs = self.chat_template_kwargs.unwrap_or_default();
        let effort = self.reasoning.as_ref().and_then(|r| r["effort"].as_str());
        match effort {
            None => {}
            Some("none") => {
                kwargs.entry("enable_thinking").or_insert(false.into());
            }
            Some(effort) => {
                kwargs.entry("reasoning_effort").or_insert(effort.into());
            }
        }
        let tools = tools::functions(
            self.tools,
            self.tool_choice.as_ref(),
            self.parallel_tool_calls,
        )?;
        let mut messages = Vec::new();
        if let Some(instructions) = self.instructions.filter(|text| !text.is_empty()) {
            messages.push(Message::new("system", instructions));
        }
        for (at, item) in items.into_iter().enumerate() {
            turn(at, item, &mut messages)?;
        }
        let mut violations = Violations::named(field_name);
        let mut sampling = self
            .sampling
            .fields(self.max_output_tokens, None, &mut violations);
        sampling.decoding.logprobs = scores;
        sampling.decoding.format = format::of_responses(self.text.as_ref())?;
        let conversation = Conversation {
            model: self.model,
            messages,
            tools,
            kwargs,
            documents: Vec::new(),
            ending: Ending::Answer,
            is_quiet: false,
            sampling,
            n_ctx: None,
            choices: 1,
            field: "input",
        };
        Ok((conversation, violations))
    }
}

/// The name of a field in requests of this route.
fn field_name(field: &str) -> String {
    match field {
        "sampling.max_tokens" => "max_output_tokens".to_owned(),
        "logprobs" => "top_logprobs".to_owned(),
        "messages" => "input".to_owned(),
        _ => name(field),
    }
}

/// Converts one input item. Reasoning and calls become parts of one assistant message, as templates
/// expect.
fn turn(at: usize, mut item: Value, messages: &mut Vec<Message>) -> Result<(), Failure> {
    let field = || format!("input[{at}]");
    if !item.is_object() {
        let message = "no object; give an item, or all of the input as one text";
        return Err(failure::invalid(&field(), message));
    }
    let kind = item["type"].as_str().unwrap_or("message").to_owned();
    let call_id = item["call_id"].as_str().map(str::to_owned);
    match kind.as_str() {
        "message" => {
            let role = take_text(&mut item, "role", field)?;
            said(role, content(&mut item, "content", &field())?, messages);
        }
        "reasoning" => {
            let mut found = None;
            for key in ["content", "summary"] {
                let parts = take(&mut item, key);
                found = found.or(thought(&parts, || format!("{}.{key}", field()))?);
            }
            if let Some(thought) = found {
                add_thought(open_turn(messages), thought);
            }
        }
        "function_call" | "custom_tool_call" | "local_shell_call" => {
            called(messages, call_id, tool_call(&kind, &mut item, field)?);
        }
        "function_call_output" | "custom_tool_call_output" | "local_shell_call_output" => {
            // The shell's output has the name of its call as its own.
            if kind == "local_shell_call_output" && item["call_id"].is_null() {
                item["call_id"] = take(&mut item, "id");
            }
            let id = take_text(&mut item, "call_id", field)?;
            let Said { content, seen } = content(&mut item, "output", &field())?;
            messages.push(Message {
                role: "tool".to_owned(),
                content,
                seen,
                tool_call_id: Some(id),
                ..Message::default()
            });
        }
        kind if SERVERS_OWN.contains(&kind) => {}
        other => {
            return Err(failure::unsupported_field(
                &field(),
                &format!(
                    "an item of the type {other} cannot be read; give messages, reasoning and function calls"
                ),
            ));
        }
    }
    Ok(())
}

/// The tool call in an item.
fn tool_call(
    kind: &str,
    item: &mut Value,
    field: impl Fn() -> String,
) -> Result<ToolCall, Failure> {
    let (name, arguments) = match kind {
        // Calls of tools that are none here, in conversations that another server began.
        "custom_tool_call" => {
            let name = take_text(item, "name", field)?;
            (name, json!({"input": take(item, "input")}))
        }
        "local_shell_call" => {
            let command = &item["action"]["command"];
            ("local_shell".to_owned(), json!({"command": command}))
        }
        _ => {
            let name = take_text(item, "name", field)?;
            let namespace = item["namespace"].as_str().filter(|space| !space.is_empty());
            let name = namespace.map_or(name.clone(), |space| tools::flat(space, &name));
            (name, take(item, "arguments"))
        }
    };
    Ok(ToolCall {
        id: None,
        name,
        arguments,
    })
}

/// Appends content of a role; the assistant's goes into the open assistant message.
fn said(role: String, said: Said, messages: &mut Vec<Message>) {
    let Said { content, seen } = said;
    let role = match role.as_str() {
        "assistant" => {
            let last = open_turn(messages);
            (last.content, last.seen) = (content, seen);
            return;
        }
        "developer" => "system".to_owned(),
        _ => role,
    };
    messages.push(Message {
        role,
        content,
        seen,
        ..Message::default()
    });
}

/// Appends a call to the assistant message that it belongs to.
fn called(messages: &mut Vec<Message>, id: Option<String>, call: ToolCall) {
    let call = ToolCall { id, ..call };
    match messages.last_mut().filter(|last| last.role == "assistant") {
        Some(last) => last.tool_calls.push(call),
        None => open_turn(messages).tool_calls.push(call),
    }
}

/// The assistant's message that the next item belongs to: the last one if it has no content yet,
/// else a new one.
fn open_turn(messages: &mut Vec<Message>) -> &mut Message {
    let fresh = |last: &Message| {
        last.role == "assistant" && last.content == Content::None && last.tool_calls.is_empty()
    };
    if !messages.last().is_some_and(fresh) {
        messages.push(Message {
            role: "assistant".to_owned(),
            ..Message::default()
        });
    }
    let last = messages.len() - 1;
    &mut messages[last]
}

/// The content of an item, under the key `key`.
fn content(item: &mut Value, key: &str, field: &str) -> Result<Said, Failure> {
    match take(item, key) {
        Value::String(text) => Ok(Content::Text(text).into()),
        Value::Array(parts) => text_parts(parts, |part| format!("{field}.{key}[{part}]")),
        Value::Null => Err(failure::invalid(
            field,
            &format!("it has no {key}; give a text or parts"),
        )),
        _ => Err(failure::invalid(
            &format!("{field}.{key}"),
            "neither a text nor a list of parts; give one of them",
        )),
    }
}

/// The text of a reasoning item's parts, if there is any.
fn thought(parts: &Value, field: impl Fn() -> String) -> Result<Option<String>, Failure> {
    let parts = match parts {
        Value::Null => return Ok(None),
        Value::Array(parts) => parts,
        _ => return Err(failure::invalid(&field(), "no list of parts; give one")),
    };
    let texts = parts.iter().enumerate().map(|(at, part)| {
        let field = || format!("{}[{at}]", field());
        let text = part["text"].as_str();
        text.ok_or_else(|| failure::invalid(&field(), "it has no text; give one"))
    });
    let texts = texts.collect::<Result<Vec<_>, _>>()?;
    Ok((!texts.is_empty()).then(|| texts.join("\n")))
}

#[cfg(test)]
mod tests {
    use rocmforge_service::peer::Peer;

    use super::super::super::super::media;
    use super::super::Memory;
    use super::*;

    fn read(value: Value) -> Result<Conversation, Failure> {
        let mut request: ResponsesRequest = serde_json::from_value(value).unwrap();
        request.refuse_unsupported()?;
        let recalled = Memory::default().recall(Peer::Local, None, request.take_input())?;
        let items = recalled.read()?.items;
        request
            .conversation(items)
            .map(|(conversation, _)| conversation)
    }

    #[test]
    fn a_tool_without_a_type_is_told_that_it_is_missing() {
        let failure = read(json!({"model": "m", "input": "hi", "tools": [{"name": "f"}]}));
        let failure = failure.unwrap_err();
        let (field, message) = &failure.fields()[0];
        assert_eq!(field, "tools[0].type");
        assert_eq!(message, "missing; give \"function\"");
    }

    #[test]
    fn a_part_of_an_item_that_cannot_be_read_is_refused_by_its_place() {
        let message = |part: Value| json!({"role": "user", "content": [part]});
        let output = |output: Value| json!({"type": "function_call_output", "call_id": "c", "output": output});
        for (item, place, words) in [
            (json!({"type": "robot"}), "", "robot"),
            (message(json!({"type": "robot"})), ".content[0]", "robot"),
            (
                message(json!({"type": 5})),
                ".content[0].type",
                "5 is no type",
            ),
            (
                message(json!({"type": "input_text"})),
                ".content[0]",
                "no text",
            ),
            (output(json!({"a": 1})), ".output", "neither"),
            (output(json!([{"type": "robot"}])), ".output[0]", "robot"),
            (
                json!({"type": "reasoning", "summary": "a"}),
                ".summary",
                "no list",
            ),
            (
                json!({"type": "reasoning", "content": [{"type": "robot"}]}),
                ".content[0]",
                "no text",
            ),
        ] {
            let input = json!([{"role": "user", "content": "a"}, item]);
            let failure = read(json!({"model": "m", "input": input})).unwrap_err();
            let (field, message) = &failure.fields()[0];
            assert_eq!(*field, format!("input[1]{place}"), "{item}");
            assert!(message.contains(words), "{item}: {message}");
        }
    }

    #[test]
    fn items_become_turns() {
        let conversation = read(json!({
            "model": "m", "instructions": "Be brief.", "store": false, "include": ["reasoning.encrypted_content"],
            "tools": [{"type": "function", "name": "f", "parameters": {}}, {"type": "web_search"}, {"type": "local_shell"}],
            "reasoning": {"effort": "low", "summary": "auto"},
            "input": [
                {"role": "developer", "content": [{"type": "input_text", "text": "d"}]},
                {"type": "message", "role": "user", "content": "hi"},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
                {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
                {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "7"},
                {"type": "function_call", "call_id": "c3", "name": "f", "arguments": "{}"},
            ],
        }))
        .unwrap();
        let roles: Vec<_> = conversation
            .messages
            .iter()
            .map(|m| m.role.as_str())
            .collect();
        assert_eq!(
            roles,
            ["system", "system", "user", "assistant", "tool", "assistant"]
        );
        let assistant = &conversation.messages[3];
        assert_eq!(assistant.reasoning_content.as_deref(), Some("hm\nso"));
        assert_eq!(assistant.content, Content::Text("I look.".into()));
        assert_eq!(assistant.tool_calls.len(), 2);
        assert_eq!(conversation.messages[4].tool_call_id.as_deref(), Some("c1"));
        assert_eq!(conversation.tools.described.len(), 1);
        assert_eq!(conversation.kwargs["reasoning_effort"], "low");
    }

    #[test]
    fn items_of_other_servers_tools_are_calls_or_left_out() {
        let conversation = read(json!({"model": "m", "input": [
            {"role": "user", "content": "hi"},
            {"type": "web_search_call", "id": "w", "action": {"type": "search", "query": "q"}},
            {"type": "function_call", "call_id": "c1", "namespace": "mcp__t", "name": "lookup", "arguments": "{}"},
            {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "*** Begin"},
            {"type": "local_shell_call", "call_id": "c3", "status": "completed",
                "action": {"type": "exec", "command": ["ls"], "env": {}}},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
            {"type": "local_shell_call_output", "id": "c3", "output": "3"},
        ]}))
        .unwrap();
        let [_, assistant, results @ ..] = &conversation.messages[..] else {
            panic!("{:?}", conversation.messages);
        };
        let calls = assistant.tool_calls.iter();
        let calls: Vec<_> = calls
            .map(|call| (&*call.name, call.arguments.clone()))
            .collect();
        let expected = [
            ("mcp__t__lookup", json!("{}")),
            ("apply_patch", json!({"input": "*** Begin"})),
            ("local_shell", json!({"command": ["ls"]})),
        ];
        assert_eq!(calls, expected);
        for (result, n) in results.iter().zip(["1", "2", "3"]) {
            assert_eq!(result.content, Content::Text(n.to_owned()));
            assert_eq!(result.tool_call_id, Some(format!("c{n}")));
        }
        assert_eq!(results.len(), 3);
    }

    #[test]
    fn what_needs_a_memory_is_refused_by_name() {
        for (key, value) in [
            ("conversation", json!("conv_1")),
            ("background", json!(true)),
            ("tool_choice", json!("required")),
        ] {
            let mut request = json!({"model": "m", "input": "hi"});
            request[key] = value;
            assert_eq!(read(request).unwrap_err().fields()[0].0, key);
        }
        let format =
            json!({"model": "m", "input": "hi", "text": {"format": {"type": "json_schema"}}});
        assert_eq!(read(format).unwrap_err().fields()[0].0, "text.format");
        let item = json!({"model": "m", "input": [{"type": "item_reference", "id": "x"}]});
        assert_eq!(read(item).unwrap_err().fields()[0].0, "input[0]");
    }

    #[test]
    fn what_is_wrong_with_an_item_is_told_by_its_own_key() {
        let output = |output: Value| json!({"type": "function_call_output", "call_id": "c", "output": output});
        let odd = json!([{"type": "robot"}]);
        let image = json!([{"type": "input_image", "image_url": "x"}]);
        let seen = read(json!({"model": "m", "input": [output(image)]})).unwrap();
        assert_eq!(seen.messages[0].content, Content::Text(media::IMAGE.into()));
        for (item, field, words) in [
            (json!("hi"), "input[0]", "one text"),
            (output(json!({"a": 1})), "input[0].output", "list of parts"),
            (output(json!(null)), "input[0]", "no output"),
            (output(odd), "input[0].output[0]", "robot"),
            (json!({"role": "user"}), "input[0]", "no content"),
        ] {
            let failure = read(json!({"model": "m", "input": [item]})).unwrap_err();
            let (found, message) = &failure.fields()[0];
            assert_eq!(found, field, "{message}");
            assert!(message.contains(words), "{message}");
        }
    }
}
