//! What builders refuse, and how they deal out what they take.

use super::*;

#[test]
fn what_is_not_fused_is_refused() {
    let target = &targets()[0];
    let normed = Input {
        norm: Some((1, 1e-5)),
        ..input(64)
    };
    let refused = |r: Result<Vec<Launch>, Error>| matches!(r, Err(Error::NoKernel { .. }));
    let f16 = matrix(WeightType::F16, 64);
    assert!(refused(matvec(target, normed, &[f16], Epilogue::Store)));
    assert!(!fuses_gate(WeightType::Q4K, WeightType::Q6K));
    assert!(refused(matvec(
        target,
        input(64),
        &[f16, f16],
        Epilogue::Gate(Act::Silu)
    )));
    let wide = matvec(
        target,
        input(64 << 10),
        &[matrix(WeightType::Q8_0, 64)],
        Epilogue::Store,
    );
    assert!(matches!(wide, Err(Error::TooLarge { .. })));
}

#[test]
fn a_choice_that_no_block_can_make_is_refused() {
    let refused = |router: Router| route::supports(&router).is_err();
    assert!(!refused(ROUTER));
    assert!(refused(Router {
        n_expert: 1024,
        n_group: 1,
        n_group_used: 1,
        ..ROUTER
    }));
    assert!(refused(Router {
        n_group: 3,
        ..ROUTER
    }));
    assert!(refused(Router {
        n_used: 33,
        n_group_used: 1,
        ..ROUTER
    }));
    assert!(refused(Router {
        n_used: 0,
        ..ROUTER
    }));
}

#[test]
fn every_shape_of_heads_has_a_kernel_but_what_no_16_bytes_hold() {
    let layout = |n_head_kv, head_dim_k, head_dim_v| KvLayout {
        n_layer: 1,
        n_head_kv,
        head_dim_k,
        head_dim_v,
        ty: KvType::F16,
    };
    let h200 = &super::targets()[0];
    // Of contexts that are long.
    let blocks = |n_head, kv: KvLayout| {
        let shape = attention::decode_shape(h200, 1, n_head, &kv, 1 << 16);
        shape.ok().map(|s| s.blocks)
    };
    // Query heads of one key/value head are dealt out evenly.
    assert_eq!(blocks(32, layout(8, 128, 128)), Some(8));
    assert_eq!(blocks(128, layout(1, 576, 512)), Some(32));
    assert_eq!(blocks(12, layout(1, 128, 128)), Some(2));
    assert_eq!(blocks(16, layout(1, 256, 256)), Some(4));
    assert_eq!(blocks(28, layout(4, 128, 128)), Some(4));
    assert_eq!(blocks(5, layout(1, 80, 80)), Some(5));
    for dim in (8..=576).step_by(8) {
        attention::supports(20, &layout(1, dim, 8)).unwrap();
        attention::supports(2, &layout(2, 8, dim)).unwrap();
    }
    for (n_head, kv) in [
        (8, layout(3, 64, 64)),
        (8, layout(8, 60, 64)),
        (8, layout(8, 640, 64)),
        (8, layout(8, 64, 0)),
    ] {
        attention::supports(n_head, &kv).unwrap_err();
    }
    let stored = |kv, ty| KvLayout { ty, ..kv };
    for dim in (8..=576).step_by(8) {
        let whole = dim % 32 == 0;
        for kv in [layout(1, dim, 32), layout(2, 64, dim)] {
            let found = attention::supports(20, &stored(kv, KvType::Q8_0));
            assert_eq!(found.is_ok(), whole, "{kv:?}: {found:?}");
            attention::supports(20, &stored(kv, KvType::F32)).unwrap();
        }
    }
    attention::supports(8, &stored(layout(8, 60, 64), KvType::F32)).unwrap_err();
}

/// Pages of a layout, somewhere.
fn pages_of(layout: &KvLayout) -> Kv<'_> {
    Kv {
        layout,
        layer: 0,
        base: 1 << 40,
        table: 2,
        table_stride: 16,
        positions: 3,
        sequences: None,
    }
}

