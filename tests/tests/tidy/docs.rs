//! The documentation: pages lead where they say, name files that exist, keep their lengths, and use
//! the field's words; so do comments of the protocol and messages. Doc comments name their object.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use rocmforge_tests::fixtures;

use super::texts::{Broken, Text, collect, texts};

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

/// Reports each word of a text that the field does not use.
fn check_words(place: &Text, n: usize, text: &str, broken: &mut Broken) {
    let text = text.to_lowercase();
    let is_letter = |c: Option<char>| c.is_some_and(char::is_alphanumeric);
    for (idiom, better) in IDIOMS {
        let found = text.match_indices(idiom).any(|(at, _)| {
            let (before, behind) = (&text[..at], &text[at + idiom.len()..]);
            !is_letter(before.chars().next_back()) && !is_letter(behind.chars().next())
        });
        if found {
            broken.at(place, n, &format!("'{idiom}' (write {better}): {text}"));
        }
    }
}

#[test]
fn pages_use_the_words_of_the_field() {
    let mut broken = Broken::default();
    for page in pages() {
        for (n, line) in prose(&page) {
            check_words(&page, n, &words_of(line), &mut broken);
        }
    }
    broken.check("pages use the words that readers search for");
}

#[test]
fn comments_of_the_protocol_use_the_words_of_the_field() {
    let mut broken = Broken::default();
    for file in texts(&["proto"]) {
        for (n, line) in file.lines() {
            if let Some((_, comment)) = line.split_once("//") {
                check_words(&file, n, &words_of(comment), &mut broken);
            }
        }
    }
    broken.check("comments of the protocol use the words that readers search for");
}

/// The sources of the product, without tests in files of their own.
fn product() -> impl Iterator<Item = Text> {
    texts(&["rs"]).into_iter().filter(|file| {
        let is_test = ["/tests/", "/benches/", "tests.rs"];
        file.is_below(&["daemon/", "client/", "kernels/", "proto/"])
            && !is_test.iter().any(|part| file.path.contains(part))
    })
}

#[test]
fn doc_comments_name_their_object() {
    // Words that refer to a neighbour's comment, which its reader may not see.
    const REFER: [&str; 9] = [
        "Its ", "It ", "Their ", "They ", "Those ", "Such ", "That of ", "The same", "Likewise",
    ];
    let mut broken = Broken::default();
    for file in product() {
        let mut is_inside = false;
        for (n, line) in file.lines() {
            let comment = line.trim_start().strip_prefix("///");
            if let Some(comment) = comment.filter(|_| !is_inside) {
                let begins = |word: &&str| comment.trim_start().starts_with(word);
                if REFER.iter().any(begins) {
                    broken.at(&file, n, line);
                }
            }
            is_inside = comment.is_some();
        }
    }
    broken.check("a doc comment is read alone: it names what it describes");
}

/// The literals of several words that a line of code has, without what is formatted into them.
fn literals(line: &str) -> Vec<String> {
    let plain = line.replace("\\\"", "");
    let goes_on = plain.ends_with('\\');
    let parts: Vec<&str> = plain.split('"').collect();
    let is_whole = |at: usize| at + 1 < parts.len() || goes_on;
    let inside = (1..parts.len()).step_by(2).filter(|at| is_whole(*at));
    let words = inside.map(|at| parts[at]).filter(|text| text.contains(' '));
    let fixed = |text: &str| {
        let outside = text.split('{').map(|rest| match rest.split_once('}') {
            Some((_, behind)) => behind,
            None => rest,
        });
        outside.collect::<Vec<_>>().join(" ")
    };
    words.map(fixed).collect()
}

#[test]
fn messages_use_the_words_of_the_field() {
    let told = r#"    let a = format!("{told} is told, \"b\"", "c d");"#;
    assert_eq!(literals(told), ["  is told, b", "c d"]);
    let mut broken = Broken::default();
    for file in product() {
        let tests = file.content.find("#[cfg(test)]\nmod tests {");
        let product = file.content.get(..tests.unwrap_or(file.content.len()));
        for (n, line) in (1..).zip(product.unwrap_or_default().lines()) {
            if !line.trim_start().starts_with("//") {
                for literal in literals(line) {
                    check_words(&file, n, &literal, &mut broken);
                }
            }
        }
    }
    broken.check("errors and log lines use the words that readers search for");
}

/// `a/{b,c}.rs` as `a/b.rs` and `a/c.rs`.
fn spelled_out(name: &str) -> Vec<String> {
    let braces = name.split_once('{').and_then(|(before, rest)| {
        let (inside, behind) = rest.split_once('}')?;
        Some((before, inside, behind))
    });
    match braces {
        Some((before, inside, behind)) => {
            let each = inside
                .split(',')
                .map(|part| format!("{before}{part}{behind}"));
            each.flat_map(|name| spelled_out(&name)).collect()
        }
        None => vec![name.to_owned()],
    }
}

/// Whether a code span of a page is the name of a file of the repository: not of the system, of
/// another project, or with a placeholder.
fn names_a_file(span: &str) -> bool {
    const ENDINGS: [&str; 9] = ["rs", "h", "hip", "py", "mjs", "proto", "toml", "sh", "txt"];
    const OF_OTHERS: [&str; 2] = ["CRATE/tests/main.rs", "convert_lora_to_gguf.py"];
    let is_of_a_path = |c: char| c.is_ascii_alphanumeric() || "_-./{},".contains(c);
    let ending = span.rsplit_once('.').map(|(_, ending)| ending);
    ending.is_some_and(|ending| ENDINGS.contains(&ending))
        && span.chars().all(is_of_a_path)
        && !span.starts_with(['/', '.'])
        && !OF_OTHERS.contains(&span)
}

#[test]
fn files_that_pages_name_are_there() {
    let root = fixtures::workspace();
    let mut paths = Vec::new();
    collect(&root, &mut paths);
    let mut known = BTreeSet::new();
    for path in &paths {
        let path = path.strip_prefix(&root).expect("below the root");
        let mut rest = path.components();
        while !rest.as_path().as_os_str().is_empty() {
            known.insert(rest.as_path().display().to_string());
            rest.next();
        }
    }
    assert_eq!(spelled_out("a/{b,c}.rs"), ["a/b.rs", "a/c.rs"]);
    let mut broken = Broken::default();
    let mut named = 0;
    for page in pages() {
        let of_today = !page.path.contains("/results/") && page.path != "CHANGELOG.md";
        for (n, line) in prose(&page).into_iter().filter(|_| of_today) {
            for span in line.split('`').skip(1).step_by(2) {
                for name in spelled_out(span).iter().filter(|name| names_a_file(name)) {
                    named += 1;
                    // Fixtures are none of the texts, and are named by their whole path.
                    if !known.contains(name) && !root.join(name).exists() {
                        broken.at(&page, n, name);
                    }
                }
            }
        }
    }
    assert!(named > 200, "pages name {named} files");
    broken.check("a file that a page names is in the repository");
}
