//! How long the product's functions are. Clippy denies more than 100 lines; of more than 70 there
//! are few: flat tables of one arm or one line a case.

use std::fmt::Write as _;

use super::texts::{Text, texts};

/// Lines of code above which a function is long, as clippy's `too_many_lines` counts them.
const LINES_MAX: usize = 70;

/// Most long functions. A new one is split where a step of it has a name; where fewer are left,
/// lower this number.
const LONG_MAX: usize = 22;

/// What users run: the daemon with the self-test of its kernels, and the command line.
const PRODUCT: [&str; 3] = ["client/", "daemon/", "kernels/"];

/// Whether a file is compiled into what users run.
fn is_product(path: &str) -> bool {
    let Some((_, file)) = path.split_once("/src/") else {
        return false;
    };
    let is_test =
        file.ends_with("tests.rs") || file.contains("tests/") || file.ends_with("schema/cases.rs");
    PRODUCT.iter().any(|place| path.starts_with(place)) && !is_test
}

/// The name of the function whose declaration begins on a line.
fn declared(line: &str) -> Option<&str> {
    let mut words = line.trim_start().split(' ');
    let is_before = |word: &str| {
        matches!(word, "const" | "async" | "unsafe" | "extern" | "\"C\"") || word.starts_with("pub")
    };
    let word = words.find(|word| !is_before(word) && !word.ends_with(')'))?;
    let name = words.next().filter(|_| word == "fn")?;
    name.split(['(', '<']).next()
}

/// The functions of formatted code with more lines of code than `max`: their lines of code, where
/// they begin, and their names. A body ends at the brace below the beginning of its declaration.
fn longer(content: &str, max: usize) -> Vec<(usize, usize, &str)> {
    let product = content.split("\n#[cfg(test)]\nmod tests {").next();
    let lines: Vec<&str> = product.unwrap_or_default().lines().collect();
    let mut found = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let Some(name) = declared(line) else {
            continue;
        };
        let opens = |line: &&str| line.ends_with(['{', ';', '}']);
        let Some(head) = lines[at..].iter().position(opens) else {
            continue;
        };
        if !lines[at + head].ends_with('{') {
            continue;
        }
        let indent = line.len() - line.trim_start().len();
        let end = format!("{}}}", &line[..indent]);
        let body = lines[at + head + 1..].iter();
        let body = body.take_while(|line| **line != end);
        let is_code = |line: &&&str| {
            let code = line.trim_start();
            !code.is_empty() && !code.starts_with("//")
        };
        let n = body.filter(is_code).count();
        if n > max {
            found.push((n, at + 1, name));
        }
    }
    found
}

#[test]
fn few_functions_are_long() {
    let product: Vec<Text> = texts(&["rs"])
        .into_iter()
        .filter(|text| is_product(&text.path))
        .collect();
    assert!(product.len() > 300, "{} files", product.len());
    let mut long = Vec::new();
    for text in &product {
        let found = longer(&text.content, LINES_MAX).into_iter();
        long.extend(found.map(|(n, at, name)| (n, format!("{}:{at} {name}", text.path))));
    }
    long.sort_by(|a, b| b.cmp(a));
    let listed = long.iter().fold(String::new(), |mut all, (n, place)| {
        let _ = writeln!(all, "{n} {place}");
        all
    });
    assert!(
        long.len() <= LONG_MAX,
        "{} functions have more than {LINES_MAX} lines of code, where {LONG_MAX} may; split what \
         has a step with a name:\n{listed}",
        long.len(),
    );
}

#[test]
fn the_lines_of_a_function_are_counted_without_comments_and_tests() {
    let code = "\
impl A {
    /// Says.
    pub(crate) async fn first<T>(
        a: T,
    ) -> T {
        // Why.

        if a {
            b
        }
    }

    fn declared(&self);

    const fn second() -> u32 { 1 }
}

unsafe extern \"C\" fn third() {
    1
}

#[cfg(test)]
mod tests {
    fn fourth() {
        1
    }
}
";
    assert_eq!(longer(code, 0), [(3, 3, "first"), (1, 18, "third")]);
    assert_eq!(longer(code, 2), [(3, 3, "first")]);
    assert_eq!(longer(code, 3), []);
    assert!(is_product("daemon/crates/engine/src/actor/run.rs"));
    for path in [
        "daemon/crates/engine/tests/many.rs",
        "daemon/benches/rpc.rs",
        "daemon/crates/gguf/src/parse/tests.rs",
        "tests/bench/src/main.rs",
    ] {
        assert!(!is_product(path), "{path}");
    }
}
