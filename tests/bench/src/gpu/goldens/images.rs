//! Vision towers: their rows of images, and log-probabilities behind prompts with images.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use rocmforge_engine::api::{Decoding, GenerateEvent, GenerateRequest, ImageSpan, PreparedImage};
use rocmforge_engine::{LoadedModel, prepare_reading_images};
use rocmforge_gguf::MappedFile;
use serde::Deserialize;

use super::{Compared, ROOM, TOLERANCE};
use crate::gpu::Bench;
use crate::session::{Session, greedy};

/// Largest difference of an element of a tower's row.
const TOLERANCE_ROWS: f32 = 2e-3;

/// An image as patches, and the tower's rows of it.
#[derive(Debug, Deserialize)]
struct Image {
    grid: [usize; 2],
    patches: Vec<f32>,
    rows: Vec<f32>,
}

/// The best tokens behind the first `rows` of a prompt, with their log-probabilities.
#[derive(Debug, Deserialize)]
struct End {
    rows: usize,
    best: Vec<(u32, f32)>,
}

/// A prompt with images.
#[derive(Debug, Deserialize)]
struct Case {
    images: Vec<usize>,
    ids: Vec<u32>,
    ends: Vec<End>,
}

#[derive(Debug, Deserialize)]
struct Golden {
    images: Vec<Image>,
    placeholder: u32,
    /// Side of the square of patches that becomes a token.
    #[serde(default = "usual_merge")]
    merge: usize,
    /// Tokens of the text between rows of an image.
    #[serde(default)]
    row_gap: usize,
    /// The model in `arch` that reads the images, if it is not the one of the projector's name.
    text_model: Option<String>,
    cases: Vec<Case>,
}

/// Qwen's.
fn usual_merge() -> usize {
    2
}

/// Compares a projector beside a model in `arch`.
pub(super) fn compare(bench: &Bench, projector: &Path) -> Result<Compared> {
    let stem = projector.file_stem().unwrap_or_default().to_string_lossy();
    let name = stem.strip_suffix("-mmproj");
    let name = name.context("a projector whose name does not end in -mmproj")?;
    let golden = std::fs::read(projector.with_file_name(format!("{name}.json")))?;
    let golden: Golden = serde_json::from_slice(&golden)?;
    let fixtures = projector.parent().and_then(Path::parent);
    let text = fixtures.context("a projector outside the fixtures")?;
    let text_model = golden.text_model.as_deref().unwrap_or(name);
    let text = text.join("arch").join(format!("{text_model}.gguf"));
    let session = Session::start_within(bench.device, ROOM)?;
    let (text, projector) = (MappedFile::open(&text)?, MappedFile::open(projector)?);
    let prepared = prepare_reading_images("golden", text, projector, &mut |_| {})?;
    let model = session.block_on(async |engine| engine.load(prepared).await)?;

    let mut compared = Compared::default();
    let mut images = Vec::new();
    for (number, image) in golden.images.into_iter().enumerate() {
        let prepared = Arc::new(PreparedImage {
            charge: Default::default(),
            grid: image.grid,
            merge: golden.merge,
            patches: image.patches,
            digest: [u8::try_from(number)?; 32],
        });
        let asked = Arc::clone(&prepared);
        let found = session.block_on(async |engine| engine.read_image(&model, asked).await)?;
        ensure!(found.len() == image.rows.len(), "another number of rows");
        for (found, expected) in found.iter().zip(&image.rows) {
            compared.note((found - expected).abs(), TOLERANCE_ROWS)?;
        }
        images.push(prepared);
    }
    for case in &golden.cases {
        for end in &case.ends {
            let ids = &case.ids[..end.rows];
            let spans = spans(&images, case, ids, (golden.placeholder, golden.row_gap));
            let found = best(&session, &model, ids, spans, end.best.len())?;
            // Two whose values are closer than the tolerance may change places.
            for ((_, expected), (_, found)) in end.best.iter().zip(&found) {
                compared.note((found - expected).abs(), TOLERANCE)?;
            }
        }
    }
    drop(model);
    session.end()?;
    Ok(compared)
}

/// The images of a prompt's first tokens, at their places.
fn spans(
    images: &[Arc<PreparedImage>],
    case: &Case,
    ids: &[u32],
    (placeholder, row_gap): (u32, usize),
) -> Vec<ImageSpan> {
    let mut spans = Vec::new();
    let mut free = 0;
    for &number in &case.images {
        let place = ids[free..].iter().position(|&id| id == placeholder);
        let Some(place) = place else { break };
        let (image, first) = (Arc::clone(&images[number]), free + place);
        let [rows, columns] = image.grid.map(|side| side / image.merge);
        free = first + rows * (columns + row_gap) - row_gap;
        spans.push(ImageSpan { first, image });
    }
    spans
}

/// The `n` likeliest tokens behind a prompt, with their log-probabilities.
fn best(
    session: &Session,
    model: &Arc<LoadedModel>,
    ids: &[u32],
    images: Vec<ImageSpan>,
    n: usize,
) -> Result<Vec<(u32, f32)>> {
    let request = GenerateRequest {
        decoding: Decoding {
            logprobs: Some(u32::try_from(n)?),
            ignore_eos: true,
            ..Decoding::default()
        },
        ..greedy(model, ids.to_vec(), 1)
    };
    session.block_on(async |engine| {
        let mut events = engine.generate_with_images(request, images)?;
        let mut scores = Vec::new();
        while let Some(event) = events.next().await {
            match event {
                GenerateEvent::Piece { scores: new, .. } => scores.extend(new),
                GenerateEvent::Done(_) => {
                    let first = scores.into_iter().next();
                    return Ok(first.context("a token without scores")?.top);
                }
                GenerateEvent::Failed(error) => return Err(error.into()),
            }
        }
        bail!("the engine ended in the middle of a request")
    })
}
