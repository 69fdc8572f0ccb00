//! Units and kernels against the sources, and weights against the reference.

use super::*;

/// What an entry of a source is called after the preprocessor:
/// `ENTRY(threads, blocks) name(Args a)`.
#[test]
fn every_unit_of_the_list_has_its_kernels() {
    for unit in units::units() {
        let mine = of_unit(unit.name);
        assert!(
            !mine.is_empty(),
            "unit {} is not carried out here",
            unit.name
        );
        let text = unit.text();
        let plain = text.lines().filter_map(|line| {
            let (_, rest) = line.split_once("ENTRY(")?;
            let (_, rest) = rest.split_once(") ")?;
            let (name, _) = rest.split_once('(')?;
            let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
            name.chars().all(is_name).then(|| name.to_owned())
        });
        // Those are compiled for NVIDIA alone, and this runtime is AMD's.
        let is_here = |name: &String| !name.starts_with("matmat_floats_");
        for name in plain.filter(is_here) {
            assert!(mine.contains(&name.as_str()), "{}: {name}", unit.name);
        }
    }
}

/// Rows of every type that go in come out as the reference has them; a scale
/// that is not finite is told.
#[test]
fn weights_come_out_as_the_reference_has_them() {
    use rocmforge_kernels_cpu::reference;
    use rocmforge_kernels_gpu::ops::weights::{Weights, dequantize_f16, repack, rows_f32};

    const ROWS: u64 = 5;
    const COLS: u64 = 512;
    let mut state = 0x9E37_79B9u32;
    let mut random = move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    for ty in WeightType::ALL {
        let mut memory = Memory::new(1 << 20);
        let mut room = |bytes: u64| memory.alloc(bytes).unwrap();
        let (from, at, out, flag, ids) = (
            room(1 << 14),
            room(1 << 14),
            room(1 << 14),
            room(4),
            room(12),
        );
        let row = COLS as usize / ty.block_size() * ty.block_bytes();
        let mut file: Vec<u8> = (0..ROWS as usize * row).map(|_| random()).collect();
        // No bit of an exponent that NaN needs: scales are small, wherever they are.
        for byte in &mut file {
            *byte &= 0x3B;
        }
        let weights = Weights {
            ty,
            at,
            rows: ROWS,
            cols: COLS,
        };
        memory.write(flag, &[0; 4]).unwrap();
        for first in [2, 0] {
            let n = if first == 0 { 2 } else { ROWS - 2 };
            memory
                .write(from, &file[first as usize * row..][..n as usize * row])
                .unwrap();
            run(&mut memory, &repack(weights, from, first, n, flag).unwrap()).unwrap();
        }
        assert_eq!(words(&mut memory, flag, 1, "").unwrap(), [0], "{ty}");
        let mut expected = vec![0.0; (ROWS * COLS) as usize];
        reference::dequantize(ty, &file, &mut expected).unwrap();
        let of_row = |r: usize| &expected[r * COLS as usize..][..COLS as usize];

        let wanted: Vec<u8> = [4u32, 0, 99].iter().flat_map(|i| i.to_le_bytes()).collect();
        memory.write(ids, &wanted).unwrap();
        run(&mut memory, &rows_f32(weights, ids, 3, out).unwrap()).unwrap();
        let zeros = vec![0.0; COLS as usize];
        let rows = [of_row(4), of_row(0), &zeros].concat();
        assert_eq!(
            floats(&mut memory, out, rows.len(), "").unwrap(),
            rows,
            "{ty}"
        );

        run(&mut memory, &dequantize_f16(weights, 1, 3, out).unwrap()).unwrap();
        let halves = memory.read(out, 3 * COLS as usize * 2, "").unwrap();
        let rows = [of_row(1), of_row(2), of_row(3)].concat();
        let as_halves: Vec<u8> = rows
            .iter()
            .flat_map(|v| half::f16::from_f32(*v).to_le_bytes())
            .collect();
        assert_eq!(halves, as_halves, "{ty}");
        assert_eq!(memory.unwritten, Vec::<String>::new(), "{ty}");

        // All ones: a scale of any type is then NaN.
        memory.write(from, &vec![0xFF; row]).unwrap();
        run(&mut memory, &repack(weights, from, 3, 1, flag).unwrap()).unwrap();
        assert_eq!(words(&mut memory, flag, 1, "").unwrap(), [1], "{ty}");
        // Past the matrix.
        run(&mut memory, &repack(weights, from, 4, 2, flag).unwrap()).unwrap_err();
    }
}

#[test]
fn names_are_single() {
    let mut names: Vec<&str> = all().iter().map(|k| k.name.as_str()).collect();
    let n = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), n);
    println!("{n} kernels");
    assert_eq!(of_unit("matvec_q4_k_q6_k"), ["matvec_q4_k_q6_k"]);
    let pair = all().iter().find(|k| k.name == "matvec_q5_k_q6_k").unwrap();
    assert_eq!(
        pair.operation,
        Operation::Matvec {
            first: WeightType::Q5K,
            second: Some(WeightType::Q6K)
        }
    );
}
