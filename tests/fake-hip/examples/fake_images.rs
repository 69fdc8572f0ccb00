//! Writes the images that the fake runtime takes, a folder for
//! ROCMFORGE_KERNELS: `fake_images FOLDER`.

use std::process::ExitCode;

fn main() -> ExitCode {
    let Some(dir) = std::env::args_os().nth(1) else {
        eprintln!("usage: fake_images FOLDER");
        return ExitCode::from(2);
    };
    match rocmforge_fake_hip::write_images(dir.as_ref(), rocmforge_fake_hip::ARCH) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}: {error}", dir.display());
            ExitCode::FAILURE
        }
    }
}
