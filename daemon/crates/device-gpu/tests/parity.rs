//! Every operation and weight type on every GPU that can be opened, and through the HIP path
//! on a fake one, against the host device; the table and its tolerances are the crate
//! `rocmforge-parity`. The fake carries kernels out with the host's code: with it, the
//! launches are what is tested.

use std::path::PathBuf;

use rocmforge_device::Device;
use rocmforge_device_cpu::{HostConfig, HostDevice};
use rocmforge_device_gpu::{GpuConfig, GpuDevice, ImageFolder, usual_images};
use rocmforge_fake_hip::{Fake, Live};
use rocmforge_gpu_driver::{Libraries, Vendor};
use rocmforge_parity::{Case, Extent, Pair, cases};
use rocmforge_test_scripts::is_whole_sweep;

/// Of so many cases one is compared on the fake runtime, in a run that does not do all of them.
const PARTS: usize = 3;

fn gpus() -> Vec<Box<dyn Device>> {
    let open = |vendor: Vendor| {
        let opened = GpuDevice::open(GpuConfig::new(vendor, 0), usual_images(vendor));
        match opened {
            Ok(device) => Some(Box::new(device) as Box<dyn Device>),
            Err(error) => {
                println!("skipped: {vendor}: {error}");
                None
            }
        }
    };
    [Vendor::Hip, Vendor::Cuda]
        .into_iter()
        .filter_map(open)
        .collect()
}

