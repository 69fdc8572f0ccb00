//! Getting ready for a model ahead of its first request: its kernels are compiled, loaded and
//! looked up by threads of their own, those that a first token needs before the others.
//!
//! Which kernels those are is found by turning the model's operations into launches as a pass
//! would, with addresses that nothing is ever launched with.
//!
//! ```text
//!   prepare --(launches, one a kernel)--> queue --> kernels-0 .. kernels-N,
//!                                                   which end when it is empty
//! ```
//!
//! *Invariant:* a pass waits for these threads only for a unit that one of them is loading
//! (`Kernels::module`); what is still in the queue it loads itself.

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use rocmforge_device::ops::{Batch, RowCounts, Span};
use rocmforge_device::{
    ALIGNMENT, BoundStep, Error, ModelPlanView, Preparation, Role, Scratch, SegmentBinding,
};
use rocmforge_gguf::MappedFile;
use rocmforge_kernels_cpu::ops::RopeAngles;
use rocmforge_kernels_gpu::ops::activations::{self, Sink, Transform};
use rocmforge_kernels_gpu::ops::rows;
use rocmforge_kernels_gpu::ops::sample::{self, TopK};
use rocmforge_kernels_gpu::ops::weights::{self, Weights};
use rocmforge_kernels_gpu::{GpuTarget, Launch};
use rocmforge_ops::WeightType;

use super::GpuDevice;
use super::kernels::Kernels;
use super::launches::{Lowering, Queued};
use super::pass_data::PassData;
use super::reserve::{self, DeviceReserve};
use super::workspace::{SMALL_BATCH, Workspace};

/// Most threads; a compilation takes a core.
const THREADS_MAX: usize = 8;

/// Sequences of the passes that are got ready for, rows of each, and the first one's position: a
/// short prompt, a token, a long prompt, a token far into a text, tokens of many.
const PASSES: [(usize, usize, u32); 5] = [
    (1, 8, 0),
    (1, 1, 0),
    (1, 4 * SMALL_BATCH as usize, 0),
    (1, 1, 1 << 16),
    (64, 1, 0),
];

/// Where the addresses of launches that are never launched begin.
const NOWHERE: u64 = 1 << 40;

#[derive(Debug, Default)]
struct Queue {
    launches: VecDeque<Launch>,
    /// Kernels that were in the queue before.
    known: HashSet<&'static str>,
    running: usize,
}

/// The threads and their queue.
#[derive(Debug)]
pub(super) struct WarmUp {
    kernels: Arc<Kernels>,
    queue: Arc<Mutex<Queue>>,
    threads: Vec<JoinHandle<()>>,
    threads_max: usize,
}

impl WarmUp {
    pub(super) fn new(kernels: Arc<Kernels>) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            kernels,
            queue: Arc::default(),
            threads: Vec::new(),
            threads_max: cores.div_ceil(2).min(THREADS_MAX),
        }
    }

    /// Adds the kernels of launches to what is made ready, in this order.
    pub(super) fn add(&mut self, launches: impl IntoIterator<Item = Launch>) {
        let mut queue = lock(&self.queue);
        for launch in launches {
            if queue.known.insert(launch.kernel) {
                queue.launches.push_back(launch);
            }
        }
        // Threads that run may be at the last of what was added before, with
        // nothing left in the queue.
        let wanted = queue.launches.len().min(self.threads_max);
        let more = wanted.saturating_sub(queue.running);
        self.threads.retain(|thread| !thread.is_finished());
        for _ in 0..more {
            let (kernels, shared) = (Arc::clone(&self.kernels), Arc::clone(&self.queue));
            let thread = std::thread::Builder::new()
                .name(format!("kernels-{}", queue.running))
                .spawn(move || serve(&kernels, &shared));
            match thread {
                Ok(thread) => {
                    queue.running += 1;
                    self.threads.push(thread);
                }
                Err(error) => {
                    tracing::debug!(%error, "no thread to load kernels ahead of need");
                    return;
                }
            }
        }
    }
}

impl Drop for WarmUp {
    fn drop(&mut self) {
        lock(&self.queue).launches.clear();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread that loads kernels panicked");
            }
        }
    }
}

