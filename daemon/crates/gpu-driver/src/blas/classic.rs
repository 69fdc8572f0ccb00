//! cuBLAS and rocBLAS: one call of each is used.

use std::ffi::{c_int, c_uint, c_void};

use crate::{Context, Vendor};

use super::{
    Error, FirstProduct, Gemm, Handle, Library, LibraryMemory, Which, config, failed, library,
    no_memory, usable,
};

mod cublas {
    pub(super) const OP_N: u32 = 0;
    pub(super) const OP_T: u32 = 1;
    pub(super) const R_32F: u32 = 0;
    pub(super) const R_16F: u32 = 2;
    pub(super) const COMPUTE_32F: u32 = 68;
    pub(super) const DEFAULT: i32 = -1;
    pub(super) const ALLOC_FAILED: i32 = 3;
    pub(super) const NAMES: [&str; 4] = [
        "libcublas.so.13",
        "libcublas.so.12",
        "libcublas.so.11",
        "libcublas.so",
    ];
}

mod rocblas {
    pub(super) const NONE: u32 = 111;
    pub(super) const TRANSPOSE: u32 = 112;
    pub(super) const F16_R: u32 = 150;
    pub(super) const F32_R: u32 = 151;
    pub(super) const STANDARD: u32 = 0;
    pub(super) const MEMORY_ERROR: i32 = 5;
    pub(super) const NAMES: [&str; 4] = [
        "librocblas.so.5",
        "librocblas.so.4",
        "librocblas.so.0",
        "librocblas.so",
    ];
}

type CublasGemmEx = unsafe extern "C" fn(
    Handle,
    u32,
    u32,
    c_int,
    c_int,
    c_int,
    *const c_void,
    *const c_void,
    u32,
    c_int,
    *const c_void,
    u32,
    c_int,
    *const c_void,
    *mut c_void,
    u32,
    c_int,
    u32,
    i32,
) -> c_int;

type RocblasGemmEx = unsafe extern "C" fn(
    Handle,
    u32,
    u32,
    c_int,
    c_int,
    c_int,
    *const c_void,
    *const c_void,
    u32,
    c_int,
    *const c_void,
    u32,
    c_int,
    *const c_void,
    *const c_void,
    u32,
    c_int,
    *mut c_void,
    u32,
    c_int,
    u32,
    u32,
    i32,
    c_uint,
) -> c_int;

type Create = unsafe extern "C" fn(*mut Handle) -> c_int;
type Destroy = unsafe extern "C" fn(Handle) -> c_int;
type SetStream = unsafe extern "C" fn(Handle, *mut c_void) -> c_int;
type SetWorkspace = unsafe extern "C" fn(Handle, *mut c_void, usize) -> c_int;

enum Call {
    Cublas(CublasGemmEx),
    Rocblas(RocblasGemmEx),
}

/// An open library with its handle, bound to one stream.
pub(super) struct Classic {
    handle: Handle,
    call: Call,
    set_workspace: Option<SetWorkspace>,
    destroy: Destroy,
    context: Context,
    /// Keeps the functions.
    library: Library,
}

// SAFETY: the handle is not tied to a thread; only the owner's thread uses it at a time.
unsafe impl Send for Classic {}

impl std::fmt::Debug for Classic {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Classic")
            .field("library", &self.library.name())
            .finish_non_exhaustive()
    }
}

/// Opens the library that goes with a context's driver.
fn found(context: &Context) -> Result<Library, Error> {
    let (names, prefix): (&[&str], _) = match context.shared_driver().vendor() {
        Vendor::Cuda => (&cublas::NAMES, "cublas"),
        Vendor::Hip => (&rocblas::NAMES, "rocblas"),
    };
    library(context, prefix, names)
}

impl Classic {
    /// Looks whether the library may be used, which can take a trial in a process of its own.
    ///
    /// # Errors
    /// [`Error::Config`]: there is none, or why it may not.
    pub(super) fn looked_at(context: &Context, first: Option<&FirstProduct>) -> Result<(), Error> {
        usable(context, Which::Classic, &found(context)?, first)
    }

    /// Opens the library that goes with a context's driver and binds it to a stream.
    ///
    /// # Errors
    /// [`Error::Config`] with what was tried.
    pub(super) fn open(
        context: &Context,
        stream: usize,
        first: Option<&FirstProduct>,
    ) -> Result<Self, Error> {
        let vendor = context.shared_driver().vendor();
        let library = found(context)?;
        let missing = |symbol: &str| config(format!("{} has no {symbol}", library.name()));
        macro_rules! function {
            ($ty:ty, $symbol:expr) => {{
                // SAFETY: the type is the one that the vendor documents for the symbol.
                unsafe { library.function::<$ty>($symbol) }.ok_or_else(|| missing($symbol))?
            }};
        }
        let (create, destroy, set_stream, call, set_workspace) = match vendor {
            Vendor::Cuda => (
                function!(Create, "cublasCreate_v2"),
                function!(Destroy, "cublasDestroy_v2"),
                function!(SetStream, "cublasSetStream_v2"),
                Call::Cublas(function!(CublasGemmEx, "cublasGemmEx")),
                Some(function!(SetWorkspace, "cublasSetWorkspace_v2")),
            ),
            Vendor::Hip => (
                function!(Create, "rocblas_create_handle"),
                function!(Destroy, "rocblas_destroy_handle"),
                function!(SetStream, "rocblas_set_stream"),
                Call::Rocblas(function!(RocblasGemmEx, "rocblas_gemm_ex")),
                None,
            ),
        };
        usable(context, Which::Classic, &library, first)?;
        context.driver().map_err(|e| config(e.to_string()))?;
        let mut handle: Handle = std::ptr::null_mut();
        // SAFETY: the out-pointer is to a live local; the context is bound to this thread.
        let code = unsafe { create(&raw mut handle) };
        if code != 0 || handle.is_null() {
            return Err(config(format!(
                "{} gives no handle: {code}",
                library.name()
            )));
        }
        let classic = Self {
            handle,
            call,
            set_workspace,
            destroy,
            context: context.clone(),
            library,
        };
        // SAFETY: handle and stream are alive; the owner keeps the stream as long as this.
        let code = unsafe { set_stream(handle, stream as *mut c_void) };
        if code != 0 {
            return Err(config(format!(
                "{} refuses the stream: {code}",
                classic.library.name()
            )));
        }
        Ok(classic)
    }

