//! Files that keep a factor beside each matrix, as those of NVFP4 weights do: the scores of the
//! file without them.

use crate::{fake, requests};
use std::path::Path;
use std::sync::Arc;

use half::f16;
use rocmforge_engine::api::{Asker, Budget, ScoreRequest};
use rocmforge_engine::{EngineHandle, Error, prepare};
use rocmforge_gguf::write::{GgufWriter, split};
use rocmforge_gguf::{Gguf, MappedFile, TensorType};

/// What the fake card may differ from the host by: 8-bit inputs and pages of f16.
const TOLERANCE: f32 = 0.02;

/// Products of one token row by a matrix, by the end of their names.
const PRODUCTS: [&str; 20] = [
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_qkv",
    "attn_gate",
    "attn_output",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
    "ffn_gate_inp",
    "ffn_gate_shexp",
    "ffn_up_shexp",
    "ffn_down_shexp",
    "ffn_gate_exps",
    "ffn_up_exps",
    "ffn_down_exps",
    "ssm_in",
    "ssm_out",
    "in_proj",
    "output",
];

fn is_product(name: &str) -> bool {
    let Some(stem) = name.strip_suffix(".weight") else {
        return false;
    };
    PRODUCTS
        .iter()
        .any(|end| stem == *end || stem.ends_with(&format!(".{end}")))
}

/// Each element times a power of two above 1: exact, but for what would be infinite.
fn multiplied(ty: TensorType, bytes: &[u8], factor: f32) -> Option<Vec<u8>> {
    match ty {
        TensorType::F32 => {
            let times = |b: &[u8; 4]| (f32::from_le_bytes(*b) * factor).to_le_bytes();
            Some(bytes.as_chunks().0.iter().flat_map(times).collect())
        }
        TensorType::F16 => {
            let times = |b: &[u8; 2]| {
                let x = f16::from_le_bytes(*b).to_f32() * factor;
                assert_eq!(f16::from_f32(x).to_f32(), x, "the factor is exact");
                f16::from_f32(x).to_le_bytes()
            };
            Some(bytes.as_chunks().0.iter().flat_map(times).collect())
        }
        // The blocks' scales alone: a block of 8 bits is its scale times whole numbers.
        TensorType::Q8_0 => {
            let times = |b: &[u8; 34]| {
                let mut block = *b;
                let d = multiplied(TensorType::F16, &b[..2], factor);
                block[..2].copy_from_slice(&d.unwrap());
                block
            };
            Some(bytes.as_chunks().0.iter().flat_map(times).collect())
        }
        _ => None,
    }
}

/// Rows of f16 in blocks of 32 elements of 8 bits with a scale in f16.
fn q8_0(bytes: &[u8]) -> Vec<u8> {
    let block = |halves: &[[u8; 2]]| {
        let x: Vec<f32> = halves
            .iter()
            .map(|&h| f16::from_le_bytes(h).to_f32())
            .collect();
        let largest = x.iter().fold(0f32, |most, v| most.max(v.abs()));
        let d = f16::from_f32(largest / 127.0);
        let inverse = if d > f16::ZERO { 1.0 / d.to_f32() } else { 0.0 };
        let quantized = x.into_iter().map(|v| (v * inverse).round() as i8 as u8);
        d.to_le_bytes()
            .into_iter()
            .chain(quantized)
            .collect::<Vec<_>>()
    };
    let (halves, _) = bytes.as_chunks::<2>();
    halves.chunks(32).flat_map(block).collect()
}

/// Writes a copy of a model whose experts are of 8 bits, which GPUs compute by tiles of rows.
fn write_q8(source: &Path, to: &Path) {
    let whole = std::fs::read(source).unwrap();
    let gguf = Gguf::parse(&whole, whole.len() as u64).unwrap();
    let n = gguf.tensors().len();
    let mut writer: GgufWriter = split(&whole, &[0, n]).unwrap().swap_remove(0);
    for tensor in gguf.tensors() {
        let bytes = &whole[tensor.offset as usize..tensor.range().end as usize];
        let (name, shape) = (&tensor.name, tensor.shape());
        writer = match tensor.ty {
            TensorType::F16 if name.contains("_exps.") => {
                writer.tensor(name, shape, TensorType::Q8_0, q8_0(bytes))
            }
            ty => writer.tensor(name, shape, ty, bytes),
        };
    }
    writer.write_to(to).unwrap();
}

