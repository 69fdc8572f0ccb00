//! Models that requests can name: loaded ones, and files that are loaded at their first use.

use rocmforge_engine::api::ModelStatus;

use crate::adapters::{names_of, with_adapter};
use crate::model_files::ModelFile;

/// Whether a model is loaded or a file.
#[derive(Debug, Clone)]
pub(crate) enum Place {
    /// The model is loaded.
    Loaded(Box<ModelStatus>),
    /// The model is a file, loaded at its first use.
    OnDisk(Box<ModelFile>),
}

/// A model that requests can name, under one of its names.
#[derive(Debug, Clone)]
pub struct Available {
    pub(crate) name: String,
    pub(crate) alias_of: Option<String>,
    pub(crate) place: Place,
}

impl Available {
    /// Name of the model in requests.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The model's own name, if this name is an alias of it.
    pub fn alias_of(&self) -> Option<&str> {
        self.alias_of.as_deref()
    }

    /// The model, if it is loaded.
    pub fn loaded(&self) -> Option<&ModelStatus> {
        match &self.place {
            Place::Loaded(status) => Some(status),
            Place::OnDisk(_) => None,
        }
    }

    /// Size of the model's file in bytes.
    pub fn file_bytes(&self) -> u64 {
        match &self.place {
            Place::Loaded(status) => status.model.file().size_bytes(),
            Place::OnDisk(file) => file.bytes,
        }
    }

    /// Modification time of the model's file, in milliseconds since 1970.
    pub fn mtime_unix_ms(&self) -> i64 {
        match &self.place {
            Place::Loaded(status) => {
                let ns = status.model.file().identity().mtime_ns;
                i64::try_from(ns / 1_000_000).unwrap_or(i64::MAX)
            }
            Place::OnDisk(file) => file.mtime_unix_ms,
        }
    }

    /// The model with each of its adapters, if it is loaded.
    pub(crate) fn with_adapters(&self) -> impl Iterator<Item = Available> {
        let adapters = self.loaded().map(|status| names_of(&status.model));
        let adapters = adapters.into_iter().flatten();
        adapters.map(|adapter| Available {
            name: with_adapter(&self.name, &adapter),
            alias_of: Some(self.name.clone()),
            place: self.place.clone(),
        })
    }
}
