//! How a template takes messages: in texts or in parts, and where it looks for what was thought.
//!
//! Templates differ in what they read of a message. Some know parts alone and find nothing in a
//! text (SmolVLM, LLaVA-NeXT), others texts alone; reasoning of earlier turns is read as
//! `reasoning_content`, `thinking`, `tool_plan` and more, or as a part. Names are looked for in the
//! template's text. What cannot be seen there is tried: the template renders small chats, once a
//! model, and what it writes of them tells.

use serde_json::{Value, json};

use super::source;
use crate::Error;

/// Names of reasoning. The first is given to every template.
const NAMES: [&str; 7] = [
    "reasoning_content",
    "reasoning",
    "thinking",
    "thought",
    "thoughts",
    "think",
    TOOL_PLAN,
];
/// Cohere's name, which counts beside calls alone.
const TOOL_PLAN: &str = "tool_plan";
/// Message text in trial renderings: no template writes it by itself.
const SAID: &str = "Qx7trial";
/// A call's id that Mistral's templates take.
const CALL_ID: &str = "trial0001";

/// How a template takes messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Shape {
    /// Whether the template takes contents as parts only: a text is given as one part.
    pub(super) wraps_texts: bool,
    /// Whether the template iterates over parts; for others texts are joined.
    pub(super) takes_parts: bool,
    /// Whether the template reads reasoning as a part of the content.
    pub(super) thinking_part: bool,
    /// Which of [`NAMES`] the template reads.
    names: [bool; NAMES.len()],
}

/// A part of text.
pub(super) fn text_part(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

/// A part of reasoning, as Mistral's templates have it.
pub(super) fn thinking_part(text: &str) -> Value {
    json!({"type": "thinking", "thinking": text})
}

/// Renders a template with variables as JSON.
type Trial<'a> = dyn FnMut(Vec<u8>) -> Result<String, Error> + 'a;

impl Shape {
    /// The shape of a template that `trial` renders.
    ///
    /// # Errors
    ///
    /// If no trial was made: the chat was cancelled, or nothing can render.
    pub(super) fn of(template: &str, trial: &mut Trial<'_>) -> Result<Shape, Error> {
        let mut shape = Shape {
            takes_parts: source::takes_parts(template),
            names: NAMES.map(|name| name == NAMES[0] || reads(template, name)),
            ..Shape::default()
        };
        // A template that ends its process or runs for seconds does so with every chat.
        let mut is_sound = true;
        let mut told = |messages: Value| -> Result<Told, Error> {
            if !is_sound {
                return Ok(Told::Failed);
            }
            let variables = json!({
                "messages": messages, "tools": null, "documents": null,
                "add_generation_prompt": false, "bos_token": "", "eos_token": "",
            });
            match trial(serde_json::to_vec(&variables).unwrap_or_default()) {
                Ok(text) => Ok(Told::of(&text)),
                Err(Error::TemplateRaised { .. } | Error::TemplateRender { .. }) => {
                    Ok(Told::Failed)
                }
                Err(error @ (Error::Cancelled | Error::Renderer { .. })) => Err(error),
                Err(_) => {
                    is_sound = false;
                    Ok(Told::Failed)
                }
            }
        };
        if shape.takes_parts || template.contains("text") {
            let text = told(json!([{"role": "user", "content": SAID}]))?;
            let part = told(json!([{"role": "user", "content": [text_part(SAID)]}]))?;
            shape.wraps_texts = text.is_missing() && part == Told::Plain;
            shape.takes_parts = match (text, part) {
                (_, Told::Plain) => true,
                (Told::Failed | Told::Nothing, _) => shape.takes_parts,
                _ => false,
            };
        }
        if template.contains("thinking") {
            let fields = |mut message: Value| {
                for name in shape.reasoning_names(message.get("tool_calls").is_some()) {
                    message[name] = SAID.into();
                }
                message
            };
            let part = |mut message: Value| {
                message["content"] = match message["content"].as_str() {
                    Some("") => json!([thinking_part(SAID)]),
                    _ => json!([thinking_part(SAID), text_part("c")]),
                };
                message
            };
            let in_fields = tries(&mut told, &fields, shape.wraps_texts)?;
            shape.thinking_part = !in_fields && tries(&mut told, &part, false)?;
        }
        Ok(shape)
    }

    /// Names under which the template reads reasoning.
    pub(super) fn reasoning_names(self, with_calls: bool) -> impl Iterator<Item = &'static str> {
        let each = NAMES.into_iter().zip(self.names);
        each.filter(move |(name, is_read)| *is_read && (with_calls || *name != TOOL_PLAN))
            .map(|(name, _)| name)
    }
}

/// Whether reasoning is written of an answer, or of a call, that has it as `thinks` puts it.
fn tries(
    told: &mut dyn FnMut(Value) -> Result<Told, Error>,
    thinks: &dyn Fn(Value) -> Value,
    wraps: bool,
) -> Result<bool, Error> {
    let content = |text: &str| match wraps {
        true => json!([text_part(text)]),
        false => text.into(),
    };
    let user = json!({"role": "user", "content": content("a")});
    let answer = json!({"role": "assistant", "content": content("b")});
    let function = json!({"name": "f", "arguments": {}});
    let call = json!({
        "role": "assistant", "content": content(""),
        "tool_calls": [{"id": CALL_ID, "type": "function", "function": function}],
    });
    let result = json!({
        "role": "tool", "tool_call_id": CALL_ID, "name": "f", "content": content("d"),
    });
    let answered = told(json!([user, thinks(answer), user]))?;
    Ok(answered == Told::Plain || told(json!([user, thinks(call), result]))? == Told::Plain)
}

