//! Many tokens: some columns of two groups unpacked once, to 8-bit codes and f32 scales that stay in the L1 cache, then
//! multiplied with every token.

#![expect(
    clippy::needless_range_loop,
    reason = "token t and group g index several arrays at once"
)]

use std::marker::PhantomData;

use super::super::activations::XBlock;
use super::super::formats::{Format, Group, Kind, TILE_BLOCKS};
use super::super::simd::{Job, Line, ROWS, Simd};
use super::Product;
use super::direct::{finish, start};

/// Groups side by side: each activation that is broadcast meets both.
const GROUPS: usize = 2;
/// Tiles of a panel: 512 columns, so that its codes (16 KiB) and scales (8 KiB) leave room in an L1 cache of 32 KiB.
const PANEL_TILES: usize = 2;
const PANEL_BLOCKS: usize = PANEL_TILES * TILE_BLOCKS;
/// Tokens between two unpackings: their sums take 16 KiB, their activations of a panel's width 96 KiB.
const TOKENS: usize = 128;

/// One block of one group.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct PanelBlock {
    codes: [Line; 8],
    scale: [[f32; ROWS]; 2],
    bias: [[f32; ROWS]; 2],
}

const EMPTY: PanelBlock = PanelBlock {
    codes: [[0; 64]; 8],
    scale: [[0.0; ROWS]; 2],
    bias: [[0.0; ROWS]; 2],
};

type Panel = [[PanelBlock; PANEL_BLOCKS]; GROUPS];
/// Running sums of one token: 16 rows of each group.
type Sums = [[f32; ROWS]; GROUPS];

/// Runs a product.
pub(super) fn run<F: Format, S: Simd>(s: S, p: &Product<'_>) {
    let mut panel: Box<Panel> = Box::new([[EMPTY; PANEL_BLOCKS]; GROUPS]);
    let mut sums = vec![[[0.0; ROWS]; GROUPS]; TOKENS.min(p.x.tokens())];
    for first_token in (0..p.x.tokens()).step_by(TOKENS) {
        let tokens = TOKENS.min(p.x.tokens() - first_token);
        for g in p.groups.clone().step_by(GROUPS) {
            let n = GROUPS.min(p.groups.end - g);
            let sums = &mut sums[..tokens];
            sums.fill([[0.0; ROWS]; GROUPS]);
            let groups: [Group<'_>; GROUPS] = std::array::from_fn(|i| {
                Group::new(p.w.ty(), p.group_bytes(g + i.min(n - 1)), p.w.cols() / 32)
            });
            for first_tile in (0..groups[0].tiles()).step_by(PANEL_TILES) {
                let blocks = PANEL_BLOCKS.min(groups[0].blocks() - first_tile * TILE_BLOCKS);
                for (group, panel) in groups.iter().zip(panel.iter_mut()).take(n) {
                    s.vectorize(Unpack::<F> {
                        group: *group,
                        first_tile,
                        blocks,
                        panel,
                        format: PhantomData,
                    });
                }
                let columns = Columns {
                    p,
                    panel: &panel,
                    first_token,
                    first_block: first_tile * TILE_BLOCKS,
                    blocks,
                };
                if n == 1 {
                    columns.multiply::<F::Kind, S, 1>(s, sums);
                } else {
                    columns.multiply::<F::Kind, S, 2>(s, sums);
                }
            }
            for (t, sums) in sums.iter().enumerate() {
                for (i, sums) in sums.iter().enumerate().take(n) {
                    p.out.set(first_token + t, (g + i) * ROWS, sums);
                }
            }
        }
    }
}

/// Unpacks one group's share of a panel.
struct Unpack<'a, F> {
    group: Group<'a>,
    first_tile: usize,
    blocks: usize,
    panel: &'a mut [PanelBlock; PANEL_BLOCKS],
    format: PhantomData<F>,
}

