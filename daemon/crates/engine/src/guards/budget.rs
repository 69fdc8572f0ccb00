//! Converts a budget to bytes, and allocates the device's memory for it at the start.
//!
//! A percentage refers to the device's memory. If that is the machine's memory (an APU's, except
//! what its firmware set apart), all programs live in it, and taking too much makes the system swap
//! instead of failing: there the percentage refers to what is free for the device at that moment,
//! less what the system keeps.

use std::time::Duration;

use rocmforge_device::{Device, Steps};

use crate::api::Budget;
use crate::api::error::{Error, no_device};
use crate::api::refusal::Refusal;

/// Smallest budget in bytes: below it no model's largest segment fits.
pub const BUDGET_MIN: u64 = 64 << 10;

/// The system keeps at least one part in this many of the machine's memory.
const SYSTEM_PART: u64 = 16;
const SYSTEM_BYTES_MAX: u64 = 4 << 30;
/// A percentage refers to at least one part in this many of the device's memory, however little is
/// free: models stay usable, and the system can drop page cache.
const LEAST_PART: u64 = 8;

/// A requested budget in bytes, and how it was derived.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct WantedBudget {
    pub(crate) bytes: u64,
    /// Number of bytes that the budget would be larger by if no other program held memory.
    pub(crate) withheld: u64,
    /// Bytes of free memory that the budget leaves, if it is a percentage of free memory.
    pub(crate) left: u64,
    /// Text that says what the percentage refers to, if that is not all of the device's memory.
    pub(crate) note: Option<String>,
}

/// The part of `free` bytes of a machine's memory of `memory` bytes that may be taken beside what
/// the system keeps.
pub(crate) fn beside_system(free: u64, memory: u64) -> u64 {
    let system = (memory / SYSTEM_PART).min(SYSTEM_BYTES_MAX);
    free.min(memory).saturating_sub(system)
}

impl WantedBudget {
    /// Converts a budget to bytes on a device of whose memory the daemon holds `held` bytes and
    /// leaves `kept` bytes to other programs.
    ///
    /// # Errors
    /// As [`budget_bytes`].
    pub(crate) fn of(
        budget: Budget,
        device: &dyn Device,
        held: u64,
        kept: u64,
    ) -> Result<Self, Error> {
        let info = device.info();
        let free = match (budget, info.machine_memory) {
            (Budget::Percent(_), true) => device.free_bytes(),
            _ => None,
        };
        let free = match info.counts_page_cache {
            true => free.map(|free| free.max(rocmforge_device::host_available_bytes())),
            false => free,
        };
        Self::with_free(
            budget,
            info.memory_bytes,
            free.map(|free| free + held),
            kept,
        )
    }

    /// The budget if `free` bytes of the machine's memory are available; `free` is `None` for a
    /// device with its own memory.
    fn with_free(budget: Budget, memory: u64, free: Option<u64>, kept: u64) -> Result<Self, Error> {
        let whole = budget_bytes(budget, memory)?;
        let (Budget::Percent(percent), Some(free)) = (budget, free) else {
            return Ok(Self {
                bytes: whole,
                withheld: 0,
                left: 0,
                note: None,
            });
        };
        let system = kept.max((memory / SYSTEM_PART).min(SYSTEM_BYTES_MAX));
        let left = free.min(memory).saturating_sub(system);
        let of = left.max(memory / LEAST_PART);
        let bytes = budget_bytes(budget, of)?;
        let mib = |bytes: u64| bytes >> 20;
        Ok(Self {
            bytes,
            withheld: whole - bytes,
            left: free.min(memory).saturating_sub(bytes),
            note: Some(format!(
                "budget: {percent} % of {} MiB, since the memory is shared with the machine: {} MiB were free for the \
                 device when that was asked for, {} MiB of them are the system's (a budget in bytes is taken as it is)",
                mib(of),
                mib(free.min(memory)),
                mib(system),
            )),
        })
    }
}

/// Largest share of the machine's memory, in percent, that the CPU takes if it computes in place of
/// a GPU.
const STEAD_PERCENT_MAX: f64 = 50.0;

/// The budget to use. If the CPU computes in place of a GPU, a budget in percent was meant for the
/// GPU's memory and is limited to half of the machine's.
pub(crate) fn meant(budget: Budget, in_stead: bool) -> Budget {
    match budget {
        Budget::Percent(percent) if in_stead => Budget::Percent(percent.min(STEAD_PERCENT_MAX)),
        other => other,
    }
}

