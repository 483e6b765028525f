from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import celery.exceptions
import kombu.exceptions
import pytest

from celery_selfheal import errors
from celery_selfheal.backoff import RetryPolicy
from celery_selfheal.classify import Verdict, classify

RETRY, EXHAUSTED, UNRECOVERABLE, PROPAGATE = (
    Verdict.RETRY,
    Verdict.EXHAUSTED,
    Verdict.UNRECOVERABLE,
    Verdict.PROPAGATE,
)
YOUNG, OLD = timedelta(seconds=10), timedelta(seconds=10.001)


class InvalidCard(ValueError):
    """A user's own error below a common one."""


class ValidationError(ValueError):
    """Stands in for pydantic's and marshmallow's."""


class StrictValidationError(ValidationError):
    """A subclass of theirs."""


class NoResultFound(Exception):
    """Stands in for SQLAlchemy's."""


class ObjectDoesNotExist(Exception):
    """Stands in for Django's."""


class OrderDoesNotExist(ObjectDoesNotExist):
    """What Django makes for each model."""


VALIDATING = SimpleNamespace(ValidationError=ValidationError)
CELERY = {"celery.exceptions": celery.exceptions, "celery_selfheal.errors": errors}
EVERYTHING: dict[str, object] = {
    **CELERY,
    "kombu.exceptions": kombu.exceptions,
    "pydantic": VALIDATING,
    "sqlalchemy.exc": SimpleNamespace(NoResultFound=NoResultFound),
    "django.core.exceptions": SimpleNamespace(ObjectDoesNotExist=ObjectDoesNotExist),
}


def policy(**changes: Any) -> RetryPolicy:
    return RetryPolicy(
        **{
            "retry_for": (Exception,),
            "give_up_for": (),
            "max_retries": 5,
            "backoff": None,
            "fixed_seconds": 1.0,
            **changes,
        }
    )


CASES: list[tuple[str, BaseException, dict[str, Any], dict[str, Any], Verdict]] = [
    # What a body raises on its own account.
    ("any error", KeyError("x"), {}, {}, RETRY),
    ("any error of the last attempt but one", KeyError("x"), {}, {"attempt": 4}, RETRY),
    ("any error of the last attempt", KeyError("x"), {}, {"attempt": 5}, EXHAUSTED),
    ("any error without retries", KeyError("x"), {"max_retries": 0}, {}, EXHAUSTED),
    ("any error, for ever", KeyError("x"), {"max_retries": None}, {"attempt": 10_000}, RETRY),
    ("any error of what is too old", KeyError("x"), {"max_age": YOUNG}, {"age": YOUNG}, EXHAUSTED),
    ("any error of what is young enough", KeyError("x"), {"max_age": OLD}, {"age": YOUNG}, RETRY),
    ("soft time limit", celery.exceptions.SoftTimeLimitExceeded(), {}, {}, RETRY),
    # What the task lists.
    ("listed", OSError(), {"retry_for": (OSError,)}, {}, RETRY),
    ("subclass of a listed one", ConnectionError(), {"retry_for": (OSError,)}, {}, RETRY),
    ("not listed", KeyError("x"), {"retry_for": (OSError,)}, {}, UNRECOVERABLE),
    ("nothing listed", KeyError("x"), {"retry_for": ()}, {}, UNRECOVERABLE),
    ("listed for giving up", KeyError("x"), {"give_up_for": (KeyError,)}, {}, UNRECOVERABLE),
    ("subclass of one for giving up", KeyError("x"), {"give_up_for": (LookupError,)}, {}, UNRECOVERABLE),
    (
        "listed for both",
        InvalidCard(),
        {"retry_for": (InvalidCard,), "give_up_for": (InvalidCard,)},
        {},
        UNRECOVERABLE,
    ),
    ("listed by the settings", InvalidCard(), {}, {"unrecoverable": (ValueError,)}, UNRECOVERABLE),
    (
        "listed by the settings and by the task",
        InvalidCard(),
        {"retry_for": (InvalidCard,)},
        {"unrecoverable": (InvalidCard,)},
        UNRECOVERABLE,
    ),
    # Our own words for it.
    ("UnrecoverableError", errors.UnrecoverableError(), {}, {}, UNRECOVERABLE),
    ("PayloadMismatch", errors.PayloadMismatch("t", "k"), {}, {}, UNRECOVERABLE),
    ("InDoubt", errors.InDoubt("t", "k"), {}, {}, UNRECOVERABLE),
    ("StalledTooOften", errors.StalledTooOften("t", "i", 3, 2), {}, {}, UNRECOVERABLE),
    (
        "UnrecoverableError, though the task lists it",
        errors.UnrecoverableError(),
        {"retry_for": (errors.UnrecoverableError,)},
        {},
        UNRECOVERABLE,
    ),
    ("StoreError", errors.StoreError("redis://x", "y"), {}, {}, RETRY),
    ("LeaseBusy", errors.LeaseBusy("k", "w1", 3), {}, {}, RETRY),
    # Ways to leave a body.
    ("Retry", celery.exceptions.Retry(), {}, {}, PROPAGATE),
    ("Ignore", celery.exceptions.Ignore(), {}, {}, PROPAGATE),
    ("Reject", celery.exceptions.Reject("x", requeue=False), {}, {}, PROPAGATE),
    ("Reject with requeue", celery.exceptions.Reject("x", requeue=True), {}, {}, PROPAGATE),
    ("Reject of the last attempt", celery.exceptions.Reject("x"), {}, {"attempt": 5}, PROPAGATE),
    ("Reject, though the task lists it", celery.exceptions.Reject("x"), {"retry_for": (Exception,)}, {}, PROPAGATE),
    ("Terminated", celery.exceptions.Terminated(), {}, {}, PROPAGATE),
    ("LeaseLost", errors.LeaseLost("i", 1), {"retry_for": (BaseException,)}, {}, PROPAGATE),
    ("SystemExit", SystemExit(), {"retry_for": (BaseException,)}, {}, PROPAGATE),
    ("KeyboardInterrupt", KeyboardInterrupt(), {"retry_for": (KeyboardInterrupt,)}, {}, PROPAGATE),
    ("self.retry() found none left", celery.exceptions.MaxRetriesExceededError(), {}, {}, EXHAUSTED),
    (
        "self.retry() found none left, and the task lists others",
        celery.exceptions.MaxRetriesExceededError(),
        {"retry_for": (OSError,)},
        {},
        EXHAUSTED,
    ),
    # What no retry mends.
    ("undecodable content", kombu.exceptions.DecodeError(), {}, {}, UNRECOVERABLE),
    ("content that is not allowed", kombu.exceptions.ContentDisallowed(), {}, {}, UNRECOVERABLE),
    ("broker away", kombu.exceptions.OperationalError(), {}, {}, RETRY),
    ("validation error", ValidationError(), {}, {}, UNRECOVERABLE),
    ("subclass of a validation error", StrictValidationError(), {}, {}, UNRECOVERABLE),
    ("another error of that name", type("ValidationError", (ValueError,), {})(), {}, {}, RETRY),
    ("validation error that is listed", ValidationError(), {"retry_for": (ValidationError,)}, {}, RETRY),
    ("validation error whose base is listed", ValidationError(), {"retry_for": (ValueError,)}, {}, RETRY),
    (
        "validation error where all are listed",
        ValidationError(),
        {"retry_for": (BaseException, Exception)},
        {},
        UNRECOVERABLE,
    ),
    (
        "validation error beside another that is listed",
        ValidationError(),
        {"retry_for": (Exception, OSError)},
        {},
        UNRECOVERABLE,
    ),
    (
        "listed validation error of the last attempt",
        ValidationError(),
        {"retry_for": (ValueError,)},
        {"attempt": 5},
        EXHAUSTED,
    ),
    # What may only not be there yet.
    ("not found, at first", NoResultFound(), {}, {"age": YOUNG}, RETRY),
    ("not found, too late for a slow producer", NoResultFound(), {}, {"age": OLD}, UNRECOVERABLE),
    ("not found, a second time", NoResultFound(), {}, {"attempt": 1}, UNRECOVERABLE),
    ("not found, at first, without retries", NoResultFound(), {"max_retries": 0}, {}, EXHAUSTED),
    ("not found, at first, where others are listed", NoResultFound(), {"retry_for": (OSError,)}, {}, UNRECOVERABLE),
    ("not found, a second time, but listed", NoResultFound(), {"retry_for": (NoResultFound,)}, {"attempt": 1}, RETRY),
    ("model not found, at first", OrderDoesNotExist(), {}, {"age": YOUNG}, RETRY),
    ("model not found, a second time", OrderDoesNotExist(), {}, {"attempt": 1}, UNRECOVERABLE),
]


