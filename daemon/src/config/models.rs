//! Declared models: `[[model]]` in the file.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use nix::fcntl::OFlag;
use rocmforge_engine::ADAPTERS_MAX;
use rocmforge_engine::api::{Class, Pooling};
use rocmforge_service::adapters::{AdapterSpec, parse_spec};
use rocmforge_service::declared::{ALIASES_MAX, Book, DECLARED_MAX, Declared};
use rocmforge_service::defaults::{Defaults, Template};
use rocmforge_service::embedding::input_type;
use rocmforge_tokenizer::{MAX_TEMPLATE_BYTES, builtin_template, builtin_template_names};
use serde::Deserialize;

use super::error::ConfigError;
use super::table::file_table;
use crate::late;

/// How long a template is waited for.
const TEMPLATE_ANSWERS: Duration = Duration::from_secs(5);

/// Templates that are being read, by this process.
static READING: LazyLock<Arc<()>> = LazyLock::new(Arc::default);
/// Maximum number of templates that are being read at once; a hung file system keeps one for ever.
const READING_MAX: usize = 64;

file_table! {
    /// One `[[model]]` as it is written.
    ModelTable {
        /// Name that requests give. Required.
        name: String,
        /// Absolute path of the GGUF file, in a model directory. Required.
        path: PathBuf,
        /// Further names of the model.
        #[serde(default)]
        aliases: Vec<String>,
        /// Uploads as much of the model as fits after the start: true or false.
        #[serde(default)]
        preload: bool,
        /// Keeps the uploaded weights of the model from eviction: true or false.
        #[serde(default)]
        pin: bool,
        /// Draft model for speculative decoding: a smaller model with the same vocabulary, declared
        /// or a file in a model directory.
        draft: Option<String>,
        /// Projector (mmproj) by which the model reads images: absolute path of a GGUF file in a
        /// model directory. Without it, the one in the directory of the model that fits it, if
        /// there is one.
        mmproj: Option<PathBuf>,
        /// LoRA adapters that requests may have: absolute paths of GGUF files in a model directory,
        /// each with its scale behind it where that is not 1, as in "/models/style.gguf=0.5". At
        /// most 16. An adapter's name is that of its file without .gguf.
        #[serde(default)]
        lora: Vec<String>,
        /// Temperature of requests that set none.
        temperature: Option<f32>,
        /// top_k of requests that set none.
        top_k: Option<i32>,
        /// top_p of requests that set none.
        top_p: Option<f32>,
        /// min_p of requests that set none.
        min_p: Option<f32>,
        /// Repetition penalty of requests that set none.
        repeat_penalty: Option<f32>,
        /// Presence penalty of requests that set none.
        presence_penalty: Option<f32>,
        /// Frequency penalty of requests that set none.
        frequency_penalty: Option<f32>,
        /// Number of last tokens that penalties count, of requests that set none.
        penalty_last_n: Option<i32>,
        /// Maximum number of output tokens of requests that set none.
        max_tokens: Option<i32>,
        /// Priority of requests that set none: "interactive" or "batch".
        priority: Option<Priority>,
        /// Chat template instead of the one in the GGUF file: absolute path of a Jinja file, or
        /// name of a built-in template.
        template: Option<PathBuf>,
        /// Whether the model thinks in requests that do not say so, where its template has the
        /// switch enable_thinking: true or false. Without it /v1/messages does not think, and other
        /// routes do as the template does.
        thinking: Option<bool>,
        /// How embeddings are made of the hidden states of tokens: "mean", "cls" (the first
        /// token's), "last", or "none" for each token's own, which /embedding returns. Without it,
        /// as the file says.
        pooling: Option<DeclaredPooling>,
        /// Texts that stand before those to embed, by the input_type of a request, as in
        /// { query = "query: ", document = "passage: " }. Requests without one have none. At most
        /// 32.
        #[serde(default)]
        prompts: BTreeMap<String, String>,
    }
}

/// How urgent a model's requests are.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Priority {
    Interactive,
    Batch,
}

/// How a model's embeddings are made, in llama-server's words.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum DeclaredPooling {
    None,
    Mean,
    Cls,
    Last,
}

