//! One line a request, written when it ends, however it ends. Never holds what was asked or answered.

use std::time::Instant;

use tonic::{Code, Status};

/// Longest model name that a line shows, in characters.
const NAME_MAX: usize = 128;

/// The line of one request. Written on drop; a request that was dropped before its end counts as cancelled.
#[derive(Debug)]
pub(super) struct RequestLog {
    rpc: &'static str,
    model: String,
    at: Instant,
    code: Code,
    /// Tokens of the prompt or input, if the request has such.
    pub(super) prompt_tokens: Option<u32>,
    /// Tokens that were generated.
    pub(super) generated_tokens: Option<u32>,
    /// Tokens a second of the decode.
    pub(super) tokens_per_s: Option<f64>,
    /// Bytes that were uploaded for it.
    pub(super) uploaded_bytes: Option<u64>,
}

impl RequestLog {
    /// Begins a line. `model` is empty for requests about no model.
    pub(super) fn new(rpc: &'static str, model: &str, at: Instant) -> Self {
        Self {
            rpc,
            model: model.chars().take(NAME_MAX).collect(),
            at,
            code: Code::Cancelled,
            prompt_tokens: None,
            generated_tokens: None,
            tokens_per_s: None,
            uploaded_bytes: None,
        }
    }

    /// Notes how the request ended and hands the result on.
    pub(super) fn end<T>(mut self, result: Result<T, Status>) -> Result<T, Status> {
        self.note(&result);
        result
    }

    /// Notes how the request stands.
    pub(super) fn note<T>(&mut self, result: &Result<T, Status>) {
        self.code = match result {
            Ok(_) => Code::Ok,
            Err(status) => status.code(),
        };
    }
}

impl Drop for RequestLog {
    fn drop(&mut self) {
        // Written as debug text, so that a name made of line breaks cannot forge a line.
        tracing::info!(
            rpc = self.rpc,
            model = ?self.model,
            code = ?self.code,
            ms = self.at.elapsed().as_secs_f64() * 1e3,
            prompt_tokens = self.prompt_tokens,
            generated_tokens = self.generated_tokens,
            tokens_per_s = self.tokens_per_s,
            uploaded_bytes = self.uploaded_bytes,
            "request"
        );
    }
}
