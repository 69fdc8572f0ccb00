//! Images: a tower alone, the first token behind an image, many clients with an image each, and a
//! second turn on an image that is known.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use futures_util::future::join_all;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rocmforge_engine::api::{GenerateEvent, GenerateRequest, ImageSpan, PreparedImage};
use rocmforge_engine::{EngineConfig, EngineHandle, LoadedModel, prepare_reading_images};
use rocmforge_gguf::MappedFile;

use super::Bench;
use super::plan::title;
use crate::check::Check;
use crate::projector;
use crate::report::Row;
use crate::session::{Session, greedy, random_prompt};

/// Tokens before and behind an image.
const SAID: usize = 20;

/// What stands for an image in prompts.
const PLACEHOLDER: u32 = 7;

/// Measures.
///
/// # Errors
/// The model or its projector cannot be made or run.
pub(crate) fn run_all(bench: &mut Bench, check: &mut Check) -> Result<()> {
    let (kind, shape, side, clients) = bench.plan.images;
    let (path, name) = (bench.models.get(kind, 1)?, title(kind));
    let file = path.with_extension("mmproj");
    projector::write(&file, &shape, 1)?;
    let session = Session::start_as(EngineConfig {
        device: bench.device.choice(),
        ..EngineConfig::default()
    })?;
    let (text, tower) = (MappedFile::open_model(&path)?, MappedFile::open(&file)?);
    let prepared = prepare_reading_images("main", text, tower, &mut |_| {})?;
    let model = session.block_on(async |engine| engine.load(prepared).await)?;
    let mut images = Maker {
        rng: StdRng::seed_from_u64(bench.seed),
        side: (side / shape.patch) as usize,
        elements: 3 * (shape.patch * shape.patch) as usize,
    };

    let (mut alone, mut first, mut again) = (Vec::new(), Vec::new(), Vec::new());
    // The first run uploads and compiles.
    for counted in std::iter::once(false).chain((0..bench.plan.runs).map(|_| true)) {
        let image = images.make();
        let begin = Instant::now();
        session.block_on(async |engine| engine.read_image(&model, image).await)?;
        let tower_ms = begin.elapsed().as_secs_f64() * 1e3;
        let (image, prompt) = (images.make(), images.prompt());
        let asked = session.block_on(async |engine| ask(engine, &model, &image, prompt).await)?;
        let second = session.block_on(async |engine| {
            let more = [asked.prompt.clone(), images.text(SAID)].concat();
            ask(engine, &model, &image, more).await
        })?;
        if second.computed >= 100 {
            check.fail(format!("a second turn computed {} tokens", second.computed));
        }
        if counted {
            alone.push(tower_ms);
            first.push(asked.first_ms);
            again.push(second.first_ms);
        }
    }
    let mut together = Vec::new();
    for _ in 0..bench.plan.rounds_together {
        let asked: Vec<_> = (0..clients)
            .map(|_| (images.make(), images.prompt()))
            .collect();
        let begin = Instant::now();
        let answers = session.block_on(async |engine| {
            let asked = asked.iter().map(|(image, prompt)| {
                let prompt = prompt.clone();
                ask(engine, &model, image, prompt)
            });
            join_all(asked).await
        });
        answers.into_iter().collect::<Result<Vec<_>>>()?;
        together.push(begin.elapsed().as_secs_f64() * 1e3);
    }

    let of = format!("an image of {side} x {side}");
    let patches = (images.side * images.side) as u64;
    let rate = alone.iter().map(|ms| shape.operations(patches) / ms / 1e9);
    let rate: Vec<f64> = rate.collect();
    bench.add(Row::new(
        &name,
        format!("{of}, the tower alone"),
        "ms",
        &alone,
    ));
    bench.add(Row::new(
        &name,
        format!("{of}, the tower alone"),
        "TFLOPS",
        &rate,
    ));
    bench.add(Row::new(&name, format!("{of}, first token"), "ms", &first));
    let figure = format!("{of}, second turn, first token");
    bench.add(Row::new(&name, figure, "ms", &again));
    let figure = format!("{clients} clients, {of} each, last first token");
    bench.add(Row::new(&name, figure, "ms", &together));
    drop(model);
    session.end()?;
    bench.models.done(&file);
    bench.models.done(&path);
    Ok(())
}

/// Makes images of random patches, and prompts with a place for one.
struct Maker {
    rng: StdRng,
    /// Patches of a side.
    side: usize,
    /// Elements of a patch.
    elements: usize,
}

impl Maker {
    fn make(&mut self) -> Arc<PreparedImage> {
        let n = self.side * self.side * self.elements;
        Arc::new(PreparedImage {
            charge: Default::default(),
            grid: [self.side; 2],
            merge: projector::MERGE as usize,
            patches: (0..n).map(|_| self.rng.random_range(-1.0..1.0)).collect(),
            digest: self.rng.random(),
        })
    }

    fn text(&mut self, n: usize) -> Vec<u32> {
        random_prompt(&mut self.rng, n)
    }

    fn prompt(&mut self) -> Vec<u32> {
        let tokens = (self.side / projector::MERGE as usize).pow(2);
        [self.text(SAID), vec![PLACEHOLDER; tokens], self.text(SAID)].concat()
    }
}

/// How a request with an image went.
struct Asked {
    prompt: Vec<u32>,
    /// From the request to its first token.
    first_ms: f64,
    /// Tokens of the prompt that were computed.
    computed: usize,
}

async fn ask(
    engine: &EngineHandle,
    model: &Arc<LoadedModel>,
    image: &Arc<PreparedImage>,
    prompt: Vec<u32>,
) -> Result<Asked> {
    let request = GenerateRequest {
        reuse: true,
        ..greedy(model, prompt.clone(), 1)
    };
    let span = ImageSpan {
        first: SAID,
        image: Arc::clone(image),
    };
    let begin = Instant::now();
    let mut events = engine.generate_with_images(request, vec![span])?;
    let mut first_ms = None;
    while let Some(event) = events.next().await {
        match event {
            GenerateEvent::Piece { .. } => {
                first_ms.get_or_insert_with(|| begin.elapsed().as_secs_f64() * 1e3);
            }
            GenerateEvent::Done(summary) => {
                return Ok(Asked {
                    computed: prompt.len() - summary.reused_tokens as usize,
                    prompt,
                    first_ms: first_ms.context("an answer without a token")?,
                });
            }
            GenerateEvent::Failed(error) => return Err(error.into()),
        }
    }
    bail!("the engine ended in the middle of a request")
}
