//! Images in prompts against what their models' authors' code computed (tests/fixtures/images,
//! made by tests/python/make_images.py).

mod golden;

use std::num::NonZeroUsize;
use std::ops::Deref;
use std::sync::Arc;

use rocmforge_engine::api::times::{Part, TimesSlot};
use rocmforge_engine::api::{
    Asker, Budget, Decoding, GenerateEvent, GenerateRequest, GenerateSummary, ImageSpan,
    PreparedImage, TokenScore,
};
use rocmforge_engine::{
    EngineConfig, EngineHandle, Error, LoadedModel, PrefixCache, prepare, prepare_reading_images,
    start,
};
use rocmforge_gguf::MappedFile;
use rocmforge_vision::Sizes;

use crate::fake;
use crate::requests::{engine, fixture, greedy, load, run, until};
use golden::Golden;

const NAMES: [&str; 14] = [
    "qwen35",
    "qwen3vl",
    "qwen2vl",
    "gemma3",
    "gemma4",
    "gemma4e",
    "gemma4uv",
    "glm4v",
    "internvl",
    "internvl6",
    "kimik25",
    "lfm2",
    "mistral3",
    "muse-glimmer",
];

/// Largest difference of a log-probability, and of a row of a tower.
const TOLERANCE: f64 = 0.02;
const TOLERANCE_ROWS: f32 = 2e-3;

async fn load_with_tower(engine: &EngineHandle, name: &str) -> Arc<LoadedModel> {
    let open = |file: String| MappedFile::open(&fixture(&file)).unwrap();
    let file = open(format!("arch/{}.gguf", golden::text_model(name)));
    let projector = open(format!("images/{name}-mmproj.gguf"));
    let prepared = prepare_reading_images(name, file, projector, &mut |_| {});
    engine.load(prepared.unwrap()).await.unwrap()
}

/// A request with images, run to its end: its ids, the scores of them, the summary.
async fn generate(
    engine: &EngineHandle,
    request: GenerateRequest,
    images: Vec<ImageSpan>,
) -> Result<(Vec<u32>, Vec<TokenScore>, GenerateSummary), Error> {
    let mut events = engine.generate_with_images(request, images)?;
    let (mut ids, mut scores) = (Vec::new(), Vec::new());
    loop {
        match events
            .next()
            .await
            .expect("a generation ends with Done or Failed")
        {
            GenerateEvent::Piece {
                ids: new,
                scores: of_new,
                ..
            } => {
                ids.extend(new);
                scores.extend(of_new);
                let cache = engine.snapshot().cache;
                assert!(cache.resident_bytes + cache.in_flight_bytes <= cache.budget_bytes);
            }
            GenerateEvent::Done(summary) => return Ok((ids, scores, summary)),
            GenerateEvent::Failed(error) => return Err(error),
        }
    }
}

/// Compares a tower's rows, and the tokens behind prompts with images.
async fn compare(engine: &EngineHandle, name: &str) {
    let (golden, model) = (Golden::new(name), load_with_tower(engine, name).await);
    for (i, (image, expected)) in golden.images.iter().enumerate() {
        let rows = engine.read_image(&model, Arc::clone(image)).await.unwrap();
        assert_eq!(rows.len(), expected.len(), "{name}, image {i}");
        let worst = rows
            .iter()
            .zip(expected)
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, f32::max);
        println!("{name}, image {i}: {worst}");
        assert!(worst < TOLERANCE_ROWS, "{name}, image {i}: {worst}");
    }
    let mut worst = 0f64;
    for case in &golden.cases {
        for (rows, best) in &case.ends {
            let ids = case.ids[..*rows].to_vec();
            let images = golden.spans(case, &ids);
            let request = GenerateRequest {
                decoding: Decoding {
                    logprobs: Some(best.len() as u32),
                    ignore_eos: true,
                    ..Decoding::default()
                },
                ..greedy(&model, ids, 1)
            };
            let (_, scores, _) = generate(engine, request, images).await.unwrap();
            for (&(id, wanted), &(found_id, found)) in best.iter().zip(&scores[0].top) {
                let difference = (wanted - f64::from(found)).abs();
                // Two whose values are closer than the tolerance may change places.
                assert!(
                    difference < TOLERANCE,
                    "{name}, {rows} tokens: {id} {wanted}, {found_id} {found}"
                );
                worst = worst.max(difference);
            }
        }
    }
    println!("{name}: {worst}");
}

