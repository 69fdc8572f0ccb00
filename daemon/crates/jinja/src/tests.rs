//! What Jinja2 makes of the same templates (`tests/python/jinja_reference.py` writes it).

use std::path::Path;

use serde_json::Value;

use super::{Error, Host, Template};

const HOST: Host<'static> = Host {
    strftime: &|format| match format {
        "%d %b %Y" => Ok("03 Feb 2026".to_owned()),
        "%Y-%m-%d" => Ok("2026-02-03".to_owned()),
        "%B %d, %Y" => Ok("February 03, 2026".to_owned()),
        "%d %B %Y" => Ok("03 February 2026".to_owned()),
        other => Err(format!("no date for {other}")),
    },
    meant: &|_| None,
    max_steps: 1_000_000,
    max_output: 1 << 20,
};

fn read(name: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reference");
    std::fs::read_to_string(folder.join(name)).unwrap()
}

fn entries(name: &str) -> Vec<Value> {
    serde_json::from_str(&read(name)).unwrap()
}

fn render(source: &str, variables: &Value) -> Result<String, Error> {
    Template::parse(source)?.render(variables, &HOST)
}

/// What is wrong with a result, where Jinja's is `expected`.
fn difference(ours: &Result<String, Error>, expected: &Value) -> Option<String> {
    let agrees = match (ours, expected) {
        (Ok(text), expected) => expected["text"].as_str() == Some(text),
        (Err(Error::Raised(message)), expected) => expected["raised"].as_str() == Some(message),
        // In which words it fails is each engine's affair.
        (Err(_), expected) => expected["text"].is_null() && expected["raised"].is_null(),
    };
    (!agrees).then(|| format!("ours  {ours:?}\n  jinja {expected}"))
}

/// Runs on a stack as large as that of a rendering thread.
fn on_a_stack(work: impl FnOnce() + Send + 'static) {
    let thread = std::thread::Builder::new().stack_size(64 << 20);
    thread.spawn(work).unwrap().join().unwrap();
}

#[test]
fn expressions_agree_with_jinja_but_for_listed_differences() {
    on_a_stack(|| {
        let listed = entries("differences.json");
        let why = |template: &str| {
            let found = listed.iter().find(|entry| entry["template"] == template);
            found.map(|entry| entry["ours"].as_str())
        };
        let mut wrong = Vec::new();
        let all = entries("expressions.json");
        for expected in &all {
            let source = expected["template"].as_str().unwrap();
            let ours = render(source, &Value::Null);
            let found = difference(&ours, expected);
            match (found, why(source)) {
                (None, None) => {}
                // A difference is what it is said to be; no text is said for a failure.
                (Some(_), Some(said)) if ours.as_deref().ok() == said => {}
                (Some(found), _) => wrong.push(format!("{source}\n  {found}")),
                (None, Some(_)) => wrong.push(format!("{source}\n  is listed and agrees")),
            }
        }
        assert!(all.len() > 500, "{}", all.len());
        assert!(
            wrong.is_empty(),
            "{} differ:\n{}",
            wrong.len(),
            wrong.join("\n")
        );
    });
}

/// The renderings of templates in a directory that differ from Jinja's.
fn differences(directory: &Path, renderings: &[Value]) -> Vec<String> {
    let chats = entries("chats.json");
    let mut wrong = Vec::new();
    for expected in renderings {
        let name = expected["template"].as_str().unwrap();
        let chat = chats.iter().find(|chat| chat["name"] == expected["chat"]);
        let source = std::fs::read_to_string(directory.join(format!("{name}.jinja"))).unwrap();
        let ours = render(&source, &chat.unwrap()["variables"]);
        if let Some(found) = difference(&ours, expected) {
            wrong.push(format!("{name}, {}\n  {found}", expected["chat"]));
        }
    }
    wrong
}

fn assert_none(wrong: &[String]) {
    let n = wrong.len();
    assert!(wrong.is_empty(), "{n} differ:\n{}", wrong.join("\n"));
}

#[test]
fn chats_agree_with_jinja() {
    on_a_stack(|| {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reference/templates");
        assert_none(&differences(&directory, &entries("renderings.json")));
    });
}

