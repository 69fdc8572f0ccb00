//! Image files. An input has two bytes that choose the tower, and the file.
//!
//! Decoding ends with pixels within the bounds or a refusal that says why; what a tower gets of
//! them is as long as its grid says, and within the tower's bounds.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rocmforge_vision::{Bounds, Filter, Rules, Sizes, Tiles, decode, prepare, prepare_all};

const BOUNDS: Bounds = Bounds {
    bytes: 4096,
    pixels: 1 << 16,
    deadline: None,
};

fuzz_target!(|data: &[u8]| {
    let Some(([patch, merge], file)) = data.split_first_chunk() else {
        return;
    };
    let (patch, merge) = (u32::from(patch % 16) + 1, u32::from(merge % 3) + 1);
    let token = u64::from(patch * merge).pow(2);
    let rules = Rules {
        patch,
        merge,
        sizes: match data.len() % 6 {
            0 => Sizes::Square(3 * patch * merge),
            1 => Sizes::Largest { tokens: 64 },
            5 => Sizes::Nearest { tokens: 64 },
            4 => Sizes::SquareTiles(Tiles {
                side: 2 * patch * merge,
                least: 1,
                most: 6,
            }),
            2 => Sizes::Padded {
                patches: 64,
                side: 16,
            },
            _ => Sizes::Between {
                min_pixels: 2 * token,
                max_pixels: 64 * token,
                enlarges: false,
            },
        },
        filter: match data.len() % 4 {
            0 => Filter::Bilinear,
            2 => Filter::Lanczos,
            _ => Filter::Bicubic,
        },
        mean: [0.5; 3],
        std: [0.5; 3],
    };
    let decoded = decode(file, BOUNDS);
    let prepared = prepare(file, BOUNDS, &rules);
    let image = match decoded {
        Ok(image) => image,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            assert_eq!(prepared.map(drop), Err(error));
            return;
        }
    };
    let pixels = u64::from(image.width()) * u64::from(image.height());
    assert!((1..=BOUNDS.pixels).contains(&pixels));
    assert_eq!(image.rgb().len() as u64, 3 * pixels);
    if let (Ok(whole), Ok(all)) = (&prepared, prepare_all(file, BOUNDS, &rules)) {
        let tiles = rules.tiles_for(image.width(), image.height());
        let n = tiles.map_or(0, |[rows, columns]| rows * columns) as usize;
        assert_eq!((all.len(), all.last()), (n + 1, Some(whole)));
    }
    match prepared {
        Ok(prepared) => {
            let [rows, columns] = prepared.grid;
            let merge = merge as usize;
            assert!(rows.is_multiple_of(merge) && columns.is_multiple_of(merge));
            // A thin image has as many tokens as its long side.
            assert!((1..=256).contains(&prepared.tokens()));
            let values = rows * columns * 3 * (patch * patch) as usize;
            assert_eq!(prepared.patches.len(), values);
            assert!(prepared.patches.iter().all(|value| value.abs() <= 1.0));
        }
        // One side is far longer than the other.
        Err(error) => assert!(error.to_string().contains("times the other")),
    }
});
