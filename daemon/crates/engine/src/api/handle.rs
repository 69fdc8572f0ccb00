//! The handle through which other threads send commands to the engine, and the events of its
//! requests.
//!
//! *Invariant:* no call blocks its thread to wait for the engine: commands are sent with
//! `try_send`, replies are awaited.

use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, TrySendError};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use rocmforge_device::Loss;
use tokio::sync::{mpsc, oneshot, watch};

use crate::api::error::{Error, device_lost};
use crate::api::times::TimesSlot;
use crate::api::{
    Budget, BudgetChange, COMMAND_CAPACITY, Cleared, Command, EVENT_CAPACITY, GenerateEvent,
    GenerateRequest, ImageSpan, Policy, PreloadEvent, PreloadRoom, PreparedImage, Registered,
    STEP_EVENTS, Snapshot, Unloaded,
};
use crate::clock::Clock;
use crate::model::loaded::{LoadedModel, PreparedModel};

/// Handle of a running engine: sends commands and reads snapshots. Cheap to clone.
#[derive(Debug, Clone)]
pub struct EngineHandle {
    commands: SyncSender<Command>,
    snapshot: watch::Receiver<Arc<Snapshot>>,
    /// Receives why the device is lost, once it is.
    lost: watch::Receiver<Option<Loss>>,
}

impl EngineHandle {
    pub(crate) fn new(
        commands: SyncSender<Command>,
        snapshot: watch::Receiver<Arc<Snapshot>>,
        lost: watch::Receiver<Option<Loss>>,
    ) -> Self {
        Self {
            commands,
            snapshot,
            lost,
        }
    }

    /// Waits until the device is lost, and returns why; for ever, if it never is.
    pub async fn lost(&self) -> Loss {
        until_lost(&mut self.lost.clone()).await
    }

    /// Waits until the engine has ended, and returns why the device is lost, if it is.
    pub async fn ended(&self) -> Option<Loss> {
        let mut lost = self.lost.clone();
        let told = lost.wait_for(Option::is_some).await;
        told.ok().and_then(|told| told.clone())
    }

