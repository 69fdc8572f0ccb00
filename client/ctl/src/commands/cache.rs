//! cache stats, clear, budget and policy.

use rocmforge_client::proto::Word as _;
use rocmforge_client::proto::v1::{CacheUsage, ClearResponse, HostTier, KvDisk, StatsResponse};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::cli::CacheCommand;
use crate::context::Context;
use crate::human::{Align, Table, clean, fields, percent, plural, size};

pub(super) async fn release(context: &mut Context, host: bool) -> anyhow::Result<()> {
    let client = context.connect().await?;
    let released = client.cache_release(host).await?;
    context.output.answer(
        || &released,
        || {
            let of_host = match released.host_freed_bytes {
                0 => String::new(),
                bytes => format!(" and {} of host memory", size(bytes)),
            };
            format!(
                "released {}{of_host}, kept {}; the next request takes up to {} again",
                size(released.freed_bytes),
                size(released.kept_bytes),
                size(released.budget_bytes)
            )
        },
    )
}

fn cleared_text(answer: &ClearResponse) -> String {
    let segments = plural(answer.freed_segments.into(), "segment");
    let mut text = format!("{segments} evicted, {} freed\n", size(answer.freed_bytes));
    for kept in &answer.kept {
        let (model, name) = (clean(&kept.model), clean(&kept.name));
        let bytes = size(kept.bytes);
        let reason = kept.reason().word().replace('_', " ");
        text.push_str(&format!("kept {model} {name} ({bytes}): {reason}\n"));
    }
    text
}

pub(super) async fn cache(context: &mut Context, command: CacheCommand) -> anyhow::Result<()> {
    let client = context.connect().await?;
    let output = &mut context.output;
    match command {
        CacheCommand::Stats => {
            let stats = client.cache_stats().await?;
            output.answer(|| stats_json(&stats), || stats_text(&stats))
        }
        CacheCommand::Clear { name, disk } => {
            let name = name.as_deref();
            let answer = match disk {
                true => client.cache_clear_disk(name).await?,
                false => client.cache_clear(name).await?,
            };
            output.answer(|| &answer, || cleared_text(&answer))
        }
        CacheCommand::Budget { budget: None } => {
            let bytes = client.cache_stats().await?.budget_bytes;
            output.answer(
                || json!({"budget_bytes": bytes}),
                || format!("budget {}", size(bytes)),
            )
        }
        CacheCommand::Policy { policy: None } => {
            let policy = client.cache_stats().await?.policy().word();
            output.answer(|| json!({"policy": policy}), || format!("policy {policy}"))
        }
        CacheCommand::Budget {
            budget: Some(budget),
        } => {
            let answer = client.cache_set_budget(budget.into()).await?;
            output.answer(
                || &answer,
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
            let now = answer.policy().word();
            let previous = answer.previous().word();
            output.answer(
                || json!({"policy": now, "previous": previous}),
                || format!("policy {now}, was {previous}"),
            )
        }
    }
}

/// The counts of the cache: the totals under "total", as on the wire, and at the top, and under
/// "models" those of each model by its name.
fn stats_json(stats: &StatsResponse) -> Value {
    let mut value = object(stats);
    let total = object(stats.total.unwrap_or_default());
    value.insert("total".to_owned(), total.clone().into());
    value.extend(total);
    let models = stats.models.iter();
    let models = models.map(|model| {
        (
            model.name.clone(),
            Value::Object(object(model.usage.unwrap_or_default())),
        )
    });
    value.insert("models".to_owned(), Value::Object(models.collect()));
    value.into()
}

/// The fields of a message.
fn object(message: impl Serialize) -> Map<String, Value> {
    match serde_json::to_value(message) {
        Ok(Value::Object(fields)) => fields,
        // A message is an object, and has no map with other keys than texts.
        Ok(_) | Err(_) => Map::new(),
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
        ("prefix cache", size(total.prefix_bytes)),
        ("policy", stats.policy().word().to_owned()),
        ("evictions", evictions(&total)),
    ];
    head.extend(
        stats
            .host_tier
            .as_ref()
            .map(|tier| ("host KV", host_kv(tier))),
    );
    head.extend(
        stats
            .kv_disk
            .as_ref()
            .map(|disk| ("disk KV", kv_disk(disk))),
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

/// KV cache in host memory, and what became of it.
fn host_kv(tier: &HostTier) -> String {
    format!(
        "{} of {}; {} saved, {} restored, {} dropped, {} tokens recomputed",
        size(tier.bytes),
        size(tier.budget_bytes),
        tier.saved,
        tier.restored,
        tier.dropped,
        tier.computed_again_tokens
    )
}

/// KV cache on disk, and what became of it.
fn kv_disk(disk: &KvDisk) -> String {
    let mut text = format!(
        "{} of {}, {} entries; {} requests read {} tokens",
        size(disk.bytes),
        size(disk.budget_bytes),
        disk.entries,
        disk.requests,
        disk.reused_tokens
    );
    let problems = [
        (disk.skipped, "skipped"),
        (disk.refused, "not written"),
        (disk.write_errors, "write errors"),
        (disk.read_errors, "read errors"),
    ];
    for (n, what) in problems.into_iter().filter(|(n, _)| *n > 0) {
        text += &format!(", {n} {what}");
    }
    if disk.is_paused {
        text += "; writing is paused after an error";
    }
    text
}

/// How many segments were evicted, by cause.
fn evictions(usage: &CacheUsage) -> String {
    let causes = object(usage.evictions_by.unwrap_or_default());
    let seen = causes.iter().filter(|(_, n)| **n != json!(0));
    let seen: Vec<String> = seen.map(|(cause, n)| format!("{cause} {n}")).collect();
    match seen.is_empty() {
        true => "none".to_owned(),
        false => seen.join(", "),
    }
}

#[cfg(test)]
mod tests {
    use rocmforge_client::proto::v1::ModelCacheUsage;

    use super::*;

    #[test]
    fn problems_of_the_disk_are_shown_where_there_are_any() {
        let sound = KvDisk {
            budget_bytes: 16 << 30,
            bytes: 1 << 30,
            entries: 7,
            requests: 2,
            reused_tokens: 640,
            ..Default::default()
        };
        let text = "1.00 GiB of 16.00 GiB, 7 entries; 2 requests read 640 tokens";
        assert_eq!(kv_disk(&sound), text);
        let full = KvDisk {
            write_errors: 1,
            refused: 3,
            is_paused: true,
            ..sound
        };
        let problems = ", 3 not written, 1 write errors; writing is paused after an error";
        assert_eq!(kv_disk(&full), format!("{text}{problems}"));
    }

    #[test]
    fn stats_have_the_totals_on_top_and_each_model_by_name() {
        let counts = |hits| CacheUsage {
            hits,
            resident_bytes: 10 * hits,
            ..Default::default()
        };
        let value = stats_json(&StatsResponse {
            budget_bytes: 100,
            total: Some(counts(5)),
            models: vec![ModelCacheUsage {
                name: "a".into(),
                usage: Some(counts(3)),
            }],
            ..Default::default()
        });
        for key in [
            "resident_bytes",
            "in_flight_bytes",
            "pinned_bytes",
            "hits",
            "misses",
            "evictions",
            "uploaded_bytes",
        ] {
            assert!(value[key].is_u64(), "{key}");
            assert!(value["models"]["a"][key].is_u64(), "{key}");
        }
        assert_eq!(value["budget_bytes"], 100);
        assert_eq!(value["hits"], 5);
        assert!(value["host_tier"].is_null());
        assert_eq!(value["models"]["a"]["hits"], 3);
    }
}
