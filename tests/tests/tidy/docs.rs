//! The documentation: pages lead where they say, keep their lengths, and use the field's words.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use rocmforge_tests::fixtures;

use super::texts::{Broken, Text, texts};

/// Most lines of the pages that a newcomer reads first.
const PAGE_LINES_MAX: [(&str, usize); 3] = [
    ("README.md", 150),
    ("ARCHITECTURE.md", 250),
    ("CHANGELOG.md", 150),
];

/// Words that the field does not use, each with what it says instead.
const IDIOMS: [(&str, &str); 20] = [
    ("anew", "again, or the verb with re-"),
    ("asker", "client"),
    ("askers", "clients"),
    ("beginnings", "prefixes"),
    ("goes on later", "is resumed"),
    ("held to", "constrained to"),
    ("is told", "is reported"),
    ("kept prompts", "prefix cache"),
    ("keys and values", "KV cache"),
    ("mend", "fix"),
    ("mended", "fixed"),
    ("mends", "fixes"),
    ("mixture", "MoE"),
    ("mixtures", "MoE models"),
    ("on its way", "in flight"),
    ("on their way", "in flight"),
    ("tells", "says, reports"),
    ("told", "reported, said"),
    ("who yields", "preempted requests"),
    ("whoever", "a noun"),
];

fn pages() -> Vec<Text> {
    texts(&["md"])
}

/// What a heading's link is on a rendered page.
fn anchor(heading: &str) -> String {
    let kept = |c: char| c.is_alphanumeric() || c == ' ' || c == '-' || c == '_';
    let text: String = heading.trim().chars().filter(|c| kept(*c)).collect();
    text.to_lowercase().replace(' ', "-")
}

/// The lines of a page outside of fenced code.
fn prose(page: &Text) -> Vec<(usize, &str)> {
    let mut is_code = false;
    let mut lines = Vec::new();
    for (n, line) in page.lines() {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
        } else if !is_code {
            lines.push((n, line));
        }
    }
    lines
}

/// A line without its code spans.
fn words_of(line: &str) -> String {
    line.split('`').step_by(2).collect::<Vec<_>>().join(" ")
}

fn anchors(path: &Path) -> BTreeSet<String> {
    let content = std::fs::read_to_string(path).unwrap_or_default();
    let headings = content.lines().filter(|line| line.starts_with('#'));
    headings
        .map(|line| anchor(line.trim_start_matches('#')))
        .collect()
}

/// The targets of a line's links.
fn links(line: &str) -> impl Iterator<Item = &str> {
    line.split("](")
        .skip(1)
        .filter_map(|rest| rest.split(')').next())
}

#[test]
fn links_of_pages_lead_somewhere() {
    let root = fixtures::workspace();
    let mut broken = Broken::default();
    for page in pages() {
        let own: PathBuf = root.join(&page.path);
        for (n, line) in prose(&page) {
            for link in links(line).filter(|link| !link.contains("://")) {
                let (file, heading) = link.split_once('#').unwrap_or((link, ""));
                let target = match file {
                    "" => own.clone(),
                    file => own.parent().expect("a page has a directory").join(file),
                };
                let is_there = target.exists();
                if !is_there || !heading.is_empty() && !anchors(&target).contains(heading) {
                    broken.at(&page, n, link);
                }
            }
        }
    }
    broken.check("a link leads to a file of the repository, and to a heading in it");
}

#[test]
fn the_book_has_every_page() {
    let root = fixtures::workspace().join("docs");
    let summary = std::fs::read_to_string(root.join("SUMMARY.md")).expect("docs/SUMMARY.md");
    let listed: BTreeSet<String> = summary.lines().flat_map(links).map(str::to_owned).collect();
    let there = pages().into_iter().filter_map(|page| {
        let path = page.path.strip_prefix("docs/")?;
        (path != "SUMMARY.md").then(|| path.to_owned())
    });
    assert_eq!(listed, there.collect(), "docs/SUMMARY.md against docs/");
}

#[test]
fn pages_keep_their_length() {
    for page in pages() {
        let bound = PAGE_LINES_MAX.iter().find(|(path, _)| *path == page.path);
        let lines = page.lines().count();
        if let Some((path, most)) = bound {
            assert!(lines <= *most, "{path} has {lines} lines, at most {most}");
        }
    }
}

#[test]
fn pages_use_the_words_of_the_field() {
    let mut broken = Broken::default();
    for page in pages() {
        for (n, line) in prose(&page) {
            let text = words_of(line).to_lowercase();
            let is_letter = |c: Option<char>| c.is_some_and(char::is_alphanumeric);
            for (idiom, better) in IDIOMS {
                let found = text.match_indices(idiom).any(|(at, _)| {
                    let (before, behind) = (&text[..at], &text[at + idiom.len()..]);
                    !is_letter(before.chars().next_back()) && !is_letter(behind.chars().next())
                });
                if found {
                    broken.at(&page, n, &format!("'{idiom}' (write {better}): {line}"));
                }
            }
        }
    }
    broken.check("pages use the words that readers search for");
}
