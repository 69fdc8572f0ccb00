//! Prometheus' text format.

use std::fmt::Write as _;
use std::sync::atomic::Ordering;

use rocmforge_service::measured::Histogram;

use super::Source;
use super::metric::{Kind, Metric, Value};

/// The label by which vLLM distinguishes models.
pub(super) const MODEL_NAME: &str = "model_name";
/// The label by which clients are distinguished: `user:UID`, `token:NAME` or `local`.
pub(super) const PEER: &str = "peer";

/// The lines of one metric.
pub(super) struct Lines<'a> {
    text: &'a mut String,
    name: &'static str,
}

impl Lines<'_> {
    /// Adds a value with these labels.
    pub(super) fn add(&mut self, labels: &[(&str, &str)], value: f64) {
        self.line("", labels, value);
    }

    fn line(&mut self, suffix: &str, labels: &[(&str, &str)], value: f64) {
        self.text.push_str(self.name);
        self.text.push_str(suffix);
        for (i, (label, text)) in labels.iter().enumerate() {
            self.text.push(if i == 0 { '{' } else { ',' });
            // Writing to a String does not fail.
            let _ = write!(self.text, "{label}=\"{}\"", escaped(text));
        }
        if !labels.is_empty() {
            self.text.push('}');
        }
        let _ = writeln!(self.text, " {value}");
    }

    fn histogram(&mut self, model: &str, of: &Histogram) {
        let (below, all, sum_s) = of.read();
        for (bound, count) in below {
            let bound = bound.to_string();
            let labels = [(MODEL_NAME, model), ("le", bound.as_str())];
            self.line("_bucket", &labels, count as f64);
        }
        self.line(
            "_bucket",
            &[(MODEL_NAME, model), ("le", "+Inf")],
            all as f64,
        );
        self.line("_sum", &[(MODEL_NAME, model)], sum_s);
        self.line("_count", &[(MODEL_NAME, model)], all as f64);
    }
}

/// Writes a metric, if it has a value.
pub(super) fn write(metric: &Metric, source: &Source<'_>, text: &mut String) {
    let maybe = match metric.value {
        Value::Maybe(value) => value(source),
        _ => None,
    };
    if matches!(metric.value, Value::Maybe(_)) && maybe.is_none() {
        return;
    }
    let name = metric.name;
    let kind = match metric.kind {
        Kind::Gauge => "gauge",
        Kind::Counter => "counter",
        Kind::Histogram => "histogram",
    };
    // Writing to a String does not fail.
    let _ = writeln!(text, "# HELP {name} {}\n# TYPE {name} {kind}", metric.help);
    let mut lines = Lines { text, name };
    match metric.value {
        Value::One(value) => lines.add(&[], value(source)),
        Value::Maybe(_) => maybe.into_iter().for_each(|value| lines.add(&[], value)),
        Value::OfModel(value) => {
            for status in &source.snapshot.models {
                lines.add(&[("model", status.model.name())], value(status));
            }
        }
        Value::OfPeer(value) => {
            for peer in &source.peers {
                lines.add(&[(PEER, &peer.peer.to_string())], value(source, peer));
            }
        }
        Value::OfRecord(count) => {
            for (model, record) in &source.records {
                let n = count(record).load(Ordering::Relaxed);
                lines.add(&[(MODEL_NAME, model)], n as f64);
            }
        }
        Value::Times(times) => {
            for (model, record) in &source.records {
                lines.histogram(model, times(record));
            }
        }
        Value::Rows(rows) => rows(source, &mut lines),
    }
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_escaped_and_values_follow() {
        let mut text = String::new();
        let mut lines = Lines {
            text: &mut text,
            name: "b",
        };
        lines.add(&[], 1.5);
        lines.add(&[("x", "q\"\\\n"), ("y", "z")], 2.0);
        assert_eq!(text, "b 1.5\nb{x=\"q\\\"\\\\\\n\",y=\"z\"} 2\n");
    }
}
