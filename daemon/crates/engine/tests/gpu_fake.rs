//! Whole models through the HIP path, without a card: a fake runtime carries the kernels out
//! with the host's own code.

use crate::{fake, requests};
use std::path::Path;
use std::sync::Arc;

use crate::fake::{Runtime, gpu_config};
use crate::requests::{chat, load, questions, run};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use rocmforge_device_gpu::GpuConfig;
use rocmforge_engine::api::{Asker, Budget, GenerateRequest, ScoreRequest, When};
use rocmforge_engine::{EngineConfig, EngineHandle, Error, LoadedModel};
use rocmforge_fake_hip::{GRANULARITY, Live};

/// Two tokens whose logits differ by less than this are equally good: what 8-bit
/// inputs and f16 pages may move.
const TOLERANCE: f32 = 0.05;

/// Budget that holds all of a fixture.
const ROOMY: u64 = 24 << 20;

/// Budget whose eighth is scratch for hundreds of rows.
const FOR_CHUNKS: u64 = 64 << 20;

/// How much worse the host finds the first token that differs; `None` if none does.
async fn gap(
    host: &EngineHandle,
    model: &Arc<LoadedModel>,
    prompt: &[u32],
    expected: &[u32],
    got: &[u32],
) -> Option<f32> {
    let end = model.tokenizer().end_of_generation()[0];
    let at = |ids: &[u32], i: usize| ids.get(i).copied().unwrap_or(end);
    let first = (0..expected.len().max(got.len())).find(|&i| expected.get(i) != got.get(i))?;
    let mut ids = [prompt, &expected[..first]].concat();
    let mut logprob = [0.0; 2];
    for (to, next) in logprob
        .iter_mut()
        .zip([at(expected, first), at(got, first)])
    {
        ids.push(next);
        let request = ScoreRequest {
            model: Arc::clone(model),
            ids: ids.clone(),
            top_n: 0,
            deadline: None,
            asker: Asker::default(),
            adapters: None,
        };
        *to = host
            .score(request)
            .await
            .unwrap()
            .tokens
            .last()
            .unwrap()
            .logprob;
        ids.pop();
    }
    Some(logprob[0] - logprob[1])
}

/// The exam, with the whole model on the device and with a third of its layers: the host's tokens,
/// but where two are equally good.
async fn exam(file: &str) {
    let runtime = Runtime::new();
    let host = requests::engine(Budget::Bytes(64 << 20));
    let on_host = load(&host, file, "m").await;
    let device = runtime.start(ROOMY).unwrap();
    let at_start = device.snapshot().device.allocations;
    let on_device = load(&device, file, "m").await;
    assert_eq!(device.snapshot().device.kind.name(), "hip");

    let info = on_host.model().info();
    let layers = info.segments.iter().filter(|s| s.name.starts_with("blk."));
    let layers: u64 = layers.map(|s| s.bytes).sum();
    let others: u64 = info
        .segments
        .iter()
        .filter(|s| !s.name.starts_with("blk."))
        .map(|s| s.bytes)
        .sum();
    let third = others + layers / 3;
    // Beside the weights: KV pages, scratch, and what the device keeps for itself.
    let small = runtime.start(third + (2 << 20)).unwrap();
    let on_small = load(&small, file, "m").await;

    let (mut right, mut close, mut asked) = (0, 0, 0);
    for (question, answer) in questions(120) {
        let request = chat(&on_host, &question);
        let prompt = request.prompt.clone();
        let (_, expected, _) = run(&host, request).await;
        let (text, ids, _) = run(&device, chat(&on_device, &question)).await;
        let (_, ids_small, summary) = run(&small, chat(&on_small, &question)).await;
        assert!(summary.cache.misses > 0, "nothing was missing: {summary:?}");
        assert_eq!(
            ids, ids_small,
            "{file}: a small budget changes the text: {question}"
        );
        asked += 1;
        right += usize::from(text.trim() == answer);
        if let Some(gap) = gap(&host, &on_host, &prompt, &expected, &ids).await {
            assert!(
                gap.abs() < TOLERANCE,
                "{file}: {text:?} is no equal of the host's: {gap} to {question}"
            );
            println!("{file}: a token as good as the host's, by {gap}: {question}");
            close += 1;
        }
    }
    let cache = small.snapshot().cache;
    println!(
        "{file}: {right} of {asked} right, {close} with a token as good as the host's; a third of the layers: {} evictions",
        cache.evictions
    );
    assert!(right + 2 >= asked, "{right} of {asked}");
    assert!(close * 20 <= asked, "{close} of {asked} differ");
    assert!(cache.evictions > 0);
    let graphs = runtime.live().graphs;
    assert!(
        graphs > 0,
        "decode steps are recorded where everything is resident"
    );
    // Chunks of the arena are of the start.
    assert_eq!(device.snapshot().device.allocations, at_start);
    device.end().unwrap();
    small.end().unwrap();
    assert_eq!(runtime.violations(), Vec::<String>::new());
    assert_eq!(runtime.live(), Live::default());
}

