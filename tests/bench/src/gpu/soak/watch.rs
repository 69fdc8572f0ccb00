//! The promises of the budget, looked at ten times a second.
//!
//! The ledger's sums are asserted in the cache at every step; here they are read as clients see
//! them, and held against two other counts: the bytes that the engine has allocated, as it
//! publishes them, and the driver's own, which is what this card's memory has in use beyond what it
//! had before, less what the driver takes for modules, streams and the vendor's library, which is
//! taken from a moment when all of them had been used.

use std::time::{Duration, Instant};

use anyhow::Result;
use rocmforge_engine::EngineHandle;
use rocmforge_engine::api::{CacheStatus, Snapshot};

use crate::check::Check;
use crate::gpu::card::Card;

/// Between two looks.
const PERIOD: Duration = Duration::from_millis(100);

/// Bytes by which the driver's count may be above the budget: its own pages of
/// what it allocates in passing.
const SLACK: u64 = 64 << 20;

/// A change of the budget is published within this time, from its first chunk of memory on.
const PUBLISHED_MAX: Duration = Duration::from_secs(3);

/// Between two looks for it.
const PUBLISHED_LOOK: Duration = Duration::from_millis(5);

/// Looks in a row at which a count may be above it where the arena is one allocation: a change of
/// the budget holds both for a moment. Where memory is mapped, none may.
const LOOKS_ABOVE_MAX: u32 = 3;

/// Looks in a row that may be above the budget, and the bytes that a count may be
/// above without being so, for an arena whose memory is rounded up to so many bytes (0
/// where it is one allocation).
fn allowance(granularity: u64, slack: u64) -> (u32, u64) {
    match granularity {
        0 => (LOOKS_ABOVE_MAX, slack),
        _ => (0, slack + granularity - 1),
    }
}

/// A count beside the ledger.
#[derive(Debug, Default)]
struct Count {
    most: u64,
    /// Most bytes above the budget of the moment.
    above_most: u64,
    looks_above: u32,
    looks_above_most: u32,
}

/// The driver's count.
struct DriverCount<'a> {
    card: &'a Card,
    /// Before the engine started.
    before: u64,
    /// What there is beside the arena.
    beside: u64,
    count: Count,
}

/// What was seen.
pub(super) struct Watch<'a> {
    driver: Option<DriverCount<'a>>,
    allocated: Count,
    looks: u64,
    used_most: u64,
    share_most: f64,
    failures: Vec<String>,
}

impl<'a> Watch<'a> {
    /// Before the engine starts.
    ///
    /// # Errors
    /// The driver does not tell.
    pub(super) fn new(card: Option<&'a Card>) -> Result<Self> {
        let count = |card: &'a Card| -> Result<DriverCount<'a>> {
            Ok(DriverCount {
                card,
                before: card.used_bytes()?,
                beside: 0,
                count: Count::default(),
            })
        };
        Ok(Self {
            driver: card.map(count).transpose()?,
            allocated: Count::default(),
            looks: 0,
            used_most: 0,
            share_most: 0.0,
            failures: Vec::new(),
        })
    }

    /// After everything has been used once, with an arena of `budget` bytes.
    ///
    /// # Errors
    /// The driver does not tell.
    pub(super) fn settled(&mut self, budget: u64) -> Result<()> {
        if let Some(driver) = &mut self.driver {
            let used = driver.card.used_bytes()?.saturating_sub(driver.before);
            driver.beside = used.saturating_sub(budget);
        }
        Ok(())
    }

    /// Watches until the time is over or the device is lost.
    pub(super) fn watch(&mut self, engine: &EngineHandle, begin: Instant, lasts: Duration) {
        let mut told = 0;
        while begin.elapsed() < lasts {
            let snapshot = engine.snapshot();
            self.look(engine, &snapshot);
            if snapshot.device_lost.is_some() {
                return;
            }
            let minutes = begin.elapsed().as_secs() / 60;
            if minutes > told {
                told = minutes;
                eprintln!(
                    "{minutes} min: {} evictions, {} failures",
                    snapshot.cache.evictions,
                    self.failures.len()
                );
            }
            std::thread::sleep(PERIOD);
        }
    }

    fn look(&mut self, engine: &EngineHandle, snapshot: &Snapshot) {
        self.looks += 1;
        let cache = &snapshot.cache;
        let models: Vec<CacheStatus> = snapshot.models.iter().map(|m| m.cache).collect();
        self.failures.extend(broken(cache, &models));
        let used = cache.resident_bytes + cache.in_flight_bytes;
        self.used_most = self.used_most.max(used);
        let share = used as f64 / cache.budget_bytes as f64;
        self.share_most = self.share_most.max(share);
        let granularity = snapshot.device.memory.map_or(0, |m| m.granularity_bytes);
        if let Some(memory) = snapshot.device.memory {
            let above = self.allocated.look(
                memory.allocated_bytes,
                cache.budget_bytes,
                allowance(granularity, 0),
            );
            self.failures.extend(
                above.map(|above| format!("allocated bytes, {above}: {memory:?}, {cache:?}")),
            );
        }
        if let Some(driver) = &mut self.driver {
            match driver.card.used_bytes() {
                Ok(now) => {
                    // All of it beside the arena is allowed for, so it is taken off.
                    let used = now.saturating_sub(driver.before + driver.beside);
                    let allowed = allowance(granularity, SLACK);
                    let budget = budget_of(engine, cache.budget_bytes, used, allowed.1);
                    let above = driver.count.look(used, budget, allowed);
                    self.failures.extend(
                        above.map(|above| format!("the driver's count, {above}: {cache:?}")),
                    );
                }
                Err(error) => self.failures.push(format!("the driver's count: {error:#}")),
            }
        }
    }

