//! Who else uses a card, by a management library and a kernel that a test makes.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rocmforge_fake_hip::{Fake, Process};
use rocmforge_gpu_driver::Vendor;
use rocmforge_gpu_driver::others::{Card, Observer, OthersUse, OwnUse, Places, Power};

use crate::fake_device::{config, open_as};

const MIB: u64 = 1 << 20;
const NVIDIA: &str = "0000:41:00.0";
const AMD: &str = "sys/bus/pci/devices/0000:01:00.0";

fn write(root: &Path, path: &str, text: &str) {
    let file = root.join(path);
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    fs::write(file, text).unwrap();
}

fn places(root: &Path, nvml: Option<&Path>) -> Places {
    Places {
        root: root.to_owned(),
        nvml: nvml.map(Path::to_owned),
    }
}

fn nvidia(address: &str) -> Card {
    Card {
        vendor: Vendor::Cuda,
        address: address.to_owned(),
    }
}

fn process(pid: u32, mib: u64, busy_percent: u32) -> Process {
    Process {
        pid,
        bytes: mib * MIB,
        busy_percent,
        graphics: false,
    }
}

/// Looks while this process holds so many bytes.
fn look(observer: &mut dyn Observer, own: u64, at: Instant) -> OthersUse {
    let own = OwnUse {
        bytes: own,
        is_working: own > 0,
    };
    observer.look(own, at).unwrap()
}

#[test]
fn nvml_counts_the_processes_that_are_not_ours() {
    let (fake, dir) = (Fake::new(), tempfile::tempdir().unwrap());
    let places = places(dir.path(), Some(fake.path()));
    let own = std::process::id();
    // A child of this process is ours as well.
    write(
        dir.path(),
        "proc/77/status",
        &format!("Name:\tx\nPPid:\t{own}\n"),
    );
    write(dir.path(), "proc/88/status", "Name:\tgame\nPPid:\t1\n");
    let mut observer = nvidia(NVIDIA).observer(&places).unwrap();
    let start = Instant::now();
    let drawing = Process {
        graphics: true,
        ..process(88, 700, 30)
    };
    let ours = [process(own, 5000, 60), process(77, 300, 20)];
    fake.set_processes(9000 * MIB, &ours);
    let seen = look(&mut *observer, 5000 * MIB, start);
    let nobody = OthersUse {
        bytes: 0,
        is_exact: true,
        busy_percent: Some(0),
    };
    assert_eq!(seen, nobody);
    // One that draws and computes is in both lists, and counts once.
    let all = [ours[0], ours[1], drawing, process(88, 600, 0)];
    fake.set_processes(9000 * MIB, &all);
    let at = |ms| start + Duration::from_millis(ms);
    // One sample may be a moment's work, and is read twice a second.
    for (ms, busy) in [(499, 0), (500, 0), (999, 0), (1000, 30), (1499, 30)] {
        let seen = look(&mut *observer, 5000 * MIB, at(ms));
        assert_eq!(
            (seen.bytes, seen.busy_percent),
            (700 * MIB, Some(busy)),
            "{ms}"
        );
    }
    // A busy share holds until a newer one must have come.
    fake.set_processes(9000 * MIB, &ours[..1]);
    fake.set_processes(9000 * MIB, &[process(own, 5000, 0)]);
    assert_eq!(look(&mut *observer, 1, at(2400)).busy_percent, Some(30));
    assert_eq!(look(&mut *observer, 1, at(2500)).busy_percent, Some(0));
    // What is no share was never written by the library.
    let unwritten = process(88, 700, 1 << 30);
    fake.set_processes(9000 * MIB, &[process(own, 5000, 0), unwritten]);
    for ms in [3000, 3500, 4000] {
        assert_eq!(look(&mut *observer, 1, at(ms)).busy_percent, Some(0));
    }
    // More processes than there is room for at first, with numbers that Linux gives to none.
    let many: Vec<_> = (0..500).map(|n| process(5_000_000 + n, 1, 0)).collect();
    fake.set_processes(9000 * MIB, &[&many[..], &ours[..1]].concat());
    assert_eq!(look(&mut *observer, 1, at(4500)).bytes, 500 * MIB);
    drop(observer);
    assert_eq!(fake.management_opened(), 0);
}

