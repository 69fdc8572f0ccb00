//! The driver layer on the cards of this machine: memory, registration of a file mapping, streams,
//! a kernel compiled at run time, a graph. Without a card each vendor is skipped with the reason.
//!
//! Without libtest's harness: the compiler's child is this same binary, run
//! again with a hidden argument.

#![expect(clippy::unwrap_used, reason = "a test")]

use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use rocmforge_gpu_driver::{
    Buffer, Class, Context, Error, Event, LaunchConfig, Libraries, Module, PinnedBuffer, Priority,
    Registration, Stream, Vendor, open, probe,
};
use rocmforge_kernels_gpu::compile::{
    CHILD_ARGUMENT, Compiler, Config, Language, Request, rtc_child_main,
};

const SOURCE: &str = r"
struct Args { unsigned* x; unsigned* step; unsigned n; unsigned reserved; };
extern C_LINKAGE __global__ void add_step(Args a) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < a.n) a.x[i] += *a.step;
}
";

const N: usize = 1 << 16;

fn compile(card: &Context) -> Vec<u8> {
    let language = match card.shared_driver().vendor() {
        Vendor::Hip => Language::Hip,
        Vendor::Cuda => Language::Cuda,
    };
    let compiler = Compiler::new(Config {
        cache: None,
        ..Config::new(language)
    });
    let start = Instant::now();
    let request = Request {
        name: "add_step",
        source: SOURCE,
        headers: &[],
        target: &card.attributes().arch,
        options: &["-DC_LINKAGE=\"C\""],
    };
    let object = compiler.object(&request, |_, _| None).unwrap();
    let ms = start.elapsed().as_millis();
    println!("compiled in {ms} ms, {} bytes", object.bytes.len());
    object.bytes
}

fn words(bytes: &[u8]) -> Vec<u32> {
    let (words, _) = bytes.as_chunks::<4>();
    words.iter().map(|w| u32::from_le_bytes(*w)).collect()
}

/// A kernel on a vector, by itself and from a graph whose step comes from memory.
fn kernel_and_graph(card: &Context, stream: &Stream) {
    let module = Module::load(card, &compile(card)).unwrap();
    let kernel = module.kernel("add_step").unwrap();
    assert!(matches!(module.kernel("absent"), Err(Error::Kernel { .. })));
    let most = card.attributes().shared_per_block_max;
    kernel.reserve_shared(most).unwrap();
    let mut x = Buffer::new(card, 4 * N as u64).unwrap();
    let mut step = Buffer::new(card, 4).unwrap();
    let start: Vec<u8> = (0..N as u32).flat_map(|i| i.to_le_bytes()).collect();
    x.write(0, &start, stream).unwrap();
    step.write(0, &5u32.to_le_bytes(), stream).unwrap();
    let mut args = Vec::new();
    args.extend(x.ptr().0.to_le_bytes());
    args.extend(step.ptr().0.to_le_bytes());
    args.extend((N as u32).to_le_bytes());
    args.extend(0u32.to_le_bytes());
    let config = LaunchConfig {
        grid: [(N as u32).div_ceil(256), 1, 1],
        block: [256, 1, 1],
        shared_bytes: 0,
        overlaps: false,
    };
    // SAFETY: the struct is add_step's; the buffers outlive the reads below.
    let launch = || unsafe { kernel.launch(config, &args, stream) };
    launch().unwrap();
    let graph = stream
        .capture(|| -> Result<(), Error> {
            launch()?;
            launch()
        })
        .unwrap();
    assert_eq!(graph.nodes(), 2);
    for (value, expected) in [(100u32, 205u32), (1000, 2205)] {
        step.write(0, &value.to_le_bytes(), stream).unwrap();
        // SAFETY: what it was recorded with is alive.
        unsafe { graph.launch(stream).unwrap() };
        let mut back = vec![0; 4 * N];
        x.read(0, &mut back, stream).unwrap();
        let wrong = words(&back)
            .iter()
            .enumerate()
            .find(|&(i, &v)| v != i as u32 + expected)
            .map(|(i, v)| (i, *v));
        assert_eq!(wrong, None);
    }
    // A capture that is broken by an allocation says so, and other streams go on.
    let breaks = Stream::new(card, Priority::Normal).unwrap();
    let broken = breaks.capture(|| -> Result<(), Error> {
        // SAFETY: as above.
        unsafe { kernel.launch(config, &args, &breaks)? };
        let _refused = Buffer::new(card, 1 << 20);
        let waited = breaks.synchronize();
        assert!(waited.is_err());
        Ok(())
    });
    println!("broken capture: {}", broken.unwrap_err());
    drop(breaks);
    launch().unwrap();
    stream.synchronize().unwrap();
}

