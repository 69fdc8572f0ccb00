//! Which files of a repository are a model: all parts of a quantization, and the projector and the
//! draft model that lie beside it.

use std::collections::BTreeMap;
use std::path::Path;

use rocmforge_gguf::PartName;

use crate::error::Error;

/// Quantizations that are taken where none is asked for, the best first.
const USUAL: [&str; 12] = [
    "Q4_K_M",
    "Q4_K_S",
    "UD-Q4_K_XL",
    "MXFP4",
    "Q4_0",
    "IQ4_XS",
    "Q5_K_M",
    "Q6_K",
    "Q8_0",
    "Q3_K_M",
    "BF16",
    "F16",
];
/// Types of a projector, the best first.
const PROJECTORS: [&str; 4] = ["F16", "BF16", "Q8_0", "F32"];

/// A file of a repository.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct RemoteFile {
    /// The path in the repository.
    pub path: String,
    /// The file's size.
    pub bytes: u64,
    /// The hub's SHA-256 in hexadecimal, where it has one.
    pub sha256: Option<String>,
}

/// What a file is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Use {
    /// The model, or a part of it.
    Model,
    /// A projector, which reads images or sound for a model.
    Projector,
    /// A draft model for speculative decoding.
    Draft,
}

/// Files that belong together: a model, or all parts of one.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Group {
    /// Tag by which a client selects the group: the quantization in its name, or the name.
    pub tag: String,
    /// Purpose of the files, such as model, projector or draft model.
    pub r#use: Use,
    /// The files, in the order of the parts.
    pub files: Vec<RemoteFile>,
    /// Number of parts of a split model, from their names.
    #[serde(skip)]
    count: u32,
    /// The name without part number and end.
    #[serde(skip)]
    stem: String,
}

impl Group {
    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files
            .iter()
            .map(|file| file.bytes)
            .fold(0, u64::saturating_add)
    }

    /// The path of the first file.
    pub fn path(&self) -> &str {
        self.files.first().map_or("", |file| &file.path)
    }

    fn dir(&self) -> &str {
        self.path().rsplit_once('/').map_or("", |(dir, _)| dir)
    }

    fn whole(&self) -> Result<(), Error> {
        let there = u32::try_from(self.files.len()).unwrap_or(u32::MAX);
        match self.count.saturating_sub(there) {
            0 => Ok(()),
            missing => Err(Error::MissingParts {
                name: self.path().to_owned(),
                count: self.count,
                missing,
            }),
        }
    }

    /// Whether this is what `tag` asks for: its path or name, or a quantization at its end.
    fn is(&self, tag: &str) -> bool {
        let name = self.path().rsplit('/').next().unwrap_or_default();
        self.path() == tag || name == tag || self.stem == tag
    }

    fn base(&self, tag: &str) -> Option<String> {
        let (stem, tag) = (self.stem.to_ascii_lowercase(), tag.to_ascii_lowercase());
        let dir = self
            .dir()
            .rsplit('/')
            .next()
            .unwrap_or_default()
            .to_ascii_lowercase();
        let base = match stem.strip_suffix(&tag) {
            Some("") => Some(String::new()),
            Some(base) => base.strip_suffix(['-', '.', '_']).map(str::to_owned),
            None => None,
        };
        base.or_else(|| (dir == tag).then_some(stem))
    }
}

/// The groups of a repository's files, by path.
pub(crate) fn groups(files: &[RemoteFile]) -> Vec<Group> {
    let mut found: BTreeMap<String, Group> = BTreeMap::new();
    for file in files {
        let lower = file.path.to_ascii_lowercase();
        if !lower.ends_with(".gguf") || lower.contains("imatrix") {
            continue;
        }
        let part = PartName::of(Path::new(&file.path));
        let name = file.path.rsplit('/').next().unwrap_or_default();
        let stem = match &part {
            Some(part) => part.stem().to_owned(),
            None => name[..name.len() - ".gguf".len()].to_owned(),
        };
        let first = part.as_ref().map(|part| part.path(1).display().to_string());
        let group = found.entry(first.unwrap_or_else(|| file.path.clone()));
        let group = group.or_insert_with(|| Group {
            tag: quantization(&stem).unwrap_or(&stem).to_owned(),
            r#use: use_of(&stem),
            files: Vec::new(),
            count: part.as_ref().map_or(1, PartName::count),
            stem,
        });
        group.files.push(file.clone());
    }
    let mut groups: Vec<Group> = found.into_values().collect();
    for group in &mut groups {
        group.files.sort_by(|a, b| a.path.cmp(&b.path));
        group.files.dedup_by(|a, b| a.path == b.path);
    }
    groups
}