/// What multiplies many rows at a time rounds to f16, on every target.
#[test]
fn prompts_over_pages_of_f32_go_row_by_row() {
    for (dim, kernel) in [
        (64, "attention_decode_any_f32.attention_decode_any_f32"),
        (256, "attention_decode_256_4_f32.attention_decode_256_4_f32"),
        (512, "attention_decode_any_f32.attention_decode_any_f32"),
    ] {
        let layout = KvLayout {
            n_layer: 1,
            n_head_kv: 2,
            head_dim_k: dim,
            head_dim_v: dim,
            ty: KvType::F32,
        };
        let kv = pages_of(&layout);
        let shared = SharedPositions {
            room: ROOM,
            positions: 300,
        };
        let scores = Scores::causal(1.0);
        for target in targets() {
            let launch =
                attention::prefill(&target, 1, 8, 300, 2, &kv, &scores, 3, (3, 128), shared);
            let launch = launch.unwrap();
            assert_eq!(launch.kernel, kernel, "{target:?}");
            // Blocks of four heads, the whole of a row's positions, the rows.
            assert_eq!(launch.grid, [2, 1, 300]);
        }
    }
}

/// Kernels that let scores fall with distance: one of many rows for heads of 64, and one of single
/// rows for all others; none reads its bias for a soft cap.
#[test]
fn scores_that_fall_with_distance_have_kernels_of_their_own() {
    let scores = Scores {
        mask: Mask::Whole,
        alibi: 8.0,
        ..Scores::causal(1.0)
    };
    let shared = SharedPositions {
        room: ROOM,
        positions: 300,
    };
    for (dim, ty, many) in [
        (64, KvType::F16, "attention_prefill_64_alibi"),
        (128, KvType::F16, "attention_decode_any_alibi"),
        (64, KvType::F32, "attention_decode_any_f32_alibi"),
        (40, KvType::F32, "attention_decode_any_f32_alibi"),
    ] {
        let layout = KvLayout {
            n_layer: 1,
            n_head_kv: 12,
            head_dim_k: dim,
            head_dim_v: dim,
            ty,
        };
        let kv = pages_of(&layout);
        for target in targets() {
            let launch =
                attention::prefill(&target, 1, 12, 300, 2, &kv, &scores, 3, (3, 128), shared);
            assert_eq!(launch.unwrap().entry(), many, "{target:?}");
            let shape = attention::decode_shape_of(&scores, &target, 5, 12, &layout, 300).unwrap();
            let qkv = Qkv {
                q: 1,
                k: 2,
                v: 3,
                n_head: 12,
                rows: 5,
            };
            let partials = Partials {
                partials: 1,
                counters: 2,
            };
            let launch = attention::decode(qkv, 4, &kv, None, &scores, shape, partials).unwrap();
            assert!(launch.entry().starts_with("attention_decode_any"));
            assert!(launch.entry().ends_with("_alibi"), "{}", launch.entry());
            assert_eq!(launch.grid[0] * shape.blocks, 144, "a block a head");
        }
        let layout = KvLayout {
            head_dim_k: 64,
            head_dim_v: 64,
            ty: KvType::Q8_0,
            ..layout
        };
        let shape = attention::decode_shape_of(&scores, &targets()[0], 5, 12, &layout, 300);
        let told = shape.unwrap_err().to_string();
        assert!(told.contains("keys of 8 bits"), "{told}");
    }
}

#[test]
fn rotations_stay_within_their_heads() {
    let heads = |dim| Heads {
        x: 1,
        n_head: 2,
        dim,
        rows: 1,
    };
    let turn = |first, n_rot| {
        Some(Rotation {
            cos: 1,
            sin: 2,
            first,
            n_rot,
            order: RopeOrder::Norm,
            by_position: false,
        })
    };
    let target = &targets()[0];
    rope_heads(target, heads(192), 0, None, turn(128, 64)).unwrap();
    rope_heads(target, heads(192), 0, None, None).unwrap();
    rope_heads(target, heads(192), 0, None, turn(136, 64)).unwrap_err();
    rope_heads(target, heads(192), 0, None, turn(0, 63)).unwrap_err();
    rope_heads(target, heads(584), 0, None, None).unwrap_err();
}

#[test]
fn norms_of_groups_are_norms_of_shorter_rows() {
    let norm = |weight_of_row| {
        Transform::Norm(Norm {
            weight: Some(1),
            weight_of_row,
            group: 128,
            eps: 1e-6,
        })
    };
    for (of_row, weight_rows) in [(true, 4), (false, 1)] {
        let launch = activations(1, 3, 512, norm(of_row), Sink::F32(4)).unwrap();
        let args = ops::activations::ActivationsArgs::from_bytes(&launch.args.to_bytes()).unwrap();
        assert_eq!(
            (launch.grid[0], args.cols, args.weight_rows),
            (12, 128, weight_rows)
        );
    }
    activations(1, 3, 512, norm(true), Sink::Q8(4, 5)).unwrap_err();
    let uneven = Transform::Norm(Norm {
        weight: None,
        weight_of_row: false,
        group: 100,
        eps: 0.0,
    });
    activations(1, 3, 512, uneven, Sink::F32(4)).unwrap_err();
}

