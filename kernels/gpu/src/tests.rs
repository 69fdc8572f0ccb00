//! Launches against the sources: entries exist, structs agree, geometry covers the work.

use std::collections::BTreeSet;

use self::sources::defined;
pub(super) use self::sources::entries;
use super::ops::activations::{Norm, Sink, Transform, activations};
use super::ops::attention::{self, Partials, Scores, SharedPositions};
use super::ops::elements::{self, Change, Part};
use super::ops::experts::{
    FEW_TILE, Groups, ManyInputs, Routed, Tensors, experts, experts_few, experts_many, group,
    is_for_few,
};
use super::ops::heads::{HeadInputs, HeadMatrices, matmat_heads};
use super::ops::kv::{Heads, Kv, Qkv, Rope, Rotation, rope_heads, rope_kv};
use super::ops::matmat::{
    HalfInputs, HalfLayout, Inputs, PartsRoom, half_layout, matmat, matmat_f16, matmat_floats,
    takes_floats,
};
use super::ops::matvec::{Epilogue, Input, Matrix, fuses_gate, matvec};
use super::ops::recurrent::{self, Conv, DeltaNet, Sequences, Ssm, conv, delta_net, ssm};
use super::ops::route::{self, route};
use super::ops::rows::LayerNorm;
use super::ops::sample::{TopK, top_k};
use super::ops::weights::{Weights, dequantize_f16, dequantize_low, repack, rows_f32};
use super::ops::{self, rows};
use super::{Error, GpuTarget, Launch, units};
use crate::WeightType;
use rocmforge_ops::{Act, KvLayout, KvType, Mask, RopeOrder, Router, RouterGate};

mod adapters;
mod emulated;
mod heads;
mod limits;
mod sources;
mod structs;

fn targets() -> [GpuTarget; 3] {
    [
        GpuTarget::nvidia(9, 0, 132),
        GpuTarget::amd("gfx90a", 104),
        GpuTarget::amd("gfx1201", 64),
    ]
}

fn matrix(ty: WeightType, rows: u64) -> Matrix {
    Matrix {
        ty,
        weights: 0x1000,
        rows,
        out: 0x2000,
        bias: None,
    }
}

fn input(cols: u64) -> Input {
    Input {
        x: 0x3000,
        cols,
        norm: None,
    }
}

const ROUTER: Router = Router {
    n_expert: 256,
    n_used: 8,
    gate: RouterGate::Sigmoid,
    n_group: 8,
    n_group_used: 4,
    renormalize: true,
    scale: 2.5,
};

const SEQUENCES: Sequences = Sequences {
    places: 1,
    n: 3,
    rows_max: 100,
    state: 64,
};

const CONV: Conv = Conv {
    x: 1,
    weight: 2,
    bias: None,
    channels: 1000,
    kernel: 4,
    act: Act::Silu,
    out: 3,
};

const DELTA_NET: DeltaNet = DeltaNet {
    qkv: 1,
    alpha: 2,
    beta: 3,
    a: 4,
    dt_bias: 5,
    n_head_k: 16,
    n_head_v: 32,
    dim_k: 128,
    dim_v: 128,
    interleaved: false,
    eps: 1e-6,
    out: 6,
};

const SSM: Ssm = Ssm {
    xbc: 1,
    dt: 2,
    a: 3,
    skip: 4,
    dt_bias: 5,
    n_head: 64,
    dim: 64,
    n_group: 8,
    n_state: 128,
    out: 6,
};

const ROUTED: Routed = Routed {
    x: 1,
    share: 8,
    ids: 2,
    n: 24,
    out: 3,
};

const TENSORS: Tensors = Tensors {
    table: 1,
    n_expert: 128,
    ty: WeightType::Q4K,
    rows: 768,
    cols: 2048,
    first: 0,
    second: Some(1 << 20),
    first_bias: None,
    second_bias: None,
    act: Act::Silu,
    scale: None,
};

const GROUPS: Groups = Groups {
    tile: ops::experts::TILE,
    at: 16,
    n: 800,
    n_expert: 128,
};

const ROOM: PartsRoom = PartsRoom {
    partials: 4096,
    bytes: 4 << 20,
    counters: 64,
    n_counters: 1024,
};

/// Rows as f16 at some address, in the order in which they are read.
fn half_inputs(target: &GpuTarget, cols: u64, n_tokens: u64) -> HalfInputs {
    HalfInputs {
        x: 1,
        layout: half_layout(target, cols, n_tokens),
        cols,
        n_tokens,
        factor: 1.0,
    }
}

