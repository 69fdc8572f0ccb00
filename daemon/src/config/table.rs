//! How a setting is declared: one entry of `declare_settings!`. From it follow the flag, the
//! variable of the environment, the key in files, the field that has the value, the line of
//! `--check-config`, what a reload does, the reference page and the words for the fuzzer.
//!
//! The entries are in [`super::settings`]. *Invariant:* settings are named nowhere else but where
//! their values are used (`config.values.KEY`).

use std::collections::BTreeMap;
use std::ffi::OsString;

use clap::builder::ValueParser;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};

use super::error::ConfigError;
use super::given::{Given, Shape};
use super::kinds::Kind;
use super::origin::Origin;
use super::settings;

/// Settings of earlier development versions, and what they are called now.
///
/// As flags; keys in files have underscores.
const RENAMED: [(&str, &str); 2] = [("offload", "cpu-compute"), ("host-tier", "host-kv")];

/// What the setting of an earlier development version is called now, as a key.
pub(super) fn renamed(key: &str) -> Option<String> {
    let old = RENAMED.iter().find(|(old, _)| old.replace('-', "_") == key);
    old.map(|(_, new)| new.replace('-', "_"))
}

/// What a setting is without a value.
#[derive(Debug, Clone, Copy)]
pub(super) enum DefaultValue {
    /// This, as it would be written.
    Is(&'static str),
    /// Unset, or made when the settings are read, in words.
    Unset(&'static str),
}

/// What a reload does about a setting whose value in the files has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reload {
    /// Names it in the log: it takes effect when the daemon is started again.
    AtRestart,
    /// Puts the log filter in force.
    LogFilter,
    /// Changes the configuration of the engine.
    IdleRelease,
    /// Reads the tokens again; also if the file has changed alone.
    Tokens,
    /// Reads the certificate and its key again; also if the files have changed alone.
    Certificate,
}

/// A setting, without its value.
#[derive(Debug)]
pub struct Entry {
    /// The setting's key in files.
    pub key: &'static str,
    /// What a reload does about it.
    pub reload: Reload,
    /// The setting's flag without the two hyphens.
    pub(super) flag: String,
    /// The subject that it belongs to, a heading of the reference page.
    pub(super) group: &'static str,
    /// Help text of the setting: lines, with empty ones between paragraphs. The first paragraph
    /// alone is in `-h`.
    pub(super) help: &'static [&'static str],
    pub(super) default: DefaultValue,
    pub(super) shape: Shape,
    /// What stands for the value in `--help`.
    pub(super) placeholder: String,
    /// What values there are, for the reference page.
    pub(super) allowed: String,
    /// Words that are values, for the fuzzer.
    pub(super) words: Vec<&'static str>,
}

impl Entry {
    pub(super) fn new<T>(
        key: &'static str,
        group: &'static str,
        help: &'static [&'static str],
        kind: Kind<T>,
        default: DefaultValue,
        reload: Reload,
    ) -> Self {
        Self {
            key,
            reload,
            flag: key.replace('_', "-"),
            group,
            help,
            default,
            shape: kind.shape,
            placeholder: kind.placeholder,
            allowed: kind.allowed,
            words: kind.words,
        }
    }

    /// Summary of the setting, a paragraph.
    pub fn summary(&self) -> String {
        self.paragraphs().into_iter().next().unwrap_or_default()
    }

    /// The help text, a text for each paragraph.
    pub(super) fn paragraphs(&self) -> Vec<String> {
        paragraphs(self.help)
    }

    /// The default in words.
    pub(super) fn default_text(&self) -> &'static str {
        match self.default {
            DefaultValue::Is(text) | DefaultValue::Unset(text) => text,
        }
    }

    /// What the setting is if nothing sets it.
    pub(super) fn default_given(&self) -> Given {
        let texts = match self.default {
            DefaultValue::Is(text) => vec![text.into()],
            DefaultValue::Unset(_) => Vec::new(),
        };
        Given {
            texts,
            origin: None,
        }
    }

    fn argument(&'static self) -> Arg {
        let default = format!("[default: {}]", self.default_text());
        let mut paragraphs = self.paragraphs();
        let short = format!("{} {default}", paragraphs.first().map_or("", |p| p));
        let action = match self.shape {
            Shape::Text | Shape::Path => ArgAction::Set,
            Shape::Paths | Shape::Names | Shape::Texts => {
                paragraphs.push("May be given several times.".to_owned());
                ArgAction::Append
            }
        };
        paragraphs.push(default);
        Arg::new(self.key)
            .long(self.flag.as_str())
            .value_name(self.placeholder.as_str())
            .help(short)
            .long_help(paragraphs.join("\n\n"))
            .value_parser(ValueParser::os_string())
            .allow_negative_numbers(self.shape == Shape::Text)
            .action(action)
    }
}

/// Lines of documentation as paragraphs.
pub(super) fn paragraphs(lines: &[&str]) -> Vec<String> {
    let paragraphs = lines.split(|line| line.trim().is_empty());
    let join = |lines: &[&str]| {
        let lines: Vec<&str> = lines.iter().map(|line| line.trim()).collect();
        lines.join(" ")
    };
    paragraphs.map(join).filter(|p| !p.is_empty()).collect()
}

/// The keys of all settings.
pub(super) fn keys() -> impl Iterator<Item = &'static str> {
    settings::ENTRIES.iter().map(|entry| entry.key)
}

