//! Sizes that towers' processors give, as their authors' code computes them.

use proptest::prelude::*;

use super::*;
use crate::testing::rules;

/// A width and a height, and those after resizing.
type Sides = ((u32, u32), (u32, u32));

/// As `smart_resize(height, width, factor=32, min_pixels=65536, max_pixels=16777216)` of
/// transformers' processor for Qwen2-VL computes them.
const EXPECTED_SIZES: [Sides; 11] = [
    ((1024, 1024), (1024, 1024)),
    ((640, 480), (640, 480)),
    ((1, 1), (256, 256)),
    ((48, 48), (256, 256)),
    ((80, 4000), (64, 4000)),
    ((8000, 6000), (4704, 3520)),
    ((333, 777), (320, 768)),
    ((10, 1999), (32, 3648)),
    ((15, 2100), (32, 3040)),
    ((176, 1200), (192, 1216)),
    ((5000, 30), (4992, 32)),
];

#[test]
fn sizes_are_those_of_the_authors_processor() {
    let rules = Rules {
        sizes: Sizes::Between {
            min_pixels: 65_536,
            max_pixels: 16_777_216,
            enlarges: false,
        },
        ..rules()
    };
    for ((width, height), (to_width, to_height)) in EXPECTED_SIZES {
        let size = rules.size_for(width, height).unwrap();
        assert_eq!((size.width, size.height), (to_width, to_height));
    }
}

/// As `smart_resize(height, width, factor=28, min_pixels=3136, max_pixels=3211264)`: the
/// processor for Qwen2.5-VL, with the most pixels that its tower takes.
const SIZES_OF_28: [Sides; 9] = [
    ((1024, 1024), (1036, 1036)),
    ((640, 480), (644, 476)),
    ((1, 1), (56, 56)),
    ((80, 4000), (84, 4004)),
    ((8000, 6000), (2044, 1540)),
    ((28, 29), (56, 84)),
    ((1999, 10), (812, 28)),
    ((42, 42), (56, 56)),
    ((1800, 1700), (1792, 1708)),
];

#[test]
fn sizes_are_those_of_the_authors_processor_for_tokens_of_28_pixels() {
    let rules = Rules {
        patch: 14,
        sizes: Sizes::Between {
            min_pixels: 3136,
            max_pixels: 3_211_264,
            enlarges: false,
        },
        ..rules()
    };
    for ((width, height), expected) in SIZES_OF_28 {
        let size = rules.size_for(width, height).unwrap();
        assert_eq!((size.width, size.height), expected, "{width} x {height}");
    }
}

/// As `smart_resize(2, height, width, factor=28, min_pixels=12544, max_pixels=6422528)` of
/// transformers' processor for GLM-4.1V, which counts the pixels of two frames.
const SIZES_OF_TWO_FRAMES: [Sides; 11] = [
    ((1024, 1024), (1036, 1036)),
    ((640, 480), (644, 476)),
    ((1, 1), (84, 84)),
    ((10, 1999), (28, 5600)),
    ((80, 4000), (84, 4004)),
    ((8000, 6000), (2044, 1540)),
    ((28, 29), (84, 84)),
    ((27, 300), (28, 308)),
    ((60, 60), (84, 84)),
    ((1800, 1700), (1792, 1708)),
    ((13, 40), (56, 140)),
];

#[test]
fn a_narrow_image_is_enlarged_where_the_authors_processor_does_so() {
    let rules = Rules {
        patch: 14,
        sizes: Sizes::Between {
            min_pixels: 6272,
            max_pixels: 3_211_264,
            enlarges: true,
        },
        ..rules()
    };
    for ((width, height), expected) in SIZES_OF_TWO_FRAMES {
        let size = rules.size_for(width, height).unwrap();
        assert_eq!((size.width, size.height), expected, "{width} x {height}");
    }
}

/// A width and a height, those of what is shown, and those after resizing.
type Shown = ((u32, u32), (u32, u32), (u32, u32));

