//! Writes a log line for each request when it ends, in whatever way, and its span if traces are
//! exported. Never contains prompts or outputs.
//!
//! Calls that change what is loaded, resident or allowed write a line with the target `audit`,
//! which says which client asked for what and the result. It is written at every log level but
//! `audit=off`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rocmforge_engine::api::times::TimesSlot;
use rocmforge_engine::api::{Gap, GenerateSummary};
use rocmforge_failure::Failure;

use crate::Service;
use crate::arrival::{Arrival, Caller};
use crate::peer::{Peer, TokenName};
use crate::trace::{self, Parent, Phase, Span, Value};
use crate::why::{Ended, RecentRequests};

/// Maximum length of a model's name or of arguments in a log line, in characters.
const TEXT_MAX: usize = 256;

/// The line of one request. Written on drop; a request that was dropped before
/// its end counts as cancelled.
#[derive(Debug)]
pub struct RequestLog {
    rpc: &'static str,
    /// The client's id of the request.
    id: Option<String>,
    model: String,
    caller: Option<Caller>,
    token: Option<TokenName>,
    parent: Option<Parent>,
    /// Arguments of a management call.
    arguments: Option<String>,
    at: Instant,
    /// Time at which the request was handed to the engine.
    handed_over: Option<Instant>,
    /// Times from the handover to the engine to the first pass and to the first token.
    began: Option<(Duration, Duration)>,
    code: &'static str,
    /// Why the request was rejected.
    refusal: Option<String>,
    /// Number of tokens of the prompt or input, if the request has one.
    pub prompt_tokens: Option<u32>,
    /// Number of generated tokens.
    pub generated_tokens: Option<u32>,
    /// Decode rate in tokens per second.
    pub tokens_per_s: Option<f64>,
    /// The longest time between two tokens, and what took most of it.
    pub longest_gap: Option<Gap>,
    /// The promised gap, and the number of longer gaps over all completions.
    pub promised_gap: Option<(Duration, u32)>,
    /// Bytes of weights that were uploaded for the request.
    pub uploaded_bytes: Option<u64>,
    /// The ring of recent requests that keeps this one after its end, and its number there.
    kept: Option<(Arc<RecentRequests>, u64)>,
    /// Slots for the time accounts of the request's completions.
    slots: Vec<TimesSlot>,
    peer: Peer,
}

impl RequestLog {
    /// Begins a request's log line. `model` is empty for requests without a model.
    pub fn new(rpc: &'static str, model: &str, arrival: &Arrival) -> Self {
        Self {
            rpc,
            id: None,
            model: cut(model),
            caller: arrival.caller,
            token: arrival.token,
            parent: arrival.parent,
            arguments: None,
            at: arrival.at,
            handed_over: None,
            began: None,
            code: "Cancelled",
            refusal: None,
            prompt_tokens: None,
            generated_tokens: None,
            tokens_per_s: None,
            longest_gap: None,
            promised_gap: None,
            uploaded_bytes: None,
            kept: None,
            slots: Vec::new(),
            peer: arrival.peer(),
        }
    }

    /// Begins the audit line of a management call.
    pub fn audit(rpc: &'static str, model: &str, arguments: &str, arrival: &Arrival) -> Self {
        let mut log = Self::new(rpc, model, arrival);
        log.arguments = Some(cut(arguments));
        log
    }

    /// Sets the client's id of the request.
    pub fn identify(&mut self, id: &str) {
        self.id = Some(cut(id));
    }

    /// Sets the model, if it becomes known only after the line was begun.
    pub fn about(&mut self, model: &str) {
        self.model = cut(model);
    }

    /// Keeps the request among the recent ones after its end.
    pub(crate) fn keep_in(&mut self, recent: &Arc<RecentRequests>) {
        if self.kept.is_none() {
            self.kept = Some((Arc::clone(recent), recent.number()));
        }
    }

    /// A new slot for the time account of a completion.
    pub(crate) fn slot(&mut self) -> TimesSlot {
        let number = self.kept.as_ref().map_or(0, |(_, number)| *number);
        let slot = TimesSlot::numbered(number);
        self.slots.push(slot.clone());
        slot
    }

    /// Records that the engine is called now for one or several texts whose times share the
    /// returned slot.
    pub fn times_in(&mut self, service: &Service) -> TimesSlot {
        self.keep_in(&service.recent);
        self.handed_over();
        self.slot()
    }

    /// Records that the request is handed to the engine now.
    pub(crate) fn handed_over(&mut self) {
        self.handed_over = Some(Instant::now());
    }

    /// Records the engine's summary of an ended generation; with several completions, the earliest
    /// start counts.
    pub fn generated(&mut self, summary: &GenerateSummary) {
        self.tokens_per_s = Some(summary.decode_tokens_per_s);
        let gaps = [self.longest_gap, summary.longest_gap]
            .into_iter()
            .flatten();
        self.longest_gap = gaps.max_by_key(|gap| gap.took);
        let broken = self.promised_gap.map_or(0, |(_, broken)| broken);
        self.promised_gap = summary.promised_gap.map(|(gap, more)| (gap, broken + more));
        self.uploaded_bytes = Some(summary.cache.uploaded_bytes);
        let (queued, ttft) = (summary.queued, summary.ttft);
        let earlier = self.began.unwrap_or((queued, ttft));
        self.began = Some((queued.min(earlier.0), ttft.min(earlier.1)));
    }

