"""`python -m headway`: the same as the `headway` command."""

import sys

from headway.cli import main

sys.exit(main())
