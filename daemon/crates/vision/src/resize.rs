//! Resizing by a bicubic, a bilinear or a Lanczos filter, bit for bit as Pillow does it.
//!
//! Processors of vision models resize 8-bit images by Pillow's `BICUBIC`, `BILINEAR` or `LANCZOS`
//! filter (transformers' processors by name; those on torchvision differ from it by one step of 255
//! in some pixels). The cubic filter has its parameter at -0.5. A filter is as wide as the scale
//! where an image shrinks, and runs over columns first and rows then; the other way round in an
//! image more than 100 times as high as wide that becomes lower. Weights are fixed-point numbers of
//! 22 bits, and values are rounded to 8 bits between the two runs, so that their order shows in the
//! bits.
//!
//! That is Pillow up to 12.3. Pillow 13.0 begins with the rows in more sizes, which changes some
//! values by a step.

use std::f64::consts::PI;

use crate::decode::Pixels;
use crate::rules::{Filter, Size};

/// Number of fraction bits of a weight: what 32 bits leave beside 8 bits of a channel and 2 bits
/// for sums above one, which negative weights cause.
const FRACTION_BITS: u32 = 22;
/// Parameter of the bicubic filter.
const SHARPNESS: f64 = -0.5;
/// Number of lobes of the Lanczos filter on each side.
const LOBES: f64 = 3.0;

/// Ratio of height to width from which on an image's rows are filtered first.
const TALL: u32 = 100;

impl Filter {
    /// Radius of the filter, in pixels of the smaller image.
    fn reach(self) -> f64 {
        match self {
            Self::Bilinear => 1.0,
            Self::Bicubic => 2.0,
            Self::Lanczos => LOBES,
        }
    }

    /// Weight of a pixel at this distance from the centre.
    fn weight(self, distance: f64) -> f64 {
        match self {
            Self::Bilinear => (1.0 - distance.abs()).max(0.0),
            Self::Bicubic => bicubic(distance),
            Self::Lanczos => lanczos(distance),
        }
    }
}

