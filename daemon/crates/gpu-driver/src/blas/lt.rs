//! cuBLASLt and hipBLASLt: the same functions by other names, with other
//! numbers for the same things.
//!
//! How a shape is multiplied is asked of the library once ([`Prepared`]) and kept.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::fmt;

use crate::{Context, Vendor};

use super::dialect::{CUBLAS_LT, Dialect, HIPBLAS_LT, PREFERS_WORKSPACE_MAX};
use super::{
    Bias, Error, FirstProduct, Gemm, Handle, Library, LibraryMemory, Which, config, failed,
    library, no_memory, usable,
};

/// Maximum number of shapes that are remembered; then all are forgotten. A prompt's length makes
/// some ten.
const PREPARED_MAX: usize = 512;

const R_32F: c_int = 0;
const R_16F: c_int = 2;

/// Bytes of a heuristic's result that both libraries fit in; cuBLASLt's has 96, hipBLASLt's 56. It
/// begins with the algorithm.
const RESULT_BYTES: usize = 128;

type Create = unsafe extern "C" fn(*mut Handle) -> c_int;
type Destroy = unsafe extern "C" fn(Handle) -> c_int;
type DescCreate = unsafe extern "C" fn(*mut Handle, c_int, c_int) -> c_int;
type LayoutCreate = unsafe extern "C" fn(*mut Handle, c_int, u64, u64, i64) -> c_int;
type SetAttribute = unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> c_int;
type Heuristic = unsafe extern "C" fn(
    Handle,
    Handle,
    Handle,
    Handle,
    Handle,
    Handle,
    Handle,
    c_int,
    *mut c_void,
    *mut c_int,
) -> c_int;
type Matmul = unsafe extern "C" fn(
    Handle,
    Handle,
    *const c_void,
    *const c_void,
    Handle,
    *const c_void,
    Handle,
    *const c_void,
    *const c_void,
    Handle,
    *mut c_void,
    Handle,
    *const c_void,
    *mut c_void,
    usize,
    *mut c_void,
) -> c_int;

#[derive(Clone, Copy)]
struct Functions {
    destroy: Destroy,
    desc_create: DescCreate,
    desc_destroy: Destroy,
    desc_set: SetAttribute,
    layout_create: LayoutCreate,
    layout_destroy: Destroy,
    layout_set: SetAttribute,
    preference_create: Create,
    preference_destroy: Destroy,
    preference_set: SetAttribute,
    heuristic: Heuristic,
    matmul: Matmul,
}

/// An object of the library, destroyed with this.
struct Object {
    handle: Handle,
    destroy: Destroy,
}

impl Drop for Object {
    fn drop(&mut self) {
        // SAFETY: the object is alive, of the kind that the function destroys, and is used no more.
        let code = unsafe { (self.destroy)(self.handle) };
        if code != 0 {
            tracing::debug!(code, "destroying an object of a library for products");
        }
    }
}

#[repr(C, align(16))]
#[derive(Clone, Copy)]
struct HeuristicResult([u8; RESULT_BYTES]);

/// What a plan was made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Shape {
    rows: u64,
    cols: u64,
    tokens: u64,
    stride: u64,
    batch: u64,
    out_step: u64,
    alignment: u32,
    room_bytes: u64,
    has_bias: bool,
}

impl Shape {
    fn of(gemm: &Gemm, room: LibraryMemory, has_bias: bool) -> Self {
        Self {
            rows: gemm.rows,
            cols: gemm.cols,
            tokens: gemm.tokens,
            stride: gemm.stride,
            batch: gemm.batch,
            out_step: gemm.out_step,
            alignment: alignment(gemm),
            room_bytes: room.1,
            has_bias,
        }
    }
}

/// The library's descriptors and chosen algorithm for products of one shape.
struct Prepared {
    desc: Object,
    weights: Object,
    x: Object,
    out: Object,
    algorithm: HeuristicResult,
    workspace_bytes: u64,
}

/// An open library with its handle.
pub(super) struct Lt {
    // Plans go before the handle.
    prepared: HashMap<Shape, Prepared>,
    handle: Object,
    functions: Functions,
    dialect: &'static Dialect,
    /// Whether it adds biases; not once it has had no way to.
    adds_bias: bool,
    context: Context,
    /// Keeps the functions.
    library: Library,
}

