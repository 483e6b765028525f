"""Every error that we raise; a class tells the caller what to do.

All arguments are plain text and numbers and all go to ``Exception.__init__``: an error leaves the prefork pool by
pickle and reaches a caller through a result backend as JSON, and both rebuild it from ``args``.
"""

from __future__ import annotations


class SelfHealError(Exception):
    """Root of our errors, except for ``LeaseLost``."""


class SettingsError(SelfHealError):
    """Mend the configuration: nothing was started.

    Attributes:
        message: Names the setting, its value and the rule or the remedy.
        setting: The setting as the user wrote it; empty if several are meant.
    """

    def __init__(self, message: str, setting: str = "") -> None:
        super().__init__(message, setting)
        self.message = message
        self.setting = setting

    def __str__(self) -> str:
        return self.message


class StoreError(SelfHealError):
    """The store did not answer: the effect is unknown, so repeat only what may be repeated.

    Attributes:
        store_url: Where the store is, without a password.
        what: What was tried and what went wrong.
    """

    def __init__(self, store_url: str, what: str) -> None:
        super().__init__(store_url, what)
        self.store_url = store_url
        self.what = what

    def __str__(self) -> str:
        return f"no answer from {self.store_url}: {self.what}"


class LeaseBusy(SelfHealError):
    """Another start holds the lease and ``lease_busy="fail"`` asks not to wait: try again later.

    Attributes:
        key: Lock key or task id.
        holder: Worker node name. For people; never compared.
        remaining_seconds: After so long the lease ends, unless its holder renews it.
    """

    def __init__(self, key: str, holder: str, remaining_seconds: float) -> None:
        super().__init__(key, holder, remaining_seconds)
        self.key = key
        self.holder = holder
        self.remaining_seconds = remaining_seconds

    def __str__(self) -> str:
        return f"lease {self.key} is held by {self.holder} for another {self.remaining_seconds:.1f} s"


class StalledTooOften(SelfHealError):
    """The task went to the dead letter queue before another start: find out what kills its workers.

    Attributes:
        task_name: Name of the task.
        task_id: Celery's message id.
        starts: Starts that neither finished nor were handed over.
        max_stalls: So many would have been allowed.
    """

    def __init__(self, task_name: str, task_id: str, starts: int, max_stalls: int) -> None:
        super().__init__(task_name, task_id, starts, max_stalls)
        self.task_name = task_name
        self.task_id = task_id
        self.starts = starts
        self.max_stalls = max_stalls

    def __str__(self) -> str:
        return (
            f"task {self.task_name}[{self.task_id}] was started {self.starts} times and never ended"
            f" (max_stalls is {self.max_stalls})"
        )


class DeadlineExceeded(SelfHealError):
    """The start ran longer than its ``max_runtime`` and was ended: raise the limit, or split the task.

    Attributes:
        task_name: Name of the task.
        task_id: Celery's message id.
        max_runtime_seconds: The limit.
    """

    def __init__(self, task_name: str, task_id: str, max_runtime_seconds: float) -> None:
        super().__init__(task_name, task_id, max_runtime_seconds)
        self.task_name = task_name
        self.task_id = task_id
        self.max_runtime_seconds = max_runtime_seconds

    def __str__(self) -> str:
        return f"task {self.task_name}[{self.task_id}] ran longer than its {self.max_runtime_seconds:g} s"


class UnrecoverableError(SelfHealError):
    """For task bodies to raise: no retry can help, go to the dead letter queue at once."""


class PayloadMismatch(SelfHealError):
    """An idempotency key came again with other arguments: mend the producer, no retry can help.

    Attributes:
        task_name: Name of the task.
        idempotency_key: The key, in use for the first arguments.
    """

    def __init__(self, task_name: str, idempotency_key: str) -> None:
        super().__init__(task_name, idempotency_key)
        self.task_name = task_name
        self.idempotency_key = idempotency_key

    def __str__(self) -> str:
        return f"idempotency key {self.idempotency_key} of task {self.task_name} was used with other arguments before"


class InDoubt(SelfHealError):
    """A start died between its effect and its record of it: a person must look what happened.

    Attributes:
        task_name: Name of the task.
        idempotency_key: The key whose claim is in doubt.
    """

    def __init__(self, task_name: str, idempotency_key: str) -> None:
        super().__init__(task_name, idempotency_key)
        self.task_name = task_name
        self.idempotency_key = idempotency_key

    def __str__(self) -> str:
        return (
            f"task {self.task_name} with idempotency key {self.idempotency_key} died before it recorded its effect:"
            " it may have happened or not"
        )


class LeaseLost(BaseException):
    """The lease is gone: stop, and write nothing.

    No ``Exception``, so that a task body's ``except Exception`` does not swallow it.

    Attributes:
        task_id: Celery's message id.
        fence: Fence of the start that must stop.
    """

    def __init__(self, task_id: str, fence: int) -> None:
        super().__init__(task_id, fence)
        self.task_id = task_id
        self.fence = fence

    def __str__(self) -> str:
        return f"lease on task {self.task_id} (fence {self.fence}) is lost"
