//! Requests with images: the vision tower first computes the images' rows in a request of its own;
//! rows that an earlier request left cached are not recomputed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rocmforge_model::N_PATCH_MAX;
use rocmforge_ops::positions_of_parts;
use rocmforge_scheduler::Kind;
use rocmforge_tensor_cache::ModelId;
use rocmforge_vision::PreparedImage;
use tokio::sync::{mpsc, oneshot};

use crate::actor::commands::SchedulerRequest;
use crate::actor::engine::Engine;
use crate::api::error::Error;
use crate::api::images::{ImageRows, ImageSpan, check};
use crate::api::times::Part;
use crate::api::{Asker, GenerateEvent, GenerateRequest};
use crate::model::loaded::LoadedModel;
use crate::request::images::{PlacedImage, TowerWork, WaitingRequest};
use crate::request::task::Work;
use crate::request::time_account::TimeAccount;

impl Engine {
    /// Starts a request for text whose prompt has images.
    pub(crate) fn generate_with_images(
        &mut self,
        request: GenerateRequest,
        images: Vec<ImageSpan>,
        events: mpsc::Sender<GenerateEvent>,
        account: TimeAccount,
    ) {
        if images.is_empty() {
            return self.generate(request, Vec::new(), events, account);
        }
        let about = (&request.model, &request.prompt[..], request.n_ctx);
        match self.tower_for(about, &images, request.asker) {
            Ok((tower, _)) => self.compute_images(tower, request, images, (events, account)),
            Err(error) => {
                // The channel is new and has room.
                let _ = events.try_send(GenerateEvent::Failed(error));
            }
        }
    }

    /// The vision tower that computes a request's images, after all of the request was checked.
    fn tower_for(
        &self,
        (model, prompt, n_ctx): (&Arc<LoadedModel>, &[u32], Option<u32>),
        images: &[ImageSpan],
        asker: Asker,
    ) -> Result<(ModelId, Arc<LoadedModel>), Error> {
        let name = model.name();
        let (model, _) = self.check(model, prompt, 0, n_ctx)?;
        let Some(entry) = self.models.tower_of(model) else {
            return Err(Error::InvalidArgument {
                field: "images",
                message: format!(
                    "model '{}' was loaded without the part that reads images; load it with its projector (mmproj), or \
                     ask a model that reads images",
                    name
                ),
            });
        };
        let loaded = Arc::clone(&entry.loaded);
        let tower = tower_of(&loaded)?;
        check(images, prompt.len(), tower)?;
        let waiting = self.requests.images.waiting(|_| true);
        let is_own = |w: &WaitingRequest| w.request.asker.client == asker.client;
        let own = self.requests.images.waiting(is_own);
        let most = self.config.queue_capacity;
        // One client leaves places to others, as in the queue.
        if waiting >= most || own >= (most - most / 8).max(1) {
            return Err(Error::Exhausted {
                message: format!(
                    "{waiting} requests wait for their images already; try again when some have ended"
                ),
                retry_after: Duration::from_secs(1),
            });
        }
        Ok((entry.id, loaded))
    }

    /// Starts the computation of those image rows that are not cached, and makes the request wait
    /// for them.
    fn compute_images(
        &mut self,
        tower: ModelId,
        request: GenerateRequest,
        images: Vec<ImageSpan>,
        (events, times): (mpsc::Sender<GenerateEvent>, TimeAccount),
    ) {
        let asker = self.sharing_of(request.reuse, request.asker);
        let known = &mut self.requests.images;
        let sharing = known.sharing(asker);
        let mut waiting = WaitingRequest {
            rows: vec![None; images.len()],
            request,
            images,
            events,
            times,
            tower,
            sharing,
        };
        for i in 0..waiting.rows.len() {
            waiting.rows[i] = self.requests.images.find(&waiting.key(i));
        }
        self.requests.images.wait(waiting);
        self.collect_images();
    }

