//! What a user may call a model: a repository of a hub, a URL, or a name of Ollama's registry.
//!
//! *Invariant:* no part of a name begins with a dot or has a character that a path, a URL or a
//! terminal would take for its own (test `names_that_lead_elsewhere_are_refused`).

use std::fmt;

use hyper::Uri;

use crate::error::Error;

/// Longest name that is read.
const NAME_MAX: usize = 1024;
/// Longest part of a name between two slashes.
const PART_MAX: usize = 200;
/// Hosts that stand for the hub.
const HUB_HOSTS: [&str; 3] = ["hf.co", "huggingface.co", "www.huggingface.co"];
/// Hosts that stand for Ollama's registry.
const REGISTRY_HOSTS: [&str; 4] = [
    "registry.ollama.ai",
    "ollama.com",
    "www.ollama.com",
    "ollama:",
];
/// Namespace of the models of Ollama's library.
const LIBRARY: &str = "library";
/// The tag that stands for none.
pub(crate) const LATEST: &str = "latest";

/// Where a model comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A repository of the hub.
    Repo {
        /// `OWNER/REPO`.
        repo: String,
        /// A branch, tag or commit; the main branch where it is `None`.
        revision: Option<String>,
        /// A quantization such as `Q4_K_M`, or a file's name.
        tag: Option<String>,
    },
    /// One file at a URL.
    Url {
        /// The file's address.
        url: Uri,
        /// The last part of the path, which ends in `.gguf`.
        name: String,
    },
    /// A model of a registry that speaks Ollama's protocol.
    Registry {
        /// `library`, or a user.
        namespace: String,
        /// The model.
        model: String,
        /// The tag, `latest` if none was given.
        tag: String,
    },
}

impl Source {
    /// Reads `OWNER/REPO[@REVISION][:TAG]`, the same behind `hf.co/`, `MODEL[:TAG]` of Ollama's
    /// library, `ollama.com/USER/MODEL[:TAG]`, or the URL of a `.gguf` file.
    ///
    /// # Errors
    /// [`Error::BadName`].
    pub fn parse(text: &str) -> Result<Source, Error> {
        let bad = |why: &str| Error::BadName {
            name: text.chars().take(120).collect(),
            why: why.to_owned(),
        };
        let given = text.trim();
        if given.is_empty() || given.len() > NAME_MAX {
            return Err(bad("1 to 1024 bytes are allowed"));
        }
        if given.chars().any(|c| c.is_control() || c.is_whitespace()) {
            return Err(bad("spaces and control characters are not allowed"));
        }
        if given.starts_with("https://") || given.starts_with("http://") {
            return of_url(given).map_err(|why| bad(&why));
        }
        let after = |hosts: &[&str]| {
            let mut rests = hosts.iter().filter_map(|host| given.strip_prefix(host));
            rests.find_map(|rest| rest.strip_prefix('/').or(Some(rest)))
        };
        if let Some(rest) = after(&REGISTRY_HOSTS) {
            return of_registry(rest).map_err(|why| bad(&why));
        }
        if let Some(rest) = after(&HUB_HOSTS) {
            return of_repo(rest).map_err(|why| bad(&why));
        }
        let name = given.split(':').next().unwrap_or_default();
        let read = match name.contains('/') {
            true => of_repo(given),
            false => of_registry(given),
        };
        read.map_err(|why| bad(&why))
    }

    /// The directory or file that a model is kept at, below a model directory: the path of `file`
    /// of a repository, whose own path is given.
    pub(crate) fn place(&self, file: &str) -> Result<String, Error> {
        checked_path(file).map_err(|why| Error::BadName {
            name: file.chars().take(120).collect(),
            why,
        })?;
        Ok(match self {
            Source::Repo { repo, .. } => format!("{repo}/{file}"),
            Source::Url { .. } => file.to_owned(),
            Source::Registry { namespace, .. } if namespace == LIBRARY => format!("ollama/{file}"),
            Source::Registry { namespace, .. } => format!("ollama/{namespace}/{file}"),
        })
    }

