//! Layers with a state of their own (`conv.hip`, `delta_net.hip`, `ssm.hip`), by their definitions.

use rocmforge_kernels_gpu::ops::recurrent::{
    CONV_CHUNK, ConvArgs, DeltaNetArgs, SequencePlace, SsmArgs,
};

use super::act::{activate, sigmoid, softplus};
use super::{Launch, args, covers, floats, store};
use crate::memory::{Fault, Memory};

/// A sequence's rows, its drafts' included, and where the state goes behind the last of its
/// own and behind each draft.
struct Sequence {
    place: SequencePlace,
    n_rows: usize,
    states_out: Vec<u64>,
}

impl Sequence {
    /// Where the state behind row `t` goes, if it is kept.
    fn state_out(&self, t: usize) -> Option<u64> {
        let behind = (t + 1).checked_sub(self.place.n_rows as usize)?;
        self.states_out.get(behind).copied()
    }
}

fn places(memory: &mut Memory, at: u64, n: u32) -> Result<Vec<Sequence>, Fault> {
    let size = size_of::<SequencePlace>();
    let bytes = memory.read(at, n as usize * size, "places of sequences")?;
    let read = |bytes| SequencePlace::from_bytes(bytes);
    let places: Option<Vec<_>> = bytes.chunks_exact(size).map(read).collect();
    let places = places.ok_or_else(|| Fault("places of another size".to_owned()))?;
    let mut sequences = Vec::new();
    for (i, place) in places.iter().enumerate().filter(|(_, p)| p.n_rows > 0) {
        let last = i + place.drafts as usize;
        let of_drafts = places.get(i + 1..=last).unwrap_or_default();
        if of_drafts.len() != place.drafts as usize || of_drafts.iter().any(|p| p.n_rows > 0) {
            return Err(Fault(format!("place {i} lacks those of its drafts")));
        }
        sequences.push(Sequence {
            place: *place,
            n_rows: (place.n_rows + place.drafts) as usize,
            states_out: places[i..=last].iter().map(|p| p.state_out).collect(),
        });
    }
    Ok(sequences)
}

/// The state that a sequence's rows begin with.
fn state(memory: &mut Memory, of: &Sequence, at: u64, n: usize) -> Result<Vec<f32>, Fault> {
    match of.place.first_position {
        0 => Ok(vec![0.0; n]),
        _ => floats(memory, of.place.state + at * 4, n, "a state"),
    }
}

fn rows_of(memory: &mut Memory, at: u64, of: &Sequence, width: usize) -> Result<Vec<f32>, Fault> {
    let first = u64::from(of.place.first_row) * width as u64 * 4;
    floats(memory, at + first, of.n_rows * width, "rows")
}

fn store_rows(
    memory: &mut Memory,
    at: u64,
    of: &Sequence,
    width: usize,
    rows: &[f32],
) -> Result<(), Fault> {
    store(
        memory,
        at + u64::from(of.place.first_row) * width as u64 * 4,
        rows,
    )
}

pub(super) fn conv(memory: &mut Memory, launch: &Launch) -> Result<(), Fault> {
    let a = args(launch, ConvArgs::from_bytes)?;
    let (channels, kernel) = (a.channels as usize, a.kernel as usize);
    covers("the grid", u64::from(launch.grid[0]) * 256, channels as u64)?;
    let weight = floats(
        memory,
        a.weight,
        channels * kernel,
        "a convolution's weight",
    )?;
    let bias = match a.bias {
        0 => vec![0.0; channels],
        at => floats(memory, at, channels, "a convolution's bias")?,
    };
    for place in places(memory, a.sequences, launch.grid[2])? {
        let chunks = u64::from(launch.grid[1]) * u64::from(CONV_CHUNK);
        covers("the grid", chunks, place.n_rows as u64)?;
        let mut inputs = state(memory, &place, a.state, (kernel - 1) * channels)?;
        inputs.extend(rows_of(memory, a.x, &place, channels)?);
        let mut out = Vec::new();
        for window in inputs.chunks(channels).collect::<Vec<_>>().windows(kernel) {
            out.extend((0..channels).map(|c| {
                let of = |j: usize| weight[c * kernel + j] * window[j][c];
                bias[c] + (0..kernel).map(of).sum::<f32>()
            }));
        }
        activate(&a.act, &mut out)?;
        store_rows(memory, a.out, &place, channels, &out)?;
        for t in 0..place.n_rows {
            let kept = &inputs[(t + 1) * channels..][..(kernel - 1) * channels];
            if let Some(to) = place.state_out(t) {
                store(memory, to + a.state * 4, kept)?;
            }
        }
    }
    Ok(())
}

