//! SIGHUP and the call: what is reloaded, what is not and says so, and what
//! systemd is told meanwhile.

use std::fs::{self, File, Permissions};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::time::Instant;

use hyper_util::rt::TokioIo;
use nix::sys::signal::Signal;
use rocmforge_proto::v1;
use rocmforge_proto::v1::models_client::ModelsClient;
use rocmforge_proto::v1::server_client::ServerClient;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};
use tonic_types::StatusExt;

use crate::program::{Daemon, PATIENCE, again, host, said, start_logging_to};

const FIRST: &str = "first-token-0123456789";
const SECOND: &str = "second-token-0123456789";

pub(crate) fn write_token(path: &Path, token: &str) {
    fs::write(path, token).unwrap();
    fs::set_permissions(path, Permissions::from_mode(0o600)).unwrap();
}

/// A free port of this machine, free again for the daemon.
pub(crate) fn free_address() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().to_string()
}

/// The status and the body of a request with a token.
fn request(address: &str, token: &str, head: &str, body: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let length = body.len();
    write!(
        stream,
        "{head} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\nconnection: close\r\n\
         content-length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let status = text.split(' ').nth(1).unwrap().parse().unwrap();
    let body = text.split_once("\r\n\r\n").unwrap().1.to_owned();
    (status, body)
}

/// Sends SIGHUP and waits for the end of the reload, as systemd does.
pub(crate) fn reload(daemon: &Daemon, notify: &UnixDatagram) {
    daemon.signal(Signal::SIGHUP);
    let begun = said(notify);
    assert!(
        begun.contains("RELOADING=1") && begun.contains("MONOTONIC_USEC="),
        "{begun}"
    );
    assert!(said(notify).contains("READY=1"));
}

/// Waits until the log has these words in one line, and gives it.
pub(crate) fn logged(log: &Path, words: &[&str]) -> String {
    let give_up = Instant::now() + PATIENCE;
    loop {
        let text = fs::read_to_string(log).unwrap();
        let mut lines = text.lines();
        let found = lines.find(|line| words.iter().all(|word| line.contains(word)));
        if let Some(found) = found {
            return found.to_owned();
        }
        assert!(
            Instant::now() < give_up,
            "no line with {words:?} in\n{text}"
        );
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

#[test]
fn a_reload_takes_filter_token_and_models_and_names_the_rest() {
    let dir = tempfile::tempdir().unwrap();
    let (config, log) = (dir.path().join("config.toml"), dir.path().join("log"));
    let (token, drop_ins) = (dir.path().join("token"), dir.path().join("conf.d"));
    let fixtures = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
    let fixtures = fixtures.canonicalize().unwrap();
    let address = free_address();
    fs::create_dir(&drop_ins).unwrap();
    write_token(&token, FIRST);
    let settings = |log: &str, queue: u32| {
        let text = format!(
            "log = \"{log}\"\nqueue_capacity = {queue}\nhttp_listen = \"{address}\"\nhttp_token_file = {token:?}\n"
        );
        fs::write(&config, text).unwrap();
    };
    let declare = |name: &str, file: &str, alias: &str| {
        let path = fixtures.join(file);
        let text = format!(
            "[[model]]\nname = \"{name}\"\npath = {path:?}\naliases = [\"{alias}\"]\npin = true\npreload = true\n"
        );
        fs::write(drop_ins.join("10-models.toml"), text).unwrap();
    };
    settings("warn", 16);
    declare("small", "tiny-llama-Q4_K_M.gguf", "gpt-4o");
    let mut command = host(dir.path(), &dir.path().join("s"));
    command.arg("--config").arg(&config);
    command.arg("--model-dir").arg(&fixtures);
    let file = File::create(&log).unwrap();
    let (mut daemon, notify) = start_logging_to(dir.path(), &mut command, file);

    let ask = |token: &str, model: &str| {
        let body = format!(r#"{{"model": "{model}", "prompt": "Once", "max_tokens": 2}}"#);
        request(&address, token, "POST /v1/completions", &body)
    };
    let (status, answer) = ask(FIRST, "gpt-4o");
    assert_eq!(status, 200, "{answer}");
    assert_eq!(ask(SECOND, "gpt-4o").0, 401);
    let (_, listed) = request(&address, FIRST, "GET /v1/models", "");
    assert!(listed.contains(r#""id":"gpt-4o""#) && listed.contains(r#""root":"small""#));
    logged(&log, &["management", "Preload", "small", "code=Ok"]);

    // All of it changes at once.
    settings("info", 17);
    write_token(&token, SECOND);
    declare("other", "tiny-qwen3-Q8_0.gguf", "gpt-5");
    reload(&daemon, &notify);
    logged(&log, &["reloaded", "setting=\"log\""]);
    logged(&log, &["reloaded", "setting=\"http_token_file\""]);
    logged(
        &log,
        &[
            "not reloaded",
            "setting=\"queue_capacity\"",
            "running=16",
            "configured=17",
        ],
    );
    logged(&log, &["no longer declared", "small", "is_loaded=true"]);
    assert_eq!(
        ask(FIRST, "gpt-5").0,
        401,
        "the first token is none any more"
    );
    let (status, answer) = ask(SECOND, "gpt-5");
    assert_eq!(status, 200, "{answer}");
    assert_eq!(ask(SECOND, "gpt-4o").0, 404, "the alias is gone");
    assert_eq!(ask(SECOND, "small").0, 200, "and its model stays");

    // An alias wins over a model that is loaded under its name, which stays behind it.
    let says = |model: &str| {
        let body = format!(
            r#"{{"model": "{model}", "prompt": "Once", "max_tokens": 8, "temperature": 0}}"#
        );
        let (status, answer) = request(&address, SECOND, "POST /v1/completions", &body);
        assert_eq!(status, 200, "{answer}");
        let answer: serde_json::Value = serde_json::from_str(&answer).unwrap();
        answer["choices"][0]["text"].as_str().unwrap().to_owned()
    };
    let (small, other) = (says("small"), says("other"));
    assert_ne!(small, other);
    declare("other", "tiny-qwen3-Q8_0.gguf", "small");
    reload(&daemon, &notify);
    logged(
        &log,
        &["the alias wins", "alias=\"small\"", "model=\"other\""],
    );
    assert_eq!(says("small"), other);
    // Of the name is told what answers to it, once, and not what it hides.
    let (_, one) = request(&address, SECOND, "GET /v1/models/small", "");
    let one: serde_json::Value = serde_json::from_str(&one).unwrap();
    assert_eq!(one["root"], "other", "{one}");
    let (_, listed) = request(&address, SECOND, "GET /v1/models", "");
    assert_eq!(listed.matches(r#""id":"small""#).count(), 1, "{listed}");
    // The file of the hidden model has its own name again, under which it is asked for.
    let own = r#""id":"tiny-llama-Q4_K_M""#;
    assert_eq!(listed.matches(own).count(), 1, "{listed}");
    assert_eq!(says("tiny-llama-Q4_K_M"), small);
    declare("other", "tiny-qwen3-Q8_0.gguf", "gpt-5");
    reload(&daemon, &notify);
    assert_eq!(says("small"), small, "it stayed loaded");

    // A limit counts from the next request on, and a later reload takes it away.
    let limit = drop_ins.join("15-limit.toml");
    let text = "[[limit]]\nfor = [\"token:default\"]\nprompt_bytes = 3\n";
    fs::write(&limit, text).unwrap();
    reload(&daemon, &notify);
    let (status, answer) = ask(SECOND, "gpt-5");
    assert!(
        status == 413 && answer.contains("prompt_bytes = 3"),
        "{answer}"
    );
    fs::remove_file(&limit).unwrap();
    reload(&daemon, &notify);
    assert_eq!(ask(SECOND, "gpt-5").0, 200);

    // What cannot be used changes nothing.
    fs::write(
        drop_ins.join("20-bad.toml"),
        "log = \"debug\"\nn_ctx_max = \"none\"\n",
    )
    .unwrap();
    reload(&daemon, &notify);
    let line = logged(&log, &["nothing was reloaded"]);
    assert!(
        line.contains("n_ctx_max") && line.contains("20-bad.toml"),
        "{line}"
    );
    assert_eq!(ask(SECOND, "gpt-5").0, 200);
    daemon.signal(Signal::SIGTERM);
    assert_eq!(daemon.wait(), Some(0));
}

/// With settings as they were.
#[test]
fn a_reload_loads_a_declared_file_that_changed_in_place_anew() {
    let dir = tempfile::tempdir().unwrap();
    let (config, log) = (dir.path().join("config.toml"), dir.path().join("log"));
    let (token, models) = (dir.path().join("token"), dir.path().join("models"));
    let fixtures = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
    let (path, address) = (models.join("m.gguf"), free_address());
    fs::create_dir(&models).unwrap();
    fs::copy(fixtures.join("tiny-llama-Q4_K_M.gguf"), &path).unwrap();
    write_token(&token, FIRST);
    let text = format!(
        "http_listen = \"{address}\"\nhttp_token_file = {token:?}\n[[model]]\nname = \"m\"\npath = {path:?}\n"
    );
    fs::write(&config, text).unwrap();
    let mut command = host(dir.path(), &dir.path().join("s"));
    command.arg("--config").arg(&config);
    command.arg("--model-dir").arg(&models);
    let (daemon, notify) = start_logging_to(dir.path(), &mut command, File::create(&log).unwrap());
    let ask = || {
        let body = r#"{"model": "m", "prompt": "Once", "max_tokens": 2}"#;
        request(&address, FIRST, "POST /v1/completions", body)
    };
    assert_eq!(ask().0, 200);
    let other = fs::read(fixtures.join("tiny-qwen3-Q8_0.gguf")).unwrap();
    fs::write(&path, other).unwrap();
    reload(&daemon, &notify);
    let (status, answer) = ask();
    assert_eq!(status, 200, "{answer}");
    logged(&log, &["m.gguf", "loaded again"]);
}

/// A connection to the daemon.
async fn channel(socket: &Path) -> Channel {
    let path = socket.to_owned();
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let endpoint = Endpoint::from_static("http://rocmforged");
    endpoint.connect_with_connector(connector).await.unwrap()
}

/// The daemon's answer to a call for a reload.
async fn call(socket: &Path) -> Result<v1::ReloadResponse, Status> {
    let mut server = ServerClient::new(channel(socket).await);
    let answer = server.reload(v1::ReloadRequest {}).await;
    answer.map(tonic::Response::into_inner)
}

#[tokio::test]
async fn a_call_reloads_and_is_told_what_was_taken_and_what_was_not() {
    let dir = tempfile::tempdir().unwrap();
    let (config, log) = (dir.path().join("config.toml"), dir.path().join("log"));
    let socket = dir.path().join("s");
    let write = |text: &str| fs::write(&config, text).unwrap();
    write("log = \"info\"\nqueue_capacity = 16\n");
    let mut command = host(dir.path(), &socket);
    command.arg("--config").arg(&config);
    let file = File::create(&log).unwrap();
    let (mut daemon, notify) = start_logging_to(dir.path(), &mut command, file);

    let nothing = call(&socket).await.unwrap();
    assert_eq!(nothing, v1::ReloadResponse::default());
    // systemd is told as with a signal.
    assert!(said(&notify).contains("RELOADING=1"));
    assert!(said(&notify).contains("READY=1"));

    let absent = dir.path().join("absent.gguf");
    let model = format!("[[model]]\nname = \"absent\"\npath = {absent:?}\n");
    let limit = "[[limit]]\nfor = [\"*\"]\nrunning = 3\n";
    write(&format!(
        "log = \"debug\"\nqueue_capacity = 17\n{model}{limit}"
    ));
    let told = call(&socket).await.unwrap();
    let change = |setting: &str, before: &str, now: &str| v1::SettingChange {
        setting: setting.to_owned(),
        before: before.to_owned(),
        now: now.to_owned(),
        reason: String::new(),
    };
    assert_eq!(
        told.taken,
        [
            change("log", "info", "debug"),
            change("model", "", "absent"),
            change("limit", "", ""),
        ]
    );
    let [queue, model] = &told.not_taken[..] else {
        panic!("{told:?}");
    };
    assert!(queue.reason.contains("started again"), "{queue:?}");
    let reason = queue.reason.clone();
    let expected = change("queue_capacity", "16", "17");
    assert_eq!(*queue, v1::SettingChange { reason, ..expected });
    assert_eq!((&*model.setting, &*model.now), ("model", "absent"));
    assert!(model.reason.contains("absent.gguf"), "{model:?}");
    let audit = ["management", "rpc=\"Reload\"", "uid=", "code="];
    assert!(logged(&log, &audit).contains("code=Ok"));

    // What cannot be used changes nothing, and says why.
    write("log = \"error\"\nn_ctx_max = \"none\"\n");
    let refused = call(&socket).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    for word in ["nothing was reloaded", "n_ctx_max", "config.toml"] {
        assert!(refused.message().contains(word), "{refused}");
    }
    let details = refused.get_error_details();
    let reason = details.error_info().map(|info| info.reason.clone());
    assert_eq!(reason.as_deref(), Some("SETTINGS_UNUSABLE"));
    logged(
        &log,
        &["management", "rpc=\"Reload\"", "FailedPrecondition"],
    );

    // What is in force is what the last good files said.
    write("log = \"info\"\n");
    let told = call(&socket).await.unwrap();
    assert_eq!(
        told.taken,
        [
            change("log", "debug", "info"),
            change("model", "absent", ""),
            change("limit", "", ""),
        ]
    );
    daemon.signal(Signal::SIGTERM);
    assert_eq!(daemon.wait(), Some(0));
}

#[tokio::test]
async fn what_a_loaded_model_does_not_take_of_a_reload_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let (config, models) = (dir.path().join("config.toml"), dir.path().join("models"));
    let (path, socket) = (models.join("m.gguf"), dir.path().join("s"));
    let fixtures = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
    fs::create_dir(&models).unwrap();
    fs::copy(fixtures.join("tiny-llama-Q4_K_M.gguf"), &path).unwrap();
    let template = dir.path().join("template");
    fs::write(&template, "{{ messages }}").unwrap();
    let declare = |more: &str| {
        let text = format!("[[model]]\nname = \"m\"\npath = {path:?}\n{more}");
        fs::write(&config, text).unwrap();
    };
    declare("");
    let mut command = host(dir.path(), &socket);
    command.arg("--config").arg(&config);
    command.arg("--model-dir").arg(&models);
    let log = File::create(dir.path().join("log")).unwrap();
    let (_daemon, notify) = start_logging_to(dir.path(), &mut command, log);
    // The daemon waits where nobody takes what it tells systemd, which is twice for a reload.
    std::thread::spawn(move || while again(|| notify.recv(&mut [0; 256])).is_ok() {});
    let other = format!("template = {template:?}\npin = true\n");
    // Each with how what is said of it begins, or that nothing is.
    for (more, words) in [
        (&*other, Some("template, pin of")),
        // The files are as they were, and so is what is loaded.
        (&other, Some("template, pin of")),
        (
            "pin = true\ntemperature = 0.5\npreload = true\n",
            Some("pin, preload of"),
        ),
        // As it was loaded, whatever was declared between.
        ("", None),
        ("temperature = 0.5\n", None),
        ("draft = \"absent\"\n", Some("draft of")),
    ] {
        declare(more);
        let told = call(&socket).await.unwrap();
        let reasons: Vec<_> = told
            .not_taken
            .iter()
            .map(|c| (&*c.now, &*c.reason))
            .collect();
        match (&reasons[..], words) {
            ([], None) => {}
            ([("m", reason)], Some(words)) => {
                assert!(reason.starts_with(words), "{reason}");
                assert!(reason.contains("unload it"), "{reason}");
            }
            _ => panic!("{more}: {told:?}"),
        }
    }
    // Loaded by hand, it is as whoever did so wanted it.
    let mut client = ModelsClient::new(channel(&socket).await);
    let name = "m".to_owned();
    let request = v1::UnloadRequest { name, force: true };
    client.unload(request).await.unwrap();
    let request = v1::LoadRequest {
        name: "m".to_owned(),
        path: path.to_str().unwrap().to_owned(),
        ..v1::LoadRequest::default()
    };
    let mut steps = client.load(request).await.unwrap().into_inner();
    while steps.message().await.unwrap().is_some() {}
    declare("pin = true\n");
    let told = call(&socket).await.unwrap();
    assert!(told.not_taken.is_empty(), "{told:?}");
    // Its file is gone: nothing can be loaded in its place.
    fs::remove_file(&path).unwrap();
    declare("draft = \"absent\"\ntemperature = 0.5\n");
    let told = call(&socket).await.unwrap();
    let [change] = &told.not_taken[..] else {
        panic!("{told:?}");
    };
    assert!(
        change.reason.contains("is not there") && change.reason.contains("stays"),
        "{change:?}"
    );
}
