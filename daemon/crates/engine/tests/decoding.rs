//! Log-probabilities, bias, and where a text may and must end.

use std::sync::Arc;

use crate::requests::{chat, engine, load, questions, run};
use rocmforge_engine::api::{
    Asker, Budget, Decoding, FinishReason, GenerateEvent, GenerateRequest, SamplingParams,
    ScoreRequest, TokenScore,
};
use rocmforge_engine::{EngineHandle, LoadedModel};

const LLAMA: &str = "tiny-llama-Q4_K_M.gguf";
const QWEN: &str = "tiny-qwen3-Q8_0.gguf";

async fn started(file: &str) -> (EngineHandle, Arc<LoadedModel>) {
    let engine = engine(Budget::Bytes(64 << 20));
    let model = load(&engine, file, "m").await;
    (engine, model)
}

/// How tokens are chosen: greedily, from a few, from all, with penalties.
fn samplings() -> [SamplingParams; 4] {
    let seeded = SamplingParams {
        seed: Some(11),
        ..SamplingParams::default()
    };
    [
        SamplingParams {
            temperature: 0.0,
            ..SamplingParams::default()
        },
        seeded.clone(),
        SamplingParams {
            top_k: 0,
            ..seeded.clone()
        },
        SamplingParams {
            repeat_penalty: 1.3,
            ..seeded
        },
    ]
}

fn with_scores(mut request: GenerateRequest, top: u32) -> GenerateRequest {
    request.decoding.logprobs = Some(top);
    request
}

async fn scored(engine: &EngineHandle, request: GenerateRequest) -> (Vec<u32>, Vec<TokenScore>) {
    let mut events = engine.generate(request).unwrap();
    let (mut ids, mut scores) = (Vec::new(), Vec::new());
    loop {
        match events.next().await.unwrap() {
            GenerateEvent::Piece {
                ids: new,
                scores: more,
                ..
            } => {
                assert!(more.len() == new.len() || more.is_empty());
                ids.extend(new);
                scores.extend(more);
            }
            GenerateEvent::Done(_) => return (ids, scores),
            GenerateEvent::Failed(error) => panic!("{error}"),
        }
    }
}

#[tokio::test]
async fn log_probabilities_are_what_a_scoring_of_the_same_text_gives() {
    for file in [LLAMA, QWEN] {
        let (engine, model) = started(file).await;
        for sampling in samplings() {
            let request = GenerateRequest {
                sampling: SamplingParams {
                    // Nothing of it is in what is told.
                    logit_bias: vec![(70, 3.0), (71, -100.0)],
                    ..sampling
                },
                decoding: Decoding {
                    ignore_eos: true,
                    ..Decoding::default()
                },
                max_tokens: Some(24),
                ..chat(&model, "Tell me a story.")
            };
            let n_prompt = request.prompt.len();
            let mut ids = request.prompt.clone();
            let (generated, scores) = scored(&engine, with_scores(request, 5)).await;
            assert_eq!((generated.len(), scores.len()), (24, 24));
            ids.extend(&generated);
            let whole = engine.score(ScoreRequest {
                model: Arc::clone(&model),
                ids,
                top_n: 5,
                deadline: None,
                asker: Asker::default(),
                adapters: None,
            });
            let whole = whole.await.unwrap();
            assert_eq!(scores, whole.tokens[n_prompt - 1..]);
            for score in &scores {
                let sorted = score.top.is_sorted_by(|a, b| a.1 >= b.1);
                assert!(sorted && score.top.len() == 5 && score.logprob <= score.top[0].1);
            }
        }
    }
}

