//! Traces of requests, as a collector of OpenTelemetry gets them.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc;

use rocmforge_tests::daemon::{Daemon, Options, PATIENCE};
use rocmforge_tests::fixtures::TINY_LLAMA;
use rocmforge_tests::python::Python;
use rocmforge_tests::session::{collect, connect, continuation, load, noise};
use serde_json::Value;

/// Names an interpreter with OpenTelemetry's messages: the packages of the other tests
/// have an earlier form of them.
const OTLP_PYTHON_ENV: &str = "ROCMFORGE_OTLP_PYTHON";

/// A collector that takes everything; gives its address and the bodies that it was sent.
fn collector() -> (String, mpsc::Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("it is bound");
    let (sender, bodies) = mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut reader = BufReader::new(stream.expect("a connection"));
            let (mut line, mut length, mut head) = (String::new(), 0, Vec::new());
            while reader.read_line(&mut line).is_ok_and(|n| n > 2) {
                if let Some(n) = line.to_lowercase().strip_prefix("content-length:") {
                    length = n.trim().parse().expect("a length");
                }
                head.push(std::mem::take(&mut line));
            }
            assert!(head[0].starts_with("POST /v1/traces HTTP/1.1"), "{head:?}");
            assert!(
                head.iter()
                    .any(|l| l.trim() == "content-type: application/json"),
                "{head:?}"
            );
            let mut body = vec![0; length];
            reader.read_exact(&mut body).expect("the whole body");
            let answer =
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}";
            reader.get_mut().write_all(answer).expect("it is read");
            if sender
                .send(String::from_utf8(body).expect("UTF-8"))
                .is_err()
            {
                return;
            }
        }
    });
    (format!("http://{address}"), bodies)
}

/// The spans of all bodies, until `n` of them are of whole requests.
fn spans(bodies: &mpsc::Receiver<String>, n: usize) -> (Vec<Value>, Vec<String>) {
    let (mut spans, mut read) = (Vec::new(), Vec::new());
    while spans
        .iter()
        .filter(|span: &&Value| span["kind"] == 2)
        .count()
        < n
    {
        let body = bodies.recv_timeout(PATIENCE).expect("more spans");
        let batch: Value = serde_json::from_str(&body).expect("JSON");
        read.push(body);
        let resource = &batch["resourceSpans"][0];
        let service = &resource["resource"]["attributes"][0];
        assert_eq!(service["key"], "service.name");
        assert_eq!(service["value"]["stringValue"], "rocmforged");
        let scoped = resource["scopeSpans"][0]["spans"].as_array();
        spans.extend(scoped.expect("spans").iter().cloned());
    }
    (spans, read)
}

fn attribute<'a>(span: &'a Value, key: &str) -> Option<&'a Value> {
    let attributes = span["attributes"].as_array()?;
    let found = attributes
        .iter()
        .find(|attribute| attribute["key"] == key)?;
    found["value"].as_object()?.values().next()
}

fn ns(span: &Value, key: &str) -> u64 {
    let text = span[key].as_str().expect("nanoseconds as text");
    text.parse().expect("a number")
}

