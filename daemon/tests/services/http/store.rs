//! Model files over HTTP: downloaded, copied and deleted, in the words of llama-server and of
//! Ollama; and the page of `/ui`.

#[path = "../../../crates/hub/tests/fake/mod.rs"]
mod hub;

use std::path::PathBuf;
use std::time::Duration;

use hub::{FakeHub, Fault, sha256};
use rocmforged::{End, PullConfig, ShownSetting};
use serde_json::{Value, json};

use crate::daemon::fixtures;
use crate::http::client::{HttpDaemon, LLAMA, piece, send, tcp, unix};

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// The bytes of a model that answers.
fn llama() -> Vec<u8> {
    std::fs::read(fixtures().join(format!("{LLAMA}.gguf"))).unwrap()
}

/// A daemon whose one model directory is empty, and which downloads from `hub`.
async fn start(
    hub: &FakeHub,
    token: Option<&str>,
    over_tcp: bool,
) -> (HttpDaemon, tempfile::TempDir) {
    let models = tempfile::tempdir().unwrap();
    let mut source = PullConfig {
        dir: Some(models.path().to_owned()),
        over_tcp,
        ..PullConfig::default()
    };
    let address: hyper::Uri = hub.url().parse().unwrap();
    (source.hub.hub, source.hub.registry) = (address.clone(), address);
    source.hub.spare_bytes = 0;
    source.hub.patience.first_wait = Duration::from_millis(5);
    let dirs: [PathBuf; 1] = [models.path().to_owned()];
    let http = HttpDaemon::start_pulling(&dirs, token, source, settings()).await;
    (http, models)
}

fn settings() -> Vec<ShownSetting> {
    vec![ShownSetting {
        key: "keep_free",
        value: Some("\"1GiB\"".to_owned()),
        origin: "/etc/rocmforged/config.toml".to_owned(),
        help: "GPU memory to keep free for other programs.".to_owned(),
    }]
}

async fn delete(http: &HttpDaemon, target: &str, body: &str) -> u16 {
    unix(&http.path(), "DELETE", target, &[], body).await.status
}

