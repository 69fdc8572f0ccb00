//! Execution of each command that the engine receives.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rocmforge_scheduler::{Arrival, ClientId, Kind};
use rocmforge_tensor_cache::ModelId;
use rocmforge_tokenizer::DecodeOptions;
use tokio::sync::{mpsc, oneshot};

use crate::actor::engine::{Draining, Engine};
use crate::actor::publish;
use crate::actor::release::refuse;
use crate::api::config::PrefixCache;
use crate::api::error::Error;
use crate::api::refusal::Refusal;
use crate::api::{Asker, Budget, BudgetChange, Command, GenerateEvent, GenerateRequest};
use crate::features::prefix_cache::Realm;
use crate::features::speculation::drafts::Drafts;
use crate::guards::budget::WantedBudget;
use crate::model::adapters::AppliedAdapters;
use crate::model::loaded::LoadedModel;
use crate::model::rotations::open_ended_context;
use crate::request::decoding::Chooser;
use crate::request::encode;
use crate::request::gaps::Gaps;
use crate::request::images::PlacedImage;
use crate::request::kv::SequenceMemory;
use crate::request::sampler::Sampler;
use crate::request::stop::StopStrings;
use crate::request::task::{Generation, Task, Work};
use crate::request::time_account::TimeAccount;

/// Maximum number of models that can be registered at a time.
pub const MODELS_MAX: usize = 1024;

impl Engine {
    /// Executes a command.
    pub(crate) fn handle(&mut self, command: Command) {
        if let Err(error) = self.wake_for(&command) {
            self.publish(true);
            return refuse(command, error);
        }
        match command {
            Command::Load { prepared, reply } => {
                let result = self.load(*prepared);
                self.answer(reply, result);
            }
            Command::Unload { name, force, reply } => {
                self.finish_passes();
                let result = self.unload(&name, force);
                self.answer(reply, result);
            }
            Command::Close { name, only, reply } => {
                let result = self.close(&name, only.as_ref());
                self.answer(reply, result);
            }
            Command::Reopen { name, reply } => {
                self.reopen(&name);
                self.answer(reply, Ok(()));
            }
            Command::Generate {
                request,
                images,
                events,
                sent,
                times,
            } => {
                let account = self.open_account(sent, times);
                self.generate_with_images(*request, images, events, account);
            }
            Command::ReadImage {
                model,
                image,
                reply,
            } => self.read_image(&model, image, reply),
            Command::Score {
                request,
                reply,
                timed,
            } => {
                let account = self.open_account(timed.sent, timed.times);
                self.score(*request, reply, account);
            }
            Command::Embed {
                request,
                reply,
                timed,
            } => {
                let account = self.open_account(timed.sent, timed.times);
                self.embed(*request, reply, account);
            }
            Command::Preload {
                name,
                segments,
                room,
                events,
            } => self.preload(&name, segments, room, events),
            Command::Pin {
                name,
                segments,
                pinned,
                reply,
            } => {
                let result = self.pin(&name, segments, pinned);
                if !pinned {
                    self.release_unpinned();
                }
                self.answer(reply, result);
            }
            Command::Clear { name, disk, reply } => {
                self.finish_passes();
                let result = self.clear(name.as_deref(), disk);
                self.answer(reply, result);
            }
            Command::SetBudget { budget, reply } => {
                let result = self.set_budget(budget);
                self.answer(reply, result);
            }
            Command::Release { host, reply } => {
                let result = self.release_asked(host);
                self.answer(reply, result);
            }
            Command::SetIdleRelease { config, reply } => {
                self.guards.release.configure(config);
                self.answer(reply, Ok(()));
            }
            Command::SetPolicy { policy: new, reply } => {
                let before = self.memory.store.cache.policy();
                self.memory.store.cache.set_policy(publish::to_cache(new));
                self.answer(reply, Ok(publish::from_cache(before)));
            }
            Command::Drain { grace, reply } => self.drain(grace, reply),
            Command::Ping { reply } => {
                // Whoever asked may have given up.
                let _ = reply.send(());
            }
            Command::Wake => {}
        }
    }

    /// Publishes the snapshot, then sends the reply: whoever has the reply sees a snapshot that
    /// includes the change.
    fn answer<T>(&mut self, reply: oneshot::Sender<Result<T, Error>>, result: Result<T, Error>) {
        self.publish(true);
        // An asker that went away has its command done all the same.
        let _ = reply.send(result);
    }