/// Registers a read-only shared mapping of a file and copies from it; refusal is told, not failed.
fn registered_file(card: &Context, stream: &Stream) {
    const BYTES: usize = 256 << 20;
    // As uploads have it. AMD's simulator cuts copies of more than 64 MiB.
    const PIECE: usize = 32 << 20;
    let mut file = tempfile::tempfile().unwrap();
    let block: Vec<u8> = (0..1u32 << 20).map(|i| ((i * 31) >> 3) as u8).collect();
    for _ in 0..BYTES / block.len() {
        file.write_all(&block).unwrap();
    }
    // SAFETY: a temporary file that nobody else knows.
    let map = Arc::new(unsafe { memmap2::MmapOptions::new().map(&file) }.unwrap());
    assert!(
        map.iter().skip(8).step_by(4096).all(|&b| b == 31),
        "faults it in"
    );
    let start = Instant::now();
    // SAFETY: the Arc keeps the mapping; registered once.
    let registered = unsafe { Registration::new(card, map.as_ptr(), BYTES, map.clone()) };
    let registration = match registered {
        Ok(registration) => registration,
        Err(error) => {
            println!("skipped: registering a file mapping: {error}");
            return;
        }
    };
    let registering = start.elapsed();
    let mut buffer = Buffer::new(card, BYTES as u64).unwrap();
    let (from, to) = (
        Event::new(card, true).unwrap(),
        Event::new(card, true).unwrap(),
    );
    for _ in 0..2 {
        from.record(stream).unwrap();
        for at in (0..BYTES).step_by(PIECE) {
            // SAFETY: inside the registration, which outlives the wait.
            unsafe {
                let from = registration.as_ptr().add(at);
                buffer
                    .copy_from_host(at as u64, from, PIECE as u64, stream)
                    .unwrap();
            }
        }
        to.record(stream).unwrap();
        to.synchronize().unwrap();
    }
    let gb_s = BYTES as f32 / to.elapsed_ms_since(&from).unwrap() / 1e6;
    let mut back = vec![0; block.len()];
    buffer
        .read((BYTES - block.len()) as u64, &mut back, stream)
        .unwrap();
    assert!(back == block);
    let start = Instant::now();
    drop(registration);
    println!(
        "file mapping: registered {} MiB in {:.1} ms, copied at {gb_s:.1} GB/s, unregistered in {:.1} ms",
        BYTES >> 20,
        registering.as_secs_f64() * 1e3,
        start.elapsed().as_secs_f64() * 1e3,
    );
    buffer.write(0, &[1; 16], stream).unwrap();
}

fn check(vendor: Vendor, ordinal: u32) {
    let driver = open(vendor, &Libraries::from_env()).unwrap();
    let card = Context::open(driver, ordinal).unwrap();
    let before = card.memory().unwrap();
    let stream = Stream::new(&card, Priority::Normal).unwrap();
    let copies = Stream::new(&card, Priority::High).unwrap();
    let refused = Buffer::new(&card, 1 << 50).unwrap_err();
    assert_eq!(refused.class(), Class::OutOfMemory, "{refused}");
    println!("{refused}");
    // Two streams, an event between them.
    let mut pinned = PinnedBuffer::new(&card, 1 << 20).unwrap();
    let buffer = Buffer::new(&card, 1 << 20).unwrap();
    // SAFETY: no copy of it is queued.
    unsafe { pinned.as_mut_slice() }.fill(9);
    let uploaded = Event::new(&card, false).unwrap();
    // SAFETY: the pinned buffer outlives the waits; the second stream waits for the first by event.
    unsafe {
        buffer
            .copy_from_host(0, pinned.as_ptr(), 1 << 20, &copies)
            .unwrap();
        uploaded.record(&copies).unwrap();
        stream.wait(&uploaded).unwrap();
        buffer.copy_within(0, 1 << 19, 1 << 19, &stream).unwrap();
        buffer.fill(0, 7, 100, &stream).unwrap();
    }
    let mut back = vec![0; 1 << 20];
    buffer.read(0, &mut back, &stream).unwrap();
    assert!(back[..100] == [7; 100] && back[100..].iter().all(|&b| b == 9));
    assert!(uploaded.is_passed().unwrap() && copies.is_idle().unwrap());
    kernel_and_graph(&card, &stream);
    registered_file(&card, &copies);
    // From another thread, to which the context is not bound yet.
    std::thread::spawn(move || drop((buffer, pinned, uploaded)))
        .join()
        .unwrap();
    card.synchronize().unwrap();
    assert_eq!(card.usage().device_bytes + card.usage().pinned_bytes, 0);
    println!(
        "free before {} MiB, after {} MiB",
        before.free >> 20,
        card.memory().unwrap().free >> 20
    );
}

fn main() {
    if std::env::args().nth(1).as_deref() == Some(CHILD_ARGUMENT) {
        std::process::exit(rtc_child_main());
    }
    let mut checked = 0;
    for report in probe(&Libraries::from_env()) {
        print!("{report}");
        for device in &report.devices {
            check(report.vendor, device.ordinal);
            checked += 1;
        }
        if report.devices.is_empty() {
            println!("skipped: no {} card", report.vendor);
        }
    }
    println!("test result: ok. {checked} passed; 0 failed; 0 ignored");
}
