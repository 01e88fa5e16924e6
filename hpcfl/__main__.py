"""``python -m hpcfl`` is ``hpcfl``."""

import sys

from hpcfl.cli import main

sys.exit(main())