    /// Computes the rows of one image, without a prompt.
    pub(crate) fn read_image(
        &mut self,
        model: &Arc<LoadedModel>,
        image: Arc<PreparedImage>,
        reply: oneshot::Sender<Result<ImageRows, Error>>,
    ) {
        let span = ImageSpan {
            first: 0,
            image: Arc::clone(&image),
        };
        let tower = model.tower().and_then(|tower| tower.model().tower());
        let n = tower.map_or(1, |tower| span.n(tower));
        let prompt = vec![0; n.clamp(1, 2 * N_PATCH_MAX as usize)];
        let asker = Asker::default();
        match self.tower_for((model, &prompt, None), &[span], asker) {
            Ok(tower) => self.ask_tower(tower, image, asker, self.now(), reply),
            Err(error) => {
                let _ = reply.send(Err(error));
            }
        }
    }

    /// Starts the vision towers on images that requests wait for. Returns whether any was started.
    fn compute_images_next(&mut self) -> bool {
        let received = self.now();
        let next = self.requests.images.next();
        let any = !next.is_empty();
        for (key, image, asker) in next {
            // Who waits for a tower that is unloaded is told then.
            let Some(entry) = self.models.get(key.tower) else {
                continue;
            };
            let loaded = Arc::clone(&entry.loaded);
            let reply = self.requests.images.ask(key);
            self.ask_tower((key.tower, loaded), image, asker, received, reply);
        }
        any
    }

    fn ask_tower(
        &mut self,
        (id, loaded): (ModelId, Arc<LoadedModel>),
        image: Arc<PreparedImage>,
        asker: Asker,
        received: Instant,
        reply: oneshot::Sender<Result<ImageRows, Error>>,
    ) {
        let Ok(tower) = tower_of(&loaded) else {
            return;
        };
        let (block, parts) = (tower.block(), tower.parts(image.grid));
        let patches = image.grid[0] * image.grid[1];
        let (n, rows) = (patches / block, patches + tower.rows_behind());
        let positions = rows.max(positions_of_parts(parts.iter().copied()));
        let order = tower.order(image.grid);
        self.requests.images.asked += 1;
        // To the scheduler it is a scoring, which computes a row for each token but the last.
        let wanted = SchedulerRequest {
            kind: Kind::Score,
            positions_max: positions + 1,
            open_ended: false,
            realm: None,
            adapters: None,
        };
        let work = Work::Tower(TowerWork {
            image,
            reply,
            rows: ImageRows::with_room(n, tower.n_out as usize, 1 + tower.deepstack.len()),
            n,
            block,
            parts,
            order,
        });
        self.enqueue(
            id,
            loaded,
            (vec![0; rows + 1], Vec::new()),
            positions + 1,
            wanted,
            TimeAccount::new(received, None),
            (None, asker),
            work,
        );
    }

    /// Takes the image rows that towers have computed: starts requests that have all of theirs, and
    /// ends computations that no request waits for.
    pub(crate) fn collect_images(&mut self) {
        self.take_images();
        // An answer may be there at once: that there is no place for it.
        while self.compute_images_next() {
            self.take_images();
        }
    }

    fn take_images(&mut self) {
        let now = self.now();
        let (ready, ended) = self.requests.images.collect(now);
        for (request, error) in ended {
            request.fail(error);
        }
        for waiting in ready {
            let tower = waiting.request.model.tower();
            let Some(tower) = tower.and_then(|tower| tower.model().tower()) else {
                waiting.fail(Error::Internal(
                    "rows of an image without a tower".to_owned(),
                ));
                continue;
            };
            let whole = waiting.request.model.model().reads_images_whole(tower);
            let row_gap = tower.row_gap;
            let spans = waiting.images.iter().zip(waiting.rows);
            let placed = spans.filter_map(|(span, rows)| {
                let placed = PlacedImage {
                    first: span.first,
                    grid: span.image.grid.map(|side| side / span.image.merge),
                    row_gap,
                    whole,
                    rows: rows?,
                };
                Some((placed, span.image.digest))
            });
            let placed = placed.collect();
            // Whether its model is still there is looked at once more.
            let mut times = waiting.times;
            times.all_to(Part::Tower, now);
            self.generate(waiting.request, placed, waiting.events, times);
        }
    }
}

fn tower_of(loaded: &LoadedModel) -> Result<&rocmforge_model::Tower, Error> {
    let tower = loaded.model().tower();
    tower.ok_or_else(|| Error::Internal("a projector without a tower".to_owned()))
}