/// What a trial wrote of [`SAID`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Told {
    Plain,
    /// In quotes: the template has written a list or an object as it stands.
    Quoted,
    Nothing,
    Failed,
}

impl Told {
    fn of(text: &str) -> Told {
        match text.find(SAID) {
            None => Told::Nothing,
            Some(at) if text[..at].ends_with(['\'', '"']) => Told::Quoted,
            Some(_) => Told::Plain,
        }
    }

    fn is_missing(self) -> bool {
        matches!(self, Told::Nothing | Told::Failed)
    }
}

/// Whether a template has `name` behind a dot, or in quotes.
fn reads(template: &str, name: &str) -> bool {
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    template.match_indices(name).any(|(at, _)| {
        let (before, behind) = (&template[..at], &template[at + name.len()..]);
        let quoted = |quote| before.ends_with(quote) && behind.starts_with(quote);
        quoted('\'') || quoted('"') || before.ends_with('.') && !behind.starts_with(is_name)
    })
}

#[cfg(test)]
mod tests {
    use super::super::{Chat, ChatTemplate, Content, Message, Renderer, ToolCall};
    use super::*;

    fn rendered(source: &str, messages: &[Message]) -> String {
        let template = ChatTemplate::new(source, "", "").unwrap();
        let chat = Chat::new(messages.to_vec());
        let rendered = Renderer::in_process().render(&template, None, &chat, &|| false);
        rendered.unwrap().into_text()
    }

    fn thinks(content: &str) -> Message {
        Message {
            reasoning_content: Some("I think.".to_owned()),
            ..Message::new("assistant", content)
        }
    }

    fn calls(content: Content) -> Message {
        Message {
            content,
            tool_calls: vec![ToolCall {
                name: "f".to_owned(),
                ..ToolCall::default()
            }],
            ..thinks("")
        }
    }

    const PARTS: &str = "{% for m in messages %}<{{ m.role }}>{% for p in m['content'] %}\
        {% if p['type'] == 'text' %}{{ p['text'] }}{% elif p['type'] == 'image' %}<image>{% endif %}\
        {% endfor %}{% endfor %}";

    #[test]
    fn templates_that_know_parts_alone_get_texts_as_parts() {
        let selects = "{% for m in messages %}{% for p in m.content|selectattr('type', 'equalto', 'text') %}\
            {{ p.text }}{% endfor %}{% endfor %}";
        let first = "{{ messages[0].content[0].text }}";
        for (source, expected) in [(PARTS, "<user>Hi."), (selects, "Hi."), (first, "Hi.")] {
            assert_eq!(rendered(source, &[Message::new("user", "Hi.")]), expected);
            let mut part = Message::new("user", "");
            part.content = Content::Parts(vec![text_part("Hi.")]);
            assert_eq!(rendered(source, &[part]), expected);
        }
    }

    #[test]
    fn templates_that_know_texts_alone_get_parts_as_texts() {
        let mut two = Message::new("user", "");
        two.content = Content::Parts(vec![text_part("a"), text_part("b")]);
        for source in [
            "{{ messages[0].content|trim }}{# text #}",
            "{{ messages[0].content }}{# type text #}",
            // A loop over the letters of a text.
            "{% for c in messages[0].content %}{{ c }}{% endfor %}",
        ] {
            assert_eq!(rendered(source, &[two.clone()]), "a\nb", "{source}");
        }
        let either = "{% if messages[0].content is string %}{{ messages[0].content }}\
            {% else %}{% for p in messages[0].content %}[{{ p.text }}{{ p.more }}]{% endfor %}{% endif %}";
        assert_eq!(rendered(either, &[Message::new("user", "Hi.")]), "Hi.");
        two.content = Content::Parts(vec![
            json!({"type": "text", "text": "a", "more": 1}),
            text_part("b"),
        ]);
        assert_eq!(rendered(either, &[two]), "[a1][b]");
    }

    #[test]
    fn reasoning_comes_under_the_names_that_a_template_reads() {
        for name in NAMES {
            for read in [
                format!("m.{name}"),
                format!("m['{name}']"),
                format!("m.get(\"{name}\")"),
            ] {
                let source = format!("{{% for m in messages %}}{{{{ {read} }}}}{{% endfor %}}");
                let text = rendered(&source, &[calls(Content::None)]);
                assert_eq!(text, "I think.", "{source}");
            }
        }
        // Cohere's plan stands beside calls alone, and others get no name that they do not read.
        let plan = "{{ messages[0].tool_plan }}";
        assert_eq!(rendered(plan, &[thinks("b")]), "");
        let all = "{{ messages[0]|tojson }}{{ thinking }}{{ messages[0].thinking_text }}";
        assert_eq!(
            rendered(all, &[thinks("b")]),
            r#"{"role": "assistant", "content": "b", "reasoning_content": "I think."}"#
        );
    }

    #[test]
    fn reasoning_is_a_part_where_a_template_reads_it_there_alone() {
        let parts = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}\
            {% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}\
            {% elif p.type == 'thinking' %}[{{ p.thinking }}]{% endif %}{% endfor %}{% endif %}{% endfor %}";
        let user = Message::new("user", "a");
        let messages = [user.clone(), thinks("b"), user.clone()];
        assert_eq!(rendered(parts, &messages), "a[I think.]ba");
        assert_eq!(
            rendered(parts, &[user.clone(), calls(Content::None)]),
            "a[I think.]"
        );
        let both = format!("{{% for m in messages %}}{{{{ m.thinking }}}}{{% endfor %}}|{parts}");
        assert_eq!(rendered(&both, &messages), "I think.|aba");
        // What writes every message as it stands reads no part.
        let dumps = "{% for m in messages %}{{ m.content|string }}{% endfor %}{# 'thinking' #}";
        assert_eq!(rendered(dumps, &messages), "aba");
    }
}
