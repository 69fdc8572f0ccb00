//! The format, value by value and refusal by refusal, on files that the crate's writer makes.

use rocmforge_gguf::write::{GgufWriter, MetaValue, RawTensor};
use rocmforge_gguf::{Described, Error, Gguf, TensorType, Value, ValueType, limits};

fn parse(writer: &GgufWriter) -> Result<Gguf, Error> {
    let bytes = writer.to_bytes();
    Gguf::parse(&bytes, bytes.len() as u64)
}

fn refusal(writer: &GgufWriter) -> Error {
    let error = parse(writer).expect_err("this file is to be refused");
    println!("{error}");
    error
}

/// One key of every type, arrays of every type, and tensors of several.
fn specimen() -> GgufWriter {
    let nested = MetaValue::Array(
        ValueType::Array,
        vec![
            MetaValue::Array(ValueType::U8, vec![1u8.into(), 2u8.into()]),
            ["x", "", "yz"].iter().collect(),
            MetaValue::Array(ValueType::Array, vec![[7i64, -8].as_slice().into()]),
        ],
    );
    GgufWriter::new()
        .key("general.architecture", "llama")
        .key("a.u8", 200u8)
        .key("a.i8", -100i8)
        .key("a.u16", 60_000u16)
        .key("a.i16", -30_000i16)
        .key("a.u32", 4_000_000_000u32)
        .key("a.i32", -2_000_000_000i32)
        .key("a.f32", 0.5f32)
        .key("a.true", true)
        .key("a.false", false)
        .key("a.u64", u64::MAX)
        .key("a.i64", i64::MIN)
        .key("a.f64", 0.25f64)
        .key("a.empty", "")
        .key("v.bytes", MetaValue::String(vec![0xff, b'a']))
        .key(
            "v.tokens",
            [b"<s>".as_slice(), b"", b"\xe4\xbd\xa0", b"\xff\x00"]
                .iter()
                .collect::<MetaValue>(),
        )
        .key("v.types", [1i32, -1, i32::MAX].as_slice())
        .key("v.u8s", [1u8, 255].as_slice())
        .key("v.u32s", [1u32, u32::MAX].as_slice())
        .key("v.scores", [0.5f32, -1.0].as_slice())
        .key("v.doubles", [0.5f64, -2.0].as_slice())
        .key(
            "v.bools",
            MetaValue::Array(ValueType::Bool, vec![true.into(), false.into()]),
        )
        .key("v.none", MetaValue::Array(ValueType::String, vec![]))
        .key("v.nested", nested)
        .zeros("output_norm.weight", &[5], TensorType::F32)
        .zeros("blk.0.attn_q.weight", &[512, 3], TensorType::Q4K)
        .zeros("blk.0.exps.weight", &[64, 3, 2, 2], TensorType::Q8_0)
        .tensor("scalar", &[], TensorType::F16, [0, 0])
}

#[test]
fn every_value_type_comes_back() {
    for version in [2, 3] {
        let gguf = parse(&specimen().version(version)).unwrap();
        assert_eq!(gguf.version(), version);
        assert_eq!(gguf.keys().count(), 24);
        assert_eq!(gguf.keys().nth(1), Some("a.u8"));
        assert_eq!(gguf.str("general.architecture").unwrap(), Some("llama"));
        assert_eq!(gguf.str("a.empty").unwrap(), Some(""));
        let value = |key| gguf.value(key).unwrap();
        assert_eq!(value("a.u8"), Value::U8(200));
        assert_eq!(value("a.i8"), Value::I8(-100));
        assert_eq!(value("a.u16"), Value::U16(60_000));
        assert_eq!(value("a.i16"), Value::I16(-30_000));
        assert_eq!(value("a.u32"), Value::U32(4_000_000_000));
        assert_eq!(value("a.i32"), Value::I32(-2_000_000_000));
        assert_eq!(value("a.u64"), Value::U64(u64::MAX));
        assert_eq!(value("a.i64"), Value::I64(i64::MIN));
        assert_eq!(value("a.f64"), Value::F64(0.25));
        assert_eq!(gguf.f32("a.f32").unwrap(), Some(0.5));
        assert_eq!(gguf.f32("a.f64").unwrap(), Some(0.25));
        assert_eq!(gguf.bool("a.true").unwrap(), Some(true));
        assert_eq!(gguf.bool("a.false").unwrap(), Some(false));
        assert_eq!(gguf.f32s("v.scores").unwrap(), Some(vec![0.5, -1.0]));
        assert_eq!(gguf.f32s("v.doubles").unwrap(), Some(vec![0.5, -2.0]));
        assert_eq!(gguf.i32s("v.types").unwrap(), Some(vec![1, -1, i32::MAX]));
        assert_eq!(gguf.i32s("v.u8s").unwrap(), Some(vec![1, 255]));
        assert_eq!(gguf.u32s("v.u32s").unwrap(), Some(vec![1, u32::MAX]));
        assert!(gguf.strings("v.none").unwrap().unwrap().is_empty());

        let tokens = gguf.strings("v.tokens").unwrap().unwrap();
        assert_eq!(tokens.len(), 4);
        assert_eq!(
            tokens.iter().collect::<Vec<_>>(),
            [b"<s>".as_slice(), b"", b"\xe4\xbd\xa0", b"\xff\x00"]
        );
    }
}

