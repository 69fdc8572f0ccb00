//! Small models of every architecture, encoders and vision towers against what their authors' own
//! code computed in float32.

mod encoders;
mod images;

use std::path::{Path, PathBuf};
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

/// What was compared with a golden, in units of what is tolerated.
#[derive(Debug, Default)]
struct Compared {
    worst: f32,
    values: usize,
    off: usize,
}

impl Compared {
    /// A value that differs so much from the golden's.
    ///
    /// # Errors
    /// It is NaN.
    fn note(&mut self, difference: f32, tolerance: f32) -> Result<()> {
        ensure!(!difference.is_nan(), "a value is NaN");
        self.worst = self.worst.max(difference / tolerance);
        self.values += 1;
        self.off += usize::from(difference > tolerance);
        Ok(())
    }
}

/// Compares all models of the fixtures, those of a folder in one line.
pub(super) fn run(
    bench: &Bench,
    fixtures: Result<PathBuf, String>,
    check: &mut Check,
) -> Result<()> {
    let fixtures = fixtures.map_err(anyhow::Error::msg)?;
    type Compare = fn(&Bench, &Path) -> Result<Compared>;
    let folders: [(&str, Compare); 3] = [
        ("arch", compare),
        ("encoders", encoders::compare),
        ("images", images::compare),
    ];
    for (folder, compare) in folders {
        folder_of(&fixtures.join(folder), &|path| compare(bench, path), check)?;
    }
    Ok(())
}

fn folder_of(
    dir: &Path,
    compare: &dyn Fn(&Path) -> Result<Compared>,
    check: &mut Check,
) -> Result<()> {
    let mut files: Vec<_> = std::fs::read_dir(dir)
        .with_context(|| dir.display().to_string())?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|e| e == "gguf"))
        .collect();
    files.sort();
    ensure!(!files.is_empty(), "no models in {}", dir.display());
    let mut wrong = Vec::new();
    for path in &files {
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        match compare(path) {
            Ok(Compared { worst, values, off }) => {
                let line = format!(
                    "{name}: {worst:.3} of the tolerance at most, {off} of {values} values beyond"
                );
                eprintln!("{line}");
                if off > 0 || values == 0 {
                    wrong.push(line);
                }
            }
            Err(error) => wrong.push(format!("{name}: {error:#}")),
        }
    }
    let right = files.len() - wrong.len();
    let folder = dir.file_name().unwrap_or_default().to_string_lossy();
    check.note(format!(
        "{folder}: {right} of {} models within the tolerance",
        files.len()
    ));
    wrong.into_iter().for_each(|one| check.fail(one));
    Ok(())
}

/// Compares a model's log-probabilities.
fn compare(bench: &Bench, path: &Path) -> Result<Compared> {
    let golden: Golden = serde_json::from_slice(&std::fs::read(path.with_extension("json"))?)?;
    let session = Session::start_within(bench.device, ROOM)?;
    let model = session.register("golden", path)?;
    let mut compared = Compared::default();
    for case in golden.cases {
        let request = ScoreRequest {
            model: Arc::clone(&model),
            ids: case.ids,
            top_n: 0,
            deadline: None,
            asker: Asker::default(),
            adapters: None,
        };
        let scores = session.score(request)?;
        ensure!(
            scores.tokens.len() == case.next_logprobs.len(),
            "another number of scores"
        );
        for (found, expected) in scores.tokens.iter().zip(&case.next_logprobs) {
            compared.note((found.logprob - expected).abs(), TOLERANCE)?;
        }
    }
    drop(model);
    session.end()?;
    Ok(compared)
}
