//! Sends a trace's requests, each when those that it comes after have ended.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use serde_json::Value;

use super::trace::Entry;
use crate::zoo::http::{Server, Usage};

/// How requests are sent.
#[derive(Debug)]
pub(super) struct Way<'a> {
    pub(super) model: &'a str,
    /// Longest output in tokens.
    pub(super) output_max: Option<u32>,
    /// Whether the trace's delays are kept.
    pub(super) delays: bool,
}

/// What became of a request.
#[derive(Debug)]
pub(super) struct Done {
    pub(super) usage: Usage,
    /// From the moment that it was sent to the first of its output.
    pub(super) first: Option<Duration>,
}

/// The tokens of a request's prompt, as the server has them.
pub(super) async fn prompt(server: &Server, entry: &Entry, way: &Way<'_>) -> Result<Vec<u32>> {
    let body = entry.body_for(way.model, way.output_max);
    let about = || format!("counting the tokens of '{}'", entry.id);
    let counted = server.post(&entry.counting_route(), body.to_string()).await;
    let counted = counted.with_context(about)?;
    let tokens = counted["tokens"].as_array();
    let tokens = tokens.context("the server does not say the tokens: it is no rocmforged");
    let ids = tokens.with_context(about)?.iter().map(Value::as_u64);
    let ids: Option<Vec<u32>> = ids.map(|id| u32::try_from(id?).ok()).collect();
    ids.context("a token is no number").with_context(about)
}

/// Sends all requests, and gives what became of each, in the trace's order.
pub(super) async fn all(server: &Server, entries: &[Entry], way: &Way<'_>) -> Vec<Result<Done>> {
    let at: HashMap<&str, usize> = entries
        .iter()
        .enumerate()
        .map(|(n, entry)| (entry.id.as_str(), n))
        .collect();
    // How many each one waits for, and who waits for it.
    let mut waits: Vec<usize> = entries.iter().map(|entry| entry.after.len()).collect();
    let mut behind: Vec<Vec<usize>> = vec![Vec::new(); entries.len()];
    for (n, entry) in entries.iter().enumerate() {
        for before in &entry.after {
            behind[at[before.as_str()]].push(n);
        }
    }
    let mut done: Vec<Option<Result<Done>>> = entries.iter().map(|_| None).collect();
    let send = |n: usize| async move { (n, one(server, &entries[n], way).await) };
    let mut sent: FuturesUnordered<_> = (0..entries.len())
        .filter(|&n| waits[n] == 0)
        .map(send)
        .collect();
    while let Some((n, outcome)) = sent.next().await {
        done[n] = Some(outcome);
        for &next in &behind[n] {
            waits[next] -= 1;
            if waits[next] == 0 {
                sent.push(send(next));
            }
        }
    }
    let never = || Err(anyhow::anyhow!("it was never sent"));
    done.into_iter().map(|d| d.unwrap_or_else(never)).collect()
}

async fn one(server: &Server, entry: &Entry, way: &Way<'_>) -> Result<Done> {
    if way.delays && entry.delay_ms > 0 {
        tokio::time::sleep(Duration::from_millis(entry.delay_ms)).await;
    }
    let body = entry.body_for(way.model, way.output_max).to_string();
    let begin = Instant::now();
    let stream = server.stream(&entry.route, body, None).await;
    let stream = stream.with_context(|| format!("'{}'", entry.id))?;
    let usage = stream.usage;
    Ok(Done {
        usage: usage.with_context(|| format!("'{}': the stream has no usage", entry.id))?,
        first: stream.pieces.first().map(|at| at.duration_since(begin)),
    })
}
