//! Every architecture's small model makes a plan that uses all of its tensors.

#![allow(clippy::unwrap_used, reason = "a test that fails says where")]

use std::path::{Path, PathBuf};

use rocmforge_gguf::write::GgufWriter;
use rocmforge_gguf::{Gguf, TensorType};
use rocmforge_model::{Error, ImageSizes, Model, Purpose};
use rocmforge_ops::{KvType, Mask, Op, RowCounts, SegmentKind, Step};

fn fixtures() -> Vec<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../tests/fixtures/arch");
    let mut files: Vec<PathBuf> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "gguf"))
        .collect();
    files.sort();
    files
}

fn model(path: &Path) -> Model {
    let bytes = std::fs::read(path).unwrap();
    let gguf = Gguf::parse(&bytes, bytes.len() as u64).unwrap();
    Model::from_gguf(&gguf).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

#[test]
fn a_plan_tells_whether_its_weights_are_floats() {
    // The first has a router of F32 beside F16; the last one of F32 beside quantized experts.
    let files = [
        ("arch/gemma4moe.gguf", true),
        ("tiny-llama-Q4_K_M.gguf", false),
        ("tiny-qwen3moe-Q4_K_M.gguf", false),
    ];
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../tests/fixtures");
    let counts = RowCounts {
        tokens: 1,
        outputs: 1,
    };
    for (file, floats) in files {
        let model = model(&dir.join(file));
        assert_eq!(model.plan().float_weights, floats, "{file}");
        assert_eq!(model.plan().scratch(counts).float_weights, floats, "{file}");
    }
}

/// Of models of floats, mixtures and those whose scores are not scaled down
/// have f32 where nobody says.
#[test]
fn gemma_4_and_mixtures_of_floats_have_keys_and_values_in_f32_by_default() {
    let mut mixtures = 0;
    for path in fixtures() {
        let mut model = model(&path);
        let name = path.file_stem().unwrap().to_str().unwrap();
        let mut steps = model.plan().steps.iter();
        let default = match steps.any(|s| matches!(s, Step::Experts { .. })) {
            true => KvType::F32,
            false if matches!(name, "gemma4" | "gemma4e") => KvType::F32,
            false => KvType::F16,
        };
        mixtures += usize::from(default == KvType::F32);
        assert_eq!(model.plan().kv_type_default(), default, "{name}");
        let in_f16 = model.info().kv_bytes_per_token;
        for ty in [None, Some(KvType::F16), Some(KvType::F32), None] {
            model.set_kv_type(ty);
            let expected = ty.unwrap_or(default);
            let mut groups = model.plan().kv.iter();
            assert!(groups.all(|g| g.layout.ty == expected), "{name}, {ty:?}");
            let times = if expected == KvType::F32 { 2 } else { 1 };
            assert_eq!(model.info().kv_bytes_per_token, times * in_f16, "{name}");
            assert_eq!(model.info().kv_type, expected.name(), "{name}");
            let plan = model.predictor().map(|p| p.kv.iter().map(|g| g.layout.ty));
            assert!(plan.is_none_or(|mut types| types.all(|ty| ty == expected)));
        }
    }
    assert!(mixtures > 2);
    let mut dir = fixtures().swap_remove(0);
    dir.pop();
    let quantized = model(&dir.join("../tiny-qwen3moe-Q4_K_M.gguf"));
    assert_eq!(quantized.plan().kv_type_default(), KvType::F16);
}

#[test]
fn every_architecture_makes_a_plan() {
    let files = fixtures();
    assert_eq!(files.len(), 58, "{files:?}");
    for path in files {
        let model = model(&path);
        let plan = model.plan();
        let n_ordered = plan
            .segments
            .iter()
            .take_while(|s| s.kind == SegmentKind::Ordered)
            .count();
        assert!(
            plan.segments[n_ordered..]
                .iter()
                .all(|s| s.kind != SegmentKind::Ordered),
            "{}: ordered segments come first",
            path.display()
        );
        // The ordered segments are named by runs, each once and in order.
        let named: Vec<u32> = plan
            .steps
            .iter()
            .filter_map(|s| match s {
                Step::Run { segment, .. } => *segment,
                Step::Experts { .. } => None,
            })
            .collect();
        let all: Vec<u32> = (0..n_ordered as u32).collect();
        assert_eq!(named, all, "{}", path.display());
        let one = plan.scratch(RowCounts {
            tokens: 1,
            outputs: 1,
        });
        let many = plan.scratch(RowCounts {
            tokens: 64,
            outputs: 1,
        });
        assert!(one.bytes < many.bytes, "{}", path.display());
    }
}

/// A llama of width 8 with heads of 2 elements, so many of queries and of keys in each layer.
fn forged(heads: &[(u32, u32)]) -> GgufWriter {
    let (f32, n_layer) = (TensorType::F32, heads.len() as u32);
    let (q, k): (Vec<u32>, Vec<u32>) = heads.iter().copied().unzip();
    let mut file = GgufWriter::new()
        .key("general.architecture", "llama")
        .key("llama.block_count", n_layer)
        .key("llama.context_length", 64u32)
        .key("llama.embedding_length", 8u32)
        .key("llama.feed_forward_length", 8u32)
        .key("llama.attention.head_count", &q[..])
        .key("llama.attention.head_count_kv", &k[..])
        .key("llama.attention.key_length", 2u32)
        .key("llama.attention.value_length", 2u32)
        .key("llama.rope.dimension_count", 2u32)
        .key("llama.attention.layer_norm_rms_epsilon", 1e-5f32)
        .zeros("token_embd.weight", &[8, 16], f32)
        .zeros("output_norm.weight", &[8], f32);
    for (i, &(q, k)) in heads.iter().enumerate() {
        let (q, k) = (2 * u64::from(q), 2 * u64::from(k));
        for (name, dims) in [
            ("attn_norm", &[8][..]),
            ("attn_q", &[8, q]),
            ("attn_k", &[8, k]),
            ("attn_v", &[8, k]),
            ("attn_output", &[q, 8]),
            ("ffn_norm", &[8]),
            ("ffn_gate", &[8, 8]),
            ("ffn_up", &[8, 8]),
            ("ffn_down", &[8, 8]),
        ] {
            file = file.zeros(&format!("blk.{i}.{name}.weight"), dims, f32);
        }
    }
    file
}

fn refusal(file: &GgufWriter) -> Option<Error> {
    let bytes = file.to_bytes();
    let gguf = Gguf::parse(&bytes, bytes.len() as u64).unwrap();
    Model::from_gguf(&gguf).err()
}

#[test]
fn a_tensor_that_nothing_uses_is_refused() {
    let file = || forged(&[(4, 2), (4, 2)]);
    assert!(refusal(&file()).is_none());
    let more = file().zeros("blk.0.attn_sinks.weight", &[4], TensorType::F32);
    let told = refusal(&more).unwrap().to_string();
    assert!(told.contains("blk.0.attn_sinks.weight"), "{told}");
}

#[test]
fn layers_that_are_all_different_are_refused() {
    let queries: Vec<(u32, u32)> = (1..=300).map(|n| (n, 1)).collect();
    assert!(refusal(&forged(&queries[..100])).is_none());
    let told = refusal(&forged(&queries)).unwrap();
    assert!(matches!(told, Error::Unsupported(_)), "{told:?}");
    assert!(told.to_string().contains("256 buffers"), "{told}");
}

/// The small model of this name with one u32 of its header changed.
fn changed(name: &str, key: &str, value: u32) -> Error {
    with_value(name, key, value).unwrap_err()
}

/// What becomes of the model with another number at a key of four bytes.
fn with_value(name: &str, key: &str, value: u32) -> Result<Model, Error> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../tests/fixtures/arch");
    let mut bytes = std::fs::read(path.join(format!("{name}.gguf"))).unwrap();
    let found = bytes.windows(key.len()).position(|w| w == key.as_bytes());
    // Behind the key are its type and its value.
    let at = found.unwrap_or_else(|| panic!("{name} has {key}")) + key.len() + 4;
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    let gguf = Gguf::parse(&bytes, bytes.len() as u64).unwrap();
    Model::from_gguf(&gguf)
}

