//! LoRA adapters: the scores of a file into which they were merged, whatever else is in a pass, and
//! errors for those that do not fit.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use half::f16;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rocmforge_engine::api::{Asker, Budget, GenerateRequest, ScoreRequest};
use rocmforge_engine::{
    AdapterFile, Beside, EngineConfig, EngineHandle, KvDiskConfig, LoadedModel, adapter_name,
    prepare_beside, start,
};
use rocmforge_gguf::write::{GgufWriter, split};
use rocmforge_gguf::{Gguf, MappedFile, TensorType};
use rocmforge_kernels_cpu::reference;
use rocmforge_ops::{Op, Step};

use crate::foresight::{Foresight, From};
use crate::requests::{fixture, greedy, run, together};
use crate::reuse::ids;
use crate::{fake, requests};

/// What f32 products in another order may move a log-probability by.
const TOLERANCE: f32 = 1e-3;

/// What the fake card may differ from the host by: inputs of products and pages of f16.
const CARD_TOLERANCE: f32 = 0.02;

/// Models of every way in which products are made: plain, fused matrices, windows and norms,
/// recurrent layers, low ranks of their own, experts beside dense layers.
const MODELS: [&str; 14] = [
    "smollm3",
    "phi3",
    "gemma3",
    "gemma4",
    "qwen35",
    "qwen35-fused",
    "deepseek2",
    "lfm2",
    "granitehybrid",
    "nemotron_h",
    "command-r",
    "starcoder2",
    "qwen3moe",
    "glm4",
];

/// An adapter's tensors for one matrix, in f32.
pub(crate) struct Pair {
    name: String,
    cols: usize,
    rows: usize,
    rank: usize,
    a: Vec<f32>,
    b: Vec<f32>,
}

/// The products of dense layers that adapters may be for, with the columns and rows of each.
fn matrices(gguf: &Gguf) -> Vec<(String, usize, usize)> {
    let takes = |name: &str| {
        let stem = name.strip_suffix(".weight").unwrap_or_default();
        let ends = [
            "attn_q",
            "attn_k",
            "attn_v",
            "attn_qkv",
            "attn_output",
            "ffn_gate",
            "ffn_up",
            "ffn_down",
            "attn_q_a",
            "attn_q_b",
            "attn_kv_a_mqa",
            "shortconv.in_proj",
            "shortconv.out_proj",
            "ssm_in",
            "ssm_out",
        ];
        stem == "output" || ends.iter().any(|end| stem.ends_with(&format!(".{end}")))
    };
    let found = gguf.tensors().iter().filter(|t| takes(&t.name));
    let found = found.filter(|t| t.dims[2] == 1 && t.dims[1] > 1);
    let shape = |dims: [u64; 4]| (dims[0] as usize, dims[1] as usize);
    found
        .map(|t| (t.name.clone(), shape(t.dims).0, shape(t.dims).1))
        .collect()
}

/// Random pairs for each of the matrices that `takes` has, of ranks that differ.
pub(crate) fn pairs(gguf: &Gguf, seed: u64, takes: impl Fn(&str) -> bool) -> Vec<Pair> {
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let wanted = matrices(gguf).into_iter().filter(|(name, ..)| takes(name));
    let pair = |(i, (name, cols, rows)): (usize, (String, usize, usize))| {
        let rank = 2 + (i + seed as usize) % 3;
        let mut random = |n: usize, std: f32| -> Vec<f32> {
            // What f16 holds exactly.
            let value = |x: f32| f16::from_f32(x).to_f32();
            (0..n)
                .map(|_| value(rng.random_range(-1.7f32..1.7) * std))
                .collect()
        };
        Pair {
            a: random(rank * cols, (cols as f32).sqrt().recip()),
            b: random(rank * rows, 0.2),
            name,
            cols,
            rows,
            rank,
        }
    };
    wanted.enumerate().map(pair).collect()
}