/// Allocates memory for a budget of `wanted` bytes; if another process holds a part of it, what is
/// available, unless that is next to nothing. Returns the allocated bytes.
///
/// # Errors
/// [`Error::NoDevice`], [`Error::DeviceLost`].
pub(crate) fn take(device: &mut dyn Device, wanted: u64, steps: &Steps) -> Result<u64, Error> {
    let mut budget = wanted;
    begin_taking(steps, budget);
    while let Err(error) = device.set_capacity(budget) {
        let less = (budget / 8 * 7) & !(rocmforge_device::ALIGNMENT - 1);
        let refused = matches!(error, rocmforge_device::Error::Memory { .. });
        if !refused || less < BUDGET_MIN.max(1 << 20) {
            return Err(no_device(&error));
        }
        tracing::debug!(%error, "the device has no room for a budget of {budget} bytes; trying {less}");
        budget = less;
        begin_taking(steps, budget);
    }
    if budget < wanted {
        tracing::warn!(
            budget_bytes = budget,
            wanted_bytes = wanted,
            free_bytes = device.free_bytes(),
            "the device has no room for a budget of {wanted} bytes, since other processes hold its memory: the budget \
             is {budget} bytes, and grows as they free memory"
        );
    }
    Ok(budget)
}

/// Announces a step that allocates `bytes`, with a longer limit than other steps: one second more
/// for each GiB, since the system may have to find and clear the memory.
fn begin_taking(steps: &Steps, bytes: u64) {
    steps.begin_longer(
        format!("taking {bytes} bytes of the device's memory"),
        Duration::from_secs(bytes >> 30),
    );
}

/// Converts a budget to bytes, and checks it against the device's memory.
fn budget_bytes(budget: Budget, memory: u64) -> Result<u64, Error> {
    let bytes = match budget {
        Budget::Bytes(0) => {
            return Err(Error::InvalidArgument {
                field: "budget",
                message: "0 bytes hold nothing".to_owned(),
            });
        }
        Budget::Bytes(bytes) => bytes,
        Budget::Percent(percent) if percent > 0.0 && percent <= 100.0 => {
            (memory as f64 * percent / 100.0) as u64
        }
        Budget::Percent(percent) => {
            return Err(Error::InvalidArgument {
                field: "budget",
                message: format!("{percent} % is out of range: above 0 and at most 100"),
            });
        }
    };
    let asked = bytes;
    let bytes = asked - asked % rocmforge_device::ALIGNMENT;
    if bytes < BUDGET_MIN || bytes > memory {
        return Err(Refusal::BudgetOutOfRange {
            asked,
            min: BUDGET_MIN,
            max: memory,
        }
        .into());
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn wanted(budget: Budget, gib: u64, free: Option<u64>, kept: u64) -> WantedBudget {
        WantedBudget::with_free(budget, gib * GIB, free.map(|free| free * GIB), kept * GIB).unwrap()
    }

    /// Once 80 % of an APU's memory was that of all memory of the machine, whatever was left of it.
    #[test]
    fn a_share_of_the_machines_memory_is_of_what_is_free_less_what_the_system_keeps() {
        let share = Budget::Percent(80.0);
        let own = wanted(share, 100, None, 0);
        assert_eq!((own.bytes, own.withheld, own.note), (80 * GIB, 0, None));
        // 54 free, of which 4 are the system's.
        let shared = wanted(share, 100, Some(54), 0);
        assert_eq!((shared.bytes, shared.withheld), (40 * GIB, 40 * GIB));
        let note = shared.note.unwrap();
        assert!(
            note.contains("80 % of 51200 MiB") && note.contains("55296 MiB"),
            "{note}"
        );
        // What is to be free for others counts where that is more; a 16th where 4 GiB are more.
        assert_eq!(wanted(share, 100, Some(60), 10).bytes, 40 * GIB);
        assert_eq!(wanted(share, 32, Some(32), 0).bytes, 24 * GIB);
        // More than there is cannot be free.
        assert_eq!(wanted(share, 64, Some(100), 14).bytes, 40 * GIB);
        // An eighth stays the base.
        let least = wanted(share, 100, Some(1), 0);
        assert_eq!((least.bytes, least.withheld), (10 * GIB, 70 * GIB));
        let bytes = wanted(Budget::Bytes(90 * GIB), 100, None, 0);
        assert_eq!((bytes.bytes, bytes.note), (90 * GIB, None));
    }

    /// Once a daemon that started before its GPU's driver took 80 % of the machine's memory.
    #[test]
    fn the_cpu_leaves_half_of_the_machine_where_it_computes_in_a_gpus_stead() {
        for (budget, stead) in [
            (Budget::Percent(80.0), Budget::Percent(50.0)),
            (Budget::Percent(20.0), Budget::Percent(20.0)),
            (Budget::Bytes(9 * GIB), Budget::Bytes(9 * GIB)),
        ] {
            assert_eq!(meant(budget, true), stead);
            assert_eq!(meant(budget, false), budget);
        }
    }

    #[test]
    fn a_budget_is_above_nothing_and_at_most_the_memory() {
        for budget in [
            Budget::Percent(0.0),
            Budget::Percent(100.5),
            Budget::Bytes(0),
            Budget::Bytes(9 * GIB),
        ] {
            let refused = WantedBudget::with_free(budget, 8 * GIB, Some(4 * GIB), 0);
            assert!(refused.is_err(), "{budget:?}");
        }
    }
}
