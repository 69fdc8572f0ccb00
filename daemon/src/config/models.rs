//! Declared models: `[[model]]` in the file.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use rocmforge_service::declared::{ALIASES_MAX, DECLARED_MAX, Declared};
use serde::Deserialize;

use super::ConfigError;

/// One `[[model]]` as it is written.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ModelTable {
    name: String,
    path: PathBuf,
    #[serde(default)]
    aliases: Vec<String>,
    #[serde(default)]
    preload: bool,
    #[serde(default)]
    pin: bool,
}

/// A model that is declared, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeclaredModel {
    /// The model.
    pub model: Declared,
    /// The file that declares it.
    pub file: PathBuf,
}

/// Checks what the files declare.
pub(super) fn checked(
    tables: Vec<(PathBuf, usize, ModelTable)>,
) -> Result<Vec<DeclaredModel>, ConfigError> {
    let mut models: Vec<DeclaredModel> = Vec::new();
    // Each name and alias, and whose it is.
    let mut taken: HashMap<String, String> = HashMap::new();
    let mut last: HashMap<String, usize> = HashMap::new();
    for (i, (_, _, table)) in tables.iter().enumerate() {
        last.insert(table.name.clone(), i);
    }
    for (i, (file, number, table)) in tables.into_iter().enumerate() {
        let refuse = |key: &'static str, message: String| ConfigError::Model {
            file: file.clone(),
            number,
            name: table.name.clone(),
            key,
            message,
        };
        Declared::check_name(&table.name).map_err(|message| refuse("name", message))?;
        if !table.path.is_absolute() {
            let message = format!(
                "{} is relative; give an absolute path",
                table.path.display()
            );
            return Err(refuse("path", message));
        }
        if table.aliases.len() > ALIASES_MAX {
            let message = format!("{} of them; at most {ALIASES_MAX}", table.aliases.len());
            return Err(refuse("aliases", message));
        }
        for alias in &table.aliases {
            Declared::check_name(alias).map_err(|message| refuse("aliases", message))?;
        }
        // A later file says it anew.
        if last.get(&table.name) != Some(&i) {
            continue;
        }
        let names = std::iter::once(("name", &table.name));
        let aliases = table.aliases.iter().map(|alias| ("aliases", alias));
        for (key, name) in names.chain(aliases) {
            if let Some(other) = taken.insert(name.clone(), table.name.clone()) {
                let message = format!("'{name}' is a name of the model '{other}' already");
                return Err(refuse(key, message));
            }
        }
        if models.len() >= DECLARED_MAX {
            let message = format!("more than {DECLARED_MAX} models are declared");
            return Err(refuse("name", message));
        }
        models.push(DeclaredModel {
            model: Declared {
                name: table.name.clone(),
                path: table.path.clone(),
                aliases: table.aliases.clone(),
                preload: table.preload,
                pin: table.pin,
            },
            file: file.clone(),
        });
    }
    Ok(models)
}

/// A path as TOML has it.
pub(super) fn quoted_path(path: &Path) -> String {
    quoted(&path.to_string_lossy())
}

/// A text as TOML has it.
pub(super) fn quoted(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}
