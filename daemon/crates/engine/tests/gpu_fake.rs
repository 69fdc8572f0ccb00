//! Whole models through the HIP path, without a card: a fake runtime carries the kernels out with the host's own code.

#![allow(clippy::unwrap_used, reason = "a test that fails says where")]

mod fake;
mod requests;

use std::time::Instant;

use requests::{chat, load, questions, run};
use rocmforge_engine::api::Budget;
use rocmforge_fake_hip::{Fake, Live};

#[tokio::test]
async fn probe() {
    for file in ["tiny-llama-Q4_K_M.gguf", "tiny-qwen3-Q8_0.gguf"] {
        let runtime = Fake::new();
        let host = requests::engine(Budget::Bytes(64 << 20));
        let on_host = load(&host, file, "m").await;
        let device = fake::start(&runtime, fake::gpu_config(&runtime), 32 << 20).unwrap();
        let on_device = load(&device, file, "m").await;
        for (question, answer) in questions(5) {
            let begin = Instant::now();
            let expected = run(&host, chat(&on_host, &question)).await;
            let t1 = begin.elapsed();
            let got = run(&device, chat(&on_device, &question)).await;
            println!(
                "{question:.40}: {:?} {:?} {answer:?}: {} {t1:?} {:?}",
                got.0,
                expected.0,
                got.1 == expected.1,
                begin.elapsed()
            );
        }
        println!("{:?}", runtime.violations());
        device.end().unwrap();
        assert_eq!(runtime.live(), Live::default());
    }
}
