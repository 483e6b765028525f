"""Settings of the app in ``late``."""

import json
import os

globals().update(json.loads(os.environ["DEPOT_SETTINGS"]))
