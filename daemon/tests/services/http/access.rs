//! Who may do what over which way.

use std::io::{Read, Write};

use rocmforged::roles::Roles;
use rocmforged::{Allowed, End};
use serde_json::json;

use crate::daemon::fixtures;
use crate::http::client::{HttpDaemon, LLAMA, tcp};

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

#[tokio::test]
async fn without_a_token_this_machine_may_use_and_not_manage() {
    let http = HttpDaemon::start().await;
    let body = json!({"model": LLAMA}).to_string();
    assert_eq!(
        tcp(http.tcp, "GET", "/v1/models", &[], "").await.status,
        200
    );
    let generate = tcp(http.tcp, "POST", "/api/generate", &[], &body).await;
    assert_eq!(generate.status, 200, "{generate:?}");
    for target in ["/models/load", "/models/unload"] {
        let refused = tcp(http.tcp, "POST", target, &[], &body).await;
        assert_eq!(refused.status, 403);
        assert_eq!(refused.json()["error"]["code"], "ROLE_MISSING");
        assert_eq!(refused.json()["error"]["details"]["role"], "manage");
        let connection = &refused.headers["connection"];
        assert_eq!(connection, "close", "the body was not read");
    }
    // A page of another site, and a name that was made to lead here.
    for header in [
        ("origin", "https://example.com"),
        ("host", "example.com:8080"),
    ] {
        let refused = tcp(http.tcp, "POST", "/api/generate", &[header], &body).await;
        assert_eq!(refused.status, 403, "{header:?}");
        let message = refused.json()["error"].as_str().unwrap().to_owned();
        assert!(message.contains("http_token_file"), "{message}");
    }
    let page = [
        ("origin", "http://localhost:3000"),
        ("host", "127.0.0.1:8080"),
    ];
    assert_eq!(
        tcp(http.tcp, "POST", "/api/generate", &page, &body)
            .await
            .status,
        200
    );
    assert_eq!(http.stop().await, End::Drained);
}

/// Pages of apps and of editors, and the name that containers have for this machine.
#[tokio::test]
async fn origins_and_hosts_that_are_allowed_need_no_token() {
    let allowed = Allowed {
        origins: vec![
            "app://obsidian.md".to_owned(),
            "vscode-webview://*".to_owned(),
        ],
        hosts: vec!["host.docker.internal".to_owned()],
    };
    let dirs = [fixtures()];
    let http = HttpDaemon::start_of(&dirs, (None, allowed), Roles::default(), Vec::new()).await;
    let get = async |header| tcp(http.tcp, "GET", "/v1/models", &[header], "").await;
    for header in [
        ("origin", "app://obsidian.md"),
        ("origin", "vscode-webview://1f2e3d"),
        ("host", "host.docker.internal:8080"),
    ] {
        let reply = get(header).await;
        assert_eq!(reply.status, 200, "{header:?}: {reply:?}");
        let readable = reply.headers.get("access-control-allow-origin");
        assert_eq!(readable.is_some(), header.0 == "origin", "{header:?}");
    }
    for (header, setting) in [
        (("origin", "chrome-extension://abc"), "http_allow_origins"),
        (("origin", "app://obsidian.md.evil"), "http_allow_origins"),
        (("host", "docker.internal"), "http_allow_hosts"),
    ] {
        let refused = get(header).await;
        assert_eq!(refused.status, 403, "{header:?}: {refused:?}");
        let error = &refused.json()["error"];
        assert_eq!(error["details"]["setting"], setting);
        assert!(
            error["message"].as_str().unwrap().contains(setting),
            "{error}"
        );
    }
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn who_is_refused_before_a_large_body_came_reads_why() {
    let http = HttpDaemon::start_with(Some(TOKEN), Roles::default()).await;
    let tcp = http.tcp;
    // What fits no buffer of a connection.
    let body = vec![b' '; 8 << 20];
    for (token, target, status) in [
        ("wrong", "/v1/completions", "401"),
        (TOKEN, "/nothing", "404"),
        (TOKEN, "/v1/models", "405"),
        (TOKEN, "/models/load", "413"),
    ] {
        let body = body.clone();
        let asked = tokio::task::spawn_blocking(move || {
            let mut stream = std::net::TcpStream::connect(tcp)?;
            write!(
                stream,
                "POST {target} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nauthorization: Bearer {token}\r\n\
                 content-length: {}\r\n\r\n",
                body.len()
            )?;
            stream.write_all(&body)?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer)?;
            std::io::Result::Ok(answer)
        });
        let answer = asked.await.unwrap();
        let answer = answer.unwrap_or_else(|error| panic!("{target}: {error}"));
        assert_eq!(answer.split(' ').nth(1), Some(status), "{answer}");
    }
    assert_eq!(http.stop().await, End::Drained);
}

/// What a browser asks before a page sends a request.
const PREFLIGHT: [(&str, &str); 2] = [
    ("access-control-request-method", "POST"),
    (
        "access-control-request-headers",
        "authorization,content-type",
    ),
];

