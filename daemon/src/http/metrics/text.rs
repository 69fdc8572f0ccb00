//! Lines of Prometheus' text format.

use std::fmt::Write as _;

use rocmforge_engine::api::ModelStatus;

/// Lines of the exposition format.
#[derive(Debug, Default)]
pub(super) struct Text(String);

impl Text {
    /// What was written.
    pub(super) fn into_string(self) -> String {
        self.0
    }

    pub(super) fn head(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a String does not fail.
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    pub(super) fn value(&mut self, name: &str, labels: &[(&str, &str)], value: f64) {
        self.0.push_str(name);
        for (i, (label, text)) in labels.iter().enumerate() {
            self.0.push(if i == 0 { '{' } else { ',' });
            let _ = write!(self.0, "{label}=\"{}\"", escaped(text));
        }
        if !labels.is_empty() {
            self.0.push('}');
        }
        let _ = writeln!(self.0, " {value}");
    }

    pub(super) fn one(&mut self, name: &str, kind: &str, help: &str, value: f64) {
        self.head(name, kind, help);
        self.value(name, &[], value);
    }

    pub(super) fn by_model(
        &mut self,
        name: &str,
        kind: &str,
        help: &str,
        models: &[ModelStatus],
        value: impl Fn(&ModelStatus) -> f64,
    ) {
        self.head(name, kind, help);
        for status in models {
            self.value(name, &[("model", status.model.name())], value(status));
        }
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
        let mut text = Text::default();
        text.one("a", "gauge", "help", 1.5);
        text.value("b", &[("x", "q\"\\\n"), ("y", "z")], 2.0);
        assert_eq!(
            text.0,
            "# HELP a help\n# TYPE a gauge\na 1.5\nb{x=\"q\\\"\\\\\\n\",y=\"z\"} 2\n"
        );
    }
}
