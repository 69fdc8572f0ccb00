//! Two models on one budget.

use rocmforge_client::proto::v1::set_budget_request::Budget;
use rocmforge_tests::daemon::{Daemon, Options};
use rocmforge_tests::fixtures::{self, TINY_LLAMA, TINY_QWEN3};
use rocmforge_tests::report;
use rocmforge_tests::session::{BudgetWatch, ask, connect, load};

/// How often the models take turns.
const ROUNDS: usize = 8;

/// An idle model gives up its last segments first, so what stays of it spares its
/// next request a whole upload.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn alternating_models_never_reload_whole() {
    let daemon = Daemon::start(&Options::default());
    let client = connect(&daemon).await;
    let models = [
        load(&client, TINY_LLAMA).await,
        load(&client, TINY_QWEN3).await,
    ];
    let exam = fixtures::exam();
    let asked = &exam[0];

    let mut expected = Vec::new();
    let watch = BudgetWatch::start(&daemon).await;
    for model in &models {
        expected.push(ask(&client, &model.name, asked).await.ids);
    }
    let working = watch.finish().await.working_max;
    let whole: u64 = models.iter().map(|model| model.weight_bytes).sum();
    let smaller = models
        .iter()
        .map(|model| model.weight_bytes)
        .min()
        .unwrap_or_default();
    let tokens = 256 + 80;
    let kv = models
        .iter()
        .map(|model| model.kv_bytes_per_token * tokens)
        .max()
        .unwrap_or_default();
    let working = working.max(kv);
    let budget = whole - smaller / 2 + working;
    client
        .cache_set_budget(Budget::Bytes(budget))
        .await
        .expect("room for one and a half models");

    let watch = BudgetWatch::start(&daemon).await;
    let mut uploaded = 0;
    for round in 0..ROUNDS {
        for (model, expected) in models.iter().zip(&expected) {
            let answer = ask(&client, &model.name, asked).await;
            assert_eq!(&answer.ids, expected, "{}", model.name);
            uploaded += answer.done.uploaded_bytes;
            assert!(
                answer.done.uploaded_bytes < model.weight_bytes,
                "round {round}: {} uploaded {} of its {} bytes",
                model.name,
                answer.done.uploaded_bytes,
                model.weight_bytes
            );
        }
    }
    watch.finish().await;
    let share = 100.0 * uploaded as f64 / (ROUNDS as u64 * whole) as f64;
    report(&format!(
        "alternating models: {share:.1} % of their bytes uploaded a round"
    ));
    daemon.stop();
}
