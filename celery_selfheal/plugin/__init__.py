"""The edge to Celery and kombu: nothing else of the package imports them."""
