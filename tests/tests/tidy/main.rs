//! Style checks as tests: what the workspace's texts must and must not have.
//!
//! Each test reads every text of the workspace and lists all the places that break its
//! rule, as `path:line: text`.

mod dependencies;
mod devices;
mod docs;
mod functions;
mod imports;
mod layout;
mod texts;

use std::fmt::Write as _;

use rocmforge_tests::fixtures;
use sha2::{Digest, Sha256};

use self::texts::{Broken, Text, collect, texts};

/// The sums of the fixtures.
const SUMS: &str = "SHA256SUMS";

/// Most lines of a source file. Past it, look for the second subject.
const LINES_MAX: usize = 600;

/// Most characters of a line of a comment, and of Markdown.
const COLUMNS_MAX: usize = 100;

/// Longer files, each with the reason why it is one subject.
const LONGER: [(&str, &str); 0] = [];

/// Below these, and nowhere else, code may be unsafe.
const UNSAFE: [&str; 12] = [
    "daemon/crates/gguf/src/mapped.rs",
    "daemon/crates/gguf/src/mapped/",
    // It asks the C library's allocator for its free pages.
    "daemon/crates/device/src/heap.rs",
    "daemon/crates/gpu-driver/src/",
    "daemon/crates/device-cpu/src/",
    "daemon/crates/device-gpu/src/",
    "kernels/cpu/src/",
    "kernels/gpu/src/compile/",
    // They call the kernels from threads of their own, which is what the kernels'
    // unsafe constructors are for.
    "kernels/cpu/benches/",
    "kernels/cpu/tests/",
    // Drivers take pointers; the fake one gives them.
    "daemon/crates/gpu-driver/tests/",
    "tests/fake-hip/src/",
];

/// Below these the wire types may be used; the daemon itself has types of its own.
const WIRE_TYPES: [&str; 6] = [
    "proto/",
    "client/",
    "daemon/benches/",
    "daemon/crates/grpc/",
    "daemon/tests/",
    "tests/",
];

/// Below these are decisions alone: no clock, thread, channel or file.
const PURE: [&str; 2] = [
    "daemon/crates/tensor-cache/src/",
    "daemon/crates/scheduler/src/",
];

/// How far above an unsafe block its SAFETY comment may begin.
const SAFETY_LINES_ABOVE: usize = 8;

/// The code of a line: what is before a `//`, with no regard for strings.
fn code(line: &str) -> &str {
    line.split("//").next().unwrap_or_default()
}

fn has_unsafe(line: &str) -> bool {
    [
        "unsafe {",
        "unsafe fn",
        "unsafe impl",
        "unsafe extern",
        "unsafe trait",
    ]
    .iter()
    .any(|form| code(line).contains(form))
}

#[test]
fn every_module_says_what_it_is_for() {
    let mut broken = Broken::default();
    for text in texts(&["rs"]) {
        if !text.content.starts_with("//! ") {
            broken.at(&text, 1, text.content.lines().next().unwrap_or("(empty)"));
        }
    }
    broken.check("a .rs file opens with //! and its purpose, invariants and owning thread");
}

#[test]
fn no_file_outgrows_its_subject() {
    let mut broken = Broken::default();
    for text in texts(&["rs", "hip", "h", "py"]) {
        let lines = text.content.lines().count();
        let listed = LONGER.iter().any(|(path, _)| *path == text.path);
        if lines > LINES_MAX && !listed {
            broken.at(&text, lines, "lines");
        }
        if lines <= LINES_MAX && listed {
            broken.at(&text, lines, "lines: take it off the list of longer files");
        }
    }
    broken.check(
        "past 600 lines a file has a second subject; split it, or list it here with a reason",
    );
}

/// Whether a line of prose may be longer: the row of a table, which has to be one line.
fn is_row(prose: &str) -> bool {
    prose.trim_start().starts_with('|')
}

#[test]
fn comments_and_markdown_have_short_lines() {
    let mut broken = Broken::default();
    let mut check = |text: &Text, n: usize, line: &str| {
        if line.chars().count() > COLUMNS_MAX {
            broken.at(text, n, line);
        }
    };
    for text in texts(&["rs", "hip", "h", "proto"]) {
        for (n, line) in text.lines() {
            let Some(comment) = line.trim_start().strip_prefix("//") else {
                continue;
            };
            if !is_row(comment.trim_start_matches(['/', '!'])) {
                check(&text, n, line);
            }
        }
    }
    for text in texts(&["py", "sh", "toml", "service", "socket", "conf", "yml"]) {
        for (n, line) in text.lines() {
            if line.trim_start().starts_with('#') {
                check(&text, n, line);
            }
        }
    }
    for text in texts(&["md"]) {
        // Commands and what programs print are as they are.
        let mut is_code = false;
        for (n, line) in text.lines() {
            if line.trim_start().starts_with("```") {
                is_code = !is_code;
            } else if !is_code && !is_row(line) {
                check(&text, n, line);
            }
        }
    }
    broken.check("a line of a comment or of Markdown has at most 100 characters");
}