    pub(super) fn name(&self) -> &str {
        self.library.name()
    }

    /// Queues products, one after another. `room`: address and bytes of memory that the
    /// library may use meanwhile.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub(super) fn gemm(&self, gemm: &Gemm, room: LibraryMemory) -> Result<(), Error> {
        (0..gemm.batch).try_for_each(|i| {
            let one = Gemm {
                weights: gemm.weights + i * gemm.rows * gemm.cols * 2,
                out: gemm.out + i * gemm.out_step,
                ..*gemm
            };
            self.one(&one, room)
        })
    }

    fn one(&self, gemm: &Gemm, room: LibraryMemory) -> Result<(), Error> {
        let int = |n: u64| c_int::try_from(n).map_err(|e| failed(format!("{n}: {e}")));
        let (m, n, k) = (int(gemm.rows)?, int(gemm.tokens)?, int(gemm.cols)?);
        let (lda, ldb, ldc) = (k, k, int(gemm.stride)?);
        let alpha = gemm.factor;
        let beta = if gemm.add { 1.0f32 } else { 0.0 };
        let (alpha, beta) = ((&raw const alpha).cast(), (&raw const beta).cast());
        let (a, b, c) = (
            gemm.weights as *const c_void,
            gemm.x as *const c_void,
            gemm.out as *mut c_void,
        );
        // Noted until the library has come back.
        let _call = self.context.driver().map_err(|e| failed(e.to_string()))?;
        self.lend(room)?;
        let code = match self.call {
            // SAFETY: the handle is alive; the matrices have the shapes and types that are told, in
            // memory that is the pass's own; the factors are read before the call returns (host
            // pointer mode is the default).
            Call::Cublas(call) => unsafe {
                call(
                    self.handle,
                    cublas::OP_T,
                    cublas::OP_N,
                    m,
                    n,
                    k,
                    alpha,
                    a,
                    cublas::R_16F,
                    lda,
                    b,
                    cublas::R_16F,
                    ldb,
                    beta,
                    c,
                    cublas::R_32F,
                    ldc,
                    cublas::COMPUTE_32F,
                    cublas::DEFAULT,
                )
            },
            // SAFETY: as above.
            Call::Rocblas(call) => unsafe {
                call(
                    self.handle,
                    rocblas::TRANSPOSE,
                    rocblas::NONE,
                    m,
                    n,
                    k,
                    alpha,
                    a,
                    rocblas::F16_R,
                    lda,
                    b,
                    rocblas::F16_R,
                    ldb,
                    beta,
                    c,
                    rocblas::F32_R,
                    ldc,
                    c,
                    rocblas::F32_R,
                    ldc,
                    rocblas::F32_R,
                    rocblas::STANDARD,
                    0,
                    0,
                )
            },
        };
        self.queued(code, gemm)
    }

    /// Lets the library use memory meanwhile, where it takes any.
    fn lend(&self, room: LibraryMemory) -> Result<(), Error> {
        let Some(set_workspace) = self.set_workspace else {
            return Ok(());
        };
        // SAFETY: the room is the pass's own until the stream has passed the product.
        let code = unsafe { set_workspace(self.handle, room.0 as *mut c_void, room.1 as usize) };
        match code {
            0 => Ok(()),
            _ => Err(failed(format!(
                "{} refuses its workspace: {code}",
                self.library.name()
            ))),
        }
    }

    /// What a call for a product returned.
    fn queued(&self, code: c_int, gemm: &Gemm) -> Result<(), Error> {
        let alloc_failed = match self.call {
            Call::Cublas(_) => cublas::ALLOC_FAILED,
            Call::Rocblas(_) => rocblas::MEMORY_ERROR,
        };
        if code == 0 {
            return Ok(());
        }
        if code == alloc_failed {
            return Err(no_memory(self.library.name()));
        }
        Err(failed(format!(
            "{}: code {code} for {} x {} x {}",
            self.library.name(),
            gemm.rows,
            gemm.tokens,
            gemm.cols
        )))
    }
}

impl Drop for Classic {
    fn drop(&mut self) {
        if self.context.driver().is_ok() {
            // SAFETY: the handle is alive and is used no more.
            let code = unsafe { (self.destroy)(self.handle) };
            if code != 0 {
                tracing::debug!(code, "giving back a handle of {}", self.library.name());
            }
        }
    }
}
