//! What runtimes on real cards were seen to do and should not: each can be switched on, with a
//! number.

/// A way to misbehave. The number that goes with each is 0 for none of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Misbehaviour {
    /// A registration of host memory takes so many milliseconds.
    SlowRegistration,
    /// The granularity is told as so many bytes, and what is mapped at or in other multiples than
    /// of 2 MiB cannot be used.
    FalseGranularity,
    /// Memory that was mapped comes back only with the addresses that it was mapped to.
    KeepsMemory,
    /// Access to mapped memory is always refused.
    RefusesAccess,
    /// So many bytes are told as free, whatever is held.
    FalseFreeBytes,
    /// A registration of host memory takes so many milliseconds for each MiB.
    CrawlingRegistration,
    /// A copy from pinned memory to the card takes so many milliseconds for each MiB.
    SlowPinnedCopies,
    /// The same of copies from registered memory.
    SlowRegisteredCopies,
    /// Copies from registered memory bring every so many bytes another one.
    FalseRegisteredBytes,
    /// A product by rocBLAS ends the process, as where it has no kernels for a chip.
    AbortsProducts,
    /// What a kernel writes over the border of two mappings is lost behind the border; what copies
    /// and fills write is not.
    LosesKernelWrites,
    /// What a kernel reads over the border of two mappings is zeros behind the border.
    LosesKernelReads,
    /// What a kernel reads of the host's memory takes so many milliseconds for each MiB.
    SlowHostReads,
    /// What a kernel reads of the host's memory has every so many bytes another one.
    FalseHostReads,
    /// A reset of the device does not return before this is switched off.
    HoldsReset,
}

impl Misbehaviour {
    /// All of them.
    pub const ALL: [Misbehaviour; 15] = [
        Misbehaviour::SlowRegistration,
        Misbehaviour::FalseGranularity,
        Misbehaviour::KeepsMemory,
        Misbehaviour::RefusesAccess,
        Misbehaviour::FalseFreeBytes,
        Misbehaviour::CrawlingRegistration,
        Misbehaviour::SlowPinnedCopies,
        Misbehaviour::SlowRegisteredCopies,
        Misbehaviour::FalseRegisteredBytes,
        Misbehaviour::AbortsProducts,
        Misbehaviour::LosesKernelWrites,
        Misbehaviour::LosesKernelReads,
        Misbehaviour::SlowHostReads,
        Misbehaviour::FalseHostReads,
        Misbehaviour::HoldsReset,
    ];

    /// Its name in FAKE_HIP_MISBEHAVE.
    pub fn name(self) -> &'static str {
        match self {
            Misbehaviour::SlowRegistration => "slow-registration",
            Misbehaviour::FalseGranularity => "false-granularity",
            Misbehaviour::KeepsMemory => "keeps-memory",
            Misbehaviour::RefusesAccess => "refuses-access",
            Misbehaviour::FalseFreeBytes => "false-free-bytes",
            Misbehaviour::CrawlingRegistration => "crawling-registration",
            Misbehaviour::SlowPinnedCopies => "slow-pinned-copies",
            Misbehaviour::SlowRegisteredCopies => "slow-registered-copies",
            Misbehaviour::FalseRegisteredBytes => "false-registered-bytes",
            Misbehaviour::AbortsProducts => "aborts-products",
            Misbehaviour::LosesKernelWrites => "loses-kernel-writes",
            Misbehaviour::LosesKernelReads => "loses-kernel-reads",
            Misbehaviour::SlowHostReads => "slow-host-reads",
            Misbehaviour::FalseHostReads => "false-host-reads",
            Misbehaviour::HoldsReset => "holds-reset",
        }
    }
}

/// Which are on, and how much.
#[derive(Debug, Default)]
pub(crate) struct Misbehaviours([u64; Misbehaviour::ALL.len()]);

impl Misbehaviours {
    /// As FAKE_HIP_MISBEHAVE says; what it does not know is left out.
    pub(crate) fn from_text(text: &str) -> Misbehaviours {
        let mut on = Misbehaviours::default();
        for order in text.split(',') {
            let (name, number) = order.split_once(':').unwrap_or((order, "1"));
            let which = Misbehaviour::ALL.into_iter().find(|m| m.name() == name);
            if let (Some(which), Ok(number)) = (which, number.parse()) {
                on.set(which as u32, number);
            }
        }
        on
    }

    pub(crate) fn set(&mut self, which: u32, number: u64) {
        if let Some(value) = self.0.get_mut(which as usize) {
            *value = number;
        }
    }

    /// The number of one that is on.
    pub(crate) fn of(&self, which: Misbehaviour) -> Option<u64> {
        let number = self.0[which as usize];
        (number > 0).then_some(number)
    }
}

/// Takes `ms_per_mib` milliseconds for each MiB of `bytes`.
pub(crate) fn take_time(ms_per_mib: u64, bytes: usize) {
    if ms_per_mib == 0 {
        return;
    }
    let us = ms_per_mib * 1000 * bytes as u64 / (1 << 20);
    std::thread::sleep(std::time::Duration::from_micros(us));
}
