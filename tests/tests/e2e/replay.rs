//! Traces in the shape of agents', replayed by `rocmforge-bench replay` against a daemon: what of
//! their prompts is computed, for each kind of layers.

use std::path::Path;
use std::process::Command;

use rocmforge_tests::binaries;
use rocmforge_tests::daemon::{Daemon, Options};
use serde_json::Value;

/// Tokens of a page.
const PAGE: u64 = 32;

/// Tokens between two states that are kept in instructions on a CPU, at most.
const BETWEEN_STATES: u64 = 8 * PAGE;

/// Layers that see all positions; three of four with a state; every other one with a window.
const MODELS: [&str; 3] = ["mini", "mini-linear", "mini-oss"];

fn bench(arguments: &[&str]) -> Vec<u8> {
    let mut command = Command::new(binaries::rocmforge_bench());
    let output = command.args(arguments).output().expect("it starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {said}");
    println!("{arguments:?}\n{said}");
    output.stdout
}

/// A daemon with the models.
fn daemon(dir: &Path) -> Daemon {
    for model in MODELS {
        let file = dir.join(format!("{model}.gguf"));
        bench(&["model", model, "q4_0", file.to_str().expect("plain")]);
    }
    let options = Options::default().only_model_dir(dir).http();
    Daemon::start(&options.vram_budget(2 << 30))
}

fn replay(daemon: &Daemon, model: &str, shape: &str, more: &[&str]) -> Value {
    let url = daemon.url();
    let fixed = [
        "replay", "--json", "--url", &url, "--model", model, "--shape", shape, "--output", "2",
    ];
    let found = bench(&[&fixed, more].concat());
    let found = serde_json::from_slice(&found).expect("one JSON object");
    println!("{model} {shape}: {found}");
    found
}

fn count(of: &Value, name: &str) -> u64 {
    of[name]
        .as_u64()
        .unwrap_or_else(|| panic!("no {name}: {of}"))
}

/// Each token of a prompt is computed once, but for those that share no full page. Layers with
/// states or windows go on from where what they need was kept: up to two pages are computed again
/// behind it, and where subagents have a part of others' instructions, the first of them computes
/// less of that part than lies between two states.
#[test]
fn agents_compute_what_is_new() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let daemon = daemon(dir.path());
    for model in MODELS {
        // Other words for each, so that none finds what another one left.
        for (shape, seed) in [("messages", "1"), ("responses", "2"), ("chat", "3")] {
            let small = ["--scale", "0.04", "--turns", "3", "--together", "4"];
            let small = [&small[..], &["--seed", seed]].concat();
            let found = replay(&daemon, model, shape, &small);
            let all = &found["all"];
            let (computed, floor) = (count(all, "computed_tokens"), count(all, "floor_tokens"));
            let behind = 2 * PAGE * count(all, "requests");
            let slack = match (model, shape) {
                // Those that begin together may do so in another order than the trace has.
                ("mini", _) => 4 * PAGE,
                (_, "chat") => behind + BETWEEN_STATES,
                _ => behind,
            };
            let most = floor + slack;
            assert!(computed <= most, "{model} {shape}: {computed}, not {most}");
            // Not all of it was there before.
            assert!(
                computed > count(&found, "distinct_tokens") / 2,
                "{model} {shape}: {computed}"
            );
        }
    }
    daemon.stop();
}

/// Tokens of one prompt of a group.
fn first_of(group: &Value) -> u64 {
    count(group, "prompt_tokens") / count(group, "requests")
}

/// Of those that begin together on one long prompt, one computes it.
#[test]
fn a_fleet_computes_its_prompt_once() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let daemon = daemon(dir.path());
    let small = ["--scale", "0.03", "--together", "32"];
    let found = replay(&daemon, "mini", "fleet", &small);
    let together = &found["groups"]["together"];
    let computed = count(together, "computed_tokens");
    assert_eq!(count(together, "requests"), 32);
    assert_eq!(computed, count(together, "floor_tokens"), "{found}");
    // The other 31 compute their questions alone.
    let prompt = first_of(together);
    assert!(prompt > 20 * PAGE, "a long prompt: {found}");
    assert!(computed < prompt + 31 * 4 * PAGE, "{found}");
    daemon.stop();
}
