//! GGUF: bytes to a checked header and tensor table; mapped files.