/// Published templates that the repository may not hold: `tests/python/jinja_reference.py` says how
/// they are tried.
#[test]
fn chats_of_templates_of_others_agree_with_jinja() {
    let named = |name| std::env::var_os(name).filter(|path| !path.is_empty());
    let (Some(directory), Some(file)) =
        (named("ROCMFORGE_TEMPLATES"), named("ROCMFORGE_RENDERINGS"))
    else {
        println!("skipped: ROCMFORGE_TEMPLATES and ROCMFORGE_RENDERINGS are not set");
        return;
    };
    on_a_stack(move || {
        let renderings = std::fs::read_to_string(file).unwrap();
        let renderings: Vec<Value> = serde_json::from_str(&renderings).unwrap();
        println!("{} renderings", renderings.len());
        assert!(!renderings.is_empty());
        assert_none(&differences(Path::new(&directory), &renderings));
    });
}

/// What templates drawn at random differ in: `tests/python/jinja_reference.py` writes them.
#[test]
fn random_templates_agree_with_jinja() {
    let named = std::env::var_os("ROCMFORGE_RANDOM_TEMPLATES").filter(|path| !path.is_empty());
    let Some(file) = named else {
        println!("skipped: ROCMFORGE_RANDOM_TEMPLATES is not set");
        return;
    };
    on_a_stack(move || {
        let lines = std::fs::read_to_string(file).unwrap();
        let mut wrong = Vec::new();
        let mut n = 0;
        for line in lines.lines() {
            let expected: Value = serde_json::from_str(line).unwrap();
            let source = expected["template"].as_str().unwrap();
            n += 1;
            if let Some(found) = difference(&render(source, &Value::Null), &expected) {
                wrong.push(format!("{source:?}\n  {found}"));
            }
        }
        println!("{n} templates");
        assert!(n > 1000, "{n}");
        assert_none(&wrong);
    });
}

#[test]
fn a_failure_names_its_line() {
    for source in [
        "\n{{ missing.a }}",
        "a\n{% for i in 5 %}{% endfor %}",
        "\n{{ 1 / 0 }}",
    ] {
        let error = render(source, &Value::Null).unwrap_err();
        assert!(
            matches!(error, Error::Render { line: 2, .. }),
            "{source}: {error:?}"
        );
    }
    let error = render("a\nb\n{% if %}", &Value::Null).unwrap_err();
    assert!(matches!(error, Error::Syntax { line: 3, .. }), "{error:?}");
}

#[test]
fn work_is_bounded() {
    on_a_stack(|| {
        let nested = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}";
        assert_eq!(render(nested, &Value::Null), Err(Error::Steps));
        let long = "{% for a in range(9999) %}{{ 'x' * 100000 }}{% endfor %}";
        assert_eq!(render(long, &Value::Null), Err(Error::Output));
        for source in [
            "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
            "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}",
            "{% set ns = namespace(a=[]) %}{% for i in range(9999) %}{% set ns.a = [ns.a] %}{% endfor %}{{ ns.a }}",
            "{{ 'x' * 999999999999 }}",
            "{{ ('b' * 100000).join(['a'] * 100000) }}",
            "{{ '%0999999999d' % 1 }}",
            "{{ '{:999999999}'.format(1) }}",
            "{{ 'a'.center(999999999999) }}",
        ] {
            let error = render(source, &Value::Null);
            assert!(
                matches!(error, Err(Error::Render { .. })),
                "{source}: {error:?}"
            );
        }
        for source in [
            format!("{{{{ {}1 }}}}", "-".repeat(100_000)),
            format!("{{{{ 1{} }}}}", "+1".repeat(100_000)),
            format!("{{{{ {}1 }}}}", "(".repeat(100_000)),
            format!("{{{{ a{} }}}}", "|e".repeat(100_000)),
            format!("{{{{ a{} }}}}", ".b".repeat(100_000)),
            "{% if a %}".repeat(100_000),
        ] {
            let error = render(&source, &Value::Null);
            assert!(matches!(error, Err(Error::Syntax { .. })), "{error:?}");
        }
    });
}
