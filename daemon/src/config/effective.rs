//! What is in force, setting by setting, and where each value came from: for `--check-config`, and
//! to tell what a reload changes.

use std::fmt::{self, Write as _};
use std::path::Path;
use std::time::Duration;

use rocmforge_engine::api::{Budget, Class, Offload, Policy};
use rocmforge_engine::{DeviceChoice, KvType, PrefixCache};
use rocmforge_service::defaults::Defaults;
use rocmforge_service::roles::Who;

use super::models::{quoted, quoted_path};
use super::{Config, Origin};

/// One setting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    /// Its key.
    pub key: &'static str,
    /// Its value as TOML has it; `None` where nothing is set and there is no default.
    pub value: Option<String>,
    /// Where it came from; `None` for the default.
    pub origin: Option<Origin>,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag => f.write_str("command line"),
            Self::Environment => f.write_str("environment"),
            Self::File(path) => write!(f, "{}", path.display()),
        }
    }
}

fn device(choice: DeviceChoice) -> String {
    quoted(&match choice {
        DeviceChoice::Auto => "auto".to_owned(),
        DeviceChoice::Host => "host".to_owned(),
        DeviceChoice::Hip(n) => format!("hip:{n}"),
        DeviceChoice::Cuda(n) => format!("cuda:{n}"),
    })
}

fn budget(budget: Budget) -> String {
    match budget {
        Budget::Bytes(bytes) => bytes.to_string(),
        Budget::Percent(percent) => quoted(&format!("{percent}%")),
    }
}

fn policy(policy: Policy) -> String {
    quoted(match policy {
        Policy::PassAware => "pass-aware",
        Policy::Lru => "lru",
    })
}

fn offload(when: Offload) -> String {
    quoted(match when {
        Offload::Auto => "auto",
        Offload::Never => "never",
        Offload::Always => "always",
    })
}

fn percent_or_off(percent: Option<f64>) -> String {
    percent.map_or_else(|| quoted("off"), |percent| percent.to_string())
}

fn prefix_cache(whose: PrefixCache) -> String {
    quoted(match whose {
        PrefixCache::Off => "off",
        PrefixCache::PerClient => "per-user",
        PrefixCache::Shared => "shared",
    })
}

fn kv_type(ty: Option<KvType>) -> String {
    quoted(ty.map_or("auto", KvType::name))
}

fn speculate(speculate: Option<bool>) -> String {
    quoted(match speculate {
        None => "auto",
        Some(true) => "on",
        Some(false) => "off",
    })
}

fn list<'a>(items: impl Iterator<Item = &'a str>) -> String {
    let items: Vec<_> = items.map(quoted).collect();
    format!("[{}]", items.join(", "))
}

/// Users and groups by their numbers, by which they are told apart.
fn who(who: &Who) -> String {
    match who {
        Who::Everyone => list(["*"].into_iter()),
        Who::Listed { users, groups } => {
            let users = users.iter().map(u32::to_string);
            let groups = groups.iter().map(|gid| format!("@{gid}"));
            let all: Vec<_> = users.chain(groups).collect();
            list(all.iter().map(String::as_str))
        }
    }
}

fn seconds(time: Duration) -> String {
    time.as_secs_f64().to_string()
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
    ] {
        if let Some(value) = value {
            // Writing to a String does not fail.
            let _ = writeln!(text, "{key} = {value}");
        }
    }
}

impl Config {
    /// All settings but the declared models, in the order of the documentation.
    pub fn settings(&self) -> Vec<Setting> {
        let path = |path: &Path| quoted_path(path);
        let http = &self.http;
        let rows = [
            ("socket", Some(path(&self.socket))),
            ("device", Some(device(self.device))),
            ("vram_budget", Some(budget(self.vram_budget))),
            (
                "keep_free",
                Some(self.keep_free.map_or("0".to_owned(), budget)),
            ),
            (
                "model_dir",
                Some({
                    let dirs: Vec<_> = self
                        .model_dirs
                        .iter()
                        .map(|d| d.to_string_lossy())
                        .collect();
                    list(dirs.iter().map(AsRef::as_ref))
                }),
            ),
            ("threads", self.threads.map(|n| n.to_string())),
            ("n_ctx_max", Some(self.n_ctx_max.to_string())),
            ("max_sequences", Some(self.max_sequences.to_string())),
            ("queue_capacity", Some(self.queue_capacity.to_string())),
            ("drain_grace", Some(seconds(self.drain_grace))),
            ("policy", Some(policy(self.policy))),
            ("offload", Some(offload(self.offload))),
            (
                "host_budget",
                Some(self.host_budget.map_or("0".to_owned(), budget)),
            ),
            ("host_tier", Some(offload(self.host_tier))),
            ("host_pressure", Some(percent_or_off(self.host_pressure))),
            ("direct_io", Some(offload(self.direct_io))),
            ("prefix_cache", Some(prefix_cache(self.prefix_cache))),
            ("kv_type", Some(kv_type(self.kv_type))),
            ("speculate", Some(speculate(self.speculate))),
            ("watchdog", Some(seconds(self.watchdog))),
            ("use_by", Some(who(&self.roles.use_by))),
            ("manage_by", Some(who(&self.roles.manage_by))),
            ("admin_by", Some(who(&self.roles.admin_by))),
            ("http_socket", http.socket.as_deref().map(path)),
            ("http_listen", http.listen.map(|a| quoted(&a.to_string()))),
            ("http_token_file", http.token_file.as_deref().map(path)),
            (
                "http_tls_cert",
                http.tls.as_ref().map(|tls| path(&tls.certificate_file)),
            ),
            (
                "http_tls_key",
                http.tls.as_ref().map(|tls| path(&tls.key_file)),
            ),
            (
                "otlp_endpoint",
                self.traces.as_ref().map(|c| quoted(&c.to_string())),
            ),
            ("log", Some(quoted(&self.log))),
        ];
        let setting = |(key, value)| Setting {
            key,
            value,
            origin: self.origins.get(key).cloned(),
        };
        rows.into_iter().map(setting).collect()
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
                Some(value) => writeln!(text, "{} = {value}  # {origin}", setting.key),
                None => writeln!(text, "# {} is not set", setting.key),
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