#[tokio::test]
async fn tiny_llama_says_what_it_says_on_the_host() {
    exam("tiny-llama-Q4_K_M.gguf").await;
}

#[tokio::test]
async fn tiny_qwen3_says_what_it_says_on_the_host() {
    exam("tiny-qwen3-Q8_0.gguf").await;
}

/// Answers to some questions, one after another.
async fn answers(engine: &EngineHandle, model: &Arc<LoadedModel>, n: usize) -> Vec<Vec<u32>> {
    let mut ids = Vec::new();
    for (question, _) in questions(n) {
        ids.push(run(engine, chat(model, &question)).await.1);
    }
    ids
}

#[tokio::test]
async fn two_models_share_a_card_that_holds_one_and_a_half() {
    let runtime = Runtime::new();
    let roomy = runtime.start(ROOMY).unwrap();
    let (llama, qwen) = ("tiny-llama-Q4_K_M.gguf", "tiny-qwen3-Q8_0.gguf");
    let (a, b) = (
        load(&roomy, llama, "a").await,
        load(&roomy, qwen, "b").await,
    );
    let bytes = |m: &Arc<LoadedModel>| m.model().info().tensor_bytes;
    let budget = (bytes(&a) + bytes(&b)) * 3 / 4;
    let (alone_a, alone_b) = (answers(&roomy, &a, 8).await, answers(&roomy, &b, 8).await);
    roomy.end().unwrap();

    let shared = runtime.start(budget & !255).unwrap();
    let (a, b) = (
        load(&shared, llama, "a").await,
        load(&shared, qwen, "b").await,
    );
    for (i, (question, _)) in questions(8).into_iter().enumerate() {
        let (_, ids, _) = run(&shared, chat(&a, &question)).await;
        assert_eq!(ids, alone_a[i], "{question}");
        let (_, ids, _) = run(&shared, chat(&b, &question)).await;
        assert_eq!(ids, alone_b[i], "{question}");
    }
    let cache = shared.snapshot().cache;
    println!("{cache:?}");
    assert!(cache.evictions > 0);
    // The arena is the budget, rounded up, by the driver's count too.
    let held = cache.budget_bytes.next_multiple_of(GRANULARITY);
    assert_eq!(runtime.live().bytes, held);
    shared.end().unwrap();
    assert_eq!(runtime.violations(), Vec::<String>::new());
    assert_eq!(runtime.live(), Live::default());
}

/// Where two models decode at once, what a pass of one has found is read while the other's runs:
/// both say what they say alone, with room for both and without.
#[tokio::test]
async fn two_models_at_once_say_what_they_say_alone() {
    let runtime = Runtime::new();
    let engine = runtime.start(ROOMY).unwrap();
    let (llama, qwen) = ("tiny-llama-Q4_K_M.gguf", "tiny-qwen3-Q8_0.gguf");
    let (a, b) = (
        load(&engine, llama, "a").await,
        load(&engine, qwen, "b").await,
    );
    let bytes = |m: &Arc<LoadedModel>| m.model().info().tensor_bytes;
    let tight = ((bytes(&a) + bytes(&b)) * 3 / 4) & !255;
    let alone = (answers(&engine, &a, 6).await, answers(&engine, &b, 6).await);
    for budget in [ROOMY, tight] {
        engine.set_budget(Budget::Bytes(budget)).await.unwrap();
        let before = engine.snapshot().suspensions;
        let both = tokio::join!(answers(&engine, &a, 6), answers(&engine, &b, 6));
        assert_eq!(both, alone, "{budget}");
        let suspended = engine.snapshot().suspensions - before;
        println!("{budget}: {suspended} suspensions");
        assert!(suspended > 20, "{budget}: {suspended}");
    }
    drop((a, b));
    engine.end().unwrap();
    assert_eq!(runtime.violations(), Vec::<String>::new());
    assert_eq!(runtime.live(), Live::default());
}

