//! Opening a card: from a configuration to a [`GpuDevice`] without memory, and what to
//! look at where there is none.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rocmforge_device::{Error, Loss, Steps};
use rocmforge_gpu_driver::blas::FirstProduct;
use rocmforge_gpu_driver::trial::Trials;
use rocmforge_gpu_driver::{
    self as gpu, Context, DeviceAttributes, KernelView, Priority, Stream, Vendor,
};
use rocmforge_kernels_gpu::{self as gpu_kernels, GpuTarget};

use super::arena::Arena;
use super::aside::Aside;
use super::config::GpuConfig;
use super::errors::{lost_as, said};
use super::graphs::{Graphs, PassGraphs, STEP_GRAPHS_MAX};
use super::kernels::{Images, Kernels};
use super::outgoing::Outgoing;
use super::pace::Runs;
use super::pass_data::PassData;
use super::products::VendorProducts;
use super::readback::Readback;
use super::reads::Reads;
use super::registration::{self, Finding};
use super::ring::Ring;
use super::rows::RowsMemory;
use super::timed::TimedParts;
use super::uploads::{Uploads, UploadsConfig};
use super::warmup::{self, WarmUp};
use super::{GpuDevice, failed};

/// Pieces of pinned memory for what passes bring along, and the bytes of one.
const PASS_PIECES: usize = 16;
const PASS_PIECE_BYTES: usize = 1 << 20;

/// How long a library's first product may take at least.
const PRODUCT_WAIT_MIN: Duration = Duration::from_secs(5);

/// What is known of a GPU beside its configuration.
#[derive(Clone)]
pub(super) struct Known {
    pub(super) images: Arc<dyn Images>,
    pub(super) system: Arc<KernelView>,
    /// How files are uploaded to the GPU, if that was found before.
    pub(super) files_way: Option<Finding>,
    /// Whether large products go to the vendor's library, where that was found before: its first
    /// product is not tried again.
    pub(super) by_library: Option<bool>,
}

impl GpuDevice {
    /// Opens a card.
    ///
    /// # Errors
    /// [`Error::Config`] where there is no driver or no such card, with what was looked for;
    /// [`Error::Lost`] where the card hangs or fails for good.
    pub fn open(config: GpuConfig, images: Box<dyn Images>) -> Result<Self, Error> {
        Self::open_by(config, images, &Steps::default())
    }

    /// Opens the GPU and notes each step of the opening in `steps`.
    ///
    /// # Errors
    /// As [`GpuDevice::open`].
    pub fn open_by(
        config: GpuConfig,
        images: Box<dyn Images>,
        steps: &Steps,
    ) -> Result<Self, Error> {
        steps.begin(format!("opening the library of {}", config.vendor));
        let refused = |e: gpu::Error| Error::Config(format!("device {}: {e}", config.vendor));
        let driver = gpu::open(config.vendor, &config.libraries).map_err(refused)?;
        let library = driver.library().to_owned();
        // The runtime is there and does not work, or finds nothing to work on. Nothing is lost
        // before a card is opened: a driver that is not set up answers with codes of a loss, too.
        let no_card = |e: gpu::Error| {
            Error::Config(format!(
                "device {}: {library} was opened, but {e}; {}",
                config.vendor,
                what_to_look_at(config.vendor)
            ))
        };
        steps.begin(format!("starting {library} and counting its cards"));
        let count = driver.device_count().map_err(no_card)?;
        if config.ordinal >= count {
            return Err(Error::Config(format!(
                "there is no device {}:{}; {library} has {count}; {} (`rocmforged --list-devices` lists them)",
                config.vendor,
                config.ordinal,
                what_to_look_at(config.vendor)
            )));
        }
        steps.begin(format!("opening {}:{}", config.vendor, config.ordinal));
        let context = Context::open(driver, config.ordinal).map_err(|e| match lost_as(&e) {
            Some(kind) => Error::Lost(Loss::new(
                kind,
                format!(
                    "opening {}:{}: {e}; {}",
                    config.vendor,
                    config.ordinal,
                    what_to_look_at(config.vendor)
                ),
            )),
            None => no_card(e),
        })?;
        Self::on(context, config, images, steps)
    }

