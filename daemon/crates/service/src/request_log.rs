//! One line a request, written when it ends, however it ends. Never holds what was asked or answered.
//!
//! Calls that change what is loaded, resident or allowed leave a line of their own kind, target `audit`, which says who
//! asked for what with which result. It is written at every log level but `audit=off`.

use std::time::Instant;

use crate::arrival::{Arrival, Caller};
use crate::failure::Failure;
use crate::peer::TokenName;

/// Longest model name or list of arguments that a line shows, in characters.
const TEXT_MAX: usize = 256;

/// The line of one request. Written on drop; a request that was dropped before its end counts as cancelled.
#[derive(Debug)]
pub struct RequestLog {
    rpc: &'static str,
    /// What the client calls the request.
    id: Option<String>,
    model: String,
    caller: Option<Caller>,
    token: Option<TokenName>,
    /// What a call of management asks for.
    arguments: Option<String>,
    at: Instant,
    code: &'static str,
    /// Why it was refused.
    refusal: Option<String>,
    /// Tokens of the prompt or input, if the request has such.
    pub prompt_tokens: Option<u32>,
    /// Tokens that were generated.
    pub generated_tokens: Option<u32>,
    /// Tokens a second of the decode.
    pub tokens_per_s: Option<f64>,
    /// Bytes that were uploaded for it.
    pub uploaded_bytes: Option<u64>,
}

impl RequestLog {
    /// Begins a line. `model` is empty for requests about no model.
    pub fn new(rpc: &'static str, model: &str, arrival: &Arrival) -> Self {
        Self {
            rpc,
            id: None,
            model: cut(model),
            caller: arrival.caller,
            token: arrival.token,
            arguments: None,
            at: arrival.at,
            code: "Cancelled",
            refusal: None,
            prompt_tokens: None,
            generated_tokens: None,
            tokens_per_s: None,
            uploaded_bytes: None,
        }
    }

    /// Begins the line of a call of management.
    pub fn audit(rpc: &'static str, model: &str, arguments: &str, arrival: &Arrival) -> Self {
        let mut log = Self::new(rpc, model, arrival);
        log.arguments = Some(cut(arguments));
        log
    }

    /// Notes what the client calls the request.
    pub fn identify(&mut self, id: &str) {
        self.id = Some(cut(id));
    }

    /// Notes the model, where it is known only after the line was begun.
    pub fn about(&mut self, model: &str) {
        self.model = cut(model);
    }

    /// Notes how the request ended and hands the result on.
    ///
    /// # Errors
    /// Those of `result`.
    pub fn end<T>(mut self, result: Result<T, Failure>) -> Result<T, Failure> {
        self.note(&result);
        result
    }

    /// Notes how the request stands.
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
        let ms = self.at.elapsed().as_secs_f64() * 1e3;
        let (uid, pid) = (self.caller.map(|c| c.uid), self.caller.map(|c| c.pid));
        let token = self.token.as_ref().map(TokenName::as_str);
        // What clients wrote is written as debug text, so that a name made of line breaks cannot forge a line.
        match &self.arguments {
            None => tracing::info!(
                rpc = self.rpc,
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