#[test]
fn nested_arrays_come_back() {
    let gguf = parse(&specimen()).unwrap();
    let Some(Value::Array(outer)) = gguf.value("v.nested") else {
        panic!("v.nested is an array")
    };
    let rows: Vec<_> = outer
        .iter()
        .map(|row| match row {
            Value::Array(row) => row,
            other => panic!("{other:?} is no array"),
        })
        .collect();
    assert_eq!(rows.len(), 3);
    assert_eq!(
        rows[0].iter().collect::<Vec<_>>(),
        [Value::U8(1), Value::U8(2)]
    );
    assert_eq!(
        rows[1].iter().collect::<Vec<_>>(),
        [
            Value::String(b"x"),
            Value::String(b""),
            Value::String(b"yz")
        ]
    );
    let Some(Value::Array(innermost)) = rows[2].iter().next() else {
        panic!("three deep")
    };
    assert_eq!(
        innermost.iter().collect::<Vec<_>>(),
        [Value::I64(7), Value::I64(-8)]
    );
}

#[test]
fn integers_of_any_width_fit_or_say_why_not() {
    let gguf = parse(&specimen()).unwrap();
    assert_eq!(gguf.u64("a.u8").unwrap(), Some(200));
    assert_eq!(gguf.u32("a.u32").unwrap(), Some(4_000_000_000));
    assert_eq!(gguf.i64("a.i8").unwrap(), Some(-100));
    assert_eq!(gguf.u64("absent").unwrap(), None);
    assert!(gguf.strings("absent").unwrap().is_none() && gguf.i32s("absent").unwrap().is_none());
    assert!(matches!(
        gguf.u64("a.i8"),
        Err(Error::ValueRange { value: -100, .. })
    ));
    assert!(matches!(gguf.u32("a.u64"), Err(Error::ValueRange { .. })));
    assert!(matches!(gguf.i64("a.u64"), Err(Error::ValueRange { .. })));
    assert!(matches!(
        gguf.i32s("v.u32s"),
        Err(Error::ValueRange {
            value: 4_294_967_295,
            ..
        })
    ));
}

#[test]
fn a_wrong_type_names_what_was_found() {
    let gguf = parse(&specimen()).unwrap();
    let found = |result: Result<(), Error>| match result {
        Err(Error::WrongType { found, .. }) => found,
        other => panic!("{other:?}"),
    };
    assert_eq!(
        found(gguf.str("a.u8").map(drop)),
        Described::One(ValueType::U8)
    );
    assert_eq!(
        found(gguf.u32("a.f32").map(drop)),
        Described::One(ValueType::F32)
    );
    assert_eq!(
        found(gguf.u32("a.true").map(drop)),
        Described::One(ValueType::Bool)
    );
    assert_eq!(
        found(gguf.bool("a.u8").map(drop)),
        Described::One(ValueType::U8)
    );
    assert_eq!(
        found(gguf.f32("a.u8").map(drop)),
        Described::One(ValueType::U8)
    );
    assert_eq!(
        found(gguf.u64("v.types").map(drop)),
        Described::Array(ValueType::I32, 3)
    );
    assert_eq!(
        found(gguf.strings("v.types").map(drop)),
        Described::Array(ValueType::I32, 3)
    );
    assert_eq!(
        found(gguf.strings("a.empty").map(drop)),
        Described::One(ValueType::String)
    );
    assert_eq!(
        found(gguf.i32s("v.tokens").map(drop)),
        Described::Array(ValueType::String, 4)
    );
    assert_eq!(
        found(gguf.f32s("v.types").map(drop)),
        Described::Array(ValueType::I32, 3)
    );
    assert!(matches!(
        gguf.str("v.bytes"),
        Err(Error::NotUtf8 { valid_up_to: 0, .. })
    ));
    let text = gguf.strings("v.types").unwrap_err().to_string();
    assert_eq!(
        text,
        "metadata key \"v.types\" is an array of 3 i32, where an array of strings is needed"
    );
}

