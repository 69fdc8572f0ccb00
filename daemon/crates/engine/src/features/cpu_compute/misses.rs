//! Missing segments that the CPU computes: which ones, and the transfer of rows between GPU and
//! host.

use std::cmp::{Ordering, Reverse};
use std::sync::Arc;

use rocmforge_device::{BoundExpert, BoundStep, Buf, ExpertFfn, SegmentBinding, Throughput};
use rocmforge_device_cpu::Brought;
use rocmforge_ops::Op;
use rocmforge_tensor_cache::{SegmentState, Upcoming};

use crate::api::RequestCacheUse;
use crate::api::error::{Error, from_cache};
use crate::features::cpu_compute::{Absent, CpuWeights, Share};
use crate::memory::Memory;
use crate::pass::spec::{ExpertStep, Pass, batch, id, scratch};
use crate::store::timetable::{Availability, UPLOADS_AHEAD, UpcomingSegment, next_upload};

/// Work that the engine's thread does while the CPU computes; called once or twice.
type Others<'a> = &'a mut dyn FnMut(&mut Memory) -> Result<(), Error>;

/// Eviction score of a segment in the cache; segments are ordered by it.
#[derive(Debug, Clone, Copy)]
struct Warmth(f64);

impl Ord for Warmth {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl PartialOrd for Warmth {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Warmth {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Warmth {}

impl Memory {
    /// Whether the CPU computes a part of this pass: its model does not fit the budget.
    pub(crate) fn uses_cpu(&self, pass: &Pass<'_>) -> bool {
        let fits = self.store.cache.fits(pass.model) && !self.cpu.is_always();
        self.cpu.takes_part(pass.n_tokens) && !fits
    }

    /// Orders a layer's absent experts: first those in flight, then by use, and last those that the
    /// CPU keeps.
    pub(crate) fn order_absent(&mut self, pass: &Pass<'_>, absent: &mut [u32]) {
        self.cpu.collect();
        if absent.len() < 2 {
            return;
        }
        let uses_cpu = self.uses_cpu(pass);
        absent.sort_by_cached_key(|&s| {
            let this = id(pass, s);
            let under_way = self.store.is_under_way(this);
            let held = || {
                self.cpu
                    .holds(pass.model, s, self.store.segment_bytes(this))
            };
            let last = uses_cpu && !under_way && held() == CpuWeights::Kept;
            (
                !under_way,
                last,
                Reverse(Warmth(self.store.cache.warmth(this))),
            )
        });
    }

    /// The CPU's share of a layer's absent experts in the order of [`Memory::order_absent`]: the
    /// last ones, none in flight. If other requests wait for the engine, a GPU's link uploads them
    /// instead while those run, since the engine would wait for the CPU.
    pub(crate) fn share_with_cpu(
        &mut self,
        pass: &Pass<'_>,
        absent: &[u32],
        (n_wanted, others_wait): (usize, bool),
    ) -> Share {
        let nothing = Share {
            computes: 0,
            timed: None,
            wants_more: false,
        };
        let links = others_wait && self.store.records && !self.cpu.is_always();
        if links || !self.uses_cpu(pass) {
            return nothing;
        }
        let free = absent
            .iter()
            .filter(|&&s| !self.store.is_under_way(id(pass, s)));
        let free: Vec<u32> = free.copied().collect();
        let Some(&first) = free.first() else {
            return nothing;
        };
        let bytes = self.store.segment_bytes(id(pass, first));
        let held = |s: u32| self.cpu.holds(pass.model, s, bytes);
        let kept = free
            .iter()
            .filter(|&&s| held(s) == CpuWeights::Kept)
            .count();
        let absent = Absent {
            n: free.len(),
            kept,
            others: held(first),
            bytes,
            rows_each: pass.n_tokens.div_ceil(n_wanted.max(1)),
            one_row: pass.n_tokens == 1,
        };
        let pace = self.store.device.pace(pass.n_tokens);
        self.cpu.share(pass.model, absent, pace)
    }

    /// Starts to convert weights of a layer's experts to the CPU kernels' layout, so that the CPU
    /// can compute them when they are missed again. Failures are ignored.
    pub(crate) fn keep_later(&mut self, pass: &Pass<'_>, segments: &[u32]) {
        let source = &self.store.sources[&pass.model];
        let segments = segments.iter().map(|&s| {
            let layout = Arc::clone(&source.layouts[s as usize]);
            (s, layout)
        });
        let kept = self.cpu.keep_later(&source.file, pass.model, segments);
        if let Err(error) = kept {
            tracing::debug!(%error, "not kept by the host");
        }
        self.fit_host_kv();
    }

