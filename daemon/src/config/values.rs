//! What a value may be: text to a setting, or a message that says what is allowed.

use std::time::Duration;

use rocmforge_engine::api::{Budget, Offload, Policy};
use rocmforge_engine::{DeviceChoice, KvType, PrefixCache};
use tracing_subscriber::EnvFilter;

use super::{DRAIN_GRACE_MAX, WATCHDOG_MAX, WATCHDOG_MIN};

pub(super) fn device(text: &str) -> Result<DeviceChoice, String> {
    match text {
        "auto" => Ok(DeviceChoice::Auto),
        "host" => Ok(DeviceChoice::Host),
        _ => gpu(text).ok_or_else(|| {
            format!("'{text}' is no device: auto, host, hip, hip:N, cuda or cuda:N")
        }),
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

pub(super) fn policy(text: &str) -> Result<Policy, String> {
    match text {
        "pass-aware" => Ok(Policy::PassAware),
        "lru" => Ok(Policy::Lru),
        _ => Err(format!("'{text}' is no policy: pass-aware or lru")),
    }
}

pub(super) fn offload(text: &str) -> Result<Offload, String> {
    match text {
        "auto" => Ok(Offload::Auto),
        "never" => Ok(Offload::Never),
        "always" => Ok(Offload::Always),
        _ => Err(format!("'{text}' is none of auto, never and always")),
    }
}

pub(super) fn prefix_cache(text: &str) -> Result<PrefixCache, String> {
    match text {
        "off" => Ok(PrefixCache::Off),
        "per-user" => Ok(PrefixCache::PerClient),
        "shared" => Ok(PrefixCache::Shared),
        _ => Err(format!("'{text}' is none of off, per-user and shared")),
    }
}

/// `None` is by the model.
pub(super) fn kv_type(text: &str) -> Result<Option<KvType>, String> {
    match (text, KvType::from_name(text)) {
        ("auto", _) => Ok(None),
        (_, Some(ty)) => Ok(Some(ty)),
        (_, None) => Err(format!("'{text}' is none of auto, f32, f16 and q8_0")),
    }
}

/// `None` is the device's affair.
pub(super) fn speculate(text: &str) -> Result<Option<bool>, String> {
    match text {
        "auto" => Ok(None),
        "on" => Ok(Some(true)),
        "off" => Ok(Some(false)),
        _ => Err(format!("'{text}' is none of on, off and auto")),
    }
}

pub(super) fn log_filter(text: &str) -> Result<String, String> {
    match EnvFilter::try_new(text) {
        Ok(_) => Ok(text.to_owned()),
        Err(error) => Err(format!(
            "'{text}' is no log filter ({error}): a level (error, warn, info, debug, trace) or directives such as \
             info,rocmforge_engine=debug"
        )),
    }
}

pub(super) fn integer(text: &str, min: u64, max: u64) -> Result<u64, String> {
    match text.parse::<u64>() {
        Ok(n) if (min..=max).contains(&n) => Ok(n),
        _ => Err(format!(
            "'{text}' is not a whole number from {min} to {max}"
        )),
    }
}

pub(super) fn integer_u32(text: &str, max: u32) -> Result<u32, String> {
    integer(text, 1, u64::from(max)).map(|n| n as u32)
}

/// Reads the watchdog's patience.
pub(super) fn watchdog(text: &str) -> Result<Duration, String> {
    let range = WATCHDOG_MIN.as_secs_f64()..=WATCHDOG_MAX.as_secs_f64();
    match text.parse::<f64>() {
        Ok(s) if range.contains(&s) => Ok(Duration::from_secs_f64(s)),
        _ => Err(format!(
            "'{text}' is not a number of seconds from {} to {}",
            range.start(),
            range.end()
        )),
    }
}

pub(super) fn seconds(text: &str) -> Result<Duration, String> {
    let max = DRAIN_GRACE_MAX.as_secs();
    match text.parse::<f64>() {
        Ok(s) if s.is_finite() && (0.0..=DRAIN_GRACE_MAX.as_secs_f64()).contains(&s) => {
            Ok(Duration::from_secs_f64(s))
        }
        _ => Err(format!(
            "'{text}' is not a number of seconds from 0 to {max}"
        )),
    }
}

/// Reads a budget, in the notation that daemon and clients share: `2147483648`, `2GiB`, `1.5G`
/// (binary), `2GB` (decimal) or `80%`.
///
/// # Errors
/// A message that says what is allowed.
pub fn parse_budget(text: &str) -> Result<Budget, String> {
    crate::rpc::parse_budget(text)
}

/// Reads what is kept free, in the same notation; 0 is none.
/// A budget, or `0` for none.
pub(super) fn budget_or_none(text: &str) -> Result<Option<Budget>, String> {
    match text {
        "0" => Ok(None),
        text => parse_budget(text).map(Some),
    }
}

/// Reads a share of time, with or without its sign; `None` is off.
pub(super) fn percent_or_off(text: &str) -> Result<Option<f64>, String> {
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
}
