//! Generates files from the declarations of the command line and of the settings: a package's
//! manual page and completions, the committed reference page, and the words for the fuzzer.
//! `rocmforged generated man|completions|reference|dictionary DIR`.

use std::fs;
use std::io;
use std::path::Path;

use clap::CommandFactory as _;
use clap_complete::Shell;
use clap_mangen::Man;

use crate::config::{Flags, dictionary, reference};

/// First argument of the program that selects this mode.
pub const ARGUMENT: &str = "generated";

/// Writes the files that the arguments after [`ARGUMENT`] select.
///
/// # Errors
/// Invalid arguments, and files that cannot be written.
pub fn main(arguments: &[String]) -> Result<(), String> {
    let written = match arguments {
        [what, dir] if what == "man" => man(Path::new(dir)),
        [what, dir] if what == "completions" => completions(Path::new(dir)),
        [what, dir] if what == "reference" => {
            fs::write(Path::new(dir).join("configuration.md"), reference())
        }
        [what, dir] if what == "dictionary" => {
            fs::write(Path::new(dir).join("config"), dictionary())
        }
        _ => {
            return Err(format!(
                "{ARGUMENT} takes 'man', 'completions', 'reference' or 'dictionary', and a directory"
            ));
        }
    };
    written.map_err(|error| format!("cannot write into {}: {error}", arguments[1]))
}

fn man(dir: &Path) -> io::Result<()> {
    let mut page = Vec::new();
    Man::new(Flags::command()).section("8").render(&mut page)?;
    fs::write(dir.join("rocmforged.8"), page)
}

fn completions(dir: &Path) -> io::Result<()> {
    let mut command = Flags::command();
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut command, "rocmforged", dir)?;
    }
    Ok(())
}
