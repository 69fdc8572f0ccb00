//! Products: against exact ones, and bit for bit between instruction sets, batch sizes
//! and divisions of the rows.

use crate::matrices::{isas, pack_all, random_activations, random_matrix, rng};
use rand::RngExt;
use rocmforge_kernels_cpu::{
    ActivationForm, Activations, Isa, PackedMatrix, ROW_GROUP, RowsOut, WeightType, mat_mul,
    mat_mul_all, mat_mul_tokens, reference,
};

fn product(w: &PackedMatrix, packed: &[u8], x: &[f32], tokens: usize) -> Vec<f32> {
    let mut activations = Activations::new();
    activations.fill(w.isa(), ActivationForm::of(w.ty()), x, tokens, w.cols());
    let mut out = vec![f32::NAN; tokens * w.rows()];
    mat_mul_all(w, packed, &activations, &mut out);
    out
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// What 8-bit activations make of `x`, in f64, and the scale of each block.
fn rounded(x: &[f32]) -> (Vec<f64>, Vec<f64>) {
    let mut rounded = Vec::new();
    let mut scales = Vec::new();
    for x in x.chunks(32) {
        let max = x.iter().fold(0.0f32, |max, v| max.max(v.abs()));
        let d = f64::from(max / 127.0);
        rounded.extend(
            x.iter()
                .map(|v| f64::from((v * (127.0 / max)).round_ties_even()) * d),
        );
        scales.push(d);
    }
    (rounded, scales)
}

/// Rows and columns that leave a remainder everywhere: groups, pairs of groups, tiles, panels.
fn shapes(ty: WeightType) -> Vec<(usize, usize)> {
    let block = ty.block_size().max(32);
    let mut shapes = vec![
        (1, block),
        (15, 2048),
        (17, 8192 + block),
        (33, 512 + 7 * block),
        (48, 256),
        (33, 2048),
    ];
    if !ty.is_quantized() {
        shapes.extend([(18, 1), (65, 45)]);
    }
    shapes
}

#[test]
fn products_agree_with_exact_ones() {
    let mut rng = rng(21);
    for ty in WeightType::ALL {
        for (rows, cols) in shapes(ty) {
            let tokens = 9;
            let file = random_matrix(&mut rng, ty, rows, cols);
            let x = random_activations(&mut rng, tokens * cols);
            let mut weights = vec![0.0f32; rows * cols];
            reference::dequantize(ty, &file, &mut weights).unwrap();
            let exact = reference::mat_mul(ty, &file, rows, cols, &x).unwrap();
            let w = PackedMatrix::new(ty, rows, cols, Isa::Scalar).unwrap();
            let y = product(&w, &pack_all(&w, &file), &x, tokens);
            for t in 0..tokens {
                let x = &x[t * cols..][..cols];
                let (x_rounded, scales) = if ty.is_quantized() {
                    rounded(x)
                } else {
                    (vec![], vec![])
                };
                for r in 0..rows {
                    let weights = &weights[r * cols..][..cols];
                    let (y, exact) = (f64::from(y[t * rows + r]), exact[t * rows + r]);
                    let sum = |f: &dyn Fn(usize, f64) -> f64| -> f64 {
                        weights
                            .iter()
                            .enumerate()
                            .map(|(k, w)| f(k, f64::from(*w)))
                            .sum()
                    };
                    // f32 sums of up to 9000 terms, some of which cancel (code
                    // times q against the min).
                    let magnitude = sum(&|k, w| (w.abs() + 0.05) * f64::from(x[k].abs()));
                    let what =
                        || format!("{ty} {rows} x {cols}, token {t} row {r}: {y} for {exact}");
                    if !ty.is_quantized() {
                        assert!((y - exact).abs() <= 2e-6 * magnitude, "{}", what());
                        continue;
                    }
                    // The integer scheme itself: exact but for f32 rounding,
                    // given the rounded activations.
                    let scheme = sum(&|k, w| w * x_rounded[k]);
                    assert!(
                        (y - scheme).abs() <= 2e-5 * magnitude,
                        "{}, the scheme gives {scheme}",
                        what()
                    );
                    // Rounding an activation errs by d / sqrt(12) in the mean square;
                    // six times that over the row.
                    let deviation = (sum(&|k, w| (w * scales[k / 32]).powi(2)) / 12.0).sqrt();
                    assert!(
                        (y - exact).abs() <= 6.0 * deviation + 2e-5 * magnitude,
                        "{} +- {deviation}",
                        what()
                    );
                }
            }
        }
    }
}

#[test]
fn every_instruction_set_gives_the_same_bits() {
    let mut rng = rng(22);
    for ty in WeightType::ALL {
        for (rows, cols) in shapes(ty) {
            let file = random_matrix(&mut rng, ty, rows, cols);
            for tokens in (1..=9).chain([16, 33, 131]) {
                if tokens == 131 && (rows, cols) != (33, 2048) {
                    continue;
                }
                let x = random_activations(&mut rng, tokens * cols);
                let w = PackedMatrix::new(ty, rows, cols, Isa::Scalar).unwrap();
                let packed = pack_all(&w, &file);
                let expected = bits(&product(&w, &packed, &x, tokens));
                for isa in isas() {
                    let w = PackedMatrix::new(ty, rows, cols, isa).unwrap();
                    let y = bits(&product(&w, &packed, &x, tokens));
                    assert_eq!(y, expected, "{ty} {isa:?} {rows} x {cols}, {tokens} tokens");
                }
            }
        }
    }
}

/// Sums of products in 16 bits saturate where too many are added up.
#[test]
fn the_largest_codes_and_activations_do_not_saturate() {
    let (rows, cols) = (16, 512);
    let mut rng = rng(0x0d07);
    let mut tried = 0;
    for ty in WeightType::ALL.into_iter().filter(|ty| ty.is_quantized()) {
        for (x, tokens) in [(1.0, 3), (-1.0, 3), (1.0, 16), (-1.0, 16)] {
            let x = vec![x; tokens * cols];
            for byte in [0x00, 0xff] {
                let mut file = random_matrix(&mut rng, ty, rows, cols);
                let kept = reference::half_floats(ty);
                for block in file.chunks_exact_mut(ty.block_bytes()) {
                    for (at, old) in block.iter_mut().enumerate() {
                        if !kept.iter().any(|&half| (half..half + 2).contains(&at)) {
                            *old = byte;
                        }
                    }
                }
                let w = PackedMatrix::new(ty, rows, cols, Isa::Scalar).unwrap();
                let mut packed = vec![0; w.packed_bytes()];
                if w.pack(&file, 0..w.row_groups(), &mut packed).is_err() {
                    // Its scales are among the bytes, and are not finite now.
                    continue;
                }
                let expected = bits(&product(&w, &packed, &x, tokens));
                for isa in isas() {
                    let w = PackedMatrix::new(ty, rows, cols, isa).unwrap();
                    let y = bits(&product(&w, &pack_all(&w, &file), &x, tokens));
                    assert_eq!(y, expected, "{ty} {isa:?} {byte:#x}, {tokens} tokens");
                }
                tried += 1;
            }
        }
    }
    assert!(tried > 100, "only {tried} products");
}

#[test]
fn a_token_does_not_depend_on_its_batch() {
    let mut rng = rng(23);
    for ty in WeightType::ALL {
        let (rows, cols, tokens) = (50, 1024 + 256, 150);
        let file = random_matrix(&mut rng, ty, rows, cols);
        let x = random_activations(&mut rng, tokens * cols);
        for isa in isas() {
            let w = PackedMatrix::new(ty, rows, cols, isa).unwrap();
            let packed = pack_all(&w, &file);
            let whole = product(&w, &packed, &x, tokens);
            let mut t = 0;
            while t < tokens {
                let n = rng.random_range(1..20).min(tokens - t);
                let part = product(&w, &packed, &x[t * cols..(t + n) * cols], n);
                assert_eq!(
                    bits(&part),
                    bits(&whole[t * rows..(t + n) * rows]),
                    "{ty} {isa:?} tokens {t} + {n}"
                );
                t += n;
            }
        }
    }
}

#[test]
fn groups_write_their_own_columns_only() {
    let mut rng = rng(24);
    for ty in WeightType::ALL {
        let (rows, cols) = (5 * ROW_GROUP - 3, 512);
        let file = random_matrix(&mut rng, ty, rows, cols);
        for tokens in [1, 3, 20] {
            let x = random_activations(&mut rng, tokens * cols);
            for isa in isas() {
                let w = PackedMatrix::new(ty, rows, cols, isa).unwrap();
                let packed = pack_all(&w, &file);
                let whole = product(&w, &packed, &x, tokens);
                let mut activations = Activations::new();
                activations.fill(isa, ActivationForm::Both, &x, tokens, cols);
                for groups in [0..1, 1..4, 4..5, 0..5, 2..2] {
                    let stride = rows + 7;
                    let poison = f32::from_bits(0x7fc0_1234);
                    let mut out = vec![poison; tokens * stride];
                    // SAFETY: the view goes to one call at a time.
                    let view = unsafe { RowsOut::new(&mut out, tokens, rows, stride) };
                    mat_mul(&w, &packed, &activations, groups.clone(), view);
                    for (i, y) in out.iter().enumerate() {
                        let (t, r) = (i / stride, i % stride);
                        let expected = if r < rows && groups.contains(&(r / ROW_GROUP)) {
                            whole[t * rows + r]
                        } else {
                            poison
                        };
                        assert_eq!(
                            y.to_bits(),
                            expected.to_bits(),
                            "{ty} {isa:?} {groups:?} token {t} row {r}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn workers_share_an_output() {
    let mut rng = rng(25);
    let (rows, cols, tokens) = (333, 768, 21);
    let file = random_matrix(&mut rng, WeightType::Q4K, rows, cols);
    let x = random_activations(&mut rng, tokens * cols);
    let w = PackedMatrix::new(WeightType::Q4K, rows, cols, Isa::best()).unwrap();
    let packed = pack_all(&w, &file);
    let whole = product(&w, &packed, &x, tokens);
    let mut activations = Activations::new();
    activations.fill(w.isa(), ActivationForm::Quantized, &x, tokens, cols);
    let mut out = vec![f32::NAN; tokens * rows];
    // SAFETY: every group goes to one thread.
    let view = unsafe { RowsOut::new(&mut out, tokens, rows, rows) };
    std::thread::scope(|scope| {
        for first in (0..w.row_groups()).step_by(3) {
            let (w, packed, activations) = (&w, &packed, &activations);
            scope.spawn(move || {
                mat_mul(
                    w,
                    packed,
                    activations,
                    first..(first + 3).min(w.row_groups()),
                    view,
                )
            });
        }
    });
    assert_eq!(bits(&out), bits(&whole));
}

#[test]
fn an_activation_that_is_not_finite_is_not_hidden() {
    let mut rng = rng(26);
    for ty in WeightType::ALL {
        let (rows, cols, tokens) = (16, 256, 2);
        let file = random_matrix(&mut rng, ty, rows, cols);
        let mut x = random_activations(&mut rng, tokens * cols);
        x[cols + 77] = f32::NAN;
        for isa in isas() {
            let w = PackedMatrix::new(ty, rows, cols, isa).unwrap();
            let y = product(&w, &pack_all(&w, &file), &x, tokens);
            assert!(y[..rows].iter().all(|y| y.is_finite()), "{ty} {isa:?}");
            assert!(y[rows..].iter().all(|y| y.is_nan()), "{ty} {isa:?}");
        }
    }
}

/// Tokens of three experts in one buffer, each expert's rows scattered over the output.
#[test]
fn tokens_of_a_range_land_at_their_places() {
    let (rows, cols) = (40, 64);
    let value = |i: usize| ((i * 7919 % 1009) as f32 - 504.0) / 256.0;
    let x: Vec<f32> = (0..45 * cols).map(value).collect();
    let mut all = Activations::new();
    all.fill(Isa::best(), ActivationForm::Float, &x, 45, cols);
    let w = PackedMatrix::new(WeightType::F32, rows, cols, Isa::best()).unwrap();
    let bytes: Vec<u8> = (0..rows * cols)
        .flat_map(|i| value(i + 17).to_le_bytes())
        .collect();
    let mut packed = vec![0; w.packed_bytes()];
    w.pack(&bytes, 0..w.row_groups(), &mut packed).unwrap();
    let mut plain = vec![f32::NAN; 45 * rows];
    mat_mul_all(&w, &packed, &all, &mut plain);
    // Token t goes to place 7 t mod 45.
    let places: Vec<u32> = (0..45).map(|t| 7 * t % 45).collect();
    let mut out = vec![f32::NAN; 45 * rows];
    for tokens in [0..1, 1..5, 5..5, 5..45] {
        // SAFETY: one call at a time.
        let view = unsafe { RowsOut::new(&mut out, 45, rows, rows) };
        let view = view.placed(&places[tokens.clone()]);
        mat_mul_tokens(&w, &packed, &all, tokens.clone(), 0..1, view);
        mat_mul_tokens(&w, &packed, &all, tokens, 1..w.row_groups(), view);
    }
    for (t, &place) in places.iter().enumerate() {
        assert_eq!(
            out[place as usize * rows..][..rows],
            plain[t * rows..][..rows]
        );
    }
}

#[test]
#[should_panic(expected = "places beyond the output's 2 tokens")]
fn a_place_beyond_the_output_is_refused() {
    let mut out = [0.0; 32];
    // SAFETY: nothing is written through it.
    let _ = unsafe { RowsOut::new(&mut out, 2, 16, 16) }.placed(&[0, 2]);
}