/// llama.cpp takes these for none; a model that says so was refused.
#[test]
fn a_factor_of_0_counts_as_absent_and_is_told() {
    let model = with_value("cohere2", "cohere2.logit_scale", 0).unwrap();
    assert_eq!(
        model.tolerated(),
        ["cohere2.logit_scale is 0; it counts as absent"]
    );
    let as_it_is = with_value("cohere2", "cohere2.logit_scale", 1f32.to_bits()).unwrap();
    assert!(as_it_is.tolerated().is_empty());
    let logits = |model: &Model| format!("{:?}", model.plan().steps.last());
    assert_eq!(logits(&model), logits(&as_it_is));
    for (name, key) in [
        ("gpt-oss", "gpt-oss.rope.scaling.factor"),
        ("gpt-oss", "gpt-oss.rope.scaling.original_context_length"),
        ("gemma3", "gemma3.rope.scaling.factor"),
        ("mistral3", "mistral3.rope.scaling.factor"),
        ("laguna", "laguna.rope.scaling.yarn_attn_factor"),
        ("phi3-longrope", "phi3.rope.scaling.attn_factor"),
    ] {
        let model = with_value(name, key, 0).unwrap();
        assert_eq!(
            model.tolerated(),
            [format!("{key} is 0; it counts as absent")]
        );
        let refused = with_value(name, key, (-1f32).to_bits()).unwrap_err();
        assert!(refused.to_string().contains(key), "{refused}");
    }
}

