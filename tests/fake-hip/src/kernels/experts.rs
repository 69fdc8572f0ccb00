//! Products of routed rows with matrices of their experts (`experts.hip`, `experts_group.hip`,
//! `experts_many.hip`).

use rocmforge_kernels_gpu::ops::experts::{
    ExpertTensors, ExpertsArgs, ExpertsGroupArgs, ExpertsManyArgs, TILE,
};
use rocmforge_ops::WeightType;

use super::act;
use super::products::Matrix;
use super::rows::from_q8;
use super::{Launch, agrees, args, covers, floats, halves, store, words};
use crate::memory::{Fault, Memory};

/// Address of an expert's tensors; `None` for one that is not there, as are all past the table's
/// end.
pub(super) fn expert_at(
    memory: &mut Memory,
    tensors: &ExpertTensors,
    id: f32,
) -> Result<Option<u64>, Fault> {
    if id.fract() != 0.0 || id < 0.0 {
        return Err(Fault(format!("expert {id} of {}", tensors.n_expert)));
    }
    if id >= tensors.n_expert as f32 {
        return Ok(None);
    }
    let bytes = memory.read(tensors.table + id as u64 * 8, 8, "the table of experts")?;
    let (words, _) = bytes.as_chunks::<8>();
    let at = u64::from_le_bytes(words[0]);
    Ok((at != 0).then_some(at))
}

/// What rows `x` become with an expert's tensors.
pub(super) fn times(
    memory: &mut Memory,
    tensors: &ExpertTensors,
    ty: WeightType,
    expert: u64,
    x: &[f32],
) -> Result<Vec<f32>, Fault> {
    let product = |memory: &mut Memory, at: u64, bias: u64| {
        let matrix = Matrix {
            ty,
            at: expert + at,
            rows: tensors.rows as usize,
            cols: tensors.cols as usize,
        };
        let bias = ExpertTensors::place(bias).map_or(0, |bias| expert + bias);
        matrix.times(memory, x, bias)
    };
    let mut out = product(memory, tensors.first, tensors.first_bias)?;
    match ExpertTensors::place(tensors.second) {
        Some(second) => {
            let up = product(memory, second, tensors.second_bias)?;
            act::gate(&tensors.act, &mut out, &up)?;
        }
        None => act::activate(&tensors.act, &mut out)?,
    }
    if let Some(scale) = ExpertTensors::place(tensors.scale) {
        let scale = floats(memory, expert + scale, 1, "an expert's factor")?[0];
        out.iter_mut().for_each(|v| *v *= scale);
    }
    Ok(out)
}

/// A block column a routed row.
pub(super) fn experts(memory: &mut Memory, launch: &Launch, ty: WeightType) -> Result<(), Fault> {
    let a = args(launch, ExpertsArgs::from_bytes)?;
    agrees(
        "blocks of the grid and by the arguments",
        launch.grid[0],
        a.n_blocks,
    )?;
    let (rows, cols) = (u64::from(a.tensors.rows), u64::from(a.tensors.cols));
    let ids = floats(memory, a.ids, launch.grid[1] as usize, "experts of rows")?;
    for (i, id) in (0u64..).zip(ids) {
        let Some(expert) = expert_at(memory, &a.tensors, id)? else {
            continue;
        };
        let at = a.x + i / u64::from(a.share) * cols * 4;
        let x = floats(memory, at, cols as usize, "a routed row")?;
        let out = times(memory, &a.tensors, ty, expert, &x)?;
        store(memory, a.out + i * rows * 4, &out)?;
    }
    Ok(())
}

fn store_words(memory: &mut Memory, at: u64, values: &[u32]) -> Result<(), Fault> {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    memory.write(at, &bytes)
}

/// Routed rows by their experts, and tiles of them.
pub(super) fn group(memory: &mut Memory, launch: &Launch) -> Result<(), Fault> {
    let a = args(launch, ExpertsGroupArgs::from_bytes)?;
    let tensors = ExpertTensors {
        table: a.table,
        n_expert: a.n_expert,
        ..ExpertTensors::default()
    };
    let ids = floats(memory, a.ids, a.n_routed as usize, "experts of rows")?;
    let mut rows: Vec<Vec<u32>> = vec![Vec::new(); a.n_expert as usize];
    for (i, id) in (0..).zip(ids) {
        if expert_at(memory, &tensors, id)?.is_some() {
            rows[id as usize].push(i);
        }
    }
    let mut tiles = vec![0, 0, 0, 0];
    let mut first = 0;
    for (e, rows) in (0..).zip(&rows) {
        for tile in rows.chunks(a.tile.max(1) as usize) {
            tiles.extend([e, first, tile.len() as u32, 0]);
            tiles[0] += 1;
            first += tile.len() as u32;
        }
    }
    store_words(memory, a.list, &rows.concat())?;
    store_words(memory, a.tiles, &tiles)
}