    fn span(&self, took: Duration) -> Span {
        let text = |text: &str| Some(Value::Text(text.to_owned()));
        let number = |n: Option<u32>| n.map(|n| Value::Number(n.into()));
        let model = (!self.model.is_empty()).then_some(&*self.model);
        let attributes = [
            ("gen_ai.request.model", model.and_then(text)),
            ("gen_ai.usage.input_tokens", number(self.prompt_tokens)),
            ("gen_ai.usage.output_tokens", number(self.generated_tokens)),
            (
                "rocmforge.uploaded_bytes",
                self.uploaded_bytes.map(Value::Number),
            ),
            ("rocmforge.request_id", self.id.as_deref().and_then(text)),
            (
                "rocmforge.arguments",
                self.arguments.as_deref().and_then(text),
            ),
            (
                "rocmforge.uid",
                number(self.caller.map(|caller| caller.uid)),
            ),
        ];
        let mut phases = Vec::new();
        if let Some(handed_over) = self.handed_over {
            let handed_over = handed_over - self.at;
            let mut from = Duration::ZERO;
            let mut phase = |name, to: Duration| {
                // The engine's clocks begin a little later than ours.
                let to = to.clamp(from, took);
                phases.push(Phase { name, from, to });
                from = to;
            };
            phase("prepare", handed_over);
            match self.began {
                Some((queued, first_token)) => {
                    phase("queue", handed_over + queued);
                    phase("prompt", handed_over + first_token);
                    phase("decode", took);
                }
                None => phase("generate", took),
            }
        }
        let known = |(name, value): (&'static str, Option<Value>)| Some((name, value?));
        Span {
            parent: self.parent,
            name: self.rpc,
            start: trace::wall(self.at),
            took,
            phases,
            attributes: attributes.into_iter().filter_map(known).collect(),
            error: (self.code != "Ok").then_some(self.code),
        }
    }

    /// Records the result of the request, writes the line, and returns the result.
    ///
    /// # Errors
    /// Those of `result`.
    pub fn end<T>(mut self, result: Result<T, Failure>) -> Result<T, Failure> {
        self.note(&result);
        result
    }

    /// Records the present result of the request.
    pub fn note<T>(&mut self, result: &Result<T, Failure>) {
        (self.code, self.refusal) = match result {
            Ok(_) => ("Ok", None),
            Err(failure) => (failure.kind().name(), Some(cut(failure.message()))),
        };
    }
}

fn cut(text: &str) -> String {
    text.chars().take(TEXT_MAX).collect()
}

impl Drop for RequestLog {
    fn drop(&mut self) {
        let took = self.at.elapsed();
        if trace::is_followed(self.parent) {
            trace::end(self.span(took));
        }
        let ms = took.as_secs_f64() * 1e3;
        let number = self.kept.as_ref().map(|(_, number)| *number);
        if let Some((recent, number)) = self.kept.take() {
            recent.keep(Ended {
                number,
                id: self.id.clone(),
                call: self.rpc,
                model: self.model.clone(),
                peer: self.peer,
                at: self.at,
                handed_over: self.handed_over,
                ended: self.at + took,
                code: self.code,
                slots: std::mem::take(&mut self.slots),
            });
        }
        let (uid, pid) = (self.caller.map(|c| c.uid), self.caller.map(|c| c.pid));
        let token = self.token.as_ref().map(TokenName::as_str);
        // What clients wrote is written as debug text, so that a name made of line
        // breaks cannot forge a line.
        match &self.arguments {
            None => tracing::info!(
                rpc = self.rpc,
                number,
                id = self.id,
                model = ?self.model,
                uid,
                pid,
                token,
                code = %self.code,
                ms,
                prompt_tokens = self.prompt_tokens,
                generated_tokens = self.generated_tokens,
                tokens_per_s = self.tokens_per_s,
                uploaded_bytes = self.uploaded_bytes,
                longest_gap_ms = self.longest_gap.map(|gap| gap.took.as_secs_f64() * 1e3),
                promised_gap_ms = self.promised_gap.map(|(gap, _)| gap.as_millis() as u64),
                broken_gaps = self.promised_gap.map(|(_, broken)| broken),
                gap_cause = self.longest_gap.map(|gap| gap.cause.name()),
                "request"
            ),
            Some(arguments) => tracing::info!(
                target: "audit",
                rpc = self.rpc,
                id = self.id,
                model = ?self.model,
                arguments,
                uid,
                pid,
                token,
                code = %self.code,
                refusal = ?self.refusal.as_deref().unwrap_or_default(),
                ms,
                uploaded_bytes = self.uploaded_bytes,
                "management"
            ),
        }
    }
}
