//! Clients in another language: one made from the .proto files alone, and over HTTP the libraries
//! that applications use.

use std::os::unix::fs::PermissionsExt;

use rocmforge_tests::daemon::{Daemon, Options};
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
    let (token, token_file) = ("0123456789abcdef0123456789abcdef", dir.path().join("token"));
    std::fs::write(&token_file, token).expect("a writable directory");
    std::fs::set_permissions(&token_file, PermissionsExt::from_mode(0o600)).expect("our own file");
    // Port 0 is any that is free; the daemon's log says which.
    let options = Options::default()
        .arg("--http-listen")
        .arg("127.0.0.1:0")
        .arg("--http-token-file")
        .arg(token_file.to_str().expect("a path of plain characters"));
    let daemon = Daemon::start(&options);
    let exam = fixtures::exam();
    let url = format!("http://{}", http_address(&daemon));
    let arguments = [
        "--url",
        &url,
        "--token",
        token,
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

/// Where a daemon listens for HTTP. The line that says so may come after the socket answers.
fn http_address(daemon: &Daemon) -> String {
    for _ in 0..600 {
        let log = daemon.log();
        let mut words = log.split_whitespace();
        if let Some(address) = words.find_map(|word| word.strip_prefix("http_listen=")) {
            return address.trim_matches('"').to_owned();
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    panic!("no address in {}", daemon.log());
}
