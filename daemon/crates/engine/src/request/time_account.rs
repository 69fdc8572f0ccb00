//! The time account of a request: at each instant it is in one state, so that the parts of its time
//! add up to the whole of it.
//!
//! ```text
//!   arrives --> waits (Standing) --its pass runs--> a slice (SliceUse)
//!                 ^                                    |
//!                 +---- the pass ends, or stops -------+
//! ```
//!
//! The engine reports to all requests what it did since the last report: a slice of a pass, or work
//! between two slices. Members of the pass count that as their own time, split by what the slice
//! waited for; the others by their standing. After a request's first waits nothing is allocated.

use std::time::{Duration, Instant};

use rocmforge_tensor_cache::ModelId;

use crate::api::times::{Part, PartTimes, TimesSlot, UploadsBefore, WAITED_FOR_MAX};

/// What a request that is in no pass waits for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Standing {
    /// The request is not admitted.
    #[default]
    Queued,
    /// The request is ready for a pass.
    Ready,
    /// The request was preempted and is not admitted again.
    Preempted,
    /// The client does not read the request's stream.
    ReaderFull,
    /// The request waits for weights or KV cache that are read from disk.
    FromDisk,
    /// The request waits for uploads of weights.
    Uploading,
    /// The request waits for another one that computes their common prefix.
    Follows,
    /// The device computes the request's pass ([`TimeAccount::computing`]).
    Computing,
}

/// A pass of the request that is queued on the device.
#[derive(Debug, Clone, Copy)]
struct Computing {
    part: Part,
    /// Work that had been queued on the device before: whose it is, and its estimated time.
    earlier: Option<(Occupant, Duration)>,
    /// Estimated device time of the pass.
    work: Duration,
}

/// Model of a pass, and the client with most of its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Occupant {
    pub(crate) model: ModelId,
    pub(crate) client: u64,
}

/// What the engine did for a while, from the view of requests that were not part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Meanwhile {
    /// The engine ran a slice of another pass.
    Slice(Occupant),
    /// The engine ran no slice, and may have waited for a model's weights.
    Between(Option<WaitsFor>),
}

/// Times that the engine waited for a model's weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WaitsFor {
    pub(crate) model: ModelId,
    /// Time of waits for uploads from memory.
    pub(crate) uploads: Duration,
    /// Time of waits for reads from disk.
    pub(crate) disk: Duration,
}

/// How a slice of a pass spent its time, for the requests in it. The rest of its time is the
/// device's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct SliceUse {
    pub(crate) disk: Duration,
    pub(crate) uploads: Duration,
    pub(crate) cpu: Duration,
    pub(crate) sampling: Duration,
    /// Time in which the device did earlier passes' work, and whose work that was.
    pub(crate) earlier: Option<(Occupant, Duration)>,
    /// Estimated device time of the slice's own work; zero if rates are unknown.
    pub(crate) work: Duration,
}

/// Bytes and time of uploads over the link during some time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct LinkTime {
    pub(crate) bytes: u64,
    pub(crate) took: Duration,
}

/// A model and client that a request waited for, and how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Behind {
    pub(crate) part: Part,
    pub(crate) whom: Occupant,
    pub(crate) took: Duration,
}

/// The account's sums when the request had its first token.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FirstToken {
    pub(crate) parts: PartTimes,
    /// Bytes of the request's model that had been uploaded since it was loaded.
    pub(crate) uploaded_bytes: u64,
    /// Bytes of weights that the CPU had computed with for the request.
    pub(crate) cpu_bytes: u64,
}

/// Sums over the slices of a pass so far.
#[derive(Debug, Clone, Copy, Default)]
struct InPass {
    /// Device time for prompt rows; the next field has it for tokens.
    prompt: Duration,
    decode: Duration,
    /// Time of waits for uploads and disk.
    waited: Duration,
    /// Estimated device time of the work alone; zero if rates are unknown.
    work: Duration,
}

/// The time account of a request.
#[derive(Debug)]
pub(crate) struct TimeAccount {
    begun: Instant,
    /// Time up to which the parts account for the request's time.
    since: Instant,
    parts: PartTimes,
    standing: Standing,
    /// Whether any row of the request was computed.
    computed: bool,
    behind: Vec<Behind>,
    link: LinkTime,
    /// Sums over the slices of the current pass.
    in_pass: InPass,
    /// The request's pass, if all of it was queued on the device and its results have not been
    /// read.
    computing: Option<Computing>,
    first_token: Option<FirstToken>,
    /// Number of passes since the first token in which the request decoded.
    decode_passes: u32,
    /// Largest number of requests that ran at once while the request was queued.
    pub(crate) running_most: u32,
    pub(crate) uploads_before: UploadsBefore,
    /// Where the request's times are put at its end, if the caller wants them.
    pub(crate) slot: Option<TimesSlot>,
}

impl TimeAccount {
    /// The time account of a request that arrives at `begun`.
    pub(crate) fn new(begun: Instant, slot: Option<TimesSlot>) -> Self {
        Self {
            begun,
            since: begun,
            parts: PartTimes::default(),
            standing: Standing::default(),
            computed: false,
            behind: Vec::new(),
            link: LinkTime::default(),
            in_pass: InPass::default(),
            computing: None,
            first_token: None,
            decode_passes: 0,
            running_most: 0,
            uploads_before: UploadsBefore::default(),
            slot,
        }
    }

