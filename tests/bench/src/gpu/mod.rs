//! `gpu`: all that the engine on a GPU is judged by, in one run that needs nothing
//! but this binary and a card.
//!
//! ```text
//! table   figures beside must, aim, llama.cpp and the card's own ceilings    figures.rs, first.rs
//! clients many requests at once                                               clients.rs
//! mixtures  mixtures of experts, resident and in smaller budgets            mixtures.rs
//! shapes  models of other kinds of layers: speed, and scores against the host's   shapes.rs
//! images  an image's way to the first token, and a second turn on it              images.rs
//! turns   the second turn of a chat; what drafts cost                          turns.rs
//! parity  every operation and type against the host                           parity.rs
//! goldens small models of every architecture against their authors' code       goldens.rs
//! text    greedy text against the host's                                      text.rs
//! soak    a mixed load with evictions, the budget watched                     soak/
//! rounds  load, generate, unload: does memory grow?                           rounds.rs
//! ```
//!
//! A figure short of its goal is marked; a check that fails, or a part that could not be
//! run, makes the exit code 1.

mod card;
mod clients;
mod figures;
pub(crate) mod first;
mod goldens;
mod images;
mod lora;
mod mixtures;
mod models;
mod parity;
mod plan;
mod rounds;
mod shapes;
mod soak;
mod text;
mod turns;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use rocmforge_engine::api::{DeviceKind, Vendor};

use crate::check::Check;
use crate::device::{DeviceArg, UploadArgs};
use crate::report::{Report, Row, figure};
use crate::session::{Session, set_uploads};
use card::Card;
use models::Models;
use plan::{Choice, Plan};

/// Budget of the engine that only tells which device there is.
const PROBE_BYTES: u64 = 64 << 20;

/// A part of the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// The figures.
    Table,
    /// Many requests at once.
    Clients,
    /// Mixtures of experts.
    Mixtures,
    /// Models of other kinds of layers.
    Shapes,
    /// A model that reads images.
    Images,
    /// The second turn of a chat.
    Turns,
    /// Operations against the host's.
    Parity,
    /// Small models of every architecture against their authors' code.
    Goldens,
    /// Text against the host's.
    Text,
    /// A mixed load.
    Soak,
    /// Growth over many loads.
    Rounds,
}

/// Options of `gpu`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// The device to measure.
    #[arg(long, value_enum, default_value = "auto")]
    device: DeviceArg,
    #[command(flatten)]
    uploads: UploadArgs,
    /// What to run, separated by commas.
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "table,clients,mixtures,shapes,images,turns,parity,goldens,text,soak,rounds"
    )]
    parts: Vec<Part>,
    /// Where models are made, found if they are there, and kept [default: a temporary
    /// folder, up to 21 GB at a time].
    #[arg(long, value_name = "DIR")]
    models: Option<PathBuf>,
    /// How long the mixed load lasts.
    #[arg(long, default_value_t = 10.0, value_parser = minutes)]
    soak_minutes: f64,
    /// Clients that ask at once, of a list of numbers [default: 1, 8, 32, 64, 128].
    #[arg(long, value_delimiter = ',', value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    clients: Vec<u16>,
    /// Tokens of each client's prompt [default: 128].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4000))]
    client_prompt: Option<u16>,
    /// Ask a mixture of experts at once, in place of the 8B.
    #[arg(long)]
    clients_of_a_mixture: bool,
    /// Load the clients' model with so many random LoRA adapters of rank 16 for all linear matrices
    /// of its layers, and measure clients with one of them each beside clients without
    /// [default: 0].
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u16).range(0..=16))]
    client_adapters: u16,
    /// Measure a mixture whose routers prefer some experts, in place of one that routes evenly.
    #[arg(long)]
    skewed: bool,
    /// Compare only operations whose name begins so, `attention` say.
    #[arg(long, value_name = "NAME")]
    operation: Option<String>,
    /// Say on standard error what each comparison of operations came to, as it is made.
    #[arg(long)]
    progress: bool,
    /// Rounds of load, generate, unload.
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    rounds: u32,
    /// The folder of exam.json and the trained models [default: ROCMFORGE_FIXTURES,
    /// ROCMFORGE_TEST_DATA, the sources' own].
    #[arg(long, value_name = "DIR")]
    fixtures: Option<PathBuf>,
    /// Seed of the mixed load and of random prompts; the same seed asks the same.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Mini models and few runs: shows that all of it works, not how fast.
    #[arg(long)]
    quick: bool,
    /// Write the table to this file too.
    #[arg(long, value_name = "FILE.md")]
    out: Option<PathBuf>,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

impl Options {
    fn plan(&self) -> Plan {
        let mut plan = match self.quick {
            true => Plan::quick(),
            false => Plan::full(),
        };
        if self.skewed {
            plan.prefer_some_experts();
        }
        if !self.clients.is_empty() {
            let asked = self.clients.iter();
            plan.together = asked.map(|&n| (n.into(), Choice::Greedy)).collect();
        }
        if self.clients_of_a_mixture {
            plan.asked = plan.mixtures.first().copied().unwrap_or(plan.asked);
        }
        plan.adapters_together = self.client_adapters;
        if let Some(n) = self.client_prompt {
            plan.text_together.0 = n.into();
        }
        plan
    }
}

fn minutes(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|e| format!("{e}"))?;
    if !(0.01..=10_000.0).contains(&value) {
        return Err("minutes are from 0.01 to 10000".to_owned());
    }
    Ok(value)
}