#[tokio::test]
async fn who_wants_scores_changes_nobodys_text_and_not_its_own() {
    let (engine, model) = started(LLAMA).await;
    let asked = questions(samplings().len());
    let request = |i: usize| GenerateRequest {
        sampling: samplings()[i].clone(),
        ..chat(&model, &asked[i].0)
    };
    let mut alone = Vec::new();
    for i in 0..asked.len() {
        let (_, ids, _) = run(&engine, request(i)).await;
        let (same, scores) = scored(&engine, with_scores(request(i), 0)).await;
        assert_eq!((&same, scores.len()), (&ids, ids.len()), "request {i}");
        assert!(scores.iter().all(|s| s.top.is_empty()));
        alone.push(ids);
    }
    // Beside one that wants all logits of each pass, for longer than any of them.
    let beside = GenerateRequest {
        decoding: Decoding {
            logprobs: Some(20),
            ignore_eos: true,
            ..Decoding::default()
        },
        max_tokens: Some(200),
        ..request(0)
    };
    let beside = engine.generate(beside).unwrap();
    for (i, ids) in alone.iter().enumerate() {
        let (_, found, _) = run(&engine, request(i)).await;
        assert_eq!(&found, ids, "request {i}");
    }
    drop(beside);
}

#[tokio::test]
async fn no_text_ends_before_its_least_tokens() {
    let (engine, model) = started(LLAMA).await;
    let (_, short, summary) = run(&engine, chat(&model, "42 - 30 = ?")).await;
    assert_eq!(summary.finish, FinishReason::EndOfText);
    assert!(short.len() < 30);
    let least = |min_tokens| GenerateRequest {
        decoding: Decoding {
            min_tokens,
            ..Decoding::default()
        },
        ..chat(&model, "42 - 30 = ?")
    };
    let (_, ids, _) = run(&engine, least(30)).await;
    assert!(ids.len() >= 30, "{ids:?}");
    assert_eq!(ids[..short.len()], short);
    let ends = model.tokenizer().end_of_generation();
    assert!(!ids.iter().any(|id| ends.contains(id)));
    let (_, same, _) = run(&engine, least(short.len() as u32)).await;
    assert_eq!(same, short, "it may end where it wants to");
}

#[tokio::test]
async fn ends_that_are_ignored_are_tokens_like_others() {
    let (engine, model) = started(LLAMA).await;
    let (text, short, _) = run(&engine, chat(&model, "42 - 30 = ?")).await;
    let request = GenerateRequest {
        decoding: Decoding {
            ignore_eos: true,
            ..Decoding::default()
        },
        max_tokens: Some(40),
        ..chat(&model, "42 - 30 = ?")
    };
    let (longer, ids, summary) = run(&engine, request).await;
    assert_eq!(summary.finish, FinishReason::MaxTokens);
    assert_eq!((ids.len(), summary.generated_tokens), (40, 40));
    assert_eq!(ids[..short.len()], short);
    let end = ids[short.len()];
    assert!(model.tokenizer().is_end_of_generation(end));
    assert!(longer.starts_with(&text), "{longer}");
}

#[tokio::test]
async fn a_named_token_ends_the_text_and_is_no_part_of_it() {
    let (engine, model) = started(LLAMA).await;
    let request = || chat(&model, "Tell me a story.");
    let (_, ids, _) = run(&engine, request()).await;
    let stop = ids[7];
    let until = ids.iter().position(|&id| id == stop).unwrap();
    let stopped = |min_tokens| GenerateRequest {
        decoding: Decoding {
            stop_tokens: vec![stop, 3],
            min_tokens,
            ..Decoding::default()
        },
        ..request()
    };
    let (_, found, summary) = run(&engine, stopped(0)).await;
    assert_eq!(summary.finish, FinishReason::StopToken { id: stop });
    assert_eq!(found, ids[..until]);
    assert_eq!(summary.generated_tokens as usize, until);
    let (_, found, _) = run(&engine, stopped(20)).await;
    assert!(found.len() >= 20 && !found[..20].contains(&stop));
}

#[tokio::test]
async fn bias_forbids_and_forces() {
    let (engine, model) = started(QWEN).await;
    let request = |logit_bias: Vec<(u32, f32)>| GenerateRequest {
        sampling: SamplingParams {
            temperature: 0.0,
            logit_bias,
            ..SamplingParams::default()
        },
        max_tokens: Some(12),
        ..chat(&model, "Tell me a story about a fox.")
    };
    let (_, ids, _) = run(&engine, request(vec![])).await;
    let (_, other, _) = run(&engine, request(vec![(ids[0], -100.0)])).await;
    assert!(!other.contains(&ids[0]));
    let (_, forced, _) = run(&engine, request(vec![(ids[1], 100.0)])).await;
    assert_eq!(forced, [ids[1]; 12]);
}
