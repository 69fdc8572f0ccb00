//! Limits per peer: `[[limit]]` in the file.

use std::path::PathBuf;

use rocmforge_service::limits::{PeerLimits, RULES_MAX, Rule};
use rocmforge_service::peer::TokenName;
use rocmforge_service::roles::Who;

use super::error::ConfigError;
use super::table::file_table;

/// How a token is written among users and `@groups`.
const TOKEN: &str = "token:";

file_table! {
    /// One `[[limit]]` as it is written.
    LimitTable {
        /// List of users, `@groups` and tokens (`token:NAME`) that the limit is for; `*` is
        /// everyone. Required.
        r#for: Vec<String>,
        /// Maximum number of requests that run at once.
        running: Option<u32>,
        /// Maximum number of requests in the queue.
        queued: Option<u32>,
        /// Maximum size of the prompts of unfinished requests, in bytes.
        prompt_bytes: Option<u64>,
        /// Maximum number of prompt and output tokens per minute.
        tokens_per_minute: Option<u64>,
    }
}

/// A limit, and where it is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfiguredLimit {
    /// The limit.
    pub rule: Rule,
    /// Clients of the limit, as configured.
    pub whom: Vec<String>,
    /// The file that has it.
    pub file: PathBuf,
}

/// Checks what the files have.
pub(super) fn checked(
    tables: Vec<(PathBuf, usize, LimitTable)>,
) -> Result<Vec<ConfiguredLimit>, ConfigError> {
    let mut limits = Vec::new();
    for (file, number, table) in tables {
        let refuse = |key: &'static str, message: String| ConfigError::Limit {
            file: file.clone(),
            number,
            key,
            message,
        };
        if table.r#for.is_empty() {
            let message = "nobody; name users, @groups and token:NAME, or * for everyone";
            return Err(refuse("for", message.to_owned()));
        }
        let is_token = |entry: &&String| entry.trim().starts_with(TOKEN);
        let (tokens, others): (Vec<_>, Vec<_>) = table.r#for.iter().partition(is_token);
        let name = |entry: &&String| TokenName::new(&entry.trim()[TOKEN.len()..]);
        let tokens: Result<Vec<_>, _> = tokens.iter().map(name).collect();
        let others: Vec<String> = others.into_iter().cloned().collect();
        for (key, value) in [
            ("running", table.running.map(u64::from)),
            ("prompt_bytes", table.prompt_bytes),
            ("tokens_per_minute", table.tokens_per_minute),
        ] {
            if value == Some(0) {
                let message = "0 would let nothing in; take the role away instead (use_by)";
                return Err(refuse(key, message.to_owned()));
            }
        }
        let limits_of_table = PeerLimits {
            running: table.running,
            queued: table.queued,
            prompt_bytes: table.prompt_bytes,
            tokens_per_minute: table.tokens_per_minute,
        };
        if limits_of_table == PeerLimits::default() {
            let message =
                "no limit is set; give running, queued, prompt_bytes or tokens_per_minute";
            return Err(refuse("for", message.to_owned()));
        }
        if limits.len() >= RULES_MAX {
            return Err(refuse("for", format!("more than {RULES_MAX} limits")));
        }
        limits.push(ConfiguredLimit {
            rule: Rule {
                who: Who::parse(&others).map_err(|message| refuse("for", message))?,
                tokens: tokens.map_err(|message| refuse("for", message))?,
                limits: limits_of_table,
            },
            whom: table.r#for,
            file,
        });
    }
    Ok(limits)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::{Config, Flags};

    /// Reads a file, and one beside it.
    fn read(first: &str, second: &str) -> Result<Config, ConfigError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.toml");
        std::fs::write(&path, first).unwrap();
        std::fs::create_dir(dir.path().join("conf.d")).unwrap();
        std::fs::write(dir.path().join("conf.d/10-a.toml"), second).unwrap();
        let flags = Flags {
            config: Some(path),
            ..Flags::default()
        };
        Config::new(flags, Path::new("/run/default.sock").to_owned())
    }

    #[test]
    fn limits_of_all_files_count_and_what_is_printed_says_the_same() {
        let first = "[[limit]]\nfor = [\"*\"]\nrunning = 4\n";
        let second = "[[limit]]\nfor = [\"root\", \"@root\", \"token:ci\"]\nqueued = 0\nprompt_bytes = 9\n\
                      [[limit]]\nfor = [\"7\"]\ntokens_per_minute = 60000\n";
        let declared = "[[model]]\nname = \"a\"\npath = \"/m/a.gguf\"\ntemperature = 0\npriority = \"batch\"\n";
        let config = read(&format!("{declared}{first}"), second).unwrap();
        let rule = |i: usize| &config.limits[i].rule;
        assert_eq!(config.limits.len(), 3);
        assert_eq!(
            (&rule(0).who, rule(0).limits.running),
            (&Who::Everyone, Some(4))
        );
        let expected = Who::parse(&["root".to_owned(), "@root".to_owned()]).unwrap();
        assert_eq!((&rule(1).who, rule(1).limits.queued), (&expected, Some(0)));
        assert_eq!(rule(1).tokens[0].as_str(), "ci");
        assert_eq!(rule(2).limits.tokens_per_minute, Some(60_000));
        let told = config.describe();
        let again = read(&told, "").unwrap();
        assert_eq!(again.models[0].model, config.models[0].model);
        let rules =
            |config: &Config| -> Vec<_> { config.limits.iter().map(|l| l.rule.clone()).collect() };
        assert_eq!(rules(&again), rules(&config));
    }

    #[test]
    fn a_refusal_of_a_limit_names_file_number_and_key() {
        for (text, place, cause) in [
            ("for = []\nrunning = 1", "for of [[limit]] 1", "nobody"),
            ("for = [\"*\"]", "for of [[limit]] 1", "no limit is set"),
            (
                "for = [\"*\"]\nrunning = 0",
                "running of [[limit]] 1",
                "nothing in",
            ),
            (
                "for = [\"token:a b\"]\nrunning = 1",
                "for of [[limit]] 1",
                "no name of a token",
            ),
            (
                "for = [\"no-such-user\"]\nrunning = 1",
                "for of [[limit]] 1",
                "no user",
            ),
            (
                "for = [\"*\"]\nbuget = 1",
                "10-a.toml",
                "unknown field `buget`",
            ),
            ("running = 1", "10-a.toml", "missing field `for`"),
        ] {
            let text = format!("[[limit]]\n{text}\n");
            let error = anyhow::Error::from(read("", &text).unwrap_err());
            let error = format!("{error:#}");
            for word in [place, cause, "10-a.toml"] {
                assert!(error.contains(word), "'{error}' lacks '{word}'");
            }
        }
    }
}