fn use_of(stem: &str) -> Use {
    let stem = stem.to_ascii_lowercase();
    let marks = ["-draft", "drafter", "eagle3", "dflash", "-assistant"];
    if stem.contains("mmproj") {
        Use::Projector
    } else if stem.starts_with("mtp-")
        || stem.starts_with("draft")
        || marks.iter().any(|mark| stem.contains(mark))
    {
        Use::Draft
    } else {
        Use::Model
    }
}

/// The quantization at the end of a name: `UD-Q4_K_XL` of `Model-7B-UD-Q4_K_XL`.
fn quantization(stem: &str) -> Option<&str> {
    let at = stem.rfind(['-', '.']).map_or(0, |at| at + 1);
    let last = &stem[at..];
    let upper = last.to_ascii_uppercase();
    let head = upper.split('_').next().unwrap_or_default();
    let digits = |rest: &str| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit());
    let is_type = ["IQ", "TQ", "Q", "BF", "F", "FP", "MXFP", "NVFP"]
        .iter()
        .any(|kind| head.strip_prefix(kind).is_some_and(digits));
    let dynamic = stem[..at].to_ascii_uppercase().ends_with("UD-");
    let from = if dynamic { at - "UD-".len() } else { at };
    is_type.then(|| &stem[from..])
}

/// What a tag of a repository stands for: the model, and what is beside it.
pub(crate) fn choose(
    repo: &str,
    files: &[RemoteFile],
    tag: Option<&str>,
) -> Result<Vec<Group>, Error> {
    let all = groups(files);
    let models: Vec<&Group> = all
        .iter()
        .filter(|group| group.r#use == Use::Model)
        .collect();
    if all.is_empty() {
        return Err(Error::NoModel {
            what: repo.to_owned(),
        });
    }
    // A projector or a draft model may be asked for by its name.
    let named = tag.and_then(|tag| all.iter().find(|group| group.is(tag)));
    let chosen = match (named, tag) {
        (Some(named), _) => named,
        (None, None) => by_habit(repo, &models)?,
        (None, Some(tag)) => by_tag(repo, &models, tag)?.ok_or_else(|| Error::NoSuchTag {
            repo: repo.to_owned(),
            tag: tag.to_owned(),
            tags: models.iter().map(|group| group.tag.clone()).collect(),
        })?,
    };
    chosen.whole()?;
    let mut wanted = vec![chosen.clone()];
    if chosen.r#use == Use::Model {
        wanted.extend(beside(&all, chosen, Use::Projector).cloned());
        wanted.extend(beside(&all, chosen, Use::Draft).cloned());
    }
    Ok(wanted)
}

fn by_tag<'a>(repo: &str, models: &[&'a Group], tag: &str) -> Result<Option<&'a Group>, Error> {
    let fitting: Vec<(&Group, String)> = models
        .iter()
        .filter_map(|group| Some((*group, group.base(tag)?)))
        .collect();
    // Of two quantizations of one model the plain one is meant, not the dynamic.
    let bare = |base: &str| base.strip_suffix("-ud").unwrap_or(base).to_owned();
    let mut bases: Vec<String> = fitting.iter().map(|(_, base)| bare(base)).collect();
    bases.sort();
    bases.dedup();
    if bases.len() > 1 {
        let tags = fitting
            .iter()
            .map(|(group, _)| group.path().to_owned())
            .collect();
        return Err(Error::Ambiguous {
            repo: repo.to_owned(),
            tags,
        });
    }
    let shortest = fitting
        .into_iter()
        .min_by_key(|(group, base)| (base.len(), group.path()));
    Ok(shortest.map(|(group, _)| group))
}

fn by_habit<'a>(repo: &str, models: &[&'a Group]) -> Result<&'a Group, Error> {
    match models {
        [] => {
            return Err(Error::NoModel {
                what: repo.to_owned(),
            });
        }
        [only] => return Ok(only),
        _ => {}
    }
    for tag in USUAL {
        if let Some(group) = by_tag(repo, models, tag)? {
            return Ok(group);
        }
    }
    let tags = models.iter().map(|group| group.tag.clone()).collect();
    Err(Error::Ambiguous {
        repo: repo.to_owned(),
        tags,
    })
}