/// One launch of every kind that can be built.
fn one_of_each(target: &GpuTarget) -> Vec<Launch> {
    let mut all = Vec::new();
    for ty in WeightType::ALL {
        all.extend(matvec(target, input(512), &[matrix(ty, 100)], Epilogue::Store).unwrap());
        let inputs = Inputs {
            x: 1,
            q8: (2, 3),
            cols: 512,
            n_tokens: 9,
        };
        all.push(matmat(target, inputs, &matrix(ty, 100), true).unwrap());
        for rows in [100, 1500, 1 << 15] {
            let matrices = [matrix(ty, rows)];
            if takes_floats(target, &matrices, 512, 9) {
                all.extend(matmat_floats(target, 1, (512, 9), &matrices, true).unwrap());
            }
        }
        if target.multiplies_f16() && ty.is_quantized() {
            // Whole steps of wgmma's kernel, and not.
            let all_cols = [512, 384].into_iter();
            for cols in all_cols.filter(|&cols| crate::device_bytes(ty, 1, cols).is_ok()) {
                for n_tokens in [2, 9, 17, 32, 33, 64, 65, 128, 129] {
                    let half = half_inputs(target, cols, n_tokens);
                    for rows in [100, 1 << 15] {
                        let matrices = [matrix(ty, rows), matrix(ty, 64)];
                        all.extend(matmat_f16(target, half, &matrices, true, ROOM).unwrap());
                        all.extend(
                            matmat_f16(target, half, &[matrix(ty, rows)], true, ROOM).unwrap(),
                        );
                    }
                }
            }
            // More columns than a block has waves for, and no room for the sums of parts.
            let room = PartsRoom { bytes: 0, ..ROOM };
            for n_tokens in [8, 16] {
                let half = half_inputs(target, 1 << 13, n_tokens);
                all.extend(matmat_f16(target, half, &[matrix(ty, 100)], true, room).unwrap());
            }
        }
        let weights = Weights {
            ty,
            at: 0x1000,
            rows: 100,
            cols: 512,
        };
        all.push(repack(weights, 5, 0, 100, 6).unwrap());
        all.push(dequantize_f16(weights, 3, 7, 8).unwrap());
        all.push(rows_f32(weights, 9, 3, 10).unwrap());
        match dequantize_low(weights, 3, 7, 8) {
            Ok(launch) => all.push(launch),
            Err(error) => assert_ne!(ty, WeightType::F32, "{error}"),
        }
        for other in WeightType::ALL {
            let two = [matrix(ty, 64), matrix(other, 32)];
            all.extend(matvec(target, input(512), &two, Epilogue::Add).unwrap());
        }
    }
    let sources = [
        Transform::Plain,
        Transform::Norm(Norm::of_row(1, 512, 1e-5)),
        Transform::AddNorm {
            other: 2,
            scale: 1.0,
            norm: Norm::of_row(1, 512, 1e-5),
        },
        Transform::Gate {
            other: Some(2),
            act: Act::Silu,
        },
        Transform::Add {
            other: 2,
            scale: 1.0,
        },
    ];
    for source in sources {
        for sink in [Sink::F32(4), Sink::F16(4), Sink::Q8(4, 5)] {
            all.push(activations(1, 3, 512, source, sink).unwrap());
        }
        for sink in [Sink::F16Pair(4, 5), Sink::F16Columns(4)] {
            let launch = activations(1, 3, 512, source, sink);
            match source {
                Transform::Plain | Transform::Norm(_) | Transform::Gate { .. } => {
                    all.push(launch.unwrap())
                }
                Transform::AddNorm { .. } | Transform::Add { .. } => assert!(launch.is_err()),
            }
        }
        assert!(activations(1, 3, 448, source, Sink::F16Columns(4)).is_err());
    }
    let add = Transform::Add {
        other: 2,
        scale: 0.5,
    };
    all.push(activations(1, 3, 512, add, Sink::Stored).unwrap());
    for what in [
        Change::Scale(2.0),
        Change::ScaleBy(3),
        Change::SoftCap(30.0),
        Change::AddGated { y: 2, gate: 3 },
        Change::AddWeighted { y: 2, weight: 3 },
        Change::AddTable {
            table: 2,
            positions: Some(3),
        },
        Change::GateHeads {
            gate: 2,
            head_dim: 64,
            act: Act::Softplus,
        },
        Change::PositionScale {
            positions: 2,
            beta: 0.1,
            span: 8192,
        },
    ] {
        all.push(elements::change(1, 3, 512, what).unwrap());
    }
    let part = Part {
        x: 1,
        cols: 512,
        first: 64,
        stride: 128,
        width: 64,
    };
    all.push(elements::columns(&[part, part], 4, 3, 2).unwrap());
    all.push(elements::combine(1, 2, 8, 3, 512, 4, true).unwrap());
    all.push(elements::product_transposed((1, 1152), 2, 30, 512, 4).unwrap());
    all.push(route(target, 1, None, &ROUTER, 3, 2, 3).unwrap());
    all.push(conv(&CONV, SEQUENCES).unwrap());
    for dim_k in [128, 256] {
        let net = DeltaNet { dim_k, ..DELTA_NET };
        all.push(delta_net(target, &net, SEQUENCES).unwrap());
        let space = Ssm {
            n_state: dim_k,
            ..SSM
        };
        all.push(ssm(&space, SEQUENCES).unwrap());
    }
    all.push(group(GROUPS, 2, 3).unwrap());
    for ty in WeightType::ALL {
        let tensors = Tensors { ty, ..TENSORS };
        all.push(experts(target, ROUTED, &tensors).unwrap());
        let single = Tensors {
            second: None,
            act: Act::Identity,
            ..tensors
        };
        let forms = [ManyInputs::Q8(1, 2), ManyInputs::F16(1, 1.0)];
        for form in forms {
            match experts_many(target, form, GROUPS, 8, &single, 3) {
                Ok(launch) => all.push(launch),
                Err(_) => {
                    let half = matches!(form, ManyInputs::F16(..));
                    assert!(!ty.is_quantized() || half && !target.multiplies_f16());
                }
            }
        }
        let of_few = Groups {
            tile: FEW_TILE,
            ..GROUPS
        };
        for tensors in [tensors, single] {
            match experts_few(target, 1, of_few, 8, &tensors, 3) {
                Ok(launch) => all.push(launch),
                Err(_) => assert!(!ty.is_quantized() || !target.has_mma()),
            }
            let wide = Tensors {
                cols: 8192,
                ..tensors
            };
            assert!(!is_for_few(target, &wide));
            assert!(experts_few(target, 1, GROUPS, 8, &tensors, 3).is_err());
        }
        let matrices = HeadMatrices {
            ty,
            weights: 1,
            n_head: 20,
            rows: 512,
            cols: 256,
        };
        let inputs = HeadInputs {
            x: 1,
            q8: (2, 3),
            n_tokens: 9,
        };
        all.push(matmat_heads(target, inputs, &matrices, 4).unwrap());
    }
    let rotation = Some(Rotation {
        cos: 1,
        sin: 2,
        first: 0,
        n_rot: 64,
        order: RopeOrder::Neox,
        by_position: false,
    });
    let heads = Heads {
        x: 1,
        n_head: 8,
        dim: 128,
        rows: 3,
    };
    all.push(rope_heads(target, heads, 2, Some((3, 1e-6)), rotation).unwrap());
    all.extend(heads::one_of_each(target, rotation));
    all.push(rows::gather(1, 2, 3, 1000, 4).unwrap());
    let spans = rows::Spans {
        sequences: 5,
        places: 6,
    };
    all.push(rows::gather_outputs(1, 2, 3, 1000, 4, spans).unwrap());
    all.push(rows::add_bias(1, 2, 1000, 3).unwrap());
    all.push(elements::clamp(1, 3, 1000, [4, 5], 2).unwrap());
    let norm = LayerNorm {
        weight: 2,
        bias: None,
        weight_of_row: true,
        group: 500,
        eps: 1e-5,
    };
    all.push(rows::layer_norm(1, 3, 1000, &norm, 4).unwrap());
    let to = TopK {
        candidates: 1,
        values: None,
        ids: 2,
        next: None,
    };
    all.extend(top_k(1, 2, 128_256, 40, to).unwrap());
    all.extend(adapters::one_of_each());
    all
}