/// In a container the library may list numbers of the host's processes, or none.
#[test]
fn where_nvml_does_not_know_us_what_is_in_use_counts_less_what_is_ours() {
    let (fake, dir) = (Fake::new(), tempfile::tempdir().unwrap());
    let places = places(dir.path(), Some(fake.path()));
    let mut observer = nvidia(NVIDIA).observer(&places).unwrap();
    for listed in [vec![process(424_242, 5500, 90)], Vec::new()] {
        fake.set_processes(9000 * MIB, &listed);
        let seen = look(&mut *observer, 5000 * MIB, Instant::now());
        let counted = OthersUse {
            bytes: 4000 * MIB,
            is_exact: false,
            busy_percent: None,
        };
        assert_eq!(seen, counted);
    }
    // The same while this process holds nothing: who is there is not gone.
    fake.set_processes(3000 * MIB, &[]);
    let seen = look(&mut *observer, 0, Instant::now());
    assert_eq!((seen.bytes, seen.is_exact), (3000 * MIB, false));
    // A driver that does not count by process.
    let own = process(std::process::id(), 5000, 0);
    let unknown = Process {
        bytes: u64::MAX,
        ..process(9, 0, 40)
    };
    fake.set_processes(6000 * MIB, &[own, unknown]);
    let at = Instant::now();
    look(&mut *observer, 5000 * MIB, at);
    let seen = look(&mut *observer, 5000 * MIB, at + Duration::from_millis(500));
    assert_eq!(
        (seen.bytes, seen.is_exact, seen.busy_percent),
        (1000 * MIB, false, Some(40))
    );
}

#[test]
fn who_cannot_observe_a_card_is_told_what_to_do() {
    let (fake, dir) = (Fake::new(), tempfile::tempdir().unwrap());
    let nowhere = PathBuf::from("/nonexistent/libnvidia-ml.so.1");
    let of = |nvml: &Path, address: &str| {
        let places = places(dir.path(), Some(nvml));
        let refused = nvidia(address).observer(&places);
        refused.err().expect("it is refused")
    };
    let missing = of(&nowhere, NVIDIA);
    assert!(missing.contains("libnvidia-ml1"), "{missing}");
    let absent = of(fake.path(), "0000:42:00.0");
    assert!(absent.contains("nvidia-smi"), "{absent}");
    assert_eq!(fake.management_opened(), 0);
    let device = open_as(config(&fake, false), &fake, 4 << 20, 1 << 20);
    let silent = device
        .card()
        .observer(&places(dir.path(), None))
        .err()
        .unwrap();
    assert!(silent.contains("mem_info_vram_used"), "{silent}");
    assert!(silent.contains("the host's /sys"), "{silent}");
}

fn fdinfo(address: &str, client: u32, vram_kib: u64, busy_ns: u64) -> String {
    format!(
        "pos:\t0\nflags:\t02100002\ndrm-driver:\tamdgpu\ndrm-client-id:\t{client}\ndrm-pdev:\t{address}\n\
         drm-memory-vram:\t{vram_kib} KiB\ndrm-engine-gfx:\t{busy_ns} ns\ndrm-engine-compute:\t0 ns\n"
    )
}

