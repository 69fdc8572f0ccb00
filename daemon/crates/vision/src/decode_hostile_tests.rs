//! Files that are to take memory or time, or that have no pixels, in each format.

use std::time::{Duration, Instant};

use image::{ImageBuffer, Rgba, RgbaImage};

use super::{Bounds, ImageError, ImageFormat, crc32, decode, decoded, encoded, file};
use crate::testing::{pattern, png};

/// A chunk of a PNG file.
fn chunk(kind: &[u8; 4], body: &[u8]) -> Vec<u8> {
    let sum = crc32(&[kind, body].concat()).to_be_bytes();
    [&(body.len() as u32).to_be_bytes()[..], kind, body, &sum].concat()
}

/// The bodies of a PNG file's chunks of a kind, one behind the other.
fn bodies(bytes: &[u8], wanted: &[u8; 4]) -> Vec<u8> {
    let (mut at, mut found) = (8, Vec::new());
    while at + 12 <= bytes.len() {
        let n = u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
        if &bytes[at + 4..at + 8] == wanted {
            found.extend(&bytes[at + 8..at + 8 + n]);
        }
        at += 12 + n;
    }
    found
}

/// Some 100 kB that inflate to 48 MB.
fn bomb() -> Vec<u8> {
    let black = image::DynamicImage::from(image::RgbImage::new(4000, 4000));
    let bomb = bodies(&encoded(&black, ImageFormat::Png), b"IDAT");
    assert!(bomb.len() < 1 << 20, "{}", bomb.len());
    bomb
}

/// Data that inflates to far more than the image has pixels is not inflated beyond them, and what
/// is not shown, such as a profile of colours, is left alone where it is too long.
#[test]
fn compressed_data_of_another_size_takes_no_memory() {
    let bomb = bomb();
    let image = pattern(3, 3);
    let whole = png(&image);
    let (head, rest) = whole.split_at(33);
    for (kind, before) in [
        (b"iCCP", &b"name\0\0"[..]),
        (b"zTXt", b"Comment\0\0"),
        (b"iTXt", b"Comment\0\x01\0\0\0"),
    ] {
        let with = [head, &chunk(kind, &[before, &bomb].concat()), rest].concat();
        assert_eq!(decoded(&with).as_ref(), Ok(&image), "{kind:?}");
    }
    let too_much = [head, &chunk(b"IDAT", &bomb), &chunk(b"IEND", b"")].concat();
    let found = decoded(&too_much);
    let is_first_rows = found.as_ref().is_ok_and(|found| found.rgb() == [0; 27]);
    assert!(
        is_first_rows || matches!(found, Err(ImageError::Damaged { .. })),
        "{found:?}"
    );
}

fn frame(value: u8) -> RgbaImage {
    ImageBuffer::from_pixel(3, 3, Rgba([value, value, value, 255]))
}

/// Of animations in each format that has them, the first frame counts, however many there are.
#[test]
fn frames_behind_the_first_are_not_decoded() {
    let mut gif = Vec::new();
    let mut encoder = image::codecs::gif::GifEncoder::new(&mut gif);
    let values = (0..1000_u32).map(|at| image::Frame::new(frame((10 + at % 200) as u8)));
    encoder.encode_frames(values).unwrap();
    drop(encoder);
    // A palette is near to the colours, and a frame that is blended with what is behind, too.
    let is_ten = |bytes: &[u8]| {
        let first = decoded(bytes).unwrap();
        first.rgb().len() == 27 && first.rgb().iter().all(|x| x.abs_diff(10) < 3)
    };
    assert!(is_ten(&gif));

    // A still image of 10 with a frame of 200 behind it.
    let of = |value| encoded(&frame(value).into(), ImageFormat::Png);
    let (still, second) = (of(10), of(200));
    let (head, rest) = still.split_at(33);
    let control = |number: u32| {
        let number = number.to_be_bytes();
        let place = [[0, 0, 0, 3], [0, 0, 0, 3], [0; 4], [0; 4]].concat();
        chunk(
            b"fcTL",
            &[&number[..], &place, &[0, 1, 0, 10, 0, 0]].concat(),
        )
    };
    let frames = chunk(b"acTL", &[0, 0, 0, 2, 0, 0, 0, 0]);
    let data = [&2_u32.to_be_bytes()[..], &bodies(&second, b"IDAT")].concat();
    let (pixels, end) = rest.split_at(rest.len() - 12);
    let animated = [
        head,
        &frames,
        &control(0),
        pixels,
        &control(1),
        &chunk(b"fdAT", &data),
        end,
    ]
    .concat();
    assert!(is_ten(&animated));
    assert!(is_ten(&webp(&[10, 200])));
}

