"""What happened, as values."""
