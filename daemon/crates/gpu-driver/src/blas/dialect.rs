//! The numbers and names by which cuBLASLt and hipBLASLt differ.

use std::ffi::c_int;

/// The numbers and names of one of the two.
pub(super) struct Dialect {
    pub(super) vendor: &'static str,
    pub(super) names: &'static [&'static str],
    pub(super) prefix: &'static str,
    pub(super) compute_32f: c_int,
    pub(super) transposed: c_int,
    pub(super) desc_transposes_a: c_int,
    pub(super) layout_batch_count: c_int,
    pub(super) layout_batch_offset: c_int,
    /// Preferences for the alignment of C and D in bytes.
    pub(super) prefers_alignment: Option<[c_int; 2]>,
    /// How a bias is added; `None` for a library that is not asked to.
    pub(super) bias: Option<BiasNumbers>,
    /// Where in a result the workspace's size and the status lie.
    pub(super) result_workspace: usize,
    /// The code for memory that the library itself could not have.
    pub(super) alloc_failed: c_int,
}

/// The numbers of a description's attributes for what follows a product, and for the address of
/// its bias; and of a bias among what may follow.
pub(super) struct BiasNumbers {
    pub(super) desc_epilogue: c_int,
    pub(super) desc_address: c_int,
    pub(super) epilogue: u32,
}

pub(super) const PREFERS_WORKSPACE_MAX: c_int = 1;

pub(super) const CUBLAS_LT: Dialect = Dialect {
    vendor: "cublasLt",
    names: &[
        "libcublasLt.so.13",
        "libcublasLt.so.12",
        "libcublasLt.so.11",
        "libcublasLt.so",
    ],
    prefix: "cublasLt",
    compute_32f: 68,
    transposed: 1,
    desc_transposes_a: 3,
    layout_batch_count: 5,
    layout_batch_offset: 6,
    prefers_alignment: Some([7, 8]),
    bias: Some(BiasNumbers {
        desc_epilogue: 7,
        desc_address: 8,
        epilogue: 4,
    }),
    result_workspace: 64,
    alloc_failed: 3,
};

/// As of ROCm 6. What came before has other numbers and refuses these, which leads to rocBLAS.
pub(super) const HIPBLAS_LT: Dialect = Dialect {
    vendor: "hipblasLt",
    names: &["libhipblaslt.so.1", "libhipblaslt.so.0", "libhipblaslt.so"],
    prefix: "hipblasLt",
    compute_32f: 2,
    transposed: 112,
    desc_transposes_a: 0,
    layout_batch_count: 0,
    layout_batch_offset: 1,
    prefers_alignment: None,
    bias: None,
    result_workspace: 24,
    alloc_failed: 2,
};
