//! Man pages and shell completions, made of the definition of the command line.
//!
//! Completions of a model's name ask the daemon: they run `rocmforgectl names`, which prints those
//! of the loaded models, a line each.

use std::path::Path;

use anyhow::Context as _;
use clap::CommandFactory as _;
use clap_complete::Shell;

use crate::cli::{Cli, GeneratedFiles};

/// Writes man pages or completions into a directory.
///
/// # Errors
/// When a file cannot be written.
pub(crate) fn write(what: GeneratedFiles, dir: &Path) -> anyhow::Result<()> {
    let written = match what {
        GeneratedFiles::Man => clap_mangen::generate_to(Cli::command(), dir),
        GeneratedFiles::Completions => [Shell::Bash, Shell::Zsh, Shell::Fish]
            .into_iter()
            .try_for_each(|shell| {
                let mut command = Cli::command();
                let file = clap_complete::generate_to(shell, &mut command, "rocmforgectl", dir)?;
                let script = std::fs::read_to_string(&file)?;
                std::fs::write(file, with_names(shell, script))
            }),
    };
    written.with_context(|| format!("cannot write into {}", dir.display()))
}

/// The commands whose first argument is the name of a model.
fn of_models() -> String {
    let command = Cli::command();
    let takes_name = |command: &&clap::Command| {
        let mut places = command.get_positionals();
        places.next().is_some_and(|place| place.get_id() == "name")
    };
    let nested = command
        .get_subcommands()
        .flat_map(clap::Command::get_subcommands);
    let all = command.get_subcommands().chain(nested).filter(takes_name);
    let names: Vec<_> = all.map(clap::Command::get_name).collect();
    names.join(" ")
}

/// A shell's script that completes names of models, too.
fn with_names(shell: Shell, mut script: String) -> String {
    let commands = of_models();
    match shell {
        Shell::Bash => {
            script += &format!(
                r#"
# Names of models, which the daemon knows.
_rocmforgectl_names() {{
    _rocmforgectl "$@"
    local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
    case " {commands} --draft " in
        *" $before "*)
            if [[ $current != -* ]]; then
                COMPREPLY+=($(compgen -W "$(rocmforgectl names 2>/dev/null)" -- "$current"))
            fi
            ;;
    esac
}}
complete -F _rocmforgectl_names -o bashdefault -o default rocmforgectl
"#
            );
        }
        Shell::Zsh => {
            // The first line has to stay that.
            let (first, rest) = script.split_once('\n').unwrap_or((&script, ""));
            let names = "_rocmforgectl_names() {\n    local -a names\n    \
                         names=(${(f)\"$(rocmforgectl names 2>/dev/null)\"})\n    compadd -a names\n}\n";
            let lines = rest.lines().map(|line| match line.contains(":name -- ") {
                true => line.replace(":_default'", ":_rocmforgectl_names'") + "\n",
                false => line.to_owned() + "\n",
            });
            script = format!("{first}\n\n{names}{}", lines.collect::<String>());
        }
        _ => {
            script += &format!(
                "complete -c rocmforgectl -n \"__fish_seen_subcommand_from {commands}; and not \
                 string match -q -- '-*' (commandline -ct)\" -f -a \"(rocmforgectl names 2>/dev/null)\"\n"
            );
        }
    }
    script
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_that_take_a_model_complete_its_name_in_each_shell() {
        let commands = of_models();
        for command in ["unload", "show", "generate", "chat", "pin", "clear"] {
            assert!(commands.split(' ').any(|c| c == command), "{commands}");
        }
        assert!(
            !commands.split(' ').any(|c| c == "load" || c == "run"),
            "{commands}"
        );
        let dir = tempfile::tempdir().unwrap();
        write(GeneratedFiles::Completions, dir.path()).unwrap();
        let read = |name: &str| std::fs::read_to_string(dir.path().join(name)).unwrap();
        assert!(read("rocmforgectl.bash").contains("complete -F _rocmforgectl_names"));
        let zsh = read("_rocmforgectl");
        assert!(zsh.starts_with("#compdef rocmforgectl\n"));
        let completed = zsh.matches(":_rocmforgectl_names'").count();
        assert_eq!(completed, commands.split(' ').count(), "{zsh}");
        assert!(read("rocmforgectl.fish").contains("(rocmforgectl names 2>/dev/null)"));
    }
}
