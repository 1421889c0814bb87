"""What can go wrong between a plan and a kernel that runs."""


class CompileError(RuntimeError):
    """A kernel could not be compiled; the message holds the compiler's own."""


class BrokenEntry(RuntimeError):
    """A compiled kernel on disk whose files are missing, cut short or changed."""


class RuntimeMissing(RuntimeError):
    """A library that compiled kernels need isn't on this machine."""
