//! What a replay comes to: a row for each group of requests, and the ratio of all.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use anyhow::{Result, bail, ensure};
use rocmforge_ops::KV_PAGE_TOKENS;
use serde_json::{Value, json};

use super::send::Done;
use super::tokens::Tokens;
use super::trace::Entry;
use crate::zoo::summary::{cell, percentile};

/// Most requests above their floor, and most errors, that are named.
const NAMED_MAX: usize = 8;

/// Requests that are reported together.
#[derive(Debug, Default)]
struct Group {
    requests: u64,
    prompt: u64,
    computed: u64,
    floor: u64,
    /// Times to first token in ms, sorted.
    first: Vec<f64>,
}

/// All figures of a replay.
#[derive(Debug)]
pub(super) struct Summary {
    groups: BTreeMap<String, Group>,
    all: Group,
    distinct: u64,
    /// Computed a second time after a preemption; part of what all computed.
    recomputed: u64,
    /// Requests that computed more than their floor, with what they computed and their floor; those
    /// that are farthest above it first.
    above: Vec<(String, u64, u64)>,
}

impl Group {
    fn add(&mut self, done: &Done, floor: u64) {
        self.requests += 1;
        self.prompt += done.usage.prompt;
        self.computed += done.usage.prompt.saturating_sub(done.usage.cached);
        self.floor += floor;
        self.first
            .extend(done.first.map(|first| first.as_secs_f64() * 1e3));
        self.first.sort_by(f64::total_cmp);
    }

    fn json(&self) -> Value {
        json!({
            "requests": self.requests,
            "prompt_tokens": self.prompt,
            "computed_tokens": self.computed,
            "floor_tokens": self.floor,
            "ttft_ms": {
                "p50": percentile(&self.first, 0.5),
                "p99": percentile(&self.first, 0.99),
                "max": self.first.last(),
            },
        })
    }

    fn row(&self, name: &str) -> String {
        let Self {
            requests,
            prompt,
            computed,
            floor,
            first,
        } = self;
        let first = cell(first);
        format!("| {name} | {requests} | {prompt} | {computed} | {floor} | {first} |")
    }
}

impl Summary {
    /// # Errors
    /// A request failed, or the server counted another prompt than it said.
    pub(super) fn of(
        entries: &[Entry],
        done: &[Result<Done>],
        tokens: &Tokens,
        recomputed: u64,
    ) -> Result<Self> {
        let failed = || done.iter().filter_map(|done| done.as_ref().err());
        if failed().next().is_some() {
            for error in failed().take(NAMED_MAX) {
                eprintln!("failed: {error:#}");
            }
            bail!("{} of {} requests failed", failed().count(), done.len());
        }
        let (mut groups, mut all) = (BTreeMap::<String, Group>::new(), Group::default());
        let mut above = Vec::new();
        for ((entry, done), &floor) in entries.iter().zip(done.iter().flatten()).zip(&tokens.floor)
        {
            let computed = done.usage.prompt.saturating_sub(done.usage.cached);
            if computed > floor {
                above.push((entry.id.clone(), computed, floor));
            }
            let group = groups.entry(entry.group.clone()).or_default();
            group.add(done, floor);
            all.add(done, floor);
        }
        ensure!(
            all.prompt == tokens.all,
            "the prompts had {} tokens by the responses, {} by the counts before",
            all.prompt,
            tokens.all
        );
        all.computed += recomputed;
        above.sort_by_key(|(_, computed, floor)| Reverse(computed - floor));
        Ok(Self {
            groups,
            all,
            distinct: tokens.distinct,
            recomputed,
            above,
        })
    }

    /// Computed over distinct tokens.
    pub(super) fn ratio(&self) -> f64 {
        self.all.computed as f64 / self.distinct.max(1) as f64
    }

    pub(super) fn print(&self, is_json: bool) -> Result<()> {
        for (id, computed, floor) in self.above.iter().take(NAMED_MAX) {
            eprintln!("above its floor: '{id}' computed {computed} tokens, not {floor}");
        }
        let floor = self.all.floor as f64 / self.distinct.max(1) as f64;
        if is_json {
            let groups = self.groups.iter();
            let groups = groups.map(|(name, group)| (name.clone(), group.json()));
            let object = json!({
                "all": self.all.json(),
                "groups": groups.collect::<serde_json::Map<_, _>>(),
                "distinct_tokens": self.distinct,
                "recomputed_tokens": self.recomputed,
                "ratio": self.ratio(),
                "floor_ratio": floor,
                "requests_above_floor": self.above.len(),
            });
            println!("{}", serde_json::to_string_pretty(&object)?);
            return Ok(());
        }
        println!(
            "| group | requests | prompt tokens | computed | floor | TTFT ms, p50 / p99 / max |"
        );
        println!("|---|---:|---:|---:|---:|---:|");
        for (name, group) in &self.groups {
            println!("{}", group.row(name));
        }
        println!("{}", self.all.row("(all)"));
        println!(
            "\n{} computed / {} distinct tokens = {:.4}; {floor:.4} is the floor with pages of \
             {KV_PAGE_TOKENS} tokens.",
            self.all.computed,
            self.distinct,
            self.ratio()
        );
        if self.recomputed > 0 {
            println!(
                "{} of them were computed again after a preemption.",
                self.recomputed
            );
        }
        if let (Some(alone), Some(together)) = (self.longest("alone"), self.longest("together")) {
            println!(
                "The last first token of those together came after {:.2} times that of one alone.",
                together / alone
            );
        }
        Ok(())
    }

    /// The longest time to first token of a group.
    fn longest(&self, group: &str) -> Option<f64> {
        self.groups.get(group)?.first.last().copied()
    }
}
