//! Man pages and shell completions, made of the definition of the command line.

use std::path::Path;

use anyhow::Context as _;
use clap::CommandFactory as _;
use clap_complete::Shell;

use crate::cli::{Cli, GeneratedFiles};

/// Writes them into a directory.
///
/// # Errors
/// When a file cannot be written.
pub(crate) fn write(what: GeneratedFiles, dir: &Path) -> anyhow::Result<()> {
    let mut command = Cli::command();
    let written = match what {
        GeneratedFiles::Man => clap_mangen::generate_to(command, dir),
        GeneratedFiles::Completions => [Shell::Bash, Shell::Zsh, Shell::Fish]
            .into_iter()
            .try_for_each(|shell| {
                clap_complete::generate_to(shell, &mut command, "rocmforgectl", dir).map(drop)
            }),
    };
    written.with_context(|| format!("cannot write into {}", dir.display()))
}
