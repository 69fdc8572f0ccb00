//! Greedy text on the device against the host's: the exam of the two small trained models, and
//! random prompts to a random model.
//!
//! Where a token differs, the host is asked how much more likely it finds its own token than the
//! device's: two right devices differ only where that is little. The text then goes on from the
//! host's token, so that all of it is compared.

use std::cmp::Ordering;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rocmforge_engine::LoadedModel;
use rocmforge_engine::api::Policy;
use rocmforge_tokenizer::Message;
use serde::Deserialize;

use super::Bench;
use super::plan::title;
use crate::check::Check;
use crate::device::DeviceArg;
use crate::session::{Session, random_prompt};

/// Most that the host's token may be likelier than the device's, as the difference of
/// their logits. Products of 8-bit inputs err by a part in a hundred, and a logit of these
/// models is of the order of ten.
pub(crate) const MARGIN_MAX: f32 = 0.5;

/// Most tokens of an answer.
const ANSWER_MAX: u32 = 80;

/// Texts that differ at more places are not followed further.
const DIFFERENCES_MAX: usize = 16;

/// The trained models and the questions, in one folder.
const TRAINED: [&str; 2] = ["tiny-llama-Q4_K_M.gguf", "tiny-qwen3-Q8_0.gguf"];
const EXAM: &str = "exam.json";

/// Device memory that holds all of a trained model.
const ROOM: u64 = 256 << 20;

/// Room beside weights that the smallest budget may need for KV, scratch and what
/// the device takes for itself.
const ROOMS: [u64; 7] = [0, 1 << 18, 1 << 19, 1 << 20, 2 << 20, 4 << 20, 8 << 20];

/// Differences of a random model's text that are told, those of the largest margins.
const TOLD_MAX: usize = 5;

/// A question of the exam.
#[derive(Debug, Clone, Deserialize)]
struct Question {
    prompt: String,
    answer: String,
}

/// A place at which the texts differ.
#[derive(Debug)]
struct Difference {
    place: usize,
    host: Option<u32>,
    device: Option<u32>,
    /// Difference of the host's logits of the two; `None` if the device's is not even
    /// among its likeliest ones.
    margin: Option<f32>,
}

/// The folder of the trained models: as given, as the environment says, or beside the sources.
pub(crate) fn fixtures(given: Option<&Path>) -> Result<PathBuf, String> {
    let mut places: Vec<PathBuf> = given.map(Path::to_owned).into_iter().collect();
    if given.is_none() {
        let from = |name| std::env::var_os(name).map(PathBuf::from);
        places.extend(from("ROCMFORGE_FIXTURES"));
        let data = from("ROCMFORGE_TEST_DATA");
        places.extend(data.into_iter().flat_map(|dir| [dir.join("models"), dir]));
        places.push(Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures"));
    }
    let whole = |dir: &&PathBuf| dir.join(EXAM).exists() && dir.join(TRAINED[0]).exists();
    let found = places.iter().find(whole).cloned();
    found.ok_or_else(|| {
        let tried: Vec<_> = places.iter().map(|p| p.display().to_string()).collect();
        format!(
            "no {EXAM} with {} in {}; --fixtures names their folder",
            TRAINED[0],
            tried.join(", ")
        )
    })
}

/// The exam of both trained models, and the random model; what does not run is a failed check.
pub(crate) fn run(bench: &Bench, fixtures: Result<PathBuf, String>) -> Vec<Check> {
    let mut checks = Vec::new();
    match fixtures {
        Ok(dir) => checks.extend(TRAINED.map(|file| {
            Check::ran(format!("Text of {file}"), |check| {
                exam(bench, &dir, file, check)
            })
        })),
        Err(why) => checks.push(Check::skipped("Text of the trained models", why)),
    }
    let name = format!("Text of a random {}", title(bench.plan.small));
    checks.push(Check::ran(name, |check| random(bench, check)));
    checks
}

/// Where a device's text stands to the host's.
struct Texts<'a> {
    host: &'a Session,
    device: &'a Session,
    on_host: Arc<LoadedModel>,
    on_device: Arc<LoadedModel>,
}

