//! Templates in children: this program starts itself, as the daemon does, and
//! feeds the child templates that would end the process that renders them.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rocmforge_tokenizer::{
    Chat, ChatTemplate, Error, Message, RENDER_CHILD_ARGUMENT, RenderLimits, Renderer,
    render_child_main,
};

/// Small enough that a test ends soon.
const LIMITS: RenderLimits = RenderLimits {
    memory_bytes: 640 << 20,
    time: Duration::from_secs(2),
    at_once: 2,
};

fn renderer() -> Renderer {
    Renderer::with_children(None, LIMITS)
}

fn render(renderer: &Renderer, source: &str) -> Result<String, Error> {
    let template = ChatTemplate::new(source, "<s>", "</s>").unwrap();
    let chat = Chat::new(vec![Message::new("user", "Hi")]);
    let rendered = renderer.render(&template, None, &chat, &|| false)?;
    Ok(rendered.into_text())
}

/// The renderer works, and with the child that it has.
fn assert_works(renderer: &Renderer) {
    let text = render(renderer, "{{ bos_token }}{{ messages[0].content }}").unwrap();
    assert_eq!(text, "<s>Hi");
}

/// Chains that compile by recursion, and values that contain themselves.
fn a_template_that_overflows_the_stack_costs_one_chat() {
    let renderer = renderer();
    // Chains of some thousand terms ended a daemon's blocking thread; with the
    // child's stack they are only slow.
    for source in [
        format!("{{{{ {}1 }}}}", "-".repeat(4_891)),
        format!("{{{{ 1{} }}}}", "+1".repeat(9_782)),
        format!("{{{{ a{} }}}}", "|e".repeat(10_164)),
        format!("{{% if a %}}{}{{% endif %}}", "{% elif a %}".repeat(20_000)),
    ] {
        match render(&renderer, &source) {
            Ok(_) | Err(Error::TemplateSyntax { .. } | Error::TemplateRender { .. }) => {}
            Err(error) => panic!("{}...: {error}", &source[..16]),
        }
    }
    for source in [
        "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}",
        "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns|tojson }}",
        "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns == ns }}",
        "{% set ns = namespace(a=[]) %}{% for i in range(99999) %}{% set ns.a = [ns.a] %}{% endfor %}{{ ns.a }}",
    ] {
        let result = render(&renderer, source);
        assert!(
            matches!(
                result,
                Ok(_)
                    | Err(Error::TemplateLimit { .. }
                        | Error::TemplateRender { .. }
                        | Error::TemplateCrashed { .. })
            ),
            "{source}: {result:?}"
        );
        assert_works(&renderer);
    }
    // Deeper trees are refused before they are made.
    let deep = format!("{{{{ {}1 }}}}", "-".repeat(1_000_000));
    let error = render(&renderer, &deep).unwrap_err();
    assert!(matches!(error, Error::TemplateSyntax { .. }), "{error:?}");
    assert_works(&renderer);
}

/// One instruction may take any amount of memory and time.
fn memory_and_time_are_bounded() {
    let renderer = renderer();
    for source in [
        "{{ ('b' * 100000).join(['a'] * 100000) }}",
        "{{ [1]|batch(1000000000, 0)|list }}",
        "{{ [1]|slice(1000000000)|list }}",
        "{{ '%0999999999d'|format(1) }}",
        // Many values, each within its bound.
        "{% set ns = namespace(a=[]) %}{% for i in range(999) %}{% set ns.a = ns.a + ['x' * 60000000] %}{% endfor %}",
    ] {
        let start = Instant::now();
        let result = render(&renderer, source);
        assert!(
            matches!(
                result,
                Err(Error::TemplateLimit { .. } | Error::TemplateRender { .. })
            ),
            "{source}: {:?}",
            result.map(|text| text.len())
        );
        assert!(start.elapsed() < Duration::from_secs(20), "{source}");
        assert_works(&renderer);
    }
    // Work that no instruction is charged for: the time is what ends it.
    let busy = "{% set s=([1]*999999)|list %}{% for i in range(99999) %}{% set n=s.count(2) %}{% endfor %}";
    let error = render(&renderer, busy).unwrap_err();
    assert!(
        matches!(
            error,
            Error::TemplateLimit {
                unit: "seconds",
                ..
            }
        ),
        "{error:?}"
    );
    assert_works(&renderer);
}

/// A namespace that holds itself is never freed; the child that holds it
/// is replaced before it is large.
fn what_a_template_leaks_goes_with_its_child() {
    let renderer = renderer();
    let leak = "{% set ns = namespace() %}{% set ns.a = ns %}{% set ns.b = messages[0].content * 10000000 %}ok";
    for _ in 0..60 {
        // 60 times 20 MB is twice what a child may have.
        assert_eq!(render(&renderer, leak).unwrap(), "ok");
    }
}

fn a_cancelled_chat_frees_its_place() {
    let renderer = Renderer::with_children(
        None,
        RenderLimits {
            time: Duration::from_secs(600),
            at_once: 1,
            ..LIMITS
        },
    );
    let busy = "{% set s=([1]*999999)|list %}{% for i in range(99999) %}{% set n=s.count(2) %}{% endfor %}";
    let template = ChatTemplate::new(busy, "", "").unwrap();
    let chat = Chat::new(vec![Message::new("user", "Hi")]);
    let cancelled = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let stop = || cancelled.load(Ordering::Relaxed);
                let error = renderer.render(&template, None, &chat, &stop).unwrap_err();
                assert!(matches!(error, Error::Cancelled), "{error:?}");
            });
        }
        std::thread::sleep(Duration::from_millis(100));
        cancelled.store(true, Ordering::Relaxed);
    });
    assert_works(&renderer);
}

