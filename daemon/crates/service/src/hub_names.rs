//! Hub names of downloaded files: `OWNER/REPO:TAG`, also with the prefix `hf.co/`, and Ollama's
//! names with a slash.
//!
//! A file is recognized by its location: below `OWNER/REPO` in a model directory, or in a Hugging
//! Face cache. Names of files and of declared models come first.

use std::path::Path;

use rocmforge_failure::Failure;

use crate::Service;
use crate::files::NamedFile;
use crate::model_files::ModelFile;
use crate::naming::default_name;
use crate::refusals;

/// Prefixes of names that stand for a hub, as downloads accept them (`hub/src/source.rs`).
const HOSTS: [&str; 6] = [
    "hf.co/",
    "huggingface.co/",
    "www.huggingface.co/",
    "ollama.com/",
    "www.ollama.com/",
    "registry.ollama.ai/",
];
/// The quantization that is meant if a repository's name has no tag.
const USUAL: &str = "Q4_K_M";

/// The file that a hub name refers to.
pub(crate) fn meant<'a>(name: &str, files: &'a [NamedFile]) -> Option<&'a NamedFile> {
    let bare = HOSTS.iter().find_map(|host| name.strip_prefix(host));
    let bare = bare.unwrap_or(name);
    let bare = bare.strip_suffix(":latest").unwrap_or(bare);
    if !bare.contains('/') {
        return None;
    }
    let served = || files.iter().filter(|named| named.file.unserved.is_none());
    // As Ollama's models lie, and copies.
    let by_path = |named: &&NamedFile| {
        let path = named.file.path.with_extension("");
        path.ends_with(bare)
    };
    if let Some(found) = served().find(by_path) {
        return Some(found);
    }
    let (repo, tag) = match bare.split_once(':') {
        Some((repo, tag)) => (repo, Some(tag)),
        None => (bare, None),
    };
    let of_repo: Vec<&NamedFile> = served().filter(|named| is_of(named, repo)).collect();
    let with = |tag: &str| {
        of_repo
            .iter()
            .copied()
            .find(|named| has_tag(&named.file.path, tag))
    };
    match (tag, &of_repo[..]) {
        (Some(tag), _) => with(tag),
        (None, [only]) => Some(only),
        (None, _) => with(USUAL),
    }
}

fn is_of(named: &NamedFile, repo: &str) -> bool {
    if let Some(hub) = &named.file.hub {
        return hub.repo == repo && !hub.is_other;
    }
    named
        .file
        .path
        .ancestors()
        .skip(1)
        .any(|dir| dir.ends_with(repo))
}

fn has_tag(path: &Path, tag: &str) -> bool {
    let name = default_name(path);
    if name == tag || path.file_name().is_some_and(|file| file == tag) {
        return true;
    }
    let (name, tag) = (name.to_ascii_lowercase(), tag.to_ascii_lowercase());
    name.strip_suffix(&tag)
        .is_some_and(|rest| rest.ends_with(['-', '.', '_']))
}

impl Service {
    /// The file that a hub name refers to.
    ///
    /// # Errors
    /// NOT_FOUND with the available names, and those of [`Service::list_files`].
    pub async fn file_by_hub_name(&self, name: &str) -> Result<ModelFile, Failure> {
        let listed = self.list_files().await?;
        match meant(name, &listed.served) {
            Some(named) => Ok(named.file.clone()),
            None => {
                let names = listed.served.iter().map(|named| named.name.as_str());
                Err(refusals::no_such_model(name, std::iter::empty(), names))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::declared::Book;
    use crate::files::named;
    use crate::looks::Looks;
    use crate::model_files::ModelDirs;

    #[test]
    fn a_hubs_name_means_the_file_that_was_downloaded_by_it() {
        let root = tempfile::tempdir().unwrap();
        for file in [
            "o/r/m-Q4_K_M.gguf",
            "o/r/m-Q8_0.gguf",
            "o/one/n-IQ2_XS.gguf",
            "ollama/u/x:3b.gguf",
            "copies/me/mine.gguf",
        ] {
            let path = root.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "x").unwrap();
        }
        let dirs = ModelDirs::new(&[root.path().to_owned()]).unwrap();
        let (files, _) = dirs.list(&Looks::default());
        let files = named(&dirs, &Book::default(), files, &Default::default());
        let meant = |name: &str| meant(name, &files).map(|named| named.name.as_str());
        for host in ["hf.co", "www.huggingface.co", "huggingface.co"] {
            assert_eq!(meant(&format!("{host}/o/r:Q8_0")), Some("m-Q8_0"));
        }
        assert_eq!(meant("o/r:q8_0"), Some("m-Q8_0"));
        assert_eq!(meant("hf.co/o/r:latest"), Some("m-Q4_K_M"));
        assert_eq!(meant("o/r:m-Q8_0.gguf"), Some("m-Q8_0"));
        assert_eq!(meant("o/one"), Some("n-IQ2_XS"));
        assert_eq!(meant("u/x:3b"), Some("x:3b"));
        assert_eq!(meant("me/mine:latest"), Some("mine"));
        for none in ["o/r:Q2_K", "o/other", "m", "r:Q8_0", "p/o/r:Q8_0", ""] {
            assert_eq!(meant(none), None, "{none}");
        }
    }
}
