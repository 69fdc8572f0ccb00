//! What keeps the engine within its bounds: the budget, memory that others want, sleep of the
//! machine, a device or a file that hangs.

pub(crate) mod budget;
pub(crate) mod file_watch;
pub(crate) mod host_pressure;
pub(crate) mod keep_free;
pub(crate) mod others_watch;
pub(crate) mod power_log;
pub(crate) mod release;
pub(crate) mod sleep;
pub(crate) mod watchdog;
pub(crate) mod yield_to;

use std::time::Duration;

use rocmforge_device::Loss;

use host_pressure::PressureWatch;
use keep_free::KeepFree;
use others_watch::OthersWatch;
use power_log::PowerLog;
use release::MemoryRelease;
use sleep::SleepClock;
use watchdog::DeviceLoss;
use yield_to::YieldGuard;

/// The guards of an engine.
pub(crate) struct Guards {
    /// Guard of memory that is kept free for other programs.
    pub(crate) keep_free: KeepFree,
    /// Gives the device's memory back while there are no requests.
    pub(crate) release: MemoryRelease,
    /// Gives it up while another process uses the device, where that is asked for.
    pub(crate) others: Option<(OthersWatch, YieldGuard)>,
    /// What the card says of its power, for the log.
    pub(crate) power: PowerLog,
    /// What goes back of the host's memory, where it may have any.
    pub(crate) host_pressure: Option<PressureWatch>,
    /// Sees the machine sleep.
    pub(crate) sleep: SleepClock,
    /// The budget asked for, while running work needs more than it.
    pub(crate) budget_wanted: Option<u64>,
    /// What a budget in percent is of, where that is less than all memory.
    pub(crate) budget_note: Option<String>,
    /// Why other processes cannot be watched, if `yield_to` is set.
    pub(crate) yield_note: Option<String>,
    /// Why the device is lost, if the engine thread detected it.
    pub(crate) lost: Option<Loss>,
    /// Channel that reports to all clients that the engine ends by itself.
    pub(crate) loss: DeviceLoss,
}

impl Guards {
    /// Whether memory is given up for another process now.
    pub(crate) fn yields(&self) -> bool {
        self.others
            .as_ref()
            .is_some_and(|(_, guard)| guard.before().is_some())
    }

    /// How often memory is looked at that others may want while there is no work and the host holds
    /// so many bytes; `None` is not at all.
    pub(crate) fn interval(&self, host_bytes: u64) -> Option<Duration> {
        let of_device = self.keep_free.watches().then_some(keep_free::WHILE_IDLE);
        // Nothing is looked at while it rests.
        let rests = self.release.before().is_some() && !self.yields();
        let of_others = self.others.as_ref().filter(|_| !rests);
        let of_others = of_others.map(|_| others_watch::EVERY);
        let of_host = self.host_pressure.as_ref();
        let of_host = of_host.and_then(|watch| watch.interval(host_bytes));
        of_device.into_iter().chain(of_others).chain(of_host).min()
    }
}
