"""One adapter a kind of broker."""
