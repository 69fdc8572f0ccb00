//! Queued work: streams, events, graphs, and the running of what is queued.

use std::collections::{HashMap, VecDeque};

use crate::kernels::{Kernel, Launch};
use crate::memory::{Fault, Stops};
use crate::misbehaviour::{Misbehaviour, take_time};
use crate::pinned::HostReads;
use crate::rocblas::Product;
use crate::state::State;
use crate::when_run;

/// One piece of work.
#[derive(Clone)]
pub(crate) enum Work {
    /// From memory that is read when the copy happens.
    H2d {
        to: u64,
        from: usize,
        bytes: usize,
    },
    /// From pageable memory, read when it was queued.
    Staged {
        to: u64,
        from: Vec<u8>,
    },
    D2h {
        to: usize,
        from: u64,
        bytes: usize,
    },
    D2d {
        to: u64,
        from: u64,
        bytes: usize,
    },
    Memset {
        to: u64,
        value: u8,
        bytes: usize,
    },
    Kernel {
        kernel: &'static Kernel,
        launch: Launch,
    },
    Product(Product),
    /// Nothing happens before this place of another stream has been passed.
    Wait {
        stream: usize,
        place: u64,
    },
    /// An event's time is taken here.
    Mark {
        event: usize,
    },
}

impl Work {
    /// Whether it names this host range.
    pub(crate) fn names_host(&self, at: usize, len: usize) -> bool {
        let (start, bytes) = match self {
            Work::H2d { from, bytes, .. } => (*from, *bytes),
            Work::D2h { to, bytes, .. } => (*to, *bytes),
            _ => return false,
        };
        start < at + len && at < start + bytes
    }
}

/// A stream: work that is queued, and places passed.
#[derive(Default)]
pub(crate) struct Stream {
    pub(crate) queue: VecDeque<Work>,
    /// Works queued since the beginning.
    pub(crate) queued: u64,
    /// Works done since the beginning.
    pub(crate) done: u64,
    /// What is recorded in place of being queued.
    pub(crate) capture: Option<Vec<Work>>,
    /// A call that is not allowed came in between.
    pub(crate) capture_broken: bool,
    /// A capture of it was broken: ROCm's runtime takes nothing on such a stream any more.
    pub(crate) spoiled: bool,
}

/// An event.
#[derive(Default, Clone, Copy)]
pub(crate) struct Event {
    /// Stream and place of the last record.
    pub(crate) place: Option<(usize, u64)>,
    /// When the last mark was passed, on the clock of works done.
    pub(crate) time: Option<u64>,
    pub(crate) timing: bool,
}

/// Streams, events and graphs by handle.
#[derive(Default)]
pub(crate) struct Queues {
    pub(crate) streams: HashMap<usize, Stream>,
    pub(crate) events: HashMap<usize, Event>,
    pub(crate) graphs: HashMap<usize, Vec<Work>>,
    pub(crate) execs: HashMap<usize, Vec<Work>>,
    /// Works done on all streams.
    pub(crate) clock: u64,
}

impl Queues {
    /// Queues work, or records it; gives the place after it.
    pub(crate) fn push(&mut self, stream: usize, work: Work) -> u64 {
        let stream = self.streams.entry(stream).or_default();
        if let Some(capture) = &mut stream.capture {
            capture.push(work);
        } else {
            stream.queue.push_back(work);
            stream.queued += 1;
        }
        stream.queued
    }

    /// Whether a place has been passed; that of a destroyed stream has.
    pub(crate) fn passed(&self, (stream, place): (usize, u64)) -> bool {
        self.streams.get(&stream).is_none_or(|s| s.done >= place)
    }

    pub(crate) fn capturing(&mut self) -> Option<&mut Stream> {
        self.streams.values_mut().find(|s| s.capture.is_some())
    }
}

impl State {
    /// Does one piece of work on the way to a place. False if it has been passed.
    pub(crate) fn step(&mut self, (stream, place): (usize, u64)) -> bool {
        if self.queues.passed((stream, place)) {
            return false;
        }
        if self.hung {
            return true;
        }
        let front = self.queues.streams.get(&stream);
        if let Some(&Work::Wait {
            stream: on,
            place: before,
        }) = front.and_then(|s| s.queue.front())
            && !self.queues.passed((on, before))
        {
            return self.step((on, before));
        }
        let Some(front) = self.queues.streams.get_mut(&stream) else {
            return false;
        };
        let Some(work) = front.queue.pop_front() else {
            return false;
        };
        front.done += 1;
        self.queues.clock += 1;
        self.run(work);
        if self.hung
            && let Some(front) = self.queues.streams.get_mut(&stream)
        {
            front.done -= 1;
        }
        true
    }

    /// Does all work before a place.
    pub(crate) fn finish(&mut self, place: (usize, u64)) {
        while self.step(place) {
            // Whoever waits for work that never ends never comes back, and
            // holds the runtime's lock.
            if self.hung {
                loop {
                    std::thread::park();
                }
            }
        }
    }

