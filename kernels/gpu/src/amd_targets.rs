//! AMD's targets: the chips that there are kernels for, their generic targets, and how clang
//! compiles for them.
//!
//! The build script takes this file as a module of its own.

/// The AMD targets that units are compiled for ahead of time, and that they are checked for.
pub const AMD_TARGETS: [&str; 11] = [
    "gfx906", "gfx908", "gfx90a", "gfx942", "gfx950", "gfx1030", "gfx1100", "gfx1101", "gfx1151",
    "gfx1200", "gfx1201",
];

/// Generic AMD targets, each with the chips that its code objects run on. For a chip with objects
/// of its own those are taken.
pub const AMD_GENERIC_TARGETS: [(&str, &[&str]); 6] = [
    (
        "gfx9-generic",
        &["gfx900", "gfx902", "gfx904", "gfx906", "gfx909", "gfx90c"],
    ),
    ("gfx9-4-generic", &["gfx940", "gfx941", "gfx942", "gfx950"]),
    (
        "gfx10-1-generic",
        &["gfx1010", "gfx1011", "gfx1012", "gfx1013"],
    ),
    (
        "gfx10-3-generic",
        &[
            "gfx1030", "gfx1031", "gfx1032", "gfx1033", "gfx1034", "gfx1035", "gfx1036",
        ],
    ),
    (
        "gfx11-generic",
        &[
            "gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153",
        ],
    ),
    ("gfx12-generic", &["gfx1200", "gfx1201"]),
];

/// What a package has inside: all but chips whose generic target their runtimes read anyway, since
/// they are younger than it.
pub const AMD_PACKAGE_TARGETS: [&str; 14] = [
    "gfx906",
    "gfx908",
    "gfx90a",
    "gfx942",
    "gfx1030",
    "gfx1100",
    "gfx1101",
    "gfx1151",
    "gfx9-generic",
    "gfx9-4-generic",
    "gfx10-1-generic",
    "gfx10-3-generic",
    "gfx11-generic",
    "gfx12-generic",
];

/// Chips whose kernels only the run-time compiler makes.
const AMD_COMPILED_TARGETS: [&str; 1] = ["gfx1250"];

/// The generic target whose code objects run on an AMD chip (`gfx1103`, without feature flags).
#[must_use]
pub fn generic_of(chip: &str) -> Option<&'static str> {
    AMD_GENERIC_TARGETS
        .iter()
        .find(|(_, chips)| chips.contains(&chip))
        .map(|(target, _)| *target)
}

/// Whether kernels can be had for an AMD chip: ahead of time, by a generic target, or by the
/// run-time compiler.
#[must_use]
pub fn is_known_amd(chip: &str) -> bool {
    AMD_TARGETS.contains(&chip)
        || AMD_COMPILED_TARGETS.contains(&chip)
        || generic_of(chip).is_some()
}

/// What the compute driver says of a node, its `properties`: the chip, `None` for a processor.
#[must_use]
pub fn chip_of_node(properties: &str) -> Option<String> {
    let mut lines = properties.lines();
    let value = lines.find_map(|line| line.strip_prefix("gfx_target_version "))?;
    let version: u32 = value.trim().parse().ok()?;
    let (major, minor, step) = (version / 10_000, version / 100 % 100, version % 100);
    // Digits behind the first part are hexadecimal ones.
    (version != 0 && minor < 16 && step < 16).then(|| format!("gfx{major}{minor:x}{step:x}"))
}

/// The target that a chip's kernels are compiled for ahead of time: its own, or the generic one.
#[must_use]
pub fn target_of(chip: &str) -> Option<&'static str> {
    let own = AMD_TARGETS.into_iter().find(|target| *target == chip);
    own.or_else(|| generic_of(chip))
}

/// The target of the archive that a target's objects are in: chips beside their generic target,
/// whose objects are nearly the same and take little room there.
#[must_use]
pub fn family(target: &str) -> &str {
    generic_of(target).unwrap_or(target)
}