#[tokio::test]
async fn requests_in_turn_on_one_model_say_what_they_say_alone() {
    let runtime = Runtime::new();
    let engine = runtime.start(ROOMY).unwrap();
    let model = load(&engine, "tiny-llama-Q4_K_M.gguf", "m").await;
    let alone = answers(&engine, &model, 6).await;
    let together = questions(6).into_iter().map(|(question, _)| {
        let request = chat(&model, &question);
        let engine: EngineHandle = engine.clone();
        tokio::spawn(async move { run(&engine, request).await.1 })
    });
    let together: Vec<_> = together.collect();
    for (task, expected) in together.into_iter().zip(alone) {
        assert_eq!(task.await.unwrap(), expected);
    }
    drop(model);
    engine.end().unwrap();
    assert_eq!(runtime.violations(), Vec::<String>::new());
    assert_eq!(runtime.live(), Live::default());
}

#[tokio::test]
async fn a_file_that_cannot_be_registered_goes_through_pinned_memory() {
    let runtime = Runtime::new();
    let file = "tiny-llama-Q4_K_M.gguf";
    let registering = runtime.start(ROOMY).unwrap();
    let model = load(&registering, file, "m").await;
    let expected = answers(&registering, &model, 4).await;
    assert!(runtime.live().registrations > 0);
    registering.end().unwrap();
    runtime.set_register(false);
    // In the second case a row of the file's is larger than a third of a piece.
    for (pieces, piece_bytes) in [(8, 1 << 20), (2, 4096)] {
        let config = GpuConfig {
            ring_pieces: pieces,
            ring_piece_bytes: piece_bytes,
            ..gpu_config(&runtime)
        };
        let engine = runtime.start_with(config, ROOMY).unwrap();
        let model = load(&engine, file, "m").await;
        assert_eq!(answers(&engine, &model, 4).await, expected);
        assert_eq!(runtime.live().registrations, 0);
        engine.end().unwrap();
    }
    assert_eq!(runtime.violations(), Vec::<String>::new());
    assert_eq!(runtime.live(), Live::default());
}

/// Brings a file to the disk and out of the page cache.
fn drop_cached(path: &Path) {
    let file = std::fs::File::open(path).unwrap();
    file.sync_all().unwrap();
    posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).unwrap();
}

#[tokio::test]
async fn a_cold_model_is_read_past_the_page_cache_where_that_is_said() {
    let runtime = Runtime::new();
    let file = "tiny-llama-Q4_K_M.gguf";
    let mapping = runtime.start(ROOMY).unwrap();
    let model = load(&mapping, file, "m").await;
    let expected = answers(&mapping, &model, 4).await;
    assert_eq!(
        model.file().direct_bytes(),
        0,
        "a small model is left to the page cache"
    );
    mapping.end().unwrap();
    let registered = runtime.calls("hipHostRegister");
    assert!(registered > 0);

    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join(file);
    std::fs::copy(requests::fixture(file), &path).unwrap();
    let engine = EngineConfig {
        budget: Budget::Bytes(ROOMY),
        cpu_compute: When::Never,
        host_budget: None,
        direct_io: When::Always,
        ..EngineConfig::default()
    };
    let engine = runtime.start_as(gpu_config(&runtime), engine).unwrap();
    let model = fake::load(&engine, &path, "m").await.unwrap();
    if !model.file().is_direct() {
        println!("skipped: {} has no direct reads", dir.path().display());
        return;
    }
    // What was read ahead with the header goes.
    drop_cached(&path);
    let len = model.file().len();
    let before = model.file().cached_bytes(0..len).unwrap();
    assert_eq!(answers(&engine, &model, 4).await, expected);
    let after = model.file().cached_bytes(0..len).unwrap();
    let direct = model.file().direct_bytes();
    println!("{direct} of {len} bytes read directly; cached {before}, then {after}");
    assert!(direct > 0);
    assert!(after < len, "the whole file is in the page cache");
    assert_eq!(
        runtime.calls("hipHostRegister"),
        registered,
        "to register is to read"
    );
    drop(model);
    engine.end().unwrap();
    assert_eq!(runtime.violations(), Vec::<String>::new());
    assert_eq!(runtime.live(), Live::default());
}