impl Texts<'_> {
    /// The host's text of at most `n` tokens, and where the device's differs.
    fn compare(&self, prompt: &[u32], n: u32) -> Result<(Vec<u32>, Vec<Difference>)> {
        let (expected, _) = self.host.greedy(&self.on_host, prompt.to_vec(), n)?;
        let mut differences = Vec::new();
        let mut agreed = 0;
        while differences.len() < DIFFERENCES_MAX {
            let left = n - agreed as u32;
            if left == 0 {
                break;
            }
            let mut so_far = prompt.to_vec();
            so_far.extend(&expected[..agreed]);
            let (got, _) = self.device.greedy(&self.on_device, so_far, left)?;
            let rest = &expected[agreed..];
            let same = rest.iter().zip(&got).take_while(|(a, b)| a == b).count();
            let place = agreed + same;
            let (host, device) = (expected.get(place).copied(), got.get(same).copied());
            if host.is_none() && device.is_none() {
                break;
            }
            let mut before = prompt.to_vec();
            before.extend(&expected[..place]);
            differences.push(Difference {
                place,
                host,
                device,
                margin: self.margin(before, host, device)?,
            });
            if host.is_none() {
                break;
            }
            agreed = place + 1;
        }
        Ok((expected, differences))
    }

    /// How much larger the host's logit of `host` is than that of `device`; no token
    /// is any that ends the text.
    fn margin(
        &self,
        before: Vec<u32>,
        host: Option<u32>,
        device: Option<u32>,
    ) -> Result<Option<f32>> {
        let likely = self.host.likely(&self.on_host, before)?;
        let tokenizer = self.on_host.tokenizer();
        let of = |token: Option<u32>| {
            let is = |id: u32| match token {
                Some(token) => id == token,
                None => tokenizer.is_end_of_generation(id),
            };
            likely
                .iter()
                .find(|(id, _)| is(*id))
                .map(|(_, logit)| logit)
        };
        Ok(of(host).zip(of(device)).map(|(host, device)| host - device))
    }
}

impl Texts<'_> {
    /// A difference in words.
    fn told(&self, what: &str, d: &Difference) -> String {
        let piece = |token: Option<u32>| match token {
            Some(id) => {
                let bytes = self.on_host.tokenizer().token_bytes(id);
                format!("{:?}", String::from_utf8_lossy(bytes.unwrap_or_default()))
            }
            None => "the end".to_owned(),
        };
        let margin = d.margin.map_or("unknown".to_owned(), |m| format!("{m:.3}"));
        format!(
            "{what}, token {}: the host {}, the device {}, margin {margin} of {MARGIN_MAX}",
            d.place,
            piece(d.host),
            piece(d.device)
        )
    }

    /// Adds the differences of a text to a check: failures where the host is sure of its token,
    /// notes of the others, the first `told_max` of the largest margins.
    fn judge(&self, check: &mut Check, mut found: Vec<(String, Difference)>, told_max: usize) {
        let right = |d: &Difference| d.margin.is_some_and(|margin| margin <= MARGIN_MAX);
        for (what, d) in found.iter().filter(|(_, d)| !right(d)) {
            check.fail(self.told(what, d));
        }
        found.retain(|(_, d)| right(d));
        found.sort_by(|(_, a), (_, b)| b.margin.partial_cmp(&a.margin).unwrap_or(Ordering::Equal));
        for (what, d) in found.iter().take(told_max) {
            check.note(self.told(what, d));
        }
    }
}

/// The differences of one text, with its name.
fn named(what: String, differences: Vec<Difference>) -> impl Iterator<Item = (String, Difference)> {
    differences.into_iter().map(move |d| (what.clone(), d))
}

