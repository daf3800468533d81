"""`python -m runner` is `vramfarm-runner`."""

import sys

from runner.cli.main import main

sys.exit(main())
