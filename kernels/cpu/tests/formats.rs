//! Every format against its definition and against an independent
//! implementation; packing and unpacking.

use crate::matrices::{isas, pack_all, random_matrix, rng};
use rocmforge_kernels_cpu::reference::half_floats;
use rocmforge_kernels_cpu::{Error, Isa, PackedMatrix, ROW_GROUP, WeightType, reference};

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn hex(text: &str) -> Vec<u8> {
    text.as_bytes()
        .chunks(2)
        .map(|pair| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect()
}

/// data/blocks.py wrote the table with PyPI's gguf.
#[test]
fn reference_gives_the_values_of_an_independent_dequantizer() {
    let mut seen = std::collections::HashSet::new();
    for line in include_str!("data/blocks.txt").lines() {
        let mut fields = line.split(' ');
        let name = fields.next().unwrap();
        let ty = WeightType::ALL
            .into_iter()
            .find(|ty| ty.name() == name)
            .unwrap();
        let block = hex(fields.next().unwrap());
        let expected: Vec<f32> = fields
            .map(|f| f32::from_bits(u32::from_str_radix(f, 16).unwrap()))
            .collect();
        assert_eq!(
            (expected.len(), block.len()),
            (ty.block_size(), ty.block_bytes()),
            "{ty}"
        );
        let mut values = vec![f32::NAN; ty.block_size()];
        reference::dequantize(ty, &block, &mut values).unwrap();
        assert_eq!(values, expected, "{ty}");
        seen.insert(ty);
    }
    assert_eq!(
        seen.len(),
        WeightType::ALL.len(),
        "the table has every type"
    );
}

fn dequantized(ty: WeightType, block: &[u8]) -> Vec<f32> {
    let mut values = vec![f32::NAN; ty.block_size()];
    reference::dequantize(ty, block, &mut values).unwrap();
    values
}

const ONE: [u8; 2] = [0x00, 0x3c];
const TWO: [u8; 2] = [0x00, 0x40];

#[test]
fn blocks_of_32_by_hand() {
    // Weight 0 is the low nibble of byte 0, weight 16 the high one.
    let quants = |first: u8| [[first; 1].as_slice(), &[0x00; 15]].concat();
    let q4_0 = dequantized(WeightType::Q4_0, &[&TWO[..], &quants(0xf1)].concat());
    assert_eq!(
        (q4_0[0], q4_0[16], q4_0[1]),
        (2.0 * (1.0 - 8.0), 2.0 * (15.0 - 8.0), -16.0)
    );
    let q4_1 = dequantized(WeightType::Q4_1, &[&TWO[..], &ONE, &quants(0xf1)].concat());
    assert_eq!((q4_1[0], q4_1[16], q4_1[31]), (3.0, 31.0, 1.0));
    // Fifth bits of weights 0 and 31.
    let fifth = 0x8000_0001u32.to_le_bytes();
    let q5_0 = dequantized(
        WeightType::Q5_0,
        &[&TWO[..], &fifth, &quants(0xf1)].concat(),
    );
    assert_eq!((q5_0[0], q5_0[16], q5_0[31]), (2.0, -2.0, 0.0));
    let q5_1 = dequantized(
        WeightType::Q5_1,
        &[&TWO[..], &ONE, &fifth, &quants(0xf1)].concat(),
    );
    assert_eq!((q5_1[0], q5_1[16], q5_1[31]), (35.0, 31.0, 33.0));
    let q8_0 = dequantized(
        WeightType::Q8_0,
        &[&TWO[..], &[0x80, 0x7f], &[0; 30]].concat(),
    );
    assert_eq!((q8_0[0], q8_0[1], q8_0[2]), (-256.0, 254.0, 0.0));
    let iq4_nl = dequantized(WeightType::IQ4NL, &[&TWO[..], &quants(0xf1)].concat());
    assert_eq!((iq4_nl[0], iq4_nl[16], iq4_nl[1]), (-208.0, 226.0, -254.0));
    // E8M0 128 is 2; E2M1 7 is 6, 9 is -0.5.
    let mxfp4 = dequantized(WeightType::MXFP4, &[&[128][..], &quants(0x97)].concat());
    assert_eq!((mxfp4[0], mxfp4[16], mxfp4[1]), (12.0, -1.0, 0.0));
}

#[test]
fn blocks_of_256_by_hand() {
    // Q2_K: sub-block 15 has scale 3 and min 5; weight 255 is bits 6-7 of the last byte.
    let mut block = [0u8; 84];
    (block[15], block[79]) = (0x53, 0x80);
    block[80..82].copy_from_slice(&TWO);
    block[82..84].copy_from_slice(&ONE);
    let q2 = dequantized(WeightType::Q2K, &block);
    assert_eq!(
        (q2[255], q2[254], q2[0]),
        (2.0 * 3.0 * 2.0 - 5.0, -5.0, 0.0)
    );
    // Q3_K: scale 0 is 0x2f (low nibble of byte 0, bits 0-1 of byte 8), less 32; weight 0 is 1
    // with the third bit unset.
    let mut block = [0u8; 110];
    (block[32], block[96], block[104]) = (0x01, 0x0f, 0x02);
    block[108..110].copy_from_slice(&TWO);
    let q3 = dequantized(WeightType::Q3K, &block);
    assert_eq!(
        (q3[0], q3[1], q3[16]),
        (2.0 * 15.0 * -3.0, 2.0 * 15.0 * -4.0, 2.0 * -32.0 * -4.0)
    );
    // Q4_K: scale 7 is 0x3f, split between bytes 11 and 7 of the scales; min 0 is 1.
    let mut block = [0u8; 144];
    block[0..2].copy_from_slice(&TWO);
    block[2..4].copy_from_slice(&ONE);
    (block[4 + 11], block[4 + 3], block[4 + 4], block[143]) = (0x0f, 0xc0, 0x01, 0xd0);
    let q4 = dequantized(WeightType::Q4K, &block);
    assert_eq!((q4[255], q4[0]), (2.0 * 63.0 * 13.0, -1.0));
    // Q5_K: the same scales; weight 255's fifth bit is bit 7 of qh's last byte.
    let mut long = [0u8; 176];
    long[..16].copy_from_slice(&block[..16]);
    (long[47], long[175]) = (0x80, 0xd0);
    let q5 = dequantized(WeightType::Q5K, &long);
    assert_eq!((q5[255], q5[0]), (2.0 * 63.0 * 29.0, -1.0));
    // Q6_K: scale 15 is -1; weight 255 is the high nibble of the last ql and bits 6-7 of the last
    // qh.
    let mut block = [0u8; 210];
    (block[127], block[191], block[207]) = (0x70, 0x80, 0xff);
    block[208..210].copy_from_slice(&TWO);
    let q6 = dequantized(WeightType::Q6K, &block);
    assert_eq!((q6[255], q6[254], q6[0]), (-2.0 * (39.0 - 32.0), 64.0, 0.0));
}

#[test]
fn unpacked_rows_are_exactly_the_defined_values() {
    let mut rng = rng(11);
    for ty in WeightType::ALL {
        for (rows, blocks) in [(1, 1), (17, 3), (33, 11)] {
            let cols = blocks * ty.block_size();
            let file = random_matrix(&mut rng, ty, rows, cols);
            let mut expected = vec![0.0; rows * cols];
            reference::dequantize(ty, &file, &mut expected).unwrap();
            for isa in isas() {
                let w = PackedMatrix::new(ty, rows, cols, isa).unwrap();
                let packed = pack_all(&w, &file);
                for (r, expected) in expected.chunks(cols).enumerate() {
                    let mut row = vec![f32::NAN; cols];
                    w.unpack_row(&packed, r, &mut row);
                    assert_eq!(
                        bits(&row),
                        bits(expected),
                        "{ty} {isa:?} row {r} of {rows} x {cols}"
                    );
                }
            }
        }
    }
}

#[test]
fn packed_size_is_the_files() {
    for ty in WeightType::ALL {
        let w = PackedMatrix::new(ty, 64, 2048, Isa::Scalar).unwrap();
        assert_eq!(w.packed_bytes(), 64 * w.file_row_bytes(), "{ty}");
        let odd = PackedMatrix::new(ty, 17, ty.block_size(), Isa::Scalar).unwrap();
        assert!(
            odd.packed_bytes() <= 32 * odd.file_row_bytes() + 2 * 63,
            "{ty}"
        );
    }
}

#[test]
fn groups_pack_one_by_one() {
    let mut rng = rng(12);
    for ty in WeightType::ALL {
        let (rows, cols) = (3 * ROW_GROUP + 5, 2 * 256);
        let file = random_matrix(&mut rng, ty, rows, cols);
        let w = PackedMatrix::new(ty, rows, cols, Isa::Scalar).unwrap();
        let whole = pack_all(&w, &file);
        for groups in [0..1, 1..3, 3..4, 2..2] {
            let mut part = vec![0x5a; w.packed_range(groups.clone()).len()];
            w.pack(
                &file[w.file_range(groups.clone())],
                groups.clone(),
                &mut part,
            )
            .unwrap();
            assert_eq!(
                part,
                whole[w.packed_range(groups.clone())],
                "{ty} {groups:?}"
            );
        }
    }
}

#[test]
fn scales_that_are_not_finite_are_refused() {
    let mut rng = rng(13);
    let (rows, row) = (40, 37);
    for ty in WeightType::ALL {
        let cols = 3 * 256;
        let good = random_matrix(&mut rng, ty, rows, cols);
        let w = PackedMatrix::new(ty, rows, cols, Isa::Scalar).unwrap();
        let mut packed = vec![0; w.packed_bytes()];
        let last_block = (row + 1) * w.file_row_bytes() - ty.block_bytes();
        let mut cases: Vec<(usize, &[u8])> = match ty {
            WeightType::F32 => vec![(0, &[0, 0, 0x80, 0x7f]), (0, &[1, 0, 0xc0, 0xff])],
            WeightType::F16 => vec![(0, &[0x00, 0x7c]), (0, &[0x01, 0xfc])],
            WeightType::BF16 => vec![(0, &[0x80, 0x7f]), (0, &[0xc0, 0xff])],
            WeightType::MXFP4 => vec![(0, &[0xff])],
            WeightType::NVFP4 => vec![(0, &[0x80]), (3, &[0xff])],
            WeightType::IQ1M => vec![(48, &[0, 0, 0, 0, 0, 0xc0, 0, 0x70 | 0x0f])],
            _ => vec![],
        };
        for &at in half_floats(ty).iter().filter(|_| ty.is_quantized()) {
            cases.extend([
                (at, [0x00u8, 0x7c].as_slice()),
                (at, &[0x00, 0xfc]),
                (at, &[0x00, 0x7e]),
            ]);
        }
        for (at, bytes) in cases {
            let mut bad = good.clone();
            bad[last_block + at..][..bytes.len()].copy_from_slice(bytes);
            let result = w.pack(&bad, 0..w.row_groups(), &mut packed);
            assert_eq!(
                result,
                Err(Error::NotFinite { ty, row }),
                "{ty} {at} {bytes:x?}"
            );
        }
        assert_eq!(w.pack(&good, 0..w.row_groups(), &mut packed), Ok(()));
    }
}

#[test]
fn impossible_shapes_are_refused() {
    let new = |ty, rows, cols| PackedMatrix::new(ty, rows, cols, Isa::Scalar);
    assert!(matches!(
        new(WeightType::Q4_0, 4, 40),
        Err(Error::Block {
            cols: 40,
            block: 32,
            ..
        })
    ));
    assert!(matches!(
        new(WeightType::Q6K, 4, 128),
        Err(Error::Block { block: 256, .. })
    ));
    assert!(matches!(
        new(WeightType::F32, 0, 4),
        Err(Error::Shape { .. })
    ));
    assert!(matches!(
        new(WeightType::F32, 4, 0),
        Err(Error::Shape { .. })
    ));
    assert!(matches!(
        new(WeightType::F32, usize::MAX / 2, 1 << 20),
        Err(Error::Shape { .. })
    ));
    assert!(matches!(
        new(WeightType::Q8_0, 1 << 40, 1 << 40),
        Err(Error::Shape { .. })
    ));
    let w = new(WeightType::Q4_0, 20, 64).unwrap();
    let (file, mut packed) = (vec![0; 20 * 36], vec![0; w.packed_bytes()]);
    assert!(matches!(
        w.pack(&file[1..], 0..2, &mut packed),
        Err(Error::Length { .. })
    ));
    assert!(matches!(
        w.pack(&file, 0..2, &mut packed[1..]),
        Err(Error::Length { .. })
    ));
    assert!(matches!(
        w.pack(&file, 0..1, &mut packed),
        Err(Error::Length { .. })
    ));
}

#[test]
fn instruction_sets_are_checked_before_use() {
    assert_eq!(Isa::parse("scalar"), Ok(Isa::Scalar));
    assert!(matches!(Isa::parse("neon"), Err(Error::UnknownIsa { .. })));
    assert!(Isa::best().is_available());
    for isa in Isa::ALL {
        match Isa::parse(isa.name()) {
            Ok(parsed) => assert!(parsed == isa && isa.is_available()),
            Err(Error::IsaUnavailable { asked, .. }) => {
                assert!(asked == isa.name() && !isa.is_available())
            }
            Err(other) => panic!("{other}"),
        }
    }
}
