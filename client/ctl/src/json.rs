//! Answers as JSON. Keys are the field names of the `.proto` files, enums are
//! lowercase words. Token bytes come twice: as text with U+FFFD for what is no
//! UTF-8, and exactly, in hexadecimal. 64-bit numbers that are no counts are
//! strings, as JSON's readers round them.

use rocmforge_client::proto::v1::*;
use serde_json::{Map, Value, json};

/// "resident" of SegmentState and so on; "unknown" for values this program is
/// too old to know.
macro_rules! words {
    ($function:ident, $type:ident, $($value:ident => $word:literal),+ $(,)?) => {
        /// The value as a word.
        pub(crate) fn $function(value: $type) -> &'static str {
            match value {
                $($type::$value => $word,)+
                $type::Unspecified => "unknown",
            }
        }
    };
}

words!(finish_reason, FinishReason,
    Stop => "stop", StopString => "stop_string", MaxTokens => "max_tokens",
    ContextFull => "context_full", StopToken => "stop_token");
words!(pooling, Pooling, Mean => "mean", First => "first", Last => "last");
words!(segment_state, SegmentState,
    Absent => "absent", Uploading => "uploading", Resident => "resident");
words!(keep_reason, KeepReason,
    Pinned => "pinned", InUse => "in_use", Uploading => "uploading");
words!(cache_policy, CachePolicy, PassAware => "pass-aware", Lru => "lru");
words!(device_kind, DeviceKind, Host => "host", Hip => "hip", Cuda => "cuda");
words!(check_outcome, CheckOutcome,
    Passed => "passed", Failed => "failed", Skipped => "skipped", Note => "note");
words!(server_state, ServerState,
    Serving => "serving", Draining => "draining", DeviceLost => "device_lost");

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// One line about a model.
pub(crate) fn summary(m: &ModelSummary) -> Value {
    json!({
        "name": m.name,
        "architecture": m.architecture,
        "path": m.path,
        "n_params": m.n_params,
        "quantization": m.quantization,
        "file_bytes": m.file_bytes,
        "weight_bytes": m.weight_bytes,
        "resident_bytes": m.resident_bytes,
        "n_segments": m.n_segments,
        "n_segments_resident": m.n_segments_resident,
        "n_segments_pinned": m.n_segments_pinned,
        "active_requests": m.active_requests,
        "n_ctx_train": m.n_ctx_train,
    })
}

/// The files that could be loaded.
pub(crate) fn files(found: &ListFilesResponse) -> Value {
    let files = found.files.iter().map(|file| {
        json!({
            "path": file.path,
            "size_bytes": file.size_bytes,
            "mtime_unix_ms": file.mtime_unix_ms,
            "loaded_as": file.loaded_as,
            "name": file.name,
        })
    });
    let unserved = found.unserved.iter().map(
        |file| json!({"path": file.path, "reason": file.reason, "is_trouble": file.is_trouble}),
    );
    let directories = found.directories.iter().map(|dir| {
        let trouble = (!dir.trouble.is_empty()).then_some(&dir.trouble);
        json!({"path": dir.path, "trouble": trouble})
    });
    json!({
        "files": files.collect::<Vec<_>>(),
        "is_cut": found.is_cut,
        "unserved": unserved.collect::<Vec<_>>(),
        "directories": directories.collect::<Vec<_>>(),
    })
}