/// Bytes that a pass of the tower takes beside weights, where they are more than some.
fn scratch(name: &str) -> u64 {
    match name {
        "gemma3" => 7 << 20,
        "mistral3" | "gemma4" | "gemma4e" | "lfm2" => 1 << 20,
        _ => 0,
    }
}

async fn all<E: Deref<Target = EngineHandle>>(start: impl Fn(u64) -> E) {
    for name in NAMES {
        let size = |file: String| std::fs::metadata(fixture(&file)).unwrap().len();
        let bytes = size(format!("arch/{}.gguf", golden::text_model(name)))
            + size(format!("images/{name}-mmproj.gguf"));
        for budget in [64 << 20, bytes / 3 + (1 << 20) + scratch(name)] {
            let engine = start(budget);
            compare(&engine, name).await;
        }
    }
}

#[tokio::test]
async fn images_give_what_their_authors_code_gives() {
    all(|budget| Box::new(engine(Budget::Bytes(budget)))).await;
}

#[tokio::test]
async fn images_give_it_through_the_hip_path() {
    let runtime = fake::Runtime::new();
    all(|budget| runtime.start(budget).unwrap()).await;
    assert_eq!(runtime.violations(), Vec::<String>::new());
}

/// What a file says nothing of is as the tower's authors have it.
#[tokio::test]
async fn sizes_are_those_of_the_tower_where_its_file_says_none() {
    let engine = engine(Budget::Bytes(64 << 20));
    for (name, tokens, enlarges) in [
        ("qwen3vl", [8, 4096], false),
        ("qwen2vl", [4, 4096], false),
        ("glm4v", [8, 4096], true),
    ] {
        let model = load_with_tower(&engine, name).await;
        let rules = model.image_rules().unwrap();
        let [min_pixels, max_pixels] = tokens.map(|n| n * u64::from(rules.token_side()).pow(2));
        let expected = Sizes::Between {
            min_pixels,
            max_pixels,
            enlarges,
        };
        assert_eq!(rules.sizes, expected, "{name}");
    }
}

/// The whole prompt of a case, which is to be continued.
fn prompt(
    golden: &Golden,
    case: usize,
    model: &Arc<LoadedModel>,
    n: u32,
) -> (GenerateRequest, Vec<ImageSpan>) {
    let case = &golden.cases[case];
    let images = golden.spans(case, &case.ids);
    let request = GenerateRequest {
        reuse: true,
        ..greedy(model, case.ids.clone(), n)
    };
    (request, images)
}

#[tokio::test]
async fn a_text_with_images_is_the_same_at_any_budget_and_length_of_passes() {
    for name in NAMES {
        let golden = Golden::new(name);
        let mut texts = Vec::new();
        for (budget, chunk) in [
            (64 << 20, None),
            ((3 << 20) + scratch(name), None),
            (64 << 20, Some(1)),
            (64 << 20, Some(7)),
        ] {
            let started = start(EngineConfig {
                budget: Budget::Bytes(budget),
                prefill_chunk: chunk.and_then(NonZeroUsize::new),
                ..EngineConfig::default()
            });
            let engine = started.unwrap().0;
            let model = load_with_tower(&engine, name).await;
            let (request, images) = prompt(&golden, 1, &model, 24);
            texts.push(generate(&engine, request, images).await.unwrap().0);
        }
        assert!(
            texts.iter().all(|text| *text == texts[0] && text.len() > 4),
            "{name}: {texts:?}"
        );
    }
}

#[tokio::test]
async fn a_second_turn_computes_neither_tower_nor_prompt_again() {
    for name in NAMES {
        let golden = Golden::new(name);
        let engine = engine(Budget::Bytes(64 << 20));
        let model = load_with_tower(&engine, name).await;
        let (request, images) = prompt(&golden, 1, &model, 8);
        let n_prompt = request.prompt.len();
        let mut ids = request.prompt.clone();
        let (answer, _, first) = generate(&engine, request, images.clone()).await.unwrap();
        assert_eq!(first.reused_tokens, 0);
        let read = until(&engine, "two images", |s| s.images_read == 2)
            .await
            .images_read;
        ids.extend(answer);
        ids.extend([7, 8, 9, 10]);
        let again = GenerateRequest {
            reuse: true,
            ..greedy(&model, ids.clone(), 8)
        };
        let (text, _, second) = generate(&engine, again, images.clone()).await.unwrap();
        assert!(
            second.reused_tokens as usize >= n_prompt / 32 * 32,
            "{second:?}"
        );
        assert_eq!(engine.snapshot().images_read, read);
        let (anew, _, _) = generate(&engine, greedy(&model, ids, 8), images)
            .await
            .unwrap();
        assert_eq!(text, anew, "{name}");
    }
}

