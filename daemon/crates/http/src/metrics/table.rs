//! All metrics, one entry each: name, kind, help and where the value comes from.
//!
//! To add one: an entry here. A value that the engine does not publish yet is a field of
//! `Snapshot` (`engine/src/api/status.rs`), filled in `engine/src/actor/publish.rs`.
//!
//! A HELP text is read alone in Prometheus and Grafana: it names what it counts, and its unit.

use rocmforge_engine::api::{CacheStatus, ModelStatus, SegmentState, SegmentStatus};
use rocmforge_service::limits::Limit;

use super::by_model::{broken_gaps, ends, evictions, expected};
use super::metric::Value::{Maybe, OfModel, OfPeer, OfRecord, One, Rows, Times};
use super::metric::{Metric, counter, gauge, histogram};
use super::text::{Lines, PEER};
use super::{Source, block, budget_bytes, kv_use};

/// All metrics, in the order of the page.
pub(super) static METRICS: &[Metric] = &[
    // vLLM's names, which routers of fleets read. Those without a model have one value for all,
    // since all models share one queue and one budget.
    gauge(
        "vllm:num_requests_running",
        "Running requests",
        One(|s| of(s.snapshot.running)),
    ),
    gauge(
        "vllm:num_requests_waiting",
        "Requests in the queue",
        One(|s| of(s.snapshot.queued)),
    ),
    gauge(
        "vllm:kv_cache_usage_perc",
        "Used share of the memory available to the KV cache, from 0 to 1",
        One(|s| kv_use(budget_bytes(s.snapshot), &s.snapshot.cache)),
    ),
    gauge(
        "vllm:cache_config_info",
        "KV cache block size in tokens, and number of blocks that fit into the budget",
        Rows(|s, rows| {
            let (tokens, blocks) = block(s.snapshot);
            let (tokens, blocks) = (tokens.to_string(), blocks.to_string());
            rows.add(&[("block_size", &tokens), ("num_gpu_blocks", &blocks)], 1.0);
        }),
    ),
    counter(
        "vllm:prefix_cache_queries_total",
        "Prompt tokens that were looked up in the prefix cache",
        One(|s| number(s.snapshot.prefixes.asked_tokens)),
    ),
    counter(
        "vllm:prefix_cache_hits_total",
        "Prompt tokens that were found in the prefix cache and not computed",
        One(|s| number(s.snapshot.prefixes.reused_tokens)),
    ),
    histogram(
        "vllm:time_to_first_token_seconds",
        "Time from the arrival of a request to its first token, in seconds",
        Times(|r| &r.first_token),
    ),
    histogram(
        "vllm:inter_token_latency_seconds",
        "Time between two successive tokens of a request, in seconds",
        Times(|r| &r.gap),
    ),
    histogram(
        "vllm:time_per_output_token_seconds",
        "Time between two successive tokens of a request, in seconds (older name of \
         vllm:inter_token_latency_seconds)",
        Times(|r| &r.gap),
    ),
    histogram(
        "vllm:e2e_request_latency_seconds",
        "Time from the arrival of a request to its end, in seconds",
        Times(|r| &r.whole),
    ),
    counter(
        "vllm:prompt_tokens_total",
        "Prompt tokens of requests that got their first token; with n choices a prompt counts once",
        OfRecord(|r| &r.prompt_tokens),
    ),
    counter(
        "vllm:generation_tokens_total",
        "Generated tokens, including those of aborted requests",
        OfRecord(|r| &r.generated_tokens),
    ),
    counter(
        "vllm:request_success_total",
        "Finished requests by reason: stop, length, or abort (failed, or the client disconnected)",
        Rows(ends),
    ),
    // Requests.
    gauge(
        "rocmforge_requests_running",
        "Running requests",
        One(|s| of(s.snapshot.running)),
    ),
    gauge(
        "rocmforge_requests_running_max",
        "Maximum number of running requests (max_sequences)",
        One(|s| of(s.running_max)),
    ),
    gauge(
        "rocmforge_requests_queued",
        "Requests in the queue",
        One(|s| of(s.snapshot.queued)),
    ),
    gauge(
        "rocmforge_requests_queued_max",
        "Maximum number of requests in the queue (queue_capacity)",
        One(|s| of(s.snapshot.queue_capacity)),
    ),
    gauge(
        "rocmforge_image_memory_bytes",
        "Memory reserved for images of requests that are fetched, decoded or wait, in bytes",
        One(|s| number(s.image_memory)),
    ),
    counter(
        "rocmforge_images_read_total",
        "Images that vision towers computed; one whose result is kept is not computed again",
        One(|s| number(s.snapshot.images_read)),
    ),
    counter(
        "rocmforge_interleaved_passes_total",
        "Decode passes that ran between the steps of a MoE model's long prefill",
        One(|s| number(s.snapshot.interleaved_passes)),
    ),
    counter(
        "rocmforge_suspended_passes_total",
        "Passes that were suspended between two of their steps so that other requests could run",
        One(|s| number(s.snapshot.suspensions)),
    ),
    counter(
        "rocmforge_broken_gaps_total",
        "Gaps between tokens that were longer than promised (max_gap_ms), by priority and by what \
         most of the gap went to",
        Rows(broken_gaps),
    ),
    counter(
        "rocmforge_recomputed_tokens_total",
        "Tokens that preempted requests recomputed after they were resumed",
        One(|s| number(s.snapshot.host_tier.again_tokens)),
    ),
    gauge(
        "rocmforge_peer_requests_running",
        "Running requests of a user or token",
        OfPeer(|s, peer| of(s.requests(peer).0)),
    ),
    gauge(
        "rocmforge_peer_requests_queued",
        "Requests of a user or token in the queue",
        OfPeer(|s, peer| of(s.requests(peer).1)),
    ),
    gauge(
        "rocmforge_peer_prompt_bytes",
        "Size of the prompts of a user's or token's unfinished requests, in bytes",
        OfPeer(|_, peer| peer.prompt_bytes as f64),
    ),
    counter(
        "rocmforge_peer_tokens_total",
        "Prompt and generated tokens of a user or token",
        OfPeer(|_, peer| peer.tokens as f64),
    ),
    counter(
        "rocmforge_peer_refused_total",
        "Requests of a user or token that were rejected, by the limit that they exceeded",
        Rows(refused),
    ),
    // Device memory.
    gauge(
        "rocmforge_budget_bytes",
        "Device memory budget in bytes",
        One(|s| number(s.snapshot.cache.budget_bytes)),
    ),
    gauge(
        "rocmforge_peak_bytes",
        "Largest amount of device memory held since the start, in bytes",
        One(|s| number(s.snapshot.peak_bytes)),
    ),
    gauge(
        "rocmforge_weight_bytes",
        "Device memory used by resident weights, in bytes",
        One(|s| number(weights_held(&s.snapshot.cache))),
    ),
    gauge(
        "rocmforge_in_flight_bytes",
        "Weights being uploaded to the device, in bytes",
        One(|s| number(s.snapshot.cache.in_flight_bytes)),
    ),
    gauge(
        "rocmforge_pinned_bytes",
        "Device memory used by pinned weights, which are never evicted, in bytes",
        One(|s| number(s.snapshot.cache.pinned_bytes)),
    ),
    gauge(
        "rocmforge_shared_bytes",
        "Device memory saved because weights of several models are equal, in bytes",
        One(|s| number(s.snapshot.cache.shared_bytes)),
    ),
    gauge(
        "rocmforge_kv_bytes",
        "Device memory used by the KV cache of unfinished requests, in bytes",
        One(|s| number(s.snapshot.cache.kv_bytes)),
    ),
    gauge(
        "rocmforge_prefix_cache_bytes",
        "Device memory used by the prefix cache, in bytes",
        One(|s| number(s.snapshot.cache.prefix_bytes)),
    ),
    gauge(
        "rocmforge_scratch_bytes",
        "Device memory used by scratch buffers, in bytes",
        One(|s| number(s.snapshot.cache.scratch_bytes)),
    ),
    gauge(
        "rocmforge_keep_free_bytes",
        "GPU memory to keep free for other programs (keep_free), in bytes",
        Maybe(|s| Some(number(s.snapshot.keep_free?.bytes))),
    ),
    gauge(
        "rocmforge_keep_free_given_up_bytes",
        "Current reduction of the budget because other programs hold GPU memory, in bytes",
        Maybe(|s| Some(number(s.snapshot.keep_free?.given_up_bytes))),
    ),
    counter(
        "rocmforge_keep_free_shrinks_total",
        "Times that the budget was reduced because other programs hold GPU memory",
        Maybe(|s| Some(number(s.snapshot.keep_free?.shrinks))),
    ),
    counter(
        "rocmforge_keep_free_grows_total",
        "Times that the budget grew again after other programs had freed GPU memory",
        Maybe(|s| Some(number(s.snapshot.keep_free?.grows))),
    ),
    gauge(
        "rocmforge_others_memory_bytes",
        "GPU memory held by other processes, where the daemon watches for them (yield_to), in bytes",
        Maybe(|s| Some(number(s.snapshot.yielding?.others_bytes))),
    ),
    gauge(
        "rocmforge_yielding",
        "Whether the budget is reduced because another process uses the GPU (yield_to): 0 or 1",
        Maybe(|s| Some(number(u64::from(s.snapshot.yielding?.is_yielding)))),
    ),
    counter(
        "rocmforge_yields_total",
        "Times that the budget was reduced because another process began to use the GPU (yield_to)",
        Maybe(|s| Some(number(s.snapshot.yielding?.count))),
    ),
    gauge(
        "rocmforge_memory_released",
        "Whether GPU memory is given back until the next request (idle_release): 0 or 1",
        One(|s| number(u64::from(s.snapshot.released_budget.is_some()))),
    ),
    gauge(
        "rocmforge_device_closed",
        "Whether the GPU is closed until the next request, with all that its driver holds for the daemon: 0 or 1",
        One(|s| number(u64::from(s.snapshot.device_closed))),
    ),
    counter(
        "rocmforge_memory_releases_total",
        "Times that GPU memory was given back because the daemon was idle, or on request",
        One(|s| number(s.snapshot.releases)),
    ),
    // Host memory.
    gauge(
        "rocmforge_host_kv_bytes",
        "Host memory used by KV cache that was evicted from the GPU, in bytes",
        One(|s| number(s.snapshot.host_tier.bytes)),
    ),
    gauge(
        "rocmforge_host_kv_budget_bytes",
        "Host memory available to KV cache that was evicted from the GPU, in bytes",
        One(|s| number(s.snapshot.host_tier.budget_bytes)),
    ),
    counter(
        "rocmforge_host_kv_saved_total",
        "KV pages and recurrent states copied from the GPU to host memory",
        One(|s| number(s.snapshot.host_tier.saved)),
    ),
    counter(
        "rocmforge_host_kv_restored_total",
        "KV pages and recurrent states copied back from host memory to the GPU",
        One(|s| number(s.snapshot.host_tier.restored)),
    ),
    counter(
        "rocmforge_host_kv_dropped_total",
        "KV pages and recurrent states evicted from the GPU without a copy in host memory",
        One(|s| number(s.snapshot.host_tier.dropped)),
    ),
    // KV cache on disk.
    gauge(
        "rocmforge_kv_disk_bytes",
        "Disk space used by KV cache (kv_disk), in bytes",
        Maybe(|s| Some(number(s.snapshot.kv_disk?.store.bytes))),
    ),
    gauge(
        "rocmforge_kv_disk_queued_bytes",
        "KV cache that waits to be written to disk, in bytes",
        Maybe(|s| Some(number(s.snapshot.kv_disk?.store.queued_bytes))),
    ),
    gauge(
        "rocmforge_kv_disk_paused",
        "1 while writing KV cache to disk is paused after an error, else 0",
        Maybe(|s| Some(number(s.snapshot.kv_disk?.store.is_paused.into()))),
    ),
    counter(
        "rocmforge_kv_disk_written_bytes_total",
        "KV cache written to disk, in bytes",
        Maybe(|s| Some(number(s.snapshot.kv_disk?.store.written_bytes))),
    ),
    counter(
        "rocmforge_kv_disk_read_bytes_total",
        "KV cache read from disk, in bytes",
        Maybe(|s| Some(number(s.snapshot.kv_disk?.store.read_bytes))),
    ),
    counter(
        "rocmforge_kv_disk_requests_total",
        "Requests that began with a prefix read from disk",
        Maybe(|s| Some(number(s.snapshot.kv_disk?.requests))),
    ),
    counter(
        "rocmforge_kv_disk_reused_tokens_total",
        "Prompt tokens that were read from disk instead of computed",
        Maybe(|s| Some(number(s.snapshot.kv_disk?.reused_tokens))),
    ),
    counter(
        "rocmforge_kv_disk_skipped_total",
        "Damaged, torn, foreign and incompatible files and entries of kv_disk that were skipped",
        Maybe(|s| Some(number(s.snapshot.kv_disk?.store.skipped.all()))),
    ),
    counter(
        "rocmforge_kv_disk_write_errors_total",
        "Failed writes of KV cache to disk",
        Maybe(|s| Some(number(s.snapshot.kv_disk?.store.write_errors))),
    ),
    counter(
        "rocmforge_kv_disk_read_errors_total",
        "Failed reads of KV cache from disk",
        Maybe(|s| Some(number(s.snapshot.kv_disk?.store.read_errors))),
    ),
    // Memory pressure.
    gauge(
        "rocmforge_host_pressure_held_bytes",
        "Host memory that can be given back under memory pressure, in bytes",
        Maybe(|s| Some(number(s.host_pressure()?.held_bytes))),
    ),
    gauge(
        "rocmforge_host_pressure_given_up_bytes",
        "Current reduction of the host memory budget because of memory pressure, in bytes",
        Maybe(|s| Some(number(s.host_pressure()?.given_up_bytes))),
    ),
    counter(
        "rocmforge_host_pressure_shrinks_total",
        "Times that host memory was given back because of memory pressure",
        Maybe(|s| Some(number(s.host_pressure()?.shrinks))),
    ),
    counter(
        "rocmforge_host_pressure_grows_total",
        "Times that the host memory budget grew again after memory pressure",
        Maybe(|s| Some(number(s.host_pressure()?.grows))),
    ),
    // Models and their weights.
    gauge(
        "rocmforge_models",
        "Loaded models",
        One(|s| s.snapshot.models.len() as f64),
    ),
    gauge(
        "rocmforge_model_requests",
        "Running and queued requests of a model",
        OfModel(|m| of(m.requests)),
    ),
    gauge(
        "rocmforge_model_weight_bytes",
        "Size of a model's weights in bytes",
        OfModel(|m| number(weights(m))),
    ),
    gauge(
        "rocmforge_model_resident_bytes",
        "Weights of a model that are resident on the device, in bytes",
        OfModel(|m| number(resident(m))),
    ),
    gauge(
        "rocmforge_model_residency_ratio",
        "Share of a model's weights that is resident on the device, from 0 to 1",
        OfModel(|m| number(resident(m)) / number(weights(m).max(1))),
    ),
    gauge(
        "rocmforge_model_in_flight_bytes",
        "Weights of a model being uploaded to the device, in bytes",
        OfModel(|m| number(m.cache.in_flight_bytes)),
    ),
    gauge(
        "rocmforge_model_expected_first_token_seconds",
        "Expected time to first token of a request that arrives now and does not queue, in seconds: \
         upload of absent weights at the measured rate, and a prefill as measured. Absent until \
         either was measured",
        Rows(expected),
    ),
    gauge(
        "rocmforge_measured_upload_bytes_per_second",
        "Measured upload rate of weights, in bytes per second: moving average over requests whose \
         first token waited for uploads",
        Maybe(|s| s.measured.upload_rate()),
    ),
    gauge(
        "rocmforge_link_bytes_per_second",
        "Upload rate of the link to the GPU, in bytes per second, by timed copies. \
         Absent until measured",
        Maybe(|s| s.snapshot.link_bytes_per_s.map(number)),
    ),
    counter(
        "rocmforge_segment_hits_total",
        "Segment cache hits: weight segments that were resident when a pass needed them",
        OfModel(|m| number(m.cache.hits)),
    ),
    counter(
        "rocmforge_segment_misses_total",
        "Segment cache misses: weight segments that were not resident when a pass needed them",
        OfModel(|m| number(m.cache.misses)),
    ),
    counter(
        "rocmforge_uploads_total",
        "Completed uploads of weight segments to the device",
        OfModel(|m| number(m.cache.uploads)),
    ),
    counter(
        "rocmforge_uploaded_bytes_total",
        "Weights uploaded to the device, in bytes",
        OfModel(|m| number(m.cache.uploaded_bytes)),
    ),
    counter(
        "rocmforge_background_uploaded_bytes_total",
        "Weights uploaded in the background while other models ran, in bytes",
        One(|s| number(s.snapshot.uploaded_aside_bytes)),
    ),
    counter(
        "rocmforge_background_loads_total",
        "Cold models whose files were read in the background while other models ran",
        One(|s| number(s.snapshot.brought_aside)),
    ),
    counter(
        "rocmforge_direct_read_bytes_total",
        "Bytes of a model's files that were read with O_DIRECT, past the page cache",
        OfModel(|m| number(m.model.file().direct_bytes())),
    ),
    counter(
        "rocmforge_evictions_total",
        "Evicted weight segments by model and cause",
        Rows(evictions),
    ),
    counter(
        "rocmforge_cpu_compute_bytes_total",
        "Weights that the CPU computed with instead of their being uploaded to the GPU, in bytes",
        One(|s| number(s.snapshot.hosted.bytes)),
    ),
    counter(
        "rocmforge_cpu_compute_seconds_total",
        "Time that the CPU computed with weights that were not on the GPU, in seconds",
        One(|s| s.snapshot.hosted.took.as_secs_f64()),
    ),
    // The device and the daemon.
    gauge(
        "rocmforge_device_info",
        "The device in use: kind, name, architecture and driver version as labels",
        Rows(|s, rows| {
            let device = &s.snapshot.device;
            let labels = [
                ("kind", device.kind.name()),
                ("name", &device.name),
                ("arch", &device.arch),
                ("driver", &device.driver),
            ];
            rows.add(&labels, 1.0);
        }),
    ),
    gauge(
        "rocmforge_device_unused_gpu",
        "1 if the CPU computes although the machine has a GPU, because no runtime can use the GPU; \
         else 0",
        One(|s| f64::from(u8::from(s.snapshot.device.unused_gpu.is_some()))),
    ),
    gauge(
        "rocmforge_device_memory_bytes",
        "Memory of the device in bytes",
        One(|s| number(s.snapshot.device.memory_bytes)),
    ),
    gauge(
        "rocmforge_device_free_bytes",
        "Free memory of the device in bytes, as the driver reports it",
        Maybe(|s| s.snapshot.device.free_bytes.map(number)),
    ),
    gauge(
        "rocmforge_device_lost",
        "1 if the device has failed permanently, with the kind of failure as label; else 0",
        Rows(|s, rows| match &s.snapshot.device_lost {
            Some(loss) => rows.add(&[("kind", loss.kind.label())], 1.0),
            None => rows.add(&[], 0.0),
        }),
    ),
    gauge(
        "rocmforge_file_wait_seconds",
        "Time for which the daemon has waited for a model file on a hung or slow file system, in \
         seconds; else 0",
        One(|s| {
            let wait = s.snapshot.waits_for.as_ref();
            wait.map_or(0.0, |wait| wait.since.elapsed().as_secs_f64())
        }),
    ),
    gauge(
        "rocmforge_uptime_seconds",
        "Time since the daemon started, in seconds",
        One(|s| s.uptime_s),
    ),
    gauge(
        "rocmforge_draining",
        "1 while the daemon shuts down and accepts no new requests, else 0",
        One(|s| f64::from(u8::from(s.is_draining))),
    ),
];

pub(super) fn number(n: u64) -> f64 {
    n as f64
}

fn of(n: u32) -> f64 {
    f64::from(n)
}

/// Bytes of weights on the device.
fn weights_held(cache: &CacheStatus) -> u64 {
    let others = cache.kv_bytes + cache.prefix_bytes + cache.scratch_bytes;
    cache.resident_bytes.saturating_sub(others)
}

fn weights(status: &ModelStatus) -> u64 {
    status.segments.iter().map(|s| s.bytes).sum()
}

fn resident(status: &ModelStatus) -> u64 {
    let is_there = |segment: &&SegmentStatus| segment.state == SegmentState::Resident;
    status
        .segments
        .iter()
        .filter(is_there)
        .map(|s| s.bytes)
        .sum()
}

fn refused(source: &Source<'_>, rows: &mut Lines<'_>) {
    for used in &source.peers {
        let peer = used.peer.to_string();
        for (limit, n) in Limit::ALL.iter().zip(used.refused) {
            rows.add(&[(PEER, &peer), ("limit", limit.key())], n as f64);
        }
    }
}
