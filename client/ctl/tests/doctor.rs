//! doctor: each finding, on machines that are made of files, and against a daemon that runs.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output};

use crate::fake::FakeDaemon;
use serde_json::Value;

const AMD: &str = "sys/bus/pci/devices/0000:03:00.0";
const NVIDIA: &str = "sys/bus/pci/devices/0000:41:00.0";

/// The files of a machine, and what lies in the search path.
struct Fake {
    dir: tempfile::TempDir,
}

/// The number of this process' group, which files of the test have.
fn own_group(dir: &Path) -> u32 {
    fs::metadata(dir).expect("it exists").gid()
}

impl Fake {
    /// A machine without a card, on which user 1000 looks, whose group has the name `render`.
    fn new() -> Fake {
        let fake = Fake {
            dir: tempfile::tempdir().expect("a temporary directory"),
        };
        let gid = own_group(fake.dir.path());
        fake.write("proc/sys/kernel/osrelease", "6.12.0-test\n");
        fake.identity(&[gid]);
        fake.locked("unlimited");
        fake.write(
            "proc/self/smaps",
            "00-01 r--p\nSize: 4 kB\nKernelPageSize:        4 kB\n",
        );
        fake.write(
            "proc/meminfo",
            "MemTotal:       33554432 kB\nMemFree: 1 kB\n",
        );
        fake.write("etc/group", &format!("root:x:99999:\nrender:x:{gid}:ada\n"));
        fake.write("etc/passwd", "ada:x:1000:1000::/srv/ada:/bin/sh\n");
        fake.script("echo 'hip: libamdhip64.so.6: cannot open shared object file'");
        fake
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.dir.path().join(path);
        fs::create_dir_all(path.parent().expect("below the root")).expect("it is made");
        fs::write(path, text).expect("it is written");
    }

    fn identity(&self, groups: &[u32]) {
        let groups: Vec<_> = groups.iter().map(u32::to_string).collect();
        let groups = groups.join(" ");
        let text = format!(
            "Name: x\nUid:\t1000\t1000\t1000\t1000\nGid:\t1000\t1000\t1000\t1000\nGroups:\t{groups}\n"
        );
        self.write("proc/self/status", &text);
    }

    fn locked(&self, soft: &str) {
        let text = format!(
            "Limit                     Soft Limit           Hard Limit           Units\n\
             Max locked memory         {soft}           {soft}           bytes\n"
        );
        self.write("proc/self/limits", &text);
    }

    /// A program in the place of the daemon's, which answers --list-devices so.
    fn script(&self, devices: &str) {
        let dir = self.dir.path().join("bin");
        fs::create_dir_all(&dir).expect("it is made");
        let version = env!("CARGO_PKG_VERSION");
        rocmforge_test_scripts::write(
            &dir.join("rocmforged"),
            &format!("case \"$1\" in --version) echo rocmforged {version};; *) {devices};; esac"),
        );
    }

    fn card(&self, pci: &str, vendor: &str) {
        self.write(&format!("{pci}/vendor"), vendor);
        self.write(&format!("{pci}/class"), "0x030000\n");
    }

    fn node(&self, path: &str, mode: u32) {
        self.write(path, "");
        let path = self.dir.path().join(path);
        fs::set_permissions(path, Permissions::from_mode(mode)).expect("it is ours");
    }

    /// What the kernel's topology has of the AMD card: its architecture, and the cores of its node.
    fn topology(&self, target: u32, cores: u32) {
        let nodes = "sys/class/kfd/kfd/topology/nodes";
        self.write(
            &format!("{nodes}/0/properties"),
            "cpu_cores_count 16\nsimd_count 0\nlocation_id 0\ngfx_target_version 0\n",
        );
        self.write(
            &format!("{nodes}/1/properties"),
            &format!(
                "cpu_cores_count {cores}\nsimd_count 80\ngfx_target_version {target}\nlocation_id 768\ndomain 0\n"
            ),
        );
    }

