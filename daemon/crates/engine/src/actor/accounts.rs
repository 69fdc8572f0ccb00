//! Charges the time accounts of requests with slices of passes and with the time between them
//! ([`crate::request::time_account`]).

use std::time::{Duration, Instant};

use rocmforge_device::Throughput;
use rocmforge_tensor_cache::{ModelId, Policy as CachePolicy};

use crate::actor::engine::Engine;
use crate::api::times::{
    DecodeTimes, Displaced, LinkUse, Part, RequestTimes, Settings, Surroundings, TimesSlot,
    WaitedFor,
};
use crate::pass::member::Member;
use crate::pass::suspended::PassUnderWay;
use crate::request::gaps::Gaps;
use crate::request::kv;
use crate::request::task::{Task, Work};
use crate::request::time_account::{Meanwhile, Occupant, Standing, TimeAccount};
use crate::request::time_book::{SpentSince, Sums};

/// What the time accounts of requests need to know of a slice of a pass that ended.
pub(crate) struct EndedSlice {
    pub(crate) now: Instant,
    /// How long the slice waited for work that the device had been given before it.
    pub(crate) earlier: Duration,
    /// Whether the slice waited until the device had done the slice's own work.
    pub(crate) was_read: bool,
    /// Estimated time of the slice's work on the device, by measured rates; zero if they are not
    /// known.
    pub(crate) work: Duration,
    /// Waits for uploads and CPU time of the earlier parts of the slice, up to the last time
    /// accounts were charged.
    pub(crate) before: SpentSince,
    /// Device time of earlier work, if the device computes the slice's pass now; else `None`.
    pub(crate) computing: Option<Duration>,
    /// Whether the slice only read results that the device had already computed.
    pub(crate) looked: bool,
}

impl Engine {
    /// Opens the time account of a request that was sent at `sent`, and charges the time until now
    /// to what the engine did meanwhile.
    pub(crate) fn open_account(&mut self, sent: Instant, slot: Option<TimesSlot>) -> TimeAccount {
        let mut account = TimeAccount::new(sent, slot);
        let now = self.now();
        match self.requests.times.last {
            Some(whom) if !self.requests.is_empty() => {
                account.all_behind(Part::Queue, whom, now);
            }
            _ => account.all_to(Part::Rest, now),
        }
        account
    }

    /// Waits for uploads and CPU time since the accounts were last charged.
    pub(crate) fn spent(&mut self) -> SpentSince {
        let sums = Sums {
            waited: self.memory.store.reasons.waited,
            cpu: self.memory.cpu.done.took,
        };
        self.requests.times.look(sums)
    }

    /// Charges the time up to now to all requests as time between two slices; `members` are about
    /// to be in a slice.
    pub(crate) fn account_between(&mut self, members: &mut [Member], now: Instant) {
        let spent = self.spent();
        let meanwhile = spent.between();
        for Member { task, .. } in members {
            task.times.stand(Standing::Ready);
            task.times
                .wait(now, task.model, meanwhile, spent.linked_bytes);
        }
        self.account_others(meanwhile, spent.linked_bytes, now);
    }

    /// Charges a slice's time to all requests: as computation to `members`, the first `decoding` of
    /// which decode, and as waiting to the others.
    pub(crate) fn account_slice(
        &mut self,
        members: &mut [Member],
        decoding: usize,
        slice: &EndedSlice,
    ) {
        let Some(whose) = occupant(members) else {
            return;
        };
        let spent = slice.before.and(self.spent());
        let (earlier, was_read) = (slice.earlier, slice.was_read);
        // What it goes on behind is told when it is read.
        let given = self.requests.times.given();
        let ahead = slice.computing.map(|ahead| (given, ahead));
        let ahead = ahead.and_then(|(given, ahead)| Some((given?, ahead)));
        let ahead = ahead.filter(|(given, _)| given.model != whose.model);
        let earlier = match slice.looked {
            true => None,
            false => self.requests.times.slice(whose, earlier, was_read),
        };
        let used = spent.slice(earlier, slice.work);
        for (at, Member { task, .. }) in members.iter_mut().enumerate() {
            let part = match at < decoding {
                true => Part::Decode,
                false => Part::Prompt,
            };
            task.times
                .compute(slice.now, part, used, spent.linked_bytes);
            if slice.computing.is_some() {
                task.times.computes(part, slice.work, ahead);
            }
        }
        self.account_others(Meanwhile::Slice(whose), spent.linked_bytes, slice.now);
    }

