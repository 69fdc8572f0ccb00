//! The kinds of values that settings have: how one is read, shown, and what the reference page says
//! of it. A value is refused with a message that says what is allowed.

use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use axum::http::Uri;
use rocmforge_engine::DeviceChoice;
use rocmforge_engine::api::Budget;
use rocmforge_http::Allowed;
use rocmforge_hub::Hosts;
use rocmforge_service::roles::Who;

use super::bounds::{HTTP_LISTEN_MAX, IMAGE_HOSTS_MAX, MODEL_DIRS_MAX, SOCKET_PATH_MAX};
use super::given::{Given, Shape};
use super::origin::Origin;
use super::quoted::{quoted, quoted_path};
use crate::addresses::ListenAddress;
use crate::log_filter;
use crate::traces::Collector;

type Read<T> = Box<dyn Fn(&Given) -> Result<T, String>>;
type Show<T> = Box<dyn Fn(&T) -> Option<String>>;

/// A kind of values.
pub(super) struct Kind<T> {
    pub(super) shape: Shape,
    /// What stands for the value in `--help`.
    pub(super) placeholder: String,
    /// What values there are, for the reference page.
    pub(super) allowed: String,
    /// Words that are values, for the fuzzer.
    pub(super) words: Vec<&'static str>,
    /// Reads a value, or says what is allowed.
    pub(super) read: Read<T>,
    /// A value as TOML has it; `None` if it is unset.
    pub(super) show: Show<T>,
}

impl<T: 'static> Kind<T> {
    /// A value that is one text.
    fn text(
        placeholder: impl Into<String>,
        allowed: impl Into<String>,
        read: impl Fn(&str) -> Result<T, String> + 'static,
        show: impl Fn(&T) -> String + 'static,
    ) -> Self {
        Self {
            shape: Shape::Text,
            placeholder: placeholder.into(),
            allowed: allowed.into(),
            words: Vec::new(),
            // What is no UTF-8 is no value of any of these, and is refused as such.
            read: Box::new(move |given| {
                let text = given.texts.first().map(|text| text.to_string_lossy());
                read(text.unwrap_or_default().trim())
            }),
            show: Box::new(move |value| Some(show(value))),
        }
    }

    /// The kind whose value may be absent.
    pub(super) fn optional(self) -> Kind<Option<T>> {
        let (read, show) = (self.read, self.show);
        Kind {
            shape: self.shape,
            placeholder: self.placeholder,
            allowed: self.allowed,
            words: self.words,
            read: Box::new(move |given| match given.texts.is_empty() {
                true => Ok(None),
                false => read(given).map(Some),
            }),
            show: Box::new(move |value| value.as_ref().and_then(&show)),
        }
    }
}