#[test]
fn tensors_have_their_place() {
    for alignment in [8u32, 32, 64, 4096] {
        let mut writer = GgufWriter::new().alignment(alignment);
        for (i, ty) in TensorType::ALL.iter().enumerate() {
            writer = writer.zeros(&format!("t{i}"), &[ty.block_size() * 2, 3], *ty);
        }
        let file = writer.to_bytes();
        let gguf = Gguf::parse(&file, file.len() as u64).unwrap();
        assert_eq!(gguf.alignment(), u64::from(alignment));
        assert_eq!(gguf.header_bytes(), writer.header().len() as u64);
        for (i, ty) in TensorType::ALL.iter().enumerate() {
            let tensor = gguf.tensor(&format!("t{i}")).unwrap();
            assert_eq!((tensor.ty, tensor.bytes), (*ty, 6 * ty.block_bytes()));
            assert_eq!(tensor.dims, [ty.block_size() * 2, 3, 1, 1]);
            assert_eq!(tensor.shape(), [ty.block_size() * 2, 3]);
            assert_eq!(tensor.elements(), ty.block_size() * 6);
            assert!(
                tensor.offset.is_multiple_of(u64::from(alignment))
                    && tensor.offset >= gguf.data_start()
            );
        }
        assert_eq!(
            gguf.tensors().last().unwrap().range().end,
            file.len() as u64
        );
        assert!(gguf.tensor("t").is_none());
    }
}

#[test]
fn tensor_types_keep_their_numbers() {
    for ty in TensorType::ALL {
        assert_eq!(TensorType::from_u32(ty.id()), Some(*ty));
        assert!(TensorType::removed_name(ty.id()).is_none());
    }
    assert_eq!(TensorType::MXFP4.id(), 39);
    assert_eq!(TensorType::Q6K.to_string(), "Q6_K");
    assert_eq!(
        (0..100)
            .filter(|&id| TensorType::from_u32(id).is_some())
            .count(),
        TensorType::ALL.len()
    );
    assert_eq!(TensorType::Q4K.row_bytes(512), Some(288));
    assert_eq!(TensorType::Q4K.row_bytes(300), None);
    assert_eq!(TensorType::F64.row_bytes(u64::MAX), None);
}

#[test]
fn a_file_cut_at_any_byte_is_refused() {
    let file = specimen().to_bytes();
    for cut in 0..file.len() {
        let error = Gguf::parse(&file[..cut], cut as u64).expect_err("a cut file is refused");
        assert!(
            matches!(error, Error::Truncated { .. } | Error::TensorPastEnd { .. }),
            "cut at {cut} of {}: {error}",
            file.len()
        );
    }
    // The bytes of the header are enough, where the file is known to be longer.
    let header = specimen().header();
    let whole = Gguf::parse(&header, file.len() as u64).unwrap();
    assert_eq!(whole.tensors().len(), 4);
    assert!(matches!(
        Gguf::parse(&header[..header.len() - 1], file.len() as u64),
        Err(Error::Truncated { .. })
    ));
}

#[test]
fn what_is_no_gguf_is_refused() {
    let with = |at: usize, bytes: &[u8]| {
        let mut file = specimen().to_bytes();
        file[at..at + bytes.len()].copy_from_slice(bytes);
        Gguf::parse(&file, file.len() as u64).unwrap_err()
    };
    assert!(matches!(with(0, b"GGML"), Error::BadMagic));
    assert!(matches!(
        with(4, &[0, 0, 0, 3]),
        Error::BigEndian { version: 3 }
    ));
    for version in [0u32, 1, 4, 0x0300_0003] {
        assert!(
            matches!(with(4, &version.to_le_bytes()), Error::Version { found } if found == version)
        );
    }
    assert!(matches!(
        Gguf::parse(b"", 0),
        Err(Error::Truncated {
            need: 4,
            available: 0,
            ..
        })
    ));
    assert!(matches!(
        Gguf::parse(b"PK\x03\x04 zip", 8),
        Err(Error::BadMagic)
    ));
    assert!(matches!(
        Gguf::parse(b"GGUF\x03\0\0\0", 8),
        Err(Error::Truncated { need: 24, .. })
    ));
}

