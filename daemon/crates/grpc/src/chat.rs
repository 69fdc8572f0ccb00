//! Converts conversations of rocmforge.v1 to the service's type.

use rocmforge_chat::conversation::Conversation;
use rocmforge_chat::images::LEFT_OUT;
use rocmforge_chat::tool_calls::{self, Tools};
use rocmforge_chat::tools;
use rocmforge_failure::{self as failure, Failure, Violations};
use rocmforge_proto::v1;
use rocmforge_tokenizer::{ChatImage, Content, Ending, ImageData, Message, Seen, ToolCall};
use serde_json::{Map, Value, json};

/// Takes the conversation out of a request's fields.
pub(super) fn conversation(
    request: &mut v1::ChatRequest,
    violations: &mut Violations,
) -> Result<Conversation, Failure> {
    let kwargs = template_args(&request.template_args, violations);
    let tools = tools(request)?;
    let messages = std::mem::take(&mut request.messages).into_iter();
    let messages = messages
        .enumerate()
        .map(|(at, m)| message(at, m, violations));
    Ok(Conversation {
        messages: messages.collect(),
        tools,
        kwargs,
        documents: Vec::new(),
        ending: match request.continue_last {
            true => Ending::Continue,
            false => Ending::Answer,
        },
        field: "messages",
    })
}

fn template_args(text: &str, violations: &mut Violations) -> Map<String, Value> {
    if text.is_empty() {
        return Map::new();
    }
    match serde_json::from_str(text) {
        Ok(Value::Object(map)) => map,
        Ok(_) => {
            violations.add("template_args", "no JSON object; give one");
            Map::new()
        }
        Err(error) => {
            violations.add(
                "template_args",
                format!("it is no JSON ({error}); give a JSON object"),
            );
            Map::new()
        }
    }
}

/// The tools and their choice, in the format that templates take.
fn tools(request: &mut v1::ChatRequest) -> Result<Tools, Failure> {
    let wanted = std::mem::take(&mut request.tools).into_iter().enumerate();
    let described = wanted.map(|(at, tool)| {
        let parameters: Value = match tool.parameters.as_str() {
            "" => json!({"type": "object", "properties": {}}),
            text => serde_json::from_str(text).map_err(|error| {
                failure::invalid(
                    &format!("tools[{at}].parameters"),
                    &format!("it is no JSON ({error}); give a JSON schema"),
                )
            })?,
        };
        if !parameters.is_object() {
            let field = format!("tools[{at}].parameters");
            return Err(failure::invalid(&field, "no JSON object; give a schema"));
        }
        let description = Some(tool.description.as_str());
        Ok(tool_calls::described(&tool.name, description, &parameters))
    });
    let described: Vec<Value> = described.collect::<Result<_, _>>()?;
    let name = request.tool_name.as_str();
    let choice = match v1::ToolMode::try_from(request.tool_mode) {
        Ok(v1::ToolMode::Required) if !name.is_empty() => {
            json!({"type": "function", "name": name})
        }
        Ok(v1::ToolMode::Required) => json!("required"),
        _ if !name.is_empty() => {
            let why = "only with TOOL_MODE_REQUIRED; set that, or leave it empty";
            return Err(failure::invalid("tool_name", why));
        }
        Ok(v1::ToolMode::Unspecified | v1::ToolMode::Auto) => json!("auto"),
        Ok(v1::ToolMode::None) => json!("none"),
        Err(_) => {
            let why = "give 1 for auto, 2 for none, or 3 for required";
            return Err(failure::invalid("tool_mode", why));
        }
    };
    let parallel = Some(!request.single_tool_call);
    let field = if name.is_empty() {
        "tool_mode"
    } else {
        "tool_name"
    };
    tools::checked_as(field, Some(described), Some(&choice), parallel)
}

fn message(at: usize, wire: v1::ChatMessage, violations: &mut Violations) -> Message {
    let mut seen = Vec::new();
    let content = match (wire.content, wire.parts) {
        (text, parts) if parts.is_empty() => match text.is_empty() && !wire.tool_calls.is_empty() {
            true => Content::None,
            false => Content::Text(text),
        },
        (text, parts) => {
            if !text.is_empty() {
                let field = format!("messages[{at}].parts");
                violations.add(&field, "there is content beside them; give one of the two");
            }
            let (texts, images) = texts(at, parts, violations);
            seen = Seen::of_parts(&texts, images);
            Content::Parts(texts)
        }
    };
    let filled = |text: String| (!text.is_empty()).then_some(text);
    let calls = wire.tool_calls.into_iter();
    Message {
        role: wire.role,
        content,
        seen,
        reasoning_content: filled(wire.reasoning),
        tool_calls: calls
            .map(|call| ToolCall {
                id: filled(call.id),
                name: call.name,
                arguments: call.arguments.into(),
            })
            .collect(),
        tool_call_id: filled(wire.tool_call_id),
        name: filled(wire.name),
        parse_special: false,
    }
}

/// Converts content parts to texts, and the images that some of the texts stand for.
fn texts(
    at: usize,
    parts: Vec<v1::ContentPart>,
    violations: &mut Violations,
) -> (Vec<Value>, Vec<Option<ChatImage>>) {
    let text = |text: &str| json!({"type": "text", "text": text});
    let parts = parts.into_iter().enumerate();
    let texts = parts.map(|(part, wire)| {
        let field = format!("messages[{at}].parts[{part}]");
        match wire.part {
            Some(v1::content_part::Part::Text(said)) => (text(&said), None),
            Some(v1::content_part::Part::Image(bytes)) => {
                let image = ChatImage {
                    field,
                    data: Ok(ImageData::Bytes(bytes.into())),
                    pixels_max: None,
                };
                (text(LEFT_OUT), Some(image))
            }
            None => {
                violations.add(&field, "empty; give a text or an image");
                (Value::Null, None)
            }
        }
    });
    texts.unzip()
}
