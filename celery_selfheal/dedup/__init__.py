"""Effects that happen once: a row (or a Redis key) for each idempotency key says what it already did."""
