//! The engine in this process, and requests of random tokens to it.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rocmforge_device_gpu::UploadWay;
use rocmforge_engine::api::{
    Asker, Budget, Decoding, GenerateEvent, GenerateRequest, GenerateSummary, Policy, PreloadEvent,
    SamplingParams, ScoreRequest, Scores, TOP_N_MAX, When,
};
use rocmforge_engine::{
    AdapterFile, Beside, EngineConfig, EngineHandle, EngineThread, LoadedModel, adapter_name,
    prepare, prepare_beside, start,
};
use rocmforge_gguf::MappedFile;

use crate::device::DeviceArg;
use crate::vocab;

/// Context of a request in tokens.
const N_CTX: u32 = 4096;

/// Attempts at a generation of full length: a random model may end its text, which times nothing.
const ATTEMPTS: usize = 16;

/// How uploads go in this process; as usual where nobody said.
static UPLOADS: OnceLock<UploadWay> = OnceLock::new();

/// Has all sessions that begin from now on upload so.
///
/// # Panics
/// The second time.
pub(crate) fn set_uploads(way: UploadWay) {
    UPLOADS.set(way).expect("it is said once");
}

/// A running engine.
pub(crate) struct Session {
    runtime: tokio::runtime::Runtime,
    pub(crate) engine: EngineHandle,
    /// Until it is waited for.
    thread: Option<EngineThread>,
    rng: StdRng,
}

/// A part that fails leaves its session, and the process must not end while the
/// engine's thread uses the driver.
impl Drop for Session {
    fn drop(&mut self) {
        if let Err(error) = self.wait() {
            eprintln!("the engine ended before: {error:#}");
        }
    }
}

impl Session {
    /// Starts the engine.
    ///
    /// # Errors
    /// The device or the budget cannot be used.
    pub(crate) fn start(
        device: DeviceArg,
        threads: Option<NonZeroUsize>,
        policy: Policy,
        prefetch: Option<u32>,
    ) -> Result<Self> {
        Self::start_as(EngineConfig {
            device: device.choice(),
            threads,
            budget: Budget::Percent(80.0),
            policy,
            prefetch,
            ..EngineConfig::default()
        })
    }

    /// Starts the engine with a budget that all must fit in, what the device
    /// takes for itself included.
    ///
    /// # Errors
    /// As [`Session::start`].
    pub(crate) fn start_within(device: DeviceArg, bytes: u64) -> Result<Self> {
        Self::start_as(EngineConfig {
            device: device.choice(),
            budget: Budget::Bytes(bytes),
            ..EngineConfig::default()
        })
    }

    /// [`Session::start_within`], with a word on what is not on the card.
    ///
    /// # Errors
    /// As [`Session::start`].
    pub(crate) fn start_split(device: DeviceArg, bytes: u64, cpu_compute: When) -> Result<Self> {
        Self::start_as(EngineConfig {
            device: device.choice(),
            budget: Budget::Bytes(bytes),
            cpu_compute,
            ..EngineConfig::default()
        })
    }

    /// Starts the engine.
    ///
    /// # Errors
    /// As [`Session::start`].
    pub(crate) fn start_as(config: EngineConfig) -> Result<Self> {
        // Where tokens are drafted, a rate depends on what random weights happen to repeat.
        let speculate = config.speculate.or(Some(false));
        Self::start_exactly(EngineConfig {
            speculate,
            ..config
        })
    }

