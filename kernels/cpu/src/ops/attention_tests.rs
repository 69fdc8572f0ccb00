//! Attention against a naive f64 softmax, and the invariants of its module.

use std::num::NonZeroUsize;

use super::kv::Stored;
use super::testing::{Random, assert_close, pool};
use super::{AttentionShape, AttentionSpan, Simd, attention, kv_append};
use rocmforge_ops::{KV_PAGE_TOKENS, KvLayout, KvType, alibi_slope};

/// One sequence: its pages, unused slots poisoned with NaN, and the same keys and values in f64.
struct Sequence {
    /// Bytes, in elements that are aligned to 4 of them.
    pages: Vec<Vec<f32>>,
    /// `[n_tokens][n_head_kv][head_dim]`
    keys: Vec<f64>,
    values: Vec<f64>,
}

/// NaN as f32, and either half of it as f16.
const POISON: u32 = 0x7fc0_7fc0;

fn bytes(page: &[f32]) -> &[u8] {
    // SAFETY: f32 has no padding, and bytes need no alignment.
    unsafe { page.align_to::<u8>().1 }
}

fn bytes_mut(page: &mut [f32]) -> &mut [u8] {
    // SAFETY: f32 has no padding, and bytes need no alignment.
    unsafe { page.align_to_mut::<u8>().1 }
}

impl Sequence {
    fn new(source: &mut Random, layout: &KvLayout, n_tokens: usize) -> Sequence {
        // As codes, too, it is nothing that may be read: every scale is NaN.
        let page = vec![f32::from_bits(POISON); layout.layer_bytes() / 4];
        let mut pages = vec![page; layout.pages_for(n_tokens)];
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for pos in 0..n_tokens {
            let k = source.normal(layout.n_head_kv * layout.head_dim_k);
            let v = source.normal(layout.n_head_kv * layout.head_dim_v);
            let (page, slot) = (pos / KV_PAGE_TOKENS, pos % KV_PAGE_TOKENS);
            kv_append(
                Simd::Scalar,
                layout,
                bytes_mut(&mut pages[page]),
                slot..slot + 1,
                &k,
                &v,
            );
            // What was stored; how near that is to what was given is kv_append's own test.
            let page = bytes(&pages[page]);
            for head in 0..layout.n_head_kv {
                let at = layout.k_offset_bytes(head);
                let mut row = vec![0.0; layout.head_dim_k];
                Stored::new(layout.ty, &page[at..][..layout.keys_bytes()]).read_key(slot, &mut row);
                keys.extend(row.into_iter().map(f64::from));
                let at = layout.v_offset_bytes(head);
                let mut row = vec![0.0; layout.head_dim_v];
                Stored::new(layout.ty, &page[at..][..layout.values_bytes()])
                    .read_value(slot, &mut row);
                values.extend(row.into_iter().map(f64::from));
            }
        }
        Sequence {
            pages,
            keys,
            values,
        }
    }

    fn layers(&self) -> Vec<&[u8]> {
        self.pages.iter().map(|page| bytes(page)).collect()
    }

    /// The result of the rows at `pos0..`, `q` being `[rows][n_head][head_dim_k]`.
    fn reference(&self, shape: &AttentionShape<'_>, pos0: usize, q: &[f32]) -> Vec<f64> {
        let kv = &shape.kv;
        let (dk, dv) = (kv.head_dim_k, kv.head_dim_v);
        let mut out = Vec::new();
        for (row, q) in q.chunks(shape.n_head * dk).enumerate() {
            let pos = pos0 + row;
            let first = shape
                .window
                .map_or(0, |w| (pos + 1).saturating_sub(w.get()));
            let n_tokens = self.keys.len() / (kv.n_head_kv * dk);
            let last = pos.saturating_add(shape.ahead).min(n_tokens - 1);
            for (head, q) in q.chunks(dk).enumerate() {
                let head_kv = head * kv.n_head_kv / shape.n_head;
                let at = |pos: usize, d: usize| (pos * kv.n_head_kv + head_kv) * d;
                let scores: Vec<f64> = (first..=last)
                    .map(|p| {
                        let key = &self.keys[at(p, dk)..][..dk];
                        let product = q.iter().zip(key).map(|(&q, &k)| f64::from(q) * k);
                        let score = f64::from(shape.scale) * product.sum::<f64>();
                        let falls = match shape.alibi {
                            0.0 => 0.0,
                            bias => alibi_slope(bias, shape.n_head as u32, head as u32),
                        };
                        match f64::from(shape.softcap) {
                            0.0 => score - f64::from(falls) * p.abs_diff(pos) as f64,
                            cap => cap * (score / cap).tanh(),
                        }
                    })
                    .collect();
                let max = scores.iter().copied().fold(f64::MIN, f64::max);
                let sink = shape
                    .sinks
                    .map_or(f64::NEG_INFINITY, |s| f64::from(s[head]));
                let sum: f64 = scores.iter().chain([&sink]).map(|s| (s - max).exp()).sum();
                for i in 0..dv {
                    let weighted = scores.iter().zip(first..);
                    out.push(
                        weighted
                            .map(|(s, p)| (s - max).exp() * self.values[at(p, dv) + i])
                            .sum::<f64>()
                            / sum,
                    );
                }
            }
        }
        out
    }
}