/// A decoder whose file denies causal attention makes embeddings; one of recurrent layers cannot.
#[test]
fn attention_that_is_not_causal_goes_both_ways_where_nothing_is_recurrent() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../tests/fixtures/arch");
    let with = |name: &str, causal: u8| {
        let original = std::fs::read(path.join(format!("{name}.gguf"))).unwrap();
        let mut bytes = original;
        // Behind magic and version: the numbers of tensors and of keys. A second key makes what is
        // put in a multiple of the alignment, so that the data stays aligned.
        let n_keys = u64::from_le_bytes(bytes[16..24].try_into().unwrap());
        bytes[16..24].copy_from_slice(&(n_keys + 2).to_le_bytes());
        let mut put = Vec::new();
        let first = format!("{name}.attention.causal");
        let rest = 96 - 2 * (8 + 4 + 1) - first.len();
        for (key, value) in [(first, causal), ("x".repeat(rest), 0)] {
            put.extend((key.len() as u64).to_le_bytes());
            put.extend(key.as_bytes());
            put.extend(7u32.to_le_bytes());
            put.push(value);
        }
        assert_eq!(put.len(), 96);
        bytes.splice(24..24, put);
        let gguf = Gguf::parse(&bytes, bytes.len() as u64).unwrap();
        Model::from_gguf(&gguf)
    };
    let (text, both) = (with("smollm3", 1).unwrap(), with("smollm3", 0).unwrap());
    assert_eq!(text.purpose(), Purpose::Text);
    assert_eq!(both.purpose(), Purpose::Embedding);
    let masks = |model: &Model| {
        let steps = model.plan().steps.iter();
        let ops = steps.flat_map(|step| match step {
            Step::Run { ops, .. } => &ops[..],
            Step::Experts { .. } => &[],
        });
        let masks = ops.filter_map(|op| match op {
            Op::Attention { mask, .. } => Some(*mask),
            _ => None,
        });
        masks.collect::<Vec<_>>()
    };
    assert!(masks(&text).iter().all(|mask| *mask == Mask::Causal));
    assert!(masks(&both).iter().all(|mask| *mask == Mask::Whole));
    // Nothing is read behind its layer.
    assert!(text.plan().kv[0].layout.n_layer > 1);
    assert_eq!(both.plan().kv[0].layout.n_layer, 1);
    let refused = with("lfm2", 0).unwrap_err();
    assert!(matches!(refused, Error::Unsupported(_)), "{refused:?}");
    assert!(
        refused.to_string().contains("lfm2.attention.causal"),
        "{refused}"
    );
}

/// A file that does not say how many groups of experts are chosen chooses all.
#[test]
fn a_number_of_groups_may_be_absent() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../tests/fixtures/arch");
    let mut bytes = std::fs::read(path.join("bailingmoe2.gguf")).unwrap();
    let key = b"bailingmoe2.expert_group_used_count";
    let at = bytes.windows(key.len()).position(|w| w == key).unwrap();
    bytes[at + key.len() - 1] = b'x';
    let gguf = Gguf::parse(&bytes, bytes.len() as u64).unwrap();
    assert!(Model::from_gguf(&gguf).is_ok());
}

