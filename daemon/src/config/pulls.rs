//! Where models are downloaded from, and to.

use std::collections::BTreeMap;

use rocmforge_http::{PullConfig, hub_token};
use rocmforge_hub::Config as HubConfig;

use super::{ConfigError, Origin, Values};

/// Reads the token's file, and puts the settings together.
pub(super) fn config(
    values: &Values,
    origins: &BTreeMap<&'static str, Origin>,
) -> Result<PullConfig, ConfigError> {
    const TOKEN: &str = "hub_token_file";

    let token = values.hub_token_file.as_deref().map(hub_token).transpose();
    let token = token.map_err(|message| ConfigError::Value {
        key: TOKEN,
        origin: origins.get(TOKEN).cloned().unwrap_or(Origin::Flag),
        message,
    })?;
    Ok(PullConfig {
        dir: values.model_dir.first().cloned(),
        hub: HubConfig {
            hub: values.hub_url.clone(),
            registry: values.registry_url.clone(),
            token,
            ..HubConfig::new()
        },
        over_tcp: values.pull_over_tcp,
    })
}
