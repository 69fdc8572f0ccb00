//! Real files with damaged headers: whatever they say, making a model of one ends with a model or
//! an error, in little time.
//!
//! Each case is made from its number alone. A failure prints it; `ROCMFORGE_MUTATIONS=N` tries
//! other counts, and `ROCMFORGE_MUTATION=N` one case.

use crate::requests;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rocmforge_gguf::Gguf;
use rocmforge_model::Model;
use rocmforge_tokenizer::{ChatTemplate, Tokenizer};

/// Cases tried unless the environment says otherwise.
const CASES: u64 = 12_000;

/// No case takes longer, of files of a few thousand tokens; the machine may have others.
const LIMIT: Duration = Duration::from_secs(20);

const FILES: [&str; 12] = [
    "tiny-llama-Q4_K_M.gguf",
    "tiny-qwen3-Q8_0.gguf",
    "arch/gemma4moe.gguf",
    "arch/deepseek2.gguf",
    "arch/gpt-oss.gguf",
    "arch/granitehybrid.gguf",
    "arch/qwen35moe.gguf",
    "arch/lfm2moe.gguf",
    "arch/laguna.gguf",
    "arch/cohere2.gguf",
    "arch/bailingmoe2.gguf",
    "arch/ernie4_5-moe.gguf",
];

/// A key or a tensor's record in a header.
struct Place {
    /// Its name, behind the name's length.
    name: Range<usize>,
    /// What follows up to the next name's length: of a key type and value, of a tensor dimensions,
    /// type and offset.
    rest: Range<usize>,
}

/// A file's bytes, and where in its header is what.
struct Seed {
    name: &'static str,
    bytes: Vec<u8>,
    header: usize,
    keys: Vec<Place>,
    tensors: Vec<Place>,
}

impl Seed {
    fn open(name: &'static str) -> Seed {
        let bytes = std::fs::read(requests::fixture(name)).unwrap();
        let gguf = Gguf::parse(&bytes, bytes.len() as u64).unwrap();
        let header = gguf.header_bytes() as usize;
        let n_keys = gguf.keys().count();
        let mut at = 24;
        let mut places: Vec<Place> = Vec::new();
        let tensors = gguf.tensors().iter().map(|t| t.name.as_str());
        for name in gguf.keys().chain(tensors) {
            // With its length, as the header has it: the first such place behind the last one.
            let text = [&(name.len() as u64).to_le_bytes(), name.as_bytes()].concat();
            let found = bytes[at..header]
                .windows(text.len())
                .position(|window| window == text);
            let start = at + found.unwrap();
            if let Some(last) = places.last_mut() {
                last.rest.end = start;
            }
            at = start + text.len();
            places.push(Place {
                name: start + 8..at,
                rest: at..header,
            });
        }
        let tensors = places.split_off(n_keys);
        Seed {
            name,
            bytes,
            header,
            keys: places,
            tensors,
        }
    }

    fn mutated(&self, rng: &mut StdRng) -> Vec<u8> {
        let mut bytes = self.bytes.clone();
        for _ in 0..rng.random_range(1..4) {
            let key = &self.keys[rng.random_range(0..self.keys.len())];
            let tensor = &self.tensors[rng.random_range(0..self.tensors.len())];
            match rng.random_range(0..10) {
                // A value, behind its type.
                0..6 => {
                    let at = rng.random_range(key.rest.start + 4..key.rest.end);
                    put(&mut bytes, at, self.header, rng);
                }
                // The same elements in another shape: the record stays right.
                6 | 7 => {
                    let at = tensor.rest.start + 4;
                    let two = u32::from_le_bytes(bytes[at - 4..at].try_into().unwrap()) > 1;
                    if two {
                        let (first, second) = bytes[at..at + 16].split_at_mut(8);
                        first.swap_with_slice(second);
                    }
                }
                // Another name for a key or a tensor, so that it is missing and one is too many.
                8 => {
                    let name = [&key.name, &tensor.name][rng.random_range(0..2)];
                    bytes[rng.random_range(name.clone())] ^= rng.random_range(1..8);
                }
                _ => {
                    let at = rng.random_range(0..self.header);
                    put(&mut bytes, at, self.header, rng);
                }
            }
        }
        if rng.random_range(0..40) == 0 {
            bytes.truncate(rng.random_range(0..bytes.len()));
        }
        bytes
    }
}