/// (n_head, n_head_kv, head_dim_k, head_dim_v)
const SHAPES: [(usize, usize, usize, usize); 12] = [
    (8, 2, 64, 64),
    (4, 4, 64, 64),
    (6, 2, 128, 128),
    (5, 1, 80, 80),
    (7, 7, 20, 36),
    (2, 1, 5, 3),
    (64, 1, 17, 96),
    (130, 2, 16, 16),
    (2, 2, 192, 128),
    (3, 1, 576, 512),
    (4, 2, 256, 256),
    (48, 1, 40, 24),
];

fn shape(
    (n_head, n_head_kv, head_dim_k, head_dim_v): (usize, usize, usize, usize),
    window: Option<usize>,
) -> AttentionShape<'static> {
    AttentionShape {
        kv: KvLayout {
            n_layer: 1,
            n_head_kv,
            head_dim_k,
            head_dim_v,
            ty: KvType::F16,
        },
        n_head,
        scale: 1.0 / (head_dim_k as f32).sqrt(),
        ahead: 0,
        window: window.and_then(NonZeroUsize::new),
        softcap: 0.0,
        sinks: None,
        alibi: 0.0,
    }
}

/// A shape in every type that its heads fit.
fn types(shape: AttentionShape<'_>) -> impl Iterator<Item = AttentionShape<'_>> {
    let fit = KvType::ALL.into_iter().filter(move |&ty| shape.kv.fits(ty));
    fit.map(move |ty| AttentionShape {
        kv: KvLayout { ty, ..shape.kv },
        ..shape
    })
}

#[test]
fn agrees_with_a_naive_softmax() {
    let mut source = Random::new("attention");
    let pool = pool(2);
    let (mut eight_bits, mut floats) = (0, 0);
    for heads in SHAPES {
        let sinks = source.normal(heads.0);
        let some = Some(1 + source.below(70));
        for (window, softcap, with_sinks) in [
            (None, 0.0, false),
            (Some(1), 0.0, true),
            (some, 1.5, true),
            (some, 0.0, false),
            (None, 1.5, false),
        ] {
            let shape = AttentionShape {
                softcap,
                sinks: with_sinks.then_some(&sinks[..]),
                ..shape(heads, window)
            };
            for shape in types(shape) {
                let n_tokens = 1 + source.below(130);
                let pos0 = source.below(n_tokens);
                let sequence = Sequence::new(&mut source, &shape.kv, n_tokens);
                let q = source.normal((n_tokens - pos0) * shape.n_head * shape.kv.head_dim_k);
                let expected = sequence.reference(&shape, pos0, &q);
                let layers = sequence.layers();
                let span = AttentionSpan {
                    n_rows: n_tokens - pos0,
                    pos0,
                    pages: &layers,
                    later: 0,
                    whole: false,
                };
                for simd in Simd::available() {
                    let mut out = vec![f32::NAN; expected.len()];
                    attention(&pool, simd, &shape, &[span], &q, &mut out);
                    let ty = shape.kv.ty;
                    let what = format!(
                        "{simd:?} {heads:?} {ty:?} {window:?} {softcap} {pos0}..{n_tokens}"
                    );
                    assert_close(&out, &expected, 1e-5, &what);
                }
                eight_bits += usize::from(shape.kv.ty == KvType::Q8_0);
                floats += usize::from(shape.kv.ty == KvType::F32);
            }
        }
    }
    assert!(eight_bits >= 20, "{eight_bits}");
    assert_eq!(floats, 5 * SHAPES.len());
}

/// What lies in a page behind the text's end is NaN, and later rows are of other spans.
#[test]
fn rows_that_attend_ahead_see_all_of_their_text_or_of_their_window() {
    let mut source = Random::new("attention ahead");
    let pool = pool(2);
    for heads in SHAPES {
        let near = 1 + source.below(70);
        for (window, ahead, alibi) in [
            (None, usize::MAX, 0.0),
            (Some(near + 1), near, 0.0),
            (None, 3, 0.0),
            (None, usize::MAX, 8.0),
        ] {
            let shape = AttentionShape {
                ahead,
                alibi,
                ..shape(heads, window)
            };
            for shape in types(shape) {
                let n_tokens = 1 + source.below(150);
                let cut = source.below(n_tokens);
                let sequence = Sequence::new(&mut source, &shape.kv, n_tokens);
                let layers = sequence.layers();
                let q = source.normal(n_tokens * shape.n_head * shape.kv.head_dim_k);
                let expected = sequence.reference(&shape, 0, &q);
                let span = |pos0: usize, end: usize| AttentionSpan {
                    n_rows: end - pos0,
                    pos0,
                    pages: &layers,
                    later: n_tokens - end,
                    whole: false,
                };
                for simd in Simd::available() {
                    let what = format!(
                        "{simd:?} {heads:?} {window:?} {ahead} {alibi} 0..{cut}..{n_tokens}"
                    );
                    let whole = [span(0, n_tokens)];
                    let parts = [span(0, cut), span(cut, n_tokens)];
                    let [whole, parts] = [&whole[..], &parts].map(|spans| {
                        let mut out = vec![f32::NAN; expected.len()];
                        attention(&pool, simd, &shape, spans, &q, &mut out);
                        out
                    });
                    assert_close(&whole, &expected, 1e-5, &what);
                    assert_eq!(whole, parts, "{what}");
                }
            }
        }
    }
}

/// A text whose rows see what was before them, and behind it an image whose rows see each other.
#[test]
fn rows_of_a_whole_span_see_all_of_it_and_others_do_not() {
    let mut source = Random::new("attention of whole spans");
    let pool = pool(2);
    for heads in SHAPES {
        for window in [None, Some(1 + source.below(70))] {
            for shape in types(shape(heads, window)) {
                let n_tokens = 2 + source.below(150);
                let cut = 1 + source.below(n_tokens - 1);
                let sequence = Sequence::new(&mut source, &shape.kv, n_tokens);
                let layers = sequence.layers();
                let width = shape.n_head * shape.kv.head_dim_k;
                let q = source.normal(n_tokens * width);
                let ahead = AttentionShape {
                    ahead: usize::MAX,
                    ..shape
                };
                let (text, image) = q.split_at(cut * width);
                let mut expected = sequence.reference(&shape, 0, text);
                expected.extend(sequence.reference(&ahead, cut, image));
                let span = |pos0: usize, end: usize| AttentionSpan {
                    n_rows: end - pos0,
                    pos0,
                    pages: &layers,
                    later: 0,
                    whole: pos0 > 0,
                };
                for simd in Simd::available() {
                    let what = format!("{simd:?} {heads:?} {window:?} 0..{cut}..{n_tokens}");
                    let mut out = vec![f32::NAN; expected.len()];
                    let spans = [span(0, cut), span(cut, n_tokens)];
                    attention(&pool, simd, &shape, &spans, &q, &mut out);
                    assert_close(&out, &expected, 1e-5, &what);
                }
            }
        }
    }
}

#[test]
fn a_row_is_the_same_bits_in_any_span_and_on_any_pool() {
    let mut source = Random::new("attention division");
    let pools = [pool(1), pool(2), pool(5)];
    for heads in SHAPES {
        let sinks = source.normal(heads.0);
        let windows = [None, Some(1 + source.below(60))];
        let shapes = windows.into_iter().flat_map(|window| {
            types(AttentionShape {
                softcap: 2.0,
                sinks: Some(&sinks),
                ..shape(heads, window)
            })
        });
        for shape in shapes {
            let n_tokens = 40 + source.below(60);
            let sequence = Sequence::new(&mut source, &shape.kv, n_tokens);
            let layers = sequence.layers();
            let (q_row, out_row) = (
                shape.n_head * shape.kv.head_dim_k,
                shape.n_head * shape.kv.head_dim_v,
            );
            let q = source.normal(n_tokens * q_row);
            for simd in Simd::available() {
                let mut expected = vec![f32::NAN; n_tokens * out_row];
                for pos in 0..n_tokens {
                    let span = AttentionSpan {
                        n_rows: 1,
                        pos0: pos,
                        pages: &layers,
                        later: 0,
                        whole: false,
                    };
                    let out = &mut expected[pos * out_row..][..out_row];
                    attention(
                        &pools[0],
                        simd,
                        &shape,
                        &[span],
                        &q[pos * q_row..][..q_row],
                        out,
                    );
                }
                for pool in &pools {
                    // Cut at random places; all spans of the sequence in one call.
                    let cut = source.below(n_tokens);
                    let spans = [(0, cut), (cut, n_tokens)].map(|(pos0, end)| AttentionSpan {
                        n_rows: end - pos0,
                        pos0,
                        pages: &layers,
                        later: 0,
                        whole: false,
                    });
                    let mut out = vec![f32::NAN; n_tokens * out_row];
                    attention(pool, simd, &shape, &spans, &q, &mut out);
                    assert!(
                        out.iter()
                            .zip(&expected)
                            .all(|(a, b)| a.to_bits() == b.to_bits()),
                        "{simd:?} {shape:?} cut at {cut} of {n_tokens}"
                    );
                }
            }
        }
    }
}

#[test]
fn spans_of_several_sequences_go_to_their_own_rows() {
    let mut source = Random::new("attention batch");
    let shape = shape(SHAPES[0], None);
    let pool = pool(3);
    let row = shape.n_head * shape.kv.head_dim_k;
    // Decoding rows of several sequences, an empty span, and a prefill.
    let lengths = [(33, 1), (64, 1), (5, 0), (70, 40), (1, 1)];
    let sequences: Vec<Sequence> = lengths
        .iter()
        .map(|&(n, _)| Sequence::new(&mut source, &shape.kv, n))
        .collect();
    let layers: Vec<Vec<&[u8]>> = sequences.iter().map(Sequence::layers).collect();
    let spans: Vec<AttentionSpan<'_>> = lengths
        .iter()
        .zip(&layers)
        .map(|(&(n, n_rows), pages)| AttentionSpan {
            n_rows,
            pos0: n - n_rows,
            pages,
            later: 0,
            whole: false,
        })
        .collect();
    let q = source.normal(43 * row);
    let mut expected = Vec::new();
    let mut rest = &q[..];
    for (span, sequence) in spans.iter().zip(&sequences) {
        let (own, others) = rest.split_at(span.n_rows * row);
        expected.extend(sequence.reference(&shape, span.pos0, own));
        rest = others;
    }
    for simd in Simd::available() {
        let mut out = vec![f32::NAN; 43 * row];
        attention(&pool, simd, &shape, &spans, &q, &mut out);
        assert_close(&out, &expected, 1e-5, &format!("{simd:?}"));
    }
}

#[test]
fn nan_reaches_the_rows_that_attend_to_it_and_no_others() {
    let mut source = Random::new("attention nan");
    let pool = pool(2);
    let n_tokens = 100;
    let bad = 37;
    for (ty, in_key) in [KvType::F16, KvType::F32]
        .into_iter()
        .flat_map(|ty| [(ty, true), (ty, false)])
    {
        let mut shape = shape(SHAPES[0], Some(50));
        shape.kv.ty = ty;
        let mut sequence = Sequence::new(&mut source, &shape.kv, n_tokens);
        let out_row = shape.n_head * shape.kv.head_dim_v;
        let q = source.normal(n_tokens * out_row);
        // Element 0 of slot 5.
        let at = match in_key {
            true => shape.kv.k_offset_bytes(1) + ty.bytes(5),
            false => shape.kv.v_offset_bytes(1) + ty.bytes(5 * 64),
        };
        let element = bytes_mut(&mut sequence.pages[1])[at..].iter_mut();
        let nan = POISON.to_le_bytes();
        element
            .zip(&nan[..ty.bytes(1)])
            .for_each(|(to, from)| *to = *from);
        let layers = sequence.layers();
        let span = AttentionSpan {
            n_rows: n_tokens,
            pos0: 0,
            pages: &layers,
            later: 0,
            whole: false,
        };
        for simd in Simd::available() {
            let mut out = vec![7f32; n_tokens * out_row];
            attention(&pool, simd, &shape, &[span], &q, &mut out);
            for (pos, row) in out.chunks(out_row).enumerate() {
                for (i, x) in row.iter().enumerate() {
                    let (head, d) = (i / 64, i % 64);
                    let attends = (bad..bad + 50).contains(&pos) && head >= 4 && (in_key || d == 0);
                    assert_eq!(
                        x.is_nan(),
                        attends,
                        "{simd:?} {ty:?} key {in_key} pos {pos} head {head} d {d}"
                    );
                }
            }
        }
    }
}

#[test]
fn pages_before_the_window_may_be_gone() {
    let mut source = Random::new("attention window");
    let shape = shape(SHAPES[0], Some(20));
    let sequence = Sequence::new(&mut source, &shape.kv, 100);
    let q = source.normal(shape.n_head * shape.kv.head_dim_k);
    let expected = sequence.reference(&shape, 99, &q);
    let mut layers = sequence.layers();
    layers[0] = &[];
    layers[1] = &[];
    let span = AttentionSpan {
        n_rows: 1,
        pos0: 99,
        pages: &layers,
        later: 0,
        whole: false,
    };
    let mut out = vec![f32::NAN; expected.len()];
    attention(&pool(1), Simd::detect(), &shape, &[span], &q, &mut out);
    assert_close(&out, &expected, 1e-5, "window");
}