/// What was asked over HTTP: its status line.
fn post(daemon: &Daemon, traceparent: &str, model: &str) -> String {
    let url = daemon.url();
    let mut stream = TcpStream::connect(url.trim_start_matches("http://")).expect("it listens");
    let body =
        format!(r#"{{"model": "{model}", "prompt": "Once upon a secret time", "max_tokens": 5}}"#);
    let length = body.len();
    write!(
        stream,
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\ntraceparent: {traceparent}\r\n\
         X-Request-Id: asked-{model}\r\nContent-Length: {length}\r\n\r\n{body}"
    )
    .expect("it reads");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("it answers");
    answer.lines().next().unwrap_or_default().to_owned()
}

/// Its parts follow one another from its beginning to its end.
fn check_parts(all: &[Value], whole: &Value, names: &[&str]) {
    let of_whole = |span: &&Value| span["parentSpanId"] == whole["spanId"];
    let parts: Vec<&Value> = all.iter().filter(of_whole).collect();
    let found: Vec<_> = parts
        .iter()
        .filter_map(|part| part["name"].as_str())
        .collect();
    assert_eq!(found, names);
    let mut at = ns(whole, "startTimeUnixNano");
    for part in parts {
        assert_eq!(part["traceId"], whole["traceId"]);
        assert_eq!(ns(part, "startTimeUnixNano"), at, "{part}");
        at = ns(part, "endTimeUnixNano");
    }
    assert_eq!(at, ns(whole, "endTimeUnixNano"), "{whole}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_gets_a_span_of_each_request_with_its_parts() {
    let (url, bodies) = collector();
    let options = Options::default().http().arg("--otlp-endpoint").arg(&url);
    let daemon = Daemon::start(&options);
    let trace = "0af7651916cd43dd8448eb211c80319c";
    let parent = format!("00-{trace}-b7ad6b7169203331-01");
    let name = TINY_LLAMA.trim_end_matches(".gguf");
    assert_eq!(post(&daemon, &parent, name), "HTTP/1.1 200 OK");
    assert_eq!(post(&daemon, &parent, "none"), "HTTP/1.1 404 Not Found");
    // Its caller records nothing.
    let unsampled = parent.replace("-01", "-00");
    assert_eq!(post(&daemon, &unsampled, name), "HTTP/1.1 200 OK");
    let client = connect(&daemon).await;
    load(&client, TINY_LLAMA).await;
    let request = continuation(TINY_LLAMA, "Once upon a secret time", noise(7, 1));
    let mut stream = client.generate(request).await.expect("it begins");
    collect(&mut stream).await.expect("it ends well");

    // The load at the first use is a request of its own.
    let (all, read) = spans(&bodies, 5);
    let text = read.concat();
    assert!(!text.contains("secret"), "{text}");
    let named = |name: &str| -> Vec<&Value> {
        let whole = all.iter().filter(|span| span["kind"] == 2);
        whole.filter(|span| span["name"] == name).collect()
    };
    let [good, bad] = named("POST /v1/completions")[..] else {
        panic!("{all:?}");
    };
    for span in [good, bad] {
        assert_eq!(span["traceId"], trace);
        assert_eq!(span["parentSpanId"], "b7ad6b7169203331");
    }
    assert_eq!(
        attribute(good, "gen_ai.request.model").expect("a model"),
        name
    );
    assert_eq!(
        attribute(good, "gen_ai.usage.output_tokens").expect("a count"),
        "5"
    );
    let id = attribute(good, "rocmforge.request_id").expect("an id");
    assert_eq!(*id, format!("asked-{name}"));
    assert!(good.get("status").is_none(), "{good}");
    check_parts(&all, good, &["prepare", "queue", "prompt", "decode"]);
    assert_eq!(bad["status"]["code"], 2, "{bad}");
    assert_eq!(bad["status"]["message"], "NotFound", "{bad}");
    let [own] = named("Generate")[..] else {
        panic!("{all:?}");
    };
    assert!(own.get("parentSpanId").is_none(), "{own}");
    assert_ne!(own["traceId"], trace);
    check_parts(&all, own, &["prepare", "queue", "prompt", "decode"]);
    assert_eq!(named("Load").len(), 2, "{all:?}");

    let test = "a_collector_gets_a_span: by OpenTelemetry's messages";
    if let Some(python) = Python::named(test, OTLP_PYTHON_ENV, "opentelemetry-proto") {
        let file = daemon.dir().join("spans");
        std::fs::write(&file, read.join("\n")).expect("a writable directory");
        let taken = python.run("otlp_takes.py", &[file]);
        assert_eq!(taken.trim(), format!("{} spans", all.len()));
    }
    daemon.stop();
}

#[test]
fn a_collector_that_is_not_there_hurts_nobody() {
    // A port where nobody listens: it was free a moment ago.
    let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    let url = format!("http://{}", free.expect("a free port"));
    let daemon = Daemon::start(&Options::default().http().arg("--otlp-endpoint").arg(&url));
    let name = TINY_LLAMA.trim_end_matches(".gguf");
    for _ in 0..3 {
        assert_eq!(post(&daemon, "odd", name), "HTTP/1.1 200 OK");
    }
    let ended = daemon.stop();
    assert_eq!(
        ended.log.matches("traces are not taken").count(),
        1,
        "{}",
        ended.log
    );
}

#[test]
fn a_collector_that_never_answers_hurts_nobody() {
    // The kernel takes connections and bytes for it; nobody ever reads them.
    let silent = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let url = format!("http://{}", silent.local_addr().expect("it is bound"));
    let daemon = Daemon::start(&Options::default().http().arg("--otlp-endpoint").arg(&url));
    let name = TINY_LLAMA.trim_end_matches(".gguf");
    for _ in 0..3 {
        assert_eq!(post(&daemon, "odd", name), "HTTP/1.1 200 OK");
    }
    let waiting = silent.accept().expect("the daemon connects");
    assert_eq!(post(&daemon, "odd", name), "HTTP/1.1 200 OK");
    // It ends with 0, though the last batch is never taken.
    daemon.stop();
    drop(waiting);
}
