//! The commands as a user runs them, on the smallest model.

use std::process::{Command, Output};

fn bench(args: &[&str]) -> Output {
    let output = Command::new(env!("CARGO_BIN_EXE_rocmforge-bench"))
        .args(args)
        .output()
        .expect("the binary starts");
    println!("{}", String::from_utf8_lossy(&output.stderr));
    output
}

fn table(args: &[&str]) -> serde_json::Value {
    let output = bench(args);
    assert!(output.status.success(), "{args:?}");
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

/// The median of the first row whose figure begins with `figure`.
fn median(report: &serde_json::Value, figure: &str) -> f64 {
    let rows = report["rows"].as_array().expect("rows");
    let named = |row: &&serde_json::Value| {
        row["figure"]
            .as_str()
            .is_some_and(|f| f.starts_with(figure))
    };
    let row = rows.iter().find(named);
    let median = row.and_then(|row| row["median"].as_f64());
    median.unwrap_or_else(|| panic!("no {figure} in {report}"))
}

#[test]
fn every_command_runs_on_a_mini_model() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().to_str().unwrap();
    let types = "--types=f16,q8_0,q4_0,q4_k_m,q6_k";
    let host = table(&[
        "host",
        "--presets=mini",
        types,
        "--runs=1",
        "--threads=2",
        "--json",
        "--dir",
        at,
    ]);
    assert_eq!(host["device"], "host");
    assert_eq!(host["rows"].as_array().unwrap().len(), 5 * 6);
    assert!(median(&host, "decode") > 0.0);

    let stream = table(&[
        "stream",
        "--preset=mini",
        "--shares=100,95,1",
        "--runs=1",
        "--threads=2",
        "--json",
        "--dir",
        at,
    ]);
    assert_eq!(median(&stream, "uploaded, 100 %"), 0.0);
    assert!(median(&stream, "uploaded, 95 %") > 0.0);
    // A budget that nothing runs in is raised to the largest segment, which
    // here is most of the model.
    assert_eq!(stream["rows"].as_array().map(Vec::len), Some(9));

    let swap = table(&[
        "swap",
        "--preset=mini",
        "--requests=2",
        "--threads=2",
        "--json",
        "--dir",
        at,
    ]);
    assert!(median(&swap, "reloaded") < 100.0);
}

#[test]
fn a_table_is_markdown_and_errors_name_their_option() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().to_str().unwrap();
    let options = [
        "host",
        "--presets=mini",
        "--types=q8_0",
        "--runs=1",
        "--dir",
        at,
    ];
    let output = bench(&options);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("; commit "), "{text}");
    assert!(text.contains("| mini q8_0 | decode 32 |"), "{text}");

    let missing = bench(&["host", "--compare", "no/such/llama-bench"]);
    assert_eq!(missing.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&missing.stderr).contains("--compare no/such/llama-bench"));
    let wrong = bench(&["model", "mini", "q9_9", "out.gguf"]);
    assert_eq!(wrong.status.code(), Some(2));
}
