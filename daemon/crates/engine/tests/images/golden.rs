//! What the authors' code computed, as tests/fixtures/images has it.

use std::sync::Arc;

use rocmforge_engine::api::{ImageSpan, PreparedImage};
use serde_json::Value;

use crate::requests::{fixture, numbers};

/// What the authors' code computed of a model and its tower.
pub(super) struct Golden {
    pub(super) images: Vec<(Arc<PreparedImage>, Vec<f32>)>,
    pub(super) placeholder: u32,
    /// Side of the square of patches that becomes a token.
    pub(super) merge: usize,
    /// Tokens of the text between rows.
    pub(super) row_gap: usize,
    pub(super) cases: Vec<Case>,
}

/// The model in `arch` that reads what a projector gives.
pub(super) fn text_model(projector: &str) -> String {
    let golden: Value = serde_json::from_slice(&read(projector)).unwrap();
    golden["text_model"]
        .as_str()
        .unwrap_or(projector)
        .to_owned()
}

fn read(name: &str) -> Vec<u8> {
    std::fs::read(fixture(&format!("images/{name}.json"))).unwrap()
}

pub(super) struct Case {
    pub(super) images: Vec<usize>,
    pub(super) ids: Vec<u32>,
    /// Behind so many tokens the best ones, with their log-probabilities.
    pub(super) ends: Vec<(usize, Vec<(u32, f64)>)>,
}

impl Golden {
    pub(super) fn new(name: &str) -> Self {
        let golden: Value = serde_json::from_slice(&read(name)).unwrap();
        let merge = golden["merge"].as_u64().unwrap_or(2) as usize;
        let image = |(i, value): (usize, &Value)| {
            let grid = numbers(&value["grid"]);
            let image = PreparedImage {
                grid: [grid[0] as usize, grid[1] as usize],
                merge,
                patches: numbers(&value["patches"]),
                digest: [i as u8; 32],
                charge: Default::default(),
            };
            (Arc::new(image), numbers(&value["rows"]))
        };
        let best = |pair: &Value| {
            let id = pair[0].as_u64().unwrap() as u32;
            (id, pair[1].as_f64().unwrap())
        };
        let case = |value: &Value| Case {
            images: numbers(&value["images"])
                .iter()
                .map(|&i| i as usize)
                .collect(),
            ids: numbers(&value["ids"]).iter().map(|&id| id as u32).collect(),
            ends: value["ends"]
                .as_array()
                .unwrap()
                .iter()
                .map(|end| {
                    let rows = end["rows"].as_u64().unwrap() as usize;
                    (
                        rows,
                        end["best"].as_array().unwrap().iter().map(best).collect(),
                    )
                })
                .collect(),
        };
        Self {
            images: golden["images"]
                .as_array()
                .unwrap()
                .iter()
                .enumerate()
                .map(image)
                .collect(),
            placeholder: golden["placeholder"].as_u64().unwrap() as u32,
            merge,
            row_gap: golden["row_gap"].as_u64().unwrap_or(0) as usize,
            cases: golden["cases"]
                .as_array()
                .unwrap()
                .iter()
                .map(case)
                .collect(),
        }
    }

    /// The images of a prompt's first tokens, at their places.
    pub(super) fn spans(&self, case: &Case, ids: &[u32]) -> Vec<ImageSpan> {
        let mut spans = Vec::new();
        let mut free = 0;
        for &i in &case.images {
            let image = Arc::clone(&self.images[i].0);
            let place = ids[free..].iter().position(|&id| id == self.placeholder);
            let Some(place) = place else { break };
            let first = free + place;
            let [rows, columns] = image.grid.map(|side| side / self.merge);
            free = first + rows * (columns + self.row_gap) - self.row_gap;
            spans.push(ImageSpan { first, image });
        }
        spans
    }
}
