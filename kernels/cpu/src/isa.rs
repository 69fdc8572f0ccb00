//! Which instruction set the kernels use: the best that the CPU has, or what
//! `ROCMFORGE_ISA` asks for.

use super::Error;
use super::simd::{Avx2, Avx512, AvxVnni};

/// An instruction set that the kernels are written for. Ordered: a later one is
/// preferred where the CPU has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Portable code, the yardstick of the others.
    Scalar,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX2 with AVX-VNNI's 8-bit dot product.
    AvxVnni,
    /// AVX-512 F, BW and VNNI.
    Avx512,
}

impl Isa {
    /// Every instruction set, ascending.
    pub const ALL: [Isa; 4] = [Isa::Scalar, Isa::Avx2, Isa::AvxVnni, Isa::Avx512];

    /// The name that `ROCMFORGE_ISA` uses.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::AvxVnni => "avxvnni",
            Isa::Avx512 => "avx512",
        }
    }

    /// Whether this CPU supports the instruction set.
    pub fn is_available(self) -> bool {
        match self {
            Isa::Scalar => true,
            Isa::Avx2 => Avx2::detect().is_some(),
            Isa::AvxVnni => AvxVnni::detect().is_some(),
            Isa::Avx512 => Avx512::detect().is_some(),
        }
    }

    /// The best instruction set of this CPU, whatever the environment says.
    pub fn best() -> Isa {
        Isa::ALL
            .into_iter()
            .rev()
            .find(|isa| isa.is_available())
            .unwrap_or(Isa::Scalar)
    }

    /// The instruction set to use: what the environment variable `ROCMFORGE_ISA`
    /// names, else [`Isa::best`].
    ///
    /// # Errors
    /// The variable holds an unknown name, or one that this CPU cannot run.
    pub fn detect() -> Result<Isa, Error> {
        match std::env::var_os("ROCMFORGE_ISA") {
            None => Ok(Isa::best()),
            Some(name) => Isa::parse(&name.to_string_lossy()),
        }
    }

    /// The instruction set of that name, if this CPU can run it.
    ///
    /// # Errors
    /// The name is unknown, or this CPU cannot run it.
    pub fn parse(name: &str) -> Result<Isa, Error> {
        let asked = Isa::ALL
            .into_iter()
            .find(|isa| isa.name() == name)
            .ok_or_else(|| Error::UnknownIsa {
                name: name.to_owned(),
            })?;
        if asked.is_available() {
            Ok(asked)
        } else {
            Err(Error::IsaUnavailable {
                asked: asked.name(),
                best: Isa::best().name(),
            })
        }
    }
}