    /// Starts a request for text whose images have been computed; each image comes with its digest.
    pub(crate) fn generate(
        &mut self,
        request: GenerateRequest,
        images: Vec<(PlacedImage, [u8; 32])>,
        events: mpsc::Sender<GenerateEvent>,
        account: TimeAccount,
    ) {
        let checked = encode::refuse_text(&request.model)
            .and_then(|()| self.check(&request.model, &request.prompt, 0, request.n_ctx));
        let (asked, class) = (request.max_gap, request.asker.class);
        let checked = checked.and_then(|(model, n_ctx)| {
            let promised = self.promise_gap(model, asked, class)?;
            Ok((model, n_ctx, promised))
        });
        let (model, mut n_ctx, promised) = match checked {
            Ok(checked) => checked,
            Err(error) => {
                // The channel is new and has room.
                let _ = events.try_send(GenerateEvent::Failed(error));
                return;
            }
        };
        let tokenizer = request.model.tokenizer();
        let mut sampler = Sampler::new(request.sampling, || Box::new(tokenizer.clone()));
        sampler.read(&request.prompt);
        let n_prompt = request.prompt.len();
        let (tokens, images) = self.with_images(request.prompt, images);
        let plan = request.model.model().plan();
        if request.max_tokens.is_none() && request.n_ctx.is_none() {
            n_ctx = open_ended_context(plan, n_prompt, n_ctx);
        }
        let positions_max = match request.max_tokens {
            Some(max) => n_ctx.min(n_prompt + max as usize),
            None => n_ctx,
        };
        let long = plan.rotates_long(positions_max);
        let adapters = request.adapters;
        let key = adapters.as_ref().map(|applied| applied.key());
        let wanted = SchedulerRequest {
            kind: Kind::Generate,
            positions_max,
            open_ended: request.max_tokens.is_none(),
            realm: self
                .sharing_of(request.reuse, request.asker)
                .map(|asker| Realm {
                    model,
                    asker,
                    long,
                    adapters: key.unwrap_or_default(),
                }),
            adapters,
        };
        let decoder = request.model.tokenizer().stream_with(DecodeOptions {
            special: request.decoding.control_text,
            ..DecodeOptions::default()
        });
        let work = Work::Generate(Box::new(Generation {
            events,
            due: Vec::new(),
            chooser: Chooser::new(sampler, request.decoding, || self.requests.masks())
                .with_drafts(images.is_empty()),
            drafts: Drafts::default(),
            drafted: (0, 0),
            decoder,
            stops: StopStrings::new(request.stop),
            max_tokens: request.max_tokens,
            n_prompt,
            reused: 0,
            generated: 0,
            started: None,
            first_token: None,
            last_token: None,
            gaps: Gaps::new(promised),
        }));
        self.enqueue(
            model,
            request.model,
            (tokens, images),
            n_ctx,
            wanted,
            account,
            (request.deadline, request.asker),
            work,
        );
    }

    /// Replaces the placeholders of images in a prompt's tokens by numbers that stand for each
    /// image's content.
    fn with_images(
        &mut self,
        mut tokens: Vec<u32>,
        images: Vec<(PlacedImage, [u8; 32])>,
    ) -> (Vec<u32>, Vec<PlacedImage>) {
        let placed = images.into_iter().map(|(image, digest)| {
            let token = self.requests.images.token(digest);
            for (run, _) in image.runs() {
                tokens[run].fill(token);
            }
            image
        });
        let placed = placed.collect();
        (tokens, placed)
    }

    /// The realm in which a request shares cached prefixes; `None` if it shares them with no other
    /// request.
    pub(crate) fn sharing_of(&self, reuse: bool, asker: Asker) -> Option<u64> {
        match self.config.prefix_cache {
            _ if !reuse => None,
            PrefixCache::Off => None,
            PrefixCache::PerClient => Some(asker.client),
            PrefixCache::Shared => Some(0),
        }
    }