    /// Sets an open card up.
    ///
    /// # Errors
    /// [`Error::Memory`], [`Error::Config`], [`Error::Lost`].
    pub fn on(
        context: Context,
        config: GpuConfig,
        images: Box<dyn Images>,
        steps: &Steps,
    ) -> Result<Self, Error> {
        let system = Arc::new(KernelView::of(context.attributes()));
        let known = Known {
            images: Arc::from(images),
            system: Arc::clone(&system),
            files_way: None,
            by_library: None,
        };
        let made = Self::set_up(context, config, known, steps);
        made.map_err(|error| match error {
            Error::Lost(loss) => Error::Lost(loss.with(said(&system))),
            other => other,
        })
    }

    pub(super) fn set_up(
        context: Context,
        config: GpuConfig,
        known: Known,
        steps: &Steps,
    ) -> Result<Self, Error> {
        let Known {
            images,
            system,
            files_way: known_way,
            by_library,
        } = known;
        let attributes = context.attributes();
        let name = attributes.name.clone();
        if let Some(refused) = refusal(config.vendor, attributes, &*images) {
            return Err(Error::Config(refused));
        }
        let target = target(config.vendor, attributes);
        let trials = Trials::of(&context, config.trials_dir.as_deref());
        let mut findings: Vec<String> = context.describe_memory().into_iter().collect();
        if config.vendor == Vendor::Hip {
            let pinned =
                config.ring_pieces * config.ring_piece_bytes + PASS_PIECES * PASS_PIECE_BYTES;
            findings.extend(gpu::locked_memory(pinned as u64));
        }
        findings.iter().for_each(|found| tracing::info!("{found}"));
        steps.begin("looking how files reach the card");
        let begin = Instant::now();
        let found = match known_way {
            Some(found) => found,
            None => files_way(&context, &config, &trials)?,
        };
        let took_ms = begin.elapsed().as_secs_f64() * 1e3;
        tracing::info!(found = found.text, took_ms, "how files reach the card");
        let registered_bytes_max = match found.registers {
            true => config.registered_bytes_max,
            false => 0,
        };
        findings.push(found.text.clone());
        steps.begin("taking pinned memory and streams");
        let kernels = Arc::new(Kernels::new(&context, images));
        let uploads = Uploads::start(
            &context,
            Arc::clone(&kernels),
            UploadsConfig {
                threads: config.staging_threads,
                ring_pieces: config.ring_pieces,
                ring_piece_bytes: config.ring_piece_bytes,
                registered_bytes_max,
                copy_streams: config.copy_streams,
                patience: config.watchdog,
            },
        )?;
        let stream =
            || Stream::new(&context, Priority::High).map_err(|e| failed("making a stream", e));
        let (compute, recorder) = (stream()?, stream()?);
        steps.begin("opening the vendor's library for large products");
        let (products, of_products) =
            open_products(&context, &compute, (&config, by_library), &trials);
        findings.extend(of_products);
        let arena = Arena::new(
            &context,
            config.granularity_min,
            &kernels,
            &trials,
            &compute,
            steps,
        );
        let mut warm_up = WarmUp::new(Arc::clone(&kernels));
        if config.warm_up {
            warm_up.add(warmup::always());
        }
        steps.begin("taking pinned memory for passes");
        let versions = context.shared_driver().versions();
        let aside = Aside::new(&context, Arc::clone(uploads.holds()));
        Ok(Self {
            warm_up,
            uploads,
            graphs: PassGraphs::new(),
            step_graphs: Graphs::new(STEP_GRAPHS_MAX),
            products,
            kernels,
            pass_ring: Ring::new(&context, PASS_PIECES, PASS_PIECE_BYTES, config.watchdog)?,
            readback: Readback::new(&context, config.watchdog)?,
            reads: Reads::new(config.watchdog),
            rows: RowsMemory::default(),
            compute,
            recorder,
            aside,
            outgoing: Outgoing::new(config.watchdog),
            arena,
            runs: Runs::new(&context)?,
            timed: TimedParts::default(),
            context,
            config,
            target,
            reserve: None,
            pass: PassData::default(),
            embeddings: Vec::new(),
            name,
            driver_version: versions.map(|v| v.driver).unwrap_or_default(),
            table_of: None,
            findings,
            files_way: found,
            system,
        })
    }
}

