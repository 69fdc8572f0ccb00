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
    let error = ChatTemplate::new("a\nb\n{% if %}", "", "").unwrap_err();
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
fn templates_cannot_reach_files() {
    for source in [
        "{% include '/etc/passwd' %}",
        "{% import '/etc/passwd' as p %}",
    ] {
        assert!(render(source).is_err(), "{source}");
    }
}