    pub(super) fn report(&self, check: &mut Check) {
        for failure in &self.failures {
            check.fail(failure.clone());
        }
        check.note(format!(
            "{} looks; the ledger held at most {:.2} GB, at most {:.2} % of the budget of the moment",
            self.looks,
            self.used_most as f64 / 1e9,
            self.share_most * 100.0
        ));
        if let Some(driver) = &self.driver {
            check.note(format!(
                "the engine had allocated {}",
                self.allocated.told()
            ));
            check.note(format!(
                "the driver counted, beside {:.2} GB of its own, {}",
                driver.beside as f64 / 1e9,
                driver.count.told()
            ));
        }
    }
}

impl Count {
    /// What is wrong with a count beside a budget, if anything.
    fn look(&mut self, bytes: u64, budget: u64, (looks_max, slack): (u32, u64)) -> Option<String> {
        self.most = self.most.max(bytes);
        let above = bytes.saturating_sub(budget);
        self.above_most = self.above_most.max(above);
        if above <= slack {
            self.looks_above = 0;
            return None;
        }
        self.looks_above += 1;
        self.looks_above_most = self.looks_above_most.max(self.looks_above);
        (self.looks_above == looks_max + 1).then(|| {
            format!("{bytes} bytes, above a budget of {budget} for more than {looks_max} looks")
        })
    }

    fn told(&self) -> String {
        let most = format!("at most {:.2} GB", self.most as f64 / 1e9);
        match (self.above_most, self.looks_above_most) {
            (0, _) => format!("{most}, never more than the budget"),
            (above, looks) => format!(
                "{most}, at most {:.3} GB above the budget of the moment, for at most {looks} looks in a row",
                above as f64 / 1e9
            ),
        }
    }
}

/// The budget that a count of the driver belongs to: a larger one is published after its memory
/// was taken, so if the count is above the one that was published before it, the one that is
/// published within a moment.
fn budget_of(engine: &EngineHandle, before: u64, used: u64, slack: u64) -> u64 {
    let begin = Instant::now();
    let mut budget = before;
    while used > budget + slack && begin.elapsed() < PUBLISHED_MAX {
        std::thread::sleep(PUBLISHED_LOOK);
        budget = budget.max(engine.snapshot().cache.budget_bytes);
    }
    budget
}

/// What the published counts say against the promises: those of the whole and of the models.
fn broken(cache: &CacheStatus, models: &[CacheStatus]) -> Vec<String> {
    let mut broken = Vec::new();
    let mut must = |holds: bool, what: &str| {
        if !holds {
            broken.push(format!("{what}: {cache:?}"));
        }
    };
    must(
        cache.resident_bytes + cache.in_flight_bytes <= cache.budget_bytes,
        "resident and in flight are above the budget",
    );
    must(
        cache.kv_bytes + cache.scratch_bytes <= cache.resident_bytes,
        "KV and scratch are above what is resident",
    );
    must(
        cache.pinned_bytes <= cache.resident_bytes,
        "more is pinned than resident",
    );
    let sum = |of: fn(&CacheStatus) -> u64| models.iter().map(of).sum::<u64>();
    must(
        sum(|cache| cache.resident_bytes) <= cache.resident_bytes,
        "the models hold more than the whole",
    );
    must(
        sum(|cache| cache.in_flight_bytes) <= cache.in_flight_bytes,
        "more is on its way to the models than to the whole",
    );
    broken
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_may_be_above_the_budget_for_a_moment_only() {
        let mut count = Count::default();
        let allowed = allowance(0, 10);
        for _ in 0..LOOKS_ABOVE_MAX {
            assert_eq!(count.look(111, 100, allowed), None);
        }
        assert!(count.look(111, 100, allowed).is_some());
        assert_eq!(count.look(111, 100, allowed), None, "told once");
        assert_eq!(count.look(110, 100, allowed), None);
        assert_eq!((count.looks_above, count.above_most), (0, 11));
        // Where memory is mapped, not for a moment; only rounding is allowed for.
        let allowed = allowance(8, 10);
        assert_eq!(count.look(117, 100, allowed), None);
        assert!(count.look(118, 100, allowed).is_some());
    }

    #[test]
    fn a_broken_promise_is_seen() {
        let sound = CacheStatus {
            budget_bytes: 100,
            resident_bytes: 90,
            in_flight_bytes: 10,
            kv_bytes: 20,
            scratch_bytes: 30,
            ..CacheStatus::default()
        };
        assert!(broken(&sound, &[sound]).is_empty());
        for (wrong, part) in [
            (
                CacheStatus {
                    in_flight_bytes: 11,
                    ..sound
                },
                "above the budget",
            ),
            (
                CacheStatus {
                    kv_bytes: 61,
                    ..sound
                },
                "KV and scratch",
            ),
            (
                CacheStatus {
                    pinned_bytes: 91,
                    ..sound
                },
                "pinned",
            ),
        ] {
            let found = broken(&wrong, &[]);
            assert!(found.len() == 1 && found[0].contains(part), "{found:?}");
        }
    }
}