    /// A machine with an AMD card on which nothing is missing but a socket.
    fn with_amd() -> Fake {
        let fake = Fake::new();
        fake.card(AMD, "0x1002\n");
        fake.write("sys/module/amdgpu/version", "6.14.4\n");
        fake.node("dev/kfd", 0o660);
        fake.node("dev/dri/renderD128", 0o660);
        fake.write(&format!("{AMD}/mem_info_vram_total"), "25753026560\n");
        fake.write(&format!("{AMD}/mem_info_gtt_total"), "17179869184\n");
        fake.script("echo 'hip:0 Radeon (gfx1100, 48 compute units, 24560 MiB)'");
        fake
    }

    fn socket(&self, mode: u32) -> UnixListener {
        let path = self.dir.path().join("run/rocmforged/rocmforged.sock");
        fs::create_dir_all(path.parent().expect("below the root")).expect("it is made");
        let listener = UnixListener::bind(&path).expect("it binds");
        fs::set_permissions(path, Permissions::from_mode(mode)).expect("it is ours");
        listener
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rocmforgectl"));
        command
            .env_remove("ROCMFORGE_SOCKET")
            .env_remove("XDG_RUNTIME_DIR")
            .env("PATH", self.dir.path().join("bin"))
            .args(["doctor", "--root"])
            .arg(self.dir.path())
            .args(arguments);
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let output = self.command(arguments).output();
        output.expect("rocmforgectl starts")
    }

    fn lines(&self) -> Vec<[String; 4]> {
        let output = self.run(&["--json"]);
        let text = String::from_utf8(output.stdout).expect("UTF-8");
        let value: Value = serde_json::from_str(&text).expect("one object");
        let findings = value["findings"].as_array().expect("a list").iter();
        let lines: Vec<_> = findings
            .map(|finding| {
                ["level", "subject", "found", "todo"]
                    .map(|key| finding[key].as_str().unwrap_or_default().to_owned())
            })
            .collect();
        let failed = lines.iter().any(|[level, ..]| level == "fail");
        assert_eq!(output.status.code(), Some(i32::from(failed)), "{lines:?}");
        for [level, _, _, todo] in &lines {
            assert_eq!(level == "ok", todo.is_empty(), "{lines:?}");
        }
        lines
    }

    /// The one finding of this level and subject whose text has these words.
    #[track_caller]
    fn has(&self, level: &str, subject: &str, words: &[&str]) {
        let lines = self.lines();
        let fits = |line: &&[String; 4]| {
            let text = format!("{} {}", line[2], line[3]);
            line[0] == level && line[1] == subject && words.iter().all(|w| text.contains(w))
        };
        let found = lines.iter().filter(fits).count();
        assert_eq!(found, 1, "{level} {subject} {words:?} in {lines:#?}");
    }
}

#[test]
fn a_machine_with_everything_has_no_failure() {
    let fake = Fake::with_amd();
    let _socket = fake.socket(0o660);
    let lines = fake.lines();
    assert!(lines.iter().all(|[level, ..]| level == "ok"), "{lines:#?}");
    fake.has("ok", "kernel", &["6.12.0-test"]);
    fake.has("ok", "driver", &["amdgpu 6.14.4"]);
    fake.has("ok", "device node", &["/dev/kfd (group render, mode 0660)"]);
    fake.has("ok", "device node", &["/dev/dri/renderD128"]);
    fake.has("ok", "runtime", &["hip:0 Radeon"]);
    fake.has("ok", "GPU memory", &["24560 MiB on the GPU"]);
    fake.has("ok", "locked memory", &["unlimited"]);
    fake.has("ok", "page size", &["4 KiB"]);
    fake.has("ok", "socket", &["members of render may connect"]);
    fake.has(
        "ok",
        "versions",
        &[env!("CARGO_PKG_VERSION"), "bin/rocmforged"],
    );

    let output = fake.run(&[]);
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    assert!(text.contains("ok    device node    /dev/kfd"), "{text}");
    assert!(output.stderr.is_empty());
}

#[test]
fn a_machine_without_a_card_serves_on_its_processor() {
    let fake = Fake::new();
    let _socket = fake.socket(0o666);
    fake.locked("8388608");
    assert_eq!(fake.run(&[]).status.code(), Some(0));
    fake.has("warn", "GPUs", &["no AMD or NVIDIA GPU"]);
    fake.has("ok", "runtime", &["libamdhip64.so.6: cannot open"]);
    fake.has("ok", "locked memory", &["8192 KiB", "CPU needs none"]);
    fake.has("ok", "socket", &["everyone may connect"]);
}

