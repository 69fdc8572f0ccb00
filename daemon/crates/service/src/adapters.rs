//! LoRA adapters: those that a load names, those that a request uses, and names such as
//! `base+adapter`.
//!
//! A request that lists adapters uses exactly these. Else a request for `base+adapter` (or
//! `base+one+other`) uses the named ones, at the scale that they were loaded with, or 1 if that is
//! 0. Any other request uses the model's default scales, which are those of the load until they are
//! changed.
//!
//! A model of its own name wins over an adapter: `a+b` is the model of that name if one is loaded
//! or declared.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rocmforge_engine::api::Snapshot;
use rocmforge_engine::{
    ADAPTERS_MAX, AdapterFile, AppliedAdapters, LoadedAdapter, LoadedModel, check_scale,
};
use rocmforge_failure::{self as failure, Failure};
use serde::{Deserialize, Serialize};

use crate::Service;
pub use crate::adapter_choice::{AdapterChoice, AdapterScale};
use crate::model_files::{ModelDirs, ModelFileError};
use crate::naming::{DEFAULT_TAG, default_name};
use crate::refusals;

/// Separator between a model's name and its adapters' names.
pub const JOIN: char = '+';

/// The field of adapters in error messages of requests and loads.
const FIELD: &str = "lora";

/// An adapter that a load names.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AdapterSpec {
    /// The adapter's file, absolute or below a model directory.
    pub path: PathBuf,
    /// Name of the adapter in requests; `None` takes the file's name without `.gguf`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Default scale of the adapter in requests.
    pub scale: f32,
}

impl AdapterSpec {
    /// Name of the adapter in requests.
    pub fn name(&self) -> String {
        let of_file = || default_name(&self.path).replace(JOIN, "-");
        self.name.clone().unwrap_or_else(of_file)
    }

    /// Opens the adapter's file. Blocks on the file system.
    pub(crate) fn open(&self, dirs: &ModelDirs) -> Result<AdapterFile, ModelFileError> {
        Ok(AdapterFile {
            name: self.name(),
            file: dirs.open(&self.path)?,
            scale: self.scale,
        })
    }
}

/// The scale of each of a model's adapters; 0 for those that are not listed.
///
/// # Errors
/// INVALID_ARGUMENT for an unknown or repeated adapter number, or an invalid scale.
pub fn scales_of(listed: &[AdapterScale], model: &LoadedModel) -> Result<Vec<f32>, Failure> {
    let adapters = model.adapters().list();
    let mut scales = vec![None; adapters.len()];
    if listed.len() > ADAPTERS_MAX {
        let why = format!(
            "{} adapters are listed; at most {ADAPTERS_MAX}",
            listed.len()
        );
        return Err(failure::invalid(FIELD, &why));
    }
    for AdapterScale { id, scale } in listed {
        let at = usize::try_from(*id).ok();
        let Some(place) = at.and_then(|at| scales.get_mut(at)) else {
            let there = match adapters.len() {
                0 => "has no adapters; load it with some".to_owned(),
                n => format!("has those of ids 0 to {}", n - 1),
            };
            let why = format!(
                "no adapter has the id {id}: the model '{}' {there}",
                model.name()
            );
            return Err(failure::invalid(FIELD, &why));
        };
        if place.replace(*scale).is_some() {
            let why = format!("the id {id} is listed twice; list each adapter once");
            return Err(failure::invalid(FIELD, &why));
        }
        check_scale(*scale).map_err(|error| refusals::from_engine(&error))?;
    }
    let scales = scales.into_iter().map(|scale| scale.unwrap_or_default());
    Ok(scales.collect())
}

/// Each way to split a name at `+` into a model's name and names of adapters.
fn parted(name: &str) -> impl Iterator<Item = (&str, std::str::Split<'_, char>)> {
    let name = name.strip_suffix(DEFAULT_TAG).unwrap_or(name);
    let places = name.match_indices(JOIN);
    places.map(|(at, _)| (&name[..at], name[at + 1..].split(JOIN)))
}

/// The adapters of `model` that are named after its name in `asked`, with their numbers; `None` if
/// it is not a name of this model with adapters.
fn named<'a>(asked: &str, model: &'a LoadedModel) -> Option<Vec<(usize, &'a LoadedAdapter)>> {
    let list = model.adapters().list();
    let find = |name: &str| {
        let mut adapters = list.iter().enumerate();
        adapters.find(|(_, adapter)| adapter.name == name)
    };
    parted(asked).find_map(|(_, names)| names.map(find).collect())
}

impl Service {
    /// The adapters of a request for a model, with their scales; `None` for none.
    ///
    /// # Errors
    ///
    /// As [`scales_of`].
    pub fn adapters_for(
        &self,
        choice: &AdapterChoice,
        model: &LoadedModel,
    ) -> Result<Option<Arc<AppliedAdapters>>, Failure> {
        let scales = match &choice.listed {
            Some(listed) => scales_of(listed, model)?,
            None => self.unlisted(&choice.asked, model),
        };
        let applied = model.adapters().at(&scales);
        applied.map_err(|error| refusals::from_engine(&error))
    }

