//! A builder per operation: shapes and device addresses in, [`Launch`](super::Launch)es out.
//!
//! Addresses are absolute. Shapes are `[rows][width]`, width fastest.

pub mod activations;
pub mod adapters;
pub mod attention;
pub mod elements;
pub mod experts;
pub mod heads;
pub mod kv;
pub mod matmat;
pub mod matvec;
pub mod recurrent;
pub mod route;
pub mod rows;
pub mod sample;
mod scores;
pub mod weights;

use crate::WeightType;

/// The kernel of a weight type: `per_type!(ty, "unit_", ".entry_")` where each type has a
/// unit, `per_type!(ty, "unit.entry_")` where one unit has all. The list is what each type is
/// called in units and entries.
macro_rules! per_type {
    (@match [$($ty:ident $name:literal),*] $of:expr, $before:literal, $after:literal) => {
        match $of {
            $($crate::WeightType::$ty => concat!($before, $name, $after, $name),)*
        }
    };
    (@match [$($ty:ident $name:literal),*] $of:expr, $before:literal) => {
        match $of {
            $($crate::WeightType::$ty => concat!($before, $name),)*
        }
    };
    ($of:expr, $($around:literal),*) => {
        per_type!(@match [
            F32 "f32", F16 "f16", BF16 "bf16", Q4_0 "q4_0", Q4_1 "q4_1", Q5_0 "q5_0", Q5_1 "q5_1",
            Q8_0 "q8_0", Q2K "q2_k", Q3K "q3_k", Q4K "q4_k", Q5K "q5_k", Q6K "q6_k",
            MXFP4 "mxfp4", IQ4NL "iq4_nl", IQ4XS "iq4_xs", IQ3S "iq3_s", IQ3XXS "iq3_xxs",
            IQ2S "iq2_s", IQ2XS "iq2_xs", IQ2XXS "iq2_xxs", IQ1S "iq1_s", IQ1M "iq1_m",
            TQ1_0 "tq1_0", TQ2_0 "tq2_0", NVFP4 "nvfp4", Q1_0 "q1_0", Q2_0 "q2_0"
        ] $of, $($around),*)
    };
}
pub(crate) use per_type;

/// What each weight type is called in units and entries.
pub(crate) const fn type_name(ty: WeightType) -> &'static str {
    per_type!(ty, "")
}
