//! `zoo`: many models on one server, asked over HTTP by clients as applications are.
//!
//! Works with any server that has OpenAI's `/v1/completions` and `/v1/chat/completions`: this
//! daemon, llama-server's router, llama-swap, Ollama. Two kinds of load:
//!
//! ```text
//! open loop    requests arrive at a rate, whatever the server does; models by a Zipf law
//! --mix        groups of clients, each with a request after the other: chats with small models,
//!              prompts of many lengths to large ones, some of which are cancelled, and streams
//!              that are promised a longest gap
//! ```
//!
//! In an open loop a time to first token counts from the moment that the request was due, so a
//! server that falls behind shows it. The clients share this process (`load.rs`), one connection a
//! request (`http.rs`); `summary.rs` makes the table.

pub(crate) mod http;
mod link;
pub(crate) mod load;
pub(crate) mod summary;

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use self::http::Server;
use self::load::{Outcome, Request, Sizes};

/// Options of `zoo`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// The server, as http://HOST:PORT.
    #[arg(long, default_value = "http://127.0.0.1:8080")]
    url: String,
    /// Bearer token, if the server wants one.
    #[arg(long)]
    token: Option<String>,
    /// Names of models, separated by commas, the most popular first [default: all that /v1/models
    /// lists].
    #[arg(long, value_delimiter = ',')]
    models: Vec<String>,
    /// Seconds of load.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    seconds: u64,
    /// Requests a second of the open loop.
    #[arg(long, default_value_t = 2.0)]
    rate: f64,
    /// Exponent of the Zipf law: the model of rank r is asked in proportion to 1 / r^s.
    #[arg(long, default_value_t = 1.0)]
    zipf: f64,
    /// Words of a prompt, LEAST:MOST, evenly distributed over their logarithm.
    #[arg(long, default_value = "8:512")]
    prompt: Sizes,
    /// Tokens of an output, LEAST:MOST, likewise.
    #[arg(long, default_value = "16:128")]
    output: Sizes,
    /// Share of requests that are cancelled after a few tokens.
    #[arg(long, default_value_t = 0.0)]
    cancel: f64,
    /// Groups of clients in a closed loop instead of the open loop.
    #[arg(long, requires_all = ["small", "large"])]
    mix: bool,
    /// Small models of the mix, which are chatted with.
    #[arg(long, value_delimiter = ',')]
    small: Vec<String>,
    /// Large models of the mix; "none" leaves the small ones alone.
    #[arg(long, value_delimiter = ',')]
    large: Vec<String>,
    /// Clients of the small models.
    #[arg(long, default_value_t = 12)]
    small_clients: u16,
    /// Clients of the large models.
    #[arg(long, default_value_t = 16)]
    large_clients: u16,
    /// Words of a prompt to a large model of the mix, LEAST:MOST.
    #[arg(long, default_value = "8:2900")]
    large_prompt: Sizes,
    /// Model of a third group of clients of the mix, which stream long outputs.
    #[arg(long, requires = "mix")]
    streams: Option<String>,
    /// Clients that stream.
    #[arg(long, default_value_t = 8)]
    stream_clients: u16,
    /// Longest gap in milliseconds that the streams ask to be promised (max_gap_ms); 0 for none.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(0..=60_000))]
    max_gap_ms: u32,
    /// The same seed makes the same requests.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    ensure!(
        options.rate.is_finite() && options.rate > 0.0,
        "--rate is above 0"
    );
    ensure!(
        (0.0..=1.0).contains(&options.cancel),
        "--cancel is from 0 to 1"
    );
    ensure!(
        options.zipf.is_finite() && options.zipf >= 0.0,
        "--zipf is 0 or more"
    );
    let server = Server::new(&options.url, options.token.as_deref())?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let before = server.link().await;
        let outcomes = match options.mix {
            true => mix(options, &server).await?,
            false => open_loop(options, &server).await?,
        };
        let link = server.link().await.zip(before);
        let link = link.map(|(after, before)| after.since(&before));
        let lasted = Duration::from_secs(options.seconds);
        summary::print(&outcomes, lasted, link.as_ref(), options.json)
    })
}

