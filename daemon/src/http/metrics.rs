//! `GET /metrics`: Prometheus text, from the published snapshot alone.
//!
//! Routers of fleets read vLLM's names; they are written with what they mean here. The rest is
//! ours.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use rocmforge_device::Loss;
use rocmforge_engine::api::{
    CacheStatus, EvictionCause, HostPressureStatus, ModelStatus, SegmentState, Snapshot,
};

use self::text::Text;
use super::Http;
use super::call::with_type;

mod peers;
mod requests;
mod text;

const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// What vLLM calls a block, in tokens: routers multiply by it.
const BLOCK_TOKENS: u64 = 16;

/// The handler.
pub(super) async fn metrics(State(http): State<Arc<Http>>) -> Response {
    let service = &http.service;
    let snapshot = service.engine.snapshot();
    let mut text = Text::default();
    vllm(&snapshot, &mut text);
    queue(&snapshot, service.limits.max_sequences, &mut text);
    cache(&snapshot, snapshot.peak_bytes, &mut text);
    prefixes(&snapshot, &mut text);
    models(&snapshot, &mut text);
    peers::write(&service.peers(), &snapshot, &mut text);
    requests::write(&service.measured, &snapshot, &mut text);
    device(&snapshot, &mut text);
    let uptime = service.started.elapsed().as_secs_f64();
    text.one(
        "rocmforge_uptime_seconds",
        "gauge",
        "Seconds since the start",
        uptime,
    );
    let draining = f64::from(u8::from(service.is_draining() || snapshot.draining));
    text.one(
        "rocmforge_draining",
        "gauge",
        "1 while no new work is taken",
        draining,
    );
    with_type(CONTENT_TYPE, Body::from(text.into_string()))
}

fn number(n: u64) -> f64 {
    n as f64
}

/// The share of the room for KV that is in use. KV shares one budget with weights, which make room
/// for it; what is in the way of more is what cannot be evicted.
fn kv_use(cache: &CacheStatus) -> f64 {
    let room = cache
        .budget_bytes
        .saturating_sub(cache.pinned_bytes + cache.scratch_bytes);
    if room == 0 {
        return 1.0;
    }
    (number(cache.kv_bytes) / number(room)).min(1.0)
}

/// vLLM's names of what all models share: they carry the name of a model there, which engines here
/// have several of, so there is one line for all.
fn vllm(snapshot: &Snapshot, text: &mut Text) {
    let requests = [
        (
            "vllm:num_requests_running",
            "Requests that run",
            snapshot.running,
        ),
        (
            "vllm:num_requests_waiting",
            "Requests that wait to be admitted",
            snapshot.queued,
        ),
    ];
    for (name, help, n) in requests {
        text.one(name, "gauge", help, f64::from(n));
    }
    let help = "Share of the room for KV that is in use, from 0 to 1";
    text.one(
        "vllm:kv_cache_usage_perc",
        "gauge",
        help,
        kv_use(&snapshot.cache),
    );
    let per_token = snapshot
        .models
        .iter()
        .map(|m| m.model.model().info().kv_bytes_per_token);
    // Of the model that needs most: a bound for all of them.
    let block_bytes = per_token.max().unwrap_or(0).saturating_mul(BLOCK_TOKENS);
    let blocks = snapshot
        .cache
        .budget_bytes
        .checked_div(block_bytes)
        .unwrap_or(0);
    text.head(
        "vllm:cache_config_info",
        "gauge",
        "Tokens of a block of KV, and blocks that the budget has room for",
    );
    let labels = [
        ("block_size", BLOCK_TOKENS.to_string()),
        ("num_gpu_blocks", blocks.to_string()),
    ];
    let labels = labels
        .each_ref()
        .map(|(name, value)| (*name, value.as_str()));
    text.value("vllm:cache_config_info", &labels, 1.0);
}

fn prefixes(snapshot: &Snapshot, text: &mut Text) {
    let counts = &snapshot.prefixes;
    let rows = [
        (
            "vllm:prefix_cache_queries_total",
            "Tokens of prompts that might begin with what earlier ones have computed",
            counts.asked_tokens,
        ),
        (
            "vllm:prefix_cache_hits_total",
            "Of them, tokens that were not computed again",
            counts.reused_tokens,
        ),
    ];
    for (name, help, n) in rows {
        text.one(name, "counter", help, number(n));
    }
    text.one(
        "rocmforge_prefix_bytes",
        "gauge",
        "Bytes of keys, values and states that no request uses, kept for prompts that begin alike",
        number(snapshot.cache.prefix_bytes),
    );
}

