//! A GPU whose context is given back: what is known of it without a driver, and the way back.
//!
//! *Invariant:* whatever is made in a context holds it, so the context is closed when the device
//! and its threads have ended, which [`ClosedDevice::finish`] asserts before it gives the rest of
//! the device back (`nothing_of_a_closed_device_is_left_and_it_opens_again`).

use std::path::Path;
use std::sync::Arc;

use rocmforge_device::ops::{Batch, Buf, ScratchLayout};
use rocmforge_device::{
    BoundStep, ClosedDevice, Closing, CopyStart, CopyTicket, Device, DeviceInfo, Error, HostCopies,
    MemoryUse, ModelPlanView, Monitoring, Preparation, Reserve, Said, Scratch, SegmentLayout,
    Steps, TakeRows, TensorDesc, Upload, UploadTicket, Watch,
};
use rocmforge_gguf::MappedFile;
use rocmforge_gpu_driver::bus::power_state;
use rocmforge_gpu_driver::{Calls, Context, Driver};
use rocmforge_kernels_gpu::GpuTarget;

use super::aside::KeptAside;
use super::config::GpuConfig;
use super::errors::said;
use super::monitoring::watch;
use super::opening::Known;
use super::workspace::Workspace;
use super::{GpuDevice, failed, layout, reserve, warmup};

/// A closed GPU.
pub(super) struct ClosedGpu {
    driver: Arc<dyn Driver>,
    calls: Arc<Calls>,
    config: GpuConfig,
    known: Known,
    /// On the PCI bus.
    address: String,
    target: GpuTarget,
    info: DeviceInfo,
    table_len: Option<u64>,
    /// Whether large products went to a library.
    vendor_products: bool,
    /// KV cache in host memory; `None` once the device that was opened again has it.
    aside: Option<KeptAside>,
}

impl Closing for GpuDevice {
    fn close(&mut self, aside: u64) -> Result<Box<dyn ClosedDevice>, Error> {
        self.uploads.settle_all()?;
        self.finish()?;
        let kept = self.aside.keep(aside)?;
        Ok(Box::new(ClosedGpu {
            driver: self.context.shared_driver(),
            calls: Arc::clone(self.context.calls()),
            config: self.config.clone(),
            known: Known {
                images: Arc::clone(self.kernels.images()),
                system: Arc::clone(&self.system),
                files_way: Some(self.files_way.clone()),
                by_library: Some(self.products.usable()),
            },
            address: self.context.attributes().pci_bus_id.clone(),
            target: self.target.clone(),
            info: self.info(),
            table_len: self.page_table_entries(),
            vendor_products: self.products.usable(),
            aside: Some(kept),
        }))
    }
}

impl ClosedDevice for ClosedGpu {
    fn finish(&mut self) -> Result<(), Error> {
        if self.calls.have_context() {
            return Err(Error::Driver {
                operation: "closing the GPU",
                message: "something still uses its context".to_owned(),
            });
        }
        let _call = self.calls.note();
        // SAFETY: whoever made something in the context holds it, and nobody does.
        let reset = unsafe { self.driver.device_reset(self.config.ordinal) };
        reset.map_err(|e| failed("giving the GPU back", e))
    }

    fn power_state(&self) -> Option<String> {
        power_state(Path::new("/"), &self.address)
    }

    fn open(&mut self, steps: &Steps) -> Result<Box<dyn Device>, Error> {
        let (driver, calls) = (Arc::clone(&self.driver), Arc::clone(&self.calls));
        let context = Context::open_noting(driver, self.config.ordinal, calls)
            .map_err(|e| failed("opening the GPU again", e))?;
        context.count_allocations_from(self.info.allocations);
        let opened = GpuDevice::set_up(context, self.config.clone(), self.known.clone(), steps);
        let mut device = match opened {
            Ok(device) => device,
            Err(Error::Lost(loss)) => {
                return Err(Error::Lost(loss.with(said(&self.known.system))));
            }
            Err(error) => {
                // What was opened has gone with it.
                if let Err(rest) = self.finish() {
                    tracing::warn!(error = %rest, "a GPU that did not open is not given back as a whole");
                }
                return Err(error);
            }
        };
        if let Some(kept) = self.aside.take() {
            device.aside.take_up(kept);
        }
        Ok(Box::new(device))
    }
}

fn refused<T>(operation: &'static str) -> Result<T, Error> {
    Err(Error::Closed(operation))
}

impl Device for ClosedGpu {
    fn info(&self) -> DeviceInfo {
        self.info.clone()
    }

    fn layout(&self, tensors: &[TensorDesc]) -> Result<SegmentLayout, Error> {
        layout(tensors)
    }

    fn workspace_bytes(&self, layout: &ScratchLayout) -> u64 {
        Workspace::new(layout, &self.target).end - layout.bytes
    }

    fn page_table_entries(&self) -> Option<u64> {
        self.table_len
    }

    fn set_capacity(&mut self, _bytes: u64) -> Result<(), Error> {
        refused("taking memory")
    }