/// A greedy request whose prompt is long enough for the vendor's library.
fn long(model: &Arc<LoadedModel>) -> GenerateRequest {
    let questions = questions(5).into_iter().map(|(question, _)| question);
    let request = chat(model, &questions.collect::<Vec<_>>().join(" "));
    assert!(request.prompt.len() > 100, "{}", request.prompt.len());
    request
}

/// How the device is opened with the vendor's library for large products.
fn with_products(runtime: &Runtime) -> GpuConfig {
    GpuConfig {
        vendor_products: true,
        ..gpu_config(runtime)
    }
}

#[tokio::test]
async fn a_long_prompt_by_the_vendors_library_says_what_it_says_on_the_host() {
    for file in ["tiny-llama-Q4_K_M.gguf", "tiny-qwen3-Q8_0.gguf"] {
        let runtime = Runtime::new();
        runtime.add_products();
        let host = requests::engine(Budget::Bytes(64 << 20));
        let on_host = load(&host, file, "m").await;
        let request = long(&on_host);
        let prompt = request.prompt.clone();
        let (_, expected, _) = run(&host, request).await;
        let engine = runtime
            .start_with(with_products(&runtime), FOR_CHUNKS)
            .unwrap();
        let model = load(&engine, file, "m").await;
        let (_, ids, _) = run(&engine, long(&model)).await;
        let products = runtime.calls("rocblas_gemm_ex");
        println!("{file}: {} tokens, {products} products", prompt.len());
        assert!(products > 10, "{products}");
        if let Some(gap) = gap(&host, &on_host, &prompt, &expected, &ids).await {
            assert!(gap.abs() < TOLERANCE, "{file}: {gap}");
        }
        drop(model);
        engine.end().unwrap();
        assert_eq!(runtime.violations(), Vec::<String>::new());
        assert_eq!(runtime.live(), Live::default());
    }
}

#[tokio::test]
async fn a_library_that_fails_a_product_fails_that_request_and_none_after_it() {
    let runtime = Runtime::new();
    runtime.add_products();
    let file = "tiny-llama-Q4_K_M.gguf";
    let portable = runtime.start(FOR_CHUNKS).unwrap();
    let model = load(&portable, file, "m").await;
    let expected = run(&portable, long(&model)).await.1;
    drop(model);
    portable.end().unwrap();
    assert_eq!(runtime.calls("rocblas_gemm_ex"), 0);

    let engine = runtime
        .start_with(with_products(&runtime), FOR_CHUNKS)
        .unwrap();
    let model = load(&engine, file, "m").await;
    // rocblas_status_internal_error, in the midst of a pass.
    runtime.fail("rocblas_gemm_ex", 5, 6);
    let error = fake::run(&engine, long(&model)).await.unwrap_err();
    println!("{error}");
    let text = error.to_string();
    for word in ["matrix product", "librocblas.so.4", "code 6"] {
        assert!(text.contains(word), "{word}: {text}");
    }
    let products = runtime.calls("rocblas_gemm_ex");
    assert_eq!(run(&engine, long(&model)).await.1, expected);
    assert_eq!(
        runtime.calls("rocblas_gemm_ex"),
        products,
        "no more are asked for"
    );
    drop(model);
    engine.end().unwrap();
    assert_eq!(runtime.violations(), Vec::<String>::new());
    assert_eq!(runtime.live(), Live::default());
}

