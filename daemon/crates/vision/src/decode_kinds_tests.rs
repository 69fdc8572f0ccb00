//! Kinds of pixels that cameras and design programs write, each with the values that Pillow 13
//! gives; where it is transparent, those of Pillow's `alpha_composite` on white.
//!
//! The files are written here bit by bit: the encoders at hand write none of them.

use image::{Rgba, RgbaImage};

use super::{ImageFormat, crc32, decoded, encoded};

/// The bytes of a text's bits, filled up with ones.
fn packed(bits: &str) -> Vec<u8> {
    let bits: Vec<_> = bits.bytes().map(|bit| bit - b'0').collect();
    let byte = |bits: &[u8]| {
        let rest = 8 - bits.len();
        bits.iter()
            .chain(&[1; 8][..rest])
            .fold(0, |byte, bit| byte * 2 + bit)
    };
    bits.chunks(8).map(byte).collect()
}

/// A segment of a JPEG file.
fn segment(kind: u8, body: &[u8]) -> Vec<u8> {
    let length = (body.len() as u16 + 2).to_be_bytes();
    [&[0xff, kind][..], &length, body].concat()
}

/// A JPEG file of 16 by 8 pixels: of each component the blocks, which have one value each, and in
/// how many columns of blocks they lie together. `transform` is that of Adobe's segment, if there
/// is one: 0 for RGB and CMYK, 2 for YCCK.
fn jpeg(components: &[(&[u8], u8)], transform: Option<u8>) -> Vec<u8> {
    let adobe = |transform| segment(0xee, &[b"Adobe\0\x64\0\0\0\0", &[transform][..]].concat());
    let numbered = || (1..).zip(components);
    let n = components.len() as u8;
    let frame = numbered().flat_map(|(id, (_, columns))| [id, columns << 4 | 1, 0]);
    let frame: Vec<_> = [8, 0, 8, 0, 16, n].into_iter().chain(frame).collect();
    let scan = numbered().flat_map(|(id, _)| [id, 0]);
    let scan: Vec<_> = [n].into_iter().chain(scan).chain([0, 63, 0]).collect();
    // The codes of 0 to 8 bits of a difference have four bits, that of a block's end has one.
    let mut of_differences = vec![0, 0, 0, 0, 9];
    of_differences.resize(17, 0);
    of_differences.extend(0..9);
    let mut of_ends = vec![0x10, 1];
    of_ends.resize(18, 0);
    let mut data = packed(&bits_of(components));
    for at in (0..data.len())
        .rev()
        .filter(|&at| data[at] == 0xff)
        .collect::<Vec<_>>()
    {
        data.insert(at + 1, 0);
    }
    [
        vec![0xff, 0xd8],
        transform.map(adobe).unwrap_or_default(),
        // A difference of one is one of the values.
        segment(0xdb, &[&[0][..], &[8; 64]].concat()),
        segment(0xc0, &frame),
        segment(0xc4, &of_differences),
        segment(0xc4, &of_ends),
        segment(0xda, &scan),
        data,
        vec![0xff, 0xd9],
    ]
    .concat()
}

/// The bits of the blocks, as they lie in units of the largest number of columns.
fn bits_of(components: &[(&[u8], u8)]) -> String {
    let columns = components.iter().map(|(_, columns)| *columns).max();
    let mut before = vec![128_i32; components.len()];
    let mut bits = String::new();
    for unit in 0..usize::from(2 / columns.unwrap_or(1)) {
        for ((values, columns), before) in components.iter().zip(&mut before) {
            let columns = usize::from(*columns);
            for &value in &values[unit * columns..(unit + 1) * columns] {
                let difference = i32::from(value) - *before;
                *before = value.into();
                let n = (i32::BITS - difference.abs().leading_zeros()) as usize;
                bits += &format!("{n:04b}");
                let written = difference - i32::from(difference < 0);
                let written = format!("{written:032b}");
                bits += &written[32 - n..];
                bits.push('0');
            }
        }
    }
    bits
}

/// The pixels at the left and at the right of a file's first line.
fn ends(bytes: &[u8]) -> [[u8; 3]; 2] {
    let found = decoded(bytes).unwrap();
    assert_eq!((found.width(), found.height()), (16, 8));
    let at = |x: usize| [0, 1, 2].map(|c| found.rgb()[3 * x + c]);
    [at(0), at(15)]
}

#[test]
fn jpeg_files_of_four_colours_are_read_as_adobe_writes_them() {
    let whole: [(&[u8], u8); 4] = [
        (&[200, 255], 1),
        (&[100, 0], 1),
        (&[50, 128], 1),
        (&[220, 90], 1),
    ];
    // Inverted: 255 is no ink. Without Adobe's segment, too.
    for transform in [Some(0), None] {
        let found = ends(&jpeg(&whole, transform));
        assert_eq!(found, [[173, 86, 43], [90, 0, 45]], "{transform:?}");
    }
    let ycck = ends(&jpeg(&whole, Some(2)));
    assert_eq!(ycck, [[141, 0, 91], [0, 0, 80]]);
    // Of two of the colours there is one value for two columns.
    let fewer: [(&[u8], u8); 4] = [(&[200, 60], 2), (&[100], 1), (&[150], 1), (&[220, 128], 2)];
    let cmyk = ends(&jpeg(&fewer, Some(0)));
    assert_eq!(cmyk, [[173, 86, 129], [30, 50, 75]]);
    let ycck = ends(&jpeg(&fewer, Some(2)));
    assert_eq!(ycck, [[21, 53, 91], [82, 101, 123]]);
    let rgb = ends(&jpeg(&whole[..3], Some(0)));
    assert_eq!(rgb, [[200, 100, 50], [255, 0, 128]]);
}