/// What Ollama's command line asks for `pull`, `list`, `show`, `ps`, `run`, `cp`, `stop` and `rm`,
/// in that order, as it was recorded of its version 0.13.
#[tokio::test]
async fn the_calls_of_ollamas_command_line_work() {
    let hub = FakeHub::start();
    hub.put("library/story:tiny", llama());
    let (http, models) = start(&hub, None, false).await;
    let reply = http
        .post(
            "/api/pull",
            &json!({"model": "story:tiny", "name": "story:tiny"}),
        )
        .await;
    assert_eq!(reply.status, 200, "{reply:?}");
    assert_eq!(reply.headers["content-type"], "application/x-ndjson");
    let lines = reply.lines();
    assert_eq!(lines[0]["status"], "pulling manifest");
    let digest = sha256(&llama());
    let ours = |line: &&Value| line["digest"] == format!("sha256:{digest}");
    let all = lines.iter().filter(ours).collect::<Vec<_>>();
    let total = llama().len();
    assert_eq!(all[0]["status"], format!("pulling {}", &digest[..12]));
    assert!(all.iter().all(|line| line["total"] == total), "{lines:?}");
    assert_eq!(lines.last().unwrap(), &json!({"status": "success"}));
    assert!(models.path().join("ollama/story:tiny.gguf").exists());

    let tags = http.get("/api/tags").await.json();
    assert_eq!(tags["models"][0]["name"], "story:tiny");
    assert_eq!(tags["models"][0]["size"], total);
    let show = http
        .post(
            "/api/show",
            &json!({"model": "story:tiny", "name": "story:tiny"}),
        )
        .await;
    assert_eq!(show.json()["details"]["family"], "llama");
    let ps = http.get("/api/ps").await.json();
    assert_eq!(ps["models"][0]["name"], "story:tiny");
    // `run` asks without a prompt first, so that the model is there.
    let opened = http
        .post(
            "/api/generate",
            &json!({"model": "story:tiny", "prompt": ""}),
        )
        .await;
    assert_eq!(opened.status, 200);
    let question = json!({
        "model": "story:tiny",
        "messages": [{"role": "user", "content": "42 - 30 = ?"}],
        "options": {"temperature": 0, "num_predict": 16}, "stream": false,
    });
    let answer = http.post("/api/chat", &question).await.json();
    assert_eq!(answer["message"]["content"], "42 - 30 = 12.");
    let copy = json!({"source": "story:tiny", "destination": "mine"});
    assert_eq!(http.post("/api/copy", &copy).await.status, 200);
    assert_eq!(
        http.post("/api/copy", &copy).await.status,
        400,
        "the name is taken"
    );
    let names = http.get("/api/tags").await.json();
    let names: Vec<_> = names["models"]
        .as_array()
        .unwrap()
        .iter()
        .map(|m| m["name"].clone())
        .collect();
    assert!(names.contains(&json!("mine")), "{names:?}");
    let stop = json!({"model": "story:tiny", "keep_alive": 0});
    assert_eq!(http.post("/api/generate", &stop).await.status, 200);
    assert_eq!(
        delete(&http, "/api/delete", "{\"model\":\"mine:latest\"}").await,
        200
    );
    assert!(
        models.path().join("ollama/story:tiny.gguf").exists(),
        "the copy went alone"
    );
    assert_eq!(
        delete(
            &http,
            "/api/delete",
            "{\"model\":\"story:tiny\",\"name\":\"story:tiny\"}"
        )
        .await,
        200
    );
    assert_eq!(
        delete(&http, "/api/delete", "{\"model\":\"story:tiny\"}").await,
        404
    );
    assert_eq!(std::fs::read_dir(models.path()).unwrap().count(), 0);

    hub.put("o/story-GGUF/story-Q4_K_M.gguf", llama());
    let pulled = http
        .post(
            "/api/pull",
            &json!({"model": "hf.co/o/story-GGUF:Q4_K_M", "stream": false}),
        )
        .await;
    assert_eq!(pulled.json(), json!({"status": "success"}));
    let mut asked = question.clone();
    asked["model"] = "hf.co/o/story-GGUF:Q4_K_M".into();
    assert_eq!(
        http.post("/api/chat", &asked).await.json()["message"]["content"],
        "42 - 30 = 12."
    );
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn a_download_that_fails_says_why_and_one_that_is_left_goes_on_later() {
    let hub = FakeHub::start();
    hub.put("o/r/story-Q4_K_M.gguf", llama());
    let (http, models) = start(&hub, None, false).await;
    let missing = http.post("/api/pull", &json!({"model": "o/none"})).await;
    assert_eq!(missing.status, 404, "{missing:?}");
    assert!(missing.json()["error"].as_str().unwrap().contains("o/none"));
    let odd = http.post("/api/pull", &json!({"model": "../../etc"})).await;
    assert_eq!(odd.status, 400, "{odd:?}");
    hub.fail(Fault::WrongBit, u32::MAX);
    let wrong = http.post("/api/pull", &json!({"model": "o/r"})).await;
    let last = wrong.lines().pop().unwrap();
    assert!(
        last["error"].as_str().unwrap().contains("SHA-256"),
        "{last}"
    );
    assert!(!models.path().join("o/r/story-Q4_K_M.gguf").exists());

    // A client that goes ends its download.
    hub.fail(Fault::Drip(4096, 100), u32::MAX);
    let stream = tokio::net::UnixStream::connect(http.path()).await.unwrap();
    let mut reply = send(stream, "POST", "/api/pull", &[], "{\"model\":\"o/r\"}").await;
    piece(reply.body_mut()).await.unwrap();
    drop(reply);
    hub.heal();
    let mut again = 0;
    loop {
        // Until the first one has let go of the file.
        let reply = http
            .post("/api/pull", &json!({"model": "o/r", "stream": false}))
            .await;
        if reply.status == 200 {
            break;
        }
        again += 1;
        assert!(again < 50, "{reply:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(
        std::fs::read(models.path().join("o/r/story-Q4_K_M.gguf")).unwrap(),
        llama()
    );
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn downloads_in_the_background_are_told_of_as_by_llama_server() {
    let hub = FakeHub::start();
    hub.put("o/r/story-Q4_K_M.gguf", llama());
    let (http, models) = start(&hub, None, false).await;
    let stream = tokio::net::UnixStream::connect(http.path()).await.unwrap();
    let mut events = send(stream, "GET", "/models/sse", &[], "").await;
    piece(events.body_mut()).await.unwrap();
    let begun = http.post("/models", &json!({"model": "o/r:Q4_K_M"})).await;
    assert_eq!(begun.json(), json!({"success": true}));
    let mut told = String::new();
    while !told.contains("download_finished") {
        let next = tokio::time::timeout(Duration::from_secs(30), piece(events.body_mut()));
        told +=
            &String::from_utf8_lossy(&next.await.expect("an event").expect("the stream goes on"));
        assert!(!told.contains("download_failed"), "{told}");
    }
    assert!(told.contains("\"model\":\"o/r:Q4_K_M\""), "{told}");
    let listed = http.get("/models").await.json();
    assert_eq!(listed["data"][0]["id"], "story-Q4_K_M");
    // By its name on the hub, loaded first.
    assert_eq!(
        http.post("/models/load", &json!({"model": "o/r:Q4_K_M"}))
            .await
            .status,
        200
    );
    let target = "/models?model=o/r:Q4_K_M";
    let refused = unix(&http.path(), "DELETE", target, &[], "").await;
    assert!(
        refused
            .text
            .contains("'story-Q4_K_M'; unload the model first"),
        "{refused:?}"
    );
    assert!(models.path().join("o/r/story-Q4_K_M.gguf").exists());
    let unloaded = http
        .post("/models/unload", &json!({"model": "story-Q4_K_M"}))
        .await;
    assert_eq!(unloaded.status, 200, "{unloaded:?}");
    assert_eq!(delete(&http, target, "").await, 200);
    assert!(!models.path().join("o/r/story-Q4_K_M.gguf").exists());
    assert_eq!(delete(&http, "/models?model=o/r:Q4_K_M", "").await, 404);

    // One that stalls is cancelled by its name.
    hub.fail(Fault::Drip(1024, 200), u32::MAX);
    assert_eq!(
        http.post("/models", &json!({"model": "o/r"})).await.status,
        200
    );
    let cancelled = http.post("/models/unload", &json!({"model": "o/r"})).await;
    assert_eq!(cancelled.json(), json!({"success": true}));
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn over_tcp_nobody_downloads_or_deletes_unless_it_is_switched_on() {
    let hub = FakeHub::start();
    hub.put("o/r/story-Q4_K_M.gguf", llama());
    let bearer = format!("Bearer {TOKEN}");
    let with = [("authorization", &*bearer)];
    let calls = [
        ("POST", "/models", "{\"model\":\"o/r\"}"),
        ("POST", "/api/pull", "{\"model\":\"o/r\",\"stream\":false}"),
        (
            "POST",
            "/api/copy",
            "{\"source\":\"a\",\"destination\":\"b\"}",
        ),
        ("DELETE", "/models?model=a", ""),
        ("DELETE", "/api/delete", "{\"model\":\"a\"}"),
    ];
    for token in [None, Some(TOKEN)] {
        let (http, _models) = start(&hub, token, false).await;
        let headers = if token.is_some() { &with[..] } else { &[] };
        for (method, target, body) in calls {
            let refused = tcp(http.tcp, method, target, headers, body).await;
            assert_eq!(refused.status, 403, "{method} {target} {refused:?}");
            assert!(refused.text.contains("pull_over_tcp"), "{refused:?}");
        }
        assert_eq!(http.stop().await, End::Drained);
    }
    assert!(hub.seen().is_empty(), "nobody asked the hub");
    let (http, models) = start(&hub, Some(TOKEN), true).await;
    let refused = tcp(http.tcp, calls[1].0, calls[1].1, &[], calls[1].2).await;
    assert_eq!(refused.status, 401, "without the token");
    let url = format!(
        "{{\"model\":\"{}/plain/o/r/story-Q4_K_M.gguf\"}}",
        hub.url()
    );
    let refused = tcp(http.tcp, "POST", "/models", &with, &url).await;
    assert_eq!(
        refused.status, 400,
        "any address of the network: {refused:?}"
    );
    let pulled = tcp(http.tcp, calls[1].0, calls[1].1, &with, calls[1].2).await;
    assert_eq!(pulled.json(), json!({"status": "success"}));
    assert!(models.path().join("o/r/story-Q4_K_M.gguf").exists());
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn the_page_is_given_without_a_token_and_says_nothing_without_one() {
    let hub = FakeHub::start();
    let (http, _models) = start(&hub, Some(TOKEN), false).await;
    for (target, kind) in [
        ("/ui", "text/html; charset=utf-8"),
        ("/ui/page.js", "text/javascript; charset=utf-8"),
        ("/ui/page.css", "text/css; charset=utf-8"),
    ] {
        let part = tcp(http.tcp, "GET", target, &[], "").await;
        assert_eq!(
            (part.status, part.headers["content-type"].to_str().unwrap()),
            (200, kind)
        );
        let policy = part.headers["content-security-policy"].to_str().unwrap();
        assert!(
            policy.starts_with("default-src 'none'; script-src 'self';"),
            "{policy}"
        );
        assert_eq!(part.headers["x-content-type-options"], "nosniff");
        assert!(!part.text.contains("keep_free"));
    }
    assert_eq!(
        tcp(http.tcp, "GET", "/ui/settings", &[], "").await.status,
        401
    );
    let live = tcp(http.tcp, "GET", "/ui/live", &[], "").await;
    assert_eq!(live.status, 401);
    let bearer = format!("Bearer {TOKEN}");
    let shown = tcp(
        http.tcp,
        "GET",
        "/ui/settings",
        &[("authorization", &bearer)],
        "",
    )
    .await;
    let settings = shown.json()["settings"].clone();
    assert_eq!(settings[0]["key"], "keep_free");
    assert_eq!(settings[0]["value"], "\"1GiB\"");
    assert_eq!(settings[0]["origin"], "/etc/rocmforged/config.toml");
    assert_eq!(http.stop().await, End::Drained);
}
