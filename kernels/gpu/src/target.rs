//! The GPU that launches are shaped for.

/// Whose GPU it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Vendor {
    /// AMD, through HIP.
    Amd,
    /// NVIDIA, through CUDA's driver API.
    Nvidia,
}

/// What geometry depends on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuTarget {
    /// Whose it is.
    pub vendor: Vendor,
    /// `gfx1100`, `gfx90a`, ... without feature flags, or `sm_90`.
    pub arch: String,
    /// Lanes of a wave: 32 or 64.
    pub wave: u32,
    /// Compute units or multiprocessors.
    pub compute_units: u32,
    /// Shared memory that a block may use without asking for more, in bytes.
    pub shared_bytes_max: u32,
    /// The most that a block may have when it asks for it, in bytes.
    pub shared_bytes_asked: u32,
}

impl GpuTarget {
    /// An AMD GPU: gfx9 has waves of 64 lanes, everything since of 32.
    #[must_use]
    pub fn amd(arch: &str, compute_units: u32) -> GpuTarget {
        let arch = arch.split(':').next().unwrap_or_default();
        GpuTarget {
            vendor: Vendor::Amd,
            arch: arch.to_owned(),
            wave: if arch.starts_with("gfx9") { 64 } else { 32 },
            compute_units,
            shared_bytes_max: 64 << 10,
            shared_bytes_asked: 64 << 10,
        }
    }

    /// Whether the target is an NVIDIA GPU with the matrix instructions that the kernels use, which
    /// is from sm_80 on.
    #[must_use]
    pub fn has_mma(&self) -> bool {
        let capability = self.arch.strip_prefix("sm_").and_then(|c| c.parse().ok());
        self.vendor == Vendor::Nvidia && matches!(capability, Some(80u32..))
    }

    /// Whether the target is an AMD GPU with the matrix instructions that the kernels use: WMMA
    /// (gfx11, gfx12) or MFMA (from gfx908 on).
    #[must_use]
    pub fn has_wmma(&self) -> bool {
        let arch = self.arch.as_str();
        // As RF_WMMA in compat.h.
        let wmma = arch.starts_with("gfx11") || arch.starts_with("gfx120");
        let mfma = matches!(arch, "gfx908" | "gfx90a" | "gfx942" | "gfx950");
        self.vendor == Vendor::Amd && (wmma || mfma)
    }

    /// Whether the target is an NVIDIA GPU with matrix instructions of four waves together (wgmma),
    /// which sm_90 alone has.
    #[must_use]
    pub fn has_wgmma(&self) -> bool {
        self.vendor == Vendor::Nvidia && self.arch == "sm_90"
    }

    /// Whether products of f16 rows are made by matrix instructions, of either vendor.
    #[must_use]
    pub fn multiplies_f16(&self) -> bool {
        self.has_mma() || self.has_wmma()
    }

    /// An NVIDIA GPU of compute capability `major.minor`, with the shared memory that each from
    /// sm_80 on has.
    #[must_use]
    pub fn nvidia(major: u32, minor: u32, compute_units: u32) -> GpuTarget {
        GpuTarget {
            vendor: Vendor::Nvidia,
            arch: format!("sm_{major}{minor}"),
            wave: 32,
            compute_units,
            shared_bytes_max: 48 << 10,
            shared_bytes_asked: 99 << 10,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wave_sizes_follow_the_architecture() {
        for (arch, wave) in [
            ("gfx906", 64),
            ("gfx90a:sramecc+:xnack-", 64),
            ("gfx1030", 32),
            ("gfx1201", 32),
        ] {
            assert_eq!(GpuTarget::amd(arch, 60).wave, wave, "{arch}");
        }
        assert_eq!(GpuTarget::amd("gfx90a:sramecc+", 104).arch, "gfx90a");
        assert_eq!(GpuTarget::nvidia(9, 0, 132).arch, "sm_90");
        assert!(GpuTarget::nvidia(12, 0, 170).has_mma());
        assert!(!GpuTarget::nvidia(7, 5, 40).has_mma());
        assert!(!GpuTarget::amd("gfx942", 304).has_mma());
        for arch in ["gfx942", "gfx90a:sramecc+:xnack-", "gfx1103", "gfx1201"] {
            assert!(GpuTarget::amd(arch, 60).has_wmma(), "{arch}");
        }
        for arch in ["gfx906", "gfx940", "gfx1030", "gfx1250"] {
            assert!(!GpuTarget::amd(arch, 60).multiplies_f16(), "{arch}");
        }
        assert!(!GpuTarget::nvidia(9, 0, 132).has_wmma());
        assert!(GpuTarget::nvidia(9, 0, 132).has_wgmma());
        assert!(
            !GpuTarget::nvidia(8, 9, 128).has_wgmma() && !GpuTarget::nvidia(12, 0, 170).has_wgmma()
        );
    }
}
