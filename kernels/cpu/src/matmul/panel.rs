//! Many tokens: some columns of two groups unpacked once, to 8-bit codes and f32 scales that stay
//! in the L1 cache, then multiplied with every token.

#![expect(
    clippy::needless_range_loop,
    reason = "token t and group g index several arrays at once"
)]

use std::marker::PhantomData;

use super::super::activations::XBlock;
use super::super::formats::{Format, Group, Kind, TILE_BLOCKS};
use super::super::simd::{DOTS, Job, Line, ROWS, Simd};
use super::Product;
use super::direct::{finish, start};

/// Groups side by side: each activation that is broadcast meets both.
const GROUPS: usize = 2;
/// Tiles of a panel: 512 columns, so that its codes (16 KiB) and scales (8 KiB) leave room
/// in an L1 cache of 32 KiB.
const PANEL_TILES: usize = 2;
const PANEL_BLOCKS: usize = PANEL_TILES * TILE_BLOCKS;
/// Maximum number of tokens between two unpackings: their sums take 17 KiB, their activations
/// of a panel's width 99 KiB.
const TOKENS: usize = 22 * WIDEST;
/// Maximum number of tokens of one pass over a panel.
const WIDEST: usize = 6;

/// One quantized block of one group of rows.
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
    let all = p.x.tokens();
    // Runs of about equal length, of whole passes where possible.
    let tokens = all.div_ceil(all.div_ceil(TOKENS)).next_multiple_of(WIDEST);
    let mut sums = vec![[[0.0; ROWS]; GROUPS]; tokens.min(all)];
    for first_token in (0..all).step_by(tokens) {
        let sums = &mut sums[..tokens.min(all - first_token)];
        for g in p.groups.clone().step_by(GROUPS) {
            if g + 1 < p.groups.end {
                pair::<F, S, 2>(s, p, g, first_token, &mut panel, sums);
            } else {
                pair::<F, S, 1>(s, p, g, first_token, &mut panel, sums);
            }
        }
    }
}

