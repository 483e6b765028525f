"""The message that Celery would send to a Redis list, without sending it."""

from __future__ import annotations

from typing import Any

from kombu.connection import Connection
from kombu.transport import virtual


def message_of(app: Any, signature: Any) -> dict[str, Any]:
    """What kombu would push for ``signature``, as a dictionary.

    Celery and kombu do all that they do for Redis but the sending. So the broker is asked once, by our own one step,
    and no patience of kombu's, which may wait for ever, comes in between.
    """
    options = dict(app.conf.broker_transport_options)
    with Connection(transport=_Transport, transport_options=options) as connection:  # type: ignore[no-untyped-call]  # kombu is untyped
        channel: _Channel = connection.default_channel
        channel.app = app
        signature.apply_async(producer=app.amqp.Producer(channel), declare=[], retry=False)
        message = channel.caught
    assert message is not None  # noqa: S101  # what Celery publishes first is the task
    return message


class _Channel(virtual.Channel):
    """Keeps the first message; what follows is the event that it was sent (``task_send_sent_event``)."""

    do_restore = False
    app: Any = None
    caught: dict[str, Any] | None = None

    def basic_publish(self, message: dict[str, Any], exchange: str, routing_key: str, **kwargs: Any) -> None:
        if self.caught is None:
            self._inplace_augment_message(message, exchange, routing_key)  # type: ignore[no-untyped-call]  # as above
            self.caught = message
            return
        with self.app.producer_or_acquire() as producer:
            producer.channel.basic_publish(message, exchange=exchange, routing_key=routing_key, **kwargs)


class _Transport(virtual.Transport):
    Channel = _Channel
    driver_type = driver_name = "unsent"
