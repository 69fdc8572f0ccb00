//! Converts the events of a generation to types of rocmforge.v1.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use futures_util::Stream;
use rocmforge_chat::parts::Part;
use rocmforge_chat::parts::splitter::Splitter;
use rocmforge_engine::LoadedModel;
use rocmforge_engine::api as engine;
use rocmforge_failure::{self as failure, Failure};
use rocmforge_proto::v1;
use rocmforge_service::answers::{Ended, Generation, Step};
use rocmforge_service::arrival::Arrival;
use rocmforge_service::generation::Running;
use rocmforge_service::request_log::RequestLog;
use tokio::time::Sleep;
use tonic::{Response, Status};

use super::convert;
use super::status_code::status;

pub(super) type GenerateStream =
    Pin<Box<dyn Stream<Item = Result<v1::GenerateEvent, Status>> + Send>>;

/// The stream of events of started completions.
pub(super) fn streamed(
    begun: Result<Vec<(Running, Splitter)>, Failure>,
    arrival: Arrival,
    log: RequestLog,
) -> Result<Response<GenerateStream>, Status> {
    match begun {
        Ok(choices) => {
            let generation = Generation::new(choices, log, &arrival);
            Ok(Response::new(Box::pin(Events::new(generation, arrival))))
        }
        Err(failure) => log.end(Err(failure)).map_err(status),
    }
}

/// Stream of a generation's events. Dropping it cancels the generation.
struct Events {
    /// The generation; `None` after the last event.
    generation: Option<Generation>,
    /// An event that follows text that was held back.
    ready: Option<v1::GenerateEvent>,
    arrived: Instant,
    deadline: Deadline,
}

impl Events {
    fn new(generation: Generation, arrival: Arrival) -> Self {
        Self {
            generation: Some(generation),
            ready: None,
            arrived: arrival.at,
            deadline: Deadline {
                at: arrival.deadline,
                timer: None,
            },
        }
    }
}

impl Stream for Events {
    type Item = Result<v1::GenerateEvent, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Self {
            generation: slot,
            ready,
            arrived,
            deadline,
        } = &mut *self;
        let Some(generation) = slot else {
            return Poll::Ready(None);
        };
        let event = match ready.take() {
            Some(event) => event,
            None => match ready!(deadline.poll_before(generation, cx)) {
                Ok(Step::More {
                    choice,
                    parts,
                    ids,
                    scores,
                    ..
                }) => {
                    let model = generation.model();
                    let token = |score| model.map(|model| token_logprob(model, score));
                    let logprobs = scores.iter().filter_map(token).collect();
                    of_piece(piece_of(choice, parts, ids, logprobs))
                }
                Ok(Step::End {
                    choice,
                    parts,
                    ended,
                    last,
                    ..
                }) => {
                    let done = v1::GenerateEvent {
                        event: Some(v1::generate_event::Event::Done(done(
                            choice, &ended, !last, *arrived,
                        ))),
                    };
                    match parts.is_empty() {
                        true => done,
                        false => {
                            *ready = Some(done);
                            of_piece(piece_of(choice, parts, Vec::new(), Vec::new()))
                        }
                    }
                }
                Ok(Step::Failed(failure)) => {
                    *slot = None;
                    return Poll::Ready(Some(Err(status(failure))));
                }
                Err(failure) => {
                    generation.fail(&failure);
                    *slot = None;
                    return Poll::Ready(Some(Err(status(failure))));
                }
            },
        };
        if is_last(&event) {
            *slot = None;
        }
        Poll::Ready(Some(Ok(event)))
    }
}

/// Deadline of a stream, with one timer for all of its events.
struct Deadline {
    at: Option<Instant>,
    /// The timer; set when the stream is first polled.
    timer: Option<Pin<Box<Sleep>>>,
}

impl Deadline {
    /// Polls for the next step; DEADLINE_EXCEEDED if the deadline comes first.
    fn poll_before(
        &mut self,
        generation: &mut Generation,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Step, Failure>> {
        // A timer fires with its next tick only, and the client's may have fired by then.
        let is_late = self.at.is_some_and(|at| Instant::now() >= at);
        if !is_late {
            if let Poll::Ready(step) = generation.poll_next(cx) {
                return Poll::Ready(Ok(step));
            }
            let Some(at) = self.at else {
                return Poll::Pending;
            };
            let set = || Box::pin(tokio::time::sleep_until(at.into()));
            ready!(self.timer.get_or_insert_with(set).as_mut().poll(cx));
        }
        Poll::Ready(Err(failure::deadline()))
    }
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
            Part::Text(text) => append(&mut piece.text, text),
            Part::Reasoning(text) => append(&mut piece.reasoning, text),
            Part::Call(call) => piece.tool_calls.push(v1::ToolCall {
                id: format!("call_{:016x}", rand::random::<u64>()),
                name: call.name,
                arguments: call.arguments,
            }),
            // Calls are told whole here.
            Part::Arguments(_) => {}
        }
    }
    piece
}

/// Appends a text, without a copy if `to` is empty, as it nearly always is.
fn append(to: &mut String, text: String) {
    match to.is_empty() {
        true => *to = text,
        false => to.push_str(&text),
    }
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
        longest_gap_ms: summary
            .longest_gap
            .map_or(0.0, |g| g.took.as_secs_f64() * 1e3),
        longest_gap_cause: summary
            .longest_gap
            .map_or_else(String::new, |gap| gap.cause.name().to_owned()),
        promised_gap_ms: summary.promised_gap.map(|(gap, _)| gap.as_millis() as u32),
        broken_gaps: summary.promised_gap.map_or(0, |(_, broken)| broken),
    }
}

/// Converts a token with its log-probability.
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