    /// Charges the time up to now to the requests that are not in the slice, as `meanwhile`.
    fn account_others(&mut self, meanwhile: Meanwhile, link: u64, now: Instant) {
        let requests = &mut self.requests;
        let running = requests.scheduler.running() as u32;
        for task in requests.tasks.values_mut() {
            if !task.begun {
                task.times.running_most = task.times.running_most.max(running);
            }
            task.times.wait(now, task.model, meanwhile, link);
        }
        let memory = &self.memory;
        let store = &memory.store;
        for pass in requests.suspended.passes_mut() {
            let held = pass.waits_for().filter(|&s| store.is_under_way(s));
            let standing = match held {
                None if pass.is_read() && pass.waits(memory) => Standing::Computing,
                Some(segment) if store.reasons.is_cold(segment) => Standing::FromDisk,
                Some(_) => Standing::Uploading,
                None => Standing::Ready,
            };
            for Member { task, .. } in &mut pass.members {
                task.times.stand(standing);
                task.times.wait(now, task.model, meanwhile, link);
            }
        }
    }

    /// Charges a complete chunk of prompts to all requests, and the passes of tokens that ran
    /// between its steps to the chunk's own requests.
    pub(crate) fn account_chunk(
        &mut self,
        members: &mut [Member],
        whose: Option<Occupant>,
        (took, before): (Duration, SpentSince),
    ) {
        let slice = EndedSlice {
            now: self.now(),
            earlier: Duration::ZERO,
            was_read: true,
            work: Duration::ZERO,
            before,
            computing: None,
            looked: false,
        };
        self.account_slice(members, 0, &slice);
        for Member { task, .. } in members {
            if let Some(whose) = whose {
                task.times.give_up(Part::Prompt, whose, took);
            }
            task.times.end_pass(0.0, None);
        }
    }

    /// Charges a complete pass to its decoding requests: the time that they would have been done
    /// earlier without the prompts of others.
    pub(crate) fn account_pass(&mut self, pass: &mut PassUnderWay) {
        self.account_uploads(pass);
        let PassUnderWay {
            plan,
            members,
            counts,
            took,
            ..
        } = pass;
        let model = ModelId(plan.model.0);
        let (decode, prompts) = members.split_at_mut(plan.decode_spans);
        let rows: u32 = decode.iter().map(|m| m.span.rows).sum();
        if prompts.is_empty() {
            let resident = counts.misses == 0 && counts.host_bytes == 0;
            if plan.rows == 1 && resident {
                self.requests.times.note_resident(model, *took);
            }
        }
        let took = took.as_secs_f64();
        let entry = self.models.get(model);
        let without = entry.and_then(|entry| {
            let times = &entry.times;
            times.seconds_within(rows as usize, plan.rows as usize, took)
        });
        let without = without.unwrap_or(took * f64::from(rows) / f64::from(plan.rows.max(1)));
        let share = match took > 0.0 {
            true => 1.0 - without / took,
            false => 0.0,
        };
        let whom = occupant(prompts);
        for Member { task, .. } in prompts {
            task.times.end_pass(0.0, None);
        }
        for Member { task, .. } in decode {
            task.times.end_pass(share, whom);
        }
    }