    /// Does all work of a stream.
    pub(crate) fn finish_stream(&mut self, stream: usize) {
        let queued = self.queues.streams.get(&stream).map_or(0, |s| s.queued);
        self.finish((stream, queued));
    }

    /// Does all work.
    pub(crate) fn finish_all(&mut self) {
        let streams: Vec<usize> = self.queues.streams.keys().copied().collect();
        for stream in streams {
            self.finish_stream(stream);
        }
    }

    fn run(&mut self, work: Work) {
        // A lost device does nothing any more; the queue empties.
        if self.lost.is_some() {
            return;
        }
        let pseudo = match &work {
            Work::H2d { .. } | Work::Staged { .. } => Some(when_run::H2D),
            Work::D2h { .. } => Some(when_run::D2H),
            Work::D2d { .. } => Some(when_run::D2D),
            Work::Memset { .. } => Some(when_run::MEMSET),
            Work::Kernel { .. } | Work::Product(_) => Some(when_run::KERNEL),
            Work::Wait { .. } | Work::Mark { .. } => None,
        };
        if let Some(code) = pseudo.and_then(|call| self.injected(call)) {
            if code == crate::HANG {
                self.hung = true;
                return;
            }
            self.lost = Some(code);
            return;
        }
        if let Work::Kernel { kernel, .. } = &work {
            *self.calls.entry(kernel.name.clone()).or_default() += 1;
        }
        if let Err(Fault(message)) = self.perform(work) {
            self.violations.push(message);
            self.lost = Some(crate::state::ILLEGAL_ADDRESS);
        }
    }

    fn perform(&mut self, work: Work) -> Result<(), Fault> {
        let memory = &mut self.memory;
        match work {
            Work::Staged { to, from } => memory.write(to, &from),
            Work::H2d { to, from, bytes } => {
                let is_ours = self.host.is_ours(from);
                // SAFETY: page-locked memory is readable until it is given back, and queued copies
                // that name it are done before that.
                let from = unsafe { std::slice::from_raw_parts(from as *const u8, bytes) };
                let slow = match is_ours {
                    true => Misbehaviour::SlowPinnedCopies,
                    false => Misbehaviour::SlowRegisteredCopies,
                };
                take_time(self.misbehaves.of(slow).unwrap_or(0), bytes);
                let wrong = self.misbehaves.of(Misbehaviour::FalseRegisteredBytes);
                match wrong.filter(|_| !is_ours) {
                    Some(every) => {
                        let mut brought = from.to_vec();
                        let some = brought.iter_mut().step_by(every as usize);
                        some.for_each(|byte| *byte ^= 1);
                        memory.write(to, &brought)
                    }
                    None => memory.write(to, from),
                }
            }
            Work::D2h { to, from, bytes } => {
                // Whole granules are kept somewhere else for a while, not looked at.
                let granule = crate::GRANULARITY;
                let kept = from.is_multiple_of(granule) && (bytes as u64).is_multiple_of(granule);
                let noted = memory.unwritten.len();
                let read = memory.read(from, bytes, "a copy to the host")?;
                if kept {
                    memory.unwritten.truncate(noted);
                }
                // SAFETY: page-locked memory, as above, or memory that the caller
                // waits for in this same call.
                unsafe { std::ptr::copy_nonoverlapping(read.as_ptr(), to as *mut u8, bytes) };
                Ok(())
            }
            Work::D2d { to, from, bytes } => memory.copy(to, from, bytes),
            Work::Memset { to, value, bytes } => memory.write(to, &vec![value; bytes]),
            Work::Kernel { kernel, launch } => {
                memory.stops = Stops {
                    writes: self
                        .misbehaves
                        .of(Misbehaviour::LosesKernelWrites)
                        .is_some(),
                    reads: self.misbehaves.of(Misbehaviour::LosesKernelReads).is_some(),
                };
                let number = |which| self.misbehaves.of(which).unwrap_or(0);
                memory.pinned.reads = HostReads {
                    ms_per_mib: number(Misbehaviour::SlowHostReads),
                    wrong_every: number(Misbehaviour::FalseHostReads),
                };
                let ran = kernel.run(memory, &launch);
                memory.stops = Stops::default();
                memory.pinned.reads = HostReads::default();
                ran.map_err(|Fault(message)| Fault(format!("{}: {message}", kernel.name)))
            }
            Work::Product(product) => product
                .run(memory)
                .map_err(|Fault(message)| Fault(format!("rocblas_gemm_ex: {message}"))),
            Work::Wait { .. } => Ok(()),
            Work::Mark { event } => {
                let now = self.queues.clock;
                if let Some(event) = self.queues.events.get_mut(&event) {
                    event.time = Some(now);
                }
                Ok(())
            }
        }
    }
}
