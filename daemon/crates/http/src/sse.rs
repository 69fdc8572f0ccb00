//! Writes server-sent events.

use serde::Serialize;

/// Content type of server-sent events.
pub(super) const SSE: &str = "text/event-stream; charset=utf-8";

/// Appends a server-sent event.
pub(super) fn event(name: Option<&str>, data: &impl Serialize, out: &mut String) {
    if let Some(name) = name {
        out.push_str("event: ");
        out.push_str(name);
        out.push('\n');
    }
    data_event(data, out);
}

/// Appends a server-sent event without a name.
pub(super) fn data_event(data: &impl Serialize, out: &mut String) {
    out.push_str("data: ");
    append_json(data, out);
    out.push_str("\n\n");
}

/// Appends a value as JSON, without a copy of it in between.
pub(super) fn append_json(value: &impl Serialize, out: &mut String) {
    let mut bytes = std::mem::take(out).into_bytes();
    let before = bytes.len();
    if let Err(error) = serde_json::to_writer(&mut bytes, value) {
        // Of our own values none has keys that are no text.
        tracing::error!(%error, "an event is no JSON");
        bytes.truncate(before);
    }
    // The writer of JSON writes UTF-8 only.
    *out = String::from_utf8(bytes).unwrap_or_default();
}
