"""The errors that minivllm raises on purpose.

Each message is a sentence for a person: what was given, what was expected, what to do. All derive from `MinivllmError`; errors about
invalid values also derive from `ValueError`.
"""


class MinivllmError(Exception):
    """Base of every error that minivllm raises on purpose."""


class ConfigError(MinivllmError, ValueError):
    """A configuration that cannot work."""


class ModelLoadError(MinivllmError, ValueError):
    """A model's name, config or weights cannot be used."""


class RequestError(MinivllmError, ValueError):
    """One request is invalid. Only that request fails."""


class ContextLengthError(RequestError):
    """A prompt is longer than the model's context, or than the cache."""


class EngineDeadError(MinivllmError, RuntimeError):
    """The engine has failed or was shut down; the message says why. It gives no further output."""


class WorkerKilledError(EngineDeadError):
    """A worker of the engine was killed by SIGKILL, or stopped: perhaps from outside."""


class RequestGivenUpError(EngineDeadError):
    """A request was dropped because replicas died while computing it. Sending it again may kill more."""


class KernelError(MinivllmError, ValueError):
    """Tensors a kernel does not support: their shape, dtype, device, memory layout or values."""


class CourseError(MinivllmError, ValueError):
    """A notebook, a submission or a folder of the course cannot be used."""


class WorkerError(MinivllmError, RuntimeError):
    """A worker in another process raised an error; the message names its rank and the error."""


class DistributedError(MinivllmError, RuntimeError):
    """A rank of a group has ended, or called a different operation than the others."""


class StageError(DistributedError):
    """A pipeline stage before this one has failed in a step, which this one has left, too: it is ready for the next. The message names that stage."""