#[test]
fn nothing_is_left_behind() {
    let marks = [
        "todo!(",
        "unimplemented!(",
        "dbg!(",
        "#[ignore",
        "FIXME",
        "XXX",
        "HACK",
    ];
    let mut broken = Broken::default();
    for text in texts(&["rs", "py", "hip", "h", "proto", "toml"]) {
        for (n, line) in text.lines() {
            if marks.iter().any(|mark| line.contains(mark)) {
                broken.at(&text, n, line);
            }
        }
    }
    broken.check("no placeholders and no tests that do not run");
}

#[test]
fn unsafe_code_stays_in_its_rooms() {
    let mut broken = Broken::default();
    for text in texts(&["rs"]).iter().filter(|text| !text.is_below(&UNSAFE)) {
        for (n, line) in text.lines().filter(|(_, line)| has_unsafe(line)) {
            broken.at(text, n, line);
        }
    }
    broken.check("unsafe is for the mapped files, the device backends and the SIMD kernels only");
}

/// The directory of the package that a source file belongs to.
fn package(path: &str) -> &str {
    path.rsplit_once("src/").map_or("", |(package, _)| package)
}

#[test]
fn crates_without_unsafe_forbid_it() {
    let mut broken = Broken::default();
    let roots =
        |text: &&Text| text.path.ends_with("src/lib.rs") || text.path.ends_with("src/main.rs");
    for text in texts(&["rs"]).iter().filter(roots) {
        let own = package(&text.path);
        let may = UNSAFE.iter().any(|place| package(place) == own);
        if !may && !text.content.contains("#![forbid(unsafe_code)]") {
            broken.at(text, 1, "has no #![forbid(unsafe_code)]");
        }
    }
    broken.check("a crate that needs no unsafe forbids it");
}

#[test]
fn every_unsafe_block_says_why_it_is_sound() {
    let mut broken = Broken::default();
    for text in texts(&["rs"]) {
        let lines: Vec<&str> = text.content.lines().collect();
        for (at, line) in lines.iter().enumerate() {
            let code = code(line);
            if !code.contains("unsafe {") && !code.contains("unsafe impl") {
                continue;
            }
            let above = &lines[at.saturating_sub(SAFETY_LINES_ABOVE)..=at];
            if !above.iter().any(|line| line.contains("SAFETY:")) {
                broken.at(&text, at + 1, line);
            }
        }
    }
    broken.check("an unsafe block has a // SAFETY: comment close above");
}

#[test]
fn exceptions_to_lints_have_a_reason() {
    let mut broken = Broken::default();
    for text in texts(&["rs"]) {
        for start in ["#[allow(", "#[expect(", "#![allow(", "#![expect("] {
            for (at, _) in text.content.match_indices(start) {
                let rest = &text.content[at..];
                let attribute = &rest[..rest.find(")]").unwrap_or(rest.len())];
                if !attribute.contains("reason = ") {
                    let line = text.content[..at].lines().count().max(1);
                    broken.at(&text, line, attribute);
                }
            }
        }
    }
    broken.check("an exception is #[expect(lint, reason = \"...\")]");
}

#[test]
fn no_path_of_a_developer_is_left() {
    let paths = ["/work/", "/home/", "/root/", "/Users/"];
    let mut broken = Broken::default();
    for text in texts(&[
        "rs", "py", "toml", "md", "proto", "service", "socket", "conf", "hip", "h", "yml",
    ]) {
        for (n, line) in text.lines() {
            if paths.iter().any(|path| line.contains(path)) {
                broken.at(&text, n, line);
            }
        }
    }
    broken.check("paths are relative, or a user's choice");
}

