//! What figures are judged by: bounds that were set for one card, and llama.cpp's figures there.

use serde::Serialize;

/// The bounds of a figure.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Goal {
    /// What it has to reach.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) must: Option<f64>,
    /// What it is to reach some day.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) aim: Option<f64>,
    /// Whether it is a time or a count, of which less is better.
    pub(crate) least_is_best: bool,
    /// llama.cpp's figure on the same card.
    #[serde(skip)]
    pub(crate) llama_cpp: Option<f64>,
}

impl Goal {
    /// Bounds from below.
    pub(crate) fn at_least(must: f64, aim: f64) -> Self {
        Self {
            must: Some(must),
            aim: Some(aim),
            least_is_best: false,
            llama_cpp: None,
        }
    }

    /// Bounds from above.
    pub(crate) fn at_most(must: f64, aim: Option<f64>) -> Self {
        Self {
            must: Some(must),
            aim,
            least_is_best: true,
            llama_cpp: None,
        }
    }

    /// As fast as llama.cpp, and twice as fast.
    pub(crate) fn of_llama_cpp(figure: f64) -> Self {
        Self::at_least(figure, 2.0 * figure).beside(figure)
    }

    /// With llama.cpp's figure beside it.
    pub(crate) fn beside(self, llama_cpp: f64) -> Self {
        Self {
            llama_cpp: Some(llama_cpp),
            ..self
        }
    }

    /// Which bound a figure meets.
    pub(crate) fn met(&self, figure: f64) -> &'static str {
        let meets = |bound: f64| match self.least_is_best {
            true => figure <= bound,
            false => figure >= bound,
        };
        match (self.must, self.aim) {
            (_, Some(aim)) if meets(aim) => "aim",
            (Some(must), _) if meets(must) => "must",
            (Some(_), _) => "**short of must**",
            _ => "",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Goal;

    #[test]
    fn a_figure_meets_aim_must_or_neither() {
        let rate = Goal::of_llama_cpp(100.0);
        assert_eq!(
            [rate.met(200.0), rate.met(199.0), rate.met(99.0)],
            ["aim", "must", "**short of must**"]
        );
        let time = Goal::at_most(10.0, None);
        assert_eq!(
            [time.met(10.0), time.met(11.0)],
            ["must", "**short of must**"]
        );
    }
}