fn queue(snapshot: &Snapshot, running_max: u32, text: &mut Text) {
    text.one(
        "rocmforge_pass_suspensions_total",
        "counter",
        "Times that a forward pass stopped between two of its steps, so that other requests had a turn",
        number(snapshot.suspensions),
    );
    text.one(
        "rocmforge_interleaved_passes_total",
        "counter",
        "Passes of tokens between the steps of a long prompt of a mixture",
        number(snapshot.interleaved_passes),
    );
    text.one(
        "rocmforge_files_brought_aside_total",
        "counter",
        "Times that a model's file was read while requests of other models went on",
        number(snapshot.brought_aside),
    );
    text.one(
        "rocmforge_uploaded_aside_bytes_total",
        "counter",
        "Bytes of weights that were uploaded beside passes of other models",
        number(snapshot.uploaded_aside_bytes),
    );
    let rows = [
        (
            "rocmforge_requests_running",
            "Requests that run",
            snapshot.running,
        ),
        (
            "rocmforge_requests_running_max",
            "Requests that may run at once",
            running_max,
        ),
        (
            "rocmforge_requests_queued",
            "Requests that wait to be admitted",
            snapshot.queued,
        ),
        (
            "rocmforge_requests_queued_max",
            "Requests that may wait",
            snapshot.queue_capacity,
        ),
    ];
    for (name, help, n) in rows {
        text.one(name, "gauge", help, f64::from(n));
    }
}

fn cache(snapshot: &Snapshot, peak: u64, text: &mut Text) {
    let cache = &snapshot.cache;
    let weights = cache
        .resident_bytes
        .saturating_sub(cache.kv_bytes + cache.prefix_bytes + cache.scratch_bytes);
    let gauges = [
        (
            "rocmforge_budget_bytes",
            "Most bytes that the device may hold",
            cache.budget_bytes,
        ),
        ("rocmforge_peak_bytes", "Most bytes that it ever held", peak),
        (
            "rocmforge_weight_bytes",
            "Bytes of resident weights",
            weights,
        ),
        (
            "rocmforge_in_flight_bytes",
            "Bytes of weights on their way",
            cache.in_flight_bytes,
        ),
        (
            "rocmforge_pinned_bytes",
            "Bytes of resident weights that are pinned",
            cache.pinned_bytes,
        ),
        (
            "rocmforge_kv_bytes",
            "Bytes of keys and values",
            cache.kv_bytes,
        ),
        (
            "rocmforge_scratch_bytes",
            "Bytes of scratch",
            cache.scratch_bytes,
        ),
    ];
    for (name, help, bytes) in gauges {
        text.one(name, "gauge", help, number(bytes));
    }
}