#[test]
fn every_launch_names_an_entry_of_its_unit() {
    for target in targets() {
        for launch in one_of_each(&target) {
            let unit = units::unit(launch.unit())
                .unwrap_or_else(|| panic!("{} is of no unit", launch.kernel));
            let found = entries(&unit.text());
            assert!(
                found.contains(launch.entry()),
                "{}: the unit has {found:?}",
                launch.kernel
            );
        }
    }
}

#[test]
fn a_launch_that_overlaps_waits_for_its_inputs() {
    for launch in one_of_each(&targets()[0]) {
        let waits = units::unit(launch.unit()).unwrap().text();
        let waits = waits.matches("wait_for_inputs();").count();
        assert!(!launch.overlaps || waits > 0, "{}", launch.kernel);
        assert_eq!(
            launch.overlaps,
            !launch.entry().starts_with("repack_") && !launch.entry().starts_with("dequantize_"),
            "{}",
            launch.kernel
        );
    }
}

#[test]
fn every_unit_is_used_and_stands_alone() {
    let used: BTreeSet<&str> = one_of_each(&targets()[0])
        .iter()
        .map(Launch::unit)
        .collect();
    let listed: BTreeSet<&str> = units::units().map(|u| u.name).collect();
    assert_eq!(used, listed);
    for unit in units::units() {
        let text = unit.text();
        assert!(!text.contains("#include"), "{}", unit.name);
        assert!(text.contains("ENTRY(THREADS"), "{}", unit.name);
    }
}