/// As `navit_resize(height, width, 14, 2, 16384, 512)` of transformers' processor for Kimi
/// K2.5.
const SHOWN_SIZES: [Shown; 11] = [
    ((1024, 1024), (1024, 1024), (1036, 1036)),
    ((640, 480), (640, 480), (644, 504)),
    ((1, 1), (1, 1), (28, 28)),
    ((10, 1999), (10, 1999), (28, 2016)),
    ((80, 4000), (80, 4000), (84, 4004)),
    ((8000, 6000), (2071, 1553), (2072, 1568)),
    ((28, 29), (28, 29), (28, 56)),
    ((27, 300), (27, 300), (28, 308)),
    ((9000, 70), (7168, 55), (7168, 56)),
    ((1800, 1700), (1800, 1700), (1820, 1708)),
    ((13, 40), (13, 40), (28, 56)),
];

#[test]
fn an_image_is_filled_up_to_whole_tokens_where_the_authors_processor_does_so() {
    let rules = Rules {
        patch: 14,
        sizes: Sizes::Padded {
            patches: 16_384,
            side: 512,
        },
        ..rules()
    };
    for ((width, height), shown, expected) in SHOWN_SIZES {
        let found = rules.shown_for(width, height).unwrap();
        assert_eq!((found.width, found.height), shown, "{width} x {height}");
        let size = rules.size_for(width, height).unwrap();
        assert_eq!((size.width, size.height), expected, "{width} x {height}");
    }
    let small = rules.at_most(28 * 28 * 10);
    assert!(small.tokens(small.size_for(4000, 3000).unwrap()) <= 20);
}

#[test]
fn an_image_of_any_shape_becomes_a_square_where_the_tower_takes_no_other() {
    let rules = Rules {
        patch: 14,
        merge: 4,
        sizes: Sizes::Square(896),
        ..rules()
    };
    for (width, height) in [(1, 1), (896, 896), (3000, 200)] {
        let size = rules.size_for(width, height).unwrap();
        assert_eq!((size.width, size.height), (896, 896));
        assert_eq!(rules.tokens(size), 256);
    }
}

/// As the processor for Pixtral in transformers computes them for 1540 pixels and tokens of 28.
const WITHIN: [Sides; 8] = [
    ((1, 1), (28, 28)),
    ((28, 29), (28, 56)),
    ((640, 480), (644, 504)),
    ((1540, 1540), (1540, 1540)),
    ((1541, 1000), (1540, 1008)),
    ((8000, 6000), (1540, 1176)),
    ((4000, 21), (1540, 28)),
    ((3333, 2777), (1540, 1288)),
];

#[test]
fn an_image_is_shrunk_to_the_longest_side_as_the_authors_processor_does() {
    let rules = Rules {
        patch: 14,
        merge: 2,
        sizes: Sizes::Within { longest: 1540 },
        ..rules()
    };
    for ((width, height), expected) in WITHIN {
        let size = rules.size_for(width, height).unwrap();
        assert_eq!((size.width, size.height), expected, "{width} x {height}");
    }
}

/// As the processor for Gemma 4 in transformers computes them for 280 tokens of 48 pixels.
const LARGEST: [Sides; 8] = [
    ((1, 1), (768, 768)),
    ((48, 48), (768, 768)),
    ((640, 480), (912, 672)),
    ((1024, 1024), (768, 768)),
    ((8000, 6000), (912, 672)),
    ((80, 4000), (96, 5664)),
    ((2100, 15), (9456, 48)),
    ((333, 777), (480, 1200)),
];

#[test]
fn an_image_gets_as_many_tokens_as_it_may_as_the_authors_processor_gives_it() {
    let rules = Rules {
        patch: 16,
        merge: 3,
        sizes: Sizes::Largest { tokens: 280 },
        ..rules()
    };
    for ((width, height), expected) in LARGEST {
        let size = rules.size_for(width, height).unwrap();
        assert_eq!((size.width, size.height), expected, "{width} x {height}");
        assert!(rules.tokens(size) <= 280);
    }
    let fewer = rules.at_most(70 * 48 * 48).size_for(640, 480).unwrap();
    assert_eq!((fewer.width, fewer.height), (432, 336));
}