/// Prompts of the same tokens with other images have nothing in common behind them.
#[tokio::test]
async fn placeholders_of_other_images_are_other_tokens() {
    let golden = Golden::new("qwen3vl");
    let engine = engine(Budget::Bytes(64 << 20));
    let model = load_with_tower(&engine, "qwen3vl").await;
    let (request, images) = prompt(&golden, 2, &model, 8);
    let ids = request.prompt.clone();
    let before = images[0].first;
    let (text, _, _) = generate(&engine, request, images.clone()).await.unwrap();
    let other: Vec<ImageSpan> = images
        .iter()
        .map(|span| {
            let mut image = (*span.image).clone();
            image.patches.iter_mut().for_each(|v| *v = -*v);
            image.digest[31] ^= 0x80;
            ImageSpan {
                first: span.first,
                image: Arc::new(image),
            }
        })
        .collect();
    let request = |reuse| GenerateRequest {
        reuse,
        ..greedy(&model, ids.clone(), 8)
    };
    let (of_other, _, summary) = generate(&engine, request(true), other.clone())
        .await
        .unwrap();
    assert!(summary.reused_tokens as usize <= before, "{summary:?}");
    let (anew, _, _) = generate(&engine, request(false), other).await.unwrap();
    assert_eq!(of_other, anew);
    assert_ne!(of_other, text);
}

/// What is done to a place and its image.
type Change = dyn Fn(&mut ImageSpan, &mut PreparedImage);

#[tokio::test]
async fn what_cannot_be_read_is_refused() {
    let golden = Golden::new("qwen35");
    let engine = engine(Budget::Bytes(64 << 20));
    let plain = load(&engine, "arch/qwen35.gguf", "plain").await;
    let (request, images) = prompt(&golden, 0, &plain, 4);
    let error = generate(&engine, request, images.clone())
        .await
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("load it with its projector (mmproj)"),
        "{error}"
    );
    let model = load_with_tower(&engine, "qwen35").await;
    let try_with = async |change: &Change| {
        let (request, mut images) = prompt(&golden, 0, &model, 4);
        let mut image = (*images[0].image).clone();
        change(&mut images[0], &mut image);
        images[0].image = Arc::new(image);
        generate(&engine, request, images)
            .await
            .unwrap_err()
            .to_string()
    };
    let cases: [(&Change, &str); 7] = [
        (&|span, _| span.first = 99, "within the"),
        (&|_, image| image.merge = 4, "squares of 4 patches"),
        (&|_, image| image.grid = [3, 8], "multiples of 2"),
        (&|_, image| image.grid = [0, 6], "0 by 6 patches"),
        (&|_, image| image.grid = [usize::MAX, 6], "make it smaller"),
        (&|_, image| image.patches.truncate(9), "has 9 values"),
        (&|_, image| image.patches[0] = f32::NAN, "no finite numbers"),
    ];
    for (change, said) in cases {
        let error = try_with(change).await;
        assert!(error.contains(said), "{said}: {error}");
    }
    let open = |file: &str| MappedFile::open(&fixture(file)).unwrap();
    let refused = |file: &str, projector: &str| {
        let prepared = prepare_reading_images("m", open(file), open(projector), &mut |_| {});
        prepared.map(drop).unwrap_err().to_string()
    };
    let mmproj = "images/qwen3vl-mmproj.gguf";
    let error = refused("arch/smollm3.gguf", mmproj);
    assert!(
        error.contains("give the projector that was made for it"),
        "{error}"
    );
    // Rows for a layer, which this one does not take.
    let error = refused("arch/qwen35.gguf", mmproj);
    assert!(error.contains("rows for 1 layers"), "{error}");
    // And none for a layer that waits for them.
    let error = refused("arch/qwen3vl.gguf", "images/qwen35-mmproj.gguf");
    assert!(error.contains("and takes rows for 1 layers"), "{error}");
    for mmproj in ["images/gemma4-mmproj.gguf", "images/gemma4e-mmproj.gguf"] {
        let error = refused("arch/gemma3.gguf", mmproj);
        assert!(
            error.contains("(gemma4v)") && error.contains("for a model of gemma4"),
            "{error}"
        );
    }
    let error = refused("arch/qwen35.gguf", "images/lfm2-mmproj.gguf");
    assert!(
        error.contains("(lfm2)") && error.contains("for a model of lfm2"),
        "{error}"
    );
    let error = refused("arch/qwen35.gguf", "arch/qwen35.gguf");
    assert!(error.contains("it is no projector (mmproj)"), "{error}");
    let as_model = prepare("m", open(mmproj), &mut |_| {})
        .map(drop)
        .unwrap_err()
        .to_string();
    assert!(
        as_model.contains("give the file of its text model"),
        "{as_model}"
    );
}

