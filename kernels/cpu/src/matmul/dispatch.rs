//! From run-time values, a weight type and an instruction set, to the types that the
//! kernels are compiled for.

use super::super::formats::{
    Format, Iq1M, Iq1S, Iq2S, Iq2Xs, Iq2Xxs, Iq3S, Iq3Xxs, Iq4Nl, Iq4Xs, MxFp4, NvFp4, Q1_0, Q2_0,
    Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, Tq1_0, Tq2_0,
};
use super::super::simd::{Avx2, Avx512, AvxVnni, Scalar, Simd};
use super::super::{Isa, WeightType};

/// What is to be done for one instruction set.
pub(crate) trait WithIsa {
    /// Does it.
    fn run<S: Simd>(self, s: S);
}

/// What is to be done for one packed format and instruction set.
pub(crate) trait WithFormat {
    /// Does it.
    fn run<F: Format, S: Simd>(self, s: S);
}

const DETECTED: &str = "an Isa that this CPU lacks; use Isa::detect";

/// Runs `job` for `isa`.
///
/// # Panics
/// If the CPU lacks it.
pub(crate) fn with_isa(isa: Isa, job: impl WithIsa) {
    match isa {
        Isa::Scalar => job.run(Scalar),
        Isa::Avx2 => job.run(Avx2::detect().expect(DETECTED)),
        Isa::AvxVnni => job.run(AvxVnni::detect().expect(DETECTED)),
        Isa::Avx512 => job.run(Avx512::detect().expect(DETECTED)),
    }
}

/// Runs `job` for the quantized type `ty` and `isa`.
///
/// # Panics
/// If the CPU lacks `isa`, or `ty` is not quantized.
pub(crate) fn with_format(ty: WeightType, isa: Isa, job: impl WithFormat) {
    with_isa(isa, ForType { ty, job });
}

struct ForType<J> {
    ty: WeightType,
    job: J,
}

impl<J: WithFormat> WithIsa for ForType<J> {
    fn run<S: Simd>(self, s: S) {
        let job = self.job;
        match self.ty {
            WeightType::Q4_0 => job.run::<Q4_0, S>(s),
            WeightType::Q4_1 => job.run::<Q4_1, S>(s),
            WeightType::Q5_0 => job.run::<Q5_0, S>(s),
            WeightType::Q5_1 => job.run::<Q5_1, S>(s),
            WeightType::Q8_0 => job.run::<Q8_0, S>(s),
            WeightType::Q2K => job.run::<Q2K, S>(s),
            WeightType::Q3K => job.run::<Q3K, S>(s),
            WeightType::Q4K => job.run::<Q4K, S>(s),
            WeightType::Q5K => job.run::<Q5K, S>(s),
            WeightType::Q6K => job.run::<Q6K, S>(s),
            WeightType::MXFP4 => job.run::<MxFp4, S>(s),
            WeightType::IQ4NL => job.run::<Iq4Nl, S>(s),
            WeightType::IQ4XS => job.run::<Iq4Xs, S>(s),
            WeightType::IQ3S => job.run::<Iq3S, S>(s),
            WeightType::IQ3XXS => job.run::<Iq3Xxs, S>(s),
            WeightType::IQ2S => job.run::<Iq2S, S>(s),
            WeightType::IQ2XS => job.run::<Iq2Xs, S>(s),
            WeightType::IQ2XXS => job.run::<Iq2Xxs, S>(s),
            WeightType::IQ1S => job.run::<Iq1S, S>(s),
            WeightType::IQ1M => job.run::<Iq1M, S>(s),
            WeightType::TQ1_0 => job.run::<Tq1_0, S>(s),
            WeightType::TQ2_0 => job.run::<Tq2_0, S>(s),
            WeightType::NVFP4 => job.run::<NvFp4, S>(s),
            WeightType::Q1_0 => job.run::<Q1_0, S>(s),
            WeightType::Q2_0 => job.run::<Q2_0, S>(s),
            WeightType::F32 | WeightType::F16 | WeightType::BF16 => {
                unreachable!("{} is not quantized", self.ty)
            }
        }
    }
}
