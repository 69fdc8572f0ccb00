//! Timetable of uploads during a pass: which segments the link uploads and which the CPU computes.
//!
//! A pass of few rows reaches its absent segments one after another. Each is computed by the CPU
//! when the pass reaches it, or was uploaded before. Two segments are uploaded ahead or in flight
//! at any time, so that the link goes on while one of them is used, and while the CPU computes for
//! longer than an upload takes. The next upload is the first absent segment that would arrive by
//! the time that the pass reaches it: an earlier one would make the pass wait where the CPU could
//! have computed it, a later one would hold its place for longer. The shares of link and CPU follow
//! from their rates.
//!
//! All times are seconds by measured rates, from now on.

use std::time::{Duration, Instant};

use rocmforge_device::Throughput;
use rocmforge_tensor_cache::SegmentId;

/// Maximum number of uploads that are in flight, or complete and not used yet. Each takes the place
/// of a segment that could stay resident.
pub(crate) const UPLOADS_AHEAD: usize = 2;

/// Maximum number of remembered uploads: those in flight, and others that no pass reached.
const DUE_MAX: usize = 64;

/// A segment that a pass will reach, and when it will be available.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct UpcomingSegment {
    /// Seconds that the device computes with the segment.
    pub(crate) computed: f64,
    pub(crate) stop: Availability,
}

/// Availability of a segment that a pass will reach.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Availability {
    /// The segment is resident.
    Resident,
    /// The segment's upload ends after this number of seconds.
    Due(f64),
    /// The segment is absent; the CPU takes `host` seconds to compute it, the link `link` seconds
    /// to upload it.
    Absent { link: f64, host: f64 },
    /// The segment is absent, and must be uploaded: the CPU cannot compute it, or it is not among
    /// the streamed segments.
    Brought,
    /// The segment is absent, and too slow on the CPU: the pass waits for its upload when it
    /// reaches it.
    OnDemand,
}

/// Index of the segment to upload next, among those that a pass will reach, the first at the time
/// `begin`; the link is free at `free`. `None` if no upload is useful.
pub(crate) fn next_upload(
    begin: f64,
    free: f64,
    coming: impl Iterator<Item = UpcomingSegment>,
) -> Option<usize> {
    let mut at = begin;
    for (i, UpcomingSegment { computed, stop }) in coming.enumerate() {
        match stop {
            Availability::Resident => at += computed,
            Availability::Due(due) => at = at.max(due) + computed,
            Availability::Absent { link, .. } if free + link <= at => return Some(i),
            Availability::Absent { host, .. } => at += host,
            Availability::Brought => return Some(i),
            Availability::OnDemand => return None,
        }
    }
    None
}

/// Estimated state of the link's and the device's queues.
#[derive(Debug, Default)]
pub(crate) struct Timetable {
    /// Measured rates of passes of the current kind.
    pace: Option<Throughput>,
    /// Time at which the link has done all queued uploads.
    free: Option<Instant>,
    due: Vec<(SegmentId, Instant)>,
    /// Time at which the device has done its queued work.
    done: Option<Instant>,
}

impl Timetable {
    /// Begins a pass, for whose kind `pace` was measured; the work of the pass before counts as
    /// done.
    pub(crate) fn begin(&mut self, pace: Option<Throughput>) {
        self.pace = pace;
        self.done = None;
    }

    /// The rates that were given to [`Timetable::begin`].
    pub(crate) fn pace(&self) -> Option<Throughput> {
        self.pace
    }

    /// Notes that an upload of `bytes` was queued on the link. Has no effect before the link's rate
    /// is known.
    pub(crate) fn begun(&mut self, segment: SegmentId, bytes: u64, now: Instant) {
        let Some(rate) = self.pace.map(|pace| pace.upload_bytes_per_s) else {
            return;
        };
        let begin = self.free.map_or(now, |free| free.max(now));
        let due = begin + duration(bytes as f64 / rate);
        self.free = Some(due);
        self.due.retain(|(id, _)| *id != segment);
        if self.due.len() >= DUE_MAX {
            self.due.remove(0);
        }
        self.due.push((segment, due));
    }

    /// Seconds until an upload completes; 0 if it has.
    pub(crate) fn due(&self, segment: SegmentId, now: Instant) -> f64 {
        let found = self.due.iter().find(|(id, _)| *id == segment);
        found.map_or(0.0, |(_, due)| since(*due, now))
    }

