//! Converts the engine's published state to types of rocmforge.v1.

use std::sync::Arc;

use rocmforge_engine::LoadedModel;
use rocmforge_engine::api::{self as engine, CacheStatus, ModelStatus, SegmentStatus};
use rocmforge_ops::RopeScaling;
use rocmforge_proto::v1;
use rocmforge_service::declared::Book;
use rocmforge_service::defaults::Defaults;
use rocmforge_service::live::LiveReport;

/// Converts a model's status to all of its details, with its defaults if it is declared.
pub(super) fn model(status: &ModelStatus, declared: &Book) -> v1::Model {
    let model = &status.model;
    let info = model.model().info();
    let (file, tokenizer) = (model.file(), model.tokenizer());
    let residency = ResidencySums::of(status);
    v1::Model {
        name: model.name().to_owned(),
        architecture: info.architecture.to_owned(),
        title: info.title.clone().unwrap_or_default(),
        n_params: info.n_params,
        file: Some(v1::ModelFile {
            path: model.path().display().to_string(),
            size_bytes: file.size_bytes(),
            mtime_unix_ms: i64::try_from(file.mtime_ns() / 1_000_000).unwrap_or(i64::MAX),
            gguf_version: info.gguf_version,
        }),
        n_ctx_train: info.n_ctx_train,
        n_embd: info.n_embd,
        n_layer: info.n_layer,
        n_head: info.n_head,
        n_head_kv: info.n_head_kv,
        n_embd_head: info.head_dim,
        n_ff: info.n_ff,
        n_vocab: info.n_vocab,
        n_expert: info.n_expert,
        n_expert_used: info.n_expert_used,
        rope: Some(rope(model)),
        tokenizer: info.tokenizer.clone(),
        has_chat_template: model.template().is_some(),
        bos_token_id: tokenizer.bos(),
        eos_token_id: tokenizer.eos(),
        quantization: info
            .quantization
            .iter()
            .map(|share| v1::TensorTypeShare {
                r#type: share.ty.to_owned(),
                tensors: share.tensors,
                bytes: share.bytes,
            })
            .collect(),
        segments: segments(model, &status.segments),
        weight_bytes: residency.weight_bytes,
        resident_bytes: residency.resident_bytes,
        kv_bytes_per_token: info.kv_bytes_per_token,
        kv_type: info.kv_type.clone(),
        active_requests: status.requests,
        draft: status.draft.clone().unwrap_or_default(),
        mmproj: model
            .tower()
            .map(|tower| tower.path().display().to_string())
            .unwrap_or_default(),
        adapters: adapters(model),
        defaults: declared.model(model.name()).map(|m| defaults(&m.defaults)),
    }
}

fn adapters(model: &LoadedModel) -> Vec<v1::Adapter> {
    let scales = model.adapters().defaults();
    let list = model.adapters().list().iter().zip(scales);
    list.map(|(adapter, scale)| v1::Adapter {
        name: adapter.name.clone(),
        path: adapter.path.display().to_string(),
        scale,
        rank: adapter.rank as u32,
    })
    .collect()
}

fn defaults(defaults: &Defaults) -> v1::ModelDefaults {
    let template = defaults.template.as_ref();
    v1::ModelDefaults {
        temperature: defaults.temperature,
        top_k: defaults.top_k,
        top_p: defaults.top_p,
        min_p: defaults.min_p,
        repeat_penalty: defaults.repeat_penalty,
        presence_penalty: defaults.presence_penalty,
        frequency_penalty: defaults.frequency_penalty,
        penalty_last_n: defaults.penalty_last_n,
        max_tokens: defaults.max_tokens,
        priority: match defaults.class {
            Some(engine::Class::Interactive) => "interactive".to_owned(),
            Some(engine::Class::Batch) => "batch".to_owned(),
            None => String::new(),
        },
        template: template.map_or_else(String::new, |t| t.path.display().to_string()),
    }
}

