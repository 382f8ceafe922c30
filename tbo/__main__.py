"""`python -m tbo` is `tbo`."""

import sys

from tbo.cli import main

if __name__ == "__main__":  # the demo's processes import this module under another name
    sys.exit(main())
