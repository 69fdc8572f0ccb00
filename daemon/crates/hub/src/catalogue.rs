//! What hubs have: the files of a repository, the layers of a registry's model, a file behind a
//! URL.

use hyper::header;
use hyper::{StatusCode, Uri};
use serde::Deserialize;

use rocmforge_gguf::PartName;
use std::path::Path;

use crate::checksum::is_sha256;
use crate::choose::{self, Group, RemoteFile, Use};
use crate::error::Error;
use crate::source::{Source, checked_path};
use crate::spans::content_range;
use crate::web::{Ask, Tries, Web, escaped, host_of, text_of};
use crate::{Config, Scope};

const JSON: &str = "application/json";
const MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
/// Layers of a registry's model that are files of ours.
const MODEL_LAYER: &str = "application/vnd.ollama.image.model";
const PROJECTOR_LAYER: &str = "application/vnd.ollama.image.projector";
/// Pages of a repository's list, and files of it.
const PAGES_MAX: usize = 64;
const FILES_MAX: usize = 20_000;
/// Files of one download.
const WANTED_MAX: usize = 1024;
/// Longest file, so that sums do not overflow.
const FILE_BYTES_MAX: u64 = 1 << 46;

/// A file that a download consists of.
#[derive(Debug, Clone)]
pub(crate) struct Wanted {
    pub(crate) url: Uri,
    /// The file's path in the repository, or what takes its place.
    pub(crate) file: String,
    pub(crate) r#use: Use,
    pub(crate) bytes: u64,
    pub(crate) sha256: Option<String>,
    /// What the server says of it, where the hub has no checksum.
    pub(crate) etag: Option<String>,
}

/// What a repository has; see [`crate::Hub::list`].
pub(crate) async fn list(web: &Web, config: &Config, source: &Source) -> Result<Vec<Group>, Error> {
    if let Source::Repo { repo, revision, .. } = source {
        let (files, _) = files_of(web, config, repo, revision.as_deref()).await?;
        return Ok(choose::groups(&files));
    }
    let wanted = wanted(web, config, source, Scope::default()).await?;
    let files: Vec<RemoteFile> = wanted
        .into_iter()
        .map(|wanted| RemoteFile {
            path: wanted.file,
            bytes: wanted.bytes,
            sha256: wanted.sha256,
        })
        .collect();
    Ok(choose::groups(&files))
}