#[tokio::test]
async fn pages_that_are_let_in_may_read_answers_and_others_may_not() {
    let body = json!({"model": LLAMA}).to_string();
    let asks = |origin: &'static str| -> Vec<_> {
        [("origin", origin)].into_iter().chain(PREFLIGHT).collect()
    };
    let http = HttpDaemon::start().await;
    let page = "http://localhost:3000";
    let allowed = tcp(http.tcp, "OPTIONS", "/api/generate", &asks(page), "").await;
    assert_eq!(allowed.status, 204, "{allowed:?}");
    assert_eq!(allowed.headers["access-control-allow-origin"], page);
    assert_eq!(
        allowed.headers["access-control-allow-methods"],
        "GET, POST, DELETE"
    );
    let headers = &allowed.headers["access-control-allow-headers"];
    assert_eq!(headers, "authorization,content-type");
    for (target, status) in [
        ("/api/generate", 200),
        ("/models/load", 403),
        ("/nothing", 404),
    ] {
        let answer = tcp(http.tcp, "POST", target, &[("origin", page)], &body).await;
        assert_eq!(answer.status, status, "{answer:?}");
        assert_eq!(answer.headers["access-control-allow-origin"], page);
        let reads = answer.headers["access-control-expose-headers"].to_str();
        assert!(reads.unwrap().contains("retry-after"), "{answer:?}");
    }
    let large = "x".repeat(rocmforged::REQUEST_MAX_BYTES + 1);
    let refused = tcp(http.tcp, "POST", "/api/show", &[("origin", page)], &large).await;
    assert_eq!(refused.status, 413);
    assert_eq!(refused.headers["access-control-allow-origin"], page);
    let foreign = "https://example.com";
    for (method, target) in [
        ("OPTIONS", "/api/generate"),
        ("GET", "/health"),
        ("POST", "/api/tags"),
    ] {
        let refused = tcp(http.tcp, method, target, &asks(foreign), "").await;
        let expected = if target == "/health" { 200 } else { 403 };
        assert_eq!(refused.status, expected, "{refused:?}");
        assert!(!refused.headers.contains_key("access-control-allow-origin"));
    }
    // Whoever asks for no page gets no leave for one.
    let plain = tcp(http.tcp, "OPTIONS", "/api/tags", &PREFLIGHT, "").await;
    assert_eq!(plain.status, 405, "{plain:?}");
    assert_eq!(http.stop().await, End::Drained);

    // With a token a page is let in that brings it; its question brings none.
    let http = HttpDaemon::start_with(Some(TOKEN), Roles::default()).await;
    let allowed = tcp(http.tcp, "OPTIONS", "/v1/models", &asks(foreign), "").await;
    assert_eq!(allowed.status, 204, "{allowed:?}");
    assert!(allowed.text.is_empty());
    assert_eq!(allowed.headers["access-control-allow-origin"], foreign);
    let bearer = format!("Bearer {TOKEN}");
    let headers = [("origin", foreign), ("authorization", bearer.as_str())];
    let answer = tcp(http.tcp, "GET", "/v1/models", &headers, "").await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.headers["access-control-allow-origin"], foreign);
    // A page that brings none, or a wrong one, reads why it is refused.
    for headers in [
        vec![headers[0]],
        vec![headers[0], ("authorization", "Bearer wrong")],
    ] {
        let refused = tcp(http.tcp, "GET", "/v1/models", &headers, "").await;
        assert_eq!(refused.status, 401);
        assert_eq!(refused.headers["access-control-allow-origin"], foreign);
    }
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn with_a_token_nothing_but_health_goes_without_it() {
    let http = HttpDaemon::start_with(Some(TOKEN), Roles::default()).await;
    assert_eq!(tcp(http.tcp, "GET", "/health", &[], "").await.status, 200);
    let routes = [
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
        ("GET", "/api/tags"),
        ("GET", "/nothing"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/messages"),
        ("POST", "/api/chat"),
        ("POST", "/models/unload"),
    ];
    for (method, target) in routes {
        for headers in [
            vec![],
            vec![("authorization", "Bearer wrong")],
            vec![("x-api-key", "wrong")],
        ] {
            let refused = tcp(http.tcp, method, target, &headers, "{}").await;
            assert_eq!(refused.status, 401, "{target}: {refused:?}");
            assert_eq!(refused.headers["www-authenticate"], "Bearer");
            let error = refused.json()["error"].clone();
            match target {
                "/v1/messages" => assert_eq!(error["type"], "authentication_error"),
                path if path.starts_with("/api/") => assert!(error.is_string()),
                _ => assert_eq!(error["code"], "invalid_api_key"),
            }
        }
    }
    let body = json!({"model": LLAMA}).to_string();
    let bearer = format!("Bearer {TOKEN}");
    let load = tcp(
        http.tcp,
        "POST",
        "/models/load",
        &[("authorization", &bearer)],
        &body,
    )
    .await;
    assert_eq!(load.status, 200, "{load:?}");
    // Names of other machines are fine for who has the token.
    let headers = [("x-api-key", TOKEN), ("host", "models.example.com")];
    let unload = tcp(http.tcp, "POST", "/models/unload", &headers, &body).await;
    assert_eq!(unload.status, 200, "{unload:?}");
    // The Unix socket knows its callers.
    assert_eq!(http.get("/v1/models").await.status, 200);
    assert_eq!(http.stop().await, End::Drained);
}