impl From<DeclaredPooling> for Pooling {
    fn from(pooling: DeclaredPooling) -> Self {
        match pooling {
            DeclaredPooling::None => Self::None,
            DeclaredPooling::Mean => Self::Mean,
            DeclaredPooling::Cls => Self::First,
            DeclaredPooling::Last => Self::Last,
        }
    }
}

impl ModelTable {
    /// The model's defaults and adapters, once all that it says by itself is right; else the key
    /// that is wrong, and what is.
    fn read(&self) -> Result<(Defaults, Vec<AdapterSpec>), (String, String)> {
        fn at<T>(key: &str, result: Result<T, String>) -> Result<T, (String, String)> {
            result.map_err(|message| (key.to_owned(), message))
        }
        let absolute = |path: &Path| match path.is_absolute() {
            true => Ok(()),
            false => Err(format!(
                "{} is relative; give an absolute path",
                path.display()
            )),
        };
        let defaults = self.defaults()?;
        at("name", Declared::check_name(&self.name))?;
        at("path", absolute(&self.path))?;
        at("mmproj", self.mmproj.as_deref().map_or(Ok(()), absolute))?;
        let lora = at("lora", adapters(&self.lora))?;
        let n = self.aliases.len();
        if n > ALIASES_MAX {
            let message = format!("{n} of them; at most {ALIASES_MAX}");
            return Err(("aliases".to_owned(), message));
        }
        for alias in &self.aliases {
            at("aliases", Declared::check_name(alias))?;
        }
        if let Some(draft) = &self.draft {
            at("draft", Declared::check_name(draft))?;
        }
        Ok((defaults, lora))
    }

    fn defaults(&self) -> Result<Defaults, (String, String)> {
        let template = self.template.as_deref().map(template).transpose();
        let defaults = Defaults {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repeat_penalty: self.repeat_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            penalty_last_n: self.penalty_last_n,
            max_tokens: self.max_tokens,
            class: self.priority.map(|priority| match priority {
                Priority::Interactive => Class::Interactive,
                Priority::Batch => Class::Batch,
            }),
            template: template.map_err(|message| ("template".to_owned(), message))?,
            thinking: self.thinking,
            pooling: self.pooling.map(Pooling::from),
            prompts: self.prompts.clone(),
        };
        defaults.check()?;
        let prompts = input_type::check(&defaults.prompts);
        prompts.map_err(|message| ("prompts".to_owned(), message))?;
        Ok(defaults)
    }
}

/// The chat template of a name, or of a file, which is read on a thread that nobody waits for for
/// ever.
fn template(path: &Path) -> Result<Template, String> {
    let shown = path.display();
    if let Some(source) = path.to_str().and_then(builtin_template) {
        return Ok(Template {
            path: path.to_owned(),
            source: source.into(),
        });
    }
    if !path.is_absolute() {
        return Err(format!(
            "{shown} is relative; give an absolute path, or one of these names: {}",
            builtin_template_names()
        ));
    }
    let silent =
        || format!("{shown} does not answer; check the server or the mount that it lies on");
    // Those that hang hold one.
    let reading = Arc::clone(&READING);
    if Arc::strong_count(&reading) > READING_MAX {
        return Err(silent());
    }
    let asked = path.to_owned();
    let read = late::ask(move || {
        let _reading = reading;
        read_template(&asked)
    });
    let read = read.map_err(|error| format!("{shown} cannot be read: no thread: {error}"))?;
    let answer = read.recv_timeout(TEMPLATE_ANSWERS);
    answer.unwrap_or_else(|_| Err(silent()))
}

fn read_template(path: &Path) -> Result<Template, String> {
    let shown = path.display();
    let failed = |error: std::io::Error| format!("{shown} cannot be read: {error}");
    // A FIFO would be waited for.
    let file = std::fs::OpenOptions::new()
        .read(true)
        .custom_flags(OFlag::O_NONBLOCK.bits())
        .open(path)
        .map_err(failed)?;
    if !file.metadata().map_err(failed)?.is_file() {
        return Err(format!("{shown} is not a regular file"));
    }
    let mut source = String::new();
    file.take(MAX_TEMPLATE_BYTES as u64 + 1)
        .read_to_string(&mut source)
        .map_err(failed)?;
    if source.len() > MAX_TEMPLATE_BYTES {
        return Err(format!("{shown} has more than {MAX_TEMPLATE_BYTES} bytes"));
    }
    Ok(Template {
        path: path.to_owned(),
        source: source.into(),
    })
}

