"""Alembic's folder: the revisions of our tables."""