    /// Starts the engine, which drafts where it would for a user.
    ///
    /// # Errors
    /// As [`Session::start`].
    pub(crate) fn start_exactly(config: EngineConfig) -> Result<Self> {
        let config = EngineConfig {
            uploads: UPLOADS.get().copied().unwrap_or_default(),
            ..config
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()?;
        let (engine, thread) = start(EngineConfig {
            child_exe: Some("/proc/self/exe".into()),
            ..config
        })?;
        Ok(Self {
            runtime,
            engine,
            thread: Some(thread),
            rng: StdRng::seed_from_u64(1),
        })
    }

    /// Ends the engine and waits for it.
    ///
    /// # Errors
    /// Why it ended before.
    pub(crate) fn end(mut self) -> Result<()> {
        self.wait()
    }

    fn wait(&mut self) -> Result<()> {
        let Some(thread) = self.thread.take() else {
            return Ok(());
        };
        self.runtime.block_on(self.engine.drain(Duration::ZERO));
        Ok(thread.join()?)
    }

    /// Runs requests of the engine.
    pub(crate) fn block_on<T>(&self, work: impl AsyncFnOnce(&EngineHandle) -> T) -> T {
        self.runtime.block_on(work(&self.engine))
    }

    /// Registers a file and tells how long that took, from opening it to the engine's answer.
    ///
    /// # Errors
    /// What loading gives.
    pub(crate) fn load(&self, name: &str, path: &Path) -> Result<(Arc<LoadedModel>, Duration)> {
        let begin = Instant::now();
        let model = self.register(name, path)?;
        let took = begin.elapsed();
        // The tables for encoding are built in the background; what is timed next must not
        // share the machine with that.
        model.tokenizer().encode("a", false, false)?;
        Ok((model, took))
    }

    /// Registers a file.
    ///
    /// # Errors
    /// What loading gives.
    pub(crate) fn register(&self, name: &str, path: &Path) -> Result<Arc<LoadedModel>> {
        let prepared = prepare(name, MappedFile::open_model(path)?, &mut |_| {})?;
        let model = self.runtime.block_on(self.engine.load(prepared));
        model.with_context(|| format!("{} does not load", path.display()))
    }

    /// [`Session::load`] of a model with LoRA adapters.
    ///
    /// # Errors
    /// What loading gives.
    pub(crate) fn load_with_adapters(
        &self,
        name: &str,
        path: &Path,
        adapters: &[PathBuf],
    ) -> Result<Arc<LoadedModel>> {
        let given = |path: &PathBuf| -> Result<AdapterFile> {
            Ok(AdapterFile {
                name: adapter_name(path),
                file: MappedFile::open(path)?,
                scale: 1.0,
            })
        };
        let beside = Beside {
            projector: None,
            adapters: adapters.iter().map(given).collect::<Result<_>>()?,
        };
        let prepared = prepare_beside(name, MappedFile::open_model(path)?, beside, &mut |_| {})?;
        let model = self.runtime.block_on(self.engine.load(prepared));
        let model = model.with_context(|| format!("{} does not load", path.display()))?;
        model.tokenizer().encode("a", false, false)?;
        Ok(model)
    }

    /// [`Session::load`] of a model for which one that is loaded drafts.
    ///
    /// # Errors
    /// What loading gives.
    pub(crate) fn load_with_draft(
        &self,
        name: &str,
        path: &Path,
        draft: &str,
    ) -> Result<Arc<LoadedModel>> {
        let mut prepared = prepare(name, MappedFile::open_model(path)?, &mut |_| {})?;
        prepared.set_draft(draft);
        let model = self.runtime.block_on(self.engine.load(prepared));
        let model = model.with_context(|| format!("{} does not load", path.display()))?;
        model.tokenizer().encode("a", false, false)?;
        Ok(model)
    }

    /// Forgets a model.
    ///
    /// # Errors
    /// It is not there.
    pub(crate) fn unload(&self, name: &str) -> Result<()> {
        self.runtime.block_on(self.engine.unload(name, false))?;
        Ok(())
    }

    /// Takes everything off the device.
    ///
    /// # Errors
    /// The engine has ended.
    pub(crate) fn clear(&self) -> Result<()> {
        self.runtime.block_on(self.engine.clear(None))?;
        Ok(())
    }

    /// Bytes on the device of a model's largest segment, without which it does
    /// not run. Clears the device.
    ///
    /// # Errors
    /// The segment cannot be brought in.
    pub(crate) fn largest_segment(&self, model: &LoadedModel) -> Result<u64> {
        let segments = (0u32..).zip(&model.model().plan().segments);
        let largest = segments.max_by_key(|(_, segment)| segment.file_bytes());
        let (index, _) = largest.context("a model without segments")?;
        self.clear()?;
        self.runtime.block_on(async {
            let mut events = self.engine.preload(model.name(), Some(vec![index]))?;
            loop {
                match events.next().await {
                    Some(PreloadEvent::Progress { .. }) => {}
                    Some(PreloadEvent::Done { uploaded_bytes }) => return Ok(uploaded_bytes),
                    Some(PreloadEvent::Failed(error)) => return Err(error.into()),
                    None => bail!("the engine ended in the middle of a preload"),
                }
            }
        })
    }

    /// Brings all of a model in.
    ///
    /// # Errors
    /// What the engine says.
    pub(crate) fn preload(&self, name: &str) -> Result<()> {
        self.runtime.block_on(async {
            let mut events = self.engine.preload(name, None)?;
            loop {
                match events.next().await {
                    Some(PreloadEvent::Progress { .. }) => {}
                    Some(PreloadEvent::Done { .. }) => return Ok(()),
                    Some(PreloadEvent::Failed(error)) => return Err(error.into()),
                    None => bail!("the engine ended in the middle of a preload"),
                }
            }
        })
    }

    /// Sets the budget.
    ///
    /// # Errors
    /// It is out of range, or running work keeps it from being reached.
    pub(crate) fn set_budget(&self, bytes: u64) -> Result<()> {
        let budget = Budget::Bytes(bytes);
        let change = self.runtime.block_on(self.engine.set_budget(budget))?;
        if change.excess_bytes > 0 {
            bail!(
                "{} bytes stay above a budget of {bytes}",
                change.excess_bytes
            );
        }
        Ok(())
    }

    /// Greedy generation of exactly `n` tokens after `n_prompt` random ones.
    ///
    /// # Errors
    /// The request fails, or every attempt ends early.
    pub(crate) fn generate(
        &mut self,
        model: &Arc<LoadedModel>,
        n_prompt: usize,
        n: u32,
    ) -> Result<GenerateSummary> {
        for _ in 0..ATTEMPTS {
            let prompt = random_prompt(&mut self.rng, n_prompt);
            let ran = run(&self.engine, greedy(model, prompt, n), |_| {});
            let summary = self.runtime.block_on(ran)?;
            if summary.generated_tokens == n {
                return Ok(summary);
            }
        }
        bail!(
            "{ATTEMPTS} generations of {n} tokens ended early: make the model with another --seed"
        )
    }

    /// The tokens of a greedy generation of at most `n`, an end of generation not among them.
    ///
    /// # Errors
    /// The request fails.
    pub(crate) fn greedy(
        &self,
        model: &Arc<LoadedModel>,
        prompt: Vec<u32>,
        n: u32,
    ) -> Result<(Vec<u32>, GenerateSummary)> {
        self.runtime.block_on(async {
            let mut tokens = Vec::new();
            let summary = run(&self.engine, greedy(model, prompt, n), |ids| {
                tokens.extend_from_slice(ids);
            });
            let summary = summary.await?;
            Ok((tokens, summary))
        })
    }

    /// Log-probabilities.
    ///
    /// # Errors
    /// The request fails.
    pub(crate) fn score(&self, request: ScoreRequest) -> Result<Scores> {
        Ok(self.runtime.block_on(self.engine.score(request))?)
    }

    /// The most likely tokens after a text and their log-probabilities, best first.
    ///
    /// # Errors
    /// The request fails.
    pub(crate) fn likely(
        &self,
        model: &Arc<LoadedModel>,
        mut ids: Vec<u32>,
    ) -> Result<Vec<(u32, f32)>> {
        // Scores are of given tokens; which one follows does not matter.
        ids.push(0);
        let scores = self.score(ScoreRequest {
            model: Arc::clone(model),
            ids,
            top_n: TOP_N_MAX,
            deadline: None,
            asker: Asker::default(),
            adapters: None,
        })?;
        let last = scores.tokens.into_iter().last();
        Ok(last.context("a score without tokens")?.top)
    }

    /// Bytes of a model's segments on the device; 0 if it is not registered.
    pub(crate) fn resident_bytes(&self, name: &str) -> u64 {
        let snapshot = self.engine.snapshot();
        let model = snapshot.models.iter().find(|m| m.model.name() == name);
        model.map_or(0, |m| m.cache.resident_bytes - m.cache.kv_bytes)
    }
}

/// Random tokens, none of them special.
pub(crate) fn random_prompt(rng: &mut StdRng, n: usize) -> Vec<u32> {
    (0..n).map(|_| rng.random_range(0..vocab::BOS)).collect()
}

/// A request for the likeliest tokens.
pub(crate) fn greedy(model: &Arc<LoadedModel>, prompt: Vec<u32>, n: u32) -> GenerateRequest {
    GenerateRequest {
        model: Arc::clone(model),
        prompt,
        sampling: SamplingParams {
            temperature: 0.0,
            ..SamplingParams::default()
        },
        max_tokens: Some(n),
        n_ctx: Some(N_CTX),
        stop: Vec::new(),
        decoding: Decoding::default(),
        deadline: None,
        max_gap: None,
        asker: Asker::default(),
        reuse: false,
        adapters: None,
    }
}

/// Runs a request to its end; `each` is called with the tokens of each event,
/// and once more at the end.
pub(crate) async fn run(
    engine: &EngineHandle,
    request: GenerateRequest,
    mut each: impl FnMut(&[u32]),
) -> Result<GenerateSummary> {
    let mut events = engine.generate(request)?;
    while let Some(event) = events.next().await {
        match event {
            GenerateEvent::Piece { ids, .. } => each(&ids),
            GenerateEvent::Done(summary) => {
                each(&[]);
                return Ok(summary);
            }
            GenerateEvent::Failed(error) => return Err(error.into()),
        }
    }
    bail!("the engine ended in the middle of a request")
}