#[test]
fn the_cache_and_the_scheduler_decide_without_clock_thread_or_file() {
    let impure = [
        "std::time",
        "std::thread",
        "std::fs",
        "std::net",
        "std::env",
        "std::process",
        "std::sync",
        "Instant",
        "tokio",
        "*const",
        "*mut",
    ];
    let mut broken = Broken::default();
    let pure = |text: &&Text| text.is_below(&PURE);
    for text in texts(&["rs"]).iter().filter(pure) {
        for (n, line) in text.lines() {
            if impure.iter().any(|word| code(line).contains(word)) {
                broken.at(text, n, line);
            }
        }
    }
    broken.check("tensor-cache and scheduler are pure");
}

/// The command line is no part of the daemon, and looks at the same things of a machine.
#[test]
fn doctor_has_the_daemons_lists() {
    let list = |path: &str, name: &str| -> Vec<String> {
        let text = std::fs::read_to_string(fixtures::workspace().join(path)).expect("a source");
        let (_, list) = text.split_once(&format!("\nconst {name}: [")).expect(name);
        let (list, _) = list.split_once("];").expect("it ends");
        let (_, list) = list.split_once("= [").expect("it begins");
        let items: Vec<_> = list.split(',').map(|item| item.trim().to_owned()).collect();
        items.into_iter().filter(|item| !item.is_empty()).collect()
    };
    let driver = "daemon/crates/gpu-driver/src";
    let doctor = "client/ctl/src/doctor";
    let targets = list(&format!("{driver}/sysfs.rs"), "APU_TARGETS");
    assert!(targets.len() > 9, "{targets:?}");
    assert_eq!(
        list(&format!("{doctor}/machine.rs"), "APU_TARGETS"),
        targets
    );
    let variables = list(&format!("{driver}/environment.rs"), "HIP");
    assert_eq!(
        list(&format!("{doctor}/environment.rs"), "VARIABLES"),
        variables
    );
}

#[test]
fn wire_types_stay_in_the_rpc_layer() {
    let mut broken = Broken::default();
    for text in texts(&["rs"])
        .iter()
        .filter(|text| !text.is_below(&WIRE_TYPES))
    {
        for (n, line) in text.lines() {
            let code = code(line);
            if code.contains("rocmforge_proto") || code.contains("prost::") {
                broken.at(text, n, line);
            }
        }
    }
    broken.check("wire types never leave daemon/crates/grpc");
}

#[test]
fn modules_are_named_for_what_they_hold() {
    let vague = [
        "utils", "util", "manager", "helper", "helpers", "misc", "common",
    ];
    let mut broken = Broken::default();
    for text in texts(&["rs", "py"]) {
        let parts = text
            .path
            .trim_end_matches(".rs")
            .trim_end_matches(".py")
            .split('/');
        if parts.into_iter().any(|part| vague.contains(&part)) {
            broken.at(&text, 1, "a name that says nothing");
        }
    }
    broken.check("names are the field's own words");
}

/// Names of other projects and formats.
const NAMES_OF_OTHERS: [&str; 6] = [
    "bytes_to_unicode",
    "ggml_rope_ext",
    "gguf_metadata_kv_t",
    "gguf_metadata_value_t",
    "gguf_tensor_info_t",
    "llama_pooling_type",
];

/// The parts of a line of prose in backticks that are names of several words:
/// `a_b_c`, also behind a path.
fn long_names(prose: &str) -> impl Iterator<Item = &str> {
    let quoted = prose.split('`').skip(1).step_by(2);
    let names = quoted.map(|q| q.rsplit("::").next().unwrap_or(q));
    names.filter(|name| {
        let lower = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        name.trim_matches('_').matches('_').count() >= 2
            && !name.starts_with('_')
            && name.chars().all(lower)
    })
}

#[test]
fn what_comments_name_exists() {
    let is_comment = |line: &str| line.trim_start().starts_with("//");
    let mut known: std::collections::HashSet<String> =
        NAMES_OF_OTHERS.map(str::to_owned).into_iter().collect();
    // These tests themselves are in none of the texts.
    let own = concat!(include_str!("main.rs"), include_str!("docs.rs")).lines();
    known.extend(
        own.filter_map(|line| Some(line.strip_prefix("fn ")?.split('(').next()?.to_owned())),
    );
    for text in texts(&["rs", "py", "hip", "h", "proto", "toml", "txt"]) {
        for (_, line) in text.lines().filter(|(_, line)| !is_comment(line)) {
            let words = line.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            known.extend(words.filter(|w| w.contains('_')).map(str::to_owned));
        }
    }
    let mut broken = Broken::default();
    for text in texts(&["rs", "md"]) {
        let of_today = !text.path.contains("/results/") && text.path != "CHANGELOG.md";
        let prose = |line: &str| of_today && (text.path.ends_with(".md") || is_comment(line));
        for (n, line) in text.lines().filter(|(_, line)| prose(line)) {
            if long_names(line).any(|name| !known.contains(name)) {
                broken.at(&text, n, line);
            }
        }
    }
    broken.check("tests, functions and fields that comments name are there");
}

