"""Another application on the same broker, without the plugin: kombu restores there what it takes for forgotten."""

import json
import os

from celery import Celery

app = Celery("plain", broker=os.environ["SHOP_BROKER"])
app.conf.update(json.loads(os.environ["SHOP_SETTINGS"]))
