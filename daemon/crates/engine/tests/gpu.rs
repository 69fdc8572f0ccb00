//! The engine on a GPU against the engine on the host: the same text, also when the model does not
//! fit.
//!
//! Where no GPU can be opened the tests print why and pass.

use crate::requests;
use crate::requests::{chat, load, questions, run};
use rocmforge_engine::api::{Budget, GenerateRequest, When};
use rocmforge_engine::{DeviceChoice, EngineConfig, EngineHandle, EngineThread, start};

/// An engine whose thread is waited for: a driver does not survive a process
/// that ends while it is in use.
struct Running(Option<EngineHandle>, Option<EngineThread>);

impl std::ops::Deref for Running {
    type Target = EngineHandle;

    fn deref(&self) -> &EngineHandle {
        self.0.as_ref().unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0 = None;
        if let Some(thread) = self.1.take() {
            let _ = thread.join();
        }
    }
}

fn on(device: DeviceChoice, budget: Budget) -> Result<Running, String> {
    let config = EngineConfig {
        device,
        budget,
        ..EngineConfig::default()
    };
    start(config)
        .map(|(engine, thread)| Running(Some(engine), Some(thread)))
        .map_err(|e| e.to_string())
}

fn gpus() -> Vec<DeviceChoice> {
    [DeviceChoice::Hip(0), DeviceChoice::Cuda(0)]
        .into_iter()
        .filter(|&choice| match on(choice, Budget::Bytes(64 << 20)) {
            Ok(_) => true,
            Err(error) => {
                println!("skipped: {choice:?}: {error}");
                false
            }
        })
        .collect()
}

#[tokio::test]
async fn greedy_text_is_the_hosts() {
    for gpu in gpus() {
        for file in ["tiny-llama-Q4_K_M.gguf", "tiny-qwen3-Q8_0.gguf"] {
            let host = on(DeviceChoice::Host, Budget::Bytes(64 << 20)).unwrap();
            let device = on(gpu, Budget::Bytes(64 << 20)).unwrap();
            println!("{:?}", device.snapshot().device);
            let on_host = load(&host, file, "m").await;
            let on_gpu = load(&device, file, "m").await;
            let info = on_host.model().info();
            let largest = info.segments.iter().map(|s| s.bytes).max().unwrap();
            let small = on(
                gpu,
                Budget::Bytes(info.tensor_bytes / 3 + largest + (2 << 20)),
            )
            .unwrap();
            let on_small = load(&small, file, "m").await;
            let (mut right, mut same, mut same_small, n) = (0, 0, 0, 40);
            for (question, answer) in questions(n) {
                let expected = run(&host, chat(&on_host, &question)).await;
                let (text, ids, _) = run(&device, chat(&on_gpu, &question)).await;
                right += usize::from(text.trim() == answer);
                same += usize::from(ids == expected.1);
                if ids != expected.1 {
                    println!(
                        "{file}: {question:.60}: {text:?}, the host {:?}",
                        expected.0
                    );
                }
                let (_, ids, _) = run(&small, chat(&on_small, &question)).await;
                same_small += usize::from(ids == expected.1);
            }
            println!(
                "{gpu:?} {file}: {right} of {n} right, {same} as on the host, {same_small} in a small budget; {:?}; {:?}",
                device.snapshot().device,
                small.snapshot().cache
            );
            assert!(right + 2 >= n && same + 2 >= n && same_small + 2 >= n);
            assert!(small.snapshot().cache.evictions > 0);
        }
    }
}

/// A turn whose beginning left the card for the host's memory says what it says
/// where that stayed on the card.
#[tokio::test]
async fn what_left_the_card_comes_back_as_it_was() {
    for gpu in gpus() {
        for file in ["tiny-llama-Q4_K_M.gguf", "arch/qwen35.gguf"] {
            let mut turns = Vec::new();
            for leaves in [false, true] {
                let config = EngineConfig {
                    device: gpu,
                    budget: Budget::Bytes(64 << 20),
                    host_budget: Some(Budget::Bytes(64 << 20)),
                    host_kv: When::Always,
                    ..EngineConfig::default()
                };
                let (engine, thread) = start(config).unwrap();
                let engine = Running(Some(engine), Some(thread));
                let model = load(&engine, file, "m").await;
                let ask = |prompt: Vec<u32>| GenerateRequest {
                    reuse: true,
                    ..requests::greedy(&model, prompt, 24)
                };
                let first: Vec<u32> = (0..600).map(|i| 5 + (i * 31 + i * i) % 200).collect();
                let (_, answer, _) = run(&engine, ask(first.clone())).await;
                if leaves {
                    for budget in [16 << 20, 64 << 20] {
                        engine.set_budget(Budget::Bytes(budget)).await.unwrap();
                    }
                    assert_eq!(engine.snapshot().cache.prefix_bytes, 0);
                }
                let second = [first, answer, vec![7; 20]].concat();
                let (_, found, summary) = run(&engine, ask(second)).await;
                let tier = engine.snapshot().host_tier;
                println!("{gpu:?} {file}: {} reused, {tier:?}", summary.reused_tokens);
                assert_eq!(tier.restored > 0, leaves, "{tier:?}");
                turns.push((found, summary.reused_tokens));
            }
            assert_eq!(turns[0], turns[1], "{file}");
        }
    }
}
