"""Worker sessions, and which deliveries each of them owns."""