/// The projector or the draft model of a model: of its directory, else of the repository's root.
fn beside<'a>(all: &'a [Group], model: &Group, r#use: Use) -> impl Iterator<Item = &'a Group> {
    let fits = |dir: &str| {
        let mut fitting: Vec<&Group> = all
            .iter()
            .filter(|group| group.r#use == r#use && group.dir() == dir && group.whole().is_ok())
            .collect();
        let rank = |group: &&Group| match r#use {
            Use::Projector => {
                let tag = group.tag.to_ascii_uppercase();
                let place = PROJECTORS.iter().position(|kind| tag.ends_with(kind));
                (place.unwrap_or(PROJECTORS.len()) as u64, group.bytes())
            }
            _ => (u64::from(group.tag != model.tag), group.bytes()),
        };
        fitting.sort_by_key(rank);
        fitting.into_iter().next()
    };
    fits(model.dir()).or_else(|| fits("")).into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(paths: &[&str]) -> Vec<RemoteFile> {
        let file = |(n, path): (usize, &&str)| RemoteFile {
            path: (*path).to_owned(),
            bytes: 10 + n as u64,
            sha256: None,
        };
        paths.iter().enumerate().map(file).collect()
    }

    fn chosen(paths: &[&str], tag: Option<&str>) -> Vec<String> {
        let groups = choose("o/r", &files(paths), tag).unwrap();
        let files = groups.into_iter().flat_map(|group| group.files);
        files.map(|file| file.path).collect()
    }

    const USUAL_REPO: [&str; 9] = [
        "README.md",
        "M-7B-BF16.gguf",
        "M-7B-Q4_K_M.gguf",
        "M-7B-Q4_K_S.gguf",
        "M-7B-UD-Q4_K_M.gguf",
        "M-7B.imatrix.gguf",
        "mmproj-F32.gguf",
        "mmproj-F16.gguf",
        "mtp-M-7B-Q8_0.gguf",
    ];

    #[test]
    fn a_quantization_is_taken_with_what_is_beside_it() {
        let beside = ["mmproj-F16.gguf", "mtp-M-7B-Q8_0.gguf"];
        let usual = |model: &'static str| [model, beside[0], beside[1]];
        assert_eq!(chosen(&USUAL_REPO, None), usual("M-7B-Q4_K_M.gguf"));
        assert_eq!(
            chosen(&USUAL_REPO, Some("q4_k_s")),
            usual("M-7B-Q4_K_S.gguf")
        );
        assert_eq!(
            chosen(&USUAL_REPO, Some("UD-Q4_K_M")),
            usual("M-7B-UD-Q4_K_M.gguf")
        );
        assert_eq!(
            chosen(&USUAL_REPO, Some("M-7B-BF16.gguf")),
            usual("M-7B-BF16.gguf")
        );
        assert_eq!(
            chosen(&USUAL_REPO, Some("mmproj-F32.gguf")),
            ["mmproj-F32.gguf"]
        );
    }

    #[test]
    fn a_split_model_is_all_of_its_parts() {
        let parts = [
            "Q8_0/m-Q8_0-00002-of-00002.gguf",
            "Q8_0/m-Q8_0-00001-of-00002.gguf",
            "m-Q2_K.gguf",
        ];
        assert_eq!(
            chosen(&parts, Some("Q8_0")),
            [
                "Q8_0/m-Q8_0-00001-of-00002.gguf",
                "Q8_0/m-Q8_0-00002-of-00002.gguf"
            ]
        );
        let missing = choose("o/r", &files(&parts[..1]), Some("Q8_0"));
        assert!(
            matches!(
                missing,
                Err(Error::MissingParts {
                    count: 2,
                    missing: 1,
                    ..
                })
            ),
            "{missing:?}"
        );
    }

    #[test]
    fn what_could_be_several_models_is_not_guessed() {
        let two = ["a-7B-Q4_K_M.gguf", "a-14B-Q4_K_M.gguf"];
        let refused = choose("o/r", &files(&two), None).unwrap_err().to_string();
        assert!(
            refused.contains("a-7B-Q4_K_M.gguf, ") || refused.contains(", a-7B-Q4_K_M.gguf"),
            "{refused}"
        );
        let odd = choose("o/r", &files(&USUAL_REPO), Some("Q9_Z"))
            .unwrap_err()
            .to_string();
        assert!(odd.contains("BF16, Q4_K_M, Q4_K_S, UD-Q4_K_M"), "{odd}");
        assert!(matches!(
            choose("o/r", &files(&["README.md"]), None),
            Err(Error::NoModel { .. })
        ));
        let strange = ["odd-one.gguf"];
        assert_eq!(chosen(&strange, None), strange, "the only one there is");
    }
}
