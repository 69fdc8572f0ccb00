//! What the fake daemon answers.

use rocmforge_client::proto::v1::*;
use tonic::Status;

/// The words that the fake generates.
pub const STORY: [&str; 5] = ["Once", " upon", " a", " time", ", héllo."];

/// A model of three segments, each in another state.
pub fn model(name: &str) -> Model {
    let segment = |index: u32, name: &str, state: SegmentState, pinned| Segment {
        index,
        name: name.into(),
        bytes: 1 << 20,
        state: state.into(),
        pinned,
        in_use: false,
    };
    Model {
        name: name.into(),
        architecture: "llama".into(),
        title: "Tiny Llama".into(),
        n_params: 5_012_345,
        file: Some(ModelFile {
            path: format!("/models/{name}.gguf"),
            size_bytes: 3 << 20,
            mtime_unix_ms: 1_700_000_000_000,
            gguf_version: 3,
        }),
        n_ctx_train: 512,
        n_embd: 256,
        n_layer: 2,
        n_head: 8,
        n_head_kv: 4,
        n_embd_head: 32,
        n_ff: 768,
        n_vocab: 4096,
        rope: Some(Rope {
            freq_base: 10_000.0,
            freq_scale: 1.0,
            n_rot: 32,
            scaling: "none".into(),
        }),
        tokenizer: "gpt2".into(),
        has_chat_template: true,
        bos_token_id: Some(1),
        eos_token_id: Some(2),
        quantization: vec![
            TensorTypeShare {
                r#type: "Q4_K".into(),
                tensors: 14,
                bytes: 2_500_000,
            },
            TensorTypeShare {
                r#type: "F32".into(),
                tensors: 5,
                bytes: 5120,
            },
        ],
        segments: vec![
            segment(0, "blk.0.attn", SegmentState::Resident, true),
            segment(1, "blk.0.ffn_up", SegmentState::Uploading, false),
            segment(2, "output", SegmentState::Absent, false),
        ],
        weight_bytes: 3 << 20,
        resident_bytes: 1 << 20,
        kv_bytes_per_token: 1024,
        kv_type: "f16".into(),
        ..Default::default()
    }
}

/// The same model on one line.
pub fn summary(name: &str) -> ModelSummary {
    ModelSummary {
        name: name.into(),
        architecture: "llama".into(),
        path: format!("/models/{name}.gguf"),
        n_params: 5_012_345,
        quantization: "Q4_K".into(),
        file_bytes: 3 << 20,
        weight_bytes: 3 << 20,
        resident_bytes: 1 << 20,
        n_segments: 3,
        n_segments_resident: 1,
        n_segments_pinned: 1,
        active_requests: 0,
        n_ctx_train: 512,
    }
}

/// The device that the fake says it computes on.
pub fn device() -> Device {
    Device {
        kind: DeviceKind::Host.into(),
        name: "Test CPU".into(),
        memory_bytes: 16 << 30,
        isa: "avx2".into(),
        threads: 2,
        ..Default::default()
    }
}

/// A HIP runtime without a card, and two NVIDIA cards.
pub fn drivers() -> Vec<GpuDriver> {
    let card = |ordinal, name: &str| GpuDevice {
        ordinal,
        name: name.into(),
        arch: "sm_90".into(),
        memory_bytes: 80 << 30,
        compute_units: 132,
        wave_size: 32,
        pci_address: format!("0000:0{ordinal}:00.0"),
        ..Default::default()
    };
    vec![
        GpuDriver {
            kind: DeviceKind::Hip.into(),
            tried: vec![LibraryAttempt {
                library: "libamdhip64.so.7".into(),
                message: "no such file".into(),
            }],
            errors: vec!["it was looked for in vain".into()],
            ..Default::default()
        },
        GpuDriver {
            kind: DeviceKind::Cuda.into(),
            library: "libcuda.so.1".into(),
            driver_version: "13.0".into(),
            runtime_version: "13.0".into(),
            devices: vec![card(0, "Card A"), card(1, "Card B")],
            ..Default::default()
        },
    ]
}

/// Counts of a cache.
pub fn usage() -> CacheUsage {
    CacheUsage {
        resident_bytes: 3 << 20,
        in_flight_bytes: 1 << 20,
        pinned_bytes: 1 << 20,
        kv_bytes: 512 << 10,
        prefix_bytes: 256 << 10,
        scratch_bytes: 256 << 10,
        hits: 75,
        misses: 25,
        evictions: 4,
        uploads: 9,
        uploaded_bytes: 9 << 20,
        evictions_by: None,
        shared_bytes: 0,
    }
}