#[test]
fn what_is_missing_is_named_with_what_mends_it() {
    let fake = Fake::with_amd();
    let root = fake.dir.path();
    fake.has(
        "fail",
        "socket",
        &["/run/rocmforged/rocmforged.sock", "systemctl enable --now"],
    );
    fs::remove_dir_all(root.join("sys/module/amdgpu")).expect("it is there");
    fake.has(
        "fail",
        "driver",
        &["amdgpu is not loaded", "modprobe amdgpu"],
    );
    fs::remove_file(root.join("dev/kfd")).expect("it is there");
    fake.has(
        "fail",
        "device node",
        &["there is no /dev/kfd", "--device /dev/kfd"],
    );
    fs::remove_file(root.join("dev/dri/renderD128")).expect("it is there");
    fake.has("fail", "device node", &["there is no /dev/dri/renderD*"]);
    fake.script("echo 'hip: libamdhip64.so.6: cannot open shared object file'");
    fake.has("fail", "runtime", &["no runtime lists it", "libamdhip64"]);
    fake.has("ok", "runtime", &["cannot open shared object"]);
    fs::remove_file(root.join("bin/rocmforged")).expect("it is there");
    fake.has(
        "fail",
        "runtime",
        &["no rocmforged to start", "install rocmforged"],
    );

    let output = fake.run(&[]);
    let (text, said) = (
        String::from_utf8(output.stdout).expect("UTF-8"),
        String::from_utf8(output.stderr).expect("UTF-8"),
    );
    assert!(text.contains("-> modprobe amdgpu"), "{text}");
    assert!(said.contains("failures to fix"), "{said}");
}

#[test]
fn nodes_that_the_caller_may_not_open_fail_with_the_group() {
    let fake = Fake::with_amd();
    fake.identity(&[4242]);
    fake.has(
        "fail",
        "device node",
        &["/dev/kfd", "closed to ada", "usermod -aG render ada"],
    );
    fake.node("dev/kfd", 0o600);
    fake.has("fail", "device node", &["/dev/kfd", "udev rule"]);
    fake.node("dev/kfd", 0o666);
    fake.has("ok", "device node", &["/dev/kfd"]);
    let _socket = fake.socket(0o660);
    fake.has("fail", "socket", &["ada may not", "usermod -aG render ada"]);
}

/// Once `usermod -aG 992` was the advice, and there was no such group.
#[test]
fn a_group_without_a_name_is_one_to_make_or_to_give_to_the_container() {
    let fake = Fake::with_amd();
    fake.identity(&[4242]);
    let gid = own_group(fake.dir.path());
    let number = gid.to_string();
    let made = format!("groupadd --system --gid {gid} gpu-{gid}, then usermod -aG gpu-{gid} ada");
    let given = format!("--group-add {gid}");
    fake.write("etc/group", "root:x:99999:\nrender:x:77777:\n");
    match gid {
        0 => fake.has(
            "fail",
            "device node",
            &["/dev/kfd", "udev rule", "GROUP=\"render\""],
        ),
        _ => {
            fake.has("fail", "device node", &["/dev/kfd", &number, &made, &given]);
            fake.write("run/.containerenv", "");
            fake.has(
                "fail",
                "device node",
                &["/dev/kfd", "has no name in this container", &given],
            );
        }
    }
    // Of a namespace of users that does not map the group.
    fake.write("proc/sys/kernel/overflowgid", &format!("{gid}\n"));
    fake.has(
        "fail",
        "device node",
        &["/dev/kfd", "does not map", "keep-groups"],
    );
}

#[test]
fn limits_that_are_low_are_found() {
    let fake = Fake::with_amd();
    fake.locked("8388608");
    fake.has(
        "fail",
        "locked memory",
        &["8192 KiB", "LimitMEMLOCK=infinity"],
    );
    fake.locked("1073741824");
    fake.has(
        "warn",
        "locked memory",
        &["1048576 KiB", "LimitMEMLOCK=infinity"],
    );
    fake.write("proc/self/smaps", "KernelPageSize:       64 kB\n");
    fake.has("warn", "page size", &["64 KiB"]);
}

