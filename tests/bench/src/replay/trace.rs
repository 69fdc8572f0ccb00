//! A trace: requests as programs sent them, one JSON object a line.
//!
//! ```text
//! {"id": "main-2", "after": ["main-1"], "delay_ms": 40, "group": "main",
//!  "route": "/v1/messages", "body": {...}}
//! ```
//!
//! A request is sent `delay_ms` after all of `after` have ended; without `after`, after the trace's
//! begin.

use std::collections::HashSet;
use std::io::{BufRead, Write};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// Most requests of a trace.
const ENTRIES_MAX: usize = 100_000;

/// Most bytes of a trace.
const BYTES_MAX: u64 = 4 << 30;

/// The dialects that a trace may have.
pub(super) const CHAT: &str = "/v1/chat/completions";
pub(super) const MESSAGES: &str = "/v1/messages";
pub(super) const RESPONSES: &str = "/v1/responses";

/// A request of a trace.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Entry {
    pub(super) id: String,
    /// Requests that end before this one begins. They come before it in the trace.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) after: Vec<String>,
    #[serde(default)]
    pub(super) delay_ms: u64,
    /// What its time to first token is reported with.
    #[serde(default)]
    pub(super) group: String,
    pub(super) route: String,
    pub(super) body: Value,
}

impl Entry {
    /// Where the server says which tokens the prompt has.
    pub(super) fn counting_route(&self) -> String {
        let count = match self.route.as_str() {
            MESSAGES => "count_tokens",
            _ => "input_tokens",
        };
        format!("{}/{count}?tokens=true", self.route)
    }

    /// The body as it is sent: streamed, to this model, with an output of so many tokens at most.
    pub(super) fn body_for(&self, model: &str, output_max: Option<u32>) -> Value {
        let mut body = self.body.clone();
        body["model"] = model.into();
        body["stream"] = true.into();
        if self.route == CHAT {
            body["stream_options"] = json!({"include_usage": true});
        }
        let field = match self.route.as_str() {
            RESPONSES => "max_output_tokens",
            _ => "max_tokens",
        };
        let said = body[field].as_u64().unwrap_or(u64::MAX);
        if let Some(most) = output_max {
            body[field] = said.min(most.into()).into();
            if self.route == CHAT {
                body.as_object_mut()
                    .map(|b| b.remove("max_completion_tokens"));
            }
        }
        body
    }
}

/// Reads a trace and checks it.
///
/// # Errors
/// The file cannot be read, a line is no request, or a request names one that does not come before.
pub(super) fn read(path: &Path) -> Result<Vec<Entry>> {
    let about = || format!("--trace {}", path.display());
    let file = std::fs::File::open(path).with_context(about)?;
    let bytes = file.metadata().with_context(about)?.len();
    ensure!(
        bytes <= BYTES_MAX,
        "{}: {bytes} bytes; a trace has {BYTES_MAX} at most",
        about()
    );
    let mut entries = Vec::new();
    for (n, line) in std::io::BufReader::new(file).lines().enumerate() {
        let about = || format!("{}, line {}", about(), n + 1);
        let line = line.with_context(about)?;
        if !line.trim().is_empty() {
            entries.push(serde_json::from_str(&line).with_context(about)?);
        }
    }
    check(&entries).with_context(about)?;
    Ok(entries)
}

/// What every trace has to be, wherever it comes from.
fn check(entries: &[Entry]) -> Result<()> {
    ensure!(!entries.is_empty(), "the trace has no request");
    ensure!(
        entries.len() <= ENTRIES_MAX,
        "{} requests; a trace has {ENTRIES_MAX} at most",
        entries.len()
    );
    let mut known = HashSet::new();
    for entry in entries {
        let id = &entry.id;
        if ![CHAT, MESSAGES, RESPONSES].contains(&entry.route.as_str()) {
            bail!(
                "'{id}': no route '{}'; use {CHAT}, {MESSAGES} or {RESPONSES}",
                entry.route
            );
        }
        ensure!(entry.body.is_object(), "'{id}': body is not an object");
        for before in &entry.after {
            ensure!(
                known.contains(before.as_str()),
                "'{id}' is after '{before}', which no line before it has"
            );
        }
        ensure!(known.insert(id.as_str()), "two requests have the id '{id}'");
    }
    Ok(())
}

/// Writes a trace.
///
/// # Errors
/// The file cannot be written.
pub(super) fn write(path: &Path, entries: &[Entry]) -> Result<()> {
    let about = || format!("--write {}", path.display());
    let file = std::fs::File::create(path).with_context(about)?;
    let mut file = std::io::BufWriter::new(file);
    for entry in entries {
        serde_json::to_writer(&mut file, entry).with_context(about)?;
        file.write_all(b"\n").with_context(about)?;
    }
    file.flush().with_context(about)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(id: &str, after: &[&str]) -> Entry {
        Entry {
            id: id.to_owned(),
            after: after.iter().map(|&a| a.to_owned()).collect(),
            delay_ms: 0,
            group: String::new(),
            route: CHAT.to_owned(),
            body: json!({"messages": [], "max_completion_tokens": 9}),
        }
    }

    #[test]
    fn a_trace_is_read_as_it_was_written_and_faults_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("trace.jsonl");
        let mut entries = vec![entry("a", &[]), entry("b", &["a"])];
        write(&path, &entries).unwrap();
        let read_back = read(&path).unwrap();
        assert_eq!(read_back[1].after, ["a"]);
        assert_eq!(read_back[1].body, entries[1].body);

        entries[1].after = vec!["c".to_owned()];
        for (entries, says) in [
            (entries.as_slice(), "after 'c', which no line before it has"),
            (&[entry("a", &[]), entry("a", &[])], "two requests"),
            (&[], "no request"),
        ] {
            write(&path, entries).unwrap();
            let error = read(&path).expect_err("a wrong trace");
            assert!(format!("{error:#}").contains(says), "{error:#}");
        }
        std::fs::write(&path, "{}\n").unwrap();
        let error = format!("{:#}", read(&path).expect_err("no request"));
        assert!(error.contains("line 1") && error.contains("id"), "{error}");
    }

    #[test]
    fn a_body_is_streamed_and_its_output_cut() {
        let mut request = entry("a", &[]);
        let body = request.body_for("m", Some(4));
        assert_eq!(body["model"], "m");
        assert_eq!(
            (&body["stream"], &body["max_tokens"]),
            (&true.into(), &4.into())
        );
        assert_eq!(body.get("max_completion_tokens"), None);
        request.route = RESPONSES.to_owned();
        request.body["max_output_tokens"] = 3.into();
        assert_eq!(request.body_for("m", Some(4))["max_output_tokens"], 3);
        assert!(request.body_for("m", None)["max_tokens"].is_null());
    }
}