    /// The snapshot that the engine published last. Never waits.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        Arc::clone(&self.snapshot.borrow())
    }

    /// A receiver of snapshots, for callers that wait for a change.
    pub fn watch(&self) -> watch::Receiver<Arc<Snapshot>> {
        self.snapshot.clone()
    }

    /// The loaded model of this name.
    ///
    /// # Errors
    /// [`Error::UnknownModel`] with the names that exist.
    pub fn model(&self, name: &str) -> Result<Arc<LoadedModel>, Error> {
        let snapshot = self.snapshot();
        match snapshot.models.iter().find(|m| m.model.name() == name) {
            Some(found) => Ok(Arc::clone(&found.model)),
            None => Err(Error::UnknownModel {
                name: name.to_owned(),
                known: snapshot
                    .models
                    .iter()
                    .map(|m| m.model.name().to_owned())
                    .collect(),
            }),
        }
    }

    /// Registers a prepared model; see [`Command::Load`].
    ///
    /// # Errors
    /// [`Error::NameTaken`], [`Error::Precondition`] if a segment can never fit the
    /// budget, or the command could not be sent.
    pub async fn load(&self, prepared: PreparedModel) -> Result<Arc<LoadedModel>, Error> {
        Ok(self.register(prepared).await?.model)
    }

    /// As [`EngineHandle::load`], and returns whether the model was loaded before.
    ///
    /// # Errors
    ///
    /// As [`EngineHandle::load`].
    pub async fn register(&self, prepared: PreparedModel) -> Result<Registered, Error> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Load {
            prepared: Box::new(prepared),
            reply,
        })?;
        self.answered(answer).await?
    }

    /// Forgets a model and returns the bytes freed; see [`Command::Unload`].
    ///
    /// # Errors
    /// [`Error::UnknownModel`], [`Error::Precondition`] while requests of it run, or the
    /// command could not be sent.
    pub async fn unload(&self, name: &str, force: bool) -> Result<Unloaded, Error> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Unload {
            name: name.to_owned(),
            force,
            reply,
        })?;
        self.answered(answer).await?
    }

    /// Starts a generation. Dropping the returned events cancels the generation, after the pass
    /// under way at the latest.
    ///
    /// # Errors
    /// The command could not be sent; every other error arrives as
    /// [`GenerateEvent::Failed`].
    pub fn generate(&self, request: GenerateRequest) -> Result<Events<GenerateEvent>, Error> {
        self.generate_with_images(request, Vec::new())
    }

    /// As [`EngineHandle::generate`], with images in the prompt, for a model that was
    /// [prepared](crate::prepare_reading_images) with a projector. A request with images is decoded
    /// without speculation.
    ///
    /// # Errors
    ///
    /// As [`EngineHandle::generate`].
    pub fn generate_with_images(
        &self,
        request: GenerateRequest,
        images: Vec<ImageSpan>,
    ) -> Result<Events<GenerateEvent>, Error> {
        self.generate_timed(request, images, None)
    }

    /// As [`EngineHandle::generate_with_images`]; when the request has ended, in whatever way, its
    /// time account is put into `times`.
    ///
    /// # Errors
    ///
    /// As [`EngineHandle::generate`].
    pub fn generate_timed(
        &self,
        request: GenerateRequest,
        images: Vec<ImageSpan>,
        times: Option<TimesSlot>,
    ) -> Result<Events<GenerateEvent>, Error> {
        let (events, receiver) = mpsc::channel(EVENT_CAPACITY);
        self.send(Command::Generate {
            request: Box::new(request),
            images,
            events,
            sent: Clock.now(),
            times,
        })?;
        Ok(Events::new(receiver, self))
    }

    /// Computes the rows that a model's vision tower gives for an image, `[tokens][width]`: those
    /// in the place of embeddings and, side by side with them, those for the first layers. Dropping
    /// the future cancels it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a model without a tower or an image that does not
    /// fit it, any error of a pass, or the command could not be sent.
    pub async fn read_image(
        &self,
        model: &Arc<LoadedModel>,
        image: Arc<PreparedImage>,
    ) -> Result<Vec<f32>, Error> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::ReadImage {
            model: Arc::clone(model),
            image,
            reply,
        })?;
        let rows = self.answered(answer).await??;
        Ok(rows.side_by_side())
    }

    /// Starts a preload of segments of the model `name`, or of all. Dropping the events stops it
    /// after the current segment.
    ///
    /// # Errors
    ///
    /// The command could not be sent; every other error arrives as [`PreloadEvent::Failed`].
    pub fn preload(
        &self,
        name: &str,
        segments: Option<Vec<u32>>,
    ) -> Result<Events<PreloadEvent>, Error> {
        let room = match segments {
            None => PreloadRoom::Idle,
            Some(_) => PreloadRoom::Any,
        };
        self.preload_into(name, segments, room)
    }

    /// Starts a preload of segments, or of all, into the memory that `room` names. Dropping the
    /// events stops it after the current segment.
    ///
    /// # Errors
    ///
    /// The command could not be sent; every other error arrives as [`PreloadEvent::Failed`].
    pub fn preload_into(
        &self,
        name: &str,
        segments: Option<Vec<u32>>,
        room: PreloadRoom,
    ) -> Result<Events<PreloadEvent>, Error> {
        let (events, receiver) = mpsc::channel(EVENT_CAPACITY);
        self.send(Command::Preload {
            name: name.to_owned(),
            segments,
            room,
            events,
        })?;
        Ok(Events::new(receiver, self))
    }

    /// Pins or unpins segments and returns the model's pinned bytes.
    ///
    /// # Errors
    /// [`Error::UnknownModel`], [`Error::InvalidArgument`] for an index out of range,
    /// [`Error::Precondition`] if the pinned segments would leave no room to run, or the command
    /// could not be sent.
    pub async fn pin(
        &self,
        name: &str,
        segments: Option<Vec<u32>>,
        pinned: bool,
    ) -> Result<u64, Error> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Pin {
            name: name.to_owned(),
            segments,
            pinned,
            reply,
        })?;
        self.answered(answer).await?
    }

    /// Evicts what is neither pinned nor in use, of one model or of all.
    ///
    /// # Errors
    /// [`Error::UnknownModel`], or the command could not be sent.
    pub async fn clear(&self, name: Option<&str>) -> Result<Cleared, Error> {
        self.clear_also(name, false).await
    }

    /// Evicts what is neither pinned nor in use, of one model or of all, and deletes its KV cache
    /// on disk in the background.
    ///
    /// # Errors
    /// [`Error::UnknownModel`], or the command could not be sent.
    pub async fn clear_with_disk(&self, name: Option<&str>) -> Result<Cleared, Error> {
        self.clear_also(name, true).await
    }

    async fn clear_also(&self, name: Option<&str>, disk: bool) -> Result<Cleared, Error> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Clear {
            name: name.map(str::to_owned),
            disk,
            reply,
        })?;
        self.answered(answer).await?
    }

    /// Changes the budget of device memory.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if it is out of range, or the command could not be sent.
    pub async fn set_budget(&self, budget: Budget) -> Result<BudgetChange, Error> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::SetBudget { budget, reply })?;
        self.answered(answer).await?
    }

    /// Waits until the engine has taken this command from its queue: within one turn of its loop (a
    /// pass, or a chunk with the passes between its steps), unless it hangs.
    ///
    /// # Errors
    ///
    /// The command could not be sent.
    pub async fn ping(&self) -> Result<(), Error> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Ping { reply })?;
        self.answered(answer).await
    }

    /// Changes the eviction policy and returns the one before.
    ///
    /// # Errors
    ///
    /// The command could not be sent.
    pub async fn set_policy(&self, policy: Policy) -> Result<Policy, Error> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::SetPolicy { policy, reply })?;
        self.answered(answer).await?
    }

    /// Ends the engine; returns when the last request has ended or `grace` has passed.
    pub async fn drain(&self, grace: Duration) {
        let (reply, answer) = oneshot::channel();
        let mut command = Command::Drain { grace, reply };
        // A full queue delays a drain; it must not lose it.
        while let Err(TrySendError::Full(back)) = self.commands.try_send(command) {
            command = back;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        // An error means that the engine has ended, which is what was asked for.
        let _ = answer.await;
    }

    /// Awaits the reply to a command; returns an error if the engine ended or its device is lost,
    /// since then no reply comes.
    pub(super) async fn answered<T>(&self, answer: oneshot::Receiver<T>) -> Result<T, Error> {
        let mut lost = self.lost.clone();
        tokio::select! {
            biased;
            answer = answer => answer.map_err(|_| self.gone()),
            loss = until_lost(&mut lost) => Err(device_lost(&loss)),
        }
    }

    pub(super) fn send(&self, command: Command) -> Result<(), Error> {
        self.commands
            .try_send(command)
            .map_err(|error| match error {
                TrySendError::Full(_) => Error::Exhausted {
                    message: format!(
                        "{COMMAND_CAPACITY} commands already wait for the engine; try again"
                    ),
                    retry_after: Duration::from_millis(200),
                },
                TrySendError::Disconnected(_) => self.gone(),
            })
    }

    /// The error for a command to an engine that has ended: the engine's own reason, if it left
    /// one.
    fn gone(&self) -> Error {
        match &*self.lost.borrow() {
            Some(loss) => device_lost(loss),
            None => Error::Unavailable {
                message: "the engine has stopped and the daemon ends; try again on a new connection once it runs again".to_owned(),
                retry_after: Duration::from_secs(2),
            },
        }
    }
}

