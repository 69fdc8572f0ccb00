//! What must hold besides the figures: passed, failed or skipped, with what was counted.

use serde::Serialize;

/// Most failures that a check names; all are counted.
const NAMED_MAX: usize = 20;

/// A check and what came of it.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Check {
    pub(crate) name: String,
    /// Why it was not made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) skipped: Option<String>,
    /// What was counted and seen.
    pub(crate) notes: Vec<String>,
    /// The first failures.
    pub(crate) failures: Vec<String>,
    /// All failures.
    pub(crate) n_failures: usize,
}

impl Check {
    pub(crate) fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            skipped: None,
            notes: Vec::new(),
            failures: Vec::new(),
            n_failures: 0,
        }
    }

    /// A check that `run` makes; an error of it is a failure.
    pub(crate) fn ran(
        name: impl Into<String>,
        run: impl FnOnce(&mut Self) -> anyhow::Result<()>,
    ) -> Self {
        let mut check = Self::new(name);
        if let Err(error) = run(&mut check) {
            check.fail(format!("could not be run to its end: {error:#}"));
        }
        check
    }

    /// A check that was not made.
    pub(crate) fn skipped(name: impl Into<String>, why: impl Into<String>) -> Self {
        Self {
            skipped: Some(why.into()),
            ..Self::new(name)
        }
    }

    pub(crate) fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }

    pub(crate) fn fail(&mut self, failure: impl Into<String>) {
        self.n_failures += 1;
        if self.failures.len() < NAMED_MAX {
            self.failures.push(failure.into());
        }
    }

    pub(crate) fn passed(&self) -> bool {
        self.n_failures == 0
    }

    /// As markdown.
    pub(crate) fn lines(&self) -> Vec<String> {
        let state = match (&self.skipped, self.n_failures) {
            (Some(why), _) => format!("skipped: {why}"),
            (None, 0) => "passed".to_owned(),
            (None, 1) => "**FAILED**".to_owned(),
            (None, n) => format!("**FAILED**, {n} times"),
        };
        let mut lines = vec![format!("**{}**: {state}", self.name), String::new()];
        lines.extend(self.failures.iter().map(|f| format!("- FAILED: {f}")));
        if self.n_failures > self.failures.len() {
            let more = self.n_failures - self.failures.len();
            lines.push(format!("- and {more} more"));
        }
        lines.extend(self.notes.iter().map(|note| format!("- {note}")));
        if lines.last().is_some_and(String::is_empty) {
            lines.pop();
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_counted_and_the_first_ones_named() {
        let mut check = Check::new("parity");
        check.note("3 comparisons");
        assert!(check.passed());
        for i in 0..NAMED_MAX + 5 {
            check.fail(format!("case {i}"));
        }
        assert!(!check.passed());
        let text = check.lines().join("\n");
        assert!(
            text.starts_with("**parity**: **FAILED**, 25 times"),
            "{text}"
        );
        assert!(text.contains("- and 5 more\n- 3 comparisons"), "{text}");
        let skipped = Check::skipped("text", "no fixtures").lines();
        assert_eq!(skipped, ["**text**: skipped: no fixtures"]);
    }
}
