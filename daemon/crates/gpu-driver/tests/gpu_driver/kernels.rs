//! Modules, launches and captured graphs.

use rocmforge_fake_hip::{Fake, marker_image};
use rocmforge_gpu_driver::{
    Buffer, Context, DevicePtr, Error, Kernel, LaunchConfig, Module, Stream,
};

use super::{OUT_OF_MEMORY, all_given_back, card, random_bytes, stream};

/// The bytes of gather's argument struct.
fn gather_args(x: DevicePtr, out: DevicePtr, rows: DevicePtr, cols: u32) -> Vec<u8> {
    let mut args = Vec::new();
    for address in [x, out, rows] {
        args.extend(address.0.to_le_bytes());
    }
    args.extend(cols.to_le_bytes());
    args.extend(0u32.to_le_bytes());
    args
}

const COLS: u32 = 8;
const TAKEN: [u32; 3] = [4, 0, 4];
const CONFIG: LaunchConfig = LaunchConfig {
    grid: [1, TAKEN.len() as u32, 1],
    block: [256, 1, 1],
    shared_bytes: 0,
    overlaps: false,
};

/// Five rows of floats on the card, three of them to be gathered.
struct Gather {
    kernel: Kernel,
    x: Buffer,
    rows: Buffer,
    out: Buffer,
    values: Vec<f32>,
}

impl Gather {
    fn new(card: &Context, stream: &Stream, seed: u64) -> Gather {
        let module = Module::load(card, &marker_image(&["gather"])).unwrap();
        let kernel = module.kernel("gather").unwrap();
        let values: Vec<f32> = random_bytes(seed, 5 * COLS as usize)
            .into_iter()
            .map(f32::from)
            .collect();
        let mut x = Buffer::new(card, 4 * values.len() as u64).unwrap();
        let mut rows = Buffer::new(card, 4 * TAKEN.len() as u64).unwrap();
        let out = Buffer::new(card, u64::from(4 * COLS) * TAKEN.len() as u64).unwrap();
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        x.write(0, &bytes, stream).unwrap();
        let bytes: Vec<u8> = TAKEN.iter().flat_map(|v| v.to_le_bytes()).collect();
        rows.write(0, &bytes, stream).unwrap();
        Gather {
            kernel,
            x,
            rows,
            out,
            values,
        }
    }

    fn args(&self) -> Vec<u8> {
        gather_args(self.x.ptr(), self.out.ptr(), self.rows.ptr(), COLS)
    }

    fn check(&self, stream: &Stream, taken: [u32; 3]) {
        let mut bytes = vec![0; self.out.bytes() as usize];
        self.out.read(0, &mut bytes, stream).unwrap();
        let (words, _) = bytes.as_chunks::<4>();
        let got: Vec<f32> = words.iter().map(|w| f32::from_le_bytes(*w)).collect();
        let cols = COLS as usize;
        let expected: Vec<f32> = taken
            .iter()
            .flat_map(|&row| &self.values[row as usize * cols..][..cols])
            .copied()
            .collect();
        assert_eq!(got, expected);
    }
}

#[test]
fn a_kernel_runs_and_its_module_lives_as_long_as_it() {
    let fake = Fake::new();
    let card = card(&fake);
    let stream = stream(&card);
    let gather = Gather::new(&card, &stream, 3);
    assert_eq!(fake.live().modules, 1, "the kernel holds it");
    gather.kernel.reserve_shared(65536).unwrap();
    // SAFETY: the struct is gather's, over buffers that outlive the read below.
    unsafe {
        gather
            .kernel
            .launch(CONFIG, &gather.args(), &stream)
            .unwrap()
    };
    gather.check(&stream, TAKEN);
    // A struct of another size is refused.
    // SAFETY: refused, so nothing is queued.
    let short = unsafe { gather.kernel.launch(CONFIG, &gather.args()[..24], &stream) };
    assert!(short.is_err());
    assert!(fake.violations()[0].contains("24 bytes of arguments for 32"));
    drop((gather, stream));
    all_given_back(&fake);
}

