//! Clients from npm over HTTP: the AI SDK and the Codex command line, each with its packages' own
//! code.

use std::path::Path;

use rocmforge_tests::daemon::{Daemon, HTTP_TOKEN, Options};
use rocmforge_tests::fixtures::{self, TINY_LLAMA};
use rocmforge_tests::forge::Forge;
use rocmforge_tests::node::Node;
use rocmforge_tests::python::Python;

use crate::python::Scripted;

/// Shows the model the last message alone, so that a small one can answer beneath an agent's long
/// instructions, and says that calls are written as JSON. Behind it: how an answer begins.
const LAST_MESSAGE: &str = "{%for m in messages%}{%if loop.last%}<|im_start|>{{m.role}}\n{{m.content}}<|im_end|>\n\
                            {%endif%}{%endfor%}<|im_start|>assistant\n";

/// The models `agent`, and `thinker` whose answers are all thoughts.
fn write_models(dir: &Path) {
    for (name, opening) in [
        ("agent", "{#<tool_call>#}"),
        ("thinker", "<think>\n{#</think><tool_call>#}"),
    ] {
        let mut file = Forge::open(&fixtures::path(TINY_LLAMA));
        file.put_template(&format!("{LAST_MESSAGE}{opening}"));
        std::fs::write(dir.join(format!("{name}.gguf")), &file.bytes)
            .expect("a writable directory");
    }
}

/// Runs the script, which prints each scenario that went well.
fn run(test: &str, script: &str, scenarios: &[&str]) {
    let Some(node) = Node::find(test) else {
        return;
    };
    let models = tempfile::tempdir().expect("a temporary directory");
    write_models(models.path());
    let token = tempfile::tempdir().expect("a temporary directory");
    let options = Options::default().only_model_dir(models.path());
    let daemon = Daemon::start(&options.http_with_token(token.path()));
    let exam = fixtures::exam();
    let said = node.run(
        script,
        &[&daemon.url(), HTTP_TOKEN, &exam[0].prompt, &exam[0].answer],
    );
    assert_eq!(said.lines().collect::<Vec<_>>(), scenarios);
    daemon.stop();
}

#[test]
fn the_ai_sdk_is_served() {
    let scenarios = [
        "plain",
        "streamed",
        "tools",
        "held",
        "reasoning",
        "errors",
        "cancelled",
    ];
    run("the_ai_sdk_is_served", "ai_sdk.mjs", &scenarios);
}

#[test]
fn the_codex_command_line_is_served() {
    let scenarios = [
        "plain",
        "tools",
        "servers",
        "held",
        "reasoning",
        "errors",
        "cancelled",
    ];
    run("the_codex_command_line_is_served", "codex.mjs", &scenarios);
}

#[test]
fn agents_libraries_of_npm_are_served() {
    let test = "agents_libraries_of_npm_are_served";
    let (Some(node), Some(python)) = (Node::find(test), Python::find(test, &["gguf"])) else {
        return;
    };
    let ground = Scripted::start(&python);
    let served = node.run(
        "agent_libraries.mjs",
        &[
            &ground.daemon.url(),
            HTTP_TOKEN,
            &ground.scripts,
            "fast",
            "slow",
        ],
    );
    let libraries = [
        "ai-sdk/openai",
        "ai-sdk/openai-chat",
        "ai-sdk/openai-compatible",
        "ai-sdk/anthropic",
        "ai-sdk/ollama",
        "openai-agents/chat",
        "openai-agents/responses",
    ];
    let expected = ["fast", "slow"]
        .iter()
        .flat_map(|model| libraries.map(|library| format!("{library} {model}")));
    assert_eq!(
        served.lines().collect::<Vec<_>>(),
        expected.collect::<Vec<_>>()
    );
    ground.daemon.stop();
}

#[test]
fn agents_of_the_command_line_are_served() {
    let test = "agents_of_the_command_line_are_served";
    let Some(node) = Node::with_programs(test) else {
        return;
    };
    let python = Python::find(test, &["gguf"]).expect("Python to write the models with");
    let ground = Scripted::start(&python);
    let home = tempfile::tempdir().expect("a temporary directory");
    let home_dir = home.path().display().to_string();
    let served = node.run(
        "agent_programs.mjs",
        &[&ground.daemon.url(), HTTP_TOKEN, &ground.scripts, &home_dir],
    );
    let programs = ["claude", "qwen", "opencode", "cn", "pi"];
    assert_eq!(served.lines().collect::<Vec<_>>(), programs);
    ground.daemon.stop();
}