    /// Charges a pass's requests with the share of the device's time that the pass spent waiting
    /// for its uploads.
    fn account_uploads(&mut self, pass: &mut PassUnderWay) {
        let bytes = pass.counts.uploaded_bytes;
        if bytes == 0 {
            return;
        }
        let plan_rows = pass.plan.rows;
        let rows = plan_rows as usize;
        let device = &mut self.memory.store.device;
        // Until a pass of as many rows is measured, one of a row is what it takes at least.
        let Some(pace) = device.pace(rows).or_else(|| device.pace(1)) else {
            return;
        };
        let seconds = |s| Duration::try_from_secs_f64(s).unwrap_or(Duration::ZERO);
        let link = seconds(bytes as f64 / pace.upload_bytes_per_s);
        let resident = self.requests.times.resident_token(pass.model());
        let resident = resident.map(seconds);
        // Rows share what each would read by itself.
        let at_most = resident.map(|row| row.saturating_mul(plan_rows));
        let resident = resident.filter(|_| rows == 1);
        let by_cpu = pass.counts.host_bytes;
        for Member { task, .. } in &mut pass.members {
            let pass_bytes = task.loaded.model().info().weights.pass_bytes;
            let own = pass_bytes.saturating_sub(by_cpu);
            let at_least = seconds(own as f64 / pace.computed_bytes_per_s);
            task.times.note_uploads(link, resident, at_least, at_most);
        }
    }

    /// Updates the standing (what they wait for) of all requests that are in no pass, from the
    /// scheduler's state. Time up to now is charged to their earlier standing.
    pub(crate) fn account_standing(&mut self) {
        let now = self.now();
        self.account_between(&mut [], now);
        let background = &self.background;
        let requests = &mut self.requests;
        for task in requests.tasks.values_mut() {
            let sequence = requests.scheduler.sequence(task.seq);
            let runs = sequence.is_some_and(|s| s.running);
            let standing = match background.stage_of(task.model) {
                _ if !task.reader_has_room() => Standing::ReaderFull,
                Some(true) => Standing::FromDisk,
                Some(false) => Standing::Uploading,
                None if task.reads => Standing::FromDisk,
                None if task.begun && !runs => Standing::Preempted,
                None if !runs => Standing::Queued,
                None if task.follows => Standing::Follows,
                None => Standing::Ready,
            };
            task.times.stand(standing);
        }
    }

    /// Closes the time account of a request that ended, and sends its times to the slot that asked
    /// for them.
    pub(crate) fn close_account(&mut self, task: &mut Task) {
        let now = self.now();
        task.times.all_to(Part::Rest, now);
        let Some(slot) = task.times.slot.take() else {
            return;
        };
        let times = self.times_of(task);
        slot.put(times);
    }

    fn times_of(&mut self, task: &Task) -> RequestTimes {
        let account = &task.times;
        let name = |model: ModelId| {
            let entry = self.models.get(model);
            entry
                .map_or("an unloaded model", |e| e.loaded.name())
                .to_owned()
        };
        let waited_for = account.behind().iter().map(|behind| WaitedFor {
            part: behind.part,
            model: name(behind.whom.model),
            client: behind.whom.client,
            took: behind.took,
        });
        let mut waited_for: Vec<_> = waited_for.collect();
        waited_for.sort_by_key(|waited| std::cmp::Reverse(waited.took));
        let reasons = &self.memory.store.reasons;
        let (uploaded_bytes, cold_bytes, reasons) =
            reasons.since(task.model, &account.uploads_before);
        let displaced = reasons.into_iter().map(|(reason, bytes)| Displaced {
            cause: reason.cause,
            by: reason.by.map(name),
            bytes,
        });
        let displaced = displaced.collect();
        let (prompt_tokens, generated_tokens, gaps) = match &task.work {
            Work::Generate(g) => ((g.n_prompt as u32, g.reused), g.generated, g.gaps),
            Work::Embed(_) => {
                let text = task.tokens.len().saturating_sub(1);
                ((text as u32, 0), 0, Gaps::default())
            }
            Work::Score(_) | Work::Tower(_) => ((task.tokens.len() as u32, 0), 0, Gaps::default()),
        };
        let pace = self.memory.store.device.pace(1);
        let surroundings = self.surroundings(task, pace);
        let link = account.link();
        RequestTimes {
            begun: account.begun(),
            ended: account.until(),
            parts: account.parts(),
            waited_for,
            uploaded_bytes,
            cold_bytes,
            displaced,
            link: LinkUse {
                bytes: link.bytes,
                took: link.took,
                measured_bytes_per_s: pace.map(|pace| pace.upload_bytes_per_s),
            },
            cpu_bytes: task.counts.host_bytes,
            prompt_tokens,
            generated_tokens,
            decode: self.decode_times(task, generated_tokens),
            longest_gap: gaps.longest(),
            promised_gap: gaps.told(),
            surroundings,
        }
    }

