//! ggml's tensor types: numbers, names, and how many elements and bytes a block has.
//!
//! Source: `enum ggml_type` and the block structures of ggml (`ggml.h`, `ggml-common.h`); the GGUF
//! spec lists the numbers under "File Structure". A number is never reused: removed ones are known
//! by name so that the error can say so.

use std::fmt;

macro_rules! tensor_types {
    ($( $(#[doc = $doc:expr])* $variant:ident = $id:literal, $name:literal, $size:literal, $bytes:literal; )*) => {
        /// The type of a tensor's elements as ggml numbers them.
        ///
        /// Quantized types store whole blocks: [`block_size`](Self::block_size) elements of a row
        /// in [`block_bytes`](Self::block_bytes) bytes. Plain types are blocks of one.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u32)]
        pub enum TensorType {
            $( $(#[doc = $doc])* $variant = $id, )*
        }

        impl TensorType {
            /// Every type, in the order of their numbers.
            pub const ALL: &[TensorType] = &[$(TensorType::$variant),*];

            /// The type with ggml's number `id`; `None` for numbers never given and for
            /// [removed](Self::removed_name) ones.
            pub const fn from_u32(id: u32) -> Option<TensorType> {
                match id {
                    $( $id => Some(TensorType::$variant), )*
                    _ => None,
                }
            }

            /// ggml's name, such as `Q4_K`.
            pub const fn name(self) -> &'static str {
                match self { $( TensorType::$variant => $name, )* }
            }

            /// Elements in a block.
            pub const fn block_size(self) -> u64 {
                match self { $( TensorType::$variant => $size, )* }
            }

            /// Bytes of a block.
            pub const fn block_bytes(self) -> u64 {
                match self { $( TensorType::$variant => $bytes, )* }
            }
        }
    };
}

tensor_types! {
    /// IEEE 754 binary32.
    F32 = 0, "F32", 1, 4;
    /// IEEE 754 binary16.
    F16 = 1, "F16", 1, 2;
    /// f16 scale, 32 x 4 bits.
    Q4_0 = 2, "Q4_0", 32, 18;
    /// f16 scale and minimum, 32 x 4 bits.
    Q4_1 = 3, "Q4_1", 32, 20;
    /// f16 scale, 32 x 5 bits.
    Q5_0 = 6, "Q5_0", 32, 22;
    /// f16 scale and minimum, 32 x 5 bits.
    Q5_1 = 7, "Q5_1", 32, 24;
    /// f16 scale, 32 x 8 bits.
    Q8_0 = 8, "Q8_0", 32, 34;
    /// f16 scale and sum, 32 x 8 bits (activations; not seen in files).
    Q8_1 = 9, "Q8_1", 32, 36;
    /// 16 sub-blocks with 4-bit scales and minima, 2 bits an element.
    Q2K = 10, "Q2_K", 256, 84;
    /// 16 sub-blocks with 6-bit scales, 3 bits an element.
    Q3K = 11, "Q3_K", 256, 110;
    /// 8 sub-blocks with 6-bit scales and minima, 4 bits an element.
    Q4K = 12, "Q4_K", 256, 144;
    /// 8 sub-blocks with 6-bit scales and minima, 5 bits an element.
    Q5K = 13, "Q5_K", 256, 176;
    /// 16 sub-blocks with 8-bit scales, 6 bits an element.
    Q6K = 14, "Q6_K", 256, 210;
    /// f32 scale, 256 x 8 bits, 16 sums (activations; not seen in files).
    Q8K = 15, "Q8_K", 256, 292;
    /// 2.06 bits an element, codebook.
    IQ2XXS = 16, "IQ2_XXS", 256, 66;
    /// 2.31 bits an element, codebook.
    IQ2XS = 17, "IQ2_XS", 256, 74;
    /// 3.06 bits an element, codebook.
    IQ3XXS = 18, "IQ3_XXS", 256, 98;
    /// 1.56 bits an element, codebook.
    IQ1S = 19, "IQ1_S", 256, 50;
    /// f16 scale, 32 x 4 bits into a table of 16 values.
    IQ4NL = 20, "IQ4_NL", 32, 18;
    /// 3.44 bits an element, codebook.
    IQ3S = 21, "IQ3_S", 256, 110;
    /// 2.56 bits an element, codebook.
    IQ2S = 22, "IQ2_S", 256, 82;
    /// 8 sub-blocks with 6-bit scales, 4 bits into a table of 16 values.
    IQ4XS = 23, "IQ4_XS", 256, 136;
    /// Signed 8-bit integer.
    I8 = 24, "I8", 1, 1;
    /// Signed 16-bit integer.
    I16 = 25, "I16", 1, 2;
    /// Signed 32-bit integer.
    I32 = 26, "I32", 1, 4;
    /// Signed 64-bit integer.
    I64 = 27, "I64", 1, 8;
    /// IEEE 754 binary64.
    F64 = 28, "F64", 1, 8;
    /// 1.75 bits an element, codebook.
    IQ1M = 29, "IQ1_M", 256, 56;
    /// The upper half of a binary32.
    BF16 = 30, "BF16", 1, 2;
    /// Ternary, five elements a byte.
    TQ1_0 = 34, "TQ1_0", 256, 54;
    /// Ternary, 2 bits an element.
    TQ2_0 = 35, "TQ2_0", 256, 66;
    /// OCP microscaling: E8M0 scale, 32 x E2M1.
    MXFP4 = 39, "MXFP4", 32, 17;
    /// Four groups of 16 x E2M1, each with a UE4M3 scale.
    NVFP4 = 40, "NVFP4", 64, 36;
    /// f16 scale, 128 x 1 bit.
    Q1_0 = 41, "Q1_0", 128, 18;
    /// f16 scale, 64 x 2 bits.
    Q2_0 = 42, "Q2_0", 64, 18;
}

// The figures above against the structures they stand for.
const _: () = {
    assert!(TensorType::Q4_0.block_bytes() == 2 + 32 / 2);
    assert!(TensorType::Q5_1.block_bytes() == 2 + 2 + 4 + 32 / 2);
    assert!(TensorType::Q2K.block_bytes() == 256 / 16 + 256 / 4 + 2 + 2);
    assert!(TensorType::Q3K.block_bytes() == 256 / 8 + 256 / 4 + 12 + 2);
    assert!(TensorType::Q4K.block_bytes() == 2 + 2 + 12 + 256 / 2);
    assert!(TensorType::Q5K.block_bytes() == 2 + 2 + 12 + 256 / 8 + 256 / 2);
    assert!(TensorType::Q6K.block_bytes() == 256 / 2 + 256 / 4 + 256 / 16 + 2);
    assert!(TensorType::Q8K.block_bytes() == 4 + 256 + 2 * 256 / 16);
    assert!(TensorType::IQ1M.block_bytes() == 256 / 8 + 256 / 16 + 256 / 32);
    assert!(TensorType::IQ3S.block_bytes() == 2 + 256 / 4 + 256 / 8 + 256 / 32 + 256 / 64);
    assert!(TensorType::TQ1_0.block_bytes() == 2 + 256 / 64 + (256 - 4 * 256 / 64) / 5);
    assert!(TensorType::MXFP4.block_bytes() == 1 + 32 / 2);
    assert!(TensorType::NVFP4.block_bytes() == 64 / 16 + 64 / 2);
};

impl TensorType {
    /// The name that a number had before it was taken out of the format, for error messages.
    pub const fn removed_name(id: u32) -> Option<&'static str> {
        Some(match id {
            4 => "Q4_2",
            5 => "Q4_3",
            31 => "Q4_0_4_4",
            32 => "Q4_0_4_8",
            33 => "Q4_0_8_8",
            36 => "IQ4_NL_4_4",
            37 => "IQ4_NL_4_8",
            38 => "IQ4_NL_8_8",
            _ => return None,
        })
    }

    /// ggml's number.
    pub const fn id(self) -> u32 {
        self as u32
    }

    /// The type as kernels compute with it; `None` if none does.
    pub fn weight_type(self) -> Option<crate::WeightType> {
        crate::WeightType::ALL
            .into_iter()
            .find(|w| w.tensor_type() == self)
    }

    /// Whether elements come in blocks with a shared scale.
    pub const fn is_quantized(self) -> bool {
        self.block_size() > 1
    }

    /// Bytes of a row of `elements`; `None` where that is not a whole number of blocks, or
    /// overflows.
    pub const fn row_bytes(self, elements: u64) -> Option<u64> {
        if !elements.is_multiple_of(self.block_size()) {
            return None;
        }
        (elements / self.block_size()).checked_mul(self.block_bytes())
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