#[test]
fn states_that_no_block_holds_are_refused() {
    let target = &targets()[0];
    let net = |dim_k, n_head_k| DeltaNet {
        dim_k,
        n_head_k,
        ..DELTA_NET
    };
    delta_net(target, &net(64, 32), SEQUENCES).unwrap();
    delta_net(target, &net(257, 16), SEQUENCES).unwrap_err();
    delta_net(target, &net(128, 12), SEQUENCES).unwrap_err();
    let space = |n_state, n_group| Ssm {
        n_state,
        n_group,
        ..SSM
    };
    ssm(&space(16, 1), SEQUENCES).unwrap();
    ssm(&space(512, 1), SEQUENCES).unwrap_err();
    ssm(&space(128, 5), SEQUENCES).unwrap_err();
    for kernel in [1, 9] {
        conv(&Conv { kernel, ..CONV }, SEQUENCES).unwrap_err();
    }
}

#[test]
fn experts_of_many_rows_take_fewer_blocks_each() {
    let target = &targets()[0];
    let blocks = |n| {
        let launch = experts(target, Routed { n, ..ROUTED }, &TENSORS).unwrap();
        assert_eq!(launch.grid[1], n);
        launch.grid[0]
    };
    // 768 rows, four to a wave of the 8 of a block, two blocks a multiprocessor of 132:
    // measured, these are the fastest.
    let found = [1, 8, 16, 40, 64, 80, 128, 4096].map(blocks);
    assert_eq!(found, [192, 33, 16, 6, 4, 3, 2, 1]);
    let alone = Tensors {
        second: None,
        act: Act::SwigluClamped {
            alpha: 1.702,
            limit: 7.0,
        },
        ..TENSORS
    };
    experts(target, ROUTED, &alone).unwrap_err();
}

#[test]
fn float_products_of_few_rows_have_blocks_of_few_tokens() {
    let h200 = &GpuTarget::nvidia(9, 0, 132);
    let grid = |rows, tokens| {
        let router = matrix(WeightType::F32, rows);
        let launch = ops::matvec::float_tokens(h200, &router, 1, 2048, tokens, false).unwrap();
        [launch.grid[0], launch.grid[1]]
    };
    let found = [1, 8, 16, 64, 512].map(|tokens| grid(128, tokens));
    assert_eq!(found, [[16, 1], [16, 8], [16, 8], [16, 8], [16, 64]]);
    assert_eq!(grid(4096, 16), [512, 2]);
    let text = units::unit("matvec_f32").unwrap().text();
    let most = defined(&text, "COLUMNS")[0];
    assert_eq!(u64::from(most), ops::matvec::COLUMNS_FLOAT);
}

#[test]
fn blocks_have_few_heads_where_all_of_them_run_at_once() {
    let h200 = &targets()[0];
    // 32 query heads, 4 key/value heads.
    let kv = KvLayout {
        n_layer: 1,
        n_head_kv: 4,
        head_dim_k: 128,
        head_dim_v: 128,
        ty: KvType::F16,
    };
    let shape = |rows, positions| {
        let shape = attention::decode_shape(h200, rows, 32, &kv, positions).unwrap();
        (shape.blocks, shape.n_split)
    };
    assert_eq!(shape(1, 256), (32, 4));
    assert_eq!(shape(1, 512), (8, 8));
    assert_eq!(shape(1, 2048), (4, 32));
    assert_eq!(shape(1, 8192), (4, 33));
    // Several rows have whole contexts where these are short.
    assert_eq!(shape(2, 512), (4, 1));
    assert_eq!(shape(2, 8192), (4, 16));
    assert_eq!(shape(8, 1024), (4, 2));
    assert_eq!(shape(8, 8192), (4, 4));
    assert_eq!(shape(32, 8192), (4, 1));
    // The kernel makes no shorter parts than there are here.
    let text = units::unit("attention_decode_128_8").unwrap().text();
    let (tiles, positions) = (defined(&text, "PART_TILES"), defined(&text, "TILE"));
    assert_eq!(tiles[0] * positions[0], attention::SEVERAL_POSITIONS);
}

