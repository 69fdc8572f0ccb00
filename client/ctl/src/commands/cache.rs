//! cache stats, clear, budget and policy.

use rocmforge_client::proto::v1::{CacheUsage, HostTier, StatsResponse};
use serde_json::json;

use super::Context;
use crate::cli::CacheCommand;
use crate::human::{Align, Table, clean, fields, percent, plural, size};
use crate::json;

pub(super) async fn cache(context: &mut Context, command: CacheCommand) -> anyhow::Result<()> {
    let client = context.connect().await?;
    let output = &mut context.output;
    match command {
        CacheCommand::Stats => {
            let stats = client.cache_stats().await?;
            output.answer(|| json::stats(&stats), || stats_text(&stats))
        }
        CacheCommand::Clear { name } => {
            let answer = client.cache_clear(name.as_deref()).await?;
            output.answer(
                || json::cleared(&answer),
                || {
                    let segments = plural(answer.freed_segments.into(), "segment");
                    let mut text =
                        format!("{segments} evicted, {} freed\n", size(answer.freed_bytes));
                    for kept in &answer.kept {
                        let (model, name) = (clean(&kept.model), clean(&kept.name));
                        let bytes = size(kept.bytes);
                        let reason = json::keep_reason(kept.reason()).replace('_', " ");
                        text.push_str(&format!("kept {model} {name} ({bytes}): {reason}\n"));
                    }
                    text
                },
            )
        }
        CacheCommand::Budget { budget: None } => {
            let bytes = client.cache_stats().await?.budget_bytes;
            output.answer(
                || json!({"budget_bytes": bytes}),
                || format!("budget {}", size(bytes)),
            )
        }
        CacheCommand::Policy { policy: None } => {
            let policy = json::cache_policy(client.cache_stats().await?.policy());
            output.answer(|| json!({"policy": policy}), || format!("policy {policy}"))
        }
        CacheCommand::Budget {
            budget: Some(budget),
        } => {
            let answer = client.cache_set_budget(budget.into()).await?;
            output.answer(
                || json::budget(&answer),
                || {
                    let mut text = format!("budget {}", size(answer.budget_bytes));
                    if answer.evicted_segments > 0 {
                        let segments = plural(answer.evicted_segments.into(), "segment");
                        let bytes = size(answer.evicted_bytes);
                        text.push_str(&format!(", {segments} evicted ({bytes})"));
                    }
                    if answer.effective_budget_bytes > answer.budget_bytes {
                        let now = size(answer.effective_budget_bytes);
                        text.push_str(&format!("; {now} until pins and running work let go"));
                    }
                    text
                },
            )
        }
        CacheCommand::Policy {
            policy: Some(policy),
        } => {
            let answer = client.cache_set_policy(policy.into()).await?;
            let now = json::cache_policy(answer.policy());
            let previous = json::cache_policy(answer.previous());
            output.answer(
                || json!({"policy": now, "previous": previous}),
                || format!("policy {now}, was {previous}"),
            )
        }
    }
}

fn stats_text(stats: &StatsResponse) -> String {
    let total = stats.total.unwrap_or_default();
    let held = total.resident_bytes
        + total.in_flight_bytes
        + total.kv_bytes
        + total.prefix_bytes
        + total.scratch_bytes;
    let share = percent(held, stats.budget_bytes);
    let mut head = vec![
        ("budget", size(stats.budget_bytes)),
        (
            "held",
            format!(
                "{} ({share}), at most {}",
                size(held),
                size(stats.peak_bytes)
            ),
        ),
        (
            "kv, scratch",
            format!("{}, {}", size(total.kv_bytes), size(total.scratch_bytes)),
        ),
        ("kept prompts", size(total.prefix_bytes)),
        ("policy", json::cache_policy(stats.policy()).to_owned()),
        ("evictions", evictions(&total)),
    ];
    head.extend(
        stats
            .host_tier
            .as_ref()
            .map(|tier| ("host tier", host_tier(tier))),
    );
    let head = fields(&head);
    let mut table = Table::new([
        ("MODEL", Align::Left),
        ("RESIDENT", Align::Right),
        ("IN FLIGHT", Align::Right),
        ("PINNED", Align::Right),
        ("HITS", Align::Right),
        ("MISSES", Align::Right),
        ("HIT RATE", Align::Right),
        ("EVICTIONS", Align::Right),
        ("UPLOADED", Align::Right),
    ]);
    let mut row = |name: &str, usage: &CacheUsage| {
        table.row([
            name.to_owned(),
            size(usage.resident_bytes),
            size(usage.in_flight_bytes),
            size(usage.pinned_bytes),
            usage.hits.to_string(),
            usage.misses.to_string(),
            percent(usage.hits, usage.hits + usage.misses),
            usage.evictions.to_string(),
            size(usage.uploaded_bytes),
        ]);
    };
    for model in &stats.models {
        row(&model.name, &model.usage.unwrap_or_default());
    }
    row("(total)", &total);
    format!("{head}\n{table}")
}

/// What the machine's memory holds, and what came of what went there.
fn host_tier(tier: &HostTier) -> String {
    format!(
        "{} of {}; {} saved, {} restored, {} dropped, {} tokens computed again",
        size(tier.bytes),
        size(tier.budget_bytes),
        tier.saved,
        tier.restored,
        tier.dropped,
        tier.computed_again_tokens
    )
}

/// How many segments were evicted, by cause.
fn evictions(usage: &CacheUsage) -> String {
    let causes = json::evictions_by(usage);
    let seen = causes.iter().filter(|(_, n)| *n > 0);
    let seen: Vec<String> = seen.map(|(cause, n)| format!("{cause} {n}")).collect();
    match seen.is_empty() {
        true => "none".to_owned(),
        false => seen.join(", "),
    }
}
