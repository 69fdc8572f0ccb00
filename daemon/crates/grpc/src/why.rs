//! Converts time accounts of requests to the types of rocmforge.v1.

use rocmforge_proto::v1;
use rocmforge_service::why::{Prediction, Report, ReportPart, Weights, Which};

/// Maximum number of requests in a response.
const LATEST_MAX: usize = 256;

/// The requests that a call asks about.
pub(super) fn which(request: v1::WhyRequest) -> Which {
    match (request.latest as usize, request.request) {
        (0, name) if name.is_empty() => Which::Slowest,
        (0, name) => Which::Named(name),
        (n, _) => Which::Latest(n.min(LATEST_MAX)),
    }
}

pub(super) fn request_times(report: Report) -> v1::RequestTimes {
    v1::RequestTimes {
        number: report.number,
        id: report.id,
        call: report.call,
        model: report.model,
        client: report.client,
        started_unix_ms: report.started_unix_ms,
        code: report.code,
        total_ms: report.total_ms,
        cause: report.cause,
        parts: report.parts.into_iter().map(part).collect(),
        prompt_tokens: report.prompt_tokens,
        reused_tokens: report.reused_tokens,
        generated_tokens: report.generated_tokens,
        tokens_per_s: report.tokens_per_s,
        weights: Some(weights(report.weights)),
        advice: report.advice,
        longest_gap_ms: report.longest_gap_ms,
        longest_gap_cause: report.longest_gap_cause.unwrap_or_default().to_owned(),
        promised_gap_ms: report.promised_gap_ms,
        broken_gaps: report.broken_gaps.unwrap_or_default(),
        predictions: report.predictions.into_iter().map(prediction).collect(),
        no_effect: report.no_effect,
    }
}

fn prediction(of: Prediction) -> v1::RatePrediction {
    v1::RatePrediction {
        setting: of.setting.to_owned(),
        value: of.value,
        tokens_per_s: of.tokens_per_s,
        predicted_tokens_per_s: of.predicted_tokens_per_s,
    }
}

fn part(part: ReportPart) -> v1::TimePart {
    let behind = part.behind.into_iter().map(|behind| v1::TimeBehind {
        model: behind.model,
        client: behind.client,
        ms: behind.ms,
    });
    v1::TimePart {
        name: part.name.to_owned(),
        text: part.text.to_owned(),
        ms: part.ms,
        behind: behind.collect(),
    }
}

fn weights(weights: Weights) -> v1::AbsentWeights {
    let displaced = weights.displaced.into_iter();
    let displaced = displaced.map(|displaced| v1::DisplacedWeights {
        cause: displaced.cause.to_owned(),
        by_model: displaced.by_model,
        bytes: displaced.bytes,
    });
    v1::AbsentWeights {
        uploaded_bytes: weights.uploaded_bytes,
        disk_bytes: weights.disk_bytes,
        cpu_bytes: weights.cpu_bytes,
        link_bytes_per_s: weights.link_bytes_per_s,
        link_measured_bytes_per_s: weights.link_measured_bytes_per_s,
        displaced: displaced.collect(),
    }
}