    /// Starts to upload an expert that the CPU computed while the link is idle, if it will be used
    /// sooner than the segment that is evicted for it.
    pub(crate) fn upload_what_was_left(&mut self, pass: &Pass<'_>) -> Result<(), Error> {
        while self.store.under_way() == 0
            && let Some(segment) = self.cpu.take_left(pass.model)
        {
            if self
                .store
                .cache
                .prefetch_for_later(segment, &mut self.store.actions)
            {
                self.store.execute()?;
            }
        }
        Ok(())
    }

    /// Whether the CPU computes a segment's operations, because it is absent and that is faster;
    /// starts uploads of later segments of the pass.
    pub(crate) fn answers(&mut self, pass: &Pass<'_>, segment: u32) -> Result<bool, Error> {
        let this = id(pass, segment);
        let there = self.store.cache.holds(this) || self.store.is_under_way(this);
        if there || !self.uses_cpu(pass) {
            return Ok(false);
        }
        if !self.cpu.computable_on_cpu(pass.model, pass.plan)[segment as usize] {
            return Ok(false);
        }
        self.collect();
        let bytes = self.store.segment_bytes(this);
        let pace = self.store.timetable.pace();
        let held = self.cpu.holds(pass.model, segment, bytes);
        let Some(seconds) = self.cpu.answers(held, bytes, pass.n_tokens, pace) else {
            return Ok(false);
        };
        if let Some(pace) = pace {
            self.feed_link(pass, segment + 1, seconds, pace)?;
        }
        Ok(true)
    }

    /// Begins the timetable of a pass that the CPU takes part in.
    pub(crate) fn begin_timetable(&mut self, pass: &Pass<'_>) {
        let pace = self.store.device.pace(pass.n_tokens);
        self.store.timetable.begin(pace);
    }

    /// Called before the device is given work with these held segments, in this order: starts
    /// uploads of later segments of the pass, unless those wait for the segments' memory
    /// ([`Memory::feed_link_behind`]).
    pub(crate) fn feed_link_with(
        &mut self,
        pass: &Pass<'_>,
        segments: &[u32],
    ) -> Result<(), Error> {
        let Some(pace) = self.store.timetable.pace() else {
            return Ok(());
        };
        for &segment in segments {
            let this = id(pass, segment);
            let seconds = self.store.segment_bytes(this) as f64 / pace.computed_bytes_per_s;
            let now = self.store.clock.now();
            let timetable = &mut self.store.timetable;
            timetable.runs(this, seconds, now);
        }
        match (segments.last(), self.store.cache.streamed_size(pass.model)) {
            (Some(last), None) => self.feed_link(pass, last + 1, 0.0, pace),
            _ => Ok(()),
        }
    }

    /// Called after the device was given work with these segments, which are held no longer. If all
    /// streamed segments have the same size, uploads of later segments are started only now: they
    /// take the place of these segments, and the rest stays.
    pub(crate) fn feed_link_behind(
        &mut self,
        pass: &Pass<'_>,
        segments: &[u32],
    ) -> Result<(), Error> {
        let pace = self.store.timetable.pace();
        let one_size = self.store.cache.streamed_size(pass.model).is_some();
        match (segments.last(), pace) {
            (Some(last), Some(pace)) if one_size => self.feed_link(pass, last + 1, 0.0, pace),
            _ => Ok(()),
        }
    }

    /// Starts uploads for a pass that reaches the segment `from` `seconds` after the device's
    /// queued work is done.
    fn feed_link(
        &mut self,
        pass: &Pass<'_>,
        from: u32,
        seconds: f64,
        pace: Throughput,
    ) -> Result<(), Error> {
        if self.cpu.is_always() {
            return Ok(());
        }
        let ahead = self.store.cache.coming(pass.model, from);
        let ahead = ahead.filter(Upcoming::is_ahead);
        let ahead = ahead.take(UPLOADS_AHEAD).count();
        if ahead == UPLOADS_AHEAD {
            return Ok(());
        }
        let come_and_go = self.store.cache.streamed_size(pass.model);
        for _ in ahead..UPLOADS_AHEAD {
            let now = self.store.clock.now();
            let computable_on_cpu = self.cpu.computable_on_cpu(pass.model, pass.plan);
            let (cpu, cache) = (&self.cpu, &self.store.cache);
            let timetable = &self.store.timetable;
            let coming = cache.coming(pass.model, from);
            let stops = coming.map(|found| {
                let Upcoming { segment, bytes, .. } = found;
                let stop = match found.state {
                    _ if found.is_ahead() => Availability::Due(timetable.due(segment, now)),
                    SegmentState::Resident(_) | SegmentState::InFlight(_) => Availability::Resident,
                    SegmentState::Absent
                        if !computable_on_cpu[segment.index as usize]
                            || come_and_go.is_some_and(|size| size != bytes) =>
                    {
                        Availability::Brought
                    }
                    SegmentState::Absent => {
                        let held = cpu.holds(pass.model, segment.index, bytes);
                        match cpu.answer(held, bytes, pass.n_tokens, Some(pace)) {
                            Some(host) => Availability::Absent {
                                link: bytes as f64 / pace.upload_bytes_per_s,
                                host,
                            },
                            None => Availability::OnDemand,
                        }
                    }
                };
                UpcomingSegment {
                    computed: bytes as f64 / pace.computed_bytes_per_s,
                    stop,
                }
            });
            let begin = timetable.done(now) + seconds;
            let Some(next) = next_upload(begin, timetable.free(now), stops) else {
                break;
            };
            let next = cache.coming(pass.model, from).nth(next);
            let Some(Upcoming { segment, .. }) = next else {
                break;
            };
            if !self.store.cache.prefetch(segment, &mut self.store.actions) {
                break;
            }
            self.store.execute()?;
        }
        Ok(())
    }

