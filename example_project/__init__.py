"""A small payments service that heals, and the demo that kills its workers to prove it."""