fn exam(bench: &Bench, dir: &Path, file: &str, check: &mut Check) -> Result<()> {
    let questions = std::fs::read(dir.join(EXAM)).context(EXAM)?;
    let questions: Vec<Question> = serde_json::from_slice(&questions).context(EXAM)?;
    let path = dir.join(file);
    let host = Session::start_within(DeviceArg::Host, ROOM)?;
    let device = Session::start_within(bench.device, ROOM)?;
    let (on_host, _) = host.load("text", &path)?;
    let (on_device, _) = device.load("text", &path)?;
    let template = on_host.template().context("a model without a template")?;
    let mut prompts = Vec::new();
    for question in &questions {
        let text = template.render(&[Message::new("user", &question.prompt)], true)?;
        prompts.push(on_host.tokenizer().encode(&text, true, true)?);
    }
    let longest = prompts.iter().max_by_key(|prompt| prompt.len());
    let longest = longest.context("an exam without questions")?;
    let (streamed, small) = smallest(bench, &path, &on_host, longest)?;
    let (on_streamed, _) = streamed.load("text", &path)?;

    let (mut right, mut tokens) = (0, 0);
    let (mut differing, mut differing_streamed) = (Vec::new(), Vec::new());
    let whole = Texts {
        host: &host,
        device: &device,
        on_host: Arc::clone(&on_host),
        on_device,
    };
    let part = Texts {
        device: &streamed,
        on_host: Arc::clone(&on_host),
        on_device: on_streamed,
        ..whole
    };
    for (i, (question, prompt)) in questions.iter().zip(&prompts).enumerate() {
        let (expected, differences) = whole.compare(prompt, ANSWER_MAX)?;
        tokens += expected.len();
        let answer = on_host.tokenizer().decode(&expected)?;
        right += usize::from(differences.is_empty() && answer.trim() == question.answer);
        let what = format!("{:.40}", question.prompt);
        differing.extend(named(what.clone(), differences));
        if i < bench.plan.questions_streamed {
            let (_, differences) = part.compare(prompt, ANSWER_MAX)?;
            differing_streamed.extend(named(format!("{what}, small budget"), differences));
        }
    }
    check.note(format!(
        "{right} of {} answers right; {} of {tokens} tokens differ from the host's",
        questions.len(),
        differing.len()
    ));
    let evictions = streamed.engine.snapshot().cache.evictions;
    if evictions == 0 {
        check.fail(format!("a budget of {small} bytes evicted nothing"));
    }
    check.note(format!(
        "in a budget of {:.1} MB ({evictions} evictions): {} tokens of {} answers differ",
        small as f64 / 1e6,
        differing_streamed.len(),
        bench.plan.questions_streamed.min(questions.len())
    ));
    whole.judge(check, differing, usize::MAX);
    part.judge(check, differing_streamed, usize::MAX);
    drop((whole, part));
    for session in [host, device, streamed] {
        session.end()?;
    }
    Ok(())
}

/// An engine whose budget is so small that layers come and go with every token: the least of a
/// few that a prompt runs in.
fn smallest(
    bench: &Bench,
    path: &Path,
    model: &LoadedModel,
    prompt: &[u32],
) -> Result<(Session, u64)> {
    let info = model.model().info();
    let largest = info.segments.iter().map(|s| s.bytes).max().unwrap_or(0);
    let mut last = None;
    for room in ROOMS {
        let budget = info.tensor_bytes / 3 + largest + room;
        let session = match Session::start_within(bench.device, budget) {
            Ok(session) => session,
            Err(error) => {
                last = Some(error);
                continue;
            }
        };
        let ran = session.load("text", path).and_then(|(model, _)| {
            session.greedy(&model, prompt.to_vec(), ANSWER_MAX)?;
            session.unload("text")
        });
        match ran {
            Ok(()) => return Ok((session, budget)),
            Err(error) => {
                session.end()?;
                last = Some(error);
            }
        }
    }
    let error = last.context("no budget was tried")?;
    Err(error.context("no budget below the model's size runs it"))
}

/// Random prompts to a random model, whose likeliest tokens lie close together.
fn random(bench: &Bench, check: &mut Check) -> Result<()> {
    let path = bench.models.get(bench.plan.small, 1)?;
    let host = Session::start(DeviceArg::Host, None, Policy::PassAware, None)?;
    let device = Session::start(bench.device, None, Policy::PassAware, None)?;
    let texts = Texts {
        host: &host,
        device: &device,
        on_host: host.load("text", &path)?.0,
        on_device: device.load("text", &path)?.0,
    };
    let (prompts, n_prompt, n) = bench.plan.prompts;
    let seed = bench.seed;
    let mut rng = StdRng::seed_from_u64(seed);
    let (mut tokens, mut differing) = (0, Vec::new());
    for i in 0..prompts {
        let length = rng.random_range(1..=n_prompt);
        let prompt = random_prompt(&mut rng, length);
        let (expected, differences) = texts.compare(&prompt, n)?;
        tokens += expected.len();
        differing.extend(named(format!("prompt {i}"), differences));
    }
    ensure!(tokens > 0, "every text was empty, seed {seed}");
    check.note(format!(
        "{} of {tokens} tokens after {prompts} prompts differ from the host's; seed {seed}",
        differing.len()
    ));
    texts.judge(check, differing, TOLD_MAX);
    drop(texts);
    host.end()?;
    device.end()
}