#[test]
fn rows_that_fill_the_device_are_not_split_and_take_matrix_instructions() {
    let kv = |n_head_kv, head_dim, ty| KvLayout {
        n_layer: 1,
        n_head_kv,
        head_dim_k: head_dim,
        head_dim_v: head_dim,
        ty,
    };
    let many = "attention_decode_128_8.attention_many_128";
    let of = |target: &GpuTarget, rows, n_head, kv: &KvLayout| {
        let shape = attention::decode_shape(target, rows, n_head, kv, 1 << 16).unwrap();
        let qkv = Qkv {
            q: 1,
            k: 0,
            v: 0,
            n_head,
            rows,
        };
        let pages = pages_of(kv);
        let partials = Partials {
            partials: 0,
            counters: 0,
        };
        let scores = Scores::causal(1.0);
        let launch = attention::decode(qkv, 1, &pages, None, &scores, shape, partials).unwrap();
        (launch.kernel == many, launch.grid, launch.block[0])
    };
    let h200 = &GpuTarget::nvidia(9, 0, 132);
    let eight = kv(8, 128, KvType::F16);
    assert_eq!(of(h200, 17, 32, &eight), (true, [8, 1, 17], 128));
    assert_eq!(of(h200, 64, 64, &eight), (true, [8, 1, 64], 128));
    // Sixteen query heads of a key/value head are two blocks.
    assert_eq!(of(h200, 64, 128, &eight), (true, [16, 1, 64], 128));
    // One row less leaves multiprocessors idle.
    let (is_many, grid, threads) = of(h200, 16, 32, &eight);
    assert!(!is_many && grid == [8, 1, 16] && threads == 256);
    for other in [kv(8, 128, KvType::Q8_0), kv(8, 96, KvType::F16)] {
        assert!(!of(h200, 64, 32, &other).0, "{other:?}");
    }
    for target in targets() {
        if !target.has_mma() {
            assert!(!of(&target, 640, 32, &eight).0);
        }
    }
}

#[test]
fn products_of_few_rows_have_a_block_a_multiprocessor() {
    let h200 = GpuTarget {
        shared_bytes_asked: 227 << 10,
        ..GpuTarget::nvidia(9, 0, 132)
    };
    let launch = |target: &GpuTarget, rows: &[u64], cols, n_tokens, room| {
        let half = half_inputs(target, cols, n_tokens);
        let matrices: Vec<Matrix> = rows.iter().map(|&n| matrix(WeightType::Q4K, n)).collect();
        matmat_f16(target, half, &matrices, false, room)
            .unwrap()
            .remove(0)
    };
    let shape = |rows: &[u64], cols, n_tokens| {
        let l = launch(&h200, rows, cols, n_tokens, ROOM);
        (l.entry(), l.grid, l.block[0])
    };
    let (few, more) = ("matmat_few_8_q4_k", "matmat_few_16_q4_k");
    // A wave for each 256 columns.
    assert_eq!(shape(&[14336, 14336], 4096, 8), (few, [132, 1, 1], 512));
    assert_eq!(shape(&[4096], 14336, 8), (few, [33, 1, 4], 448));
    assert_eq!(shape(&[4096], 14336, 16), (more, [33, 1, 4], 448));
    // Waves that are left take other rows, where that leaves no multiprocessor idle.
    assert_eq!(shape(&[128_256], 2048, 2), (few, [132, 1, 1], 512));
    assert_eq!(shape(&[1024], 2048, 2), (few, [64, 1, 1], 256));
    let entry =
        |target, cols, n_tokens, room| launch(target, &[4096], cols, n_tokens, room).entry();
    let none = PartsRoom { bytes: 0, ..ROOM };
    assert_eq!(entry(&h200, 4096, 8, none), few);
    assert_eq!(entry(&h200, 14336, 8, none), "matmat_mma_8x128_q4_k");
    assert_eq!(entry(&h200, 4096, 17, ROOM), "matmat_wgmma_32_q4_k");
    // Half the waves where a block may have 99 KiB.
    let small = launch(&GpuTarget::nvidia(8, 6, 84), &[4096], 4096, 16, ROOM);
    assert_eq!((small.grid, small.block[0]), ([42, 1, 2], 256));
    assert!(small.shared_bytes <= 99 << 10);
}

