//! The types that kernels multiply with: those of [`TensorType`] that a weight may have.

use std::fmt;

use crate::TensorType;

macro_rules! weight_types {
    ($($ty:ident),* $(,)?) => {
        /// A type of weights that kernels multiply with.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[expect(missing_docs, reason = "the variants are ggml's own type names")]
        pub enum WeightType {
            $($ty,)*
        }

        impl WeightType {
            /// Every type, in the order of the declaration.
            pub const ALL: [WeightType; [$(TensorType::$ty),*].len()] = [$(WeightType::$ty),*];

            /// The type as files number it, which names it and tells its blocks.
            pub const fn tensor_type(self) -> TensorType {
                match self {
                    $(WeightType::$ty => TensorType::$ty,)*
                }
            }
        }
    };
}

weight_types! {
    F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2K, Q3K, Q4K, Q5K, Q6K, MXFP4, IQ4NL, IQ4XS, IQ3S,
    IQ3XXS, IQ2S, IQ2XS, IQ2XXS, IQ1S, IQ1M, TQ1_0, TQ2_0, NVFP4, Q1_0, Q2_0,
}

impl WeightType {
    /// Weights in a block; a row is a whole number of blocks.
    pub const fn block_size(self) -> usize {
        self.tensor_type().block_size() as usize
    }

    /// Bytes of a block, in the file and, but for padding at the end of a group of rows, packed.
    pub const fn block_bytes(self) -> usize {
        self.tensor_type().block_bytes() as usize
    }

    /// ggml's name of the type.
    pub const fn name(self) -> &'static str {
        self.tensor_type().name()
    }

    /// Whether products with this type quantize the activations to 8 bits
    /// (otherwise they keep them in f32).
    pub const fn is_quantized(self) -> bool {
        self.block_size() > 1
    }
}

impl fmt::Display for WeightType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
