//! What a device must do, and what only some devices can do.

use super::texts::{Broken, texts};

/// Functions of public traits of a file that have a body, each with its line and the body's first
/// line.
fn with_bodies(content: &str) -> Vec<(usize, &str, &str)> {
    let (mut found, mut is_inside, mut name) = (Vec::new(), false, "");
    let lines: Vec<&str> = content.lines().collect();
    for (at, line) in lines.iter().enumerate() {
        is_inside = line.starts_with("pub trait ") || (is_inside && *line != "}");
        if let Some(declared) = line.strip_prefix("    fn ").filter(|_| is_inside) {
            name = declared.split(['(', '<']).next().unwrap_or_default();
        }
        // A body begins at the end of a declaration's first or last line.
        let is_head = line.starts_with("    fn ") || line.starts_with("    )");
        if is_inside && is_head && line.ends_with('{') {
            let body = lines.get(at + 1).map_or("", |body| body.trim());
            found.push((at + 1, name, body));
        }
    }
    found
}

#[test]
fn a_device_does_all_of_what_it_offers() {
    let content = "pub trait A {\n    fn a();\n    fn b(\n        c: u8,\n    ) -> u8 {\n        c\n    }\n}\n\
                   impl B {\n    fn d() {\n    }\n}\n";
    assert_eq!(with_bodies(content), [(5, "b", "c")]);
    let mut broken = Broken::default();
    for file in texts(&["rs"]) {
        if !file.path.starts_with("daemon/crates/device/src/") {
            continue;
        }
        for (line, name, body) in with_bodies(&file.content) {
            // The accessors, and a read of one buffer by that of several.
            if body != "None" && name != "read" {
                broken.at(&file, line, name);
            }
        }
    }
    broken.check(
        "what only some devices do is an interface with an accessor in `Device`, which is `None` \
         unless a device offers it; what callers do without is a function of `dyn Device`",
    );
}