    /// Sets what had been uploaded of the request's model before it; for requests that share a
    /// slot, before the first.
    pub(crate) fn begin_uploads(&mut self, before: UploadsBefore) {
        self.uploads_before = match &self.slot {
            Some(slot) => slot.first_uploads(before),
            None => before,
        };
    }

    pub(crate) fn begun(&self) -> Instant {
        self.begun
    }

    pub(crate) fn until(&self) -> Instant {
        self.since
    }

    pub(crate) fn parts(&self) -> PartTimes {
        self.parts
    }

    pub(crate) fn behind(&self) -> &[Behind] {
        &self.behind
    }

    pub(crate) fn link(&self) -> LinkTime {
        self.link
    }

    /// The account at the request's first token, and the number of its decode passes since.
    pub(crate) fn first_token(&self) -> Option<(&FirstToken, u32)> {
        let first = self.first_token.as_ref()?;
        Some((first, self.decode_passes))
    }

    /// Notes the first token: the bytes of the model that had been uploaded, and computed with by
    /// the CPU, for the request. Later tokens change nothing.
    pub(crate) fn note_token(&mut self, uploaded_bytes: u64, cpu_bytes: u64) {
        let parts = self.parts;
        self.first_token.get_or_insert(FirstToken {
            parts,
            uploaded_bytes,
            cpu_bytes,
        });
    }

    /// What the request waits for, or waited for before its pass.
    pub(crate) fn standing(&self) -> Standing {
        self.standing
    }

    /// Sets what the request waits for from now on, while it is in no pass.
    pub(crate) fn stand(&mut self, standing: Standing) {
        self.standing = standing;
    }

    /// Charges all time up to now to one part.
    pub(crate) fn all_to(&mut self, part: Part, now: Instant) {
        let took = self.take_time(now);
        self.parts.add(part, took);
    }

    /// Charges all time up to now to a part, caused by passes of `whom`.
    pub(crate) fn all_behind(&mut self, part: Part, whom: Occupant, now: Instant) {
        let took = self.take_time(now);
        self.add_behind(part, whom, took);
    }

    /// Records that the request's pass was queued on the device, which needs `work` for it, for
    /// rows of its prompt or to decode, after `earlier` work.
    pub(crate) fn computes(
        &mut self,
        part: Part,
        work: Duration,
        earlier: Option<(Occupant, Duration)>,
    ) {
        self.computing = Some(Computing {
            part,
            earlier,
            work,
        });
    }

    /// Charges a time in which the request was in no pass; `own` is its model.
    pub(crate) fn wait(&mut self, now: Instant, own: ModelId, meanwhile: Meanwhile, link: u64) {
        let all = self.take_time(now);
        let took = all.saturating_sub(self.of_device(all));
        if took.is_zero() {
            return;
        }
        let waits = |part| Some(part);
        let for_itself = match self.standing {
            Standing::ReaderFull => waits(Part::Reader),
            Standing::FromDisk => waits(Part::Disk),
            Standing::Uploading => waits(Part::Uploads),
            Standing::Queued
            | Standing::Preempted
            | Standing::Ready
            | Standing::Follows
            | Standing::Computing => None,
        };
        if let Some(part) = for_itself {
            self.parts.add(part, took);
            if matches!(part, Part::Disk | Part::Uploads) {
                self.add_link(link, took);
            }
            return;
        }
        match meanwhile {
            Meanwhile::Slice(whom) => {
                let part = match self.standing {
                    Standing::Preempted => Part::Preempted,
                    Standing::Queued => Part::Queue,
                    _ if whom.model != own => Part::OtherModels,
                    _ if self.computed || self.standing == Standing::Follows => Part::OwnModel,
                    _ => Part::Queue,
                };
                self.add_behind(part, whom, took);
            }
            Meanwhile::Between(waits) => {
                let part = match self.standing {
                    Standing::Preempted => Part::Preempted,
                    Standing::Queued => Part::Queue,
                    _ => Part::Rest,
                };
                self.parts.add(part, took);
                let Some(waits) = waits else { return };
                let disk = waits.disk.min(took);
                let uploads = waits.uploads.min(took - disk);
                if waits.model == own {
                    self.parts.shift(part, Part::Disk, disk);
                    let moved = self.parts.shift(part, Part::Uploads, uploads);
                    self.add_link(link, moved);
                } else {
                    self.parts.shift(part, Part::OtherModels, disk + uploads);
                }
            }
        }
    }

