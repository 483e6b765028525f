"""``celery -A proj selfheal ...``: the plugin's command line."""

from celery_selfheal.plugin.commands.selfheal import selfheal

__all__ = ("selfheal",)
