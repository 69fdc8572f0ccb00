//! The units of compilation: one source with its definitions and headers, as one text.
//!
//! `hip/units.txt` lists them. A unit's text needs no include path and no definitions from outside, so it is also what a cache
//! of compiled units is keyed by.

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

const UNITS: &str = include_str!("../../hip/units.txt");

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        [$(($name, include_str!(concat!("../../hip/", $name)))),*]
    };
}

/// Every source and header.
const FILES: [(&str, &str); 46] = files![
    "compat.h",
    "formats.h",
    "formats_low_bits.h",
    "codebook_iq1.h",
    "codebook_iq2_s.h",
    "codebook_iq2_xs.h",
    "codebook_iq2_xxs.h",
    "codebook_iq3_s.h",
    "codebook_iq3_xxs.h",
    "repack_low_bits.h",
    "act.h",
    "floats.h",
    "tokens.h",
    "matmat_q8.h",
    "matvec_float.h",
    "recurrent.h",
    "experts.h",
    "activations.h",
    "kv.h",
    "attention_mma.h",
    "mma_f16.h",
    "matmat_mma.h",
    "attention_wmma.h",
    "attention_plain.h",
    "matvec.hip",
    "matvec_float.hip",
    "matmat.hip",
    "activations.hip",
    "repack.hip",
    "dequantize.hip",
    "rope_kv.hip",
    "rope_heads.hip",
    "attention_decode.hip",
    "attention_prefill.hip",
    "gather.hip",
    "add_bias.hip",
    "elements.hip",
    "route.hip",
    "conv.hip",
    "delta_net.hip",
    "ssm.hip",
    "experts.hip",
    "experts_group.hip",
    "experts_many.hip",
    "matmat_heads.hip",
    "sample.hip",
];

/// A unit of the list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unit {
    /// Its name, the part of [`Launch::kernel`](super::Launch) before the dot.
    pub name: &'static str,
    source: &'static str,
    definitions: &'static str,
}

impl Unit {
    /// The whole text: definitions, headers, source.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::new();
        for definition in self.definitions.split_whitespace() {
            let (name, value) = definition.split_once('=').unwrap_or((definition, "1"));
            text += &format!("#define {name} {value}\n");
        }
        let mut included = Vec::new();
        expand(self.source, &mut included, &mut text);
        text
    }
}

/// All units, in the order of the list.
pub fn units() -> impl Iterator<Item = Unit> {
    UNITS
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(|line| {
            let (name, rest) = line.split_once(' ').unwrap_or((line, ""));
            let (source, definitions) = rest.split_once(' ').unwrap_or((rest, ""));
            Unit {
                name,
                source,
                definitions,
            }
        })
}

/// The unit of this name.
#[must_use]
pub fn unit(name: &str) -> Option<Unit> {
    units().find(|unit| unit.name == name)
}

/// A source or header by its file name.
pub(crate) fn file(name: &str) -> Option<&'static str> {
    FILES
        .iter()
        .find(|(n, _)| *n == name)
        .map(|(_, text)| *text)
}

/// Appends a file with the headers that it includes, each once.
fn expand(name: &str, included: &mut Vec<String>, to: &mut String) {
    for line in file(name).unwrap_or_default().lines() {
        if let Some(header) = line.strip_prefix("#include \"") {
            let header = header.trim_end_matches('"').to_owned();
            if !included.contains(&header) {
                included.push(header.clone());
                expand(&header, included, to);
            }
        } else if line != "#pragma once" {
            to.push_str(line);
            to.push('\n');
        }
    }
}

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

    /// build.rs and check_targets.sh cannot use these lists.
    #[test]
    fn the_lists_of_the_build_and_of_the_check_are_the_same() {
        let generic = AMD_GENERIC_TARGETS.map(|(target, _)| target);
        let targets: Vec<&str> = AMD_TARGETS.into_iter().chain(generic).collect();
        let build = include_str!("../../build.rs");
        assert!(build.contains(&targets.join(",")), "build.rs");
        let check = include_str!("../../hip/check_targets.sh");
        assert!(check.contains(&targets.join(" ")), "check_targets.sh");
    }
}
