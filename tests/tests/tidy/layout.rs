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