#[track_caller]
fn compare_all(gpu: Box<dyn Device>, is_compared: impl Fn(usize) -> bool) {
    let info = gpu.info();
    println!("{info:?}");
    let host = Box::new(HostDevice::new(HostConfig::default()).unwrap());
    let mut pair = Pair::new(host, gpu).unwrap();
    let mut wrong = Vec::new();
    for (i, case) in cases(Extent::Full).iter().enumerate() {
        if !is_compared(i) {
            continue;
        }
        for c in pair.compare(case, 1000 + i as u64).unwrap() {
            let mark = if c.right { "ok" } else { "WRONG" };
            println!(
                "{mark:5} {:26} {:50} {:6} {:.2e} (<= {:.0e})",
                c.operation, c.case, c.buffer, c.error, c.tolerance
            );
            if !c.right {
                wrong.push(format!(
                    "{} {} {}: {:.3e}, seed {}",
                    c.operation, c.case, c.buffer, c.error, c.seed
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{}:\n{}", info.name, wrong.join("\n"));
}

#[test]
fn every_operation_and_type_on_a_card_is_the_hosts() {
    for gpu in gpus() {
        compare_all(gpu, |_| true);
    }
}

/// The host, and beside it a fake runtime's card, whose kernels are in a folder.
fn beside_the_host(fake: &Fake, images: PathBuf) -> Pair {
    let config = GpuConfig {
        libraries: Libraries {
            hip: Some(fake.path().to_owned()),
            cuda: None,
        },
        ring_pieces: 2,
        ..GpuConfig::new(Vendor::Hip, 0)
    };
    let device = GpuDevice::open(config, Box::new(ImageFolder(images))).unwrap();
    let host = Box::new(HostDevice::new(HostConfig::default()).unwrap());
    Pair::new(host, Box::new(device)).unwrap()
}

/// The fake runtime with a library for products, and a card of it beside the host.
fn with_a_library() -> (Fake, Pair) {
    let fake = Fake::new();
    fake.add_products();
    let pair = beside_the_host(&fake, fake.images());
    (fake, pair)
}

/// The launches of what a card with matrix instructions does otherwise than the fake one,
/// which has none by default.
#[test]
fn products_of_f16_rows_are_the_hosts_on_a_card_with_matrix_instructions() {
    let fake = Fake::new();
    let images = fake.become_arch("gfx1100");
    let mut pair = beside_the_host(&fake, images);
    let concerned = |operation: &str| operation.starts_with("mul_mat") || operation == "experts";
    let all = cases(Extent::Full);
    for case in all.iter().filter(|c| concerned(c.operation())) {
        for c in pair.compare(case, 13).unwrap() {
            assert!(c.right, "{c:?}");
        }
    }
    for kernel in [
        "matmat_wmma_32_q4_k",
        "matmat_wmma_64_q6_k",
        "experts_many_f16_q8_0",
    ] {
        assert!(fake.calls(kernel) > 0, "{kernel} did not run");
    }
    // Rows of up to 16 tokens, which this card reads in 8 bits.
    assert!(fake.calls("matmat_q4_k") > 0);
    assert_eq!(fake.violations(), Vec::<String>::new());
}

/// What adapters add, to products of 8 bits, of f16 rows and of floats, by kernels and, for many
/// rows, by the vendor's library.
#[test]
fn adapters_are_the_hosts_by_kernels_and_by_a_library() {
    let concerned = |operation: &str| operation.contains("adapters");
    let all = cases(Extent::Full);
    let compare = |fake: &Fake, mut pair: Pair| {
        for case in all.iter().filter(|c| concerned(c.operation())) {
            for c in pair.compare(case, 17).unwrap() {
                assert!(c.right, "{c:?}");
            }
        }
        for kernel in [
            "down_f16",
            "down_f32",
            "up_1_f16",
            "up_32_f32",
            "up_gated_f16",
        ] {
            let ran = fake.calls(&format!("adapters_{kernel}"));
            assert!(ran > 0, "{kernel} did not run");
        }
        assert_eq!(fake.violations(), Vec::<String>::new());
    };
    let fake = Fake::new();
    let images = fake.become_arch("gfx1100");
    let pair = beside_the_host(&fake, images);
    compare(&fake, pair);
    assert!(fake.calls("adapters_down_half_f16") > 0);
    let (fake, pair) = with_a_library();
    compare(&fake, pair);
    // Rows of 200 tokens by 512 ranks.
    assert!(
        fake.calls("rocblas_gemm_ex") > 0,
        "no product by the library"
    );
}

/// Once the values that SwiGLU hands from one segment to the next were cut at f16's largest
/// where a library multiplies.
#[test]
fn large_values_that_segments_hand_on_are_the_hosts_with_a_library_for_products() {
    let (fake, mut pair) = with_a_library();
    let is_whole = is_whole_sweep("misuse of the runtime by other operations beside a library");
    let concerned = |case: &Case| case.operation().starts_with("large gated values");
    let mut compared = 0;
    for case in cases(Extent::Full) {
        if !is_whole && !concerned(&case) {
            continue;
        }
        for c in pair.compare(&case, 7).unwrap() {
            if concerned(&case) {
                println!("{} {}: {:.2e}", c.operation, c.case, c.error);
                assert!(c.right, "{c:?}");
                compared += 1;
            }
        }
    }
    assert!(compared > 0);
    assert!(fake.calls("rocblas_gemm_ex") > 0);
    assert_eq!(fake.violations(), Vec::<String>::new());
}

/// Once rows of more than 64 tokens were rounded to f16 before they met float weights, and
/// flipped experts of mixtures.
#[test]
fn float_products_by_a_library_are_as_exact_as_the_hosts() {
    let (fake, mut pair) = with_a_library();
    let floats = ["mul_mat F32", "mul_mat F16", "mul_mat BF16"];
    let all = cases(Extent::Full);
    for case in all.iter().filter(|c| floats.contains(&c.operation())) {
        for c in pair.compare(case, 11).unwrap() {
            println!("{} {}: {:.2e}", c.case, c.buffer, c.error);
            assert!(c.right, "{c:?}");
        }
    }
    assert!(fake.calls("rocblas_gemm_ex") > 0);
    assert_eq!(fake.violations(), Vec::<String>::new());
}

#[test]
fn every_operation_and_type_through_the_fake_runtime_is_the_hosts() {
    let fake = Fake::new();
    let config = GpuConfig {
        libraries: Libraries {
            hip: Some(fake.path().to_owned()),
            cuda: None,
        },
        // A vendor's library on this machine knows nothing of the fake's memory.
        vendor_products: false,
        ring_pieces: 2,
        ..GpuConfig::new(Vendor::Hip, 0)
    };
    let device = GpuDevice::open(config, Box::new(ImageFolder(fake.images()))).unwrap();
    // Each run has others, so that a few runs have them all.
    let rest = rand::random_range(0..PARTS);
    let is_whole = is_whole_sweep(&format!(
        "cases whose number has not the rest {rest} by {PARTS}"
    ));
    compare_all(Box::new(device), |i| is_whole || i % PARTS == rest);
    assert_eq!(fake.violations(), Vec::<String>::new());
    assert_eq!(fake.live(), Live::default());
}

/// Once a launch that failed only while a decode step was recorded failed that
/// step each time that it came.
#[test]
fn a_launch_that_cannot_be_recorded_is_made() {
    const LAUNCH: &str = "hipModuleLaunchKernel";
    const CAPTURE_UNSUPPORTED: u32 = 900;
    let fake = Fake::new();
    let config = GpuConfig {
        libraries: Libraries {
            hip: Some(fake.path().to_owned()),
            cuda: None,
        },
        vendor_products: false,
        ring_pieces: 2,
        ..GpuConfig::new(Vendor::Hip, 0)
    };
    let device = GpuDevice::open(config, Box::new(ImageFolder(fake.images()))).unwrap();
    let at_opening = fake.calls(LAUNCH);
    let host = Box::new(HostDevice::new(HostConfig::default()).unwrap());
    let mut pair = Pair::new(host, Box::new(device)).unwrap();
    let all = cases(Extent::Quick);
    let recorded = all.iter().find(|case| case.is_recorded()).unwrap();
    let mut right = |seed| {
        pair.compare(recorded, seed)
            .unwrap()
            .iter()
            .all(|c| c.right)
    };
    let count = |call| fake.calls(call);
    assert!(right(1));
    assert_eq!(
        (count("hipGraphInstantiate"), count("hipGraphLaunch")),
        (1, 2)
    );
    // The last launches are those of the recording: what comes after is a replay.
    let launches = count(LAUNCH) - at_opening;
    fake.fail(LAUNCH, launches, CAPTURE_UNSUPPORTED);
    assert!(right(2));
    assert_eq!(
        (count("hipGraphInstantiate"), count("hipGraphLaunch")),
        (1, 2)
    );
    assert_eq!(fake.violations(), Vec::<String>::new());
}