fn serve(kernels: &Kernels, queue: &Mutex<Queue>) {
    loop {
        let launch = {
            let mut queue = lock(queue);
            let Some(launch) = queue.launches.pop_front() else {
                queue.running -= 1;
                return;
            };
            launch
        };
        if let Err(error) = kernels.prepare(&launch) {
            // Whoever needs it meets the error too, and tells.
            tracing::debug!(kernel = launch.kernel, %error, "not loaded ahead of need");
            lock(queue).known.remove(launch.kernel);
        }
    }
}

fn lock(queue: &Mutex<Queue>) -> MutexGuard<'_, Queue> {
    queue.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A launch of a kernel of each unit that every model's passes need.
pub(super) fn always() -> Vec<Launch> {
    let weights = Weights {
        ty: WeightType::Q8_0,
        at: NOWHERE,
        rows: 256,
        cols: 256,
    };
    let to = TopK {
        candidates: NOWHERE,
        values: None,
        ids: NOWHERE,
        next: None,
    };
    let launches = [
        weights::repack(weights, NOWHERE, 0, 1, NOWHERE),
        activations::activations(NOWHERE, 1, 256, Transform::Plain, Sink::F32(NOWHERE)),
        rows::gather(NOWHERE, NOWHERE, 1, 256, NOWHERE),
    ];
    let sampling = sample::top_k(NOWHERE, 1, 256, 1, to).into_iter().flatten();
    launches.into_iter().flatten().chain(sampling).collect()
}

/// One launch of each kernel that passes of a model come to, and of those that its uploads need, in
/// the order in which a first request asks for them.
pub(super) fn launches(
    target: &GpuTarget,
    vendor: bool,
    model: &ModelPlanView<'_>,
) -> Result<Vec<Launch>, Error> {
    let mut all = Launches::default();
    let weights = |ty| Weights {
        ty,
        at: NOWHERE,
        rows: 256,
        cols: 256,
    };
    let wrong = |e| super::launch_error(&e);
    for layout in model.layouts {
        let matrices = layout
            .tensors
            .iter()
            .filter(|t| t.desc.role == Role::Matrix);
        for ty in matrices.map(|t| t.desc.ty) {
            all.add(weights::repack(weights(ty), NOWHERE, 0, 1, NOWHERE).map_err(wrong)?);
        }
    }
    for (i, of) in PASSES.into_iter().enumerate() {
        for launch in pass(target, vendor, model, of)? {
            all.add(launch);
        }
        if i == 0 {
            let to = TopK {
                candidates: NOWHERE,
                values: None,
                ids: NOWHERE,
                next: None,
            };
            for launch in sample::top_k(NOWHERE, 1, 256, 1, to).map_err(wrong)? {
                all.add(launch);
            }
        }
    }
    for input in &model.plan.inputs {
        let rows = weights(input.table.ty);
        all.add(weights::repack(rows, NOWHERE, 0, 1, NOWHERE).map_err(wrong)?);
        all.add(weights::rows_f32(rows, NOWHERE, 1, NOWHERE).map_err(wrong)?);
    }
    Ok(all.launches)
}

