//! The settings of the daemon, each declared once. How, and what follows from an entry, is in
//! [`super::table`].
//!
//! To add one: an entry here, and what its value does (`config.values.KEY`; settings of the engine
//! also in `Config::engine`). Then `rocmforged generated reference docs` and `rocmforged generated
//! dictionary tests/fuzz/dictionaries` write what is committed of it; tests compare both.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use axum::http::Uri;
use rocmforge_engine::api::{Budget, Policy, When};
use rocmforge_engine::{DeviceChoice, KvType, PrefixCache};
use rocmforge_hub::Hosts;
use rocmforge_service::check::MAX_GAP_MS;
use rocmforge_service::roles::Who;

use super::bounds::{
    DRAIN_GRACE_MAX, IDLE_RELEASE_MAX, IDLE_RELEASE_MIN, IMAGE_MEMORY_MIN, MAX_SEQUENCES_LIMIT,
    N_CTX_MAX_LIMIT, QUEUE_CAPACITY_LIMIT, THREADS_MAX, WATCHDOG_MAX, WATCHDOG_MIN,
};
use super::error::ConfigError;
use super::kinds::{
    Kind, addresses, bytes, choice, collector, count, device, directories, hosts, hub, integer,
    log_filter, path, patterns, percent_or_off, seconds, seconds_or_none, size, size_or_none,
    size_or_off, socket, users,
};
use super::table::DefaultValue::{Is, Unset};
use super::table::{AllGiven, Entry, Reload, declare_settings};
use crate::addresses::ListenAddress;
use crate::traces::Collector;

