//! The events of a message's stream.
//!
//! ```text
//! message_start
//!   (content_block_start content_block_delta* content_block_stop)*
//! message_delta message_stop
//! ```
//!
//! One block is open at a time: a block of another kind opens once the one before is closed.

use rocmforge_chat::parts::Part;
use rocmforge_failure::Failure;
use rocmforge_service::answers::Ended;
use serde_json::{Value, json};

use super::super::error::Dialect;
use super::super::reply::{Events, SSE, event};
use super::{stop_reason, tool_use_id, usage, usage_of};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Block {
    Text,
    Thinking,
    Call,
}

/// Writer of Anthropic's stream events.
#[derive(Debug)]
pub(super) struct MessageEvents {
    id: String,
    model: String,
    request_id: String,
    prompt_tokens: u32,
    open: Option<Block>,
    /// Index of the next block.
    index: u32,
}

impl MessageEvents {
    pub(super) fn new(id: String, model: String, request_id: String, prompt_tokens: u32) -> Self {
        Self {
            id,
            model,
            request_id,
            prompt_tokens,
            open: None,
            index: 0,
        }
    }

    fn start(&self, block: &Value, out: &mut String) {
        let data =
            json!({"type": "content_block_start", "index": self.index, "content_block": block});
        event(Some("content_block_start"), &data, out);
    }

    fn delta(&self, delta: &Value, out: &mut String) {
        let data = json!({"type": "content_block_delta", "index": self.index, "delta": delta});
        event(Some("content_block_delta"), &data, out);
    }

    fn stop(&mut self, out: &mut String) {
        let data = json!({"type": "content_block_stop", "index": self.index});
        event(Some("content_block_stop"), &data, out);
        self.index += 1;
    }

    /// Closes the block that is open, if any.
    fn close(&mut self, out: &mut String) {
        let Some(open) = self.open.take() else { return };
        if open == Block::Thinking {
            self.delta(&json!({"type": "signature_delta", "signature": ""}), out);
        }
        self.stop(out);
    }

    /// Opens a block of this kind, unless it is open.
    fn enter(&mut self, block: Block, empty: &Value, out: &mut String) {
        if self.open == Some(block) {
            return;
        }
        self.close(out);
        self.start(empty, out);
        self.open = Some(block);
    }

    fn arguments(&self, text: &str, out: &mut String) {
        if !text.is_empty() {
            let input = json!({"type": "input_json_delta", "partial_json": text});
            self.delta(&input, out);
        }
    }
}

impl Events for MessageEvents {
    const CONTENT_TYPE: &'static str = SSE;

    fn begin(&mut self, out: &mut String) {
        let message = json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": null,
            "stop_sequence": null,
            // How much of it is read from the cache is known once it was
            // computed: the last event says it.
            "usage": usage_of(self.prompt_tokens, 0, 0),
        });
        let data = json!({"type": "message_start", "message": message});
        event(Some("message_start"), &data, out);
    }

    fn part(&mut self, part: Part, out: &mut String) {
        match part {
            Part::Text(text) => {
                self.enter(Block::Text, &json!({"type": "text", "text": ""}), out);
                self.delta(&json!({"type": "text_delta", "text": text}), out);
            }
            Part::Reasoning(text) => {
                let empty = json!({"type": "thinking", "thinking": "", "signature": ""});
                self.enter(Block::Thinking, &empty, out);
                self.delta(&json!({"type": "thinking_delta", "thinking": text}), out);
            }
            Part::Call(call) => {
                // Each has a block of its own.
                self.close(out);
                let block = json!({"type": "tool_use", "id": tool_use_id(), "name": call.name, "input": {}});
                self.enter(Block::Call, &block, out);
                self.arguments(&call.arguments, out);
            }
            Part::Arguments(more) => self.arguments(&more, out),
        }
    }

    fn heartbeat(&mut self, out: &mut String) {
        event(Some("ping"), &json!({"type": "ping"}), out);
    }

    fn end(&mut self, ended: &Ended, out: &mut String) {
        self.close(out);
        let reason = match stop_reason(ended) {
            // Its block was told, whatever its arguments came to.
            "end_turn" if ended.told_calls > 0 => "tool_use",
            reason => reason,
        };
        let data = json!({
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": ended.stop_string},
            "usage": usage(ended),
        });
        event(Some("message_delta"), &data, out);
        event(Some("message_stop"), &json!({"type": "message_stop"}), out);
    }

    fn failed(&mut self, failure: &Failure, out: &mut String) {
        let data = Dialect::Anthropic.body(failure, &self.request_id);
        event(Some("error"), &data, out);
    }
}