/// A tower with positions of columns and rows has no more of either.
#[tokio::test]
async fn an_image_longer_than_the_places_of_its_tower_is_refused() {
    let engine = engine(Budget::Bytes(64 << 20));
    let model = load_with_tower(&engine, "gemma4").await;
    let image = |grid: [usize; 2]| PreparedImage {
        grid,
        merge: 3,
        patches: vec![0.25; grid[0] * grid[1] * 3 * 16],
        digest: [1; 32],
        charge: Default::default(),
    };
    let rows = engine.read_image(&model, Arc::new(image([3, 63]))).await;
    assert_eq!(rows.unwrap().len(), 21 * 64);
    for grid in [[3, 66], [66, 3]] {
        let ids = vec![5; 40];
        let span = ImageSpan {
            first: 1,
            image: Arc::new(image(grid)),
        };
        let refused = generate(&engine, greedy(&model, ids, 1), vec![span]).await;
        let error = refused.map(drop).unwrap_err().to_string();
        assert!(
            error.contains("the model knows 64 places a side"),
            "{error}"
        );
    }
}

/// A tower whose positions are those of one square takes no other image.
#[tokio::test]
async fn an_image_of_another_size_than_a_tile_is_refused() {
    let engine = engine(Budget::Bytes(64 << 20));
    let model = load_with_tower(&engine, "internvl").await;
    for grid in [[4, 6], [8, 8]] {
        let image = PreparedImage {
            grid,
            merge: 2,
            patches: vec![0.25; grid[0] * grid[1] * 3 * 16],
            digest: [1; 32],
            charge: Default::default(),
        };
        let error = engine.read_image(&model, Arc::new(image)).await;
        let error = error.unwrap_err().to_string();
        assert!(error.contains("the model's images have 6 by 6"), "{error}");
    }
}

/// A tower goes with its model, and is none of the models that there are.
#[tokio::test]
async fn a_tower_comes_and_goes_with_its_model() {
    let golden = Golden::new("qwen35");
    let engine = engine(Budget::Bytes(64 << 20));
    let model = load_with_tower(&engine, "qwen35").await;
    let (request, images) = prompt(&golden, 0, &model, 4);
    generate(&engine, request, images).await.unwrap();
    assert_eq!(engine.snapshot().models.len(), 1);
    drop(model);
    engine.unload("qwen35", false).await.unwrap();
    let snapshot = until(&engine, "nothing", |s| s.models.is_empty()).await;
    assert_eq!(snapshot.cache.resident_bytes, 0);
    let model = load_with_tower(&engine, "qwen35").await;
    let (request, images) = prompt(&golden, 0, &model, 4);
    // Nobody waits any more: the engine comes to rest, and the next request has its images.
    let read = engine.snapshot().images_read;
    let waiting = engine.generate_with_images(request, images).unwrap();
    until(&engine, "an image", |s| s.images_read > read).await;
    drop(waiting);
    until(&engine, "no requests", |s| s.running + s.queued == 0).await;
    let (request, images) = prompt(&golden, 0, &model, 4);
    generate(&engine, request, images).await.unwrap();
    let (_, ids, _) = run(&engine, greedy(&model, vec![5, 6, 7], 4)).await;
    assert_eq!(ids.len(), 4);
}

