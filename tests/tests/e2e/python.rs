//! Clients in another language: one made from the .proto files alone, and over HTTP the libraries
//! that applications use.

use rocmforge_tests::daemon::{Daemon, HTTP_TOKEN, Options};
use rocmforge_tests::fixtures::{self, TINY_LLAMA};
use rocmforge_tests::forge::Forge;
use rocmforge_tests::node::Node;
use rocmforge_tests::python::Python;

#[test]
fn stock_grpcio_loads_and_generates() {
    let modules = ["grpc", "grpc_tools", "grpc_health", "grpc_reflection"];
    let Some(python) = Python::find("stock_grpcio_loads_and_generates", &modules) else {
        return;
    };
    let daemon = Daemon::start(&Options::default());
    let (socket, model) = (daemon.socket(), fixtures::path(TINY_LLAMA));
    let exam = fixtures::exam();
    let arguments = [
        "--socket".as_ref(),
        socket.as_os_str(),
        "--model".as_ref(),
        model.as_os_str(),
        "--message".as_ref(),
        exam[0].prompt.as_ref(),
    ];
    let answer = python.run("grpc_client.py", &arguments);
    assert_eq!(answer.trim(), exam[0].answer);
    daemon.stop();
}

#[test]
fn the_libraries_of_openai_anthropic_and_ollama_are_served() {
    let modules = ["openai", "anthropic", "ollama", "httpx"];
    let test = "the_libraries_of_openai_anthropic_and_ollama_are_served";
    let Some(python) = Python::find(test, &modules) else {
        return;
    };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let daemon = Daemon::start(&Options::default().http_with_token(dir.path()));
    let exam = fixtures::exam();
    let url = daemon.url();
    let arguments = [
        "--url",
        &url,
        "--token",
        HTTP_TOKEN,
        "--model",
        TINY_LLAMA.trim_end_matches(".gguf"),
        "--message",
        &exam[0].prompt,
    ];
    let answers = python.run("http_clients.py", &arguments);
    let answers: Vec<_> = answers.lines().map(str::trim).collect();
    assert_eq!(answers, [exam[0].answer.as_str(); 3]);
    daemon.stop();
}

/// What is rejected of the schemas that generators write, by the keyword.
const REJECTED: [(&str, &str); 1] = [("pydantic: set_int", "#/uniqueItems")];

/// Shows the model the messages alone, and says that calls are written as JSON.
const CALLER: &str = "{%for m in messages%}{{m.content}}{%endfor%}{#<tool_call>#}";

#[test]
fn schemas_of_generators_hold_outputs() {
    let test = "schemas_of_generators_hold_outputs";
    let (Some(python), Some(node)) = (
        Python::find(test, &["pydantic", "jsonschema"]),
        Node::find(test),
    ) else {
        return;
    };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let schemas = dir.path().join("schemas.jsonl");
    std::fs::write(&schemas, node.run("schemas.mjs", &[])).expect("a writable directory");
    let models = tempfile::tempdir().expect("a temporary directory");
    let mut file = Forge::open(&fixtures::path(TINY_LLAMA));
    file.put_template(CALLER);
    let model = models.path().join("caller.gguf");
    std::fs::write(model, &file.bytes).expect("a writable directory");
    let options = Options::default().only_model_dir(models.path());
    let daemon = Daemon::start(&options.http_with_token(dir.path()));
    let (url, schemas) = (daemon.url(), schemas.display().to_string());
    let arguments = [
        "--url",
        &url,
        "--token",
        HTTP_TOKEN,
        "--model",
        "caller",
        "--schemas",
        &schemas,
    ];
    let said = python.run("schemas.py", &arguments);
    let said: serde_json::Value = serde_json::from_str(&said).expect("a line of JSON");
    println!("{said}");
    assert!(said["schemas"].as_u64() >= Some(400), "{said}");
    assert!(said["whole"].as_u64() >= Some(200), "{said}");
    assert_eq!(said["wrong"], serde_json::json!({}), "{said}");
    let rejected = said["rejected"].as_object().expect("an object");
    assert_eq!(rejected.len(), REJECTED.len(), "{said}");
    for (name, place) in REJECTED {
        assert!(rejected[name].to_string().contains(place), "{name}: {said}");
    }
    daemon.stop();
}