/// As the processor for LFM2-VL in transformers computes them: an image, its whole size, and
/// the columns and rows of its tiles, 1 and 1 where it is not cut.
const TILED: [(Sides, (u32, u32)); 12] = [
    (((1, 1), (256, 256)), (1, 1)),
    (((512, 512), (512, 512)), (1, 1)),
    (((640, 480), (576, 416)), (1, 1)),
    (((800, 600), (576, 416)), (1, 1)),
    (((1024, 1024), (512, 512)), (2, 2)),
    (((4000, 3000), (576, 416)), (3, 2)),
    (((3000, 4000), (416, 576)), (2, 3)),
    (((3000, 600), (1120, 224)), (5, 1)),
    (((500, 5000), (160, 1600)), (1, 10)),
    (((740, 740), (512, 512)), (2, 2)),
    (((10, 1999), (32, 3648)), (1, 1)),
    (((2048, 1024), (704, 352)), (4, 2)),
];

fn tiled() -> Rules {
    Rules {
        patch: 16,
        merge: 2,
        sizes: Sizes::Tiled {
            min_pixels: 64 * 1024,
            max_pixels: 256 * 1024,
            tiles: Tiles {
                side: 512,
                least: 2,
                most: 10,
            },
        },
        filter: Filter::Bilinear,
        ..rules()
    }
}

#[test]
fn a_large_image_is_cut_as_the_authors_processor_does() {
    for (((width, height), whole), (columns, rows)) in TILED {
        let size = tiled().size_for(width, height).unwrap();
        assert_eq!((size.width, size.height), whole, "{width} x {height}");
        let tiles = tiled().tiles_for(width, height);
        let expected = (columns * rows > 1).then_some([rows, columns]);
        assert_eq!(tiles, expected, "{width} x {height}");
    }
    assert_eq!(tiled().tile_grid(), [16, 16]);
    // Fewer pixels are fewer tiles, or none.
    let most = |pixels| tiled().at_most(pixels).tiles_for(4000, 3000);
    assert_eq!(most(1024 * 512), Some([1, 2]));
    assert_eq!(most(512 * 512), None);
    assert_eq!(rules().tiles_for(4000, 3000), None);
}

/// As `get_optimal_tiled_canvas((height, width), (448, 448), 1, 12)` of transformers' processor for
/// InternVL: an image, and the columns and rows of its tiles, 1 and 1 where it is not cut.
const SQUARE_TILED: [((u32, u32), (u32, u32)); 17] = [
    ((1, 1), (1, 1)),
    ((448, 448), (1, 1)),
    ((640, 480), (4, 3)),
    ((800, 600), (4, 3)),
    ((1024, 1024), (3, 3)),
    ((4000, 3000), (4, 3)),
    ((3000, 600), (5, 1)),
    ((500, 5000), (1, 10)),
    ((740, 740), (2, 2)),
    ((10, 1999), (1, 12)),
    ((2048, 1024), (4, 2)),
    ((1344, 896), (3, 2)),
    ((449, 448), (1, 1)),
    ((896, 448), (2, 1)),
    ((634, 448), (4, 3)),
    ((600, 1000), (2, 3)),
    ((1000, 600), (3, 2)),
];