/// Events of one request. Reading them lets a sequence go on that waits for its reader; dropping
/// them cancels the request.
#[derive(Debug)]
pub struct Events<T> {
    receiver: mpsc::Receiver<T>,
    commands: SyncSender<Command>,
    lost: LossWatch,
}

impl<T> Events<T> {
    fn new(receiver: mpsc::Receiver<T>, engine: &EngineHandle) -> Self {
        Self {
            receiver,
            commands: engine.commands.clone(),
            lost: LossWatch::of(engine.lost.clone()),
        }
    }

    /// The next event, or `None` after the last (or if the engine ended).
    pub async fn next(&mut self) -> Option<T> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    /// As [`Events::next`], for callers that poll; no event is lost if a caller stops polling.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<T>> {
        // In this order: what was sent before the loss is read before it.
        let event = match self.receiver.poll_recv(cx) {
            Poll::Ready(event) => event,
            Poll::Pending => {
                ready!(self.lost.poll(cx));
                None
            }
        };
        // Looked at after the event was taken: one that the engine sent just before would be missed
        // otherwise, and the engine would sleep with its sequence left out.
        if self.receiver.len() + 1 + STEP_EVENTS > EVENT_CAPACITY {
            // If the queue is full the engine is awake and looks at every sequence anyway.
            let _ = self.commands.try_send(Command::Wake);
        }
        Poll::Ready(event)
    }
}

/// Waits for the loss of the device, once for all events of a request: a new wait for each event
/// would cost as much as taking it.
struct LossWatch {
    /// Receives the reason once the device is lost.
    told: watch::Receiver<Option<Loss>>,
    waiting: Pin<Box<dyn Future<Output = Loss> + Send>>,
    /// The waker that `waiting` wakes.
    woken: Option<Waker>,
    is_lost: bool,
}

