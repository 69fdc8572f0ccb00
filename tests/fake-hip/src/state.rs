//! All that the runtime knows, behind one lock: a fake needs no concurrency.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::kernels::Kernel;
use crate::memory::{HostRanges, Memory};
use crate::misbehaviour::Misbehaviours;
use crate::queue::Queues;

pub(crate) const SUCCESS: u32 = 0;
pub(crate) const INVALID_VALUE: u32 = 1;
pub(crate) const OUT_OF_MEMORY: u32 = 2;
pub(crate) const NO_DEVICE: u32 = 100;
pub(crate) const INVALID_DEVICE: u32 = 101;
pub(crate) const NO_BINARY: u32 = 209;
pub(crate) const INVALID_HANDLE: u32 = 400;
pub(crate) const NOT_FOUND: u32 = 500;
pub(crate) const NOT_READY: u32 = 600;
pub(crate) const ILLEGAL_ADDRESS: u32 = 700;
pub(crate) const ALREADY_REGISTERED: u32 = 712;
pub(crate) const NOT_REGISTERED: u32 = 713;
pub(crate) const NOT_SUPPORTED: u32 = 801;
pub(crate) const CAPTURE_UNSUPPORTED: u32 = 900;
pub(crate) const CAPTURE_INVALIDATED: u32 = 901;

/// Not HIP's: work that is to fail with it never ends, and neither does a call.
pub(crate) const HANG: u32 = crate::HANG;

/// Codes after which nothing works any more.
const FATAL: [u32; 5] = [700, 702, 709, 710, 719];

/// Calls that give something back: on a lost device they do, and still say that it is lost.
const GIVING_BACK: [&str; 11] = [
    "hipFree",
    "hipMemUnmap",
    "hipMemRelease",
    "hipMemAddressFree",
    "hipHostFree",
    "hipHostUnregister",
    "hipStreamDestroy",
    "hipEventDestroy",
    "hipModuleUnload",
    "hipGraphDestroy",
    "hipGraphExecDestroy",
];

/// An order to fail: the `nth` call from now, with `code`.
struct Failure {
    call: String,
    nth: u64,
    code: u32,
}

/// The runtime.
pub(crate) struct State {
    /// By the number of the card, the last one for all behind it.
    archs: Vec<String>,
    integrated: Vec<bool>,
    totals: Vec<u64>,
    pub(crate) wave: i32,
    pub(crate) devices: i32,
    pub(crate) register: bool,
    /// Whether addresses can be reserved apart from memory.
    pub(crate) virtual_memory: bool,
    pub(crate) misbehaves: Misbehaviours,
    pub(crate) memory: Memory,
    /// A file that says how many bytes other processes hold, read at each count.
    others_file: Option<PathBuf>,
    pub(crate) host: HostRanges,
    pub(crate) queues: Queues,
    /// Modules: the kernels that they have.
    pub(crate) modules: HashMap<usize, Vec<&'static Kernel>>,
    /// Functions: module and kernel.
    pub(crate) functions: HashMap<usize, (usize, &'static Kernel)>,
    /// Handles of rocBLAS: the stream of each.
    pub(crate) blas: HashMap<usize, usize>,
    /// Whether the process has the card open: since it was set, until it is reset.
    pub(crate) is_open: bool,
    pub(crate) violations: Vec<String>,
    /// The code that every call gives from now on.
    pub(crate) lost: Option<u32>,
    /// No queued work ends any more.
    pub(crate) hung: bool,
    pub(crate) calls: HashMap<String, u64>,
    /// All calls so far, and a file that says how many there were and which was the last.
    all_calls: u64,
    calls_file: Option<File>,
    failures: Vec<Failure>,
    next_handle: usize,
}

impl State {
    fn from_env() -> State {
        let text = |name: &str| std::env::var(name).ok();
        let number = |name: &str| text(name).and_then(|v| v.parse::<u64>().ok());
        let list = |name: &str, usual: &str| -> Vec<String> {
            let list = text(name).unwrap_or_else(|| usual.to_owned());
            list.split(',').map(str::to_owned).collect()
        };
        let totals = list("FAKE_HIP_MEMORY", "");
        let totals: Vec<u64> = totals
            .iter()
            .map(|t| t.parse().unwrap_or(1 << 30))
            .collect();
        let mut state = State {
            archs: list("FAKE_HIP_ARCH", crate::ARCH),
            integrated: list("FAKE_HIP_INTEGRATED", "0")
                .iter()
                .map(|i| i == "1")
                .collect(),
            wave: number("FAKE_HIP_WAVE").unwrap_or(32) as i32,
            devices: number("FAKE_HIP_DEVICES").unwrap_or(1) as i32,
            register: number("FAKE_HIP_REGISTER") != Some(0),
            virtual_memory: number("FAKE_HIP_VIRTUAL_MEMORY") != Some(0),
            misbehaves: Misbehaviours::from_text(&text("FAKE_HIP_MISBEHAVE").unwrap_or_default()),
            memory: Memory::new(totals[0]),
            totals,
            others_file: std::env::var_os("FAKE_HIP_OTHERS_FILE").map(PathBuf::from),
            host: HostRanges::default(),
            queues: Queues::default(),
            modules: HashMap::new(),
            functions: HashMap::new(),
            blas: HashMap::new(),
            is_open: false,
            violations: Vec::new(),
            lost: None,
            hung: false,
            calls: HashMap::new(),
            all_calls: 0,
            calls_file: std::env::var_os("FAKE_HIP_CALLS_FILE").map(|path| {
                let file = File::options()
                    .write(true)
                    .create(true)
                    .truncate(false)
                    .open(path);
                file.expect("the file of FAKE_HIP_CALLS_FILE can be written")
            }),
            failures: Vec::new(),
            next_handle: 0x1000,
        };
        for order in text("FAKE_HIP_FAIL").unwrap_or_default().split(',') {
            // `run:kernel:1:719`: the name may have a colon of its own.
            let mut parts = order.rsplitn(3, ':');
            let code = parts.next().and_then(|v| v.parse().ok());
            let nth = parts.next().and_then(|v| v.parse().ok());
            if let (Some(code), Some(nth), Some(call)) = (code, nth, parts.next()) {
                state.fail(call, nth, code);
            }
        }
        state
    }

