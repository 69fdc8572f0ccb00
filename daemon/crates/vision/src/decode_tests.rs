//! Files of each format, whole, damaged and hostile, against the decoder.

use image::{ImageBuffer, Luma, LumaA, Rgb, Rgba};
use proptest::prelude::*;

use super::*;
use crate::testing::{encoded, file, pattern, png};

#[path = "decode_hostile_tests.rs"]
mod hostile;
#[path = "decode_kinds_tests.rs"]
mod kinds;

const FORMATS: [ImageFormat; 4] = [
    ImageFormat::Png,
    ImageFormat::Jpeg,
    ImageFormat::WebP,
    ImageFormat::Gif,
];

fn decoded(bytes: &[u8]) -> Result<Pixels, ImageError> {
    decode(bytes, Bounds::default())
}

#[test]
fn each_format_is_told_by_its_bytes() {
    for format in FORMATS {
        let image = pattern(40, 24);
        let found = decoded(&file(&image, format)).unwrap();
        assert_eq!((found.width(), found.height()), (40, 24), "{format:?}");
        let is_exact = matches!(format, ImageFormat::Png | ImageFormat::WebP);
        assert!(!is_exact || found == image, "{format:?}");
    }
}

#[test]
fn other_formats_and_no_image_are_refused() {
    assert_eq!(decoded(b""), Err(ImageError::Empty));
    for bytes in [
        &b"BM\x3a\0\0\0"[..],
        b"%PDF-1.7",
        b"<svg xmlns='x'/>",
        b"II*\0\x08\0\0\0",
        b"GGUF\x03\0\0\0",
        b"\x89PN",
        b"{}",
    ] {
        assert_eq!(decoded(bytes), Err(ImageError::UnknownFormat), "{bytes:?}");
    }
    let cut = ImageFormat::Png;
    let bytes = file(&pattern(9, 9), cut);
    let error = decoded(&bytes[..bytes.len() / 2]).unwrap_err();
    let told = error.to_string();
    assert!(told.starts_with("the PNG file is damaged: "), "{told}");
}

/// A PNG file whose header says this size, with the checksum that goes with it.
fn png_of_size(width: u32, height: u32) -> Vec<u8> {
    let mut bytes = png(&pattern(3, 3));
    bytes[16..20].copy_from_slice(&width.to_be_bytes());
    bytes[20..24].copy_from_slice(&height.to_be_bytes());
    let sum = crc32(&bytes[12..29]);
    bytes[29..33].copy_from_slice(&sum.to_be_bytes());
    bytes
}

fn crc32(bytes: &[u8]) -> u32 {
    let step = |sum: u32, byte: &u8| {
        (0..8).fold(sum ^ u32::from(*byte), |sum, _| {
            (sum >> 1) ^ (0xedb8_8320 * (sum & 1))
        })
    };
    !bytes.iter().fold(u32::MAX, step)
}

#[test]
fn an_image_that_says_it_is_huge_is_refused_by_its_header() {
    let told = decoded(&png_of_size(50_000, 50_000)).unwrap_err();
    let expected = ImageError::TooManyPixels {
        width: 50_000,
        height: 50_000,
        max: 64 << 20,
    };
    assert_eq!(told, expected);
    assert!(decoded(&png_of_size(0, 9)).is_err());
    assert!(decoded(&png_of_size(9, 0)).is_err());
    // A size within the bounds with the bytes of another.
    assert!(decoded(&png_of_size(4000, 4000)).is_err());
    let few = Bounds {
        pixels: 99,
        ..Bounds::default()
    };
    let error = decode(&png(&pattern(10, 10)), few).unwrap_err();
    assert!(error.to_string().contains("10 x 10 pixels; at most 99"));
    let short = Bounds {
        bytes: 10,
        ..Bounds::default()
    };
    let error = decode(&png(&pattern(10, 10)), short).unwrap_err();
    assert!(matches!(error, ImageError::TooManyBytes { max: 10, .. }));
}