#[test]
fn an_image_is_cut_by_its_shape_where_the_tower_takes_squares() {
    let squares = |least| Rules {
        patch: 14,
        merge: 2,
        sizes: Sizes::SquareTiles(Tiles {
            side: 448,
            least,
            most: 12,
        }),
        ..rules()
    };
    let rules = squares(1);
    for ((width, height), (columns, rows)) in SQUARE_TILED {
        let size = rules.size_for(width, height).unwrap();
        assert_eq!((size.width, size.height), (448, 448), "{width} x {height}");
        let expected = (columns * rows > 1).then_some([rows, columns]);
        let tiles = rules.tiles_for(width, height);
        assert_eq!(tiles, expected, "{width} x {height}");
    }
    assert_eq!(
        (rules.tile_grid(), rules.tokens(size_of_square())),
        ([16, 16], 256)
    );
    // At least three.
    assert_eq!(squares(3).tiles_for(448, 448), Some([2, 2]));
    assert_eq!(squares(3).tiles_for(100, 50), Some([2, 4]));
    // Fewer pixels are fewer tiles, or none.
    let most = |pixels| rules.at_most(pixels).tiles_for(4000, 3000);
    assert_eq!(most(448 * 448 * 6), Some([2, 3]));
    assert_eq!(most(448 * 448), None);
    assert_eq!(most(1), None);
}

fn size_of_square() -> Size {
    Size {
        width: 448,
        height: 448,
    }
}

/// As `smart_resize(height, width, 28, 4096)` of transformers' processor for Muse Glimmer, but of
/// 42 x 42 pixels, where one and four tokens are as near and Python's order of a set decides.
const NEAREST: [Sides; 13] = [
    ((1, 1), (28, 28)),
    ((28, 28), (28, 28)),
    ((640, 480), (644, 476)),
    ((1024, 1024), (1036, 1036)),
    ((8000, 6000), (2044, 1540)),
    ((80, 4000), (84, 4004)),
    ((2100, 15), (2100, 28)),
    ((333, 777), (336, 784)),
    ((4000, 21), (4004, 28)),
    ((42, 42), (56, 56)),
    ((1800, 1700), (1820, 1708)),
    ((27, 300), (28, 308)),
    ((14, 14), (28, 28)),
];

#[test]
fn an_image_gets_the_tokens_of_the_nearest_shape_as_the_authors_processor_gives_it() {
    let rules = Rules {
        patch: 14,
        merge: 2,
        sizes: Sizes::Nearest { tokens: 4096 },
        ..rules()
    };
    for ((width, height), expected) in NEAREST {
        let size = rules.size_for(width, height).unwrap();
        assert_eq!((size.width, size.height), expected, "{width} x {height}");
        assert!(rules.tokens(size) <= 4096);
    }
    let few = rules.at_most(28 * 28 * 10);
    assert!(few.tokens(few.size_for(4000, 3000).unwrap()) <= 10);
    // A line has no fewer than its shape asks for.
    let line = few.size_for(4000, 20).unwrap();
    assert_eq!((line.width, line.height), (28 * 45, 28));
}

#[test]
fn a_line_and_nothing_are_refused() {
    assert_eq!(rules().size_for(0, 5), Err(ImageError::Empty));
    let narrow = rules().size_for(1, 201).unwrap_err();
    assert!(narrow.to_string().contains("1 x 201"), "{narrow}");
    assert!(rules().size_for(1, 200).is_ok());
    assert!(rules().size_for(u32::MAX, 1).is_err());
}

proptest! {
    #[test]
    fn a_size_is_of_whole_tokens_and_within_the_bounds(
        width in 1_u32..5000,
        height in 1_u32..5000,
    ) {
        let rules = rules();
        let Ok(size) = rules.size_for(width, height) else {
            return Ok(());
        };
        let unit = rules.token_side();
        prop_assert!(size.width > 0 && size.width % unit == 0);
        prop_assert!(size.height > 0 && size.height % unit == 0);
        let pixels = u64::from(size.width) * u64::from(size.height);
        let Sizes::Between { min_pixels, max_pixels, .. } = rules.sizes else {
            unreachable!("Qwen's");
        };
        prop_assert!(pixels >= min_pixels);
        // A side of one token cannot shrink.
        let thin = size.width == unit || size.height == unit;
        prop_assert!(pixels <= max_pixels || thin);
        prop_assert_eq!(rules.tokens(size) as u64, pixels / u64::from(unit * unit));
    }
}
