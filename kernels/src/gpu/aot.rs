//! Units compiled ahead of time for AMD targets and embedded, when the build was asked for them (`ROCMFORGE_AOT=1`, see build.rs).

use super::units::generic_of;

/// Target, unit, code object.
static OBJECTS: &[(&str, &str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/aot.rs"));

/// The code object of a unit for an AMD chip (`gfx1100`, without feature flags): its own, else that
/// of its generic target.
#[must_use]
pub fn object(chip: &str, unit: &str) -> Option<&'static [u8]> {
    let of = |target: &str| {
        OBJECTS
            .iter()
            .find(|(t, u, _)| *t == target && *u == unit)
            .map(|(.., object)| *object)
    };
    of(chip).or_else(|| of(generic_of(chip)?))
}

/// Whether [`object`] gives a generic one, which an older runtime may not load.
#[must_use]
pub fn is_generic(chip: &str, unit: &str) -> bool {
    !OBJECTS.iter().any(|(t, u, _)| *t == chip && *u == unit) && object(chip, unit).is_some()
}

/// How many objects are embedded.
#[must_use]
pub fn count() -> usize {
    OBJECTS.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::units;

    #[test]
    fn embedded_objects_are_elf_and_complete_for_their_target() {
        if count() == 0 {
            println!("skipped: built without ROCMFORGE_AOT=1, nothing is embedded");
            return;
        }
        for (target, unit, object) in OBJECTS {
            assert!(object.starts_with(b"\x7fELF"), "{unit} for {target}");
        }
        let target = OBJECTS[0].0;
        for unit in units::units() {
            assert!(object(target, unit.name).is_some(), "{}", unit.name);
        }
        assert!(object("gfx000", "repack").is_none());
    }
}
