//! Clients in another language: one made from the .proto files alone, and over HTTP the libraries
//! that applications use.

use rocmforge_tests::daemon::{Daemon, HTTP_TOKEN, Options};
use rocmforge_tests::fixtures::{self, TINY_LLAMA};
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