#[test]
fn what_is_transparent_shows_white() {
    let mut image = ImageBuffer::from_pixel(4, 4, Rgba([200_u8, 100, 0, 255]));
    image.put_pixel(1, 0, Rgba([9, 9, 9, 0]));
    image.put_pixel(2, 0, Rgba([0, 100, 255, 128]));
    let found = decoded(&encoded(&image.into(), ImageFormat::Png)).unwrap();
    assert_eq!(
        found.rgb()[..9],
        [200, 100, 0, 255, 255, 255, 127, 177, 255]
    );
    let grey = ImageBuffer::from_pixel(1, 1, LumaA([0_u8, 0]));
    let found = decoded(&encoded(&grey.into(), ImageFormat::Png)).unwrap();
    assert_eq!(found.rgb(), [255, 255, 255]);
}

#[test]
fn sixteen_bits_and_grey_become_eight_bits_of_three_channels() {
    let deep = ImageBuffer::from_pixel(2, 2, Rgb([65_535_u16, 32_896, 0]));
    let found = decoded(&encoded(&deep.into(), ImageFormat::Png)).unwrap();
    assert_eq!(found.rgb()[..3], [255, 128, 0]);
    let grey = ImageBuffer::from_pixel(2, 2, Luma([77_u8]));
    for format in [ImageFormat::Png, ImageFormat::Jpeg] {
        let found = decoded(&encoded(&grey.clone().into(), format)).unwrap();
        assert_eq!(found.rgb(), [77; 12], "{format:?}");
    }
}

/// An EXIF block that says this orientation and nothing else.
fn exif(orientation: u8) -> Vec<u8> {
    let mut block = b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0".to_vec();
    block.extend([orientation, 0, 0, 0, 0, 0, 0, 0]);
    block
}

#[test]
fn a_photo_is_turned_as_its_exif_block_says() {
    // Left half black, right half white.
    let image = ImageBuffer::from_fn(64, 32, |x, _| Luma([if x < 32 { 0_u8 } else { 255 }]));
    let jpeg = encoded(&image.into(), ImageFormat::Jpeg);
    let turned = |orientation: u8| {
        let block = exif(orientation);
        let length = (block.len() + 8) as u16;
        let mut bytes = jpeg[..2].to_vec();
        bytes.extend([0xff, 0xe1]);
        bytes.extend(length.to_be_bytes());
        bytes.extend(b"Exif\0\0");
        bytes.extend(block);
        bytes.extend(&jpeg[2..]);
        decoded(&bytes).unwrap()
    };
    let lies = turned(1);
    assert_eq!((lies.width(), lies.height(), lies.rgb()[0]), (64, 32, 0));
    let upside_down = turned(3);
    assert_eq!((upside_down.width(), upside_down.rgb()[0]), (64, 255));
    // Turned to the right: what was left is above.
    let stands = turned(6);
    assert_eq!((stands.width(), stands.height()), (32, 64));
    assert_eq!((stands.rgb()[0], stands.rgb().last()), (0, Some(&255)));
    // Of no meaning.
    assert_eq!(turned(99).width(), 64);
}

#[test]
fn the_first_frame_of_an_animation_counts() {
    let frame = |value: u8| {
        let image = ImageBuffer::from_pixel(8, 8, Rgba([value, value, value, 255]));
        image::Frame::new(image)
    };
    let mut bytes = Vec::new();
    let mut encoder = image::codecs::gif::GifEncoder::new(&mut bytes);
    encoder.encode_frames([frame(10), frame(200)]).unwrap();
    drop(encoder);
    assert_eq!(decoded(&bytes).unwrap().rgb()[0], 10);
}

/// A JPEG file of which the size is another one, with its scan so many times.
fn jpeg_of(width: u16, height: u16, scans: usize) -> Vec<u8> {
    let mut bytes = file(&pattern(16, 16), ImageFormat::Jpeg);
    let find = |bytes: &[u8], mark: u8| bytes.windows(2).position(|w| w == [0xff, mark]).unwrap();
    let frame = find(&bytes, 0xc0);
    bytes[frame + 5..frame + 7].copy_from_slice(&height.to_be_bytes());
    bytes[frame + 7..frame + 9].copy_from_slice(&width.to_be_bytes());
    let (scan, end) = (find(&bytes, 0xda), bytes.len() - 2);
    [
        &bytes[..scan],
        &bytes[scan..end].repeat(scans),
        &bytes[end..],
    ]
    .concat()
}

