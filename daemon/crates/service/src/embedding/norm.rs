//! Scaling of embedding vectors, as llama.cpp's `embd_normalize`.

/// How an embedding vector is scaled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Norm {
    /// No scaling.
    None,
    /// Division by the largest absolute element, and multiplication by [`LARGEST`].
    Largest,
    /// Division by the p-norm: with 1 the sum of the absolute values, with 2 the Euclidean length.
    Power(u32),
}

/// Value of the largest element after [`Norm::Largest`].
const LARGEST: f64 = 32760.0;

impl Norm {
    /// Scales vectors to the Euclidean length 1.
    pub const LENGTH: Self = Self::Power(2);

    /// The scaling for llama.cpp's number: -1 for none, 0 for the largest element, else the power
    /// of the norm.
    pub fn numbered(number: i64) -> Option<Self> {
        match number {
            -1 => Some(Self::None),
            0 => Some(Self::Largest),
            power => u32::try_from(power).ok().map(Self::Power),
        }
    }

    /// Scales a vector in place; a zero vector stays.
    pub(super) fn scale(self, vector: &mut [f32]) {
        let all = || vector.iter().map(|v| f64::from(*v).abs());
        let largest = || all().fold(0.0, f64::max);
        let by = match self {
            Self::None => return,
            Self::Largest => largest() / LARGEST,
            Self::Power(2) => all().map(|v| v * v).sum::<f64>().sqrt(),
            Self::Power(power) => {
                // Of what is at most 1, so that no power overflows.
                let (most, power) = (largest(), f64::from(power));
                let sum: f64 = all().map(|v| (v / most).powf(power)).sum();
                most * sum.powf(power.recip())
            }
        };
        if by > 0.0 {
            vector
                .iter_mut()
                .for_each(|v| *v = (f64::from(*v) / by) as f32);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scaled(number: i64, vector: &[f32]) -> Vec<f32> {
        let mut vector = vector.to_vec();
        Norm::numbered(number).unwrap().scale(&mut vector);
        vector
    }

    #[test]
    fn a_vector_is_scaled_as_llama_cpp_scales_it_and_zeros_stay_zeros() {
        let vector = [3.0, -4.0];
        assert_eq!(scaled(-1, &vector), vector);
        assert_eq!(scaled(0, &vector), [24570.0, -32760.0]);
        assert_eq!(scaled(1, &vector), [3.0 / 7.0, -4.0 / 7.0]);
        assert_eq!(scaled(2, &vector), [0.6, -0.8]);
        let cubes = 91_f64.cbrt();
        for (found, v) in scaled(3, &vector).iter().zip(vector) {
            assert!((f64::from(*found) - f64::from(v) / cubes).abs() < 1e-6);
        }
        // The powers of these are beyond all numbers; the largest is left.
        let large = scaled(i64::from(u32::MAX), &[1e30, -1e38]);
        assert_eq!(large[1], -1.0);
        for number in [-1, 0, 1, 2, 3] {
            assert_eq!(scaled(number, &[0.0; 3]), [0.0; 3]);
        }
        assert_eq!(Norm::numbered(-2), None);
        assert_eq!(Norm::numbered(i64::MAX), None);
    }
}