#[tokio::test]
async fn a_library_without_memory_gets_another_chance() {
    let runtime = Runtime::new();
    runtime.add_products();
    let engine = runtime
        .start_with(with_products(&runtime), FOR_CHUNKS)
        .unwrap();
    let model = load(&engine, "tiny-llama-Q4_K_M.gguf", "m").await;
    let expected = run(&engine, long(&model)).await.1;
    let products = runtime.calls("rocblas_gemm_ex");
    // rocblas_status_memory_error: the budget shrinks, and the step is done again.
    runtime.fail("rocblas_gemm_ex", 5, 5);
    assert_eq!(run(&engine, long(&model)).await.1, expected);
    assert!(engine.snapshot().cache.budget_bytes < FOR_CHUNKS);
    assert!(runtime.calls("rocblas_gemm_ex") > 2 * products);
}

#[tokio::test]
async fn memory_that_another_process_took_makes_the_budget_smaller() {
    let runtime = Runtime::new();
    let file = "tiny-llama-Q4_K_M.gguf";
    runtime.set_memory(64 << 20, 58 << 20);
    let engine = runtime.start(16 << 20).unwrap();
    let budget = engine.snapshot().cache.budget_bytes;
    assert!((4 << 20..=6 << 20).contains(&budget), "{budget}");
    let model = load(&engine, file, "m").await;
    let expected = answers(&engine, &model, 4).await;
    // More is refused with the numbers, and what was in force stays so.
    let error = engine
        .set_budget(Budget::Bytes(16 << 20))
        .await
        .unwrap_err();
    assert!(matches!(error, Error::Exhausted { .. }), "{error:?}");
    let text = error.to_string();
    let free = (6 << 20) - budget.next_multiple_of(GRANULARITY);
    for number in [16 << 20, free, budget] {
        assert!(text.contains(&number.to_string()), "{number} in: {text}");
    }
    assert_eq!(engine.snapshot().cache.budget_bytes, budget);
    assert_eq!(answers(&engine, &model, 4).await, expected);
    // What the other gave back can be had, beside what is held while it is moved.
    runtime.set_memory(64 << 20, 0);
    engine.set_budget(Budget::Bytes(16 << 20)).await.unwrap();
    assert_eq!(runtime.live().bytes, 16 << 20);
    assert_eq!(answers(&engine, &model, 4).await, expected);
    drop(model);
    engine.end().unwrap();
    assert_eq!(runtime.violations(), Vec::<String>::new());
    assert_eq!(runtime.live(), Live::default());
}

#[tokio::test]
async fn a_load_gets_kernels_and_file_ready_without_a_request() {
    let runtime = Runtime::new();
    let start = || {
        let config = GpuConfig {
            warm_up: true,
            ..gpu_config(&runtime.fake)
        };
        runtime.start_with(config, ROOMY).unwrap()
    };
    let file = "tiny-llama-Q4_K_M.gguf";
    let cold = runtime.start(ROOMY).unwrap();
    let model = load(&cold, file, "m").await;
    let expected = answers(&cold, &model, 2).await;
    drop(model);
    cold.end().unwrap();
    // A refusal meanwhile is nobody's: whoever needs what it was about asks again.
    for refused in [None, Some("hipModuleLoadData"), Some("hipHostRegister")] {
        if let Some(call) = refused {
            runtime.fail(call, 1, 2);
        }
        let device = start();
        let model = load(&device, file, "m").await;
        if refused.is_none() {
            let begun = std::time::Instant::now();
            let ready = || {
                let live = runtime.live();
                // The units that every model needs are four.
                live.modules > 8 && live.registrations > 0
            };
            while !ready() {
                assert!(begun.elapsed().as_secs() < 30, "{:?}", runtime.live());
                tokio::time::sleep(std::time::Duration::from_millis(1)).await;
            }
            assert_eq!(device.snapshot().cache.uploads, 0, "nothing is uploaded");
        }
        assert_eq!(answers(&device, &model, 2).await, expected, "{refused:?}");
        device.unload("m", false).await.unwrap();
        drop(model);
        device.end().unwrap();
        runtime.recover();
        assert_eq!(runtime.live(), Live::default(), "{refused:?}");
        // A request that meets the refusal makes the budget shrink, and a page of KV that
        // is not full travels whole.
        let mut noted = runtime.violations();
        noted.retain(|line| refused.is_none() || !line.starts_with("a copy to the host reads"));
        assert_eq!(noted, Vec::<String>::new(), "{refused:?}");
    }
}