/// A chunk of a WebP file.
fn riff(kind: &[u8; 4], body: &[u8]) -> Vec<u8> {
    let pad = &[0][..body.len() % 2];
    [kind, &(body.len() as u32).to_le_bytes()[..], body, pad].concat()
}

/// An animated WebP file of frames of 3 by 3 pixels.
fn webp(values: &[u8]) -> Vec<u8> {
    let frames = values.iter().map(|&value| {
        let still = encoded(&frame(value).into(), ImageFormat::WebP);
        // Behind RIFF, the size and WEBP.
        let place = [0, 0, 0, 0, 0, 0, 2, 0, 0, 2, 0, 0, 100, 0, 0, 0];
        riff(b"ANMF", &[&place[..], &still[12..]].concat())
    });
    let header = riff(b"VP8X", &[0b0001_0010, 0, 0, 0, 2, 0, 0, 2, 0, 0]);
    let background = riff(b"ANIM", &[0; 6]);
    let body = [b"WEBP".to_vec(), header, background].concat();
    riff(
        b"RIFF",
        &[body, frames.collect::<Vec<_>>().concat()].concat(),
    )
}

/// No columns or no rows by the header, in each format that can say so.
#[test]
fn images_of_no_pixels_are_refused() {
    let mut gif = file(&pattern(3, 3), ImageFormat::Gif);
    gif[6..10].fill(0);
    let mut jpeg = file(&pattern(3, 3), ImageFormat::Jpeg);
    let frame = jpeg.windows(2).position(|w| w == [0xff, 0xc0]).unwrap();
    jpeg[frame + 5..frame + 9].fill(0);
    let mut high = jpeg.clone();
    high[frame + 8] = 3;
    // A lossy frame says its size itself.
    let lossy = [0x10, 0, 0, 0x9d, 1, 0x2a, 0, 0, 0, 0, 0, 0];
    let webp = riff(b"RIFF", &[&b"WEBP"[..], &riff(b"VP8 ", &lossy)].concat());
    for (what, bytes) in [
        ("GIF", gif),
        ("JPEG", jpeg),
        ("JPEG of a column", high),
        ("WebP", webp),
    ] {
        let error = decoded(&bytes).unwrap_err();
        let is_told = matches!(error, ImageError::Damaged { .. } | ImageError::Empty);
        assert!(is_told, "{what}: {error}");
    }
}

/// A canvas of 2^24 by 2^24 pixels, which WebP's header has room for, and a screen of a GIF file
/// of 65,535 by 65,535.
#[test]
fn canvases_beyond_the_bounds_are_refused_by_the_header() {
    let mut large = webp(&[10]);
    let at = large.windows(4).position(|w| w == b"VP8X").unwrap();
    large[at + 12..at + 18].fill(0xff);
    let mut gif = file(&pattern(3, 3), ImageFormat::Gif);
    gif[6..10].fill(0xff);
    let soon = Bounds {
        deadline: Some(Instant::now() + Duration::from_secs(60)),
        ..Bounds::default()
    };
    for bytes in [large, gif] {
        let error = decode(&bytes, soon).unwrap_err();
        let is_told = matches!(
            error,
            ImageError::TooManyPixels { .. } | ImageError::Damaged { .. }
        );
        assert!(is_told, "{error}");
    }
}
