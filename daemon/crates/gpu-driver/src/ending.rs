//! The end of a process whose driver is at work.

use super::trial;

/// Ends the process at once, without exit handlers: a vendor's library would wait in its own for a
/// call that may not come back, or take apart what a call still uses. Trials that have only just
/// begun are not counted as ones that no process survives: it was this one that ended.
pub fn end_process(code: u8) -> ! {
    trial::forget_the_young();
    // SAFETY: takes any number and does not return; what runs on other threads ends with it.
    unsafe { libc::_exit(i32::from(code)) }
}