    /// How the time after a request's first token was spent, as parts.
    fn decode_times(&self, task: &Task, generated: u32) -> DecodeTimes {
        let account = &task.times;
        let Some((first, passes)) = account.first_token() else {
            return DecodeTimes::default();
        };
        let uploaded = self.memory.store.reasons.uploaded_bytes(task.model);
        DecodeTimes {
            tokens: generated.saturating_sub(1),
            passes,
            parts: account.parts().since(&first.parts),
            uploaded_bytes: uploaded.saturating_sub(first.uploaded_bytes),
            cpu_bytes: task.counts.host_bytes.saturating_sub(first.cpu_bytes),
        }
    }

    fn surroundings(&self, task: &Task, pace: Option<Throughput>) -> Surroundings {
        let store = &self.memory.store;
        let is_known = store.sources.contains_key(&task.model);
        let model = task.loaded.model();
        let (plan, info) = (model.plan(), model.info());
        let positions = task.tokens.len();
        Surroundings {
            budget_bytes: store.budget(),
            model_bytes: if is_known {
                store.model_bytes(task.model)
            } else {
                0
            },
            model_fits: is_known && store.cache.fits(task.model),
            block_bytes: task.counts.block_bytes,
            kv_type: info.kv_type.clone(),
            kv_bytes: kv::bytes_for(plan, positions, 1),
            resident_token_s: self.requests.times.resident_token(task.model),
            running: (
                task.times.running_most,
                self.config.max_sequences.get() as u32,
            ),
            free_bytes: store
                .free_bytes
                .map(|free| free.saturating_sub(self.guards.keep_free.bytes())),
            weights: info.weights.clone(),
            file_type: info.file_type,
            has_experts: info.n_expert > 0,
            is_pass_aware: store.cache.policy() == CachePolicy::PassAware,
            computed_bytes_per_s: pace.map(|pace| pace.computed_bytes_per_s),
            settings: self.settings_of(task),
        }
    }

    fn settings_of(&self, task: &Task) -> Settings {
        let drafted = match &task.work {
            Work::Generate(g) => g.drafted.0,
            Work::Score(_) | Work::Embed(_) | Work::Tower(_) => 0,
        };
        let draft = self.speculation.draft_model(task.model);
        Settings {
            cpu_compute: self.memory.cpu.takes_part(1),
            draft_model: draft.map(|draft| draft.name.clone()),
            drafted,
            shares_prefixes: task.realm.is_some(),
        }
    }
}

/// Charges requests with waiting for a chunk of their own model's prompts, up to `now`.
pub(crate) fn account_behind(members: &mut [Member], whose: Occupant, now: Instant) {
    for Member { task, .. } in members {
        task.times.stand(Standing::Ready);
        task.times.wait(now, task.model, Meanwhile::Slice(whose), 0);
    }
}

/// Charges requests with a pass of their tokens that ran up to now and used `spent`.
pub(crate) fn account_tokens(members: &mut [Member], now: Instant, spent: SpentSince) {
    for Member { task, .. } in members {
        task.times.compute(
            now,
            Part::Decode,
            spent.slice(None, Duration::ZERO),
            spent.linked_bytes,
        );
        task.times.end_pass(0.0, None);
    }
}

/// Occupant of a pass: its model, and the client of most of its rows.
pub(crate) fn occupant(members: &[Member]) -> Option<Occupant> {
    let most = members.iter().max_by_key(|member| member.span.rows)?;
    Some(Occupant {
        model: most.task.model,
        client: most.task.asker.client,
    })
}