#[test]
fn products_of_17_to_128_rows_are_cut_up_as_blocks_run_at_once() {
    let h200 = GpuTarget {
        shared_bytes_asked: 227 << 10,
        ..GpuTarget::nvidia(9, 0, 132)
    };
    let room = PartsRoom {
        bytes: 12 << 20,
        ..ROOM
    };
    let shape = |target: &GpuTarget, rows: &[u64], cols, n_tokens, room| {
        let half = half_inputs(target, cols, n_tokens);
        let matrices: Vec<Matrix> = rows.iter().map(|&n| matrix(WeightType::Q4K, n)).collect();
        let launches = matmat_f16(target, half, &matrices, false, room).unwrap();
        (launches[0].entry(), launches[0].grid)
    };
    let of = |rows: &[u64], cols, n_tokens| shape(&h200, rows, cols, n_tokens, room);
    let (few, some, many) = (
        "matmat_wgmma_32_q4_k",
        "matmat_wgmma_64_q4_k",
        "matmat_wgmma_128_q4_k",
    );
    assert_eq!(of(&[14336, 14336], 4096, 64), (some, [224, 1, 1]));
    // Two blocks a multiprocessor, one of 128 tokens.
    assert_eq!(of(&[4096], 14336, 32), (few, [32, 1, 8]));
    assert_eq!(of(&[4096], 14336, 128), (many, [32, 1, 4]));
    // A part has a step at least.
    assert_eq!(of(&[128], 512, 17), (few, [1, 1, 2]));
    // As many parts as there is room for, and none where tiles cannot be counted.
    let some_room = PartsRoom {
        bytes: 4 << 20,
        ..room
    };
    assert_eq!(
        shape(&h200, &[4096], 4096, 64, some_room),
        (some, [32, 1, 4])
    );
    let uncounted = PartsRoom {
        n_counters: 31,
        ..room
    };
    assert_eq!(
        shape(&h200, &[4096], 4096, 64, uncounted),
        (some, [32, 1, 1])
    );
    // What is no whole number of steps, other rows and other cards stay with mma.sync.
    let a100 = GpuTarget {
        shared_bytes_asked: 163 << 10,
        ..GpuTarget::nvidia(8, 0, 108)
    };
    assert_eq!(half_layout(&h200, 4224, 64), HalfLayout::Rows);
    for (target, n_tokens) in [(&h200, 129), (&a100, 64)] {
        assert_eq!(half_layout(target, 4096, n_tokens), HalfLayout::Rows);
        let (entry, _) = shape(target, &[4096], 4096, n_tokens, room);
        assert!(entry.starts_with("matmat_mma_64x"), "{entry}");
    }
}

#[test]
fn contexts_are_split_to_fill_the_device_but_not_below_a_step() {
    let h200 = &targets()[0];
    assert_eq!(attention::n_split(h200, 1, 8, 8192), 16);
    let mi300 = GpuTarget::amd("gfx942", 304);
    assert_eq!(attention::n_split(&mi300, 1, 8, 8192), 64);
    assert_eq!(attention::n_split(&mi300, 4, 8, 8192), 19);
    assert_eq!(attention::n_split(h200, 1, 8, 512), 8);
    assert_eq!(attention::n_split(h200, 64, 8, 8192), 1);
    assert_eq!(
        attention::prefill_tiles([(0, 300), (300, 3)]),
        [[256, 44], [128, 128], [0, 128], [300, 3]]
    );
}

#[test]
fn products_of_few_float_rows_share_a_launch_of_as_many_blocks_as_there_are_multiprocessors() {
    let target = &GpuTarget::nvidia(9, 0, 132);
    let of = |rows: &[u64], ty| -> Vec<Matrix> { rows.iter().map(|&n| matrix(ty, n)).collect() };
    let launch = |rows: &[u64], cols, tokens| {
        let matrices = of(rows, WeightType::F16);
        let launches = matmat_floats(target, 1 << 20, (cols, tokens), &matrices, false).unwrap();
        assert_eq!(launches.len(), 1);
        (launches[0].kernel, launches[0].grid)
    };
    for (rows, cols, expected) in [
        (
            &[1024, 1024, 1024][..],
            1024,
            ("matvec_f16.matmat_floats_2_f16", [192, 1, 1]),
        ),
        (
            &[1024],
            1024,
            ("matvec_f16.matmat_floats_1_f16", [128, 1, 1]),
        ),
        (
            &[4096],
            1024,
            ("matvec_f16.matmat_floats_4_f16", [128, 1, 1]),
        ),
        (
            &[1024],
            4096,
            ("matvec_f16.matmat_floats_1_f16", [128, 1, 1]),
        ),
    ] {
        assert_eq!(launch(rows, cols, 16), expected, "{rows:?} {cols}");
    }
    let takes =
        |target: &GpuTarget, ty, cols, tokens| takes_floats(target, &of(&[64], ty), cols, tokens);
    let f16 = WeightType::F16;
    assert!(takes(target, f16, 64, 4) && takes(&GpuTarget::nvidia(8, 0, 108), f16, 64, 16));
    assert!(!takes(target, f16, 64, 3) && !takes(target, f16, 64, 17));
    assert!(!takes(target, f16, 96, 16) && !takes(target, WeightType::BF16, 64, 16));
    assert!(!takes(&GpuTarget::nvidia(7, 5, 68), f16, 64, 16));
    assert!(targets()[1..].iter().all(|amd| !takes(amd, f16, 64, 16)));
}