impl LossWatch {
    fn of(told: watch::Receiver<Option<Loss>>) -> Self {
        let mut own = told.clone();
        Self {
            told,
            waiting: Box::pin(async move { until_lost(&mut own).await }),
            woken: None,
            is_lost: false,
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.is_lost {
            return Poll::Ready(());
        }
        let is_woken = self.woken.as_ref().is_some_and(|w| w.will_wake(cx.waker()));
        if is_woken && self.told.has_changed().is_ok_and(|is_new| !is_new) {
            return Poll::Pending;
        }
        self.woken = Some(cx.waker().clone());
        ready!(self.waiting.as_mut().poll(cx));
        self.is_lost = true;
        Poll::Ready(())
    }
}

impl fmt::Debug for LossWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LossWatch")
            .field("is_lost", &self.is_lost)
            .finish_non_exhaustive()
    }
}

impl<T> Drop for Events<T> {
    fn drop(&mut self) {
        self.receiver.close();
        // So that a sequence that waits for its reader is seen to be cancelled.
        let _ = self.commands.try_send(Command::Wake);
    }
}

/// Waits for the loss of the device; for ever if the engine ends otherwise.
async fn until_lost(lost: &mut watch::Receiver<Option<Loss>>) -> Loss {
    let told = lost.wait_for(Option::is_some).await;
    match told.ok().and_then(|told| told.clone()) {
        Some(loss) => loss,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::sync_channel;
    use std::task::Wake;

    use rocmforge_device::LossKind;

    use super::*;

    /// Counts how often it is woken.
    #[derive(Default)]
    struct Counted(AtomicUsize);

    impl Wake for Counted {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    struct Sent {
        events: mpsc::Sender<u32>,
        lost: watch::Sender<Option<Loss>>,
    }

    fn begun() -> (Sent, Events<u32>) {
        let (commands, _) = sync_channel(1);
        let first = Arc::new(Snapshot::empty());
        let (lost, told) = watch::channel(None);
        let handle = EngineHandle::new(commands, watch::channel(first).1, told);
        let (events, receiver) = mpsc::channel(EVENT_CAPACITY);
        (Sent { events, lost }, Events::new(receiver, &handle))
    }

    #[test]
    fn a_loss_wakes_whoever_polled_last_and_is_told_behind_what_came_before() {
        let (engine, mut events) = begun();
        let [first, last] = [(); 2].map(|()| Arc::new(Counted::default()));
        for polls in [&first, &first, &last, &last] {
            let waker = Waker::from(Arc::clone(polls));
            let polled = events.poll_next(&mut Context::from_waker(&waker));
            assert!(polled.is_pending());
        }
        engine.lost.send_replace(Some(Loss::unknown("gone")));
        let woken = |who: &Counted| who.0.load(Ordering::Relaxed);
        assert_eq!((woken(&first), woken(&last)), (0, 1));
        engine.events.try_send(7).unwrap();
        let waker = Waker::from(last);
        let mut next = || events.poll_next(&mut Context::from_waker(&waker));
        assert_eq!(next(), Poll::Ready(Some(7)));
        // Also when it is asked again.
        assert_eq!([next(), next()], [Poll::Ready(None); 2]);
    }

    /// Once whoever waited for an engine that was stuck was told that it had stopped, without why.
    #[tokio::test]
    async fn commands_to_an_engine_that_lost_its_device_say_how_it_was_lost() {
        let (commands, stuck) = sync_channel(2);
        let first = Arc::new(Snapshot::empty());
        let (lost, told) = watch::channel(None);
        let handle = EngineHandle::new(commands, watch::channel(first).1, told);
        let waits = tokio::spawn({
            let handle = handle.clone();
            async move { handle.ping().await }
        });
        while stuck.try_recv().is_err() {
            tokio::task::yield_now().await;
        }
        lost.send_replace(Some(Loss::new(LossKind::Hang, "no end after 30 s")));
        let waited = waits.await.unwrap();
        // No one takes commands any more.
        drop(stuck);
        for told in [waited, handle.ping().await] {
            let error = told.unwrap_err().to_string();
            assert!(error.contains("no end after 30 s"), "{error}");
        }
    }

    #[test]
    fn an_engine_that_ends_without_a_loss_ends_its_events() {
        let (engine, mut events) = begun();
        let waker = Waker::noop();
        let mut next = || events.poll_next(&mut Context::from_waker(waker));
        assert!(next().is_pending());
        drop(engine.lost);
        assert!(next().is_pending(), "its events are not at their end yet");
        drop(engine.events);
        assert_eq!(next(), Poll::Ready(None));
    }
}
