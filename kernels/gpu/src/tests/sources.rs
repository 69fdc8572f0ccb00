//! What the tests read in the texts of units.

use std::collections::BTreeSet;

/// The entries that a unit's text defines, macros of one level expanded.
pub(crate) fn entries(text: &str) -> BTreeSet<String> {
    let mut definitions = Vec::new();
    let mut found = BTreeSet::new();
    let mut generators: Vec<(String, Vec<String>)> = Vec::new();
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        if let Some(rest) = line.strip_prefix("#define ") {
            let mut whole = rest.to_owned();
            while whole.ends_with('\\') {
                whole.pop();
                whole += lines.next().unwrap_or_default();
            }
            let (name, body) = whole.split_once([' ', '(']).unwrap_or((&whole, ""));
            let made: Vec<String> = entry_names(body);
            if !made.is_empty() {
                generators.push((name.to_owned(), made));
            }
            definitions.push((name.to_owned(), body.trim().to_owned()));
            continue;
        }
        found.extend(entry_names(line));
        for (name, made) in &generators {
            if let Some(argument) = line
                .strip_prefix(name.as_str())
                .and_then(|rest| rest.strip_prefix('('))
            {
                let argument = argument.split([',', ')']).next().unwrap_or_default();
                found.extend(
                    made.iter()
                        .map(|m| m.replace("##name##", argument).replace("##name", argument)),
                );
            }
        }
    }
    found
        .into_iter()
        .map(|entry| {
            let value = |of: &str| {
                definitions
                    .iter()
                    .find(|(name, _)| name == of)
                    .map(|(_, value)| value.clone())
            };
            if let Some(joined) = entry.strip_prefix("NAME(") {
                let (a, b) = joined.trim_end_matches(')').split_once(", ").unwrap();
                // Where it is not defined, conditions leave the entry out.
                return format!("{a}{}", value(b).unwrap_or_else(|| b.to_owned()));
            }
            value(&entry).unwrap_or(entry)
        })
        .collect()
}

/// Names after `ENTRY(...)` in a line.
fn entry_names(line: &str) -> Vec<String> {
    line.match_indices("ENTRY(")
        .map(|(at, _)| &line[at..])
        .filter(|rest| {
            let threads = rest["ENTRY(".len()..].split(',').next();
            let threads = threads.unwrap_or_default();
            threads.ends_with("THREADS") || threads.parse::<u32>().is_ok()
        })
        .map(|rest| {
            let rest = rest[rest.find(')').unwrap() + 1..].trim_start();
            let end = if rest.starts_with("NAME(") {
                rest.find(')').unwrap() + 1
            } else {
                rest.find('(').unwrap()
            };
            rest[..end].to_owned()
        })
        .collect()
}

/// The values of `#define name value` in a source, one for each branch of its conditions.
pub(super) fn defined(source: &str, name: &str) -> Vec<u32> {
    source
        .lines()
        .filter_map(|l| l.strip_prefix(&format!("#define {name} ")))
        .map(|value| {
            let value = value.split_whitespace().next().unwrap();
            value.trim_end_matches('u').parse().unwrap()
        })
        .collect()
}
