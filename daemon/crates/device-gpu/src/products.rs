//! Large products by a vendor's library, as long as it does them; the portable kernels otherwise.
//!
//! ```text
//!   open --(no library can do a product: that pass fails)--> failed: portable kernels from then on
//! ```

use std::cell::Cell;

use rocmforge_device::Error;
use rocmforge_gpu_driver::blas::{Bias, Blas, FirstProduct, Gemm};
use rocmforge_gpu_driver::{Context, Stream};

use super::errors::product_error;

/// The vendor's libraries of one device.
#[derive(Debug)]
pub(super) struct VendorProducts {
    blas: Option<Blas>,
    failed: Cell<bool>,
}

impl VendorProducts {
    /// Opens what there is; else the reason, for people.
    pub(super) fn open(
        context: &Context,
        stream: &Stream,
        first: Option<&FirstProduct>,
    ) -> (Self, Option<String>) {
        let (blas, why) = match Blas::open(context, stream, first) {
            Ok(blas) => (Some(blas), None),
            Err(error) => (
                None,
                Some(format!(
                    "large products are done by the portable kernels: {error}"
                )),
            ),
        };
        let failed = Cell::new(false);
        (Self { blas, failed }, why)
    }

    /// No library.
    pub(super) fn none() -> Self {
        Self {
            blas: None,
            failed: Cell::new(false),
        }
    }

    /// Whether large products go to a library.
    pub(super) fn usable(&self) -> bool {
        self.blas.is_some() && !self.failed.get()
    }

    /// Queues a product, and says whether its bias is left to be added. `room`: address and bytes
    /// of memory that the library may use meanwhile. One that no library can do fails this pass,
    /// and none after it; want of memory and a lost device are not the library's fault.
    ///
    /// # Errors
    /// [`Error::Driver`], [`Error::Config`], [`Error::Memory`], [`Error::Lost`].
    pub(super) fn gemm(&self, gemm: &Gemm, room: (u64, u64)) -> Result<Bias, Error> {
        let blas = self.blas.as_ref();
        let blas = blas.expect("products are tiled only where there is a library");
        let done = blas.gemm(gemm, room).map_err(product_error);
        if let Err(error) = &done
            && !matches!(error, Error::Memory { .. } | Error::Lost(_))
            && !self.failed.replace(true)
        {
            tracing::warn!(%error, "large products are done by the portable kernels from now on, which is slower");
        }
        done
    }
}