/// A PNG file of one line: its bits a sample, its kind of colour, chunks before the data, and the
/// line's bytes.
fn png_line(
    width: u32,
    depth: u8,
    colour: u8,
    chunks: &[(&[u8; 4], &[u8])],
    line: &[u8],
) -> Vec<u8> {
    let chunk = |(kind, body): (&[u8; 4], &[u8])| {
        let sum = crc32(&[kind, body].concat()).to_be_bytes();
        [&(body.len() as u32).to_be_bytes()[..], kind, body, &sum].concat()
    };
    let header = [
        &width.to_be_bytes()[..],
        &[0, 0, 0, 1, depth, colour, 0, 0, 0],
    ]
    .concat();
    // No filter, in a block that is stored.
    let line = [&[0], line].concat();
    let (mut a, mut b) = (1_u32, 0);
    for byte in &line {
        a = (a + u32::from(*byte)) % 65_521;
        b = (a + b) % 65_521;
    }
    let n = line.len() as u16;
    let lengths = [n.to_le_bytes(), (!n).to_le_bytes()].concat();
    let sum = (b << 16 | a).to_be_bytes();
    let data = [&[0x78, 1, 1][..], &lengths, &line, &sum].concat();
    let chunks = chunks.iter().copied().map(chunk).collect::<Vec<_>>();
    [
        b"\x89PNG\r\n\x1a\n".to_vec(),
        chunk((b"IHDR", &header)),
        chunks.concat(),
        chunk((b"IDAT", &data)),
        chunk((b"IEND", &[])),
    ]
    .concat()
}

const GREY: u8 = 0;
const RGB: u8 = 2;
const PALETTE: u8 = 3;
const GREY_ALPHA: u8 = 4;
const RGB_ALPHA: u8 = 6;

#[test]
fn png_files_of_each_depth_and_kind_have_the_right_values() {
    let colours: (&[u8; 4], &[u8]) = (b"PLTE", &[200, 100, 0, 0, 100, 255, 9, 9, 9]);
    let check = |depth, colour, chunks: &[(&[u8; 4], &[u8])], line: &[u8], expected: &[u8]| {
        let width = expected.len() as u32 / 3;
        let found = decoded(&png_line(width, depth, colour, chunks, line));
        let found = found.unwrap_or_else(|error| panic!("{depth} {colour}: {error}"));
        assert_eq!(found.rgb(), expected, "{depth} bits of kind {colour}");
    };
    let greys = |values: &[u8]| values.iter().flat_map(|v| [*v; 3]).collect::<Vec<_>>();
    // A palette, and one whose colours are transparent by half and wholly.
    let solid = [200, 100, 0, 0, 100, 255, 9, 9, 9];
    check(2, PALETTE, &[colours], &[0b0001_1000], &solid);
    check(8, PALETTE, &[colours], &[0, 1, 2], &solid);
    let through = [200, 100, 0, 127, 177, 255, 255, 255, 255];
    check(
        8,
        PALETTE,
        &[colours, (b"tRNS", &[255, 128, 0])],
        &[0, 1, 2],
        &through,
    );
    // Grey.
    check(1, GREY, &[], &[0b0100_0000], &greys(&[0, 255, 0]));
    check(2, GREY, &[], &[0b0001_1011], &greys(&[0, 85, 170, 255]));
    check(4, GREY, &[], &[0x0a, 0xf0], &greys(&[0, 170, 255]));
    // Pillow cuts these at 255; they are brought to eight bits here.
    check(
        16,
        GREY,
        &[],
        &[0, 0, 0x80, 0x80, 0xff, 0xff],
        &greys(&[0, 128, 255]),
    );
    check(
        8,
        GREY_ALPHA,
        &[],
        &[100, 255, 100, 128, 100, 0],
        &greys(&[100, 177, 255]),
    );
    check(
        16,
        GREY_ALPHA,
        &[],
        &[100, 100, 255, 255, 100, 100, 128, 128],
        &greys(&[100, 177]),
    );
    // One value is transparent.
    check(
        8,
        GREY,
        &[(b"tRNS", &[0, 77])],
        &[77, 78],
        &greys(&[255, 78]),
    );
    let one = [255, 255, 255, 4, 5, 6];
    check(
        8,
        RGB,
        &[(b"tRNS", &[0, 1, 0, 2, 0, 3])],
        &[1, 2, 3, 4, 5, 6],
        &one,
    );
    // Colours of 16 bits.
    check(
        16,
        RGB,
        &[],
        &[0, 0, 0x80, 0x80, 0xff, 0xff],
        &[0, 128, 255],
    );
    let half = [0, 0, 100, 100, 255, 255, 128, 128];
    check(16, RGB_ALPHA, &[], &half, &[127, 177, 255]);
}

#[test]
fn what_is_transparent_in_gif_and_webp_files_shows_white() {
    let mut image = RgbaImage::from_pixel(2, 1, Rgba([200, 100, 0, 255]));
    image.put_pixel(1, 0, Rgba([0, 0, 0, 0]));
    for format in [ImageFormat::Gif, ImageFormat::WebP] {
        let found = decoded(&encoded(&image.clone().into(), format)).unwrap();
        assert_eq!(found.rgb(), [200, 100, 0, 255, 255, 255], "{format:?}");
    }
}