/// The entry that has this key.
pub(super) fn find(key: &str) -> Option<&'static Entry> {
    settings::ENTRIES.iter().find(|entry| entry.key == key)
}

/// Values that were written for each setting, by key.
#[derive(Debug, Default)]
pub(super) struct AllGiven(pub(super) BTreeMap<&'static str, Given>);

impl AllGiven {
    /// The value of a setting. A setting that nothing sets has its default.
    pub(super) fn read<T>(&self, key: &'static str, kind: &Kind<T>) -> Result<T, ConfigError> {
        let default = || find(key).map(Entry::default_given);
        let given = self.0.get(key).cloned().or_else(default);
        let given = given.unwrap_or(Given {
            texts: Vec::new(),
            origin: None,
        });
        (kind.read)(&given).map_err(|message| ConfigError::Value {
            key,
            origin: given.origin.unwrap_or(Origin::Flag),
            message,
        })
    }

    /// Gives a setting that nothing sets the value `texts`, as its default.
    pub(super) fn set_default(&mut self, key: &'static str, texts: Vec<OsString>) {
        self.0.entry(key).or_insert(Given {
            texts,
            origin: None,
        });
    }

    /// Gives a setting that nothing sets the value of another one, as its default.
    pub(super) fn set_default_to(&mut self, key: &'static str, other: &str) {
        let given = self.0.get(other).cloned();
        let given = given.or_else(|| find(other).map(Entry::default_given));
        self.set_default(key, given.map_or_else(Vec::new, |given| given.texts));
    }

    /// Where the values came from that are no defaults.
    pub(super) fn origins(&self) -> BTreeMap<&'static str, Origin> {
        let origin = |(key, given): (&&'static str, &Given)| Some((*key, given.origin.clone()?));
        self.0.iter().filter_map(origin).collect()
    }
}

/// What the command line has for each setting.
#[derive(Debug, Clone, Default)]
pub struct SettingFlags(BTreeMap<&'static str, Vec<OsString>>);

impl SettingFlags {
    pub(super) fn given(&self, entry: &Entry) -> Option<Given> {
        let texts = self.0.get(entry.key)?.clone();
        Some(Given {
            texts,
            origin: Some(Origin::Flag),
        })
    }
}

impl FromArgMatches for SettingFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut flags = Self::default();
        flags.update_from_arg_matches(matches)?;
        Ok(flags)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        for entry in settings::ENTRIES.iter() {
            if let Some(values) = matches.get_many::<OsString>(entry.key) {
                self.0.insert(entry.key, values.cloned().collect());
            }
        }
        Ok(())
    }
}

impl Args for SettingFlags {
    fn augment_args(command: Command) -> Command {
        let arguments = settings::ENTRIES.iter().map(Entry::argument);
        let renamed = RENAMED.iter().map(|&(old, new)| {
            let refuse = move |_: &str| Err::<String, _>(format!("the setting is called --{new}"));
            Arg::new(old).long(old).hide(true).value_parser(refuse)
        });
        command.args(arguments).args(renamed)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

/// Declares the settings: their entries, and a structure with a field for the value of each.
///
/// ```text
/// "Heading of the reference page" {
///     /// What it means, first in one paragraph for `-h`, then as much as the reference needs.
///     key: Type = kind, default, what a reload does;
/// }
/// ```
macro_rules! declare_settings {
    ($(
        $group:literal {
            $($(#[doc = $help:literal])+ $key:ident: $type:ty = $kind:expr, $default:expr, $reload:ident;)+
        }
    )+) => {
        /// The value of each setting.
        #[derive(Debug, Clone)]
        pub struct Values {
            $($($(#[doc = $help])+ pub $key: $type,)+)+
        }

        /// All settings, in the order of the reference page.
        pub(super) static ENTRIES: std::sync::LazyLock<Vec<Entry>> = std::sync::LazyLock::new(|| {
            vec![$($(Entry::new(
                stringify!($key),
                $group,
                &[$($help),+],
                $kind,
                $default,
                Reload::$reload,
            ),)+)+]
        });

        impl Values {
            pub(super) fn read(given: &AllGiven) -> Result<Self, ConfigError> {
                Ok(Self {
                    $($($key: given.read(stringify!($key), &$kind)?,)+)+
                })
            }

            /// Each value as TOML has it, in the order of [`ENTRIES`]; `None` if it is unset.
            pub(super) fn shown(&self) -> Vec<Option<String>> {
                vec![$($(($kind.show)(&self.$key),)+)+]
            }
        }
    };
}
pub(super) use declare_settings;

/// Declares a table that files have several of, such as `[[model]]`: a structure that is read by
/// serde, and the documentation of its keys.
macro_rules! file_table {
    (
        $(#[$meta:meta])*
        $name:ident {
            $($(#[doc = $help:literal])+ $(#[serde($($serde:tt)+)])? $key:ident: $type:ty,)+
        }
    ) => {
        $(#[$meta])*
        #[derive(Debug, Clone, serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        pub(super) struct $name {
            $($(#[doc = $help])+ $(#[serde($($serde)+)])? $key: $type,)+
        }

        impl $name {
            /// Keys of the table, each with its documentation.
            pub(super) const KEYS: &'static [(&'static str, &'static [&'static str])] =
                &[$((stringify!($key), &[$($help),+]),)+];
        }
    };
}
pub(super) use file_table;
