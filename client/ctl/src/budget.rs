//! Budgets as users write them: bytes, sizes with a unit, shares of the device.

use rocmforge_client::proto::v1::set_budget_request;

/// A budget; the daemon resolves shares, as it knows the device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Budget {
    /// So many bytes.
    Bytes(u64),
    /// So many hundredths of the device's memory.
    Percent(f64),
}

impl From<Budget> for set_budget_request::Budget {
    fn from(budget: Budget) -> Self {
        match budget {
            Budget::Bytes(bytes) => Self::Bytes(bytes),
            Budget::Percent(percent) => Self::Percent(percent),
        }
    }
}

/// Reads "2GiB", "1.5G", "512MiB", "2147483648" or "80%".
///
/// K, M, G and T count in 1024 with or without "iB"; KB, MB, GB and TB count in
/// 1000. Case does not matter.
pub(crate) fn parse_budget(text: &str) -> Result<Budget, String> {
    let text = text.trim();
    let malformed = || format!("{text:?} is no size; write 2GiB, 1.5G, 512MiB, bytes, or 80%");
    let digits = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit = unit.trim().to_ascii_lowercase();
    if unit.is_empty() || unit == "b" {
        // Exact, as a fraction of a byte is a mistake and f64 ends at 2^53.
        return number.parse().map(Budget::Bytes).map_err(|_| malformed());
    }
    let number: f64 = number.parse().map_err(|_| malformed())?;
    if unit == "%" {
        if number <= 0.0 || number > 100.0 {
            return Err(format!(
                "{text} is not a share; it has to be above 0% and at most 100%"
            ));
        }
        return Ok(Budget::Percent(number));
    }
    if !unit.is_ascii() {
        return Err(malformed());
    }
    let (base, rest): (f64, _) = match unit.split_at(1) {
        (_, "" | "ib") => (1024.0, &unit[..1]),
        (_, "b") => (1000.0, &unit[..1]),
        _ => return Err(malformed()),
    };
    let power = match rest {
        "k" => 1,
        "m" => 2,
        "g" => 3,
        "t" => 4,
        _ => return Err(malformed()),
    };
    let bytes = number * base.powi(power);
    if bytes >= u64::MAX as f64 {
        return Err(format!("{text} is more than any device has"));
    }
    Ok(Budget::Bytes(bytes as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_shares() {
        for (text, expected) in [
            ("2147483648", Budget::Bytes(1 << 31)),
            ("18446744073709551615", Budget::Bytes(u64::MAX)),
            ("0", Budget::Bytes(0)),
            ("100b", Budget::Bytes(100)),
            ("2GiB", Budget::Bytes(2 << 30)),
            ("2 gib", Budget::Bytes(2 << 30)),
            ("1.5G", Budget::Bytes(3 << 29)),
            ("512MiB", Budget::Bytes(512 << 20)),
            ("4k", Budget::Bytes(4096)),
            ("2GB", Budget::Bytes(2_000_000_000)),
            ("1T", Budget::Bytes(1 << 40)),
            ("80%", Budget::Percent(80.0)),
            ("12.5 %", Budget::Percent(12.5)),
        ] {
            assert_eq!(parse_budget(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn what_is_no_budget_says_how_to_write_one() {
        for text in [
            "",
            "lots",
            "1.5",
            "-1",
            "G",
            "2Gi",
            "2GiBs",
            "1..5G",
            "0x10",
            "é",
            "2é",
            "99999999999T",
        ] {
            assert!(parse_budget(text).is_err(), "{text:?}");
        }
        assert!(parse_budget("lots").unwrap_err().contains("2GiB"));
        assert!(parse_budget("101%").unwrap_err().contains("100%"));
        assert!(parse_budget("0%").is_err());
    }
}