/// Groups `g .. g + G` times the tokens from `first_token` on, one for each of `sums`.
fn pair<F: Format, S: Simd, const G: usize>(
    s: S,
    p: &Product<'_>,
    g: usize,
    first_token: usize,
    panel: &mut Panel,
    sums: &mut [Sums],
) {
    sums.fill([[0.0; ROWS]; GROUPS]);
    let group = |g| Group::new(p.w.ty(), p.group_bytes(g), p.w.cols() / 32);
    let mut groups: [Group<'_>; G] = [group(g); G];
    for i in 1..G {
        groups[i] = group(g + i);
    }
    for first_tile in (0..groups[0].tiles()).step_by(PANEL_TILES) {
        let first_block = first_tile * TILE_BLOCKS;
        let blocks = PANEL_BLOCKS.min(groups[0].blocks() - first_block);
        for (group, panel) in groups.iter().zip(panel.iter_mut()) {
            s.vectorize(Unpack::<F> {
                group: *group,
                first_tile,
                blocks,
                panel,
                format: PhantomData,
            });
        }
        let mut packed: [&[u8]; G] = [&[]; G];
        for i in 0..G {
            packed[i] = groups[i].tile(first_tile).bytes;
        }
        Columns {
            p,
            panel,
            first_token,
            first_block,
            blocks,
            packed,
            panel_bytes: PANEL_TILES * F::TILE_BYTES,
        }
        .multiply::<F::Kind, S>(s, sums);
    }
    for (t, sums) in sums.iter().enumerate() {
        for (i, sums) in sums.iter().enumerate().take(G) {
            p.out.set(first_token + t, (g + i) * ROWS, sums);
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

/// Tokens of one pass over a panel, at most. What the registers hold: a sum in f32 and one in i32
/// for each token and group (two, for halves), and operands.
const fn widest<K: Kind, S: Simd>() -> usize {
    match (S::TOKENS, K::HALVES) {
        (8.., false) => WIDEST,
        (8.., true) => 4,
        _ => 2,
    }
}

/// A panel and the activations that meet it.
struct Columns<'a, const G: usize> {
    p: &'a Product<'a>,
    panel: &'a Panel,
    first_token: usize,
    first_block: usize,
    blocks: usize,
    /// From where each group's share was unpacked, `panel_bytes` long.
    packed: [&'a [u8]; G],
    panel_bytes: usize,
}

impl<const G: usize> Columns<'_, G> {
    /// Adds the panel's product with each token to its sums.
    fn multiply<K: Kind, S: Simd>(&self, s: S, sums: &mut [Sums]) {
        let most = widest::<K, S>();
        // Meanwhile the next panel comes from memory, some lines a pass.
        let lines_each = self
            .panel_bytes
            .div_ceil(64)
            .div_ceil(sums.len().div_ceil(most));
        let mut ahead = self.panel_bytes;
        let mut t = 0;
        while t < sums.len() {
            for packed in self.packed {
                for line in 0..lines_each {
                    s.prefetch(packed, ahead + 64 * line);
                }
            }
            ahead += 64 * lines_each;
            let left = &mut sums[t..];
            // What is never as wide is not compiled: the guards are constants.
            t += match left.len().min(most) {
                6.. if const { widest::<K, S>() >= 6 } => self.tokens::<K, S, 6>(s, t, left),
                4.. if const { widest::<K, S>() >= 4 } => self.tokens::<K, S, 4>(s, t, left),
                2.. => self.tokens::<K, S, 2>(s, t, left),
                _ => self.tokens::<K, S, 1>(s, t, left),
            };
        }
    }

    /// The first `NT` of `sums`, which are token `t`'s and the following ones'; yields `NT`.
    fn tokens<K: Kind, S: Simd, const NT: usize>(
        &self,
        s: S,
        t: usize,
        sums: &mut [Sums],
    ) -> usize {
        let sums = sums
            .first_chunk_mut()
            .expect("the caller counted the sums left");
        // Loops, here and below: an array made by a function or mapped is a fourth of
        // all that would be compiled.
        let mut x: [&[XBlock]; NT] = [&[]; NT];
        for i in 0..NT {
            let all = self.p.x.blocks(self.first_token + t + i);
            x[i] = &all[self.first_block..][..self.blocks];
        }
        let mut panel: [&[PanelBlock]; G] = [&[]; G];
        for g in 0..G {
            panel[g] = &self.panel[g][..self.blocks];
        }
        s.vectorize(PanelProduct::<K, G, NT> {
            panel,
            x,
            sums,
            kind: PhantomData,
        });
        NT
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
                let mut x = [&self.x[0][b]; NT];
                for t in 0..NT {
                    x[t] = &self.x[t][b];
                }
                let mut w = [&self.panel[0][b]; G];
                for g in 0..G {
                    w[g] = &self.panel[g][b];
                }
                let mut dots = [[[s.begin(s.splat(0)); 2]; G]; NT];
                for t in 0..NT {
                    let [a, b] = start::<K, S>(s, x[t]);
                    dots[t] = [[s.begin(a), s.begin(b)]; G];
                }
                for j in 0..8 {
                    let into = if K::HALVES { j / DOTS } else { 0 };
                    let mut codes = [s.splat(0); G];
                    for g in 0..G {
                        codes[g] = s.line(&w[g].codes[j], half);
                    }
                    for t in 0..NT {
                        let x = s.splat(x[t].q[j]);
                        for g in 0..G {
                            let sum = &mut dots[t][g][into];
                            *sum = s.dot(*sum, j, codes[g], x, K::BITS);
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
                        let [a, b] = dots[t][g];
                        let ints = [s.end(a), s.end(b)];
                        acc[t][g] = finish::<K, S>(s, ints, scale, bias, x[t], acc[t][g]);
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