/// Each image is work of its own for the tower, but the request takes one place.
#[tokio::test]
async fn a_request_with_many_images_takes_one_place_in_the_queue() {
    let golden = Golden::new("qwen35");
    let started = start(EngineConfig {
        budget: Budget::Bytes(64 << 20),
        queue_capacity: 2,
        ..EngineConfig::default()
    });
    let engine = started.unwrap().0;
    let model = load_with_tower(&engine, "qwen35").await;
    let image = &golden.images[0].0;
    let n = image.grid[0] * image.grid[1] / 4;
    let (mut ids, mut images) = (vec![5], Vec::new());
    for i in 0..6 {
        let image = Arc::new(PreparedImage {
            digest: [100 + i; 32],
            ..(**image).clone()
        });
        let first = ids.len();
        images.push(ImageSpan { first, image });
        ids.extend(vec![golden.placeholder; n]);
        ids.push(6);
    }
    let request = GenerateRequest {
        reuse: true,
        ..greedy(&model, ids, 3)
    };
    generate(&engine, request, images).await.unwrap();
    until(&engine, "six images", |s| s.images_read == 6).await;
}

/// What one client has shown is computed again for another one, as its prompt is: the time to the
/// first token tells nobody what others have sent.
#[tokio::test]
async fn rows_of_images_are_shared_as_prompts_are() {
    let golden = Golden::new("qwen35");
    for (sharing, expected) in [
        (PrefixCache::PerClient, 4),
        (PrefixCache::Shared, 2),
        (PrefixCache::Off, 6),
    ] {
        let started = start(EngineConfig {
            budget: Budget::Bytes(64 << 20),
            prefix_cache: sharing,
            ..EngineConfig::default()
        });
        let engine = started.unwrap().0;
        let model = load_with_tower(&engine, "qwen35").await;
        for client in [1, 2, 1] {
            let (request, images) = prompt(&golden, 1, &model, 2);
            let request = GenerateRequest {
                asker: Asker {
                    client,
                    ..Asker::default()
                },
                ..request
            };
            generate(&engine, request, images).await.unwrap();
        }
        let read = until(&engine, "all images", |s| s.images_read >= expected).await;
        assert_eq!(read.images_read, expected, "{sharing:?}");
    }
}

/// Whenever a model goes, each request for it has an answer, which names it.
#[tokio::test]
async fn an_unload_ends_requests_that_wait_for_images() {
    let golden = Golden::new("qwen35");
    let engine = engine(Budget::Bytes(64 << 20));
    for round in 0..20 {
        let model = load_with_tower(&engine, "qwen35").await;
        let (request, images) = prompt(&golden, 1, &model, 4);
        let asked = engine.clone();
        let answer = tokio::spawn(async move { generate(&asked, request, images).await });
        drop(model);
        tokio::time::sleep(std::time::Duration::from_micros(150 * round)).await;
        let force = round % 2 == 0;
        if engine.unload("qwen35", force).await.is_err() {
            assert!(!force);
            engine.unload("qwen35", true).await.unwrap();
        }
        if let Err(error) = answer.await.unwrap() {
            let error = error.to_string();
            assert!(error.contains("'qwen35'"), "{error}");
        }
    }
}

/// A request waits for its images before anything else of it is computed.
#[tokio::test]
async fn the_time_of_its_images_is_told_apart() {
    let engine = engine(Budget::Bytes(64 << 20));
    let (golden, model) = (
        Golden::new("qwen3vl"),
        load_with_tower(&engine, "qwen3vl").await,
    );
    let case = golden.cases.iter().find(|case| !case.images.is_empty());
    let case = case.unwrap();
    let images = golden.spans(case, &case.ids);
    let slot = TimesSlot::default();
    let request = greedy(&model, case.ids.clone(), 1);
    let events = engine.generate_timed(request, images, Some(slot.clone()));
    let mut events = events.unwrap();
    while events.next().await.is_some() {}
    let times = slot.get().unwrap();
    assert_eq!(times.parts.total(), times.ended - times.begun);
    println!("{:?}", times.parts.ranked());
    assert!(!times.parts.of(Part::Tower).is_zero());
    assert!(!times.parts.of(Part::Prompt).is_zero());
}