    /// Runs the operations of a segment on the CPU, and copies the rows that later steps read to
    /// the GPU.
    pub(crate) fn run_on_cpu(
        &mut self,
        pass: &Pass<'_>,
        segment: u32,
        ops: &[Op],
        live_out: &[Buf],
        counts: &mut RequestCacheUse,
    ) -> Result<(), Error> {
        let (mut reads, mut written): (Vec<Buf>, Vec<Buf>) = (Vec::new(), Vec::new());
        for op in ops {
            let mut writes = Vec::new();
            op.buffers(
                &mut |b| {
                    if !written.contains(&b) && !reads.contains(&b) {
                        reads.push(b);
                    }
                },
                &mut |b| writes.push(b),
            );
            written.extend(writes);
        }
        let mut rows = Vec::with_capacity(reads.len());
        for buf in reads {
            rows.push((buf, self.rows_of(pass, buf, pass.n_tokens)?));
        }
        // What the card did before, and what it waited for, is no part of the answer.
        let begin = self.store.clock.now();
        self.store.timetable.caught_up();
        let given: Vec<(Buf, &[f32])> = rows.iter().map(|(b, r)| (*b, r.as_slice())).collect();
        let layouts = &self.store.sources[&pass.model].layouts;
        let layout = Arc::clone(&layouts[segment as usize]);
        let step = BoundStep::Run {
            ops,
            live_out,
            weights: Some(SegmentBinding {
                layout: &layout,
                slab: 0,
            }),
        };
        let (host, brought) = self.on_host(pass, &[segment], step, &given, &mut |_| Ok(()))?;
        written.sort_unstable();
        written.dedup();
        for buf in live_out.iter().filter(|b| written.contains(b)) {
            let mut rows = vec![0.0; self.elements(pass, *buf, pass.n_tokens)];
            let moved = self.cpu.read(&host, *buf, &mut rows).and_then(|()| {
                self.store
                    .device
                    .write_parts(scratch(pass), *buf, &[(0, &rows)])
            });
            moved.map_err(|e| self.store.device_error(Some(pass.model), e))?;
        }
        counts.misses += 1;
        counts.host_bytes += layout.bytes;
        self.cpu
            .took(brought, pass.n_tokens, self.store.clock.now() - begin);
        self.store
            .cache
            .done_without(id(pass, segment))
            .map_err(from_cache)
    }