impl<F: Format> Job for Unpack<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for half in 0..ROWS / S::LANES {
            for (t, blocks) in self.panel[..self.blocks]
                .chunks_mut(TILE_BLOCKS)
                .enumerate()
            {
                let tile = self.group.tile(self.first_tile + t);
                let mut state = F::open(s, tile, half);
                for (b, block) in blocks.iter_mut().enumerate() {
                    let operands = F::block(s, tile, &mut state, b, half);
                    for j in 0..8 {
                        s.store_line(&mut block.codes[j], half, operands.w[j]);
                    }
                    for i in 0..if F::Kind::HALVES { 2 } else { 1 } {
                        s.store_floats(&mut block.scale[i], half, operands.scale[i]);
                        if F::Kind::BIAS {
                            s.store_floats(&mut block.bias[i], half, operands.bias[i]);
                        }
                    }
                }
            }
        }
    }
}

/// A panel and the activations that meet it.
struct Columns<'a> {
    p: &'a Product<'a>,
    panel: &'a Panel,
    first_token: usize,
    first_block: usize,
    blocks: usize,
}

impl Columns<'_> {
    fn multiply<K: Kind, S: Simd, const G: usize>(&self, s: S, sums: &mut [Sums]) {
        let (fours, rest) = sums.as_chunks_mut::<4>();
        for (i, sums) in fours.iter_mut().enumerate() {
            self.tokens::<K, S, G, 4>(s, 4 * i, sums);
        }
        let done = 4 * fours.len();
        let (twos, one) = rest.as_chunks_mut::<2>();
        for (i, sums) in twos.iter_mut().enumerate() {
            self.tokens::<K, S, G, 2>(s, done + 2 * i, sums);
        }
        if let [sums] = one {
            self.tokens::<K, S, G, 1>(s, done + 2 * twos.len(), std::array::from_mut(sums));
        }
    }

    fn tokens<K: Kind, S: Simd, const G: usize, const NT: usize>(
        &self,
        s: S,
        t: usize,
        sums: &mut [Sums; NT],
    ) {
        let x = std::array::from_fn(|i| {
            &self.p.x.blocks(self.first_token + t + i)[self.first_block..][..self.blocks]
        });
        let panel = std::array::from_fn(|g| &self.panel[g][..self.blocks]);
        s.vectorize(PanelProduct::<K, G, NT> {
            panel,
            x,
            sums,
            kind: PhantomData,
        });
    }
}

/// `G` groups of a panel times `NT` tokens, added to `sums`.
struct PanelProduct<'a, K, const G: usize, const NT: usize> {
    panel: [&'a [PanelBlock]; G],
    x: [&'a [XBlock]; NT],
    sums: &'a mut [Sums; NT],
    kind: PhantomData<K>,
}

impl<K: Kind, const G: usize, const NT: usize> Job for PanelProduct<'_, K, G, NT> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for half in 0..ROWS / S::LANES {
            let mut acc = [[s.splat_f(0.0); G]; NT];
            for t in 0..NT {
                for g in 0..G {
                    acc[t][g] = s.floats(&self.sums[t][g], half);
                }
            }
            for b in 0..self.x[0].len() {
                let x: [&XBlock; NT] = self.x.map(|x| &x[b]);
                let w: [&PanelBlock; G] = self.panel.map(|panel| &panel[b]);
                let mut ints = [[[s.splat(0); 2]; G]; NT];
                for t in 0..NT {
                    ints[t] = [start::<K, S>(s, x[t]); G];
                }
                for j in 0..8 {
                    let into = if K::HALVES { j / 4 } else { 0 };
                    let w = w.map(|w| s.line(&w.codes[j], half));
                    for t in 0..NT {
                        let x = s.splat(x[t].q[j]);
                        for g in 0..G {
                            ints[t][g][into] = if K::WIDE {
                                s.dot::<true>(ints[t][g][into], w[g], x)
                            } else {
                                s.dot::<false>(ints[t][g][into], w[g], x)
                            };
                        }
                    }
                }
                for g in 0..G {
                    let scale = [
                        s.floats(&w[g].scale[0], half),
                        s.floats(&w[g].scale[1], half),
                    ];
                    let bias = [s.floats(&w[g].bias[0], half), s.floats(&w[g].bias[1], half)];
                    for t in 0..NT {
                        acc[t][g] = finish::<K, S>(s, ints[t][g], scale, bias, x[t], acc[t][g]);
                    }
                }
            }
            for t in 0..NT {
                for g in 0..G {
                    s.store_floats(&mut self.sums[t][g], half, acc[t][g]);
                }
            }
        }
    }
}