/// Writes a copy of a model whose matrices are so much larger and have the factor that makes up for
/// it; says how many.
fn write(source: &Path, to: &Path) -> usize {
    let whole = std::fs::read(source).unwrap();
    let gguf = Gguf::parse(&whole, whole.len() as u64).unwrap();
    let n = gguf.tensors().len();
    // The metadata alone: the tensors follow, changed.
    let mut writer: GgufWriter = split(&whole, &[0, n]).unwrap().swap_remove(0);
    let mut scaled = 0;
    for tensor in gguf.tensors() {
        let bytes = &whole[tensor.offset as usize..tensor.range().end as usize];
        // Each expert has a factor of its own.
        let parts = tensor.dims[2] as usize;
        let factors: Vec<f32> = (0..parts)
            .map(|part| [4.0, 8.0, 2.0][(scaled + part) % 3])
            .collect();
        let larger = is_product(&tensor.name)
            .then(|| {
                let parts = bytes.chunks_exact(bytes.len() / parts).zip(&factors);
                let parts = parts.map(|(part, factor)| multiplied(tensor.ty, part, *factor));
                parts.collect::<Option<Vec<_>>>()
            })
            .flatten()
            .map(|parts| parts.concat());
        writer = writer.tensor(
            &tensor.name,
            tensor.shape(),
            tensor.ty,
            larger.as_deref().unwrap_or(bytes),
        );
        if larger.is_some() {
            scaled += 1;
            let stem = tensor.name.strip_suffix("weight").unwrap();
            let inverse: Vec<u8> = factors
                .iter()
                .flat_map(|f| (1.0 / f).to_le_bytes())
                .collect();
            let ones = 1f32.to_le_bytes().repeat(parts);
            for (end, values) in [("scale", inverse), ("input_scale", ones)] {
                let name = format!("{stem}{end}");
                writer = writer.tensor(&name, &[parts as u64], TensorType::F32, values);
            }
        }
    }
    writer.write_to(to).unwrap();
    scaled
}

async fn scores(engine: &EngineHandle, path: &Path, name: &str) -> Vec<f32> {
    let file = MappedFile::open(path).unwrap();
    let prepared = prepare(name, file, &mut |_| {}).unwrap();
    let model = engine.load(prepared).await.unwrap();
    let n_vocab = model.model().hparams().n_vocab;
    let request = ScoreRequest {
        model: Arc::clone(&model),
        ids: (0..40).map(|i| (i * 7 + 3) % n_vocab).collect(),
        top_n: 0,
        deadline: None,
        asker: Asker::default(),
        adapters: None,
    };
    let scores = engine.score(request).await.unwrap();
    scores.tokens.iter().skip(1).map(|t| t.logprob).collect()
}

/// Powers of two make no rounding of their own, so that on the host not a bit differs.
#[tokio::test]
async fn a_factor_beside_a_matrix_multiplies_its_product() {
    let dir = tempfile::tempdir().unwrap();
    let host = requests::engine(Budget::Bytes(64 << 20));
    let runtime = fake::Runtime::new();
    let card = runtime.start(64 << 20).unwrap();
    for name in [
        "smollm3",
        "phi3",
        "qwen35",
        "qwen35moe",
        "qwen3moe",
        "nemotron_h",
        "nemotron_h_moe",
        "lfm2",
        "qwen3moe-q8",
        "nemotron_h_moe-q8",
    ] {
        let plain = match name.strip_suffix("-q8") {
            None => requests::fixture(&format!("arch/{name}.gguf")),
            Some(source) => {
                let to = dir.path().join(format!("{name}-plain.gguf"));
                write_q8(&requests::fixture(&format!("arch/{source}.gguf")), &to);
                to
            }
        };
        let path = dir.path().join(format!("{name}.gguf"));
        let scaled = write(&plain, &path);
        assert!(scaled > 3, "{name}: {scaled} matrices have a factor");
        let expected = scores(&host, &plain, name).await;
        assert_eq!(
            scores(&host, &path, &format!("{name}-scaled")).await,
            expected,
            "{name}"
        );
        let on_card = scores(&card, &path, name).await;
        let worst = expected.iter().zip(&on_card).map(|(a, b)| (a - b).abs());
        let worst = worst.fold(0.0, f32::max);
        println!("{name}: {scaled} factors, on the fake card within {worst}");
        assert!(worst < TOLERANCE, "{name}: {worst}");
    }
}

/// The bias would be multiplied, too.
#[test]
fn a_factor_and_a_bias_together_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    write(&requests::fixture("arch/qwen2moe.gguf"), &path);
    let file = MappedFile::open(&path).unwrap();
    let error = prepare("m", file, &mut |_| {}).unwrap_err();
    assert!(matches!(error, Error::Unsupported(_)), "{error}");
    assert!(
        error.to_string().contains("both a bias and a scale"),
        "{error}"
    );
}
