//! What requests took, by model: vLLM's histograms and counts, and what a first token would take.

use std::sync::atomic::{AtomicU64, Ordering};

use rocmforge_engine::api::Snapshot;
use rocmforge_service::measured::{Histogram, Measured, Record};

use super::text::Text;

/// The label by which vLLM tells models apart.
const MODEL: &str = "model_name";

/// A part of a model's record.
type Of<T> = fn(&Record) -> &T;

/// Writes all of them.
pub(super) fn write(measured: &Measured, snapshot: &Snapshot, text: &mut Text) {
    let all = measured.all();
    let histograms: [(&str, &str, Of<Histogram>); 4] = [
        (
            "vllm:time_to_first_token_seconds",
            "Seconds from the arrival of a request to its first token",
            |r| &r.first_token,
        ),
        (
            "vllm:inter_token_latency_seconds",
            "Seconds from a token to the next one of its request",
            |r| &r.gap,
        ),
        (
            "vllm:time_per_output_token_seconds",
            "The same as vllm:inter_token_latency_seconds, under its older name",
            |r| &r.gap,
        ),
        (
            "vllm:e2e_request_latency_seconds",
            "Seconds from the arrival of a request to its end",
            |r| &r.whole,
        ),
    ];
    for (name, help, of) in histograms {
        text.head(name, "histogram", help);
        for (model, record) in &all {
            histogram(name, model, of(record), text);
        }
    }
    let counters: [(&str, &str, Of<AtomicU64>); 2] = [
        (
            "vllm:prompt_tokens_total",
            "Tokens of prompts whose first token came; one counts for each of n answers",
            |r| &r.prompt_tokens,
        ),
        (
            "vllm:generation_tokens_total",
            "Tokens that were generated, those of requests that were aborted among them",
            |r| &r.generated_tokens,
        ),
    ];
    let value = |count: &AtomicU64| count.load(Ordering::Relaxed) as f64;
    for (name, help, of) in counters {
        text.head(name, "counter", help);
        for (model, record) in &all {
            text.value(name, &[(MODEL, model)], value(of(record)));
        }
    }
    let ends = "vllm:request_success_total";
    text.head(
        ends,
        "counter",
        "Requests by how they ended; abort: failed, or their clients went away",
    );
    for (model, record) in &all {
        let reasons = [
            ("stop", &record.ends.stop),
            ("length", &record.ends.length),
            ("abort", &record.ends.abort),
        ];
        for (reason, count) in reasons {
            let labels = [(MODEL, model.as_str()), ("finished_reason", reason)];
            text.value(ends, &labels, value(count));
        }
    }
    expected(measured, snapshot, text);
}

fn histogram(name: &str, model: &str, of: &Histogram, text: &mut Text) {
    let (below, all, sum_s) = of.read();
    let bucket = format!("{name}_bucket");
    for (bound, count) in below {
        let bound = bound.to_string();
        let labels = [(MODEL, model), ("le", bound.as_str())];
        text.value(&bucket, &labels, count as f64);
    }
    text.value(&bucket, &[(MODEL, model), ("le", "+Inf")], all as f64);
    text.value(&format!("{name}_sum"), &[(MODEL, model)], sum_s);
    text.value(&format!("{name}_count"), &[(MODEL, model)], all as f64);
}

fn expected(measured: &Measured, snapshot: &Snapshot, text: &mut Text) {
    if let Some(rate) = measured.upload_rate() {
        text.one(
            "rocmforge_measured_upload_bytes_per_second",
            "gauge",
            "Bytes a second at which absent weights came, by the delay of first tokens that waited \
             for them (mean of the latest, each counts a quarter)",
            rate,
        );
    }
    let name = "rocmforge_model_expected_first_token_seconds";
    text.head(
        name,
        "gauge",
        "Seconds to the first token of a request that comes now and waits for no other: bytes of \
         the model's weights that are not on the device, by the measured upload rate, and the time \
         of a prompt as measured with all weights there (of another model, by bytes of weights, \
         before one of its own was). No line before either was measured",
    );
    for status in &snapshot.models {
        if let Some(seconds) = measured.expected_first_token_s(status) {
            text.value(name, &[("model", status.model.name())], seconds);
        }
    }
}
