//! Requests, and clients that send them: at due moments, or one after another.

use std::str::FromStr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures_util::future::try_join_all;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::{Value, json};

use super::http::Server;

/// Words that prompts are made of; what they say does not matter, only that prompts differ.
pub(crate) const WORDS: [&str; 24] = [
    "river", "stone", "window", "garden", "letter", "morning", "copper", "bridge", "winter",
    "paper", "silver", "market", "forest", "harbor", "candle", "mirror", "village", "shadow",
    "thunder", "ladder", "basket", "engine", "meadow", "lantern",
];

/// How long a request of the load may still take when the load has ended.
const REST: Duration = Duration::from_secs(120);

/// A range of sizes, drawn evenly over their logarithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sizes {
    pub(super) least: u32,
    pub(super) most: u32,
}

impl FromStr for Sizes {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let (least, most) = text.split_once(':').context("a range is LEAST:MOST")?;
        let sizes = Self {
            least: least.parse()?,
            most: most.parse()?,
        };
        ensure!(
            1 <= sizes.least && sizes.least <= sizes.most,
            "a range is LEAST:MOST, both 1 or more"
        );
        Ok(sizes)
    }
}

impl Sizes {
    fn draw(self, rng: &mut StdRng) -> u32 {
        let (low, high) = (f64::from(self.least).ln(), f64::from(self.most).ln());
        let drawn = (low + (high - low) * rng.random::<f64>()).exp().round();
        (drawn as u32).clamp(self.least, self.most)
    }
}

/// One request of a client.
#[derive(Debug, Clone)]
pub(super) struct Request {
    model: String,
    path: &'static str,
    body: Value,
    /// Pieces after which the client cancels.
    pieces_max: Option<usize>,
    /// The longest gap that is to be promised.
    max_gap: Option<Duration>,
}

impl Request {
    /// A text of random words that is continued to its full length.
    pub(super) fn completion(model: &str, prompt: Sizes, output: Sizes, rng: &mut StdRng) -> Self {
        let words = (0..prompt.draw(rng)).map(|_| WORDS[rng.random_range(0..WORDS.len())]);
        let text = words.collect::<Vec<_>>().join(" ");
        let body = json!({
            "model": model,
            "prompt": text,
            "max_tokens": output.draw(rng),
            "temperature": 0,
            "ignore_eos": true,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        Self {
            model: model.to_owned(),
            path: "/v1/completions",
            body,
            pieces_max: None,
            max_gap: None,
        }
    }

    /// A short question, answered until the model ends.
    pub(super) fn chat(model: &str, rng: &mut StdRng) -> Self {
        let (a, b) = (rng.random_range(10..90), rng.random_range(1..10));
        let word = WORDS[rng.random_range(0..WORDS.len())];
        let content = match rng.random_range(0..3) {
            0 => format!("{a} + {b} = ?"),
            1 => format!("{a} - {b} = ?"),
            _ => format!("Tell me a story about a {word}."),
        };
        let body = json!({
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 80,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        Self {
            model: model.to_owned(),
            path: "/v1/chat/completions",
            body,
            pieces_max: None,
            max_gap: None,
        }
    }

    /// The same request with a longest gap that is asked for, if any; its figures are a row of
    /// their own.
    pub(super) fn promised(mut self, max_gap_ms: u32) -> Self {
        self.model += match max_gap_ms {
            0 => " (streams)".to_owned(),
            gap => {
                self.body["max_gap_ms"] = gap.into();
                format!(" (gap {gap} ms)")
            }
        }
        .as_str();
        self.max_gap = (max_gap_ms > 0).then(|| Duration::from_millis(max_gap_ms.into()));
        self
    }

    /// The same request, cancelled after a few pieces with this probability.
    pub(super) fn cancelled_by(mut self, probability: f64, rng: &mut StdRng) -> Self {
        let pieces = rng.random_range(1..8);
        self.pieces_max = (rng.random::<f64>() < probability).then_some(pieces);
        self
    }
}

/// What became of a request.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) model: String,
    /// From the moment that it was due to its first piece.
    pub(super) first: Option<Duration>,
    /// Between pieces.
    pub(super) gaps: Vec<Duration>,
    /// From the moment that it was due to its end.
    pub(super) whole: Duration,
    pub(super) tokens: u64,
    pub(super) is_cancelled: bool,
    /// The longest gap that was asked for.
    pub(super) max_gap: Option<Duration>,
    pub(super) error: Option<String>,
}

async fn send(server: &Server, due: Instant, request: Request) -> Outcome {
    let body = request.body.to_string();
    let result = server.stream(request.path, body, request.pieces_max).await;
    let whole = due.elapsed();
    let (stream, error) = match result {
        Ok(stream) => (stream, None),
        Err(error) => (super::http::Stream::default(), Some(format!("{error:#}"))),
    };
    let pieces = &stream.pieces;
    Outcome {
        model: request.model,
        first: pieces.first().map(|at| at.duration_since(due)),
        gaps: pieces.windows(2).map(|pair| pair[1] - pair[0]).collect(),
        whole,
        tokens: stream
            .usage
            .map_or(pieces.len() as u64, |usage| usage.output),
        is_cancelled: request.pieces_max.is_some(),
        max_gap: request.max_gap,
        error,
    }
}

/// Sends each request when it is due, whatever becomes of those before.
pub(super) async fn open(
    server: &Server,
    requests: Vec<(Duration, Request)>,
) -> Result<Vec<Outcome>> {
    let begin = Instant::now();
    let tasks = requests.into_iter().map(|(at, request)| {
        let (server, due) = (server.clone(), begin + at);
        async move {
            let sent = tokio::spawn(async move {
                tokio::time::sleep_until(due.into()).await;
                send(&server, due, request).await
            });
            sent.await.context("a client ended early")
        }
    });
    try_join_all(tasks).await
}

/// Clients that each send one request after another until the time is over. What is under way then
/// is read to its end, and counts.
pub(super) async fn closed(
    server: &Server,
    clients: u16,
    lasts: Duration,
    seed: u64,
    next: impl Fn(&mut StdRng) -> Request,
) -> Result<Vec<Outcome>> {
    let end = Instant::now() + lasts;
    let next = &next;
    let clients = (0..clients).map(|client| async move {
        let mut rng = StdRng::seed_from_u64(seed.wrapping_add(u64::from(client) << 32));
        let mut outcomes = Vec::new();
        while Instant::now() < end {
            let request = next(&mut rng);
            let sent = send(server, Instant::now(), request);
            let rest = end.saturating_duration_since(Instant::now()) + REST;
            let outcome = tokio::time::timeout(rest, sent)
                .await
                .context("a request did not end within two minutes of the load's end")?;
            let failed = outcome.error.is_some();
            outcomes.push(outcome);
            if failed {
                // Not a request a microsecond where the server refuses all.
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
        Ok::<_, anyhow::Error>(outcomes)
    });
    Ok(try_join_all(clients).await?.into_iter().flatten().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_stay_in_their_range() {
        let sizes: Sizes = "8:2900".parse().expect("a range");
        let mut rng = StdRng::seed_from_u64(3);
        let drawn: Vec<u32> = (0..2000).map(|_| sizes.draw(&mut rng)).collect();
        assert!(drawn.iter().all(|n| (8..=2900).contains(n)));
        // Half of them are below the range's geometric mean.
        let below = drawn.iter().filter(|n| **n < 152).count();
        assert!((900..1100).contains(&below), "{below}");
        for wrong in ["8", "0:4", "9:8", "a:b"] {
            assert!(wrong.parse::<Sizes>().is_err(), "{wrong}");
        }
    }
}