    /// The name of a registry's model for a file, without its end.
    pub(crate) fn registry_stem(model: &str, tag: &str) -> String {
        match tag {
            LATEST => model.to_owned(),
            tag => format!("{model}:{tag}"),
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Repo {
                repo,
                revision,
                tag,
            } => {
                f.write_str(repo)?;
                if let Some(revision) = revision {
                    write!(f, "@{revision}")?;
                }
                tag.as_ref().map_or(Ok(()), |tag| write!(f, ":{tag}"))
            }
            Source::Url { url, .. } => write!(f, "{}", without_query(url)),
            Source::Registry {
                namespace,
                model,
                tag,
            } if namespace == LIBRARY => {
                write!(f, "{model}:{tag}")
            }
            Source::Registry {
                namespace,
                model,
                tag,
            } => {
                write!(f, "ollama.com/{namespace}/{model}:{tag}")
            }
        }
    }
}

/// An address without what may be a secret in it.
pub(crate) fn without_query(url: &Uri) -> String {
    let scheme = url.scheme_str().unwrap_or_default();
    let host = url.authority().map_or("", |authority| authority.as_str());
    format!("{scheme}://{host}{}", url.path())
}

/// Whether each part is one that a repository, a model or a tag may have.
fn checked_part(part: &str) -> Result<(), String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "._-+".contains(c);
    let is_one = !part.is_empty() && part.len() <= PART_MAX && part.chars().all(fits);
    match is_one && !part.starts_with(['.', '-']) && !part.contains("..") {
        true => Ok(()),
        false => Err(format!(
            "{part:?} in it is not a name of ASCII letters, digits, '.', '_' and '-' that begins with a letter or digit"
        )),
    }
}

/// Whether a path of a repository may be one below a model directory.
pub(crate) fn checked_path(path: &str) -> Result<(), String> {
    const DEPTH_MAX: usize = 4;
    let parts: Vec<&str> = path.split('/').collect();
    if parts.len() > DEPTH_MAX {
        return Err(format!("more than {DEPTH_MAX} directories are not kept"));
    }
    for part in parts {
        let bad = |c: char| c.is_control() || "\\\"<>|*?".contains(c) || is_mark(c);
        if part.is_empty() || part.len() > PART_MAX || part.starts_with('.') || part.contains(bad) {
            return Err(format!("{part:?} in it can be no name of a file here"));
        }
    }
    Ok(())
}

