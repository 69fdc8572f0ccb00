//! The engine's main loop, and how requests end.

use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use rocmforge_device::Loss;
use rocmforge_scheduler::SeqId;

use crate::actor::engine::Engine;
use crate::actor::step::Stepped;
use crate::api::error::{Error, device_lost};
use crate::api::{COMMAND_CAPACITY, Command, PreloadRoom};
use crate::features::background_load;
use crate::features::preload::{Preload, Turn};
use crate::request::task::Task;

/// Longest time that the engine sleeps without a command.
const SLEEP: Duration = Duration::from_secs(60);

/// Longest sleep of the engine while the KV store writes or reads its index, or segments are
/// compared, so that their progress is published.
const STATUS_EVERY: Duration = Duration::from_millis(100);

impl Engine {
    /// The engine's main loop. Returns `None` when asked to end, or why the device is lost.
    pub(crate) fn run(&mut self, commands: &Receiver<Command>) -> Option<Loss> {
        let mut rested = false;
        loop {
            // Not without end: those who send them on and on would stop everyone else's requests.
            for _ in 0..COMMAND_CAPACITY {
                match commands.try_recv() {
                    Ok(command) => self.handle(command),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => return self.lost(),
                }
            }
            if let Some(reason) = self.lost() {
                return Some(reason);
            }
            if self.check_after_sleep() {
                continue;
            }
            // In this order: a drain that waits for a reader who went away ends with it,
            // not with its grace period.
            let now = self.now();
            self.end_those(|task| task.ended(now));
            self.collect_images();
            if self.drained(now) {
                return None;
            }
            if self.turn(now) {
                self.guards.release.note_work(now);
                self.watch_while_busy();
                self.memory.note_rates(false);
                self.publish(false);
                rested = false;
                continue;
            }
            // What is in flight is looked at often, and nothing else has changed since.
            match std::mem::replace(&mut rested, true) && self.waits_for_files() {
                true => {
                    self.memory.collect();
                    self.watch_others();
                }
                false => self.go_idle(),
            }
            self.release_when_idle(now);
            match self.next_command(commands) {
                Ok(command) => {
                    self.handle(command);
                    rested = false;
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return self.lost(),
            }
        }
    }

    /// One turn of the loop: admits requests, runs a slice of a pass and background work. Returns
    /// whether anything was done.
    fn turn(&mut self, now: Instant) -> bool {
        let (background, cx, speculation) = self.background();
        for (model, error) in background.before_pass(&cx, speculation, now) {
            self.end_those(|task| (task.model == model).then(|| error.clone()));
        }
        self.read_prefixes(now);
        self.wake_for_requests();
        self.make_room_while_yielding();
        self.admit();
        // Before the pass: it may take long, and its event must not come before the state
        // that knows of its request.
        if self.requests.changed {
            self.publish(true);
        }
        let stepped = match self.step() {
            Stepped::Looked => return true,
            Stepped::Ran => true,
            Stepped::Nothing => false,
        };
        let now = self.now();
        let (background, mut cx, speculation) = self.background();
        let uploaded = background.after_pass(&mut cx, speculation, now);
        let written = self.memory.write_notes(stepped);
        let trimmed = self.memory.trim_in_turn(stepped);
        self.preload_turn(stepped) || stepped || uploaded || written || trimmed
    }

    /// Uploads a segment of a preload, if it is a preload's turn. Returns whether there was one
    /// that a slow file did not hold up.
    fn preload_turn(&mut self, stepped: bool) -> bool {
        let others = !self.requests.is_empty();
        match self.preloads.after_pass(&mut self.memory, stepped, others) {
            Turn::Idle => return false,
            Turn::Done => {}
            Turn::Ended(preload, event) => {
                self.publish(true);
                preload.end(event);
            }
            Turn::Failed(preload, error) => match self.room_after(&preload, error) {
                Ok(()) => self.preloads.again(preload),
                Err(error) => {
                    self.publish(true);
                    preload.end(crate::api::PreloadEvent::Failed(error));
                }
            },
        }
        true
    }

    /// Makes room for a preload whose upload failed because the driver refused memory. A preload
    /// into free room is not worth a smaller budget.
    fn room_after(&mut self, preload: &Preload, error: Error) -> Result<(), Error> {
        match preload.room {
            PreloadRoom::Free => {
                self.memory.store.take_refused_bytes();
                Err(error)
            }
            PreloadRoom::Idle | PreloadRoom::Any => self.shrink_for_preload(error),
        }
    }

    /// Whether any file, upload or pinned memory is waited for in the background.
    pub(crate) fn waits_for_files(&self) -> bool {
        !self.background.not_ready().is_empty()
            || self.preloads.wait_for_files()
            || self.memory.waits_for_disk()
            || self.memory.trim_waits
    }

    /// Waits for the next command, at most until a timed task is due.
    fn next_command(&mut self, commands: &Receiver<Command>) -> Result<Command, RecvTimeoutError> {
        let now = self.now();
        let until = now + self.idle_timeout(now);
        loop {
            let left = until.saturating_duration_since(self.now());
            let Some(every) = self.guards.interval(self.memory.host_bytes()) else {
                return commands.recv_timeout(left);
            };
            match commands.recv_timeout(left.min(every)) {
                // Only counts of memory are looked at: all else is as it was.
                Err(RecvTimeoutError::Timeout) if left > every && !self.watch_while_idle() => {}
                other => return other,
            }
        }
    }

    /// How long the engine can sleep at `now` if no command arrives.
    fn idle_timeout(&self, now: Instant) -> Duration {
        let deadlines = self.requests.all().filter_map(|t| t.deadline);
        let deadline = deadlines
            .chain(self.draining.as_ref().map(|d| d.until))
            .min();
        let idle = match self.waits_for_files() {
            true => background_load::POLL,
            false if self.memory.is_disk_busy() => STATUS_EVERY,
            false if self.memory.equal.is_comparing() => STATUS_EVERY,
            false => self.guards.release.due_in(now).unwrap_or(SLEEP).min(SLEEP),
        };
        deadline.map_or(idle, |d| d.saturating_duration_since(now).min(idle))
    }

    /// Gives back what only running work needs, before the engine sleeps.
    fn go_idle(&mut self) {
        self.memory.collect();
        self.memory.store.remember();
        self.memory.note_rates(false);
        self.free_idle_scratch();
        self.finish_shrink();
        self.watch_host();
        self.publish(true);
    }

    /// Frees scratch memory if nothing runs.
    pub(crate) fn free_idle_scratch(&mut self) {
        if !self.requests.all().any(|t| t.begun) {
            self.free_scratch();
        }
    }

    /// Frees the scratch that no pass uses and the spare states: they hold no data.
    pub(crate) fn free_scratch(&mut self) {
        self.space.free(&mut self.memory);
        self.speculation.free_states(&mut self.memory);
    }

    /// Ends the requests for which `reason` returns an error.
    pub(crate) fn end_those(&mut self, reason: impl Fn(&Task) -> Option<Error>) {
        let found = |task: &Task| reason(task).map(|error| (task.seq, error));
        let over = self.requests.tasks.values().filter_map(found);
        let over: Vec<(SeqId, Error)> = over.collect();
        for (seq, error) in over {
            self.end(seq, error);
        }
    }

    /// Ends a request with an error, if it still exists.
    pub(crate) fn end(&mut self, seq: SeqId, error: Error) {
        self.requests.scheduler.end(seq);
        if let Some(task) = self.requests.tasks.remove(&seq) {
            self.finish(task, Some(error));
        }
    }

    /// Frees what a request held, publishes, and reports its failure if `error` is given.
    pub(crate) fn finish(&mut self, mut task: Task, error: Option<Error>) {
        self.close_account(&mut task);
        let plan = task.loaded.model().plan();
        task.memory.free(&mut self.memory, plan);
        self.release_rest(task.model);
        if let Some(error) = error {
            tracing::debug!(model = task.loaded.name(), %error, "a request ended early");
            task.fail(error);
        }
    }

    /// Whether a shutdown is complete: no request is left, or the grace period has passed.
    fn drained(&mut self, now: Instant) -> bool {
        let Some(draining) = &self.draining else {
            return false;
        };
        if !self.requests.is_empty() && now < draining.until {
            return false;
        }
        self.finish_passes();
        self.end_those(|_| Some(crate::actor::commands::draining()));
        for waiting in self.requests.images.take_waiting() {
            waiting.fail(crate::actor::commands::draining());
        }
        self.memory.write_all_notes();
        let draining = self.draining.take().expect("looked at above");
        for reply in draining.replies {
            // Nobody waiting is no reason to stay.
            let _ = reply.send(());
        }
        true
    }

    /// Ends every request with the reason for which the engine ends.
    pub(crate) fn give_up(&mut self, lost: &Loss) {
        self.guards.lost = Some(lost.clone());
        let error = || device_lost(lost);
        for task in std::mem::take(&mut self.requests.tasks).into_values() {
            task.fail(error());
        }
        for waiting in self.requests.images.take_waiting() {
            waiting.fail(error());
        }
        self.requests.suspended.fail(error);
        self.preloads.end(|_| true, error);
        self.guards.loss.tell(lost);
    }
}