#[test]
fn huge_counts_and_lengths_are_refused_before_they_are_believed() {
    let huge = [limits::MAX_TENSORS + 1, 1 << 40, i64::MAX as u64, u64::MAX];
    for n in huge {
        let tensors = specimen().raw_counts(Some(n), None);
        assert!(matches!(refusal(&tensors), Error::Limit { found, offset: 8, .. } if found == n));
        let keys = specimen().raw_counts(None, Some(n));
        assert!(matches!(refusal(&keys), Error::Limit { found, offset: 16, .. } if found == n));
        let array =
            |ty: ValueType| [(ty as u32).to_le_bytes().as_slice(), &n.to_le_bytes()].concat();
        for ty in [
            ValueType::U8,
            ValueType::F64,
            ValueType::String,
            ValueType::Array,
        ] {
            let writer = GgufWriter::new().raw_key(b"k", ValueType::Array as u32, &array(ty));
            assert!(matches!(
                refusal(&writer),
                Error::Limit { found, .. } | Error::Truncated { need: found, .. } if found >= limits::MAX_TENSORS
            ));
        }
        let string = GgufWriter::new().raw_key(b"k", ValueType::String as u32, &n.to_le_bytes());
        assert!(matches!(
            refusal(&string),
            Error::Limit { .. } | Error::Truncated { .. }
        ));
        let element = [array(ValueType::String), vec![0; 16]].concat();
        let element = [&element[..4], &1u64.to_le_bytes(), &n.to_le_bytes()].concat();
        let strings = GgufWriter::new().raw_key(b"k", ValueType::Array as u32, &element);
        assert!(matches!(
            refusal(&strings),
            Error::Limit { .. } | Error::Truncated { .. }
        ));
    }
    // Counts within the limits that the file cannot hold fail at once, with what it would take.
    let writer = specimen().raw_counts(Some(limits::MAX_TENSORS), None);
    assert!(
        matches!(refusal(&writer), Error::Truncated { need, .. } if need >= 25 * limits::MAX_TENSORS)
    );
    // A key and a name one too long.
    let long = vec![b'k'; limits::MAX_KEY_BYTES as usize + 1];
    assert!(matches!(
        refusal(&GgufWriter::new().raw_key(&long, 0, &[0])),
        Error::Limit { offset: 24, .. }
    ));
    let name = "n".repeat(limits::MAX_TENSOR_NAME_BYTES as usize);
    assert!(parse(&GgufWriter::new().zeros(&name, &[1], TensorType::I8)).is_ok());
    let writer = GgufWriter::new().zeros(&format!("{name}n"), &[1], TensorType::I8);
    assert!(matches!(
        refusal(&writer),
        Error::Limit {
            found: 65,
            max: 64,
            ..
        }
    ));
}

