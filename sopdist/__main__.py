"""`python -m sopdist`: the same as the command `sopdist`."""

import sys

from .cli import main

sys.exit(main())