fn models(snapshot: &Snapshot, text: &mut Text) {
    let models = &snapshot.models;
    text.one(
        "rocmforge_models",
        "gauge",
        "Models that are loaded",
        models.len() as f64,
    );
    let resident = |status: &ModelStatus| -> u64 {
        let there = |segment: &&rocmforge_engine::api::SegmentStatus| {
            segment.state == SegmentState::Resident
        };
        status.segments.iter().filter(there).map(|s| s.bytes).sum()
    };
    let weights = |status: &ModelStatus| -> u64 { status.segments.iter().map(|s| s.bytes).sum() };
    type Of = fn(&CacheStatus) -> u64;
    type Value<'f> = &'f dyn Fn(&ModelStatus) -> f64;
    let gauges: [(&str, &str, Value<'_>); 5] = [
        (
            "rocmforge_model_requests",
            "Requests of a model that run or wait",
            &|m| f64::from(m.requests),
        ),
        (
            "rocmforge_model_weight_bytes",
            "Bytes of a model's weights",
            &|m| number(weights(m)),
        ),
        (
            "rocmforge_model_resident_bytes",
            "Bytes of them on the device",
            &|m| number(resident(m)),
        ),
        (
            "rocmforge_model_residency_ratio",
            "Share of them on the device, from 0 to 1",
            &|m| number(resident(m)) / number(weights(m).max(1)),
        ),
        (
            "rocmforge_model_in_flight_bytes",
            "Bytes of them on their way",
            &|m| number(m.cache.in_flight_bytes),
        ),
    ];
    for (name, help, value) in gauges {
        text.by_model(name, "gauge", help, models, value);
    }
    let counters: [(&str, &str, Of); 4] = [
        (
            "rocmforge_segment_hits_total",
            "Segments found resident",
            |c| c.hits,
        ),
        (
            "rocmforge_segment_misses_total",
            "Segments that were not",
            |c| c.misses,
        ),
        ("rocmforge_uploads_total", "Uploads that ended", |c| {
            c.uploads
        }),
        (
            "rocmforge_uploaded_bytes_total",
            "Bytes that they moved",
            |c| c.uploaded_bytes,
        ),
    ];
    for (name, help, of) in counters {
        text.by_model(name, "counter", help, models, |m| number(of(&m.cache)));
    }
    text.by_model(
        "rocmforge_direct_read_bytes_total",
        "counter",
        "Bytes of a model's files that were read past the page cache",
        models,
        |m| number(m.model.file().direct_bytes()),
    );
    text.one(
        "rocmforge_host_computed_bytes_total",
        "counter",
        "Bytes of weights that were not on the card and that the host computed with",
        number(snapshot.hosted.bytes),
    );
    text.one(
        "rocmforge_host_computed_seconds_total",
        "counter",
        "How long that took",
        snapshot.hosted.took.as_secs_f64(),
    );
    let tier = snapshot.host_tier;
    text.one(
        "rocmforge_host_tier_bytes",
        "gauge",
        "Bytes of KV pages and states that left the card and are kept in the host's memory",
        number(tier.bytes),
    );
    text.one(
        "rocmforge_host_tier_budget_bytes",
        "gauge",
        "Bytes that they may have: the host's budget less the weights that it keeps",
        number(tier.budget_bytes),
    );
    for (name, help, count) in [
        (
            "rocmforge_host_tier_saved_total",
            "KV pages and states that were copied there",
            tier.saved,
        ),
        (
            "rocmforge_host_tier_restored_total",
            "Those that were copied back",
            tier.restored,
        ),
        (
            "rocmforge_host_tier_dropped_total",
            "KV pages and states that nothing is left of, on the card or there",
            tier.dropped,
        ),
        (
            "rocmforge_tokens_computed_again_total",
            "Tokens that requests had computed before they yielded and computed again",
            tier.again_tokens,
        ),
    ] {
        text.one(name, "counter", help, number(count));
    }
    if let Some(host) = snapshot.host_pressure.filter(|host| !host.is_blind) {
        host_pressure(&host, text);
    }
    let name = "rocmforge_evictions_total";
    text.head(name, "counter", "Segments evicted, by model and cause");
    for status in models {
        for cause in EvictionCause::ALL {
            let labels = [("model", status.model.name()), ("cause", cause.name())];
            text.value(name, &labels, number(status.cache.evictions_by.of(cause)));
        }
    }
}

fn host_pressure(host: &HostPressureStatus, text: &mut Text) {
    for (name, kind, help, n) in [
        (
            "rocmforge_host_pressure_held_bytes",
            "gauge",
            "Bytes of the machine's memory that go back while it is short of memory",
            host.held_bytes,
        ),
        (
            "rocmforge_host_pressure_given_up_bytes",
            "gauge",
            "Bytes by which the host's budget is smaller now for that",
            host.given_up_bytes,
        ),
        (
            "rocmforge_host_pressure_shrinks_total",
            "counter",
            "Times that memory was given back to the machine",
            host.shrinks,
        ),
        (
            "rocmforge_host_pressure_grows_total",
            "counter",
            "Times that some of it could be taken again",
            host.grows,
        ),
    ] {
        text.one(name, kind, help, number(n));
    }
}

fn device(snapshot: &Snapshot, text: &mut Text) {
    let device = &snapshot.device;
    text.head("rocmforge_device_info", "gauge", "The device in use");
    let labels = [
        ("kind", device.kind.as_str()),
        ("name", &device.name),
        ("arch", &device.arch),
        ("driver", &device.driver),
    ];
    text.value("rocmforge_device_info", &labels, 1.0);
    let help = "1 where the CPU computes although a GPU is on the bus, which cannot be used";
    let is_unused = f64::from(u8::from(device.unused_gpu.is_some()));
    text.one("rocmforge_device_unused_gpu", "gauge", help, is_unused);
    let help = "Memory of the device";
    text.one(
        "rocmforge_device_memory_bytes",
        "gauge",
        help,
        number(device.memory_bytes),
    );
    if let Some(free) = device.free_bytes {
        let help = "Bytes of it that are free, by its driver";
        text.one("rocmforge_device_free_bytes", "gauge", help, number(free));
    }
    if let Some(kept) = &snapshot.keep_free {
        let rows = [
            (
                "rocmforge_keep_free_bytes",
                "gauge",
                "Bytes of it that are to be free for others",
                kept.bytes,
            ),
            (
                "rocmforge_keep_free_given_up_bytes",
                "gauge",
                "Bytes by which the budget is smaller now than configured because others hold memory",
                kept.given_up_bytes,
            ),
            (
                "rocmforge_keep_free_shrinks_total",
                "counter",
                "Times that memory was given back for others",
                kept.shrinks,
            ),
            (
                "rocmforge_keep_free_grows_total",
                "counter",
                "Times that some of it was taken again",
                kept.grows,
            ),
        ];
        for (name, kind, help, n) in rows {
            text.one(name, kind, help, number(n));
        }
    }
    lost(snapshot.device_lost.as_ref(), text);
    let waits_for = snapshot.waits_for.as_ref();
    text.one(
        "rocmforge_file_wait_seconds",
        "gauge",
        "How long a file that does not answer has been waited for; 0 as a rule",
        waits_for.map_or(0.0, |wait| wait.since.elapsed().as_secs_f64()),
    );
}

fn lost(loss: Option<&Loss>, text: &mut Text) {
    let name = "rocmforge_device_lost";
    text.head(name, "gauge", "1 once it failed for good, with how");
    match loss {
        Some(loss) => text.value(name, &[("kind", loss.kind.label())], 1.0),
        None => text.value(name, &[], 0.0),
    }
}

#[cfg(test)]
mod tests {
    use rocmforge_device::LossKind;

    use super::*;

    #[test]
    fn a_lost_device_is_counted_by_how_it_was_lost() {
        let told = |loss: Option<&Loss>| {
            let mut text = Text::default();
            lost(loss, &mut text);
            let text = text.into_string();
            let rows = text.lines().filter(|line| !line.starts_with('#'));
            rows.map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(told(None), ["rocmforge_device_lost 0"]);
        let loss = Loss::new(LossKind::Hang, "no end after 30 s");
        let row = r#"rocmforge_device_lost{kind="hang"} 1"#;
        assert_eq!(told(Some(&loss)), [row]);
    }

    #[test]
    fn what_the_machine_got_back_is_told() {
        let mut text = Text::default();
        let host = HostPressureStatus {
            percent: 10.0,
            is_blind: false,
            held_bytes: 700,
            given_up_bytes: 300,
            shrinks: 2,
            grows: 1,
        };
        host_pressure(&host, &mut text);
        let text = text.into_string();
        for row in [
            "rocmforge_host_pressure_held_bytes 700",
            "rocmforge_host_pressure_given_up_bytes 300",
            "rocmforge_host_pressure_shrinks_total 2",
            "rocmforge_host_pressure_grows_total 1",
        ] {
            assert!(text.lines().any(|line| line == row), "no '{row}' in {text}");
        }
    }

    #[test]
    fn what_cannot_be_evicted_is_no_room_for_kv() {
        let cache = CacheStatus {
            budget_bytes: 100,
            pinned_bytes: 40,
            scratch_bytes: 10,
            kv_bytes: 25,
            ..CacheStatus::default()
        };
        assert!((kv_use(&cache) - 0.5).abs() < 1e-9);
        assert!((kv_use(&CacheStatus::default()) - 1.0).abs() < 1e-9);
    }
}
