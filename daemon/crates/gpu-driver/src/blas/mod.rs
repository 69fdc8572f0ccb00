//! The vendors' libraries for matrix products, through dlopen: cuBLASLt, else
//! cuBLAS; hipBLASLt, else rocBLAS.
//!
//! Column-major as they are, `out[t][r] = sum_k w[r][k] x[t][k]` in row-major is `C = A^T B` with
//! `A = w`, `B = x`, `C = out`, all of them as they lie.
//!
//! ```text
//! open:    the newer library --(not there, not usable, refuses its handle)--> the older one
//!              --(likewise)--> none: portable kernels
//! product: the newer one --(has no way for a shape, or fails)--> the older one, opened then,
//!              for all that follows
//! ```
//!
//! AMD's are usable where they have kernels for the chip (`tensile.rs`) and a first product in a
//! child came out right (`first.rs`).

mod classic;
mod dialect;
mod error;
mod first;
mod lt;
mod tensile;

use std::cell::{OnceCell, RefCell};
use std::ffi::c_void;
use std::path::Path;

use super::library::{Library, file_of};
use super::{Context, Stream, Vendor, search};
use classic::Classic;
use lt::Lt;

pub use error::Error;
use first::Which;
pub use first::{CHILD_ARGUMENT, FirstProduct, child_main};

/// Products of f16 matrices into f32, row-major:
/// `out[t][r] (+)= factor * sum_k weights[r][k] * x[t][k]`, `batch` of them with the same `x`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gemm {
    /// f16 `[batch][rows][cols]`.
    pub weights: u64,
    /// f16 `[tokens][cols]`.
    pub x: u64,
    /// f32 `[tokens][stride]`, from the first of the columns that are written; the next of the
    /// batch `out_step` bytes behind.
    pub out: u64,
    /// Rows of `weights`.
    pub rows: u64,
    /// Elements that are multiplied and added up.
    pub cols: u64,
    /// Rows of `x`.
    pub tokens: u64,
    /// Elements from a row of `out` to the next.
    pub stride: u64,
    /// Products.
    pub batch: u64,
    /// Bytes from a product's `out` to the next one's.
    pub out_step: u64,
    /// What each sum is multiplied by.
    pub factor: f32,
    /// Added to what is there.
    pub add: bool,
    /// f32 `[rows]`, added to each of `out`'s rows; `batch` is 1 then.
    pub bias: Option<u64>,
}

/// Whether a library has added [`Gemm::bias`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bias {
    /// The library has added it, or there is none.
    Added,
    /// The library has not: whoever asked adds it behind the product.
    Left,
}

type Handle = *mut c_void;

/// Address and bytes of memory that a library may use during a product.
pub type LibraryMemory = (u64, u64);

/// The libraries of one device, bound to one stream.
#[derive(Debug)]
pub struct Blas {
    context: Context,
    /// The compute stream's handle; the owner keeps the stream as long as this.
    stream: usize,
    /// hipBLASLt or cuBLASLt; empty if there is none, and after it failed.
    lt: RefCell<Option<Lt>>,
    /// Opened when it is needed: it takes memory of its own.
    classic: OnceCell<Classic>,
    /// Why it is not to be opened, as was found while there was time and room for a trial.
    classic_refused: Option<String>,
}

impl Blas {
    /// Opens what goes with a context's driver.
    ///
    /// # Errors
    /// [`Error::Config`] with what was tried.
    pub fn open(
        context: &Context,
        stream: &Stream,
        first: Option<&FirstProduct>,
    ) -> Result<Self, Error> {
        let mut blas = Self {
            context: context.clone(),
            stream: stream.handle().0,
            lt: RefCell::default(),
            classic: OnceCell::new(),
            classic_refused: None,
        };
        match Lt::open(context, first) {
            Ok(lt) => {
                tracing::info!(library = lt.name(), "large products");
                if first.is_some() {
                    let refused = Classic::looked_at(context, first).err();
                    blas.classic_refused = refused.map(|error| error.to_string());
                }
                blas.lt.replace(Some(lt));
            }
            Err(error) => {
                let both = |classic: Error| config(format!("{error}; {classic}"));
                Classic::looked_at(context, first).map_err(&both)?;
                let classic = blas.classic().map_err(both)?;
                tracing::info!(library = classic.name(), instead = %error, "large products");
            }
        }
        Ok(blas)
    }