/// One of several words.
pub(super) fn choice<T: Copy + PartialEq + 'static, const N: usize>(
    options: [(&'static str, T); N],
) -> Kind<T> {
    let words = options.map(|(word, _)| word);
    let (last, others) = words.split_last().map_or(("", &[][..]), |(l, o)| (*l, o));
    let others = others.join(", ");
    let none_of = match N {
        2 => format!("neither {others} nor {last}"),
        _ => format!("none of {others} and {last}"),
    };
    let read = move |text: &str| {
        let found = options.iter().find(|(word, _)| *word == text);
        let value = found.map(|(_, value)| *value);
        value.ok_or_else(|| format!("'{text}' is {none_of}"))
    };
    let show = move |value: &T| {
        let found = options.iter().find(|(_, option)| option == value);
        quoted(found.map_or("", |(word, _)| word))
    };
    let code: Vec<String> = words.iter().map(|word| format!("`{word}`")).collect();
    Kind {
        words: words.to_vec(),
        ..Kind::text(words.join("|"), code.join(", "), read, show)
    }
}

/// A whole number.
pub(super) fn integer(placeholder: &'static str, min: u32, max: u32) -> Kind<u32> {
    let allowed = format!("a whole number from {min} to {max}");
    let read = move |text: &str| match text.parse::<u32>() {
        Ok(n) if (min..=max).contains(&n) => Ok(n),
        _ => Err(format!(
            "'{text}' is not a whole number from {min} to {max}"
        )),
    };
    Kind::text(placeholder, allowed, read, u32::to_string)
}

/// A whole number of things, of which there is one at least.
pub(super) fn count(placeholder: &'static str, max: u32) -> Kind<NonZeroUsize> {
    let Kind { allowed, read, .. } = integer(placeholder, 1, max);
    let positive = move |given: &Given| {
        let n = read(given)?;
        NonZeroUsize::new(n as usize).ok_or_else(|| format!("'{n}' is not a number from 1 on"))
    };
    Kind {
        read: Box::new(positive),
        ..Kind::text(
            placeholder,
            allowed,
            |_| Ok(NonZeroUsize::MIN),
            NonZeroUsize::to_string,
        )
    }
}

/// A time in seconds, with or without a fraction.
pub(super) fn seconds(min: Duration, max: Duration) -> Kind<Duration> {
    let range = min.as_secs_f64()..=max.as_secs_f64();
    let allowed = format!("seconds from {} to {}", range.start(), range.end());
    let read = move |text: &str| match text.parse::<f64>() {
        Ok(s) if range.contains(&s) => Ok(Duration::from_secs_f64(s)),
        _ => Err(format!(
            "'{text}' is not a number of seconds from {} to {}",
            range.start(),
            range.end()
        )),
    };
    Kind::text("SECONDS", allowed, read, |time| {
        time.as_secs_f64().to_string()
    })
}

/// A time in seconds, or `0`, which is `None`.
pub(super) fn seconds_or_none(min: Duration, max: Duration) -> Kind<Option<Duration>> {
    let Kind { allowed, read, .. } = seconds(min, max);
    let allowed = format!("{allowed}; `0` for never");
    let or_none = move |given: &Given| {
        let text = given.texts.first().map(|text| text.to_string_lossy());
        match text.is_some_and(|text| text.trim() == "0") {
            true => Ok(None),
            false => read(given).map(Some),
        }
    };
    let show = |time: &Option<Duration>| time.unwrap_or_default().as_secs_f64().to_string();
    Kind {
        read: Box::new(or_none),
        ..Kind::text("SECONDS", allowed, |_| Ok(None), show)
    }
}

/// Bytes, as a number, a size or a share.
pub(super) fn size() -> Kind<Budget> {
    let allowed = "bytes, a size such as `2GiB` or `1.5G` (binary units) or `2GB` (decimal units), or a \
                   percentage such as `80%`";
    let words = vec!["1.5G", "2GB", "2GiB", "80%"];
    Kind {
        words,
        ..Kind::text("SIZE", allowed, parse_budget, show_budget)
    }
}

/// A size or `0`, which is `None`.
pub(super) fn size_or_none() -> Kind<Option<Budget>> {
    let allowed = format!("{}; `0` for none", size().allowed);
    let read = |text: &str| match text {
        "0" => Ok(None),
        text => parse_budget(text).map(Some),
    };
    let show = |size: &Option<Budget>| size.as_ref().map_or("0".to_owned(), show_budget);
    Kind::text("SIZE", allowed, read, show)
}

/// A size, `0` among them, or `off`, which is `None`.
pub(super) fn size_or_off() -> Kind<Option<Budget>> {
    let allowed = format!("{}; `0`; `off`", size().allowed);
    let read = |text: &str| match text {
        "off" => Ok(None),
        "0" => Ok(Some(Budget::Bytes(0))),
        text => parse_budget(text).map(Some),
    };
    let show = |size: &Option<Budget>| size.as_ref().map_or_else(|| quoted("off"), show_budget);
    Kind::text("SIZE|off", allowed, read, show)
}

/// Bytes, as a number or a size.
pub(super) fn bytes(min: u64) -> Kind<u64> {
    let allowed = format!(
        "bytes, or a size such as `2GiB` or `1.5G` (binary units) or `2GB` (decimal units); at least {} MiB",
        min >> 20
    );
    let read = move |text: &str| match parse_budget(text)? {
        Budget::Bytes(bytes) if bytes >= min => Ok(bytes),
        _ => Err(format!(
            "'{text}' is no size of {} MiB or more; give one such as 2GiB",
            min >> 20
        )),
    };
    Kind::text("SIZE", allowed, read, show_bytes)
}

/// Hosts from which files are fetched.
pub(super) fn hosts() -> Kind<Hosts> {
    Kind {
        shape: Shape::Names,
        placeholder: "HOST".to_owned(),
        allowed:
            "a list of host names; `*.` in front of one stands for any names before it, `*` for \
                  every host"
                .to_owned(),
        words: vec!["*.example.org"],
        read: Box::new(|given| {
            let texts = given.texts.iter().map(|text| text.to_string_lossy());
            let texts: Vec<String> = texts.map(|text| text.trim().to_owned()).collect();
            if texts.len() > IMAGE_HOSTS_MAX {
                return Err(format!(
                    "{} hosts are named; at most {IMAGE_HOSTS_MAX}",
                    texts.len()
                ));
            }
            Hosts::new(&texts)
        }),
        show: Box::new(|hosts| {
            let mut patterns = hosts.patterns().peekable();
            patterns.peek()?;
            Some(list(patterns))
        }),
    }
}

/// Bytes as a size, where they are whole GiB or MiB.
fn show_bytes(bytes: &u64) -> String {
    match *bytes {
        0 => "0".to_owned(),
        bytes if bytes.is_multiple_of(1 << 30) => quoted(&format!("{}GiB", bytes >> 30)),
        bytes if bytes.is_multiple_of(1 << 20) => quoted(&format!("{}MiB", bytes >> 20)),
        bytes => bytes.to_string(),
    }
}

fn show_budget(budget: &Budget) -> String {
    match budget {
        Budget::Bytes(bytes) => show_bytes(bytes),
        Budget::Percent(percent) => quoted(&format!("{percent}%")),
    }
}

/// Reads a budget, in the notation that daemon and clients share: `2147483648`, `2GiB`, `1.5G`
/// (binary), `2GB` (decimal) or `80%`.
///
/// # Errors
/// A message that says what is allowed.
pub fn parse_budget(text: &str) -> Result<Budget, String> {
    rocmforge_grpc::parse_budget(text)
}

/// A percentage, with or without its sign, or `off`, which is `None`.
pub(super) fn percent_or_off() -> Kind<Option<f64>> {
    let allowed = "a percentage above 0 and up to 100, or `off`";
    let read = |text: &str| {
        if text == "off" {
            return Ok(None);
        }
        let number = text.strip_suffix('%').unwrap_or(text);
        match number.parse::<f64>() {
            Ok(percent) if percent > 0.0 && percent <= 100.0 => Ok(Some(percent)),
            _ => Err(format!(
                "'{text}' is neither off nor a percentage above 0 and up to 100"
            )),
        }
    };
    let show = |percent: &Option<f64>| {
        percent.map_or_else(|| quoted("off"), |percent| percent.to_string())
    };
    Kind::text("PERCENT|off", allowed, read, show)
}

/// A device, or the choice of one.
pub(super) fn device() -> Kind<DeviceChoice> {
    let allowed = "`auto`, `cpu`, `host`, `hip`, `hip:N`, `cuda`, `cuda:N`";
    let read = |text: &str| match text {
        "auto" => Ok(DeviceChoice::Auto),
        // Whoever comes from elsewhere says cpu; the rest of the product says host.
        "cpu" | "host" => Ok(DeviceChoice::Host),
        _ => gpu(text)
            .ok_or_else(|| format!("'{text}' is no device: auto, cpu, hip, hip:N, cuda or cuda:N")),
    };
    let show = |choice: &DeviceChoice| {
        quoted(&match choice {
            DeviceChoice::Auto => "auto".to_owned(),
            DeviceChoice::Host => "host".to_owned(),
            DeviceChoice::Hip(n) => format!("hip:{n}"),
            DeviceChoice::Cuda(n) => format!("cuda:{n}"),
        })
    };
    Kind {
        words: vec!["auto", "cpu", "host", "hip:1", "cuda"],
        ..Kind::text("DEVICE", allowed, read, show)
    }
}

/// `hip`, `cuda`, each with or without `:N`.
fn gpu(text: &str) -> Option<DeviceChoice> {
    let (kind, ordinal) = match text.split_once(':') {
        Some((kind, ordinal)) => (kind, ordinal.parse().ok()?),
        None => (text, 0),
    };
    match kind {
        "hip" => Some(DeviceChoice::Hip(ordinal)),
        "cuda" => Some(DeviceChoice::Cuda(ordinal)),
        _ => None,
    }
}

/// A filter of log lines.
pub(super) fn log_filter() -> Kind<String> {
    let allowed = "a level (`off`, `error`, `warn`, `info`, `debug`, `trace`) or directives such as \
                   `info,rocmforge_engine=debug`";
    let read = |text: &str| match log_filter::parse(text) {
        Ok(_) => Ok(text.to_owned()),
        Err(error) => Err(error),
    };
    Kind {
        words: vec!["debug,rocmforge_engine=trace"],
        ..Kind::text("FILTER", allowed, read, |filter: &String| quoted(filter))
    }
}

/// Addresses to listen on.
pub(super) fn addresses() -> Kind<Vec<ListenAddress>> {
    Kind {
        shape: Shape::Texts,
        placeholder: "ADDRESS:PORT".to_owned(),
        allowed: format!(
            "an IP address or a host name, and a port, such as `127.0.0.1:8080`, `[::1]:8080` or `localhost:8080`; or \
             a list of at most {HTTP_LISTEN_MAX}"
        ),
        words: vec!["localhost:8080", "[::1]:80"],
        read: Box::new(|given| {
            let texts = given.texts.iter().map(|text| text.to_string_lossy());
            let texts: Vec<String> = texts.map(|text| text.into_owned()).collect();
            let each = texts.iter().flat_map(|text| text.split(',')).map(str::trim);
            let mut addresses = Vec::new();
            for text in each {
                let address = text.parse()?;
                if !addresses.contains(&address) {
                    addresses.push(address);
                }
            }
            match addresses.len() {
                0..=HTTP_LISTEN_MAX => Ok(addresses),
                n => Err(format!(
                    "{n} addresses are named; at most {HTTP_LISTEN_MAX}"
                )),
            }
        }),
        show: Box::new(|addresses| {
            let texts: Vec<String> = addresses.iter().map(ToString::to_string).collect();
            (!texts.is_empty()).then(|| list(texts.iter().map(String::as_str)))
        }),
    }
}

/// A collector of traces.
pub(super) fn collector() -> Kind<Collector> {
    let allowed = "a URL `http://HOST:PORT`, with a path unless it is `/v1/traces`";
    let show = |collector: &Collector| quoted(&collector.to_string());
    Kind::text("URL", allowed, Collector::parse, show)
}

/// The address of a hub.
pub(super) fn hub() -> Kind<Uri> {
    let allowed = "a URL `https://HOST`, or `http://HOST:PORT` for a hub of one's own";
    let show = |url: &Uri| quoted(url.to_string().trim_end_matches('/'));
    Kind::text("URL", allowed, rocmforge_hub::address, show)
}

/// The path of a file.
pub(super) fn path(placeholder: &'static str) -> Kind<PathBuf> {
    Kind {
        shape: Shape::Path,
        placeholder: placeholder.to_owned(),
        allowed: "a path; absolute in a file".to_owned(),
        words: Vec::new(),
        read: Box::new(|given| {
            let path = given.texts.first().cloned().unwrap_or_default();
            checked_path(path, given.origin.as_ref())
        }),
        show: Box::new(|path| Some(quoted_path(path))),
    }
}

/// The path of a Unix socket.
pub(super) fn socket() -> Kind<PathBuf> {
    let Kind { read, .. } = path("PATH");
    Kind {
        allowed: format!("a path of at most {SOCKET_PATH_MAX} bytes; absolute in a file"),
        read: Box::new(move |given| {
            let path = read(given)?;
            let bytes = path.as_os_str().len();
            if bytes > SOCKET_PATH_MAX {
                return Err(format!(
                    "{} has {bytes} bytes, but the path of a Unix socket has at most {SOCKET_PATH_MAX}; choose a shorter one",
                    path.display()
                ));
            }
            Ok(path)
        }),
        ..path("PATH")
    }
}

/// A path: as given on the command line, absolute in a file (which has no working directory).
fn checked_path(path: OsString, origin: Option<&Origin>) -> Result<PathBuf, String> {
    let path = PathBuf::from(path);
    if path.as_os_str().is_empty() {
        return Err("the path is empty".to_owned());
    }
    if matches!(origin, Some(Origin::File { .. })) && !path.is_absolute() {
        return Err(format!(
            "{} is relative; paths in the file are absolute",
            path.display()
        ));
    }
    Ok(path)
}

/// Directories.
pub(super) fn directories() -> Kind<Vec<PathBuf>> {
    Kind {
        shape: Shape::Paths,
        placeholder: "DIR".to_owned(),
        allowed: format!("a path, or a list of at most {MODEL_DIRS_MAX}; absolute in a file"),
        words: Vec::new(),
        read: Box::new(|given| {
            let n = given.texts.len();
            if n > MODEL_DIRS_MAX {
                return Err(format!(
                    "{n} directories are named; at most {MODEL_DIRS_MAX}"
                ));
            }
            let texts = given.texts.iter().cloned();
            let paths = texts.map(|path| checked_path(path, given.origin.as_ref()));
            paths.collect()
        }),
        show: Box::new(|dirs| {
            let dirs: Vec<_> = dirs.iter().map(|dir| dir.to_string_lossy()).collect();
            Some(list(dirs.iter().map(AsRef::as_ref)))
        }),
    }
}

/// Users and groups.
pub(super) fn users() -> Kind<Who> {
    Kind {
        shape: Shape::Names,
        placeholder: "WHO".to_owned(),
        allowed: "a list of users (`NAME` or a number), groups (`@NAME`), or `*` for everyone"
            .to_owned(),
        words: vec!["*", "@root"],
        read: Box::new(|given| {
            let names = given.texts.iter().map(|name| name.to_string_lossy());
            let names: Vec<String> = names.map(|name| name.into_owned()).collect();
            Who::parse(&names)
        }),
        show: Box::new(|who| Some(show_users(who))),
    }
}

/// Origins of pages, or names of hosts; `what` is what one of them is.
pub(super) fn patterns(placeholder: &'static str, what: &'static str) -> Kind<Vec<String>> {
    Kind {
        shape: Shape::Names,
        placeholder: placeholder.to_owned(),
        allowed: format!("a list of {what}s; `*` at the end of one stands for any rest"),
        words: Vec::new(),
        read: Box::new(move |given| {
            let texts = given.texts.iter().map(|text| text.to_string_lossy());
            let texts: Vec<String> = texts.map(|text| text.trim().to_owned()).collect();
            Allowed::check(&texts, what)?;
            Ok(texts)
        }),
        show: Box::new(|patterns| Some(list(patterns.iter().map(String::as_str)))),
    }
}

/// Users and groups by their numbers, by which they are told apart.
fn show_users(who: &Who) -> String {
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

/// A list as TOML has it.
pub(super) fn list<'a>(items: impl Iterator<Item = &'a str>) -> String {
    let items: Vec<_> = items.map(quoted).collect();
    format!("[{}]", items.join(", "))
}
