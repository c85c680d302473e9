"""``python -m fccl``: the same as the command ``fccl``."""

import sys

from fccl.cli import main

sys.exit(main())
