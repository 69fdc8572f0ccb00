//! Redirects: which ones a download follows.

use hyper::Uri;

use crate::error::Error;
use crate::web::host_of;

/// The URL that a reference at another URL stands for, without a fragment; nothing for an empty
/// one. Dots in its path stay.
pub(crate) fn joined(from: &Uri, to: &str) -> Option<String> {
    let (scheme, authority) = (from.scheme_str()?, from.authority()?);
    let to = to.split('#').next().filter(|to| !to.is_empty())?;
    let is_scheme = |text: &str| {
        let is_fine = |byte: u8| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte);
        text.starts_with(|first: char| first.is_ascii_alphabetic()) && text.bytes().all(is_fine)
    };
    let is_whole = to
        .split_once(':')
        .is_some_and(|(begin, _)| is_scheme(begin));
    Some(if is_whole {
        to.to_owned()
    } else if to.starts_with("//") {
        format!("{scheme}:{to}")
    } else if to.starts_with('/') {
        format!("{scheme}://{authority}{to}")
    } else if to.starts_with('?') {
        format!("{scheme}://{authority}{}{to}", from.path())
    } else {
        let dir = from.path().rsplit_once('/').map_or("", |(dir, _)| dir);
        format!("{scheme}://{authority}{dir}/{to}")
    })
}

/// Where a request is led to, if that is a place that may be trusted.
///
/// # Errors
/// [`Error::Redirect`] with what is wrong with it.
pub(crate) fn led(from: &Uri, to: &str) -> Result<Uri, Error> {
    let refuse = |why| Error::Redirect {
        host: host_of(from),
        to: to
            .split('?')
            .next()
            .unwrap_or_default()
            .chars()
            .take(200)
            .collect(),
        why,
    };
    let url: Uri = joined(from, to)
        .and_then(|whole| whole.parse().ok())
        .ok_or_else(|| refuse("which is no address; check the hub's address"))?;
    let has_user = url
        .authority()
        .is_none_or(|authority| authority.as_str().contains('@'));
    match url.scheme_str() {
        _ if has_user => Err(refuse(
            "which is no address of a host; check the hub's address",
        )),
        Some("https") => Ok(url),
        Some("http") if from.scheme_str() == Some("http") && url.host() == from.host() => Ok(url),
        _ => Err(refuse(
            "which is not https; use a hub that leads to https alone",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_led_to_a_place_that_is_less_safe() {
        let https: Uri = "https://hub.example/a/b?x=1".parse().unwrap();
        let http: Uri = "http://10.0.0.2:8080/a/b".parse().unwrap();
        let to = |from: &Uri, to: &str| led(from, to).map(|url| url.to_string());
        assert_eq!(
            to(&https, "https://cdn.example/x?sig=1").unwrap(),
            "https://cdn.example/x?sig=1"
        );
        assert_eq!(to(&https, "/c").unwrap(), "https://hub.example/c");
        assert_eq!(
            to(&https, "c?y=2#z").unwrap(),
            "https://hub.example/a/c?y=2"
        );
        assert_eq!(
            to(&https, "//other.example/c").unwrap(),
            "https://other.example/c"
        );
        assert_eq!(
            to(&http, "http://10.0.0.2:9090/c").unwrap(),
            "http://10.0.0.2:9090/c"
        );
        assert_eq!(
            to(&http, "https://cdn.example/c").unwrap(),
            "https://cdn.example/c"
        );
        for (from, odd) in [
            (&https, "http://hub.example/c"),
            (&https, "http://169.254.169.254/latest"),
            (&http, "http://127.0.0.1/c"),
            (&https, "file:///etc/passwd"),
            (&https, "https://user:pass@cdn.example/c"),
            (&https, "https://"),
        ] {
            assert!(
                matches!(led(from, odd), Err(Error::Redirect { .. })),
                "{odd}"
            );
        }
    }

    #[test]
    fn a_reference_is_joined_to_the_url_that_it_stands_at() {
        let from: Uri = "https://a.example:8443/b/c?d=e".parse().unwrap();
        for (to, expected) in [
            ("https://x.example/y", "https://x.example/y"),
            ("//x.example/y", "https://x.example/y"),
            ("/y#z", "https://a.example:8443/y"),
            ("y", "https://a.example:8443/b/y"),
            ("?y=z", "https://a.example:8443/b/c?y=z"),
            // What looks like a URL is in its query.
            (
                "/login?next=https://x",
                "https://a.example:8443/login?next=https://x",
            ),
            (
                "login?next=https://x",
                "https://a.example:8443/b/login?next=https://x",
            ),
        ] {
            assert_eq!(joined(&from, to).as_deref(), Some(expected), "{to}");
        }
        assert_eq!(joined(&from, ""), None);
        assert_eq!(joined(&from, "#z"), None);
    }
}