#[test]
fn a_header_above_its_limit_is_refused() {
    let (head, file_len) = (
        GgufWriter::new().raw_counts(None, Some(1)),
        limits::MAX_HEADER_BYTES * 8,
    );
    let elements = limits::MAX_ARRAY_LEN;
    // Sixteen million arrays of at least 12 bytes, and more behind them.
    let mut value = (ValueType::Array as u32).to_le_bytes().to_vec();
    value.extend(elements.to_le_bytes());
    let inner = [
        (ValueType::U64 as u32).to_le_bytes().as_slice(),
        &elements.to_le_bytes(),
    ]
    .concat();
    value.extend(inner);
    let bytes = head.raw_key(b"k", ValueType::Array as u32, &value).header();
    let error = Gguf::parse(&bytes, file_len).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Limit {
                max: limits::MAX_HEADER_BYTES,
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn bad_keys_are_refused() {
    let key = |key: &[u8], ty: u32, value: &[u8]| {
        refusal(&GgufWriter::new().key("first", 1u8).raw_key(key, ty, value))
    };
    assert!(matches!(key(b"first", 0, &[0]), Error::DuplicateKey { key, .. } if key == "first"));
    assert!(matches!(
        key(b"k", 13, &[0; 16]),
        Error::UnknownValueType { found: 13, .. }
    ));
    let array = |ty: u32, count: u64, rest: &[u8]| {
        [&ty.to_le_bytes(), count.to_le_bytes().as_slice(), rest].concat()
    };
    assert!(matches!(
        key(b"k", 9, &array(77, 1, &[0; 8])),
        Error::UnknownValueType { found: 77, .. }
    ));

    let deep = |depth: usize| {
        let mut value = MetaValue::Array(ValueType::U8, vec![]);
        for _ in 1..depth {
            value = MetaValue::Array(ValueType::Array, vec![value]);
        }
        GgufWriter::new().key("deep", value)
    };
    assert!(parse(&deep(limits::MAX_ARRAY_DEPTH)).is_ok());
    for depth in [limits::MAX_ARRAY_DEPTH + 1, 50] {
        assert!(matches!(refusal(&deep(depth)), Error::NestedTooDeep { key, .. } if key == "deep"));
    }
}

#[test]
fn bad_alignments_are_refused() {
    for bad in [0u32, 1, 4, 12, 33, 2 << 20, 1 << 31, u32::MAX] {
        let writer = GgufWriter::new().key("general.alignment", bad);
        assert!(matches!(refusal(&writer), Error::Alignment { found } if found == u64::from(bad)));
    }
    assert!(matches!(
        refusal(&GgufWriter::new().key("general.alignment", "32")),
        Error::WrongType { .. }
    ));
    assert!(matches!(
        refusal(&GgufWriter::new().key("general.alignment", -32i32)),
        Error::ValueRange { .. }
    ));
}

#[test]
fn bad_tensors_are_refused() {
    let raw = |name: &str, dims: &[u64], ty: u32, offset: u64| RawTensor {
        name: name.into(),
        dims: dims.into(),
        ty,
        offset,
    };
    let with = |tensor: RawTensor| {
        refusal(
            &GgufWriter::new()
                .zeros("a", &[256, 2], TensorType::F32)
                .raw_tensor(tensor)
                .raw_data(&[0; 4096]),
        )
    };
    assert!(matches!(
        with(raw("", &[1], 0, 2048)),
        Error::BadTensorName { index: 1, .. }
    ));
    assert!(matches!(
        with(RawTensor {
            name: vec![0xff],
            ..raw("", &[1], 0, 2048)
        }),
        Error::BadTensorName { .. }
    ));
    assert!(
        matches!(with(raw("a", &[1], 0, 2048)), Error::DuplicateTensor { tensor, .. } if tensor == "a")
    );
    assert!(matches!(
        with(raw("t", &[1; 5], 0, 2048)),
        Error::TooManyDims { found: 5, .. }
    ));
    assert!(matches!(
        with(raw("t", &[4, 0], 0, 2048)),
        Error::ZeroDim {
            dims: [4, 0, 1, 1],
            ..
        }
    ));
    assert!(matches!(
        with(raw("t", &[1], 99, 2048)),
        Error::UnknownTensorType { found: 99, .. }
    ));
    for (id, name) in [
        (4, "Q4_2"),
        (5, "Q4_3"),
        (31, "Q4_0_4_4"),
        (36, "IQ4_NL_4_4"),
    ] {
        assert!(
            matches!(with(raw("t", &[32], id, 2048)), Error::RemovedTensorType { name: n, .. } if n == name)
        );
    }
    assert!(matches!(
        with(raw("t", &[255], TensorType::Q4K.id(), 2048)),
        Error::PartialBlock {
            row: 255,
            ty: TensorType::Q4K,
            ..
        }
    ));
    for dims in [
        vec![u64::MAX],
        vec![1 << 32, 1 << 32],
        vec![1 << 62, 2],
        vec![1 << 31; 4],
        vec![1 << 61],
    ] {
        assert!(
            matches!(with(raw("t", &dims, 0, 2048)), Error::SizeOverflow { .. }),
            "{dims:?}"
        );
    }
    assert!(matches!(
        with(raw("t", &[1], 0, 2049)),
        Error::UnalignedTensor {
            offset: 2049,
            alignment: 32,
            ..
        }
    ));
    for (dims, offset) in [
        (&[1][..], 8192),
        (&[4096], 2048),
        (&[1], u64::MAX - 31),
        (&[1 << 40], 2048),
    ] {
        assert!(
            matches!(with(raw("t", dims, 0, offset)), Error::TensorPastEnd { tensor, .. } if tensor == "t")
        );
    }
    for offset in [0, 32, 2016] {
        let error = with(raw("t", &[8], 0, offset));
        assert!(
            matches!(&error, Error::Overlap { first, second, .. } if first == "a" && second == "t"),
            "{error}"
        );
    }
    // Touching is fine, and so is a gap and an order of the table that is not the data's.
    let writer = GgufWriter::new()
        .raw_tensor(raw("late", &[8], 0, 64))
        .raw_tensor(raw("early", &[8], 0, 0))
        .raw_tensor(raw("middle", &[8], 0, 32))
        .raw_data(&[0; 96]);
    assert_eq!(parse(&writer).unwrap().tensors()[0].name, "late");
}