/// Marks of direction, and line ends that a terminal obeys.
fn is_mark(c: char) -> bool {
    matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

fn is_gguf(name: &str) -> bool {
    name.len() > 5 && name.to_ascii_lowercase().ends_with(".gguf")
}

fn of_repo(text: &str) -> Result<Source, String> {
    let (name, tag) = match text.split_once(':') {
        Some((name, tag)) => (name, Some(tag)),
        None => (text, None),
    };
    let (repo, revision) = match name.split_once('@') {
        Some((repo, revision)) => (repo, Some(revision)),
        None => (name, None),
    };
    let parts: Vec<&str> = repo.split('/').collect();
    let [owner, model] = parts[..] else {
        return Err(
            "a repository is OWNER/REPO, with :QUANT behind it if one is wanted".to_owned(),
        );
    };
    checked_part(owner)?;
    checked_part(model)?;
    if let Some(revision) = revision {
        checked_part(revision)?;
    }
    let tag = tag.filter(|tag| *tag != LATEST);
    if let Some(tag) = tag {
        checked_path(tag)?;
    }
    Ok(Source::Repo {
        repo: format!("{owner}/{model}"),
        revision: revision.map(str::to_owned),
        tag: tag.map(str::to_owned),
    })
}

fn of_registry(text: &str) -> Result<Source, String> {
    let (name, tag) = text.split_once(':').unwrap_or((text, LATEST));
    let (namespace, model) = name.split_once('/').unwrap_or((LIBRARY, name));
    for part in [namespace, model, tag] {
        checked_part(part)?;
    }
    Ok(Source::Registry {
        namespace: namespace.to_owned(),
        model: model.to_owned(),
        tag: tag.to_owned(),
    })
}

fn of_url(text: &str) -> Result<Source, String> {
    let url: Uri = text.parse().map_err(|_| "it is no address".to_owned())?;
    let host = url.authority().map(|authority| authority.as_str());
    let host = host.unwrap_or_default();
    if host.is_empty() || host.contains('@') {
        return Err(
            "the address has no host, or has a user or a password; give https://HOST/PATH.gguf"
                .to_owned(),
        );
    }
    let path = url.path().trim_matches('/');
    if HUB_HOSTS.contains(&host) {
        let parts: Vec<&str> = path.split('/').collect();
        match parts[..] {
            [owner, repo] | [owner, repo, "tree", "main"] => {
                return of_repo(&format!("{owner}/{repo}"));
            }
            [owner, repo, "resolve" | "blob", revision, ref file @ ..] if !file.is_empty() => {
                return of_repo(&format!("{owner}/{repo}@{revision}:{}", file.join("/")));
            }
            _ => {}
        }
    }
    let name = path.rsplit('/').next().unwrap_or_default();
    if !is_gguf(name) {
        return Err(
            "the address does not end in .gguf; give the address of a GGUF file".to_owned(),
        );
    }
    let name = name.replace("%20", " ");
    checked_path(&name)?;
    Ok(Source::Url { url, name })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn repo(repo: &str, revision: Option<&str>, tag: Option<&str>) -> Source {
        Source::Repo {
            repo: repo.to_owned(),
            revision: revision.map(str::to_owned),
            tag: tag.map(str::to_owned),
        }
    }

    fn registry(namespace: &str, model: &str, tag: &str) -> Source {
        let [namespace, model, tag] = [namespace, model, tag].map(str::to_owned);
        Source::Registry {
            namespace,
            model,
            tag,
        }
    }

    #[test]
    fn a_name_says_where_a_model_comes_from() {
        let cases = [
            ("o/r", repo("o/r", None, None)),
            ("o/r:Q4_K_M", repo("o/r", None, Some("Q4_K_M"))),
            ("o/r:latest", repo("o/r", None, None)),
            (
                "o/r@v1:sub/m.gguf",
                repo("o/r", Some("v1"), Some("sub/m.gguf")),
            ),
            ("hf.co/o/r:Q8_0", repo("o/r", None, Some("Q8_0"))),
            ("https://huggingface.co/o/r", repo("o/r", None, None)),
            (
                "https://huggingface.co/o/r/resolve/main/m.gguf",
                repo("o/r", Some("main"), Some("m.gguf")),
            ),
            ("llama3.2:3b", registry("library", "llama3.2", "3b")),
            ("llama3.2", registry("library", "llama3.2", "latest")),
            ("ollama.com/u/m:t", registry("u", "m", "t")),
            (
                "registry.ollama.ai/library/m",
                registry("library", "m", "latest"),
            ),
        ];
        for (text, source) in cases {
            assert_eq!(Source::parse(text).unwrap(), source, "{text}");
        }
        let url = Source::parse("http://h:8080/a/My%20Model.gguf?token=x").unwrap();
        assert_eq!(
            url.to_string(),
            "http://h:8080/a/My%20Model.gguf",
            "no secret is shown"
        );
        assert!(matches!(url, Source::Url { name, .. } if name == "My Model.gguf"));
    }

    #[test]
    fn names_that_lead_elsewhere_are_refused() {
        for text in [
            "",
            "../x",
            "o/..",
            "o/r:../../etc/passwd",
            "o/r:/etc/passwd",
            "o/r:.hidden.gguf",
            "o/r:a//b",
            "o/r@../x",
            "o/r@a/b",
            "a/b/c",
            "o/r:a/b/c/d/e.gguf",
            "-o/r",
            "o r/x",
            "o/r\u{202e}",
            "o/r:\u{1b}[2J",
            "m:..",
            ".hidden",
            "https://h/a.bin",
            "https://h/",
            "https://user:secret@h/a.gguf",
            "https:///a.gguf",
            "https://h/..%2f.gguf\u{7}",
            "ftp://h/a.gguf",
            &"a".repeat(2000),
        ] {
            let refused = Source::parse(text);
            assert!(
                matches!(refused, Err(Error::BadName { .. })),
                "{text:?}: {refused:?}"
            );
        }
    }

    #[test]
    fn files_of_a_source_lie_in_a_directory_of_its_own() {
        let place = |name: &str, file: &str| Source::parse(name).unwrap().place(file);
        assert_eq!(place("o/r", "q/m.gguf").unwrap(), "o/r/q/m.gguf");
        assert_eq!(place("m:3b", "m:3b.gguf").unwrap(), "ollama/m:3b.gguf");
        assert_eq!(
            place("ollama.com/u/m", "m.gguf").unwrap(),
            "ollama/u/m.gguf"
        );
        for file in ["../m.gguf", "/m.gguf", "a/../m.gguf", "", "a\n.gguf"] {
            assert!(place("o/r", file).is_err(), "{file:?}");
        }
    }
}