#[test]
fn whitespace_is_plain() {
    let mut broken = Broken::default();
    for text in texts(&[
        "rs", "py", "toml", "md", "proto", "service", "socket", "conf", "hip", "h",
    ]) {
        for (n, line) in text.lines() {
            // An escaped tab in a string is two characters and passes.
            if line.contains('\t') || line.ends_with(' ') || line.ends_with('\r') {
                broken.at(&text, n, line);
            }
        }
        if !text.content.is_empty() && !text.content.ends_with('\n') {
            broken.at(&text, text.content.lines().count(), "no newline at the end");
        }
    }
    broken.check("no tab, no space at a line's end, no carriage return, a newline at the end");
}

/// Tests rest on these very bytes: tests/fixtures/SHA256SUMS has them as `sha256sum` prints them.
#[test]
fn fixtures_are_as_they_were_committed() {
    let (dir, mut paths) = (fixtures::dir(), Vec::new());
    collect(&dir, &mut paths);
    paths.retain(|path| path.file_name() != Some(SUMS.as_ref()));
    paths.sort();
    let mut found = String::new();
    for path in paths {
        let bytes = std::fs::read(&path).expect("a readable fixture");
        let name = path.strip_prefix(&dir).expect("below the fixtures");
        for byte in Sha256::digest(&bytes) {
            let _ = write!(found, "{byte:02x}");
        }
        let _ = writeln!(found, "  {}", name.display());
    }
    let sums = std::fs::read_to_string(dir.join(SUMS)).expect("the sums are there");
    assert_eq!(
        sums, found,
        "tests/fixtures/SHA256SUMS (left) against the files: a fixture that is new or was changed \
         on purpose goes into it, `cd tests/fixtures && sha256sum $(git ls-files | grep -v {SUMS})`"
    );
}

/// The crates with what they depend on of ours, as ARCHITECTURE.md's table has
/// them and as Cargo has them.
#[test]
fn the_table_of_crates_is_true() {
    let root = fixtures::workspace();
    let text =
        std::fs::read_to_string(root.join("ARCHITECTURE.md")).expect("ARCHITECTURE.md is there");
    let mut table = std::collections::BTreeMap::new();
    for line in text.lines().filter(|l| l.starts_with("| rocmforge")) {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, name, _, _, known, _] = cells[..] else {
            panic!("a row of another number of columns: {line}");
        };
        let known = known.split(", ").filter(|k| *k != "nothing");
        let known: Vec<String> = known.map(|k| format!("rocmforge-{k}")).collect();
        table.insert(name.to_owned(), known);
    }
    let cargo = std::process::Command::new(env!("CARGO"))
        .args([
            "metadata",
            "--no-deps",
            "--offline",
            "--format-version",
            "1",
        ])
        .current_dir(&root)
        .output()
        .expect("cargo runs");
    let metadata: serde_json::Value =
        serde_json::from_slice(&cargo.stdout).expect("cargo metadata prints JSON");
    let packages = metadata["packages"].as_array().expect("packages");
    let name = |p: &serde_json::Value| p["name"].as_str().unwrap_or_default().to_owned();
    let ours: Vec<String> = packages.iter().map(&name).collect();
    let mut found = std::collections::BTreeMap::new();
    for package in packages {
        let dependencies = package["dependencies"].as_array().expect("dependencies");
        let mut known: Vec<String> = dependencies
            .iter()
            .filter(|d| d["kind"].is_null())
            .map(&name)
            .filter(|d| ours.contains(d))
            .collect();
        known.sort();
        found.insert(name(package), known);
    }
    assert_eq!(
        table, found,
        "ARCHITECTURE.md's table of crates (left) against cargo metadata"
    );
}

/// Clippy's `await_holding_lock` does not know locks that are awaited: there are none.
#[test]
fn no_lock_is_held_across_an_await() {
    let mut broken = Broken::default();
    for text in texts(&["rs"]).iter().filter(|t| t.is_below(&["daemon/"])) {
        for (n, line) in text.lines() {
            let locks = ["tokio::sync::Mutex", ".lock().await", ".write().await"];
            if locks.iter().any(|lock| code(line).contains(lock)) {
                broken.at(text, n, line);
            }
        }
    }
    broken.check("no lock is held across an await");
}