// SAFETY: neither the handle nor the descriptors are tied to a thread; only the owner's
// thread uses them at a time.
unsafe impl Send for Lt {}

impl fmt::Debug for Lt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lt")
            .field("library", &self.library.name())
            .field("prepared", &self.prepared.len())
            .finish_non_exhaustive()
    }
}

impl Lt {
    /// Opens the library that goes with a context's driver.
    ///
    /// # Errors
    /// [`Error::Config`] with what was tried.
    pub(super) fn open(context: &Context, first: Option<&FirstProduct>) -> Result<Self, Error> {
        let dialect = match context.shared_driver().vendor() {
            Vendor::Cuda => &CUBLAS_LT,
            Vendor::Hip => &HIPBLAS_LT,
        };
        let library = library(context, dialect.vendor, dialect.names)?;
        macro_rules! function {
            ($ty:ty, $name:literal) => {{
                let symbol = format!(concat!("{}", $name), dialect.prefix);
                // SAFETY: the type is the one that both vendors document for the symbol.
                unsafe { library.function::<$ty>(&symbol) }
                    .ok_or_else(|| config(format!("{} has no {symbol}", library.name())))?
            }};
        }
        let create = function!(Create, "Create");
        let functions = Functions {
            destroy: function!(Destroy, "Destroy"),
            desc_create: function!(DescCreate, "MatmulDescCreate"),
            desc_destroy: function!(Destroy, "MatmulDescDestroy"),
            desc_set: function!(SetAttribute, "MatmulDescSetAttribute"),
            layout_create: function!(LayoutCreate, "MatrixLayoutCreate"),
            layout_destroy: function!(Destroy, "MatrixLayoutDestroy"),
            layout_set: function!(SetAttribute, "MatrixLayoutSetAttribute"),
            preference_create: function!(Create, "MatmulPreferenceCreate"),
            preference_destroy: function!(Destroy, "MatmulPreferenceDestroy"),
            preference_set: function!(SetAttribute, "MatmulPreferenceSetAttribute"),
            heuristic: function!(Heuristic, "MatmulAlgoGetHeuristic"),
            matmul: function!(Matmul, "Matmul"),
        };
        usable(context, Which::Lt, &library, first)?;
        context.driver().map_err(|e| config(e.to_string()))?;
        let mut handle: Handle = std::ptr::null_mut();
        // SAFETY: the out-pointer is to a live local; the context is bound to this thread.
        let code = unsafe { create(&raw mut handle) };
        let handle = made(code, handle, functions.destroy)
            .map_err(|code| config(format!("{} gives no handle: {code}", library.name())))?;
        Ok(Self {
            prepared: HashMap::new(),
            handle,
            functions,
            dialect,
            adds_bias: true,
            context: context.clone(),
            library,
        })
    }

    pub(super) fn name(&self) -> &str {
        self.library.name()
    }

    /// Queues a product on a stream, and says whether its bias is left to be added.
    ///
    /// # Errors
    /// [`Error::Driver`]: the library has no way to do it, or fails. [`Error::Memory`].
    pub(super) fn gemm(
        &mut self,
        gemm: &Gemm,
        room: LibraryMemory,
        stream: usize,
    ) -> Result<Bias, Error> {
        let context = self.context.clone();
        // Noted until the library has come back.
        let call = context.driver().map_err(|e| failed(e.to_string()))?;
        let adds_bias = self.adds_bias && self.dialect.bias.is_some();
        let bias = gemm.bias.filter(|_| adds_bias);
        let shape = Shape::of(gemm, room, bias.is_some());
        if !self.is_prepared(shape, bias)? {
            drop(call);
            return self.gemm(gemm, room, stream);
        }
        let plan = &self.prepared[&shape];
        if let (Some(bias), Some(numbers)) = (bias, &self.dialect.bias) {
            set(
                self.functions.desc_set,
                &plan.desc,
                numbers.desc_address,
                &bias,
            )
            .map_err(|(what, code)| failed(format!("{}: {what}: code {code}", self.name())))?;
        }
        let alpha = gemm.factor;
        let beta = if gemm.add { 1.0f32 } else { 0.0 };
        // SAFETY: the descriptors are alive and tell the shapes and types of the matrices, which
        // are in memory that is the pass's own, as is the room until the stream has passed the
        // product; the factors are read before the call returns (host pointer mode is the default).
        let code = unsafe {
            (self.functions.matmul)(
                self.handle.handle,
                plan.desc.handle,
                (&raw const alpha).cast(),
                gemm.weights as *const c_void,
                plan.weights.handle,
                gemm.x as *const c_void,
                plan.x.handle,
                (&raw const beta).cast(),
                gemm.out as *const c_void,
                plan.out.handle,
                gemm.out as *mut c_void,
                plan.out.handle,
                (&raw const plan.algorithm).cast(),
                room.0 as *mut c_void,
                plan.workspace_bytes as usize,
                stream as *mut c_void,
            )
        };
        if code == self.dialect.alloc_failed {
            return Err(no_memory(self.name()));
        }
        if code != 0 {
            return Err(failed(format!(
                "{}: code {code} for {shape:?}",
                self.name()
            )));
        }
        Ok(match bias == gemm.bias {
            true => Bias::Added,
            false => Bias::Left,
        })
    }

