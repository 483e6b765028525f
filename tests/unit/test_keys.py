"""Names of keys: one place, one hash tag, no two alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from celery_selfheal.keys import Keys, delivery_tag, session_of_tag

KEYS = Keys(prefix="selfheal", app="shop")

NAMES: dict[str, Callable[[str], str]] = {
    kind: getattr(KEYS, kind)
    for kind in (
        *("lease", "lock", "locking", "journal", "done", "held", "budget", "wait", "progress", "claim"),
        *("session", "owned", "host"),
    )
}
SINGLE = ("inflight", "index", "fence", "counters", "sessions", "about", "pulse", "grace", "epoch", "leader")


def all_keys() -> list[str]:
    texts = ("", "t1", "t1:a", "inflight", "lease:t1", "a b", "ä")
    return [name(text) for name in NAMES.values() for text in texts] + [getattr(KEYS, name) for name in SINGLE]


def test_every_public_name_is_looked_at_here() -> None:
    public = {name for name in dir(Keys) if not name.startswith("_")}

    assert public - {"prefix", "app", "root"} == {*NAMES, *SINGLE}


def test_no_two_things_share_a_key() -> None:
    assert len(set(all_keys())) == len(all_keys())


def test_all_keys_of_an_application_live_in_one_slot_of_a_cluster() -> None:
    """Redis hashes what stands between the first brace and the next closing one."""
    tags = {key[key.index("{") + 1 : key.index("}")] for key in all_keys()}

    assert tags == {"selfheal:shop"}


def test_an_access_list_can_name_all_of_them_by_one_pattern() -> None:
    assert all(key.startswith("{selfheal:shop}:") for key in all_keys())


def test_applications_and_prefixes_do_not_share_keys() -> None:
    keys = [Keys(prefix="selfheal", app="shop"), Keys(prefix="selfheal", app="mail"), Keys(prefix="test", app="shop")]

    assert len({one.lease("t1") for one in keys}) == 3


@pytest.mark.parametrize("session", ["celery@host:1:ff", "celery@a/b:1:ff", "celery@host/7:1:ff", "7"])
def test_delivery_tag_names_the_session_that_took_the_message(session: str) -> None:
    assert session_of_tag(delivery_tag(session, 12)) == session


def test_no_two_deliveries_share_a_tag() -> None:
    tags = {delivery_tag(session, number) for session in ("w1", "w11", "w1/1") for number in range(1, 30)}

    assert len(tags) == 3 * 29


@pytest.mark.parametrize("tag", ["", "0c2b3f64-8f7e-4a0e-b1d4-3d9a6d1a2b3c", "1", "w1/", "w1/x", "w1/1x"])
def test_tag_of_a_worker_without_the_plugin_names_no_session(tag: str) -> None:
    assert session_of_tag(tag) is None
