//! Budgets as people write them: bytes, sizes with a unit, shares of the device. One notation for
//! the daemon's settings and for clients.

use std::fmt;
use std::str::FromStr;

use crate::v1::set_budget_request;

/// Largest budget in bytes (one PiB): above it a typing error is more likely than the memory.
pub const BUDGET_MAX_BYTES: u64 = 1 << 50;

/// How much device memory to hold. The daemon resolves shares, as it knows the device.
///
/// Read from `2147483648`, `512MiB`, `2GiB`, `1.5G` or `80%`. K, M, G and T count in 1024,
/// with or without `iB`; KB, MB, GB and TB count in 1000. Case does not matter, and space
/// may stand before the unit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Budget {
    /// Bytes, from 1 to [`BUDGET_MAX_BYTES`].
    Bytes(u64),
    /// Hundredths of the device's memory, above 0 and at most 100.
    Percent(f64),
}

/// Why a text is no budget.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BudgetError(String);

impl fmt::Display for BudgetError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for BudgetError {}

impl From<Budget> for set_budget_request::Budget {
    fn from(budget: Budget) -> Self {
        match budget {
            Budget::Bytes(bytes) => Self::Bytes(bytes),
            Budget::Percent(percent) => Self::Percent(percent),
        }
    }
}

impl FromStr for Budget {
    type Err = BudgetError;

    fn from_str(text: &str) -> Result<Self, BudgetError> {
        let text = text.trim();
        let wrong = || {
            BudgetError(format!(
                "'{text}' is no budget: bytes (2147483648), a size (512MiB, 2GiB, 1.5G; KB, MB and GB are decimal), or a \
                 share of the device's memory above 0% and at most 100% (80%)"
            ))
        };
        let digits = text
            .find(|c: char| !(c.is_ascii_digit() || c == '.'))
            .unwrap_or(text.len());
        let (number, unit) = (&text[..digits], text[digits..].trim());
        let factor: u64 = match unit.to_ascii_lowercase().as_str() {
            "%" => return percent(number).ok_or_else(wrong),
            "" | "b" => 1,
            "k" | "kib" => 1 << 10,
            "m" | "mib" => 1 << 20,
            "g" | "gib" => 1 << 30,
            "t" | "tib" => 1 << 40,
            "kb" => 1_000,
            "mb" => 1_000_000,
            "gb" => 1_000_000_000,
            "tb" => 1_000_000_000_000,
            _ => return Err(wrong()),
        };
        let bytes = match number.parse::<u64>() {
            Ok(n) => n.checked_mul(factor),
            // A fraction of a byte is a typing error; 53 bits are exact far
            // above the largest budget.
            Err(_) if factor > 1 => {
                let number: f64 = number.parse().map_err(|_| wrong())?;
                Some((number * factor as f64) as u64)
            }
            Err(_) => return Err(wrong()),
        };
        match bytes {
            Some(0) => Err(wrong()),
            Some(bytes) if bytes <= BUDGET_MAX_BYTES => Ok(Self::Bytes(bytes)),
            Some(_) | None => Err(BudgetError(format!(
                "'{text}' is too much: a budget has at most {BUDGET_MAX_BYTES} bytes"
            ))),
        }
    }
}

fn percent(number: &str) -> Option<Budget> {
    let percent: f64 = number.parse().ok()?;
    // Also false for NaN.
    (percent > 0.0 && percent <= 100.0).then_some(Budget::Percent(percent))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_shares() {
        for (text, expected) in [
            ("2147483648", Budget::Bytes(1 << 31)),
            ("100b", Budget::Bytes(100)),
            ("2GiB", Budget::Bytes(2 << 30)),
            (" 2 gib ", Budget::Bytes(2 << 30)),
            ("1.5G", Budget::Bytes(3 << 29)),
            ("512MiB", Budget::Bytes(512 << 20)),
            ("4k", Budget::Bytes(4096)),
            ("2GB", Budget::Bytes(2_000_000_000)),
            ("1T", Budget::Bytes(1 << 40)),
            ("1024TiB", Budget::Bytes(BUDGET_MAX_BYTES)),
            ("80%", Budget::Percent(80.0)),
            ("12.5 %", Budget::Percent(12.5)),
        ] {
            assert_eq!(text.parse(), Ok(expected), "{text}");
        }
    }

    #[test]
    fn what_is_no_budget_says_how_to_write_one() {
        for text in [
            "", "lots", "1.5", "-1", "G", "2Gi", "2GiBs", "1..5G", "0x10", "é", "2é", "0", "0.0G",
            "0%", "101%", "NaN%",
        ] {
            let error = text.parse::<Budget>().unwrap_err().to_string();
            assert!(error.contains("2GiB") && error.contains("80%"), "{error}");
        }
        for text in ["1025TiB", "99999999999T", "18446744073709551615"] {
            let error = text.parse::<Budget>().unwrap_err().to_string();
            assert!(error.contains("at most"), "{error}");
        }
    }
}