@pytest.mark.parametrize(
    ("exc", "declared", "situation", "verdict"),
    [pytest.param(*case, id=name) for name, *case in CASES],
)
def test_failure_is_judged(
    exc: BaseException, declared: dict[str, Any], situation: dict[str, Any], verdict: Verdict
) -> None:
    given = {"attempt": 0, "age": timedelta(0), **situation}

    assert classify(exc, policy(**declared), modules=EVERYTHING, **given) is verdict


@pytest.mark.parametrize("module", ["pydantic", "pydantic_core", "marshmallow"])
def test_validation_errors_are_known_from_each_library_that_has_them(module: str) -> None:
    situation: dict[str, Any] = {"attempt": 0, "age": timedelta(0)}

    assert classify(ValidationError(), policy(), modules={module: VALIDATING}, **situation) is UNRECOVERABLE
    assert classify(ValidationError(), policy(), modules={"elsewhere": VALIDATING}, **situation) is RETRY


@pytest.mark.parametrize(
    ("exc", "attempt"), [(ValidationError(), 0), (NoResultFound(), 1), (ObjectDoesNotExist(), 1)], ids=repr
)
@pytest.mark.parametrize("half_loaded", [None, SimpleNamespace(), SimpleNamespace(ValidationError="a text")], ids=repr)
def test_library_that_is_not_loaded_or_only_half_changes_nothing(
    exc: Exception, attempt: int, half_loaded: object
) -> None:
    modules = {**CELERY, "pydantic": half_loaded, "sqlalchemy.exc": half_loaded, "django.core.exceptions": half_loaded}

    for loaded in (CELERY, modules):
        assert classify(exc, policy(), attempt=attempt, age=timedelta(0), modules=loaded) is RETRY


def test_judging_loads_no_library() -> None:
    program = """
import sys
from datetime import timedelta
from celery_selfheal.backoff import RetryPolicy
from celery_selfheal.classify import classify
policy = RetryPolicy(retry_for=(Exception,), give_up_for=(), max_retries=1, backoff=None, fixed_seconds=1)
before = set(sys.modules)
print(classify(KeyError(), policy, attempt=0, age=timedelta(0)).value, sorted(set(sys.modules) - before))
"""

    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout

    assert output == "retry []\n"


def test_errors_of_the_real_libraries_are_found_by_their_names() -> None:
    sqlalchemy_errors = pytest.importorskip("sqlalchemy.exc")

    assert classify(sqlalchemy_errors.NoResultFound(), policy(), attempt=1, age=timedelta(0)) is UNRECOVERABLE
    assert classify(kombu.exceptions.DecodeError(), policy(), attempt=0, age=timedelta(0)) is UNRECOVERABLE
