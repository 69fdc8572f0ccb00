//! `socket`: clients of a running daemon, each with a connection of its own, as programs are.
//!
//! All send a random prompt at the same moment and read their texts to the end. The daemon and
//! what it has loaded are the caller's; the clients share this process, whose CPU time is
//! printed beside the figures.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use futures_util::StreamExt;
use futures_util::future::try_join_all;
use nix::sys::resource::{UsageWho, getrusage};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rocmforge_client::Client;
use rocmforge_client::proto::v1::generate_event::Event;
use rocmforge_client::proto::v1::generate_request::Prompt;
use rocmforge_client::proto::v1::{GenerateRequest, SamplingParams, TokenIds};

use crate::rates::{Rates, Text};
use crate::report::Spread;

/// Options of `socket`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Name of a loaded model.
    model: String,
    /// The daemon's socket [default: as rocmforgectl finds it].
    #[arg(long)]
    socket: Option<PathBuf>,
    /// Numbers of clients, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "1,8,32,64,128",
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    clients: Vec<u16>,
    /// Tokens of each prompt.
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    prompt: u32,
    /// Tokens of each text.
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(2..=1 << 20))]
    tokens: u32,
    /// Prompts are of token ids below this.
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..))]
    vocabulary: u32,
    /// Counted runs of each number, after one that is not.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u8).range(1..=100))]
    runs: u8,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    println!(
        "| clients | decode, tokens/s | min | max | together, tokens/s | longest gap, ms | CPU of the clients, us a token |"
    );
    println!("|---:|---:|---:|---:|---:|---:|---:|");
    let mut rng = StdRng::seed_from_u64(1);
    for &n in &options.clients {
        let mut rates = Rates::default();
        let mut cpu = Vec::new();
        let connecting = (0..n).map(|_| Client::connect(options.socket.as_deref()));
        let clients = runtime.block_on(try_join_all(connecting))?;
        for counted in std::iter::once(false).chain((0..options.runs).map(|_| true)) {
            let requests: Vec<_> = clients.iter().map(|_| request(options, &mut rng)).collect();
            let before = cpu_seconds()?;
            let texts = runtime.block_on(try_join_all(
                clients.iter().zip(requests).map(|(c, r)| text(c, r)),
            ))?;
            let tokens = f64::from(n) * f64::from(options.tokens);
            for text in &texts {
                ensure!(
                    text.tokens.len() == options.tokens as usize,
                    "a text has {} tokens",
                    text.tokens.len()
                );
            }
            if counted {
                cpu.push((cpu_seconds()? - before) / tokens * 1e6);
                rates.count(&texts)?;
            }
        }
        let decode = Spread::of(&rates.decode);
        println!(
            "| {n} | {:.0} | {:.0} | {:.0} | {:.0} | {:.1} | {:.0} |",
            decode.median,
            decode.min,
            decode.max,
            Spread::of(&rates.together).median,
            Spread::of(&rates.gap).median,
            Spread::of(&cpu).median,
        );
    }
    Ok(())
}

fn request(options: &Options, rng: &mut StdRng) -> GenerateRequest {
    let ids = (0..options.prompt)
        .map(|_| rng.random_range(0..options.vocabulary))
        .collect();
    GenerateRequest {
        model: options.model.clone(),
        prompt: Some(Prompt::Tokens(TokenIds { ids })),
        sampling: Some(SamplingParams {
            temperature: Some(0.0),
            max_tokens: Some(options.tokens.cast_signed()),
            ignore_eos: true,
            ..SamplingParams::default()
        }),
        ..GenerateRequest::default()
    }
}

async fn text(client: &Client, request: GenerateRequest) -> Result<Text> {
    let asked = Instant::now();
    let mut tokens = Vec::new();
    let mut events = client.generate(request).await?;
    while let Some(event) = events.next().await {
        if let Event::Piece(piece) = event? {
            let now = Instant::now();
            tokens.extend(piece.token_ids.iter().map(|_| now));
        }
    }
    Ok(Text {
        tokens,
        asked,
        ended: Instant::now(),
    })
}

/// CPU time of this process.
fn cpu_seconds() -> Result<f64> {
    let usage = getrusage(UsageWho::RUSAGE_SELF).context("getrusage")?;
    let times = [usage.user_time(), usage.system_time()];
    Ok(times
        .iter()
        .map(|t| t.tv_sec() as f64 + t.tv_usec() as f64 / 1e6)
        .sum())
}