#[test]
fn the_kernels_counts_of_an_amd_card_are_read() {
    let (fake, dir) = (Fake::new(), tempfile::tempdir().unwrap());
    let (root, address) = (dir.path(), "0000:01:00.0");
    let file = |name: &str, text: &str| write(root, &format!("{AMD}/{name}"), text);
    file("mem_info_vram_used", &format!("{}\n", 1000 * MIB));
    file("gpu_busy_percent", "55\n");
    let device = open_as(config(&fake, false), &fake, 4 << 20, 1 << 20);
    let mut observer = device.card().observer(&places(root, None)).unwrap();
    let start = Instant::now();
    let at = |ms| start + Duration::from_millis(ms);
    // Files of others cannot be read: the whole card's share counts while this process rests.
    let seen = look(&mut *observer, 0, at(0));
    assert_eq!((seen.bytes, seen.busy_percent), (1000 * MIB, Some(55)));
    assert!(!seen.is_exact);
    let seen = look(&mut *observer, 300 * MIB, at(100));
    assert_eq!((seen.bytes, seen.busy_percent), (700 * MIB, None));
    // Its own file says what it holds; two descriptors of one file count once.
    for n in [5, 6] {
        let own = fdinfo(address, 7, 400 << 10, 0);
        write(root, &format!("proc/self/fdinfo/{n}"), &own);
    }
    let game = |busy| {
        write(
            root,
            "proc/42/fdinfo/3",
            &fdinfo("0000:01:00.0", 9, 1, busy),
        )
    };
    game(1_000_000);
    write(root, "proc/42/fdinfo/4", &fdinfo("0000:09:00.0", 10, 1, 0));
    write(root, "proc/42/fdinfo/5", "pos:\t0\n");
    // Only files of cards are read.
    fs::create_dir_all(root.join("proc/42/fd")).unwrap();
    for (n, file) in [(3, "/dev/dri/renderD128"), (6, "/dev/null")] {
        symlink(file, root.join(format!("proc/42/fd/{n}"))).unwrap();
    }
    let unread = fdinfo(address, 11, 1, 1_000_000_000);
    write(root, "proc/42/fdinfo/6", &unread);
    let seen = look(&mut *observer, 300 * MIB, at(1100));
    let expected = OthersUse {
        bytes: 600 * MIB,
        is_exact: true,
        busy_percent: Some(0),
    };
    assert_eq!(seen, expected);
    // 40 of 100 milliseconds.
    game(41_000_000);
    let unread = fdinfo(address, 11, 1, 2_000_000_000);
    write(root, "proc/42/fdinfo/6", &unread);
    let seen = look(&mut *observer, 300 * MIB, at(1200));
    assert_eq!(seen.busy_percent, Some(40));
    // While this process holds nothing, others are counted as before.
    for n in [5, 6] {
        let own = fdinfo(address, 7, 0, 0);
        write(root, &format!("proc/self/fdinfo/{n}"), &own);
    }
    file("mem_info_vram_used", &format!("{}\n", 600 * MIB));
    let seen = look(&mut *observer, 0, at(1250));
    assert_eq!((seen.bytes, seen.is_exact), (600 * MIB, true));
    file("mem_info_vram_used", "nonsense\n");
    let unread = observer.look(OwnUse::default(), at(1300)).unwrap_err();
    assert!(unread.contains("no number"), "{unread}");
}

#[test]
fn the_power_of_a_card_is_read_where_it_is_told() {
    let (fake, dir) = (Fake::new(), tempfile::tempdir().unwrap());
    let root = dir.path();
    let device = open_as(config(&fake, false), &fake, 4 << 20, 1 << 20);
    let card = device.card();
    let read = || {
        let Power { state, watts } = card.power(&places(root, None));
        (state.unwrap_or_default(), watts)
    };
    assert_eq!(read(), (String::new(), None));
    write(root, &format!("{AMD}/power_state"), "D0\n");
    write(
        root,
        &format!("{AMD}/hwmon/hwmon3/power1_input"),
        "12500000\n",
    );
    assert_eq!(read(), ("D0".to_owned(), Some(12.5)));
    write(
        root,
        &format!("{AMD}/hwmon/hwmon3/power1_average"),
        "9000000\n",
    );
    assert_eq!(read(), ("D0".to_owned(), Some(9.0)));
    // One that sleeps is left asleep.
    write(root, &format!("{AMD}/power_state"), "D3cold\n");
    assert_eq!(read(), ("D3cold".to_owned(), None));
    let power = nvidia(NVIDIA).power(&places(root, Some(fake.path())));
    assert_eq!(
        (power.state.as_deref(), power.watts),
        (Some("P8"), Some(83.25))
    );
    let sleeping = format!("sys/bus/pci/devices/{NVIDIA}/power_state");
    write(root, &sleeping, "D3cold\n");
    let power = nvidia(NVIDIA).power(&places(root, Some(fake.path())));
    assert_eq!(
        (power.state.as_deref(), power.watts),
        (Some("D3cold"), None)
    );
    assert_eq!(fake.management_opened(), 0);
}
