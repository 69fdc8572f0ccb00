//! What `/metrics` says of requests, held against the rules of the text format.

use std::collections::{BTreeMap, HashSet};

use rocmforged::End;
use serde_json::json;

use crate::daemon::greedy;
use crate::http::client::{HttpDaemon, LLAMA};

/// A sample: its name with all labels in order, and its value.
type Samples = BTreeMap<String, f64>;

/// Reads a whole exposition, and refuses what a scraper would.
fn parsed(text: &str) -> Samples {
    let mut samples = Samples::new();
    let (mut helped, mut typed) = (HashSet::new(), BTreeMap::new());
    let mut closed = HashSet::new();
    let mut family = String::new();
    assert!(text.ends_with('\n'), "the last line ends");
    for line in text.lines() {
        let words: Vec<&str> = line.splitn(4, ' ').collect();
        match words.as_slice() {
            ["#", "HELP", name, help] => {
                assert!(helped.insert((*name).to_owned()), "{line}: HELP twice");
                assert!(!help.is_empty(), "{line}: no words");
            }
            ["#", "TYPE", name, kind] => {
                let before = typed.insert((*name).to_owned(), (*kind).to_owned());
                assert!(before.is_none(), "{line}: TYPE twice");
                assert!(helped.contains(*name), "{line}: no HELP before");
                assert!(["gauge", "counter", "histogram"].contains(kind), "{line}");
                closed.insert(std::mem::replace(&mut family, (*name).to_owned()));
                assert!(!closed.contains(*name), "{line}: lines of it are apart");
            }
            _ => {
                let (sample, value) = line.rsplit_once(' ').unwrap();
                let value: f64 = value.parse().unwrap_or_else(|e| panic!("{line}: {e}"));
                let name = sample.split('{').next().unwrap();
                let kind = &typed[&family];
                let suffix = name.strip_prefix(family.as_str());
                let suffix = suffix.unwrap_or_else(|| panic!("{line} is among those of {family}"));
                match kind.as_str() {
                    "histogram" => assert!(["_bucket", "_sum", "_count"].contains(&suffix)),
                    _ => assert_eq!(suffix, "", "{line}"),
                }
                if kind != "gauge" {
                    assert!(value >= 0.0, "{line}");
                }
                let before = samples.insert(sample.to_owned(), value);
                assert!(before.is_none(), "{line}: twice");
            }
        }
    }
    for (name, kind) in &typed {
        if kind == "histogram" {
            buckets_are_cumulative(name, text, &samples);
        }
    }
    samples
}

/// In the order of the lines, of each model: bounds rise, counts do not fall, the last is all.
fn buckets_are_cumulative(name: &str, text: &str, samples: &Samples) {
    let mut last: BTreeMap<&str, (f64, f64)> = BTreeMap::new();
    for line in text.lines() {
        let Some(rest) = line.strip_prefix(&format!("{name}_bucket{{")) else {
            continue;
        };
        let (labels, value) = rest.rsplit_once("\"} ").unwrap();
        let (model, bound) = labels.rsplit_once(",le=\"").unwrap();
        let bound = bound.replace("+Inf", "inf").parse::<f64>().unwrap();
        let value: f64 = value.parse().unwrap();
        if let Some((bound_before, before)) = last.insert(model, (bound, value)) {
            assert!(bound > bound_before && value >= before, "{line}");
        }
    }
    for (model, (bound, value)) in last {
        assert!(bound.is_infinite(), "{name} of {model} has no le=\"+Inf\"");
        assert_eq!(samples[&format!("{name}_count{{{model}}}")], value);
        let sum = samples[&format!("{name}_sum{{{model}}}")];
        assert!(sum.is_finite() && (value == 0.0) == (sum == 0.0), "{name}");
    }
}

fn of(name: &str) -> String {
    format!("{name}{{model_name=\"{LLAMA}\"}}")
}

