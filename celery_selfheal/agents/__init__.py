"""Agents that keep a fleet alive: one step method each, no threads, no Celery."""
