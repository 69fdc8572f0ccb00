//! Guards that keep the engine within its bounds: the budget, memory that other processes want,
//! sleep of the machine, a device or a file that hangs.

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

/// The engine's guards: of free memory, idle release, other processes, host memory, sleep and loss
/// of the device.
pub(crate) struct Guards {
    /// Guard of memory that is kept free for other programs.
    pub(crate) keep_free: KeepFree,
    /// Gives the device's memory back while there are no requests.
    pub(crate) release: MemoryRelease,
    /// Gives the device's memory up while another process uses the device, if `yield_to` is set.
    pub(crate) others: Option<(OthersWatch, YieldGuard)>,
    /// Logs the power that the GPU draws.
    pub(crate) power: PowerLog,
    /// Gives host memory back when the machine runs short of it; `None` if the engine may not give
    /// any back.
    pub(crate) host_pressure: Option<PressureWatch>,
    /// Detects that the machine slept (suspend).
    pub(crate) sleep: SleepClock,
    /// The budget asked for, in bytes, while running work still needs more than that; else `None`.
    pub(crate) budget_wanted: Option<u64>,
    /// Explains what a budget in percent refers to, if that is less than all memory of the device.
    pub(crate) budget_note: Option<String>,
    /// Why other processes cannot be watched, if `yield_to` is set.
    pub(crate) yield_note: Option<String>,
    /// Why the device is lost, once the engine thread has detected it.
    pub(crate) lost: Option<Loss>,
    /// Channel that reports to all holders of an [`crate::EngineHandle`] that the engine ended
    /// because its device is lost.
    pub(crate) loss: DeviceLoss,
}

impl Guards {
    /// Whether the device's memory is given up for another process now.
    pub(crate) fn yields(&self) -> bool {
        self.others
            .as_ref()
            .is_some_and(|(_, guard)| guard.before().is_some())
    }

    /// How often the guards check free memory while the engine has no work and holds `host_bytes`
    /// of host memory; `None` if nothing has to be checked.
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