/// Everything about a model.
pub(crate) fn model(m: &Model) -> Value {
    let file = m.file.as_ref().map(|file| {
        json!({
            "path": file.path,
            "size_bytes": file.size_bytes,
            "mtime_unix_ms": file.mtime_unix_ms,
            "gguf_version": file.gguf_version,
        })
    });
    let rope = m.rope.as_ref().map(|rope| {
        json!({
            "freq_base": rope.freq_base,
            "freq_scale": rope.freq_scale,
            "n_rot": rope.n_rot,
            "scaling": rope.scaling,
        })
    });
    let quantization = m
        .quantization
        .iter()
        .map(|share| json!({"type": share.r#type, "tensors": share.tensors, "bytes": share.bytes}));
    let segments = m.segments.iter().map(|segment| {
        json!({
            "index": segment.index,
            "name": segment.name,
            "bytes": segment.bytes,
            "state": segment_state(segment.state()),
            "pinned": segment.pinned,
            "in_use": segment.in_use,
        })
    });
    json!({
        "name": m.name,
        "architecture": m.architecture,
        "title": m.title,
        "n_params": m.n_params,
        "file": file,
        "n_ctx_train": m.n_ctx_train,
        "n_embd": m.n_embd,
        "n_layer": m.n_layer,
        "n_head": m.n_head,
        "n_head_kv": m.n_head_kv,
        "n_embd_head": m.n_embd_head,
        "n_ff": m.n_ff,
        "n_vocab": m.n_vocab,
        "n_expert": m.n_expert,
        "n_expert_used": m.n_expert_used,
        "rope": rope,
        "tokenizer": m.tokenizer,
        "has_chat_template": m.has_chat_template,
        "bos_token_id": m.bos_token_id,
        "eos_token_id": m.eos_token_id,
        "quantization": quantization.collect::<Vec<_>>(),
        "segments": segments.collect::<Vec<_>>(),
        "weight_bytes": m.weight_bytes,
        "resident_bytes": m.resident_bytes,
        "kv_bytes_per_token": m.kv_bytes_per_token,
        "kv_type": m.kv_type,
        "draft": (!m.draft.is_empty()).then_some(&m.draft),
        "active_requests": m.active_requests,
        "defaults": m.defaults.as_ref().map(defaults),
    })
}

/// What requests of a declared model have where they leave it unset.
pub(crate) fn defaults(defaults: &ModelDefaults) -> Value {
    let named = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    let all = json!({
        "temperature": defaults.temperature,
        "top_k": defaults.top_k,
        "top_p": defaults.top_p,
        "min_p": defaults.min_p,
        "repeat_penalty": defaults.repeat_penalty,
        "presence_penalty": defaults.presence_penalty,
        "frequency_penalty": defaults.frequency_penalty,
        "penalty_last_n": defaults.penalty_last_n,
        "max_tokens": defaults.max_tokens,
        "priority": named(&defaults.priority),
        "template": named(&defaults.template),
    });
    let Value::Object(mut all) = all else {
        return all;
    };
    all.retain(|_, value| !value.is_null());
    all.into()
}

/// A piece of generated text.
pub(crate) fn generated(piece: &GeneratePiece) -> Value {
    let mut value = json!({"text": piece.text, "token_ids": piece.token_ids});
    if piece.choice > 0 {
        value["choice"] = piece.choice.into();
    }
    if !piece.reasoning.is_empty() {
        value["reasoning"] = piece.reasoning.clone().into();
    }
    if !piece.tool_calls.is_empty() {
        value["tool_calls"] = piece.tool_calls.iter().map(tool_call).collect();
    }
    if !piece.logprobs.is_empty() {
        value["logprobs"] = piece.logprobs.iter().map(token).collect();
    }
    value
}

/// A call of a tool.
pub(crate) fn tool_call(call: &ToolCall) -> Value {
    json!({"id": call.id, "name": call.name, "arguments": call.arguments})
}

/// A rendered conversation.
pub(crate) fn rendered(answer: &RenderResponse) -> Value {
    json!({"text": answer.text, "ids": answer.ids})
}

/// The vectors of texts.
pub(crate) fn embedded(answer: &EmbedResponse) -> Value {
    let vectors = answer.embeddings.iter();
    let vectors = vectors.map(|one| json!({"values": one.values, "tokens": one.tokens}));
    json!({
        "embeddings": vectors.collect::<Vec<_>>(),
        "pooling": pooling(answer.pooling()),
        "prompt_tokens": answer.prompt_tokens,
        "total_ms": answer.total_ms,
    })
}

/// How relevant documents are.
pub(crate) fn ranked(answer: &RerankResponse) -> Value {
    let results = answer.results.iter();
    let results = results.map(|one| json!({"index": one.index, "score": one.score}));
    json!({
        "results": results.collect::<Vec<_>>(),
        "prompt_tokens": answer.prompt_tokens,
        "total_ms": answer.total_ms,
    })
}

/// The outcome of a generation.
pub(crate) fn outcome(done: &GenerateDone) -> Value {
    let mut value = json!({
        "finish_reason": finish_reason(done.finish_reason()),
        "prompt_tokens": done.prompt_tokens,
        "reused_tokens": done.reused_tokens,
        "drafted_tokens": done.drafted_tokens,
        "accepted_tokens": done.accepted_tokens,
        "generated_tokens": done.generated_tokens,
        "ttft_ms": done.ttft_ms,
        "decode_tokens_per_s": done.decode_tokens_per_s,
        "prefill_tokens_per_s": done.prefill_tokens_per_s,
        "cache_hits": done.cache_hits,
        "cache_misses": done.cache_misses,
        "uploaded_bytes": done.uploaded_bytes,
        "queue_ms": done.queue_ms,
        "total_ms": done.total_ms,
        "seed": done.seed.to_string(),
    });
    if done.choice > 0 || done.others_go_on {
        value["choice"] = done.choice.into();
    }
    if done.tool_calls > 0 {
        value["tool_calls"] = done.tool_calls.into();
    }
    if !done.stop_string.is_empty() {
        value["stop_string"] = done.stop_string.clone().into();
    }
    if let Some(id) = done.stop_token_id {
        value["stop_token_id"] = id.into();
    }
    value
}

fn token(token: &TokenLogprob) -> Value {
    let mut value = json!({
        "id": token.id,
        "piece": text(&token.piece),
        "piece_hex": hex(&token.piece),
        "logprob": token.logprob,
    });
    if !token.top.is_empty() {
        let top = token.top.iter().map(|top| {
            json!({
                "id": top.id,
                "piece": text(&top.piece),
                "piece_hex": hex(&top.piece),
                "logprob": top.logprob,
            })
        });
        value["top"] = top.collect();
    }
    value
}

/// The score of a text.
pub(crate) fn score(score: &ScoreResponse) -> Value {
    json!({
        "sum_logprob": score.sum_logprob,
        "n_scored": score.n_scored,
        "perplexity": score.perplexity,
        "cache_hits": score.cache_hits,
        "cache_misses": score.cache_misses,
        "uploaded_bytes": score.uploaded_bytes,
        "total_ms": score.total_ms,
        "tokens": score.tokens.iter().map(token).collect::<Vec<_>>(),
    })
}

/// The token ids of a text.
pub(crate) fn tokens(answer: &TokenizeResponse) -> Value {
    let pieces: Vec<String> = answer.pieces.iter().map(|piece| text(piece)).collect();
    let exact: Vec<String> = answer.pieces.iter().map(|piece| hex(piece)).collect();
    json!({"ids": answer.ids, "pieces": pieces, "pieces_hex": exact})
}

fn usage(usage: &CacheUsage) -> Map<String, Value> {
    let mut value: Map<String, Value> = [
        ("resident_bytes", usage.resident_bytes),
        ("in_flight_bytes", usage.in_flight_bytes),
        ("pinned_bytes", usage.pinned_bytes),
        ("kv_bytes", usage.kv_bytes),
        ("prefix_bytes", usage.prefix_bytes),
        ("scratch_bytes", usage.scratch_bytes),
        ("hits", usage.hits),
        ("misses", usage.misses),
        ("evictions", usage.evictions),
        ("uploads", usage.uploads),
        ("uploaded_bytes", usage.uploaded_bytes),
    ]
    .into_iter()
    .map(|(key, value)| (key.to_owned(), value.into()))
    .collect();
    let causes = evictions_by(usage).into_iter();
    let causes: Map<String, Value> = causes
        .map(|(cause, n)| (cause.to_owned(), n.into()))
        .collect();
    value.insert("evictions_by".into(), causes.into());
    value
}

/// Evicted segments by cause.
pub(crate) fn evictions_by(usage: &CacheUsage) -> [(&'static str, u64); 8] {
    let causes = usage.evictions_by.unwrap_or_default();
    [
        ("other_model", causes.other_model),
        ("own_pass", causes.own_pass),
        ("kv", causes.kv),
        ("scratch", causes.scratch),
        ("budget", causes.budget),
        ("clear", causes.clear),
        ("unload", causes.unload),
        ("spoiled", causes.spoiled),
    ]
}

/// The counts of the cache: the totals under "total", as on the wire, and at the
/// top, and under "models" those of each model by its name.
pub(crate) fn stats(stats: &StatsResponse) -> Value {
    let mut value = Map::new();
    value.insert("budget_bytes".into(), stats.budget_bytes.into());
    value.insert("peak_bytes".into(), stats.peak_bytes.into());
    value.insert("policy".into(), cache_policy(stats.policy()).into());
    let total = usage(&stats.total.unwrap_or_default());
    value.insert("total".into(), total.clone().into());
    value.append(&mut total.clone());
    let tier = stats.host_tier.as_ref().map(|tier| {
        json!({
            "budget_bytes": tier.budget_bytes,
            "bytes": tier.bytes,
            "saved": tier.saved,
            "restored": tier.restored,
            "dropped": tier.dropped,
            "computed_again_tokens": tier.computed_again_tokens,
        })
    });
    value.insert("host_tier".into(), tier.into());
    let models: Map<String, Value> = stats
        .models
        .iter()
        .map(|model| {
            (
                model.name.clone(),
                usage(&model.usage.unwrap_or_default()).into(),
            )
        })
        .collect();
    value.insert("models".into(), models.into());
    value.into()
}

/// What was cleared and what stayed.
pub(crate) fn cleared(answer: &ClearResponse) -> Value {
    let kept = answer.kept.iter().map(|kept| {
        json!({
            "model": kept.model,
            "index": kept.index,
            "name": kept.name,
            "bytes": kept.bytes,
            "reason": keep_reason(kept.reason()),
        })
    });
    json!({
        "freed_bytes": answer.freed_bytes,
        "freed_segments": answer.freed_segments,
        "kept": kept.collect::<Vec<_>>(),
    })
}

/// What a reload took and what it did not.
pub(crate) fn reloaded(reloaded: &ReloadResponse) -> Value {
    let list = |changes: &[SettingChange]| -> Vec<Value> {
        let change = |change: &SettingChange| {
            json!({
                "setting": change.setting,
                "before": change.before,
                "now": change.now,
                "reason": change.reason,
            })
        };
        changes.iter().map(change).collect()
    };
    json!({"taken": list(&reloaded.taken), "not_taken": list(&reloaded.not_taken)})
}

/// What a new budget came to.
pub(crate) fn budget(answer: &SetBudgetResponse) -> Value {
    json!({
        "budget_bytes": answer.budget_bytes,
        "effective_budget_bytes": answer.effective_budget_bytes,
        "resident_bytes": answer.resident_bytes,
        "in_flight_bytes": answer.in_flight_bytes,
        "evicted_segments": answer.evicted_segments,
        "evicted_bytes": answer.evicted_bytes,
    })
}

fn device(device: &Device) -> Value {
    let memory = device.memory.as_ref().map(|memory| {
        json!({
            "free_bytes": memory.free_bytes,
            "allocated_bytes": memory.allocated_bytes,
            "capacity_bytes": memory.capacity_bytes,
        })
    });
    json!({
        "kind": device_kind(device.kind()),
        "name": device.name,
        "memory_bytes": device.memory_bytes,
        "isa": device.isa,
        "threads": device.threads,
        "ordinal": device.ordinal,
        "driver_version": device.driver_version,
        "compute_units": device.compute_units,
        "allocations": device.allocations,
        "findings": device.findings,
        "unused_gpu": (!device.unused_gpu.is_empty()).then_some(&device.unused_gpu),
        "memory": memory,
    })
}

fn driver(driver: &GpuDriver) -> Value {
    let tried = driver
        .tried
        .iter()
        .map(|attempt| json!({"library": attempt.library, "message": attempt.message}));
    let devices = driver.devices.iter().map(|device| {
        json!({
            "ordinal": device.ordinal,
            "name": device.name,
            "arch": device.arch,
            "memory_bytes": device.memory_bytes,
            "free_bytes": device.free_bytes,
            "compute_units": device.compute_units,
            "wave_size": device.wave_size,
            "pci_address": device.pci_address,
            "integrated": device.integrated,
            "in_use": device.in_use,
        })
    });
    json!({
        "kind": device_kind(driver.kind()),
        "tried": tried.collect::<Vec<_>>(),
        "library": driver.library,
        "driver_version": driver.driver_version,
        "runtime_version": driver.runtime_version,
        "devices": devices.collect::<Vec<_>>(),
        "errors": driver.errors,
    })
}

/// What a self-test came to, with the daemon's version.
pub(crate) fn device_check(checked: &CheckDeviceResponse, version: &str) -> Value {
    let checks = checked.checks.iter().map(|check| {
        json!({
            "name": check.name,
            "outcome": check_outcome(check.outcome()),
            "detail": check.detail,
            "ms": check.ms,
        })
    });
    json!({
        "version": version,
        "device": checked.device.as_ref().map(device),
        "checks": checks.collect::<Vec<_>>(),
        "took_ms": checked.took_ms,
    })
}

/// The GPU drivers and devices.
pub(crate) fn devices(found: &ListDevicesResponse) -> Value {
    json!({
        "in_use": found.in_use.as_ref().map(device),
        "drivers": found.drivers.iter().map(driver).collect::<Vec<_>>(),
        "passed_over": found.passed_over,
    })
}

/// A file that does not answer.
fn file_wait(wait: &FileWait) -> Value {
    let (waited_ms, all_wait) = (wait.waited_ms, wait.all_wait);
    json!({"model": wait.model, "path": wait.path, "waited_ms": waited_ms, "all_wait": all_wait})
}

/// The daemon as it is now.
pub(crate) fn status(status: &StatusResponse, socket: &std::path::Path) -> Value {
    json!({
        "version": status.version,
        "state": server_state(status.state()),
        "pid": status.pid,
        "socket": socket.to_string_lossy(),
        "uptime_ms": status.uptime_ms,
        "device": status.device.as_ref().map(device),
        "drivers": status.drivers.iter().map(driver).collect::<Vec<_>>(),
        "passed_over": status.passed_over,
        "waits_for": status.waits_for.as_ref().map(file_wait),
        "keep_free": status.keep_free.as_ref().map(|kept| json!({
            "bytes": kept.bytes,
            "given_up_bytes": kept.given_up_bytes,
            "shrinks": kept.shrinks,
            "grows": kept.grows,
        })),
        "host_pressure": status.host_pressure.as_ref().map(|host| json!({
            "percent": host.percent,
            "not_counted": host.not_counted,
            "held_bytes": host.held_bytes,
            "given_up_bytes": host.given_up_bytes,
            "shrinks": host.shrinks,
            "grows": host.grows,
        })),
        "budget_bytes": status.budget_bytes,
        "used_bytes": status.used_bytes,
        "queue_depth": status.queue_depth,
        "queue_capacity": status.queue_capacity,
        "running": status.running,
        "running_capacity": status.running_capacity,
        "model_dirs": status.model_dirs,
        "models": status.models.iter().map(summary).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stats_have_the_totals_on_top_and_each_model_by_name() {
        let counts = |hits| CacheUsage {
            hits,
            resident_bytes: 10 * hits,
            ..Default::default()
        };
        let value = stats(&StatsResponse {
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

    #[test]
    fn half_a_character_does_not_break_the_line() {
        let value = tokens(&TokenizeResponse {
            ids: vec![1],
            pieces: vec![vec![0xc3]],
        });
        assert_eq!(value["pieces"][0], "\u{fffd}");
        assert_eq!(value["pieces_hex"][0], "c3");
        let done = GenerateDone {
            seed: 14_466_886_325_030_996_175,
            ..Default::default()
        };
        assert_eq!(outcome(&done)["seed"], "14466886325030996175");
    }

    #[test]
    fn a_token_without_a_probability_has_null() {
        let first = TokenLogprob {
            id: 7,
            ..Default::default()
        };
        assert!(token(&first)["logprob"].is_null());
    }
}