/// A model that is declared, and where.
#[derive(Debug, Clone, PartialEq)]
pub struct DeclaredModel {
    /// The model.
    pub model: Declared,
    /// The file that declares it.
    pub file: PathBuf,
}

/// Checks what the files declare.
pub(super) fn checked(
    tables: Vec<(PathBuf, usize, ModelTable)>,
) -> Result<Vec<DeclaredModel>, ConfigError> {
    let mut models: Vec<DeclaredModel> = Vec::new();
    let mut numbers = Vec::new();
    // Each name and alias, and whose it is.
    let mut taken: HashMap<String, String> = HashMap::new();
    let mut last: HashMap<String, usize> = HashMap::new();
    for (i, (_, _, table)) in tables.iter().enumerate() {
        last.insert(table.name.clone(), i);
    }
    let mut in_files: HashSet<(PathBuf, String)> = HashSet::new();
    for (i, (file, number, table)) in tables.into_iter().enumerate() {
        let refuse = |key: &str, message: String| ConfigError::Model {
            file: file.clone(),
            number,
            name: table.name.clone(),
            key: key.to_owned(),
            message,
        };
        let read = table.read();
        let (defaults, lora) = read.map_err(|(key, message)| refuse(&key, message))?;
        if !in_files.insert((file.clone(), table.name.clone())) {
            let message = "this file declares it twice; remove one, or give them two names";
            return Err(refuse("name", message.to_owned()));
        }
        // A later file says it anew.
        if last.get(&table.name) != Some(&i) {
            continue;
        }
        let names = std::iter::once(("name", &table.name));
        let aliases = table.aliases.iter().map(|alias| ("aliases", alias));
        for (key, name) in names.chain(aliases) {
            if let Some(other) = taken.insert(name.clone(), table.name.clone()) {
                let message = format!("'{name}' is a name of the model '{other}' already");
                return Err(refuse(key, message));
            }
        }
        if models.len() >= DECLARED_MAX {
            let message = format!("more than {DECLARED_MAX} models are declared; remove some");
            return Err(refuse("name", message));
        }
        numbers.push(number);
        models.push(DeclaredModel {
            model: Declared {
                name: table.name.clone(),
                path: table.path.clone(),
                aliases: table.aliases.clone(),
                preload: table.preload,
                pin: table.pin,
                draft: table.draft.clone(),
                mmproj: table.mmproj.clone(),
                lora,
                defaults,
            },
            file: file.clone(),
        });
    }
    refuse_circles(&models, &numbers)?;
    Ok(models)
}

/// The adapters of a model.
fn adapters(written: &[String]) -> Result<Vec<AdapterSpec>, String> {
    if written.len() > ADAPTERS_MAX {
        return Err(format!("{} of them; at most {ADAPTERS_MAX}", written.len()));
    }
    let specs = written.iter().map(|text| parse_spec(text));
    let specs: Vec<AdapterSpec> = specs.collect::<Result<_, _>>()?;
    match specs.iter().find(|spec| !spec.path.is_absolute()) {
        Some(spec) => Err(format!(
            "{} is relative; give an absolute path",
            spec.path.display()
        )),
        None => Ok(specs),
    }
}

/// Refuses a model that would draft for itself, if only by others: each is loaded before
/// the one for which it drafts. Names lead where those of requests do.
fn refuse_circles(models: &[DeclaredModel], numbers: &[usize]) -> Result<(), ConfigError> {
    let book = Book::new(models.iter().map(|m| m.model.clone()).collect());
    let draft_of = |model: &&Declared| book.asked(model.draft.as_deref()?);
    for (declared, &number) in models.iter().zip(numbers) {
        let chain = std::iter::successors(draft_of(&&declared.model), draft_of);
        let mut chain = chain.take(models.len());
        if chain.any(|model| model.name == declared.model.name) {
            let (name, draft) = (&declared.model.name, declared.model.draft.as_deref());
            return Err(ConfigError::Model {
                file: declared.file.clone(),
                number,
                name: name.clone(),
                key: "draft".to_owned(),
                message: format!(
                    "'{}' leads back to '{name}', which cannot draft for itself",
                    draft.unwrap_or_default()
                ),
            });
        }
    }
    Ok(())
}
