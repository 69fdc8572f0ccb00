//! Which modules import which: no long cycle in any crate, and what the engine's folders promise.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use super::code;
use super::texts::{Broken, Text, texts};

/// Most modules that may import each other in a cycle.
const CYCLE_MAX: usize = 3;

/// Crates whose longest cycle is longer than that, each with how many modules it has. It must not
/// grow; once it is short, its line goes.
const LONGER_CYCLES: [(&str, usize); 4] = [
    ("daemon/crates/device-cpu", 4),
    ("daemon/crates/device-gpu", 7),
    ("daemon/crates/gpu-driver", 4),
    ("tests/fake-hip", 6),
];

/// The engine's source.
const ENGINE: &str = "daemon/crates/engine/src/";

/// Most fields of `Engine`: a feature brings a value, and its state is in there.
const ENGINE_FIELDS_MAX: usize = 12;

/// Where the engine may read the time, each with the reason.
const CLOCKS: [&str; 3] = [
    // The clock itself.
    "clock.rs",
    // Threads of their own, which wait for files and have no engine.
    "guards/file_watch.rs",
    "model/fetcher.rs",
];

/// A text without its comments and without the tests at its end.
fn product(text: &Text) -> String {
    let product = text.content.split("#[cfg(test)]\nmod tests {").next();
    let lines = product.unwrap_or_default().lines().map(code);
    lines.fold(String::new(), |all, line| all + line + "\n")
}

/// The paths that an item of a `use` names, its braces written out, each with its ` as `.
fn written_out(item: &str) -> Vec<String> {
    let item = item.trim();
    let Some((before, list)) = item.split_once('{') else {
        return vec![item.to_owned()];
    };
    let mut paths = Vec::new();
    let (mut depth, mut from) = (0, 0);
    for (at, c) in list.char_indices() {
        match c {
            '{' => depth += 1,
            ',' | '}' if depth == 0 => {
                let inner = list[from..at].trim();
                if !inner.is_empty() {
                    let inner = written_out(inner);
                    paths.extend(inner.iter().map(|path| format!("{before}{path}")));
                }
                from = at + 1;
            }
            '}' => depth -= 1,
            _ => {}
        }
    }
    paths
}

/// The paths of a text that may lead into its crate.
#[derive(Debug, Default, PartialEq)]
struct Paths {
    /// Those that it uses.
    used: Vec<String>,
    /// Those that it hands on by `pub use`.
    handed_on: Vec<String>,
}

impl Paths {
    fn of(product: &str) -> Self {
        let mut paths = Self::default();
        // The text without its `use`.
        let mut rest = String::new();
        let mut from = 0;
        for (at, _) in product.match_indices("use ") {
            let line = product[..at].rfind('\n').map_or(0, |line| line + 1);
            let before = product[line..at].trim();
            let is_public = before == "pub" || before.starts_with("pub(");
            if at < from || !(before.is_empty() || is_public) {
                continue;
            }
            let item = product[at + 4..].split(';').next().unwrap_or_default();
            let written = written_out(&item.replace('\n', " "));
            rest += &product[from..line];
            from = at + 4 + item.len();
            match is_public {
                true => paths.handed_on.extend(written),
                false => paths.used.extend(written),
            }
        }
        rest += &product[from..];
        for start in ["crate::", "super::"] {
            for (at, _) in rest.match_indices(start) {
                let is_path = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
                let path = rest[at..].split(|c| !is_path(c)).next().unwrap_or_default();
                paths.used.push(path.trim_end_matches(':').to_owned());
            }
        }
        paths
    }
}

/// The modules of a crate by their paths, each with the paths in its text.
type Modules = BTreeMap<String, Paths>;

/// A module, and what is named of it.
type Named = (String, String);