#[tokio::test]
async fn requests_of_both_skins_are_in_one_histogram() {
    let http = HttpDaemon::start().await;
    let before = parsed(&http.get("/metrics").await.text);
    assert!(!before.contains_key(&of("vllm:prompt_tokens_total")));
    let expected = format!("rocmforge_model_expected_first_token_seconds{{model=\"{LLAMA}\"}}");

    let asked = json!({
        "model": LLAMA, "prompt": "Once upon a time", "max_tokens": 6, "temperature": 0,
    });
    let reply = http.post("/v1/completions", &asked).await.json();
    let usage = &reply["usage"];
    let (prompt, generated) = (
        usage["prompt_tokens"].as_f64().unwrap(),
        usage["completion_tokens"].as_f64().unwrap(),
    );
    let first = parsed(&http.get("/metrics").await.text);
    assert_eq!(first[&of("vllm:prompt_tokens_total")], prompt);
    assert_eq!(first[&of("vllm:generation_tokens_total")], generated);
    let rate = first["rocmforge_measured_upload_bytes_per_second"];
    assert!(rate > 0.0, "the first request found nothing there");

    let (_, done) = http
        .daemon
        .generate(greedy(LLAMA, "Once upon a time", 6))
        .await
        .unwrap();
    let second = parsed(&http.get("/metrics").await.text);
    for name in [
        "vllm:time_to_first_token_seconds",
        "vllm:e2e_request_latency_seconds",
    ] {
        assert_eq!(first[&of(&format!("{name}_count"))], 1.0, "{name}");
        assert_eq!(second[&of(&format!("{name}_count"))], 2.0, "{name}");
    }
    for name in [
        "vllm:inter_token_latency_seconds",
        "vllm:time_per_output_token_seconds",
    ] {
        assert_eq!(
            second[&of(&format!("{name}_count"))],
            generated + f64::from(done.generated_tokens) - 2.0,
            "{name}: one less than tokens"
        );
    }
    let (ttft, whole) = (
        second[&of("vllm:time_to_first_token_seconds_sum")],
        second[&of("vllm:e2e_request_latency_seconds_sum")],
    );
    assert!(ttft > 0.0 && ttft <= whole);
    assert_eq!(
        second[&of("vllm:generation_tokens_total")],
        generated + f64::from(done.generated_tokens)
    );
    let ends = |reason: &str| {
        let labels = format!("{{model_name=\"{LLAMA}\",finished_reason=\"{reason}\"}}");
        second[&format!("vllm:request_success_total{labels}")]
    };
    assert_eq!(
        (ends("length"), ends("stop"), ends("abort")),
        (2.0, 0.0, 0.0)
    );

    // All of it is there now: what is expected is a prompt alone.
    let warm = second[&expected];
    assert!(warm > 0.0 && warm < 60.0, "{warm}");
    let cleared = rocmforge_proto::v1::ClearRequest::default();
    http.daemon.cache().clear(cleared).await.unwrap();
    let cold = parsed(&http.get("/metrics").await.text);
    let weights = cold[&format!("rocmforge_model_weight_bytes{{model=\"{LLAMA}\"}}")];
    let rate = cold["rocmforge_measured_upload_bytes_per_second"];
    assert!(
        (cold[&expected] - (warm + weights / rate)).abs() < 1e-6,
        "{} is not {warm} + {weights} / {rate}",
        cold[&expected]
    );
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn a_request_whose_client_goes_is_counted_as_aborted() {
    let http = HttpDaemon::start().await;
    http.daemon
        .load(format!("{LLAMA}.gguf"), LLAMA)
        .await
        .unwrap();
    let mut events = http
        .daemon
        .inference()
        .generate(crate::daemon::endless(LLAMA, 1))
        .await
        .unwrap()
        .into_inner();
    events.message().await.unwrap();
    drop(events);
    let aborted =
        format!("vllm:request_success_total{{model_name=\"{LLAMA}\",finished_reason=\"abort\"}}");
    let give_up = std::time::Instant::now() + std::time::Duration::from_secs(60);
    loop {
        let samples = parsed(&http.get("/metrics").await.text);
        if samples[&aborted] == 1.0 {
            assert_eq!(samples[&of("vllm:e2e_request_latency_seconds_count")], 0.0);
            // Its prompt was computed, and tokens came.
            let (prompt, generated) = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total");
            assert!(samples[&of(prompt)] >= 1.0, "{samples:?}");
            assert!(samples[&of(generated)] >= 1.0, "{samples:?}");
            break;
        }
        assert!(std::time::Instant::now() < give_up, "it is never counted");
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    assert_eq!(http.stop().await, End::Drained);
}

/// vLLM makes a request of its own of each answer.
#[tokio::test]
async fn each_of_n_answers_counts_the_prompt_and_as_a_request() {
    let http = HttpDaemon::start().await;
    let asked = json!({
        "model": LLAMA, "prompt": "Once upon a time", "max_tokens": 6, "n": 3, "temperature": 1,
    });
    let reply = http.post("/v1/completions", &asked).await.json();
    let usage = |of: &str| reply["usage"][of].as_f64().unwrap();
    let samples = parsed(&http.get("/metrics").await.text);
    assert_eq!(
        (
            samples[&of("vllm:prompt_tokens_total")],
            samples[&of("vllm:generation_tokens_total")],
            samples[&of("vllm:time_to_first_token_seconds_count")],
            samples[&of("vllm:e2e_request_latency_seconds_count")],
        ),
        (
            3.0 * usage("prompt_tokens"),
            usage("completion_tokens"),
            3.0,
            3.0
        )
    );
    assert_eq!(http.stop().await, End::Drained);
}