#[test]
fn variables_that_hide_cards_are_told_where_there_is_one() {
    let fake = Fake::with_amd();
    let variables = "PATH=/bin\0ROCR_VISIBLE_DEVICES=1\0HIP_VISIBLE_DEVICES=\0";
    fake.write("proc/self/environ", variables);
    let words = ["ROCR_VISIBLE_DEVICES=1, HIP_VISIBLE_DEVICES= (this shell's)"];
    fake.has("warn", "environment", &words);
    let without = Fake::new();
    without.write("proc/self/environ", variables);
    let lines = without.lines();
    assert!(lines.iter().all(|line| line[1] != "environment"));
}

#[test]
fn an_apu_with_the_kernels_default_is_told_how_to_have_more() {
    let fake = Fake::with_amd();
    fake.topology(110501, 0);
    fake.write(&format!("{AMD}/mem_info_vram_total"), "536870912\n");
    fake.write(&format!("{AMD}/mem_info_gtt_total"), "17179869184\n");
    fake.has(
        "warn",
        "GPU memory",
        &[
            "APU",
            "512 MiB",
            "16384 MiB",
            "32768 MiB",
            "ttm.pages_limit=6291456",
        ],
    );
    fake.write(&format!("{AMD}/mem_info_gtt_total"), "25769803776\n");
    fake.has("ok", "GPU memory", &["APU", "24576 MiB"]);
}

/// Once cards of 4 GiB and less were taken for APUs, and an APU with 96 GiB set apart for a card.
#[test]
fn what_is_an_apu_is_told_by_the_kernel_and_not_by_sizes() {
    let fake = Fake::with_amd();
    let sizes = |vram: u64, gtt: u64| {
        for (name, gib) in [("vram", vram), ("gtt", gtt)] {
            let path = format!("{AMD}/mem_info_{name}_total");
            fake.write(&path, &format!("{}\n", gib << 30));
        }
    };
    // A Radeon RX 6400, with and without KFD.
    sizes(4, 32);
    fake.has("ok", "GPU memory", &["4096 MiB on the GPU"]);
    fake.topology(100304, 0);
    fake.has("ok", "GPU memory", &["4096 MiB on the GPU"]);
    // A Strix Halo; an APU of an older kernel, which tells of one node with cores.
    for (target, cores) in [(110501, 0), (90002, 8), (90006, 8)] {
        fake.topology(target, cores);
        sizes(96, 16);
        fake.has("ok", "GPU memory", &["98304 MiB reserved", "APU"]);
        sizes(16, 24);
        fake.has("ok", "GPU memory", &["shared", "16384 MiB reserved"]);
    }
}

#[test]
fn an_nvidia_card_needs_its_own_nodes_and_module() {
    let fake = Fake::new();
    fake.card(NVIDIA, "0x10de\n");
    fake.has("fail", "driver", &["nvidia is not loaded"]);
    fake.has("fail", "device node", &["there is no /dev/nvidia-uvm"]);
    fake.has("fail", "runtime", &["cuda", "libcuda"]);
    fake.write("sys/module/nvidia/version", "570.86\n");
    for node in ["nvidiactl", "nvidia0", "nvidia-uvm"] {
        fake.node(&format!("dev/{node}"), 0o666);
    }
    fake.script("echo 'cuda:0 H200 (sm_90, 132 units)'");
    fake.has("ok", "driver", &["nvidia 570.86"]);
    fake.has("ok", "runtime", &["cuda:0 H200"]);
    let lines = fake.lines();
    assert!(
        !lines.iter().any(|[l, s, ..]| l == "fail" && s != "socket"),
        "{lines:#?}"
    );
}