/// Changes some bytes of a header at a place, as far as it reaches.
fn put(bytes: &mut [u8], at: usize, header: usize, rng: &mut StdRng) {
    const NUMBERS: [u64; 7] = [0, 1, u64::MAX, 1 << 63, i64::MAX as u64, 1 << 32, 1 << 20];
    const FLOATS: [f32; 7] = [f32::NAN, f32::INFINITY, -1.0, 0.0, 1e38, -0.0, 1e-40];
    let new: Vec<u8> = match rng.random_range(0..6) {
        0 => vec![rng.random()],
        1 => vec![bytes[at] ^ 1 << rng.random_range(0..8)],
        2 => rng.random_range(0u32..300).to_le_bytes().into(),
        3 => NUMBERS[rng.random_range(0..NUMBERS.len())]
            .to_le_bytes()
            .into(),
        4 => FLOATS[rng.random_range(0..FLOATS.len())]
            .to_le_bytes()
            .into(),
        // A stretch of the header in another one's place.
        _ => {
            let n = rng.random_range(1..32);
            let from = rng.random_range(0..header - n);
            bytes[from..from + n].into()
        }
    };
    let end = header.min(at + new.len());
    bytes[at..end].copy_from_slice(&new[..end - at]);
}

/// What the daemon does with a file's header; how far it came.
fn prepare(bytes: &[u8]) -> &'static str {
    let Ok(gguf) = Gguf::parse(bytes, bytes.len() as u64) else {
        return "no header";
    };
    let tokenizer = Tokenizer::from_gguf(&gguf);
    if let Ok(tokenizer) = &tokenizer {
        let _ = ChatTemplate::from_gguf(&gguf, tokenizer);
        let ids = tokenizer.encode("Once upon a time, 42 foxes.\n", true, true);
        if let Ok(ids) = ids {
            let n = tokenizer.n_vocab() as u32;
            assert!(ids.iter().all(|&id| id < n), "ids of the vocabulary");
        }
    }
    match (Model::from_gguf(&gguf), tokenizer) {
        (Ok(model), Ok(_)) => {
            for segment in &model.plan().segments {
                for tensor in &segment.tensors {
                    let end = tensor.offset.checked_add(tensor.bytes);
                    assert!(
                        end.is_some_and(|end| end <= bytes.len() as u64),
                        "{} lies in the file",
                        tensor.name
                    );
                }
            }
            "a model"
        }
        (Err(_), Ok(_)) => "no model",
        (_, Err(_)) => "no tokenizer",
    }
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

#[test]
fn a_damaged_header_is_a_model_or_an_error() {
    let seeds = FILES.map(Seed::open);
    for seed in &seeds {
        assert_eq!(prepare(&seed.bytes), "a model", "{}", seed.name);
    }
    let cases = match number("ROCMFORGE_MUTATION") {
        Some(case) => case..case + 1,
        None => 0..number("ROCMFORGE_MUTATIONS").unwrap_or(CASES),
    };
    let all = cases.end - cases.start > 1;
    let mut outcomes = std::collections::BTreeMap::<&str, u64>::new();
    let mut slowest = (Duration::ZERO, 0);
    for case in cases {
        let mut rng = StdRng::seed_from_u64(case);
        let seed = &seeds[case as usize % seeds.len()];
        let bytes = seed.mutated(&mut rng);
        let begin = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| prepare(&bytes)));
        let took = begin.elapsed();
        slowest = slowest.max((took, case));
        let Ok(outcome) = outcome else {
            panic!("{}: ROCMFORGE_MUTATION={case} panics", seed.name);
        };
        assert!(
            took < LIMIT,
            "{}: ROCMFORGE_MUTATION={case} takes {took:?}",
            seed.name
        );
        *outcomes.entry(outcome).or_default() += 1;
    }
    println!(
        "{outcomes:?}; the slowest, {}, took {:?}",
        slowest.1, slowest.0
    );
    if all {
        // Changes that all end at the first check would try nothing.
        for outcome in ["a model", "no header", "no model", "no tokenizer"] {
            assert!(outcomes.contains_key(outcome), "{outcome}: {outcomes:?}");
        }
    }
}