    /// Splits a time between slices: the device's time for the request's pass, and for earlier
    /// work.
    fn of_device(&mut self, all: Duration) -> Duration {
        let Some(computing) = &mut self.computing else {
            return Duration::ZERO;
        };
        let Computing { part, work, .. } = *computing;
        let mut left = all;
        let earlier = computing.earlier.as_mut().map(|(whom, some)| {
            let waited = left.min(*some);
            *some -= waited;
            left -= waited;
            (*whom, waited)
        });
        // It takes longer than was thought where it is not done yet.
        let own = match self.standing {
            Standing::Computing => left,
            _ => left.min(work),
        };
        computing.work = work.saturating_sub(own);
        self.parts.add(part, own);
        match part {
            Part::Decode => self.in_pass.decode += own,
            _ => self.in_pass.prompt += own,
        }
        if let Some((whom, waited)) = earlier {
            self.add_behind(Part::OtherModels, whom, waited);
        }
        all - left + own
    }

    /// Charges a time in which the request was in a slice of a pass, computing its prompt or
    /// decoding (`part`).
    pub(crate) fn compute(&mut self, now: Instant, part: Part, used: SliceUse, link: u64) {
        let took = self.take_time(now);
        self.computed = true;
        self.standing = Standing::Ready;
        self.computing = None;
        let mut left = took;
        let mut add = |parts: &mut PartTimes, part, some: Duration| {
            let some = some.min(left);
            left -= some;
            parts.add(part, some);
            some
        };
        add(&mut self.parts, Part::Disk, used.disk);
        add(&mut self.parts, Part::Uploads, used.uploads);
        add(&mut self.parts, Part::CpuCompute, used.cpu);
        add(&mut self.parts, Part::Sampling, used.sampling);
        let earlier = used.earlier.map(|(whom, some)| {
            let some = some.min(left);
            left -= some;
            (whom, some)
        });
        self.parts.add(part, left);
        match part {
            Part::Decode => self.in_pass.decode += left,
            _ => self.in_pass.prompt += left,
        }
        self.in_pass.waited += used.disk + used.uploads;
        self.in_pass.work += used.work;
        if let Some((whom, some)) = earlier {
            self.add_behind(Part::OtherModels, whom, some);
        }
        if !(used.disk + used.uploads).is_zero() {
            self.add_link(link, took);
        }
    }

    /// Records that the request's pass is nearly complete and that its uploads took the link
    /// `link`. A device with queued work waits for uploads by itself, which only shows in that its
    /// time (`measured`, or by the slices' rates) exceeds its work alone. Without known rates the
    /// work is taken as `at_least`; since rates are means over all models, waits count at most
    /// `at_most`.
    pub(crate) fn note_uploads(
        &mut self,
        link: Duration,
        measured: Option<Duration>,
        at_least: Duration,
        at_most: Option<Duration>,
    ) {
        let InPass {
            prompt,
            decode,
            waited,
            work: by_rates,
        } = self.in_pass;
        let by_rates = by_rates.max(at_least).min(at_most.unwrap_or(Duration::MAX));
        let work = measured.unwrap_or(by_rates);
        let waits = (prompt + decode)
            .saturating_sub(work)
            .min(link.saturating_sub(waited));
        let of_decode = self
            .parts
            .shift(Part::Decode, Part::Uploads, waits.min(decode));
        self.in_pass.decode -= of_decode;
        let of_prompt = waits.saturating_sub(of_decode).min(prompt);
        self.parts.shift(Part::Prompt, Part::Uploads, of_prompt);
    }

    /// Records that the request's pass is complete, and that `share` of its decode time was due to
    /// prompts of others.
    pub(crate) fn end_pass(&mut self, share: f64, whom: Option<Occupant>) {
        let InPass { decode, .. } = std::mem::take(&mut self.in_pass);
        self.decode_passes += u32::from(self.first_token.is_some());
        if let Some(whom) = whom {
            self.give_up(Part::Decode, whom, decode.mul_f64(share.clamp(0.0, 1.0)));
        }
    }

    /// Moves a part of the last slice's time to passes of `whom` that ran between its steps.
    pub(crate) fn give_up(&mut self, from: Part, whom: Occupant, took: Duration) {
        let moved = self.parts.shift(from, Part::OwnModel, took);
        self.note_behind(Part::OwnModel, whom, moved);
    }

    fn take_time(&mut self, now: Instant) -> Duration {
        let took = now.saturating_duration_since(self.since);
        self.since = self.since.max(now);
        took
    }

    fn add_link(&mut self, bytes: u64, took: Duration) {
        self.link.bytes += bytes;
        self.link.took += took;
    }

    fn add_behind(&mut self, part: Part, whom: Occupant, took: Duration) {
        self.parts.add(part, took);
        self.note_behind(part, whom, took);
    }

    /// Adds a time that the request waited for `whom`; if the list is full, the shortest entry is
    /// replaced.
    fn note_behind(&mut self, part: Part, whom: Occupant, took: Duration) {
        if took.is_zero() {
            return;
        }
        let known = |b: &&mut Behind| b.part == part && b.whom == whom;
        if let Some(behind) = self.behind.iter_mut().find(known) {
            behind.took += took;
            return;
        }
        let new = Behind { part, whom, took };
        if self.behind.len() < WAITED_FOR_MAX {
            self.behind.push(new);
        } else if let Some(least) = self.behind.iter_mut().min_by_key(|b| b.took)
            && least.took < took
        {
            *least = new;
        }
    }
}

#[cfg(test)]
#[path = "time_account_tests.rs"]
mod tests;
