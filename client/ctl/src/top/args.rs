//! Arguments of `top`.

use clap::builder::RangedI64ValueParser;
use clap::{Args, value_parser};

/// Arguments of `top`.
#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// Print the board once as text, and exit
    #[arg(long)]
    pub(crate) once: bool,
    /// Seconds between two updates
    #[arg(long, value_name = "SECONDS", default_value_t = 1, value_parser = seconds())]
    pub(crate) every: u8,
}

fn seconds() -> RangedI64ValueParser<u8> {
    value_parser!(u8).range(1..=60)
}
