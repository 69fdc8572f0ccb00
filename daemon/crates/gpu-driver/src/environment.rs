//! Variables of the environment that change which cards a runtime shows, and as what.

use super::Vendor;

/// Environment variables that HIP and ROCr read. HIP reads CUDA's variable, too.
const HIP: [&str; 5] = [
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "CUDA_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "HSA_OVERRIDE_GFX_VERSION",
];
const CUDA: [&str; 1] = ["CUDA_VISIBLE_DEVICES"];

/// Maximum characters of an environment variable's value that are shown.
const VALUE_MAX: usize = 64;

/// Environment variables that change the vendor's runtime and are set, as text for users.
pub fn that_is_set(vendor: Vendor) -> Option<String> {
    told(vendor, |name| {
        std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
    })
}

fn told(vendor: Vendor, value: impl Fn(&str) -> Option<String>) -> Option<String> {
    let names: &[&str] = match vendor {
        Vendor::Hip => &HIP,
        Vendor::Cuda => &CUDA,
    };
    let set = names.iter().filter_map(|name| {
        let value = value(name)?;
        let plain = value.chars().filter(|c| !c.is_control());
        let plain: String = plain.take(VALUE_MAX).collect();
        Some(format!("{name}={plain}"))
    });
    let set: Vec<_> = set.collect();
    (!set.is_empty()).then(|| {
        format!(
            "the environment has {}, which changes what GPUs the runtime lists, and their numbers or architectures",
            set.join(", ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_hides_a_card_is_told_with_its_value() {
        let of = |name: &str| match name {
            "ROCR_VISIBLE_DEVICES" => Some("1\n".to_owned()),
            // Set to nothing it hides all cards.
            "CUDA_VISIBLE_DEVICES" => Some(String::new()),
            _ => None,
        };
        let hip = told(Vendor::Hip, of).unwrap();
        assert!(
            hip.contains("ROCR_VISIBLE_DEVICES=1, CUDA_VISIBLE_DEVICES=,"),
            "{hip}"
        );
        assert!(!hip.contains("GPU_DEVICE_ORDINAL"), "{hip}");
        let cuda = told(Vendor::Cuda, of).unwrap();
        assert!(!cuda.contains("ROCR"), "{cuda}");
        assert_eq!(told(Vendor::Hip, |_| None), None);
    }
}
