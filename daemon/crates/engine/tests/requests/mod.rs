//! What the engine's tests share: fixtures, and requests run to their end.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use rocmforge_engine::api::{
    Asker, Budget, Decoding, Dry, DynamicTemperature, GenerateEvent, GenerateRequest,
    GenerateSummary, Mirostat, MirostatVersion, SamplingParams, Snapshot, Xtc,
};
use rocmforge_engine::{EngineConfig, EngineHandle, LoadedModel, prepare, start};
use rocmforge_gguf::MappedFile;
use rocmforge_tokenizer::Message;

pub(crate) fn fixture(name: &str) -> PathBuf {
    // A test binary that was carried to another machine is told where they are.
    match std::env::var_os("ROCMFORGE_FIXTURES") {
        Some(dir) => PathBuf::from(dir).join(name),
        None => PathBuf::from(env!("CARGO_MANIFEST_DIR"))
            .join("../../../tests/fixtures")
            .join(name),
    }
}

/// Brings a file to the disk and out of the page cache. Whether nothing of it is left there, and
/// the system tells so of a byte: asking for one may read some pages ahead, so only the first is.
pub(crate) fn drop_cached(mapped: &MappedFile) -> bool {
    let file = File::open(mapped.path()).unwrap();
    file.sync_all().unwrap();
    posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).unwrap();
    let is_cold = mapped.is_mapped() && mapped.cached_bytes(0..mapped.len()).unwrap() == 0;
    is_cold && !mapped.seems_cached(0..1)
}

pub(crate) fn engine(budget: Budget) -> EngineHandle {
    start(EngineConfig {
        budget,
        ..EngineConfig::default()
    })
    .unwrap()
    .0
}

