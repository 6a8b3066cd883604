"""python -m pipelab: the command line."""

import sys

from pipelab.cli import main

sys.exit(main())
