//! Parameters of the further samplers, with their ranges: one line of [`SamplerFields`] each.

use std::fmt::Display;

use rocmforge_engine::api::{Mirostat, MirostatVersion, SamplerKind, SamplingParams};

/// Maximum number of samplers in an order.
pub const ORDER_MAX: usize = 16;
/// Maximum number of DRY's sequence breakers.
pub const BREAKERS_MAX: usize = 32;
/// Maximum length of a DRY sequence breaker in bytes.
pub const BREAKER_MAX_BYTES: usize = 40;

/// Callback that takes a field and what is wrong with it.
type Wrong<'a> = &'a mut dyn FnMut(&str, String);

/// Checks an optional number with `fine`; reports the field and its range if it fails.
fn in_range<T: Copy + Into<f64> + Display>(
    field: &str,
    value: Option<T>,
    fine: impl Fn(f64) -> bool,
    range: &str,
    wrong: Wrong<'_>,
) -> Option<T> {
    let x = value?;
    let number = x.into();
    // NaN fails every comparison, infinities are named in the ranges.
    let is_fine = number.is_finite() && fine(number);
    if !is_fine {
        wrong(field, format!("{x} is out of range: {range}"));
    }
    is_fine.then_some(x)
}

/// Declares numeric sampler fields: name in requests, allowed values, and where they are stored. A
/// whole number is an `i32`.
macro_rules! sampler_fields {
    (
        $(
            $(#[doc = $doc:literal])+
            $field:ident: $type:ty,
            $range:literal if |$value:ident| $fine:expr,
            |$params:ident, $x:ident| $set:expr;
        )+
    ) => {
        /// A request's sampler fields; absent ones take their defaults.
        #[derive(Debug, Clone, Default)]
        pub struct SamplerFields {
            $($(#[doc = $doc])+ pub $field: Option<$type>,)+
            /// Version of Mirostat: 1, 2, or 0 for off.
            pub mirostat: Option<i32>,
            /// Texts that end a repetition for DRY: at most [`BREAKERS_MAX`], of 1 to
            /// [`BREAKER_MAX_BYTES`] bytes.
            pub dry_sequence_breakers: Option<Vec<String>>,
            /// Names of the samplers in their order, at most [`ORDER_MAX`]; those missing are off.
            pub samplers: Option<Vec<String>>,
        }

        impl SamplerFields {
            fn numbers(&self, params: &mut SamplingParams, wrong: Wrong<'_>) {
                $(
                    let fine = |$value: f64| $fine;
                    let name = concat!("sampling.", stringify!($field));
                    if let Some($x) = in_range(name, self.$field, fine, $range, wrong) {
                        let $params = &mut *params;
                        $set;
                    }
                )+
            }
        }
    };
}

sampler_fields! {
    /// Typical sampling: above 0, at most 1, which keeps all.
    typical_p: f32, "above 0 and at most 1, where 1 keeps all" if |x| x > 0.0 && x <= 1.0,
        |p, x| p.typical_p = x;
    /// Top-n-sigma: standard deviations below the largest logit that are kept: at least 0, where 0
    /// keeps all.
    top_n_sigma: f32, "finite and at least 0, where 0 keeps all" if |x| x >= 0.0,
        |p, x| p.top_n_sigma = x;
    /// Probability that XTC is applied to a token: from 0 to 1.
    xtc_probability: f32, "from 0 to 1, where 0 is off" if |x| (0.0..=1.0).contains(&x),
        |p, x| p.xtc.probability = x;
    /// Probability from which XTC removes tokens: from 0 to 1.
    xtc_threshold: f32, "from 0 to 1, where more than 0.5 is off" if |x| (0.0..=1.0).contains(&x),
        |p, x| p.xtc.threshold = x;
    /// Range of the dynamic temperature: at least 0, which is off.
    dynatemp_range: f32, "finite and at least 0, where 0 is off" if |x| x >= 0.0,
        |p, x| p.dynatemp.range = x;
    /// Exponent of the dynamic temperature: at least 0.
    dynatemp_exponent: f32, "finite and at least 0" if |x| x >= 0.0,
        |p, x| p.dynatemp.exponent = x;
    /// Least number of tokens that samplers leave: at least 0.
    min_keep: i32, "at least 0" if |n| n >= 0.0, |p, n| p.min_keep = n.cast_unsigned();
    /// Multiplier of the DRY penalty: at least 0, where 0 switches DRY off.
    dry_multiplier: f32, "finite and at least 0, where 0 is off" if |x| x >= 0.0,
        |p, x| p.dry.multiplier = x;
    /// Base of the DRY penalty, which grows with each repeated token: at least 1.
    dry_base: f32, "finite and at least 1" if |x| x >= 1.0, |p, x| p.dry.base = x;
    /// Length from which DRY penalizes a repetition, in tokens: at least 1.
    dry_allowed_length: i32, "at least 1" if |n| n >= 1.0,
        |p, n| p.dry.allowed_length = n.cast_unsigned();
    /// Number of recent tokens in which DRY looks for repetitions: at least 0, or -1 for the whole
    /// context.
    dry_penalty_last_n: i32, "at least 0, where 0 is off, or -1 for the whole context"
        if |n| n >= -1.0, |p, n| p.dry.last_n = u32::try_from(n).unwrap_or(u32::MAX);
    /// Target surprise of Mirostat, in bits: at least 0.
    mirostat_tau: f32, "finite and at least 0" if |x| x >= 0.0,
        |p, x| p.mirostat = p.mirostat.map(|held| Mirostat { tau: x, ..held });
    /// Rate at which Mirostat adapts its bound, from 0 to 1.
    mirostat_eta: f32, "from 0 to 1" if |x| (0.0..=1.0).contains(&x),
        |p, x| p.mirostat = p.mirostat.map(|held| Mirostat { eta: x, ..held });
}

/// Mirostat of a version, with default parameters.
pub fn mirostat(version: MirostatVersion) -> Mirostat {
    Mirostat {
        version,
        tau: 5.0,
        eta: 0.1,
    }
}

impl SamplerFields {
    /// Checks the fields, and stores their values in `params`.
    pub(crate) fn set(self, params: &mut SamplingParams, wrong: Wrong<'_>) {
        let version = match self.mirostat {
            None | Some(0) => None,
            Some(1) => Some(MirostatVersion::V1),
            Some(2) => Some(MirostatVersion::V2),
            Some(n) => {
                let message = format!("{n} is out of range: 0 for none, 1 or 2");
                wrong("sampling.mirostat", message);
                None
            }
        };
        params.mirostat = version.map(mirostat);
        self.numbers(params, wrong);
        if let Some(breakers) = self.dry_sequence_breakers {
            check_breakers(&breakers, wrong);
            params.dry.breakers = breakers;
        }
        if let Some(names) = self.samplers {
            match order(&names) {
                Ok(order) => params.order = order,
                Err(message) => wrong("sampling.samplers", message),
            }
        }
    }
}

fn check_breakers(breakers: &[String], wrong: Wrong<'_>) {
    let field = "sampling.dry_sequence_breakers";
    if breakers.len() > BREAKERS_MAX {
        let message = format!("{} texts; at most {BREAKERS_MAX}", breakers.len());
        wrong(field, message);
    }
    let fits = |text: &String| (1..=BREAKER_MAX_BYTES).contains(&text.len());
    if let Some(at) = breakers.iter().position(|text| !fits(text)) {
        let bytes = breakers[at].len();
        let message = format!("text {at} has {bytes} bytes; 1 to {BREAKER_MAX_BYTES} are allowed");
        wrong(field, message);
    }
}

/// The samplers with these names.
fn order(names: &[String]) -> Result<Vec<SamplerKind>, String> {
    if names.len() > ORDER_MAX {
        return Err(format!("{} samplers; at most {ORDER_MAX}", names.len()));
    }
    let mut order = Vec::new();
    for name in names {
        // llama.cpp's, which does nothing without a target of its own.
        if name == "adaptive_p" {
            continue;
        }
        let kind = kind(name).ok_or_else(|| {
            let known = SamplerKind::ALL.map(SamplerKind::name).join(", ");
            format!("there is no sampler '{name}'; give some of {known}")
        })?;
        let once = matches!(kind, SamplerKind::Penalties | SamplerKind::Dry);
        if once && order.contains(&kind) {
            return Err(format!("'{name}' is given twice; give it once"));
        }
        order.push(kind);
    }
    Ok(order)
}

/// The sampler with this name, in any of the spellings that llama.cpp accepts.
fn kind(name: &str) -> Option<SamplerKind> {
    let name = name.replace('-', "_");
    let name = match &*name {
        "typical_p" | "typical" => "typ_p",
        "temp" => "temperature",
        name => name,
    };
    let mut kinds = SamplerKind::ALL.into_iter();
    kinds.find(|kind| kind.name() == name)
}

/// The names for an order in short form, one letter each. An unknown letter stays, and is rejected
/// as a name.
pub fn names_of_letters(letters: &str) -> Vec<String> {
    let name = |letter: char| {
        let mut kinds = SamplerKind::ALL.into_iter();
        let kind = kinds.find(|kind| kind.letter() == letter);
        kind.map_or_else(|| letter.to_string(), |kind| kind.name().to_owned())
    };
    // Letters that are too many are refused by their number.
    letters.chars().take(ORDER_MAX + 1).map(name).collect()
}

#[cfg(test)]
mod tests {
    use rocmforge_engine::api::SamplingParams;
    use rocmforge_failure::Violations;

    use super::*;
    use crate::check::{self, SamplingFields};

    fn with(change: impl Fn(&mut SamplerFields)) -> Result<SamplingParams, (String, String)> {
        let mut wire = SamplingFields::default();
        change(&mut wire.samplers);
        let mut violations = Violations::default();
        let sampling = check::sampling(wire, &mut violations);
        match violations.result() {
            Ok(()) => Ok(sampling.params),
            Err(failure) => Err(failure.fields()[0].clone()),
        }
    }

    type Real = (
        &'static str,
        fn(&mut SamplerFields, f32),
        fn(&SamplingParams) -> f32,
        &'static [f32],
        &'static [f32],
    );

    #[test]
    fn numbers_of_samplers_reach_them_and_are_held_to_their_ranges() {
        let fields: [Real; 8] = [
            (
                "typical_p",
                |f, x| f.typical_p = Some(x),
                |p| p.typical_p,
                &[1e-6, 0.5, 1.0],
                &[0.0, -1.0, 1.01],
            ),
            (
                "top_n_sigma",
                |f, x| f.top_n_sigma = Some(x),
                |p| p.top_n_sigma,
                &[0.0, 1.5, 1e30],
                &[-0.5],
            ),
            (
                "xtc_probability",
                |f, x| f.xtc_probability = Some(x),
                |p| p.xtc.probability,
                &[0.0, 1.0],
                &[-0.1, 1.1],
            ),
            (
                "xtc_threshold",
                |f, x| f.xtc_threshold = Some(x),
                |p| p.xtc.threshold,
                &[0.0, 0.6, 1.0],
                &[-0.1, 1.1],
            ),
            (
                "dynatemp_range",
                |f, x| f.dynatemp_range = Some(x),
                |p| p.dynatemp.range,
                &[0.0, 9.0],
                &[-0.1],
            ),
            (
                "dynatemp_exponent",
                |f, x| f.dynatemp_exponent = Some(x),
                |p| p.dynatemp.exponent,
                &[0.0, 9.0],
                &[-0.1],
            ),
            (
                "dry_multiplier",
                |f, x| f.dry_multiplier = Some(x),
                |p| p.dry.multiplier,
                &[0.0, 0.8, 1e30],
                &[-0.1],
            ),
            (
                "dry_base",
                |f, x| f.dry_base = Some(x),
                |p| p.dry.base,
                &[1.0, 1.75],
                &[0.9, 0.0, -2.0],
            ),
        ];
        let never = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
        for (field, set, get, fine, refused) in fields {
            for &x in fine {
                assert_eq!(with(|f| set(f, x)).map(|p| get(&p)), Ok(x), "{field}");
            }
            for &x in refused.iter().chain(&never) {
                let (name, message) = with(|f| set(f, x)).expect_err(field);
                assert_eq!(name, format!("sampling.{field}"));
                assert!(message.contains("out of range"), "{message}");
            }
        }
    }

    #[test]
    fn whole_numbers_of_samplers_are_held_to_their_ranges() {
        let dry = |n| with(|f| f.dry_penalty_last_n = Some(n)).map(|p| p.dry.last_n);
        assert_eq!((dry(-1), dry(0), dry(7)), (Ok(u32::MAX), Ok(0), Ok(7)));
        assert!(dry(-2).is_err());
        let length = |n| with(|f| f.dry_allowed_length = Some(n)).map(|p| p.dry.allowed_length);
        assert_eq!((length(1), length(i32::MAX)), (Ok(1), Ok(i32::MAX as u32)));
        assert!(length(0).is_err() && length(-1).is_err());
        assert_eq!(with(|f| f.min_keep = Some(3)).map(|p| p.min_keep), Ok(3));
        assert!(with(|f| f.min_keep = Some(-1)).is_err());
    }

    #[test]
    fn mirostat_is_one_of_two_with_its_target_and_rate() {
        let of = |n, tau, eta| {
            with(|f| (f.mirostat, f.mirostat_tau, f.mirostat_eta) = (Some(n), tau, eta))
                .map(|params| params.mirostat)
        };
        assert_eq!(of(0, Some(3.0), None), Ok(None));
        let (version, tau, eta) = (MirostatVersion::V2, 5.0, 0.1);
        assert_eq!(of(2, None, None), Ok(Some(Mirostat { version, tau, eta })));
        let found = of(1, Some(0.0), Some(1.0)).unwrap().unwrap();
        assert_eq!(
            (found.version, found.tau, found.eta),
            (MirostatVersion::V1, 0.0, 1.0)
        );
        let field = |result: Result<_, (String, String)>| result.unwrap_err().0;
        assert_eq!(field(of(3, None, None)), "sampling.mirostat");
        assert_eq!(field(of(-1, None, None)), "sampling.mirostat");
        assert_eq!(field(of(0, Some(-1.0), None)), "sampling.mirostat_tau");
        assert_eq!(field(of(2, Some(f32::NAN), None)), "sampling.mirostat_tau");
        assert_eq!(field(of(2, None, Some(1.5))), "sampling.mirostat_eta");
    }

    #[test]
    fn an_order_is_read_by_names_and_letters() {
        use SamplerKind::{
            Dry, MinP, Penalties, Temperature, TopK, TopNSigma, TopP, TypicalP, Xtc,
        };
        let of = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
            with(|f| f.samplers = Some(names.clone())).map(|p| p.order)
        };
        assert_eq!(of(&[]), Ok(vec![]));
        let spelled = ["top-k", "typical_p", "temp", "top_k", "adaptive_p"];
        assert_eq!(of(&spelled), Ok(vec![TopK, TypicalP, Temperature, TopK]));
        let all = vec![
            Penalties,
            Dry,
            TopNSigma,
            TopK,
            TypicalP,
            TopP,
            MinP,
            Xtc,
            Temperature,
        ];
        assert_eq!(with(|_| {}).map(|p| p.order), Ok(all.clone()));
        let letters = names_of_letters("edskypmxt");
        assert_eq!(
            with(|f| f.samplers = Some(letters.clone())).map(|p| p.order),
            Ok(all)
        );
        let refused = |names: &[&str]| of(names).unwrap_err();
        let (field, message) = refused(&["top_k", "beam"]);
        assert_eq!(field, "sampling.samplers");
        assert!(
            message.contains("'beam'") && message.contains("typ_p"),
            "{message}"
        );
        assert!(refused(&["dry", "dry"]).1.contains("twice"));
        assert!(refused(&["top_k"; ORDER_MAX + 1]).1.contains("at most 16"));
        let letters = names_of_letters(&"q".repeat(1 << 20));
        assert!(with(|f| f.samplers = Some(letters.clone())).is_err());
    }

    #[test]
    fn breakers_are_bounded_in_number_and_length() {
        let of = |list: Vec<String>| {
            with(|f| f.dry_sequence_breakers = Some(list.clone())).map(|p| p.dry.breakers)
        };
        assert_eq!(of(vec![]), Ok(vec![]));
        let longest = "x".repeat(BREAKER_MAX_BYTES);
        assert!(of(vec![longest.clone(); BREAKERS_MAX]).is_ok());
        for bad in [
            vec![longest.clone(); BREAKERS_MAX + 1],
            vec![longest + "x"],
            vec!["a".to_owned(), String::new()],
        ] {
            let (field, _) = of(bad).unwrap_err();
            assert_eq!(field, "sampling.dry_sequence_breakers");
        }
    }
}
