//! Where tests lie: one program a folder, and no file that nothing compiles.

use std::path::Path;

use super::texts::{Broken, texts};

/// The folders of tests whose `main.rs` has the other files as its modules.
fn programs() -> Vec<(String, String)> {
    texts(&["rs"])
        .into_iter()
        .filter(|text| text.path.ends_with("tests/main.rs") && !text.path.contains("/src/"))
        .map(|text| (text.path.replace("/main.rs", "/"), text.content))
        .collect()
}

#[test]
fn every_test_file_is_a_module_or_a_program_of_the_manifest() {
    let files = texts(&["rs"]);
    let manifests = texts(&["toml"]);
    let programs = programs();
    assert!(programs.len() > 5, "{} programs", programs.len());
    let mut broken = Broken::default();
    for (folder, main) in &programs {
        let package = folder.strip_suffix("tests/").expect("a folder of tests");
        let manifest = format!("{package}Cargo.toml");
        let manifest = manifests.iter().find(|text| text.path == manifest);
        let manifest = &manifest.expect("a package has a manifest").content;
        for file in files.iter().filter(|file| file.path.starts_with(folder)) {
            let name = &file.path[folder.len()..];
            let module = match name.split_once('/') {
                Some((folder, "mod.rs")) => folder,
                Some(_) => continue,
                None => Path::new(name)
                    .file_stem()
                    .and_then(|stem| stem.to_str())
                    .expect("a name in ASCII"),
            };
            let is_module = main.contains(&format!("mod {module};"));
            let is_program = manifest.contains(&format!("\"tests/{name}\""));
            if !is_module && !is_program {
                broken.at(file, 1, "nothing compiles it");
            }
        }
    }
    broken.check(
        "a test's file is a module of its folder's main.rs, or, where it needs a process of its \
         own, a [[test]] of the package's manifest",
    );
}

/// The languages of the blocks of code in the documentation of `content`, each with its line.
fn languages(content: &str) -> Vec<(usize, &str)> {
    let (mut languages, mut is_inside) = (Vec::new(), false);
    for (line, text) in content.lines().enumerate() {
        let text = text.trim_start();
        let text = text.strip_prefix("///").or(text.strip_prefix("//!"));
        let Some(language) = text.and_then(|text| text.trim_start().strip_prefix("```")) else {
            continue;
        };
        is_inside = !is_inside;
        if is_inside {
            languages.push((line + 1, language.trim()));
        }
    }
    languages
}

/// The folders of sources of the packages whose manifests have this line.
fn sources_with(line: &str) -> Vec<String> {
    let manifests = texts(&["toml"]);
    let having = manifests
        .iter()
        .filter(|text| text.path.ends_with("/Cargo.toml") && text.content.contains(line));
    having
        .map(|text| text.path.replace("Cargo.toml", "src/"))
        .collect()
}

#[test]
fn an_example_in_the_documentation_is_compiled() {
    let found =
        languages("/// ```text\n/// a\n/// ```\n\n    //! ```\n    //! b();\n    //! ```\n");
    assert_eq!(found, [(1, "text"), (5, "")]);
    let folders = sources_with("\ndoctest = false\n");
    assert!(folders.len() > 10, "{folders:?}");
    let mut broken = Broken::default();
    for file in texts(&["rs"]) {
        if !folders.iter().any(|folder| file.path.starts_with(folder)) {
            continue;
        }
        for (line, language) in languages(&file.content) {
            if matches!(
                language,
                "" | "rust" | "no_run" | "should_panic" | "compile_fail"
            ) {
                broken.at(&file, line, "nothing compiles this example");
            }
        }
    }
    broken.check(
        "a package whose documentation has examples in Rust does not set `doctest = false`, which \
         saves the others a build of their documentation; what is no Rust has a language, such as \
         `text`",
    );
}

#[test]
fn a_library_without_a_test_program_has_no_tests() {
    // Packages whose library is tested from outside alone.
    let folders = sources_with("[lib]\ntest = false\n");
    let others = sources_with("[lib]\ndoctest = false\ntest = false\n");
    let folders = [folders, others].concat();
    assert!(folders.len() > 2, "{folders:?}");
    let mut broken = Broken::default();
    for file in texts(&["rs"]) {
        if !folders.iter().any(|folder| file.path.starts_with(folder)) {
            continue;
        }
        for (line, text) in file.lines() {
            if text.contains("cfg(test)") {
                broken.at(&file, line, "nothing runs these tests");
            }
        }
    }
    broken.check("a package whose library has tests does not set `test = false` for it");
}