    /// Whether there is a way to multiply a shape, with a bias at this address or none. Not where
    /// biases turn out to be left from now on.
    ///
    /// # Errors
    /// As [`Lt::gemm`].
    fn is_prepared(&mut self, shape: Shape, bias: Option<u64>) -> Result<bool, Error> {
        if self.prepared.contains_key(&shape) {
            return Ok(true);
        }
        let plan = match self.prepare(&shape, bias) {
            Ok(plan) => plan,
            Err((_, code)) if code == self.dialect.alloc_failed => {
                return Err(no_memory(self.name()));
            }
            Err((what, code)) if shape.has_bias => {
                tracing::debug!(what, code, ?shape, "biases are added behind products");
                self.adds_bias = false;
                return Ok(false);
            }
            Err((what, code)) => {
                return Err(failed(format!(
                    "{}: {what}: code {code} for {shape:?}",
                    self.name()
                )));
            }
        };
        if self.prepared.len() >= PREPARED_MAX {
            self.prepared.clear();
        }
        self.prepared.insert(shape, plan);
        Ok(true)
    }

    /// What a way to multiply a shape may use.
    fn preference(&self, shape: &Shape) -> Result<Object, (&'static str, c_int)> {
        let f = &self.functions;
        let mut preference: Handle = std::ptr::null_mut();
        // SAFETY: the out-pointer is to a live local.
        let code = unsafe { (f.preference_create)(&raw mut preference) };
        let preference =
            made(code, preference, f.preference_destroy).map_err(|c| ("a preference", c))?;
        set(
            f.preference_set,
            &preference,
            PREFERS_WORKSPACE_MAX,
            &shape.room_bytes,
        )?;
        for attribute in self.dialect.prefers_alignment.into_iter().flatten() {
            set(f.preference_set, &preference, attribute, &shape.alignment)?;
        }
        Ok(preference)
    }

