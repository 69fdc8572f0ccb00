//! Small models of every architecture against log-probabilities that their authors' own
//! code computed in float32.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use rocmforge_engine::api::{Asker, ScoreRequest};
use serde::Deserialize;

use super::Bench;
use crate::check::Check;
use crate::session::Session;

/// Largest difference of a log-probability on a file of F16, as on the host.
const TOLERANCE: f32 = 0.02;

/// Memory beside the weights for KV, scratch and what the device keeps for itself.
const ROOM: u64 = 48 << 20;

/// A sequence and what is right.
#[derive(Debug, Deserialize)]
struct Case {
    ids: Vec<u32>,
    next_logprobs: Vec<f32>,
}

#[derive(Debug, Deserialize)]
struct Golden {
    cases: Vec<Case>,
}

/// Compares all models of a folder's `arch`, each in one line.
pub(super) fn run(
    bench: &Bench,
    fixtures: Result<std::path::PathBuf, String>,
    check: &mut Check,
) -> Result<()> {
    let dir = fixtures.map_err(anyhow::Error::msg)?.join("arch");
    let mut files: Vec<_> = std::fs::read_dir(&dir)
        .with_context(|| dir.display().to_string())?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|e| e == "gguf"))
        .collect();
    files.sort();
    ensure!(!files.is_empty(), "no models in {}", dir.display());
    let mut wrong = Vec::new();
    for path in &files {
        let name = path
            .file_stem()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        match compare(bench, path) {
            Ok((worst, rows, off)) => {
                eprintln!("{name}: {worst:.4}, {off} of {rows} rows beyond {TOLERANCE}");
                let line = format!("{name} {worst:.3} ({off} of {rows} rows)");
                if off > 0 {
                    wrong.push(line);
                }
            }
            Err(error) => wrong.push(format!("{name}: {error:#}")),
        }
    }
    let right = files.len() - wrong.len();
    check.note(format!(
        "{right} of {} models within {TOLERANCE}",
        files.len()
    ));
    wrong.into_iter().for_each(|one| check.fail(one));
    Ok(())
}

/// The largest difference of a model's log-probabilities, the rows compared, and
/// those beyond the tolerance.
fn compare(bench: &Bench, path: &Path) -> Result<(f32, usize, usize)> {
    let golden: Golden = serde_json::from_slice(&std::fs::read(path.with_extension("json"))?)?;
    let session = Session::start_within(bench.device, ROOM)?;
    let model = session.register("golden", path)?;
    let (mut worst, mut rows, mut off) = (0f32, 0, 0);
    for case in golden.cases {
        let request = ScoreRequest {
            model: Arc::clone(&model),
            ids: case.ids,
            top_n: 0,
            deadline: None,
            asker: Asker::default(),
        };
        let scores = session.score(request)?;
        ensure!(
            scores.tokens.len() == case.next_logprobs.len(),
            "another number of scores"
        );
        for (found, expected) in scores.tokens.iter().zip(&case.next_logprobs) {
            let difference = (found.logprob - expected).abs();
            ensure!(!difference.is_nan(), "a score is NaN");
            worst = worst.max(difference);
            rows += 1;
            off += usize::from(difference > TOLERANCE);
        }
    }
    drop(model);
    session.end()?;
    Ok((worst, rows, off))
}