    /// Runs experts, each with its segment, on the CPU, for rows `x` routed by `ids`, and copies
    /// their results to the GPU. Meanwhile the engine's thread gives the GPU and the link their
    /// work with `others`.
    pub(crate) fn experts_on_cpu(
        &mut self,
        pass: &Pass<'_>,
        ffn: &ExpertFfn,
        step: ExpertStep,
        experts: &[(u32, u32)],
        (x, ids): (&[f32], &[f32]),
        others: Others<'_>,
    ) -> Result<u64, Error> {
        let begin = self.store.clock.now();
        let all = &self.store.sources[&pass.model].layouts;
        let layouts = experts.iter().map(|&(_, s)| Arc::clone(&all[s as usize]));
        let layouts: Vec<_> = layouts.collect();
        let bound = |(&(expert, segment), layout)| BoundExpert {
            expert,
            weights: SegmentBinding { layout, slab: 0 },
            first_tensor: ((expert - step.experts_of(segment).start) * ffn.n_tensors) as usize,
        };
        let mut segments: Vec<u32> = experts.iter().map(|&(_, segment)| segment).collect();
        segments.dedup();
        let bytes: u64 = segments.iter().map(|&s| all[s as usize].bytes).sum();
        let rows_each = ids.len().div_ceil(experts.len().max(1)).min(pass.n_tokens);
        let bound = BoundStep::Experts {
            ffn,
            experts: experts
                .iter()
                .zip(layouts.iter().map(Arc::as_ref))
                .map(bound)
                .collect(),
        };
        let given = [(ffn.x, x), (ffn.ids, ids)];
        let of_each: Vec<u32> = experts.iter().map(|&(_, segment)| segment).collect();
        let (host, brought) = self.on_host(pass, &of_each, bound, &given, others)?;
        let width = pass.scratch.bufs[usize::from(ffn.out.0)].width as usize;
        let mut out = vec![0.0; ids.len() * width];
        let read = self.cpu.read(&host, ffn.out, &mut out);
        read.map_err(|e| self.store.device_error(Some(pass.model), e))?;
        let here = |id: f32| experts.iter().any(|&(e, _)| e as f32 == id);
        let mut parts: Vec<(u64, &[f32])> = Vec::with_capacity(ids.len());
        let mut first = 0;
        while first < ids.len() {
            let n = ids[first..].iter().take_while(|id| here(**id)).count();
            if n > 0 {
                parts.push((first as u64, &out[first * width..(first + n) * width]));
            }
            first += n.max(1);
        }
        let written = self
            .store
            .device
            .write_parts(scratch(pass), ffn.out, &parts);
        written.map_err(|e| self.store.device_error(Some(pass.model), e))?;
        self.cpu
            .took(brought, rows_each, self.store.clock.now() - begin);
        for segment in segments {
            let done = self.store.cache.done_without(id(pass, segment));
            done.map_err(from_cache)?;
            self.cpu.leaves(id(pass, segment));
        }
        Ok(bytes)
    }

    fn on_host(
        &mut self,
        pass: &Pass<'_>,
        segments: &[u32],
        step: BoundStep<'_>,
        given: &[(Buf, &[f32])],
        others: Others<'_>,
    ) -> Result<(Arc<rocmforge_device::ScratchLayout>, Brought), Error> {
        let batch = batch(pass, pass.outputs);
        let layout = self
            .cpu
            .layout((pass.model, pass.adapted), pass.plan, batch.counts());
        let file = Arc::clone(&self.store.sources[&pass.model].file);
        let segments = (u64::from(pass.model.0), segments);
        let waiting = self.store.wait_for_file(pass.model);
        let source = &self.store.sources[&pass.model];
        let absent = segments.1.iter().copied().filter(|&segment| {
            let bytes = source.layouts[segment as usize].bytes;
            self.cpu.holds(pass.model, segment, bytes) != CpuWeights::Kept
        });
        source.bring_all(absent)?;
        let host = self.cpu.take();
        let mut host = host.map_err(|e| self.store.device_error(Some(pass.model), e))?;
        let mut beside = Ok(());
        let mut own = || {
            if beside.is_ok() {
                beside = others(self);
            }
        };
        let ran = host.run(&file, segments, &step, &layout, &batch, given, &mut own);
        self.cpu.put_back(host);
        drop(waiting);
        self.fit_host_kv();
        let brought = ran.map_err(|e| self.store.device_error(Some(pass.model), e))?;
        beside.map(|()| (layout, brought))
    }

    /// Number of elements of a buffer's rows in a pass of `n_tokens` rows.
    fn elements(&self, pass: &Pass<'_>, buf: Buf, n_tokens: usize) -> usize {
        let placed = &pass.scratch.bufs[usize::from(buf.0)];
        let counts = rocmforge_ops::RowCounts {
            tokens: n_tokens as u64,
            outputs: pass.outputs.len() as u64,
        };
        (counts.of(placed.rows) * placed.width) as usize
    }

    /// Reads the rows of two buffers of a pass from the GPU at once.
    pub(crate) fn rows_of_both(
        &mut self,
        pass: &Pass<'_>,
        bufs: [Buf; 2],
    ) -> Result<[Vec<f32>; 2], Error> {
        let mut rows = bufs.map(|buf| vec![0.0; self.elements(pass, buf, pass.n_tokens)]);
        let [a, b] = &mut rows;
        let mut parts = [(bufs[0], a.as_mut_slice()), (bufs[1], b.as_mut_slice())];
        let read = self.store.device.read_each(scratch(pass), &mut parts);
        read.map_err(|e| self.store.device_error(Some(pass.model), e))?;
        Ok(rows)
    }

    /// Reads a buffer's rows of a pass from the GPU.
    pub(crate) fn rows_of(
        &mut self,
        pass: &Pass<'_>,
        buf: Buf,
        n_tokens: usize,
    ) -> Result<Vec<f32>, Error> {
        let mut rows = vec![0.0; self.elements(pass, buf, n_tokens)];
        let read = self.store.device.read(scratch(pass), buf, &mut rows);
        read.map_err(|e| self.store.device_error(Some(pass.model), e))?;
        Ok(rows)
    }
}