/// A piece of one token.
pub fn piece(id: u32, text: &str) -> GenerateEvent {
    GenerateEvent {
        event: Some(generate_event::Event::Piece(GeneratePiece {
            text: text.into(),
            token_ids: vec![id],
            ..Default::default()
        })),
    }
}

/// The events of a generation; see `Fake::generate_text`.
pub fn script(prompt: &str, most: usize) -> Vec<Result<GenerateEvent, Status>> {
    let piece = |id, text| Ok(piece(id, text));
    match prompt {
        "endless" => return vec![],
        "hang" | "break" => return vec![piece(0, STORY[0])],
        "changed" => {
            let status = Status::data_loss("the file of \"tiny\" changed; load it again");
            return vec![piece(0, STORY[0]), Err(status)];
        }
        _ => {}
    }
    let mut events: Vec<_> = (0..).zip(STORY).map(|(id, text)| piece(id, text)).collect();
    events.truncate(most);
    // A kind of event that this version of the client does not know.
    events.insert(1, Ok(GenerateEvent { event: None }));
    let reason = if most < STORY.len() {
        FinishReason::MaxTokens
    } else {
        FinishReason::Stop
    };
    let done = GenerateDone {
        stop_token_id: None,
        longest_gap_ms: 14.0,
        longest_gap_cause: "own_passes".to_owned(),
        promised_gap_ms: None,
        broken_gaps: 0,
        finish_reason: reason.into(),
        prompt_tokens: 3,
        reused_tokens: 0,
        drafted_tokens: 0,
        accepted_tokens: 0,
        generated_tokens: most.min(STORY.len()) as u32,
        ttft_ms: 12.5,
        decode_tokens_per_s: 80.0,
        cache_hits: 7,
        cache_misses: 2,
        uploaded_bytes: 2 << 20,
        prefill_tokens_per_s: 240.0,
        queue_ms: 0.5,
        total_ms: 62.5,
        seed: 42,
        stop_string: String::new(),
        ..Default::default()
    };
    events.push(Ok(GenerateEvent {
        event: Some(generate_event::Event::Done(done)),
    }));
    events
}

/// A request that runs.
pub(super) fn live_request() -> LiveRequest {
    LiveRequest {
        number: 7,
        model: "tiny".into(),
        client: "user:1000".into(),
        state: "decode".into(),
        age_ms: 2_500,
        prompt_tokens: 12,
        computed_tokens: 20,
        generated_tokens: 9,
        tokens_per_s: Some(38.0),
        longest_gap_ms: Some(41.2),
        longest_gap_cause: "uploads".into(),
    }
}

/// Where the time of a request went.
pub(super) fn request_times(number: u64) -> RequestTimes {
    RequestTimes {
        number,
        id: format!("req-{number}"),
        call: "Chat".into(),
        model: "tiny".into(),
        client: "user:1000".into(),
        started_unix_ms: 1_700_000_000_000,
        code: "Ok".into(),
        total_ms: 120.0,
        cause: "uploads".into(),
        parts: vec![
            TimePart {
                name: "uploads".into(),
                text: "waiting for uploads of weights".into(),
                ms: 90.0,
                behind: Vec::new(),
            },
            TimePart {
                name: "queue".into(),
                text: "waiting in the queue".into(),
                ms: 30.0,
                behind: vec![TimeBehind {
                    model: "big".into(),
                    client: "another client".into(),
                    ms: 30.0,
                }],
            },
        ],
        prompt_tokens: 12,
        reused_tokens: 4,
        generated_tokens: 8,
        tokens_per_s: Some(20.0),
        longest_gap_ms: Some(14.0),
        longest_gap_cause: "own_passes".into(),
        promised_gap_ms: Some(20.0),
        broken_gaps: 0,
        weights: Some(AbsentWeights {
            uploaded_bytes: 3 << 20,
            disk_bytes: 1 << 20,
            cpu_bytes: 0,
            link_bytes_per_s: 2e9,
            link_measured_bytes_per_s: 8e9,
            displaced: vec![DisplacedWeights {
                cause: "other_model".into(),
                by_model: "big".into(),
                bytes: 2 << 20,
            }],
        }),
        advice: vec!["2.0 MiB more budget".into()],
        predictions: vec![RatePrediction {
            setting: "budget".into(),
            value: (4_u64 << 30).to_string(),
            tokens_per_s: 38.0,
            predicted_tokens_per_s: 71.0,
        }],
        no_effect: vec!["prefix_cache: none of the 40 prompt tokens were known".into()],
    }
}
