//! Tokens a second of whole models on the host device: `cargo bench -p rocmforge-engine --bench speed -- FILE...`.
//!
//! For each file: milliseconds to register it, prefill of 128 tokens and decode of 32, in tokens a second, as the
//! median of several runs with the model resident. Random tokens, greedy. The share of the ceiling is the bytes that
//! decode reads over the time, against a plain read of memory by the same number of threads.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use rand::{RngExt, SeedableRng};
use rocmforge_engine::api::{
    Budget, GenerateEvent, GenerateRequest, GenerateSummary, SamplingParams,
};
use rocmforge_engine::{EngineConfig, EngineHandle, LoadedModel, prepare, start};
use rocmforge_gguf::MappedFile;

const PROMPT: usize = 128;
const DECODE: u32 = 32;
const RUNS: usize = 7;

fn main() {
    let files: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| !a.starts_with("--"))
        .collect();
    if files.is_empty() {
        println!("no files given: cargo bench -p rocmforge-engine --bench speed -- FILE.gguf ...");
        return;
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .expect("a runtime");
    let (engine, _thread) = start(EngineConfig {
        budget: Budget::Percent(60.0),
        ..EngineConfig::default()
    })
    .expect("the host device starts");
    println!("{}", engine.snapshot().device.name);
    println!(
        "| model | load ms | first use ms | prefill {PROMPT} t/s | decode t/s | decode GB/s |"
    );
    println!("|---|---|---|---|---|---|");
    for file in files {
        runtime.block_on(one(&engine, Path::new(&file)));
    }
}

async fn one(engine: &EngineHandle, path: &Path) {
    let name = path
        .file_stem()
        .expect("a file")
        .to_string_lossy()
        .into_owned();
    let begin = Instant::now();
    let file = MappedFile::open(path).expect("the file opens");
    let model = engine
        .load(prepare("speed", file, &mut |_| {}).expect("a model"))
        .await
        .expect("the model is registered");
    let load = begin.elapsed();
    let mut rng = rand::rngs::StdRng::seed_from_u64(1);
    let first = generate(engine, &model, &mut rng, 4, 1).await.ttft;
    let mut prefill = Vec::new();
    let mut decode = Vec::new();
    for _ in 0..RUNS {
        let summary = generate(engine, &model, &mut rng, PROMPT, 1).await;
        prefill.push(PROMPT as f64 / summary.ttft.as_secs_f64());
        let summary = generate(engine, &model, &mut rng, 1, DECODE).await;
        decode.push(summary.decode_tokens_per_s);
    }
    let bytes: u64 = model
        .model()
        .segments()
        .iter()
        .map(|s| s.file_bytes())
        .sum();
    let decode = median(decode);
    println!(
        "| {name} | {:.1} | {:.0} | {:.1} | {decode:.2} | {:.1} |",
        load.as_secs_f64() * 1e3,
        first.as_secs_f64() * 1e3,
        median(prefill),
        decode * bytes as f64 / 1e9,
    );
    engine.unload("speed", false).await.expect("nothing runs");
}

async fn generate(
    engine: &EngineHandle,
    model: &Arc<LoadedModel>,
    rng: &mut rand::rngs::StdRng,
    n_prompt: usize,
    n: u32,
) -> GenerateSummary {
    let n_vocab = model.model().hparams().n_vocab;
    loop {
        let request = GenerateRequest {
            model: Arc::clone(model),
            prompt: (0..n_prompt)
                .map(|_| rng.random_range(0..n_vocab))
                .collect(),
            sampling: SamplingParams {
                temperature: 0.0,
                ..SamplingParams::default()
            },
            max_tokens: Some(n),
            n_ctx: Some(4096),
            stop: Vec::new(),
            deadline: None,
        };
        let mut events = engine.generate(request).expect("the engine runs");
        let summary = loop {
            match events.next().await.expect("an end") {
                GenerateEvent::Piece { .. } => {}
                GenerateEvent::Done(summary) => break summary,
                GenerateEvent::Failed(error) => panic!("{error}"),
            }
        };
        // A random model may end its text at once; such a run times nothing.
        if summary.generated_tokens == n {
            return summary;
        }
    }
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}
