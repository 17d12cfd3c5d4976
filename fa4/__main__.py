"""``python -m fa4`` is the ``fa4`` command."""

import sys

from fa4.cli import main

if __name__ == "__main__":
    sys.exit(main())
