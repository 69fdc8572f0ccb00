//! Fetches images that requests name by URL, from allowed hosts ([`rocmforge_hub::Fetcher`]), for
//! models that read images.

use std::time::{Duration, Instant};

use bytes::Bytes;
use rocmforge_engine::LoadedModel;
use rocmforge_failure::{self as failure, Failure};
use rocmforge_hub::{FetchBounds, FetchError, Fetcher, Hosts};
use rocmforge_service::Service;
use rocmforge_service::arrival::Arrival;
use rocmforge_tokenizer::{Chat, ImageData, Message};

/// Maximum size of an image in bytes.
const BYTES_MAX: u64 = 20 << 20;
/// Maximum time in which all images of a request are fetched.
const TIME_MAX: Duration = Duration::from_secs(30);
/// Maximum number of images of a request that are fetched.
const FETCHED_MAX: usize = 16;

/// Fetches images of requests.
#[derive(Debug)]
pub(super) struct ImageUrls(Fetcher);

impl ImageUrls {
    pub(super) fn new(hosts: Hosts) -> Self {
        Self(Fetcher::new(hosts))
    }

    /// Replaces URLs of images by the images' bytes. Does nothing for a model that reads text only,
    /// or if no host is allowed: then the service rejects the URLs.
    ///
    /// # Errors
    /// INVALID_ARGUMENT names the part whose image cannot be fetched; RESOURCE_EXHAUSTED
    /// if there is no memory for it now; DEADLINE_EXCEEDED.
    pub(super) async fn fetch(
        &self,
        service: &Service,
        arrival: &Arrival,
        messages: &mut [Message],
        model: &LoadedModel,
    ) -> Result<(), Failure> {
        if model.tower().is_none() || !self.0.is_on() {
            return Ok(());
        }
        let fetched = self.fetch_all(service, arrival, messages);
        arrival.limit(fetched).await
    }

    async fn fetch_all(
        &self,
        service: &Service,
        arrival: &Arrival,
        messages: &mut [Message],
    ) -> Result<(), Failure> {
        let begun = Instant::now();
        let mut fetched = 0;
        for image in Chat::images_of(messages) {
            let Ok(ImageData::Url(url)) = &image.data else {
                continue;
            };
            fetched += 1;
            if fetched > FETCHED_MAX {
                let why = format!(
                    "at most {FETCHED_MAX} images of a request are fetched; give others as data: URLs"
                );
                return Err(failure::invalid(&image.field, &why));
            }
            let bounds = FetchBounds {
                bytes: BYTES_MAX,
                time: TIME_MAX.saturating_sub(begun.elapsed()),
            };
            let mut file = service.images.hold_file(arrival.peer(), BYTES_MAX)?;
            let done = self.0.fetch(url, bounds, &mut file.bytes).await;
            done.map_err(|error| failure::invalid(&image.field, &why(&error, fetched)))?;
            file.finish();
            image.data = Ok(ImageData::Bytes(Bytes::from_owner(file)));
        }
        Ok(())
    }
}

/// The error message for the `n`th fetched image.
fn why(error: &FetchError, n: usize) -> String {
    match error {
        FetchError::TooSlow { host, .. } if n > 1 => format!(
            "the {n} images up to this one, which is at {host}, take longer than {} seconds to be fetched; give \
             images as data: URLs",
            TIME_MAX.as_secs()
        ),
        error => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_that_is_late_by_those_before_it_is_told_the_time_of_all() {
        let slow = FetchError::TooSlow {
            host: "a.example".to_owned(),
            max: Duration::ZERO,
        };
        let told = why(&slow, 3);
        assert!(
            told.contains("3 images") && told.contains("than 30 seconds"),
            "{told}"
        );
        let alone = FetchError::TooSlow {
            host: "a.example".to_owned(),
            max: TIME_MAX,
        };
        assert!(why(&alone, 1).contains("the host a.example takes longer than 30 seconds"));
    }
}