/// Requests that arrive by a Poisson process, whatever becomes of those before.
async fn open_loop(options: &Options, server: &Server) -> Result<Vec<Outcome>> {
    let names = match options.models.is_empty() {
        true => server.models().await?,
        false => options.models.clone(),
    };
    ensure!(
        !names.is_empty(),
        "the server lists no model: give --models"
    );
    let mut rng = StdRng::seed_from_u64(options.seed);
    let popularity = Zipf::new(names.len(), options.zipf);
    let mut due = 0.0;
    let mut requests = Vec::new();
    loop {
        // The gap between two arrivals of a Poisson process.
        due += -(1.0 - rng.random::<f64>()).ln() / options.rate;
        if due >= options.seconds as f64 {
            break;
        }
        let model = &names[popularity.rank(&mut rng)];
        let request = Request::completion(model, options.prompt, options.output, &mut rng);
        let request = request.cancelled_by(options.cancel, &mut rng);
        requests.push((Duration::from_secs_f64(due), request));
    }
    if requests.is_empty() {
        bail!("no request falls into {} s at this rate", options.seconds);
    }
    load::open(server, requests).await
}

/// Chats with small models beside prompts to large ones, each client with one request at a time.
async fn mix(options: &Options, server: &Server) -> Result<Vec<Outcome>> {
    let lasts = Duration::from_secs(options.seconds);
    let large: Vec<String> = options
        .large
        .iter()
        .filter(|m| *m != "none")
        .cloned()
        .collect();
    let small = load::closed(server, options.small_clients, lasts, options.seed, |rng| {
        let model = &options.small[rng.random_range(0..options.small.len())];
        Request::chat(model, rng)
    });
    let large_clients = if large.is_empty() {
        0
    } else {
        options.large_clients
    };
    let large = load::closed(
        server,
        large_clients,
        lasts,
        options.seed ^ 0x9e37_79b9,
        |rng| {
            let model = &large[rng.random_range(0..large.len())];
            Request::completion(model, options.large_prompt, LARGE_OUTPUT, rng)
                .cancelled_by(0.1, rng)
        },
    );
    let streams = streams(options, server, lasts);
    let (small, large, streams) = tokio::join!(small, large, streams);
    let mut outcomes = small.context("clients of the small models")?;
    outcomes.extend(large.context("clients of the large models")?);
    outcomes.extend(streams.context("clients that stream")?);
    Ok(outcomes)
}

/// Tokens of an output of a large model in the mix.
const LARGE_OUTPUT: Sizes = Sizes {
    least: 8,
    most: 128,
};

/// Clients that stream long outputs of one model, with a longest gap that they ask for.
async fn streams(options: &Options, server: &Server, lasts: Duration) -> Result<Vec<Outcome>> {
    let Some(model) = &options.streams else {
        return Ok(Vec::new());
    };
    let (prompt, output) = (
        Sizes {
            least: 8,
            most: 256,
        },
        Sizes {
            least: 256,
            most: 1024,
        },
    );
    let seed = options.seed ^ 0x51_7cc1;
    load::closed(server, options.stream_clients, lasts, seed, |rng| {
        Request::completion(model, prompt, output, rng).promised(options.max_gap_ms)
    })
    .await
}

/// Ranks drawn in proportion to 1 / r^s.
struct Zipf {
    /// Sums of the weights up to each rank.
    sums: Vec<f64>,
}

impl Zipf {
    fn new(ranks: usize, exponent: f64) -> Self {
        let mut sum = 0.0;
        let sums = (1..=ranks)
            .map(|rank| {
                sum += (rank as f64).powf(-exponent);
                sum
            })
            .collect();
        Self { sums }
    }

    fn rank(&self, rng: &mut StdRng) -> usize {
        let all = self.sums.last().copied().unwrap_or_default();
        let drawn = rng.random::<f64>() * all;
        self.sums
            .partition_point(|sum| *sum <= drawn)
            .min(self.sums.len().saturating_sub(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_follow_the_law() {
        let (zipf, mut rng) = (Zipf::new(4, 1.0), StdRng::seed_from_u64(7));
        let mut counts = [0u32; 4];
        for _ in 0..25_000 {
            counts[zipf.rank(&mut rng)] += 1;
        }
        // 12 : 6 : 4 : 3 of 25.
        for (count, expected) in counts.iter().zip([12_000.0, 6_000.0, 4_000.0, 3_000.0]) {
            assert!((f64::from(*count) - expected).abs() < 400.0, "{counts:?}");
        }
    }
}