#[test]
fn values_that_no_model_has_are_refused_by_key() {
    for (name, key, value, told) in [
        ("laguna", "laguna.rope.dimension_count_swa", 33, "even"),
        (
            "laguna",
            "laguna.rope.dimension_count_swa",
            64,
            "at most the head's",
        ),
        (
            "laguna",
            "laguna.leading_dense_block_count",
            5000,
            "at most",
        ),
        (
            "cohere2",
            "cohere2.attention.sliding_window",
            0,
            "must be in 1",
        ),
        (
            "muse-glimmer",
            "muse-glimmer.attention.sliding_window",
            0,
            "must be in 1",
        ),
        (
            "ernie4_5-moe",
            "ernie4_5-moe.interleave_moe_layer_step",
            0,
            "must be in 1",
        ),
        (
            "ernie4_5-moe",
            "ernie4_5-moe.expert_used_count",
            9,
            "at most the 8 experts",
        ),
        (
            "hunyuan-moe",
            "hunyuan-moe.expert_used_count",
            0,
            "must be in 1",
        ),
        (
            "bailingmoe2",
            "bailingmoe2.expert_group_count",
            3,
            "must divide",
        ),
        (
            "gemma",
            "gemma.feed_forward_length",
            1 << 21,
            "is 2097152: must be in 0..=1048576",
        ),
        (
            "bailingmoe2",
            "bailingmoe2.expert_group_used_count",
            0,
            "must be in 1..=",
        ),
        // A negative one turns the logits upside down.
        (
            "cohere2",
            "cohere2.logit_scale",
            (-0.5f32).to_bits(),
            "must be a positive",
        ),
        (
            "granite",
            "granite.residual_scale",
            (-1f32).to_bits(),
            "must not be negative",
        ),
        (
            "gemma2",
            "gemma2.final_logit_softcapping",
            (-30f32).to_bits(),
            "must not be negative",
        ),
        // Of three layers that predict two are the model's own.
        (
            "glm4moe",
            "glm4moe.nextn_predict_layers",
            2,
            "has no tensor of a block that predicts",
        ),
    ] {
        let refused = changed(name, key, value).to_string();
        assert!(
            refused.contains(key) && refused.contains(told),
            "{key} = {value}: {refused}"
        );
    }
    // A width that the tensors do not have is told by the tensor.
    let key = "laguna.expert_shared_feed_forward_length";
    let refused = changed("laguna", key, 64).to_string();
    assert!(
        refused.contains("ffn_gate_shexp") || refused.contains("ffn_up_shexp"),
        "{refused}"
    );
}

/// The bytes of a projector in which the number of a key is another one.
fn projector_with(name: &str, key: &str, value: u32) -> Vec<u8> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../tests/fixtures/images");
    let mut bytes = std::fs::read(dir.join(format!("{name}-mmproj.gguf"))).unwrap();
    let mut places = bytes.windows(key.len());
    let at = places.position(|w| w == key.as_bytes()).unwrap() + key.len();
    // Behind the key the type of its value.
    bytes[at + 4..at + 8].copy_from_slice(&value.to_le_bytes());
    bytes
}

#[test]
fn a_projector_of_squares_says_what_is_wrong_with_its_numbers() {
    let tower = |key: &str, value| {
        let bytes = projector_with("internvl", &format!("clip.vision.{key}"), value);
        let gguf = Gguf::parse(&bytes, bytes.len() as u64).unwrap();
        Model::tower_from_gguf(&gguf)
    };
    let read = tower("preproc_max_tiles", 64).unwrap();
    let ImageSizes::SquareTiles(tiles) = read.tower().unwrap().sizes else {
        panic!("{:?}", read.tower());
    };
    assert_eq!((tiles.side, tiles.least, tiles.most), (24, 1, 64));
    for (key, value, said) in [
        ("image_size", 28, "6 by 6 patches of 4 pixels"),
        ("image_size", 0, "image_size"),
        ("projector.scale_factor", 4, "must divide the 6 patches"),
        ("projector.scale_factor", 0, "scale_factor"),
        ("preproc_max_tiles", 65, "preproc_max_tiles"),
        ("preproc_min_tiles", 7, "no less than preproc_min_tiles, 7"),
        ("attention.head_count", 3, "heads"),
    ] {
        let told = tower(key, value).map(drop).unwrap_err().to_string();
        assert!(told.contains(said), "{key} = {value}: {told}");
    }
}
