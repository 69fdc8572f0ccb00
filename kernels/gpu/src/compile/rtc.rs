//! hiprtc and nvrtc, opened with dlopen. Only the child process comes here.
//!
//! Both have the same functions under different prefixes; what differs is the option that names the
//! target and the function that gives the code.

use std::ffi::{CStr, CString, c_char, c_int};
use std::ptr;

use super::Language;
use super::wire::Unit;

type Program = *mut std::ffi::c_void;

/// A run-time compiler's functions.
pub(super) struct Compiler {
    language: Language,
    library_name: String,
    _library: std::mem::ManuallyDrop<libloading::Library>,
    version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    log: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    code_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    code: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
}

impl Compiler {
    /// Opens `library`, or the first usual name that is there and has the functions.
    pub(super) fn open(language: Language, library: &str) -> Result<Compiler, String> {
        let names: Vec<&str> = if library.is_empty() {
            language.libraries().to_vec()
        } else {
            vec![library]
        };
        let mut tried = Vec::new();
        for name in names {
            match Compiler::open_one(language, name) {
                Ok(compiler) => return Ok(compiler),
                Err(message) => tried.push(message),
            }
        }
        Err(format!(
            "no {} library could be used; tried {}; install it, or name it in ROCMFORGE_RTC_LIBRARY",
            language.compiler(),
            tried.join("; ")
        ))
    }

    fn open_one(language: Language, name: &str) -> Result<Compiler, String> {
        // SAFETY: runs the library's initializers, in a process that exists for nothing else.
        let library = unsafe { libloading::Library::new(name) }.map_err(|error| {
            let source = std::error::Error::source(&error).map(ToString::to_string);
            source.unwrap_or_else(|| error.to_string())
        })?;
        let prefix = language.compiler();
        macro_rules! function {
            ($suffix:literal) => {{
                let symbol = format!("{prefix}{}", $suffix);
                // SAFETY: the field's type is the one that the vendor's header
                // declares for this function.
                *unsafe { library.get(&symbol) }.map_err(|_| format!("{name} has no {symbol}"))?
            }};
        }
        let (code_size, code) = match language {
            Language::Hip => (function!("GetCodeSize"), function!("GetCode")),
            Language::Cuda => (function!("GetCUBINSize"), function!("GetCUBIN")),
        };
        Ok(Compiler {
            language,
            library_name: name.to_owned(),
            version: function!("Version"),
            error_string: function!("GetErrorString"),
            create: function!("CreateProgram"),
            compile: function!("CompileProgram"),
            log_size: function!("GetProgramLogSize"),
            log: function!("GetProgramLog"),
            code_size,
            code,
            _library: std::mem::ManuallyDrop::new(library),
        })
    }

    fn check(&self, what: &str, code: c_int) -> Result<(), String> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: takes any code and gives a static string or null.
        let text = unsafe { (self.error_string)(code) };
        let text = if text.is_null() {
            "unknown code".into()
        } else {
            // SAFETY: not null, and static.
            unsafe { CStr::from_ptr(text) }.to_string_lossy()
        };
        Err(format!(
            "{}{what}: {text} ({code})",
            self.language.compiler()
        ))
    }

    /// `libnvrtc.so.13 13.0` with the library's size and time, since packages
    /// rebuild without a new version.
    pub(super) fn version(&self) -> Result<String, String> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both out-pointers are to live locals.
        let code = unsafe { (self.version)(&raw mut major, &raw mut minor) };
        self.check("Version", code)?;
        let file = mapped_file(&self.library_name).unwrap_or_default();
        Ok(format!("{} {major}.{minor} {file}", self.library_name))
    }

    /// Compiles a unit to a code object for its target.
    pub(super) fn compile(&self, unit: &Unit) -> Result<Vec<u8>, String> {
        let c = |text: &str| CString::new(text).map_err(|_| "a text with a zero byte".to_owned());
        let source = c(&unit.source)?;
        let name = c(&unit.name)?;
        let mut names = Vec::new();
        let mut texts = Vec::new();
        for (header, text) in &unit.headers {
            names.push(c(header)?);
            texts.push(c(text)?);
        }
        let mut options = vec![c(&match self.language {
            Language::Hip => format!("--offload-arch={}", unit.target),
            // With what sm_90 alone has: wgmma.
            Language::Cuda if unit.target == "sm_90" => "--gpu-architecture=sm_90a".to_owned(),
            Language::Cuda => format!("--gpu-architecture={}", unit.target),
        })?];
        for option in &unit.options {
            options.push(c(option)?);
        }
        let pointers = |texts: &[CString]| texts.iter().map(|t| t.as_ptr()).collect::<Vec<_>>();
        let (name_ptrs, text_ptrs, option_ptrs) =
            (pointers(&names), pointers(&texts), pointers(&options));
        let mut program: Program = ptr::null_mut();
        // SAFETY: all strings end in zero and live through the call; the counts are the arrays'
        // lengths.
        let code = unsafe {
            (self.create)(
                &raw mut program,
                source.as_ptr(),
                name.as_ptr(),
                names.len() as c_int,
                text_ptrs.as_ptr(),
                name_ptrs.as_ptr(),
            )
        };
        self.check("CreateProgram", code)?;
        // SAFETY: the program was just made; the strings live through the call.
        let code = unsafe { (self.compile)(program, options.len() as c_int, option_ptrs.as_ptr()) };
        if let Err(error) = self.check("CompileProgram", code) {
            let log = self
                .bytes(program, self.log_size, self.log)
                .unwrap_or_default();
            let log = String::from_utf8_lossy(&log);
            return Err(format!("{error}\n{}", log.trim_matches(['\0', '\n', ' '])));
        }
        // The program is not destroyed: the process ends with the answer.
        self.bytes(program, self.code_size, self.code)
    }

    /// What a pair of size and content functions gives.
    fn bytes(
        &self,
        program: Program,
        size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
        content: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    ) -> Result<Vec<u8>, String> {
        let mut len = 0;
        // SAFETY: the program is alive, the out-pointer is to a live local.
        let code = unsafe { size(program, &raw mut len) };
        self.check("Get...Size", code)?;
        if len > super::OBJECT_BYTES_MAX {
            return Err(format!("an object of {len} bytes"));
        }
        let mut bytes = vec![0u8; len];
        // SAFETY: the program is alive, and the buffer has the size that it asked for.
        let code = unsafe { content(program, bytes.as_mut_ptr().cast()) };
        self.check("Get...", code)?;
        Ok(bytes)
    }
}

/// Path, size and time of the mapped file whose name begins like the library's.
fn mapped_file(library: &str) -> Option<String> {
    use std::os::unix::fs::MetadataExt;
    let stem = library.rsplit('/').next()?.split(".so").next()?;
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let path = maps.lines().find_map(|line| {
        let path = &line[line.find('/')?..];
        path.rsplit('/').next()?.starts_with(stem).then_some(path)
    })?;
    let metadata = std::fs::metadata(path).ok()?;
    Some(format!("{path} {} {}", metadata.size(), metadata.mtime()))
}