#[test]
fn a_relative_socket_is_looked_for_where_a_client_finds_it() {
    let fake = Fake::new();
    let here = tempfile::tempdir().expect("a temporary directory");
    // A daemon that was killed left it.
    let socket = here.path().join("s");
    drop(UnixListener::bind(&socket).expect("it binds"));
    fs::set_permissions(socket, Permissions::from_mode(0o666)).expect("it is ours");
    let mut doctor = fake.command(&["--socket", "s"]);
    let output = doctor.current_dir(here.path()).output();
    let text = String::from_utf8(output.expect("it starts").stdout).expect("UTF-8");
    assert!(
        text.contains("no daemon answers there") && !text.contains("there is none"),
        "{text}"
    );
}

#[tokio::test]
async fn a_daemon_that_runs_is_asked_and_another_version_is_told() {
    let daemon = FakeDaemon::start();
    let fake = Fake::with_amd();
    let socket = daemon.socket.to_str().expect("UTF-8").to_owned();
    let output = tokio::task::spawn_blocking(move || {
        // Of the root only files are read; the socket is named, so that it is asked.
        fake.write(socket.trim_start_matches('/'), "");
        fake.run(&["--json", "--socket", &socket])
    });
    let output = output.await.expect("it ends");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    assert!(text.contains("the daemon computes on"), "{text}");
    assert!(text.contains("the running daemon"), "{text}");
}

/// bash with the script that the package ships, at a line that is typed.
#[tokio::test]
async fn a_shell_completes_the_names_of_models() {
    let daemon = FakeDaemon::start();
    let dir = tempfile::tempdir().expect("a path, a shell");
    let into = dir.path().to_str().expect("a path, a shell");
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_rocmforgectl"));
    let written = Command::new(program)
        .args(["generated", "completions", into])
        .status();
    assert!(written.expect("it starts").success());
    let completed = |words: &'static str| {
        let script = format!(
            "source {into}/rocmforgectl.bash; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); \
             _rocmforgectl_names rocmforgectl \"${{COMP_WORDS[-1]}}\" \"${{COMP_WORDS[-2]}}\"; echo \"${{COMPREPLY[*]}}\""
        );
        let beside = program
            .parent()
            .expect("a path, a shell")
            .display()
            .to_string();
        let mut shell = tokio::process::Command::new("bash");
        shell.args(["--norc", "-c", &script]);
        shell.env("PATH", format!("{beside}:/usr/bin:/bin"));
        shell.env("ROCMFORGE_SOCKET", &daemon.socket);
        shell.output()
    };
    for (words, has) in [
        ("rocmforgectl unload ''", true),
        ("rocmforgectl unload ti", true),
        ("rocmforgectl unload x", false),
        ("rocmforgectl ls ''", false),
    ] {
        let output = completed(words).await.expect("a path, a shell");
        let told = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(
            told.split_whitespace().any(|word| word == "tiny"),
            has,
            "{words}: {output:?}"
        );
    }
}

/// What the daemon does not serve, and why, was said nowhere.
#[tokio::test]
async fn model_directories_and_files_that_are_not_offered_are_told_with_what_to_do() {
    let daemon = FakeDaemon::start();
    let output = tokio::process::Command::new(env!("CARGO_BIN_EXE_rocmforgectl"))
        .args(["--json", "--socket"])
        .arg(&daemon.socket)
        .arg("doctor")
        .output();
    let output = output.await.expect("it starts");
    let told: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let findings = told["findings"].as_array().expect("a list").iter();
    let of_models: Vec<_> = findings.filter(|f| f["subject"] == "models").collect();
    let row = |found: &Value| {
        let text = |key: &str| found[key].as_str().unwrap_or_default().to_owned();
        (text("level"), text("found"), text("todo"))
    };
    let rows: Vec<_> = of_models.iter().map(|found| row(found)).collect();
    let expected = [
        ("ok", "2 model files in 2 model directories", ""),
        (
            "warn",
            "model directory /usb is not there",
            "mount or create it",
        ),
        (
            "warn",
            "/models/l.gguf: it is a link to /nvme/l.gguf",
            "name /nvme",
        ),
        (
            "ok",
            "1 file of other kinds (`rocmforgectl files` says which)",
            "",
        ),
    ];
    let expected =
        expected.map(|(level, found, todo)| (level.to_owned(), found.to_owned(), todo.to_owned()));
    assert_eq!(rows, expected);
}