/// Waits for a state of the engine, which may be over before anybody looks: only for one that
/// lasts.
pub(crate) async fn until(
    engine: &EngineHandle,
    what: &str,
    condition: impl Fn(&Snapshot) -> bool,
) -> Arc<Snapshot> {
    let begin = Instant::now();
    loop {
        let snapshot = engine.snapshot();
        if condition(&snapshot) {
            return snapshot;
        }
        let waited = begin.elapsed();
        assert!(
            waited < Duration::from_secs(60),
            "{what} did not come: {snapshot:?}"
        );
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

pub(crate) async fn load(engine: &EngineHandle, file: &str, name: &str) -> Arc<LoadedModel> {
    let file = MappedFile::open(&fixture(file)).unwrap();
    engine
        .load(prepare(name, file, &mut |_| {}).unwrap())
        .await
        .unwrap()
}

/// What comes behind a prompt, greedily.
pub(crate) fn greedy(
    model: &Arc<LoadedModel>,
    prompt: Vec<u32>,
    max_tokens: u32,
) -> GenerateRequest {
    GenerateRequest {
        model: Arc::clone(model),
        prompt,
        sampling: SamplingParams {
            temperature: 0.0,
            ..SamplingParams::default()
        },
        max_tokens: Some(max_tokens),
        n_ctx: None,
        stop: Vec::new(),
        decoding: Decoding::default(),
        deadline: None,
        max_gap: None,
        asker: Asker::default(),
        reuse: false,
        adapters: None,
    }
}

pub(crate) fn chat(model: &Arc<LoadedModel>, question: &str) -> GenerateRequest {
    let text = model
        .template()
        .unwrap()
        .render(&[Message::new("user", question)], true)
        .unwrap();
    greedy(
        model,
        model.tokenizer().encode(&text, true, true).unwrap(),
        80,
    )
}

/// How many samplings there are.
pub(crate) const SAMPLINGS: usize = 6;

/// Greedy, drawn of all, drawn of few, with penalties, which look at each token, with all that the
/// samplers behind top-k and in front of it can do, and with Mirostat, which goes with what was
/// drawn.
pub(crate) fn samplings(
    drawn: SamplingParams,
    top_k: u32,
    penalized: SamplingParams,
) -> [SamplingParams; SAMPLINGS] {
    [
        SamplingParams {
            temperature: 0.0,
            ..SamplingParams::default()
        },
        SamplingParams {
            top_k: 0,
            ..drawn.clone()
        },
        SamplingParams {
            top_k,
            ..drawn.clone()
        },
        penalized,
        SamplingParams {
            dry: Dry {
                multiplier: 0.1,
                ..Dry::default()
            },
            top_n_sigma: 3.0,
            typical_p: 0.98,
            xtc: Xtc {
                probability: 0.1,
                threshold: 0.2,
            },
            dynatemp: DynamicTemperature {
                range: 0.2,
                exponent: 1.0,
            },
            ..drawn.clone()
        },
        SamplingParams {
            mirostat: Some(Mirostat {
                version: MirostatVersion::V2,
                tau: 2.0,
                eta: 0.1,
            }),
            ..drawn
        },
    ]
}

pub(crate) async fn run(
    engine: &EngineHandle,
    request: GenerateRequest,
) -> (String, Vec<u32>, GenerateSummary) {
    let mut events = engine.generate(request).unwrap();
    let (mut text, mut ids) = (String::new(), Vec::new());
    loop {
        match events
            .next()
            .await
            .expect("a generation ends with Done or Failed")
        {
            GenerateEvent::Piece {
                text: piece,
                ids: new,
                ..
            } => {
                text += &piece;
                ids.extend(new);
                let cache = engine.snapshot().cache;
                assert!(cache.resident_bytes + cache.in_flight_bytes <= cache.budget_bytes);
            }
            GenerateEvent::Done(summary) => return (text, ids, summary),
            GenerateEvent::Failed(error) => panic!("{error}"),
        }
    }
}

/// What some requests at once came to.
pub(crate) async fn together(
    engine: &EngineHandle,
    requests: Vec<GenerateRequest>,
) -> Vec<(Vec<u32>, GenerateSummary)> {
    let spawned: Vec<_> = requests
        .into_iter()
        .map(|request| {
            let engine = engine.clone();
            tokio::spawn(async move { run(&engine, request).await })
        })
        .collect();
    let mut ended = Vec::new();
    for one in spawned {
        let (_, ids, summary) = one.await.unwrap();
        ended.push((ids, summary));
    }
    ended
}

pub(crate) fn questions(n: usize) -> Vec<(String, String)> {
    let exam: serde_json::Value =
        serde_json::from_slice(&std::fs::read(fixture("exam.json")).unwrap()).unwrap();
    let item = |q: &serde_json::Value| {
        (
            q["prompt"].as_str().unwrap().to_owned(),
            q["answer"].as_str().unwrap().to_owned(),
        )
    };
    exam.as_array().unwrap().iter().take(n).map(item).collect()
}

/// Loads a copy of tiny-llama that knows no end of text: its end tokens have other
/// names, and no id is the end's.
pub(crate) async fn load_endless(engine: &EngineHandle, name: &str) -> Arc<LoadedModel> {
    let mut bytes = std::fs::read(fixture("tiny-llama-Q4_K_M.gguf")).unwrap();
    for (from, to) in [
        ("<|im_end|>", "<|im_enx|>"),
        ("<|endoftext|>", "<|endoftexx|>"),
    ] {
        assert!(
            replace(&mut bytes, from.as_bytes(), to.as_bytes()) > 0,
            "{from}"
        );
    }
    let key = b"tokenizer.ggml.eos_token_id";
    let at = bytes.windows(key.len()).position(|w| w == key).unwrap() + key.len() + 4;
    bytes[at..at + 4].copy_from_slice(&u32::MAX.to_le_bytes());
    let copy = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(copy.path(), &bytes).unwrap();
    let file = MappedFile::open(copy.path()).unwrap();
    engine
        .load(prepare(name, file, &mut |_| {}).unwrap())
        .await
        .unwrap()
}

fn replace(bytes: &mut [u8], from: &[u8], to: &[u8]) -> usize {
    let found: Vec<usize> = (0..bytes.len() - from.len())
        .filter(|&i| bytes[i..].starts_with(from))
        .collect();
    for &at in &found {
        bytes[at..at + to.len()].copy_from_slice(to);
    }
    found.len()
}

/// The numbers of a list in a golden.
pub(crate) fn numbers(value: &serde_json::Value) -> Vec<f32> {
    let values = value.as_array().unwrap().iter();
    values.map(|v| v.as_f64().unwrap() as f32).collect()
}
