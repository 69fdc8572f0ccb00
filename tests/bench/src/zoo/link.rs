//! What a load took of the link to the GPU, by the server's metrics.

use std::collections::BTreeMap;
use std::time::Duration;

/// The least part of what the link brought that a model has of which something is said: one that
/// was uploaded once has no bound by the link.
const PART_MIN: f64 = 0.01;

/// Weights that went over the link since the server started.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Link {
    /// Bytes of each model.
    bytes: BTreeMap<String, f64>,
    /// Bytes that the link brings in a second, if that was measured.
    rate: Option<f64>,
}

impl Link {
    /// Of the text of `/metrics`; `None` where nothing is counted there.
    pub(super) fn of(metrics: &str) -> Option<Self> {
        let mut link = Self::default();
        for line in metrics.lines() {
            let Some((name, value)) = line.rsplit_once(' ') else {
                continue;
            };
            let Ok(value) = value.parse::<f64>() else {
                continue;
            };
            if name == "rocmforge_link_bytes_per_second" {
                link.rate = Some(value);
            }
            let labels = name.strip_prefix("rocmforge_uploaded_bytes_total");
            if let Some(labels) = labels {
                let model = labels.trim_start_matches("{model=\"");
                let model = model.trim_end_matches("\"}").to_owned();
                *link.bytes.entry(model).or_default() += value;
            }
        }
        (!link.bytes.is_empty()).then_some(link)
    }

    /// What came since an earlier look.
    pub(super) fn since(mut self, before: &Self) -> Self {
        for (model, bytes) in &mut self.bytes {
            *bytes -= before.bytes.get(model).copied().unwrap_or(0.0);
            *bytes = bytes.max(0.0);
        }
        self
    }

    pub(super) fn all_bytes(&self) -> f64 {
        self.bytes.values().sum()
    }

    /// The part of a time that the link needs for all that it brought, at the rate that was
    /// measured.
    pub(super) fn part_of(&self, lasted: Duration) -> Option<f64> {
        Some(self.all_bytes() / self.rate? / lasted.as_secs_f64())
    }

    /// Tokens a second of a model that the link would allow that had nothing else to bring, with as
    /// many bytes for each of its `tokens` as in this load; `None` where it brought next to nothing
    /// for it.
    pub(super) fn allows(&self, model: &str, tokens: f64) -> Option<f64> {
        let least = self.all_bytes() * PART_MIN;
        let bytes = *self.bytes.get(model).filter(|bytes| **bytes > least)?;
        Some(tokens / bytes * self.rate?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: &str = "# HELP rocmforge_uploaded_bytes_total Weights\n\
        rocmforge_uploaded_bytes_total{model=\"a\"} 1e9\n\
        rocmforge_uploaded_bytes_total{model=\"b\"} 5\n";

    #[test]
    fn a_load_is_told_its_part_of_the_link() {
        let after = "rocmforge_uploaded_bytes_total{model=\"a\"} 21e9\n\
            rocmforge_uploaded_bytes_total{model=\"b\"} 5\n\
            rocmforge_link_bytes_per_second 50e9\n";
        let link = Link::of(after).zip(Link::of(BEFORE));
        let link = link
            .map(|(after, before)| after.since(&before))
            .unwrap_or_default();
        assert_eq!(link.all_bytes(), 20e9);
        assert_eq!(link.part_of(Duration::from_secs(2)), Some(0.2));
        // 100 tokens of 200 MB each.
        assert_eq!(link.allows("a", 100.0), Some(250.0));
        assert_eq!(link.allows("b", 100.0), None, "nothing came for it");
        assert_eq!(link.allows("c", 100.0), None);
        let mut more = link.clone();
        more.bytes.insert("b".to_owned(), 1e6);
        assert_eq!(more.allows("b", 100.0), None, "next to nothing came for it");
        assert_eq!(Link::of("up 1\n"), None);
        let unknown = Link::of(BEFORE).unwrap_or_default();
        assert_eq!(unknown.part_of(Duration::from_secs(1)), None);
    }
}