/// The small model with heads of 4 in place of 64, and sixteen times as many.
fn of_heads_without_a_kernel() -> Vec<u8> {
    let mut bytes = std::fs::read(requests::fixture("tiny-llama-Q4_K_M.gguf")).unwrap();
    for (key, value) in [
        ("attention.head_count", 64u32),
        ("attention.head_count_kv", 32),
        ("attention.key_length", 4),
        ("attention.value_length", 4),
        ("rope.dimension_count", 4),
    ] {
        let name = format!("llama.{key}");
        let mut written = (name.len() as u64).to_le_bytes().to_vec();
        written.extend_from_slice(name.as_bytes());
        let at = bytes.windows(written.len()).position(|w| w == written);
        // Behind the name stands the type.
        let at = at.unwrap() + written.len() + 4;
        bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }
    bytes
}

#[tokio::test]
async fn a_model_that_no_kernel_can_run_is_refused_when_it_is_loaded() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("narrow.gguf");
    std::fs::write(&path, of_heads_without_a_kernel()).unwrap();
    // It is a model, which the host runs.
    let host = requests::engine(Budget::Bytes(ROOMY));
    let model = fake::load(&host, &path, "m").await.unwrap();
    run(&host, chat(&model, "Hi")).await;
    let runtime = Runtime::new();
    for warm_up in [false, true] {
        let config = GpuConfig {
            warm_up,
            ..gpu_config(&runtime.fake)
        };
        let device = runtime.start_with(config, ROOMY).unwrap();
        let error = fake::load(&device, &path, "m").await.unwrap_err();
        assert!(matches!(error, Error::Unsupported(_)), "{error:?}");
        for part in ["narrow.gguf", "keys of 4", "multiples of 8"] {
            assert!(error.to_string().contains(part), "{error}");
        }
        // Nothing of it stays: neither its name, nor its file.
        assert!(device.snapshot().models.is_empty());
        let model = load(&device, "tiny-llama-Q4_K_M.gguf", "m").await;
        run(&device, chat(&model, "Hi")).await;
        drop(model);
        device.end().unwrap();
        assert_eq!(runtime.live(), Live::default());
    }
}

/// Such a budget was accepted once, and every request failed for good.
#[tokio::test]
async fn a_budget_below_what_the_device_keeps_is_refused_with_the_least_one_that_works() {
    let runtime = Runtime::new();
    let engine = runtime.start(ROOMY).unwrap();
    let model = load(&engine, "tiny-llama-Q4_K_M.gguf", "m").await;
    let expected = answers(&engine, &model, 2).await;
    let refused = engine.set_budget(Budget::Bytes(256 << 10)).await;
    let error = refused.unwrap_err();
    let Error::Precondition(refusal) = &error else {
        panic!("{error:?}");
    };
    assert_eq!(refusal.reason(), "BUDGET_OUT_OF_RANGE");
    let numbers = refusal.numbers();
    let number = |name| numbers.iter().find(|(n, _)| *n == name).unwrap().1;
    let (min, staging) = (number("min_bytes"), number("staging_bytes"));
    assert!(staging > 0 && min > staging && min < ROOMY, "{error}");
    assert!(error.to_string().contains(&min.to_string()), "{error}");
    // What was in force stays so, and the least one works.
    assert_eq!(engine.snapshot().cache.budget_bytes, ROOMY);
    assert_eq!(answers(&engine, &model, 2).await, expected);
    engine.set_budget(Budget::Bytes(min)).await.unwrap();
    assert_eq!(engine.snapshot().cache.budget_bytes, min);
    assert_eq!(answers(&engine, &model, 2).await, expected);
    drop(model);
    engine.end().unwrap();
    assert_eq!(runtime.violations(), Vec::<String>::new());
}
