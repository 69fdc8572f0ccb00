//! The Grafana dashboard and the alert rules ask for what the daemon prints, and Prometheus'
//! own tool takes the rules.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::Command;

use rocmforge_fake_hip::Fake;
use rocmforge_tests::daemon::{Daemon, Options, PATIENCE};
use rocmforge_tests::fixtures::{self, TINY_LLAMA};
use rocmforge_tests::skip;
use serde_json::Value;

/// Names promtool; given by name, it is required.
const PROMTOOL_ENV: &str = "ROCMFORGE_PROMTOOL";

/// Labels that Prometheus itself adds.
const PROMETHEUS_LABELS: [&str; 2] = ["instance", "job"];

fn dir() -> PathBuf {
    fixtures::workspace().join("packaging/monitoring")
}

/// The body of an answer with status 200.
fn http(daemon: &Daemon, request: &str, body: &str) -> String {
    let url = daemon.url();
    let mut stream = TcpStream::connect(url.trim_start_matches("http://")).expect("it listens");
    stream
        .set_read_timeout(Some(PATIENCE))
        .expect("a time above zero");
    let length = body.len();
    write!(
        stream,
        "{request} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
    )
    .expect("it reads");
    let mut answer = String::new();
    stream
        .read_to_string(&mut answer)
        .expect("it answers in UTF-8");
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    answer.split_once("\r\n\r\n").expect("a head").1.to_owned()
}

/// Each metric with its labels, as a daemon with a card prints them after two requests.
fn printed() -> BTreeMap<String, BTreeSet<String>> {
    let fake = Fake::new();
    let options = Options::on_device("hip")
        .env("ROCMFORGE_HIP_LIBRARY", fake.path())
        .env("ROCMFORGE_KERNELS", fake.images())
        .http();
    let daemon = Daemon::start(&options);
    let model = TINY_LLAMA.trim_end_matches(".gguf");
    for prompt in ["Once upon a time", "42 - 30 = ?"] {
        let body = format!(r#"{{"model": "{model}", "prompt": "{prompt}", "max_tokens": 3}}"#);
        http(&daemon, "POST /v1/completions", &body);
    }
    let text = http(&daemon, "GET /metrics", "");
    daemon.stop();
    let mut metrics = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (sample, _) = line
            .rsplit_once(' ')
            .unwrap_or_else(|| panic!("no sample: {line}"));
        let (name, labels) = sample.split_once('{').unwrap_or((sample, ""));
        metrics.insert(name.to_owned(), label_names(labels));
    }
    metrics
}

/// The names in `a="x",b=~"y"`.
fn label_names(labels: &str) -> BTreeSet<String> {
    let values = labels.split('"').step_by(2);
    values
        .map(|between| between.trim_matches(|c: char| !(c.is_alphanumeric() || c == '_')))
        .filter(|name| !name.is_empty())
        .map(str::to_owned)
        .collect()
}

/// Each of our metrics in an expression, with the labels that it is selected by.
fn selected(expression: &str) -> Vec<(String, BTreeSet<String>)> {
    let is_name = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    let mut found = Vec::new();
    let mut rest = expression;
    while let Some(at) = rest.find(is_name) {
        let end = rest[at..]
            .find(|c| !is_name(c))
            .map_or(rest.len(), |n| at + n);
        let name = &rest[at..end];
        rest = &rest[end..];
        if name.starts_with("vllm:") || name.starts_with("rocmforge_") {
            let labels = rest.strip_prefix('{').and_then(|rest| rest.split_once('}'));
            let labels = labels.map_or_else(BTreeSet::new, |(labels, _)| label_names(labels));
            found.push((name.to_owned(), labels));
        }
    }
    found
}

/// Every text of the dashboard that Prometheus is asked.
fn expressions(value: &Value, into: &mut Vec<String>) {
    match value {
        Value::Array(values) => values.iter().for_each(|value| expressions(value, into)),
        Value::Object(members) => {
            for (key, value) in members {
                match value {
                    Value::String(text)
                        if ["expr", "query", "definition"].contains(&key.as_str()) =>
                    {
                        into.push(text.clone())
                    }
                    value => expressions(value, into),
                }
            }
        }
        _ => {}
    }
}

#[test]
fn dashboard_and_alerts_ask_for_what_is_printed() {
    let printed = printed();
    let dashboard = std::fs::read_to_string(dir().join("dashboard.json")).expect("it is committed");
    let dashboard: Value = serde_json::from_str(&dashboard).expect("JSON");
    let mut asked = Vec::new();
    expressions(&dashboard, &mut asked);
    let panels = dashboard["panels"].as_array().expect("a list of panels");
    let charts = panels.iter().filter(|panel| panel["type"] != "row").count();
    assert!(
        asked.len() >= charts,
        "{} expressions, {charts} panels",
        asked.len()
    );
    let ids: BTreeSet<_> = panels.iter().map(|panel| panel["id"].as_u64()).collect();
    assert_eq!(ids.len(), panels.len(), "each panel has an id of its own");
    let alerts = std::fs::read_to_string(dir().join("alerts.yaml")).expect("it is committed");
    asked.push(alerts);
    let mut names = BTreeSet::new();
    for (name, labels) in asked.iter().flat_map(|text| selected(text)) {
        let known = printed
            .get(&name)
            .unwrap_or_else(|| panic!("{name} is not printed"));
        for label in labels {
            let own = PROMETHEUS_LABELS.contains(&label.as_str());
            assert!(
                own || known.contains(&label),
                "{name} has no label {label}, but {known:?}"
            );
        }
        names.insert(name);
    }
    assert!(names.len() > 25, "the dashboard shows {names:?} alone");
}

#[test]
fn promtool_takes_the_alert_rules_and_their_tests() {
    let given = std::env::var_os(PROMTOOL_ENV).filter(|path| !path.is_empty());
    let program = given.clone().unwrap_or_else(|| "promtool".into());
    for arguments in [
        ["check", "rules", "alerts.yaml"],
        ["test", "rules", "alerts.test.yaml"],
    ] {
        let output = match Command::new(&program)
            .args(arguments)
            .current_dir(dir())
            .output()
        {
            Ok(output) => output,
            Err(error) => {
                assert!(given.is_none(), "{PROMTOOL_ENV}: {error}");
                let reason = format!("no promtool: {error} (Debian's package prometheus has it)");
                return skip("promtool_takes_the_alert_rules_and_their_tests", &reason);
            }
        };
        let said = [output.stdout, output.stderr].concat();
        assert!(
            output.status.success(),
            "{arguments:?}: {}",
            String::from_utf8_lossy(&said)
        );
    }
}