/// The vendor's library for large products, and what was found of it, which is logged.
fn open_products(
    context: &Context,
    compute: &Stream,
    (config, known): (&GpuConfig, Option<bool>),
    trials: &Trials,
) -> (VendorProducts, Vec<String>) {
    // NVIDIA's libraries say what they cannot do, and are opened when they are needed.
    let child_exe = config
        .child_exe
        .clone()
        .filter(|_| config.vendor == Vendor::Hip && known.is_none());
    let first = child_exe.map(|exe| FirstProduct {
        exe,
        runtime: config.libraries.hip.clone(),
        ordinal: config.ordinal,
        // Two libraries may be tried in one step.
        limit: (config.watchdog / 2).max(PRODUCT_WAIT_MIN),
        trials: trials.clone(),
        remembered: RefCell::default(),
    });
    let (products, without) = match config.vendor_products && known != Some(false) {
        true => VendorProducts::open(context, compute, first.as_ref()),
        false => (VendorProducts::none(), None),
    };
    let remembered = first.map(|first| first.remembered.into_inner());
    let found = without.into_iter().chain(remembered.into_iter().flatten());
    let found: Vec<String> = found.collect();
    found.iter().for_each(|found| tracing::info!("{found}"));
    (products, found)
}

/// Whether file mappings are registered with the driver.
fn files_way(context: &Context, config: &GpuConfig, trials: &Trials) -> Result<Finding, Error> {
    if config.registered_bytes_max == 0 {
        return Ok(Finding::ring("no mapping is to be registered"));
    }
    match config.registration_trial {
        true => registration::find(context, trials, config.watchdog).map_err(Error::Lost),
        false => Ok(Finding::untried()),
    }
}

/// Why a card is not opened, where that is known from what it is: there are no kernels for it.
pub fn refusal(
    vendor: Vendor,
    attributes: &DeviceAttributes,
    images: &dyn Images,
) -> Option<String> {
    let refused = images.refuses(&attributes.arch)?;
    let DeviceAttributes { ordinal, name, .. } = attributes;
    Some(format!("device {vendor}:{ordinal} ({name}): {refused}"))
}

/// A card as the builders of launches know it.
fn target(vendor: Vendor, attributes: &DeviceAttributes) -> GpuTarget {
    GpuTarget {
        vendor: match vendor {
            Vendor::Hip => gpu_kernels::Vendor::Amd,
            Vendor::Cuda => gpu_kernels::Vendor::Nvidia,
        },
        arch: attributes.arch.clone(),
        wave: attributes.wave,
        compute_units: attributes.compute_units,
        shared_bytes_max: attributes.shared_per_block,
        shared_bytes_asked: attributes.shared_per_block_max,
    }
}

/// What to do where a vendor's runtime finds no card.
fn what_to_look_at(vendor: Vendor) -> String {
    let usual = match vendor {
        Vendor::Hip => {
            "is the amdgpu kernel driver loaded, is the card one that this runtime supports, and may this user open \
             /dev/kfd and /dev/dri/renderD* (groups render and video)? --device host computes on the CPU"
        }
        Vendor::Cuda => {
            "is the NVIDIA kernel driver loaded (nvidia-smi), and may this user open /dev/nvidia*? --device host \
             computes on the CPU"
        }
    };
    match gpu::environment::that_is_set(vendor) {
        Some(set) => format!("{usual}; {set}"),
        None => usual.to_owned(),
    }
}
