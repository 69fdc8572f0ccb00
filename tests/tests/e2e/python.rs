//! Clients in another language: one made from the .proto files alone, and over HTTP the libraries
//! that applications use.

use rocmforge_tests::daemon::{Daemon, HTTP_TOKEN, Options};
use rocmforge_tests::fixtures::{self, TINY_LLAMA};
use rocmforge_tests::forge::Forge;
use rocmforge_tests::node::Node;
use rocmforge_tests::python::Python;
use rocmforge_tests::skip;

/// Names an interpreter with tests/python/requirements-agents.txt.
const AGENTS_PYTHON_ENV: &str = "ROCMFORGE_AGENTS_PYTHON";

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

#[test]
fn the_libraries_of_openai_anthropic_and_ollama_show_images() {
    let modules = ["openai", "anthropic", "ollama", "httpx"];
    let test = "the_libraries_of_openai_anthropic_and_ollama_show_images";
    let Some(python) = Python::find(test, &modules) else {
        return;
    };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let models = dir.path().join("models");
    std::fs::create_dir(&models).expect("a writable directory");
    let made = [
        "--make".as_ref(),
        models.as_os_str(),
        "--fixtures".as_ref(),
        fixtures::dir().as_os_str(),
    ]
    .map(ToOwned::to_owned);
    python.run("image_clients.py", &made);
    let options = Options::default().only_model_dir(&models);
    let daemon = Daemon::start(&options.http_with_token(dir.path()));
    let url = daemon.url();
    let arguments = ["--url", &url, "--token", HTTP_TOKEN, "--model", "seeing"];
    let answers = python.run("image_clients.py", &arguments);
    let answers: Vec<_> = answers.lines().collect();
    assert!(answers.len() == 3 && answers[0].len() > 2, "{answers:?}");
    assert!(
        answers.iter().all(|answer| *answer == answers[0]),
        "{answers:?}"
    );
    daemon.stop();
}

/// Libraries of agents that are installed with the others, and those that need packages of their
/// own (tests/python/requirements-agents.txt).
const LIBRARIES: [&str; 3] = ["openai-agents", "pydantic-ai", "langchain"];
const MORE_LIBRARIES: [&str; 3] = ["litellm", "instructor", "llama-index"];

/// A daemon with the models `fast` and `slow`, which say what tests/python/scripted.py has written.
pub(crate) struct Scripted {
    pub(crate) daemon: Daemon,
    /// The file that tells what they say.
    pub(crate) scripts: String,
    _models: tempfile::TempDir,
}

impl Scripted {
    pub(crate) fn start(python: &Python) -> Self {
        let models = tempfile::tempdir().expect("a temporary directory");
        let vocabulary = fixtures::path(TINY_LLAMA);
        let said = python.run("scripted.py", &[models.path(), &vocabulary]);
        let scripts = models.path().join("scripts.json");
        std::fs::write(&scripts, said).expect("a writable directory");
        let options = Options::default()
            .only_model_dir(models.path())
            .vram_budget(256 << 20);
        let daemon = Daemon::start(&options.http_with_token(models.path()));
        Self {
            daemon,
            scripts: scripts.display().to_string(),
            _models: models,
        }
    }
}

fn libraries_are_served(python: &Python, libraries: &[&str]) {
    let ground = Scripted::start(python);
    let arguments = [
        "--url",
        &ground.daemon.url(),
        "--token",
        HTTP_TOKEN,
        "--scripts",
        &ground.scripts,
        "--libraries",
        &libraries.join(","),
        "--models",
        "fast,slow",
    ];
    let served = python.run("agent_libraries.py", &arguments);
    let expected = libraries
        .iter()
        .flat_map(|library| [format!("{library} fast"), format!("{library} slow")]);
    assert_eq!(
        served.lines().collect::<Vec<_>>(),
        expected.collect::<Vec<_>>()
    );
    ground.daemon.stop();
}

#[test]
fn agents_libraries_are_served() {
    let modules = ["agents", "pydantic_ai", "langchain_openai", "gguf"];
    if let Some(python) = Python::find("agents_libraries_are_served", &modules) {
        libraries_are_served(&python, &LIBRARIES);
    }
}

#[test]
fn more_agents_libraries_are_served() {
    let test = "more_agents_libraries_are_served";
    let packages = "the packages of tests/python/requirements-agents.txt";
    if let Some(python) = Python::named(test, AGENTS_PYTHON_ENV, packages) {
        libraries_are_served(&python, &MORE_LIBRARIES);
    }
}

/// LangChain embeds a corpus, searches it and reranks it; the order is that of the authors' code.
#[test]
fn langchain_searches_and_reranks_a_corpus() {
    let test = "langchain_searches_and_reranks_a_corpus";
    let modules = ["langchain_openai", "langchain_cohere", "numpy"];
    let Some(python) = Python::find(test, &modules) else {
        return;
    };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let encoders = fixtures::dir().join("encoders");
    let corpus = encoders.join("ranking.json").display().to_string();
    let options = Options::default().only_model_dir(&encoders);
    let daemon = Daemon::start(&options.http_with_token(dir.path()));
    let arguments = [
        "--url",
        &daemon.url(),
        "--token",
        HTTP_TOKEN,
        "--corpus",
        &corpus,
        "--encoder",
        "llama-embed",
        "--reranker",
        "modern-bert-rank",
    ];
    let found = python.run("rankings.py", &arguments);
    let found: Vec<_> = found.lines().collect();
    assert_eq!(found, ["1 5 3 8 6 0 7 4 2", "4 1 5 6 2 7 0 3 8"]);
    daemon.stop();
}

/// What is rejected of the schemas that generators write, by the keyword.
const REJECTED: [(&str, &str); 1] = [("pydantic: set_int", "#/uniqueItems")];

/// Shows the model the messages alone, and says that calls are written as JSON.
const CALLER: &str = "{%for m in messages%}{{m.content}}{%endfor%}{#<tool_call>#}";

/// Names what tests/go/schemas.go has printed, which has a library of Go.
const GO_SCHEMAS_ENV: &str = "ROCMFORGE_GO_SCHEMAS";

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
    let mut generated = node.run("schemas.mjs", &[]);
    match std::env::var_os(GO_SCHEMAS_ENV).filter(|path| !path.is_empty()) {
        Some(path) => generated += &std::fs::read_to_string(path).expect("the schemas of Go"),
        None => skip(test, &format!("tests/go/schemas.go (set {GO_SCHEMAS_ENV})")),
    }
    std::fs::write(&schemas, generated).expect("a writable directory");
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
