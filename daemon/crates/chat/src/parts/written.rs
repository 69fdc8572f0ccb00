//! Streams tool calls whose arguments are not JSON text.
//!
//! A [`Reading`] gives the part of the arguments' JSON that is certain however the block goes on: a
//! prefix of what the form's parser makes of the whole block. When the block has ended, the
//! parser's result is final, and the rest of it is sent.

use serde_json::Value;

use super::block::Block;
use super::{CALL_MAX_BYTES, Part};
use crate::tool_calls::ToolCall;
use crate::tool_calls::forms::Form;
use crate::tool_calls::known::Known;
use crate::tool_calls::reading::Reading;
use crate::tool_calls::texts::partial;

/// A call that was sent, and whether it counts.
#[derive(Debug)]
struct Told {
    call: ToolCall,
    counts: bool,
}

/// A block of streamed calls, whose arguments are not JSON.
#[derive(Debug)]
pub(super) struct Written {
    form: Form,
    reading: Reading,
    told: Vec<Told>,
    /// Whether the last call's arguments are complete.
    ended: bool,
    /// Number of bytes that contain no closing mark.
    seen: usize,
    /// Whether the block exceeds the maximum length.
    too_long: bool,
}

impl Written {
    /// A block that begins with `text`; `None` while that is too short to decide.
    pub(super) fn of(form: Form, text: &str) -> Option<Self> {
        Some(Self {
            form,
            reading: Reading::of(form.pieces, text)?,
            told: Vec::new(),
            ended: false,
            seen: 0,
            too_long: false,
        })
    }

    pub(super) fn is_open(&self) -> bool {
        !self.ended && self.told.last().is_some_and(|told| told.counts)
    }

    pub(super) fn has_begun(&self) -> bool {
        !self.told.is_empty()
    }

    /// Consumes more of a block, as [`super::calls::Calls::take`]. The block stays in `held` until
    /// it has ended.
    pub(super) fn take(
        &mut self,
        held: &mut String,
        close: &str,
        tools: &[Value],
        counted: &mut impl FnMut() -> bool,
        into: &mut Vec<Part>,
    ) -> Block {
        let closed = held[self.seen..].find(close).map(|n| self.seen + n);
        let end = closed.unwrap_or_else(|| held.len() - partial(&held[self.seen..], close));
        if !self.too_long {
            self.read(&held[..end], tools, counted, into);
        }
        self.seen = end;
        if self.told.is_empty() {
            return match closed.is_some() || self.reading.is_none() {
                true => Block::Whole,
                false => Block::More,
            };
        }
        if let Some(at) = closed {
            let rest = held.split_off(at + close.len());
            let block = std::mem::replace(held, rest);
            if !self.too_long {
                self.tell_rest(&block[..at], tools, counted, into);
            }
            return Block::Ended(String::new());
        }
        if self.too_long || held.len() > CALL_MAX_BYTES {
            self.too_long = true;
            held.drain(..self.seen);
            self.seen = 0;
        }
        Block::More
    }

    /// Handles the end of the output. If that cuts a block in tags, what was streamed so far is
    /// kept.
    pub(super) fn finish(
        &mut self,
        held: &str,
        close: &str,
        is_cut: bool,
        tools: &[Value],
        counted: &mut impl FnMut() -> bool,
        into: &mut Vec<Part>,
    ) {
        if self.too_long {
            return;
        }
        let block = &held[..held.len() - partial(held, close)];
        self.read(block, tools, counted, into);
        // Between tags a value ends where the text does: the parser takes a cut one for whole, or a
        // closing tag inside of it for the call's.
        if !(is_cut && self.form.in_tags) {
            self.tell_rest(block, tools, counted, into);
        }
    }

    fn read(
        &mut self,
        block: &str,
        tools: &[Value],
        counted: &mut impl FnMut() -> bool,
        into: &mut Vec<Part>,
    ) {
        let mut known = Vec::new();
        self.reading.read(block, tools, &mut known);
        for known in known {
            match known {
                Known::Call(name) => {
                    let arguments = String::new();
                    self.tell(ToolCall { name, arguments }, counted, into);
                    self.ended = false;
                }
                Known::More(text) => self.say(&text, into),
                Known::End => self.ended = true,
            }
        }
    }

    /// Sends the rest of what the parser makes of the whole block, after what was streamed of it.
    fn tell_rest(
        &mut self,
        block: &str,
        tools: &[Value],
        counted: &mut impl FnMut() -> bool,
        into: &mut Vec<Part>,
    ) {
        let calls = (self.form.parse)(block, tools).unwrap_or_default();
        let n_told = self.told.len();
        for (at, call) in calls.into_iter().enumerate() {
            if at >= n_told {
                self.tell(call, counted, into);
                continue;
            }
            let told = &self.told[at].call;
            let rest = call.arguments.strip_prefix(&*told.arguments);
            let rest = rest.filter(|_| told.name == call.name);
            // All calls but the last were told to their end.
            if at + 1 == n_told
                && let Some(rest) = rest
            {
                let rest = rest.to_owned();
                self.say(&rest, into);
                self.ended = true;
            }
        }
    }

    fn tell(&mut self, call: ToolCall, counted: &mut impl FnMut() -> bool, into: &mut Vec<Part>) {
        let counts = counted();
        if counts {
            into.push(Part::Call(call.clone()));
        }
        self.told.push(Told { call, counts });
    }

    /// Sends more of the last call's arguments.
    fn say(&mut self, text: &str, into: &mut Vec<Part>) {
        let Some(told) = self.told.last_mut().filter(|_| !text.is_empty()) else {
            return;
        };
        told.call.arguments.push_str(text);
        if told.counts {
            into.push(Part::Arguments(text.to_owned()));
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::tool_calls::{described, forms, is_object};

    #[test]
    fn a_call_that_is_too_long_stays_open_and_ends_with_its_mark() {
        let tools = [described(
            "f",
            None,
            &json!({"properties": {"a": {"type": "string"}}}),
        )];
        let form = forms::HERMES;
        let head = "<function=f><parameter=a>";
        let mut written = Written::of(form, head).unwrap_or_else(|| panic!("it is in tags"));
        let (mut held, mut parts) = (head.to_owned(), Vec::new());
        for _ in 0..40 {
            held.push_str(&"a b".repeat(CALL_MAX_BYTES / 64));
            let block = written.take(&mut held, form.close, &tools, &mut || true, &mut parts);
            assert_eq!(block, Block::More);
            assert!(written.is_open() && held.len() <= CALL_MAX_BYTES * 2);
        }
        held.push_str("</parameter></function></tool_call> behind");
        let block = written.take(&mut held, form.close, &tools, &mut || true, &mut parts);
        assert_eq!((block, &*held), (Block::Ended(String::new()), " behind"));
        let arguments = |part: &Part| match part {
            Part::Arguments(more) => Some(more.clone()),
            _ => None,
        };
        let told: String = parts.iter().filter_map(arguments).collect();
        assert!(told.len() > CALL_MAX_BYTES && !is_object(&told));
    }
}