pub(super) fn delta_net(memory: &mut Memory, launch: &Launch, most: u32) -> Result<(), Fault> {
    let a = args(launch, DeltaNetArgs::from_bytes)?;
    covers("the kernel's keys", u64::from(most), u64::from(a.dim_k))?;
    let (n_k, n_v) = (a.n_head_k as usize, a.n_head_v as usize);
    let (dim_k, dim_v) = (a.dim_k as usize, a.dim_v as usize);
    // 32 columns a block at most.
    let columns = u64::from(launch.grid[0]) * 32;
    covers("the grid", columns, (n_v * dim_v) as u64)?;
    let rates = floats(memory, a.a, n_v, "rates of heads")?;
    let dt_bias = floats(memory, a.dt_bias, n_v, "biases of heads")?;
    let width = 2 * n_k * dim_k + n_v * dim_v;
    let normed = |x: &[f32]| -> Vec<f32> {
        let norm = (x.iter().map(|v| v * v).sum::<f32>() + a.eps).sqrt();
        x.iter().map(|v| v / norm).collect()
    };
    for place in places(memory, a.sequences, launch.grid[1])? {
        let mut states = state(memory, &place, a.state, n_v * dim_k * dim_v)?;
        let qkv = rows_of(memory, a.qkv, &place, width)?;
        let alpha = rows_of(memory, a.alpha, &place, n_v)?;
        let beta = rows_of(memory, a.beta, &place, n_v)?;
        let mut out = Vec::new();
        for (t, row) in qkv.chunks(width).enumerate() {
            for (h, s) in states.chunks_mut(dim_k * dim_v).enumerate() {
                let g = if a.interleaved != 0 {
                    h % n_k
                } else {
                    h / (n_v / n_k)
                };
                let mut q = normed(&row[g * dim_k..][..dim_k]);
                q.iter_mut().for_each(|v| *v /= (dim_k as f32).sqrt());
                let k = normed(&row[(n_k + g) * dim_k..][..dim_k]);
                let v = &row[2 * n_k * dim_k + h * dim_v..][..dim_v];
                let decay = (rates[h] * softplus(alpha[t * n_v + h] + dt_bias[h])).exp();
                s.iter_mut().for_each(|s| *s *= decay);
                let beta = sigmoid(beta[t * n_v + h]);
                for c in 0..dim_v {
                    let seen: f32 = (0..dim_k).map(|i| s[i * dim_v + c] * k[i]).sum();
                    let change = beta * (v[c] - seen);
                    (0..dim_k).for_each(|i| s[i * dim_v + c] += k[i] * change);
                    out.push((0..dim_k).map(|i| s[i * dim_v + c] * q[i]).sum());
                }
            }
            if let Some(to) = place.state_out(t) {
                store(memory, to + a.state * 4, &states)?;
            }
        }
        store_rows(memory, a.out, &place, n_v * dim_v, &out)?;
    }
    Ok(())
}