/// A tile of rows of one expert a block column; input rows in 8 bits or f16.
pub(super) fn many(
    memory: &mut Memory,
    launch: &Launch,
    ty: WeightType,
    half: bool,
) -> Result<(), Fault> {
    let a = args(launch, ExpertsManyArgs::from_bytes)?;
    agrees(
        "blocks of the grid and by the arguments",
        launch.grid[0],
        a.n_blocks,
    )?;
    let of_a_block = if half { u64::from(TILE) } else { 8 };
    let rows_of_a_tile = u64::from(launch.grid[2]) * of_a_block;
    covers("the grid", rows_of_a_tile, u64::from(TILE))?;
    let n_tiles = words(memory, a.tiles, 1, "tiles")?[0];
    covers("the grid", u64::from(launch.grid[1]), u64::from(n_tiles))?;
    let (rows, cols) = (u64::from(a.tensors.rows), a.tensors.cols as usize);
    for tile in 1..=u64::from(n_tiles) {
        let tile = words(memory, a.tiles + tile * 16, 3, "a tile")?;
        let Some(expert) = expert_at(memory, &a.tensors, tile[0] as f32)? else {
            return Err(Fault(format!(
                "a tile of expert {}, which is not there",
                tile[0]
            )));
        };
        let list = a.list + u64::from(tile[1]) * 4;
        for i in words(memory, list, tile[2] as usize, "the list of routed rows")? {
            let row = u64::from(i / a.share);
            let x = match half {
                true => halves(memory, a.x + row * cols as u64 * 2, cols, "a routed row")?
                    .iter()
                    .map(|x| x * a.factor)
                    .collect(),
                false => {
                    let bytes = memory.read(a.x + row * cols as u64, cols, "a routed row")?;
                    let scales = a.x_scales + row * (cols as u64 / 32) * 8;
                    let scales = floats(memory, scales, cols / 32 * 2, "a routed row's scales")?;
                    from_q8(&bytes, &scales, cols)?
                }
            };
            let out = times(memory, &a.tensors, ty, expert, &x)?;
            store(memory, a.out + u64::from(i) * rows * 4, &out)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use rocmforge_kernels_gpu::GpuTarget;
    use rocmforge_kernels_gpu::device_bytes;
    use rocmforge_kernels_gpu::ops::activations::{GATED_F16_SCALE, Sink, Transform, activations};
    use rocmforge_kernels_gpu::ops::experts::{self, Groups, ManyInputs, Routed, Tensors};
    use rocmforge_kernels_gpu::ops::heads::{HeadInputs, HeadMatrices, matmat_heads};
    use rocmforge_kernels_gpu::ops::matmat::{HalfInputs, HalfLayout, PartsRoom, matmat_f16};
    use rocmforge_kernels_gpu::ops::matvec::Matrix;
    use rocmforge_ops::Act;

    use super::super::run;
    use super::*;

    const COLS: usize = 64;
    const ROWS: usize = 5;

    fn numbers(n: usize, seed: usize) -> Vec<f32> {
        (0..n)
            .map(|i| (((i + seed) * 37 % 101) as f32 - 50.0) / 40.0)
            .collect()
    }

    fn with(memory: &mut Memory, values: &[f32]) -> u64 {
        let at = memory.alloc(values.len() as u64 * 4).unwrap();
        store(memory, at, values).unwrap();
        at
    }

    /// Q8_0 blocks with a scale of 1/64.
    fn q8_0(rows: usize, seed: usize) -> (Vec<u8>, Vec<f32>) {
        let (mut bytes, mut values) = (Vec::new(), Vec::new());
        for b in 0..rows * COLS / 32 {
            bytes.extend([0x00, 0x24]);
            for i in 0..32 {
                let q = ((b * 32 + i + seed) * 29 % 127) as i8 - 63;
                bytes.push(q.cast_unsigned());
                values.push(f32::from(q) / 64.0);
            }
        }
        (bytes, values)
    }

    /// Three experts of which one is not there; 100 routed rows, two a row of x.
    #[test]
    fn rows_go_to_their_experts_one_by_one_and_in_tiles() {
        let mut memory = Memory::new(1 << 24);
        let m = &mut memory;
        let matrix = rocmforge_kernels_gpu::device_bytes(WeightType::Q8_0, 5, 64).unwrap();
        let (mut table, mut weights) = (Vec::new(), Vec::new());
        for e in 0..3 {
            let (bytes, values) = q8_0(ROWS, e * 11);
            weights.push(values);
            let at = m.alloc(matrix + 256).unwrap();
            m.write(at, &bytes).unwrap();
            store(m, at + matrix, &[0.5; ROWS]).unwrap();
            store(m, at + matrix + 128, &[2.0]).unwrap();
            table.push(if e == 1 { 0 } else { at });
        }
        let table_at = m.alloc(24).unwrap();
        let bytes: Vec<u8> = table.iter().flat_map(|t| t.to_le_bytes()).collect();
        m.write(table_at, &bytes).unwrap();
        let ids: Vec<f32> = (0..100).map(|i| (i * 7 % 3) as f32).collect();
        let (x_values, untouched) = (numbers(50 * COLS, 3), vec![7.0; 100 * ROWS]);
        let (x, ids_at) = (with(m, &x_values), with(m, &ids));
        let [one_by_one, tiled, tiled_f16] = [(); 3].map(|()| with(m, &untouched));
        let tensors = Tensors {
            table: table_at,
            n_expert: 3,
            ty: WeightType::Q8_0,
            rows: ROWS as u64,
            cols: COLS as u64,
            first: 0,
            second: None,
            first_bias: Some(matrix),
            second_bias: None,
            act: Act::Identity,
            scale: Some(matrix + 128),
        };
        let target = GpuTarget::amd("gfx1201", 64);
        let routed = Routed {
            x,
            share: 2,
            ids: ids_at,
            n: 100,
            out: one_by_one,
        };
        run(m, &experts::experts(&target, routed, &tensors).unwrap()).unwrap();
        let groups = Groups {
            tile: TILE,
            at: m.alloc(experts::groups_bytes(100, 3)).unwrap(),
            n: 100,
            n_expert: 3,
        };
        run(m, &experts::group(groups, ids_at, table_at).unwrap()).unwrap();
        let q8 = (m.alloc(50 * 64).unwrap(), m.alloc(50 * 16).unwrap());
        let to_q8 = activations(x, 50, 64, Transform::Plain, Sink::Q8(q8.0, q8.1)).unwrap();
        run(m, &to_q8).unwrap();
        let inputs = ManyInputs::Q8(q8.0, q8.1);
        let many = experts::experts_many(&target, inputs, groups, 2, &tensors, tiled).unwrap();
        run(m, &many).unwrap();
        let half = m.alloc(50 * 64 * 2).unwrap();
        let to_f16 = activations(x, 50, 64, Transform::Plain, Sink::F16(half)).unwrap();
        run(m, &to_f16).unwrap();
        let inputs = ManyInputs::F16(half, 1.0 / GATED_F16_SCALE);
        let many = experts::experts_many(&target, inputs, groups, 2, &tensors, tiled_f16).unwrap();
        run(m, &many).unwrap();
        let [one_by_one, tiled, tiled_f16] =
            [one_by_one, tiled, tiled_f16].map(|at| floats(m, at, 100 * ROWS, "").unwrap());
        for i in 0..100 {
            let x = &x_values[i / 2 * COLS..][..COLS];
            for r in 0..ROWS {
                let at = i * ROWS + r;
                if ids[i] == 1.0 {
                    let all = [one_by_one[at], tiled[at], tiled_f16[at]];
                    assert_eq!(all, [7.0; 3], "row {i}");
                    continue;
                }
                let w = &weights[ids[i] as usize][r * COLS..][..COLS];
                let sum: f32 = w.iter().zip(x).map(|(w, x)| w * x).sum();
                let expected = (sum + 0.5) * 2.0;
                // Inputs in 8 bits.
                assert!(
                    (one_by_one[at] - expected).abs() < 0.2,
                    "{i} {r}: {expected}"
                );
                assert!((tiled[at] - expected).abs() < 0.2, "{i} {r}: {expected}");
                let off = (tiled_f16[at] - expected).abs();
                assert!(off < 0.2, "{i} {r}: {expected}, off {off}");
            }
        }
    }

    /// Two matrices of one launch, added to what is there, in one part and in more.
    #[test]
    fn f16_rows_are_multiplied_with_each_matrix() {
        let mut memory = Memory::new(1 << 24);
        let m = &mut memory;
        let target = GpuTarget::amd("gfx1201", 64);
        let (tokens, all) = (20, [300, 64]);
        let x_values = numbers(tokens * COLS * 4, 5);
        let cols = COLS * 4;
        let x = with(m, &x_values);
        let half = m.alloc((tokens * cols * 2) as u64).unwrap();
        let plain = Transform::Plain;
        run(
            m,
            &activations(x, tokens as u64, cols as u64, plain, Sink::F16(half)).unwrap(),
        )
        .unwrap();
        for room in [0, 1 << 20] {
            let (mut matrices, mut values) = (Vec::new(), Vec::new());
            for (seed, rows) in all.into_iter().enumerate() {
                let (bytes, weights) = q8_0(rows * 4, seed * 7);
                let planes = device_bytes(WeightType::Q8_0, rows as u64, cols as u64).unwrap();
                let at = m.alloc(planes).unwrap();
                m.write(at, &bytes).unwrap();
                values.push(weights);
                matrices.push(Matrix {
                    ty: WeightType::Q8_0,
                    weights: at,
                    rows: rows as u64,
                    out: with(m, &vec![1.0; tokens * rows]),
                    bias: None,
                });
            }
            let room = PartsRoom {
                partials: m.alloc(1 << 20).unwrap(),
                bytes: room,
                counters: with(m, &[0.0; 64]),
                n_counters: 64,
            };
            let inputs = HalfInputs {
                x: half,
                layout: HalfLayout::Rows,
                cols: cols as u64,
                n_tokens: tokens as u64,
                factor: 1.0 / GATED_F16_SCALE,
            };
            for launch in matmat_f16(&target, inputs, &matrices, true, room).unwrap() {
                assert_eq!(launch.grid[2] > 1, room.bytes > 0);
                run(m, &launch).unwrap();
            }
            for (matrix, weights) in matrices.iter().zip(&values) {
                let rows = matrix.rows as usize;
                let out = floats(m, matrix.out, tokens * rows, "").unwrap();
                for (i, out) in out.iter().enumerate() {
                    let w = &weights[i % rows * cols..][..cols];
                    let x = &x_values[i / rows * cols..][..cols];
                    let expected = 1.0 + w.iter().zip(x).map(|(w, x)| w * x).sum::<f32>();
                    let off = (out - expected).abs();
                    assert!(off < 0.2, "{i}: {expected}, off {off}");
                }
            }
        }
    }

    #[test]
    fn a_head_is_multiplied_with_its_own_rows() {
        let mut memory = Memory::new(1 << 24);
        let m = &mut memory;
        let (n_head, tokens) = (3, 4);
        let x_values = numbers(tokens * n_head * COLS, 5);
        let weights = numbers(n_head * ROWS * COLS, 9);
        let (x, at) = (with(m, &x_values), with(m, &weights));
        let out = with(m, &vec![0.0; tokens * n_head * ROWS]);
        let matrices = HeadMatrices {
            ty: WeightType::F32,
            weights: at,
            n_head: n_head as u32,
            rows: ROWS as u64,
            cols: COLS as u64,
        };
        let inputs = HeadInputs {
            x,
            q8: (0, 0),
            n_tokens: tokens as u32,
        };
        let target = GpuTarget::amd("gfx1201", 64);
        run(m, &matmat_heads(&target, inputs, &matrices, out).unwrap()).unwrap();
        let out = floats(m, out, tokens * n_head * ROWS, "").unwrap();
        for (i, out) in out.iter().enumerate() {
            let (t_h, r) = (i / ROWS, i % ROWS);
            let w = &weights[(t_h % n_head * ROWS + r) * COLS..][..COLS];
            let x = &x_values[t_h * COLS..][..COLS];
            let expected: f32 = w.iter().zip(x).map(|(w, x)| w * x).sum();
            assert!((out - expected).abs() < 1e-3, "{i}: {out} {expected}");
        }
    }
}
