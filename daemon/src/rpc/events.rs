//! The events of a generation, on the wire.

use std::collections::VecDeque;
use std::pin::Pin;
use std::time::Instant;

use futures_util::{Stream, stream};
use rocmforge_engine::LoadedModel;
use rocmforge_engine::api as engine;
use rocmforge_proto::v1;
use rocmforge_service::answers::{Ended, Generation, Step};
use rocmforge_service::arrival::Arrival;
use rocmforge_service::failure::Failure;
use rocmforge_service::generation::Running;
use rocmforge_service::parts::{Part, Splitter};
use rocmforge_service::request_log::RequestLog;
use tonic::{Response, Status};

use super::convert;
use super::status_code::status;

pub(super) type GenerateStream =
    Pin<Box<dyn Stream<Item = Result<v1::GenerateEvent, Status>> + Send>>;

/// The stream of what has begun.
pub(super) fn streamed(
    begun: Result<Vec<(Running, Splitter)>, Failure>,
    arrival: Arrival,
    log: RequestLog,
) -> Result<Response<GenerateStream>, Status> {
    match begun {
        Ok(choices) => {
            let generation = Generation::new(choices, log, &arrival);
            Ok(Response::new(Box::pin(events(generation, arrival))))
        }
        Err(failure) => log.end(Err(failure)).map_err(status),
    }
}

/// The wire's events. Dropping the stream drops the engine's, which cancels the generation.
fn events(
    generation: Generation,
    arrival: Arrival,
) -> impl Stream<Item = Result<v1::GenerateEvent, Status>> + Send {
    stream::unfold(
        Some((generation, VecDeque::new())),
        move |state| async move {
            let (mut generation, mut ready): (Generation, VecDeque<v1::GenerateEvent>) = state?;
            if let Some(event) = ready.pop_front() {
                let goes_on = !is_last(&event);
                return Some((Ok(event), goes_on.then_some((generation, ready))));
            }
            let model = generation.model().cloned();
            match arrival.limit(async { Ok(generation.next().await) }).await {
                Ok(Step::More {
                    choice,
                    parts,
                    ids,
                    scores,
                }) => {
                    let scored = model.iter().flat_map(|model| {
                        let token = |score: &engine::TokenScore| token_logprob(model, score);
                        scores.iter().map(token).collect::<Vec<_>>()
                    });
                    let piece = piece_of(choice, parts, ids, scored.collect());
                    Some((Ok(of_piece(piece)), Some((generation, ready))))
                }
                Ok(Step::End {
                    choice,
                    parts,
                    ended,
                    last,
                }) => {
                    let done = done(choice, &ended, !last, arrival.at);
                    let done = v1::GenerateEvent {
                        event: Some(v1::generate_event::Event::Done(done)),
                    };
                    if parts.is_empty() {
                        return Some((Ok(done), (!last).then_some((generation, ready))));
                    }
                    ready.push_back(done);
                    let rest = piece_of(choice, parts, Vec::new(), Vec::new());
                    Some((Ok(of_piece(rest)), Some((generation, ready))))
                }
                Ok(Step::Failed(failure)) => Some((Err(status(failure)), None)),
                Err(failure) => {
                    generation.fail(&failure);
                    Some((Err(status(failure)), None))
                }
            }
        },
    )
}

/// Whether the stream ends with this event.
fn is_last(event: &v1::GenerateEvent) -> bool {
    matches!(&event.event, Some(v1::generate_event::Event::Done(done)) if !done.others_go_on)
}

fn of_piece(piece: v1::GeneratePiece) -> v1::GenerateEvent {
    v1::GenerateEvent {
        event: Some(v1::generate_event::Event::Piece(piece)),
    }
}

fn piece_of(
    choice: usize,
    parts: Vec<Part>,
    token_ids: Vec<u32>,
    logprobs: Vec<v1::TokenLogprob>,
) -> v1::GeneratePiece {
    let mut piece = v1::GeneratePiece {
        choice: choice as u32,
        token_ids,
        logprobs,
        ..Default::default()
    };
    for part in parts {
        match part {
            Part::Text(text) => piece.text.push_str(&text),
            Part::Reasoning(text) => piece.reasoning.push_str(&text),
            Part::Call(call) => piece.tool_calls.push(v1::ToolCall {
                id: format!("call_{:016x}", rand::random::<u64>()),
                name: call.name,
                arguments: call.arguments,
            }),
        }
    }
    piece
}

fn done(choice: usize, ended: &Ended, others_go_on: bool, arrived: Instant) -> v1::GenerateDone {
    let summary = &ended.summary;
    let ttft_s = summary.ttft.as_secs_f64();
    let prefill_s = summary.ttft.saturating_sub(summary.queued).as_secs_f64();
    v1::GenerateDone {
        finish_reason: convert::finish(summary.finish).into(),
        prompt_tokens: summary.prompt_tokens,
        reused_tokens: summary.reused_tokens,
        drafted_tokens: summary.drafted_tokens,
        accepted_tokens: summary.accepted_tokens,
        generated_tokens: summary.generated_tokens,
        ttft_ms: ttft_s * 1e3,
        decode_tokens_per_s: summary.decode_tokens_per_s,
        cache_hits: summary.cache.hits,
        cache_misses: summary.cache.misses,
        uploaded_bytes: summary.cache.uploaded_bytes,
        prefill_tokens_per_s: if prefill_s > 0.0 {
            f64::from(summary.prompt_tokens - summary.reused_tokens) / prefill_s
        } else {
            0.0
        },
        queue_ms: summary.queued.as_secs_f64() * 1e3,
        total_ms: arrived.elapsed().as_secs_f64() * 1e3,
        seed: ended.seed,
        stop_string: ended.stop_string.clone().unwrap_or_default(),
        stop_token_id: match summary.finish {
            engine::FinishReason::StopToken { id } => Some(id),
            _ => None,
        },
        choice: choice as u32,
        others_go_on,
        tool_calls: ended.calls as u32,
    }
}

/// A token with its log-probability.
pub(super) fn token_logprob(model: &LoadedModel, score: &engine::TokenScore) -> v1::TokenLogprob {
    let top = score.top.iter().map(|&(id, logprob)| v1::TopLogprob {
        id,
        logprob,
        piece: piece(model, id),
    });
    v1::TokenLogprob {
        id: score.id,
        logprob: Some(score.logprob),
        piece: piece(model, score.id),
        top: top.collect(),
    }
}

/// Bytes of a token.
pub(super) fn piece(model: &LoadedModel, id: u32) -> Vec<u8> {
    model
        .tokenizer()
        .token_bytes(id)
        .unwrap_or_default()
        .to_vec()
}
