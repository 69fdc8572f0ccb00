//! Score against an independent float32 computation of the same file.
//!
//! A kernel that multiplies 8-bit activations with quantized weights differs from float32 by
//! design. The reference says by how much: it computes once in float32 and once with activations
//! rounded to 8 bits in blocks of 32. The daemon may be off by [`ERROR_FACTOR`] times that error in
//! root mean square, since kernels choose their blocks themselves (256 for the K types costs up to
//! twice as much), plus [`FLOOR`] for keys and values in f16 and for sums in another order.

use std::ffi::OsStr;
use std::path::Path;

use rocmforge_client::Client;
use rocmforge_client::proto::v1::score_request::Input;
use rocmforge_client::proto::v1::{ScoreRequest, ScoreResponse, TokenIds};
use rocmforge_tests::daemon::{Daemon, Options};
use rocmforge_tests::fixtures::{self, TINY_LLAMA, TINY_QWEN3};
use rocmforge_tests::python::Python;
use rocmforge_tests::report;
use rocmforge_tests::session::{connect, load, try_load};
use serde_json::Value;

/// How many times the error of rounded activations the daemon may be off.
const ERROR_FACTOR: f64 = 2.0;

/// What it may be off besides, in natural logarithms.
const FLOOR: f64 = 0.01;

/// Tokens of text.txt, story by story, that have one before them in theirs.
const STORY_TOKENS: u32 = 12_461;

/// How far 8-bit activations may move the perplexity of 12,461 tokens, as a share.
const PERPLEXITY_TOLERANCE: f64 = 0.01;

/// Random-weight models: one corner of the format each, as arguments of make_random_model.py.
const CORNERS: [&str; 25] = [
    "--types F32",
    "--types F16",
    "--types BF16",
    "--types Q4_0",
    "--types Q4_1",
    "--types Q5_0",
    "--types Q5_1",
    "--types Q8_0",
    "--types Q2_K",
    "--types Q3_K",
    "--types Q4_K",
    "--types Q5_K",
    "--types Q6_K",
    "--types MXFP4",
    "--types IQ4_XS,IQ4_NL",
    "--types IQ3_S,IQ3_XXS,IQ2_S",
    "--types IQ2_XS,IQ2_XXS,IQ1_S,IQ1_M",
    "--types TQ1_0,TQ2_0,NVFP4",
    "--types Q4_K,Q6_K,F32 --heads 9 --kv-heads 3 --embd 320 --no-tied",
    "--arch qwen2 --types Q8_0,Q4_0 --heads 7 --kv-heads 1 --no-tied",
    "--arch qwen2 --types Q5_K,Q6_K --rope yarn --layers 3",
    "--arch qwen3 --types Q4_K,Q6_K --heads 5 --kv-heads 5 --head-dim 128",
    "--arch qwen3 --types Q8_0 --rope linear --head-dim 32",
    "--arch llama --types Q4_0,Q8_0 --rope llama3 --rope-base 500000 --bias",
    "--arch llama --types Q3_K,Q2_K,MXFP4 --rope yarn --layers 3 --no-tied",
];

async fn score(client: &Client, model: &str, input: Input) -> ScoreResponse {
    let request = ScoreRequest {
        model: model.to_owned(),
        input: Some(input),
        ..Default::default()
    };
    client
        .score(request)
        .await
        .unwrap_or_else(|error| panic!("{model} does not score: {error}"))
}

/// Log-probabilities of ids 1.., by the reference.
fn reference(python: &Python, model: &Path, ids: &Path, activations: &str) -> Vec<f64> {
    let arguments = [
        model.as_os_str(),
        "--ids-file".as_ref(),
        ids.as_os_str(),
        "--score".as_ref(),
        "--activations".as_ref(),
        activations.as_ref(),
    ];
    let printed: Value = serde_json::from_str(&python.run("reference.py", &arguments))
        .expect("reference.py prints JSON");
    let tokens = printed["tokens"].as_array().expect("a list of tokens");
    tokens
        .iter()
        .skip(1)
        .map(|token| token["logprob"].as_f64().expect("a number"))
        .collect()
}

fn rms(values: impl Iterator<Item = f64>) -> f64 {
    let squares: Vec<f64> = values.map(|v| v * v).collect();
    (squares.iter().sum::<f64>() / squares.len() as f64).sqrt()
}