fn rope(model: &LoadedModel) -> v1::Rope {
    // The first table is that of the layers that attend to everything.
    let Some(rope) = model.model().plan().ropes.first() else {
        return v1::Rope {
            freq_base: 0.0,
            freq_scale: 1.0,
            n_rot: 0,
            scaling: "none".to_owned(),
        };
    };
    let (freq_scale, scaling) = match rope.scaling {
        RopeScaling::Linear { factor } => ((1.0 / factor) as f32, "linear"),
        RopeScaling::Yarn { factor, .. } => ((1.0 / factor) as f32, "yarn"),
        RopeScaling::None if rope.long.is_some() => (1.0, "longrope"),
        RopeScaling::None if rope.factors.is_some() => (1.0, "llama3"),
        RopeScaling::None => (1.0, "none"),
    };
    v1::Rope {
        freq_base: rope.freq_base as f32,
        freq_scale,
        n_rot: rope.n_rot,
        scaling: scaling.to_owned(),
    }
}

fn segments(model: &Arc<LoadedModel>, states: &[SegmentStatus]) -> Vec<v1::Segment> {
    let described = model.model().info().segments.iter().zip(states);
    (0u32..)
        .zip(described)
        .map(|(index, (segment, status))| v1::Segment {
            index,
            name: segment.name.clone(),
            bytes: status.bytes,
            state: segment_state(status.state).into(),
            pinned: status.pinned,
            in_use: status.in_use,
        })
        .collect()
}

fn segment_state(state: engine::SegmentState) -> v1::SegmentState {
    match state {
        engine::SegmentState::Absent => v1::SegmentState::Absent,
        engine::SegmentState::InFlight => v1::SegmentState::Uploading,
        engine::SegmentState::Resident => v1::SegmentState::Resident,
    }
}

/// Converts a model's status to a summary.
pub(super) fn summary(status: &ModelStatus) -> v1::ModelSummary {
    let model = &status.model;
    let info = model.model().info();
    let residency = ResidencySums::of(status);
    v1::ModelSummary {
        name: model.name().to_owned(),
        architecture: info.architecture.to_owned(),
        path: model.path().display().to_string(),
        n_params: info.n_params,
        quantization: info
            .quantization
            .first()
            .map(|share| share.ty.to_owned())
            .unwrap_or_default(),
        file_bytes: model.file().size_bytes(),
        weight_bytes: residency.weight_bytes,
        resident_bytes: residency.resident_bytes,
        n_segments: status.segments.len() as u32,
        n_segments_resident: residency.n_resident,
        n_segments_pinned: residency.n_pinned,
        active_requests: status.requests,
        n_ctx_train: info.n_ctx_train,
    }
}

/// Summaries of all models, sorted by name.
pub(super) fn summaries(models: &[ModelStatus]) -> Vec<v1::ModelSummary> {
    let mut lines: Vec<_> = models.iter().map(summary).collect();
    lines.sort_by(|a, b| a.name.cmp(&b.name));
    lines
}

/// Sums over the segments of a model, or of a subset.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct ResidencySums {
    pub(super) n_segments: u32,
    pub(super) weight_bytes: u64,
    pub(super) n_resident: u32,
    pub(super) resident_bytes: u64,
    pub(super) n_pinned: u32,
    pub(super) pinned_bytes: u64,
}

impl ResidencySums {
    /// Counts all segments of a model.
    pub(super) fn of(status: &ModelStatus) -> Self {
        Self::of_segments(status, None)
    }

    /// Counts the given segments of a model, or all.
    pub(super) fn of_segments(status: &ModelStatus, asked: Option<&[u32]>) -> Self {
        let mut sum = Self::default();
        for (index, segment) in (0u32..).zip(status.segments.iter()) {
            if asked.is_some_and(|asked| !asked.contains(&index)) {
                continue;
            }
            sum.n_segments += 1;
            sum.weight_bytes += segment.bytes;
            if segment.state == engine::SegmentState::Resident {
                sum.n_resident += 1;
                sum.resident_bytes += segment.bytes;
            }
            if segment.pinned {
                sum.n_pinned += 1;
                sum.pinned_bytes += segment.bytes;
            }
        }
        sum
    }
}

