//! Templates: what they render, and what they refuse.

use super::*;

fn compile(source: &str) -> ChatTemplate {
    ChatTemplate::new(source, "<s>", "</s>").unwrap()
}

fn render(source: &str) -> Result<String, Error> {
    compile(source).render(&[Message::new("user", "Hi")], true)
}

#[test]
fn a_template_that_does_not_parse_names_its_line() {
    let error = render("a\nb\n{% if %}").unwrap_err();
    assert!(
        matches!(error, Error::TemplateSyntax { line: 3, .. }),
        "{error}"
    );
    let error = ChatTemplate::new(&" ".repeat(MAX_TEMPLATE_BYTES + 1), "", "").unwrap_err();
    assert!(matches!(error, Error::Size { .. }), "{error}");
}

#[test]
fn what_a_template_raises_comes_out_in_its_words() {
    let error = render("{{ raise_exception('roles must alternate') }}").unwrap_err();
    assert!(
        matches!(&error, Error::TemplateRaised { message } if message == "roles must alternate"),
        "{error}"
    );
    let nested = "{% macro m() %}{{ raise_exception('deep') }}{% endmacro %}{{ m() }}";
    let error = render(nested).unwrap_err();
    assert!(
        matches!(&error, Error::TemplateRaised { message } if message == "deep"),
        "{error}"
    );
}

#[test]
fn a_failing_template_names_its_line() {
    for source in [
        "\n{{ nothing.at.all }}",
        "\n{{ messages.frobnicate() }}",
        "\n{{ 1 / 0 }}",
    ] {
        let error = render(source).unwrap_err();
        assert!(
            matches!(error, Error::TemplateRender { line: 2, .. }),
            "{source}: {error}"
        );
    }
}

#[test]
fn what_is_empty_can_be_reversed() {
    for (source, expected) in [
        ("{{ ''[::-1] }}{{ [][::-1]|list }}", "[]"),
        ("{{ messages[1:][::-1]|length }}", "0"),
        ("{{ [1, 2, 3][2:0:-1]|list }}{{ 'abc'[5::-2] }}", "[3, 2]ca"),
    ] {
        assert_eq!(render(source).unwrap(), expected, "{source}");
    }
}

#[test]
fn lists_with_a_name_can_be_changed() {
    // As Kimi K2's template keeps the ids of calls.
    let queue = "{% set ns = namespace(ids=[]) %}\
        {% macro call(id) %}{% set _ = ns.ids.append(id) %}<{{ id }}>{% endmacro %}\
        {{ call('a') }}{{ call('b') }}{% for m in 'xyz' %}\
        {% if ns.ids %}{% set id = ns.ids.pop(0) %}{% else %}{% set id = '-' %}{% endif %}[{{ id }}]{% endfor %}";
    assert_eq!(render(queue).unwrap(), "<a><b>[a][b][-]");
    for (source, expected) in [
        (
            "{% set l = [1] %}{% for i in [2, 3] %}{% set _ = l.append(i) %}{% endfor %}{{ l }}",
            "[1, 2, 3]",
        ),
        (
            "{% set l = [1, 2] %}{% set k = l.copy() %}{% set _ = l.extend(l) %}{% set _ = k.insert(-1, 'x') %}\
             {{ l }}{{ k }}{{ l|tojson }}{{ l[-1] }}{{ l[1:]|list }}{{ l|length }}{{ 2 in l }}{{ l.count(1) }}{{ l + k == l }}",
            "[1, 2, 1, 2][1, 'x', 2][1, 2, 1, 2]2[2, 1, 2]4True2False",
        ),
        (
            "{% set l = [1, 2] %}{{ l.pop() }}{{ l.pop(-1) }}{{ l }}{% set l = ['a'] %}{{ l.clear() or l|join }}{{ l == [] }}",
            "21[]True",
        ),
        (
            "{% set l = [3, 1] %}{% set _ = l.append(2) %}{{ l|sort }}{{ l is sequence }}{{ l|join('-') }}{{ l.index(2) }}",
            "[1, 2, 3]True3-1-22",
        ),
    ] {
        assert_eq!(render(source).unwrap(), expected, "{source}");
    }
    for source in [
        "{% set l = [] %}{{ l.pop() }}",
        "{% set l = [1] %}{{ l.pop(1) }}{{ l.pop(-2) }}",
        "{% set l = [] %}{{ l.append() }}",
        "{% set l = [] %}{{ l.append(1, 2) }}{{ l.frobnicate() }}",
    ] {
        assert!(render(source).is_err(), "{source}");
    }
}

