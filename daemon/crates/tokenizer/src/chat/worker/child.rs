//! The child: compiles and renders what comes over standard input, within
//! limits that the kernel holds it to.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;

use nix::sys::resource::{Resource, UsageWho, getrlimit, getrusage, setrlimit};

use super::super::engine::{Compiled, Failure};
use super::{STACK_BYTES, wire};

/// Compiled templates that a child keeps.
const KEPT_TEMPLATES: usize = 8;
/// Resident memory from which a child is replaced after its answer: what a
/// template leaked goes with it.
const RESIDENT_BYTES_MAX: usize = 96 << 20;
/// Exit status of a child that was called wrongly or cannot answer.
const FAILED: u8 = 3;

/// The child. `main` calls it when its first argument is
/// [`RENDER_CHILD_ARGUMENT`](super::RENDER_CHILD_ARGUMENT), before it starts
/// anything, with the arguments behind that one, and ends with the status that
/// it returns.
pub fn render_child_main(arguments: impl IntoIterator<Item = String>) -> u8 {
    let numbers: Option<Vec<u64>> = arguments.into_iter().map(|a| a.parse().ok()).collect();
    let Some(&[memory_bytes, cpu_seconds]) = numbers.as_deref() else {
        eprintln!("this is a helper of rocmforged: it is started with two numbers");
        return FAILED;
    };
    // A panic of the template engine is an answer.
    std::panic::set_hook(Box::new(|_| {}));
    let served = limit(memory_bytes).and_then(|()| {
        std::thread::Builder::new()
            .name("render".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || serve(cpu_seconds))
    });
    match served.map(std::thread::JoinHandle::join) {
        Ok(Ok(Ok(()))) => 0,
        // The parent is gone or the socket broke: there is nobody to tell.
        Ok(Ok(Err(_))) => FAILED,
        Ok(Err(_panicked)) => FAILED,
        Err(error) => {
            eprintln!("cannot begin: {error}");
            FAILED
        }
    }
}

fn limit(memory_bytes: u64) -> io::Result<()> {
    setrlimit(Resource::RLIMIT_AS, memory_bytes, memory_bytes)?;
    // A core would hold the messages.
    setrlimit(Resource::RLIMIT_CORE, 0, 0)?;
    Ok(())
}

/// Allows `seconds` of processor time from now on.
fn limit_cpu(seconds: u64) -> io::Result<()> {
    let usage = getrusage(UsageWho::RUSAGE_SELF)?;
    let used = usage.user_time().tv_sec() + usage.system_time().tv_sec();
    let (_, hard) = getrlimit(Resource::RLIMIT_CPU)?;
    let soft = used.unsigned_abs() + seconds + 1;
    setrlimit(Resource::RLIMIT_CPU, soft.min(hard), hard)?;
    Ok(())
}

/// Resident bytes of this process; 0 if the kernel does not report them.
fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split_whitespace().nth(1).and_then(|n| n.parse().ok());
    pages.unwrap_or(0usize) * 4096
}

fn serve(cpu_seconds: u64) -> io::Result<()> {
    let mut requests = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    let mut answers = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    let mut kept: Vec<(String, Compiled)> = Vec::new();
    while let Some(frame) = wire::read_frame(&mut requests)? {
        limit_cpu(cpu_seconds)?;
        let Some((template, variables)) = wire::parse_request(&frame) else {
            return Err(io::ErrorKind::InvalidData.into());
        };
        let answer = compiled(&mut kept, template).and_then(|it| it.render(variables));
        drop(frame);
        let retires = resident_bytes() > RESIDENT_BYTES_MAX;
        wire::write_answer(&mut answers, &answer, retires)?;
        answers.flush()?;
    }
    Ok(())
}

/// The template, compiled now or before; the last one used comes last.
fn compiled<'k>(
    kept: &'k mut Vec<(String, Compiled)>,
    template: &str,
) -> Result<&'k Compiled, Failure> {
    let entry = match kept.iter().position(|(text, _)| text == template) {
        Some(at) => kept.remove(at),
        None => {
            let compiled = Compiled::new(template)?;
            if kept.len() == KEPT_TEMPLATES {
                kept.remove(0);
            }
            (template.to_owned(), compiled)
        }
    };
    kept.push(entry);
    Ok(&kept[kept.len() - 1].1)
}