/// Holds the daemon's scores of `ids` to the reference's.
async fn check(
    client: &Client,
    python: &Python,
    dir: &Path,
    model: (&str, &Path),
    ids: Vec<u32>,
    what: &str,
) {
    let list = dir.join("ids.json");
    std::fs::write(&list, serde_json::to_string(&ids).expect("ids are JSON"))
        .expect("a file of ids");
    let exact = reference(python, model.1, &list, "f32");
    let rounded = reference(python, model.1, &list, "q8:32");
    let scored = score(client, model.0, Input::Tokens(TokenIds { ids })).await;
    assert_eq!(
        scored.tokens.len(),
        exact.len() + 1,
        "{what}: a score for each id"
    );
    assert!(
        scored.tokens[0].logprob.is_none(),
        "{what}: nothing comes before the first id"
    );
    let ours: Vec<f64> = scored.tokens[1..]
        .iter()
        .map(|token| f64::from(token.logprob.expect("every other id has a log-probability")))
        .collect();

    let error = rms(ours.iter().zip(&exact).map(|(a, b)| a - b));
    let explained = rms(rounded.iter().zip(&exact).map(|(a, b)| a - b));
    let size = rms(exact.iter().copied());
    report(&format!(
        "parity: {what}: error {error:.5} ({:.3} %), 8-bit activations alone {explained:.5}",
        100.0 * error / size
    ));
    let allowed = ERROR_FACTOR * explained + FLOOR;
    assert!(
        error <= allowed,
        "{what}: off by {error}, {allowed} is explained\n{ours:?}\n{exact:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fixtures_agree_with_float32() {
    let Some(python) = Python::find("fixtures_agree_with_float32", &["numpy", "gguf"]) else {
        return;
    };
    let daemon = Daemon::start(&Options::default());
    let client = connect(&daemon).await;
    let stories = fixtures::stories();
    for fixture in [TINY_LLAMA, TINY_QWEN3] {
        load(&client, fixture).await;
        let text = stories[..4].join("\n");
        let scored = score(&client, fixture, Input::Text(text)).await;
        let ids = scored.tokens.iter().map(|token| token.id).collect();
        let path = fixtures::path(fixture);
        check(
            &client,
            &python,
            daemon.dir(),
            (fixture, &path),
            ids,
            fixture,
        )
        .await;
    }
    daemon.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_corner_agrees_with_float32() {
    let Some(python) = Python::find("every_corner_agrees_with_float32", &["numpy", "gguf"]) else {
        return;
    };
    let models = tempfile::tempdir().expect("a temporary directory");
    let daemon = Daemon::start(&Options::default().model_dir(models.path()));
    let client = connect(&daemon).await;
    let vocabulary = fixtures::path(TINY_LLAMA);
    for (seed, corner) in CORNERS.iter().enumerate() {
        let path = models.path().join(format!("corner-{seed}.gguf"));
        let mut arguments = vec![path.as_os_str(), "--vocab".as_ref(), vocabulary.as_os_str()];
        let seed_option = format!("--seed={seed}");
        arguments.push(seed_option.as_ref());
        arguments.extend(corner.split(' ').map(OsStr::new));
        python.run("make_random_model.py", &arguments);
        let name = format!("corner-{seed}");
        let loaded = try_load(&client, &path, &name).await;
        loaded.unwrap_or_else(|error| panic!("{corner} (seed {seed}) does not load: {error}"));
        // Any ids will do; these wander over the vocabulary.
        let ids = (0..96_u32)
            .map(|n| (n * n * 31 + n * 7 + 5) % 1216)
            .collect();
        let what = format!("{corner} --seed {seed}");
        check(&client, &python, daemon.dir(), (&name, &path), ids, &what).await;
        client
            .unload(&name, false)
            .await
            .expect("an idle model unloads");
    }
    daemon.stop();
}

/// The figure that a person compares between versions, with keys and values in either type. In
/// float32 the reference has what stands here.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn perplexity_of_the_stories() {
    for kv_type in ["f16", "q8_0"] {
        let options = Options::default().arg("--kv-type").arg(kv_type);
        let daemon = Daemon::start(&options);
        let client = connect(&daemon).await;
        for (fixture, in_float32) in [(TINY_LLAMA, 1.7640), (TINY_QWEN3, 1.5943)] {
            let model = load(&client, fixture).await;
            assert_eq!(model.kv_type, kv_type);
            let perplexity = perplexity(&client, fixture).await;
            report(&format!(
                "perplexity of text.txt: {fixture}, {kv_type}, {perplexity:.4} over {STORY_TOKENS} tokens"
            ));
            let off = (perplexity / in_float32 - 1.0).abs();
            assert!(
                off < PERPLEXITY_TOLERANCE,
                "{fixture}, {kv_type}: {perplexity}, and {in_float32} in float32"
            );
        }
        daemon.stop();
    }
}

/// Of all stories, each on its own.
async fn perplexity(client: &Client, fixture: &str) -> f64 {
    let (mut sum, mut n) = (0.0, 0);
    for story in fixtures::stories() {
        let scored = score(client, fixture, Input::Text(story)).await;
        let listed: f64 = scored
            .tokens
            .iter()
            .filter_map(|token| token.logprob)
            .map(f64::from)
            .sum();
        assert!(
            (scored.sum_logprob - listed).abs() <= 1e-3 * listed.abs(),
            "{} is not {listed}",
            scored.sum_logprob
        );
        let perplexity = (-scored.sum_logprob / f64::from(scored.n_scored)).exp();
        assert!(
            (scored.perplexity - perplexity).abs() <= 1e-6 * perplexity,
            "{scored:?}"
        );
        sum += scored.sum_logprob;
        n += scored.n_scored;
    }
    assert_eq!(
        n, STORY_TOKENS,
        "tokens of text.txt that have one before them"
    );
    (-sum / f64::from(n)).exp()
}