/// What a path names, as far as that is of these modules; `None` of the crate's root, which only
/// hands on.
fn named(modules: &Modules, own: &str, path: &str) -> Option<Named> {
    let mut at: Vec<&str> = own.split("::").collect();
    let path = path.split(" as ").next().unwrap_or_default();
    let mut parts = path.split("::").map(str::trim).peekable();
    match parts.peek() {
        Some(&"crate") => {
            at.clear();
            parts.next();
        }
        Some(&"self") => drop(parts.next()),
        _ => {
            while parts.next_if_eq(&"super").is_some() {
                at.pop();
            }
        }
    }
    at.extend(parts);
    let module = |n: &usize| modules.contains_key(&at[..*n].join("::"));
    let n = (1..=at.len()).rev().find(module)?;
    let item = at.get(n).copied().unwrap_or_default();
    Some((at[..n].join("::"), item.to_owned()))
}

/// What modules import of each other. What a module hands on counts for those who use it, and as an
/// import of the module that it comes from.
fn imports(modules: &Modules) -> BTreeMap<String, BTreeSet<String>> {
    let mut handed_on: BTreeMap<Named, Named> = BTreeMap::new();
    for (own, paths) in modules {
        for path in &paths.handed_on {
            let name = path.rsplit(" as ").next().unwrap_or_default();
            let name = name.rsplit("::").next().unwrap_or_default().trim();
            let from = named(modules, own, path).filter(|(module, _)| module != own);
            if let Some(from) = from {
                handed_on.insert((own.clone(), name.to_owned()), from);
            }
        }
    }
    let origin = |own: &str, path: &str| {
        let mut found = named(modules, own, path)?;
        for _ in 0..8 {
            let Some(from) = handed_on.get(&found) else {
                break;
            };
            found = from.clone();
        }
        (found.0 != own).then_some(found.0)
    };
    let of = |(own, paths): (&String, &Paths)| {
        let imports = paths.used.iter().filter_map(|path| origin(own, path));
        (own.clone(), imports.collect())
    };
    modules.iter().map(of).collect()
}

/// The crates by their directories, without modules of tests, each with its imports.
fn crates() -> BTreeMap<String, BTreeMap<String, BTreeSet<String>>> {
    let mut crates: BTreeMap<String, Modules> = BTreeMap::new();
    for text in texts(&["rs"]) {
        let Some((name, file)) = text.path.split_once("/src/") else {
            continue;
        };
        let module = file.trim_end_matches(".rs").trim_end_matches("/mod");
        if module.ends_with("tests") || ["lib", "main"].contains(&module) {
            continue;
        }
        let modules = crates.entry(name.to_owned()).or_default();
        modules.insert(module.replace('/', "::"), Paths::of(&product(&text)));
    }
    let crates = crates.into_iter();
    crates
        .map(|(name, modules)| (name, imports(&modules)))
        .collect()
}

/// The modules that a module comes to by imports.
fn reached<'a>(
    imports: &'a BTreeMap<String, BTreeSet<String>>,
    from: &'a str,
) -> BTreeSet<&'a str> {
    let mut reached = BTreeSet::new();
    let mut next = vec![from];
    while let Some(module) = next.pop() {
        for import in &imports[module] {
            if reached.insert(import.as_str()) {
                next.push(import);
            }
        }
    }
    reached
}

/// The cycles of a crate: modules that all come to each other.
fn cycles(imports: &BTreeMap<String, BTreeSet<String>>) -> BTreeSet<Vec<&str>> {
    let reach: BTreeMap<&str, BTreeSet<&str>> = imports
        .keys()
        .map(|module| (module.as_str(), reached(imports, module)))
        .collect();
    let mut cycles = BTreeSet::new();
    for (module, reached) in &reach {
        let back = |other: &&str| reach[other].contains(module);
        let found: Vec<&str> = reached.iter().copied().filter(back).collect();
        if found.len() > 1 {
            cycles.insert(found);
        }
    }
    cycles
}