#[test]
fn a_jpeg_file_that_goes_over_its_pixels_again_and_again_is_refused() {
    let error = decoded(&jpeg_of(65_000, 1000, 17)).unwrap_err();
    let expected = ImageError::TooManyScans { scans: 17, max: 16 };
    assert_eq!(error, expected);
    assert_eq!(scans(&jpeg_of(16, 16, 3)), 3);
    // What a camera puts in front of the image is no scan of it.
    let mut with_thumbnail = vec![0xff, 0xd8, 0xff, 0xe1, 0, 8];
    with_thumbnail.extend([0xff, 0xda, 0, 0, 0, 0]);
    with_thumbnail.extend(&jpeg_of(16, 16, 1)[2..]);
    assert_eq!(scans(&with_thumbnail), 1);
    assert!(decoded(&with_thumbnail).is_ok());
}

#[test]
fn a_frame_that_is_larger_than_its_gif_file_says_is_refused() {
    let mut bytes = file(&pattern(3, 3), ImageFormat::Gif);
    // At the origin, three pixels wide and high.
    let descriptor = [0x2c, 0, 0, 0, 0, 3, 0, 3, 0];
    let mut places = bytes.windows(descriptor.len());
    let frame = places.position(|place| place == descriptor).unwrap();
    bytes[frame + 5..frame + 9].fill(0xff);
    assert_eq!(header(&bytes, Bounds::default()).unwrap().width, 3);
    let error = decoded(&bytes).unwrap_err().to_string();
    assert!(error.starts_with("the GIF file is damaged"), "{error}");
}

#[test]
fn decoding_ends_at_its_deadline() {
    let late = Bounds {
        deadline: Some(Instant::now()),
        ..Bounds::default()
    };
    for format in [ImageFormat::Png, ImageFormat::Gif] {
        let error = decode(&file(&pattern(40, 24), format), late).unwrap_err();
        assert_eq!(error, ImageError::TooSlow, "{format:?}");
    }
}

#[test]
fn a_header_is_read_without_the_pixels() {
    for format in FORMATS {
        let file = file(&pattern(40, 24), format);
        let found = header(&file, Bounds::default()).unwrap();
        assert_eq!((found.width, found.height), (40, 24), "{format:?}");
        assert!(found.decoding_bytes() >= 40 * 24 * 16);
    }
    let bomb = header(&png_of_size(50_000, 50_000), Bounds::default());
    assert!(matches!(bomb, Err(ImageError::TooManyPixels { .. })));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    /// A thousand damaged files of each format: a refusal, or an image of the size that it says.
    #[test]
    fn a_damaged_file_is_refused_or_read(
        format in 0_usize..4,
        places in prop::collection::vec((0_usize..4096, 0_u8..255), 0..12),
        end in 0_usize..4096,
    ) {
        let mut bytes = file(&pattern(31, 17), FORMATS[format]);
        let n = bytes.len();
        for (place, change) in places {
            bytes[place % n] ^= change;
        }
        bytes.truncate(end.max(1).min(n));
        let bounds = Bounds {
            bytes: 1 << 20,
            pixels: 1 << 20,
            deadline: None,
        };
        if let Ok(image) = decode(&bytes, bounds) {
            let pixels = u64::from(image.width()) * u64::from(image.height());
            prop_assert!(pixels > 0 && pixels <= bounds.pixels);
            prop_assert_eq!(image.rgb().len() as u64, pixels * 3);
        }
    }

    #[test]
    fn any_bytes_behind_a_signature_are_refused_or_read(
        format in 0_usize..4,
        bytes in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        let signatures = [
            &b"\x89PNG\r\n\x1a\n"[..],
            b"\xff\xd8\xff",
            b"RIFF\x10\0\0\0WEBP",
            b"GIF89a",
        ];
        let file = [signatures[format], &bytes].concat();
        let _ = decode(&file, Bounds { bytes: 1 << 20, pixels: 1 << 20, deadline: None });
    }
}