    fn classic(&self) -> Result<&Classic, Error> {
        if let Some(classic) = self.classic.get() {
            return Ok(classic);
        }
        if let Some(refused) = &self.classic_refused {
            return Err(config(refused.clone()));
        }
        // It was tried when the device was opened.
        let classic = Classic::open(&self.context, self.stream, None)?;
        Ok(self.classic.get_or_init(|| classic))
    }

    /// Queues a product, and says whether its bias is left to be added. `room`: address and bytes
    /// of memory that the library may use meanwhile.
    ///
    /// # Errors
    /// [`Error::Driver`], [`Error::Config`], [`Error::Memory`].
    pub fn gemm(&self, gemm: &Gemm, room: LibraryMemory) -> Result<Bias, Error> {
        let mut lt = self.lt.borrow_mut();
        if let Some(library) = lt.as_mut() {
            match library.gemm(gemm, room, self.stream) {
                Ok(bias) => return Ok(bias),
                // Another library would want memory, too.
                Err(error @ Error::Memory { .. }) => return Err(error),
                Err(error) => {
                    let classic = self.classic()?;
                    tracing::warn!(%error, library = classic.name(), "large products go to another library from now on");
                    *lt = None;
                }
            }
        }
        self.classic()?.gemm(gemm, room)?;
        Ok(match gemm.bias {
            None => Bias::Added,
            Some(_) => Bias::Left,
        })
    }
}

/// Refuses a library of AMD's that cannot be used on the context's card.
fn usable(
    context: &Context,
    which: Which,
    library: &Library,
    first: Option<&FirstProduct>,
) -> Result<(), Error> {
    if context.shared_driver().vendor() == Vendor::Cuda {
        return Ok(());
    }
    let name = library.name();
    let lacks = file_of(name)
        .and_then(|file| tensile::lacks(which.kernels(), &file, &context.attributes().arch));
    if let Some(why) = lacks {
        return Err(config(format!("{name} cannot be used: {why}")));
    }
    let allowed = first.map_or(Ok(()), |first| first.allows(which, name));
    allowed.map_err(config)
}

fn config(message: String) -> Error {
    Error::Config(message)
}

/// A library that was refused memory of its own.
fn no_memory(library: &str) -> Error {
    Error::Memory(format!(
        "{library} has no room for what it allocates itself"
    ))
}

fn failed(message: String) -> Error {
    Error::Driver(message)
}

/// Opens the first of some names. Where the runtime was named by a path, those beside it come
/// first: they belong together.
fn library(context: &Context, vendor: &'static str, names: &[&str]) -> Result<Library, Error> {
    let driver = context.shared_driver();
    let dir = Path::new(driver.library()).parent();
    let dir = dir.filter(|dir| !dir.as_os_str().is_empty());
    let beside = dir
        .into_iter()
        .flat_map(|dir| names.iter().map(move |name| dir.join(name)));
    let usual = match driver.vendor() {
        Vendor::Hip => search::names(names),
        Vendor::Cuda => names.iter().map(|&name| name.to_owned()).collect(),
    };
    let names: Vec<String> = beside
        .map(|path| path.to_string_lossy().into_owned())
        .chain(usual)
        .collect();
    let hint = "install the vendor's library for matrix products";
    Library::open(vendor, &names, hint).map_err(|error| {
        tracing::debug!(%error, "a library for large products");
        config(format!("no {vendor} library could be opened"))
    })
}
