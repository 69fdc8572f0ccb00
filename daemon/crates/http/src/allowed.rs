//! Origins and hosts besides this machine's own that are allowed without a token.

/// Origins and host names that are allowed without a token.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Allowed {
    /// Allowed origins of pages: `app://obsidian.md`, `vscode-webview://*`.
    pub origins: Vec<String>,
    /// Additional host names of this machine, without a port: `host.docker.internal`.
    pub hosts: Vec<String>,
}

/// Maximum length of a pattern in bytes.
const PATTERN_MAX_BYTES: usize = 256;
/// Maximum number of patterns of a list.
const PATTERNS_MAX: usize = 64;

impl Allowed {
    /// Checks patterns of origins or hosts; `what` names one in messages.
    ///
    /// # Errors
    /// A message that says which one is wrong, and how.
    pub fn check(patterns: &[String], what: &str) -> Result<(), String> {
        if patterns.len() > PATTERNS_MAX {
            let n = patterns.len();
            return Err(format!("{n} entries; at most {PATTERNS_MAX}"));
        }
        let is_odd = |pattern: &&String| {
            let body = pattern.strip_suffix('*').unwrap_or(pattern);
            let fine = |b: u8| b.is_ascii_graphic() && b != b'*' && b != b',';
            pattern.is_empty() || pattern.len() > PATTERN_MAX_BYTES || !body.bytes().all(fine)
        };
        match patterns.iter().find(is_odd) {
            Some(pattern) => Err(format!(
                "{pattern:?} is no {what}: printable characters without spaces, and at most one * at the end, for any \
                 rest"
            )),
            None => Ok(()),
        }
    }

    /// Whether pages of this origin are allowed.
    pub(super) fn has_origin(&self, origin: &str) -> bool {
        self.origins.iter().any(|pattern| fits(pattern, origin))
    }

    /// Whether `HOST[:PORT]` is an allowed name of this machine.
    pub(super) fn has_host(&self, host: &str) -> bool {
        let name = match host.rsplit_once(':') {
            Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
            _ => host,
        };
        self.hosts.iter().any(|pattern| fits(pattern, name))
    }
}

/// Whether a text equals a pattern, or has its prefix if the pattern ends in `*`; case-insensitive.
fn fits(pattern: &str, text: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(begin) => text
            .get(..begin.len())
            .is_some_and(|text| text.eq_ignore_ascii_case(begin)),
        None => text.eq_ignore_ascii_case(pattern),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(patterns: &[&str]) -> Vec<String> {
        patterns.iter().map(|&pattern| pattern.to_owned()).collect()
    }

    #[test]
    fn pages_and_names_are_let_in_by_their_patterns() {
        let allowed = Allowed {
            origins: list(&["app://obsidian.md", "vscode-webview://*", "null"]),
            hosts: list(&["host.docker.internal", "build-*"]),
        };
        for origin in [
            "app://obsidian.md",
            "vscode-webview://1a2b",
            "VSCODE-webview://x",
            "null",
        ] {
            assert!(allowed.has_origin(origin), "{origin}");
        }
        for origin in [
            "app://obsidian.md.evil",
            "https://app://obsidian.md",
            "vscode",
            "",
        ] {
            assert!(!allowed.has_origin(origin), "{origin}");
        }
        for host in [
            "host.docker.internal",
            "HOST.docker.internal:8080",
            "build-7:80",
        ] {
            assert!(allowed.has_host(host), "{host}");
        }
        for host in [
            "docker.internal",
            "host.docker.internal.evil.com",
            "a:b",
            "[::1]:80",
            "",
        ] {
            assert!(!allowed.has_host(host), "{host}");
        }
        assert!(!Allowed::default().has_origin("") && !Allowed::default().has_host(""));
    }

    #[test]
    fn odd_patterns_are_told() {
        for odd in ["", "a b", "*.example.com", "a*b", "a,b"] {
            let told = Allowed::check(&list(&[odd]), "origin").unwrap_err();
            assert!(told.contains(&format!("{odd:?}")), "{told}");
        }
        assert!(Allowed::check(&list(&["*", "app://*", "null"]), "origin").is_ok());
        assert!(Allowed::check(&vec!["x".to_owned(); PATTERNS_MAX + 1], "origin").is_err());
    }
}