#[test]
fn a_module_names_the_kernel_that_it_lacks() {
    let fake = Fake::new();
    let card = card(&fake);
    let module = Module::load(&card, &marker_image(&["gather"])).unwrap();
    let error = module.kernel("add_bias").unwrap_err();
    assert_eq!(error.to_string(), "the module has no kernel 'add_bias'");
    assert!(module.kernel("a\0b").is_err());
    let error = Module::load(&card, b"neither marker nor ELF").unwrap_err();
    assert!(
        error.to_string().contains("hipErrorNoBinaryForGpu (209)"),
        "{error}"
    );
}

#[test]
fn a_captured_graph_replays_with_what_memory_holds_then() {
    let fake = Fake::new();
    let card = card(&fake);
    let stream = stream(&card);
    let mut gather = Gather::new(&card, &stream, 4);
    let graph = stream
        .capture(|| -> Result<(), Error> {
            // SAFETY: the struct is gather's; its buffers outlive the graph.
            unsafe { gather.kernel.launch(CONFIG, &gather.args(), &stream) }
        })
        .unwrap();
    assert_eq!((graph.nodes(), fake.queued()), (1, 0));
    // SAFETY: as above.
    unsafe { graph.launch(&stream).unwrap() };
    gather.check(&stream, TAKEN);
    let rows: Vec<u8> = [1u32, 2, 3].iter().flat_map(|v| v.to_le_bytes()).collect();
    gather.rows.write(0, &rows, &stream).unwrap();
    // SAFETY: as above.
    unsafe { graph.launch(&stream).unwrap() };
    gather.check(&stream, [1, 2, 3]);
    assert_eq!(
        fake.live().graphs,
        1,
        "the source of an instantiated graph is gone"
    );
    drop((graph, gather, stream));
    all_given_back(&fake);
}

#[test]
fn a_capture_that_fails_ends_and_one_that_is_broken_takes_its_stream_along() {
    let fake = Fake::new();
    let card = card(&fake);
    let stream = stream(&card);
    let gather = Gather::new(&card, &stream, 5);
    // The closure's own error comes back.
    let refused = stream.capture(|| {
        Err(Error::Kernel {
            kernel: "own".to_owned(),
        })
    });
    assert!(matches!(refused, Err(Error::Kernel { .. })));
    // An allocation inside breaks the capture, whatever the closure makes of it.
    let breaks = self::stream(&card);
    let broken = breaks.capture(|| -> Result<(), Error> {
        assert!(Buffer::new(&card, 1).is_err());
        Ok(())
    });
    assert!(
        broken
            .unwrap_err()
            .to_string()
            .contains("hipErrorStreamCaptureInvalidated")
    );
    // SAFETY: the struct is gather's, over buffers that outlive all that is queued.
    let launched = |on: &Stream| unsafe { gather.kernel.launch(CONFIG, &gather.args(), on) };
    let refused = launched(&breaks).unwrap_err().to_string();
    assert!(
        refused.contains("hipErrorStreamCaptureInvalidated"),
        "{refused}"
    );
    for call in [
        "hipStreamBeginCapture",
        "hipStreamEndCapture",
        "hipGraphGetNodes",
        "hipGraphInstantiate",
    ] {
        fake.fail(call, 1, OUT_OF_MEMORY);
        let failed = stream.capture(|| -> Result<(), Error> { Ok(()) });
        assert!(failed.unwrap_err().is_out_of_memory(), "{call}");
        fake.recover();
        assert_eq!(fake.live().graphs, 0, "{call}");
    }
    launched(&stream).unwrap();
    gather.check(&stream, TAKEN);
}

#[test]
fn a_kernel_outside_its_memory_loses_the_device() {
    let fake = Fake::new();
    let card = card(&fake);
    let stream = stream(&card);
    let gather = Gather::new(&card, &stream, 6);
    let end = gather.out.ptr().offset(gather.out.bytes() - 4);
    let args = gather_args(gather.x.ptr(), end, gather.rows.ptr(), COLS);
    // SAFETY: the fake checks the addresses, which is what is tested.
    unsafe { gather.kernel.launch(CONFIG, &args, &stream).unwrap() };
    let error = stream.synchronize().unwrap_err();
    assert!(error.is_lost(), "{error}");
    let noted = fake.violations();
    assert!(
        noted
            .iter()
            .any(|line| line.starts_with("gather: no allocation holds")),
        "{noted:?}"
    );
}