/// The launches of a pass of some sequences, each of so many tokens, the first at a position.
fn pass(
    target: &GpuTarget,
    vendor: bool,
    model: &ModelPlanView<'_>,
    (sequences, rows, position): (usize, usize, u32),
) -> Result<Vec<Launch>, Error> {
    let n_tokens = sequences * rows;
    let layout = model.plan.scratch(RowCounts {
        tokens: n_tokens as u64,
        outputs: 1,
    });
    let angles: Vec<RopeAngles> = model
        .plan
        .ropes
        .iter()
        .map(|r| RopeAngles::new(r.order))
        .collect();
    let span = |i: usize| Span {
        first_row: i * rows,
        n_rows: rows,
        first_position: position,
        kv_pages: &[],
        state: 0,
        state_out: 0,
        whole: false,
        draft: false,
    };
    let spans: Vec<Span<'_>> = (0..sequences).map(span).collect();
    let batch = Batch {
        n_tokens,
        spans: &spans,
        parts: &spans,
        kv: &model.plan.kv,
        rope: &angles,
        outputs: &[0],
    };
    // Of a size that the largest budgets get: a smaller one changes no kernel.
    let reserve = DeviceReserve::new(
        NOWHERE,
        reserve::bytes(u64::MAX).next_multiple_of(ALIGNMENT),
    );
    let mut lowering = Lowering {
        target,
        arena: NOWHERE,
        reserve: &reserve,
        workspace: Workspace::new(&layout, target),
        scratch: Scratch {
            layout: &layout,
            base: 0,
        },
        scratch_base: NOWHERE,
        batch: &batch,
        shape: PassData::shape(&batch),
        vendor,
        work: Vec::new(),
        table: Vec::new(),
        handed_on: None,
    };
    for step in bound_steps(model) {
        lowering.lower(&step, None)?;
    }
    let launches = lowering.work.into_iter().filter_map(|work| match work {
        Queued::Launch(launch) => Some(launch),
        Queued::Gemm(_, adds_bias) => adds_bias,
        Queued::Clear(..) => None,
    });
    Ok(launches.collect())
}

/// The steps of a plan, with weights that lie nowhere.
fn bound_steps<'a>(model: &ModelPlanView<'a>) -> impl Iterator<Item = BoundStep<'a>> {
    let (layouts, plan) = (model.layouts, model.plan);
    let bound = move |segment: u32| SegmentBinding {
        layout: &layouts[segment as usize],
        slab: 0,
    };
    plan.steps
        .iter()
        .map(move |step| BoundStep::of(step, bound))
}

/// Launches, one a kernel.
#[derive(Default)]
struct Launches {
    launches: Vec<Launch>,
    kernels: HashSet<&'static str>,
}

impl Launches {
    fn add(&mut self, launch: Launch) {
        if self.kernels.insert(launch.kernel) {
            self.launches.push(launch);
        }
    }
}

impl Preparation for GpuDevice {
    fn prepare(&mut self, model: &ModelPlanView<'_>) -> Result<(), Error> {
        let launches = launches(&self.target, self.products.usable(), model)?;
        if self.config.warm_up {
            self.warm_up.add(launches);
            self.uploads.register_ahead(model);
        }
        Ok(())
    }

    fn forget_file(&mut self, file: &Arc<MappedFile>) {
        // Recordings know models by the addresses of their plans.
        if let Err(error) = self.finish() {
            tracing::warn!(%error, "waiting for the device before a model goes");
        }
        self.forget_recordings();
        self.uploads.forget(file);
    }
}

#[cfg(test)]
mod tests {
    use rocmforge_device::ops::{Buf, BufSpec, Conflicts, Input, Op, Plan, Product, Rows, Step};
    use rocmforge_device::{SegmentLayout, TensorDesc};
    use rocmforge_fake_hip::Fake;
    use rocmforge_gguf::MappedFile;
    use rocmforge_gpu_driver::{Context, Libraries, Vendor, open};

    use super::super::kernels::Images;
    use super::*;

    /// Images that are not to be had before somebody says so.
    struct Slow(std::sync::Mutex<std::sync::mpsc::Receiver<()>>);

    impl Images for Slow {
        fn image(&self, _arch: &str, unit: &str) -> Result<Vec<u8>, Error> {
            let told = self.0.lock().unwrap().recv();
            Err(Error::Config(format!("{unit}: {told:?}")))
        }
    }

    /// Once what was added while threads were at their last kernels, all of it known, made threads
    /// until the system refused.
    #[test]
    fn what_is_known_already_starts_no_threads() {
        let fake = Fake::new();
        let libraries = Libraries {
            hip: Some(fake.path().to_owned()),
            cuda: None,
        };
        let context = Context::open(open(Vendor::Hip, &libraries).unwrap(), 0).unwrap();
        let (go, wait) = std::sync::mpsc::channel();
        let images = Arc::new(Slow(std::sync::Mutex::new(wait)));
        let mut warm_up = WarmUp::new(Arc::new(Kernels::new(&context, images)));
        warm_up.threads_max = 2;
        let one: Vec<_> = always().into_iter().take(1).collect();
        warm_up.add(one.clone());
        while !lock(&warm_up.queue).launches.is_empty() {
            std::thread::yield_now();
        }
        warm_up.add(one);
        assert_eq!(
            (warm_up.threads.len(), lock(&warm_up.queue).running),
            (1, 1)
        );
        drop(go);
        drop(warm_up);
    }

