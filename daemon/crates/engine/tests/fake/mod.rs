//! The engine on the HIP path without a card: a fake runtime, and how the tests'
//! engines are set up on it.

#![allow(dead_code, reason = "each test binary uses its part")]

pub(crate) mod tiny;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rocmforge_device_gpu::{GpuConfig, GpuDevice, ImageFolder};
use rocmforge_engine::api::{
    Asker, Budget, Decoding, GenerateEvent, GenerateRequest, GenerateSummary, SamplingParams, When,
};
use rocmforge_engine::{
    EngineConfig, EngineHandle, EngineThread, Error, LoadedModel, prepare, start_on,
};
use rocmforge_fake_hip::{Fake, GRANULARITY};
use rocmforge_gguf::MappedFile;
use rocmforge_gpu_driver::{Libraries, Vendor};

/// An engine whose thread is waited for, so that what it held is given back when it is gone.
pub(crate) struct Running {
    handle: Option<EngineHandle>,
    thread: Option<EngineThread>,
}

impl Running {
    pub(crate) fn new(handle: EngineHandle, thread: EngineThread) -> Running {
        Running {
            handle: Some(handle),
            thread: Some(thread),
        }
    }

    /// Lets go of the engine and says how it ended.
    pub(crate) fn end(mut self) -> Result<(), Error> {
        self.handle = None;
        self.thread.take().unwrap().join()
    }
}

impl std::ops::Deref for Running {
    type Target = EngineHandle;

    fn deref(&self) -> &EngineHandle {
        self.handle.as_ref().unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.handle = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// How the device is opened: small pinned memory, since a fake one is real
/// memory that must be filled.
pub(crate) fn gpu_config(fake: &Fake) -> GpuConfig {
    GpuConfig {
        libraries: Libraries {
            hip: Some(fake.path().to_owned()),
            cuda: None,
        },
        watchdog: Duration::from_secs(20),
        ring_pieces: 2,
        ring_piece_bytes: 64 << 10,
        staging_threads: 2,
        // Copies that are timed wait for others where there are several, and when depends on times.
        copy_streams: 1,
        // A vendor's library on this machine knows nothing of the fake's memory.
        vendor_products: false,
        // The n-th call of a function is the same one in every run.
        warm_up: false,
        registration_trial: false,
        trials_dir: None,
        granularity_min: GRANULARITY,
        ..GpuConfig::new(Vendor::Hip, 0)
    }
}

/// A fake runtime with its images.
pub(crate) struct Runtime {
    pub(crate) fake: Fake,
    images: std::path::PathBuf,
}

impl std::ops::Deref for Runtime {
    type Target = Fake;

    fn deref(&self) -> &Fake {
        &self.fake
    }
}

impl Runtime {
    pub(crate) fn new() -> Runtime {
        let fake = Fake::new();
        let images = fake.images();
        Runtime { fake, images }
    }

    /// Starts an engine on it.
    pub(crate) fn start(&self, budget: u64) -> Result<Running, Error> {
        self.start_with(gpu_config(&self.fake), budget)
    }

    /// Starts an engine on it, the device set up in another way.
    ///
    /// What is missing is uploaded: which answer a miss gets depends on times otherwise.
    pub(crate) fn start_with(&self, config: GpuConfig, budget: u64) -> Result<Running, Error> {
        self.start_split(config, budget, (When::Never, None))
    }

    /// Starts an engine on it, with a word on what is not on the card, and on
    /// what the host may keep of it.
    pub(crate) fn start_split(
        &self,
        config: GpuConfig,
        budget: u64,
        (cpu_compute, host_budget): (When, Option<Budget>),
    ) -> Result<Running, Error> {
        let engine = EngineConfig {
            budget: Budget::Bytes(budget),
            cpu_compute,
            host_budget,
            ..EngineConfig::default()
        };
        self.start_as(config, engine)
    }

    /// Starts an engine on it, both set up as they are given.
    pub(crate) fn start_as(
        &self,
        config: GpuConfig,
        engine: EngineConfig,
    ) -> Result<Running, Error> {
        let images = ImageFolder(self.images.clone());
        let device = GpuDevice::open(config, Box::new(images)).map_err(|e| {
            // As the engine says it of a device that it opens itself.
            Error::Unavailable {
                message: e.to_string(),
                retry_after: Duration::ZERO,
            }
        })?;
        let card = device.card();
        let (handle, thread) = start_on(Box::new(device), Some(card), engine)?;
        Ok(Running::new(handle, thread))
    }
}

/// Opens and loads a file.
pub(crate) async fn load(
    engine: &EngineHandle,
    path: &Path,
    name: &str,
) -> Result<Arc<LoadedModel>, Error> {
    let file = MappedFile::open(path).unwrap();
    engine.load(prepare(name, file, &mut |_| {})?).await
}

/// A greedy request for up to `n` tokens behind a text.
pub(crate) fn greedy(model: &Arc<LoadedModel>, text: &str, n: u32) -> GenerateRequest {
    GenerateRequest {
        model: Arc::clone(model),
        prompt: model.tokenizer().encode(text, true, true).unwrap(),
        sampling: SamplingParams {
            temperature: 0.0,
            ..SamplingParams::default()
        },
        max_tokens: Some(n),
        n_ctx: None,
        stop: Vec::new(),
        decoding: Decoding::default(),
        deadline: None,
        max_gap: None,
        asker: Asker::default(),
        reuse: false,
        adapters: None,
    }
}

/// What a request gets that was sent as the engine ended.
pub(crate) fn ended() -> Error {
    Error::Unavailable {
        message: "the engine has ended".to_owned(),
        retry_after: Duration::ZERO,
    }
}

/// Runs a request to its end.
pub(crate) async fn run(
    engine: &EngineHandle,
    request: GenerateRequest,
) -> Result<(Vec<u32>, GenerateSummary), Error> {
    let mut events = engine.generate(request)?;
    let mut ids = Vec::new();
    loop {
        match events.next().await {
            Some(GenerateEvent::Piece { ids: new, .. }) => ids.extend(new),
            Some(GenerateEvent::Done(summary)) => return Ok((ids, summary)),
            Some(GenerateEvent::Failed(error)) => return Err(error),
            // Sent when the engine had ended and before that was known.
            None => return Err(ended()),
        }
    }
}