    /// Seconds until the link is free.
    pub(crate) fn free(&self, now: Instant) -> f64 {
        self.free.map_or(0.0, |free| since(free, now))
    }

    /// Seconds until the device has done its queued work.
    pub(crate) fn done(&self, now: Instant) -> f64 {
        self.done.map_or(0.0, |done| since(done, now))
    }

    /// Records that work of `seconds` with a segment was queued on the device; it begins when the
    /// segment has arrived.
    pub(crate) fn runs(&mut self, segment: SegmentId, seconds: f64, now: Instant) {
        let mut begin = self.done.map_or(now, |done| done.max(now));
        if let Some(at) = self.due.iter().position(|(id, _)| *id == segment) {
            begin = begin.max(self.due.swap_remove(at).1);
        }
        self.done = Some(begin + duration(seconds));
    }

    /// Records that the device has done all queued work: its results were read.
    pub(crate) fn caught_up(&mut self) {
        self.done = None;
    }
}

/// Seconds from `now` to `at`; 0 if that is past.
fn since(at: Instant, now: Instant) -> f64 {
    at.saturating_duration_since(now).as_secs_f64()
}

/// Converts seconds to a duration of at most one second, also if they are not finite: a first rate
/// may be far off, and the link would count as busy for too long.
fn duration(seconds: f64) -> Duration {
    const MOST: Duration = Duration::from_secs(1);
    Duration::try_from_secs_f64(seconds).map_or(MOST, |found| found.min(MOST))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rocmforge_tensor_cache::ModelId;

    /// What passes of a model of 32 layers take on average, of which the host and the link compute
    /// and bring what is absent, a segment of three each: milliseconds. Segments are given up in
    /// the order in which they were used.
    struct Simulated {
        /// Of an absent segment on the host, and of one on the link.
        host: f64,
        link: f64,
        /// Of a segment on the device.
        computed: f64,
        /// Segments that may be on the device, of those that come and go.
        room: usize,
    }

    impl Simulated {
        const LAYERS: usize = 32;

        fn run(&self, ahead: usize) -> f64 {
            const PASSES: usize = 60;
            let n = 3 * Self::LAYERS;
            let comes_and_goes = |i: usize| i % 3 == 1;
            let mut resident: Vec<usize> = (0..Self::LAYERS).map(|layer| 3 * layer + 1).collect();
            resident.truncate(self.room);
            // Segments that were given to the link, with the time at which they have come.
            let mut due: Vec<(usize, f64)> = Vec::new();
            let (mut now, mut free, mut measured) = (0.0f64, 0.0f64, 0.0);
            for at in 0..PASSES * n {
                if at == PASSES / 2 * n {
                    measured = now;
                }
                let here = at % n;
                while due.len() < ahead {
                    let coming = (here..here + n).map(|i| {
                        let i = i % n;
                        let stop = match due.iter().find(|(id, _)| *id == i) {
                            Some((_, due)) => Availability::Due((due - now).max(0.0)),
                            None if !comes_and_goes(i) || resident.contains(&i) => {
                                Availability::Resident
                            }
                            None => Availability::Absent {
                                link: self.link,
                                host: self.host,
                            },
                        };
                        let computed = self.computed;
                        UpcomingSegment { computed, stop }
                    });
                    let found = next_upload(0.0, (free - now).max(0.0), coming);
                    let Some(next) = found.map(|i| (here + i) % n) else {
                        break;
                    };
                    if resident.len() + due.len() >= self.room {
                        // What was used last is needed last.
                        let passed = |&i: &usize| (i + n - here - 1) % n;
                        let Some(last) = resident.iter().copied().max_by_key(passed) else {
                            break;
                        };
                        resident.retain(|&i| i != last);
                    }
                    free = free.max(now) + self.link;
                    due.push((next, free));
                }
                if let Some(found) = due.iter().position(|(id, _)| *id == here) {
                    now = now.max(due.swap_remove(found).1);
                    resident.push(here);
                } else if comes_and_goes(here) && !resident.contains(&here) {
                    now += self.host - self.computed;
                }
                now += self.computed;
            }
            (now - measured) / (PASSES - PASSES / 2) as f64
        }

        /// What a pass cannot take less than: host and link divide what is absent, and the
        /// device computes beside neither.
        fn least(&self) -> f64 {
            let absent = (Self::LAYERS - self.room) as f64;
            let device = 3.0 * Self::LAYERS as f64 * self.computed;
            // T = device + hosted * (host - computed), and T = (absent - hosted) * link.
            let host = self.host - self.computed;
            let hosted = ((absent * self.link - device) / (host + self.link)).clamp(0.0, absent);
            (device + hosted * host).max((absent - hosted) * self.link)
        }
    }

    #[test]
    fn neither_link_nor_host_waits_for_long() {
        for room in [12, 16, 20] {
            for host in [0.5, 0.8, 1.2, 1.8, 2.6] {
                let simulated = Simulated {
                    host,
                    link: 1.3,
                    computed: 0.02,
                    room,
                };
                let took = simulated.run(UPLOADS_AHEAD);
                let least = simulated.least();
                assert!(
                    took < 1.2 * least + 1.3,
                    "room for {room}, {host} ms: {took:.2} of {least:.2}"
                );
                assert!(took < simulated.run(1), "one in hand would do as well");
            }
        }
    }

    #[test]
    fn the_first_that_comes_in_time_is_brought() {
        let absent = |host| UpcomingSegment {
            computed: 0.0,
            stop: Availability::Absent { link: 1.0, host },
        };
        let other = |stop| UpcomingSegment {
            computed: 0.25,
            stop,
        };
        let next = |coming: &[UpcomingSegment]| next_upload(0.0, 0.0, coming.iter().copied());
        assert_eq!(
            next(&[absent(0.5); 4]),
            Some(2),
            "two are computed meanwhile"
        );
        assert_eq!(next(&[absent(1.0); 4]), Some(1));
        assert_eq!(
            next(&[absent(0.1); 4]),
            None,
            "none comes before the host is there"
        );
        let resident = other(Availability::Resident);
        assert_eq!(
            next(&[resident, resident, resident, resident, absent(0.5)]),
            Some(4)
        );
        assert_eq!(
            next(&[other(Availability::Due(0.9)), absent(0.5)]),
            Some(1),
            "waited for the other"
        );
        assert_eq!(next(&[absent(0.5), other(Availability::Brought)]), Some(1));
        assert_eq!(
            next(&[other(Availability::OnDemand), absent(9.0), absent(9.0)]),
            None
        );
        // A link that is busy comes later.
        assert_eq!(next_upload(0.0, 0.7, [absent(0.5); 6].into_iter()), Some(4));
        assert_eq!(next_upload(0.7, 0.7, [absent(0.5); 6].into_iter()), Some(2));
    }

    #[test]
    fn uploads_follow_each_other_and_work_waits_for_them() {
        let segment = |index| SegmentId {
            model: ModelId(1),
            index,
        };
        let pace = Throughput {
            computed_bytes_per_s: 1e12,
            upload_bytes_per_s: 1e9,
            ahead_bytes: 0,
        };
        let now = Instant::now();
        let mut timetable = Timetable::default();
        timetable.begun(segment(1), 1_000_000, now);
        assert_eq!(timetable.free(now), 0.0, "no rate is known yet");
        timetable.begin(Some(pace));
        timetable.begun(segment(1), 1_000_000, now);
        timetable.begun(segment(2), 2_000_000, now);
        let ms = |seconds: f64| (seconds * 1e3).round();
        assert_eq!(ms(timetable.due(segment(1), now)), 1.0);
        assert_eq!(ms(timetable.due(segment(2), now)), 3.0);
        assert_eq!(timetable.due(segment(3), now), 0.0);
        assert_eq!(ms(timetable.free(now)), 3.0);
        timetable.runs(segment(2), 0.001, now);
        assert_eq!(ms(timetable.done(now)), 4.0, "behind its upload");
        assert_eq!(timetable.due(segment(2), now), 0.0, "used");
        timetable.caught_up();
        assert_eq!(timetable.done(now), 0.0);
        let later = now + Duration::from_millis(5);
        timetable.begun(segment(4), 1_000_000, later);
        assert_eq!(ms(timetable.due(segment(4), later)), 1.0);
        timetable.begun(segment(5), u64::MAX, later);
        assert_eq!(
            ms(timetable.due(segment(5), later)),
            1001.0,
            "taken for a second"
        );
        for index in 0..200 {
            timetable.begun(segment(index), 1, later);
        }
        assert!(timetable.due.len() <= DUE_MAX);
    }
}