/// The files that a source stands for.
pub(crate) async fn wanted(
    web: &Web,
    config: &Config,
    source: &Source,
    scope: Scope,
) -> Result<Vec<Wanted>, Error> {
    let mut wanted = match source {
        Source::Repo {
            repo,
            revision,
            tag,
        } => {
            let (files, commit) = files_of(web, config, repo, revision.as_deref()).await?;
            let groups = choose::choose(repo, &files, tag.as_deref())?;
            let each = groups.into_iter().flat_map(|group| {
                let r#use = group.r#use;
                group.files.into_iter().map(move |file| (r#use, file))
            });
            let each = each.map(|(r#use, file)| {
                let path = escaped(&file.path);
                Ok(Wanted {
                    url: below(&config.hub, &format!("/{repo}/resolve/{commit}/{path}"))?,
                    file: file.path,
                    r#use,
                    bytes: file.bytes,
                    sha256: file.sha256,
                    etag: None,
                })
            });
            each.collect::<Result<Vec<_>, Error>>()?
        }
        Source::Registry {
            namespace,
            model,
            tag,
        } => layers(web, config, namespace, model, tag).await?,
        Source::Url { url, name } => behind(web, url, name).await?,
    };
    if scope.model_only && wanted.iter().any(|file| file.r#use == Use::Model) {
        wanted.retain(|file| file.r#use == Use::Model);
    }
    for file in &wanted {
        if file.bytes == 0 || file.bytes > FILE_BYTES_MAX {
            return Err(Error::Length {
                name: file.file.clone(),
                listed: file.bytes,
                given: file.bytes,
            });
        }
    }
    match wanted.len() > WANTED_MAX {
        true => Err(odd(&config.hub, "with more than 1024 files of one model")),
        false => Ok(wanted),
    }
}

fn odd(url: &Uri, what: &str) -> Error {
    Error::BadAnswer {
        host: host_of(url),
        what: what.to_owned(),
    }
}

/// An address below a hub's.
fn below(base: &Uri, path: &str) -> Result<Uri, Error> {
    let whole = format!("{}{path}", base.to_string().trim_end_matches('/'));
    whole.parse().map_err(|_| Error::BadName {
        name: path.chars().take(120).collect(),
        why: "no address can be made of it".to_owned(),
    })
}

#[derive(Debug, Deserialize)]
struct Revision {
    sha: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Entry {
    r#type: String,
    path: String,
    #[serde(default)]
    size: u64,
    lfs: Option<Lfs>,
}

#[derive(Debug, Deserialize)]
struct Lfs {
    oid: String,
    size: u64,
}

/// The files of a repository, and the commit that they are of: all of a download is of one.
async fn files_of(
    web: &Web,
    config: &Config,
    repo: &str,
    revision: Option<&str>,
) -> Result<(Vec<RemoteFile>, String), Error> {
    let revision = revision.unwrap_or("main");
    let url = below(
        &config.hub,
        &format!("/api/models/{repo}/revision/{}", escaped(revision)),
    )?;
    let (found, _): (Revision, _) = web.json(&url, JSON, repo).await?;
    let is_commit = |sha: &String| {
        sha.len() >= 7 && sha.len() <= 64 && sha.bytes().all(|b| b.is_ascii_hexdigit())
    };
    let commit = found
        .sha
        .filter(is_commit)
        .unwrap_or_else(|| revision.to_owned());
    let mut next = Some(below(
        &config.hub,
        &format!("/api/models/{repo}/tree/{commit}?recursive=true"),
    )?);
    let (mut files, mut pages) = (Vec::new(), 0);
    while let Some(url) = next.take() {
        pages += 1;
        if pages > PAGES_MAX || files.len() > FILES_MAX {
            return Err(odd(&config.hub, "with an endless list of files"));
        }
        let (entries, more): (Vec<Entry>, _) = web.json(&url, JSON, repo).await?;
        next = more;
        // What can be no file here is left out of what may be chosen.
        let usable = entries
            .into_iter()
            .filter(|entry| entry.r#type == "file" && checked_path(&entry.path).is_ok());
        files.extend(usable.map(|entry| {
            let sha256 = entry
                .lfs
                .as_ref()
                .map(|lfs| lfs.oid.trim_start_matches("sha256:").to_owned());
            RemoteFile {
                path: entry.path,
                bytes: entry.lfs.map_or(entry.size, |lfs| lfs.size),
                sha256: sha256.filter(|sha256| is_sha256(sha256)),
            }
        }));
    }
    Ok((files, commit))
}

#[derive(Debug, Deserialize)]
struct Manifest {
    #[serde(default)]
    layers: Vec<Layer>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Layer {
    media_type: String,
    digest: String,
    size: u64,
}

/// The layers of a registry's model that are GGUF files.
async fn layers(
    web: &Web,
    config: &Config,
    namespace: &str,
    model: &str,
    tag: &str,
) -> Result<Vec<Wanted>, Error> {
    let base = format!("/v2/{namespace}/{model}");
    let url = below(&config.registry, &format!("{base}/manifests/{tag}"))?;
    let what = format!("{model}:{tag}");
    let (manifest, _): (Manifest, _) = web.json(&url, MANIFEST, &what).await?;
    let stem = Source::registry_stem(model, tag);
    let mut wanted: Vec<Wanted> = Vec::new();
    for layer in manifest.layers {
        let r#use = match layer.media_type.as_str() {
            MODEL_LAYER => Use::Model,
            PROJECTOR_LAYER => Use::Projector,
            _ => continue,
        };
        let sha256 = layer
            .digest
            .strip_prefix("sha256:")
            .filter(|sha256| is_sha256(sha256));
        let sha256 =
            sha256.ok_or_else(|| odd(&config.registry, "with a layer without a SHA-256"))?;
        if wanted.iter().any(|one| one.r#use == r#use) {
            return Err(odd(&config.registry, "with a model of several files"));
        }
        wanted.push(Wanted {
            url: below(&config.registry, &format!("{base}/blobs/sha256:{sha256}"))?,
            file: match r#use {
                Use::Projector => format!("mmproj-{stem}.gguf"),
                _ => format!("{stem}.gguf"),
            },
            r#use,
            bytes: layer.size,
            sha256: Some(sha256.to_owned()),
            etag: None,
        });
    }
    match wanted.iter().any(|one| one.r#use == Use::Model) {
        true => Ok(wanted),
        false => Err(Error::NoModel { what }),
    }
}

/// The file behind a URL, with the other parts where it is one of several.
async fn behind(web: &Web, url: &Uri, name: &str) -> Result<Vec<Wanted>, Error> {
    let mut names = vec![name.to_owned()];
    if let Some(part) = PartName::of(Path::new(name)) {
        let too_many = |_| odd(url, "with a name of too many parts");
        names = part
            .paths()
            .map_err(too_many)?
            .map(|path| path.display().to_string())
            .collect();
    }
    let mut wanted = Vec::new();
    for one in names {
        let sibling = match one == name {
            true => url.clone(),
            false => {
                let text = url.to_string().replacen(&escaped(name), &escaped(&one), 1);
                text.parse()
                    .map_err(|_| odd(url, "with a name that is no part of its address"))?
            }
        };
        wanted.push(one_behind(web, sibling, one).await?);
    }
    Ok(wanted)
}

async fn one_behind(web: &Web, url: Uri, file: String) -> Result<Wanted, Error> {
    let mut tries = Tries::new(web.patience);
    let answer = loop {
        let ask = Ask {
            url: &url,
            accept: "*/*",
            range: Some((0, 1)),
            if_range: None,
            what: &file,
        };
        match web.ask(&ask).await {
            Ok(answer) => break answer,
            Err(fault) => tries.again(fault, |_, _| {}).await?,
        }
    };
    let headers = answer.response.headers();
    let total = match answer.response.status() {
        StatusCode::PARTIAL_CONTENT => {
            let said = text_of(headers, &header::CONTENT_RANGE);
            said.as_deref()
                .and_then(content_range)
                .and_then(|(_, total)| total)
        }
        _ => text_of(headers, &header::CONTENT_LENGTH).and_then(|n| n.parse().ok()),
    };
    let total = total.ok_or_else(|| odd(&url, "without the length of the file"))?;
    let sha256 = answer.linked_etag.filter(|etag| is_sha256(etag));
    Ok(Wanted {
        etag: text_of(headers, &header::ETAG),
        url,
        file,
        r#use: Use::Model,
        bytes: total,
        sha256,
    })
}
