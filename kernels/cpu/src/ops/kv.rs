//! The key/value store on the host: views of a head in a layer of a page, and writing tokens into
//! one. The layout is [`rocmforge_ops::kv`]'s: the keys transposed, `[head_dim][slot]`, and the
//! values `[slot][head_dim]`.

use std::ops::Range;

use half::f16;
use rocmforge_ops::{KV_BLOCK, KV_PAGE_TOKENS, KvLayout, KvType};

use super::Simd;
use super::lanes::{Lanes, simd_fn};

/// Slots of a page, the stride of keys.
const SLOTS: usize = KV_PAGE_TOKENS;

/// Keys or values of one head in a page, as they are stored: keys `[head_dim][KV_PAGE_TOKENS]`,
/// values `[KV_PAGE_TOKENS][head_dim]`.
#[derive(Clone, Copy, Debug)]
pub(super) enum Stored<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    Q8_0 {
        codes: &'a [i8],
        /// Of keys `[head_dim / 32][KV_PAGE_TOKENS]`, of values `[KV_PAGE_TOKENS][head_dim / 32]`.
        scales: &'a [f16],
    },
}

impl<'a> Stored<'a> {
    /// # Panics
    /// When what is stored would not be aligned.
    #[inline(always)]
    pub(super) fn new(ty: KvType, bytes: &'a [u8]) -> Stored<'a> {
        match ty {
            KvType::F32 => Stored::F32(elements(bytes)),
            KvType::F16 => Stored::F16(elements(bytes)),
            KvType::Q8_0 => {
                let (codes, scales) = bytes.split_at(codes_len(bytes.len()));
                // SAFETY: every byte is an i8 of the same size, and needs no alignment.
                let (_, codes, _) = unsafe { codes.align_to::<i8>() };
                Stored::Q8_0 {
                    codes,
                    scales: elements(scales),
                }
            }
        }
    }

    /// The key of slot `slot`, `[head_dim]`, as f32.
    pub(super) fn read_key(&self, slot: usize, out: &mut [f32]) {
        self.read(out, |i| i * SLOTS + slot, |block| block * SLOTS + slot);
    }

    /// The value of slot `slot`, `[head_dim]`, as f32.
    pub(super) fn read_value(&self, slot: usize, out: &mut [f32]) {
        let dim = out.len();
        let first_block = slot * (dim / KV_BLOCK);
        self.read(out, |i| slot * dim + i, |block| first_block + block);
    }

    /// Element `i` of `out` is the one at `place(i)`, and the scale of a block
    /// is at `scale_place(block)`.
    #[inline(always)]
    fn read(
        &self,
        out: &mut [f32],
        place: impl Fn(usize) -> usize,
        scale_place: impl Fn(usize) -> usize,
    ) {
        for (i, out) in out.iter_mut().enumerate() {
            *out = match self {
                Stored::F32(elements) => elements[place(i)],
                Stored::F16(elements) => elements[place(i)].to_f32(),
                Stored::Q8_0 { codes, scales } => {
                    f32::from(codes[place(i)]) * scales[scale_place(i / KV_BLOCK)].to_f32()
                }
            };
        }
    }
}

/// Of the bytes of a piece of [`KvType::Q8_0`], those of the codes.
#[inline(always)]
fn codes_len(bytes: usize) -> usize {
    bytes / (KV_BLOCK + 2) * KV_BLOCK
}

/// What a page holds that has no scale beside it.
///
/// # Safety
/// Every bit pattern is one, and it has no padding.
unsafe trait Plain {}
// SAFETY: every bit pattern is an f32, which has no padding.
unsafe impl Plain for f32 {}
// SAFETY: every bit pattern is an f16, which has no padding.
unsafe impl Plain for f16 {}

#[inline(always)]
fn elements<E: Plain>(bytes: &[u8]) -> &[E] {
    // SAFETY: `Plain`.
    let (before, elements, after) = unsafe { bytes.align_to::<E>() };
    assert!(
        before.is_empty() && after.is_empty(),
        "kv page is not aligned to {} bytes",
        size_of::<E>()
    );
    elements
}

fn elements_mut<E: Plain>(bytes: &mut [u8]) -> &mut [E] {
    // SAFETY: `Plain`; what is written has no padding either.
    let (before, elements, after) = unsafe { bytes.align_to_mut::<E>() };
    assert!(
        before.is_empty() && after.is_empty(),
        "kv page is not aligned to {} bytes",
        size_of::<E>()
    );
    elements
}

/// Writes the keys and the values of consecutive tokens into the slots `slots` of `page_layer`: one
/// layer of a page, [`KvLayout::layer_bytes`] long and aligned to 4 bytes for f32, else to 2. `k`
/// is `[slots][n_head_kv][head_dim_k]`, `v` is `[slots][n_head_kv][head_dim_v]`. As f32 they stay
/// what they are. As f16 they are rounded to the nearest, beyond its range to infinity. As Q8_0 the
/// codes are rounded to the nearest, ties to even; a block with an element that is not finite, or
/// so large that the scale is not, is read as NaN.
///
/// # Panics
/// When a length or the alignment differs from the layout, or a slot is not
/// below [`KV_PAGE_TOKENS`].
pub fn kv_append(
    simd: Simd,
    layout: &KvLayout,
    page_layer: &mut [u8],
    slots: Range<usize>,
    k: &[f32],
    v: &[f32],
) {
    assert!(slots.end <= SLOTS, "kv_append: slots {slots:?} of {SLOTS}");
    assert_eq!(
        page_layer.len(),
        layout.layer_bytes(),
        "kv_append: not a layer of a page"
    );
    assert!(
        layout.fits(layout.ty),
        "kv_append: heads of no whole blocks"
    );
    let (k_width, v_width) = (
        layout.n_head_kv * layout.head_dim_k,
        layout.n_head_kv * layout.head_dim_v,
    );
    assert_eq!(
        k.len(),
        slots.len() * k_width,
        "kv_append: k has another shape"
    );
    assert_eq!(
        v.len(),
        slots.len() * v_width,
        "kv_append: v has another shape"
    );
    let (dk, dv) = (layout.head_dim_k, layout.head_dim_v);
    let (keys, values) = (layout.keys_bytes(), layout.values_bytes());
    // A head at a time: a key goes to as many cache lines as it has elements, and the
    // next slot's to the same ones.
    for head in 0..layout.n_head_kv {
        let to = &mut page_layer[layout.k_offset_bytes(head)..][..keys];
        for (i, slot) in slots.clone().enumerate() {
            let key = &k[i * k_width + head * dk..][..dk];
            write_key(simd, layout.ty, to, slot, key);
        }
        let to = &mut page_layer[layout.v_offset_bytes(head)..][..values];
        for (i, slot) in slots.clone().enumerate() {
            let value = &v[i * v_width + head * dv..][..dv];
            write_value(simd, layout.ty, to, slot, value);
        }
    }
}

/// Writes the key of one slot of a head.
fn write_key(simd: Simd, ty: KvType, head: &mut [u8], slot: usize, from: &[f32]) {
    let mut narrowed = [f16::ZERO; KV_BLOCK];
    match ty {
        KvType::F32 => scatter(from, elements_mut(head), slot),
        KvType::F16 => {
            let blocks = elements_mut(head).chunks_mut(KV_BLOCK * SLOTS);
            for (from, to) in from.chunks(KV_BLOCK).zip(blocks) {
                let narrowed = &mut narrowed[..from.len()];
                narrow(simd, from, narrowed);
                scatter(narrowed, to, slot);
            }
        }
        KvType::Q8_0 => {
            let (codes, scales) = head.split_at_mut(codes_len(head.len()));
            let scales = elements_mut(scales).chunks_exact_mut(SLOTS);
            let blocks = codes.chunks_exact_mut(KV_BLOCK * SLOTS).zip(scales);
            for (from, (to, scales)) in from.chunks_exact(KV_BLOCK).zip(blocks) {
                let mut codes = [0u8; KV_BLOCK];
                quantize(simd, from, &mut codes, &mut scales[slot..][..1]);
                scatter(&codes, to, slot);
            }
        }
    }
}

/// `to[i][slot] = from[i]`, `to` being `[from.len()][KV_PAGE_TOKENS]`.
#[inline(always)]
fn scatter<E: Copy>(from: &[E], to: &mut [E], slot: usize) {
    assert!(slot < SLOTS && to.len() == from.len() * SLOTS);
    for (to, from) in to.chunks_exact_mut(SLOTS).zip(from) {
        to[slot] = *from;
    }
}

/// Writes the value of one slot of a head.
fn write_value(simd: Simd, ty: KvType, head: &mut [u8], slot: usize, from: &[f32]) {
    let dim = from.len();
    match ty {
        KvType::F32 => elements_mut(head)[slot * dim..][..dim].copy_from_slice(from),
        KvType::F16 => narrow(simd, from, &mut elements_mut(head)[slot * dim..][..dim]),
        KvType::Q8_0 => {
            let (codes, scales) = head.split_at_mut(codes_len(head.len()));
            let blocks = dim / KV_BLOCK;
            quantize(
                simd,
                from,
                &mut codes[slot * dim..][..dim],
                &mut elements_mut(scales)[slot * blocks..][..blocks],
            );
        }
    }
}

simd_fn! {
    fn narrow(from: &[f32], to: &mut [f16]);
    simd narrow_lanes;
    scalar narrow_scalar;
}

#[inline(always)]
fn narrow_lanes<S: Lanes>(s: S, from: &[f32], to: &mut [f16]) {
    let mut froms = from.chunks_exact(S::N);
    let mut tos = to.chunks_exact_mut(S::N);
    for (from, to) in froms.by_ref().zip(tos.by_ref()) {
        s.store_f16(to, s.load(from));
    }
    narrow_scalar(froms.remainder(), tos.into_remainder());
}

fn narrow_scalar(from: &[f32], to: &mut [f16]) {
    for (from, to) in from.iter().zip(to) {
        *to = f16::from_f32(*from);
    }
}

simd_fn! {
    fn quantize(from: &[f32], codes: &mut [u8], scales: &mut [f16]);
    simd quantize_lanes;
    scalar quantize_blocks;
}

/// Quantizes with the same operations in the same order, which the compiler may do several at a
/// time.
#[inline(always)]
fn quantize_lanes<S: Lanes>(_: S, from: &[f32], codes: &mut [u8], scales: &mut [f16]) {
    quantize_blocks(from, codes, scales);
}

#[inline(always)]
fn quantize_blocks(from: &[f32], codes: &mut [u8], scales: &mut [f16]) {
    let blocks = from
        .chunks_exact(KV_BLOCK)
        .zip(codes.chunks_exact_mut(KV_BLOCK));
    for ((from, codes), scale) in blocks.zip(scales) {
        // As whole numbers absolute values are in their own order, infinity
        // behind all and NaN behind that.
        let most = from.iter().map(|x| x.to_bits() & 0x7fff_ffff).max();
        *scale = f16::from_f32(f32::from_bits(most.unwrap_or(0)) / 127.0);
        let size = scale.to_f32();
        let inverse = if size > 0.0 { 1.0 / size } else { 0.0 };
        for (code, x) in codes.iter_mut().zip(from) {
            // The smallest scales are coarse, so that a quotient may be beyond 127;
            // one that is NaN becomes 0.
            *code = (x * inverse).round_ties_even().clamp(-127.0, 127.0) as i8 as u8;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::Random;

    /// Memory for one layer of a page, aligned to 4 bytes, every byte 0xd5; as long
    /// as the layer, whole words.
    fn memory(layout: &KvLayout) -> Vec<u32> {
        assert!(layout.layer_bytes().is_multiple_of(4));
        vec![0xd5d5_d5d5; layout.layer_bytes() / 4]
    }

    fn bytes_mut(memory: &mut [u32]) -> &mut [u8] {
        // SAFETY: u32 has no padding, and bytes need no alignment.
        unsafe { memory.align_to_mut::<u8>().1 }
    }

    fn bytes(memory: &[u32]) -> &[u8] {
        // SAFETY: u32 has no padding, and bytes need no alignment.
        unsafe { memory.align_to::<u8>().1 }
    }

    /// What a token that was appended is read as, keys and values of all heads.
    fn read(layout: &KvLayout, layer: &[u8], slot: usize) -> (Vec<f32>, Vec<f32>) {
        let (mut k, mut v) = (Vec::new(), Vec::new());
        for head in 0..layout.n_head_kv {
            let at = layout.k_offset_bytes(head);
            let mut row = vec![0.0; layout.head_dim_k];
            Stored::new(layout.ty, &layer[at..][..layout.keys_bytes()]).read_key(slot, &mut row);
            k.append(&mut row);
            let at = layout.v_offset_bytes(head);
            let mut row = vec![0.0; layout.head_dim_v];
            Stored::new(layout.ty, &layer[at..][..layout.values_bytes()])
                .read_value(slot, &mut row);
            v.append(&mut row);
        }
        (k, v)
    }

    #[test]
    fn a_token_lands_in_its_slot_and_nowhere_else() {
        let mut source = Random::new("kv_append");
        for (ty, n_head_kv, head_dim_k, head_dim_v) in [
            (KvType::F16, 2, 64, 64),
            (KvType::F16, 3, 20, 7),
            (KvType::F16, 1, 33, 128),
            (KvType::F32, 2, 64, 64),
            (KvType::F32, 3, 5, 33),
            (KvType::Q8_0, 2, 64, 64),
            (KvType::Q8_0, 3, 96, 32),
            (KvType::Q8_0, 1, 576, 512),
        ] {
            let layout = KvLayout {
                n_layer: 3,
                n_head_kv,
                head_dim_k,
                head_dim_v,
                ty,
            };
            let k = source.normal(n_head_kv * head_dim_k);
            let v = source.normal(n_head_kv * head_dim_v);
            let slot = source.below(KV_PAGE_TOKENS);
            for simd in Simd::available() {
                let mut memory = memory(&layout);
                kv_append(
                    simd,
                    &layout,
                    bytes_mut(&mut memory),
                    slot..slot + 1,
                    &k,
                    &v,
                );
                let (found_k, found_v) = read(&layout, bytes(&memory), slot);
                for (expected, found) in k.iter().chain(&v).zip(found_k.iter().chain(&found_v)) {
                    let allowed = match ty {
                        KvType::F32 => 0.0,
                        KvType::F16 => expected.abs() / 2048.0,
                        // Half of the largest of a block divided by 127, and that rounded to f16.
                        KvType::Q8_0 => 6.0 / 127.0 * 0.502,
                    };
                    let difference = (expected - found).abs();
                    assert!(
                        difference <= allowed,
                        "{ty:?} {simd:?}: {found} for {expected}"
                    );
                }
                let per_head = ty.bytes(head_dim_k + head_dim_v);
                let mut others = 0;
                for other in (0..KV_PAGE_TOKENS).filter(|&other| other != slot) {
                    let (k, v) = read(&layout, bytes(&memory), other);
                    let first = match ty {
                        KvType::F32 => f32::from_bits(0xd5d5_d5d5),
                        KvType::F16 => f16::from_bits(0xd5d5).to_f32(),
                        KvType::Q8_0 => f32::from(0xd5u8 as i8) * f16::from_bits(0xd5d5).to_f32(),
                    };
                    assert!(k.iter().chain(&v).all(|&x| x == first), "{simd:?}");
                    others += n_head_kv * per_head;
                }
                assert_eq!(others + n_head_kv * per_head, layout.layer_bytes());
            }
        }
    }

    #[test]
    fn instruction_sets_write_the_same_bytes() {
        let mut source = Random::new("kv_append bytes");
        let layout = KvLayout {
            n_layer: 1,
            n_head_kv: 1,
            head_dim_k: 128,
            head_dim_v: 64,
            ty: KvType::Q8_0,
        };
        for size in [1.0, 1e-7, 3e4, 0.0] {
            let scaled = |x: Vec<f32>| -> Vec<f32> { x.iter().map(|x| x * size).collect() };
            let (k, v) = (scaled(source.normal(128)), scaled(source.normal(64)));
            let written = Simd::available().map(|simd| {
                let mut memory = memory(&layout);
                kv_append(simd, &layout, bytes_mut(&mut memory), 7..8, &k, &v);
                memory
            });
            let written: Vec<_> = written.collect();
            assert!(written.iter().all(|w| *w == written[0]), "size {size}");
        }
    }

    /// The order of a page's bytes, spelled out.
    #[test]
    fn keys_are_transposed_and_values_are_not() {
        let mut source = Random::new("kv_append order");
        let (dk, dv, n_head_kv) = (64, 32, 2);
        for ty in KvType::ALL {
            let layout = KvLayout {
                n_layer: 1,
                n_head_kv,
                head_dim_k: dk,
                head_dim_v: dv,
                ty,
            };
            let (k, v) = (source.normal(n_head_kv * dk), source.normal(n_head_kv * dv));
            let (head, slot) = (1, 1 + source.below(KV_PAGE_TOKENS - 1));
            let mut memory = memory(&layout);
            kv_append(
                Simd::detect(),
                &layout,
                bytes_mut(&mut memory),
                slot..slot + 1,
                &k,
                &v,
            );
            let layer = bytes(&memory);
            let keys = &layer[layout.k_offset_bytes(head)..][..layout.keys_bytes()];
            let values = &layer[layout.v_offset_bytes(head)..][..layout.values_bytes()];
            let half = |bytes: &[u8], at: usize| {
                f16::from_le_bytes([bytes[2 * at], bytes[2 * at + 1]]).to_f32()
            };
            let (key, value) = (&k[head * dk..][..dk], &v[head * dv..][..dv]);
            // What lies at an element's place, and at that of its block's scale.
            let at = |bytes: &[u8], at: usize, scale: usize| match ty {
                KvType::F32 => f32::from_bits(u32::from_le_bytes(std::array::from_fn(|i| {
                    bytes[4 * at + i]
                }))),
                KvType::F16 => half(bytes, at),
                KvType::Q8_0 => {
                    let (codes, scales) = bytes.split_at(codes_len(bytes.len()));
                    f32::from(codes[at] as i8) * half(scales, scale)
                }
            };
            for (i, x) in key.iter().enumerate() {
                let found = at(keys, i * 32 + slot, i / 32 * 32 + slot);
                assert!((found - x).abs() < 0.05, "{ty:?} key {i}: {found} for {x}");
            }
            for (i, x) in value.iter().enumerate() {
                let found = at(values, slot * dv + i, slot * (dv / 32) + i / 32);
                assert!(
                    (found - x).abs() < 0.05,
                    "{ty:?} value {i}: {found} for {x}"
                );
            }
        }
    }

    #[test]
    fn tokens_together_are_the_same_bytes_as_one_by_one() {
        let mut source = Random::new("kv_append several");
        for (ty, head_dim_k, head_dim_v) in [
            (KvType::F32, 5, 33),
            (KvType::F16, 33, 20),
            (KvType::F16, 128, 128),
            (KvType::Q8_0, 96, 64),
        ] {
            let layout = KvLayout {
                n_layer: 1,
                n_head_kv: 2,
                head_dim_k,
                head_dim_v,
                ty,
            };
            for slots in [0..KV_PAGE_TOKENS, 3..20, 31..32, 7..7] {
                let k = source.normal(slots.len() * 2 * head_dim_k);
                let v = source.normal(slots.len() * 2 * head_dim_v);
                for simd in Simd::available() {
                    let (mut together, mut apart) = (memory(&layout), memory(&layout));
                    let to = bytes_mut(&mut together);
                    kv_append(simd, &layout, to, slots.clone(), &k, &v);
                    let rows = k.chunks(2 * head_dim_k).zip(v.chunks(2 * head_dim_v));
                    for (slot, (k, v)) in slots.clone().zip(rows) {
                        let to = bytes_mut(&mut apart);
                        kv_append(simd, &layout, to, slot..slot + 1, k, v);
                    }
                    assert_eq!(together, apart, "{ty:?} {simd:?} {slots:?}");
                }
            }
        }
    }

    #[test]
    fn what_is_not_finite_is_never_read_as_a_number() {
        for (ty, bad) in [
            (KvType::F32, f32::NAN),
            (KvType::F32, f32::NEG_INFINITY),
            (KvType::F16, f32::NAN),
            (KvType::F16, 1e6),
            (KvType::Q8_0, f32::NAN),
            (KvType::Q8_0, -f32::NAN),
            (KvType::Q8_0, f32::INFINITY),
            (KvType::Q8_0, f32::NEG_INFINITY),
            (KvType::Q8_0, 1e7),
        ] {
            let layout = KvLayout {
                n_layer: 1,
                n_head_kv: 1,
                head_dim_k: 64,
                head_dim_v: 32,
                ty,
            };
            let mut k = vec![0.5; 64];
            k[40] = bad;
            let v = vec![0.5; 32];
            for simd in Simd::available() {
                let mut memory = memory(&layout);
                kv_append(simd, &layout, bytes_mut(&mut memory), 31..32, &k, &v);
                let (k, v) = read(&layout, bytes(&memory), 31);
                assert!(
                    !k[40].is_finite(),
                    "{ty:?} {simd:?}: {bad} became {}",
                    k[40]
                );
                let others = k[..32].iter().chain(&v);
                for x in others {
                    assert!((x - 0.5).abs() < 0.002, "{ty:?} {simd:?}: {x}");
                }
            }
        }
    }
}