#[test]
fn no_crate_has_a_long_cycle_of_imports() {
    let mut long = String::new();
    for (name, imports) in crates() {
        let listed = LONGER_CYCLES.iter().find(|(listed, _)| *listed == name);
        let most = listed.map_or(CYCLE_MAX, |(_, modules)| *modules);
        for cycle in cycles(&imports) {
            if cycle.len() > most {
                let modules = cycle.join(", ");
                let _ = writeln!(long, "  {name}, {}: {modules}", cycle.len());
            }
        }
    }
    assert!(
        long.is_empty(),
        "modules import each other in a cycle of more than {CYCLE_MAX} (or than is listed): move \
         the shared types into a module that imports neither\n{long}"
    );
}

#[test]
fn cycles_of_imports_are_found() {
    let texts = [
        // A face that hands on what its file has.
        ("a", "mod b;\npub(crate) use b::{B, C as D};\n"),
        ("a::b", "use crate::c::{self, f};\n"),
        ("c", "fn f() { crate::e::g() }\n"),
        (
            "e",
            "use crate::a::{D};\nuse super::Face;\nlet reuse = 1;\n",
        ),
        ("f", "use crate::a::B;\n"),
    ];
    let texts = texts.map(|(name, text)| (name.to_owned(), Paths::of(text)));
    let imports = imports(&Modules::from(texts));
    let of = |module: &str| {
        imports[module]
            .iter()
            .map(String::as_str)
            .collect::<Vec<_>>()
    };
    assert_eq!(of("a"), Vec::<&str>::new());
    assert_eq!(of("a::b"), ["c"]);
    assert_eq!(of("c"), ["e"]);
    assert_eq!(of("e"), ["a::b"]);
    assert_eq!(of("f"), ["a::b"]);
    let found: Vec<Vec<&str>> = cycles(&imports).into_iter().collect();
    assert_eq!(found, [["a::b", "c", "e"]]);
    let nested = written_out("x::{y, z::{self, W as V}}");
    assert_eq!(nested, ["x::y", "x::z::self", "x::z::W as V"]);
}

/// Whether a line of code names the engine itself.
fn names_engine(line: &str) -> bool {
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    let mut words = code(line).split(|c: char| !is_name(c));
    words.any(|word| word == "Engine")
}

#[test]
fn only_the_actor_names_the_engine() {
    let mut broken = Broken::default();
    for text in texts(&["rs"]) {
        let Some(file) = text.path.strip_prefix(ENGINE) else {
            continue;
        };
        for (n, line) in text.lines() {
            if !file.starts_with("actor/") && names_engine(line) {
                broken.at(&text, n, line);
            }
        }
    }
    broken.check("a feature is given what it works with, not the engine (features/context.rs)");
}

#[test]
fn the_engine_has_few_fields() {
    let texts = texts(&["rs"]);
    let own = texts
        .iter()
        .find(|t| t.path == format!("{ENGINE}actor/engine.rs"));
    let own = own.expect("the engine's file");
    let fields = own.content.split("pub(crate) struct Engine {").nth(1);
    let fields = fields.and_then(|rest| rest.split("\n}").next());
    let fields = fields.expect("the engine's fields").lines().map(code);
    let fields: Vec<&str> = fields.filter(|line| line.contains(':')).collect();
    assert!(
        (1..=ENGINE_FIELDS_MAX).contains(&fields.len()),
        "the engine has {} fields and may have {ENGINE_FIELDS_MAX}: {fields:?}",
        fields.len()
    );
}

#[test]
fn the_engine_reads_one_clock() {
    let mut broken = Broken::default();
    for text in texts(&["rs"]) {
        let Some(file) = text.path.strip_prefix(ENGINE) else {
            continue;
        };
        let is_product = text.lines().take_while(|(_, line)| *line != "#[cfg(test)]");
        for (n, line) in is_product {
            let reads = ["Instant::now", ".elapsed()"];
            if !CLOCKS.contains(&file) && reads.iter().any(|r| code(line).contains(r)) {
                broken.at(&text, n, line);
            }
        }
    }
    broken.check("decisions get the time as an argument; what measures itself reads Store::clock");
}