#[test]
fn endless_templates_run_out_of_steps() {
    let nested = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}";
    let error = render(nested).unwrap_err();
    assert!(
        matches!(
            error,
            Error::TemplateLimit {
                max: MAX_CHAT_STEPS,
                ..
            }
        ),
        "{error}"
    );
    let recursive = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}";
    let error = render(recursive).unwrap_err();
    assert!(matches!(error, Error::TemplateRender { .. }), "{error}");
}

#[test]
fn output_is_bounded() {
    let long = "{% for a in range(9999) %}{{ 'x' * 100000 }}{% endfor %}";
    let error = render(long).unwrap_err();
    assert!(
        matches!(
            error,
            Error::TemplateLimit {
                unit: "bytes of output",
                ..
            }
        ),
        "{error}"
    );
    let message = [Message::new("user", "y".repeat(8 << 20))];
    let text = compile("{{ messages[0].content }}")
        .render(&message, true)
        .unwrap();
    assert_eq!(text.len(), 8 << 20);
}

#[test]
fn content_is_data_and_never_a_template() {
    let message = [Message::new("user", "{{ raise_exception('x') }}<&>")];
    let text = compile("{{ messages[0]['content'] }}")
        .render(&message, true)
        .unwrap();
    assert_eq!(text, "{{ raise_exception('x') }}<&>");
}

#[test]
fn what_is_added_to_a_safe_text_stays_plain() {
    // As Functionary 3.1 describes tools; Jinja with the filter of today's transformers would write
    // &#34; for each quote.
    let source = "{% set t = {'name': 'f', 'description': \"a's & <b>\"} %}\
        {{ \"Use '\"|safe + t['name'] + \"' to '\"|safe + t['description'] + \"'\\n\"|safe + t | tojson() }}";
    assert_eq!(
        render(source).unwrap(),
        "Use 'f' to 'a's & <b>'\n{\"name\": \"f\", \"description\": \"a's & <b>\"}"
    );
}

#[test]
fn templates_cannot_reach_files() {
    for source in [
        "{% include '/etc/passwd' %}",
        "{% import '/etc/passwd' as p %}",
    ] {
        assert!(render(source).is_err(), "{source}");
    }
}

fn chat(messages: Vec<Message>) -> Chat {
    Chat::new(messages)
}

fn rendered(source: &str, chat: &Chat) -> Result<String, Error> {
    Renderer::in_process()
        .render(&compile(source), None, chat, &|| false)
        .map(RenderedChat::into_text)
}

#[test]
fn a_message_has_what_it_was_given_and_nothing_else() {
    let mut message = Message::new("assistant", "x");
    let source = "{{ messages[0]|tojson }}";
    assert_eq!(
        rendered(source, &chat(vec![message.clone()])).unwrap(),
        r#"{"role": "assistant", "content": "x"}"#
    );
    message.content = Content::None;
    message.reasoning_content = Some("r".to_owned());
    message.tool_calls = vec![ToolCall {
        id: Some("1".to_owned()),
        name: "f".to_owned(),
        arguments: r#"{"b": 1, "a": 2.0}"#.into(),
    }];
    message.name = Some("n".to_owned());
    assert_eq!(
        rendered(source, &chat(vec![message])).unwrap(),
        r#"{"role": "assistant", "content": null, "reasoning_content": "r", "name": "n", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"b": 1, "a": 2.0}}}]}"#
    );
}

