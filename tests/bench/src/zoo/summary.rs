//! The table of a load: one row a model, and one for all.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Result;
use serde_json::{Value, json};

use super::link::Link;
use super::load::Outcome;

/// Most errors that are printed.
const ERRORS_MAX: usize = 5;

/// Figures of some requests.
struct Figures {
    done: usize,
    cancelled: usize,
    failed: usize,
    requests_per_second: f64,
    tokens_per_second: f64,
    first: Vec<f64>,
    gaps: Vec<f64>,
    whole: Vec<f64>,
    /// Gaps that were longer than what was asked for, where anything was.
    longer_gaps: Option<usize>,
}

impl Figures {
    fn of(outcomes: &[&Outcome], lasted: Duration) -> Self {
        let ms = |d: Duration| d.as_secs_f64() * 1e3;
        let well = || outcomes.iter().filter(|o| o.error.is_none());
        let sorted = |mut values: Vec<f64>| {
            values.sort_by(f64::total_cmp);
            values
        };
        let seconds = lasted.as_secs_f64();
        let done = well().filter(|o| !o.is_cancelled).count();
        let tokens: u64 = well().map(|o| o.tokens).sum();
        let longer = |o: &Outcome| {
            let most = o.max_gap?;
            Some(o.gaps.iter().filter(|gap| **gap > most).count())
        };
        let promised = well().filter_map(|o| longer(o)).reduce(|a, b| a + b);
        Self {
            done,
            cancelled: well().filter(|o| o.is_cancelled).count(),
            failed: outcomes.len() - well().count(),
            requests_per_second: done as f64 / seconds,
            tokens_per_second: tokens as f64 / seconds,
            first: sorted(well().filter_map(|o| o.first).map(ms).collect()),
            gaps: sorted(well().flat_map(|o| &o.gaps).copied().map(ms).collect()),
            longer_gaps: promised,
            whole: sorted(
                well()
                    .filter(|o| !o.is_cancelled)
                    .map(|o| ms(o.whole))
                    .collect(),
            ),
        }
    }

    fn json(&self) -> Value {
        let spread = |values: &[f64]| {
            json!({
                "p50": percentile(values, 0.5),
                "p99": percentile(values, 0.99),
                "p9999": percentile(values, 0.9999),
                "max": values.last(),
            })
        };
        json!({
            "done": self.done,
            "cancelled": self.cancelled,
            "failed": self.failed,
            "requests_per_second": self.requests_per_second,
            "tokens_per_second": self.tokens_per_second,
            "ttft_ms": spread(&self.first),
            "gap_ms": spread(&self.gaps),
            "whole_ms": spread(&self.whole),
            "gaps_longer_than_asked": self.longer_gaps,
        })
    }
}

/// The value that this share of the sorted values does not exceed (nearest rank).
pub(crate) fn percentile(sorted: &[f64], share: f64) -> Option<f64> {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied()
}

pub(crate) fn cell(values: &[f64]) -> String {
    let show = |value: Option<f64>| value.map_or("-".to_owned(), |v| format!("{v:.1}"));
    format!(
        "{} / {} / {}",
        show(percentile(values, 0.5)),
        show(percentile(values, 0.99)),
        show(values.last().copied()),
    )
}

/// Prints all figures; errors go to stderr.
pub(super) fn print(
    outcomes: &[Outcome],
    lasted: Duration,
    link: Option<&Link>,
    is_json: bool,
) -> Result<()> {
    let mut models: BTreeMap<&str, Vec<&Outcome>> = BTreeMap::new();
    for outcome in outcomes {
        models.entry(&outcome.model).or_default().push(outcome);
    }
    let all: Vec<&Outcome> = outcomes.iter().collect();
    let rows = models.into_iter().chain([("(all)", all)]);
    let rows: Vec<(&str, Figures)> = rows
        .map(|(name, outcomes)| (name, Figures::of(&outcomes, lasted)))
        .collect();
    for error in outcomes
        .iter()
        .filter_map(|o| o.error.as_ref())
        .take(ERRORS_MAX)
    {
        eprintln!("failed: {error}");
    }
    if is_json {
        let models: serde_json::Map<String, Value> = rows
            .iter()
            .map(|(name, figures)| ((*name).to_owned(), figures.json()))
            .collect();
        let gigabytes = link.map(|link| link.all_bytes() / lasted.as_secs_f64() / 1e9);
        let allows = |(name, f): &(&str, Figures)| {
            let allows = link?.allows(name, f.tokens_per_second * lasted.as_secs_f64())?;
            Some(((*name).to_owned(), json!(allows)))
        };
        let allows: serde_json::Map<String, Value> = rows.iter().filter_map(allows).collect();
        let object = json!({
            "models": models,
            "uploaded_gb_per_second": gigabytes,
            "link_part": link.and_then(|link| link.part_of(lasted)),
            "link_allows_tokens_per_second": allows,
        });
        println!("{}", serde_json::to_string_pretty(&object)?);
        return Ok(());
    }
    println!(
        "| model | done | cancelled | failed | requests/s | tokens/s | TTFT ms, p50 / p99 / max | gap ms, p50 / p99 / max | whole ms, p50 / p99 / max |"
    );
    println!("|---|---:|---:|---:|---:|---:|---:|---:|---:|");
    for (name, f) in &rows {
        println!(
            "| {name} | {} | {} | {} | {:.1} | {:.1} | {} | {} | {} |",
            f.done,
            f.cancelled,
            f.failed,
            f.requests_per_second,
            f.tokens_per_second,
            cell(&f.first),
            cell(&f.gaps),
            cell(&f.whole),
        );
    }
    for (name, f) in &rows {
        let (Some(longer), true) = (f.longer_gaps, *name != "(all)") else {
            continue;
        };
        let p9999 = percentile(&f.gaps, 0.9999).unwrap_or(f64::NAN);
        println!(
            "\n{name}: {} gaps, p99.99 {p9999:.1} ms, {longer} longer than asked.",
            f.gaps.len()
        );
    }
    if let Some(link) = link {
        print_link(link, &rows, lasted);
    }
    Ok(())
}

/// Prints what the link brought, beside what it could, and what that allows each model.
fn print_link(link: &Link, rows: &[(&str, Figures)], lasted: Duration) {
    let (bytes, seconds) = (link.all_bytes(), lasted.as_secs_f64());
    let part = link.part_of(lasted);
    let part = part.map_or_else(String::new, |part| {
        format!(", {:.0} % of what the link brings", part * 100.0)
    });
    println!(
        "\nUploaded {:.1} GB, {:.2} GB/s{part}.",
        bytes / 1e9,
        bytes / seconds / 1e9
    );
    for (name, f) in rows {
        let tokens = f.tokens_per_second * seconds;
        if let Some(allows) = link.allows(name, tokens) {
            println!(
                "{name}: {:.2} of the {allows:.0} tokens/s that the link alone allows, with as many bytes a token.",
                f.tokens_per_second / allows
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_nearest_rank() {
        let values: Vec<f64> = (1..=200).map(f64::from).collect();
        assert_eq!(percentile(&values, 0.5), Some(100.0));
        assert_eq!(percentile(&values, 0.99), Some(198.0));
        assert_eq!(percentile(&values[..1], 0.99), Some(1.0));
        assert_eq!(percentile(&[], 0.5), None);
    }
}
