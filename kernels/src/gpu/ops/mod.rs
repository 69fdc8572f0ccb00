//! A builder per operation: shapes and device addresses in, [`Launch`](super::Launch)es out.
//!
//! Addresses are absolute. Shapes are `[rows][width]`, width fastest.

pub mod activations;
pub mod attention;
pub mod kv;
pub mod matmat;
pub mod matvec;
pub mod rows;
pub mod sample;
pub mod weights;

use crate::host::WeightType;

/// What each weight type is called in units and entries.
pub(crate) const fn type_name(ty: WeightType) -> &'static str {
    match ty {
        WeightType::F32 => "f32",
        WeightType::F16 => "f16",
        WeightType::BF16 => "bf16",
        WeightType::Q4_0 => "q4_0",
        WeightType::Q4_1 => "q4_1",
        WeightType::Q5_0 => "q5_0",
        WeightType::Q5_1 => "q5_1",
        WeightType::Q8_0 => "q8_0",
        WeightType::Q2K => "q2_k",
        WeightType::Q3K => "q3_k",
        WeightType::Q4K => "q4_k",
        WeightType::Q5K => "q5_k",
        WeightType::Q6K => "q6_k",
        WeightType::MXFP4 => "mxfp4",
    }
}

/// The kernel of a weight type: `per_type!(ty, "unit_", ".entry_")` where each type has a unit, `per_type!(ty, "unit.entry_")` where
/// one unit has all.
macro_rules! per_type {
    ($ty:expr, $before:literal, $after:literal) => {{
        use $crate::host::WeightType as W;
        match $ty {
            W::F32 => concat!($before, "f32", $after, "f32"),
            W::F16 => concat!($before, "f16", $after, "f16"),
            W::BF16 => concat!($before, "bf16", $after, "bf16"),
            W::Q4_0 => concat!($before, "q4_0", $after, "q4_0"),
            W::Q4_1 => concat!($before, "q4_1", $after, "q4_1"),
            W::Q5_0 => concat!($before, "q5_0", $after, "q5_0"),
            W::Q5_1 => concat!($before, "q5_1", $after, "q5_1"),
            W::Q8_0 => concat!($before, "q8_0", $after, "q8_0"),
            W::Q2K => concat!($before, "q2_k", $after, "q2_k"),
            W::Q3K => concat!($before, "q3_k", $after, "q3_k"),
            W::Q4K => concat!($before, "q4_k", $after, "q4_k"),
            W::Q5K => concat!($before, "q5_k", $after, "q5_k"),
            W::Q6K => concat!($before, "q6_k", $after, "q6_k"),
            W::MXFP4 => concat!($before, "mxfp4", $after, "mxfp4"),
        }
    }};
    ($ty:expr, $before:literal) => {{
        use $crate::host::WeightType as W;
        match $ty {
            W::F32 => concat!($before, "f32"),
            W::F16 => concat!($before, "f16"),
            W::BF16 => concat!($before, "bf16"),
            W::Q4_0 => concat!($before, "q4_0"),
            W::Q4_1 => concat!($before, "q4_1"),
            W::Q5_0 => concat!($before, "q5_0"),
            W::Q5_1 => concat!($before, "q5_1"),
            W::Q8_0 => concat!($before, "q8_0"),
            W::Q2K => concat!($before, "q2_k"),
            W::Q3K => concat!($before, "q3_k"),
            W::Q4K => concat!($before, "q4_k"),
            W::Q5K => concat!($before, "q5_k"),
            W::Q6K => concat!($before, "q6_k"),
            W::MXFP4 => concat!($before, "mxfp4"),
        }
    }};
}
pub(crate) use per_type;