/// What all parts share.
pub(crate) struct Bench {
    /// The device, which is a definite one.
    pub(crate) device: DeviceArg,
    /// How uploads to it go.
    pub(crate) uploads: UploadArgs,
    /// The vendor of the GPU; none on the host.
    pub(crate) vendor: Option<Vendor>,
    /// The card by the driver's account; none on the host.
    pub(crate) card: Option<Card>,
    pub(crate) plan: Plan,
    pub(crate) is_quick: bool,
    pub(crate) models: Models,
    pub(crate) seed: u64,
    /// How the names of the operations begin that are compared.
    pub(crate) operation: String,
    /// Whether each of their comparisons is told as it is made.
    pub(crate) tells_progress: bool,
    pub(crate) report: Report,
}

impl Bench {
    fn new(options: &Options) -> Result<Self> {
        set_uploads(options.uploads.way());
        let probe = Session::start_within(options.device, PROBE_BYTES)?;
        let status = probe.engine.snapshot().device.clone();
        probe.end()?;
        let vendor = match status.kind {
            DeviceKind::Host => None,
            DeviceKind::Hip => Some(Vendor::Hip),
            DeviceKind::Cuda => Some(Vendor::Cuda),
        };
        let card = vendor.map(Card::open).transpose()?;
        if card.is_none() && !options.quick && options.device == DeviceArg::Auto {
            bail!(
                "no GPU could be opened (rocmforgectl devices says what was looked for); --quick runs mini models on the \
                 CPU, --device host measures the CPU as if it were one, which takes hours"
            );
        }
        let mut report = Report::new(&status);
        report.driver = card.as_ref().map(|card| card.driver.clone());
        Ok(Self {
            device: DeviceArg::of_kind(status.kind),
            uploads: options.uploads,
            vendor,
            card,
            plan: options.plan(),
            is_quick: options.quick,
            models: Models::new(options.models.as_deref())?,
            seed: options.seed,
            operation: options.operation.clone().unwrap_or_default(),
            tells_progress: options.progress,
            report,
        })
    }

    /// Adds a row, and says on stderr what was measured.
    pub(crate) fn add(&mut self, row: Row) {
        eprintln!(
            "{}, {}: {} {}",
            row.model,
            row.figure,
            figure(row.value.median),
            row.unit
        );
        self.report.rows.push(row);
    }

    /// Runs a part; an error of it is a failed check, so that the other parts
    /// are run and all is printed.
    fn part(&mut self, part: Part, options: &Options) {
        let begin = Instant::now();
        let name = format!("{part:?}").to_lowercase();
        eprintln!("== {name}");
        let checks = match part {
            Part::Table => {
                let check = Check::ran("Figures", |check| figures::run(self, check));
                // Rows speak for themselves: only what could not be measured is told.
                (!check.passed()).then_some(check).into_iter().collect()
            }
            Part::Clients => {
                let check = Check::ran("Clients", |check| clients::run_all(self, check));
                (!check.passed()).then_some(check).into_iter().collect()
            }
            Part::Mixtures => {
                let check = Check::ran("Mixtures", |check| mixtures::run_all(self, check));
                (!check.passed()).then_some(check).into_iter().collect()
            }
            Part::Shapes => shapes::run_all(self),
            Part::Images => {
                let check = Check::ran("Images", |check| images::run_all(self, check));
                (!check.passed()).then_some(check).into_iter().collect()
            }
            Part::Turns => {
                let check = Check::ran("Turns", |check| turns::run_all(self, check));
                (!check.passed()).then_some(check).into_iter().collect()
            }
            Part::Parity => vec![Check::ran(parity::name(self), |check| {
                parity::run(self, check)
            })],
            Part::Goldens => vec![Check::ran("Architectures", |check| {
                goldens::run(self, text::fixtures(options.fixtures.as_deref()), check)
            })],
            Part::Text => text::run(self, text::fixtures(options.fixtures.as_deref())),
            Part::Soak => {
                let name = format!("A mixed load of {} minutes", options.soak_minutes);
                let lasts = Duration::from_secs_f64(options.soak_minutes * 60.0);
                vec![Check::ran(name, |check| soak::run(self, lasts, check))]
            }
            Part::Rounds => {
                let (n, name) = (options.rounds, rounds::name(self, options.rounds));
                vec![Check::ran(name, |check| rounds::run(self, n, check))]
            }
        };
        for check in checks.iter().filter(|check| !check.passed()) {
            eprintln!("{}", check.lines().join("\n"));
        }
        self.report.checks.extend(checks);
        eprintln!("== {name}: {:.1} s", begin.elapsed().as_secs_f64());
    }
}

/// Runs the parts and prints the report.
///
/// # Errors
/// There is no such device, a check fails, or the report cannot be written.
pub(crate) fn run(options: &Options) -> Result<()> {
    let mut bench = Bench::new(options)?;
    for part in Part::value_variants() {
        if options.parts.contains(part) {
            bench.part(*part, options);
            // After each part, so that a run that is cut short leaves what it had.
            if let Some(out) = &options.out {
                let text = bench.report.markdown();
                std::fs::write(out, text).with_context(|| format!("--out {}", out.display()))?;
            }
        }
    }
    bench.report.print(options.json)?;
    let failed = bench.report.checks.iter().filter(|check| !check.passed());
    let failed: Vec<&str> = failed.map(|check| check.name.as_str()).collect();
    ensure!(failed.is_empty(), "failed: {}", failed.join("; "));
    Ok(())
}