/// Converts counts of the cache. The wire type has weights, KV and scratch separately; the engine's
/// `resident_bytes` is their sum and, in the total of a GPU, the block that the device keeps for
/// itself, which stays with the weights here.
pub(super) fn usage(cache: &CacheStatus) -> v1::CacheUsage {
    v1::CacheUsage {
        resident_bytes: cache
            .resident_bytes
            .saturating_sub(cache.kv_bytes + cache.prefix_bytes + cache.scratch_bytes),
        in_flight_bytes: cache.in_flight_bytes,
        pinned_bytes: cache.pinned_bytes,
        shared_bytes: cache.shared_bytes,
        kv_bytes: cache.kv_bytes,
        prefix_bytes: cache.prefix_bytes,
        scratch_bytes: cache.scratch_bytes,
        hits: cache.hits,
        misses: cache.misses,
        evictions: cache.evictions,
        uploads: cache.uploads,
        uploaded_bytes: cache.uploaded_bytes,
        evictions_by: Some(eviction_causes(cache)),
    }
}

fn eviction_causes(cache: &CacheStatus) -> v1::EvictionCauses {
    let of = |cause| cache.evictions_by.of(cause);
    v1::EvictionCauses {
        other_model: of(engine::EvictionCause::OtherModel),
        own_pass: of(engine::EvictionCause::OwnPass),
        kv: of(engine::EvictionCause::Kv),
        scratch: of(engine::EvictionCause::Scratch),
        budget: of(engine::EvictionCause::Budget),
        clear: of(engine::EvictionCause::Clear),
        unload: of(engine::EvictionCause::Unload),
        spoiled: of(engine::EvictionCause::Spoiled),
        shared: of(engine::EvictionCause::Shared),
    }
}

/// Converts the eviction policy.
pub(super) fn policy(policy: engine::Policy) -> v1::CachePolicy {
    match policy {
        engine::Policy::PassAware => v1::CachePolicy::PassAware,
        engine::Policy::Lru => v1::CachePolicy::Lru,
    }
}

/// Converts a segment that a clear left resident.
pub(super) fn kept(kept: engine::KeptSegment) -> v1::KeptSegment {
    v1::KeptSegment {
        reason: match kept.reason {
            engine::KeptReason::Pinned => v1::KeepReason::Pinned,
            engine::KeptReason::InUse => v1::KeepReason::InUse,
            engine::KeptReason::InFlight => v1::KeepReason::Uploading,
        }
        .into(),
        model: kept.model,
        index: kept.index,
        name: kept.name,
        bytes: kept.bytes,
    }
}

/// Converts a queued or running request.
pub(super) fn live(report: LiveReport) -> v1::LiveRequest {
    v1::LiveRequest {
        number: report.number,
        model: report.model,
        client: report.client,
        state: report.state.to_owned(),
        age_ms: report.age_ms,
        prompt_tokens: report.prompt_tokens,
        computed_tokens: report.computed_tokens,
        generated_tokens: report.generated_tokens,
        tokens_per_s: report.tokens_per_s,
        longest_gap_ms: report.longest_gap_ms,
        longest_gap_cause: report.longest_gap_cause.unwrap_or_default().to_owned(),
    }
}

/// Converts the reason for which a generation ended.
pub(super) fn finish(reason: engine::FinishReason) -> v1::FinishReason {
    match reason {
        engine::FinishReason::EndOfText => v1::FinishReason::Stop,
        engine::FinishReason::StopString { .. } => v1::FinishReason::StopString,
        engine::FinishReason::StopToken { .. } => v1::FinishReason::StopToken,
        engine::FinishReason::MaxTokens => v1::FinishReason::MaxTokens,
        engine::FinishReason::ContextFull => v1::FinishReason::ContextFull,
    }
}