fn bytes_of(values: &[f32], ty: TensorType) -> Vec<u8> {
    match ty {
        TensorType::F16 => {
            let bytes = values.iter().map(|x| f16::from_f32(*x).to_le_bytes());
            bytes.flatten().collect()
        }
        _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}

fn header(arch: &str, alpha: f32) -> GgufWriter {
    GgufWriter::new()
        .key("general.type", "adapter")
        .key("general.architecture", arch)
        .key("adapter.type", "lora")
        .key("adapter.lora.alpha", alpha)
}

/// Writes an adapter file.
pub(crate) fn write_adapter(
    path: &Path,
    arch: &str,
    alpha: f32,
    pairs: &[Pair],
    ty: TensorType,
) -> PathBuf {
    let mut writer = header(arch, alpha);
    for pair in pairs {
        let (r, cols, rows) = (pair.rank as u64, pair.cols as u64, pair.rows as u64);
        let halves = [
            ("lora_a", [cols, r], &pair.a),
            ("lora_b", [r, rows], &pair.b),
        ];
        for (half, dims, values) in halves {
            let name = format!("{}.{half}", pair.name);
            writer = writer.tensor(&name, &dims, ty, bytes_of(values, ty));
        }
    }
    writer.write_to(path).unwrap();
    path.to_owned()
}

/// Adds `scale * alpha / rank * B A` to a matrix.
fn merge(weights: &mut [f32], pair: &Pair, alpha: f32, scale: f32) {
    let factor = match alpha {
        0.0 => scale,
        alpha => scale * alpha / pair.rank as f32,
    };
    for row in 0..pair.rows {
        for col in 0..pair.cols {
            let product = |r: usize| pair.b[row * pair.rank + r] * pair.a[r * pair.cols + col];
            let sum: f32 = (0..pair.rank).map(product).sum();
            weights[row * pair.cols + col] += factor * sum;
        }
    }
}

/// Writes a copy of a model whose dense products are f32, with adapters merged into them.
fn write_merged(source: &Path, to: &Path, merged: &[(&[Pair], f32, f32)]) {
    let whole = std::fs::read(source).unwrap();
    let gguf = Gguf::parse(&whole, whole.len() as u64).unwrap();
    let n = gguf.tensors().len();
    let dense: Vec<String> = matrices(&gguf).into_iter().map(|m| m.0).collect();
    let mut writer: GgufWriter = split(&whole, &[0, n]).unwrap().swap_remove(0);
    for tensor in gguf.tensors() {
        let bytes = &whole[tensor.offset as usize..tensor.range().end as usize];
        if !dense.contains(&tensor.name) {
            writer = writer.tensor(&tensor.name, tensor.shape(), tensor.ty, bytes);
            continue;
        }
        let mut weights = vec![0.0; tensor.elements() as usize];
        reference::dequantize(tensor.ty.weight_type().unwrap(), bytes, &mut weights).unwrap();
        for (pairs, alpha, scale) in merged {
            let ours = pairs.iter().filter(|pair| pair.name == tensor.name);
            ours.for_each(|pair| merge(&mut weights, pair, *alpha, *scale));
        }
        let bytes = bytes_of(&weights, TensorType::F32);
        writer = writer.tensor(&tensor.name, tensor.shape(), TensorType::F32, bytes);
    }
    writer.write_to(to).unwrap();
}

fn given(path: &Path) -> AdapterFile {
    AdapterFile {
        name: adapter_name(path),
        file: MappedFile::open(path).unwrap(),
        scale: 1.0,
    }
}

/// Loads a model with adapters.
pub(crate) async fn load_with(
    engine: &EngineHandle,
    path: &Path,
    name: &str,
    adapters: &[PathBuf],
) -> Arc<LoadedModel> {
    let beside = Beside {
        projector: None,
        adapters: adapters.iter().map(|path| given(path)).collect(),
    };
    let file = MappedFile::open(path).unwrap();
    let prepared = prepare_beside(name, file, beside, &mut |_| {}).unwrap();
    engine.load(prepared).await.unwrap()
}

async fn scores(engine: &EngineHandle, model: &Arc<LoadedModel>, scales: &[f32]) -> Vec<f32> {
    let n_vocab = model.model().hparams().n_vocab;
    let request = ScoreRequest {
        model: Arc::clone(model),
        ids: (0..40).map(|i| (i * 7 + 3) % n_vocab).collect(),
        top_n: 0,
        deadline: None,
        asker: Asker::default(),
        adapters: model.adapters().at(scales).unwrap(),
    };
    let scores = engine.score(request).await.unwrap();
    scores.tokens.iter().skip(1).map(|t| t.logprob).collect()
}

fn apart(a: &[f32], b: &[f32]) -> f32 {
    let each = a.iter().zip(b).map(|(a, b)| (a - b).abs());
    each.fold(0.0, f32::max)
}

/// A model of f32 products, and two adapters for it: one for all matrices, one for some.
struct Files {
    _dir: tempfile::TempDir,
    model: PathBuf,
    adapters: Vec<PathBuf>,
    pairs: [Vec<Pair>; 2],
}

const ALPHAS: [f32; 2] = [6.0, 0.0];

fn files(name: &str, types: [TensorType; 2]) -> Files {
    let dir = tempfile::tempdir().unwrap();
    let source = fixture(&format!("arch/{name}.gguf"));
    let whole = std::fs::read(&source).unwrap();
    let gguf = Gguf::parse(&whole, whole.len() as u64).unwrap();
    let arch = gguf.str("general.architecture").unwrap().unwrap();
    let model = dir.path().join("base.gguf");
    write_merged(&source, &model, &[]);
    let some = |name: &str| !name.contains("ffn_") && !name.contains("attn_k");
    let pairs = [pairs(&gguf, 1, |_| true), pairs(&gguf, 2, some)];
    let adapters = (0..2).map(|i| {
        let path = dir.path().join(format!("adapter-{i}.gguf"));
        write_adapter(&path, arch, ALPHAS[i], &pairs[i], types[i])
    });
    Files {
        model,
        adapters: adapters.collect(),
        pairs,
        _dir: dir,
    }
}

#[tokio::test]
async fn scores_are_those_of_a_file_into_which_adapters_were_merged() {
    let engine = requests::engine(Budget::Bytes(64 << 20));
    for name in MODELS {
        let files = files(name, [TensorType::F32, TensorType::F16]);
        let model = load_with(&engine, &files.model, name, &files.adapters).await;
        let base = scores(&engine, &model, &[0.0, 0.0]).await;
        for (i, scales) in [[1.0, 0.0], [0.0, -0.7], [0.5, 0.8]].iter().enumerate() {
            let path = files.model.with_file_name(format!("merged-{i}.gguf"));
            let parts: Vec<(&[Pair], f32, f32)> = (0..2)
                .map(|i| (&files.pairs[i][..], ALPHAS[i], scales[i]))
                .collect();
            write_merged(&files.model, &path, &parts);
            let merged = load_with(&engine, &path, "merged", &[]).await;
            let expected = scores(&engine, &merged, &[]).await;
            let found = scores(&engine, &model, scales).await;
            let (off, moved) = (apart(&found, &expected), apart(&base, &expected));
            println!("{name} {scales:?}: {off}, moved by {moved}");
            assert!(off <= TOLERANCE, "{name} {scales:?}: {off}");
            assert!(moved > 100.0 * TOLERANCE, "{name} {scales:?}: {moved}");
            drop(merged);
            engine.unload("merged", false).await.unwrap();
        }
        assert_eq!(scores(&engine, &model, &[0.0, 0.0]).await, base, "{name}");
        drop(model);
        engine.unload(name, false).await.unwrap();
    }
}

#[tokio::test]
async fn a_model_with_adapters_that_are_not_used_computes_as_one_without() {
    let engine = requests::engine(Budget::Bytes(64 << 20));
    let files = files("smollm3", [TensorType::F16; 2]);
    let plain = load_with(&engine, &files.model, "plain", &[]).await;
    let with = load_with(&engine, &files.model, "with", &files.adapters).await;
    let (a, b) = (plain.model(), with.model());
    let names = |model: &rocmforge_model::Model| {
        let steps = model.plan().steps.iter().map(|step| match step {
            Step::Run { ops, .. } => ops.iter().map(Op::name).collect(),
            Step::Experts { .. } => vec!["experts"],
        });
        steps.collect::<Vec<_>>()
    };
    assert_eq!(names(a), names(b));
    assert_eq!(a.plan().bufs, b.plan().bufs);
    assert_eq!(a.plan().inputs, b.plan().inputs);
    assert_eq!(
        scores(&engine, &plain, &[]).await,
        scores(&engine, &with, &[0.0; 2]).await
    );
    assert_eq!(plain.file().size_bytes(), with.file().size_bytes());
    assert!(plain.file().is_same_as(with.file()));
}

/// Requests with the first adapter, the second, both and none, with the scales of each.
fn requests_of(model: &Arc<LoadedModel>, reuse: bool, prompt: &[u32]) -> Vec<GenerateRequest> {
    let scales = [[1.0, 0.0], [0.0, 1.0], [0.5, 0.5], [0.0, 0.0], [0.9, 0.0]];
    let request = |scales: &[f32; 2]| GenerateRequest {
        adapters: model.adapters().at(scales).unwrap(),
        reuse,
        ..greedy(model, prompt.to_vec(), 24)
    };
    scales.iter().map(request).collect()
}

#[tokio::test]
async fn rows_with_different_adapters_share_passes_and_get_what_they_get_alone() {
    for name in ["smollm3", "phi3", "qwen35"] {
        let files = files(name, [TensorType::F16; 2]);
        let roomy = requests::engine(Budget::Bytes(64 << 20));
        let model = load_with(&roomy, &files.model, name, &files.adapters).await;
        let prompt = ids(1, 70);
        let mut alone = Vec::new();
        for request in requests_of(&model, false, &prompt) {
            alone.push(run(&roomy, request).await.1);
        }
        let mut distinct = alone.clone();
        distinct.sort();
        distinct.dedup();
        assert!(distinct.len() >= 4, "{name}: adapters change texts");
        let at_once = together(&roomy, requests_of(&model, false, &prompt)).await;
        for (i, (found, _)) in at_once.iter().enumerate() {
            assert_eq!(*found, alone[i], "{name}: request {i}");
        }
        // A third of its bytes: segments with their adapters come and go.
        let bytes = roomy.snapshot().models[0]
            .segments
            .iter()
            .map(|s| s.bytes)
            .sum::<u64>();
        let tight = requests::engine(Budget::Bytes(bytes / 3 + (2 << 20)));
        let model = load_with(&tight, &files.model, name, &files.adapters).await;
        let at_once = together(&tight, requests_of(&model, false, &prompt)).await;
        for (i, (found, _)) in at_once.iter().enumerate() {
            assert_eq!(*found, alone[i], "{name}: request {i} in a third");
        }
        tight.clear(None).await.unwrap();
        let first = requests_of(&model, false, &prompt).swap_remove(0);
        assert_eq!(run(&tight, first).await.1, alone[0], "{name}: evicted");
    }
}

#[tokio::test]
async fn requests_with_other_adapters_share_no_keys_and_values() {
    let directory = tempfile::tempdir().unwrap();
    let files = files("smollm3", [TensorType::F16; 2]);
    let config = || EngineConfig {
        budget: Budget::Bytes(64 << 20),
        kv_disk: Some(KvDiskConfig {
            directory: directory.path().join("kv"),
            budget: Budget::Bytes(256 << 20),
            always: true,
            queue_bytes: None,
            write_bytes_per_s: None,
        }),
        ..EngineConfig::default()
    };
    let prompt = ids(3, 150);
    let mut expected = Vec::new();
    for round in 0..2 {
        let (engine, thread) = start(config()).unwrap();
        let model = load_with(&engine, &files.model, "m", &files.adapters).await;
        let again = || requests_of(&model, true, &prompt).into_iter().enumerate();
        for (i, request) in again() {
            let (_, found, summary) = run(&engine, request).await;
            if round == 0 {
                assert_eq!(summary.reused_tokens, 0, "request {i} has others' pages");
                expected.push(found);
            } else {
                assert_eq!(found, expected[i], "request {i} after a restart");
                assert!(
                    summary.reused_tokens >= 128,
                    "request {i} is read from disk"
                );
            }
        }
        for (i, request) in again() {
            let (_, found, summary) = run(&engine, request).await;
            assert_eq!(found, expected[i], "request {i} again");
            assert!(summary.reused_tokens >= 128, "request {i} has its own");
        }
        // All at once: those that begin alike wait for the one with the same adapters alone.
        let both = [again(), again()].into_iter().flatten();
        let at_once = together(&engine, both.map(|(_, request)| request).collect()).await;
        for (i, (found, _)) in at_once.iter().enumerate() {
            assert_eq!(
                *found,
                expected[i % expected.len()],
                "request {i} beside others"
            );
        }
        drop(model);
        engine.drain(std::time::Duration::from_secs(20)).await;
        drop(engine);
        thread.join().unwrap();
    }
}

#[tokio::test]
async fn drafts_do_not_change_texts_with_adapters() {
    let files = files("smollm3", [TensorType::F16; 2]);
    // It says again what it has said: drafts are made of it.
    let prompt = ids(5, 24).repeat(6);
    let mut texts = Vec::new();
    for speculate in [false, true] {
        let (engine, _thread) = start(EngineConfig {
            budget: Budget::Bytes(64 << 20),
            speculate: Some(speculate),
            ..EngineConfig::default()
        })
        .unwrap();
        let model = load_with(&engine, &files.model, "m", &files.adapters).await;
        let mut all = Vec::new();
        for mut request in requests_of(&model, false, &prompt) {
            request.max_tokens = Some(96);
            all.push(run(&engine, request).await.1);
        }
        texts.push(all);
    }
    assert_eq!(texts[0], texts[1]);
}

#[tokio::test]
async fn a_card_computes_adapters_as_the_host_does() {
    let files = files("smollm3", [TensorType::F16; 2]);
    let host = requests::engine(Budget::Bytes(64 << 20));
    let runtime = fake::Runtime::new();
    let card = runtime.start(64 << 20).unwrap();
    let on_host = load_with(&host, &files.model, "m", &files.adapters).await;
    let on_card = load_with(&card, &files.model, "m", &files.adapters).await;
    for scales in [[1.0, 0.0], [0.5, 0.5], [0.0, 0.0]] {
        let expected = scores(&host, &on_host, &scales).await;
        let found = scores(&card, &on_card, &scales).await;
        let off = apart(&found, &expected);
        assert!(off <= CARD_TOLERANCE, "{scales:?}: {off}");
    }
    // Passes are recorded: those with adapters and those without are not taken for each other.
    let prompt = ids(1, 40);
    let mut alone = Vec::new();
    for request in requests_of(&on_card, false, &prompt) {
        alone.push(run(&card, request).await.1);
    }
    for (i, request) in requests_of(&on_card, false, &prompt)
        .into_iter()
        .enumerate()
    {
        assert_eq!(run(&card, request).await.1, alone[i], "request {i}");
    }
}

#[tokio::test]
async fn drafts_of_an_mtp_head_do_not_change_texts_with_adapters() {
    let folder = tempfile::tempdir().unwrap();
    let path = Foresight {
        arch: "glm4moe",
        from: From::Both,
        layers: 1.0,
        without: "",
    }
    .write(&folder);
    let whole = std::fs::read(&path).unwrap();
    let gguf = Gguf::parse(&whole, whole.len() as u64).unwrap();
    let pairs = pairs(&gguf, 4, |name| name.starts_with("blk.0.attn"));
    let adapter = folder.path().join("adapter.gguf");
    let adapter = write_adapter(&adapter, "glm4moe", 16.0, &pairs, TensorType::F16);
    let mut texts = Vec::new();
    let mut drafted = 0;
    for speculate in [false, true] {
        let (engine, _thread) = start(EngineConfig {
            budget: Budget::Bytes(64 << 20),
            speculate: Some(speculate),
            ..EngineConfig::default()
        })
        .unwrap();
        let model = load_with(&engine, &path, "m", std::slice::from_ref(&adapter)).await;
        for scale in [0.0, 1.0] {
            let request = GenerateRequest {
                adapters: model.adapters().at(&[scale]).unwrap(),
                ..greedy(&model, ids(2, 40), 60)
            };
            let (_, found, summary) = run(&engine, request).await;
            drafted += summary.drafted_tokens;
            texts.push(found);
        }
    }
    assert!(drafted > 0, "the head drafts");
    assert_eq!(texts[..2], texts[2..]);
    assert_ne!(texts[0], texts[1], "the adapter changes the text");
}

/// Once a client's scale that made logits overflow counted as a damaged file, and deleted what all
/// clients' prompts had left in memory and on disk.
#[tokio::test]
async fn scales_that_overflow_fail_their_own_request_and_leave_prompts_of_others() {
    let engine = requests::engine(Budget::Bytes(64 << 20));
    let files = files("smollm3", [TensorType::F16; 2]);
    let path = files.model.with_file_name("huge.gguf");
    write_adapter(&path, "smollm3", 1e35, &files.pairs[0], TensorType::F16);
    let model = load_with(&engine, &files.model, "m", &[path]).await;
    let plain = || GenerateRequest {
        reuse: true,
        ..greedy(&model, ids(3, 150), 8)
    };
    let (_, expected, _) = run(&engine, plain()).await;
    let overflowing = ScoreRequest {
        model: Arc::clone(&model),
        ids: ids(3, 40),
        top_n: 0,
        deadline: None,
        asker: Asker::default(),
        adapters: model.adapters().at(&[1.0]).unwrap(),
    };
    let error = engine.score(overflowing).await.unwrap_err();
    assert!(error.to_string().contains("smaller scales"), "{error}");
    let (_, found, summary) = run(&engine, plain()).await;
    assert_eq!(found, expected);
    assert!(summary.reused_tokens >= 128, "the prompt is still there");
    // With the factor of the file it is no number any more.
    let error = model.adapters().at(&[1000.0]).map(drop);
    error.unwrap();
}
