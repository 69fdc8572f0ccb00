//! The effective settings with the source of each value: for `--check-config`, and to find what a
//! reload changes.

use std::fmt::{self, Write as _};

use rocmforge_engine::api::{Class, Pooling};
use rocmforge_service::defaults::Defaults;
use rocmforge_service::embedding::input_type::Prompts;

use super::kinds::list;
use super::quoted::{quoted, quoted_path};
use super::settings::ENTRIES;
use super::table::Entry;
use super::{Config, Origin};

/// A setting with its effective value and source.
#[derive(Debug, Clone)]
pub struct Setting {
    /// Declaration of the setting.
    pub entry: &'static Entry,
    /// Value of the setting as TOML has it; `None` where nothing is set and there is no default.
    pub value: Option<String>,
    /// Origin of the value; `None` for the default.
    pub origin: Option<Origin>,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag => f.write_str("command line"),
            Self::Environment => f.write_str("environment"),
            Self::File { path, .. } => write!(f, "{}", path.display()),
        }
    }
}

/// A pooling as the file has it.
fn pooling(pooling: Pooling) -> String {
    quoted(match pooling {
        Pooling::None => "none",
        Pooling::Mean => "mean",
        Pooling::First => "cls",
        Pooling::Last => "last",
    })
}

/// Prompts as an inline table, if there are any.
fn prompts(prompts: &Prompts) -> Option<String> {
    let pairs = prompts.iter();
    let table = pairs.map(|(name, prompt)| (name.clone(), toml::Value::from(prompt.as_str())));
    let table: toml::Table = table.collect();
    (!table.is_empty()).then(|| toml::Value::Table(table).to_string())
}

/// The defaults of a declared model that are set.
fn defaults(defaults: &Defaults, text: &mut String) {
    let number = |n: Option<i32>| n.map(|n| n.to_string());
    // With a point, as TOML tells numbers apart.
    let real = |x: Option<f32>| x.map(|x| format!("{x:?}"));
    let class = defaults.class.map(|class| match class {
        Class::Interactive => quoted("interactive"),
        Class::Batch => quoted("batch"),
    });
    for (key, value) in [
        ("temperature", real(defaults.temperature)),
        ("top_k", number(defaults.top_k)),
        ("top_p", real(defaults.top_p)),
        ("min_p", real(defaults.min_p)),
        ("repeat_penalty", real(defaults.repeat_penalty)),
        ("presence_penalty", real(defaults.presence_penalty)),
        ("frequency_penalty", real(defaults.frequency_penalty)),
        ("penalty_last_n", number(defaults.penalty_last_n)),
        ("max_tokens", number(defaults.max_tokens)),
        ("priority", class),
        (
            "template",
            defaults.template.as_ref().map(|t| quoted_path(&t.path)),
        ),
        ("thinking", defaults.thinking.map(|on| on.to_string())),
        ("pooling", defaults.pooling.map(pooling)),
        ("prompts", prompts(&defaults.prompts)),
    ] {
        if let Some(value) = value {
            // Writing to a String does not fail.
            let _ = writeln!(text, "{key} = {value}");
        }
    }
}

impl Config {
    /// All settings but the declared models and limits, in the order of the reference page.
    pub fn settings(&self) -> Vec<Setting> {
        let values = self.values.shown();
        let setting = |(entry, value): (&'static Entry, Option<String>)| Setting {
            entry,
            value,
            origin: self.origins.get(entry.key).cloned(),
        };
        ENTRIES.iter().zip(values).map(setting).collect()
    }

    /// What is in force as a file that would say the same, with where each value came from behind
    /// it.
    pub fn describe(&self) -> String {
        let mut text = String::new();
        // Writing to a String does not fail.
        for file in &self.files {
            let _ = writeln!(text, "# read: {}", file.display());
        }
        for setting in self.settings() {
            let origin = setting
                .origin
                .map_or("default".to_owned(), |origin| origin.to_string());
            let _ = match setting.value {
                Some(value) => writeln!(text, "{} = {value}  # {origin}", setting.entry.key),
                None => writeln!(text, "# {} is not set", setting.entry.key),
            };
        }
        for declared in &self.models {
            let model = &declared.model;
            let _ = write!(
                text,
                "\n[[model]]  # {}\nname = {}\npath = {}\naliases = {}\npreload = {}\npin = {}\n",
                declared.file.display(),
                quoted(&model.name),
                quoted_path(&model.path),
                list(model.aliases.iter().map(String::as_str)),
                model.preload,
                model.pin,
            );
            if let Some(draft) = &model.draft {
                // Writing to a String does not fail.
                let _ = writeln!(text, "draft = {}", quoted(draft));
            }
            defaults(&model.defaults, &mut text);
        }
        for limit in &self.limits {
            let whom = list(limit.whom.iter().map(String::as_str));
            let _ = write!(
                text,
                "\n[[limit]]  # {}\nfor = {whom}\n",
                limit.file.display()
            );
            let limits = limit.rule.limits;
            for (key, value) in [
                ("running", limits.running.map(u64::from)),
                ("queued", limits.queued.map(u64::from)),
                ("prompt_bytes", limits.prompt_bytes),
                ("tokens_per_minute", limits.tokens_per_minute),
            ] {
                if let Some(value) = value {
                    let _ = writeln!(text, "{key} = {value}");
                }
            }
        }
        text
    }
}
