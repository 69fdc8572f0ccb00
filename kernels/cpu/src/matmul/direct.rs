//! Few tokens: packed bytes straight to registers. Bound by memory for one token:
//! reads each packed byte once.

use std::marker::PhantomData;

use super::super::activations::XBlock;
use super::super::formats::{Format, Group, Kind, Operands, TILE_BLOCKS};
use super::super::simd::{DOTS, Job, ROWS, Simd};
use super::Product;

/// How far ahead of the reads the prefetches go. A core needs some 4 KiB in flight to reach its
/// share of the memory's bandwidth, more than its out-of-order window holds; every line must be
/// prefetched, or the gaps stop the hardware's own.
const PREFETCH_BYTES: usize = 8192;

/// Runs a product.
pub(super) fn run<F: Format, S: Simd>(s: S, p: &Product<'_>) {
    let tokens = p.x.tokens();
    for g in p.groups.clone() {
        let group = Group::new(p.w.ty(), p.group_bytes(g), p.w.cols() / 32);
        let mut t = 0;
        while t < tokens {
            // The guards are constants: what is never as wide is not compiled.
            t += match tokens - t {
                8.. if const { S::TOKENS >= 8 } => one::<F, S, 8>(s, p, group, g, t),
                4.. if const { S::TOKENS >= 4 } => one::<F, S, 4>(s, p, group, g, t),
                2.. if const { S::TOKENS >= 2 } => one::<F, S, 2>(s, p, group, g, t),
                _ => one::<F, S, 1>(s, p, group, g, t),
            };
        }
    }
}

/// One group, `NT` tokens from `t` on; yields `NT`.
fn one<F: Format, S: Simd, const NT: usize>(
    s: S,
    p: &Product<'_>,
    group: Group<'_>,
    g: usize,
    t: usize,
) -> usize {
    let mut x: [&[XBlock]; NT] = [&[]; NT];
    for (i, x) in x.iter_mut().enumerate() {
        *x = p.x.blocks(t + i);
    }
    let y = s.vectorize(GroupProduct::<F, NT> {
        group,
        x,
        format: PhantomData,
    });
    for (i, y) in y.iter().enumerate() {
        p.out.set(t + i, g * ROWS, y);
    }
    NT
}

/// 16 rows times `NT` tokens.
struct GroupProduct<'a, F, const NT: usize> {
    group: Group<'a>,
    x: [&'a [XBlock]; NT],
    format: PhantomData<F>,
}

impl<F: Format, const NT: usize> Job for GroupProduct<'_, F, NT> {
    type Output = [[f32; ROWS]; NT];

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> [[f32; ROWS]; NT] {
        let mut out = [[0.0; ROWS]; NT];
        for half in 0..ROWS / S::LANES {
            let mut acc = [s.splat_f(0.0); NT];
            for t in 0..self.group.tiles() {
                let tile = self.group.tile(t);
                let mut state = F::open(s, tile, half);
                for b in 0..tile.blocks {
                    let operands = F::block(s, tile, &mut state, b, half);
                    let step = F::TILE_BYTES / TILE_BLOCKS;
                    for line in 0..step.div_ceil(64) {
                        s.prefetch(tile.bytes, PREFETCH_BYTES + b * step + line * 64);
                    }
                    for (acc, x) in acc.iter_mut().zip(&self.x) {
                        *acc = block_product::<F::Kind, S>(
                            s,
                            &operands,
                            &x[t * TILE_BLOCKS + b],
                            *acc,
                        );
                    }
                }
            }
            for (out, acc) in out.iter_mut().zip(acc) {
                s.store_floats(out, half, acc);
            }
        }
        out
    }
}

/// Adds one block's product to `acc`.
#[inline(always)]
fn block_product<K: Kind, S: Simd>(s: S, w: &Operands<S>, x: &XBlock, acc: S::F) -> S::F {
    let [a, b] = start::<K, S>(s, x);
    let mut sums = [s.begin(a), s.begin(b)];
    for j in 0..8 {
        let into = if K::HALVES { j / DOTS } else { 0 };
        sums[into] = s.dot(sums[into], j, w.w[j], s.splat(x.q[j]), K::BITS);
    }
    let ints = [s.end(sums[0]), s.end(sums[1])];
    finish::<K, S>(s, ints, w.scale, w.bias, x, acc)
}

/// The integer sums before the first product.
#[inline(always)]
pub(super) fn start<K: Kind, S: Simd>(s: S, x: &XBlock) -> [S::I; 2] {
    // With a bias there is no offset, and centred codes have it in them.
    if K::BIAS || (S::PAIRS && K::BITS == 8) {
        return [s.splat(0); 2];
    }
    match K::HALVES {
        false => [s.shl(s.splat(x.neg_sum), K::OFFSET_LOG2), s.splat(0)],
        true => {
            let [a, b] = x.neg_half_sums;
            [
                s.shl(s.splat(a), K::OFFSET_LOG2),
                s.shl(s.splat(b), K::OFFSET_LOG2),
            ]
        }
    }
}

/// Scales a block's integer sums and adds them to `acc`.
#[inline(always)]
pub(super) fn finish<K: Kind, S: Simd>(
    s: S,
    ints: [S::I; 2],
    scale: [S::F; 2],
    bias: [S::F; 2],
    x: &XBlock,
    acc: S::F,
) -> S::F {
    let mut p = s.mul(s.to_f(ints[0]), scale[0]);
    if K::HALVES {
        p = s.fma(s.to_f(ints[1]), scale[1], p);
    }
    if K::BIAS {
        if K::HALVES {
            p = s.fma(bias[0], s.to_f(s.splat(x.neg_half_sums[0])), p);
            p = s.fma(bias[1], s.to_f(s.splat(x.neg_half_sums[1])), p);
        } else {
            p = s.fma(bias[0], s.to_f(s.splat(x.neg_sum)), p);
        }
    }
    s.fma(p, s.splat_f(x.d), acc)
}
