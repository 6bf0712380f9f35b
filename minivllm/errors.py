"""The errors that minivllm raises on purpose.

Each message is a sentence for a person: what was given, what was expected, what to do. All of them derive from
`MinivllmError`, and the ones that mean "a wrong value" derive from `ValueError` too, so `except ValueError` works
as people expect.
"""


class MinivllmError(Exception):
    """Base of every error that minivllm raises on purpose."""


class ConfigError(MinivllmError, ValueError):
    """The engine was asked for a configuration that cannot work."""


class ModelLoadError(MinivllmError, ValueError):
    """A model's name, config or weights cannot be used."""


class RequestError(MinivllmError, ValueError):
    """One request is wrong. Only that request fails."""


class EngineDeadError(MinivllmError, RuntimeError):
    """The engine behind an `AsyncLLMEngine` has failed or was shut down; the text says why. Nothing more comes from it."""


class KernelError(MinivllmError, ValueError):
    """Tensors that a kernel cannot take: a wrong shape, dtype, device or memory layout, or numbers out of range."""


class CourseError(MinivllmError, ValueError):
    """A notebook, a submission or a folder of the course cannot be used."""
