//! The files of the models: made when they are first needed, removed when they no longer are,
//! unless they are to be kept.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::plan::Kind;
use crate::generate;

/// A folder of models.
pub(crate) struct Models {
    dir: PathBuf,
    /// What removes the folder at the end; `None` for a user's own.
    temporary: Option<tempfile::TempDir>,
}

impl Models {
    /// In a folder of the user's, or else in one that goes away with this.
    ///
    /// # Errors
    /// There is no room for temporary files.
    pub(crate) fn new(dir: Option<&Path>) -> Result<Self> {
        if let Some(dir) = dir {
            return Ok(Self {
                dir: dir.to_owned(),
                temporary: None,
            });
        }
        let temporary = tempfile::Builder::new()
            .prefix("rocmforge-bench-")
            .tempdir()
            .context("no temporary folder for models: give --models")?;
        Ok(Self {
            dir: temporary.path().to_owned(),
            temporary: Some(temporary),
        })
    }

    /// A model's file, in the page cache.
    ///
    /// # Errors
    /// What making or reading it gives.
    pub(crate) fn get(&self, (preset, mix): Kind, seed: u64) -> Result<PathBuf> {
        generate::provide(&self.dir, preset, mix, seed)
            .with_context(|| format!("making models in {} (--models)", self.dir.display()))
    }

    /// A model is not needed any more: a file that was made for this run goes.
    pub(crate) fn done(&self, path: &Path) {
        if self.temporary.is_some()
            && let Err(error) = std::fs::remove_file(path)
        {
            eprintln!("{} stays: {error}", path.display());
        }
    }
}
