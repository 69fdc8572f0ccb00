//! Encoders: vectors of length 1 in each pooling, and the logits of pairs.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, ensure};
use rocmforge_engine::LoadedModel;
use rocmforge_engine::api::{Asker, EmbedRequest, Pooling};
use serde::Deserialize;

use super::{Compared, ROOM};
use crate::gpu::Bench;
use crate::session::Session;

/// Largest difference of a component of a vector of length 1.
const TOLERANCE: f32 = 2e-3;
/// Largest difference of a logit.
const TOLERANCE_LOGIT: f32 = 0.01;

/// A text and its vectors.
#[derive(Debug, Deserialize)]
struct Case {
    ids: Vec<u32>,
    mean: Vec<f32>,
    first: Vec<f32>,
    last: Vec<f32>,
}

/// A question with a text, and how well it answers.
#[derive(Debug, Deserialize)]
struct Pair {
    ids: Vec<u32>,
    logits: Vec<f32>,
}

#[derive(Debug, Deserialize)]
struct Golden {
    cases: Vec<Case>,
    pairs: Vec<Pair>,
}

/// Compares an encoder.
pub(super) fn compare(bench: &Bench, path: &Path) -> Result<Compared> {
    let golden: Golden = serde_json::from_slice(&std::fs::read(path.with_extension("json"))?)?;
    let session = Session::start_within(bench.device, ROOM)?;
    let model = session.register("golden", path)?;
    let mut compared = Compared::default();
    for case in golden.cases {
        let poolings = [
            (Pooling::Mean, case.mean),
            (Pooling::First, case.first),
            (Pooling::Last, case.last),
        ];
        for (pooling, expected) in poolings {
            let found = values(&session, &model, &case.ids, pooling, false)?;
            let length = found.iter().map(|v| v * v).sum::<f32>().sqrt();
            let found: Vec<f32> = found.iter().map(|v| v / length).collect();
            note(&mut compared, &found, &expected, TOLERANCE)?;
        }
    }
    let pooling = match model.model().hparams().arch {
        "modern-bert" => Pooling::Mean,
        _ => Pooling::First,
    };
    for pair in golden.pairs {
        let found = values(&session, &model, &pair.ids, pooling, true)?;
        note(&mut compared, &found, &pair.logits, TOLERANCE_LOGIT)?;
    }
    drop(model);
    session.end()?;
    Ok(compared)
}

fn values(
    session: &Session,
    model: &Arc<LoadedModel>,
    ids: &[u32],
    pooling: Pooling,
    classes: bool,
) -> Result<Vec<f32>> {
    let request = EmbedRequest {
        model: Arc::clone(model),
        ids: ids.to_vec(),
        pooling,
        classes,
        deadline: None,
        asker: Asker::default(),
        adapters: None,
    };
    let embedding = session.block_on(async |engine| engine.embed(request).await)?;
    Ok(embedding.values)
}

fn note(compared: &mut Compared, found: &[f32], expected: &[f32], tolerance: f32) -> Result<()> {
    ensure!(found.len() == expected.len(), "another number of values");
    for (found, expected) in found.iter().zip(expected) {
        compared.note((found - expected).abs(), tolerance)?;
    }
    Ok(())
}
