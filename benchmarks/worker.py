"""What ``celery -A benchmarks.worker`` finds: the application that the environment asks for."""

from __future__ import annotations

import os

from benchmarks.tasks import PLAIN_VARIABLE, URL_VARIABLE, make_app

app = make_app(os.environ[URL_VARIABLE], plain=bool(os.environ.get(PLAIN_VARIABLE)))