    fn unlisted(&self, asked: &str, model: &LoadedModel) -> Vec<f32> {
        let is_own = asked == model.name() || self.real_name(asked) == model.name();
        let Some(named) = named(asked, model).filter(|_| !is_own) else {
            return model.adapters().defaults();
        };
        let mut scales = vec![0.0; model.adapters().list().len()];
        for (at, adapter) in named {
            scales[at] = match adapter.scale {
                0.0 => 1.0,
                scale => scale,
            };
        }
        scales
    }

    /// The model's name in a request's name, without names of adapters appended to it.
    pub fn without_adapters<'a>(&self, name: &'a str) -> &'a str {
        if !name.contains(JOIN) || self.is_known(name) {
            return name;
        }
        let has_all = |(base, names): &(&str, std::str::Split<'_, char>)| {
            let has = self.adapter_names(base);
            !has.is_empty() && names.clone().all(|name| has.iter().any(|has| has == name))
        };
        parted(name).find(has_all).map_or(name, |(base, _)| base)
    }

    fn is_known(&self, name: &str) -> bool {
        let book = self.declared();
        let is_known = |name: &str| {
            let real = book.real_name(name);
            book.model(&real).is_some() || self.engine.model(&real).is_ok()
        };
        is_known(name) || name.strip_suffix(DEFAULT_TAG).is_some_and(is_known)
    }

    /// The names of the adapters that a model has, or will have once it is loaded.
    fn adapter_names(&self, model: &str) -> Vec<String> {
        let book = self.declared();
        let real = book.real_name(model);
        if let Ok(loaded) = self.engine.model(&real) {
            return names_of(&loaded);
        }
        let specs = match book.model(&real) {
            Some(declared) => declared.lora.clone(),
            None => self.remembered_adapters(&real),
        };
        specs.iter().map(AdapterSpec::name).collect()
    }

    /// Names such as `base+adapter` for each adapter of each loaded model.
    pub(crate) fn names_with_adapters(snapshot: &Snapshot) -> Vec<String> {
        let models = snapshot.models.iter().map(|status| &status.model);
        let with = models.flat_map(|model| {
            let names = names_of(model).into_iter();
            names.map(|name| with_adapter(model.name(), &name))
        });
        with.collect()
    }
}

/// The names of a loaded model's adapters.
pub(crate) fn names_of(model: &LoadedModel) -> Vec<String> {
    let list = model.adapters().list().iter();
    list.map(|adapter| adapter.name.clone()).collect()
}

/// The name `model+adapter`.
pub(crate) fn with_adapter(model: &str, adapter: &str) -> String {
    format!("{model}{JOIN}{adapter}")
}

/// Parses an adapter that is given as `FILE` or `FILE=SCALE`.
///
/// # Errors
/// A message that says what is wrong with the scale.
pub fn parse_spec(text: &str) -> Result<AdapterSpec, String> {
    let spec = |path: &str, scale| AdapterSpec {
        path: Path::new(path).to_owned(),
        name: None,
        scale,
    };
    match text.rsplit_once('=') {
        Some((path, scale)) if !path.is_empty() && !scale.contains('/') => {
            let number = scale.parse::<f32>().ok();
            let fits = |scale: &f32| check_scale(*scale).is_ok();
            let number = number.filter(fits).ok_or_else(|| {
                format!(
                    "{text:?} has the scale {scale:?}; give FILE or FILE=SCALE, as in /m/a.gguf=0.5"
                )
            })?;
            Ok(spec(path, number))
        }
        _ => Ok(spec(text, 1.0)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_adapter_is_given_by_its_file_and_scale() {
        let read = |text| parse_spec(text).map(|spec| (spec.path, spec.scale));
        assert_eq!(read("/m/a.gguf"), Ok((PathBuf::from("/m/a.gguf"), 1.0)));
        assert_eq!(read("/m/a.gguf=0.5"), Ok((PathBuf::from("/m/a.gguf"), 0.5)));
        assert_eq!(read("/m/a.gguf=-2"), Ok((PathBuf::from("/m/a.gguf"), -2.0)));
        assert_eq!(read("/m=2/a"), Ok((PathBuf::from("/m=2/a"), 1.0)));
        for wrong in [
            "/m/a.gguf=much",
            "/m/a.gguf=nan",
            "/m/a.gguf=inf",
            "/m/a=2000",
        ] {
            assert!(read(wrong).unwrap_err().contains("FILE=SCALE"), "{wrong}");
        }
    }

    #[test]
    fn an_adapter_without_a_name_has_its_files() {
        let named = |path: &str| parse_spec(path).unwrap().name();
        assert_eq!(named("/m/a b+c.gguf"), "a-b-c");
        assert_eq!(named("loras/Fix.GGUF=0.5"), "Fix");
    }

    #[test]
    fn a_name_is_parted_at_each_plus() {
        let all: Vec<(&str, Vec<&str>)> = parted("a+b+c:latest")
            .map(|(base, names)| (base, names.collect()))
            .collect();
        assert_eq!(all, [("a", vec!["b", "c"]), ("a+b", vec!["c"])]);
        assert_eq!(parted("a").count(), 0);
    }
}