    /// Checks a request's model, token ids and context length. Returns the model's id and the
    /// context length; the last `beyond` ids need no position in the context.
    pub(crate) fn check(
        &self,
        loaded: &Arc<LoadedModel>,
        ids: &[u32],
        beyond: usize,
        n_ctx: Option<u32>,
    ) -> Result<(ModelId, usize), Error> {
        if self.draining.is_some() {
            return Err(draining());
        }
        // Whoever asks found it loaded: it went as it does under a request that waits or runs.
        let Ok(entry) = self.models.find(loaded.name()) else {
            return Err(Refusal::Unloaded {
                model: loaded.name().to_owned(),
            }
            .into());
        };
        if !Arc::ptr_eq(&entry.loaded, loaded) {
            return Err(Refusal::Reloaded {
                model: loaded.name().to_owned(),
            }
            .into());
        }
        let hparams = loaded.model().hparams();
        let longest = hparams.n_ctx_train.min(self.config.n_ctx_max);
        let n_ctx = n_ctx.unwrap_or(longest);
        if n_ctx == 0 || n_ctx > longest {
            return Err(Error::InvalidArgument {
                field: "n_ctx",
                message: format!(
                    "{n_ctx} is out of range 1..={longest} (trained for {}, the daemon allows {})",
                    hparams.n_ctx_train, self.config.n_ctx_max
                ),
            });
        }
        if ids.is_empty() {
            return Err(Error::InvalidArgument {
                field: "prompt",
                message: "has no tokens; give some text".to_owned(),
            });
        }
        // Generating needs a position for the first new token; the last
        // position can be generated into.
        if ids.len() - beyond > n_ctx as usize {
            return Err(Error::InvalidArgument {
                field: "prompt",
                message: format!(
                    "has {} tokens, the context holds {n_ctx}; shorten it or raise n_ctx",
                    ids.len()
                ),
            });
        }
        if let Some(id) = ids.iter().find(|&&id| id >= hparams.n_vocab) {
            return Err(Error::InvalidArgument {
                field: "ids",
                message: format!(
                    "token id {id} is not below the vocabulary's {}",
                    hparams.n_vocab
                ),
            });
        }
        // A far file is looked at when it is read, where nobody waits for it without end.
        if loaded.far().is_none() {
            let _waiting = self.memory.store.files.begin(loaded.name(), loaded.path());
            loaded
                .file()
                .check_unchanged()
                .map_err(|e| crate::api::error::from_read(loaded.name(), loaded.path(), e))?;
        }
        Ok((entry.id, n_ctx as usize))
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "the fields of the one struct that is made here"
    )]
    pub(crate) fn enqueue(
        &mut self,
        model: ModelId,
        loaded: Arc<LoadedModel>,
        (tokens, images): (Vec<u32>, Vec<PlacedImage>),
        n_ctx: usize,
        wanted: SchedulerRequest,
        mut times: TimeAccount,
        (deadline, asker): (Option<Instant>, Asker),
        work: Work,
    ) {
        times.begin_uploads(self.memory.store.reasons.before(model));
        let seq = self.requests.next_seq();
        let arrival = Arrival {
            seq,
            model: rocmforge_scheduler::ModelId(model.0),
            client: ClientId(asker.client),
            class: asker.class,
            kind: wanted.kind,
            tokens: tokens.len() as u32,
            positions_max: wanted.positions_max as u32,
            open_ended: wanted.open_ended,
            whole: match &work {
                Work::Embed(e) => e.whole,
                Work::Tower(_) => true,
                Work::Generate(_) | Work::Score(_) => false,
            },
            // The engine ends what is late itself, and says how many tokens there were.
            deadline: None,
            promised: matches!(&work, Work::Generate(g) if g.gaps.promised().is_some()),
        };
        let has_draft_model = self.speculation.draft_model(model).is_some();
        let has_mtp = self.speculation.mtp(model).is_some();
        let predicts = has_mtp && work.takes_drafts() && !has_draft_model;
        let reach = match work {
            // The last token is none.
            Work::Embed(_) | Work::Tower(_) => wanted.positions_max - 1,
            Work::Generate(_) | Work::Score(_) => wanted.positions_max,
        };
        let task = Task {
            seq,
            model,
            loaded,
            asker,
            tokens,
            n_past: 0,
            n_ctx,
            reach,
            memory: SequenceMemory::default(),
            compactions: 0,
            no_room: (0, 0),
            yielded_at: 0,
            begun: false,
            follows: false,
            reads: false,
            open_ended: wanted.open_ended,
            realm: wanted.realm,
            adapters: wanted.adapters,
            images,
            predicts,
            sized: (0, 0),
            counts: crate::api::RequestCacheUse::default(),
            received: times.begun(),
            times,
            deadline,
            work,
        };
        let wholes = task.wholes();
        self.arrive(task, arrival);
        self.requests.scheduler.keep_whole(seq, &wholes);
    }

    fn set_budget(&mut self, budget: Budget) -> Result<BudgetChange, Error> {
        let was_closed = self.open_device()?;
        let set = self.set_budget_of_open(budget);
        if was_closed && set.is_err() {
            self.close_device();
        }
        set
    }

    fn set_budget_of_open(&mut self, budget: Budget) -> Result<BudgetChange, Error> {
        let held = self.memory.store.device.memory_use();
        let held = held.map_or(0, |memory| memory.allocated_bytes);
        let wanted = WantedBudget::of(
            budget,
            &*self.memory.store.device,
            held,
            self.guards.keep_free.bytes(),
        )?;
        let staging = self.memory.store.reserve_bytes();
        let before = self.guards.release.before();
        let before = before.unwrap_or(self.memory.budget());
        if staging > 0 && wanted.bytes < self.budget_floor().min(before) {
            let (asked, min) = (wanted.bytes, self.budget_least());
            return Err(Refusal::BudgetTooSmall {
                asked,
                min,
                staging,
            }
            .into());
        }
        let change = self.change_budget(wanted.bytes)?;
        if let Some((_, guard)) = &mut self.guards.others {
            guard.budget_was_set(wanted.bytes);
        }
        // What was released does not come back beside it.
        self.guards.release.take_before();
        self.guards.release.note_work(self.memory.store.clock.now());
        self.guards
            .keep_free
            .budget_was_set(wanted.withheld, wanted.left);
        self.guards.budget_note = wanted.note;
        Ok(change)
    }

    /// Changes the budget to `wanted` bytes, which must be in the allowed range.
    pub(crate) fn change_budget(&mut self, wanted: u64) -> Result<BudgetChange, Error> {
        self.finish_passes();
        let before = self.memory.store.cache.stats().total.counters;
        if wanted > self.memory.budget() {
            self.draft_again();
        } else if self.room_for_running(wanted) > wanted {
            self.stop_drafting(|_| true);
        }
        // Running work keeps what it needs; the rest of the way is gone as it ends.
        let now = self.room_on_the_way_to(wanted);
        self.guards.budget_wanted = (now > wanted).then_some(wanted);
        let above = match self.memory.set_budget(now) {
            Err(_) if self.memory.store.take_refused_bytes().is_some() => {
                self.grow_anew(now)?;
                0
            }
            set => set?,
        };
        self.give_back_unused()?;
        let after = self.memory.store.cache.stats().total.counters;
        Ok(BudgetChange {
            budget_bytes: wanted,
            evicted_segments: after.evictions - before.evictions,
            evicted_bytes: after.evicted_bytes - before.evicted_bytes,
            excess_bytes: now - wanted + above,
        })
    }

    /// Continues a shrink of the budget that running work had held up. Called after releases.
    pub(crate) fn finish_shrink(&mut self) {
        if let Some(wanted) = self.guards.budget_wanted {
            let now = self.room_on_the_way_to(wanted);
            if let Err(error) = self.memory.set_budget(now) {
                self.lose(&error);
            }
            self.guards.budget_wanted = (now > wanted).then_some(wanted);
        } else if let Err(error) = self.memory.store.finish_shrink() {
            self.lose(&error);
        }
        if let Err(error) = self.give_back_unused() {
            self.lose(&error);
        }
    }

    /// The budget to put in force on the way to `wanted` bytes: not less than running work needs,
    /// and not more than the larger of the present budget and `wanted`.
    fn room_on_the_way_to(&mut self, wanted: u64) -> u64 {
        let before = self.memory.budget();
        self.room_for_running(wanted).min(before.max(wanted))
    }

    fn drain(&mut self, grace: Duration, reply: oneshot::Sender<()>) {
        let until = self.now() + grace;
        match &mut self.draining {
            Some(draining) => {
                draining.until = draining.until.min(until);
                draining.replies.push(reply);
            }
            None => {
                self.draining = Some(Draining {
                    until,
                    replies: vec![reply],
                })
            }
        }
        self.end_those(|task| (!task.begun).then(draining));
        self.preloads.end(|_| true, draining);
        self.publish(true);
    }
}

/// A request's parameters for the scheduler.
pub(crate) struct SchedulerRequest {
    pub(crate) kind: Kind,
    /// Maximum number of positions that the request can reach, prompt and output together.
    pub(crate) positions_max: usize,
    /// Whether the request has no `max_tokens`, so that only the model or the context's end ends
    /// it.
    pub(crate) open_ended: bool,
    /// The realm in which the request shares cached prefixes; `None` for no sharing.
    pub(crate) realm: Option<Realm>,
    /// The request's LoRA adapters.
    pub(crate) adapters: Option<Arc<AppliedAdapters>>,
}

/// The error for new work while the daemon shuts down.
pub(crate) fn draining() -> Error {
    Error::Unavailable {
        message: "the daemon is shutting down; try again when it has been restarted".to_owned(),
        retry_after: Duration::from_secs(5),
    }
}