/// The options that depend on the target: generic ones need a newer form of code objects than ROCm
/// 5 reads.
#[must_use]
pub fn object_version(target: &str) -> &'static str {
    if target.ends_with("-generic") {
        "-mcode-object-version=6"
    } else {
        "-mcode-object-version=5"
    }
}

/// Options of clang for an AMD target without ROCm, beside `--offload-arch`, [`object_version`],
/// input and output.
pub const CLANG_OPTIONS: [&str; 8] = [
    "-x",
    "hip",
    "--offload-device-only",
    "--no-gpu-bundle-output",
    "-nogpuinc",
    "-nogpulib",
    "-std=c++17",
    "-O3",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_chip_has_one_generic_target_at_most_and_unknown_ones_are_known_as_such() {
        let chips = AMD_GENERIC_TARGETS.iter().flat_map(|(_, chips)| *chips);
        let mut all: Vec<&str> = chips.copied().collect();
        all.sort_unstable();
        let count = all.len();
        all.dedup();
        assert_eq!(all.len(), count);
        assert_eq!(generic_of("gfx1103"), Some("gfx11-generic"));
        assert_eq!(generic_of("gfx90c"), Some("gfx9-generic"));
        // Their matrix instructions are no others' of gfx9.
        for chip in ["gfx908", "gfx90a"] {
            assert_eq!(generic_of(chip), None, "{chip}");
        }
        for chip in AMD_TARGETS.into_iter().chain(["gfx1250", "gfx1036"]) {
            assert!(is_known_amd(chip), "{chip}");
        }
        for chip in ["gfx803", "gfx1300", "gfx11-generic", ""] {
            assert!(!is_known_amd(chip), "{chip}");
        }
    }

    #[test]
    fn a_card_is_told_from_a_processor_and_has_a_target() {
        let node = |version| format!("cpu_cores_count 0\ngfx_target_version {version}\nlds 64\n");
        for (version, chip, target) in [
            (90_006, "gfx906", Some("gfx906")),
            (90_010, "gfx90a", Some("gfx90a")),
            (90_012, "gfx90c", Some("gfx9-generic")),
            (90_402, "gfx942", Some("gfx942")),
            (100_306, "gfx1036", Some("gfx10-3-generic")),
            (110_000, "gfx1100", Some("gfx1100")),
            (110_501, "gfx1151", Some("gfx1151")),
            (120_500, "gfx1250", None),
            (80_003, "gfx803", None),
        ] {
            assert_eq!(chip_of_node(&node(version)).as_deref(), Some(chip));
            assert_eq!(target_of(chip), target, "{chip}");
        }
        for other in [
            "",
            "gfx_target_version 0",
            "gfx_target_version x",
            "simd_count 4",
        ] {
            assert_eq!(chip_of_node(other), None, "{other}");
        }
    }

    fn ahead_of_time() -> Vec<&'static str> {
        let generic = AMD_GENERIC_TARGETS.map(|(target, _)| target);
        AMD_TARGETS.into_iter().chain(generic).collect()
    }

    /// check_targets.sh cannot use these lists.
    #[test]
    fn the_list_of_the_check_is_the_same() {
        let check = include_str!("../hip/check_targets.sh");
        let all = ahead_of_time().into_iter().chain(AMD_COMPILED_TARGETS);
        let list = format!("targets=({})\n", all.collect::<Vec<_>>().join(" "));
        assert!(check.contains(&list), "{list}");
    }

    #[test]
    fn a_package_has_kernels_for_every_chip_that_is_known() {
        let all = ahead_of_time();
        assert!(AMD_PACKAGE_TARGETS.iter().all(|t| all.contains(t)));
        for chip in all {
            let own = AMD_PACKAGE_TARGETS.contains(&chip);
            let generic = generic_of(chip).is_some_and(|g| AMD_PACKAGE_TARGETS.contains(&g));
            assert!(own || generic, "{chip}");
        }
        assert_eq!(family("gfx1101"), family("gfx11-generic"));
        assert_eq!(family("gfx90a"), "gfx90a");
    }
}