fn a_template_that_does_not_parse_says_where() {
    let renderer = renderer();
    let error = render(&renderer, "a\nb\n{% if %}").unwrap_err();
    assert!(
        matches!(error, Error::TemplateSyntax { line: 3, .. }),
        "{error:?}"
    );
    let error = render(&renderer, "{{ raise_exception('no') }}").unwrap_err();
    assert!(
        matches!(&error, Error::TemplateRaised { message } if message == "no"),
        "{error:?}"
    );
    assert_works(&renderer);
}

/// Many chats at a time, of large messages and small, by fewer children.
fn chats_do_not_mix() {
    let renderer = renderer();
    let done = AtomicUsize::new(0);
    let template = ChatTemplate::new("{{ messages[0].content }}.", "", "").unwrap();
    std::thread::scope(|scope| {
        for thread in 0..6 {
            let (renderer, template, done) = (&renderer, &template, &done);
            scope.spawn(move || {
                for i in 0..20 {
                    let text = format!("{thread}-{i} ").repeat(1 << (i % 18));
                    let chat = Chat::new(vec![Message::new("user", text.clone())]);
                    let rendered = renderer.render(template, None, &chat, &|| false).unwrap();
                    assert_eq!(rendered.text(), format!("{text}."));
                    done.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(done.into_inner(), 120);
}

fn a_program_that_is_no_child_is_an_error() {
    let limits = RenderLimits::default();
    let missing = Renderer::with_children(Some("/nonexistent".into()), limits);
    let error = render(&missing, "{{ 1 }}").unwrap_err();
    assert!(matches!(error, Error::Renderer { .. }), "{error:?}");
    let other = Renderer::with_children(Some("/bin/false".into()), limits);
    let error = render(&other, "{{ 1 }}").unwrap_err();
    assert!(matches!(error, Error::TemplateCrashed { .. }), "{error:?}");
}

/// Once the chat that was under way failed, as if its template had taken too much memory.
fn a_child_that_is_killed_from_outside_costs_no_chat() {
    let dir = tempfile::tempdir().unwrap();
    // Kills itself as often as the file says, then is a child as any other.
    let script = |name: &str, signal: &str, times: u32| {
        let (path, left) = (
            dir.path().join(name),
            dir.path().join(format!("{name}.left")),
        );
        std::fs::write(&left, times.to_string()).unwrap();
        let left = left.display();
        let own = std::env::current_exe().unwrap();
        rocmforge_test_scripts::write(
            &path,
            &format!(
                "read n < {left}\nif [ $n -gt 0 ]; then echo $((n - 1)) > {left}; kill -{signal} $$; fi\nexec {} \"$@\"",
                own.display()
            ),
        );
        Renderer::with_children(Some(path), LIMITS)
    };
    for (signal, times) in [("KILL", 1), ("TERM", 2)] {
        assert_works(&script(signal, signal, times));
    }
    let error = render(&script("always", "KILL", 99), "{{ 1 }}").unwrap_err();
    assert!(
        matches!(error, Error::TemplateKilled { signal: 9 }),
        "{error:?}"
    );
    let text = error.to_string();
    assert!(
        text.contains("killed by signal 9") && !text.contains("exceeds"),
        "{text}"
    );
    // What it does itself is the template's fault, and is not tried again.
    let error = render(&script("crash", "SEGV", 1), "{{ 1 }}").unwrap_err();
    assert!(matches!(error, Error::TemplateCrashed { .. }), "{error:?}");
}

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    if arguments.next().as_deref() == Some(RENDER_CHILD_ARGUMENT) {
        return ExitCode::from(render_child_main(arguments));
    }
    let tests: &[(&str, fn())] = &[
        (
            "a_template_that_overflows_the_stack_costs_one_chat",
            a_template_that_overflows_the_stack_costs_one_chat,
        ),
        ("memory_and_time_are_bounded", memory_and_time_are_bounded),
        (
            "what_a_template_leaks_goes_with_its_child",
            what_a_template_leaks_goes_with_its_child,
        ),
        (
            "a_cancelled_chat_frees_its_place",
            a_cancelled_chat_frees_its_place,
        ),
        (
            "a_template_that_does_not_parse_says_where",
            a_template_that_does_not_parse_says_where,
        ),
        ("chats_do_not_mix", chats_do_not_mix),
        (
            "a_program_that_is_no_child_is_an_error",
            a_program_that_is_no_child_is_an_error,
        ),
        (
            "a_child_that_is_killed_from_outside_costs_no_chat",
            a_child_that_is_killed_from_outside_costs_no_chat,
        ),
    ];
    let mut failed = 0;
    for (name, test) in tests {
        let start = Instant::now();
        let passed = std::panic::catch_unwind(test).is_ok();
        failed += usize::from(!passed);
        let words = if passed { "ok" } else { "FAILED" };
        println!(
            "test {name} ... {words} ({:.1} s)",
            start.elapsed().as_secs_f32()
        );
    }
    // How long an ordinary chat takes, for whoever reads the log.
    let renderer = renderer();
    assert_works(&renderer);
    let start = Instant::now();
    (0..200).for_each(|_| assert_works(&renderer));
    println!("an ordinary chat takes {:?}", start.elapsed() / 200);
    if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