#[test]
fn tools_arguments_and_documents_reach_the_template() {
    let mut chat = chat(vec![Message::new("user", "x")]);
    let source = "{{ tools is none }} {{ enable_thinking|default('unset') }} {{ documents|length if documents else 0 }} {{ bos_token }}";
    assert_eq!(rendered(source, &chat).unwrap(), "True unset 0 <s>");
    chat.tools = vec![serde_json::json!({"type": "function", "function": {"name": "f"}})];
    chat.documents = vec![serde_json::json!({"text": "d"})];
    chat.template_kwargs = serde_json::json!({"enable_thinking": false, "bos_token": "no"})
        .as_object()
        .unwrap()
        .clone();
    assert_eq!(rendered(source, &chat).unwrap(), "False False 1 <s>");
    assert_eq!(
        rendered("{{ tools|tojson }}", &chat).unwrap(),
        r#"[{"type": "function", "function": {"name": "f"}}]"#
    );
}

#[test]
fn templates_that_join_arguments_get_them_as_text() {
    let mut message = Message::new("assistant", "");
    message.tool_calls = vec![ToolCall {
        id: None,
        name: "f".to_owned(),
        arguments: serde_json::json!({"a": 1}),
    }];
    let chat = chat(vec![message]);
    let source = "{{ 'f' + messages[0].tool_calls[0].function.arguments }}";
    assert_eq!(rendered(source, &chat).unwrap(), r#"f{"a":1}"#);
    let source = "{{ messages[0].tool_calls[0].function.arguments.a + 1 }}";
    assert_eq!(rendered(source, &chat).unwrap(), "2");
}

#[test]
fn arguments_that_are_not_there_are_none() {
    for arguments in ["".into(), " ".into(), serde_json::Value::Null] {
        let mut message = Message::new("assistant", "");
        message.tool_calls = vec![ToolCall {
            id: None,
            name: "f".to_owned(),
            arguments,
        }];
        let chat = chat(vec![message]);
        let source = "{{ 'f' + messages[0].tool_calls[0].function.arguments }}";
        assert_eq!(rendered(source, &chat).unwrap(), "f{}");
        let source = "{{ messages[0].tool_calls[0].function.arguments.items()|length }}";
        assert_eq!(rendered(source, &chat).unwrap(), "0");
    }
}

#[test]
fn parts_are_joined_for_templates_that_know_none() {
    let mut message = Message::new("user", "");
    message.content = Content::Parts(vec![
        serde_json::json!({"type": "text", "text": "a"}),
        serde_json::json!({"type": "text", "text": "b"}),
    ]);
    let chat = chat(vec![message]);
    assert_eq!(
        rendered("{{ messages[0].content + '!' }}", &chat).unwrap(),
        "a\nb!"
    );
    assert_eq!(
        rendered(
            "{% for part in messages[0].content %}[{{ part.text }}]{% endfor %}",
            &chat
        )
        .unwrap(),
        "[a][b]"
    );
    let by_a_name = "{% macro write(m) %}{% set c = m.get('content') %}\
        {% if c is string %}{{ c }}{% elif c is not none %}{% for part in c -%}[{{ part['text'] }}]{%- endfor %}{% endif %}\
        {% endmacro %}{% for m in messages %}{{ write(m) }}{% endfor %}";
    assert_eq!(rendered(by_a_name, &chat).unwrap(), "[a][b]");
}

#[test]
fn the_last_message_can_be_left_open() {
    let mut chat = chat(vec![
        Message::new("user", "a"),
        Message::new("assistant", "The answer is "),
    ]);
    let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
    let start = "<user>a</><assistant>The answer is ";
    for (ending, text) in [
        (Ending::Answer, format!("{start}</><assistant>")),
        (Ending::Closed, format!("{start}</>")),
        (Ending::Continue, start.to_owned()),
    ] {
        chat.ending = ending;
        assert_eq!(rendered(source, &chat).unwrap(), text);
    }
    let error = rendered("{{ messages|length }}", &chat).unwrap_err();
    assert!(matches!(error, Error::TemplateRender { .. }), "{error}");
    chat.messages.clear();
    let error = rendered(source, &chat).unwrap_err();
    assert!(matches!(error, Error::TemplateRender { .. }), "{error}");
}
