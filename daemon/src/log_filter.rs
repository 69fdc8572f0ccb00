//! Parses the filter of log lines.

use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;

/// Parses a filter: levels, and targets with or without a level, separated by commas. Without a
/// level for a target, only errors are logged.
///
/// # Errors
/// A message that says what is wrong with it.
pub fn parse(text: &str) -> Result<Targets, String> {
    let parts = text.split(',').map(str::trim);
    let mut parts = parts.filter(|part| !part.is_empty()).peekable();
    if parts.peek().is_none() {
        return Ok(Targets::new().with_default(LevelFilter::ERROR));
    }
    parts.try_fold(Targets::new(), |filter, part| {
        let level = part.parse::<LevelFilter>();
        match (part.split_once('='), level) {
            (Some((target, level)), _) => add(filter, target.trim(), level.trim())
                .ok_or_else(|| {
                format!("'{part}' is not TARGET=LEVEL: for example info,rocmforge_engine=debug")
            }),
            (None, Ok(level)) => Ok(filter.with_default(level)),
            (None, Err(_)) if is_ours(part) => Ok(filter.with_target(part, LevelFilter::TRACE)),
            // It would count as a target of which everything is logged, and nothing else would be.
            (None, Err(_)) => Err(format!(
                "'{part}' is no level: off, error, warn, info, debug or trace; the target of another library has a level \
                 behind it (h2=debug)"
            )),
        }
    })
}

/// Adds a target to a filter; `None` if the target or the level is invalid.
fn add(filter: Targets, target: &str, level: &str) -> Option<Targets> {
    let is_target = !target.is_empty() && !target.contains(['[', ']', '{', '}', '=']);
    // No level at all would be read as one.
    let is_level = !level.is_empty();
    let level = level.parse::<LevelFilter>().ok();
    let level = level.filter(|_| is_target && is_level)?;
    Some(filter.with_target(target, level))
}

/// Whether a word is a log target of this daemon.
fn is_ours(word: &str) -> bool {
    word == "audit" || (word.starts_with("rocmforge") && !word.contains(['[', '{']))
}

#[cfg(test)]
mod tests {
    use tracing::Level;

    use super::*;

    #[test]
    fn targets_have_their_levels_and_all_others_the_general_one() {
        let filter = parse(" warn, rocmforge_engine=debug,h2 = trace,rocmforge_hub").unwrap();
        for (target, level, is_logged) in [
            ("rocmforge_http::listen", Level::WARN, true),
            ("rocmforge_http::listen", Level::INFO, false),
            ("rocmforge_engine::actor", Level::DEBUG, true),
            ("rocmforge_engine", Level::TRACE, false),
            ("h2::codec", Level::TRACE, true),
            ("rocmforge_hub", Level::TRACE, true),
        ] {
            assert_eq!(
                filter.would_enable(target, &level),
                is_logged,
                "{target} {level}"
            );
        }
        let alone = parse("rocmforge_engine=info").unwrap();
        assert!(alone.would_enable("rocmforge_engine", &Level::INFO));
        assert!(!alone.would_enable("rocmforged", &Level::ERROR));
        for nothing in ["", " , "] {
            let filter = parse(nothing).unwrap();
            assert!(filter.would_enable("rocmforged", &Level::ERROR));
            assert!(!filter.would_enable("rocmforged", &Level::WARN));
        }
        assert!(
            !parse("off")
                .unwrap()
                .would_enable("rocmforged", &Level::ERROR)
        );
    }

    #[test]
    fn what_is_no_filter_is_refused() {
        for text in [
            "info,=,",
            "=info",
            "h2=",
            "h2=loud",
            "h2=a=debug",
            "h2[span]=debug",
            "rocmforged[{field}]",
            "verbose",
            "warning,rocmforge_engine=debug",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