/// Weight of the bicubic filter at this distance ([`Filter::weight`]).
fn bicubic(distance: f64) -> f64 {
    let x = distance.abs();
    if x < 1.0 {
        ((SHARPNESS + 2.0) * x - (SHARPNESS + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        (((x - 5.0) * x + 8.0) * x - 4.0) * SHARPNESS
    } else {
        0.0
    }
}

/// Weight of the Lanczos filter at this distance ([`Filter::weight`]; Duchon 1979).
fn lanczos(distance: f64) -> f64 {
    let sinc = |x: f64| {
        let x = x * PI;
        if x == 0.0 { 1.0 } else { x.sin() / x }
    };
    if (-LOBES..LOBES).contains(&distance) {
        sinc(distance) * sinc(distance / LOBES)
    } else {
        0.0
    }
}

/// The source pixels of one result pixel, with their weights.
struct Window {
    first: usize,
    weights: Vec<i32>,
}

/// The windows that resize a line of `from` pixels to `to`.
fn windows(from: u32, to: u32, filter: Filter) -> Vec<Window> {
    let scale = f64::from(from) / f64::from(to);
    let width = scale.max(1.0);
    let reach = filter.reach() * width;
    // A product with it, not a quotient: the last bit of a weight counts.
    let inverse = 1.0 / width;
    let window = |at: u32| {
        let centre = (f64::from(at) + 0.5) * scale;
        // Truncated towards zero, as a conversion does.
        let first = (centre - reach + 0.5).max(0.0) as usize;
        let end = ((centre + reach + 0.5) as usize).min(from as usize);
        let distances = (first..end).map(|pixel| (pixel as f64 - centre + 0.5) * inverse);
        let weights: Vec<f64> = distances.map(|at| filter.weight(at)).collect();
        let sum: f64 = weights.iter().sum();
        let one = f64::from(1_u32 << FRACTION_BITS);
        let fixed = weights.iter().map(|weight| {
            let scaled = weight / sum * one;
            (scaled + 0.5_f64.copysign(scaled)) as i32
        });
        Window {
            first,
            weights: fixed.collect(),
        }
    };
    (0..to).map(window).collect()
}

/// Rounds a fixed-point sum of weighted channel values to 8 bits.
fn rounded(sum: i32) -> u8 {
    (sum >> FRACTION_BITS).clamp(0, 255) as u8
}

const HALF: i32 = 1 << (FRACTION_BITS - 1);

/// Resizes an image to another width.
fn columns(from: &Pixels, to: u32, filter: Filter) -> Pixels {
    let windows = windows(from.width, to, filter);
    let mut rgb = Vec::with_capacity(to as usize * from.height as usize * 3);
    for row in from.rgb.chunks_exact(from.width as usize * 3) {
        for window in &windows {
            let mut sums = [HALF; 3];
            let pixels = row[window.first * 3..].as_chunks::<3>().0;
            for (pixel, weight) in pixels.iter().zip(&window.weights) {
                for (sum, channel) in sums.iter_mut().zip(pixel) {
                    *sum += i32::from(*channel) * weight;
                }
            }
            rgb.extend(sums.map(rounded));
        }
    }
    Pixels {
        width: to,
        height: from.height,
        rgb,
    }
}

/// Resizes an image to another height.
fn rows(from: &Pixels, to: u32, filter: Filter) -> Pixels {
    let line = from.width as usize * 3;
    let mut rgb = Vec::with_capacity(to as usize * line);
    let mut sums = vec![HALF; line];
    for window in windows(from.height, to, filter) {
        sums.fill(HALF);
        let lines = from.rgb[window.first * line..].chunks_exact(line);
        for (channels, weight) in lines.zip(&window.weights) {
            for (sum, channel) in sums.iter_mut().zip(channels) {
                *sum += i32::from(*channel) * weight;
            }
        }
        rgb.extend(sums.iter().map(|sum| rounded(*sum)));
    }
    Pixels {
        width: from.width,
        height: to,
        rgb,
    }
}

/// Resizes an image. A side that keeps its length is not filtered. CPU-bound: up to about 40
/// operations for each channel of the larger image.
pub fn resize(image: Pixels, to: Size, filter: Filter) -> Pixels {
    let is_tall = image.height > image.width.saturating_mul(TALL) && to.height < image.height;
    let to_width = |image: Pixels| match image.width == to.width {
        true => image,
        false => columns(&image, to.width, filter),
    };
    let to_height = |image: Pixels| match image.height == to.height {
        true => image,
        false => rows(&image, to.height, filter),
    };
    match is_tall {
        true => to_width(to_height(image)),
        false => to_height(to_width(image)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{pattern, sum};

    /// SHA-256 of the bytes that Pillow 12.3 makes of the same pattern by
    /// `Image.resize((width, height), Image.BICUBIC)`.
    const BY_PILLOW: [(u32, u32, u32, u32, &str); 7] = [
        (
            64,
            48,
            32,
            32,
            "29d7789678aac5709635ef5c2890a189696f028bd63040c89b0402e8bd0cce14",
        ),
        (
            50,
            70,
            128,
            96,
            "ce03ffaa1d89cd218dd7b185054fc0c598a480a7219780bce667a366482c1173",
        ),
        (
            640,
            480,
            256,
            192,
            "7715a79979de0da49c339fb11d15852ba8ffd240d4be8c84a1a90be5b6821c74",
        ),
        (
            33,
            1,
            64,
            32,
            "4abb6ebfbcf451a153cf190f0fc6c8b7b186f7d1095a23fc64e4e7f9d65550b3",
        ),
        (
            100,
            100,
            100,
            64,
            "cd8b9b84a7f0ed8413e102180c64d7b1722f7eab3220a350d5295ecc37a92e1c",
        ),
        (
            101,
            37,
            101,
            37,
            "c0647d3dfea6eea5573d7798b78b5119fc05a5ada1d70b5b2afffc1d1fdfaeb1",
        ),
        (
            3,
            500,
            32,
            320,
            "013b9bb80f62111b54a2e0fc6798aac45950e07e9f6e0b0f5395a7aba531433e",
        ),
    ];

    #[test]
    fn a_resized_image_has_the_bytes_that_pillow_makes() {
        for (from_width, from_height, width, height, expected) in BY_PILLOW {
            let to = Size { width, height };
            let resized = resize(pattern(from_width, from_height), to, Filter::Bicubic);
            assert_eq!((resized.width(), resized.height()), (width, height));
            let what = format!("{from_width} x {from_height} to {width} x {height}");
            assert_eq!(sum(resized.rgb()), expected, "{what}");
        }
    }

    /// SHA-256 of the bytes that Pillow 12.3 makes of the same pattern by
    /// `Image.resize((width, height), Image.BILINEAR)`.
    const BILINEAR_BY_PILLOW: [(u32, u32, u32, u32, &str); 5] = [
        (
            64,
            48,
            32,
            32,
            "09cc61ddbef57499803e7ff565acf9615b9d01d594a31d8bdc0488bd6b5c7984",
        ),
        (
            50,
            70,
            128,
            96,
            "adf108965bef6da9b94859a43d45610dbb819440fcc4b0be1d3f63fc34959c2d",
        ),
        (
            640,
            480,
            896,
            896,
            "9d697dc5a43a9b52b727453b339669db9efeeab6e1a7f5c1d1d6a07665b50676",
        ),
        (
            3,
            500,
            32,
            320,
            "1b175e3cc8b94592cdbc3d6cb15b896b40bebd44343b733fa49cc441c41848e6",
        ),
        (
            1000,
            1300,
            896,
            896,
            "f16c5223949cfca2a83273fa73566b10b5355d65cd4a79bf8e48a4d12e8d5efe",
        ),
    ];

    #[test]
    fn a_bilinear_image_has_the_bytes_that_pillow_makes() {
        for (from_width, from_height, width, height, expected) in BILINEAR_BY_PILLOW {
            let to = Size { width, height };
            let resized = resize(pattern(from_width, from_height), to, Filter::Bilinear);
            let what = format!("{from_width} x {from_height} to {width} x {height}");
            assert_eq!(sum(resized.rgb()), expected, "{what}");
        }
    }

    /// SHA-256 of the bytes that Pillow 13.0 makes of the same pattern by
    /// `Image.resize((width, height), Image.LANCZOS)`, of one side after the other.
    const LANCZOS_BY_PILLOW: [(u32, u32, u32, u32, &str); 5] = [
        (
            64,
            48,
            32,
            32,
            "75177b0de0712d9dbcf967e69c9bf088f33e421d3d7b4ea6d0098ec105dfb81e",
        ),
        (
            50,
            70,
            128,
            96,
            "4e63b7687e1ddabbd3ab2d1ae357f5f91096f1f10dc3bb22150ca90d58ad2656",
        ),
        (
            640,
            480,
            896,
            672,
            "6d3a4e1f3d582fdb21c79435bc8cb75f2dbc17d1218430432a55af06c876af10",
        ),
        (
            3,
            500,
            32,
            320,
            "e48d94f7fe2d6382d972c08e972b5f81f95a134dc2bd94c89b35381d39dbd848",
        ),
        (
            1000,
            700,
            364,
            252,
            "71c25600775d22d3a7d27c9eb4c1f4813f23f1ca9ca9db6ffeb5e41f10d19c6f",
        ),
    ];

    #[test]
    fn an_image_by_lanczos_has_the_bytes_that_pillow_makes() {
        for (from_width, from_height, width, height, expected) in LANCZOS_BY_PILLOW {
            let to = Size { width, height };
            let resized = resize(pattern(from_width, from_height), to, Filter::Lanczos);
            let what = format!("{from_width} x {from_height} to {width} x {height}");
            assert_eq!(sum(resized.rgb()), expected, "{what}");
        }
    }

    #[test]
    fn the_weights_of_each_window_sum_to_one() {
        let lengths = [(1, 1), (1, 999), (999, 1), (7, 5), (5, 7), (4096, 32)];
        let filters = [Filter::Bilinear, Filter::Bicubic, Filter::Lanczos];
        for ((from, to), filter) in lengths.into_iter().flat_map(|l| filters.map(|f| (l, f))) {
            for window in windows(from, to, filter) {
                let sum: i64 = window.weights.iter().copied().map(i64::from).sum();
                let off = (sum - (1 << FRACTION_BITS)).unsigned_abs() as usize;
                // Each weight is rounded.
                assert!(off <= window.weights.len(), "{from} to {to}: {sum}");
                assert!(window.first + window.weights.len() <= from as usize);
            }
        }
    }
}