    /// Asks for a way to multiply a shape, with a bias at this address or none. The error is what
    /// failed, and the library's code.
    fn prepare(&self, shape: &Shape, bias: Option<u64>) -> Result<Prepared, (&'static str, c_int)> {
        let f = &self.functions;
        let mut desc: Handle = std::ptr::null_mut();
        // SAFETY: the out-pointer is to a live local.
        let code = unsafe { (f.desc_create)(&raw mut desc, self.dialect.compute_32f, R_32F) };
        let desc = made(code, desc, f.desc_destroy).map_err(|c| ("a description", c))?;
        let transposed = self.dialect.transposed;
        set(
            f.desc_set,
            &desc,
            self.dialect.desc_transposes_a,
            &transposed,
        )?;
        if let (Some(bias), Some(numbers)) = (bias, &self.dialect.bias) {
            set(f.desc_set, &desc, numbers.desc_epilogue, &numbers.epilogue)?;
            set(f.desc_set, &desc, numbers.desc_address, &bias)?;
        }
        let weights = self.layout(
            R_16F,
            [shape.cols, shape.rows, shape.cols],
            shape.batch,
            shape.rows * shape.cols,
        )?;
        let x = self.layout(
            R_16F,
            [shape.cols, shape.tokens, shape.cols],
            shape.batch,
            0,
        )?;
        let out = self.layout(
            R_32F,
            [shape.rows, shape.tokens, shape.stride],
            shape.batch,
            shape.out_step / 4,
        )?;
        let preference = self.preference(shape)?;
        let mut result = HeuristicResult([0; RESULT_BYTES]);
        let mut found: c_int = 0;
        // SAFETY: all descriptors are alive; the result has room for one of either library's,
        // which is what is asked for.
        let code = unsafe {
            (f.heuristic)(
                self.handle.handle,
                desc.handle,
                weights.handle,
                x.handle,
                out.handle,
                out.handle,
                preference.handle,
                1,
                (&raw mut result).cast(),
                &raw mut found,
            )
        };
        let at = self.dialect.result_workspace;
        let number = |at: usize, n: usize| {
            let bytes = result.0[at..at + n].iter().rev();
            bytes.fold(0u64, |sum, &b| (sum << 8) | u64::from(b))
        };
        let (workspace_bytes, state) = (number(at, 8), number(at + 8, 4));
        if code != 0 || found < 1 || state != 0 || workspace_bytes > shape.room_bytes {
            return Err((
                "no way to multiply",
                if code != 0 { code } else { state as c_int },
            ));
        }
        Ok(Prepared {
            desc,
            weights,
            x,
            out,
            algorithm: result,
            workspace_bytes,
        })
    }

    /// A column-major matrix: rows, columns, elements from column to column.
    fn layout(
        &self,
        ty: c_int,
        [rows, cols, leading]: [u64; 3],
        batch: u64,
        offset: u64,
    ) -> Result<Object, (&'static str, c_int)> {
        let f = &self.functions;
        let mut layout: Handle = std::ptr::null_mut();
        // SAFETY: the out-pointer is to a live local.
        let code =
            unsafe { (f.layout_create)(&raw mut layout, ty, rows, cols, leading.cast_signed()) };
        let layout = made(code, layout, f.layout_destroy).map_err(|c| ("a layout", c))?;
        if batch > 1 {
            let count = batch as i32;
            set(
                f.layout_set,
                &layout,
                self.dialect.layout_batch_count,
                &count,
            )?;
            let offset = offset.cast_signed();
            set(
                f.layout_set,
                &layout,
                self.dialect.layout_batch_offset,
                &offset,
            )?;
        }
        Ok(layout)
    }
}

/// A created object, or the code.
fn made(code: c_int, handle: Handle, destroy: Destroy) -> Result<Object, c_int> {
    if code != 0 || handle.is_null() {
        return Err(code);
    }
    Ok(Object { handle, destroy })
}

fn set<T: Copy>(
    function: SetAttribute,
    object: &Object,
    attribute: c_int,
    value: &T,
) -> Result<(), (&'static str, c_int)> {
    // SAFETY: the object is alive and of the kind that the function is for; the value is
    // copied before it returns.
    let code = unsafe {
        function(
            object.handle,
            attribute,
            std::ptr::from_ref(value).cast(),
            size_of::<T>(),
        )
    };
    if code != 0 {
        return Err(("an attribute", code));
    }
    Ok(())
}

/// Bytes that the places of a product's results are multiples of, up to 256.
fn alignment(gemm: &Gemm) -> u32 {
    let all = gemm.out | gemm.out_step | (gemm.stride * 4) | 256;
    1 << all.trailing_zeros()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_as_aligned_as_their_places() {
        let gemm = Gemm {
            weights: 0,
            x: 0,
            out: 4096,
            rows: 1000,
            cols: 512,
            tokens: 70,
            stride: 1024,
            batch: 1,
            out_step: 0,
            factor: 1.0,
            add: false,
            bias: None,
        };
        assert_eq!(alignment(&gemm), 256);
        assert_eq!(
            alignment(&Gemm {
                out: 4096 + 4,
                ..gemm
            }),
            4
        );
        assert_eq!(
            alignment(&Gemm {
                stride: 1002,
                ..gemm
            }),
            8
        );
        let batched = Gemm {
            batch: 2,
            out_step: 64,
            ..gemm
        };
        assert_eq!(alignment(&batched), 64);
    }
}