#[test]
fn blocks_have_the_threads_that_the_source_counts_on() {
    for target in targets() {
        for launch in one_of_each(&target) {
            let text = units::unit(launch.unit()).unwrap().text();
            let threads = defined(&text, "THREADS");
            assert_eq!(launch.block[1..], [1, 1], "{}", launch.kernel);
            match launch.entry() {
                // As many waves as the shape has slices of columns, and groups of these.
                few if few.starts_with("matmat_few_") || few.starts_with("experts_few_") => {
                    let most = defined(&text, "FEW_THREADS")[0];
                    assert!(launch.block[0] % 32 == 0 && launch.block[0] <= most);
                }
                many if many.starts_with("attention_many_") => {
                    assert_eq!([launch.block[0]], *defined(&text, "MANY_THREADS"));
                    assert!(text.contains("ENTRY(128, 3) NAME(attention_many_, DIM)"));
                }
                several if several.starts_with("attention_several_") => {
                    assert_eq!([launch.block[0]], *defined(&text, "SEVERAL_THREADS"));
                    assert!(text.contains("ENTRY(256, 1) NAME(attention_several_, DIM)"));
                }
                up if up.starts_with("adapters_up_") => {
                    assert_eq!([launch.block[0]], *defined(&text, "UP_THREADS"));
                }
                _ => assert!(threads.contains(&launch.block[0]), "{}", launch.kernel),
            }
            assert!(launch.grid.iter().all(|&n| n > 0), "{}", launch.kernel);
            // More than any block may use is asked for by name; every NVIDIA GPU
            // from sm_80 on has 99 KiB.
            let by_name = ["attention_prefill_", "matmat_", "experts_few_"];
            let most = match by_name.iter().any(|name| launch.entry().starts_with(name)) {
                true => 99 << 10,
                false => target.shared_bytes_max,
            };
            assert!(launch.shared_bytes <= most, "{}", launch.kernel);
        }
    }
}

#[test]
fn constants_are_those_of_the_sources() {
    let source = units::file("activations.hip").unwrap();
    let scale = ops::activations::GATED_F16_SCALE;
    assert!(source.contains(&format!("#define GATED_SCALE {scale}f\n")));
    let source = units::file("matmat_wgmma.h").unwrap();
    assert_eq!(
        defined(source, "WGMMA_PARTS"),
        [ops::matmat::PARTS_MAX as u32]
    );
    let source = units::file("route.hip").unwrap();
    assert_eq!(defined(source, "EXPERTS_MAX"), [route::EXPERTS_MAX]);
    assert_eq!(defined(source, "GROUPS_MAX"), [route::GROUPS_MAX]);
    let source = units::file("experts_many.hip").unwrap();
    assert_eq!(defined(source, "TILE_TOKENS"), [ops::experts::TILE]);
    let source = units::file("experts_few.h").unwrap();
    assert_eq!(defined(source, "FEW_TILE"), [ops::experts::FEW_TILE]);
    let source = units::file("experts_group.hip").unwrap();
    assert_eq!(defined(source, "EXPERTS_MAX"), [ops::experts::EXPERTS_MAX]);
    let source = units::file("conv.hip").unwrap();
    assert_eq!(defined(source, "CHUNK"), [recurrent::CONV_CHUNK]);
    assert_eq!(defined(source, "TAPS_MAX"), [recurrent::TAPS_MAX]);
}

#[test]
fn products_that_share_an_input_share_a_launch_where_they_can() {
    let target = &targets()[0];
    let (q4, q6, q8) = (WeightType::Q4K, WeightType::Q6K, WeightType::Q8_0);
    let n = |matrices: &[Matrix]| {
        matvec(target, input(4096), matrices, Epilogue::Store)
            .unwrap()
            .len()
    };
    assert_eq!(
        n(&[matrix(q4, 4096), matrix(q4, 1024), matrix(q4, 1024)]),
        1
    );
    assert_eq!(
        n(&[matrix(q4, 4096), matrix(q4, 1024), matrix(q6, 1024)]),
        1
    );
    assert_eq!(
        n(&[matrix(q6, 4096), matrix(q4, 1024), matrix(q6, 1024)]),
        1
    );
    assert_eq!(
        n(&[matrix(q4, 4096), matrix(q8, 1024), matrix(q6, 1024)]),
        2
    );
    assert_eq!(n(&[matrix(q8, 64); 5]), 2);
    assert_eq!(n(&[matrix(WeightType::F16, 64), matrix(q8, 64)]), 2);
}