    /// The architecture of a card.
    pub(crate) fn arch(&self, card: i32) -> &str {
        of_card(&self.archs, card).map_or("", String::as_str)
    }

    /// Whether a card is a part of the processor.
    pub(crate) fn integrated(&self, card: i32) -> bool {
        of_card(&self.integrated, card).is_some_and(|&integrated| integrated)
    }

    /// Bytes of a card's memory.
    pub(crate) fn total(&self, card: i32) -> u64 {
        match self.totals.len() {
            0 | 1 => self.memory.total,
            _ => of_card(&self.totals, card).copied().unwrap_or(0),
        }
    }

    /// All cards are of one kind from now on.
    pub(crate) fn set_cards(&mut self, arch: Option<String>, integrated: Option<bool>) {
        if let Some(arch) = arch {
            self.archs = vec![arch];
        }
        if let Some(integrated) = integrated {
            self.integrated = vec![integrated];
        }
    }

    /// Bytes that are free now.
    pub(crate) fn free_bytes(&mut self) -> u64 {
        let told = self.others_file.as_ref().and_then(|file| {
            let text = std::fs::read_to_string(file).ok()?;
            text.trim().parse().ok()
        });
        if let Some(others) = told {
            self.memory.others = others;
        }
        self.memory.free_bytes()
    }

    /// Orders a failure.
    pub(crate) fn fail(&mut self, call: &str, nth: u64, code: u32) {
        self.failures.push(Failure {
            call: call.to_owned(),
            nth,
            code,
        });
    }

    /// Forgets all that is alive and queued, orders and loss. Addresses and
    /// handles are never given twice.
    pub(crate) fn reset(&mut self) {
        self.queues = Queues::default();
        self.modules.clear();
        self.functions.clear();
        self.blas.clear();
        self.host = HostRanges::default();
        self.memory.reset();
        self.fail_no_more();
        self.lost = None;
        self.hung = false;
        self.is_open = false;
    }

    /// How many things the process has on the card or for it.
    pub(crate) fn alive(&self) -> u64 {
        let queues = &self.queues;
        let handles = [
            queues.streams.len(),
            queues.events.len(),
            queues.graphs.len(),
            queues.execs.len(),
            self.modules.len(),
            self.blas.len(),
        ];
        let ranges = self.host.count(true) + self.host.count(false) + self.memory.reservations();
        self.memory.count() + ranges + handles.iter().sum::<usize>() as u64
    }

    /// Drops all orders.
    pub(crate) fn fail_no_more(&mut self) {
        self.failures.clear();
    }

    /// Counts a call and gives the code that it is to fail with.
    pub(crate) fn injected(&mut self, call: &str) -> Option<u32> {
        match self.calls.get_mut(call) {
            Some(count) => *count += 1,
            None => {
                self.calls.insert(call.to_owned(), 1);
            }
        }
        self.all_calls += 1;
        if let Some(file) = &self.calls_file {
            // A shorter line leaves the end of a longer one behind it.
            let line = format!("{} {call}\n", self.all_calls);
            let _ = file.write_all_at(line.as_bytes(), 0);
        }
        let mut code = None;
        self.failures.retain_mut(|failure| {
            if failure.call != call || failure.nth == 0 {
                return true;
            }
            failure.nth -= 1;
            if failure.nth == 0 {
                code = Some(failure.code);
            }
            failure.nth > 0
        });
        code
    }

    pub(crate) fn handle(&mut self) -> usize {
        self.next_handle += 0x10;
        self.next_handle
    }

    /// Notes a misuse and gives the code for it.
    pub(crate) fn misuse(&mut self, code: u32, message: String) -> u32 {
        self.violations.push(message);
        code
    }
}

/// What a list says of a card.
fn of_card<T>(list: &[T], card: i32) -> Option<&T> {
    list.get(card.max(0) as usize).or(list.last())
}

/// The runtime, locked.
pub(crate) fn state() -> MutexGuard<'static, State> {
    static STATE: OnceLock<Mutex<State>> = OnceLock::new();
    STATE
        .get_or_init(|| Mutex::new(State::from_env()))
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
}

/// Runs a call: counted, failed if so ordered, refused once the device is lost.
pub(crate) fn call(name: &str, run: impl FnOnce(&mut State) -> u32) -> u32 {
    let mut state = state();
    let injected = state.injected(name);
    if injected == Some(HANG) {
        // The caller alone; a driver's other calls may go on.
        drop(state);
        loop {
            std::thread::park();
        }
    }
    match (state.lost, injected) {
        (Some(lost), _) => {
            if GIVING_BACK.contains(&name) {
                run(&mut state);
            }
            lost
        }
        (None, Some(code)) => {
            if FATAL.contains(&code) {
                state.lost = Some(code);
            }
            if name == "hipStreamEndCapture" {
                // However it ends, it ends.
                state.queues.capturing().map(|stream| stream.capture.take());
            } else if let Some(stream) = state.queues.capturing() {
                stream.capture_broken = true;
            }
            code
        }
        (None, None) => {
            let code = run(&mut state);
            // Work that failed during the call shows in its result.
            state.lost.unwrap_or(code)
        }
    }
}