pub(super) fn ssm(memory: &mut Memory, launch: &Launch, most: u32) -> Result<(), Fault> {
    let a = args(launch, SsmArgs::from_bytes)?;
    covers("the kernel's states", u64::from(most), u64::from(a.n_state))?;
    let (n_head, dim) = (a.n_head as usize, a.dim as usize);
    let (n_group, n_state) = (a.n_group as usize, a.n_state as usize);
    let elements = u64::from(launch.grid[0]) * 16;
    covers("the grid", elements, (n_head * dim) as u64)?;
    let rates = floats(memory, a.a, n_head, "rates of heads")?;
    let skip = floats(memory, a.skip, n_head, "skips of heads")?;
    let dt_bias = floats(memory, a.dt_bias, n_head, "biases of heads")?;
    let width = n_head * dim + 2 * n_group * n_state;
    for place in places(memory, a.sequences, launch.grid[1])? {
        let mut states = state(memory, &place, a.state, n_head * dim * n_state)?;
        let xbc = rows_of(memory, a.xbc, &place, width)?;
        let dt = rows_of(memory, a.dt, &place, n_head)?;
        let mut out = Vec::new();
        for (t, row) in xbc.chunks(width).enumerate() {
            for (i, s) in states.chunks_mut(n_state).enumerate() {
                let h = i / dim;
                let group = h / (n_head / n_group);
                let b = &row[n_head * dim + group * n_state..][..n_state];
                let c = &row[n_head * dim + (n_group + group) * n_state..][..n_state];
                let d = softplus(dt[t * n_head + h] + dt_bias[h]);
                let decay = (d * rates[h]).exp();
                s.iter_mut()
                    .zip(b)
                    .for_each(|(s, b)| *s = *s * decay + d * row[i] * b);
                let seen: f32 = s.iter().zip(c).map(|(s, c)| s * c).sum();
                out.push(seen + skip[h] * row[i]);
            }
            if let Some(to) = place.state_out(t) {
                store(memory, to + a.state * 4, &states)?;
            }
        }
        store_rows(memory, a.out, &place, n_head * dim, &out)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use rocmforge_kernels_gpu::GpuTarget;
    use rocmforge_kernels_gpu::ops::recurrent::{self, Conv, DeltaNet, Sequences, Ssm};
    use rocmforge_ops::Act;

    use super::super::run;
    use super::*;

    const ROWS: usize = 20;

    fn numbers(n: usize) -> Vec<f32> {
        (0..n)
            .map(|i| ((i * 37 % 101) as f32 - 50.0) / 40.0)
            .collect()
    }

    /// Runs rows of `width` elements at once, then in two passes on the same state, and compares; a
    /// second sequence in the same launches must not be seen by the first.
    fn in_two_passes(
        width: usize,
        state: usize,
        launch: impl Fn(Sequences) -> rocmforge_kernels_gpu::Launch,
        memory: &mut Memory,
        out: u64,
    ) {
        let places = memory.alloc(256).unwrap();
        // Before the first position memory may hold anything.
        let states = [1.0, 2.0].map(|v| {
            let at = memory.alloc(state as u64 * 4).unwrap();
            store(memory, at, &vec![v; state]).unwrap();
            at
        });
        let mut pass = |spans: [(usize, usize, usize); 2]| {
            let bytes: Vec<u8> = spans
                .iter()
                .zip(states)
                .flat_map(|(&(first_row, n_rows, first_position), state)| {
                    SequencePlace {
                        first_row: first_row as u32,
                        n_rows: n_rows as u32,
                        first_position: first_position as u32,
                        drafts: 0,
                        state,
                        state_out: state,
                        ..SequencePlace::default()
                    }
                    .to_bytes()
                })
                .collect();
            memory.write(places, &bytes).unwrap();
            let sequences = Sequences {
                places,
                n: 2,
                rows_max: ROWS as u32,
                state: 0,
            };
            run(memory, &launch(sequences)).unwrap();
            floats(memory, out, ROWS * width, "").unwrap()
        };
        let whole = pass([(0, ROWS, 0), (0, 0, 0)]);
        // Rows 0 to 12 of the first sequence; the second has others.
        let first = pass([(0, 13, 0), (13, 7, 0)]);
        let second = pass([(13, 7, 13), (0, 3, 7)]);
        assert_eq!(first[..13 * width], whole[..13 * width]);
        assert_eq!(second[13 * width..], whole[13 * width..]);
        assert_ne!(first[13 * width..], whole[13 * width..]);
        // The last four rows as drafts of the first sequence; the second one goes on from the
        // state behind one of them.
        let kept = [(); 4].map(|()| memory.alloc(state as u64 * 4).unwrap());
        let with_drafts = write_places(memory, places, |i| match i {
            0 => (0, ROWS - 4, 0, 4, states[0], states[0]),
            1..5 => (ROWS - 5 + i, 0, (ROWS - 5 + i) as u32, 0, 0, kept[i - 1]),
            _ => (0, 0, 0, 0, states[1], states[1]),
        });
        run(memory, &launch(with_drafts)).unwrap();
        assert_eq!(floats(memory, out, ROWS * width, "").unwrap(), whole);
        for right in 0..4 {
            let from = [states[0], kept[0], kept[1], kept[2]][right];
            let first = ROWS - 4 + right;
            let goes_on = write_places(memory, places, |i| match i {
                0 => (first, 4 - right, first as u32, 0, from, kept[3]),
                _ => (0, 0, 0, 0, 0, 0),
            });
            store(memory, out, &vec![f32::NAN; ROWS * width]).unwrap();
            run(memory, &launch(goes_on)).unwrap();
            let found = floats(memory, out, ROWS * width, "").unwrap();
            assert_eq!(found[first * width..], whole[first * width..], "{right}");
        }
    }

    /// Six places: first row, rows, first position, drafts, and the states.
    fn write_places(
        memory: &mut Memory,
        at: u64,
        place: impl Fn(usize) -> (usize, usize, u32, u32, u64, u64),
    ) -> Sequences {
        let place = |i| {
            let (first_row, n_rows, first_position, drafts, state, state_out) = place(i);
            SequencePlace {
                first_row: first_row as u32,
                n_rows: n_rows as u32,
                first_position,
                drafts,
                state,
                state_out,
                ..SequencePlace::default()
            }
            .to_bytes()
        };
        let bytes: Vec<u8> = (0..6).flat_map(place).collect();
        memory.write(at, &bytes).unwrap();
        Sequences {
            places: at,
            n: 6,
            rows_max: ROWS as u32,
            state: 0,
        }
    }

    #[test]
    fn a_state_carries_a_sequence_from_pass_to_pass() {
        let mut memory = Memory::new(1 << 24);
        let mut with = |values: &[f32]| {
            let at = memory.alloc(values.len() as u64 * 4).unwrap();
            store(&mut memory, at, values).unwrap();
            at
        };
        let net = DeltaNet {
            qkv: with(&numbers(ROWS * (2 * 2 * 8 + 4 * 6))),
            alpha: with(&numbers(ROWS * 4)),
            beta: with(&numbers(ROWS * 4)),
            a: with(&[-0.1, -0.2, -0.3, -0.4]),
            dt_bias: with(&[0.1, 0.2, 0.3, 0.4]),
            n_head_k: 2,
            n_head_v: 4,
            dim_k: 8,
            dim_v: 6,
            interleaved: true,
            eps: 1e-6,
            out: with(&[0.0; ROWS * 4 * 6]),
        };
        let space = Ssm {
            xbc: with(&numbers(ROWS * (4 * 6 + 2 * 2 * 8))),
            dt: net.alpha,
            a: net.a,
            skip: net.dt_bias,
            dt_bias: net.dt_bias,
            n_head: 4,
            dim: 6,
            n_group: 2,
            n_state: 8,
            out: with(&[0.0; ROWS * 4 * 6]),
        };
        let conv = Conv {
            x: with(&numbers(ROWS * 10)),
            weight: with(&numbers(40)),
            bias: None,
            channels: 10,
            kernel: 4,
            act: Act::Silu,
            out: with(&[0.0; ROWS * 10]),
        };
        let target = GpuTarget::amd("gfx1201", 64);
        let delta = |s| recurrent::delta_net(&target, &net, s).unwrap();
        in_two_passes(4 * 6, 4 * 8 * 6, delta, &mut memory, net.out);
        let states = |s| recurrent::ssm(&space, s).unwrap();
        in_two_passes(4 * 6, 4 * 6 * 8, states, &mut memory, space.out);
        let convolved = |s| recurrent::conv(&conv, s).unwrap();
        in_two_passes(10, 3 * 10, convolved, &mut memory, conv.out);
    }
}