    fn matrix(name: &str, ty: WeightType, rows: u64, cols: u64) -> TensorDesc {
        TensorDesc {
            name: name.to_owned(),
            ty,
            rows,
            cols,
            offset: 0,
            bytes: ty.tensor_type().row_bytes(cols).unwrap() * rows,
            role: Role::Matrix,
        }
    }

    #[test]
    fn each_unit_that_every_model_needs_is_there() {
        let units: HashSet<_> = always().iter().map(Launch::unit).collect();
        let expected = ["repack", "activations", "gather", "sample"];
        assert_eq!(units, expected.into_iter().collect());
    }

    #[test]
    fn what_a_first_token_needs_comes_first_and_each_kernel_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, [0; 64]).unwrap();
        let file = Arc::new(MappedFile::open(&path).unwrap());
        let tensors = [
            matrix("a", WeightType::Q4K, 512, 256),
            matrix("b", WeightType::Q6K, 512, 256),
        ];
        let layout = SegmentLayout::place(&tensors, |desc| Ok::<_, Error>(desc.bytes));
        let layout = Arc::new(layout.unwrap());
        let buf = |name, width| BufSpec {
            name,
            width,
            rows: Rows::Tokens,
        };
        let product = |weight, out| Product {
            weight,
            bias: None,
            out,
        };
        let run = |segment| Step::Run {
            segment: Some(segment),
            ops: vec![Op::MatMul {
                x: Buf(0),
                products: vec![product(0, Buf(1)), product(1, Buf(2))],
            }],
            live_out: vec![Buf(1), Buf(2)],
        };
        let plan = Plan {
            segments: Vec::new(),
            steps: vec![run(0), run(1)],
            head_step: 1,
            inputs: vec![Input {
                table: matrix("rows", WeightType::Q8_0, 1, 256),
                buf: Buf(0),
                rows: rocmforge_device::ops::InputRows::Tokens,
            }],
            logits: Buf(2),
            hidden: Buf(2),
            stream: None,
            bufs: vec![buf("x", 256), buf("y", 512), buf("z", 512)],
            conflicts: Conflicts::all(3),
            kv: Vec::new(),
            state_elements: 0,
            ropes: Vec::new(),
            float_weights: false,
            both_ways: false,
        };
        let model = ModelPlanView {
            file: &file,
            plan: &plan,
            layouts: &[Arc::clone(&layout), layout],
        };
        let target = GpuTarget::nvidia(9, 0, 132);
        let names = |vendor| -> Vec<&str> {
            let launches = launches(&target, vendor, &model).unwrap();
            launches.iter().map(|l| l.kernel).collect()
        };
        let portable = names(false);
        let unique: HashSet<_> = portable.iter().collect();
        assert_eq!(unique.len(), portable.len());
        let at = |names: &[&str], part: &str| {
            names
                .iter()
                .position(|n| n.contains(part))
                .unwrap_or_else(|| panic!("no {part} in {names:?}"))
        };
        assert!(at(&portable, "repack_q4_k") < at(&portable, "matmat_q4_k"));
        assert!(at(&portable, "repack_q6_k") < at(&portable, "matmat_q6_k"));
        assert!(at(&portable, "matmat_q4_k") < at(&portable, "matvec_"));
        assert!(at(&portable, "top_k_join") < at(&portable, "matvec_"));
        assert!(at(&portable, "matvec_") < at(&portable, "rows_q8_0"));
        assert!(
            !portable
                .iter()
                .any(|n| n.contains("dequantize_q4_k.dequantize"))
        );
        at(&names(true), "dequantize_q4_k.dequantize");
    }
}