declare_settings! {
    "Daemon" {
        /// Unix socket for gRPC.
        ///
        /// Under systemd's socket activation the open socket is used, and this setting is not.
        socket: PathBuf = socket(),
            Unset("$ROCMFORGE_SOCKET, $XDG_RUNTIME_DIR/rocmforged.sock, else /run/rocmforged/rocmforged.sock"), AtRestart;

        /// Directory from which clients may load models, with its subdirectories.
        ///
        /// Symbolic links are resolved first: a link that leads out of the directory is refused.
        /// Without any directory every load is refused.
        model_dir: Vec<PathBuf> = directories(), Unset("none"), AtRestart;

        /// File in which models that clients load are remembered over a restart.
        ///
        /// Remembered are models that are loaded or pinned by name (`rocmforgectl load` and `pin`),
        /// with pins, preload and draft, until they are unloaded. Models that a request opened by
        /// itself and declared models are not: they come back in any case. Under the packaged unit
        /// use `/var/lib/rocmforged/state/models.json`.
        remember: Option<PathBuf> = path("FILE").optional(), Unset("none"), AtRestart;

        /// Whether models that were in use come back after a restart.
        ///
        /// Noted are the models that requests used within the last hour, and which of their weights
        /// were resident: at a stop, and at most once a minute. The next daemon serves at once, and
        /// brings them back in the background into free memory. The note lies beside the file of
        /// `remember`, else in the state directory of the service ($STATE_DIRECTORY, which systemd
        /// sets); without both nothing is noted.
        restart_warm: bool = choice([("on", true), ("off", false)]), Is("on"), AtRestart;

        /// Log filter: a level, or directives such as info,rocmforge_engine=debug.
        ///
        /// Management calls are logged at every level unless audit=off is one of the directives.
        log: String = log_filter(), Is("info"), LogFilter;

        /// Time that running requests get to finish after SIGTERM.
        ///
        /// Under systemd, TimeoutStopSec= of the unit must be at least 16 seconds longer.
        drain_grace: Duration = seconds(Duration::ZERO, DRAIN_GRACE_MAX), Is("20"), AtRestart;

        /// OpenTelemetry collector for traces of requests (OTLP over HTTP, without TLS).
        otlp_endpoint: Option<Collector> = collector().optional(), Unset("no traces"), AtRestart;
    }
    "Device" {
        /// Device to compute on.
        ///
        /// auto is the best AMD GPU that works, else the best NVIDIA GPU, else the CPU. cpu and
        /// host are the CPU. hip and cuda are the first GPU of that kind, hip:1 the second.
        device: DeviceChoice = device(), Is("auto"), AtRestart;

        /// CPU threads for computing.
        threads: Option<NonZeroUsize> = count("N", THREADS_MAX).optional(), Unset("one per core"), AtRestart;

        /// Time that a GPU operation may take before the GPU counts as hung.
        ///
        /// The daemon then exits with code 4, so that systemd restarts it.
        watchdog: Duration = seconds(WATCHDOG_MIN, WATCHDOG_MAX), Is("30"), AtRestart;
    }
    "Memory" {
        /// Maximum device memory for weights, KV cache and scratch together.
        ///
        /// A percentage is of the device's memory; of an integrated GPU (APU) that computes in
        /// system memory, of what is free there at the start. On the CPU the rest is left to the
        /// page cache, from which weights are read.
        vram_budget: Budget = size(), Is("50%"), AtRestart;

        /// GPU memory to keep free for other programs.
        ///
        /// While less is free, the budget shrinks; it grows again later. GPUs only.
        keep_free: Option<Budget> = size_or_none(), Is("0"), AtRestart;

        /// Budget while another process uses the GPU.
        ///
        /// The budget shrinks to it when another process takes more GPU memory or keeps the GPU
        /// busy, and comes back when that process has left, or has done nothing for five minutes.
        /// Running requests go on, and new ones get what they need. With 0 the GPU is closed while
        /// there are none. Others are seen by NVML on NVIDIA, by DRM's fdinfo and sysfs on AMD.
        yield_to: Option<Budget> = size_or_off(), Is("off"), AtRestart;

        /// Time without requests after which GPU memory is given back and the GPU is closed.
        ///
        /// Weights are evicted; if some are pinned, they stay, and the GPU stays open. KV cache
        /// moves to host memory where `host_kv` keeps it, and is dropped otherwise. The next
        /// request opens the GPU, takes the memory again and uploads what it needs. `rocmforgectl
        /// release` does the same at once. On the CPU it is the memory of weights and KV cache.
        idle_release: Option<Duration> =
            seconds_or_none(IDLE_RELEASE_MIN, IDLE_RELEASE_MAX), Is("0"), IdleRelease;

        /// Whether a release of GPU memory gives host memory back, too.
        ///
        /// That of `host_budget`: KV cache in host memory is dropped, and weights that the CPU
        /// computes with. For `idle_release` and `rocmforgectl release`.
        idle_release_host: bool = choice([("off", false), ("on", true)]), Is("off"), IdleRelease;

        /// Eviction policy of the weight cache.
        policy: Policy = choice([("pass-aware", Policy::PassAware), ("lru", Policy::Lru)]),
            Is("pass-aware"), AtRestart;

        /// Whether weights that are not in GPU memory are computed on the CPU instead of uploaded.
        ///
        /// auto computes on the CPU where that is faster than the upload, by what was measured of
        /// both. `threads` sets the number of threads.
        cpu_compute: When = when(), Is("auto"), AtRestart;

        /// Host memory for weights repacked for the CPU, and for KV cache that left the GPU.
        ///
        /// At most half of the machine's memory. Repacked weights are those that the CPU computes
        /// with (`cpu_compute`); without them it computes from the model file, two to three times
        /// as slowly. The rest is for KV cache (`host_kv`).
        host_budget: Option<Budget> = size_or_none(), Is("12.5%"), AtRestart;

        /// Whether KV cache that is evicted from the GPU is kept in host memory.
        ///
        /// auto keeps it where copying it back is faster than recomputing it, by what was measured
        /// of both. Within `host_budget`.
        host_kv: When = when(), Is("auto"), AtRestart;

        /// Directory for KV cache on disk, which survives restarts.
        ///
        /// KV pages and recurrent states of finished requests are written there in the background,
        /// and read for a request whose prefix is not in memory, if reading is faster than
        /// recomputing. Each daemon needs a directory of its own, which is created with mode 0700.
        /// Under the packaged unit use `/var/lib/rocmforged/state/kv`. Its files contain what
        /// prompts contain.
        kv_disk: Option<PathBuf> = path("DIR").optional(), Unset("no KV cache on disk"), AtRestart;

        /// Disk space for KV cache (`kv_disk`).
        ///
        /// A percentage is of the file system's size. The least is 64 MiB. Files that were used
        /// least recently are deleted first.
        kv_disk_budget: Budget = size(), Is("16GiB"), AtRestart;

        /// Memory pressure at which host memory is given back to the system.
        ///
        /// The percentage of time in which any process of the machine, or of the daemon's control
        /// group, waits for memory (PSI). Memory of `host_budget` is given back step by step, and
        /// taken again once the pressure has gone.
        host_pressure: Option<f64> = percent_or_off(), Is("10"), AtRestart;

        /// Whether model files are read with O_DIRECT, past the page cache.
        ///
        /// Pages that are cached already are used in any case. auto reads models with O_DIRECT that
        /// are larger than the memory available when they are loaded, because they would evict
        /// everything else from the page cache.
        direct_io: When = when(), Is("auto"), AtRestart;
    }
    "Requests" {
        /// Maximum context of a request in tokens.
        n_ctx_max: u32 = integer("TOKENS", 1, N_CTX_MAX_LIMIT), Is("131072"), AtRestart;

        /// Maximum number of requests that run at once.
        max_sequences: NonZeroUsize = count("N", MAX_SEQUENCES_LIMIT), Is("64"), AtRestart;

        /// Maximum number of requests in the queue.
        ///
        /// One client gets at most seven eighths of it.
        queue_capacity: u32 = integer("N", 1, QUEUE_CAPACITY_LIMIT), Is("320"), AtRestart;

        /// Longest gap between tokens that interactive requests are promised which set none.
        ///
        /// In milliseconds. A request asks for its own with `max_gap_ms`, or for none with 0. One
        /// whose gap cannot be held is refused, also where this setting is what asks for it.
        max_gap_ms_interactive: Option<u32> = integer("MS", 1, MAX_GAP_MS).optional(), Unset("none"), AtRestart;

        /// Longest gap between tokens that batch requests are promised which set none.
        ///
        /// In milliseconds, as `max_gap_ms_interactive`.
        max_gap_ms_batch: Option<u32> = integer("MS", 1, MAX_GAP_MS).optional(), Unset("none"), AtRestart;

        /// Prefix cache: whose earlier prompts a request may reuse.
        ///
        /// per-user reuses a user's own prompts, shared those of all users. With shared, a user can
        /// find out from the time to first token whether somebody has sent a prompt with the same
        /// beginning.
        prefix_cache: PrefixCache = choice([
            ("off", PrefixCache::Off),
            ("per-user", PrefixCache::PerClient),
            ("shared", PrefixCache::Shared),
        ]), Is("per-user"), AtRestart;

        /// Whether equal weights of several models are kept once.
        ///
        /// Fine-tunes of one model, and copies under other names, often have equal weights. Their
        /// files are compared in the background once both models are on the device. Experts of MoE
        /// models are not shared, nor weights of files that `direct_io` reads past the page cache.
        share_weights: bool = choice([("on", true), ("off", false)]), Is("on"), AtRestart;

        /// Element type of the KV cache.
        ///
        /// q8_0 takes 53 % of the memory of f16, at a small loss of precision; layers whose heads
        /// are no multiple of 32 elements keep f16. f32 takes twice as much. auto is f16, but f32
        /// for unquantized models (F16, BF16, F32) that do not scale their attention scores, such
        /// as Gemma 4, or are MoE.
        kv_type: Option<KvType> = choice([
            ("auto", None),
            ("f32", Some(KvType::F32)),
            ("f16", Some(KvType::F16)),
            ("q8_0", Some(KvType::Q8_0)),
        ]), Is("auto"), AtRestart;

        /// Speculative decoding with n-grams or an MTP head: on, off, or auto (CPU only).
        ///
        /// auto is on for the CPU alone: on a GPU the number of rows of a batch decides which
        /// kernel computes them, so that the output can differ where two tokens are nearly equally
        /// likely. A model with a draft model uses it unless this is off.
        speculate: Option<bool> =
            choice([("on", Some(true)), ("off", Some(false)), ("auto", None)]), Is("auto"), AtRestart;
    }
    "Images" {
        /// Memory for images of requests until the model has read them.
        ///
        /// Decoding an image takes 16 bytes a pixel; what is left of it while the request waits,
        /// 12 bytes a pixel that the model reads. Requests wait for memory, at most a minute. One
        /// client gets at most three quarters of it. An eighth is for files that are fetched
        /// (`image_url_hosts`).
        image_memory: u64 = bytes(IMAGE_MEMORY_MIN), Is("2GiB"), AtRestart;

        /// Hosts from which images are fetched that requests name by an http or https URL.
        ///
        /// Without any, such requests are refused. A host is fetched from at its public addresses
        /// alone, and redirects are followed to hosts of the list alone. At most 20 MiB an image
        /// and 30 seconds a request. Under the packaged systemd unit fetching needs a drop-in that
        /// allows network sockets.
        image_url_hosts: Hosts = hosts(), Unset("none"), AtRestart;
    }
    "Downloads" {
        /// Address of the hub that models are downloaded from.
        ///
        /// The hub speaks Hugging Face's API. Downloads begin with `POST /models` or
        /// `POST /api/pull`, need the role admin, and go to the first model directory, in which the
        /// daemon must be able to write. Under the packaged systemd unit they need a drop-in that
        /// allows network sockets.
        hub_url: Uri = hub(), Is("https://huggingface.co"), AtRestart;

        /// File with the token for the hub.
        ///
        /// The token goes to `hub_url` alone, not to places that the hub leads to. The file must
        /// not be readable by every user.
        hub_token_file: Option<PathBuf> = path("FILE").optional(), Unset("no token"), AtRestart;

        /// Address of the registry for Ollama names such as llama3.2:3b.
        registry_url: Uri = hub(), Is("https://registry.ollama.ai"), AtRestart;

        /// Whether HTTP clients over TCP may download, copy and delete models.
        ///
        /// With tokens, every client that sends one may; without, every program of this machine.
        pull_over_tcp: bool = choice([("off", false), ("on", true)]), Is("off"), AtRestart;
    }
    "Access" {
        /// Users and groups that may use models: generate, tokenize, read the status.
        use_by: Who = users(), Is("*"), AtRestart;

        /// Users and groups that may also load, unload, preload, pin and evict models, and test
        /// GPUs.
        manage_by: Who = users(), Unset("as use_by"), AtRestart;

        /// Users and groups that may also change budget and policy, and reload the settings.
        admin_by: Who = users(), Unset("as manage_by"), AtRestart;
    }
    "HTTP" {
        /// Unix socket for HTTP (OpenAI, Anthropic, Ollama and llama-server routes).
        ///
        /// Clients have the roles of their user, as over gRPC.
        http_socket: Option<PathBuf> = socket().optional(), Unset("none"), AtRestart;

        /// TCP addresses for HTTP.
        ///
        /// A host name stands for all addresses that it resolves to: `localhost:8080` is
        /// `127.0.0.1:8080` and `[::1]:8080`. Requests may use such a name in their `Host` header.
        /// `[::]:8080` alone takes IPv4 as well. An address that other machines reach needs
        /// `http_token_file`, `http_tls_cert` and `http_tls_key`. Under the packaged systemd unit
        /// any address needs a drop-in that allows network sockets.
        http_listen: Vec<ListenAddress> = addresses(), Unset("none"), AtRestart;

        /// File of bearer tokens for HTTP over TCP, one per line: TOKEN or NAME TOKEN.
        ///
        /// A client that sends a token may use, load and unload models. A reload reads the file
        /// again. The file must not be readable by every user.
        http_token_file: Option<PathBuf> = path("FILE").optional(), Unset("none"), Tokens;

        /// TLS certificate chain for HTTP over TCP, PEM.
        ///
        /// The certificate of the daemon comes first, then those of the issuers. With it and
        /// `http_tls_key` HTTP over TCP is served with TLS only. A reload reads both files again.
        http_tls_cert: Option<PathBuf> = path("FILE").optional(), Unset("no TLS"), Certificate;

        /// Private key of the TLS certificate, PEM, not encrypted.
        http_tls_key: Option<PathBuf> = path("FILE").optional(), Unset("no TLS"), Certificate;

        /// Origins of web pages and apps that may use HTTP without a token.
        ///
        /// An origin as a browser sends it, such as `app://obsidian.md`; a `*` at the end stands
        /// for any rest, as in `vscode-webview://*`. Pages of this machine are always allowed. Any
        /// page of an allowed origin may generate, and read what it generated.
        http_allow_origins: Vec<String> = patterns("ORIGIN", "origin"), Unset("none"), AtRestart;

        /// Host names that requests over HTTP may use for this machine without a token.
        ///
        /// A name without a port, such as `host.docker.internal`; a `*` at the end stands for any
        /// rest. `localhost` and loopback addresses are always allowed.
        http_allow_hosts: Vec<String> = patterns("HOST", "host name"), Unset("none"), AtRestart;
    }
}

/// Whether the daemon does something: where it pays, never, or always.
fn when() -> Kind<When> {
    choice([
        ("auto", When::Auto),
        ("never", When::Never),
        ("always", When::Always),
    ])
}