    fn renew(&mut self, _sizes: &[u64], _keep: &[(u64, u64)]) -> Result<u64, Error> {
        refused("taking memory")
    }

    fn begin_upload(&mut self, _upload: Upload) -> Result<UploadTicket, Error> {
        refused("uploading a segment")
    }

    fn finished_uploads(&mut self) -> Vec<(UploadTicket, Result<(), Error>)> {
        Vec::new()
    }

    fn wait_upload(&mut self, _ticket: UploadTicket) -> Result<(), Error> {
        refused("waiting for an upload")
    }

    fn is_queued(&self, _ticket: UploadTicket) -> bool {
        false
    }

    fn move_slab(&mut self, _from: u64, _to: u64, _bytes: u64) -> Result<(), Error> {
        refused("moving a slab")
    }

    fn read_slab(&mut self, _from: u64, _into: &mut [u8]) -> Result<(), Error> {
        refused("reading a slab")
    }

    fn write_slab(&mut self, _to: u64, _bytes: &[u8]) -> Result<(), Error> {
        refused("writing a slab")
    }

    fn discard(&mut self, _offset: u64, _bytes: u64) {}

    fn write(&mut self, _scratch: Scratch<'_>, _buf: Buf, _rows: &[f32]) -> Result<(), Error> {
        refused("writing rows")
    }

    fn write_parts(
        &mut self,
        _scratch: Scratch<'_>,
        _buf: Buf,
        _parts: &[(u64, &[f32])],
    ) -> Result<(), Error> {
        refused("writing rows")
    }

    fn write_rows(
        &mut self,
        _scratch: Scratch<'_>,
        _buf: Buf,
        _table: &TensorDesc,
        _rows: &[u8],
    ) -> Result<(), Error> {
        refused("writing rows")
    }

    fn run(
        &mut self,
        _step: &BoundStep<'_>,
        _scratch: Scratch<'_>,
        _batch: &Batch<'_>,
    ) -> Result<(), Error> {
        refused("running a step")
    }

    fn read_each(
        &mut self,
        _scratch: Scratch<'_>,
        _bufs: &mut [(Buf, &mut [f32])],
    ) -> Result<(), Error> {
        refused("reading rows")
    }

    fn take_rows(
        &mut self,
        _scratch: Scratch<'_>,
        _buf: Buf,
        _rows: &[u32],
        _take: TakeRows<'_>,
    ) -> Result<(), Error> {
        refused("reading rows")
    }

    fn monitoring(&self) -> Option<&dyn Monitoring> {
        Some(self)
    }

    fn reserve(&mut self) -> Option<&mut dyn Reserve> {
        Some(self)
    }

    fn preparation(&mut self) -> Option<&mut dyn Preparation> {
        Some(self)
    }

    fn host_copies(&mut self) -> Option<&mut dyn HostCopies> {
        Some(self)
    }
}

impl Monitoring for ClosedGpu {
    fn memory_use(&self) -> MemoryUse {
        MemoryUse::default()
    }

    fn free_bytes(&self) -> Option<u64> {
        None
    }

    fn watch(&self) -> Watch {
        let (calls, system) = (Arc::clone(&self.calls), Arc::clone(&self.known.system));
        watch(calls, system, self.config.watchdog)
    }

    fn said_of_loss(&self) -> Option<Said> {
        said(&self.known.system)
    }
}

impl Reserve for ClosedGpu {
    fn reserve_bytes(&self, budget: u64) -> u64 {
        reserve::bytes(budget)
    }

    fn set_reserve(&mut self, _offset: u64, _bytes: u64) -> Result<(), Error> {
        refused("taking the device's block")
    }
}

impl Preparation for ClosedGpu {
    /// Says whether the device could run the model; the rest is for when the device is open.
    fn prepare(&mut self, model: &ModelPlanView<'_>) -> Result<(), Error> {
        warmup::launches(&self.target, self.vendor_products, model).map(|_| ())
    }

    /// Nothing that was kept for files is left.
    fn forget_file(&mut self, _file: &Arc<MappedFile>) {}
}

impl HostCopies for ClosedGpu {
    fn set_aside(&mut self, bytes: u64) -> Result<u64, Error> {
        Ok(self.aside.as_mut().map_or(0, |kept| kept.set_bytes(bytes)))
    }

    fn save(&mut self, _from: u64, _to: u64, _bytes: u64, _waits: bool) -> Result<bool, Error> {
        refused("copying a range to the host")
    }

    fn restore(&mut self, _from: u64, _to: u64, _bytes: u64) -> Result<(), Error> {
        refused("copying a range from the host")
    }

    fn begin_copy(&mut self, _from: u64, _bytes: u64) -> Result<CopyStart, Error> {
        refused("copying a range to the host")
    }

    fn end_copy(&mut self, _ticket: CopyTicket, _waits: bool) -> Result<Option<Vec<u8>>, Error> {
        refused("copying a range to the host")
    }
}
